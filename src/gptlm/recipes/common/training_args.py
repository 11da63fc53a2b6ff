"""The run in the words of transformers.TrainingArguments."""

import sys
from typing import Any

from transformers import TrainingArguments

from gptlm.checkpoint.task import PRETRAIN
from gptlm.config.run import Run
from gptlm.quiet import quiet_transformers
from gptlm.recipes.common.device import Device
from gptlm.recipes.common.peers import Peers
from gptlm.recipes.common.updates import stock_name, stock_settings
from gptlm.upstream.torch import set_group_timeout
from gptlm.upstream.transformers import use_one_gpu


def hf_arguments(
    run: Run, device: Device, deepspeed: dict[str, Any] | None = None, peers: Peers | None = None
) -> TrainingArguments:
    """Joins the process group of `peers`. `deepspeed` shards with that configuration.

    Precision: HuggingFace's flags mean autocast without DeepSpeed and half weights with it; the other two cases are
    DeepSpeed's torch_autocast and our master weights, with the flags off.
    """
    flags = device.half_weights == (deepspeed is not None)
    quiet_transformers()
    training = run.training
    if peers is not None:
        set_group_timeout(training.ddp_timeout)  # else groups of some of the processes have torch's own
        peers.init_group("gloo" if device.type == "cpu" else "nccl")  # transformers' finds what earlier starts left
    arguments = TrainingArguments(
        output_dir=training.output_dir,
        per_device_train_batch_size=run.step_batch,
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        gradient_accumulation_steps=run.step_accumulation,
        max_steps=training.max_steps,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
        optim=stock_name(training.optim),
        optim_args=stock_settings(training),
        seed=training.seed,
        use_cpu=device.type == "cpu",
        fp16=flags and device.precision == "fp16",
        bf16=flags and device.precision == "bf16",
        deepspeed=deepspeed,
        eval_strategy=training.evaluation_strategy or "no",
        eval_steps=training.eval_steps,
        eval_delay=training.eval_delay,
        eval_on_start=training.eval_on_start and training.do_eval,
        save_strategy=training.save_strategy,
        save_steps=training.save_steps,
        save_only_model=training.ignore_save_lr_and_optim,
        load_best_model_at_end=training.load_best_model_at_end,
        metric_for_best_model=training.metric_for_best_model,
        greater_is_better=bool(training.greater_is_better) if training.metric_for_best_model else None,
        logging_strategy=training.logging_strategy,
        logging_steps=training.logging_steps,
        logging_first_step=training.logging_first_step,
        logging_nan_inf_filter=False,  # it hides NaN and waits for the device at every micro-batch
        run_name=training.run_name,
        project=training.project,
        trackio_space_id=training.trackio_space_id,
        trackio_bucket_id=training.trackio_bucket_id,
        trackio_static_space_id=False if training.trackio_space_id is None else None,
        report_to=[],
        disable_tqdm=training.disable_tqdm or not sys.stderr.isatty(),
        include_num_input_tokens_seen=_counted_tokens(run),
        neftune_noise_alpha=training.neftune_noise_alpha or None,
        full_determinism=training.full_determinism,
        tf32=training.tf32 if device.type == "cuda" else None,
        dataloader_num_workers=training.dataloader_num_workers,
        dataloader_pin_memory=training.dataloader_pin_memory,
        dataloader_prefetch_factor=training.dataloader_prefetch_factor if training.dataloader_num_workers else None,
        dataloader_persistent_workers=training.dataloader_persistent_workers and training.dataloader_num_workers > 0,
        ignore_data_skip=True,  # the sampler starts at the consumed sample
        ddp_find_unused_parameters=False,
        ddp_timeout=training.ddp_timeout,
        log_level="error",
        log_level_replica="error",
    )
    arguments.device  # noqa: B018 - takes the process group and counts the GPUs
    use_one_gpu(arguments)
    return arguments


def _counted_tokens(run: Run) -> str:
    """Batches of pretraining have no padding, so that all tokens are those that progress counts."""
    wanted = run.training.include_num_input_tokens_seen
    return "non_padding" if wanted == "all" and run.task == PRETRAIN else wanted
