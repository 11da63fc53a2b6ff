"""`--tensor_parallel_degree` of `gptlm evaluate` and `gptlm predict`: what has to fit before weights are loaded."""

from collections.abc import Iterator
from math import gcd
from pathlib import Path

from gptlm.config.problem import Problem
from gptlm.errors import GptlmError, named
from gptlm.model.adapter_files import base_and_adapters, base_hint, check_fit
from gptlm.model.files import shape_of_config
from gptlm.model.hub import hub_config, is_hub_id
from gptlm.model.presets import PRESETS, Shape

FLAG = "tensor_parallel_degree"


def process_problems(degree: int, processes: int, command: str, *, replicas: bool) -> Iterator[Problem]:
    """Processes that `degree` does not divide.

    Args:
        replicas: whether several replicas of the model share the work.
    """
    fits = processes % degree == 0 if replicas else processes in (1, degree)
    if degree > 1 and (processes == 1 or not fits):
        start = degree if not replicas else max(processes // degree, 1) * degree
        found = "this is one process" if processes == 1 else f"there are {processes} processes"
        more = "" if replicas else ", and prediction has no data parallelism"
        yield Problem(
            FLAG, f"{degree}: {found}{more}; start {start}: torchrun --nproc_per_node {start} -m gptlm {command} ..."
        )


def split_problems(degree: int, name: str, lora_path: str | None, shape: Shape) -> Iterator[Problem]:
    """What makes the model `name` with adapters or sizes that cannot be split over `degree` processes."""
    if degree == 1:
        return
    _, adapters = base_and_adapters(name, lora_path)
    if adapters:
        yield Problem(
            FLAG,
            f"{degree}: the adapters in {lora_path or name} are not split over processes; make a model of them and "
            f"their base first: gptlm merge-lora --lora_path {lora_path or name} --output_path DIR",
        )
    heads, inner = shape.num_attention_heads, shape.intermediate_size
    if heads % degree or inner % degree:
        common = gcd(heads, inner)
        fitting = [str(number) for number in range(1, common + 1) if common % number == 0]
        yield Problem(
            FLAG,
            f"{degree} does not divide the {heads} attention heads and the feed-forward width {inner} of {name}; give "
            f"one of {', '.join(fitting)}",
        )


def find_shape(name: str, lora_path: str | None) -> Shape:
    """The sizes of the model `name`, from its config.json or the preset; adapters must have these sizes.

    Raises:
        GptlmError: if there is no such model, or its config cannot be read.
    """
    base, adapters = base_and_adapters(name, lora_path)
    if Path(base).is_dir():
        shape = shape_of_config(Path(base) / "config.json")
    elif base in PRESETS:
        if PRESETS[base].hub_id is None:
            raise GptlmError(f"no weights were ever published for {base}, it is a size only; give a trained folder")
        shape = PRESETS[base].shape
    elif is_hub_id(base):
        shape = shape_of_config(hub_config(base))
    else:
        hint = base_hint((lora_path or name) if adapters else None)
        raise GptlmError(
            f"{named('model_name_or_path')} {base!r} is neither a folder nor a built-in name{hint}; a model of the "
            "hub is OWNER/NAME"
        )
    if adapters:
        check_fit(Path(adapters), shape)
    return shape
