"""Arguments of transformers' TrainingArguments (versions 4 and 5) and run_clm.py, and of TRL's SFT script.

Each is an alias, or has no effect or is refused for a reason. tests/compat/test_aliases.py checks that none is missing.
"""

from collections.abc import Mapping

from gptlm.compat.paddlenlp import OFF

Refused = dict[str, tuple[tuple[str, ...], str]]
Settings = dict[str, Mapping[str, str]]

MODEL_RENAMED = {
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "model_id": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
}
HUB_RENAMED = {"push_to_hub_model_id": "hub_model_id", "push_to_hub_token": "hub_token"}
TRAINING_RENAMED = {
    **MODEL_RENAMED,
    **HUB_RENAMED,
    "tokenizer": "tokenizer_name_or_path",
    "processing_class": "tokenizer_name_or_path",
    "per_device_batch_size": "per_device_train_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "max_train_steps": "max_steps",
    "num_warmup_steps": "warmup_steps",
    "checkpointing_steps": "save_steps",
    "save_only_model": "ignore_save_lr_and_optim",
    "enable_jit_checkpoint": "save_on_signal",
}

# An alias that sets other arguments for some of its values: value -> our arguments; a bare switch is "true".
CPU: Settings = {name: {"true": "--device cpu", "false": ""} for name in ("use_cpu", "no_cuda")}
_WEIGHTS = {"auto": "", "float32": "", "fp32": "", "none": ""}
TRAINING_SETTINGS: Settings = (
    CPU
    | {
        "adafactor": {"true": "--optim adafactor", "false": ""},
    }
    | {
        name: _WEIGHTS
        | dict.fromkeys(("bfloat16", "bf16"), "--bf16 true --fp16_opt_level O2")
        | dict.fromkeys(("float16", "fp16"), "--fp16 true --fp16_opt_level O2")
        for name in ("torch_dtype", "dtype")
    }
)
INFERENCE_SETTINGS: Settings = CPU | {
    name: _WEIGHTS
    | dict.fromkeys(("bfloat16", "bf16"), "--bf16 true")
    | dict.fromkeys(("float16", "fp16"), "--fp16 true")
    for name in ("torch_dtype", "dtype")
}
SFT_SETTINGS: Settings = TRAINING_SETTINGS | {
    name: {"true": "", "none": "", "false": "--train_on_prompt true"}
    for name in ("completion_only_loss", "assistant_only_loss")
}
# transformers' `include_num_input_tokens_seen` is a switch or a word
TRAINING_VALUES = {"include_num_input_tokens_seen": {"true": "all", "1": "all", "false": "no", "0": "no"}}
SFT_SETTINGS |= {"neftune": {"true": "--neftune_noise_alpha 5", "false": ""}}  # PaddleNLP's switch and its alpha
SFT_SETTINGS |= {"train_sampling_strategy": {"random": "", "group_by_length": "--group_by_length true"}}

ATTENTION = "attention always uses the fastest kernel of the device, flash attention included"
OWN_METRICS = "evaluation has its own metrics"
LOADER = "it changes the speed of data loading only; samples and order are the same"
REPLICAS = "every parameter gets a gradient in every step, and gradients are averaged once per step"
NO_CODE = "code in model folders is never run"
HUB = "set HF_HOME and HF_TOKEN in the environment"
MODEL_IGNORED = {
    "attn_implementation": ATTENTION,
    "trust_remote_code": NO_CODE,
    "use_fast_tokenizer": "tokenizers are always fast tokenizers",
    "use_fast": "tokenizers are always fast tokenizers",
    "low_cpu_mem_usage": "weights are always read one tensor at a time",
    "cache_dir": HUB,
    "token": HUB,
    "use_auth_token": HUB,
}
TRAINING_IGNORED = {
    **MODEL_IGNORED,
    "activation_checkpointing_kwargs": "recomputation is never reentrant; results are the same",
    "gradient_checkpointing_kwargs": "recomputation is never reentrant; results are the same",
    "gradient_checkpointing_use_reentrant": "recomputation is never reentrant; results are the same",
    "torch_compile_backend": "layers and loss are compiled with the inductor backend",
    "use_liger_kernel": "the loss is already computed without materializing all logits",
    "liger_kernel_config": "the loss is already computed without materializing all logits",
    "use_cache": "training uses no key-value cache",
    "torch_empty_cache_steps": "the allocator cache is not emptied; results are the same",
    "logging_nan_inf_filter": "a NaN or infinite loss stops the run",
    "include_tokens_per_second": "consumed samples and throughput are always logged",
    "log_level_replica": "rank 0 logs",
    "trackio_static_space_id": "trackio makes a static copy of the Space of --trackio_space_id, and of no other",
    **dict.fromkeys(
        ("eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics", "batch_eval_metrics"), OWN_METRICS
    ),
    "include_inputs_for_metrics": OWN_METRICS,
    "restore_callback_states_from_checkpoint": "a resumed run restores all state",
    "length_column_name": "lengths are counted in tokens",
    **dict.fromkeys(
        ("dataloader_multiprocessing_context dataloader_in_order dispatch_batches").split(),
        LOADER,
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), REPLICAS
    ),
    "ddp_backend": "nccl on GPUs, gloo on CPUs",
    "xpu_backend": "nccl on GPUs, gloo on CPUs",
    **dict.fromkeys(("half_precision_backend", "fp16_backend"), "mixed precision is torch's, see --fp16_opt_level"),
    "jit_mode_eval": "evaluation runs like training",
    "use_ipex": "evaluation runs like training",
    "ray_scope": "there is no hyperparameter search",
    "mp_parameters": "it is for SageMaker",
    "torchdynamo": "see --torch_compile",
    "save_safetensors": "weights are always saved as safetensors",
    "overwrite_cache": "caches are rebuilt when the data changes",
    "keep_linebreaks": "texts are not changed",
    "streaming": "data is always read as needed",
    "dataset_streaming": "data is always read as needed",
}

