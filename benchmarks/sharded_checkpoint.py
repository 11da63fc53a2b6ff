"""Memory and time of several processes while they save, resume, and write the final model, by checkpoint format.

    python benchmarks/sharded_checkpoint.py [--model gpt2-medium-en] [--processes 4] [--only NAME ...] [--folder DIR]

gloo on CPUs, in float32, which they compute fast. Each case trains one step, writes a checkpoint and the final model,
and resumes from the checkpoint for a second step. Sequences are short, so that memory is mostly weights, gradients and
optimizer state. Printed, of the process with most:

    train         peak resident memory of the first step and all before it
    save          its peak while the checkpoint is written, above the memory before; "wait" are the seconds until
                  training continues, "all" until the checkpoint is complete
    resume        its peak while the checkpoint is read, above the memory after
    final         as "save", of the final model
    run           peak of both runs, as the largest and the smallest of the processes
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strategies import write_data

STRATEGIES = {"ddp": ""} | {f"stage{stage}": f"--sharding stage{stage}" for stage in (1, 2, 3)}
FORMATS = {"hf": "", "sharded": "", "async": "--async_save"}
CASES = {f"{strategy} {form}": (strategy, form) for strategy in STRATEGIES for form in FORMATS}
HEAD = ("train", "save", "wait", "all", "resume", "time", "final", "time", "run: most", "least", "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium-en")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--folder", help="where to write; default: the folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-", dir=arguments.folder) as name:
        folder = Path(name)
        write_data(folder / "data" / "c")
        print(f"{'case (GiB, seconds)':<20}" + "".join(f"{title:>10}" for title in HEAD), flush=True)
        for case in arguments.only:
            strategy, form = CASES[case]
            words = STRATEGIES[strategy].split() + FORMATS[form].split()
            words += ["--checkpoint_format", "hf" if form == "hf" else "sharded"]
            first = run(folder, [*words, "--max_steps", "1"], arguments)
            again = run(folder, [*words, "--max_steps", "2"], arguments)
            print(f"{case:<20}" + "".join(f"{value:>10.2f}" for value in figures(first, again)), flush=True)
            for file in (folder / "out").rglob("*.safetensors"):
                file.unlink()


def run(folder: Path, words: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process has noted."""
    resumes = words[-1] == "2"
    words = [
        *("--model_name_or_path", arguments.model, "--input_dir", f"{folder}/data", "--output_dir", f"{folder}/out"),
        *("--split", "1,0,0", "--max_seq_length", "8", "--per_device_train_batch_size", "1", "--save_steps", "1"),
        *("--logging_steps", "1", "--do_train", "--device", "cpu", "--disable_tqdm", "1", "--report_to", "none"),
        *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--continue_training", "0", *words),
        *(() if resumes else ("--overwrite_output_dir",)),
    ]  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GPTLM_NOTES": str(folder / "notes")}
    (folder / "notes").mkdir(exist_ok=True)
    command = [sys.executable, *launcher, __file__, "--of_run", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    return [json.loads((folder / "notes" / str(rank)).read_text()) for rank in range(arguments.processes)]


def figures(first: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[float]:
    """The columns of one case."""

    def most(ranks: list[dict[str, Any]], phase: str, key: str) -> float:
        return max(rank[phase][key] for rank in ranks)

    peaks = [max(one["run"]["peak"], two["run"]["peak"]) for one, two in zip(first, again)]
    return [
        most(first, "train", "peak"),
        most(first, "save", "above"), most(first, "save", "seconds"), most(first, "wait", "seconds"),
        most(again, "load", "over"), most(again, "load", "seconds"),
        most(first, "save_final", "above"), most(first, "save_final", "seconds"),
        max(peaks), min(peaks), max(peaks) / min(peaks),
    ]  # fmt: skip


# In the processes of a run -------------------------------------------------------------------------------------------


def measured_run(words: list[str]) -> None:
    """Pretrain with `words`, and note memory and time of each part."""
    from gptlm.checkpoint.checkpointer import Checkpointer
    from gptlm.commands.pretrain import parse_pretrain
    from gptlm.recipes.pretrain.run import pretrain

    notes: dict[str, dict[str, float]] = {}
    begun: dict[str, float] = {}

    def note_peak() -> None:
        notes["run"] = {"peak": max(memory("VmHWM"), notes.get("run", {}).get("peak", 0.0))}

    def measured(name: str) -> None:
        method: Callable[..., Any] = getattr(Checkpointer, name)

        def wrapped(self: Checkpointer, *args: Any) -> Any:
            if name == "wait" and ("save" not in begun or name in notes):  # the first one after the save counts
                return method(self, *args)
            if "train" not in notes and name != "load":
                notes["train"] = {"peak": memory("VmHWM")}
            note_peak()
            before, start = memory("VmRSS"), time.perf_counter()
            begun.setdefault(name, start)
            reset_peak()
            result = method(self, *args)
            peak, after = memory("VmHWM"), memory("VmRSS")
            note_peak()
            start = begun["save"] if name == "wait" else start
            seconds = time.perf_counter() - start
            notes.setdefault(name, {"peak": peak, "above": peak - before, "over": peak - after, "seconds": seconds})
            return result

        setattr(Checkpointer, name, wrapped)

    for name in ("save", "wait", "load", "save_final"):
        measured(name)
    pretrain(parse_pretrain(words, dict(os.environ)))
    note_peak()
    (Path(os.environ["GPTLM_NOTES"]) / os.environ["RANK"]).write_text(json.dumps(notes))


def memory(field: str) -> float:
    """A field of /proc/self/status in GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 2**20


def reset_peak() -> None:
    """Let the peak of resident memory be that from now on."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of_run"]:
        measured_run(sys.argv[2:])
    else:
        main()
