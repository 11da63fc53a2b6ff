"""Each field of transformers' TrainingArguments is honoured, renamed, or has no effect or is refused for a reason."""

from dataclasses import fields

import pytest
from transformers import TrainingArguments

from gptlm.commands.pretrain import PRETRAIN
from gptlm.commands.sft import SFT
from gptlm.config.parser import ALWAYS_ON, parse
from gptlm.errors import UsageError
from gptlm.secret import Secret

HONOURED = {  # field -> (a value, what the argument of the same or another name then is)
    "output_dir": ("o", "o"),
    "per_device_train_batch_size": ("3", 3),
    "num_train_epochs": ("2.5", 2.5),
    "max_steps": ("7", 7),
    "learning_rate": ("1e-3", 1e-3),
    "lr_scheduler_type": ("inverse_sqrt", "inverse_sqrt"),
    "lr_scheduler_kwargs": ('{"timescale": 5}', '{"timescale": 5}'),
    "warmup_steps": ("3", 3.0),
    "optim": ("adafactor", "adafactor"),
    "optim_args": ("momentum=0.9", "momentum=0.9"),
    "weight_decay": ("0.5", 0.5),
    "adam_beta1": ("0.5", 0.5),
    "adam_beta2": ("0.5", 0.5),
    "auto_find_batch_size": ("true", True),
    "adam_epsilon": ("0.5", 0.5),
    "gradient_accumulation_steps": ("3", 3),
    "max_grad_norm": ("0.5", 0.5),
    "label_smoothing_factor": ("0.5", 0.5),
    "bf16": ("true", True),
    "fp16": ("true", True),
    "tf32": ("true", True),
    "torch_compile": ("true", True),
    "torch_compile_mode": ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    "neftune_noise_alpha": ("5", 5.0),
    "logging_strategy": ("epoch", "epoch"),
    "logging_steps": ("3", 3.0),
    "logging_first_step": ("true", True),
    "include_num_input_tokens_seen": ("true", "all"),
    "disable_tqdm": ("true", True),
    "report_to": ("wandb", ["wandb"]),
    "run_name": ("r", "r"),
    "project": ("p", "p"),
    "trackio_space_id": ("me/s", "me/s"),
    "trackio_bucket_id": ("me/b", "me/b"),
    "eval_steps": ("3", 3.0),
    "eval_delay": ("3", 3.0),
    "per_device_eval_batch_size": ("3", 3),
    "eval_on_start": ("true", True),
    "save_strategy": ("best", "best"),
    "save_steps": ("3", 3.0),
    "save_total_limit": ("3", 3),
    "load_best_model_at_end": ("true", True),
    "metric_for_best_model": ("loss", "loss"),
    "greater_is_better": ("true", True),
    "full_determinism": ("true", True),
    "seed": ("7", 7),
    "data_seed": ("7", 7),
    "dataloader_num_workers": ("3", 3),
    "dataloader_pin_memory": ("false", False),
    "dataloader_persistent_workers": ("true", True),
    "dataloader_prefetch_factor": ("3", 3),
    "ddp_timeout": ("3", 3),
    "deepspeed": ("d.json", "d.json"),
    "skip_memory_metrics": ("false", False),
    "do_train": ("true", True),
    "do_eval": ("true", True),
    "do_predict": ("true", True),
    "resume_from_checkpoint": ("c", "c"),
    "local_rank": ("1", 1),
    "activation_checkpointing": ("true", True),
    "gradient_checkpointing": ("true", True),
    "eval_strategy": ("epoch", "epoch"),
    "save_only_model": ("true", True),
    "enable_jit_checkpoint": ("true", True),
    "use_cpu": ("true", "cpu"),
    "push_to_hub": ("true", True),
    "hub_model_id": ("me/it", "me/it"),
    "hub_token": ("hf_it", Secret("hf_it")),
    "hub_private_repo": ("true", True),
    "hub_strategy": ("end", "end"),
    "hub_revision": ("second", "second"),
    "hub_always_push": ("true", True),
}
RENAMED = {
    "activation_checkpointing": "recompute",
    "gradient_checkpointing": "recompute",
    "eval_strategy": "evaluation_strategy",
    "save_only_model": "ignore_save_lr_and_optim",
    "enable_jit_checkpoint": "save_on_signal",
    "use_cpu": "device",
}
ALWAYS = {"average_tokens_across_devices": "false"}  # what is always on can only be refused when it is off
NAMES = [field.name for field in fields(TrainingArguments)]


@pytest.mark.parametrize("vocabulary", [PRETRAIN, SFT], ids=["pretrain", "sft"])
def test_each_field_is_honoured_or_has_a_reason(vocabulary):
    for name in NAMES:
        if name in HONOURED:
            value, expected = HONOURED[name]
            parsed = parse(vocabulary, [f"--{name}", value])
            assert parsed.value(RENAMED.get(name, name)) == expected and parsed.notes == [], name
            continue
        try:
            parsed = parse(vocabulary, [f"--{name}", ALWAYS.get(name, "7")])
        except UsageError as error:
            assert "did you mean" not in str(error) and "unknown" not in str(error), name
            reason = str(error).removeprefix(f"--{name} ").partition(": ")[2]
        else:
            (note,) = parsed.notes
            reason = note.removeprefix(f"--{name} has no effect here: ").removeprefix(f"--{name} is {ALWAYS_ON}")
            assert reason != note, name
        assert len(reason.split()) > 2, (name, reason)


def test_the_table_names_fields_that_exist():
    assert set(HONOURED) <= set(NAMES)
    assert len(NAMES) == 114  # those of 5.24: a new one belongs into this table or into compat/transformers.py