SHARDED = "give --sharding stage3 for full_shard, stage2 for shard_grad_op, with offload for fsdp's offload"
LOSS = "the loss is always the mean over the target tokens of all processes"
ON = ("", "1", "true", "t", "yes", "y", "on")
EMPTY = ("", "none", "null", "{}")
NONE_OR_ZERO = ("", "none", "null", "0", "0.0")
MODEL_REFUSED: Refused = {
    "model_revision": (("", "main", "none"), "give a folder with the files of that revision"),
    "revision": (("", "main", "none"), "give a folder with the files of that revision"),
}
HUB_REFUSED: Refused = {"push_to_hub_organization": (EMPTY, "give --hub_model_id ORGANIZATION/NAME")}
TRAINING_REFUSED: Refused = {
    **MODEL_REFUSED,
    **HUB_REFUSED,
    "average_tokens_across_devices": (ON, LOSS),
    "optim_target_modules": (EMPTY, "one optimizer updates all weights; no optimizer that needs this is offered"),
    "accelerator_config": (EMPTY, "batches are split in one way; give the batch sizes"),
    "split_batches": (OFF, "--per_device_train_batch_size is per process; give --global_batch_size for all"),
    "parallelism_config": (EMPTY, "give --tensor_parallel_degree, --pipeline_parallel_degree and --sharding"),
    "fsdp": ((*OFF, *EMPTY, "[]"), SHARDED),
    "fsdp_config": (EMPTY, SHARDED),
    "fsdp_min_num_params": (NONE_OR_ZERO, SHARDED),
    "fsdp_transformer_layer_cls_to_wrap": (EMPTY, SHARDED),
    "sharded_ddp": ((*OFF, *EMPTY, "[]"), "optimizer state is sharded with --sharding stage1 or stage2"),
    "debug": ((*EMPTY, "[]"), "a NaN or infinite loss stops the run; there is no other debug mode"),
    "use_mps_device": (OFF, "gptlm runs on gpu and cpu"),
    "tpu_num_cores": (NONE_OR_ZERO, "gptlm runs on gpu and cpu"),
    "tpu_metrics_debug": (OFF, "gptlm runs on gpu and cpu"),
    "config_overrides": (EMPTY, "give the sizes as flags: --num_hidden_layers, --hidden_size, --num_attention_heads"),
}

ONE_CORPUS = "train, valid and test are shares of one corpus: give --split 95,5,0 for 5 percent, or --validation_file"
PRETRAIN_RENAMED = {
    **TRAINING_RENAMED,
    "block_size": "max_seq_length",
    "max_seq_len": "max_seq_length",
    "max_length": "max_seq_length",
    "context_length": "max_seq_length",
    "config_name": "model_name_or_path",
    "train_dataset": "train_file",
    "eval_dataset": "validation_file",
    "eval_dataset_name_or_path": "validation_file",
    "dataset_name_or_path": "dataset_name",
    "dataset_config_name": "dataset_config",
    "dataset_train_split": "dataset_split",
    "dataset_streaming": "streaming",
    "dataset_num_proc": "preprocessing_num_workers",
    **dict.fromkeys(("text_column_name", "dataset_text_field"), "text_column"),
}
PRETRAIN_IGNORED = {word: why for word, why in TRAINING_IGNORED.items() if "streaming" not in word} | {
    "packing": "samples are always packed from concatenated documents",
}
PRETRAIN_REFUSED: Refused = TRAINING_REFUSED | {
    "group_by_length": (OFF, "samples all have --max_seq_length tokens"),
    "train_sampling_strategy": (("", "random"), "the sample order follows from --seed"),
    "val_size": (EMPTY, ONE_CORPUS),
    **dict.fromkeys(("validation_split_percentage", "eval_split_ratio", "test_size"), (EMPTY, ONE_CORPUS)),
    "max_train_samples": (EMPTY, "give --max_steps, the samples divided by the global batch size"),
    "max_eval_samples": (EMPTY, "give --eval_iters, the batches of an evaluation"),
}

