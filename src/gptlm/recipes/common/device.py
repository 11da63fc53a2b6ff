"""The device of a run, its precision, and its process group."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gptlm.config.args.training import TrainingArguments
from gptlm.errors import GptlmError, UsageError, named
from gptlm.parallel.dims import ParallelDims
from gptlm.parallel.process_groups import Mesh
from gptlm.quiet import deepspeed_without_gpu
from gptlm.ranks import is_launched, local_rank, local_world_size, world_size
from gptlm.recipes.common.peers import Peers, explain_timeout
from gptlm.upstream.torch import set_group_timeout

logger = logging.getLogger(__name__)

PEAKS = {  # part of a GPU's name -> see peak_flops; a name that is a prefix of another comes after it
    "B200": 2250e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "4090": 165e12,
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """The device of a run, "cuda" or "cpu", and its arithmetic, "fp16", "bf16" or "fp32".

    Half precision is autocast at level O1, half-precision weights at O2.
    """

    type: str
    precision: str
    level: str = "O1"

    @property
    def half_weights(self) -> bool:
        return self.precision != "fp32" and self.level == "O2"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16}[self.precision] if self.half_weights else torch.float32


def choose_device(device: str, *, fp16: bool, bf16: bool, level: str) -> Device:
    """The device and precision that are available; a fallback is logged as a warning.

    Raises:
        UsageError: for bfloat16 on a GPU without it.
    """
    wanted = "cpu" if device.lower().startswith("cpu") else "cuda"
    found = wanted if wanted == "cpu" or torch.cuda.is_available() else "cpu"
    if found != wanted:
        logger.warning("no GPU is visible; running on the CPU, which is slow (--device cpu says that it is meant)")
    half = precision_of(fp16, bf16, level)
    if half == "fp32":
        return Device(found, "fp32")
    if found == "cpu" and (half == "fp16" or wanted != "cpu"):
        logger.warning("--%s: half precision is not used on a CPU, the run is float32", half)
        return Device("cpu", "fp32")
    if found == "cuda" and half == "bf16" and not torch.cuda.is_bf16_supported():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16; use --fp16")
    return Device(found, half, level)


def precision_of(fp16: bool, bf16: bool, level: str) -> str:
    """The precision requested by the flags; O0 disables half precision."""
    return "fp32" if level == "O0" else "fp16" if fp16 else "bf16" if bf16 else "fp32"


def choose_arithmetic(training: TrainingArguments, device: Device) -> None:
    """Check --tf32, and let all kernels be deterministic with --full_determinism.

    Raises:
        UsageError: for --tf32 on a GPU without it.
    """
    if training.tf32 and device.type == "cpu":
        logger.warning("--tf32 has no effect: a CPU has none")
    elif training.tf32 and torch.cuda.get_device_capability() < (8, 0):
        raise UsageError(f"{torch.cuda.get_device_name()} has no TF32 (Ampere and newer GPUs have); leave --tf32 out")
    if training.full_determinism:
        from transformers import enable_full_determinism  # with the Trainer's modules, which prediction does not need

        enable_full_determinism(training.seed)
        logger.info("all kernels are deterministic, nothing is compiled (full_determinism)")


def peak_flops(device: Device) -> float | None:
    """Dense operations per second of one GPU in half precision, by the vendor's data sheet; None: not known."""
    if device.type != "cuda" or device.precision == "fp32":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for gpu, peak in PEAKS.items() if gpu in name), None)


def use_device(device: Device) -> None:
    """Without a GPU, silence libraries that look for one. Log when GPUs stay idle."""
    if device.type == "cpu":
        deepspeed_without_gpu()
        return
    gpus = torch.cuda.device_count()
    if gpus > 1 and not is_launched():
        logger.warning(
            "%d GPUs are visible, this process uses one; for all of them: torchrun --nproc_per_node %d ...",
            gpus,
            gpus,
        )


def own_device(kind: str) -> torch.device:
    """This process's device; the GPUs of a node are assigned to its processes in order."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank() % torch.cuda.device_count())


def tensor_groups(degree: int, device: torch.device, peers: Peers | None) -> Mesh:
    """The groups of `degree` processes that split a model for inference; joins the process group.

    Args:
        device: of this process. GPUs exchange activations over NCCL, the host its results over gloo.

    Raises:
        GptlmError: if processes would have to share a GPU, which NCCL cannot.
    """
    on_gpu, here, gpus = device.type == "cuda", local_world_size() or 1, torch.cuda.device_count()
    if on_gpu and here > gpus:
        raise GptlmError(
            f"{named('tensor_parallel_degree')} {degree}: {here} processes on this machine, {gpus} GPUs are visible; "
            "each process takes a GPU of its own"
        )
    assert peers is not None  # the command line has checked the number of processes
    set_group_timeout(peers.seconds)
    if on_gpu:
        torch.cuda.set_device(device)
    peers.heartbeat.ends = on_gpu
    peers.init_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return Mesh(ParallelDims(world_size(), degree))


@contextmanager
def close_process_group(peers: Peers | None) -> Iterator[None]:
    """Leave no process group behind: gloo's threads abort the process at exit otherwise.

    A wait for other processes that took too long becomes a GptlmError.

    What holds the group (the trainer, its wrapped model) must be out of reach when the block ends. A group that was
    there before stays: who opened it closes it.
    """
    was_open = dist.is_initialized()
    explained = explain_timeout(peers.seconds, peers.heartbeat) if peers else nullcontext()
    try:
        with explained:
            yield
            if dist.is_initialized() and not was_open:
                dist.barrier()  # no process destroys the group while another one uses it
    finally:
        if dist.is_initialized() and not was_open:
            gc.collect()  # the trainer is part of reference cycles
            dist.destroy_process_group()
