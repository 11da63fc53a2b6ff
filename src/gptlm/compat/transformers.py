"""Words of transformers' TrainingArguments (versions 4 and 5), of its run_clm.py, and of TRL's SFT script.

Each is an alias, has no effect, or is refused, and says why. tests/config/test_spellings.py goes through them.
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
TRAINING_RENAMED = {
    **MODEL_RENAMED,
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
}

# A word that sets another flag for some of its values: value -> our words; a bare switch is "true".
CPU: Settings = {name: {"true": "--device cpu", "false": ""} for name in ("use_cpu", "no_cuda")}
_WEIGHTS = {"auto": "", "float32": "", "fp32": "", "none": ""}
TRAINING_SETTINGS: Settings = CPU | {
    name: _WEIGHTS
    | dict.fromkeys(("bfloat16", "bf16"), "--bf16 true --fp16_opt_level O2")
    | dict.fromkeys(("float16", "fp16"), "--fp16 true --fp16_opt_level O2")
    for name in ("torch_dtype", "dtype")
}
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

ATTENTION = "attention always takes the fastest kernel of the machine, flash attention included"
NO_UPLOAD = "nothing is uploaded; give the output folder to hf upload"
TRACKIO = "trackio is no tracker here; --report_to takes tensorboard and wandb"
OWN_METRICS = "evaluations compute their metrics themselves"
LOADER = "a setting of the data loader's speed; samples and their order are the same"
REPLICAS = "every weight has a gradient in every step, and gradients are averaged once in it"
NO_CODE = "the network is built in, no code of a model's folder is run"
HUB = "set HF_HOME and HF_TOKEN in the environment"
MODEL_IGNORED = {
    "attn_implementation": ATTENTION,
    "trust_remote_code": NO_CODE,
    "use_fast_tokenizer": "tokenizers are the fast ones",
    "use_fast": "tokenizers are the fast ones",
    "low_cpu_mem_usage": "weights are read one tensor at a time",
    "cache_dir": HUB,
    "token": HUB,
    "use_auth_token": HUB,
}
TRAINING_IGNORED = {
    **MODEL_IGNORED,
    "activation_checkpointing_kwargs": "recomputation here is never reentrant; results are the same",
    "gradient_checkpointing_kwargs": "recomputation here is never reentrant; results are the same",
    "gradient_checkpointing_use_reentrant": "recomputation here is never reentrant; results are the same",
    "torch_compile_backend": "blocks and loss are compiled with torch's own backend",
    "torch_compile_mode": "blocks and loss are compiled in one mode; --cuda_graphs is a flag of its own",
    "use_liger_kernel": "the loss never holds all logits; results are the same",
    "liger_kernel_config": "the loss never holds all logits; results are the same",
    "use_cache": "training keeps no keys and values",
    "torch_empty_cache_steps": "memory stays with the allocator; results are the same",
    "logging_nan_inf_filter": "a NaN or infinite loss ends the run",
    "include_num_input_tokens_seen": "the log has consumed samples and the speed",
    "include_tokens_per_second": "the log has consumed samples and the speed",
    "log_level_replica": "the first process logs",
    "project": TRACKIO,
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), TRACKIO),
    **dict.fromkeys(
        ("eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics", "batch_eval_metrics"), OWN_METRICS
    ),
    "include_inputs_for_metrics": OWN_METRICS,
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), NO_UPLOAD
    ),
    **dict.fromkeys(("push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"), NO_UPLOAD),
    "restore_callback_states_from_checkpoint": "a resumed run has all of its state",
    "length_column_name": "examples are not grouped by length",
    **dict.fromkeys(
        (
            "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
            "dataloader_multiprocessing_context dataloader_in_order dispatch_batches"
        ).split(),
        LOADER,
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), REPLICAS
    ),
    "ddp_backend": "nccl on GPUs, gloo on CPUs",
    "xpu_backend": "nccl on GPUs, gloo on CPUs",
    **dict.fromkeys(("half_precision_backend", "fp16_backend"), "half precision is torch's, see fp16_opt_level"),
    "jit_mode_eval": "evaluations run as training does",
    "use_ipex": "evaluations run as training does",
    "ray_scope": "hyperparameters are not searched for",
    "mp_parameters": "a setting of SageMaker",
    "torchdynamo": "see torch_compile",
    "save_safetensors": "weights are always safetensors",
    "overwrite_cache": "what is cached is made again when the data changes",
    "keep_linebreaks": "texts are kept as they are",
    "streaming": "data is read as needed",
    "dataset_streaming": "data is read as needed",
}

LOSS = "the loss of a step is the mean over the targets of all its processes"
QUANTIZED = "quantized weights are not implemented; use --bf16 --fp16_opt_level O2"
ON = ("", "1", "true", "t", "yes", "y", "on")
EMPTY = ("", "none", "null", "{}")
NONE_OR_ZERO = ("", "none", "null", "0", "0.0")
MODEL_REFUSED: Refused = {
    "model_revision": (("", "main", "none"), "give a folder with the revision's files"),
    "revision": (("", "main", "none"), "give a folder with the revision's files"),
}
TRAINING_REFUSED: Refused = {
    **MODEL_REFUSED,
    "group_by_length": (OFF, "batches of examples of like length are not built"),
    "train_sampling_strategy": (("", "random"), "the order of the samples is fixed by --seed"),
    "data_seed": (EMPTY, "a seed of the data order alone is not built; --seed draws weights, dropout and order"),
    "average_tokens_across_devices": (ON, LOSS),
    "label_smoothing_factor": (NONE_OR_ZERO, "label smoothing is not implemented"),
    "neftune_noise_alpha": (NONE_OR_ZERO, "NEFTune is not implemented"),
    "tf32": ((*OFF, *EMPTY), "products of float32 stay in float32; use --bf16"),
    "lr_scheduler_kwargs": (EMPTY, "give --min_learning_rate, --decay_steps, --lr_end or --power"),
    "optim_args": (EMPTY, "give --adam_beta1, --adam_beta2, --adam_epsilon and --weight_decay"),
    "optim_target_modules": (EMPTY, "the optimizer is AdamW for all weights"),
    "adafactor": (OFF, "the optimizer is AdamW"),
    "auto_find_batch_size": (OFF, "it is not built; gptlm plan says which micro-batch fits"),
    "logging_strategy": (("", "steps"), "log lines come every --logging_steps; the trackers are --report_to"),
    "eval_delay": (NONE_OR_ZERO, "a later first evaluation is not built; give --eval_steps"),
    "enable_jit_checkpoint": (OFF, "a checkpoint at SIGTERM is not built; give --save_steps"),
    "push_to_hub": (OFF, NO_UPLOAD),
    "full_determinism": (OFF, "runs on CPUs are exact, kernels of GPUs are not made so"),
    "accelerator_config": (EMPTY, "batches are split in one way; give the batch sizes"),
    "split_batches": (OFF, "per_device_train_batch_size counts one process; give --global_batch_size for all"),
    "parallelism_config": (EMPTY, "give --tensor_parallel_degree, --pipeline_parallel_degree and --sharding"),
    "fsdp": ((*OFF, *EMPTY, "[]"), "weights are sharded with --sharding stage3"),
    "fsdp_config": (EMPTY, "weights are sharded with --sharding stage3"),
    "fsdp_min_num_params": (NONE_OR_ZERO, "weights are sharded with --sharding stage3"),
    "fsdp_transformer_layer_cls_to_wrap": (EMPTY, "weights are sharded with --sharding stage3"),
    "sharded_ddp": ((*OFF, *EMPTY, "[]"), "states are sharded with --sharding stage1 or stage2"),
    "debug": ((*EMPTY, "[]"), "a NaN or infinite loss ends the run; there is no other debugging"),
    "use_mps_device": (OFF, "gptlm runs on gpu and cpu"),
    "tpu_num_cores": (NONE_OR_ZERO, "gptlm runs on gpu and cpu"),
    "tpu_metrics_debug": (OFF, "gptlm runs on gpu and cpu"),
    "config_overrides": (EMPTY, "give the sizes as flags: --num_hidden_layers, --hidden_size, --num_attention_heads"),
}

TOKENS = "pretraining reads token files; make them with gptlm preprocess and give --input_dir"
ONE_CORPUS = "train, valid and test are shares of one corpus: give --input_dir and --split 949,50,1"
PRETRAIN_RENAMED = {
    **TRAINING_RENAMED,
    "block_size": "max_seq_length",
    "max_seq_len": "max_seq_length",
    "max_length": "max_seq_length",
    "context_length": "max_seq_length",
    "config_name": "model_name_or_path",
}
PRETRAIN_IGNORED = TRAINING_IGNORED | {
    "preprocessing_num_workers": "token files are made by gptlm preprocess --workers",
    "dataset_num_proc": "token files are made by gptlm preprocess --workers",
    "packing": "samples are cut from documents laid end to end",
}
PRETRAIN_REFUSED: Refused = TRAINING_REFUSED | {
    "dataset_name": (EMPTY, TOKENS),
    "dataset_name_or_path": (EMPTY, TOKENS),
    "dataset_config_name": (EMPTY, TOKENS),
    "train_file": (EMPTY, TOKENS),
    "train_dataset": (EMPTY, TOKENS),
    **dict.fromkeys(("validation_file", "eval_dataset", "eval_dataset_name_or_path", "val_size"), (EMPTY, ONE_CORPUS)),
    **dict.fromkeys(("validation_split_percentage", "eval_split_ratio", "test_size"), (EMPTY, ONE_CORPUS)),
    "max_train_samples": (EMPTY, "give --max_steps, the samples divided by the global batch size"),
    "max_eval_samples": (EMPTY, "give --eval_iters, the batches of an evaluation"),
}

EVAL_FILE = "one example in twenty is held out; give --eval_dataset_name_or_path for others"
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
    "predict_with_generate": "eval_with_do_generation",
}
SFT_IGNORED = TRAINING_IGNORED | {
    "preprocessing_num_workers": "examples are encoded in one process",
    "dataset_num_proc": "examples are encoded in one process",
    "packing_strategy": "short examples are packed in one way",
    "padding_free": "packs have no padding, see zero_padding",
    "shuffle_dataset": "examples are shuffled anew in each epoch",
    "ignore_bias_buffers": "there are none",
    "bnb_4bit_quant_type": "weights are not quantized",
    "bnb_4bit_quant_storage": "weights are not quantized",
    "use_bnb_nested_quant": "weights are not quantized",
}
SFT_REFUSED: Refused = TRAINING_REFUSED | {
    "config_name": (EMPTY, "fine-tuning takes the sizes of the weights; give --model_name_or_path"),
    **dict.fromkeys(("val_size", "validation_split_percentage", "eval_split_ratio", "test_size"), (EMPTY, EVAL_FILE)),
    "max_train_samples": (EMPTY, "cut the file of examples"),
    "max_eval_samples": (EMPTY, "cut the file of examples; --generate_num limits generated texts"),
    "dataset_config_name": (EMPTY, "give --dataset_name_or_path, a file or a folder"),
    "dataset_config": (EMPTY, "give --dataset_name_or_path, a file or a folder"),
    "dataset_train_split": (("", "train"), "the split is named train"),
    "dataset_test_split": (("", "test", "dev", "validation"), "give --eval_dataset_name_or_path"),
    "dataset_text_field": (("", "text"), "examples are prompts and answers; plain text is for gptlm pretrain"),
    "dataset_kwargs": (EMPTY, "examples are encoded in one way"),
    "model_init_kwargs": (EMPTY, "give the model's settings as flags, as --torch_dtype"),
    "chat_template_path": (EMPTY, "put the template into the tokenizer's folder"),
    "eos_token": (EMPTY, "the tokenizer's own is taken"),
    "pad_token": (EMPTY, "padding is masked, its token does not matter"),
    "eval_packing": (EMPTY, "evaluations are not packed"),
    "activation_offloading": (OFF, "activations stay on the device; use --recompute"),
    "loss_type": (("", "nll"), "the loss is cross-entropy"),
    "generation_max_length": (EMPTY, "give --tgt_length, the new tokens"),
    "generation_num_beams": (("", "1", "none"), "generated texts are the likeliest token each time"),
    "lora_task_type": (("", "causal_lm"), "a GPT is a causal language model"),
    "lora_modules_to_save": (EMPTY, "adapters alone are trained; --additional_special_tokens saves its rows"),
    "lora_target_parameters": (EMPTY, "give --lora_target_modules"),
    "use_rslora": (OFF, "rank-stabilised LoRA is not implemented; set --lora_alpha"),
    "use_dora": (OFF, "DoRA is not implemented; use --lora"),
    "load_in_8bit": (OFF, QUANTIZED),
    "load_in_4bit": (OFF, QUANTIZED),
}

INFERENCE_RENAMED = {
    **MODEL_RENAMED,
    "per_device_batch_size": "batch_size",
    "per_gpu_eval_batch_size": "batch_size",
    "eval_batch_size": "batch_size",
}
EVALUATE_RENAMED = INFERENCE_RENAMED | {"block_size": "max_seq_length", "max_length": "max_seq_length"}
INFERENCE_IGNORED = MODEL_IGNORED | {"use_cache": "keys and values of earlier tokens are always kept"}
INFERENCE_REFUSED: Refused = MODEL_REFUSED | {
    **dict.fromkeys(
        ("tokenizer_name_or_path", "tokenizer_name", "tokenizer", "processing_class"),
        (EMPTY, "the tokenizer is the one in the model's folder; put another there"),
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
    "block_size": "samples are cut in training, see --max_seq_length there",
    "max_seq_length": "samples are cut in training, see --max_seq_length there",
    "streaming": "the input is read as one stream, in order",
    "trust_remote_code": NO_CODE,
    "use_fast_tokenizer": "tokenizers are the fast ones",
}
