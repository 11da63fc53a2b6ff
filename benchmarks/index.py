"""The sample index of a large blend: memory and CPU time of building it, and of the processes that read it.

    python benchmarks/index.py FOLDER [--corpora 100] [--documents 10000000] [--data_order paddlenlp]

One epoch of samples of 2,048 tokens from corpora of so many documents each, of 24 to 2,024 tokens. No text is needed:
the corpora share one .idx by hard links, and one .bin, a sparse file of zeros. FOLDER needs 12 bytes for each document
and 200 MB; what was written there is removed. Every step is a process of its own; the memory of imports is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from gptlm.data.blocks import build_split
from gptlm.data.cache import IndexCache
from gptlm.data.corpora import open_corpora
from gptlm.data.indexed import DTYPES, HEADER, MAGIC

LENGTH = 2048
CODE = next(code for code, dtype in DTYPES.items() if dtype == np.uint16)
SHARE = 0.99  # of an epoch: no corpus is read twice
READ = 1000  # samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpora", type=int, default=100)
    parser.add_argument("--documents", type=int, default=10_000_000, help="of each corpus")
    parser.add_argument("--data_order", default="paddlenlp")
    parser.add_argument("--step", choices=("build", "read"), help="one step in this process, on corpora that exist")
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(measure(arguments)))
        return
    write(arguments.folder, arguments.corpora, arguments.documents)
    try:
        for step in ("build", "read"):
            found = subprocess.run([sys.executable, *sys.argv, "--step", step], check=True, stdout=subprocess.PIPE)
            print(step, found.stdout.decode().strip(), flush=True)
    finally:
        for file in [*arguments.folder.glob("part*"), *(arguments.folder / "cache").glob("*")]:
            file.unlink()


def write(folder: Path, corpora: int, documents: int) -> None:
    """`corpora` pairs of .bin and .idx."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = (24 + (np.arange(documents) * 2654435761 >> 13) % 2001).astype(np.int32)
    ends = np.cumsum(sizes, dtype=np.int64) * 2
    with open(folder / "part0.idx", "wb") as file:
        file.write(MAGIC + np.array((1, CODE, documents, documents + 1), dtype=HEADER).tobytes())
        for array in (sizes, ends - 2 * sizes, np.arange(documents + 1, dtype=np.int64)):
            file.write(array.tobytes())
    with open(folder / "part0.bin", "wb") as file:
        file.truncate(int(ends[-1]))
    for number in range(1, corpora):
        for suffix in ("idx", "bin"):
            os.link(folder / f"part0.{suffix}", folder / f"part{number}.{suffix}")


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    before, started, cpu = memory(), time.monotonic(), time.process_time()
    cache = IndexCache([arguments.folder / "cache"])
    # weights differ a little, so that each corpus has an order of its own in the cache
    weights = [1 + number * 1e-6 for number in range(arguments.corpora)]
    words = " ".join(f"{weight} {arguments.folder}/part{number}" for number, weight in enumerate(weights))
    corpora = open_corpora(words, "100,0,0", arguments.data_order, cache)
    tokens = sum(corpus.token_count("train") for corpus in corpora)
    samples = int((tokens - 1) // LENGTH * SHARE)
    dataset = build_split(
        corpora, "train", num_samples=samples, seq_length=LENGTH, seed=1, cache=cache, data_order=arguments.data_order
    )
    assert dataset is not None
    found = {"samples": len(dataset), "documents": sum(len(corpus.tokens) for corpus in corpora), "tokens": tokens}
    found |= {"seconds": round(time.monotonic() - started, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    if arguments.step == "read":
        started = time.process_time()
        for i in range(len(dataset) // 2, len(dataset) // 2 + READ):
            assert len(dataset[i]) == LENGTH + 1
        found["microseconds_per_sample"] = round((time.process_time() - started) / READ * 1e6)
    return found | {"peak_mib": round((memory("VmHWM") - before) / 2**20)}


def memory(name: str = "VmRSS") -> int:
    """Resident memory of this process in bytes; "VmHWM": the most it had (`ru_maxrss` would include its parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
