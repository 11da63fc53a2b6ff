"""Memory fields of the log line, in PaddleNLP's words and units."""

import resource
import sys

import torch

GIB, MIB = 1 << 30, 1 << 20


def gpu_fields() -> dict[str, float]:
    """GiB allocated and reserved on this process's GPU."""
    return {
        "current_memory_allocated": torch.cuda.memory_allocated() / GIB,
        "current_memory_reserved": torch.cuda.memory_reserved() / GIB,
        "max_memory_allocated": torch.cuda.max_memory_allocated() / GIB,
        "max_memory_reserved": torch.cuda.max_memory_reserved() / GIB,
    }


def process_fields(*, gpu: bool) -> dict[str, float]:
    """MiB in use by this process and its peak; with `gpu` also the GPU's peaks."""
    fields: dict[str, float] = {"cpu_mem_used": _resident() // MIB, "cpu_mem_used_peak": _peak() // MIB}
    if gpu:
        fields["gpu_max_memory_allocated"] = torch.cuda.max_memory_allocated() // MIB
        fields["gpu_max_memory_reserved"] = torch.cuda.max_memory_reserved() // MIB
    return fields


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc outside Linux
        return _peak()


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
