"""Pretraining on text: `--train_file` and `--dataset_name` are encoded into token files once, and kept between runs.

The token files are those of `gptlm preprocess --append_eos`.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gptlm.config.args.data import PreprocessArguments, PreprocessJob
from gptlm.config.args.training import DataArguments
from gptlm.config.origin import derived
from gptlm.config.run import PretrainRun
from gptlm.data.documents import BATCH_ROWS, Batch, read_batches, table_batches
from gptlm.data.folder_cache import FolderCache, hashes_of
from gptlm.data.text_files import list_files, size_of
from gptlm.data.workers import BYTES_PER_WORKER
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError, named
from gptlm.json_text import parse_json
from gptlm.model.hub_datasets import HubDataset, StreamedDataset
from gptlm.model.tokenizer import load_tokenizer
from gptlm.ranks import local_rank
from gptlm.recipes.common.caches import below_datasets
from gptlm.recipes.common.model import check_entries, tokenizer_folder
from gptlm.recipes.common.remote_files import local_copy
from gptlm.recipes.preprocess import encode, tokenizer_facts

logger = logging.getLogger(__name__)

FORMAT = 1  # of the cached folders; other ones are built again
CACHE = "gptlm-tokens"  # folder below that of `datasets`, or in the output folder
NAME = "text"  # of the token files

Batches = Callable[[], Iterator[Batch]]


def with_token_files(run: PretrainRun) -> PretrainRun:
    """`run` with the token files of its text as `input_dir`; the first process of a node encodes, the others wait.

    Raises:
        GptlmError: if text or tokenizer cannot be read, or the token files cannot be written.
    """
    data = run.data
    if not data.reads_text:
        return run
    tokenizer, name = _tokenizer(run)
    check_entries(run, tokenizer)
    what, size, batches = _files(run) if data.train_file else _dataset(data)
    key = {"kind": "tokens", "format": FORMAT, "column": data.text_column, "tokenizer": _hash_of(tokenizer)} | what
    folders = [Path(data.data_cache)] if data.data_cache else below_datasets(CACHE, run.training.output_dir or "")
    cache = FolderCache(folders, lambda folder: str(folder / NAME))
    built: list[Path] = []

    def build(folder: Path) -> dict[str, Any]:
        built.append(folder)
        return _write(_job(data, tokenizer, size()), tokenizer, name, size(), batches(), folder)

    prefix, facts = cache.load_or_build(key, build, first=local_rank() == 0)
    where, how = data.train_file or data.dataset_name, "encoded in" if built else "loaded from"
    logger.info("%s: %d documents, %s tokens, %s %s", where, facts["documents"], f"{facts['tokens']:,}", how, prefix)
    source = derived(named("train_file") if data.train_file else named("dataset_name"), recomputed=True)
    return replace(run, data=replace(data, input_dir=prefix), sources=run.sources | {"input_dir": source})


def _job(data: DataArguments, tokenizer: PreTrainedTokenizerBase, size: int) -> PreprocessJob:
    wanted = data.preprocessing_num_workers or len(os.sched_getaffinity(0))
    workers = max(1, min(wanted, size // BYTES_PER_WORKER)) if size else wanted
    eos = tokenizer.eos_token_id is not None
    arguments = PreprocessArguments(json_keys=[data.text_column], append_eos=eos, workers=workers)
    return PreprocessJob(arguments, megatron=False, shard=(1, 1), notes=())


def _tokenizer(run: PretrainRun) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer that was named, else the model's; and its folder or name."""
    own = run.model.model_name_or_path if run.source.kind not in ("flags", "config") else None
    name = run.model.tokenizer_name_or_path or own
    if name is None:
        raise GptlmError(f"text needs a tokenizer: give {named('tokenizer_name_or_path')} DIR")
    try:
        return load_tokenizer(tokenizer_folder(name)), str(Path(name).resolve()) if Path(name).is_dir() else name
    except GptlmError as error:
        raise GptlmError(f"text needs a tokenizer ({error}); give {named('tokenizer_name_or_path')} DIR") from error


def _files(run: PretrainRun) -> tuple[dict[str, Any], Callable[[], int], Batches]:
    data, output_dir = run.data, run.training.output_dir
    files = list_files(local_copy("train_file", data.train_file, data_cache=data.data_cache, output_dir=output_dir))
    return (
        {"data": hashes_of(files), "txt_split": PreprocessArguments().txt_split},
        lambda: sum(map(size_of, files)),
        lambda: read_batches(files, keys=[data.text_column]),
    )


def _dataset(data: DataArguments) -> tuple[dict[str, Any], Callable[[], int], Batches]:
    name, split, config = data.dataset_name or "", data.dataset_split, data.dataset_config
    if data.streaming:
        stream = StreamedDataset(name, split, config, "dataset_name")
        return {"data": stream.identity()}, lambda: 0, lambda: _streamed(stream, data)
    table = HubDataset(name, split, config, "dataset_name")
    _check_column(name, split, table.table.column_names, data.text_column)
    texts = table.table.select_columns([data.text_column])
    return (
        {"data": table.content()},
        lambda: table.size,
        lambda: table_batches(texts, f"{name} {split}", range(len(texts)), table.size),
    )


def _streamed(stream: StreamedDataset, data: DataArguments) -> Iterator[Batch]:
    start, name = 0, f"{stream.name} {stream.split}"
    for columns in stream.rows.iter(batch_size=BATCH_ROWS):
        _check_column(stream.name, stream.split, list(columns), data.text_column)
        records = [{data.text_column: text} for text in columns[data.text_column]]
        yield Batch(name, range(start + 1, start + 1 + len(records)), records, False, 0)
        start += len(records)


def _check_column(name: str, split: str, found: list[str], column: str) -> None:
    if column not in found:
        raise GptlmError(
            f"the {split} split of {name} has no column {column!r}, it has {', '.join(found)}; name the column of the "
            f"texts with {named('text_column')}"
        )


def _write(
    job: PreprocessJob,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    size: int,
    batches: Iterator[Batch],
    folder: Path,
) -> dict[str, Any]:
    writer = IndexedTokensWriter(str(folder / NAME), len(tokenizer))
    try:
        progress = encode(job, tokenizer, None, batches, size, [writer])
        if not writer.total:
            raise GptlmError(f"there is no text under {job.arguments.json_keys[0]!r}; see {named('text_column')}")
        writer.finish(tokenizer_facts(job.arguments, tokenizer, name))
        return {"documents": progress.documents, "tokens": writer.total}
    finally:
        writer.abandon()


def _hash_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Everything in a tokenizer that ids depend on."""
    content = parse_json(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return [digest, str(tokenizer.eos_token_id), version("tokenizers")]
