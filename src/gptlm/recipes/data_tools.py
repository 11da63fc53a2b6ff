"""Tools for token files: check them, count them, copy or merge them, and show samples and their order."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gptlm.checksums import ALGORITHM
from gptlm.config.args.data import CheckArguments, CopyArguments, OrderQuestion, PrefixArguments
from gptlm.config.run import PretrainRun, with_epochs_counted
from gptlm.data.blocks import BlockDataset, PretrainingDataset, build_split
from gptlm.data.cache import IndexCache
from gptlm.data.corpora import SPLITS, Corpus, find_prefixes, missing_eos, open_corpora
from gptlm.data.indexed import IndexedTokens, first_bad_token, full_checksum, id_range, open_tokens, read_metadata
from gptlm.data.writer import IndexedTokensWriter, token_files
from gptlm.disk import write_failure
from gptlm.errors import GptlmError
from gptlm.recipes.common.command_results import check_files, maker, note_files
from gptlm.training.metrics.throughput import start_logging

FIRST_SAMPLES = 8


def order(question: OrderQuestion) -> dict[str, dict | None]:
    """Print, and return, the order of each split: its length, epochs, a hash of all samples, and the first ones."""
    datasets = _datasets(question)
    facts = {split: _facts(dataset) for split, dataset in datasets.items()}
    if question.arguments.json:
        print(json.dumps(facts))
        return facts
    for split, fact in facts.items():
        if fact is None:
            print(f"{split}: empty")
        else:
            print(f"{split}: {fact['len']} samples, {fact['epochs'] or 'blended'} epochs, sha256 {fact['sha256']}")
    return facts


def show(question: OrderQuestion) -> None:
    """Print one training sample: its ids and its text, with a line before each sequence."""
    dataset = _datasets(question)["train"]
    number = question.arguments.sample
    if dataset is None or number >= len(dataset):
        raise GptlmError(f"--sample {number}: the train split has {len(dataset) if dataset else 0} samples, from 0")
    while not isinstance(dataset, BlockDataset):
        part, sample = dataset.find(number)
        print(f"sample {number} of the blend is sample {sample} of part {part}")
        dataset, number = dataset.datasets[part], sample
    tokenizer = _tokenizer(question.arguments.tokenizer_name_or_path, dataset.tokens.prefix)
    for sequence, offset, length in dataset.pieces(number):
        print(f"--- sequence {sequence} of {dataset.tokens.prefix}, tokens {offset} to {offset + length - 1}")
        ids = dataset.tokens.get(sequence, offset, length).tolist()
        print(" ".join(map(str, ids)))
        if tokenizer is not None:
            print(tokenizer.decode(ids))


def check(arguments: CheckArguments) -> None:
    """Check every invariant of one corpus.

    Raises:
        GptlmError: for the first that is violated.
    """
    tokens, facts = _open(arguments)
    vocab_size = arguments.vocab_size or facts.get("vocab_size")
    low, high = id_range(tokens.tokens)
    limit = vocab_size or np.iinfo(np.int64).max
    bad = first_bad_token(tokens, limit) if low < 0 or high >= limit else None
    if bad is not None:
        sequence, offset, token = bad
        reason = f"not below {vocab_size}" if token >= 0 else "and ids start at 0"
        raise GptlmError(f"{tokens.prefix}: sequence {sequence}, token {offset} is id {token}, {reason}")
    if facts and facts.get("tokens") != len(tokens.tokens):
        noted = f"has {facts['tokens']:,} tokens" if "tokens" in facts else "has no number of tokens"
        raise GptlmError(
            f"{tokens.prefix}.meta.json {noted}, the file has {len(tokens.tokens):,}: it describes other data; "
            "remove it or preprocess again"
        )
    found = full_checksum(tokens) if arguments.full else None
    written = facts.get(ALGORITHM)
    if found and written not in (None, found):
        raise GptlmError(
            f"{tokens.path}: the ids are not those that were written: their {ALGORITHM} is {found}, {written} in "
            f"{tokens.prefix}.meta.json; copy the files again, or preprocess again"
        )
    known = f"below {vocab_size}" if vocab_size else "vocabulary unknown"
    counts = f"{len(tokens)} sequences, {len(tokens.tokens):,} tokens"
    print(f"{tokens.prefix} is whole: {counts}, ids {low} to {high} ({known})")
    if found:
        print(f"{ALGORITHM} of all ids: {found} ({'as noted when they were written' if written else 'none was noted'})")
    if problem := missing_eos(tokens, facts.get("eos_token_id")):
        print(f"warning: {problem}")


def stats(arguments: PrefixArguments) -> None:
    """Print numbers of one corpus."""
    tokens, facts = _open(arguments)
    sizes = np.asarray(tokens.sizes)
    low, high = id_range(tokens.tokens)
    rows = {
        "documents": len(tokens.document_starts) - 1,
        "sequences": len(tokens),
        "empty sequences": int((sizes == 0).sum()),
        "tokens": len(tokens.tokens),
        "dtype": tokens.tokens.dtype,
        "ids": f"{low} to {high}",
        "length min / median / mean / max": (
            f"{sizes.min()} / {np.median(sizes):g} / {sizes.mean():.1f} / {sizes.max()}" if len(sizes) else "-"
        ),
        "vocabulary": facts.get("vocab_size", "unknown"),
        "tokenizer": facts.get("tokenizer", "unknown"),
    }
    for name, value in rows.items():
        print(f"{name:<34}{value:,}" if isinstance(value, int) else f"{name:<34}{value}")
    if problem := missing_eos(tokens, facts.get("eos_token_id")):
        print(f"warning: {problem}")


def copy(arguments: CopyArguments) -> None:
    """Copy one corpus or merge several into one, in any of the formats.

    Raises:
        GptlmError: if they were made with different tokenizers, ids do not fit the vocabulary, or a shard is missing.
    """
    start_logging(main_process=True)
    prefixes = [p for name in arguments.input for p in (find_prefixes(name) if Path(name).is_dir() else [name])]
    opened = {prefix: open_tokens(prefix) for prefix in prefixes}
    prefixes = _shards_in_order(prefixes)
    if Path(arguments.output_prefix or "").resolve() in [Path(prefix).resolve() for prefix in prefixes]:
        raise GptlmError(f"--output_prefix {arguments.output_prefix} is one of the inputs; give another")
    sources = [opened[prefix] for prefix in prefixes]
    facts = [read_metadata(prefix) for prefix in prefixes]
    prints = {fact.get("tokenizer_fingerprint") for fact in facts if fact}
    if len(prints) > 1:
        raise GptlmError(
            f"{' and '.join(prefixes)} were made with different tokenizers; their ids mean different texts"
        )
    known = [fact["vocab_size"] for fact in facts if "vocab_size" in fact]
    vocab_size = (
        arguments.vocab_size or max(known, default=0) or 1 + max(id_range(source.tokens)[1] for source in sources)
    )
    inputs = [file for prefix in prefixes for layout in ("mmap", "npy") for file in token_files(prefix, layout)]
    by = maker("data", asdict(arguments), inputs, overwrite=arguments.overwrite)
    check_files("output_prefix", token_files(arguments.output_prefix or "", arguments.dataset_impl), by)
    writer = None
    try:
        writer = IndexedTokensWriter(arguments.output_prefix or "", vocab_size, arguments.dataset_impl)
        for source in sources:
            writer.copy(source)
        kept = {key: value for key, value in facts[0].items() if key.startswith(("tokenizer", "eos", "append"))}
        if len(sources) == 1:
            kept |= {key: facts[0][key] for key in ("shard", "shard_of") if key in facts[0]}
        written = writer.finish(kept)
        note_files(written, by)
    except OSError as error:
        output = Path(arguments.output_prefix or "")
        raise GptlmError(f"cannot write {output}: {write_failure(error, output)}") from error
    finally:
        if writer is not None:
            writer.abandon()
    print(f"{len(sources)} corpora, {len(writer.sizes)} sequences, {writer.total:,} tokens")
    for source, fact in zip(sources, facts, strict=True):
        if problem := missing_eos(source, fact.get("eos_token_id", kept.get("eos_token_id"))):
            print(f"warning: {problem}")
    print(f"written: {', '.join(map(str, written))}")


def _shards_in_order(prefixes: list[str]) -> list[str]:
    """Shards are merged in their own order, all of them or none; other corpora in the order of the command."""
    facts = {prefix: read_metadata(prefix) for prefix in prefixes}
    shards = {prefix: _shard_of(prefix, fact) for prefix, fact in facts.items()}
    if len(prefixes) == 1 or not any(shards.values()):
        return prefixes
    ordered = sorted(prefixes, key=lambda prefix: shards[prefix])
    parts = max(shard[1] for shard in shards.values() if shard)
    if [shards[prefix] for prefix in ordered] != [(part, parts) for part in range(1, parts + 1)]:
        found = ", ".join(f"{shard[0]}/{shard[1]}" if shard else "a whole corpus" for shard in shards.values())
        raise GptlmError(f"shards are merged when all {parts} are there, each once; found {found}")
    if len({facts[prefix].get("shard_of") for prefix in prefixes}) > 1:
        raise GptlmError(
            "the shards are not of one input and one command (files and their sizes, key, end-of-text, sentences); "
            "make them with the same flags from the same files"
        )
    return ordered


def _shard_of(prefix: str, facts: dict) -> tuple[int, ...]:
    shard = facts.get("shard", [])
    if not (isinstance(shard, list) and len(shard) in (0, 2) and all(isinstance(number, int) for number in shard)):
        raise GptlmError(f"{prefix}.meta.json has the shard {shard!r}; expected two numbers")
    return tuple(shard)


def index(run: PretrainRun) -> None:
    """Build the index that the pretraining command `run` will look for, on a machine without a GPU.

    An index that exists is compared with its checksums.
    """
    from gptlm.recipes.pretrain.data import load_or_build_datasets, open_run_corpora, steps_per_epoch
    from gptlm.recipes.pretrain.text_source import with_token_files

    start_logging(main_process=True)
    run = with_token_files(run)
    corpora = open_run_corpora(run)
    run = with_epochs_counted(run, steps_per_epoch(run, corpora))
    for split, dataset in load_or_build_datasets(run, corpora, verify=True).items():
        if dataset is not None:
            print(f"{split}: {len(dataset)} samples of {run.data.max_seq_length} tokens")


def _datasets(question: OrderQuestion) -> dict[str, PretrainingDataset | None]:
    arguments = question.arguments
    cache = IndexCache([Path(arguments.data_cache)] if arguments.data_cache else [])
    corpora: Sequence[Corpus] = open_corpora(arguments.input_dir or "", arguments.split, arguments.data_order, cache)
    return {
        split: build_split(
            corpora,
            split,
            num_samples=count,
            seq_length=arguments.max_seq_length,
            seed=arguments.seed,
            cache=cache,
            data_order=arguments.data_order,
        )
        for split, count in zip(SPLITS, question.counts, strict=True)
    }


def _facts(dataset: PretrainingDataset | None) -> dict | None:
    if dataset is None:
        return None
    digest = hashlib.sha256()
    for i in range(len(dataset)):
        digest.update(dataset[i].astype("<i8").tobytes())
    return {
        "len": len(dataset),
        "epochs": dataset.order.epochs if isinstance(dataset, BlockDataset) else None,
        "sha256": digest.hexdigest(),
        "first": [dataset[i].tolist() for i in range(min(FIRST_SAMPLES, len(dataset)))],
    }


def _open(arguments: PrefixArguments) -> tuple[IndexedTokens, dict]:
    prefix = arguments.prefix or ""
    return open_tokens(prefix), read_metadata(prefix)


def _tokenizer(name: str | None, prefix: str) -> Any:
    """The tokenizer `name`, or the one in the metadata of `prefix` if it still exists; else None."""
    from gptlm.model.tokenizer import load_tokenizer

    recorded = read_metadata(prefix).get("tokenizer")
    if name:
        return load_tokenizer(name)
    return load_tokenizer(recorded) if recorded and Path(recorded).is_dir() else None
