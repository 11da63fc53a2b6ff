"""Arguments of PaddleNLP and of older scripts: alias -> our argument, or why it has no effect or is refused.

Names have underscores here; the command line also accepts dashes.
"""

from gptlm.config.parser import ALWAYS_ON

# Values of refused arguments that are accepted: of a switch, and of a number of processes or experts (1 is none).
OFF = ("", "0", "f", "false", "n", "no", "off", "none", "null")
OFF_DEGREE = (*OFF, "1", "-1")

PRETRAIN_RENAMED = {
    "initial_loss_scale": "scale_loss",
    "use_fp8": "fp8",
    "sharding_degree": "sharding_parallel_degree",
    "eval_strategy": "evaluation_strategy",
    "gradient_checkpointing": "recompute",
    "activation_checkpointing": "recompute",
    "tokenizer_name": "tokenizer_name_or_path",
    "grad_clip": "max_grad_norm",
    "micro_batch_size": "per_device_train_batch_size",
    "warmup_rate": "warmup_fraction",
    "logging_freq": "logging_steps",
    "eval_freq": "eval_steps",
    "max_lr": "learning_rate",
    "min_lr": "min_learning_rate",
}

FUSED = "it selects a PaddlePaddle kernel; results are the same"
FLASH = f"{ALWAYS_ON}attention uses the fastest kernel of the device, flash attention included"
QKV = f"{ALWAYS_ON}query, key and value are one matrix; results are the same"
LINEAR = f"{ALWAYS_ON}matrix product and bias are one operation; results are the same"
COMPILED = f"{ALWAYS_ON}compiled blocks fuse it on a GPU (--torch_compile); results are the same"
STATIC = "it configures PaddlePaddle's static graph engine"
CHECKPOINT = "checkpoints have one safetensors format that loads with any parallel layout"

# Each one in use is logged once with its reason.
PRETRAIN_IGNORED = {
    "model_type": "the architecture is read from --model_name_or_path",
    "output_attentions": "training returns the loss only",
    "use_flash_attention": FLASH,
    "use_flash_attn": FLASH,
    "fuse_attention_qkv": QKV,
    "fuse_attention_ffn": "GPT's feed-forward network has no gate, so there are no two matrices to fuse",
    "fused_linear": LINEAR,
    "use_fused_linear": LINEAR,
    "enable_fuse_transformer": FUSED,
    "fuse_sequence_parallel_allreduce": FUSED,
    "enable_linear_fused_grad_add": FUSED,
    "fused_linear_param_grad_add": FUSED,
    "use_fast_layer_norm": COMPILED,
    "use_fused_rms_norm": "GPT has layer norms, no RMS norms",
    "use_fused_rope": "GPT has learned positions, no rotary ones",
    "use_fused_dropout_add": COMPILED,
    "recompute_use_reentrant": "recomputation is never reentrant; results are the same",
    "pp_recompute_interval": "every layer is recomputed, see --no_recompute_layers",
    "transformer_engine_backend": "Transformer Engine layers are not used",
    "te_init_weight_path": "Transformer Engine layers are not used",
    "data_impl": "the format is detected; files are read as needed",
    "skip_warmup": "files are memory-mapped and read as needed",
    "distributed_dataloader": "each process reads its own samples from memory-mapped files",
    "unified_checkpoint": CHECKPOINT,
    "unified_checkpoint_config": CHECKPOINT,
    "save_sharded_model": CHECKPOINT,
    "load_sharded_model": CHECKPOINT,
    "force_reshard_pp": CHECKPOINT,
    "ignore_data_skip": "a resumed run starts at the next sample without reading the earlier ones",
    "amp_custom_black_list": "loss, softmax and layer norms already run in float32",
    "amp_custom_white_list": "autocast's own list decides",
    "hybrid_parallel_topo_order": "the tensor-parallel dimension is always innermost in the rank order",
    "data_parallel_config": STATIC,
    "to_static": STATIC,
    "enable_auto_parallel": STATIC,
    "use_intermediate_api": STATIC,
    "pipeline_schedule_mode": STATIC,
    "virtual_pipeline_seg_method": STATIC,
    "auto_parallel_resume_form_hybrid_parallel": STATIC,
    "use_expert_parallel": "GPT has no experts",
    "sr": STATIC,
    "refined_ops_patterns": STATIC,
    "job_schedule_profiler_start": STATIC,
    "job_schedule_profiler_end": STATIC,
    "job_schedule_profiler_range": STATIC,
    "flatten_param_grads": "it is for NPUs",
    "lazy_data_processing": "samples are always read as needed",
    "do_export": "saved models need no export; AutoModelForCausalLM.from_pretrained loads them",
    "skip_profile_timer": "timers are not logged",
    "log_on_each_node": "rank 0 logs",
    "save_on_each_node": "rank 0 saves",
    "past_index": "training returns no past key values",
    "label_names": "the targets are known",
    "remove_unused_columns": "batches contain model inputs only",
    "prediction_loss_only": "pretraining evaluates the loss only",
    "eval_accumulation_steps": "evaluation keeps one number per batch",
    "dataloader_drop_last": "pretraining uses complete batches only",
    "num_cycles": "the cosine schedule decays once, to --min_learning_rate",
    "fp16_full_eval": "evaluation uses the precision of training",
    "bf16_full_eval": "evaluation uses the precision of training",
    "log_level": "rank 0 logs at level INFO",
    "wandb_api_key": "set WANDB_API_KEY in the environment",
    "eval_data_mode": "every evaluation uses the same samples",
}

