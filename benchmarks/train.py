"""Tokens per second of gptlm, of a plain compiled PyTorch loop, and of the stock HuggingFace Trainer, side by side.

    python benchmarks/train.py [--model gpt2-medium-en] [--vocab_size 50257] [--micro 16] [--steps 60] [--rounds 1]
        [--only NAME ...]

All train the same vocabulary, by default GPT-2's 50257 entries (the plain loop pads it, see loops.py), and read the
same token file. Ours is `scripts/run_pretrain.py` as users run it, logging every 10 steps. Rounds are interleaved. A
speed is the median over means of ten steps each, after the tenth, in wall-clock time. MFU counts 6 N + 12 L H S
operations per token (Kaplan et al. 2020; Chowdhery et al. 2022), relative to --peak. --json FILE writes the numbers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from strategies import write_data

ROOT = Path(__file__).parents[1]
SIZES = {  # layers, width, heads, vocabulary, tokens of a sample
    "gpt2-en": (12, 768, 12, 50257, 1024),
    "gpt2-medium-en": (24, 1024, 16, 50257, 1024),
    "gpt3-1.3B-en": (24, 2048, 16, 50257, 1024),
    "demo": (3, 256, 4, 2048, 128),
}
OURS = {  # names -> flags
    "ours": "--bf16 --fp16_opt_level O2",
    "ours eager": "--bf16 --fp16_opt_level O2 --torch_compile 0",
    "ours no graphs": "--bf16 --fp16_opt_level O2 --cuda_graphs 0",
    "ours documents": "--bf16 --fp16_opt_level O2 --document_masking attention",
    "ours fp8": "--bf16 --fp16_opt_level O2 --fp8",
    "ours O1": "--bf16",
    "ours fp16": "--fp16 --fp16_opt_level O2",
    "ours recompute": "--bf16 --fp16_opt_level O2 --recompute 1",
    "ours fp16 recompute": "--fp16 --fp16_opt_level O2 --recompute 1",
    "ours stage1": "--bf16 --fp16_opt_level O2 --sharding stage1",
    "ours stage2": "--bf16 --fp16_opt_level O2 --sharding stage2",
    "ours stage3": "--bf16 --fp16_opt_level O2 --sharding stage3",
    "ours fp32": "",
}
OTHERS = {
    "loop": "loop",
    "trainer": "trainer",
    "trainer zero2": "trainer --zero 2",
    "trainer zero3": "trainer --zero 3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium-en", choices=SIZES)
    parser.add_argument("--vocab_size", type=int, help="entries; unset: those of the model")
    parser.add_argument("--micro", type=int, default=16, help="samples")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="one per GPU")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--peak", type=float, default=989.0, help="peak of a GPU, 10^12 operations per second")
    parser.add_argument("--more", default="", help="flags added to ours")
    parser.add_argument("--only", nargs="*", default=["ours", "loop", "trainer"])
    parser.add_argument("--json", dest="file")
    arguments = parser.parse_args()
    if arguments.vocab_size is None:
        arguments.vocab_size = SIZES[arguments.model][3]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-") as name:
        write_data(Path(name) / "data" / "c", min(arguments.vocab_size, 50257))
        for _ in range(arguments.rounds):
            for case in arguments.only:
                result = ours(Path(name), case, arguments) if case in OURS else other(Path(name), case, arguments)
                if result:
                    found[case].append(result)
                    print_row(case, result, arguments)
    if arguments.file:
        Path(arguments.file).write_text(json.dumps(found))


def print_row(case: str, result: dict[str, Any], arguments: argparse.Namespace) -> None:
    layers, width, _, _, length = SIZES[arguments.model]
    parameters = (arguments.vocab_size + length) * width + layers * 12 * width * width
    flops = 6 * parameters + 12 * layers * width * length
    tokens = arguments.micro * length / statistics.median(result["seconds"])
    result["tokens_per_second"] = tokens
    mfu = tokens * flops / 1e12 / arguments.peak
    print(
        f"{case:<16}{tokens:>12,.0f} tokens/s/GPU {tokens / length:>8.2f} samples/s  MFU {mfu:.1%}"
        f"  {result['memory']:6.2f} GiB  first step after {result['first']:.1f} s",
        flush=True,
    )


def launcher(arguments: argparse.Namespace) -> list[str]:
    if arguments.processes == 1:
        return [sys.executable]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.processes)]
    return [sys.executable, *run]


def other(folder: Path, case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("--layers", "--width", "--heads", "--vocabulary", "--length")
    words = [*OTHERS[case].split(), "--data", folder / "data" / "c"]
    layers, width, heads, _, length = SIZES[arguments.model]
    values = (layers, width, heads, arguments.vocab_size, length)
    words += [word for pair in zip(names, values, strict=True) for word in pair]
    words += ["--micro", arguments.micro, "--steps", arguments.steps, "--dropout", arguments.dropout]
    script = str(ROOT / "benchmarks" / "loops.py")
    done = subprocess.run([*launcher(arguments), script, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        print(case, "failed", done.stderr[-2000:], file=sys.stderr)
        return {}
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def ours(folder: Path, case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    layers, width, heads, _, length = SIZES[arguments.model]
    words = (
        f"--num_hidden_layers {layers} --hidden_size {width} --num_attention_heads {heads} "
        f"--vocab_size {arguments.vocab_size} "
        f"--max_position_embeddings {length} --max_seq_length {length} --input_dir {folder}/data --split 1,0,0 "
        f"--output_dir {folder}/out --overwrite_output_dir --per_device_train_batch_size {arguments.micro} "
        f"--max_steps {arguments.steps} --logging_steps 10 --save_strategy no --do_train --disable_tqdm 1 "
        "--report_to none --learning_rate 1e-4 --warmup_steps 10 --max_grad_norm 1.0 --weight_decay 0.1 "
        f"--hidden_dropout_prob {arguments.dropout} --attention_probs_dropout_prob {arguments.dropout} "
        f"{OURS[case]} {arguments.more}"
    ).split()
    marks = folder / "marks.json"
    environment = {**os.environ, "GPTLM_STEP_TIMES": str(marks)}
    script = [str(ROOT / "benchmarks" / "timed.py"), "pretrain"]
    done = subprocess.run([*launcher(arguments), *script, *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        print(case, "failed", done.stdout[-1500:], done.stderr[-3000:], file=sys.stderr)
        return {}
    return json.loads(marks.read_text())


if __name__ == "__main__":
    main()
