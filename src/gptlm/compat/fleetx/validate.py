"""Checks of a FleetX configuration. The first line of a message with two is the original's text."""

import difflib
from collections.abc import Iterator
from pathlib import Path

from gptlm.compat.fleetx import keys
from gptlm.compat.fleetx.load import Configuration, matching

DEVICES = ["gpu", "xpu", "rocm", "npu", "cpu", "mlu"]
GRANULARITIES = ("full", "full_attn", "core_attn", "only_attn")
CALCULATED = (
    "Engine.eval_freq",
    "Engine.eval_iters",
    "Engine.test_iters",
    "Engine.save_load.save_steps",
    "Engine.num_train_epochs",
)


def is_auto(configuration: Configuration) -> bool:
    """Whether the file is one of tools/auto.py, whose batch arithmetic differs."""
    module = str(configuration.value("Model.module", ""))
    return module.endswith("Auto") or bool({"auto", "auto_parallel"} & set(Path(configuration.path).parts))


def unknown_keys(configuration: Configuration) -> Iterator[str]:
    names = (*keys.TRAINING_RENAMED, *keys.SETTLED, *keys.EVALUATION_RENAMED, *keys.GENERATION_RENAMED)
    for key, leaf in configuration.leaves.items():
        emptied = leaf.value is None and any(name.startswith(f"{key}.") for name in names)  # a section without keys
        if key in names or key in keys.TRAINING_IGNORED or emptied:
            continue
        # of a section that is ignored as a whole (Generation in training), only what is nearly a known key is wrong
        is_ignored = matching(key, keys.TRAINING_IGNORED) is not None
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.9 if is_ignored else 0.6)
        if near or not is_ignored:
            yield f"{configuration.typed(key)} is unknown{f'; did you mean {near[0]}?' if near else '; remove it'}"
    module = configuration.value("Model.module")
    if module is not None and str(module) not in keys.MODULES:
        yield f"{configuration.typed('Model.module')} {module}: expected one of {', '.join(keys.MODULES)}"


def problems_of(configuration: Configuration) -> Iterator[str]:
    yield from unknown_keys(configuration)
    value, typed = configuration.value, configuration.typed
    device = str(value("Global.device", "gpu")).lower()
    if device.split(":")[0] not in DEVICES:
        yield (
            f"device({device}) is not in {DEVICES},\n"
            f"Please ensure the config option {typed('Global.device')} is one of these devices; gptlm runs on gpu and "
            "cpu"
        )
    granularity = value("Model.recompute_granularity")
    if granularity is not None and granularity not in GRANULARITIES:
        yield (
            f"recompute_granularity can be only chosen from full or only_attn, but received {granularity}\n"
            f"  {typed('Model.recompute_granularity')}: expected {', '.join(GRANULARITIES)}"
        )
    yield from _layers_problem(configuration)
    optimizer, name = value("Optimizer.name", "AdamW"), value("Optimizer.lr.name", keys.SCHEDULE)
    known = keys.SAME["Optimizer.name"]
    if optimizer not in known:
        expected = ", ".join(map(str, known))
        yield f"{typed('Optimizer.name')} {optimizer}: expected {expected}, all of which are AdamW here"
    if name not in keys.SCHEDULE_NAMES and value("Model.module") != "GPTFinetuneModule":
        yield f"{typed('Optimizer.lr.name')} {name}: expected {keys.SCHEDULE}"
    yield from _numbers(configuration)
    degree, groups = value("Distributed.sharding.sharding_degree", 1), value("Distributed.dp_degree")
    if is_auto(configuration) and isinstance(groups, int) and isinstance(degree, int) and groups % max(degree, 1):
        yield f"dp_degree[{groups}] should be divided by sharding_degree[{degree}].\n  {typed('Distributed.dp_degree')}"


def _numbers(configuration: Configuration) -> Iterator[str]:
    """Keys that enter calculations before the parser sees them, and numbers that YAML reads as text."""
    for key in keys.TRAINING_RENAMED:
        value = configuration.value(key)
        if isinstance(value, str) and value.isdigit():  # 010 is neither octal nor ten
            yield f"{configuration.typed(key)} {value!r}: expected a whole number"
    for key in (*CALCULATED, "Engine.max_steps", "Distributed.dp_degree", "Distributed.sharding.sharding_degree"):
        value = configuration.value(key)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if value is not None and (isinstance(value, bool) or not whole):
            yield f"{configuration.typed(key)} {value!r}: expected a whole number"


def _layers_problem(configuration: Configuration) -> Iterator[str]:
    layers, typed = configuration.value("Model.no_recompute_layers"), configuration.typed("Model.no_recompute_layers")
    count = configuration.value("Model.num_layers")
    if layers is None:
        return
    if not isinstance(layers, (list, tuple)):
        yield f"no_recompute_layers should be a list\n  {typed}: {layers!r}; write [{layers}]"
    elif any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        yield f"all values in no_recompute_layers should be an integer\n  {typed}: {layers}"
    elif layers and min(layers) < 0:
        yield f"the min value in no_recompute_layers should >= 0\n  {typed}: {min(layers)}"
    elif layers and isinstance(count, int) and max(layers) >= count:
        yield f"the max value in no_recompute_layers should < num_layers\n  {typed}: {max(layers)}, num_layers {count}"
