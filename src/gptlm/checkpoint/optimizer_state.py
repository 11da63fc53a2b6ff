"""The optimizer state in files that know nothing of ranks, ZeRO stages or precision.

`optimizer-00001.safetensors`, ... hold float32 tensors named `parameter|kind`: `exp_avg` and `exp_avg_sq` (AdamW's
moments) and, where the model's own weights are half precision, `master` (their float32 copies). Parameters have the
network's names and shapes, so any layout can take its part.

Of other optimizers everything in a parameter's state is stored, under its own name and in its own precision; numbers
are tensors without dimensions named `parameter|kind|number`. ZeRO's parts hold what has the parameter's shape, and a
step count.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptlm.errors import GptlmError
from gptlm.model.safetensors_io import LazyTensors, save_shards
from gptlm.model.shards import ShardedTensors
from gptlm.model.shards_index import is_sharded
from gptlm.parallel.deepspeed import gathered_parameters, to_cpu_float32
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import checkpoint_name, local_shard, own_boxes
from gptlm.upstream.deepspeed import (
    fill_own_state,
    fill_own_weight,
    flat_partitions,
    link_optimizer_state,
    own_state_range,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
NUMBER = "|number"
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
FILE_BYTES = 4 << 30  # tensors of one file; what a rank holds in host memory while it writes


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, writes: bool) -> None:
    """Write `tensors` as they come; every rank has to take them, one of them `writes`."""
    if writes:
        tensors = iter(tensors)
        floats = ((name, _to_file(name, tensor)) for name, tensor in tensors)
        try:
            save_shards(folder, floats, "optimizer-{:05d}.safetensors", FILE_BYTES)
        finally:
            deque(tensors, maxlen=0)  # after an error, too
    else:
        deque(tensors, maxlen=0)  # gathering them is collective


def _to_file(name: str, tensor: Tensor) -> Tensor:
    if name.rpartition("|")[2] in ("master", *MOMENTS):
        return to_cpu_float32(tensor)
    return tensor.detach().to("cpu", copy=True).contiguous()  # bitsandbytes shares its tables between parameters


def files(folder: Path) -> list[Path]:
    """The state files in `folder`."""
    return sorted(folder.glob("optimizer-*.safetensors"))


def gather(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """All state tensors of this process's parameters, without ZeRO's partition; every rank has to take them."""
    return _sharded(model, optimizer) if is_zero(optimizer) else _plain(model, optimizer)


def load(folder: Path, weights: Any, model: nn.Module, optimizer: Any, steps: int, mesh: Mesh | None = None) -> None:
    """Weights and state of the checkpoint in `folder` into any layout.

    Args:
        weights: gives the checkpoint's weights by name (`StoredWeights` or `StoredAdapters`).
        steps: optimizer steps the state has seen.
        mesh: which share of each tensor is this process's; None: all of it.

    Raises:
        GptlmError: if a tensor is missing or of another shape.
    """
    stored = StoredStates(folder, weights, mesh)
    if is_zero(optimizer):
        _load_sharded(stored, model, optimizer, steps)
    else:
        _load_plain(stored, model, optimizer, steps)


class StoredStates:
    """Tensors of a checkpoint by name, read one at a time: this process's share of each, as its own memory.

    Of a sharded checkpoint no more is read.

    Args:
        weights_only: weights are read themselves, not their masters.
    """

    def __init__(self, folder: Path, weights: Any, mesh: Mesh | None = None, *, weights_only: bool = False):
        self.folder, self.weights, self.mesh, self.weights_only = folder, weights, mesh, weights_only
        self.tensors: Mapping[str, Tensor] = (
            ShardedTensors(folder) if is_sharded(folder) else LazyTensors(files(folder))
        )

    def tensor(self, name: str, kind: str | None = None) -> Tensor:
        """The state `kind` of a parameter; None: the most precise copy there is of the parameter itself.

        Raises:
            GptlmError: if it is not there.
        """
        name, key = self._key(name, kind)
        if isinstance(self.tensors, ShardedTensors):
            shape, boxes = own_boxes(self.mesh, name, self.tensors.index.tensors[key].shape)
            return self.tensors.elements(key, boxes, 0, prod(shape)).view(shape)
        found = local_shard(self.mesh, name, self._whole(name, key))
        return found.clone() if self.mesh is None else found  # of a mapped file

    def part(self, name: str, kind: str | None, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of what `tensor` gives, which has to have `shape`.

        Raises:
            GptlmError: if it is not there, or of another shape.
        """
        name, key = self._key(name, kind)
        if isinstance(self.tensors, ShardedTensors):
            found, boxes = own_boxes(self.mesh, name, self.tensors.index.tensors[key].shape)
            values = None
        else:
            values = local_shard(self.mesh, name, self._whole(name, key))
            found, boxes = tuple(values.shape), []
        if found != tuple(shape):
            raise GptlmError(
                f"the checkpoint {self.folder} is of another model: {key} is {list(found)} instead of {list(shape)}"
            )
        if values is None:
            return self.tensors.elements(key, boxes, start, stop)  # type: ignore[attr-defined]
        return values.reshape(-1)[start:stop]

    def has_moments(self, name: str) -> bool:
        return f"{checkpoint_name(name)}|{MOMENTS[0]}" in self.tensors

    def kinds(self, name: str) -> list[str]:
        """What is stored of a parameter besides its master."""
        return [kind for kind in self._kinds.get(checkpoint_name(name), ()) if kind != "master"]

    @cached_property
    def _kinds(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key in self.tensors:
            name, mark, kind = key.partition("|")
            if mark:
                found.setdefault(name, []).append(kind)
        return found

    def _key(self, name: str, kind: str | None) -> tuple[str, str]:
        """The names of the parameter and of the tensor in the checkpoint."""
        name = checkpoint_name(name)
        master = f"{name}|master"
        has_master = not self.weights_only and master in self.tensors
        key = f"{name}|{kind}" if kind else master if has_master else name
        if key not in self.tensors and (kind or isinstance(self.tensors, ShardedTensors)):
            raise GptlmError(f"the checkpoint {self.folder} lacks {key}; resume from another checkpoint")
        return name, key

    def _whole(self, name: str, key: str) -> Tensor:
        """Of a checkpoint that is not sharded."""
        return self.weights.get(name) if key == name else self.tensors[key]


@torch.no_grad()
def load_weight(stored: StoredStates, name: str, parameter: nn.Parameter) -> None:
    """Put a weight of the checkpoint into `parameter`, or into this process's partition of it.

    Raises:
        GptlmError: if it is missing or of another shape.
    """
    if hasattr(parameter, "ds_id"):
        shape = parameter.ds_shape  # type: ignore[attr-defined]
        if fill_own_weight(parameter, partial(stored.part, name, None, shape)):
            return
    with gathered_parameters([parameter], write=True):
        parameter.data.copy_(stored.tensor(name))


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that training changes, by name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def is_zero(optimizer: Any) -> bool:
    """Whether it is a ZeRO optimizer of DeepSpeed."""
    return hasattr(optimizer, "loss_scaler") and not isinstance(optimizer, torch.optim.Optimizer)


def _has_masters(optimizer: Any) -> bool:
    """Whether it is a `MasterWeightAdamW`, which keeps float32 copies of half-precision weights."""
    return hasattr(optimizer, "masters")


def _is_count(kind: str) -> bool:
    return kind == "step" or kind.endswith(NUMBER)


def _is_adamw(optimizer: Any) -> bool:
    """Whether it is torch's AdamW or DeepSpeed's: state is the moments."""
    return isinstance(optimizer, torch.optim.Adam) or type(optimizer).__module__.startswith("deepspeed")


def local(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, str, Sequence[int], int, Tensor]]:
    """The state that this process keeps, as it lies in its memory; no collective operation.

    Yields:
        (parameter, kind, shape, start, values): values are the elements of a tensor of that shape from `start` on,
        which under tensor parallelism is a shard.
    """
    if not is_zero(optimizer):
        for name, value in _plain(model, optimizer):
            yield *name.split("|", 1), value.shape, 0, value.detach().reshape(-1)  # type: ignore[misc]
        return
    kinds, masters = _kinds_under_zero(model, optimizer)
    for name, parameter in trained(model):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        for kind in [*(["master"] if masters else []), *kinds]:
            own = own_state_range(optimizer, parameter, None if kind == "master" else kind)
            if own is not None:
                yield name, kind, shape, *own


