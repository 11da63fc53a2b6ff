"""Foreign words. The only file in which they occur: word -> ours, or why it has no effect, or why it is refused.

Words are written with underscores; on the command line dashes do as well. The words of transformers and TRL are in
spellings_transformers.py.
"""

# Values of refused words that ask for nothing: of a switch, and of a number of processes or experts, where 1 is none.
OFF = ("", "0", "f", "false", "n", "no", "off", "none", "null")
OFF_DEGREE = (*OFF, "1", "-1")

# A word of PaddleNLP's other versions, of HuggingFace, or of older scripts -> the same thing in our words.
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

EVALUATES = ("eval_freq",)  # words of originals that always evaluate: to say when is to ask for it

FUSED = "a speed switch of PaddlePaddle kernels; results are the same without it"
STATIC = "PaddlePaddle's static graph and auto-parallel engine; gptlm has one engine"
CHECKPOINT = "every checkpoint here is one safetensors format that loads on any layout"

# Known words without an effect here, and why. Each one used is named once in the log.
PRETRAIN_IGNORED = {
    "model_type": "the architecture is read from model_name_or_path",
    "output_attentions": "training returns the loss only",
    "use_flash_attention": "attention always takes the fastest kernel of the machine, flash attention included",
    "use_flash_attn": "attention always takes the fastest kernel of the machine, flash attention included",
    "fuse_attention_qkv": "query, key and value are always one matrix; results are the same",
    "fuse_attention_ffn": FUSED,
    "fused_linear": FUSED,
    "use_fused_linear": FUSED,
    "enable_fuse_transformer": FUSED,
    "fuse_sequence_parallel_allreduce": FUSED,
    "enable_linear_fused_grad_add": FUSED,
    "fused_linear_param_grad_add": FUSED,
    "use_fast_layer_norm": FUSED,
    "use_fused_rms_norm": FUSED,
    "use_fused_rope": FUSED,
    "use_fused_dropout_add": FUSED,
    "recompute_use_reentrant": "recomputation here is never reentrant; results are the same",
    "pp_recompute_interval": "every layer is recomputed, see no_recompute_layers",
    "transformer_engine_backend": "Transformer Engine layers are not used",
    "te_init_weight_path": "Transformer Engine layers are not used",
    "data_impl": "the format is read from the files, which are always memory-mapped",
    "skip_warmup": "files are memory-mapped and read as needed",
    "distributed_dataloader": "each process reads its own samples from the memory-mapped files",
    "unified_checkpoint": CHECKPOINT,
    "unified_checkpoint_config": CHECKPOINT,
    "save_sharded_model": CHECKPOINT,
    "load_sharded_model": CHECKPOINT,
    "force_reshard_pp": CHECKPOINT,
    "ignore_data_skip": "resuming starts at the next sample without reading the earlier ones",
    "amp_custom_black_list": "loss, softmax and layer norms are float32 already",
    "amp_custom_white_list": "autocast's own list decides",
    "hybrid_parallel_topo_order": "ranks are ordered with tensor parallelism fastest",
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
    "flatten_param_grads": "a switch for NPU cards",
    "lazy_data_processing": "samples are always read as needed",
    "do_export": "the saved model is the export: AutoModelForCausalLM.from_pretrained loads it",
    "skip_profile_timer": "no timer lines are printed",
    "log_on_each_node": "the first process logs",
    "save_on_each_node": "the first process saves",
    "past_index": "GPT returns no past states in training",
    "label_names": "the targets are known",
    "remove_unused_columns": "a batch holds only what the model takes",
    "prediction_loss_only": "evaluation of pretraining is the loss",
    "eval_accumulation_steps": "evaluation of pretraining keeps one number per batch",
    "dataloader_drop_last": "every batch is whole: the sample index is as long as the run",
    "num_cycles": "the cosine schedule goes down once, to min_learning_rate",
    "fp16_full_eval": "evaluation runs in the precision of training",
    "bf16_full_eval": "evaluation runs in the precision of training",
    "log_level": "lines are printed at level INFO by the first process",
    "wandb_api_key": "set WANDB_API_KEY in the environment",
    "eval_data_mode": "every evaluation reads the same windows",
}

# Known words that ask for what cannot be had, with the values that ask for nothing.
PRETRAIN_REFUSED = {
    "sep_parallel_degree": (OFF_DEGREE, "segment parallelism is not implemented; use --tensor_parallel_degree"),
    "context_parallel_degree": (OFF_DEGREE, "context parallelism is not implemented; use --tensor_parallel_degree"),
    "autotuner_benchmark": (OFF, "give --max_steps 5 --save_strategy no instead"),
}

# Words inside --tensor_parallel_config, --pipeline_parallel_config and --sharding_parallel_config.
PARALLEL_WORDS = {
    "tensor_parallel_config": (
        "enable_mp_async_allreduce",
        "enable_mp_skip_c_identity",
        "enable_mp_fused_linear_param_grad_add",
        "enable_delay_scale_loss",
        "enable_sp_async_reduce_scatter",
        "sync_param",
        "sync_grad",
        "sync_moment",
    ),
    "pipeline_parallel_config": (
        "disable_p2p_cache_shape",
        "disable_partial_send_recv",
        "enable_delay_scale_loss",
        "enable_dp_comm_overlap",
        "enable_sharding_comm_overlap",
        "enable_timer",
        "enable_release_grads",
        "enable_clear_every_step_cache",
        "enable_overlap_p2p_comm",
        "disable_batch_p2p_comm",
    ),
    "sharding_parallel_config": (
        "enable_stage1_tensor_fusion",
        "enable_stage1_overlap",
        "enable_stage2_overlap",
        "split_param",
        "disable_stage1_reduce_avg",
        "enable_stage1_allgather_overlap",
        "enable_stage1_broadcast_overlap",
    ),
}

