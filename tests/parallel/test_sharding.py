"""Shares of parameters: put together again they are the whole, and each does its part of the product."""

import pytest
import torch

from gptlm.parallel.sharding import EMBEDDING, shard, split_of, stage_layers, unshard, vocab_range

D, HEADS = 8, 4
SHAPES = {
    "transformer.wte.weight": (12, D),
    "transformer.wpe.weight": (6, D),
    "transformer.h.0.attn.c_attn.weight": (3 * D, D),
    "transformer.h.0.attn.c_attn.bias": (3 * D,),
    "transformer.h.0.attn.c_proj.weight": (D, D),
    "transformer.h.0.attn.c_proj.bias": (D,),
    "transformer.h.0.mlp.c_fc.weight": (4 * D, D),
    "transformer.h.0.mlp.c_fc.bias": (4 * D,),
    "transformer.h.0.mlp.c_proj.weight": (D, 4 * D),
    "transformer.h.0.ln_1.weight": (D,),
}


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_parts_make_the_whole(name, degree):
    whole = torch.randn(SHAPES[name])
    parts = [shard(name, whole, rank, degree) for rank in range(degree)]
    assert unshard(name, parts).equal(whole)
    assert parts[0].numel() == whole.numel() // (degree if split_of(name) else 1)


def test_heads_stay_whole():
    """Process r of 2 gets q, k and v of heads 2 r and 2 r + 1: rows by head are 2 wide."""
    name = "transformer.h.0.attn.c_attn.bias"
    part = shard(name, torch.arange(3 * D), 1, 2)
    assert part.tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


@pytest.mark.parametrize("degree", [2, 4])
def test_a_column_and_a_row_split_are_the_product(degree):
    first, second = torch.randn(4 * D, D), torch.randn(D, 4 * D)
    x = torch.randn(3, D)
    names = ("transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight")
    total = sum(
        torch.relu(x @ shard(names[0], first, rank, degree).T) @ shard(names[1], second, rank, degree).T
        for rank in range(degree)
    )
    torch.testing.assert_close(total, torch.relu(x @ first.T) @ second.T)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("layer", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
def test_adapters_are_split_like_their_layer(layer, degree):
    """The product of a process's parts of B and A is its part of the whole product."""
    name, rank = f"transformer.h.0.{layer}.weight", 3
    rows, columns = SHAPES[name]
    b, a = torch.randn(rows, rank), torch.randn(rank, columns)
    adapted = f"base_model.model.transformer.h.0.{layer}"
    for process in range(degree):
        of_b, of_a = (
            shard(f"{adapted}.{part}.default.weight", whole, process, degree)
            for part, whole in (("lora_B", b), ("lora_A", a))
        )
        torch.testing.assert_close(of_b @ of_a, shard(name, b @ a, process, degree))
        assert shard(f"{adapted}.base_layer.weight", b @ a, process, degree).equal(shard(name, b @ a, process, degree))


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (7, 3), (24, 16), (3, 3)])
def test_stages_share_the_layers_evenly(layers, stages):
    shares = [stage_layers(stage, stages, layers) for stage in range(stages)]
    assert [layer for share in shares for layer in share] == list(range(layers))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("vocabulary", "degree"), [(12, 4), (13, 4), (50257, 2), (50257, 8)])
def test_every_process_has_the_rows_of_its_ids(vocabulary, degree):
    whole = torch.arange(vocabulary)[:, None]
    parts = [shard(EMBEDDING, whole, rank, degree) for rank in range(degree)]
    assert [part.flatten().tolist() for part in parts] == [
        list(vocab_range(rank, degree, vocabulary)) for rank in range(degree)
    ]
    assert unshard(EMBEDDING, parts).equal(whole)
