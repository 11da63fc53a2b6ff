"""The Trainer for prompts and answers: evaluation also has perplexity, accuracy, and generated texts.

Overridden, and why:
    prediction_step    sums over the answers' tokens, and how many of them the model finds itself
    evaluation_loop    perplexity, and continued prompts compared with the answers
    log                perplexity beside the loss, as PaddleNLP prints it
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput

from gptlm.data.epochs import Epochs, Size
from gptlm.kernels.varlen_attention import Documents
from gptlm.training.metrics.results import suffix_of
from gptlm.training.metrics.text import text_scores
from gptlm.training.trainer import PretrainTrainer

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


class SftTrainer(PretrainTrainer):
    """Trainer for rows with targets in some places only.

    Args:
        train_dataset: `Epochs`, which begins where this start of the run does.
        continuation: what evaluations generate; None: nothing.
    """

    def __init__(self, *args: Any, continuation: Continuation | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.continuation = continuation
        self.compute_metrics = means

    @property
    def epochs(self) -> Epochs:
        """The training data."""
        dataset: Any = self.train_dataset
        return dataset

    @property
    def _steps(self) -> int:
        """Optimizer steps since this start of the run."""
        return self.state.global_step - self.start_step

    @property
    def trained(self) -> Size:
        return self.epochs.trained(self._steps)

    @property
    def consumed_tokens(self) -> int:
        return self.epochs.counted(self._steps).tokens

    @property
    def passes(self) -> float:
        return self.epochs.passes(self._steps)

    @property
    def at_epoch_end(self) -> bool:
        return self.epochs.position(self._steps).place == 0

    @property
    def first_index(self) -> int:
        return 0

    def _manifest(self) -> dict[str, Any]:
        return {**super()._manifest(), "epoch_position": list(self.epochs.position(self._steps))}

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("shift_labels")
        if "cu_seqlens" in inputs:
            inputs["documents"] = Documents(inputs.pop("cu_seqlens"), inputs.pop("max_seqlen"))
        network: Any = self.network.get_base_model() if isinstance(self.network, PeftModel) else self.network
        with torch.no_grad(), self.compute_loss_context_manager():
            hidden = network.transformer(**inputs).last_hidden_state
            logits = network.lm_head(hidden[targets != -100]).float()
        targets = targets[targets != -100]
        loss = F.cross_entropy(logits, targets, reduction="sum").double().view(1)
        right = (logits.argmax(-1) == targets).sum().double().view(1)
        return None, torch.stack([loss, right], dim=1), torch.full_like(loss, len(targets))

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        metrics = output.metrics or {}
        metrics[f"{metric_key_prefix}_ppl"] = perplexity(metrics[f"{metric_key_prefix}_loss"])
        if self.continuation is not None:
            scores = self._generated(self.continuation, metric_key_prefix)
            metrics |= {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        return output._replace(metrics=metrics)

    def _generated(self, continuation: Continuation, prefix: str) -> dict[str, float]:
        """Each process continues its share; all of them call the model equally often, as ZeRO stage 3 needs."""
        world, rank = self.args.world_size, self.args.process_index
        count = len(continuation.prompts)
        share = [number % count for number in range(rank, -(-count // world) * world, world)]
        self.network.eval()
        with torch.compiler.set_stance("force_eager"):  # one token at a time, with a cache that grows
            texts = continuation.generate(self.network, [continuation.prompts[number] for number in share])
        parts = [list(zip(share, texts, strict=True))]
        if world > 1:
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, parts[0])
            parts = gathered
        found = dict(pair for part in parts for pair in part)
        predictions = [continuation.clean(found[number]) for number in range(count)]
        references = [continuation.clean(answer) for answer in continuation.answers]
        if self.args.should_save:
            self._write_predictions(continuation, predictions, references, prefix)
        return text_scores(predictions, references, continuation.level)

    def _write_predictions(
        self, continuation: Continuation, predictions: list[str], references: list[str], prefix: str
    ) -> None:
        folder = self.output_dir / f"predictions{suffix_of(self.output_dir, self.evaluated)}"
        path = folder / f"{prefix}-step-{self.state.global_step}.jsonl"
        rows = zip(continuation.texts, predictions, references, strict=True)
        names = ("prompt", "prediction", "reference")
        lines = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:  # the scores are in the log; training is worth more than these texts
            logger.warning("cannot write the predictions %s: %s; training goes on without them", path, error.strerror)

    def more_fields(self, logs: dict[str, float]) -> dict[str, float]:
        return {"ppl": perplexity(logs["loss"])} if "loss" in logs else {}


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too much for a float."""
    try:
        return round(math.exp(loss), 6)
    except OverflowError:
        return math.inf


def means(prediction: EvalPrediction) -> dict[str, float]:
    """`loss` and `accuracy` per target, from the sums of all batches."""
    loss, right = prediction.predictions.reshape(-1, 2).sum(0)  # type: ignore[union-attr]
    count = max(prediction.label_ids.sum(), 1)  # type: ignore[union-attr]
    return {"loss": float(loss / count), "accuracy": float(right / count)}
