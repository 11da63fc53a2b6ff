"""Checks of datasets and samples that a caller hands to the trainer."""

from typing import Any

from gptlm.errors import GptlmError
from gptlm.training.step import Inputs


def check_dataset(dataset: Any, name: str) -> None:
    """Raises GptlmError if there is no dataset, or none with a length and samples by index."""
    if dataset is None:
        raise GptlmError(f"GPTTrainer has no {name}; give one")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        raise GptlmError(f"{name} is {kind}, without a length or samples by index; give a list or a map-style dataset")
    if not len(dataset):
        raise GptlmError(f"{name} has no samples")


def check_batch(inputs: Inputs, config: Any) -> None:
    """Raises GptlmError if a batch of `collate_samples` is too long for the model or has ids beyond its vocabulary."""
    length, limit = inputs["input_ids"].shape[1], config.n_positions
    if length > limit:
        raise GptlmError(f"a sample has {length} input tokens, the model has {limit} positions; give shorter samples")
    highest = max(int(inputs[key].max()) for key in ("input_ids", "shift_labels"))
    if highest >= config.vocab_size:
        raise GptlmError(
            f"a sample has token id {highest}, the model's vocabulary has {config.vocab_size} entries; tokenize with "
            "the model's own tokenizer"
        )


def any_dataset(train_dataset: Any = None, eval_dataset: Any = None, **_: Any) -> Any:
    """A dataset whose first sample can fill batches up."""
    dataset = eval_dataset if train_dataset is None else train_dataset
    return next(iter(dataset.values()), None) if isinstance(dataset, dict) else dataset
