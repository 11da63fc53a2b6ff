"""The optimizer of another library's checkpoint as a checkpoint of ours, which training goes on from."""

import logging
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from transformers import TrainerState

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint import optimizer_state as states
from gptlm.conversion.gpt2_names import layer_and_part
from gptlm.conversion.source import Source
from gptlm.model.files import CONV1D_WEIGHTS

logger = logging.getLogger(__name__)


def start_checkpoint(source: Source, output: Path) -> Path:
    """The new folder in `output` that the checkpoint is written into.

    Raises:
        GptlmError: if `source` has no optimizer that is read here.
    """
    folder = checkpoint.staging_folder(output, source.steps()[0])
    folder.mkdir()
    return folder


def finish_checkpoint(source: Source, folder: Path, consumed: int | None) -> None:
    """Write Adam's moments, the float32 weights of half-precision ones and the step, and give `folder` its name.

    Args:
        consumed: samples that training has read; None: what the checkpoint says.
    """
    iterations, updates, noted = source.steps()
    states.write(folder, _tensors(source), writes=True)
    state = TrainerState(global_step=iterations, max_steps=iterations, train_batch_size=1)  # the run's own counts
    state.save_to_json(str(folder / "trainer_state.json"))
    samples = noted if consumed is None else consumed
    if samples is None:
        logger.warning(
            "the checkpoint does not say how many samples it has read: training starts at the first one "
            "(--consumed_samples N)"
        )
    facts = {
        "order": {},
        "settings": {},
        "global_step": iterations,
        "optimizer_steps": updates,
        "loss_scale": None,
        "world_size": 0,  # it has no random states
        "weights_only": False,
        "consumed_samples": samples or 0,
        "loss_sum": 0.0,
        "steps_without_loss": iterations,
    }
    final = checkpoint.commit(folder, facts)
    logger.info("%s: step %d, %d updates, %d samples consumed", final.name, iterations, updates, samples or 0)


def _tensors(source: Source) -> Iterator[tuple[str, Tensor]]:
    """By the names of the training's own files; its matrices are (out, in)."""
    for name, kind, value in source.states():
        matrix = layer_and_part(name)[1] in CONV1D_WEIGHTS
        yield f"{name}|{kind}", (value.t() if matrix else value).float().contiguous()