SFT_RENAMED = {
    "dataset": "dataset_name_or_path",
    "eval_dataset": "eval_dataset_name_or_path",
    "max_seq_length": "max_length",
    "max_source_length": "src_length",
    "max_target_length": "tgt_length",
    "lora_r": "lora_rank",
    "intokens": "zero_padding",
    "packing": "zero_padding",
}
SFT_IGNORED = {
    "benchmark": "there is one way to train",
    "save_generation_output": "generated texts are always written to output_dir/predictions",
    "pad_to_multiple_of": "a batch is as long as its longest example",
    "pad_to_max_length": "a batch is as long as its longest example",
    "eval_accumulation_steps": "an evaluation keeps two numbers per batch",
    "remove_unused_columns": "a batch holds only what the model takes",
    "lora_use_mixer": "adapters are PEFT's",
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
    "merge_model": "there is one way to merge",
    "safe_serialization": "weights are always safetensors",
}
SFT_REFUSED = {
    "prefix_tuning": (OFF, "prefix tuning is not implemented; use --lora"),
    "pissa": (OFF, "PiSSA is not implemented; use --lora"),
    "rslora": (OFF, "rank-stabilised LoRA is not implemented; set --lora_alpha"),
    "lora_plus_scale": ((*OFF_DEGREE, "1.0"), "LoRA+ is not implemented; use --lora"),
    "lokr": (OFF, "LoKr is not implemented; use --lora"),
    "vera": (OFF, "VeRA is not implemented; use --lora"),
    "neftune": (OFF, "NEFTune is not implemented"),
    "weight_quantize_algo": (OFF, "quantized weights are not implemented; use --bf16 --fp16_opt_level O2"),
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
    "chunk_size": "batches are cut by bytes",
    "partitions": "the input is read as one stream, in order",
    "keep_sequential_samples": "documents always keep their order",
    "tensor_model_parallel_size": "the vocabulary is padded when the model is made",
    "make_vocab_size_divisible_by": "the vocabulary is padded when the model is made",
    "max_repeated_len": "texts are kept as they are",
    "cn_seg_func": "word segmentation serves ERNIE and BERT, not GPT",
    "cn_splited": "word segmentation serves ERNIE and BERT, not GPT",
    "cn_split_dimer": "word segmentation serves ERNIE and BERT, not GPT",
}
PREPROCESS_REFUSED = {
    "cn_whole_word_segment": (OFF, "whole-word masking serves ERNIE and BERT, not GPT"),
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
}
PREDICT_IGNORED = {
    "model_type": "the architecture is read from model_name_or_path",
    "use_cache": "keys and values of earlier tokens are always kept",
    "use_topp_sampling": "a kernel of PaddlePaddle; --top_p samples the same",
    "early_finish": "a continuation always ends at its end-of-text token",
    "inference": "there is one way to continue a prompt",
}
PREDICT_REFUSED = {
    "save_onepiece_model_path": (("", "none"), "saved models are in one piece already; copy the folder"),
    "diversity_rate": (("", "0", "0.0", "none"), "diverse beams are not implemented; use --do_sample"),
    "forced_bos_token_id": (("", "none"), "put the token into the prompt"),
    "forced_eos_token_id": (("", "none"), "a continuation that is cut short has no end; leave it out"),
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

TOKENIZER_OF_MODEL = "the tokenizer is the one in the model's folder"
RAW_WEIGHTS = "weights are read alone, there is nothing else to load"
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
}
EVALUATE_IGNORED = {
    "strict_lambada": "both measures of LAMBADA are always computed and printed",
    "no_load_optim": RAW_WEIGHTS,
    "no_load_rng": RAW_WEIGHTS,
    "finetune": RAW_WEIGHTS,
    "use_checkpoint_args": "sizes are always read from the model's config.json",
    "vocab_file": TOKENIZER_OF_MODEL,
    "merge_file": TOKENIZER_OF_MODEL,
    "tokenizer_type": TOKENIZER_OF_MODEL,
    "tokenizer_model": TOKENIZER_OF_MODEL,
    "make_vocab_size_divisible_by": "the embedding has the rows the model was saved with",
    "train_data": "nothing is trained",
    "epochs": "nothing is trained",
    "data_impl": "the format is read from the files",
    "num_workers": "texts are prepared before the model is loaded",
    "seed": "nothing is drawn at random",
    "DDP_impl": "no gradients are exchanged",
    "distributed_backend": "processes exchange a few sums only",
    "local_rank": "torchrun sets it in the environment",
    "checkpoint_activations": "nothing is trained",
    "activations_checkpoint_method": "nothing is trained",
    "recompute_activations": "nothing is trained",
    "deepspeed": "each process holds the whole model",
    "deepspeed_config": "each process holds the whole model",
    "attention_softmax_in_fp32": "attention takes the fastest kernel of the machine, its softmax is float32",
    "model_type": "the architecture is read from model_name_or_path",
}
EVALUATE_REFUSED = {
    "tensor_model_parallel_size": (OFF_DEGREE, "a model is not split for evaluation; start one process per replica"),
    "model_parallel_size": (OFF_DEGREE, "a model is not split for evaluation; start one process per replica"),
    "pipeline_model_parallel_size": (OFF_DEGREE, "a model is not split for evaluation; start one process per replica"),
}
