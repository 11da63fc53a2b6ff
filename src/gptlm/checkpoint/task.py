"""Which task the run in an output folder is of, and the sub-folder of a run of another task.

A checkpoint's manifest notes its task. For older ones, run.json beside the model shows it. A folder belongs to the task
of its newest checkpoint, or of the model in it. A run of another task uses the sub-folder named after its own task:

    output/checkpoint-6, output/model.safetensors    pretraining
    output/sft, output/lora                          fine-tuning and adapters, from commands with the same output_dir
"""

from dataclasses import replace
from pathlib import Path

from gptlm.checkpoint.folder import RUN_FILE, Checkpoint, folders, read_manifest
from gptlm.config.args.training import TrainingArguments
from gptlm.config.origin import derived
from gptlm.config.parser import Parsed
from gptlm.errors import GptlmError, UsageError, named
from gptlm.json_text import parse_json
from gptlm.model.adapter_files import is_adapter
from gptlm.model.files import has_weights

PRETRAIN, SFT, LORA = "pretrain", "sft", "lora"
NAMES = {PRETRAIN: "pretraining", SFT: "fine-tuning", LORA: "training adapters"}
ONLY_SFT = "src_length"  # an argument of fine-tuning alone, in each of its run.json files


def name_of(task: str) -> str:
    """How messages call `task`: in words, or a recipe by its name."""
    return NAMES.get(task, task)


def task_of(checkpoint: Checkpoint) -> str | None:
    """The task that wrote `checkpoint`; None where nothing says it (a converted one)."""
    return checkpoint.manifest.task or _task_in_run_file(checkpoint.path)


def owner_of(folder: Path) -> str | None:
    """The task whose run `folder` holds; None if it holds none, or nothing says which."""
    for path in reversed(folders(folder)):
        try:
            return task_of(Checkpoint(path, read_manifest(path)))
        except GptlmError:
            continue  # not whole: the next one decides, and the run says so
    return _task_in_run_file(folder) if _holds_model(folder) else None


def own_folder(folder: Path, task: str) -> Path:
    """Where a run of `task` with the output folder `folder` works: there, or in its own sub-folder.

    Raises:
        UsageError: if both are of other tasks.
    """
    own = folder / task
    owners = [owner_of(folder), owner_of(own)]
    if owners == [None, task] and not folders(folder) and not _holds_model(folder):
        return own  # the other task's checkpoints are removed or to come; this one's run resumes
    if owners[0] in (None, task):
        return folder
    if owners[1] in (None, task):
        return own
    raise UsageError(
        f"{named('output_dir')} {folder} holds a run of {name_of(str(owners[0]))}, and {own} one of "
        f"{name_of(str(owners[1]))}; give another {named('output_dir')}"
    )


def take_own_folder(parsed: Parsed, task: str) -> None:
    """Move `output_dir` to the run's own sub-folder if the folder holds a run of another task, with a note.

    Without training it stays unless a run of `task` lies in the sub-folder: its own model may be the one to evaluate.

    Raises:
        UsageError: as `own_folder`.
    """
    training = parsed[TrainingArguments]
    if not training.output_dir:
        return
    folder = Path(training.output_dir)
    own = own_folder(folder, task)
    only_evaluates = training.do_eval or training.do_predict
    trains = not only_evaluates if training.do_train is None else training.do_train
    if own == folder or not (trains or owner_of(own)):
        return
    other = owner_of(folder)
    why = f"{folder} holds a run of {name_of(other)}" if other else f"{own} holds a run of this task, {folder} none"
    parsed.note(f"{why}: this one, {name_of(task)}, uses {own} (another {named('output_dir')} avoids this)")
    parsed.put(replace(training, output_dir=str(own)), derived(why))


def take_own_adapters(parsed: Parsed) -> None:
    """Move `lora_path` to the sub-folder with adapters, if the folder itself holds the run of another task."""
    folder = Path(parsed.value("lora_path") or "")
    own = folder / LORA
    if not parsed.value("lora_path") or is_adapter(folder) or not is_adapter(own):
        return
    parsed.note(f"{folder} holds no adapters; those in {own} are used")
    parsed.set("lora_path", str(own), parsed.sources["lora_path"])


def note_other_tasks(parsed: Parsed) -> None:
    """Name the models of other tasks in sub-folders of `model_name_or_path`, one of which may be meant."""
    folder = Path(parsed.value("model_name_or_path") or "")
    others = [str(folder / task) for task in NAMES if _holds_model(folder / task)]
    if others and _holds_model(folder):
        owner = owner_of(folder)
        what = f", of {name_of(owner)}" if owner else ""
        parsed.note(f"the model is the one directly in {folder}{what}; other tasks have theirs in {', '.join(others)}")


def _holds_model(folder: Path) -> bool:
    return has_weights(folder) or is_adapter(folder)


def _task_in_run_file(folder: Path) -> str | None:
    try:
        run = parse_json((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(run, dict):
        return None
    if ONLY_SFT not in run:
        return PRETRAIN
    return LORA if run.get("lora") else SFT
