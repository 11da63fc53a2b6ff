"""How each parameter of the network is sharded over tensor-parallel processes, and gathered again.

token embedding, mlp.c_fc                rows (vocabulary, feed-forward width)
attn.c_attn                              heads: the same share of q, k and v
attn.c_proj, mlp.c_proj, their weight    columns
everything else                          not split

LoRA adapters are split like their layer: B of the first two by rows or heads, A of the third by columns.

If the vocabulary does not divide, the first processes have one row more than the others. Heads and widths must divide.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.parallel.process_groups import Mesh

EMBEDDING = "transformer.wte.weight"
Box = tuple[int, int, int, int]
PEFT_MODEL = "base_model.model."  # before the names of a network with adapters
OUTPUT = "lm_head.weight"  # the copy of the embedding on the last of several pipeline stages


def split_of(name: str) -> str:
    """How a parameter is split: "rows", "heads", "columns" or "" (not)."""
    if _is_embedding(name):
        return "rows"
    layer, adapter, _ = name.partition(".lora_")
    is_a = adapter and ".lora_A." in name
    if ".c_proj" in layer:
        return "columns" if is_a or (not adapter and layer.endswith(".weight")) else ""
    if is_a:
        return ""
    if ".mlp.c_fc" in layer:
        return "rows"
    return "heads" if ".attn.c_attn" in layer else ""


def _is_embedding(name: str) -> bool:
    """Whether it is the token embedding or its copy, whose shards may differ by one row."""
    return name.removeprefix(PEFT_MODEL) in (EMBEDDING, OUTPUT)


def shard(name: str, tensor: Tensor, rank: int, degree: int) -> Tensor:
    """Process `rank`'s shard of the full `tensor`, a copy."""
    kind = split_of(name)
    if not kind or degree == 1:
        return tensor.clone()
    if kind == "heads":
        three = tensor.view(3, tensor.shape[0] // 3, *tensor.shape[1:])
        return three.chunk(degree, 1)[rank].flatten(0, 1).clone()
    return tensor.tensor_split(degree, 1 if kind == "columns" else 0)[rank].clone()


def unshard(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The full tensor from its shards, in order of rank."""
    kind = split_of(name)
    if not kind or len(parts) == 1:
        return parts[0]
    if kind == "heads":
        three = [part.view(3, part.shape[0] // 3, *part.shape[1:]) for part in parts]
        return torch.cat(three, 1).flatten(0, 1)
    return torch.cat(list(parts), 1 if kind == "columns" else 0)


def stage_layers(stage: int, stages: int, layers: int) -> range:
    """The layers of one pipeline stage. If they do not divide, the first stages have one more: the last stage has
    the output layer besides.
    """
    return _range(stage, stages, layers)


def vocab_range(rank: int, degree: int, vocabulary: int) -> range:
    """The token ids whose embedding rows are on process `rank`."""
    return _range(rank, degree, vocabulary)


def _range(number: int, parts: int, count: int) -> range:
    """Part `number` of range(count); as in `torch.tensor_split`, the first parts are longer by one."""
    short, longer = divmod(count, parts)
    first = number * short + min(number, longer)
    return range(first, first + short + (number < longer))


def checkpoint_name(name: str) -> str:
    """The name of a parameter in a checkpoint, where the last stage's copy of the embedding is the embedding."""
    return EMBEDDING if name == OUTPUT else name


def local_shard(mesh: Mesh | None, name: str, tensor: Tensor) -> Tensor:
    """This process's shard of a full tensor."""
    return tensor if mesh is None else shard(name, tensor, mesh.tensor_rank, mesh.dims.tensor)


def full_shape(mesh: Mesh | None, name: str, shape: Sequence[int], vocabulary: int) -> list[int]:
    """The shape of the full tensor, of which this process's shard has `shape`.

    Args:
        vocabulary: rows of the full embedding.
    """
    kind = split_of(name)
    if mesh is None or not kind:
        return list(shape)
    if kind == "columns":
        return [shape[0], shape[1] * mesh.dims.tensor]
    return [vocabulary if _is_embedding(name) else shape[0] * mesh.dims.tensor, *shape[1:]]


def own_boxes(mesh: Mesh | None, name: str, full: Sequence[int]) -> tuple[tuple[int, ...], list[Box]]:
    """The shape of this process's shard of a tensor of shape `full`, and which boxes it holds, one after the other.

    Returns:
        for each box first row, end of the rows, first column, end of the columns; a vector is one column.
    """
    rows, columns = (full[0], prod(full[1:])) if full else (1, 1)
    kind, rank, degree = split_of(name), 0, 1
    if mesh is not None:
        rank, degree = mesh.tensor_rank, mesh.dims.tensor
    if not kind or degree == 1 or not full:
        return tuple(full), [(0, rows, 0, columns)]
    if kind == "columns":
        own = _range(rank, degree, columns)
        return (rows, len(own)), [(0, rows, own.start, own.stop)]
    if kind == "rows":
        own = _range(rank, degree, rows)
        return (len(own), *full[1:]), [(own.start, own.stop, 0, columns)]
    own = _range(rank, degree, rows // 3)
    boxes = [(part + own.start, part + own.stop, 0, columns) for part in range(0, rows, rows // 3)]
    return (3 * len(own), *full[1:]), boxes


def gather_tensors(mesh: Mesh, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the model, full and one at a time, on every process.

    Args:
        tensors: (name, this process's shard) of the own stage; a name may end in "|kind". Taking the next one may be
            a collective operation of the data-parallel group.
    """
    shards = iter(tensors)
    for stage in range(mesh.dims.pipeline):
        own = mesh.pipeline_rank == stage
        while True:
            found = next(shards, None) if own else None
            if found is not None and mesh.dims.pipeline > 1 and not mesh.is_first_stage and found[0].startswith(OUTPUT):
                continue  # the first stage yields it
            name, tensor = _broadcast(mesh, stage, found)
            if name is None or tensor is None:
                break
            yield name, tensor


def _broadcast(mesh: Mesh, stage: int, found: tuple[str, Tensor] | None) -> tuple[str | None, Tensor | None]:
    """The next tensor of one stage on all stages; (None, None) when it has no more."""
    name, full = None, None
    if found is not None:
        name = found[0]
        full = _all_gather(mesh, name, found[1].detach())
    if mesh.dims.pipeline == 1:
        return name, full
    source = dist.get_global_rank(mesh.pipeline_group, stage)
    facts = [(name, full.shape, full.dtype) if full is not None else None]
    dist.broadcast_object_list(facts, src=source, group=mesh.pipeline_group)
    if facts[0] is None:
        return None, None
    name, shape, dtype = facts[0]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = full.to(device) if full is not None else torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(tensor, src=source, group=mesh.pipeline_group)
    return name, tensor


def _all_gather(mesh: Mesh, name: str, share: Tensor) -> Tensor:
    if mesh.dims.tensor == 1:
        return share.contiguous()
    if dist.get_backend() == "nccl":
        share = share.cuda()
    name = name.partition("|")[0]
    rows = [share.shape[0]] * mesh.dims.tensor
    if _is_embedding(name):
        dist.all_gather_object(rows, share.shape[0], group=mesh.tensor_group)
        share = torch.cat((share, share.new_zeros(max(rows) - share.shape[0], *share.shape[1:])))
    parts = [torch.empty_like(share) for _ in rows]
    dist.all_gather(parts, share.contiguous(), group=mesh.tensor_group)
    return unshard(name, [part[:count] for part, count in zip(parts, rows, strict=True)])
