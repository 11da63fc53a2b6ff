"""Where the examples of a fine-tuning run lie, and reading them: files, saved datasets, the hub; conversations."""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from gptlm.config.sft import SftRun
from gptlm.data.examples import (
    Example,
    Turn,
    find_files,
    is_saved_dataset,
    plain_conversation,
    read_examples,
    read_records,
)
from gptlm.errors import GptlmError, reason_of

logger = logging.getLogger(__name__)

HUB_SPLITS = {"train": "train", "dev": "validation"}
FILE_ENDINGS = (".json", ".jsonl", ".parquet")  # no dataset of the hub is called so
Sources = dict[str, Path | str]  # "train" and "dev" -> a file, a saved dataset, or "hub:NAME:SPLIT"


def find_sources(run: SftRun) -> Sources:
    """Where the examples lie.

    Raises:
        GptlmError: if there is no such file or folder, or nothing in it.
    """
    data = run.data
    found: Sources = {}
    if data.dataset_name_or_path is None:
        found = {split: f"hub:{data.task_name}:{hub}" for split, hub in HUB_SPLITS.items()}
    else:
        path = Path(data.dataset_name_or_path)
        if path.is_file() or is_saved_dataset(path):
            found["train"] = path
        elif path.is_dir():
            found = {split: files[0] for split in ("train", "dev") if (files := _in_folder(path, split))}
            if not found:
                raise GptlmError(f"{path} holds no train.json, train.jsonl, dev.json ... and is no saved dataset")
            if "train" not in found and run.training.do_train:
                raise GptlmError(
                    f"{path} holds {Path(found['dev']).name} but no train.json, train.jsonl or train.parquet; to train "
                    f"on it: --dataset_name_or_path {found['dev']}"
                )
        elif path.suffix in FILE_ENDINGS or path.is_absolute() or str(data.dataset_name_or_path).startswith("."):
            raise GptlmError(f"--dataset_name_or_path {path}: there is no such file or folder")
        else:
            found = {split: f"hub:{path}:{hub}" for split, hub in HUB_SPLITS.items()}
    if data.eval_dataset_name_or_path:
        found["dev"] = _named_for_evaluation(Path(data.eval_dataset_name_or_path))
    return found


def _named_for_evaluation(path: Path) -> Path:
    """`path`, or the file for evaluation (else the only one) where it is a folder of files."""
    if not path.exists():
        raise GptlmError(f"--eval_dataset_name_or_path {path}: there is no such file or folder")
    if path.is_file() or is_saved_dataset(path):
        return path
    files = _in_folder(path, "dev") or _in_folder(path, "train")
    if not files:
        raise GptlmError(
            f"--eval_dataset_name_or_path {path} holds no dev.json, dev.jsonl, validation.json ... and is no saved "
            "dataset"
        )
    return files[0]


def _in_folder(path: Path, split: str) -> list[Path]:
    """The file of "train" or "dev" in a folder; others that would do as well are named in the log."""
    files = find_files(path, split)
    if len(files) > 1:
        others = ", ".join(file.name for file in files[1:])
        logger.warning("%s is read; %s in the same folder: ignored", files[0], others)
    return files[:1]


def read(source: Path | str, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    records = read_records(source) if isinstance(source, Path) else _hub_records(source)
    found = read_examples(records, partial(_conversation, tokenizer))
    for reason, count in found.left_out.items():
        logger.warning("%d records of %s are left out: %s", count, source, reason)
    return found.examples


def _hub_records(source: str) -> Iterable[tuple[str, Any]]:
    import datasets

    _, name, split = source.split(":")
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # datasets, huggingface_hub and requests each raise their own kinds
        reason = reason_of(error)
        raise GptlmError(
            f"the dataset {name} can be had neither from this machine nor from the HuggingFace hub ({reason}); "
            "give --dataset_name_or_path a local file or folder"
        ) from error
    return ((f"{name} {split}, row {number}", row) for number, row in enumerate(rows))


def _conversation(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Example:
    """Turns in the tokenizer's chat template, or in plain headings where it has none."""
    if not tokenizer.chat_template:
        return plain_conversation(messages)
    turns, before, end = [], "", str(tokenizer.eos_token)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _rendered(tokenizer, messages[:number], True)
        whole = _rendered(tokenizer, messages[: number + 1], False)
        if not prompt.startswith(before) or not whole.startswith(prompt):
            raise GptlmError(
                f"the tokenizer's chat template changes earlier turns when turn {number + 1} is added, so that no "
                "conversation can be learnt as one row; split conversations into prompt and response"
            )
        answer, found, rest = whole.removeprefix(prompt).rpartition(end)
        if not found or rest.strip():  # the template puts no end-of-text token behind answers: the row gets one
            answer, rest = answer + found + rest, ""
        turns.append(Turn(prompt.removeprefix(before), answer))
        before = whole.removesuffix(rest) if rest else whole
    return turns


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except TemplateSyntaxError as error:
        raise GptlmError(
            f"the tokenizer's chat template is no valid Jinja, line {error.lineno}: {error}; mend chat_template in "
            f"the folder {tokenizer.name_or_path}"
        ) from error
    except TemplateError as error:
        raise GptlmError(f"the tokenizer's chat template refuses a conversation: {error}") from error
