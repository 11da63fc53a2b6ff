"""Generation with gptlm and with stock `generate`, side by side.

    python benchmarks/generate.py [--size 345M] [--batches 1 16] [--only NAME ...] [--tokenizer FOLDER] [--model FOLDER]
        [--tiny]

Greedy, 128 new tokens after prompts of 20 to 80 tokens, bfloat16 on a GPU. The model is random, made on the spot
(`made.py`), vocabulary 50257. Ours is `gptlm predict` as users run it, with the speed from its log: 9 batches, without
loading. Stock `generate` has a growing cache ("dynamic") or a static one, for which it compiles the forward pass; the
median of 3 batches after one of warm-up. NAME is a row (`ours 16`) or a group: ours, dynamic, static.
"""

import argparse
import re
import statistics
import tempfile
from pathlib import Path

from finetune import Peers, print_machine, timed
from made import SIZES, Words, make_model

KINDS = ("ours", "dynamic", "static")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="345M", choices=SIZES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], choices=(1, 16), help="batch sizes")
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=list(KINDS), help=f"rows, or groups of {', '.join(KINDS)}")
    parser.add_argument("--more", default="", help="flags added to ours")
    parser.add_argument("--tokenizer", help="folder; unset: one made on the spot")
    parser.add_argument("--model", help="folder with weights and tokenizer; unset: made on the spot")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: does every row run?")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.size, arguments.new_tokens = "tiny", 8
    rows = [f"{kind} {batch}" for kind in KINDS for batch in arguments.batches]
    rows = [row for row in rows if row in arguments.only or row.split()[0] in arguments.only]
    print_machine(arguments, f"{arguments.size}, {arguments.new_tokens} new tokens")
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-") as name:
        folder = Path(name)
        model = Path(arguments.model or folder / "model")
        if not arguments.model:
            make_model(model, arguments.size, arguments.tokenizer)
        words = Words(model)
        prompts = [words.text(20, 80).strip() for _ in range(9 * 16)]
        speeds = {}
        (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
        settings = ["--prompts", folder / "prompts.txt", "--new_tokens", arguments.new_tokens]
        others = [row for row in rows if not row.startswith("ours")]
        speeds = {}
        with Peers(model, others, settings, tiny=arguments.tiny) as peers:
            for row in (row for row in rows if row.startswith("ours")):
                if found := ours(folder, model, prompts, int(row.split()[1]), arguments):
                    speeds[row] = print_row(row, *found)
            for row, result in peers.results():
                speeds[row] = print_row(row, statistics.median(result["tokens_per_second"]), result.get("memory", 0.0))
    print()
    for batch in arguments.batches:
        for kind in KINDS[1:]:
            if f"ours {batch}" in speeds and f"{kind} {batch}" in speeds:
                print(f"ours {batch} / {kind} {batch}: {speeds[f'ours {batch}'] / speeds[f'{kind} {batch}']:.2f}")


def ours(
    folder: Path, model: Path, prompts: list[str], batch: int, arguments: argparse.Namespace
) -> tuple[float, float] | None:
    """Tokens per second by our log, and GiB; None if it failed."""
    file = folder / f"prompts_{batch}.txt"
    file.write_text("\n".join(prompts[: 9 * batch]) + "\n")
    words = (
        f"predict --model_name_or_path {model} --input_file {file} --batch_size {batch} "
        f"--tgt_length {arguments.new_tokens} {'--device cpu' if arguments.tiny else '--bf16'} {arguments.more}"
    ).split()
    found, output = timed(folder, words)
    speed = re.search(r"([\d.]+) tokens/s, without loading", output)
    return (float(speed[1]), found["memory"]) if found and speed else None


def print_row(row: str, tokens: float, memory: float) -> float:
    print(f"{row:<16}{tokens:>12,.0f} tokens/s  {memory:6.2f} GiB", flush=True)
    return tokens


if __name__ == "__main__":
    main()
