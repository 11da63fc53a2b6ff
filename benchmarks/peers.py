"""Other libraries on the same model, rows and prompts, for finetune.py and generate.py.

    echo CASE | python benchmarks/peers.py MODEL [--rows FILE] [--prompts FILE] [--micro 8] [--steps 40] [--cpu]

MODEL is a folder with weights and tokenizer. The lines of standard input are cases. One process runs all of them,
because imports take longer than a measurement. Prints one JSON object per case. Training is bfloat16 autocast over
float32 weights, as in transformers' and TRL's examples; cases with "bf16" load all weights in bfloat16.

TRL packs without padding ("bfd": best fit, rows kept whole, one flat sequence per batch), which it supports with
flash-attention 2 or 3 only. Where neither is installed, transformers' scaled_dot_product_attention gets a dense mask of
the whole flat sequence instead. "wrapped" cuts rows where a pack ends and lets them attend to each other.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MARK = 5  # steps between two times
REPEATS = 3  # measurements after one of warm-up


class Timer(TrainerCallback):
    """Counts the tokens of batches, without padding, and notes the time every `MARK` steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self.marks = [(0, time.perf_counter())]
        self.first = 0.0

    def counted(self, collate: Callable[[Any], dict[str, Any]], rows: Any) -> dict[str, Any]:
        batch = collate(rows)
        mask = batch.get("attention_mask")
        self.tokens += batch["input_ids"].numel() if mask is None else int(mask.sum())
        return batch

    def on_step_end(self, settings: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 or state.global_step % MARK == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append((self.tokens, time.perf_counter()))

    def result(self) -> dict[str, Any]:
        pairs = list(zip(self.marks[1:], self.marks[2:], strict=False))[1:]  # from step MARK on
        speeds = [(after[0] - before[0]) / (after[1] - before[1]) for before, after in pairs]
        return {"tokens_per_second": speeds, "first": self.marks[1][1] - self.marks[0][1]}


def load(arguments: argparse.Namespace, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa")


def tokenizer_of(arguments: argparse.Namespace, side: str = "right") -> Any:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side=side)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def rows_of(arguments: argparse.Namespace) -> list[dict[str, str]]:
    return [json.loads(line) for line in open(arguments.rows)]


def common(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    return dict(
        output_dir=folder, per_device_train_batch_size=arguments.micro, max_steps=arguments.steps, logging_steps=10,
        bf16=not arguments.cpu, use_cpu=arguments.cpu, save_strategy="no", report_to=[], disable_tqdm=True,
        learning_rate=1e-5,
    )  # fmt: skip


def adapters() -> Any:
    """Our defaults: rank 8, scale 2, all four matrices of a block."""
    from peft import LoraConfig

    targets = ["c_attn", "c_proj", "c_fc"]
    return LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=True, task_type="CAUSAL_LM")


def stock(arguments: argparse.Namespace, *, lora: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """transformers' Trainer with DataCollatorForSeq2Seq; with adapters PEFT's model."""
    tokenizer = tokenizer_of(arguments)
    model = load(arguments, dtype)
    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, adapters())
    rows = []
    for row in rows_of(arguments):
        prompt, answer = tokenizer(row["src"]).input_ids, [*tokenizer(row["tgt"]).input_ids, tokenizer.eos_token_id]
        ids, labels = prompt + answer, [-100] * len(prompt) + answer
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)})
    timer = Timer()
    collator = partial(timer.counted, DataCollatorForSeq2Seq(tokenizer, padding=True))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(**common(arguments, folder))
        trainer = Trainer(model, settings, train_dataset=rows, data_collator=collator, callbacks=[timer])  # type: ignore[arg-type]
        timer.marks = [(0, time.perf_counter())]
        trainer.train()
    return timer.result()


