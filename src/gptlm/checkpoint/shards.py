"""Sharded checkpoints: which parts of which tensors each process writes, and the index of all of them.

    weights-00001-of-00004.safetensors     the first process's parts of the weights
    optimizer-00001-of-00004.safetensors   its parts of the optimizer's state; not with save_only_model
    shards.json                            model/shards_index.py: where each part belongs

Processes write what they hold: under tensor and pipeline parallelism their shards, under ZeRO their partitions. What
several processes hold alike (the weights of replicas, under ZeRO stages 1 and 2, too) is divided evenly among them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlm.checkpoint import optimizer_state
from gptlm.checkpoint.agreement import agree
from gptlm.errors import GptlmError
from gptlm.model.files import SHARDS_INDEX
from gptlm.model.shards_index import STEP, Box, Entry, Index, Part, index_text, is_weight, parse_index, size_of
from gptlm.model.tensor_files import NAMES, write_file
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import OUTPUT, checkpoint_name, full_shape, own_boxes, split_of
from gptlm.upstream.deepspeed import own_weight_range, partition_count

FLOATS = ("master", *optimizer_state.MOMENTS)  # stored in float32 whatever they are in memory


@dataclass
class Held:
    """A part of a tensor that this process writes.

    Attributes:
        shape: of the full tensor.
        box, start: `values` are the elements of that box from `start` on.
        values: (n,), a view of the process's own memory, on any device.
    """

    name: str
    shape: list[int]
    box: Box
    start: int
    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        return torch.float32 if self.name.rpartition("|")[2] in FLOATS else self.values.dtype


@dataclass(frozen=True)
class Written:
    """What one process has written: its files with their checksums, and its parts with shape and dtype."""

    checksums: dict[str, str]
    parts: list[tuple[str, list[int], str, Part]]


def held_parts(model: nn.Module, optimizer: Any, mesh: Mesh | None, *, weights_only: bool = False) -> list[Held]:
    """The parts that this process writes; no collective operation, no copy.

    Args:
        optimizer: as `optimizer_state.gather` takes it.
    """
    replica, replicas = 0, dist.get_world_size() if dist.is_initialized() else 1
    if mesh is not None:
        replica, replicas = mesh.data_rank, mesh.dims.data
    elif replicas > 1:
        replica = dist.get_rank()
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    whole, partitioned, states = list[Held](), list[Held](), list[Held]()
    for name, parameter in optimizer_state.trained(model):
        own = own_weight_range(parameter)
        start, values = (0, parameter.detach().reshape(-1)) if own is None else own
        shape = parameter.shape if own is None else parameter.ds_shape  # type: ignore[attr-defined]
        (whole if own is None else partitioned).extend(_parts(mesh, name, "", shape, start, values, vocabulary))
    found = _share(whole, replica, replicas)
    if not weights_only:
        for name, kind, shape, start, values in optimizer_state.local(model, optimizer):
            states += _parts(mesh, name, f"|{kind}", shape, start, values, vocabulary)
    if not optimizer_state.is_zero(optimizer):
        return found + partitioned + _share(states, replica, replicas)
    group = partition_count(optimizer)  # processes that hold the state once, where there may be several such groups
    return found + _share(partitioned + states, replica // group, replicas // group)


def _parts(
    mesh: Mesh | None, name: str, kind: str, shape: Any, start: int, values: Tensor, vocabulary: int
) -> Iterator[Held]:
    """The elements `values` of a shard of `shape`, from element `start` on, as parts of the full tensor."""
    is_copy = mesh is not None and name == OUTPUT and not mesh.is_first_stage  # the first stage writes the embedding
    if is_copy or (mesh is not None and not split_of(name) and mesh.tensor_rank > 0):
        return
    full, first = full_shape(mesh, name, shape, vocabulary), 0
    for box in own_boxes(mesh, name, full)[1]:
        begin, end = max(start, first), min(start + len(values), first + size_of(box))
        if begin < end:
            yield Held(checkpoint_name(name) + kind, full, box, begin - first, values[begin - start : end - start])
        first += size_of(box)


def _share(parts: list[Held], number: int, count: int) -> list[Held]:
    """Share `number` of `count` equal ones of parts that `count` processes hold alike."""
    total, place, found = sum(part.values.nbytes for part in parts), 0, list[Held]()
    first, last = total * number // count, total * (number + 1) // count
    for part in parts:
        size = part.values.element_size()
        begin, end = (min(max(-(-(edge - place) // size), 0), len(part.values)) for edge in (first, last))
        if begin < end:
            found.append(Held(part.name, part.shape, part.box, part.start + begin, part.values[begin:end]))
        place += part.values.nbytes
    return found


def copied(parts: list[Held]) -> list[Held]:
    """`parts` in host memory of their own, in their dtypes in the file."""
    return [
        Held(part.name, part.shape, part.box, part.start, part.values.to("cpu", part.dtype, copy=True))
        for part in parts
    ]


def write(folder: Path, parts: list[Held], step: int, process: int, processes: int) -> Written:
    """Write the files of one process into `folder`, which all processes share.

    Raises:
        GptlmError: if the folder is not there.
        OSError: if a file cannot be written.
    """
    if not folder.is_dir():
        raise GptlmError(
            f"process {process} does not see the folder {folder}: a sharded checkpoint needs an output folder that "
            "all machines share; give another one"
        )
    checksums, written = {}, []
    for kind in ("weights", "optimizer"):
        own = [part for part in parts if is_weight(part.name) == (kind == "weights")]
        if not own:
            continue
        file = f"{kind}-{process + 1:05d}-of-{processes:05d}.safetensors"
        counts: dict[str, int] = {}
        tensors = {}
        for part in own:
            number = counts[part.name] = counts.get(part.name, 0) + 1
            key = part.name if number == 1 else f"{part.name}#{number}"
            tensors[key] = part.values, part.dtype
            place = Part(file, key, part.box, part.start, part.start + len(part.values))
            written.append((part.name, part.shape, NAMES[part.dtype], place))
        checksums[file] = write_file(folder / file, tensors, {"format": "pt", STEP: str(step)})
    return Written(checksums, written)


def write_index(folder: Path, written: list[Written], step: int) -> None:
    """Write the index of what all processes have written.

    Raises:
        OSError: if it cannot be written.
        RuntimeError: if their parts do not make whole tensors.
    """
    tensors: dict[str, Entry] = {}
    for name, shape, dtype, part in chain.from_iterable(one.parts for one in written):
        before = tensors.get(name)
        tensors[name] = Entry(tuple(shape), dtype, (*(before.parts if before else ()), part))
    text = index_text(Index(step, tensors))
    try:
        parse_index(text)
    except ValueError as error:
        raise RuntimeError(f"the parts of the processes do not fit together: {error}") from error
    (folder / SHARDS_INDEX).write_text(text, encoding="utf-8")


class Save:
    """One checkpoint, written by all processes: each its files, then the first one the index and what comes after it.

    Args:
        commit: called by the first process with the checksums of all files, when all of them are written.
        group: of all processes; None: the default one.
    """

    def __init__(
        self, folder: Path, parts: list[Held], step: int, commit: Callable[[Mapping[str, str]], None], group: Any = None
    ):
        self.folder, self.parts, self.step, self.commit, self.group = folder, parts, step, commit, group
        is_alone = not dist.is_initialized()
        self.process, self.processes = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Write it.

        Raises:
            Exception: what went wrong in this process.
            GptlmError: if it went wrong in another one.
        """
        what, written, error = f"the checkpoint {self.folder}", None, None
        try:
            written = write(self.folder, self.parts, self.step, self.process, self.processes)
        except Exception as caught:  # the others must not wait for this process
            error = caught
        self.parts = []
        agree(error, what, self.group)
        everything: list[Any] = [written]
        if self.processes > 1:
            everything = [None] * self.processes
            dist.gather_object(written, everything if self.process == 0 else None, group=self.group)
        if self.process == 0:
            try:
                write_index(self.folder, everything, self.step)
                self.commit({name: one for each in everything for name, one in each.checksums.items()})
            except Exception as caught:
                error = caught
        agree(error, what, self.group)

    def start(self) -> None:
        """Write it in a thread, while training continues; `parts` must be copies, `group` used by nothing else."""

        def work() -> None:
            try:
                self.run()
            except Exception as error:  # `wait` raises it
                self._error = error

        self._thread = Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is written. Raises as `run`."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
