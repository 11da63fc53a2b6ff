"""Adam's moments and float32 weights in PaddleNLP's `optimizer.pdopt` and FleetX's `model_state.pdopt`.

They are keyed by internal names (`linear_0.w_0_moment1_0`), which the weights' file maps its own names to
(`StructuredToParameterName@@`); under O2 moments are those of `..._fp32_master_0`. Sharding ranks keep a share each.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from gptlm.conversion.paddle import names as words
from gptlm.conversion.paddle.arrays import as_tensor
from gptlm.conversion.safe_pickle import read_pickle
from gptlm.errors import GptlmError

KINDS = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
MASTERS, SCHEDULE = "master_weights", "LR_Scheduler"


def states_of(path: Path, kind: str) -> dict[str, Tensor]:
    """The states of the weights in `path` by their own names; those that are not there are left out.

    Args:
        kind: "exp_avg", "exp_avg_sq" or "master".

    Raises:
        GptlmError: if there is no optimizer beside them, or the table of names is missing.
    """
    content, states = read_pickle(path), optimizer_of(path)
    table = dict(content.get(words.NAME_TABLE, {}))
    table |= {name: value[0] for name, value in content.items() if isinstance(value, tuple) and len(value) == 2}
    if not table:
        raise GptlmError(
            f"{path} has no {words.NAME_TABLE}, by which its optimizer is read; leave --with_optimizer out"
        )
    found: dict[str, Tensor] = {}
    for name, internal in table.items():
        if kind == "master":
            value = states.get(MASTERS, {}).get(internal)
        else:
            keys = [f"{internal}{middle}_{KINDS[kind]}_0" for middle in ("", "_fp32_master_0")]
            value = next((states[key] for key in keys if key in states), None)
        if value is not None:
            found[name] = as_tensor(value, f"{kind} of {name}", path)
    return found


def optimizer_of(path: Path) -> dict[str, Any]:
    """What the optimizer's files beside the weights in `path` hold, the shares of sharding ranks together.

    Raises:
        GptlmError: if there are none.
    """
    files = _files(path)
    if not files:
        raise GptlmError(f"there is no optimizer (.pdopt) beside {path}; convert without --with_optimizer")
    states: dict[str, Any] = {}
    for file in files:
        content = read_pickle(file)
        if not isinstance(content, dict):
            raise GptlmError(f"{file} holds no optimizer (a {type(content).__name__})")
        masters = states.get(MASTERS, {}) | (content.get(MASTERS) or {})
        states |= content
        states[MASTERS] = masters
    return states


def _files(path: Path) -> list[Path]:
    """For `model_state.RANKS.pdparams` `optimizer.RANKS[_shardNN].pdopt`, for `model.pdparams` `model_state.pdopt`."""
    if path.name.startswith("model_state"):
        ranks = path.name.removeprefix("model_state").removesuffix(".pdparams").removeprefix(".")
        shape = re.compile(rf"^optimizer\.?{re.escape(ranks)}[._]?(?:shard\d+)?\.pdopt$")
        return sorted(file for file in path.parent.glob("optimizer*.pdopt") if shape.match(file.name))
    own = path.name.replace("model", "model_state", 1).replace(".pdparams", ".pdopt")
    shards = [path.parent]
    if re.search(r"_sharding_\d+", path.parent.name):  # each sharding rank has a folder of its own
        shards = sorted(path.parent.parent.glob(re.sub(r"_sharding_\d+", "_sharding_*", path.parent.name)))
    return [folder / own for folder in shards if (folder / own).is_file()]
