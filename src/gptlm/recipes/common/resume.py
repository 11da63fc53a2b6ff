"""Where a training run starts: whether its folder can be written, which checkpoint it goes on from, what changed."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gptlm.checkpoint import folder as checkpoint
from gptlm.config.parser import shown
from gptlm.config.run import Run
from gptlm.errors import GptlmError
from gptlm.model.files import shape_of_config
from gptlm.ranks import is_main_process

logger = logging.getLogger(__name__)

MEANINGS = {"content": "the token files were changed, the samples to come are of other text"}
UNNOTED = {"content": "does not note the content of the token files: whether they are still the same is not checked"}


def check_output(flag: str, folder: Path) -> None:
    """Find out now, not at the first checkpoint, that nothing can be written.

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
def output_locked(run: Run) -> Iterator[None]:
    """No other run writes into `output_dir` meanwhile; a killed one leaves no lock behind.

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
            f"another run is writing into {output_dir}; wait for its end, or give another --output_dir"
        ) from None
    except (NotImplementedError, OSError) as error:
        logger.warning("%s cannot be locked (%s): start no second run there", output_dir, error)
    try:
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def starting_point(run: Run, check: Callable[[Any, checkpoint.Checkpoint], None]) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from; None starts at step 0. `check` raises where one is not of this run's model.

    Raises:
        GptlmError: if the one asked for is missing or damaged, or starting anew would replace a finished model.
    """
    training = run.training
    output_dir = Path(training.output_dir or "")
    if not training.do_train or training.overwrite_output_dir:
        return None
    asked = training.resume_from_checkpoint
    found: checkpoint.Checkpoint | None
    if asked and asked.lower() not in ("true", "1", "yes"):
        found = checkpoint.read(_newest_below(Path(asked)))
    else:
        found, passed_over = checkpoint.newest(output_dir)
        for reason in passed_over:
            logger.warning("%s; it is passed over", reason)
        if found is None and passed_over:
            raise GptlmError(
                f"none of the {len(passed_over)} checkpoints in {output_dir} is whole ({passed_over[0]}); mend "
                "or remove them, or start anew with --overwrite_output_dir"
            )
    if found is None:
        if any((output_dir / name).exists() for name in ("model.safetensors", "adapter_model.safetensors")):
            raise GptlmError(
                f"{output_dir} holds a model but no checkpoint to go on from; give another --output_dir, or "
                "--overwrite_output_dir to replace it"
            )
        if asked:
            logger.info("no checkpoint in %s yet: training starts at step 0", output_dir)
    elif found.facts["weights_only"] and not training.ignore_load_lr_and_optim:
        raise GptlmError(
            f"the checkpoint {found.path} holds weights only (ignore_save_lr_and_optim); start a new run from it with "
            f"--model_name_or_path {found.path} --continue_training and another --output_dir, or go on with "
            "--ignore_load_lr_and_optim"
        )
    else:
        check(run, found)
    return found


def _newest_below(asked: Path) -> Path:
    """`asked`, or the newest whole checkpoint in it where it is a folder of them."""
    if not asked.is_dir() or (asked / checkpoint.MANIFEST).exists():
        return asked
    found, passed_over = checkpoint.newest(asked)
    for reason in passed_over:
        logger.warning("%s; it is passed over", reason)
    return found.path if found else asked


def check_shape(run: Run, found: checkpoint.Checkpoint) -> None:
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
    """What changes the updates to come when a run goes on under other flags."""
    training = run.training
    names = ("learning_rate", "min_learning_rate", "lr_scheduler_type", "warmup_steps", "decay_steps", "max_steps")
    more = ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon")
    return {name: getattr(training, name) for name in (*names, *more)} | {"global_batch_size": run.batch.total}


def say_changes(start: checkpoint.Checkpoint, facts: dict[str, dict[str, Any]]) -> None:
    """One line per value that is not what it was when the checkpoint was written, as far as that was noted."""
    for kind, meaning in (("order", "the samples to come are in another order"), ("settings", "the new value holds")):
        noted = start.facts.get(kind) or {}
        for name, value in facts[kind].items():
            if name in UNNOTED and noted and name not in noted:
                logger.info("%s %s", start.path.name, UNNOTED[name])
            elif noted and noted.get(name) != value:
                meant = MEANINGS.get(name, meaning)
                before, now = shown(noted.get(name)), shown(value)
                logger.warning("%s was %s in %s, is %s now: %s", name, before, start.path.name, now, meant)
