"""ZeRO configurations of DeepSpeed; the files in ds_configs/ hold the same dicts.

They have no optimizer and no scheduler block: DeepSpeed's optimizer would decay biases and layer norms, its scheduler
replace ours. `fill_auto` replaces "auto" by the value of the flag.
"""

import copy
import difflib
from dataclasses import dataclass
from typing import Any

from gptlm.errors import UsageError

CPU = {"device": "cpu", "pin_memory": True}
BUCKET = 5 * 10**7  # elements per reduction: 100 MB in half precision keep a link busy, and several overlap
WHOLE_BLOCKS = {  # stage 3: one all-gather and one reduce-scatter per block, not per module
    "leaf_module": {"classes": ["gptlm.model.block.Block"]},
    "stage3_param_persistence_threshold": 0,
}
NEVER = 1 << 30  # steps between DeepSpeed's own progress lines
SUPERSEDED = ("optimizer", "scheduler", "tensor_parallel", "pipeline", "amp", "data_efficiency", "compression_training")
KNOWN = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping zero_optimization "
    "fp16 bf16 torch_autocast data_types steps_per_print wall_clock_breakdown dump_state prescale_gradients "
    "gradient_predivide_factor sparse_gradients communication_data_type seq_parallel_communication_data_type "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer comms_logger flops_profiler activation_checkpointing "
    "tensorboard wandb csv_monitor comet aio checkpoint elasticity autotuning nebula memory_breakdown "
    "disable_allgather dataloader_drop_last timers compile graph_harvesting hybrid_engine zenflow eigenvalue"
).split()


@dataclass(frozen=True)
class RunSettings:
    """Flags of a run that a DeepSpeed configuration sets as well.

    Attributes:
        micro_batch, accumulation, replicas: the three factors of the global batch.
        max_grad_norm: 0 never clips.
        precision: "fp32", "fp16" or "bf16"; `level` O1 is autocast, O2 half-precision weights.
        fixed_scale, scale_window, hysteresis, minimum_scale: of float16's loss scale.
        master_grad: accumulate gradients in float32.
        whole_blocks: all weights of a block are trained, so stage 3 may gather and reduce them together.
    """

    micro_batch: int
    accumulation: int
    replicas: int
    max_grad_norm: float
    precision: str
    level: str
    fixed_scale: float | None = None
    scale_window: int = 2000
    hysteresis: int = 1
    minimum_scale: float = 1.0
    master_grad: bool = False
    whole_blocks: bool = True


def zero_config(stage: int, *, offload: bool = False) -> dict[str, Any]:
    """ZeRO stage 1, 2 or 3; `offload` keeps optimizer state (and, in stage 3, parameters) in host memory.

    Raises:
        ValueError: for another stage.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {stage}: expected 1, 2 or 3")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    zero["reduce_bucket_size"] = BUCKET  # DeepSpeed has two; its default of 5e8 takes 2 or 4 GB
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if offload:
        zero["offload_optimizer"] = CPU
    if offload and stage == 3:
        zero["offload_param"] = CPU
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": "auto", "hysteresis": "auto", "min_loss_scale": "auto"},
        "zero_optimization": zero,
    }


def stage_of(config: dict[str, Any]) -> int:
    """The ZeRO stage of a configuration; 0 where it has none."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def gathers_whole_blocks(config: dict[str, Any]) -> bool:
    """Whether a configuration of stage 3 that `fill_auto` returned gathers all weights of a block together."""
    return config["zero_optimization"].get("leaf_module") == WHOLE_BLOCKS["leaf_module"]


def fill_auto(config: dict[str, Any], wanted: RunSettings, name: str = "the DeepSpeed configuration") -> dict[str, Any]:
    """`config` with the values of the flags in place of "auto", and with what the flags need besides.

    Raises:
        UsageError: if file and flag contradict each other (with both values), or a block cannot be used.
    """
    config = copy.deepcopy(config)
    _check_form(config, name)
    problems = superseded_blocks(config, name)
    sizes = {
        "train_micro_batch_size_per_gpu": (wanted.micro_batch, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (wanted.accumulation, "gradient_accumulation_steps"),
        "gradient_clipping": (wanted.max_grad_norm, "max_grad_norm"),
    }
    for key, (value, flag) in sizes.items():
        if config.get(key, "auto") not in ("auto", value):
            problems.append(
                f"{name} says {key} {config[key]}, --{flag} says {value:g}; give one of them or make them equal"
            )
        config[key] = value
    total = wanted.micro_batch * wanted.accumulation * wanted.replicas
    if config.pop("train_batch_size", "auto") not in ("auto", total):
        problems.append(f"{name} has another train_batch_size than {total}, the global batch of the flags; remove it")
    problems += _fill_precision(config, wanted, name)
    if stage_of(config) == 0 and wanted.precision != "fp32":
        problems.append(f"{name}: half precision needs ZeRO stage 1, 2 or 3 (stage 0 loses accuracy); set the stage")
    if wanted.whole_blocks and stage_of(config) == 3:
        config["zero_optimization"] = copy.deepcopy(WHOLE_BLOCKS) | config["zero_optimization"]
    config["steps_per_print"] = NEVER
    config.setdefault("timers", {"throughput": {"enabled": False}})  # it synchronizes with the GPU
    if problems:
        raise UsageError("\n".join(problems))
    return config


def superseded_blocks(config: dict[str, Any], name: str) -> list[str]:
    """One problem for each block that configures what gptlm does itself."""
    return [f"{name} has a {key!r} block, which gptlm does itself; remove it" for key in SUPERSEDED if key in config]


def _check_form(config: dict[str, Any], name: str) -> None:
    """Refuse what makes DeepSpeed fail without a clear message, and keys that it would ignore."""
    for key in ("zero_optimization", "fp16", "bf16"):
        if not isinstance(config.get(key, {}), dict):
            raise UsageError(f"{name}: {key} is {config[key]!r}; expected an object like {{...}}")
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"{name}: zero_optimization.stage is {stage!r}; expected 1, 2 or 3")
    for key in config:
        if key not in KNOWN and key not in SUPERSEDED:
            near = difflib.get_close_matches(key, KNOWN, n=1)
            raise UsageError(f"{name}: {key} is not a key of DeepSpeed{f'; did you mean {near[0]}?' if near else ''}")


def _fill_precision(config: dict[str, Any], wanted: RunSettings, name: str) -> list[str]:
    """Set half precision: O2 is DeepSpeed's fp16 or bf16 block, O1 its torch_autocast. Returns the problems."""
    problems = []
    for kind in ("fp16", "bf16"):
        block = config.setdefault(kind, {})
        on = wanted.level == "O2" and wanted.precision == kind
        if block.get("enabled", "auto") not in ("auto", on):
            flag = f"--{wanted.precision} --fp16_opt_level {wanted.level}" if wanted.precision != "fp32" else "float32"
            problems.append(f"{name} says {kind}.enabled {block['enabled']}, the flags say {flag}; make them agree")
        block["enabled"] = on
    if wanted.level == "O1" and wanted.precision != "fp32":
        config["torch_autocast"] = {"enabled": True, "dtype": {"fp16": "float16", "bf16": "bfloat16"}[wanted.precision]}
    scale = {
        "loss_scale": wanted.fixed_scale or 0,
        "loss_scale_window": wanted.scale_window,
        "hysteresis": wanted.hysteresis,
        "min_loss_scale": wanted.minimum_scale,
    }
    config["fp16"] |= {key: value for key, value in scale.items() if config["fp16"].get(key, "auto") == "auto"}
    if wanted.master_grad and wanted.level == "O2":
        config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
    return problems
