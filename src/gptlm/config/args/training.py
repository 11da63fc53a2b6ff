"""Arguments of training.

Names and defaults are PaddleNLP's, except `do_train` (on if no `do_*` flag is given), `eval_iters` (the constant 10
in PaddleNLP) and the dropout probabilities (the model's own if weights are loaded).
"""

from dataclasses import dataclass

from gptlm.config.args.choices import NO_SCHEDULES, OPTIMIZERS, OWN_SCHEDULES, STOCK_SCHEDULES
from gptlm.config.field import LARGEST, LARGEST_SEED, LONGEST_WAIT, arg
from gptlm.data.blocks import DOCUMENT_MASKINGS
from gptlm.data.order import DATA_ORDERS, parse_split
from gptlm.errors import GptlmError, named

LOG_FORMATS = ("paddlenlp", "fleetx-2022", "fleetx", "megatron", "oneflow", "oneflow-normal")


def bad_interval(value: float) -> str | None:
    """What is wrong with a number of steps that may also be a fraction of the run."""
    if 0 < value < 1 or (float(value).is_integer() and 0 < value <= LARGEST):
        return None
    return f"{value:g}: expected a whole number of at least 1 step, or a fraction of max_steps below 1"


def bad_split(value: str) -> str | None:
    try:
        parse_split(value)
    except GptlmError as error:
        return error.marked.removeprefix(f"{named('split')} ")
    return None


def bad_device(value: str) -> str | None:
    kind, _, index = value.lower().partition(":")
    known = kind in ("gpu", "cuda", "cpu") and (not index or index.isdigit())
    return None if known else f"{value!r}: gptlm runs on gpu and cpu"


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Model"""

    model_name_or_path: str | None = arg(
        "gpt2-medium-en",
        "built-in name, folder with config.json (and weights), OWNER/NAME of the hub, or config .json file",
    )
    tokenizer_name_or_path: str | None = arg(None, "tokenizer folder or name; unset: --model_name_or_path")
    continue_training: bool = arg(False, "start from the weights of --model_name_or_path, not from random weights")
    num_hidden_layers: int | None = arg(None, "number of transformer layers; unset: the model's", ge=1, le=10_000)
    hidden_size: int | None = arg(None, "hidden size; unset: the model's", ge=1)
    num_attention_heads: int | None = arg(None, "number of attention heads; unset: the model's", ge=1)
    intermediate_size: int | None = arg(None, "feed-forward size; unset: the model's or 4 x --hidden_size", ge=1)
    vocab_size: int | None = arg(
        None, "rows of the embedding; unset: the model's, at least the tokenizer's size rounded up to 128", ge=1
    )
    max_position_embeddings: int | None = arg(
        None,
        "rows of the position embedding; unset: the model's, at least --max_seq_length with random weights",
        ge=1,
        unit="tokens",
    )
    initializer_range: float | None = arg(
        None, "standard deviation of random weights; unset: the model's config, else 0.02", gt=0
    )
    hidden_dropout_prob: float | None = arg(
        None,
        "dropout probability after embeddings and feed-forward layers; unset: 0.1, or the loaded model's",
        ge=0,
        lt=1,
    )
    attention_probs_dropout_prob: float | None = arg(
        None,
        "dropout probability of attention weights and attention output; unset: 0.1, or the loaded model's",
        ge=0,
        lt=1,
    )


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Data"""

    input_dir: str | None = arg(
        None,
        "folder with token files, one prefix, or 'weight1 prefix1 weight2 prefix2 ...' (required)",
        words=True,
    )
    train_file: str | None = arg(
        None,
        "text to encode and train on, in place of --input_dir: file, folder or quoted glob, "
        "as the input of gptlm preprocess",
    )
    validation_file: str | None = arg(
        None,
        "--train_file: text to evaluate on, all of it, in place of --split; then all of --train_file is trained on",
    )
    dataset_name: str | None = arg(
        None, "dataset to encode and train on, in place of --input_dir: name on the HuggingFace hub, or local folder"
    )
    dataset_config: str | None = arg(None, "--dataset_name: configuration; unset: the dataset's default")
    dataset_split: str = arg("train", "--dataset_name: split to encode; train, valid and test samples are parts of it")
    streaming: bool = arg(False, "--dataset_name: read it as a stream, without a copy on disk")
    text_column: str = arg("text", "--train_file, --dataset_name: column (JSON key) of the texts")
    preprocessing_num_workers: int | None = arg(
        None, "--train_file, --dataset_name: encoder processes; unset: one per core", ge=1
    )
    split: str = arg("949,50,1", "ratio of train, valid and test sequences", check=bad_split)
    max_seq_length: int = arg(1024, "sequence length", ge=1, unit="tokens")
    data_cache: str | None = arg(
        None,
        "folder for the sample index and for encoded text; unset: the index in index-cache beside the data, text in "
        "the folder of the datasets library (HF_DATASETS_CACHE), else --output_dir",
    )
    share_folder: bool = arg(False, "nodes share a file system: build the sample index once, not once per node")
    data_order: str = arg("paddlenlp", "library whose sample order is reproduced", choices=DATA_ORDERS)
    document_masking: str = arg(
        "none",
        "position: restart positions at each document; attention: also mask attention between documents",
        choices=DOCUMENT_MASKINGS,
    )
    eod_mask_loss: bool = arg(False, "mask the loss of the first token after an end-of-text token")
    eval_iters: int = arg(10, "batches per evaluation, the same ones each time", ge=1)
    test_iters: int | None = arg(None, "batches of the final test; unset: 10 x --eval_iters", ge=1)
    max_evaluate_steps: int = arg(-1, "maximum number of batches per evaluation; -1: no limit")

    @property
    def reads_text(self) -> bool:
        """Whether the data is text, not token files."""
        return bool(self.train_file or self.dataset_name)


