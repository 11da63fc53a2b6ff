"""Adam's moments and float32 weights in Megatron's `model_optim_rng.pt`.

The optimizer numbers parameters group by group, in each in the order of the model's tensors; the groups are those with
weight decay (matrices and embeddings) and those without (biases and norms). In half precision `optimizer` wraps the
optimizer and keeps the float32 weights as `fp32_from_fp16_params`, group by group (megatron/optimizer/optimizer.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptlm.conversion.megatron import names as words
from gptlm.errors import GptlmError

MASTERS = "fp32_from_fp16_params"


def states_of(content: Mapping[str, Any], tensors: dict[str, Tensor], kind: str, path: Path) -> dict[str, Tensor]:
    """The states of `tensors`, which are the model of `content`, by the same names.

    Args:
        kind: "exp_avg", "exp_avg_sq" or "master".

    Raises:
        GptlmError: if there is no optimizer in it, or it is not of these tensors.
    """
    wrapper = _optimizer(content, path)
    inner = wrapper.get("optimizer", wrapper)
    groups = _names_by_group(tensors, [len(group["params"]) for group in inner["param_groups"]], path)
    found: dict[str, Tensor] = {}
    for number, names in enumerate(groups):
        if kind == "master":
            values = wrapper[MASTERS][number]
        else:
            values = [inner["state"][key][kind] for key in inner["param_groups"][number]["params"]]
        found |= dict(zip(names, values))
    for name, tensor in tensors.items():
        if name in found and found[name].shape != tensor.shape:
            raise GptlmError(
                f"{path}: {kind} of {name} is {tuple(found[name].shape)}, the weight {tuple(tensor.shape)}; its "
                "optimizer orders parameters in a way that is not known; convert without --with_optimizer"
            )
    return found


def has_masters(content: Mapping[str, Any]) -> bool:
    """Whether float32 copies of half-precision weights are kept."""
    return MASTERS in (content.get("optimizer") or {})


def adam_steps(content: Mapping[str, Any], path: Path) -> int:
    """Updates the moments have seen: fewer than iterations where float16 skipped some."""
    wrapper = _optimizer(content, path)
    inner = wrapper.get("optimizer", wrapper)
    steps = [group["step"] for group in inner["param_groups"] if "step" in group]
    steps += [state["step"] for state in inner["state"].values() if "step" in state]
    return int(steps[0]) if steps else int(content.get("iteration", 0))


def _optimizer(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    optimizer = content.get("optimizer")
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(inner, dict) or not {"state", "param_groups"} <= set(inner):
        raise GptlmError(
            f"{path} holds no optimizer that can be read (a distributed one lies apart in flat pieces, a release has "
            "none); convert without --with_optimizer"
        )
    return optimizer


def _names_by_group(tensors: dict[str, Tensor], sizes: list[int], path: Path) -> list[list[str]]:
    names = [name for name in tensors if not words.BUFFERS.search(name)]
    decayed = [name for name in names if tensors[name].ndim > 1 and not name.endswith(".bias")]
    plain = [name for name in names if name not in set(decayed)]
    for groups in ([decayed, plain], [names]):
        if [len(group) for group in groups] == sizes:
            return groups
    raise GptlmError(
        f"{path}: the optimizer has groups of {sizes} parameters, the model {len(decayed)} with weight decay and "
        f"{len(plain)} without; convert without --with_optimizer"
    )
