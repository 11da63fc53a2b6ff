"""From `--input_dir` and `--split` to checked training, validation and test datasets."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptlm.data.blend import BlendedDataset, blend_size, normalise, part_samples
from gptlm.data.blocks import BlockDataset
from gptlm.data.cache import IndexCache, content_hash
from gptlm.data.indexed import IndexedTokens, first_bad_token, id_range, metadata_path, open_tokens, read_metadata
from gptlm.data.inputs import parse_input
from gptlm.data.order import SampleOrder, build_order, split_bounds
from gptlm.errors import GptlmError, doing

SPLITS = ("train", "valid", "test")

PretrainingDataset = BlockDataset | BlendedDataset


@dataclass(frozen=True)
class Corpus:
    """One part of the data: its tokens, its share of a blend, and where its splits begin and end."""

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
        return int(self.tokens.sizes[first:last].sum(dtype=np.int64))


@doing("opening the token files")
def open_corpora(input_dir: str, split: str, data_order: str = "paddlenlp") -> list[Corpus]:
    """Open every part of `--input_dir`; weights sum to 1.

    Raises:
        GptlmError: if a file is missing, damaged or empty, or the split is malformed.
    """
    parts = parse_input(input_dir)
    weights = normalise([weight for weight, _ in parts])
    corpora = []
    for (_, prefix), weight in zip(parts, weights, strict=True):
        tokens = open_tokens(prefix)
        if len(tokens.tokens) == 0:
            raise GptlmError(f"{prefix} holds no tokens; preprocess a text that has some")
        corpora.append(Corpus(tokens, weight, split_bounds(split, len(tokens), data_order), read_metadata(prefix)))
    return corpora


def default_cache_folders(input_dir: str, data_cache: str | None, output_dir: str) -> list[Path]:
    """Where the index may lie: `--data_cache`, else beside the data as in the originals, else in the output folder."""
    if data_cache:
        return [Path(data_cache)]
    first_prefix = parse_input(input_dir)[0][1]
    return [Path(os.path.dirname(first_prefix) or ".") / "index-cache", Path(output_dir) / "index-cache"]


def check_ids(corpora: Sequence[Corpus], vocab_size: int, cache: IndexCache) -> None:
    """Every id must be one the model has a row for.

    The range of ids comes from the data's metadata, else from one reading of all tokens, whose result is cached.

    Raises:
        GptlmError: naming the first bad position.
    """
    for corpus in corpora:
        tokens = corpus.tokens
        low, high = id_range_of(corpus, cache)
        noted = corpus.metadata.get("vocab_size", 0)
        if noted - 1 > np.iinfo(tokens.tokens.dtype).max:
            raise GptlmError(
                f"{tokens.path} is {tokens.tokens.dtype}, its metadata speak of {noted} entries, more than that "
                "holds: the files are not of one run; preprocess again"
            )
        if low >= 0 and high < vocab_size:
            continue
        bad = first_bad_token(tokens, vocab_size)
        if bad is None:
            raise GptlmError(f"{tokens.prefix}.meta.json names id {high}, which is not in the data; preprocess again")
        sequence, offset, token = bad
        raise GptlmError(
            f"{tokens.prefix}: sequence {sequence}, token {offset} is id {token}, the model's vocabulary has "
            f"{vocab_size} entries (0 to {vocab_size - 1}); use the tokenizer's model or --vocab_size"
        )


def id_range_of(corpus: Corpus, cache: IndexCache) -> tuple[int, int]:
    """Lowest and highest id, or (0, highest) where the metadata name it."""
    tokens, facts = corpus.tokens, corpus.metadata
    # Time stamps stand for the content: hashing all tokens would cost as much as looking at them.
    stamp = tokens.path.stat().st_mtime_ns
    if "max_id" in facts and facts.get("tokens") == len(tokens.tokens):
        if stamp <= metadata_path(tokens.prefix).stat().st_mtime_ns:  # else the tokens were changed since
            return 0, facts["max_id"]
    what = {"id_range": str(tokens.path.resolve()), "tokens": len(tokens.tokens), "stamp": stamp}
    low, high = cache.load_or_build(what, lambda: {"range": np.array(id_range(tokens), np.int64)})["range"]
    return int(low), int(high)


def refuse_short(corpora: Sequence[Corpus], split: str, seq_length: int) -> None:
    """Raises GptlmError if a part's split holds some tokens, but fewer than one sample."""
    for corpus in corpora:
        first, last = corpus.sequences(split)
        if corpus.weight > 0 and 0 < (count := corpus.token_count(split)) < seq_length + 1:
            raise GptlmError(
                f"{corpus.tokens.prefix}: the {split} split (sequences {first} to {last - 1}) holds {count} tokens, "
                f"one sample takes {seq_length + 1} (max_seq_length + 1); shorten --max_seq_length, add text, or "
                "change --split"
            )


def build_split(
    corpora: Sequence[Corpus],
    split: str,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    cache: IndexCache,
    data_order: str = "paddlenlp",
) -> PretrainingDataset | None:
    """The dataset of one split with at least `num_samples` samples, or None if the split is empty everywhere.

    Parts of a blend whose split is empty are left out, and the others' weights fill the gap. A split shorter than one
    sample is repeated until it fills one, as in the originals; `refuse_short` is for who does not want that.
    """
    present = [corpus for corpus in corpora if corpus.weight > 0 and corpus.token_count(split) > 0]
    if not present:
        return None
    weights = normalise([corpus.weight for corpus in present])
    if len(corpora) == 1:
        return BlockDataset(
            present[0].tokens, _cached_order(present[0], split, num_samples, seq_length, seed, cache, data_order)
        )
    wanted = [part_samples(num_samples, weight, data_order) for weight in weights]
    parts = [
        BlockDataset(corpus.tokens, _cached_order(corpus, split, n, seq_length, seed, cache, data_order))
        for corpus, n in zip(present, wanted, strict=True)
    ]
    return BlendedDataset(parts, weights, blend_size(num_samples, weights, data_order), cache)


def _cached_order(
    corpus: Corpus, split: str, num_samples: int, seq_length: int, seed: int, cache: IndexCache, data_order: str
) -> SampleOrder:
    first, last = corpus.sequences(split)
    what = {
        "order": "fleetx" if data_order == "fleetx" else "shuffled",  # the others differ in their bounds only
        "sizes": content_hash(corpus.tokens.sizes),
        "sequences": [first, last],
        "num_samples": num_samples,
        "seq_length": seq_length,
        "seed": seed,
    }

    def build() -> dict[str, np.ndarray]:
        order = build_order(
            corpus.tokens.sizes,
            first,
            last,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            data_order=data_order,
        )
        facts = np.array([order.epochs, order.separate_last_epoch], np.int64)
        return {"documents": order.documents, "samples": order.samples, "shuffle": order.shuffle, "epochs": facts}

    arrays = cache.load_or_build(what, build)
    epochs, separate = arrays["epochs"].tolist()
    return SampleOrder(arrays["documents"], arrays["samples"], arrays["shuffle"], epochs, bool(separate))
