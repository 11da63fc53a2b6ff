"""Where the examples of a fine-tuning run are, and reading them: files, saved datasets, the HuggingFace hub."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gptlm.config.run import SftRun
from gptlm.data.chat_template import ChatTemplate
from gptlm.data.conversations import Chat, Example, PlainHeadings
from gptlm.data.examples import SUFFIXES, find_files, read_examples, read_records
from gptlm.data.text_files import is_dataset
from gptlm.errors import GptlmError, reason_of

logger = logging.getLogger(__name__)

HUB_SPLITS = {"train": "train", "dev": "validation"}
Sources = dict[str, Path | str]  # "train" and "dev" -> a file, a saved dataset, or "hub:NAME:SPLIT"


def find_sources(run: SftRun) -> Sources:
    """Where the examples are.

    Raises:
        GptlmError: if there is no such file or folder, or nothing in it.
    """
    data = run.data
    found: Sources = {}
    if data.dataset_name_or_path is None:
        found = {split: f"hub:{data.task_name}:{hub}" for split, hub in HUB_SPLITS.items()}
    else:
        path = Path(data.dataset_name_or_path)
        if path.is_file() or is_dataset(path):
            found["train"] = path
        elif path.is_dir():
            found = {split: file for split in ("train", "dev") if (file := _file_in(path, split))}
            if not found:
                raise GptlmError(f"{path} has no train.json, train.jsonl, dev.json ... and is not a saved dataset")
            if "train" not in found and run.training.do_train:
                raise GptlmError(
                    f"{path} has {Path(found['dev']).name} but no train.json, train.jsonl or train.parquet; to train "
                    f"on it: --dataset_name_or_path {found['dev']}"
                )
        # no dataset of the hub has such a name
        elif path.suffix in SUFFIXES or path.is_absolute() or str(data.dataset_name_or_path).startswith("."):
            raise GptlmError(f"--dataset_name_or_path {path}: there is no such file or folder")
        else:
            found = {split: f"hub:{path}:{hub}" for split, hub in HUB_SPLITS.items()}
    if data.eval_dataset_name_or_path:
        found["dev"] = _evaluation_file(Path(data.eval_dataset_name_or_path))
    return found


def _evaluation_file(path: Path) -> Path:
    """`path`, or the file for evaluation (else the only one) if it is a folder of files."""
    if not path.exists():
        raise GptlmError(f"--eval_dataset_name_or_path {path}: there is no such file or folder")
    if path.is_file() or is_dataset(path):
        return path
    file = _file_in(path, "dev") or _file_in(path, "train")
    if file is None:
        raise GptlmError(
            f"--eval_dataset_name_or_path {path} has no dev.json, dev.jsonl, validation.json ... and is not a saved "
            "dataset"
        )
    return file


def _file_in(folder: Path, split: str) -> Path | None:
    """The file of "train" or "dev" in a folder; other candidates are logged."""
    files = find_files(folder, split)
    if len(files) > 1:
        others = ", ".join(file.name for file in files[1:])
        logger.warning("%s is read; %s in the same folder: ignored", files[0], others)
    return files[0] if files else None


def read(source: Path | str, tokenizer: PreTrainedTokenizerBase, *, questions: bool = False) -> list[Example]:
    """Examples of a file or dataset; conversations in the tokenizer's chat template if it has one.

    Args:
        questions: records with source, target and title ask for the question.

    Raises:
        GptlmError: with file and record.
    """
    records = read_records(source) if isinstance(source, Path) else _hub_records(source)
    render = ChatTemplate(tokenizer) if tokenizer.chat_template else PlainHeadings()
    found = read_examples(records, render, questions=questions)
    for form, count in found.forms.items():
        is_chat = tokenizer.chat_template and ("messages" in form or form == "conversations")
        how = " in the tokenizer's chat template" if is_chat else ""
        logger.info("%s: %d records read as %s%s", source, count, form, how)
    if found.ignored:
        keys = ", ".join(f"{key} ({count})" for key, count in sorted(found.ignored.items()))
        logger.warning("%s: ignored keys: %s", source, keys)
    if found.forms["source/target"] and found.ignored["title"]:
        logger.warning("%s: for question generation from source and title give --task_name squad", source)
    _log_ends([example for example in found.examples if isinstance(example, Chat)], source, tokenizer)
    for reason, count in found.skipped.items():
        logger.warning("%d records of %s are skipped: %s", count, source, reason)
    return found.examples


def _log_ends(chats: list[Chat], source: Path | str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log which token ends assistant turns, and warn if it is not a target."""
    for end_id in {chat.end_id for chat in chats}:
        if end_id is None:
            logger.info(
                "%s: the chat template ends no turn with a token: %s follows the last response", source,
                tokenizer.eos_token,
            )  # fmt: skip
        else:
            logger.info("%s: %s ends a turn", source, tokenizer.convert_ids_to_tokens(end_id))
    if count := sum(not chat.end_in_loss for chat in chats):
        logger.warning(
            "%s: in %d conversations the {%% generation %%} of the chat template does not contain the end of a turn: "
            "the model does not learn to end; put that token inside it", source, count,
        )  # fmt: skip


def _hub_records(source: str) -> Iterable[tuple[str, Any]]:
    import datasets

    _, name, split = source.split(":")
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # datasets, huggingface_hub and requests each raise their own kinds
        reason = reason_of(error)
        raise GptlmError(
            f"the dataset {name} is neither on this machine nor on the HuggingFace hub ({reason}); "
            "give --dataset_name_or_path a local file or folder"
        ) from error
    return ((f"{name} {split}, record {number}", row) for number, row in enumerate(rows, start=1))