# Refused, except with the given values.
PRETRAIN_REFUSED = {
    "sep_parallel_degree": (OFF_DEGREE, "segment parallelism is not implemented; use --tensor_parallel_degree"),
    "context_parallel_degree": (OFF_DEGREE, "context parallelism is not implemented; use --tensor_parallel_degree"),
    "autotuner_benchmark": (OFF, "give --max_steps 5 --save_strategy no instead"),
}

SFT_RENAMED = {
    "dataset": "dataset_name_or_path",
    "eval_dataset": "eval_dataset_name_or_path",
    "max_seq_length": "max_length",
    "max_source_length": "src_length",
    "max_target_length": "tgt_length",
    "lora_r": "lora_rank",
    "rslora": "use_rslora",
    "intokens": "zero_padding",
    "packing": "zero_padding",
}
SFT_SETTINGS = {
    "pissa": {"true": "--init_lora_weights pissa", "false": ""},
    "weight_quantize_algo": {
        "none": "",
        "nf4": "--load_in_4bit true --bnb_4bit_quant_type nf4",
        "fp4": "--load_in_4bit true --bnb_4bit_quant_type fp4",
        "weight_only_int8": "--load_in_8bit true",
        "llm.int8": "--load_in_8bit true",
    },
}
SFT_IGNORED = {
    "benchmark": "there is no benchmark mode",
    "save_generation_output": "generated texts are always written to output_dir/predictions",
    "pad_to_max_length": "batches are padded to their longest example, see --pad_to_multiple_of",
    "eval_accumulation_steps": "evaluation keeps two numbers per batch",
    "remove_unused_columns": "batches contain model inputs only",
    "lora_use_mixer": "adapters use PEFT's layers",
}
MERGE_RENAMED = {
    "torch_dtype": "dtype",
    "adapter_name_or_path": "lora_path",
    "base_model_name_or_path": "model_name_or_path",
    "merge_model_path": "output_path",
    "merge_lora_model_path": "output_path",
    "output_dir": "output_path",
}
MERGE_IGNORED = {
    "device": "merging runs on the CPU",
    "use_cpu": "merging runs on the CPU",
    "no_cuda": "merging runs on the CPU",
    "low_gpu_mem": "merging runs on the CPU",
    "merge_model": "merging is the only mode",
    "safe_serialization": "weights are always saved as safetensors",
}
SFT_REFUSED = {
    "prefix_tuning": (OFF, "prefix tuning is not implemented; use --lora"),
    "lora_plus_scale": ((*OFF_DEGREE, "1.0"), "LoRA+ is not implemented; use --lora"),
    "lokr": (OFF, "LoKr is not implemented; use --lora"),
    "vera": (OFF, "VeRA is not implemented; use --lora"),
}

PREPROCESS_RENAMED = {
    "input": "input_path",
    "vocab": "vocab_file",
    "json_key": "json_keys",
    "append_eod": "append_eos",
    "model_name": "model_name_or_path",
    "data_impl": "dataset_impl",
    "output": "output_prefix",
    "tokenizer_name_or_path": "model_name_or_path",
}
PREPROCESS_IGNORED = {
    "chunk_size": "work is split by bytes",
    "partitions": "the input is read as one stream, in order",
    "keep_sequential_samples": "the order of documents is always kept",
    "tensor_model_parallel_size": "the vocabulary is padded when a model is initialized",
    "make_vocab_size_divisible_by": "the vocabulary is padded when a model is initialized",
    "max_repeated_len": "texts are not changed",
    "cn_seg_func": "word segmentation is for ERNIE and BERT",
    "cn_splited": "word segmentation is for ERNIE and BERT",
    "cn_split_dimer": "word segmentation is for ERNIE and BERT",
}
PREPROCESS_REFUSED = {
    "cn_whole_word_segment": (OFF, "whole-word masking is for ERNIE and BERT"),
}

