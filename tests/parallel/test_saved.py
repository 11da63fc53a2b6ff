"""What a layer of a tensor-parallel network keeps for its backward pass."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config

from gptlm.kernels.linear_cross_entropy import linear_cross_entropy
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.parallel.dims import ParallelDims
from gptlm.parallel.parallelize import parallelize
from gptlm.parallel.process_groups import Mesh

DEGREE, BATCH, LENGTH, WIDTH = 4, 2, 128, 256


@pytest.fixture
def mesh():
    """Of the first of four processes whose exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEGREE)
    yield Mesh(ParallelDims(DEGREE, tensor=DEGREE))
    dist.destroy_process_group()


def block_of(mesh, sequence):
    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 8, "n_positions": LENGTH, "vocab_size": 512}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = GPTLMHeadModel(config)

    def fill(model, name, module):
        for weight in module.parameters(recurse=False):
            torch.nn.init.normal_(weight, std=0.02)

    parallelize(model, mesh, fill, linear_cross_entropy, sequence=sequence)
    return model.to(torch.bfloat16).train().transformer.h[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("sequence", "recompute", "units"),
    [
        # norms' inputs and outputs are whole or split, q, k, v and attention's output, 4 + 4 around GELU are split
        (False, "", 4 + (4 + 8) / DEGREE),
        (True, "", (4 + 4 + 8) / DEGREE),
        (False, "full_attn", 4 + 8 / DEGREE),
        (True, "full_attn", (4 + 8) / DEGREE),
        (False, "full", 1),
        (True, "full", 1 / DEGREE),
    ],
)
def test_a_layer_keeps_what_the_planner_counts(mesh, sequence, recompute, units, compiled):
    """Bytes by hand, in units of a token's width in half precision; with `sequence` nothing is kept whole.

    Compiled it may be less, what norms put out computed again.
    """
    block = block_of(mesh, sequence)
    block.recompute = recompute
    if compiled:
        block.compile(backend="aot_eager_decomp_partition")  # the division into passes that inductor has, too
    weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    part = LENGTH // DEGREE if sequence else LENGTH
    x = torch.randn(BATCH, part, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, None, None, None)
    found = sum(size for place, size in kept.items() if place not in weights)
    statistics = 0.05  # of norms and attention
    assert 0.8 * units < found / (2 * BATCH * LENGTH * WIDTH) < units + statistics


def test_a_whole_module_is_dropped_before_the_next_one_is_made(mesh):
    with torch.device("meta"):
        model = GPTLMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=8, n_positions=16, vocab_size=64))
    whole, kept = weakref.WeakSet(), []

    def fill(model, name, module):
        kept.append(len(whole))
        if name.endswith(("c_attn", "c_proj", "c_fc", "wte")):  # what is split
            whole.add(module)

    parallelize(model, mesh, fill, linear_cross_entropy)
    assert kept == [0] * (3 + 3 * 6)
