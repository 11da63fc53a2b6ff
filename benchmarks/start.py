"""Seconds from the start of a command to its first step or token, next to importing torch and transformers.

    python benchmarks/start.py [--rounds 5] [--only NAME ...] [--gpu]

A tiny model (2 layers of 64, 1,000 entries) and tiny data, made by this script. "first" is the time until the line with
the first result is read: one token of `predict`, the scores of one batch of `evaluate`, the log of the first training
step. "all" is the time until the process has ended. "CPU" is user and system time, which other load on the machine
changes least. "GPT2LMHeadModel" and "Trainer" are the imports of these classes of transformers alone. Rounds are
interleaved, after one of warm-up, in which all byte code is compiled, even with PYTHONDONTWRITEBYTECODE; medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from made import Words, make_model, make_rows
from strategies import write_data

IMPORTS = "import torch, transformers"
FLOORS = {  # what transformers' own model and Trainer take, without any work
    "GPT2LMHeadModel": f"{IMPORTS}; transformers.GPT2LMHeadModel",
    "Trainer": f"{IMPORTS}; transformers.GPT2LMHeadModel, transformers.Trainer",
}
COMMANDS = {  # name -> what the first line with a result contains, flags; {} is the folder
    "predict": ("", "--model_name_or_path {0}/model --prompt Hello --tgt_length 1"),
    "evaluate": ("acc", "--model_name_or_path {0}/model --task LAMBADA --eval_path {0}/lambada.jsonl"),
    "pretrain": (
        "loss: ",
        "--num_hidden_layers 2 --hidden_size 64 --num_attention_heads 2 --vocab_size 1000 --max_seq_length 64 "
        "--input_dir {0}/data --split 1,0,0 --output_dir {0}/pretrain --max_steps 2 --logging_steps 1 --do_train "
        "--overwrite_output_dir",
    ),
    "sft": (
        "loss: ",
        "--model_name_or_path {0}/model --dataset_name_or_path {0}/sft --output_dir {0}/sft_out --max_length 64 "
        "--max_steps 2 --logging_steps 1 --do_train --overwrite_output_dir",
    ),
    "help": ("usage", "--help"),
    "print_config": ("{", "--print_config --model_name_or_path gpt2-en --input_dir {0}/data --output_dir {0}/printed"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(COMMANDS), choices=COMMANDS)
    parser.add_argument("--gpu", action="store_true", help="commands use a GPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-") as name:
        folder = Path(name)
        make_model(folder / "model", "tiny", None, vocabulary=1000)
        words = Words(folder / "model")
        make_rows(folder / "sft", words, 20, 64)
        (folder / "lambada.jsonl").write_text(json.dumps({"text": words.text(20, 20)[1:]}) + "\n")
        write_data(folder / "data" / "c", 1000)
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in (IMPORTS, *FLOORS, *arguments.only)}
        for _ in range(arguments.rounds + 1):
            for row in found:
                found[row].append(measure(row, folder, gpu=arguments.gpu))
    middle = {
        row: [statistics.median(column) for column in zip(*times[1:], strict=True)] for row, times in found.items()
    }
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, medians of {arguments.rounds}\n")
    columns = ("first", "CPU", "all", "CPU")
    print(f"{'':<28}{''.join(f'{column:>8}' for column in columns)}   relative to the imports")
    for row, values in middle.items():
        ratios = [value / base for value, base in zip(values, middle[IMPORTS], strict=True)]
        print(f"{row:<28}" + "".join(f"{v:>7.2f}s" for v in values) + "   " + "".join(f"{r:>7.2f}" for r in ratios))


def measure(row: str, folder: Path, *, gpu: bool) -> tuple[float, float, float, float]:
    """Seconds to the first result, and of CPU time until then; the same to the end."""
    awaited, command = None, ["-c", FLOORS.get(row, IMPORTS)]
    if row in COMMANDS:
        awaited, flags = COMMANDS[row]
        runs = row not in ("help", "print_config")  # these two are of `pretrain`
        command = ["-m", "gptlm", row if runs else "pretrain", *flags.format(folder).split()]
        command += ["--device", "gpu" if gpu else "cpu"] if runs else []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    start, first = time.perf_counter(), None
    errors = open(folder / "errors", "w+")
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        if first is None and awaited is not None and awaited in line:
            used = psutil.Process(process.pid).cpu_times()
            first = time.perf_counter() - start, used.user + used.system
    _, status, usage = os.wait4(process.pid, 0)
    end = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    errors.seek(0)
    if status or (first is None and awaited is not None):
        raise SystemExit(f"{row} failed:\n{errors.read()[-3000:]}")
    return (*(first or end), *end)


if __name__ == "__main__":
    main()
