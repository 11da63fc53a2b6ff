"""How each parameter of the network is split over tensor-parallel processes, and put together again.

token embedding, mlp.c_fc                by rows (vocabulary, feed-forward width)
attn.c_attn                              by heads: the same share of q, of k and of v
attn.c_proj, mlp.c_proj, their weight    by columns
everything else                          not at all

A vocabulary that does not divide gives the first processes one row more than the others; the rest has to divide.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.parallel.process_groups import Mesh

EMBEDDING = "transformer.wte.weight"
OUTPUT = "lm_head.weight"  # tied to the embedding; the name it has where the embedding itself is on another stage


def split_of(name: str) -> str:
    """ "rows", "heads", "columns" or "" (not split)."""
    if name in (EMBEDDING, OUTPUT) or ".mlp.c_fc." in name:
        return "rows"
    if ".attn.c_attn." in name:
        return "heads"
    return "columns" if name.endswith(".c_proj.weight") else ""


def shard(name: str, tensor: Tensor, rank: int, degree: int) -> Tensor:
    """Process `rank`'s share of the whole `tensor`, a copy."""
    kind = split_of(name)
    if not kind or degree == 1:
        return tensor.clone()
    if kind == "heads":
        three = tensor.view(3, tensor.shape[0] // 3, *tensor.shape[1:])
        return three.chunk(degree, 1)[rank].flatten(0, 1).clone()
    return tensor.tensor_split(degree, 1 if kind == "columns" else 0)[rank].clone()


def unshard(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The tensor whose shares are `parts`, in order of rank."""
    kind = split_of(name)
    if not kind or len(parts) == 1:
        return parts[0]
    if kind == "heads":
        three = [part.view(3, part.shape[0] // 3, *part.shape[1:]) for part in parts]
        return torch.cat(three, 1).flatten(0, 1)
    return torch.cat(list(parts), 1 if kind == "columns" else 0)


def stage_layers(stage: int, stages: int, layers: int) -> range:
    """The layers of one pipeline stage; where they do not divide, the first stages have one more.

    The last stage also has the output layer, so it is among the shorter ones.
    """
    return _share(stage, stages, layers)


def vocab_range(rank: int, degree: int, vocabulary: int) -> range:
    """The token ids whose rows of the embedding process `rank` has."""
    return _share(rank, degree, vocabulary)


def _share(number: int, shares: int, count: int) -> range:
    """Of `count` things in a row; where they do not divide, the first shares have one more (`torch.tensor_split`)."""
    short, longer = divmod(count, shares)
    first = number * short + min(number, longer)
    return range(first, first + short + (number < longer))


def checkpoint_name(name: str) -> str:
    """The whole model's name of a parameter: the last stage's copy of the embedding is the embedding."""
    return EMBEDDING if name == OUTPUT else name


def local_shard(mesh: Mesh | None, name: str, tensor: Tensor) -> Tensor:
    """This process's share of a whole tensor."""
    return tensor if mesh is None else shard(name, tensor, mesh.tensor_rank, mesh.dims.tensor)


def gather_tensors(mesh: Mesh, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
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
        whole = _all_gather(mesh, name, found[1].detach())
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


def _all_gather(mesh: Mesh, name: str, share: Tensor) -> Tensor:
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
    return unshard(name, [part[:count] for part, count in zip(parts, rows, strict=True)])
