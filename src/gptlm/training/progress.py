"""Where a run is in its data: samples, tokens and epochs trained, and what a checkpoint notes of them.

`SequentialProgress` is for datasets whose index is the training order (pretraining), `EpochProgress` for datasets that
are read epoch after epoch (fine-tuning). "Steps" are optimizer steps since this start of the run.
"""

from typing import Any

from gptlm.checkpoint.manifest import Manifest
from gptlm.data.epochs import BEGIN, Epochs, Position, Size


class SequentialProgress:
    """Sample after sample of `dataset`.

    Args:
        seq_length: tokens per sample.
        samples_per_step: the global batch.
        samples_per_epoch: of one pass over the training data; None: as many as the dataset has.

    Attributes:
        start_step, start_samples: where this start of the run begins; 0 for a new one.
        first_index: of the dataset, at which it begins.
    """

    def __init__(self, dataset: Any, *, seq_length: int, samples_per_step: int, samples_per_epoch: float | None = None):
        self.dataset, self.seq_length, self.samples_per_step = dataset, seq_length, samples_per_step
        self._samples_per_epoch = samples_per_epoch
        self.start_step = self.start_samples = 0

    def resume(self, manifest: Manifest) -> None:
        self.start_step, self.start_samples = manifest.global_step, manifest.consumed_samples

    @property
    def first_index(self) -> int:
        return self.start_samples

    def trained(self, steps: int) -> Size:
        """Samples and tokens trained since this start."""
        samples = steps * self.samples_per_step
        return Size(samples, samples * self.seq_length)

    def consumed(self, steps: int) -> Size:
        """Samples and tokens trained, earlier starts of the run included."""
        samples = self.start_samples + self.trained(steps).examples
        return Size(samples, samples * self.seq_length)

    def passes(self, steps: int) -> float:
        """Passes over the training data, earlier starts included: `progress_or_epoch`."""
        return self.consumed(steps).examples / (self._samples_per_epoch or len(self.dataset))

    def is_epoch_end(self, steps: int) -> bool:
        """Passes of pretraining end between steps, whose batches are whole."""
        return False

    def manifest(self, steps: int) -> dict[str, Any]:
        return {"consumed_samples": self.consumed(steps).examples}


class EpochProgress:
    """Epochs of samples of different length; `epochs` begins where this start of the run does."""

    first_index = 0

    def __init__(self, epochs: Epochs):
        self.dataset = epochs
        self.start_step = self.start_samples = 0

    @property
    def samples_per_step(self) -> int:
        return self.dataset.batch

    def resume(self, manifest: Manifest) -> None:
        self.start_step, self.start_samples = manifest.global_step, manifest.consumed_samples

    def trained(self, steps: int) -> Size:
        return self.dataset.trained(steps)

    def consumed(self, steps: int) -> Size:
        return Size(self.start_samples + self.trained(steps).examples, self.dataset.counted(steps).tokens)

    def passes(self, steps: int) -> float:
        return self.dataset.passes(steps)

    def is_epoch_end(self, steps: int) -> bool:
        return self.dataset.position(steps).place == 0

    def manifest(self, steps: int) -> dict[str, Any]:
        return {
            "consumed_samples": self.consumed(steps).examples,
            "epoch_position": list(self.dataset.position(steps)),
        }


def position_of(manifest: Manifest | None) -> Position:
    """Where in its epochs a checkpoint was written; the beginning of an epoch if it does not say."""
    return Position(*manifest.epoch_position) if manifest and manifest.epoch_position else BEGIN
