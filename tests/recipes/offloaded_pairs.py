"""Four processes train a small network with ZeRO in pairs, offloaded and not; torch's AdamW, which needs no compiler.

    torchrun --nproc_per_node 4 tests/recipes/offloaded_pairs.py RESULT.json

RESULT: [case, distance of the weights from those of one process, distance of its gradient norms, and whether each
process saw an overflow of the last one], of each stage.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from gptlm.parallel.copies import Copies
from gptlm.parallel.deepspeed import setup_deepspeed
from gptlm.parallel.dims import ParallelDims
from gptlm.parallel.process_groups import Mesh
from gptlm.upstream.deepspeed import average_gradients, initialized_with

STEPS, CLIP = 4, 0.05
UNSHARDED = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def alone(data):
    """Weights and gradient norms of one process that reads all of `data` (steps, processes, micro-batches, ...)."""
    model, norms = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return list(model.parameters()), norms


def pairs(stage, offload):
    """An engine whose ZeRO groups are pairs, and what they agree on."""
    mesh, model = Mesh(ParallelDims(dist.get_world_size()), 2), network()
    if dist.get_rank() > 1:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1)  # the first pair's weights are what training starts from
    copies = Copies(mesh)
    copies.broadcast_weights(model)
    zero = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero |= {f"stage3_{name}": 0 for name in UNSHARDED}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2, "zero_optimization": zero}
    config |= {"gradient_clipping": CLIP, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    with initialized_with(mesh):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    copies.attach(engine)
    return engine, copies


def backward(engine, micro_batches, factor=1.0):
    for number, batch in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
        engine.backward(engine(batch).square().mean() * factor / len(micro_batches), scale_wrt_gas=False)


def main(result: str) -> None:
    dist.init_process_group("gloo")
    setup_deepspeed(on_cpu=True)
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    data = torch.randn(STEPS, world, 2, 5, 7, generator=torch.Generator().manual_seed(1))
    weights, norms = alone(data)
    for stage in (1, 2, 3):
        for offload in (False, True):
            (engine, copies), own, seen = pairs(stage, offload), [], [False] * world
            for batch in data:
                backward(engine, batch[rank])
                engine.step()
                own.append(float(engine.get_global_grad_norm()))
            shares = zip(engine.module.parameters(), weights, strict=True)
            far = max((safe_get_full_fp32_param(own) - weight).abs().max().item() for own, weight in shares)
            if offload and stage < 3:  # stage 3 looks at the gradients, which are averaged
                backward(engine, data[0, rank], float("inf") if rank == world - 1 else 1.0)
                average_gradients(engine.optimizer, copies.average)
                dist.all_gather_object(seen, engine.optimizer.local_overflow)
            apart = max(abs(a - b) for a, b in zip(own, norms, strict=True))
            found.append([f"stage{stage}{' offload' if offload else ''}", far, apart, seen])
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # DeepSpeed's objects wait for each other at exit


if __name__ == "__main__":
    main(sys.argv[1])
