"""How each parameter of the network is split over tensor-parallel processes, and put together again.

token embedding, mlp.c_fc                by rows (vocabulary, feed-forward width)
attn.c_attn                              by heads: the same share of q, of k and of v
attn.c_proj, mlp.c_proj, their weight    by columns
everything else                          not at all

A vocabulary that does not divide gives the first processes one row more than the others; the rest has to divide.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

EMBEDDING = "transformer.wte.weight"
OUTPUT = "lm_head.weight"  # tied to the embedding; the name it has where the embedding itself is on another stage


def kind_of(name: str) -> str:
    """ "rows", "heads", "columns" or "" (not split)."""
    if name in (EMBEDDING, OUTPUT) or ".mlp.c_fc." in name:
        return "rows"
    if ".attn.c_attn." in name:
        return "heads"
    return "columns" if name.endswith(".c_proj.weight") else ""


def part_of(name: str, tensor: Tensor, rank: int, degree: int) -> Tensor:
    """Process `rank`'s share of the whole `tensor`, a copy."""
    kind = kind_of(name)
    if not kind or degree == 1:
        return tensor.clone()
    if kind == "heads":
        three = tensor.view(3, tensor.shape[0] // 3, *tensor.shape[1:])
        return three.chunk(degree, 1)[rank].flatten(0, 1).clone()
    return tensor.tensor_split(degree, 1 if kind == "columns" else 0)[rank].clone()


def whole_of(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The tensor whose shares are `parts`, in order of rank."""
    kind = kind_of(name)
    if not kind or len(parts) == 1:
        return parts[0]
    if kind == "heads":
        three = [part.view(3, part.shape[0] // 3, *part.shape[1:]) for part in parts]
        return torch.cat(three, 1).flatten(0, 1)
    return torch.cat(list(parts), 1 if kind == "columns" else 0)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of one pipeline stage; where they do not divide, the first stages have one more.

    The last stage also has the output layer, so it is among the shorter ones.
    """
    return _share(stage, stages, layers)


def ids_of(rank: int, degree: int, vocabulary: int) -> range:
    """The token ids whose rows of the embedding process `rank` has."""
    return _share(rank, degree, vocabulary)


def _share(number: int, shares: int, count: int) -> range:
    """Of `count` things in a row; where they do not divide, the first shares have one more (`torch.tensor_split`)."""
    short, longer = divmod(count, shares)
    first = number * short + min(number, longer)
    return range(first, first + short + (number < longer))
