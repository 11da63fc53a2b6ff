"""The data path against a loop as in the originals, in one run on one machine.

    python benchmarks/data.py [--input TEXT.jsonl --vocab_file V --merge_file M] [--megabytes 24] [--short_documents N]
    python benchmarks/data.py --sft ROWS [--input TEXT.jsonl --vocab_file V --merge_file M] [--workers N]

With --sft: fine-tuning on so many rows of 40 to 320 and 10 to 90 words, the time and memory of the data alone, first
with an empty cache, then with the encoded rows of the first start. Before them, the tokenizer
alone. Otherwise, in this order:

- preprocessing with 1 and 2 workers, in MB/s and relative to a loop of `tokenizer.encode` per document in a pool of
  worker processes, as in Megatron-LM's preprocess_data.py
- building the sample index of 8 million documents and 8.8 billion tokens
- reading batches of 2048 tokens in one process
- memory while preprocessing many short documents

Without --input the text is Python's standard library, and the vocabulary is trained on it.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from gptlm.data.blocks import BlockDataset
from gptlm.data.documents import read_batches
from gptlm.data.indexed import open_tokens
from gptlm.data.order import build_order
from gptlm.data.preprocess import EncodeSettings, write_corpus
from gptlm.data.writer import IndexedTokensWriter

LONGER = 10  # times as much text for the fast tokenizer, whose start would dominate otherwise
ROUNDS = 3  # the best one is reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", help="a .jsonl with the key text")
    parser.add_argument("--vocab_file")
    parser.add_argument("--merge_file")
    parser.add_argument(
        "--megabytes", type=float, default=24, help="text of one measurement; repeated if there is less"
    )
    parser.add_argument("--short_documents", type=int, default=2_000_000)
    parser.add_argument("--sft", type=int, metavar="ROWS")
    parser.add_argument("--workers", type=int, help="encoder processes of --sft; unset: one per core")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, numpy {np.__version__}")
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-") as name:
        folder = Path(name)
        if arguments.sft:
            measure_sft(folder, arguments)
            return
        measure_preprocessing(folder, arguments)
        measure_index()
        measure_reading(folder)
        measure_memory(folder, arguments.short_documents)


# Preprocessing ----------------------------------------------------------------------------------------------------


def measure_preprocessing(folder: Path, arguments: argparse.Namespace) -> None:
    from gptlm.model.tokenizer import load_gpt2_files, train_tokenizer  # slow to import, and workers import this file

    texts = _texts(arguments)
    if arguments.vocab_file:
        tokenizer = load_gpt2_files(arguments.vocab_file, arguments.merge_file)
    else:
        tokenizer = train_tokenizer(texts, 8192)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    whole = sum(map(len, lines))
    for name, factor in (("text", 1), ("long", LONGER)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(max(1, round(arguments.megabytes * 1e6 / whole)) * factor):
                file.writelines(lines)
    size = (folder / "text.jsonl").stat().st_size / 1e6
    print(f"\npreprocessing {size:.1f} MB ({whole / 1e6:.1f} MB of different text)")
    print(f"{'':<44}{'1 worker':>14}{'2 workers':>14}{'2 over 1':>10}")
    loop = [_rate(size, partial(_encode_loop, folder, workers)) for workers in (1, 2)]
    print(f"{'tokenizer.encode per document':<44}{loop[0]:>9.2f} MB/s{loop[1]:>9.2f} MB/s{loop[1] / loop[0]:>10.2f}")
    reference = (folder / "loop.bin").read_bytes()
    for backend, text, factor in (("tokenizers", "text", 1), ("gigatoken", "long", LONGER)):
        ours = [_rate(size * factor, partial(_preprocess, folder, text, backend, workers)) for workers in (1, 2)]
        assert (folder / "ours.bin").read_bytes() == reference * factor, backend
        name = f"gptlm, --tokenizer_backend {backend}"
        print(f"{name:<44}{ours[0]:>9.2f} MB/s{ours[1]:>9.2f} MB/s{ours[1] / ours[0]:>10.2f}")
        print(f"{'  ratio to the loop':<44}{ours[0] / loop[0]:>14.2f}{ours[1] / loop[1]:>14.2f}")


def _rate(size: float, work: Callable[[], None]) -> float:
    return size / min(_seconds(work) for _ in range(ROUNDS))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _preprocess(folder: Path, text: str, backend: str, workers: int) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    writer = IndexedTokensWriter(str(folder / "ours"), tokenizer.get_vocab_size())
    settings = EncodeSettings(str(folder / "tokenizer.json"), ("text",), None, False, False, backend=backend)
    write_corpus(read_batches([folder / f"{text}.jsonl"]), settings, [writer], workers=workers)
    writer.finish({})


def _encode_loop(folder: Path, workers: int) -> None:
    """As in Megatron-LM: each line goes to a worker, ids come back as lists, documents are written one by one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    dtype = np.uint16 if vocab_size < 65500 else np.int32
    with (
        multiprocessing.get_context("spawn").Pool(workers, _load, [str(folder / "tokenizer.json")]) as pool,
        open(folder / "text.jsonl", encoding="utf-8") as lines,
        open(folder / "loop.bin", "wb") as file,
    ):
        for ids, _ in pool.imap(_encode_line, lines, 32):
            file.write(np.array(ids, dtype=dtype).tobytes(order="C"))


