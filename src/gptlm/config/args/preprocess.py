"""Flags of the commands around training: tokenizer, preprocessing, demo."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptlm.compat import paddlenlp as spellings
from gptlm.compat import transformers as spellings_transformers
from gptlm.config.field import arg, check_fields
from gptlm.config.model_size import drop_tokenizer_class, is_tokenizer_class
from gptlm.config.parser import Parsed, Vocabulary, build, parse
from gptlm.config.problem import usage_error
from gptlm.errors import UsageError

TXT_SPLITS = ("blank_line", "line", "file")
TOKENIZER_BACKENDS = ("tokenizers", "gigatoken")
SEQUENCE_LEVELS = ("document", "sentence")


@dataclass(frozen=True, kw_only=True)
class PreprocessArguments:
    """Text to token files."""

    input_path: str | None = arg(
        None,
        "a file, a folder or a quoted glob of .jsonl, .json, .txt (also .gz, .zst) or .parquet, or a dataset folder; "
        "spelled --input, Megatron's conventions hold for names and white space",
    )
    output_prefix: str | None = arg(None, "path of the result without suffix")
    model_name_or_path: str | None = arg(None, "folder or name of the tokenizer (or of a model with one)")
    tokenizer_name: str | None = arg(None, "class of the tokenizer in PaddleNLP, or a folder; model_name_or_path wins")
    tokenizer_type: str = arg(
        "HuggingFaceTokenizer",
        "GPT2BPETokenizer reads vocab_file and merge_file",
        choices=("GPT2BPETokenizer", "HuggingFaceTokenizer"),
    )
    tokenizer_model: str | None = arg(None, "the tokenizer of HuggingFaceTokenizer, in Megatron's words")
    vocab_file: str | None = arg(None, "GPT-2's vocab.json")
    merge_file: str | None = arg(None, "GPT-2's merges.txt")
    data_format: str = arg("JSON", "format of .json and .jsonl files", choices=("JSON",))
    json_keys: list[str] = arg(["text"], "keys whose texts are encoded, each into token files of its own", words=True)
    txt_split: str = arg("blank_line", "what ends a document in a .txt file", choices=TXT_SPLITS)
    dataset_impl: str = arg(
        "mmap",
        "mmap (or infer) for .bin/.idx, lazy and cached for .bin/.idx in the older TNTIDX format, npy for "
        "_ids.npy/_idx.npz",
        choices=("mmap", "lazy", "cached", "infer", "npy"),
    )
    split_sentences: bool = arg(False, "encode sentence by sentence (nltk's punkt); Megatron's name ends in _sentence")
    keep_newlines: bool = arg(False, "with split_sentences: a sentence keeps the white space behind it")
    lang: str = arg("english", "with split_sentences: the language")
    chinese: bool = arg(False, "with split_sentences: each line is a sentence")
    sequence_level: str = arg(
        "document",
        "what training shuffles as one: sentence is what the originals make of split_sentences",
        choices=SEQUENCE_LEVELS,
    )
    shard: str = arg("1/1", "i/n: encode only the i-th of n parts, into PREFIX_0000i-of-0000n; see gptlm data merge")
    tokenizer_backend: str = arg(
        "tokenizers",
        "gigatoken: the same ids (but for letters younger than Unicode 14), many times faster; extra 'fast'",
        choices=TOKENIZER_BACKENDS,
    )
    append_eos: bool = arg(False, "end every document with the end-of-text id")
    allow_special_tokens: bool = arg(False, "let <|endoftext|> written in a text become its id")
    on_error: str = arg(
        "raise", "skip: leave out documents that are broken, and name and count them", choices=("raise", "skip")
    )
    workers: int = arg(1, "processes that encode", ge=1)
    max_doc_num: int | None = arg(None, "stop after this many documents", ge=1)
    log_interval: int = arg(1000, "documents between progress lines when there is no progress bar")


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    """A tokenizer from text."""

    input_path: str | None = arg(None, "a file, a folder or a quoted glob of .jsonl, .json, .txt or .parquet")
    output_dir: str | None = arg(None, "folder for the tokenizer")
    vocab_size: int = arg(
        32000, "entries of the vocabulary, 257 or more", ge=257, unit="entries (256 bytes and <|endoftext|>)"
    )
    min_frequency: int = arg(2, "occurrences a pair needs to be merged")
    json_key: str = arg("text", "key of the texts in JSON files")
    txt_split: str = arg("blank_line", "what ends a document in a .txt file", choices=TXT_SPLITS)


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """The whole way on this machine's own text."""

    output_dir: str = arg("demo", "folder for everything the demo makes")
    max_steps: int = arg(400, "optimizer steps", ge=10)
    workers: int = arg(2, "processes that encode")


PREPROCESS = Vocabulary(
    (PreprocessArguments,),
    spellings_transformers.PREPROCESS_RENAMED | spellings.PREPROCESS_RENAMED,
    spellings_transformers.PREPROCESS_IGNORED | spellings.PREPROCESS_IGNORED,
    spellings.PREPROCESS_REFUSED,
)
TOKENIZER = Vocabulary((TokenizerArguments,), spellings.TOKENIZER_RENAMED)
DEMO = Vocabulary((DemoArguments,))