SFT_RENAMED = {
    **TRAINING_RENAMED,
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "block_size": "max_length",
    "max_seq_len": "max_length",
    "dataset_name": "dataset_name_or_path",
    "train_file": "dataset_name_or_path",
    "train_dataset": "dataset_name_or_path",
    "validation_file": "eval_dataset_name_or_path",
    "use_peft": "lora",
    "lora_modules_to_save": "modules_to_save",
    "dataset_num_proc": "preprocessing_num_workers",
    "predict_with_generate": "eval_with_do_generation",
    **dict.fromkeys(("eval_split_ratio", "test_size"), "val_size"),
    "text_column_name": "text_column",
    "chat_template_path": "chat_template",
    "dataset_config_name": "dataset_config",
    "dataset_train_split": "dataset_split",
}
SFT_IGNORED = TRAINING_IGNORED | {
    "packing_strategy": "there is one packing strategy",
    "padding_free": "packing needs no padding, see --zero_padding",
    "shuffle_dataset": "examples are always shuffled in each epoch",
    "ignore_bias_buffers": "there are none",
    "bnb_4bit_quant_storage": "quantized weights are stored as bytes",
}
SFT_REFUSED: Refused = TRAINING_REFUSED | {
    "config_name": (EMPTY, "fine-tuning uses the sizes of the model; give --model_name_or_path"),
    "validation_split_percentage": (EMPTY, "give --val_size, the fraction or the number of examples"),
    "dataset_test_split": (("", "test", "dev", "validation"), "give --eval_dataset_name_or_path"),
    "dataset_text_field": (("", "text"), "give --text_column, which reads all records as plain texts"),
    "dataset_kwargs": (EMPTY, "examples are encoded in one way"),
    "model_init_kwargs": (EMPTY, "give them as arguments, such as --torch_dtype"),
    "pad_token": (EMPTY, "padding is masked, so its token has no effect"),
    "eval_packing": (EMPTY, "evaluations are not packed"),
    "activation_offloading": (OFF, "activation offloading is not implemented; use --recompute"),
    "loss_type": (("", "nll"), "the loss is cross-entropy"),
    "generation_max_length": (EMPTY, "give --tgt_length, the number of new tokens"),
    "generation_num_beams": (("", "1", "none"), "evaluation uses greedy search"),
    "lora_task_type": (("", "causal_lm"), "a GPT is a causal language model"),
    "lora_target_parameters": (EMPTY, "give --lora_target_modules"),
}

INFERENCE_RENAMED = {
    **MODEL_RENAMED,
    "per_device_batch_size": "batch_size",
    "per_gpu_eval_batch_size": "batch_size",
    "eval_batch_size": "batch_size",
}
CHAT_RENAMED = INFERENCE_RENAMED | {"max_new_tokens": "tgt_length"}
EVALUATE_RENAMED = INFERENCE_RENAMED | {"block_size": "max_seq_length", "max_length": "max_seq_length"}
INFERENCE_IGNORED = MODEL_IGNORED | {"use_cache": "the key-value cache is always used"}
INFERENCE_REFUSED: Refused = MODEL_REFUSED | {
    **dict.fromkeys(
        ("tokenizer_name_or_path", "tokenizer_name", "tokenizer", "processing_class"),
        (EMPTY, "the tokenizer is loaded from the model folder; replace it there"),
    ),
    "load_in_8bit": (OFF, "quantized weights are not implemented; use --bf16"),
    "load_in_4bit": (OFF, "quantized weights are not implemented; use --bf16"),
}
PREPROCESS_RENAMED = {
    "tokenizer": "model_name_or_path",
    "processing_class": "model_name_or_path",
    "train_file": "input_path",
    "num_proc": "workers",
    "num_workers": "workers",
    "dataset_num_proc": "workers",
    "preprocessing_num_workers": "workers",
    "text_column": "json_keys",
    "text_column_name": "json_keys",
    "dataset_text_field": "json_keys",
}
PREPROCESS_IGNORED = {
    "block_size": "samples are formed in training, see --max_seq_length there",
    "max_seq_length": "samples are formed in training, see --max_seq_length there",
    "streaming": "the input is always read as a stream, in order",
    "trust_remote_code": NO_CODE,
    "use_fast_tokenizer": "tokenizers are always fast tokenizers",
}
