"""YAML files of axolotl and litgpt, which are not read: the error has their values as flags of gptlm.

Their sections hold classes and data sources of those libraries, so a file as a whole has no meaning here.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from gptlm.compat import litgpt
from gptlm.compat.transformers import Settings
from gptlm.config.files import Leaf, Tree, as_texts
from gptlm.errors import UsageError

# axolotl's key -> our flag
SAME = (
    "output_dir load_in_8bit load_in_4bit lora_dropout lora_alpha lora_target_modules gradient_accumulation_steps "
    "max_steps learning_rate warmup_steps warmup_ratio weight_decay max_grad_norm adam_beta1 adam_beta2 bf16 fp16 tf32 "
    "logging_steps eval_steps save_steps save_strategy save_total_limit seed chat_template early_stopping_patience "
    "neftune_noise_alpha hub_model_id group_by_length resume_from_checkpoint torch_compile deepspeed max_length"
)
AXOLOTL = dict(zip(SAME.split(), SAME.split(), strict=True)) | {
    "base_model": "model_name_or_path",
    "tokenizer_config": "tokenizer_name_or_path",
    "sequence_len": "max_length",
    "sample_packing": "zero_padding",
    "lora_r": "lora_rank",
    "lora_modules_to_save": "modules_to_save",
    "lora_model_dir": "lora_path",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_init_lora_weights": "init_lora_weights",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "eval_strategy": "evaluation_strategy",
    "gradient_checkpointing": "recompute",
    "val_set_size": "val_size",
    "train_on_inputs": "train_on_prompt",
    "datasets.path": "dataset_name_or_path",
    "pretraining_dataset.path": "dataset_name",
    "test_datasets.path": "eval_dataset_name_or_path",
}
AXOLOTL_VALUES: Settings = {
    "adapter": {"lora": "--lora", "qlora": "--lora --load_in_4bit"},
    "lora_target_linear": {"true": "--lora_target_modules all-linear"},
    "bf16": {"auto": "--bf16", "full": "--bf16 --fp16_opt_level O2"},
}
LITGPT = litgpt.SFT_RENAMED | {
    "tokenizer_dir": "tokenizer_name_or_path",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "seed": "seed",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_r": "lora_rank",
}
LITGPT_VALUES: Settings = litgpt.SFT_SETTINGS | {
    "data.class_path": {"litgpt.data.JSON": ""},
    "optimizer.class_path": {"torch.optim.AdamW": ""},
    "logger_name": {"csv": "--report_to none"},
    "devices": {"1": "", "auto": ""},
    "num_nodes": {"1": ""},
}
PRETRAINS = {"pretraining_dataset", "tokenizer_dir", "initial_checkpoint_dir"}  # keys of files for pretraining
OFF = ("", "none", "null", "false", "[]", "{}")


def refuse_other_yaml(path: str, tree: Tree) -> None:
    """Do nothing for a file of gptlm, FleetX or LLaMA-Factory.

    Raises:
        UsageError: for a file of axolotl or litgpt, with its values as flags.
    """
    if "base_model" in tree and {"datasets", "pretraining_dataset", "adapter", "micro_batch_size"} & {*tree}:
        library, flags, values = "axolotl", AXOLOTL, AXOLOTL_VALUES
    elif {"checkpoint_dir", "out_dir"} & {*tree} and any(isinstance(tree.get(key), dict) for key in ("train", "data")):
        library, flags, values = "litgpt", LITGPT, LITGPT_VALUES
    else:
        return
    command = "gptlm pretrain" if PRETRAINS & {*tree} else "gptlm sft"
    typed, without = ["--lora"] if library == "litgpt" and "lora_r" in tree else [], list[str]()
    for name, value in _leaves(tree, ""):
        texts = as_texts(value)
        text = " ".join(texts)
        if text in values.get(name, {}):
            typed.append(values[name][text])
        elif text.lower() in OFF:
            continue
        elif name in flags and not _is_nested(value):
            typed.append(shlex.join([f"--{flags[name]}", *(() if text == "true" else texts)]))
        else:
            without.append(name)
    rest = f"; without a flag of the same meaning: {', '.join(dict.fromkeys(without))}" if without else ""
    raise UsageError(
        f"{path} is a configuration of {library}, which is not read; give its values as flags: {command} "
        f"{' '.join(dict.fromkeys(filter(None, typed)))}{rest}"
    )


def _leaves(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of each setting, also in lists; `init_args` is no part of a name."""
    for key, node in tree.items():
        name = above.rstrip(".") if key == "init_args" else f"{above}{key}"
        value = node.value if isinstance(node, Leaf) else node
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                yield from _leaves(item, f"{name}.")
        else:
            yield name, value


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)
