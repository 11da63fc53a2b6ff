"""Metrics of prompts and responses: perplexity, accuracy, and generated texts compared with the references."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import EvalPrediction

from gptlm import owned
from gptlm.kernels.attention import Documents
from gptlm.parallel.deepspeed import gathered_parameters
from gptlm.parallel.tensor import whole_sequences
from gptlm.training.metrics.loss import LossMetrics
from gptlm.training.metrics.results import suffix_of
from gptlm.training.metrics.text import text_scores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Continuation:
    """Prompts that an evaluation continues.

    Attributes:
        prompts: token ids each.
        texts: the same as texts, for the file.
        answers: the reference texts.
        generate: (model, prompts) -> texts.
        level: of the metrics, "word" or "char".
        clean: what is done to generated and reference texts before they are compared.
    """

    prompts: Sequence[list[int]]
    texts: Sequence[str]
    answers: Sequence[str]
    generate: Callable[[Any, Sequence[list[int]]], list[str]]
    level: str
    clean: Callable[[str], str] = str.strip


class ResponseMetrics(LossMetrics):
    """Loss, accuracy and perplexity of response tokens, and scores of generated texts.

    Args:
        continuation: what evaluations generate; None: nothing.
    """

    def __init__(self, continuation: Continuation | None = None, evaluated: str | None = None):
        super().__init__(evaluated)
        self.continuation = continuation

    @torch.no_grad()
    def batch_sums(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Losses and correct predictions of the targets, (1, 2) float64, and their number, (1,) float64."""
        inputs = dict(inputs)
        targets = inputs.pop("shift_labels")
        if "cu_seqlens" in inputs:
            inputs["documents"] = Documents(inputs.pop("cu_seqlens"), inputs.pop("max_seqlen"))
        network: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        hidden = network.transformer(**inputs).last_hidden_state
        if network.gather_hidden is not None:
            hidden = network.gather_hidden(hidden)
        targets = targets.flatten()
        counted = (targets != -100).nonzero()[:, 0]
        with gathered_parameters([network.lm_head.weight]):
            weight = network.lm_head.weight
            losses, hits = network.output_scores(hidden.flatten(0, 1)[counted], weight, targets[counted])
        sums = torch.stack([losses.double().sum(), hits.double().sum()])
        return sums[None], torch.full_like(sums[:1], len(hits))

    def means(self, prediction: EvalPrediction) -> dict[str, float]:
        loss, correct = prediction.predictions.reshape(-1, 2).sum(0)  # type: ignore[union-attr]
        count = max(prediction.label_ids.sum(), 1)  # type: ignore[union-attr]
        return {"loss": float(loss / count), "accuracy": float(correct / count)}

    def after_loop(self, trainer: Any, metrics: dict[str, float], prefix: str) -> dict[str, float]:
        more = {f"{prefix}_ppl": perplexity(metrics[f"{prefix}_loss"])}
        if self.continuation is not None:
            scores = self._generate(self.continuation, trainer, prefix)
            more |= {f"{prefix}_{name}": value for name, value in scores.items()}
        return more

    def log_fields(self, logs: Mapping[str, float]) -> dict[str, float]:
        return {"ppl": perplexity(logs["loss"])} if "loss" in logs else {}

    def _generate(self, continuation: Continuation, trainer: Any, prefix: str) -> dict[str, float]:
        """Scores of generated texts. Each replica of the model continues its share of the prompts.

        All of them call the model equally often, as ZeRO stage 3 needs.
        """
        replicas, replica, count = trainer.replicas, trainer.replica, len(continuation.prompts)
        share = [number % count for number in range(replica, -(-count // replicas) * replicas, replicas)]
        trainer.model.eval()
        # the cache grows with each token: every step a new shape
        with torch.compiler.set_stance("force_eager"), whole_sequences(trainer.model):
            texts = continuation.generate(trainer.model, [continuation.prompts[number] for number in share])
        parts = [list(zip(share, texts, strict=True))]
        if trainer.args.world_size > 1:
            gathered: list[Any] = [None] * trainer.args.world_size
            dist.all_gather_object(gathered, parts[0])
            parts = gathered
        found = dict(pair for part in parts for pair in part)
        predictions = [continuation.clean(found[number]) for number in range(count)]
        references = [continuation.clean(answer) for answer in continuation.answers]
        if trainer.args.should_save:
            folder = Path(trainer.args.output_dir or "")
            folder.mkdir(parents=True, exist_ok=True)
            name = f"predictions{suffix_of(folder, self.evaluated)}/{prefix}-step-{trainer.state.global_step}.jsonl"
            _write_predictions(folder, name, continuation.texts, predictions, references)
        return text_scores(predictions, references, continuation.level)


def _write_predictions(
    folder: Path, name: str, prompts: Sequence[str], predictions: list[str], references: list[str]
) -> None:
    columns, path = ("prompt", "prediction", "reference"), folder / name
    rows = zip(prompts, predictions, references, strict=True)
    lines = [json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        owned.make_way(folder, name)
        owned.note(folder, [name], owned.RUN)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:  # the scores are in the log; training is worth more than these texts
        logger.warning("cannot write the predictions %s: %s; training continues without them", path, error.strerror)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too much for a float."""
    try:
        return round(math.exp(loss), 6)
    except OverflowError:
        return math.inf