# One process, or replicas that each hold everything ---------------------------------------------------------------


def _plain(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in trained(model):
        if _has_masters(optimizer):
            state = optimizer.tensors(parameter)
            kinds: tuple[str, ...] = ("master", *MOMENTS) if optimizer.updates else ("master",)
        elif _is_adamw(optimizer):
            state = optimizer.state.get(parameter, {})
            kinds = MOMENTS if state else ()
        else:
            state, kinds = _named_tensors(optimizer.state.get(parameter, {})), ()
            yield from ((f"{name}|{kind}", value) for kind, value in state.items())
        for kind in kinds:
            yield f"{name}|{kind}", state[kind]


def _named_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state of one parameter; numbers as tensors."""
    found = {kind: value for kind, value in state.items() if isinstance(value, Tensor)}
    numbers = {kind: value for kind, value in state.items() if isinstance(value, int | float)}
    return found | {
        f"{kind}{NUMBER}": torch.tensor(value, dtype=_NUMBERS[type(value)]) for kind, value in numbers.items()
    }


def _restored(stored: StoredStates, name: str, device: torch.device, steps: int, *, on_device: bool) -> dict[str, Any]:
    """The state of one parameter as `_named_tensors` wrote it; counts stay in host memory unless kernels read them."""
    found: dict[str, Any] = {}
    for kind in stored.kinds(name):
        value = stored.tensor(name, kind)
        if kind.endswith(NUMBER):
            found[kind.removesuffix(NUMBER)] = value.item()
        else:
            found[kind] = value.to(device) if value.ndim or on_device else value
    if "step" not in found:  # written under ZeRO; the element-wise optimizers count from 0 as AdamW does
        found["step"] = torch.tensor(float(steps), device=device if on_device else "cpu")
    return found


@torch.no_grad()
def _load_plain(stored: StoredStates, model: nn.Module, optimizer: Any, steps: int) -> None:
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for name, parameter in trained(model):
        parameter.copy_(weight := stored.tensor(name))
        if not _has_masters(optimizer) and not _is_adamw(optimizer):
            if steps and stored.kinds(name):
                optimizer.state[parameter] = _restored(stored, name, parameter.device, steps, on_device=fused)
            continue
        kinds = MOMENTS if steps and stored.has_moments(name) else ()
        if _has_masters(optimizer):
            optimizer.updates = steps
            own = optimizer.tensors(parameter)
            own["master"].copy_(weight)
            for kind in kinds:
                own[kind].copy_(stored.tensor(name, kind))
        elif kinds:
            step = torch.tensor(float(steps), device=parameter.device if fused else "cpu")
            moments = {kind: stored.tensor(name, kind).to(parameter.device) for kind in kinds}
            optimizer.state[parameter] = {"step": step, **moments}


# ZeRO ---------------------------------------------------------------------------------------------------------------


def _sharded(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    kinds, masters = _kinds_under_zero(model, optimizer)
    for name, parameter in trained(model):
        if masters:
            yield f"{name}|master", safe_get_full_fp32_param(parameter)
        for kind in kinds:
            yield f"{name}|{kind}", safe_get_full_optimizer_state(parameter, kind)


def _kinds_under_zero(model: nn.Module, optimizer: Any) -> tuple[Sequence[str], bool]:
    """What is kept of each parameter besides its float32 copy, and whether that is kept, too."""
    stepped = bool(optimizer.optimizer.state)  # not where float16 has skipped every step so far
    if stepped:
        link_optimizer_state(optimizer)
    kinds = MOMENTS if _is_adamw(optimizer.optimizer) else _kinds_of_parts(optimizer)
    return kinds if stepped else (), trained(model)[0][1].dtype != torch.float32


def _kinds_of_parts(optimizer: Any) -> list[str]:
    """What has the shape of the flat parts in the state of an element-wise optimizer."""
    found = [
        kind
        for part in flat_partitions(optimizer)[:1]
        for kind, value in optimizer.optimizer.state.get(part, {}).items()
        if isinstance(value, Tensor) and value.numel() == part.numel()
    ]
    return sorted(found)


@torch.no_grad()
def _load_sharded(stored: StoredStates, model: nn.Module, optimizer: Any, steps: int) -> None:
    inner, first = optimizer.optimizer, trained(model)[0][0]
    adamw = _is_adamw(inner)
    kinds = MOMENTS if adamw else tuple(kind for kind in stored.kinds(first) if not _is_count(kind))
    if steps and (adamw or kinds):
        for part in flat_partitions(optimizer):
            inner.state.pop(part, None)
            step: Any = steps if "CPU" in type(inner).__name__ else torch.tensor(float(steps), device=part.device)
            inner.state[part] = {"step": step, **{kind: torch.zeros_like(part.data) for kind in kinds}}
        link_optimizer_state(optimizer)
    for name, parameter in trained(model):
        own = kinds if steps and kinds and kinds[0] in stored.kinds(name) else ()
        shape = getattr(parameter, "ds_shape", parameter.shape)
        for kind in (None, *own):
            fill_own_state(optimizer, parameter, kind, partial(stored.part, name, kind, shape))
        load_weight(stored, name, parameter)
