"""Fine-tuning's evaluation without training: which model it means, the trained one in output_dir or another."""

import json
from pathlib import Path

from gptlm.config.parser import Parsed
from gptlm.errors import GptlmError, named
from gptlm.model.adapter_files import is_adapter, settings_of
from gptlm.model.files import has_weights

RUN_FILE = "run.json"
MANIFEST = "manifest.json"  # only whole checkpoints have one
ORIGIN = "derived: the model in output_dir"


def take_trained(parsed: Parsed) -> None:
    """Without training, the model (or adapters) in output_dir is meant, unless the command names another model.

    The command of a run without --do_train names the model that the run started from: it means the result, and of a
    run that has not ended its newest checkpoint.

    Raises:
        GptlmError: if the adapters in output_dir are damaged.
    """
    values = parsed.values
    if values["do_train"] or not values["do_eval"] or not values["output_dir"] or values["lora_path"]:
        return
    folder = Path(values["output_dir"])
    trained = _trained_in(folder)
    if trained is None:
        return
    adapters = is_adapter(trained)
    start = settings_of(trained).get("base_model_name_or_path") if adapters else None
    named_model = parsed.sources["model_name_or_path"] != "default"
    if named_model and not _is_start(values["model_name_or_path"], folder, trained, start):
        parsed.note(
            f"{values['model_name_or_path']} is evaluated, not the model trained in {folder}; leave "
            f"--{named('model_name_or_path')} out to evaluate that one"
        )
        return
    what = "its model with the adapters" if adapters else "the model"
    unfinished = "" if trained == folder else f"; the run has not ended, its newest checkpoint is {trained.name}"
    parsed.note(f"{what} trained in {folder} is evaluated, as nothing is trained (--{named('do_train')}){unfinished}")
    if not adapters:
        parsed.set("model_name_or_path", str(trained), ORIGIN)
        if values["lora"]:
            parsed.set("lora", False, ORIGIN)
            parsed.note(f"--{named('lora')} has no effect: {trained} holds a whole model, no adapters")
    else:
        parsed.set("lora_path", str(trained), ORIGIN)
        if not named_model:
            if not start:
                raise GptlmError(f"the adapters in {trained} do not name their model: give --model_name_or_path")
            parsed.set("model_name_or_path", start, "derived: the model of the adapters in output_dir")


def _trained_in(folder: Path) -> Path | None:
    """`folder` if it holds a finished model or adapters, else the newest whole checkpoint in it."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    whole = [path for path, number in numbers.items() if number.isdigit() and (path / MANIFEST).is_file()]
    newest = sorted(whole, key=lambda path: -int(numbers[path]))
    return next((path for path in (folder, *newest) if is_adapter(path) or has_weights(path)), None)


def _is_start(name: str, folder: Path, trained: Path, base: str | None) -> bool:
    """Whether `name` is the model that the run in `folder` started from, or what it has trained."""
    try:
        noted = json.loads((trained / RUN_FILE).read_text(encoding="utf-8")).get("model_name_or_path")
    except (OSError, ValueError, AttributeError):
        noted = None
    same = [name == other or Path(name).resolve() == Path(other).resolve() for other in (noted, base) if other]
    return any(same) or Path(name).resolve() in (folder.resolve(), trained.resolve())
