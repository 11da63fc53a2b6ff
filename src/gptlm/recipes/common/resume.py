"""Where a training run starts: the output folder, the checkpoint to resume from, and what has changed since."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.folder import Checkpoint
from gptlm.checkpoint.task import LORA, PRETRAIN, name_of, own_folder, task_of
from gptlm.config.parser import shown
from gptlm.config.run import Run
from gptlm.conversion.trainer_checkpoint import is_trainer_checkpoint
from gptlm.disk import new_folders
from gptlm.errors import GptlmError, named, reason_of
from gptlm.locks import locked
from gptlm.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS, WEIGHTS_INDEX, shape_of_config
from gptlm.owned import RUN_LOG
from gptlm.ranks import is_main_process
from gptlm.recipes.common.main_process_first import told_by_main
from gptlm.recipes.common.output_folder import read_checkpoints
from gptlm.recipes.common.peers import Peers
from gptlm.recipes.common.shared_folder import check_shared

logger = logging.getLogger(__name__)

SAMPLED = "sampled_content"  # of the token files: blocks of them
MEANINGS = {SAMPLED: "the token files were changed, the samples to come are of other text"}
LATER = {  # settings that older checkpoints do not note, which were trained without them
    "optim": "adamw",
    "optim_args": None,
    "lr_scheduler_kwargs": None,
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
}
UNNOTED = {SAMPLED: "does not note the content of the token files: whether they are still the same is not checked"}


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
def lock_output(run: Run, peers: Peers | None) -> Iterator[None]:
    """Lock `output_dir` against other runs. The lock of a killed process is released by the OS.

    If the run ends by an error or a signal before it has written anything, a new folder is removed.

    Raises:
        GptlmError: if another run does, or the nodes do not share the folder.
    """
    if not run.training.do_train:
        yield
        return
    if not is_main_process():
        check_shared(run, peers)
        yield
        return
    output_dir = Path(run.training.output_dir or "")
    with new_folders(output_dir), ExitStack() as stack:
        try:
            stack.enter_context(locked(output_dir / ".lock"))
        except BlockingIOError:
            raise GptlmError(
                f"another run is writing into {output_dir}; wait until it ends, or give another --output_dir"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no second run there", output_dir, reason_of(error))
        check_shared(run, peers)
        yield


def find_resume_checkpoint(
    run: Run, check: Callable[[Any, Checkpoint], None], peers: Peers | None
) -> Checkpoint | None:
    """The checkpoint to resume from; None starts at step 0. `check` raises where one is not of this run's model.

    Args:
        peers: of `find_peers`: rank 0 reads the files and tells the others.

    Raises:
        GptlmError: if the requested one is missing or damaged, or starting anew would replace a finished model.
    """
    training = run.training
    output_dir = Path(training.output_dir or "")
    if not training.do_train or training.overwrite_output_dir:
        return None
    asked = training.resume_from_checkpoint
    path = told_by_main(peers, "the checkpoint to resume from", lambda: _choose(run))
    found = checkpoint.read(Path(path)) if path else None
    if found is not None and _asked_folder(run) is not None:
        _check_task(run, found)
        if is_complete(run, found) and checkpoint.folders(output_dir):
            raise GptlmError(
                f"nothing is left to train after {found.path}, and {output_dir} holds a run of its own, whose model "
                f"would be replaced; give another {named('output_dir')}, or leave {named('resume_from_checkpoint')} out"
            )
    if found is None:
        if any((output_dir / name).exists() for name in (WEIGHTS, WEIGHTS_INDEX, ADAPTER_WEIGHTS)):
            raise GptlmError(
                f"{output_dir} holds a model but no checkpoint to resume from; give another --output_dir, or "
                "--overwrite_output_dir to replace it"
            )
        if asked or (output_dir / RUN_LOG).exists():
            logger.info(
                "no checkpoint in %s yet: training starts at step 0 (--save_strategy and --save_steps set when one is "
                "saved)",
                output_dir,
            )
    elif found.manifest.weights_only and not training.ignore_load_lr_and_optim:
        raise GptlmError(
            f"the checkpoint {found.path} holds weights only (ignore_save_lr_and_optim); start a new run from it with "
            f"--model_name_or_path {found.path} --continue_training and another --output_dir, or resume with "
            "--ignore_load_lr_and_optim"
        )
    else:
        check(run, found)
    return found


def _choose(run: Run) -> str | None:
    """The folder of the undamaged checkpoint to resume from; its files are read once, by one process.

    Raises:
        GptlmError: if the requested one is missing or damaged, or all are damaged.
    """
    path, output_dir = _asked_folder(run), Path(run.training.output_dir or "")
    if path is not None and not _holds_checkpoints(path):
        try:
            found = checkpoint.read(path)
            checkpoint.check_content(found)
        except GptlmError as error:
            if is_trainer_checkpoint(path):
                raise GptlmError(_start_from_trainer(path)) from error
            advice = f"; give another one with {named('resume_from_checkpoint')}" if path.is_dir() else ""
            raise GptlmError(f"{error.marked}{advice}") from error
    else:
        newest, skipped = checkpoint.newest(path or output_dir, () if path else read_checkpoints(run))
        for reason in skipped:
            logger.warning("%s; it is skipped", reason)
        if newest is None and skipped:
            advice = (
                f"give another {named('resume_from_checkpoint')}"
                if path
                else f"repair or remove them, or start anew with {named('overwrite_output_dir')}"
            )
            raise GptlmError(
                f"none of the {len(skipped)} checkpoints in {path or output_dir} is complete ({skipped[0]}); {advice}"
            )
        if newest is None:
            return None
        found = newest
    if found.manifest.checksums is None:
        logger.info("%s has no checksums: damage that keeps the size of a file is not noticed", found.path.name)
    return str(found.path)


def _start_from_trainer(path: Path) -> str:
    """How a checkpoint of transformers' own Trainer in `path` is used."""
    what = f"the checkpoint {path} was written by transformers' Trainer"
    if (path / ADAPTER_CONFIG).is_file():
        return f"{what}: give its adapters as --lora --lora_path {path} instead; their optimizer state is not read"
    return (
        f"{what}: with its optimizer state, first run gptlm convert --from {path} --with_optimizer --output DIR, then "
        f"this command with --output_dir DIR; for its weights alone, give --model_name_or_path {path} instead"
    )


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


