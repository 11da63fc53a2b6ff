"""Objects of the caller, written to a temporary folder from where a run reads them as it reads files.

So a run with objects is the run of a command with these files, and the objects stay as they are.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gptlm.commands.preprocess import parse_preprocess
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import UsageError
from gptlm.recipes.preprocess import preprocess

TEXT, IDS = "text", "input_ids"  # keys of pretraining records


def save_model(model: Any, folder: Path) -> str:
    """Write the model; returns its folder.

    Raises:
        UsageError: if it is no model of transformers, or one with adapters.
    """
    if isinstance(model, PeftModel):
        raise UsageError("model has adapters; give model.merge_and_unload(), or save them and give lora_path")
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"model is {type(model).__name__}; expected a model of transformers, or model_name_or_path")
    model.save_pretrained(folder)
    return str(folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Write the tokenizer; returns its folder. Raises UsageError if it is none of transformers."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(f"tokenizer is {type(tokenizer).__name__}; expected one of transformers")
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_records(name: str, records: Any, path: Path) -> str:
    """Write records as lines of JSON; returns the file. Raises UsageError for what are no records."""
    with path.open("w", encoding="utf-8") as file:
        for number, record in enumerate(_items(name, records)):
            if not isinstance(record, Mapping):
                raise UsageError(f"{name}[{number}] is {type(record).__name__}; expected a dict")
            try:
                file.write(json.dumps(dict(record)) + "\n")
            except (TypeError, ValueError) as error:
                raise UsageError(f"{name}[{number}] holds a value that JSON has not: {error}") from error
    return str(path)


def save_corpus(train: Any, evaluation: Any, folder: Path, tokenizer: str | None) -> tuple[str, str | None]:
    """Write documents as token files; returns their prefix, and the split if there is something to evaluate on.

    Args:
        train, evaluation: texts, lists of token ids, or records of one of them (`text`, `input_ids`). After each text
            comes the end-of-text token; lists of ids are taken as they are. `evaluation` may be None.
        tokenizer: folder or name, for texts.

    Raises:
        UsageError: for what are no documents, or texts without a tokenizer.
    """
    documents = [_document("train_dataset", number, item) for number, item in enumerate(_items("train_dataset", train))]
    split = None
    if evaluation is not None:
        items = enumerate(_items("eval_dataset", evaluation))
        held = [_document("eval_dataset", number, item) for number, item in items]
        split = f"{len(documents)},{len(held)},0"
        documents += held
    are_texts = isinstance(documents[0], str)
    if any(isinstance(document, str) != are_texts for document in documents):
        raise UsageError("the documents are texts and lists of token ids; give one of the two")
    prefix = str(folder / "corpus")
    if not are_texts:
        _write_ids(documents, prefix)
        return prefix, split
    if tokenizer is None:
        raise UsageError("the documents are texts; give a tokenizer, or tokenizer_name_or_path")
    lines = save_records("documents", [{TEXT: text} for text in documents], folder / "corpus.jsonl")
    words = ["--input_path", lines, "--output_prefix", prefix, "--model_name_or_path", tokenizer, "--append_eos"]
    preprocess(parse_preprocess(words))
    return prefix, split


def _write_ids(documents: list[Any], prefix: str) -> None:
    writer = IndexedTokensWriter(prefix, max(int(ids.max()) for ids in documents) + 1)
    try:
        for ids in documents:
            writer.add(ids, [len(ids)])
        writer.finish({})
    finally:
        writer.abandon()


def _document(name: str, number: int, item: Any) -> Any:
    """A text, or token ids as an array."""
    if isinstance(item, Mapping):
        key = next((key for key in (TEXT, IDS) if key in item), None)
        if key is None:
            raise UsageError(f"{name}[{number}] has the keys {', '.join(map(str, item))}; expected {TEXT} or {IDS}")
        item = item[key]
    if isinstance(item, str):
        if not item.strip():
            raise UsageError(f"{name}[{number}] is an empty text; leave it out")
        return item
    ids = np.asarray(item)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise UsageError(f"{name}[{number}] is neither a text nor a list of token ids")
    return ids


def _items(name: str, dataset: Any) -> Iterator[Any]:
    """The items of a dataset with a length: a list, a `datasets.Dataset`, a map-style dataset of torch."""
    if isinstance(dataset, (str, bytes, Mapping)) or not hasattr(dataset, "__len__"):
        splits = f" with {', '.join(map(str, dataset))}; give one of them" if isinstance(dataset, Mapping) else ""
        raise UsageError(
            f"{name} is {type(dataset).__name__}{splits or '; expected a list or a datasets.Dataset of known length'}"
        )
    if not len(dataset):
        raise UsageError(f"{name} has no items")
    return (dataset[number] for number in range(len(dataset)))
