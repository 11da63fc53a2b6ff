"""Tokenizers: load one from a folder or from GPT-2's two files, train one, add tokens, compare two."""

import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

from gptlm.errors import GptlmError, doing, reason_of
from gptlm.model.files import MERGES, TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, WORD_LIST, read_json
from gptlm.model.pretrained import load_pretrained

logger = logging.getLogger(__name__)

EOS = "<|endoftext|>"
LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # key in tokenizer.deprecation_warnings
DOWNLOAD = "copy or download it again"
LONGEST_WORD = 1000  # characters
NO_SPACE = re.compile(r"\S+")
PROBE = "The quick brown fox jumps over the lazy dog."


@doing("loading the tokenizer")
def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder (tokenizer.json, or vocab.json and merges.txt).

    Raises:
        GptlmError: if it cannot be loaded, is not a fast tokenizer (library `tokenizers`), or cannot encode text.
    """
    folder = Path(source)
    _check_files(folder)
    has_json = (folder / TOKENIZER).is_file()
    sentencepiece = sorted(folder.glob("*.model"))
    if sentencepiece and not has_json:
        raise GptlmError(
            f"{source} holds a sentencepiece tokenizer ({sentencepiece[0].name}), as CPM and PaddleNLP's "
            "GPTChineseTokenizer use; it is not supported, give a folder with tokenizer.json, or train one with "
            "gptlm tokenizer"
        )
    if (folder / VOCABULARY).is_file() and not has_json:
        return load_gpt2_files(str(folder / VOCABULARY), str(folder / MERGES))
    if has_json:
        read_json(folder / TOKENIZER, remedy=DOWNLOAD)  # transformers ignores a damaged one, or does not name the file
    try:
        tokenizer = load_pretrained(AutoTokenizer, source)
        tokenizer(PROBE)  # values of other types in tokenizer_config.json are first used here
    except GptlmError:
        raise
    except Exception as error:  # transformers, tokenizers and huggingface_hub have error types of their own
        raise GptlmError(f"cannot load a tokenizer from {source}: {reason_of(error)}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise GptlmError(
            f"the tokenizer in {source} has no fast form ({type(tokenizer).__name__}); "
            "gptlm needs a tokenizer.json or GPT-2's vocab.json and merges.txt"
        )
    tokenizer.deprecation_warnings[LENGTH_WARNING] = True  # every command truncates long texts itself
    return check_encodes(tokenizer, source)


def _check_files(folder: Path) -> None:
    """Raises GptlmError with the missing files if those in `folder` are not a complete tokenizer."""
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if TOKENIZER in there or {VOCABULARY, MERGES} <= there or any(folder.glob("*.model")):
        return
    if {WORD_LIST, TOKENIZER_CONFIG} <= there:  # the config names the class that reads the word list
        return
    expected = "expected tokenizer.json, or GPT-2's vocab.json and merges.txt"
    for name, lacks in ((VOCABULARY, MERGES), (MERGES, VOCABULARY)):
        if name in there:
            raise GptlmError(
                f"the tokenizer in {folder} is incomplete: {name} is there, {lacks} is missing; {expected}"
            )
    if WORD_LIST in there:
        raise GptlmError(
            f"the tokenizer in {folder} is incomplete: vocab.txt is a list of words as BERT's, the "
            f"tokenizer_config.json that says how to read it is missing; {expected}"
        )
    raise GptlmError(f"{folder} holds no tokenizer; {expected}")


def load_gpt2_files(vocab_file: str, merge_file: str) -> PreTrainedTokenizerBase:
    """The byte-level BPE of GPT-2's two files, `vocab.json` and `merges.txt`.

    Raises:
        GptlmError: if a file is missing, the two are swapped or damaged, there is no `<|endoftext|>`, or text cannot be
            encoded.
    """
    vocabulary: dict[str, int] = read_json(Path(vocab_file), "the vocabulary ", "are vocabulary and merges swapped?")
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise GptlmError(
                f"the vocabulary {vocab_file} is not a JSON object of token -> id: {token[:40]!r} has {token_id!r:.40}"
            )
    merges = _read_merges(Path(merge_file), vocabulary)
    if EOS not in vocabulary:
        raise GptlmError(f"{vocab_file} has no {EOS} entry, which GPT-2's vocabulary ends documents with")
    return check_encodes(GPT2Tokenizer(vocab=vocabulary, merges=merges), vocab_file)  # type: ignore[arg-type]


def check_encodes(tokenizer: PreTrainedTokenizerBase, source: str) -> PreTrainedTokenizerBase:
    """`tokenizer`, if it can encode text: an English sentence or its own entries.

    Raises:
        GptlmError: naming `source`, if neither gives more than one known id, as with an empty vocabulary.
    """
    if _known_ids(tokenizer, PROBE) > 1:
        return tokenizer
    # Vocabularies of other languages, or of DNA, do not know the sentence: try their own first entries as a text.
    special, vocabulary = set(tokenizer.all_special_ids), tokenizer.get_vocab()
    own = [token_id for token_id in sorted(vocabulary.values()) if token_id not in special][:64]
    if _known_ids(tokenizer, str(tokenizer.decode(own))) > 1:
        return tokenizer
    raise GptlmError(
        f"the tokenizer in {source} cannot encode text: {PROBE!r} gives no two known ids, its vocabulary has "
        f"{len(vocabulary)} entries; give a folder with a whole tokenizer"
    )


def _known_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Number of different ids of `text` without special tokens, among them the unknown token."""
    return len(set(tokenizer(text, add_special_tokens=False)["input_ids"]) - set(tokenizer.all_special_ids))


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of merges.txt, one per line; a `#version` header, CRLF and empty lines at the end are accepted."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise GptlmError(f"cannot read the merges {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GptlmError(f"the merges {path} are not UTF-8 (byte {error.start + 1}); copy the file again") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or "".join(parts) not in vocabulary:
            raise GptlmError(
                f"{path}, line {number}: {line[:60]!r} is not a merge of two known tokens; "
                "the file is damaged or belongs to another vocabulary"
            )
        merges.append((parts[0], parts[1]))
    made = {left + right for left, right in merges}
    unmade = [t for t in vocabulary if len(t) > 1 and t not in made and not (t.startswith("<") and t.endswith(">"))]
    if unmade:
        raise GptlmError(
            f"{path} has no merge for {len(unmade)} tokens of the vocabulary ({unmade[0]!r}); it was cut short"
        )
    return merges


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], allow_special_tokens: bool = False
) -> list[list[int]]:
    """The ids of each text; a special token in a text stays text, unless `allow_special_tokens`."""
    if not texts:  # an IndexError in transformers
        return []
    literal = not allow_special_tokens
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=literal)["input_ids"]


