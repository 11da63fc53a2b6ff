"""What a run needs memory for, logged once after the first step, so that a user sees what to change."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gptlm.training.metrics.memory import GIB, MIB

logger = logging.getLogger(__name__)

UNITS = ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB"))


class MemoryParts(TrainerCallback):
    """Logs the memory of weights, master weights, moments, gradients and, on a GPU, activations of the main process.

    Args:
        trainer: a weak reference to the GPTTrainer.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.is_logged, self.gradients = False, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.is_logged, self.gradients = False, 0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.is_logged:
            self.gradients = held_bytes(self.trainer.weights.gradients, args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.is_logged:
            return
        self.is_logged = True
        if not state.is_world_process_zero:
            return
        parts, host = self._parts(args.device)
        text = ", ".join(f"{name} {in_words(size)}" for name, size in parts.items() if size)
        if args.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
            text += f", activations and buffers up to {in_words(max(0, peak - sum(parts.values())))}"
            text += f"; {in_words(peak)} at the peak"
        if host:
            text += f"; offloaded to host memory: {in_words(host)}"
        logger.info("memory after the first step: %s", text)

    def _parts(self, device: torch.device) -> tuple[dict[str, int], int]:
        """Bytes by part on `device`, and bytes of all that is offloaded from it."""
        weights, model = self.trainer.weights, self.trainer.model
        held = {
            "weights": [getattr(one, "ds_tensor", one) for one in (*model.parameters(), *model.buffers())],
            "master weights": weights.masters,
            "moments": weights.moments,
        }
        parts = {name: held_bytes(tensors, device) for name, tensors in held.items()}
        cpu = torch.device("cpu")
        host = 0 if device.type == "cpu" else sum(held_bytes(tensors, cpu) for tensors in held.values())
        return {**parts, "gradients": self.gradients}, host


def held_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes on devices of the type of `device` that `tensors` keep allocated; shared memory counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def in_words(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit), UNITS[-1])
    return f"{size / unit:.2f} {name}"
