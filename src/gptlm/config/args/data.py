"""Arguments of the commands that make and read token files: preprocess, tokenizer, demo and the data tools."""

from dataclasses import dataclass

from gptlm.config.args.training import bad_split
from gptlm.config.field import LARGEST_SEED, arg
from gptlm.data.order import DATA_ORDERS

TXT_SPLITS = ("blank_line", "line", "file")
TOKENIZER_BACKENDS = ("tokenizers", "gigatoken")
SEQUENCE_LEVELS = ("document", "sentence")
ENTRIES = "entries (256 bytes and <|endoftext|>)"


def bad_keys(keys: list[str]) -> str | None:
    if keys and len(set(keys)) == len(keys):
        return None
    return f"{' '.join(keys)}: expected one or more different keys"


def bad_counts(text: str) -> str | None:
    words = text.split(",")
    if len(words) == 3 and all(word.strip().isdigit() for word in words):
        return None
    return f"{text!r}: expected three whole numbers like 200,20,1"


def bad_shard(text: str) -> str | None:
    try:
        part, parts = (int(word) for word in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    return None if 1 <= part <= parts else f"{text}: expected i/n with i from 1 to n, like 2/8"


@dataclass(frozen=True, kw_only=True)
class PreprocessArguments:
    """Text to token files"""

    input_path: str | None = arg(
        None,
        "file, folder or quoted glob of .jsonl, .json, .txt (also .gz, .zst) or .parquet, or a saved dataset. "
        "Given as --input, file names and white space follow Megatron-LM (required)",
    )
    output_prefix: str | None = arg(None, "path of the token files without suffix (required)")
    overwrite: bool = arg(False, "replace token files that gptlm wrote of other input or arguments")
    model_name_or_path: str | None = arg(None, "tokenizer: folder or name, also of a model with a tokenizer")
    tokenizer_name: str | None = arg(
        None, "PaddleNLP's tokenizer class, or a folder; --model_name_or_path takes precedence"
    )
    tokenizer_type: str = arg(
        "HuggingFaceTokenizer",
        "Megatron-LM's tokenizer type; GPT2BPETokenizer reads --vocab_file and --merge_file",
        choices=("GPT2BPETokenizer", "HuggingFaceTokenizer"),
    )
    tokenizer_model: str | None = arg(None, "Megatron-LM's argument for the tokenizer of HuggingFaceTokenizer")
    vocab_file: str | None = arg(None, "GPT-2's vocab.json")
    merge_file: str | None = arg(None, "GPT-2's merges.txt")
    data_format: str = arg("JSON", "format of .json and .jsonl files", choices=("JSON",))
    json_keys: list[str] = arg(
        ["text"], "JSON keys to encode, each into its own token files", words=True, check=bad_keys
    )
    txt_split: str = arg("blank_line", "document separator in .txt files", choices=TXT_SPLITS)
    dataset_impl: str = arg(
        "mmap",
        "output format: mmap or infer (.bin/.idx), lazy or cached (.bin/.idx in the older TNTIDX format), or npy "
        "(_ids.npy/_idx.npz)",
        choices=("mmap", "lazy", "cached", "infer", "npy"),
    )
    split_sentences: bool = arg(
        False, "encode sentence by sentence (nltk's Punkt); with --input the file name ends in _sentence"
    )
    keep_newlines: bool = arg(False, "--split_sentences: keep the white space after a sentence")
    lang: str = arg("english", "--split_sentences: language")
    chinese: bool = arg(False, "--split_sentences: one sentence per line")
    sequence_level: str = arg(
        "document",
        "--split_sentences: unit that training shuffles; sentence: as in PaddleNLP and Megatron-LM",
        choices=SEQUENCE_LEVELS,
    )
    shard: str = arg(
        "1/1", "i/n: encode part i of n into PREFIX_0000i-of-0000n; join with gptlm data merge", check=bad_shard
    )
    tokenizer_backend: str = arg(
        "tokenizers",
        "gigatoken: the same ids, except for letters newer than Unicode 13, and many times faster; needs gptlm[fast]",
        choices=TOKENIZER_BACKENDS,
    )
    append_eos: bool = arg(False, "append the end-of-text token to every document")
    allow_special_tokens: bool = arg(False, "encode <|endoftext|> in a text as the special token")
    on_error: str = arg(
        "raise", "what to do with broken documents; skip: log and count them", choices=("raise", "skip")
    )
    workers: int = arg(1, "encoder processes", ge=1)
    max_doc_num: int | None = arg(None, "maximum number of documents; unset: all", ge=1)
    log_interval: int = arg(1000, "progress log interval when there is no progress bar", unit="documents")


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    """Tokenizer training"""

    input_path: str | None = arg(None, "file, folder or quoted glob of .jsonl, .json, .txt or .parquet (required)")
    output_dir: str | None = arg(None, "folder for the tokenizer (required)")
    overwrite: bool = arg(False, "replace a tokenizer that gptlm trained of other input or arguments")
    vocab_size: int = arg(32000, "vocabulary size", ge=257, unit=ENTRIES)
    min_frequency: int = arg(2, "minimum occurrences of a pair to be merged")
    json_key: str = arg("text", "JSON key of the text")
    txt_split: str = arg("blank_line", "document separator in .txt files", choices=TXT_SPLITS)


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Demo"""

    output_dir: str = arg("demo", "folder for all results")
    max_steps: int = arg(400, "optimizer steps", ge=10)
    workers: int = arg(2, "encoder processes")


@dataclass(frozen=True, kw_only=True)
class OrderArguments:
    """Sample order"""

    input_dir: str | None = arg(
        None, "folder with token files, one prefix, or 'weight1 prefix1 weight2 prefix2 ...' (required)", words=True
    )
    split: str = arg("949,50,1", "ratio of train, valid and test sequences", check=bad_split)
    max_seq_length: int = arg(1024, "sequence length", ge=1, unit="tokens")
    num_samples: str = arg(
        "1,1,1", "samples of train, valid and test; they determine the number of epochs", check=bad_counts
    )
    seed: int = arg(42, "random seed of the data order", ge=0, le=LARGEST_SEED)
    data_order: str = arg("paddlenlp", "sample order to reproduce", choices=DATA_ORDERS)
    data_cache: str | None = arg(None, "folder for the sample index; unset: not stored")
    json: bool = arg(False, "print one JSON object with a hash of all samples and the first 8 samples")
    sample: int = arg(0, "show: index of the training sample", ge=0)
    tokenizer_name_or_path: str | None = arg(None, "show: tokenizer folder; unset: the one recorded with the data")


@dataclass(frozen=True, kw_only=True)
class PrefixArguments:
    """Token files"""

    prefix: str | None = arg(None, "path of the token files without suffix; may be the first argument (required)")
    vocab_size: int | None = arg(None, "upper bound of token ids; unset: vocabulary size recorded with the data", ge=1)


@dataclass(frozen=True, kw_only=True)
class CheckArguments(PrefixArguments):
    """Token files to check"""

    full: bool = arg(
        False,
        "also hash all token ids: print the hash (XXH3, of a .bin that of xxh128sum), and compare it with the one that "
        "preprocessing noted",
    )


@dataclass(frozen=True, kw_only=True)
class CopyArguments:
    """Token files to join or to convert"""

    input: list[str] = arg(
        [], "prefixes of token files, or one folder with token files, joined in this order (required)"
    )
    output_prefix: str | None = arg(None, "path of the result without suffix (required)")
    overwrite: bool = arg(False, "replace token files that gptlm wrote of other input or arguments")
    dataset_impl: str = arg("mmap", "output format", choices=("mmap", "lazy", "cached", "npy"))
    vocab_size: int | None = arg(None, "upper bound of token ids; unset: vocabulary size recorded with the data", ge=1)


@dataclass(frozen=True)
class PreprocessJob:
    """A checked preprocessing command.

    Attributes:
        megatron: file names and white space follow Megatron-LM.
        shard: (i, n): part i of n, from 1.
    """

    arguments: PreprocessArguments
    megatron: bool
    shard: tuple[int, int]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class OrderQuestion:
    """Checked `OrderArguments`; `counts` are the samples of train, valid and test."""

    arguments: OrderArguments
    counts: tuple[int, int, int]
