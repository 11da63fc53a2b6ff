"""Pretraining on text: `--train_file` and `--dataset_name` are encoded into token files once, and kept between runs.

The token files are those of `gptlm preprocess --append_eos`.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Part:
    """Text to encode.

    Attributes:
        what: identifies its content.
        flag: that named it.
        size: bytes; 0: unknown.
        batches: reads it.
    """

    what: dict[str, Any]
    flag: str
    size: Callable[[], int]
    batches: Callable[[], Iterator[Batch]]


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
    parts = [_files(run, "train_file") if data.train_file else _dataset(data)]
    parts += [_files(run, "validation_file")] if data.validation_file else []
    key = {"kind": "tokens", "format": FORMAT, "column": data.text_column, "tokenizer": _hash_of(tokenizer)}
    key |= parts[0].what | ({"validation": parts[1].what} if data.validation_file else {})
    folders = [Path(data.data_cache)] if data.data_cache else below_datasets(CACHE, run.training.output_dir or "")
    cache = FolderCache(folders, lambda folder: str(folder / NAME))
    built: list[Path] = []

    def build(folder: Path) -> dict[str, Any]:
        built.append(folder)
        return _write(data, tokenizer, name, parts, folder)

    prefix, facts = cache.load_or_build(key, build, first=local_rank() == 0)
    where, how = data.train_file or data.dataset_name, "encoded in" if built else "loaded from"
    logger.info("%s: %d documents, %s tokens, %s %s", where, facts["documents"], f"{facts['tokens']:,}", how, prefix)
    source = derived(named("train_file") if data.train_file else named("dataset_name"), recomputed=True)
    run = replace(run, data=replace(data, input_dir=prefix), sources=run.sources | {"input_dir": source})
    if not data.validation_file:
        return run
    logger.info("%s: %d of these documents are evaluated on", data.validation_file, facts["of_parts"][1])
    split = ",".join(map(str, [*facts["of_parts"], 0]))
    source = derived(named("validation_file"), recomputed=True)
    return replace(run, data=replace(run.data, split=split), sources=run.sources | {"split": source})


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


def _files(run: PretrainRun, flag: str) -> Part:
    data, output_dir = run.data, run.training.output_dir
    path = data.train_file if flag == "train_file" else data.validation_file
    files = list_files(local_copy(flag, path, data_cache=data.data_cache, output_dir=output_dir))
    return Part(
        {"data": hashes_of(files), "txt_split": PreprocessArguments().txt_split},
        flag,
        lambda: sum(map(size_of, files)),
        lambda: read_batches(files, keys=[data.text_column]),
    )


def _dataset(data: DataArguments) -> Part:
    name, split, config = data.dataset_name or "", data.dataset_split, data.dataset_config
    if data.streaming:
        stream = StreamedDataset(name, split, config, "dataset_name")
        return Part({"data": stream.identity()}, "dataset_name", lambda: 0, lambda: _streamed(stream, data))
    table = HubDataset(name, split, config, "dataset_name")
    _check_column(name, split, table.table.column_names, data.text_column)
    texts = table.table.select_columns([data.text_column])
    return Part(
        {"data": table.content()},
        "dataset_name",
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
    data: DataArguments, tokenizer: PreTrainedTokenizerBase, name: str, parts: list[Part], folder: Path
) -> dict[str, Any]:
    """Encode all `parts`, one after the other, into one corpus."""
    writer = IndexedTokensWriter(str(folder / NAME), len(tokenizer))
    documents, of_parts = 0, list[int]()
    try:
        for part in parts:
            job, before = _job(data, tokenizer, part.size()), writer.total
            progress = encode(job, tokenizer, None, part.batches(), part.size(), [writer])
            if writer.total == before:
                raise GptlmError(
                    f"{named(part.flag)}: there is no text under {data.text_column!r}; see {named('text_column')}"
                )
            documents += progress.documents
            of_parts.append(progress.documents - progress.empty)
        writer.finish(tokenizer_facts(job.arguments, tokenizer, name))
        return {"documents": documents, "tokens": writer.total, "of_parts": of_parts}
    finally:
        writer.abandon()


def _hash_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Everything in a tokenizer that ids depend on."""
    content = parse_json(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return [digest, str(tokenizer.eos_token_id), version("tokenizers")]
