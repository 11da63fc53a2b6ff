"""The baselines: a plain PyTorch loop and the stock HuggingFace Trainer.

    python benchmarks/loops.py loop|trainer --data PREFIX --layers 24 --width 1024 --heads 16 --micro 16 --steps 40

Under torchrun the loop uses DistributedDataParallel; so does the Trainer, or DeepSpeed ZeRO with --zero. Prints one
JSON object: seconds per step, seconds from the end of imports to the end of the first step, peak memory. The loop reads
the same token file as ours; the Trainer's samples are in memory, which costs it nothing.

Each has the vocabulary its users have: the loop rounds --vocabulary up to a multiple of 64 (50257 to 50304), as
nanoGPT's train.py does for speed; the Trainer takes it as it is, as GPT-2's configuration has it.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptlm.ranks import is_main_process, local_rank, rank, world_size


class Layer(nn.Module):
    """A pre-norm layer: fused qkv, scaled_dot_product_attention, GELU. [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout)


class Network(nn.Module):
    """Token and position embeddings, layers, a tied head. Ids and targets [batch, length] -> mean loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.dropout = dropout
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if name.endswith(("out", "down")) else 1))
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.dropout)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def loop(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """float32 weights, bfloat16 autocast on a GPU, torch.compile, fused AdamW, DDP with several processes."""
    vocabulary = -(-arguments.vocabulary // 64) * 64
    network: Any = Network(
        arguments.layers, arguments.width, arguments.heads, vocabulary, arguments.length, arguments.dropout
    ).to(device)
    world = world_size()
    if world > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        network = nn.parallel.DistributedDataParallel(network)
    decayed = [p for p in network.parameters() if p.dim() >= 2]
    others = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=device == "cuda")
    compiled: Any = torch.compile(network)
    tokens = np.memmap(f"{arguments.data}.bin", dtype=np.uint16, mode="r")
    rng = np.random.default_rng(rank())

    def batch() -> tuple[Tensor, Tensor]:
        starts = rng.integers(len(tokens) - arguments.length - 1, size=arguments.micro)
        rows = torch.from_numpy(np.stack([tokens[s : s + arguments.length + 1] for s in starts]).astype(np.int64))
        if device == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    marks = [time.perf_counter()]
    inputs = batch()
    for step in range(arguments.steps):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = compiled(*inputs)
        inputs = batch()  # on the CPU, while the GPU computes
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0 or (step + 1) % 10 == 0:
            loss.item()
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
    if world > 1:
        dist.destroy_process_group()
    return timed(marks)


def timed(marks: list[float]) -> dict[str, Any]:
    """Seconds per step (means of ten), from the times at the start and after steps 1, 10, 20, ..."""
    return {"seconds": [(b - a) / 10 for a, b in itertools.pairwise(marks)], "first": marks[1] - marks[0]}


def trainer(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """GPT2LMHeadModel in transformers' Trainer, bf16 autocast on a GPU, optionally DeepSpeed ZeRO."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Timer(TrainerCallback):
        marks = [0.0]

        def on_step_end(self, settings: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 or state.global_step % 10 == 0:
                if device == "cuda":
                    torch.cuda.synchronize()
                self.marks.append(time.perf_counter())

    tokens = np.memmap(f"{arguments.data}.bin", dtype=np.uint16, mode="r")
    length = arguments.length
    count = min(arguments.steps * arguments.micro * 8, len(tokens) // length)
    rows = torch.from_numpy(np.array(tokens[: length * count]).astype(np.int64)).view(-1, length)
    config = GPT2Config(
        vocab_size=arguments.vocabulary, n_embd=arguments.width, n_layer=arguments.layers, n_head=arguments.heads,
        attn_pdrop=arguments.dropout, embd_pdrop=arguments.dropout, resid_pdrop=arguments.dropout,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=arguments.micro, max_steps=arguments.steps, bf16=device == "cuda",
            max_grad_norm=1.0, logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=device == "cpu", deepspeed=zero_settings(arguments.zero), weight_decay=0.1, learning_rate=1e-4,
        )  # fmt: skip
        timer = Timer()
        timer.marks[0] = time.perf_counter()
        samples = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(GPT2LMHeadModel(config), settings, train_dataset=samples, callbacks=[timer]).train()  # type: ignore[arg-type]
    return timed(timer.marks)


def zero_settings(stage: int) -> dict[str, Any] | None:
    """The example of HuggingFace's documentation."""
    if not stage:
        return None
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"} if stage == 3 else {}
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    return {**batch, "bf16": {"enabled": "auto"}, "zero_optimization": zero, "gradient_clipping": "auto"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loop", "trainer"))
    parser.add_argument("--data", required=True)
    sizes = {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50257, "length": 1024, "micro": 16}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--zero", type=int, default=0, help="DeepSpeed stage of the Trainer")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank())
    result = (loop if arguments.what == "loop" else trainer)(arguments, device)
    result["memory"] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    if is_main_process():
        sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
