"""Where a training run starts: the output folder, the checkpoint to resume from, and what has changed since."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.folder import Checkpoint
from gptlm.checkpoint.task import LORA, PRETRAIN, name_of, own_folder, task_of
from gptlm.config.parser import shown
from gptlm.config.run import Run
from gptlm.errors import GptlmError, named
from gptlm.model.files import shape_of_config
from gptlm.ranks import is_main_process

logger = logging.getLogger(__name__)

MEANINGS = {"content": "the token files were changed, the samples to come are of other text"}
UNNOTED = {"content": "does not note the content of the token files: whether they are still the same is not checked"}


def check_output(flag: str, folder: Path) -> None:
    """Check at the start, not at the first checkpoint, that the folder is writable.

    Raises:
        GptlmError: if `folder` or what it would lie in is a file, or cannot be written to.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise GptlmError(f"--{flag} {folder}: {nearest} is a file, not a folder; give another --{flag}")
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        raise GptlmError(
            f"--{flag} {folder}: {nearest} cannot be written to ({error.strerror}); give another --{flag}"
        ) from error


@contextmanager
def lock_output(run: Run) -> Iterator[None]:
    """Lock `output_dir` against other runs. The lock of a killed process is released by the OS.

    Raises:
        GptlmError: if another run does.
    """
    if not run.training.do_train or not is_main_process():
        yield
        return
    output_dir = Path(run.training.output_dir or "")
    output_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output_dir / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise GptlmError(
            f"another run is writing into {output_dir}; wait until it ends, or give another --output_dir"
        ) from None
    except (NotImplementedError, OSError) as error:
        logger.warning("%s cannot be locked (%s): start no second run there", output_dir, error)
    try:
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def find_resume_checkpoint(run: Run, check: Callable[[Any, Checkpoint], None]) -> Checkpoint | None:
    """The checkpoint to resume from; None starts at step 0. `check` raises where one is not of this run's model.

    Raises:
        GptlmError: if the requested one is missing or damaged, or starting anew would replace a finished model.
    """
    training = run.training
    output_dir = Path(training.output_dir or "")
    if not training.do_train or training.overwrite_output_dir:
        return None
    asked = training.resume_from_checkpoint
    found: Checkpoint | None
    path = _asked_folder(run)
    if path is not None:
        found = checkpoint.read(_newest_below(path))
        _check_task(run, found)
        if is_complete(run, found) and checkpoint.folders(output_dir):
            raise GptlmError(
                f"nothing is left to train after {found.path}, and {output_dir} holds a run of its own, whose model "
                f"would be replaced; give another {named('output_dir')}, or leave {named('resume_from_checkpoint')} out"
            )
    else:
        found, skipped = checkpoint.newest(output_dir)
        for reason in skipped:
            logger.warning("%s; it is skipped", reason)
        if found is None and skipped:
            raise GptlmError(
                f"none of the {len(skipped)} checkpoints in {output_dir} is complete ({skipped[0]}); repair "
                "or remove them, or start anew with --overwrite_output_dir"
            )
    if found is None:
        if any((output_dir / name).exists() for name in ("model.safetensors", "adapter_model.safetensors")):
            raise GptlmError(
                f"{output_dir} holds a model but no checkpoint to resume from; give another --output_dir, or "
                "--overwrite_output_dir to replace it"
            )
        if asked:
            logger.info("no checkpoint in %s yet: training starts at step 0", output_dir)
    elif found.manifest["weights_only"] and not training.ignore_load_lr_and_optim:
        raise GptlmError(
            f"the checkpoint {found.path} holds weights only (ignore_save_lr_and_optim); start a new run from it with "
            f"--model_name_or_path {found.path} --continue_training and another --output_dir, or resume with "
            "--ignore_load_lr_and_optim"
        )
    else:
        check(run, found)
    return found


def _asked_folder(run: Run) -> Path | None:
    """The folder that --resume_from_checkpoint names; None where it is output_dir, or not given."""
    asked = run.training.resume_from_checkpoint
    if not asked or asked.lower() in ("true", "1", "yes"):
        return None
    folder = Path(asked)
    own = folder if (folder / checkpoint.MANIFEST).exists() else own_folder(folder, run.task)
    if own.resolve() == Path(run.training.output_dir or "").resolve():
        return None
    return own if own.is_dir() else folder


def _check_task(run: Run, found: Checkpoint) -> None:
    """Raises GptlmError if `found` is of another task: it has other samples, another schedule and other steps."""
    task = task_of(found)
    if task in (None, run.task):
        return
    if task == LORA:
        start = f"merge them (`gptlm merge-lora --lora_path {found.path} --output_path DIR`) and give DIR as"
        advice = f"--lora trains them on; else {start} --model_name_or_path"
    else:
        more = " --continue_training" if run.task == PRETRAIN else ""
        advice = f"to start from its weights give --model_name_or_path {found.path}{more} instead"
    raise GptlmError(
        f"the checkpoint {found.path} is of {name_of(str(task))}, this run is {name_of(run.task)}: it cannot be "
        f"resumed; {advice}"
    )


def _newest_below(asked: Path) -> Path:
    """`asked`, or the newest complete checkpoint in it where it is a folder of them."""
    if not asked.is_dir() or (asked / checkpoint.MANIFEST).exists():
        return asked
    found, skipped = checkpoint.newest(asked)
    for reason in skipped:
        logger.warning("%s; it is skipped", reason)
    return found.path if found else asked


def is_complete(run: Run, found: Checkpoint | None) -> bool:
    """Whether nothing is left to train after the checkpoint `found`."""
    return found is not None and found.manifest["global_step"] >= run.training.max_steps


def check_shape(run: Run, found: Checkpoint) -> None:
    """Raises GptlmError if the checkpoint is of another model than the command's."""
    saved = asdict(shape_of_config(found.path / "config.json"))
    differences = [
        f"{name} {saved[name]} there, {value} in the command"
        for name, value in asdict(run.shape).items()
        if saved[name] != value
    ]
    if differences:
        raise GptlmError(
            f"the checkpoint {found.path} is of another model: {'; '.join(differences)}; give the same sizes, another "
            "--output_dir, or --overwrite_output_dir"
        )


def settings(run: Run) -> dict[str, Any]:
    """Settings that change later updates if a run resumes with other values."""
    training = run.training
    names = ("learning_rate", "min_learning_rate", "lr_scheduler_type", "warmup_steps", "decay_steps", "max_steps")
    more = ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon")
    return {name: getattr(training, name) for name in (*names, *more)} | {"global_batch_size": run.batch.total}


def log_changes(resume: Checkpoint, manifest: dict[str, dict[str, Any]]) -> None:
    """Log one line per setting that differs from the one recorded in the checkpoint."""
    for kind, meaning in (("order", "the samples to come are in another order"), ("settings", "the new value holds")):
        noted = resume.manifest.get(kind) or {}
        for name, value in manifest[kind].items():
            if name in UNNOTED and noted and name not in noted:
                logger.info("%s %s", resume.path.name, UNNOTED[name])
            elif noted and noted.get(name) != value:
                meant = MEANINGS.get(name, meaning)
                before, now = shown(noted.get(name)), shown(value)
                logger.warning("%s was %s in %s, is %s now: %s", name, before, resume.path.name, now, meant)
