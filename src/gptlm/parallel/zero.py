"""DeepSpeed's ZeRO as a dict; the files in ds_configs/ are the same dicts.

No optimizer and no scheduler block: DeepSpeed's own would decay biases and layer norms, and replace our schedules.
"auto" is filled in by the Trainer.
"""

from typing import Any

CPU = {"device": "cpu", "pin_memory": True}


def zero_config(stage: int, *, offload: bool = False) -> dict[str, Any]:
    """ZeRO stage 1, 2 or 3; `offload` keeps optimizer state (and, in stage 3, parameters) in host memory.

    Raises:
        ValueError: for another stage.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {stage}: expected 1, 2 or 3")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
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
        "fp16": {"enabled": "auto", "loss_scale_window": 2000, "hysteresis": 1},
        "zero_optimization": zero,
    }
