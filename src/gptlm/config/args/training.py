"""Every flag of the training commands: its name, type, default, meaning and unit. Parsing is in parser.py.

Names are PaddleNLP's; where its default or HuggingFace's differs, the default here is PaddleNLP's. Changed on
purpose: `do_train` (on when no `do_*` flag is given), `eval_iters` (a flag here, the constant 10 there), dropouts
(the model's own, where weights are loaded).
"""

from dataclasses import dataclass

from gptlm.config.field import LARGEST, LARGEST_SEED, arg
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
    """The model."""

    model_name_or_path: str | None = arg(
        "gpt2-medium-en", "a built-in name, a folder with config.json (and weights), or a config .json file"
    )
    tokenizer_name_or_path: str | None = arg(None, "tokenizer folder or name; unset: model_name_or_path")
    continue_training: bool = arg(False, "start from the weights of model_name_or_path instead of random ones")
    num_hidden_layers: int | None = arg(None, "transformer layers; unset: the model's", ge=1)
    hidden_size: int | None = arg(None, "width of a token's vector; unset: the model's", ge=1)
    num_attention_heads: int | None = arg(None, "attention heads per layer; unset: the model's", ge=1)
    intermediate_size: int | None = arg(
        None, "width of the feed-forward layer; unset: the model's or 4 x hidden_size", ge=1
    )
    vocab_size: int | None = arg(
        None, "rows of the embedding; unset: the model's, grown to the tokenizer's size rounded up to 128", ge=1
    )
    max_position_embeddings: int | None = arg(
        None, "longest sequence in tokens; unset: the model's, grown to max_seq_length with random weights", ge=1
    )
    initializer_range: float | None = arg(
        None, "standard deviation of random weights; unset: 0.02, or what the model's config says", gt=0
    )
    hidden_dropout_prob: float | None = arg(
        None, "dropout of embeddings and feed-forward output; unset: 0.1, or what loaded weights say", ge=0, lt=1
    )
    attention_probs_dropout_prob: float | None = arg(
        None, "dropout of attention weights and attention output; unset: 0.1, or what loaded weights say", ge=0, lt=1
    )


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """The data."""

    input_dir: str | None = arg(
        None, "folder with token files, one prefix, or 'weight1 prefix1 weight2 prefix2 ...'", words=True
    )
    split: str = arg("949,50,1", "shares of train, valid and test, by sequence", check=bad_split)
    max_seq_length: int = arg(1024, "tokens a sample trains on", ge=1)
    data_cache: str | None = arg(None, "folder for the sample index; unset: index-cache beside the data")
    share_folder: bool = arg(False, "all nodes see one file system: build the sample index once, not once per node")
    data_order: str = arg("paddlenlp", "whose sample order to reproduce", choices=DATA_ORDERS)
    document_masking: str = arg(
        "none",
        "position: positions restart with each document; attention: and it attends to no other document",
        choices=DOCUMENT_MASKINGS,
    )
    eod_mask_loss: bool = arg(False, "do not train on the first token of a document, which nothing foretells")
    eval_iters: int = arg(10, "batches per evaluation, always the same ones", ge=1)
    test_iters: int | None = arg(None, "batches of the final test; unset: ten times eval_iters", ge=1)
    max_evaluate_steps: int = arg(-1, "upper limit of batches per evaluation; -1: none")


