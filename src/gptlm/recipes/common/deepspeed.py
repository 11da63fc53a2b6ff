"""Whether a run uses DeepSpeed, and with which configuration."""

import logging
from typing import Any

from gptlm.config.deepspeed_file import SIZES, read_deepspeed
from gptlm.config.run import Run
from gptlm.config.validate import PIPELINE_STAGE
from gptlm.errors import UsageError, reason_of
from gptlm.parallel.zero_config import RunSettings, fill_auto, stage_of, zero_config
from gptlm.recipes.common.device import Device, precision_of

logger = logging.getLogger(__name__)


def deepspeed_config(run: Run, device: Device) -> dict[str, Any] | None:
    """The complete DeepSpeed configuration of a training run; None where nothing is to be sharded or offloaded.

    Raises:
        UsageError: if --deepspeed names no JSON file, or contradicts a flag.
    """
    parallel, training = run.parallel, run.training
    if not training.do_train:
        return None  # evaluation alone has no optimizer to shard
    if parallel.deepspeed:
        config, name = _without_sizes(read_deepspeed(parallel.deepspeed)), parallel.deepspeed
        for kind in ("fp16", "bf16"):
            if getattr(training, kind) and device.precision != kind:  # which the log says already
                config.setdefault(kind, {})["enabled"] = "auto"
    else:
        words = parallel.sharding.replace(",", " ").replace("_", " ").split()
        shares = run.dims.data > 1 and parallel.sharding_parallel_degree > 1
        if not run.dims.is_model_parallel and (not words or not (shares or "offload" in words)):
            return None
        stage = next(
            (int(word[-1]) for word in words if word.startswith("stage")), 1
        )  # 1 on one replica shares nothing
        config, name = zero_config(stage, offload="offload" in words), f"--sharding {parallel.sharding}"
    if run.dims.pipeline > 1:
        if stage_of(config) > 1:
            raise UsageError(
                f"{name}: ZeRO stage {stage_of(config)} does not work with pipelines; use stage 1, or "
                "tensor parallelism in place of the pipeline\n"
                f"  (PaddleNLP: {PIPELINE_STAGE})"
            )
        half = training.amp_master_grad and device.half_weights
        if half and (parallel.deepspeed or "offload_optimizer" in config["zero_optimization"]):
            raise UsageError(
                f"{name}: with a pipeline, --amp_master_grad does not work with offload or --deepspeed FILE, where "
                "DeepSpeed would add gradients up in half precision; leave one of them out"
            )
        config.setdefault("zero_optimization", {})["overlap_comm"] = False  # gradients are added up over a whole step
    config = fill_auto(config, _wanted(run, device), name)
    if parallel.deepspeed:
        _check_zero(config, name)
    return config


def check_file(run: Run) -> None:
    """Read the --deepspeed FILE of a run that is not started; for the machine its flags speak of.

    Raises:
        UsageError: as `deepspeed_config` does.
    """
    if run.parallel.deepspeed:
        training = run.training
        level = training.fp16_opt_level
        deepspeed_config(run, Device("cuda", precision_of(training.fp16, training.bf16, level), level))


def shard_degree(run: Run, config: dict[str, Any] | None) -> int | None:
    """Replicas that share one optimizer state, where they are fewer than all; else None."""
    degree = run.parallel.sharding_parallel_degree
    return degree if config is not None and run.parallel.sharding and degree < run.dims.data else None


def _wanted(run: Run, device: Device) -> RunSettings:
    training = run.training
    return RunSettings(
        micro_batch=run.step_batch,
        accumulation=run.step_accumulation,
        replicas=run.dims.data,
        max_grad_norm=training.max_grad_norm,
        precision=device.precision,
        level=device.level,
        fixed_scale=training.loss_scale,
        scale_window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        minimum_scale=training.min_loss_scale,
        master_grad=training.amp_master_grad and run.dims.pipeline == 1,
        whole_blocks=run.trains_all,
    )


def _check_zero(config: dict[str, Any], name: str) -> None:
    """DeepSpeed's own check of its ZeRO settings, as a sentence; "auto" is filled in by the Trainer later."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    zero = config.get("zero_optimization", {})
    try:
        DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    except ValueError as error:
        found = error.errors() if isinstance(error, ValidationError) else []  # its text is a page
        reason = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found) or reason_of(error)
        raise UsageError(f"{name}: DeepSpeed refuses zero_optimization: {reason}") from error


def _without_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """`config` without the numbers that the run has taken over (a pipeline counts micro-batches otherwise)."""
    return {key: value for key, value in config.items() if key not in SIZES}
