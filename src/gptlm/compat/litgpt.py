"""Arguments of litgpt's `litgpt finetune` and `finetune_lora`. Each is an alias, has no effect, or is refused."""

from gptlm.compat.transformers import EMPTY, Refused, Settings

SFT_RENAMED = {
    "checkpoint_dir": "model_name_or_path",
    "out_dir": "output_dir",
    "logger_name": "report_to",
    "data.json_path": "dataset_name_or_path",
    "data.val_split_fraction": "val_size",
    "train.epochs": "num_train_epochs",
    "train.max_steps": "max_steps",
    "train.micro_batch_size": "per_device_train_batch_size",
    "train.global_batch_size": "global_batch_size",
    "train.save_interval": "save_steps",
    "train.lr_warmup_steps": "warmup_steps",
    "train.max_norm": "max_grad_norm",
    "train.max_seq_length": "max_length",
    "train.min_lr": "min_learning_rate",
    "eval.interval": "eval_steps",
}
SFT_VALUES = {"logger_name": {"csv": "none"}}
SFT_SETTINGS: Settings = {
    "data.mask_prompt": {"true": "", "false": "--train_on_prompt true"},
    "precision": {
        "32-true": "",
        "bf16-mixed": "--bf16 true",
        "bf16-true": "--bf16 true --fp16_opt_level O2",
        "16-mixed": "--fp16 true",
        "16-true": "--fp16 true --fp16_opt_level O2",
    },
    "quantize": {
        "bnb.nf4": "--load_in_4bit true",
        "bnb.nf4-dq": "--load_in_4bit true --use_bnb_nested_quant true",
        "bnb.fp4": "--load_in_4bit true --bnb_4bit_quant_type fp4",
        "bnb.int8-training": "--load_in_8bit true",
        "none": "",
    },
}
STEPS = "litgpt counts micro-batches here; give"
SFT_REFUSED: Refused = {
    "data": (("json",), "give a file or a dataset of the hub as --dataset_name_or_path"),
    "devices": (("", "1", "auto"), "start with torchrun --nproc_per_node N scripts/finetune_generation.py"),
    "train.log_interval": (EMPTY, f"{STEPS} --logging_steps, in optimizer steps"),
    "data.prompt_style": (EMPTY, "give --chat_template chatml, plain or a Jinja file"),
}
