"""What surrounds a recipe that Python code calls: signals, flags in messages, a temporary folder."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from gptlm.compat.auto_convert import ConversionNeeded
from gptlm.entry_points import hide_other_gpus
from gptlm.errors import GptlmError, UsageError, flags_as_typed
from gptlm.mapped_files import FileCutOff
from gptlm.ranks import check_connection, check_launcher, is_launched
from gptlm.recipes.convert import convert_once
from gptlm.signals import Terminated, ending_on_signals


@contextmanager
def running(typed: dict[str, str]) -> Iterator[None]:
    """Messages name flags as `typed`. SIGTERM and SIGHUP end the run, and then have the effect that they had before.

    Raises:
        GptlmError: after a signal whose handler, of the caller, returns, or if a file became shorter while it was read.
    """
    ended = None
    try:
        with ending_on_signals(is_launched=is_launched()), flags_as_typed(typed):
            yield
    except FileCutOff as error:
        raise GptlmError(str(error)) from None
    except Terminated as error:
        ended = error
    if ended is not None:
        signal.raise_signal(ended.number)
        raise GptlmError(str(ended))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """For objects of the caller; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="gptlm-") as folder:
        yield Path(folder)


def convert_first(needed: ConversionNeeded) -> None:
    """Convert a checkpoint of another library that a flag names."""
    convert_once(needed.path, needed.result.parent, needed.heads, needed.vocabulary)


def check_processes() -> None:
    """Raises GptlmError if the launcher's variables are wrong, or its address cannot be reached."""
    check_launcher(os.environ)
    check_connection(os.environ)


def choose_gpu(device: str) -> None:
    """Make GPU N the one of this process for "gpu:N". Raises UsageError if the process has used a GPU already."""
    if ":" in device and torch.cuda.is_initialized():
        raise UsageError(f"device {device!r}: this process uses a GPU already; choose it by CUDA_VISIBLE_DEVICES")
    hide_other_gpus(device, os.environ)


def checked_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """Raises UsageError if one of `callbacks` is no TrainerCallback."""
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise UsageError(f"callbacks: {kind.__name__} is not a transformers.TrainerCallback")
    return tuple(callbacks)