@dataclass(frozen=True, kw_only=True)
class ParallelArguments:
    """Parallelism"""

    tensor_parallel_degree: int = arg(-1, "tensor parallelism: processes that split each layer; -1: 1")
    tensor_parallel_config: str = arg("", "tensor-parallel options of PaddleNLP, without effect", words=True)
    pipeline_parallel_degree: int = arg(-1, "pipeline parallelism: number of stages; -1: 1")
    pipeline_parallel_config: str = arg("", "pipeline-parallel options of PaddleNLP, without effect", words=True)
    virtual_pp_degree: int = arg(1, "interleaved pipeline: model chunks per process", ge=1)
    sequence_parallel: bool = arg(False, "split activations along the sequence in the tensor-parallel group")
    sharding: str = arg("", "ZeRO stage: stage1, stage2 or stage3, optionally with offload", words=True)
    sharding_parallel_degree: int = arg(-1, "replicas per ZeRO sharding group; the groups are copies; -1: all replicas")
    data_parallel_degree: int = arg(-1, "number of sharding groups; -1: replicas / --sharding_parallel_degree")
    adapt_dp: bool = arg(False, "adjust --data_parallel_degree if it does not fit the number of processes")
    sharding_parallel_config: str = arg("", "sharding options of PaddleNLP, without effect", words=True)
    auto_parallel: bool = arg(False, "use the best parallel layout that gptlm plan finds for this number of processes")
    auto_parallel_memory: float = arg(80.0, "--auto_parallel: memory of a GPU", unit="GiB")
    deepspeed: str | None = arg(None, "DeepSpeed configuration file", switch=True)
    local_rank: int = arg(-1, "set by launchers and ignored; LOCAL_RANK in the environment is used")
    world_size: int | None = arg(None, "with --print_config: number of processes to resolve for")


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Training"""

    output_dir: str | None = arg(None, "folder for checkpoints, the final model, results and logs (required)")
    overwrite_output_dir: bool = arg(False, "start from step 0 and remove what earlier runs wrote into --output_dir")
    do_train: bool | None = arg(None, "train; unset: on, unless --do_eval or --do_predict is given")
    do_eval: bool = arg(False, "evaluate on the validation split, also during training")
    do_predict: bool = arg(False, "evaluate on the test split at the end")
    eval_on_start: bool = arg(False, "evaluate before the first step")
    per_device_train_batch_size: int = arg(8, "micro-batch size: samples per forward pass and process", ge=1)
    per_device_eval_batch_size: int = arg(8, "evaluation batch size per process", ge=1)
    gradient_accumulation_steps: int = arg(1, "micro-batches per optimizer step", ge=1)
    auto_find_batch_size: bool = arg(
        False, "one process: after running out of memory, smaller micro-batches and more accumulation"
    )
    local_batch_size: int | None = arg(
        None, "samples per optimizer step and data-parallel replica; unset: micro-batch x accumulation", ge=1
    )
    global_batch_size: int | None = arg(
        None, "samples per optimizer step; unset: --local_batch_size x data-parallel replicas", ge=1
    )
    max_steps: int = arg(-1, "total number of optimizer steps", ge=1, also={-1: "num_train_epochs decides"})
    num_train_epochs: float = arg(1.0, "epochs, if --max_steps is not given; above 0")
    learning_rate: float = arg(5e-5, "peak learning rate", ge=0)
    min_learning_rate: float = arg(1e-5, "final learning rate of the linear and cosine schedules", ge=0)
    lr_scheduler_type: str = arg(
        "linear",
        "learning rate schedule",
        choices=(*OWN_SCHEDULES, *STOCK_SCHEDULES, *NO_SCHEDULES),
    )
    lr_scheduler_kwargs: str | None = arg(
        None, "settings of a schedule of transformers, as a JSON object or name=value,name=value", nested=True
    )
    lr_start_step: int = arg(
        1, "step number of the first update in linear and cosine schedules; 0: its rate is 0", ge=0, le=1
    )
    warmup_steps: float = arg(
        0,
        "linear warmup steps; below 1: fraction of --max_steps, rounded up; overrides --warmup_ratio "
        "and --warmup_fraction",
        ge=0,
    )
    warmup_ratio: float = arg(0.0, "linear warmup as a fraction of --max_steps", ge=0, le=1)
    warmup_fraction: float = arg(0.0, "linear warmup as a fraction of --decay_steps", ge=0, le=1)
    decay_steps: float | None = arg(
        None, "step at which the learning rate reaches its minimum; unset: --max_steps", gt=0
    )
    lr_end: float = arg(1e-7, "final learning rate of the polynomial schedule")
    power: float = arg(1.0, "exponent of the polynomial schedule")
    optim: str = arg("adamw", "optimizer; adamw, adamw_torch and adamw_torch_fused are one", choices=OPTIMIZERS)
    optim_args: str | None = arg(
        None, "settings of other optimizers than AdamW, as name=value,name=value or a JSON object", nested=True
    )
    weight_decay: float = arg(0.0, "decoupled weight decay; not applied to biases and layer norms", ge=0)
    adam_beta1: float = arg(0.9, "AdamW beta1", ge=0, lt=1)
    adam_beta2: float = arg(0.999, "AdamW beta2", ge=0, lt=1)
    adam_epsilon: float = arg(1e-8, "AdamW epsilon", ge=0)
    max_grad_norm: float = arg(1.0, "gradient clipping: maximum global norm; 0: off", ge=0)
    label_smoothing_factor: float = arg(0.0, "label smoothing of the training loss; evaluation has none", ge=0, lt=1)
    neftune_noise_alpha: float | None = arg(
        None, "NEFTune: uniform noise on the embeddings in training, at most alpha / sqrt(length x width)", ge=0
    )
    seed: int = arg(42, "random seed of weights, dropout and data order", ge=0, le=LARGEST_SEED)
    data_seed: int | None = arg(None, "random seed of the data order alone; unset: seed", ge=0, le=LARGEST_SEED)
    full_determinism: bool = arg(
        False, "deterministic kernels only, not compiled: runs on one machine are equal bit by bit, and slower"
    )
    device: str = arg("gpu", "gpu, gpu:N or cpu; falls back to cpu with a warning if there is no GPU", check=bad_device)
    fp16: bool = arg(False, "float16 mixed precision")
    bf16: bool = arg(False, "bfloat16 mixed precision")
    fp16_opt_level: str = arg(
        "O1",
        "mixed precision level; O0: float32, O1: autocast, O2: half-precision weights with float32 master weights",
        choices=("O0", "O1", "O2"),
    )
    tf32: bool | None = arg(None, "TF32 in float32 matrix products of an Ampere or newer GPU; unset: torch's default")
    scale_loss: float = arg(32768.0, "fp16: initial dynamic loss scale", gt=0)
    loss_scale: float | None = arg(None, "fp16: static loss scale; unset: dynamic", gt=0)
    loss_scale_window: int = arg(2000, "fp16: steps without overflow before the loss scale doubles", ge=1)
    hysteresis: int = arg(1, "fp16: overflows before the loss scale halves", ge=1)
    min_loss_scale: float = arg(1.0, "fp16: minimum loss scale; an overflow there stops the run", ge=1)
    torch_compile: bool | None = arg(None, "compile layers and loss; unset: on a GPU")
    torch_compile_mode: str | None = arg(
        None,
        "mode of torch.compile; unset: default",
        choices=("default", "max-autotune-no-cudagraphs"),
    )
    cuda_graphs: bool | None = arg(
        None,
        "replay forward and backward of a micro-batch as a CUDA graph, one for each shape; unset: if compiled, without "
        "communication",
    )
    flat_grad_sync: bool | None = arg(
        None,
        "reduce all gradients once after backward, not in buckets during it; unset: under O2 where that is faster",
    )
    fp8: bool = arg(False, "float8 matrix products in the layers; needs bf16 and an Ada, Hopper or newer GPU")
    fp8_skip: int = arg(1, "layers at each end of the model that --fp8 leaves in bfloat16", ge=0)
    amp_master_grad: bool = arg(False, "O2: accumulate gradients in float32")
    recompute: bool = arg(False, "activation recomputation: drop activations and recompute them in backward")
    recompute_granularity: str = arg(
        "full",
        "what to recompute; full: layer, full_attn or only_attn: attention module, core_attn: attention core",
        choices=("full", "full_attn", "core_attn", "only_attn"),
    )
    no_recompute_layers: list[int] = arg([], "indices of layers that are not recomputed", words=True)
    evaluation_strategy: str | None = arg(
        None, "when to evaluate; unset: steps with --do_eval, else no", choices=("no", "steps", "epoch")
    )
    eval_steps: float | None = arg(
        None,
        "evaluation interval; below 1: fraction of --max_steps; unset: --logging_steps",
        check=bad_interval,
        unit="steps",
    )
    eval_delay: float = arg(
        0, "no evaluation before this step, or before this epoch with --evaluation_strategy epoch", ge=0
    )
    minimum_eval_times: int | None = arg(None, "lower --eval_steps to reach at least this number of evaluations", ge=1)
    save_strategy: str = arg(
        "steps",
        "when to save checkpoints; best: after each evaluation that improves --metric_for_best_model",
        choices=("no", "steps", "epoch", "best"),
    )
    save_steps: float = arg(
        500, "checkpoint interval; below 1: fraction of --max_steps", check=bad_interval, unit="steps"
    )
    save_on_signal: bool = arg(
        True, "SIGTERM and SIGHUP save a checkpoint before they end the run; 0: they end it after the step"
    )
    checkpoint_format: str | None = arg(
        None,
        "hf: a checkpoint is a GPT-2 folder that one process writes; sharded: each process writes its share; unset: "
        "sharded with several processes and more than 1 billion weights, hf for adapters",
        choices=("hf", "sharded"),
    )
    async_save: bool = arg(
        False, "checkpoint_format sharded: training continues when the checkpoint is copied to host memory"
    )
    save_total_limit: int | None = arg(None, "maximum number of checkpoints to keep; unset: all", ge=1)
    load_best_model_at_end: bool = arg(False, "load the best checkpoint at the end of training")
    metric_for_best_model: str | None = arg(None, "metric of the best checkpoint; unset: loss")
    greater_is_better: bool | None = arg(None, "whether a higher metric is better; unset: by metric")
    early_stopping_patience: int | None = arg(
        None, "end training after this many evaluations in a row without a better --metric_for_best_model", ge=1
    )
    early_stopping_threshold: float = arg(
        0.0, "--early_stopping_patience: by how much more than this the metric has to improve", ge=0
    )
    ignore_save_lr_and_optim: bool = arg(False, "save weights only; such checkpoints cannot be resumed")
    ignore_load_lr_and_optim: bool = arg(
        False, "resume weights and sample position only, with a new optimizer and schedule"
    )
    resume_from_checkpoint: str | None = arg(
        None, "checkpoint folder to resume from; true or unset: the newest in --output_dir"
    )
    logging_steps: float = arg(500, "log interval; below 1: fraction of --max_steps", check=bad_interval, unit="steps")
    logging_strategy: str = arg("steps", "when to log the training loss", choices=("no", "steps", "epoch"))
    log_format: str = arg("paddlenlp", "library whose log lines are printed", choices=LOG_FORMATS)
    logging_first_step: bool = arg(False, "also log the first step")
    logging_dir: str | None = arg(None, "folder for TensorBoard events; unset: output_dir/runs/<date>_<host>")
    include_num_input_tokens_seen: str = arg(
        "no",
        "count input tokens in the log lines: all, or those that are not padding",
        choices=("no", "all", "non_padding"),
    )
    report_to: list[str] = arg(
        ["visualdl"],
        "trackers: visualdl, tensorboard, wandb, mlflow, swanlab, trackio; all: visualdl and tensorboard; or none",
        words=True,
    )
    run_name: str | None = arg(None, "run name in wandb, mlflow, swanlab and trackio")
    project: str = arg("huggingface", "project in trackio; the others read theirs from the environment")
    trackio_space_id: str | None = arg(None, "Hugging Face Space that trackio uploads to; unset: local files only")
    trackio_bucket_id: str | None = arg(None, "Hugging Face bucket of --trackio_space_id")
    disable_tqdm: bool | None = arg(None, "no progress bar; unset: a bar if stderr is a terminal")
    skip_memory_metrics: bool = arg(True, "false: add memory usage to the log lines")
    profile: int | None = arg(
        None,
        "torch.profiler: write a trace and a table of this many steps, after 3 of warm-up, to output_dir/profile",
        ge=1,
        le=100,
        unit="steps",
    )
    dataloader_num_workers: int = arg(0, "worker processes that load samples", ge=0)
    dataloader_pin_memory: bool = arg(True, "batches in page-locked memory, which a GPU copies faster")
    dataloader_prefetch_factor: int | None = arg(
        None, "batches that each worker process loads ahead; unset: torch's 2", ge=1
    )
    dataloader_persistent_workers: bool = arg(False, "keep worker processes after the last batch of a pass")
    ddp_timeout: int = arg(1800, "timeout of collective operations", ge=1, le=LONGEST_WAIT, unit="seconds")
