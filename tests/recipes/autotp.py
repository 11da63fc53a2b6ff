"""Stock GPT-2 trained by DeepSpeed's own tensor parallelism (AutoTP), nothing of gptlm in it.

    torchrun --nproc_per_node 2 tests/recipes/autotp.py MODEL BATCHES.pt RESULT.json

AutoTP refuses GPT-2 as it is, with its Conv1D and fused q, k and v. So each Conv1D becomes the Linear it is, and
AutoTP is told that `c_attn` is three matrices, which it splits one by one.

BATCHES: [(steps, B, T + 1) tokens, learning rates]; RESULT: {case: {"losses": [...], "norms": [...], "split": [...]}}
for the two cases "layers", which leaves the vocabulary whole, and "vocabulary", which splits it, too.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from torch import nn
from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.c_attn\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*\.c_fc\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.c_proj\.weight$"], "partition_type": "row"},
    ],
}


def with_linears(model: nn.Module) -> nn.Module:
    """`model` with a Linear in place of each Conv1D, which has its weight transposed."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(module.nx, module.nf)
            linear.weight.data.copy_(module.weight.data.T)
            linear.bias.data.copy_(module.bias.data)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, linear)
    return model


def parameter_groups(model: nn.Module) -> list[dict]:
    decayed = [p for name, p in model.named_parameters() if "bias" not in name and "ln_" not in name]
    rest = [p for name, p in model.named_parameters() if "bias" in name or "ln_" in name]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def train(folder: str, batches: list, *, vocabulary: bool) -> dict[str, list]:
    degree = deepspeed.comm.get_world_size()
    model = with_linears(GPT2LMHeadModel.from_pretrained(folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    whole = {name: p.shape for name, p in model.named_parameters()}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
    parallel = {"autotp_size": degree, "partition_config": PARTITION, "vocab_parallel_lm_head": vocabulary}
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, "tensor_parallel": parallel})
    for block in model.transformer.h:
        block.attn.split_size //= degree  # AutoTP divides the other sizes itself
    losses, norms = [], []
    for tokens, rate in zip(*batches):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = engine(input_ids=inputs, labels=targets, shift_labels=targets).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    split = [name for name, p in model.named_parameters() if p.shape != whole[name]]
    return {"losses": losses, "norms": norms, "split": split}


def main(folder: str, batches: str, result: str) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed("gloo")
    found = {
        name: train(folder, torch.load(batches), vocabulary=name == "vocabulary") for name in ("layers", "vocabulary")
    }
    if deepspeed.comm.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
