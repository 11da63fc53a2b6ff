"""Memory and time of several processes while they save, resume, and write the final model, by checkpoint format.

    python benchmarks/sharded_checkpoint.py [--model gpt2-medium-en] [--processes 4] [--only NAME ...] [--folder DIR]
                                            [--one_card] [--more "FLAG ..."]

gloo on CPUs, in float32, which they compute fast; with --one_card NCCL and bfloat16 with float32 master weights, all
processes on one GPU (see strategies.py). Each case trains one step, writes a checkpoint and the final model, and
resumes from the checkpoint for a second step. Sequences are short, so that memory is mostly weights, gradients and
optimizer state. Printed of host memory, of the process with most:

    train         peak resident memory of the first step and all before it
    save          its peak while the checkpoint is written, above the memory before; "wait" are the seconds until
                  training continues, "all" until the checkpoint is complete
    resume        its peak while the checkpoint is read, above the memory after
    final         as "save", of the final model
    run           peak of both runs, as the largest and the smallest of the processes

On GPUs, also the peak of allocated GPU memory (`torch.cuda.max_memory_allocated`), as the largest and the smallest of
the processes: of the first step and all before it, while the checkpoint is written, and while it is read.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from strategies import run_processes, write_data

STRATEGIES = {"ddp": ""} | {f"stage{stage}": f"--sharding stage{stage}" for stage in (1, 2, 3)}
FORMATS = {"hf": "", "sharded": "", "async": "--async_save"}
CASES = {f"{strategy} {form}": (strategy, form) for strategy in STRATEGIES for form in FORMATS}
HEAD = ("train", "save", "wait", "all", "resume", "time", "final", "time", "run: most", "least", "ratio")
GPU_HEAD = ("GPU: train", "least", "save", "least", "resume", "least")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium-en")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--folder", help="where to write; default: the folder for temporary files")
    parser.add_argument("--one_card", action="store_true", help="all processes on one GPU")
    parser.add_argument("--more", default="", help="flags added to every case")
    arguments = parser.parse_args()
    head = HEAD + (GPU_HEAD if arguments.one_card else ())
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-", dir=arguments.folder) as name:
        folder = Path(name)
        write_data(folder / "data" / "c")
        print(f"{'case (GiB, seconds)':<20}" + "".join(f"{title:>10}" for title in head), flush=True)
        for case in arguments.only:
            strategy, form = CASES[case]
            words = STRATEGIES[strategy].split() + FORMATS[form].split()
            words += ["--checkpoint_format", "hf" if form == "hf" else "sharded"]
            first = run(folder, [*words, "--max_steps", "1"], arguments)
            again = run(folder, [*words, "--max_steps", "2"], arguments)
            values = figures(first, again) + (gpu_figures(first, again) if arguments.one_card else [])
            print(f"{case:<20}" + "".join(f"{value:>10.2f}" for value in values), flush=True)
            for file in (folder / "out").rglob("*.safetensors"):
                file.unlink()


def run(folder: Path, words: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process has noted."""
    resumes = words[-1] == "2"
    device = "--device gpu --bf16 --fp16_opt_level O2" if arguments.one_card else "--device cpu"
    words = [
        *("--model_name_or_path", arguments.model, "--input_dir", f"{folder}/data", "--output_dir", f"{folder}/out"),
        *("--split", "1,0,0", "--max_seq_length", "8", "--per_device_train_batch_size", "1", "--save_steps", "1"),
        *("--logging_steps", "1", "--do_train", *device.split(), "--disable_tqdm", "1", "--report_to", "none"),
        *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--continue_training", "0", *words),
        *(() if resumes else ("--overwrite_output_dir",)),
        *arguments.more.split(),
    ]  # fmt: skip
    (folder / "notes").mkdir(exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "GPTLM_NOTES": str(folder / "notes")}
    status, output = run_processes([__file__, "--of_run", *words], arguments)
    if status:
        sys.exit(output[-4000:])
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


def gpu_figures(first: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[float]:
    """The columns of GPU memory of one case."""
    phases = ((first, "train"), (first, "save"), (again, "load"))
    peaks = [[rank[phase]["gpu"] for rank in ranks] for ranks, phase in phases]
    return [value for of_ranks in peaks for value in (max(of_ranks), min(of_ranks))]


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
            if name == "wait" and ("save" not in notes or name in notes):  # the first one after the save counts
                return method(self, *args)
            if "train" not in notes and name != "load":
                notes["train"] = {"peak": memory("VmHWM"), "gpu": gpu_peak()}
            note_peak()
            before, start = memory("VmRSS"), time.perf_counter()
            begun.setdefault(name, start)
            reset_peaks()
            result = method(self, *args)
            peak, after, gpu = memory("VmHWM"), memory("VmRSS"), gpu_peak()
            note_peak()
            start = begun["save"] if name == "wait" else start
            seconds = time.perf_counter() - start
            found = {"peak": peak, "above": peak - before, "over": peak - after, "seconds": seconds, "gpu": gpu}
            notes.setdefault(name, found)
            return result

        setattr(Checkpointer, name, wrapped)

    for name in ("save", "wait", "load", "save_final"):
        measured(name)
    pretrain(parse_pretrain(words, dict(os.environ)))
    note_peak()
    (Path(os.environ["GPTLM_NOTES"]) / os.environ.get("RANK", "0")).write_text(json.dumps(notes))


def memory(field: str) -> float:
    """A field of /proc/self/status in GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 2**20


def gpu_peak() -> float:
    """The peak of allocated GPU memory in GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def reset_peaks() -> None:
    """Let the peaks of resident and of GPU memory be those from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of_run"]:
        measured_run(sys.argv[2:])
    else:
        main()
