"""Fine-tuning with gptlm, the stock Trainer (with PEFT) and TRL's SFTTrainer, side by side.

    python benchmarks/finetune.py [--size 345M] [--micro 8] [--length 640] [--only NAME ...] [--steps 60]
        [--tokenizer FOLDER] [--model FOLDER] [--tiny]

Model and rows are random and made on the spot (`made.py`): vocabulary 50257, GPT-2's dropout of 0.1, 1,600 rows of 41
to 575 tokens, 308 on average. Ours is `gptlm sft` as users run it, logging every 10 steps; the others are in
`peers.py`. TRL comes with `pip install -e '.[benchmark]'`. Tokens are those of rows, without padding; rows per second
are tokens per second over a row's mean tokens, also where several rows share a pack. A speed is the median over means
of 10 steps after step 20 (ours), or of 5 steps after the first third (the others). "pretrain" rows are `gptlm pretrain`
with the same tokens per step and dropout.

All of ours start together, because imports and compilation take longer than a measurement. After 15 steps each waits
until it has the machine for itself.

NAME may be a row or a group: full, lora, pretrain, ours, stock, trl. Without --tiny a GPU is needed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from made import SIZES, Words, make_model, make_rows
from strategies import write_data

ROOT = Path(__file__).parents[1]
OURS = {  # names -> command and flags
    "ours padded": "sft",
    "ours padded grouped": "sft --group_by_length 1",
    "ours packed": "sft --zero_padding 1",
    "ours lora padded": "sft --lora 1",
    "ours lora packed": "sft --lora 1 --zero_padding 1",
    "pretrain": "pretrain",
    "pretrain masked": "pretrain --document_masking attention",
}
PEERS = (
    "stock padded", "stock lora padded", "stock lora padded bf16",
    "trl bfd", "trl wrapped",
    "trl lora bfd", "trl lora wrapped", "trl lora bfd bf16", "trl lora wrapped bf16",
)  # fmt: skip
ROWS = (*OURS, *PEERS)
RATIOS = (  # of rows per second, each against the fastest of the others that were measured
    ("ours padded", ("stock padded",)),
    ("ours packed", ("stock padded",)),
    ("ours packed", ("trl bfd", "trl wrapped")),
    ("ours packed", ("pretrain",)),
    ("ours lora padded", ("stock lora padded", "stock lora padded bf16")),
    ("ours lora packed", ("stock lora padded", "stock lora padded bf16")),
    ("ours lora packed", ("trl lora bfd", "trl lora wrapped", "trl lora bfd bf16", "trl lora wrapped bf16")),
    ("ours lora padded", ("ours padded",)),
    ("ours lora packed", ("ours packed",)),
    ("pretrain masked", ("pretrain",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="345M", choices=SIZES)
    parser.add_argument("--micro", type=int, default=8, help="rows or packs")
    parser.add_argument("--length", type=int, default=640, help="tokens of a pack, and most of a row")
    parser.add_argument("--steps", type=int, default=60, help="of ours; the others make two thirds, at least 20")
    parser.add_argument("--only", nargs="*", default=list(ROWS), help=f"rows or groups of {', '.join(ROWS)}")
    parser.add_argument("--more", default="", help="flags added to ours")
    parser.add_argument("--tokenizer", help="folder; unset: one made on the spot")
    parser.add_argument("--model", help="folder with weights and tokenizer; unset: made on the spot")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: does every row run?")
    arguments = parser.parse_args()
    if arguments.tiny:  # batches of other sizes would take minutes
        arguments.size, arguments.micro, arguments.length, arguments.steps = "tiny", 2, 128, 30
    count = 60 if arguments.tiny else 1600
    rows = chosen(arguments.only)
    print_machine(arguments, f"{arguments.size}, micro-batch {arguments.micro} x {arguments.length}")
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-") as name:
        folder = Path(name)
        model = Path(arguments.model or folder / "model")
        if not arguments.model:
            make_model(model, arguments.size, arguments.tokenizer)
        mean = make_rows(folder / "sft", Words(model), count, arguments.length)
        if any(row.startswith("pretrain") for row in rows):
            write_data(folder / "data" / "c")
        print(f"{count} rows of {mean:.1f} tokens on average\n", flush=True)
        speeds = {}
        for row, result in measured(folder, model, rows, arguments):
            if result.get("tokens_per_second"):
                speeds[row] = print_row(row, result, mean)
    print_ratios(speeds)


def chosen(names: list[str]) -> list[str]:
    """The rows that are named, or contain a name as a word; "full" is fine-tuning without adapters."""
    found = set()
    for name in names:
        hits = {name} & set(ROWS) or {row for row in ROWS if name in row.split()}
        if name == "full":
            hits = {row for row in ROWS if "lora" not in row and "pretrain" not in row}
        if not hits:
            raise SystemExit(f"{name!r} is no row; expected some of {', '.join(ROWS)}")
        found |= hits
    return [row for row in ROWS if row in found]


def print_machine(arguments: argparse.Namespace, what: str) -> None:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    card = "CPU" if arguments.tiny else subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    print(f"{card}, torch {version('torch')}, transformers {version('transformers')}; {what}", flush=True)


def measured(
    folder: Path, model: Path, rows: list[str], arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start all of `rows`; yields each with its result when it has had the machine for itself."""
    words: list[Any] = ["--rows", folder / "sft" / "train.json", "--steps", max(20, arguments.steps * 2 // 3)]
    words += ["--micro", arguments.micro, "--length", arguments.length]
    with Peers(model, [row for row in rows if row in PEERS], words, tiny=arguments.tiny) as others:
        started = {
            row: Gated(folder / row.replace(" ", "_"), ours(folder, model, row, arguments))
            for row in rows
            if row in OURS
        }
        try:
            for run in started.values():
                run.wait_until_ready()
            for row, run in started.items():
                yield row, run.result()
        finally:
            for run in started.values():
                run.process.kill()
        yield from others.results()


def ours(folder: Path, model: Path, row: str, arguments: argparse.Namespace) -> list[str]:
    """The words of timed.py."""
    command, *flags = OURS[row].split()
    precision = "--device cpu" if arguments.tiny else "--bf16 --fp16_opt_level O2"
    words = (
        f"--output_dir {folder}/out_{row.replace(' ', '_')} --overwrite_output_dir --do_train "
        f"--max_steps {arguments.steps} --logging_steps 10 --save_strategy no --disable_tqdm 1 --report_to none "
        f"--per_device_train_batch_size {arguments.micro} --learning_rate 1e-5 {precision} {arguments.more}"
    ).split()
    if command == "pretrain":
        layers, width, heads, positions = SIZES[arguments.size]
        flags += (
            f"--num_hidden_layers {layers} --hidden_size {width} --num_attention_heads {heads} --vocab_size 50257 "
            f"--max_position_embeddings {positions} --max_seq_length {arguments.length} --split 1,0,0 "
            f"--input_dir {folder}/data --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1"
        ).split()
    else:
        flags += (
            f"--model_name_or_path {model} --dataset_name_or_path {folder}/sft --max_length {arguments.length} "
            f"--src_length {arguments.length * 8 // 10} --tgt_length {arguments.length * 2 // 10}"
        ).split()
    return [command, *words, *flags]


class Gated:
    """A run of timed.py that waits after its first steps.

    Args:
        gate: path of its files: the times, and the marks for which both sides wait.
    """

    def __init__(self, gate: Path, words: list[str]):
        self.gate, self.words = gate, words
        self.output = open(f"{gate}.log", "w+")
        environment = {**os.environ, "GPTLM_STEP_TIMES": f"{gate}.json", "GPTLM_GATE": str(gate)}
        command = [sys.executable, str(ROOT / "benchmarks" / "timed.py"), *words]
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=environment)

    def wait_until_ready(self) -> None:
        while self.process.poll() is None and not Path(f"{self.gate}.ready").exists():
            time.sleep(0.05)

    def result(self) -> dict[str, Any]:
        """Let it run to its end; its times, empty if it failed."""
        Path(f"{self.gate}.go").touch()
        if self.process.wait():
            self.output.seek(0)
            print(" ".join(self.words), "failed", self.output.read()[-3000:], file=sys.stderr)
            return {}
        return json.loads(Path(f"{self.gate}.json").read_text())


def timed(folder: Path, words: list[str]) -> tuple[dict[str, Any], str]:
    """Run `timed.py` with `words`; its times, empty if it failed, and its output."""
    marks = folder / "marks.json"
    marks.unlink(missing_ok=True)
    environment = {**os.environ, "GPTLM_STEP_TIMES": str(marks)}
    command = [sys.executable, str(ROOT / "benchmarks" / "timed.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(" ".join(words), "failed", done.stdout[-1500:], done.stderr[-3000:], file=sys.stderr)
        return {}, ""
    return json.loads(marks.read_text()), done.stdout + done.stderr


class Peers:
    """A process of peers.py, which imports its libraries while ours is measured. A context.

    Args:
        model: folder with weights and tokenizer.
        cases: the cases to run when `results` is called; without any nothing is started.
        words: flags of peers.py.
    """

    def __init__(self, model: Path, cases: list[str], words: list[Any], *, tiny: bool):
        self.cases = cases
        self.errors = tempfile.TemporaryFile("w+")
        command = [sys.executable, ROOT / "benchmarks" / "peers.py", model, *words, *(["--cpu"] if tiny else [])]
        pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.process = subprocess.Popen(list(map(str, command)), **pipes) if cases else None

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *args: object) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def results(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Run the cases; yields the name and the result of each that did not fail."""
        if not self.process:
            return
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("".join(f"{case}\n" for case in self.cases))
        self.process.stdin.close()
        for line in self.process.stdout:
            found = json.loads(line) if line.startswith('{"case"') else {}
            if "error" in found:
                print(found["case"], "failed", found["error"], file=sys.stderr)
            elif found:
                yield found["case"], found
        if self.process.wait():
            self.errors.seek(0)
            print("peers.py failed", self.errors.read()[-3000:], file=sys.stderr)


def print_row(row: str, result: dict[str, Any], mean: float) -> float:
    """Print it; returns its tokens per second."""
    speeds = result["tokens_per_second"]
    tokens = statistics.median(speeds[len(speeds) // 3 :] if row in PEERS else speeds)
    rows = "" if row.startswith("pretrain") else f"{tokens / mean:8.1f} rows/s"
    print(
        f"{row:<24}{rows:>16}{tokens:>12,.0f} tokens/s  {result.get('memory', 0):6.2f} GiB"
        f"  first step after {result['first']:.1f} s",
        flush=True,
    )
    return tokens


def print_ratios(speeds: dict[str, float]) -> None:
    print()
    for row, others in RATIOS:
        known = [other for other in others if other in speeds]
        if row in speeds and known:
            best = max(known, key=speeds.__getitem__)
            print(f"{row} / {best}: {speeds[row] / speeds[best]:.2f}")


if __name__ == "__main__":
    main()