@dataclass(frozen=True, kw_only=True)
class ParallelArguments:
    """How processes share the work."""

    tensor_parallel_degree: int = arg(-1, "processes that split each layer; -1: 1")
    tensor_parallel_config: str = arg("", "names of tensor-parallel optimisations", words=True)
    pipeline_parallel_degree: int = arg(-1, "processes that split the stack of layers; -1: 1")
    pipeline_parallel_config: str = arg("", "names of pipeline optimisations", words=True)
    virtual_pp_degree: int = arg(1, "pipeline chunks per process", ge=1)
    sequence_parallel: bool = arg(False, "split activations along the sequence inside the tensor-parallel group")
    sharding: str = arg("", "stage1, stage2 or stage3, optionally with offload: what ZeRO shards", words=True)
    sharding_parallel_degree: int = arg(-1, "processes that share one copy of what is sharded; -1: all replicas")
    data_parallel_degree: int = arg(-1, "groups of replicas, each of which shards on its own; -1: what is left")
    adapt_dp: bool = arg(False, "take what is left where data_parallel_degree does not fit the number of processes")
    sharding_parallel_config: str = arg("", "names of sharding optimisations", words=True)
    auto_parallel: bool = arg(False, "take the layout that gptlm plan puts first for this number of processes")
    auto_parallel_memory: float = arg(80.0, "with auto_parallel: GiB of each card")
    deepspeed: str | None = arg(None, "a DeepSpeed configuration file", switch=True)
    local_rank: int = arg(-1, "given by launchers; LOCAL_RANK in the environment is what counts")
    world_size: int | None = arg(None, "with --print_config: resolve for this many processes")


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """The training run."""

    output_dir: str | None = arg(None, "folder for checkpoints, the final model, results and logs")
    overwrite_output_dir: bool = arg(False, "start anew even if output_dir holds checkpoints, which are removed")
    do_train: bool | None = arg(None, "train; unset: on, unless do_eval or do_predict is given")
    do_eval: bool = arg(False, "evaluate on the validation split, during training too")
    do_predict: bool = arg(False, "evaluate on the test split at the end")
    eval_on_start: bool = arg(False, "evaluate once before the first step")
    per_device_train_batch_size: int = arg(8, "micro-batch: samples in one forward pass on one process", ge=1)
    per_device_eval_batch_size: int = arg(8, "samples in one evaluation batch on one process", ge=1)
    gradient_accumulation_steps: int = arg(1, "micro-batches per optimizer step", ge=1)
    local_batch_size: int | None = arg(
        None, "samples per optimizer step and replica; unset: micro-batch x accumulation", ge=1
    )
    global_batch_size: int | None = arg(None, "samples per optimizer step; unset: local batch x replicas", ge=1)
    max_steps: int = arg(
        -1,
        "optimizer steps; -1: num_train_epochs passes over the training split",
        ge=1,
        also={-1: "num_train_epochs decides"},
    )
    num_train_epochs: float = arg(1.0, "passes over the training split when max_steps is not given")
    learning_rate: float = arg(5e-5, "highest learning rate", ge=0)
    min_learning_rate: float = arg(1e-5, "lowest learning rate of the linear and cosine schedules", ge=0)
    lr_scheduler_type: str = arg(
        "linear",
        "shape of the schedule",
        choices=("linear", "cosine", "oneflow_cosine", "constant", "constant_with_warmup", "polynomial"),
    )
    lr_start_step: int = arg(
        1, "step that the first update counts as in linear and cosine schedules: 1, or 0 (rate 0)", ge=0, le=1
    )
    warmup_steps: float = arg(
        0, "optimizer steps of linear warm-up, below 1 a share of max_steps (rounded up); wins over the ratios", ge=0
    )
    warmup_ratio: float = arg(0.0, "warm-up as a share of max_steps", ge=0, le=1)
    warmup_fraction: float = arg(0.0, "warm-up as a share of decay_steps", ge=0, le=1)
    decay_steps: float | None = arg(None, "step at which the lowest learning rate is reached; unset: max_steps", gt=0)
    lr_end: float = arg(1e-7, "last learning rate of the polynomial schedule")
    power: float = arg(1.0, "exponent of the polynomial schedule")
    optim: str = arg(
        "adamw", "optimizer; all three names are AdamW", choices=("adamw", "adamw_torch", "adamw_torch_fused")
    )
    weight_decay: float = arg(0.0, "decoupled weight decay; biases and layer norms have none", ge=0)
    adam_beta1: float = arg(0.9, "decay of the first moment", ge=0, lt=1)
    adam_beta2: float = arg(0.999, "decay of the second moment", ge=0, lt=1)
    adam_epsilon: float = arg(1e-8, "added to the root of the second moment", ge=0)
    max_grad_norm: float = arg(1.0, "gradients are scaled down to this global norm; 0: never", ge=0)
    seed: int = arg(42, "seed of the weights, of dropout and of the data order", ge=0, le=LARGEST_SEED)
    device: str = arg("gpu", "gpu or cpu; gpu falls back to cpu, loudly, when there is none", check=bad_device)
    fp16: bool = arg(False, "float16 mixed precision")
    bf16: bool = arg(False, "bfloat16 mixed precision")
    fp16_opt_level: str = arg("O1", "O0 none, O1 autocast, O2 half-precision weights", choices=("O0", "O1", "O2"))
    scale_loss: float = arg(32768.0, "first value of the dynamic loss scale of fp16", gt=0)
    loss_scale: float | None = arg(None, "a fixed loss scale for fp16 instead of the dynamic one", gt=0)
    loss_scale_window: int = arg(2000, "good steps after which the dynamic loss scale doubles", ge=1)
    hysteresis: int = arg(1, "overflows after which the dynamic loss scale halves", ge=1)
    min_loss_scale: float = arg(1.0, "lowest loss scale; an overflow there ends the run", ge=1)
    torch_compile: bool | None = arg(None, "compile blocks and loss; unset: in pretraining on a GPU")
    cuda_graphs: bool | None = arg(
        None,
        "replay the passes of a micro-batch as one CUDA graph; unset: where compiled and nothing is exchanged in them",
    )
    fp8: bool = arg(False, "the blocks' matrix products in float8 (Ada, Hopper and newer GPUs)")
    amp_master_grad: bool = arg(False, "accumulate gradients in float32 under O2")
    recompute: bool = arg(False, "compute activations again in the backward pass instead of keeping them")
    recompute_granularity: str = arg(
        "full", "what is computed again", choices=("full", "full_attn", "core_attn", "only_attn")
    )
    no_recompute_layers: list[int] = arg([], "layers whose activations are kept", words=True)
    evaluation_strategy: str | None = arg(
        None, "when to evaluate; unset: steps with do_eval, else no", choices=("no", "steps", "epoch")
    )
    eval_steps: float | None = arg(
        None,
        "optimizer steps between evaluations, below 1 a share of max_steps; unset: logging_steps",
        check=bad_interval,
    )
    minimum_eval_times: int | None = arg(None, "lower eval_steps so that at least this many evaluations happen", ge=1)
    save_strategy: str = arg("steps", "when to save a checkpoint", choices=("no", "steps", "epoch"))
    save_steps: float = arg(
        500, "optimizer steps between checkpoints, below 1 a share of max_steps", check=bad_interval
    )
    save_total_limit: int | None = arg(None, "checkpoints to keep; unset: all", ge=1)
    load_best_model_at_end: bool = arg(False, "end with the checkpoint of the best evaluation")
    metric_for_best_model: str | None = arg(None, "metric that decides; unset: loss")
    greater_is_better: bool | None = arg(None, "whether a higher metric is better; unset: not for a loss")
    ignore_save_lr_and_optim: bool = arg(False, "checkpoints hold weights only and cannot be resumed from")
    ignore_load_lr_and_optim: bool = arg(
        False, "go on with the checkpoint's weights and sample position only: new optimizer, schedule from its start"
    )
    resume_from_checkpoint: str | None = arg(
        None, "checkpoint folder to go on from, or true for the newest in output_dir (also the default)"
    )
    logging_steps: float = arg(
        500, "optimizer steps between log lines, below 1 a share of max_steps", check=bad_interval
    )
    log_format: str = arg("paddlenlp", "whose log lines are printed", choices=LOG_FORMATS)
    logging_first_step: bool = arg(False, "log the first step too")
    logging_dir: str | None = arg(None, "folder for event files; unset: output_dir/runs/<date>_<host>")
    report_to: list[str] = arg(["visualdl"], "visualdl, tensorboard, wandb, all or none", words=True)
    run_name: str | None = arg(None, "name of the run in wandb")
    disable_tqdm: bool | None = arg(None, "no progress bar; unset: a bar where stderr is a terminal")
    skip_memory_metrics: bool = arg(True, "false adds memory use to the log lines")
    dataloader_num_workers: int = arg(0, "processes that read samples ahead", ge=0)
    ddp_timeout: int = arg(
        1800, "seconds a process waits for the others before it gives up", ge=1, le=1_000_000_000, unit="seconds"
    )
