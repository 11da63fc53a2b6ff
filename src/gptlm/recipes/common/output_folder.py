"""The output folder of a training run: what must not be in it, and what a new run removes from it."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.config.run import PretrainRun, Run, SftRun
from gptlm.data.corpora import parse_input
from gptlm.errors import GptlmError, named
from gptlm.training.metrics.results import of_other_models

logger = logging.getLogger(__name__)

MERGED = "merged"  # the folder in output_dir for --merge_weights
SHOWN = 5  # names in a message


def check_own_files(run: Run) -> None:
    """Check that the run replaces no file that it reads, and none that gptlm did not write.

    Raises:
        GptlmError: naming the folder or the files.
    """
    output_dir = Path(run.training.output_dir or "")
    if not output_dir.is_dir():
        return
    files = owned.listing(output_dir)
    if run.training.do_train:
        _check_inputs(run, output_dir, is_run=any(entry.key is None for entry in files.values()))
    foreign = [name for name in _written_names(run, output_dir) if owned.entry_of(output_dir, name, files) is None]
    if foreign:
        raise GptlmError(
            f"{named('output_dir')} {output_dir}: {some_of(foreign)} would be replaced, and gptlm did not write "
            f"{'it' if len(foreign) == 1 else 'them'}; move {'it' if len(foreign) == 1 else 'them'} elsewhere, or give "
            f"another {named('output_dir')}"
        )


def some_of(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more


def _written_names(run: Run, output_dir: Path) -> Iterator[str]:
    """The files in `output_dir` whose names the run writes to."""
    merges = isinstance(run, SftRun) and run.lora.lora and run.lora.merge_weights
    for folder in (output_dir, *([output_dir / MERGED] if merges else [])):
        for path in folder.iterdir() if folder.is_dir() else ():
            name = path.relative_to(output_dir).as_posix()
            is_result = name.endswith("_results.json")
            if not owned.RUN_FILES.fullmatch(name) or name == MERGED:
                continue
            if run.training.do_train or name == "results_of.json" or (is_result and run.evaluated is None):
                yield name


def _check_inputs(run: Run, output_dir: Path, *, is_run: bool) -> None:
    removes = run.training.overwrite_output_dir
    for flag, what, path in inputs_of(run):
        if not path.exists():
            continue
        folder = path.resolve() if path.is_dir() else path.resolve().parent
        if folder == output_dir.resolve() and not is_run:
            raise GptlmError(
                f"{named('output_dir')} {output_dir} is the folder of the {what} ({named(flag)} {path}), and holds no "
                f"run of gptlm; give another {named('output_dir')}, which may lie in it"
            )
        if folder == output_dir.resolve() and removes and what != "data":
            raise GptlmError(
                f"{named('overwrite_output_dir')} would remove the {what} that the run reads ({named(flag)} {path}); "
                f"give another {named('output_dir')}"
            )
        if folder == (output_dir / MERGED).resolve() and isinstance(run, SftRun) and run.lora.merge_weights:
            raise GptlmError(
                f"{named('merge_weights')} would replace the {what} that the run reads ({named(flag)} {path}); give "
                f"another {named('output_dir')}"
            )


def inputs_of(run: Run) -> Iterator[tuple[str, str, Path]]:
    """What the run reads: flag, what it is, and where; names of the hub are among the paths.

    Raises:
        GptlmError: if the folder with token files does not exist or has none.
    """
    yield from _models_of(run)
    if isinstance(run, SftRun):
        for flag in ("dataset_name_or_path", "eval_dataset_name_or_path"):
            if name := getattr(run.data, flag):
                yield flag, "data", Path(name)
    elif isinstance(run, PretrainRun) and not run.data.input_dir:
        if text := run.data.train_file or run.data.dataset_name:
            yield "train_file" if run.data.train_file else "dataset_name", "data", Path(text)
        if run.data.validation_file:
            yield "validation_file", "data", Path(run.data.validation_file)
    elif isinstance(run, PretrainRun):
        for _, prefix in parse_input(run.data.input_dir or ""):
            yield "input_dir", "data", Path(prefix).parent


def _models_of(run: Run) -> Iterator[tuple[str, str, Path]]:
    for name in dict.fromkeys((run.model.model_name_or_path, run.source.weights)):
        if name:
            yield "model_name_or_path", "model", Path(name)
    if run.model.tokenizer_name_or_path:
        yield "tokenizer_name_or_path", "tokenizer", Path(run.model.tokenizer_name_or_path)
    if isinstance(run, SftRun) and run.lora.lora_path:
        yield "lora_path", "adapters", Path(run.lora.lora_path)


def read_checkpoints(run: Run) -> frozenset[str]:
    """The names of the checkpoints in the output folder that the run reads its model, adapters or tokenizer from."""
    output_dir = Path(run.training.output_dir or "").resolve()
    found = (path.resolve() for _, _, path in _models_of(run))
    return frozenset(path.name for path in found if path.parent == output_dir and checkpoint.PATTERN.match(path.name))


def clear_output(run: Run, resume: checkpoint.Checkpoint | None) -> None:
    """Remove interrupted saves, rename checkpoints newer than the resumed one, with overwrite_output_dir remove all."""
    output_dir, read = Path(run.training.output_dir or ""), read_checkpoints(run)
    checkpoint.remove_leftovers(output_dir)
    for left in checkpoint.set_aside(output_dir, resume.manifest.global_step, read) if resume else ():
        name = left.name.removeprefix("left-")
        logger.warning("%s is newer than the resumed checkpoint; renamed to %s", name, left)
    if run.training.overwrite_output_dir:
        _remove_run(output_dir, read)


def _remove_run(output_dir: Path, read: frozenset[str]) -> None:
    """Remove what runs wrote into `output_dir`, but no results of other models and no checkpoint that is read."""
    files = {name for name, entry in owned.listing(output_dir).items() if entry.key is None}
    names = {name.split("/")[0] for name in files - of_other_models(output_dir, files)} - read
    found = sorted(name for name in names if os.path.lexists(output_dir / name))
    removed = [name for name in found if owned.remove(output_dir, name)]
    if removed:
        logger.info("removed from %s (overwrite_output_dir): %s", output_dir, ", ".join(removed))
    for name in sorted({*found} - {*removed}):
        logger.warning("%s holds files that gptlm did not write; they stay", output_dir / name)