def trl(
    arguments: argparse.Namespace, *, packing: str | None, lora: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """TRL's SFTTrainer; gradient checkpointing, its default, is off, which is faster."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": row["src"], "completion": row["tgt"]} for row in rows_of(arguments)]
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        packed = {} if packing is None else {"packing": True, "packing_strategy": packing}
        settings = SFTConfig(
            **common(arguments, folder), max_length=arguments.length, gradient_checkpointing=False, **packed
        )
        trainer = SFTTrainer(
            load(arguments, dtype), settings, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer_of(arguments), peft_config=adapters() if lora else None, callbacks=[timer],
        )  # fmt: skip
        trainer.data_collator = partial(timer.counted, trainer.data_collator)
        timer.marks = [(0, time.perf_counter())]
        trainer.train()
    return timer.result()


def generate(arguments: argparse.Namespace, *, batch: int, static: bool) -> dict[str, Any]:
    """Stock `generate`, greedy: a growing cache, or a static one with the compiled step."""
    tokenizer = tokenizer_of(arguments, "left")
    model = load(arguments, torch.float32 if arguments.cpu else torch.bfloat16).eval()
    model.to("cpu" if arguments.cpu else "cuda")
    prompts = Path(arguments.prompts).read_text().splitlines()
    more = {"cache_implementation": "static"} if static else {}

    def run(texts: list[str]) -> int:
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        settings = dict(max_new_tokens=arguments.new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        found = model.generate(**inputs, **settings, **more)[:, inputs.input_ids.shape[1] :]
        return int((found != tokenizer.eos_token_id).sum())

    start = time.perf_counter()
    run(prompts[:batch])  # kernels are chosen; the static cache compiles
    first = time.perf_counter() - start
    speeds = []
    for i in range(REPEATS + 1):
        start = time.perf_counter()
        speeds.append(run(prompts[i * batch : (i + 1) * batch]) / (time.perf_counter() - start))
    return {"tokens_per_second": speeds[1:], "first": first}


@torch.inference_mode()
def forward(arguments: argparse.Namespace, *, ours: bool) -> dict[str, Any]:
    """Forward pass and loss on full windows: of the stock model, or of ours with compiled blocks."""
    kind, dtype = ("cpu", torch.float32) if arguments.cpu else ("cuda", torch.bfloat16)
    if ours:
        from gptlm.inference.loading import load_for_inference

        model: Any = load_for_inference(arguments.model, torch.device(kind), dtype=dtype)[0]
        for block in model.transformer.h:
            block.compile()
    else:
        model = load(arguments, dtype).to(kind).eval()
    ids = torch.randint(model.config.vocab_size, (arguments.micro, arguments.length), device=kind)
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.item()
    first = time.perf_counter() - start
    speeds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(arguments.steps):
            loss = model(input_ids=ids, labels=ids).loss
        loss.item()  # waits for the device
        speeds.append(arguments.steps * ids.numel() / (time.perf_counter() - start))
    return {"tokens_per_second": speeds[1:], "first": first}


BF16 = torch.bfloat16
CASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "stock padded": stock,
    "stock lora padded": partial(stock, lora=True),
    "stock lora padded bf16": partial(stock, lora=True, dtype=BF16),
    "trl": partial(trl, packing=None),
    "trl bfd": partial(trl, packing="bfd"),
    "trl wrapped": partial(trl, packing="wrapped"),
    "trl lora bfd": partial(trl, packing="bfd", lora=True),
    "trl lora bfd bf16": partial(trl, packing="bfd", lora=True, dtype=BF16),
    "trl lora wrapped": partial(trl, packing="wrapped", lora=True),
    "trl lora wrapped bf16": partial(trl, packing="wrapped", lora=True, dtype=BF16),
    **{
        f"{cache} {batch}": partial(generate, batch=batch, static=cache == "static")
        for cache in ("dynamic", "static")
        for batch in (1, 16)
    },
    "stock forward": partial(forward, ours=False),
    "ours forward": partial(forward, ours=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", help="fine-tuning data: JSON lines with src and tgt")
    parser.add_argument("--prompts", help="one per line")
    parser.add_argument("--micro", type=int, default=8, help="rows or packs of a batch")
    parser.add_argument("--length", type=int, default=640, help="tokens of a pack or window")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for line in sys.stdin:
        case = line.strip()
        try:
            result = CASES[case](arguments)
        except Exception:  # the other cases are worth their time
            traceback.print_exc()
            result = {"error": traceback.format_exc(limit=-1)}
        if not arguments.cpu:
            result["memory"] = torch.cuda.max_memory_allocated() / 2**30
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        sys.stdout.write(json.dumps({"case": case, **result}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
