"""Seconds to write a checkpoint with and without checksums, and to compare them when a run resumes.

    python benchmarks/checkpoint.py [--size 1.3B] [--folder DIR] [--rounds 3]

A model of random float32 weights and its two moments, as training writes them: model.safetensors, and optimizer files
of 4 GiB. 1.3B are 16 GB, in memory (on the GPU, if there is one) and twice on the disk of `--folder`. "write" is until
everything is on the disk. "compare" reads from the page cache, "compare, cold" from the disk, after the kernel was
asked to forget the files. The two ways of writing alternate, after a round of warm-up; medians.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint import optimizer_state
from gptlm.disk import sync_tree
from gptlm.model.safetensors_io import save_tensors

SIZES = {"tiny": (2, 64), "125M": (12, 768), "345M": (24, 1024), "1.3B": (24, 2048)}  # layers, width
VOCABULARY, POSITIONS = 50257, 1024
FACTS = {
    "global_step": 1, "optimizer_steps": 1, "consumed_samples": 8, "loss_sum": 1.0, "world_size": 1,
    "weights_only": False, "loss_scale": None,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--folder", help="where to write; default: the folder for temporary files")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sizes = shapes(*SIZES[arguments.size])
    weights, *moments = [{name: torch.randn(*shape, device=device) for name, shape in sizes.items()} for _ in range(3)]
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        times.setdefault(name, []).append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-", dir=arguments.folder) as name:
        plain, final = Path(name) / "plain", Path(name) / "checkpoint-1"
        staging = checkpoint.staging_folder(Path(name), 1)
        for number in range(arguments.rounds + 1):
            if number == 1:  # the first round imports what the others find
                times.clear()
            for folder in (plain, final):
                shutil.rmtree(folder, ignore_errors=True)
            os.sync()
            ways: list[tuple[str, Callable[[], object]]] = [
                ("write, no checksums", lambda: (write(plain, weights, moments), sync_tree(plain))),
                ("write", lambda: (write(staging, weights, moments), checkpoint.commit(staging, FACTS))),
            ]
            for row, way in ways if number % 2 else reversed(ways):
                timed(row, way)
                os.sync()
            timed("compare", lambda: checkpoint.check_content(checkpoint.read(final)))
            for file in final.iterdir():
                forget(file)
            timed("compare, cold", lambda: checkpoint.check_content(checkpoint.read(final)))
        size = sum(file.stat().st_size for file in final.iterdir())
    print(f"{arguments.size}: {size / 1e9:.3f} GB from {device}, {os.cpu_count()} cores, {arguments.rounds} rounds\n")
    for row, seconds in sorted(times.items(), key=lambda entry: entry[0] != "write, no checksums"):
        middle = statistics.median(seconds)
        print(f"{row:<22}{middle:>8.2f} s{size / middle / 1e9:>8.2f} GB/s   ({min(seconds):.2f} to {max(seconds):.2f})")


def shapes(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a GPT-2 in the network's layout, by name."""
    found: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, width), "wpe.weight": (POSITIONS, width)}
    for layer in range(layers):
        for name, rows, columns in (
            ("attn.c_attn", 3, 1),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 4, 1),
            ("mlp.c_proj", 1, 4),
        ):
            found[f"h.{layer}.{name}.weight"] = (rows * width, columns * width)
            found[f"h.{layer}.{name}.bias"] = (rows * width,)
    return found


def write(folder: Path, weights: dict[str, Tensor], moments: list[dict[str, Tensor]]) -> None:
    folder.mkdir()
    save_tensors(folder / "model.safetensors", weights)
    kinds = list(zip(optimizer_state.MOMENTS, moments, strict=True))
    states = ((f"{name}|{kind}", values[name]) for name in weights for kind, values in kinds)
    optimizer_state.write(folder, states, writes=True)


def forget(file: Path) -> None:
    """Ask the kernel to drop the file from the page cache; it is on the disk."""
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