@dataclass(frozen=True)
class PreprocessJob:
    """A checked preprocessing command; `megatron` says whose conventions hold, `shard` is (i, n)."""

    arguments: PreprocessArguments
    megatron: bool
    shard: tuple[int, int]
    notes: tuple[str, ...]


def parse_preprocess(argv: Sequence[str]) -> PreprocessJob:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(PREPROCESS, argv)
    values = parsed.values
    problems = _missing(parsed, "input_path", "output_prefix")
    if (values["output_prefix"] or "").endswith("/"):
        problems.append(f"--output_prefix {values['output_prefix']}: expected folder/name, this is a folder")
    problems += [problem.marked for problem in check_fields(build(PreprocessArguments, values))]
    if not values["json_keys"] or len(set(values["json_keys"])) < len(values["json_keys"]):
        problems.append(f"--json_keys {' '.join(values['json_keys'])}: expected one or more different keys")
    shard = _shard(values["shard"])
    if shard is None:
        problems.append(f"--shard {values['shard']}: expected i/n with i from 1 to n, like 2/8")
    elif shard != (1, 1) and values["max_doc_num"] is not None:
        problems.append("--max_doc_num counts documents of the whole input; leave it out with --shard")
    problems += _tokenizer_problems(parsed)
    _note_sentences(parsed)
    megatron = parsed.aliases.get("input_path") == "input"
    if not megatron and len(values["json_keys"]) > 1:
        problems.append("several --json_keys give several corpora, whose names are Megatron's: use --input")
    if problems or shard is None:
        raise UsageError("\n".join(problems))
    return PreprocessJob(build(PreprocessArguments, values), megatron, shard, tuple(parsed.notes))


def parse_tokenizer(argv: Sequence[str]) -> TokenizerArguments:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(TOKENIZER, argv)
    problems = _missing(parsed, "input_path", "output_dir")
    arguments = build(TokenizerArguments, parsed.values)
    problems += [problem.marked for problem in check_fields(arguments)]
    if problems:
        raise UsageError("\n".join(problems))
    return arguments


def parse_demo(argv: Sequence[str]) -> DemoArguments:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(DEMO, argv)
    arguments = build(DemoArguments, parsed.values)
    if problems := check_fields(arguments):
        raise usage_error(problems, parsed.typed)
    return arguments


def _shard(text: str) -> tuple[int, int] | None:
    try:
        part, parts = (int(word) for word in text.split("/"))
    except ValueError:
        return None
    return (part, parts) if 1 <= part <= parts else None


def _note_sentences(parsed: Parsed) -> None:
    """Flags of sentences that do nothing without them, and what the originals make of them."""
    values = parsed.values
    if not values["split_sentences"]:
        for name in ("keep_newlines", "lang", "sequence_level"):
            if not parsed.is_default(name):
                parsed.note(f"--{name} has no effect: documents are not split into sentences")
        if values["chinese"]:
            parsed.note("--chinese has no effect: byte-level BPE encodes every language")
        values["sequence_level"] = "document"
        return
    if values["chinese"] and not parsed.is_default("lang"):
        parsed.note(f"--lang {values['lang']} has no effect: with --chinese each line is a sentence")
    if values["sequence_level"] == "document":
        parsed.note(
            "--split_sentences: text is encoded sentence by sentence, white space between them is dropped "
            "(--keep_newlines keeps it), and each document stays one sequence; in the originals each sentence is a "
            "sequence, and GPT training shuffles the sentences of all documents (--sequence_level sentence does that)"
        )
    else:
        parsed.note(
            "--sequence_level sentence: as in the originals each sentence is a sequence, and GPT training shuffles the "
            "sentences of all documents"
        )


def _tokenizer_problems(parsed: Parsed) -> list[str]:
    values = parsed.values
    files = [name for name in ("vocab_file", "merge_file") if values[name]]
    if len(files) == 1 and values["model_name_or_path"] is None:
        missing = "merge_file" if files == ["vocab_file"] else "vocab_file"
        return [f"--{files[0]} is given without --{missing}; GPT-2's tokenizer needs both"]
    if values["tokenizer_type"] == "GPT2BPETokenizer" and not files and values["model_name_or_path"] is None:
        return ["--tokenizer_type GPT2BPETokenizer needs --vocab_file and --merge_file"]
    named = values["model_name_or_path"] or values["tokenizer_model"] or values["tokenizer_name"]
    if not files and is_tokenizer_class(named):
        return [f"--tokenizer_name {named} is a class without a vocabulary: give --model_name_or_path DIR"]
    drop_tokenizer_class(parsed, "tokenizer_name", values["model_name_or_path"])
    if values["tokenizer_name"] and values["tokenizer_name"] != named:
        parsed.note(f"--tokenizer_name {values['tokenizer_name']} has no effect: the tokenizer of {named} is used")
    if not files and named is None:
        return ["no tokenizer is named: give --model_name_or_path DIR, or --vocab_file and --merge_file"]
    return []


def _missing(parsed: Parsed, *names: str) -> list[str]:
    return [f"--{name} is missing" for name in names if not parsed.values[name]]