def _holds_checkpoints(asked: Path) -> bool:
    """Whether the folder is not a checkpoint itself, but one of several."""
    return asked.is_dir() and not (asked / checkpoint.MANIFEST).exists() and bool(checkpoint.folders(asked))


def is_complete(run: Run, found: Checkpoint | None) -> bool:
    """Whether nothing is left to train after the checkpoint `found`."""
    return found is not None and found.manifest.global_step >= run.training.max_steps


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
    kinds = ("optim", "optim_args", "lr_scheduler_kwargs", "label_smoothing_factor", "neftune_noise_alpha")
    return {name: getattr(training, name) for name in (*names, *more, *kinds)} | {"global_batch_size": run.batch.total}


def is_same_order(resume: Checkpoint, order: dict[str, Any]) -> bool:
    """Whether the samples to come are those that the checkpoint would have read, by all that it notes."""
    noted = resume.manifest.order
    return all(noted.get(name) == value for name, value in order.items() if name not in UNNOTED or name in noted)


def log_changes(resume: Checkpoint, manifest: dict[str, dict[str, Any]]) -> None:
    """Log one line per setting that differs from the one recorded in the checkpoint."""
    for kind, meaning in (("order", "the samples to come are in another order"), ("settings", "the new value holds")):
        noted = getattr(resume.manifest, kind)
        noted = noted and (LATER | noted if kind == "settings" else noted)
        for name, value in manifest[kind].items():
            if name in UNNOTED and noted and name not in noted:
                logger.info("%s %s", resume.path.name, UNNOTED[name])
            elif noted and noted.get(name) != value:
                meant = MEANINGS.get(name, meaning)
                before, now = shown(noted.get(name)), shown(value)
                logger.warning("%s was %s in %s, is %s now: %s", name, before, resume.path.name, now, meant)
