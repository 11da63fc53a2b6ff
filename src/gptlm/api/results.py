"""What the functions return."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from gptlm.model.gpt import GPTLMHeadModel
from gptlm.training.trainer import GPTTrainer


@dataclass(frozen=True)
class TrainResult:
    """A finished training run.

    Attributes:
        metrics: as in all_results.json.
        output_dir: the folder of model, checkpoints, results and logs.
        history: the log lines of the whole run, `trainer.state.log_history`.
        model: after the last step, or the best one, in evaluation mode; adapters are not merged. None in a run of
            several processes, where each may hold a part: `gptlm.load(output_dir)` reads it.
        tokenizer: None if the run had none.
        trainer: None in a run of several processes.
        upload_error: why the model is not on the hub, where `push_to_hub` asked for it; None: it is.
    """

    metrics: dict[str, float]
    output_dir: Path
    history: tuple[dict[str, Any], ...]
    model: GPTLMHeadModel | PeftModel | None
    tokenizer: PreTrainedTokenizerBase | None
    trainer: GPTTrainer | None
    upload_error: str | None = None


class Loaded(NamedTuple):
    """A model for inference and its tokenizer."""

    model: GPTLMHeadModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Generation:
    """A continuation.

    Attributes:
        prompt: as it was given, a text or messages.
        text: without the prompt.
        token_ids: of the new tokens, without the one that ended them.
    """

    prompt: str | list[dict[str, Any]]
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a task.

    Attributes:
        loss, ppl: mean -log p per token and its exponential; None for LAMBADA.
        accuracy: LAMBADA's strict accuracy; None for other tasks.
        report: everything, as `gptlm evaluate --json` prints it.
    """

    task: str
    loss: float | None
    ppl: float | None
    accuracy: float | None
    report: dict[str, Any]
