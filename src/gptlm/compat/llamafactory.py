"""Arguments of LLaMA-Factory's `llamafactory-cli train`, as flags and in its YAML files.

Each is an alias, or has no effect or is refused for a reason. What it shares with transformers' TrainingArguments is in
`transformers`.
"""

from gptlm.compat.paddlenlp import OFF
from gptlm.compat.transformers import ATTENTION, EMPTY, NONE_OR_ZERO, Refused, Settings

OWN_KERNELS = "training always uses the kernels of gptlm"
FULL_OR_LORA = "all weights are trained, or adapters (--lora)"

SFT_RENAMED = {
    "cutoff_len": "max_length",
    "max_samples": "max_train_samples",
    "adapter_name_or_path": "lora_path",
    "additional_target": "modules_to_save",
    "quantization_type": "bnb_4bit_quant_type",
    "double_quantization": "use_bnb_nested_quant",
    "lora_target": "lora_target_modules",
    "new_special_tokens": "additional_special_tokens",
    "neat_packing": "zero_padding",
    "template": "chat_template",
}
SFT_VALUES = {"lora_target": {"all": "all-linear"}}
SFT_SETTINGS: Settings = {
    "finetuning_type": {"lora": "--lora true", "full": ""},
    "quantization_bit": {"4": "--load_in_4bit true", "8": "--load_in_8bit true", "none": ""},
    "pissa_init": {"true": "--init_lora_weights pissa", "false": ""},
    "pure_bf16": {"true": "--bf16 true --fp16_opt_level O2", "false": ""},
    "disable_gradient_checkpointing": {"true": "--recompute false", "false": "--recompute true"},
    "use_muon": {"true": "--optim muon", "false": ""},
}
SFT_IGNORED = {
    "flash_attn": ATTENTION,
    "enable_liger_kernel": OWN_KERNELS,
    "use_unsloth": OWN_KERNELS,
    "use_unsloth_gc": OWN_KERNELS,
    "plot_loss": "report.html always draws the curves",
    "compute_accuracy": "evaluations always measure the accuracy",
    "resize_vocab": "the embedding always grows with the vocabulary",
    "enable_thinking": "a chat template says what an answer begins with",
    "preprocessing_batch_size": "it changes the speed of encoding only",
    "ignore_pad_token_for_loss": "padding is never part of the loss",
    "upcast_layernorm": "norms follow --fp16_opt_level",
    "upcast_lmhead_output": "the loss is always computed in float32",
    "print_param_status": "the log says how many parameters are trained",
    "infer_backend": "evaluations generate with the model in training",
    "pissa_convert": "adapters are always saved as LoRA on the unchanged base",
}
SFT_REFUSED: Refused = {
    "stage": (("", "sft"), "pt is gptlm pretrain; training on preferences and rewards is not implemented"),
    "dataset_dir": (EMPTY, "give the file itself as --dataset_name_or_path; dataset_info.json is not read"),
    "default_system": (EMPTY, "give each record its system text, as system or as a message"),
    "mask_history": (OFF, 'give the earlier turns of the assistant "weight": 0'),
    "rope_scaling": (EMPTY, "GPT-2 has a table of positions; its length is max_position_embeddings"),
    "loraplus_lr_ratio": (NONE_OR_ZERO, "all adapters have one learning rate"),
    **dict.fromkeys(
        ("add_tokens", "add_special_tokens"),
        (EMPTY, "give --additional_special_tokens, which adds entries to the vocabulary"),
    ),
    "create_new_adapter": (OFF, "merge the first adapters with gptlm merge-lora and train new ones on the result"),
    "tokenized_path": (EMPTY, "encoded examples are kept by themselves; --data_cache names their folder"),
    "mix_strategy": (("", "concat", "none"), "examples of all files are shuffled together"),
    "interleave_probs": (EMPTY, "examples of all files are shuffled together"),
    "buffer_size": (EMPTY, "examples are shuffled as a whole; there is no buffer"),
    "model_max_length": (EMPTY, "give --max_length"),
    "max_new_tokens": (EMPTY, "give --tgt_length, the number of new tokens"),
    "export_dir": (EMPTY, "merge adapters with gptlm merge-lora --lora_path DIR --output_path DIR"),
    **dict.fromkeys(("freeze_trainable_layers", "freeze_trainable_modules"), (EMPTY, FULL_OR_LORA)),
    **dict.fromkeys(
        ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_llama_pro", "use_dft_loss"),
        (OFF, "it is not implemented; --optim has the optimizers"),
    ),
    "shift_attn": (OFF, "attention always covers all earlier tokens"),
    "mixture_of_depths": (EMPTY, "every token passes every layer"),
}