TOKENIZER_RENAMED = {
    "input": "input_path",
    "train_file": "input_path",
    "output": "output_dir",
    **dict.fromkeys(("json_keys", "text_column", "dataset_text_field"), "json_key"),
}

PREDICT_RENAMED = {
    "max_new_tokens": "tgt_length",
    "max_length": "tgt_length",
    "max_dec_len": "tgt_length",
    "min_dec_len": "min_new_tokens",
    "max_source_length": "src_length",
    "per_device_eval_batch_size": "batch_size",
    "input": "input_file",
    "output": "output_file",
    "adapter_name_or_path": "lora_path",
    "tensor_model_parallel_size": "tensor_parallel_degree",
}
PREDICT_IGNORED = {
    "model_type": "the architecture is read from --model_name_or_path",
    "use_cache": "the key-value cache is always used",
    "use_topp_sampling": "it selects a PaddlePaddle kernel; --top_p samples the same",
    "early_finish": "a continuation always stops at the end-of-text token",
    "inference": "continuing prompts is the only mode",
}
PREDICT_REFUSED = {
    "save_onepiece_model_path": (("", "none"), "saved models are single folders already; copy the folder"),
    **dict.fromkeys(
        ("pipeline_parallel_degree", "pipeline_model_parallel_size"),
        (OFF_DEGREE, "prediction has no pipeline; use --tensor_parallel_degree"),
    ),
    "diversity_rate": (("", "0", "0.0", "none"), "diverse beams are not implemented; use --do_sample"),
    "forced_bos_token_id": (("", "none"), "add the token to the prompt"),
    "forced_eos_token_id": (("", "none"), "truncated continuations get no end-of-text token; leave it out"),
}

ORDER_RENAMED = {
    "data_path": "input_dir",
    "data_cache_path": "data_cache",
    "tokenizer": "tokenizer_name_or_path",
    "tokenizer_name": "tokenizer_name_or_path",
    **dict.fromkeys(("seq_length", "block_size", "max_seq_len", "max_length"), "max_seq_length"),
}
COPY_RENAMED = {"data_impl": "dataset_impl"}
CONVERT_RENAMED = {"from": "source", "torch_dtype": "dtype", "output_dir": "output", "output_path": "output"}

TOKENIZER_OF_MODEL = "the tokenizer is loaded from the model folder"
RAW_WEIGHTS = "only weights are loaded"
EVALUATE_RENAMED = {
    "json_keys": "json_key",
    "valid_data": "eval_path",
    "micro_batch_size": "batch_size",
    "per_device_eval_batch_size": "batch_size",
    "max_seq_len": "max_seq_length",
    "log_interval": "logging_freq",
    "load": "model_name_or_path",
    "pretrained_checkpoint": "model_name_or_path",
    "data_path": "input_dir",
    **dict.fromkeys(("tensor_model_parallel_size", "model_parallel_size"), "tensor_parallel_degree"),
}
EVALUATE_IGNORED = {
    "strict_lambada": "both LAMBADA metrics are always printed",
    "no_load_optim": RAW_WEIGHTS,
    "no_load_rng": RAW_WEIGHTS,
    "finetune": RAW_WEIGHTS,
    "use_checkpoint_args": "sizes are always read from config.json",
    "vocab_file": TOKENIZER_OF_MODEL,
    "merge_file": TOKENIZER_OF_MODEL,
    "tokenizer_type": TOKENIZER_OF_MODEL,
    "tokenizer_model": TOKENIZER_OF_MODEL,
    "make_vocab_size_divisible_by": "the vocabulary size is the model's",
    "train_data": "nothing is trained",
    "epochs": "nothing is trained",
    "data_impl": "the format is detected",
    "num_workers": "texts are tokenized before the model is loaded",
    "seed": "evaluation has no randomness",
    "DDP_impl": "there are no gradients",
    "distributed_backend": "only a few sums are reduced between processes",
    "local_rank": "LOCAL_RANK in the environment is used",
    "checkpoint_activations": "nothing is trained",
    "activations_checkpoint_method": "nothing is trained",
    "recompute_activations": "nothing is trained",
    "deepspeed": "each process loads the whole model",
    "deepspeed_config": "each process loads the whole model",
    "attention_softmax_in_fp32": "attention uses the fastest kernel available; its softmax is float32",
    "model_type": "the architecture is read from --model_name_or_path",
}
EVALUATE_REFUSED = {
    **dict.fromkeys(
        ("pipeline_parallel_degree", "pipeline_model_parallel_size"),
        (OFF_DEGREE, "evaluation has no pipeline; use --tensor_parallel_degree"),
    ),
}
