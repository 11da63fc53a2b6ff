"""Fine-tuning's evaluation without training: which model it means, the trained one in output_dir or another."""

import json
from pathlib import Path

from gptlm.config.parser import Parsed
from gptlm.errors import GptlmError, named
from gptlm.model.adapter_files import is_adapter, settings_of
from gptlm.model.presets import has_weights

RUN_FILE = "run.json"
ORIGIN = "derived: the model in output_dir"


def take_trained(parsed: Parsed) -> None:
    """Without training, the model (or adapters) in output_dir is meant, unless the command names another model.

    The command of a finished run without --do_train names the model that the run started from: it means the result.

    Raises:
        GptlmError: if the adapters in output_dir are damaged.
    """
    values = parsed.values
    folder = Path(values["output_dir"] or "")
    if values["do_train"] or not values["do_eval"] or not values["output_dir"] or values["lora_path"]:
        return
    adapters = is_adapter(folder)
    if not adapters and not has_weights(folder):
        return
    start = settings_of(folder).get("base_model_name_or_path") if adapters else None
    if parsed.sources["model_name_or_path"] != "default" and not _is_start(values["model_name_or_path"], folder, start):
        parsed.note(
            f"{values['model_name_or_path']} is evaluated, not the model trained in {folder}; leave "
            f"--{named('model_name_or_path')} out to evaluate that one"
        )
        return
    what = "its model with the adapters" if adapters else "the model"
    parsed.note(f"{what} trained in {folder} is evaluated, as nothing is trained (--{named('do_train')})")
    if not adapters:
        parsed.set("model_name_or_path", str(folder), ORIGIN)
        if values["lora"]:
            parsed.set("lora", False, ORIGIN)
            parsed.note(f"--{named('lora')} has no effect: {folder} holds a whole model, no adapters")
    else:
        parsed.set("lora_path", str(folder), ORIGIN)
        if parsed.sources["model_name_or_path"] == "default":
            if not start:
                raise GptlmError(f"the adapters in {folder} do not name their model: give --model_name_or_path")
            parsed.set("model_name_or_path", start, "derived: the model of the adapters in output_dir")


def _is_start(name: str, folder: Path, base: str | None) -> bool:
    """Whether `name` is the model that the run in `folder` started from, or that folder itself."""
    try:
        noted = json.loads((folder / RUN_FILE).read_text(encoding="utf-8")).get("model_name_or_path")
    except (OSError, ValueError, AttributeError):
        noted = None
    same = [name == other or Path(name).resolve() == Path(other).resolve() for other in (noted, base) if other]
    return any(same) or Path(name).resolve() == folder.resolve()
