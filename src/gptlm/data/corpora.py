"""The corpora of a pretraining run: from `--input_dir` and `--split` to opened token files, and checks of them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptlm.data.blend import normalise
from gptlm.data.cache import IndexCache
from gptlm.data.indexed import IndexedTokens, first_bad_token, id_range, metadata_path, open_tokens, read_metadata
from gptlm.data.order import split_bounds
from gptlm.errors import GptlmError, doing, named

SPLITS = ("train", "valid", "test")
SUFFIXES = ("_idx.npz", "_ids.npy", "_ids.npz", ".idx", ".bin")
SAMPLED_DOCUMENTS = 256  # whose last id is read, evenly spaced
EOS_SHARE = 0.9  # a few documents can lack the end-of-text id, such as truncated ones


@dataclass(frozen=True)
class Corpus:
    """One part of the data: its tokens, its share of a blend, and where its splits start and end."""

    tokens: IndexedTokens
    weight: float
    bounds: list[int]
    metadata: dict

    def sequences(self, split: str) -> tuple[int, int]:
        """First and last + 1 sequence of a split."""
        k = SPLITS.index(split)
        return self.bounds[k], self.bounds[k + 1]

    def token_count(self, split: str) -> int:
        first, last = self.sequences(split)
        return self.tokens.tokens_before(last) - self.tokens.tokens_before(first)


@doing("opening the token files")
def open_corpora(
    input_dir: str, split: str, data_order: str = "paddlenlp", cache: IndexCache | None = None
) -> list[Corpus]:
    """Open every part of `--input_dir`; weights sum to 1.

    Args:
        cache: as in `open_tokens`.

    Raises:
        GptlmError: if a file is missing, damaged or empty, or the split is malformed.
    """
    parts = parse_input(input_dir)
    weights = normalise([weight for weight, _ in parts])
    corpora = []
    for (_, prefix), weight in zip(parts, weights, strict=True):
        tokens = open_tokens(prefix, cache)
        if len(tokens.tokens) == 0:
            raise GptlmError(f"{prefix} has no tokens; preprocess a text that has some")
        corpora.append(Corpus(tokens, weight, split_bounds(split, len(tokens), data_order), read_metadata(prefix)))
    return corpora


def parse_input(input_dir: str) -> list[tuple[float, str]]:
    """`--input_dir` as (weight, prefix) pairs: a folder, one prefix, or "w1 p1 w2 p2 ...".

    Raises:
        GptlmError: if a weight is not a number, is negative, or all are zero; or as `find_prefixes`.
    """
    if not os.path.isdir(input_dir) and any(os.path.exists(input_dir + suffix) for suffix in SUFFIXES):
        return [(1.0, input_dir)]
    words = input_dir.split()
    if os.path.isdir(input_dir) or len(words) < 2:
        return [(1.0, prefix) for prefix in find_prefixes(input_dir)]
    if len(words) % 2:
        raise GptlmError(
            f"{named('input_dir')} {input_dir!r} has {len(words)} words; expected pairs 'weight1 prefix1 ...'"
        )
    parts = []
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        try:
            parts.append((float(weight), prefix))
        except ValueError:
            raise GptlmError(
                f"{named('input_dir')}: {weight!r} is not a weight; expected 'weight1 prefix1 weight2 prefix2 ...'"
            ) from None
    weights = np.array([weight for weight, _ in parts])
    if not np.isfinite(weights).all() or weights.min() < 0 or weights.sum() <= 0:
        raise GptlmError(f"{named('input_dir')} {input_dir!r}: weights must be 0 or more, finite, and not all 0")
    return parts


def find_prefixes(folder: str) -> list[str]:
    """Prefixes of all corpora in `folder`, sorted by name (the originals take the file system's order).

    Raises:
        GptlmError: if the folder does not exist or has none.
    """
    suffix = next((suffix for suffix in SUFFIXES if folder.endswith(suffix)), None)
    if suffix is not None and os.path.isfile(folder):
        raise GptlmError(f"{folder} is one file of a pair; give the prefix {folder.removesuffix(suffix)}")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise GptlmError(
            f"cannot list the data folder {folder}: {error.strerror}; {named('input_dir')} takes a folder with "
            ".bin/.idx or _ids.npy/_idx.npz files, the prefix of such files, or 'weight1 prefix1 weight2 prefix2'"
        ) from error
    prefixes = {
        os.path.join(folder, name.removesuffix(suffix)): None
        for name in names
        for suffix in SUFFIXES
        if name.endswith(suffix)
    }
    if not prefixes:
        contents = ", ".join(names[:5]) or "no files"
        raise GptlmError(
            f"{folder} has no token files (.bin/.idx or _ids.npy/_idx.npz); it contains {contents}; "
            "make them with gptlm preprocess"
        )
    return list(prefixes)


def default_cache_folders(input_dir: str, data_cache: str | None, output_dir: str) -> list[Path]:
    """Folders for the index: `--data_cache`, else beside the data (as in the originals), else in the output folder."""
    if data_cache:
        return [Path(data_cache)]
    first_prefix = parse_input(input_dir)[0][1]
    return [Path(os.path.dirname(first_prefix) or ".") / "index-cache", Path(output_dir) / "index-cache"]


# Checks -----------------------------------------------------------------------------------------------------------


def check_ids(corpora: Sequence[Corpus], vocab_size: int, cache: IndexCache) -> None:
    """Every id must be one for which the model has a row.

    Raises:
        GptlmError: with the first bad position.
    """
    for corpus in corpora:
        tokens = corpus.tokens
        low, high = id_range_of(corpus, cache)
        entries = corpus.metadata.get("vocab_size", 0)
        if entries - 1 > np.iinfo(tokens.tokens.dtype).max:
            raise GptlmError(
                f"{tokens.path} is {tokens.tokens.dtype}, which cannot store the {entries} entries in its metadata: "
                "the two files do not belong together; preprocess again"
            )
        if low >= 0 and high < vocab_size:
            continue
        bad = first_bad_token(tokens, vocab_size)
        if bad is None:
            raise GptlmError(f"{tokens.prefix}.meta.json has id {high}, which is not in the data; preprocess again")
        sequence, offset, token = bad
        raise GptlmError(
            f"{tokens.prefix}: sequence {sequence}, token {offset} is id {token}, the model's vocabulary has "
            f"{vocab_size} entries (0 to {vocab_size - 1}); use the tokenizer's model or --vocab_size"
        )


def id_range_of(corpus: Corpus, cache: IndexCache) -> tuple[int, int]:
    """Lowest and highest id, or (0, highest) from the metadata; a scan of all tokens is cached."""
    tokens, facts = corpus.tokens, corpus.metadata
    # The time stamp identifies the content: hashing all tokens would cost as much as scanning them.
    stamp = tokens.path.stat().st_mtime_ns
    if "max_id" in facts and facts.get("tokens") == len(tokens.tokens):
        if stamp <= metadata_path(tokens.prefix).stat().st_mtime_ns:  # else the tokens were changed since
            return 0, facts["max_id"]
    what = {"id_range": str(tokens.path.resolve()), "tokens": len(tokens.tokens), "stamp": stamp}
    found = cache.load_or_build(what, lambda: {"range": np.array(id_range(tokens.tokens), np.int64)})["range"]
    return int(found[0]), int(found[1])


def refuse_short(corpora: Sequence[Corpus], split: str, seq_length: int) -> None:
    """Raises GptlmError if a part's split has some tokens, but fewer than one sample."""
    for corpus in corpora:
        first, last = corpus.sequences(split)
        if corpus.weight > 0 and 0 < (count := corpus.token_count(split)) < seq_length + 1:
            raise GptlmError(
                f"{corpus.tokens.prefix}: the {split} split (sequences {first} to {last - 1}) has {count} tokens, "
                f"one sample takes {seq_length + 1} (max_seq_length + 1); shorten --max_seq_length, add text, or "
                "change --split"
            )


def missing_eos(tokens: IndexedTokens, eos_id: int | None) -> str | None:
    """A warning if documents do not end with the end-of-text id, which alone separates them in the token stream.

    Args:
        eos_id: the tokenizer's end-of-text id; None: unknown, any id that the documents share is accepted.
    """
    ids = _last_ids(tokens)
    if not len(ids) or (eos_id is None and len(ids) == 1):
        return None
    values, counts = np.unique(ids, return_counts=True)
    common, count = int(values[counts.argmax()]), int(counts.max())
    right = count if eos_id is None else int((ids == eos_id).sum())
    if right >= EOS_SHARE * len(ids):
        return None
    sampled = f"{tokens.prefix}: of {len(ids)} documents sampled"
    advice = "a model cannot learn from them where a text ends (preprocess with --append_eos)"
    if eos_id is None:
        return f"{sampled}, {count} end with id {common} and the others with {len(values) - 1} other ids: {advice}"
    if count >= EOS_SHARE * len(ids):
        return (
            f"{sampled}, {count} end with id {common}, the tokenizer's end-of-text id is {eos_id}: generation will not "
            "stop where they end; their texts end alike, or another tokenizer made them (preprocess with this one and "
            "--append_eos)"
        )
    return f"{sampled}, {right} end with the tokenizer's end-of-text id {eos_id}: {advice}"


def _last_ids(tokens: IndexedTokens) -> np.ndarray:
    """The last ids of up to `SAMPLED_DOCUMENTS` evenly spaced documents that are not empty."""
    documents = len(tokens.document_starts) - 1
    chosen = np.unique(np.linspace(0, max(documents - 1, 0), SAMPLED_DOCUMENTS).astype(np.int64))[:documents]
    sequences = tokens.document_starts[chosen], tokens.document_starts[chosen + 1]
    starts, ends = (np.array([tokens.tokens_before(int(number)) for number in part], np.int64) for part in sequences)
    return tokens.tokens[ends[ends > starts] - 1].astype(np.int64)
