"""Padded rows through tensor, sequence and pipeline parallelism without a mask, and documents through the first two.

    torchrun --nproc_per_node 2 tests/recipes/padded.py MODEL BATCH.pt RESULT.json

BATCH: ids and targets, (B, T) each, and what `documents_in` gives; RESULT: {case: [loss, norm of all gradients]}
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptlm.kernels.attention import Documents
from gptlm.kernels.linear_cross_entropy import linear_cross_entropy
from gptlm.model.build import StoredWeights, blank_model, loaded_config
from gptlm.parallel.dims import ParallelDims
from gptlm.parallel.parallelize import parallelize
from gptlm.parallel.pipeline import Pipeline
from gptlm.parallel.process_groups import Mesh
from gptlm.recipes.common.model import _fill

LAYOUTS = {"tensor": (2, 1, False), "sequence": (2, 1, True), "pipeline": (1, 2, False)}


def loss_and_norm(
    folder: str, ids: torch.Tensor, targets: torch.Tensor, layout: str, dropout: float = 0.0, **documents: Any
) -> list[float]:
    tensor, pipeline, sequence = LAYOUTS[layout]
    mesh = Mesh(ParallelDims(dist.get_world_size(), tensor, pipeline))
    with torch.device("meta"):
        model = blank_model(loaded_config(folder, 0.0, dropout))
    model = parallelize(model, mesh, partial(_fill, StoredWeights(folder)), linear_cross_entropy, sequence=sequence)
    count = (targets != -100).sum()
    if pipeline > 1:
        runner = Pipeline(model, mesh, chunks=1, micro_batches=2, device=torch.device("cpu"), documents=Documents)
        more = {"positions": documents.get("position_ids"), "offsets": documents.get("cu_seqlens")}
        loss = runner.step(ids, targets, 1.0 / count, **more)
        runner.all_reduce_tied_gradients(lambda weight: weight.grad)
    else:
        loss = model.train()(input_ids=ids, shift_labels=targets, **documents).loss
        loss.backward()
    own = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None and p.model_parallel]
    total = torch.stack(own).sum()
    dist.all_reduce(total)
    return [loss.item(), total.sqrt().item()]


def main(folder: str, batch: str, result: str) -> None:
    dist.init_process_group("gloo")
    ids, targets, documents = torch.load(batch)
    found = {layout: loss_and_norm(folder, ids, targets, layout) for layout in LAYOUTS}
    for layout in LAYOUTS:
        found[f"{layout}, documents"] = loss_and_norm(folder, ids, targets, layout, **documents)
        found[f"{layout}, dropout"] = loss_and_norm(folder, ids, targets, layout, 0.5, **documents)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


main(*sys.argv[1:])