@doing("training the tokenizer")
def train_tokenizer(documents: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE like GPT-2's. `<|endoftext|>` gets id 0 and is bos, eos, unk and pad.

    Args:
        documents: the texts; read once.
        vocab_size: at least 257; the result has fewer entries if the texts have fewer pairs to merge.

    Raises:
        GptlmError: if `vocab_size` cannot hold the 256 bytes and `<|endoftext|>`.
    """
    if vocab_size < 257:
        raise GptlmError(f"vocab_size {vocab_size} is below 257: 256 bytes and {EOS} must fit")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_short_words(documents), trainer=trainer)
    return GPT2Tokenizer(tokenizer_object=tokenizer, unk_token=EOS, bos_token=EOS, eos_token=EOS, pad_token=EOS)


def _short_words(texts: Iterable[str]) -> Iterator[str]:
    """`texts`, cut inside words above LONGEST_WORD: the time of a training grows steeply with the length of a word."""
    cuts = 0
    for text in texts:
        start = 0
        if len(text) > LONGEST_WORD and max(map(len, text.split()), default=0) > LONGEST_WORD:
            for word in NO_SPACE.finditer(text):
                for cut in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                    yield text[start:cut]
                    start, cuts = cut, cuts + 1
        yield text[start:]
    if cuts:
        logger.info(
            "words above %d characters are cut for the training of the vocabulary, %d times", LONGEST_WORD, cuts
        )


def fit_to_model(tokenizer: PreTrainedTokenizerBase, positions: int) -> None:
    """Set the maximal length, `positions`, and the end of text as padding token unless there is one. Adds no entry."""
    tokenizer.model_max_length = positions
    tokenizer.deprecation_warnings[LENGTH_WARNING] = True  # training truncates long texts itself
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the files in `folder`, the chat template twice: as a file and in tokenizer_config.json.

    Older versions of transformers, and servers that do not use transformers, know the second place only. The file comes
    first where both are known.
    """
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer.chat_template, str):
        path = folder / TOKENIZER_CONFIG
        settings = read_json(path) | {"chat_template": tokenizer.chat_template}
        path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add `tokens` to the vocabulary, in order.

    Tokens that the chat template writes become special tokens, so that they stay text inside a message. The others
    become plain added tokens, which every text that contains them is encoded with.
    """
    before, known = len(tokenizer), tokenizer.get_vocab()
    template = str(tokenizer.chat_template or "")
    control = [token for token in tokens if token in template]
    for token in tokens:
        tokenizer.add_tokens([AddedToken(token, special=token in control, normalized=False)], token in control)
    if control:
        tokenizer.add_special_tokens({"additional_special_tokens": control}, replace_extra_special_tokens=False)
    new = tokenizer.convert_ids_to_tokens(list(range(before, len(tokenizer))))
    logger.info("%d tokens are new in the vocabulary%s", len(new), f": {' '.join(new)}" if new else "")
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    stay = [token for token in tokens if token in special]
    if stay:
        why = "the chat template writes them, or the tokenizer has them as special tokens"
        logger.info("%s stay text inside texts (%s); --allow_special_tokens changes this", " ".join(stay), why)
    old = [token for token in tokens if token in known]
    if old:
        logger.info("the vocabulary already has %s", " ".join(old))


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits: a hash of everything that ids depend on (vocabulary, merges and added tokens)."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {key: content["model"].get(key) for key in ("type", "vocab", "merges")}
    added = [[token["id"], token["content"]] for token in content["added_tokens"]]
    text = json.dumps([model, added], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