def _load(tokenizer_file: str) -> None:
    _encode_line.tokenizer = Tokenizer.from_file(tokenizer_file)  # type: ignore[attr-defined]
    _encode_line.tokenizer.encode_special_tokens = True  # type: ignore[attr-defined]


def _encode_line(line: str) -> tuple[list[int], int]:
    return _encode_line.tokenizer.encode(json.loads(line)["text"]).ids, len(line)  # type: ignore[attr-defined]


def _texts(arguments: argparse.Namespace) -> list[str]:
    return (
        [json.loads(line)["text"] for line in open(arguments.input, encoding="utf-8")]
        if arguments.input
        else [file.read_text(errors="replace") for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    )


# Order and reading ------------------------------------------------------------------------------------------------


def measure_index() -> None:
    sizes = np.random.RandomState(0).randint(200, 2001, 8_000_000).astype(np.int32)
    tokens = int(sizes.sum(dtype=np.int64))
    samples = (tokens - 1) // 2048

    def build() -> None:
        build_order(sizes, 0, len(sizes), num_samples=samples, seq_length=2048, seed=1, data_order="paddlenlp")

    seconds = min(_seconds(build) for _ in range(ROUNDS))
    print(f"\nindex of {len(sizes):,} documents, {tokens / 1e9:.1f} billion tokens: {seconds:.2f} s")


def measure_reading(folder: Path) -> None:
    from gptlm.data.collate import collate_blocks  # imports torch, which the workers do not need

    rng = np.random.RandomState(0)
    writer = IndexedTokensWriter(str(folder / "read"), 50257)
    for _ in range(20):
        lengths = rng.randint(200, 2001, 10_000)
        writer.add(rng.randint(0, 50257, int(lengths.sum())), lengths)
    writer.finish({})
    tokens = open_tokens(str(folder / "read"))
    samples = (writer.total - 1) // 2048
    order = build_order(
        tokens.sizes, 0, len(tokens), num_samples=samples, seq_length=2048, seed=1, data_order="paddlenlp"
    )
    dataset = BlockDataset(tokens, order)

    def read() -> None:
        for start in range(0, 16_000, 8):
            collate_blocks([dataset[i] for i in range(start, start + 8)])

    seconds = min(_seconds(read) for _ in range(ROUNDS))
    speed = 16_000 * 2048 / seconds / 1e6
    print(f"reading {writer.total / 1e6:.0f} M tokens in batches of 8 x 2048: {speed:.0f} M tokens/s")


# Memory -----------------------------------------------------------------------------------------------------------


def measure_memory(folder: Path, documents: int) -> None:
    """In a new process, whose memory has no earlier measurements in it."""
    with open(folder / "short.jsonl", "w") as file:
        for start in range(0, documents, 1000):
            file.writelines(f'{{"text": "word {i}"}}\n' for i in range(start, min(start + 1000, documents)))
    process = multiprocessing.get_context("spawn").Process(target=_short_documents, args=(folder, documents))
    process.start()
    process.join()


def _short_documents(folder: Path, documents: int) -> None:
    writer = IndexedTokensWriter(str(folder / "short"), 50257)
    settings = EncodeSettings(str(folder / "tokenizer.json"), ("text",), 0, True, False, backend="gigatoken")
    marks: list[tuple[int, float]] = []

    def note(progress) -> None:
        if progress.documents >= documents * len(marks) // 8:
            marks.append((progress.documents, psutil.Process().memory_info().rss / 2**20))

    write_corpus(read_batches([folder / "short.jsonl"]), settings, [writer], workers=2, on_progress=note)
    writer.finish({})
    shown = ", ".join(f"{count / 1e6:.2f} M: {megabytes:.0f} MB" for count, megabytes in marks[1:])
    print(f"\n{documents:,} short documents, memory of the writing process after {shown}")


# Fine-tuning -----------------------------------------------------------------------------------------------------


def measure_sft(folder: Path, arguments: argparse.Namespace) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from gptlm.model.tokenizer import load_gpt2_files, train_tokenizer

    texts = _texts(arguments)
    tokenizer = (
        load_gpt2_files(arguments.vocab_file, arguments.merge_file)
        if arguments.vocab_file
        else train_tokenizer(texts, 32_000)
    )
    tokenizer.save_pretrained(folder / "model")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    words, choice = " ".join(texts).split(), random.Random(0)
    with open(folder / "train.jsonl", "w") as file:
        for _ in range(arguments.sft):
            first, prompt, response = (choice.randrange(*span) for span in ((len(words) - 410,), (40, 320), (10, 90)))
            pair = words[first : first + prompt], words[first + prompt : first + prompt + response]
            file.write(json.dumps(dict(zip(("src", "tgt"), map(" ".join, pair), strict=True))) + "\n")
    megabytes = (folder / "train.jsonl").stat().st_size / 1e6
    print(f"\nfine-tuning on {arguments.sft:,} rows, {megabytes:.0f} MB, {len(tokenizer):,} entries:")
    spawn = multiprocessing.get_context("spawn")
    jobs: list[tuple[Any, tuple]] = [(_encode, (folder,))]
    jobs += [(_load, (folder, start, arguments.workers)) for start in ("first start", "next start")]
    for target, inputs in jobs:
        process = spawn.Process(target=target, args=inputs)
        process.start()
        process.join()


def _encode(folder: Path) -> None:
    """Only what cannot be left out: the tokenizer's own batches, on all cores."""
    from gptlm.model.tokenizer import load_tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = load_tokenizer(str(folder / "model")).backend_tokenizer
    records = [json.loads(line) for line in open(folder / "train.jsonl")]
    texts = [record[name] for record in records for name in ("src", "tgt")]
    started, cpu = time.monotonic(), cpu_seconds()
    for first in range(0, len(texts), 2000):
        tokenizer.encode_batch_fast(texts[first : first + 2000], add_special_tokens=False)
    print(f"encoding alone: {time.monotonic() - started:.2f} s, {cpu_seconds() - cpu:.2f} s of CPU time")


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    return sum(os.times()[:4])


def _load(folder: Path, start: str, workers: int | None) -> None:
    from transformers import Trainer  # noqa: F401 - what a run imports in any case

    from gptlm.commands.sft import parse_sft
    from gptlm.model.tokenizer import load_tokenizer
    from gptlm.recipes.sft.data import load_data
    from gptlm.recipes.sft.sources import find_sources

    words = ["--model_name_or_path", folder / "model", "--dataset_name_or_path", folder / "train.jsonl", "--do_train"]
    words += ["--output_dir", folder / "out", "--data_cache", folder / "cache", "--max_length", 1024]
    words += ["--preprocessing_num_workers", workers] if workers else []
    run = parse_sft([str(word) for word in words], {})
    tokenizer = load_tokenizer(str(folder / "model"))
    before = psutil.Process().memory_full_info()
    started, cpu = time.monotonic(), cpu_seconds()
    data = load_data(run, find_sources(run), tokenizer)
    seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu
    after, peak = psutil.Process().memory_full_info(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    own, most = (after.uss - before.uss) / 2**20, (peak - before.rss) / 2**20
    print(
        f"{start}: {seconds:.2f} s, {cpu:.2f} s of CPU time, {own:.0f} MB, "
        f"at most {most:.0f} MB with mapped files, {len(data.train):,} samples"
    )


if __name__ == "__main__":
    main()
