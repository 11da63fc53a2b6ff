"""Precision, ZeRO stages, recomputation and parallel layouts side by side: losses, speed, memory.

    python benchmarks/strategies.py [--model gpt2-medium-en] [--processes 2] [--micro 8] [--steps 20] [--only NAME ...]

Every case starts from the same random weights and reads the same samples. Printed: tokens/s of all GPUs together
(median of the steps after the tenth), the peak memory of one GPU, and the largest difference of a loss from the first
case.

With --one_card all processes run on one GPU. NCCL treats each as a separate machine, so that layouts of several GPUs
can be tried: losses and memory are real, speeds are not.
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
from typing import Any

import numpy as np

from gptlm.data.writer import IndexedTokensWriter

ROOT = Path(__file__).parents[1]
O2 = "--fp16_opt_level O2"
CASES = {
    "fp32": "",
    "bf16 O1": "--bf16",
    "bf16 O2": f"--bf16 {O2}",
    "fp16 O1": "--fp16",
    "fp16 O2": f"--fp16 {O2}",
    "bf16 O2 master gradients": f"--bf16 {O2} --amp_master_grad",
    "bf16 O2 stage1": f"--bf16 {O2} --sharding stage1",
    "bf16 O2 stage2": f"--bf16 {O2} --sharding stage2",
    "bf16 O2 stage3": f"--bf16 {O2} --sharding stage3",
    "bf16 O1 stage2": "--bf16 --sharding stage2",
    "fp16 O1 stage2": "--fp16 --sharding stage2",
    "fp16 O2 stage2": f"--fp16 {O2} --sharding stage2",
    "bf16 O2 recompute full": f"--bf16 {O2} --recompute 1",
    "bf16 O2 recompute full_attn": f"--bf16 {O2} --recompute 1 --recompute_granularity full_attn",
    "bf16 O2 recompute core_attn": f"--bf16 {O2} --recompute 1 --recompute_granularity core_attn",
    "bf16 O2 tp2": f"--bf16 {O2} --tensor_parallel_degree 2",
    "bf16 O2 tp2 sp": f"--bf16 {O2} --tensor_parallel_degree 2 --sequence_parallel 1",
    "bf16 O2 pp2": f"--bf16 {O2} --pipeline_parallel_degree 2 --per_device_train_batch_size 2",
    "bf16 O2 tp4": f"--bf16 {O2} --tensor_parallel_degree 4",
    "bf16 O2 tp4 sp": f"--bf16 {O2} --tensor_parallel_degree 4 --sequence_parallel 1",
    "bf16 O2 pp4": f"--bf16 {O2} --pipeline_parallel_degree 4 --per_device_train_batch_size 2",
    "bf16 O2 tp2 pp2": f"--bf16 {O2} --tensor_parallel_degree 2 --pipeline_parallel_degree 2 "
    "--per_device_train_batch_size 2",
    "bf16 O2 tp2 stage2": f"--bf16 {O2} --tensor_parallel_degree 2 --sharding stage2",
    "bf16 O2 documents": f"--bf16 {O2} --document_masking attention",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium-en")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--one_card", action="store_true", help="all processes on one GPU")
    parser.add_argument("--micro", type=int, default=8, help="samples of 1024 tokens per GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--more", default="", help="flags added to every case")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gptlm-benchmark-") as name:
        folder = Path(name)
        write_data(folder / "data" / "c")
        first: list[float] = []
        print(f"{'case':<30}{'tokens/s':>12}{'GiB':>8}{'loss differs':>14}{'last loss':>11}", flush=True)
        for case in arguments.only:
            losses, speed, memory = run(folder, case, arguments)
            first = first or losses
            if not losses:
                print(f"{case:<30}{'failed':>12}", flush=True)
                continue
            differs = max(abs(a - b) for a, b in zip(losses, first, strict=True))
            print(f"{case:<30}{speed:>12,.0f}{memory:>8.2f}{differs:>14.1e}{losses[-1]:>11.4f}", flush=True)


def write_data(prefix: Path, vocabulary: int = 50257) -> None:
    """Increasing sequences of token ids, which a model can learn to continue."""
    rng = np.random.RandomState(0)
    writer = IndexedTokensWriter(str(prefix), vocabulary)
    for length in rng.randint(100, 2000, 4000):
        ids = (rng.randint(50000) + np.cumsum(rng.randint(1, 4, length))) % vocabulary
        writer.add(ids, [length])
    writer.finish({})


def run(folder: Path, case: str, arguments: argparse.Namespace) -> tuple[list[float], float, float]:
    words = (
        f"--model_name_or_path {arguments.model} --input_dir {folder}/data --output_dir {folder}/out "
        f"--overwrite_output_dir --split 1,0,0 --max_seq_length 1024 --per_device_train_batch_size {arguments.micro} "
        f"--global_batch_size {arguments.micro * arguments.processes} "
        f"--max_steps {arguments.steps} --logging_steps 1 --save_strategy no --do_train --device gpu --disable_tqdm 1 "
        "--report_to none --learning_rate 1e-4 --warmup_steps 10 --max_grad_norm 1.0 --weight_decay 0.01 "
        f"--hidden_dropout_prob 0 --attention_probs_dropout_prob 0 {CASES[case]} {arguments.more}"
    ).split()
    status, output = run_processes([str(ROOT / "scripts/run_pretrain.py"), *words], arguments)
    if status:
        print(output[-4500:], file=sys.stderr)
        return [], 0.0, 0.0
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "loss" in entry]
    speeds = [entry["interval_tokens_per_second_per_device"] for entry in steps[10:]]
    memory = max(entry.get("max_memory_allocated", 0) for entry in steps)
    return [entry["loss"] for entry in steps], statistics.median(speeds) * arguments.processes, memory


def run_processes(command: list[str], arguments: argparse.Namespace) -> tuple[int, str]:
    """Run `command` with --processes processes; returns exit code and output, of the first that failed if any did."""
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if not arguments.one_card:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.processes)]
        done = subprocess.run([sys.executable, *(launcher if arguments.processes > 1 else []), *command], **options)
        return done.returncode, done.stdout
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(arguments.processes)]
        processes = [
            subprocess.Popen([sys.executable, *command], env=one_card_environment(rank, arguments.processes),
                             stdout=log.open("w"), stderr=subprocess.STDOUT)
            for rank, log in enumerate(logs)
        ]  # fmt: skip
        try:
            while None in (found := [process.poll() for process in processes]) and not any(found):
                time.sleep(0.2)
        finally:  # after a failure the others would wait forever
            for process in processes:
                process.kill()
                process.wait()
        failed = next((rank for rank, status in enumerate(found) if status), 0)
        return found[failed] or 0, logs[failed].read_text()


def one_card_environment(rank: int, processes: int) -> dict[str, str]:
    """The environment of one of several processes on one GPU: each is the only process of its machine."""
    ranks = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29541}
    nccl = {"NCCL_HOSTID": f"machine{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
    return os.environ | {name: str(value) for name, value in (ranks | rendezvous | nccl).items()}


if __name__ == "__main__":
    main()
