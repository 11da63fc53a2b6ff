"""What can be wrong with single options of training that transformers' TrainingArguments also has."""

from collections.abc import Iterator
from dataclasses import fields

from gptlm.config.args.hub import HubArguments
from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.checkpoints import checkpoint_problems
from gptlm.config.optimizers import optimizer_problems
from gptlm.config.parser import Parsed
from gptlm.config.problem import Problem
from gptlm.errors import named
from gptlm.parallel.dims import ParallelDims

TRACKER_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab", "trackio": "trackio"}
HUB_SETTINGS = tuple(f.name for f in fields(HubArguments) if f.name != "push_to_hub")
TRACKERS = ("visualdl", "tensorboard", *TRACKER_PACKAGES, "all", "none")


def option_problems(parsed: Parsed, dims: ParallelDims | None) -> Iterator[Problem]:
    """Options that contradict others; those that change nothing in this run are logged."""
    training = parsed[TrainingArguments]
    for tracker in training.report_to:
        if tracker not in (*TRACKERS, "autonlp"):
            yield Problem("report_to", f"{tracker!r}: expected {', '.join(TRACKERS)}")
    _note_idle(parsed, training)
    yield from optimizer_problems(parsed, dims)
    yield from checkpoint_problems(parsed)
    if not training.do_train:
        return
    evaluates = training.evaluation_strategy != "no"
    if training.early_stopping_patience is not None and not evaluates:
        yield Problem("early_stopping_patience", f"compares evaluations, and there are none; add {named('do_eval')}")
    if training.save_strategy == "best" and not evaluates:
        yield Problem("save_strategy", f"best compares evaluations, and there are none; add {named('do_eval')}")
    parallel = parsed[ParallelArguments]
    if training.auto_find_batch_size and ((parallel.world_size or 1) > 1 or parallel.sharding or parallel.deepspeed):
        yield Problem(
            "auto_find_batch_size",
            "is for one process without sharding, others would have to agree; `gptlm plan` shows the micro-batch that "
            f"fits, give it as {named('per_device_train_batch_size')}",
        )
    if training.full_determinism:
        yield from _not_deterministic(training)
    if dims is None or not dims.is_model_parallel:
        return
    if training.neftune_noise_alpha:
        yield Problem(
            "neftune_noise_alpha",
            f"{training.neftune_noise_alpha:g} does not work with tensor and pipeline parallelism ({dims}), which "
            f"split the embeddings; use {named('sharding')} stage3",
        )


def _not_deterministic(training: TrainingArguments) -> Iterator[Problem]:
    for name in ("torch_compile", "cuda_graphs", "fp8"):
        if getattr(training, name):
            yield Problem("full_determinism", f"runs PyTorch's deterministic kernels; leave {named(name)} out")


def _note_idle(parsed: Parsed, training: TrainingArguments) -> None:
    note = parsed.note
    if not training.do_train:
        for name in ("early_stopping_patience", "label_smoothing_factor", "neftune_noise_alpha"):
            if not parsed.is_default(name) and getattr(training, name):
                note(f"{named(name)} has no effect: nothing is trained")
    if training.early_stopping_threshold and training.early_stopping_patience is None:
        note(f"{named('early_stopping_threshold')} has no effect without {named('early_stopping_patience')}")
    if training.eval_delay and training.evaluation_strategy == "no":
        note(f"{named('eval_delay')} has no effect: evaluation is off ({named('do_eval')})")
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if getattr(training, name) and not training.dataloader_num_workers:
            note(f"{named(name)} has no effect: there are no worker processes ({named('dataloader_num_workers')})")
    for name in ("trackio_space_id", "trackio_bucket_id"):
        if not parsed.is_default(name) and "trackio" not in training.report_to:
            note(f"{named(name)} has no effect without {named('report_to')} trackio")
    hub = parsed[HubArguments]
    if hub.push_to_hub and not training.do_train:
        note(f"{named('push_to_hub')} has no effect: nothing is trained")
    elif hub.push_to_hub and hub.hub_strategy == "every_save" and training.checkpoint_format == "sharded":
        note(
            f"{named('hub_strategy')} every_save has no effect: others cannot load sharded checkpoints; the final "
            "model is uploaded"
        )
    for name in HUB_SETTINGS:
        if not hub.push_to_hub and parsed.given(name):
            note(f"{named(name)} has no effect without {named('push_to_hub')}")
    if training.torch_compile_mode and training.torch_compile is False:
        note(f"{named('torch_compile_mode')} has no effect: {named('torch_compile')} is off")
