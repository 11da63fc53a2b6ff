"""Tensors of a parallel model under the names and in the shapes of the whole one, and back."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import EMBEDDING, OUTPUT, part_of, whole_of


def stored_name(name: str) -> str:
    """The whole model's name of a parameter: the last stage's copy of the embedding is the embedding."""
    return EMBEDDING if name == OUTPUT else name


def own_part(mesh: Mesh | None, name: str, tensor: Tensor) -> Tensor:
    """This process's share of a whole tensor."""
    return tensor if mesh is None else part_of(name, tensor, mesh.tensor_rank, mesh.dims.tensor)


def assembled(mesh: Mesh, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the model, whole, one after the other, on every process; each gives those of its stage.

    Args:
        tensors: (name, this process's share); a name may end in "|kind". Taking one may be a collective operation of
            the data-parallel group.
    """
    shares = iter(tensors)
    for stage in range(mesh.dims.pipeline):
        own = mesh.pipeline_rank == stage
        while True:
            found = next(shares, None) if own else None
            if found is not None and mesh.dims.pipeline > 1 and not mesh.is_first_stage and found[0].startswith(OUTPUT):
                continue  # the first stage has it, too
            name, tensor = _shown_to_all(mesh, stage, found)
            if name is None or tensor is None:
                break
            yield name, tensor


def _shown_to_all(mesh: Mesh, stage: int, found: tuple[str, Tensor] | None) -> tuple[str | None, Tensor | None]:
    """What one stage has next, on all of them; (None, None) when it has no more."""
    name, whole = None, None
    if found is not None:
        name = found[0]
        whole = _whole(mesh, name, found[1].detach())
    if mesh.dims.pipeline == 1:
        return name, whole
    source = dist.get_global_rank(mesh.pipeline_group, stage)
    facts = [(name, whole.shape, whole.dtype) if whole is not None else None]
    dist.broadcast_object_list(facts, src=source, group=mesh.pipeline_group)
    if facts[0] is None:
        return None, None
    name, shape, dtype = facts[0]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = whole.to(device) if whole is not None else torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(tensor, src=source, group=mesh.pipeline_group)
    return name, tensor


def _whole(mesh: Mesh, name: str, share: Tensor) -> Tensor:
    if mesh.dims.tensor == 1:
        return share.contiguous()
    if dist.get_backend() == "nccl":
        share = share.cuda()
    name = name.partition("|")[0]
    rows = [share.shape[0]] * mesh.dims.tensor
    if name in (EMBEDDING, OUTPUT):  # the first processes may have one row more
        dist.all_gather_object(rows, share.shape[0], group=mesh.tensor_group)
        share = torch.cat((share, share.new_zeros(max(rows) - share.shape[0], *share.shape[1:])))
    parts = [torch.empty_like(share) for _ in rows]
    dist.all_gather(parts, share.contiguous(), group=mesh.tensor_group)
    return whole_of(name, [part[:count] for part, count in zip(parts, rows, strict=True)])
