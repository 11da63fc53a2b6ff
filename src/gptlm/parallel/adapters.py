"""LoRA adapters of split Linears. Each adapter is split like its layer:

column-parallel layer    A is whole, B is split by rows as the layer's weight is (`attn.c_attn`: by heads)
row-parallel layer       A is split by columns, B is whole

PEFT makes the adapters of whole layers, with the random numbers that one process draws. Then each process keeps its
shards, and the parts communicate (B, T, rank) activations: a column-parallel A all-reduces their gradients, a
row-parallel A the activations themselves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlm.parallel.collectives import copy_to_group, gather_sequence, reduce_from_group, reduce_scatter_sequence
from gptlm.parallel.parallelize import mark_counted
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import local_shard
from gptlm.parallel.tensor import ColumnLinear, RowLinear, own_random_numbers


class SplitAdapter(nn.Module):
    """One matrix of an adapter, a Linear without bias.

    Args:
        weight: (out, in), this process's part.
    """

    def __init__(self, weight: Tensor, group: Any, sequence: bool):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.group, self.sequence = group, sequence


class ColumnA(SplitAdapter):
    """A of a column-parallel layer: (B, T, in) or, with `sequence`, (B, T / n, in) -> (B, T, rank)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            return gather_sequence(F.linear(x, copy_to_group(self.weight, self.group)), self.group)
        return copy_to_group(F.linear(x, self.weight), self.group)


class RowA(SplitAdapter):
    """A of a row-parallel layer: (B, T, in / n) -> (B, T, rank) or, with `sequence`, (B, T / n, rank)."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        return reduce_scatter_sequence(x, self.group) if self.sequence else reduce_from_group(x, self.group)


class SequenceB(SplitAdapter):
    """B of a row-parallel layer with `sequence`: (B, T / n, rank) -> (B, T / n, out)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, copy_to_group(self.weight, self.group))


class SplitDropout(nn.Dropout):
    """Dropout of split activations, of which each process draws its own numbers."""

    def __init__(self, p: float, context: Callable[[], Any]):
        super().__init__(p)
        self.context = context

    @torch.compiler.disable  # changing the RNG generator causes a graph break
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        with self.context():
            return super().forward(x)


def split_adapters(
    model: Any, mesh: Mesh, adapter: str, *, sequence: bool = False, device: torch.device | None = None
) -> None:
    """Keep this process's shards of the adapters of `model`, a PEFT model of a network from `parallelize`.

    Args:
        adapter: PEFT's name of it.
        sequence, device: as in `parallelize`.
    """
    context = partial(own_random_numbers, mesh.tensor_rank, device or torch.device("cpu"))
    for name, module in list(model.named_modules()):
        layer: Any = module
        base = getattr(layer, "base_layer", None)
        if not isinstance(base, ColumnLinear | RowLinear):
            continue
        own = {
            part: local_shard(mesh, f"{name}.{part}.{adapter}.weight", weights[adapter].weight.data)
            for part, weights in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
        }
        is_row, how = isinstance(base, RowLinear), (mesh.tensor_group, sequence)
        layer.lora_A[adapter] = (RowA if is_row else ColumnA)(own["lora_A"], *how)
        if is_row and sequence:
            layer.lora_B[adapter] = SequenceB(own["lora_B"], *how)
        else:
            layer.lora_B[adapter].weight = nn.Parameter(own["lora_B"])
        dropout = layer.lora_dropout[adapter]
        if isinstance(dropout, nn.Dropout) and (is_row or sequence):
            layer.lora_dropout[adapter] = SplitDropout(dropout.p, context)
    for name, parameter in model.named_parameters():
        mark_counted(name, parameter, mesh)
