"""Where the examples of a fine-tuning run lie, and reading them: files, saved datasets, the hub; conversations."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gptlm.config.run import SftRun
from gptlm.data.chat import ChatTemplate
from gptlm.data.examples import find_files, is_saved_dataset, read_examples, read_records
from gptlm.data.messages import PlainHeadings
from gptlm.data.turns import Chat, Example
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


def read(source: Path | str, tokenizer: PreTrainedTokenizerBase, *, questions: bool = False) -> list[Example]:
    """Examples of a file or dataset; conversations in the tokenizer's chat template where it has one.

    The log says how records were read and which of their keys are not used.

    Args:
        questions: records with source, target and title ask for the question.

    Raises:
        GptlmError: naming file and record.
    """
    records = read_records(source) if isinstance(source, Path) else _hub_records(source)
    render = ChatTemplate(tokenizer) if tokenizer.chat_template else PlainHeadings()
    found = read_examples(records, render, questions=questions)
    for form, count in found.forms.items():
        chat = " in the tokenizer's chat template" if "messages" in form or form == "conversations" else ""
        logger.info("%s: %d records read as %s%s", source, count, form, chat if tokenizer.chat_template else "")
    if found.ignored:
        keys = ", ".join(f"{key} ({count})" for key, count in sorted(found.ignored.items()))
        logger.warning("%s: ignored keys: %s", source, keys)
    if found.forms["source/target"] and found.ignored["title"]:
        logger.warning("%s: for question generation from source and title give --task_name squad", source)
    _log_ends([example for example in found.examples if isinstance(example, Chat)], source, tokenizer)
    for reason, count in found.left_out.items():
        logger.warning("%d records of %s are left out: %s", count, source, reason)
    return found.examples


def _log_ends(chats: list[Chat], source: Path | str, tokenizer: PreTrainedTokenizerBase) -> None:
    """What ends the assistant's turns, and where nothing teaches it."""
    for end in {chat.end for chat in chats}:
        if end is None:
            logger.info(
                "%s: the chat template ends no turn with a token: %s follows the last answer", source,
                tokenizer.eos_token,
            )  # fmt: skip
        else:
            logger.info("%s: %s ends a turn", source, tokenizer.convert_ids_to_tokens(end))
    unlearnt = sum(not chat.end_learnt for chat in chats)
    if unlearnt:
        logger.warning(
            "%s: in %d conversations the {%% generation %%} of the chat template leaves out what ends a turn: the "
            "model does not learn to end; put that token inside it", source, unlearnt,
        )  # fmt: skip


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
