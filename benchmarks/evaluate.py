"""`gptlm evaluate` on short and long texts against a forward pass with loss on full windows, side by side.

    python benchmarks/evaluate.py [--size 345M] [--batch N] [--only NAME ...] [--tokenizer FOLDER] [--model FOLDER]
        [--tiny]

- "lambada": 5,000 texts of 60 to 120 tokens, as in LAMBADA, whose last words are the targets
- "text": one text of 300,000 tokens in windows of 1024, each scored once (--overlapping_eval none)
- "ours forward", "stock forward": forward pass and loss of 8 x 1024 random tokens, of our model with compiled blocks,
  and of transformers' GPT2LMHeadModel

The model is random, made on the spot (`made.py`), vocabulary 50257; bfloat16 on a GPU. Tokens are inputs without
padding. The speed of `evaluate` is over all batches but the first tenth, without loading and tokenization.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from finetune import Peers, print_machine, timed
from generate import print_row
from made import SIZES, Words, make_model

OURS = ("lambada", "text")
FORWARD = ("ours forward", "stock forward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="345M", choices=SIZES)
    parser.add_argument("--batch", type=int, help="texts or windows; unset: evaluate's own choice")
    parser.add_argument("--only", nargs="*", default=[*OURS, *FORWARD], choices=[*OURS, *FORWARD])
    parser.add_argument("--more", default="", help="flags added to ours")
    parser.add_argument("--tokenizer", help="folder; unset: one made on the spot")
    parser.add_argument("--model", help="folder with weights and tokenizer; unset: made on the spot")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: does every row run?")
    arguments = parser.parse_args()
    texts, tokens, steps, windows = 5000, 300_000, 20, [8, 1024]
    if arguments.tiny:
        arguments.size, arguments.batch = "tiny", 4
        texts, tokens, steps, windows = 20, 3000, 1, [1, 128]
    print_machine(arguments, arguments.size)
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-") as name:
        folder = Path(name)
        model = Path(arguments.model or folder / "model")
        if not arguments.model:
            make_model(model, arguments.size, arguments.tokenizer)
        words, speeds = Words(model), {}
        lines = [json.dumps({"text": words.text(60, 120)[1:]}) for _ in range(texts)]
        (folder / "lambada.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "text.txt").write_text(words.text(tokens, tokens)[1:] + "\n")
        settings = ["--micro", windows[0], "--length", windows[1], "--steps", steps]
        others = [row for row in FORWARD if row in arguments.only]
        with Peers(model, others, settings, tiny=arguments.tiny) as peers:
            for row in (row for row in OURS if row in arguments.only):
                if found := ours(folder, model, row, arguments):
                    speeds[row] = print_row(row, *found)
            for row, result in peers.results():
                speeds[row] = print_row(row, statistics.median(result["tokens_per_second"]), result.get("memory", 0.0))
    print()
    for row in OURS:
        if row in speeds and "ours forward" in speeds:
            print(f"{row} / ours forward: {speeds[row] / speeds['ours forward']:.2f}")


def ours(folder: Path, model: Path, row: str, arguments: argparse.Namespace) -> tuple[float, float] | None:
    """Tokens per second, and GiB; None if it failed."""
    task = f"LAMBADA --eval_path {folder}/lambada.jsonl"
    if row == "text":
        task = f"TEXT --eval_path {folder}/text.txt --overlapping_eval none"
    command = (
        f"evaluate --model_name_or_path {model} --task {task} {'--device cpu' if arguments.tiny else '--bf16'} "
        f"{f'--batch_size {arguments.batch}' if arguments.batch else ''} {arguments.more}"
    )
    found, _ = timed(folder, command.split())
    if not found:
        return None
    batches = len(found["tokens"])
    skipped = min(max(1, batches // 10), batches - 1)
    return sum(found["tokens"][skipped:]) / sum(found["seconds"][skipped:]), found["memory"]


if __name__ == "__main__":
    main()
