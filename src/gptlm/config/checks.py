"""What can be wrong with a run, said before anything heavy is imported or read."""

from collections.abc import Iterator, Mapping
from typing import Any

from gptlm.config.parser import Parsed
from gptlm.config.shapes import ModelSource
from gptlm.config.spellings import PARALLEL_WORDS
from gptlm.data.order import parse_split
from gptlm.errors import GptlmError
from gptlm.parallel.dims import ParallelDims

TRACKERS = ("visualdl", "tensorboard", "wandb", "all", "none", "autonlp")
AT_LEAST_ONE = (
    "per_device_eval_batch_size",
    "save_steps",
    "logging_steps",
    "virtual_pp_degree",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
)
NOT_NEGATIVE = (
    "learning_rate",
    "min_learning_rate",
    "weight_decay",
    "max_grad_norm",
    "warmup_steps",
    "dataloader_num_workers",
    "adam_epsilon",
)


def problems_of(parsed: Parsed, dims: ParallelDims, source: ModelSource, printing: bool) -> list[str]:
    """Everything that makes the run impossible, one sentence each; harmless oddities are added to the notes."""
    problems = [*_numbers(parsed), *_training(parsed), *_parallel(parsed, dims), *_weights(parsed, source)]
    problems += _folder(parsed, "output_dir", "the folder for results", printing)
    _oddities(parsed, dims)
    return problems


def pretrain_problems(parsed: Parsed, printing: bool) -> Iterator[str]:
    """What can be wrong with a run on token files alone."""
    values = parsed.values
    for name in ("max_seq_length", "eval_iters", "test_iters"):
        if values[name] is not None and values[name] < 1:
            yield f"{typed(parsed, name)} {values[name]}: expected at least 1"
    try:
        parse_split(values["split"])
    except GptlmError as error:
        yield str(error)
    if values["load_best_model_at_end"] and values["do_train"]:
        if values["metric_for_best_model"] not in ("loss", "eval_loss"):
            yield f"metric_for_best_model {values['metric_for_best_model']!r}: pretraining evaluates the loss only"
    if values["greater_is_better"]:
        yield "greater_is_better true: the metric of pretraining is the loss, of which less is better"
    yield from _folder(parsed, "input_dir", "the folder with token files", printing)


def not_built(dims: ParallelDims, values: Mapping[str, Any]) -> list[str]:
    """What is sensible but not implemented in this version."""
    refusals = []
    masking = values.get("document_masking", "none")
    if dims.pipeline > 1 and masking != "none":
        refusals.append(
            f"document_masking {masking} with pipeline_parallel_degree {dims.pipeline}: stages hand on hidden states "
            "only, without documents; use --tensor_parallel_degree instead, or document_masking none"
        )
    if "document_masking" not in values and dims.shares_replicas:
        refusals.append(
            f"tensor_parallel_degree {dims.tensor} and pipeline_parallel_degree {dims.pipeline}: fine-tuning runs on "
            "replicas only; use --sharding stage3 for models that do not fit on one card"
        )
    return refusals


def _numbers(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    for name in AT_LEAST_ONE:
        if values[name] < 1:
            yield f"{typed(parsed, name)} {values[name]}: expected at least 1"
    for name in NOT_NEGATIVE:
        if not values[name] >= 0 or values[name] == float("inf"):
            yield f"{typed(parsed, name)} {values[name]:g}: expected a finite number, 0 or more"
    for name in ("warmup_ratio", "warmup_fraction"):
        if not 0 <= values[name] <= 1:
            yield f"{typed(parsed, name)} {values[name]:g}: expected a share between 0 and 1"
    if values["lr_start_step"] not in (0, 1):
        yield f"lr_start_step {values['lr_start_step']}: expected 0 or 1"
    if values["initializer_range"] is not None and not 0 < values["initializer_range"] < float("inf"):
        yield f"initializer_range {values['initializer_range']:g}: expected a finite number above 0"
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "adam_beta1", "adam_beta2"):
        if values[name] is not None and not 0 <= values[name] < 1:
            yield f"{typed(parsed, name)} {values[name]:g}: expected 0 or more and below 1"
    if values["max_steps"] == 0 or values["max_steps"] < -1:
        yield f"max_steps {values['max_steps']}: expected at least 1, or -1 for num_train_epochs passes"
    if values["max_steps"] == -1 and values["num_train_epochs"] <= 0:
        yield f"num_train_epochs {values['num_train_epochs']:g}: expected more than 0"
    if not 0 <= values["seed"] < 2**32:
        yield f"seed {values['seed']}: expected 0 to {2**32 - 1}"
    for name in ("eval_steps", "save_total_limit", "minimum_eval_times"):
        if values[name] is not None and values[name] < 1:
            yield f"{name} {values[name]}: expected at least 1"
    if values["decay_steps"] is not None and values["decay_steps"] <= 0:
        yield f"decay_steps {values['decay_steps']:g}: expected more than 0"
    for name in ("scale_loss", "loss_scale"):
        if values[name] is not None and not 0 < values[name] < float("inf"):
            yield f"{name} {values[name]:g}: expected a finite number above 0"


def _training(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    if values["fp16"] and values["bf16"]:
        yield "At most one of fp16 and bf16 can be True, but not both"
    if not device_known(values["device"]):
        yield f"device {values['device']!r}: gptlm runs on gpu and cpu"
    elif ":" in values["device"] and values["world_size"] > 1:
        yield f"device {values['device']!r} is one card, there are {values['world_size']} processes; use --device gpu"
    for tracker in values["report_to"]:
        if tracker not in TRACKERS:
            yield f"report_to {tracker!r}: expected {', '.join(TRACKERS[:5])}"
    resume = (values["resume_from_checkpoint"] or "").lower()
    if resume in ("false", "0", "no"):
        yield f"resume_from_checkpoint {resume}: to start anew give --overwrite_output_dir or another --output_dir"
    if not (values["do_train"] or values["do_eval"] or values["do_predict"]):
        yield "do_train, do_eval and do_predict are all off: there is nothing to do"
    if values["load_best_model_at_end"] and values["do_train"]:
        yield from _best_model(parsed)


def _best_model(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    if values["evaluation_strategy"] == "no" or values["evaluation_strategy"] != values["save_strategy"]:
        yield (
            f"load_best_model_at_end needs evaluation and saving at the same times; evaluation_strategy is "
            f"{values['evaluation_strategy']}, save_strategy is {values['save_strategy']}"
        )
    elif values["evaluation_strategy"] == "steps" and values["save_steps"] % (values["eval_steps"] or 1):
        yield (
            f"load_best_model_at_end needs save_steps ({values['save_steps']}) to be a multiple of eval_steps "
            f"({values['eval_steps']})"
        )


def _parallel(parsed: Parsed, dims: ParallelDims) -> Iterator[str]:
    values = parsed.values
    for name, known in PARALLEL_WORDS.items():
        for word in values[name].replace(",", " ").split():
            if word not in known:
                yield f"{name}: {word!r} is unknown; expected {', '.join(known)}"
    yield from _sharding(parsed, dims)
    for name in ("num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"):
        if dims.tensor > 1 and values[name] and values[name] % dims.tensor:
            yield f"{name} {values[name]} is not a multiple of tensor_parallel_degree ({dims.tensor})"
    length = values.get("max_seq_length")
    if values["sequence_parallel"] and length and length % dims.tensor:
        yield f"max_seq_length {length} is not a multiple of tensor_parallel_degree ({dims.tensor}): sequence_parallel"
    yield from _stages(parsed, dims)
    if dims.pipeline > 1 and values["virtual_pp_degree"] > 1 and values["gradient_accumulation_steps"] % dims.pipeline:
        steps = values["gradient_accumulation_steps"]
        yield (
            f"num of microbatches {steps} should be divisible of pp_degree {dims.pipeline} when using interleave "
            f"pipeline\n  gradient_accumulation_steps {steps}, pipeline_parallel_degree {dims.pipeline}, "
            f"virtual_pp_degree {values['virtual_pp_degree']}; raise the global batch size or set virtual_pp_degree 1"
        )
    if "enable_dp_comm_overlap" in values["pipeline_parallel_config"] and dims.pipeline > 1 and dims.data > 1:
        yield "pipeline_parallel_config enable_dp_comm_overlap with data parallelism: overlap has accuracy issue"


def _stages(parsed: Parsed, dims: ParallelDims) -> Iterator[str]:
    """Layers against pipeline stages."""
    values = parsed.values
    layers, chunks = values["num_hidden_layers"], values["virtual_pp_degree"] if dims.pipeline > 1 else 1
    stages = dims.pipeline * chunks
    if dims.pipeline == 1 or not layers:
        return
    if layers < stages:
        yield f"num_hidden_layers {layers} is less than the {stages} stages of the pipeline; lower the degrees"
    elif layers % stages and chunks > 1:
        yield (
            f"virtual pp doesn't support uneven layer split.\n  num_hidden_layers {layers} is not a multiple of "
            f"pipeline_parallel_degree {dims.pipeline} x virtual_pp_degree {chunks}"
        )
    elif layers % stages:
        parsed.note(
            f"num_hidden_layers {layers} does not divide by pipeline_parallel_degree {stages}: the first "
            f"{layers % stages} stages have {layers // stages + 1} layers, the others {layers // stages}"
        )
    steps = values["gradient_accumulation_steps"]
    idle = (stages // chunks - 1) / (chunks * steps + stages // chunks - 1)
    parsed.note(
        f"pipeline: {dims.pipeline} stages, {steps} micro-batches in a step: each process waits {idle:.0%} of the time "
        "(more micro-batches make it less)"
    )


def _sharding(parsed: Parsed, dims: ParallelDims) -> Iterator[str]:
    values = parsed.values
    words = values["sharding"].replace(",", " ").replace("_", " ").split()
    unknown = [word for word in words if word not in ("stage1", "stage2", "stage3", "offload")]
    stages = [word for word in words if word.startswith("stage")]
    if unknown:
        yield f"sharding {values['sharding']!r}: expected stage1, stage2 or stage3, optionally with offload"
        return
    if words and len(stages) != 1:
        yield f"sharding {values['sharding']!r}: exactly one of stage1, stage2 and stage3 is needed"
        return
    if stages and stages[0] != "stage1" and dims.pipeline > 1:
        yield (
            "pipeline parallel is not compatible for sharding stage2 or stage3, please using sharding stage1 "
            f"(sharding {values['sharding']!r}, pipeline_parallel_degree {dims.pipeline})"
        )
    degree = values["sharding_parallel_degree"]
    sharing = degree if stages else 1
    if dims.data % sharing == 0 and not degrees_fit(values, dims):
        groups = values["data_parallel_degree"]
        needed = groups * sharing * dims.tensor * dims.pipeline
        yield (
            "unreasonable config of dist_strategy.\n"
            f"  data_parallel_degree {groups} x sharding_parallel_degree {sharing} x tensor_parallel_degree "
            f"{dims.tensor} x pipeline_parallel_degree {dims.pipeline} = {needed} is not the number of processes "
            f"({dims.world}); "
            f"launch {needed} (--world_size {needed} with --print_config), leave data_parallel_degree out, or add "
            "--adapt_dp"
        )
    if stages and dims.data % degree:
        yield (
            f"sharding_parallel_degree {degree} does not divide the {dims.data} data-parallel replicas "
            f"({dims.world} processes / ({dims.tensor} x {dims.pipeline}))"
        )
    elif stages and 1 < degree < dims.data and dims.shares_replicas:
        yield (
            f"sharding_parallel_degree {degree} of {dims.data} replicas with tensor or pipeline parallelism: ZeRO "
            "shares over all replicas or none; leave the degree out"
        )
    elif stages and 1 < degree < dims.data and stages[0] == "stage2":
        yield (
            f"sharding stage2 with sharding_parallel_degree {degree} of {dims.data} replicas: DeepSpeed shares "
            "gradients over all replicas or none; use stage1 with this degree, stage3 with it, or leave the degree out"
        )
    if values["sharding"] and values["deepspeed"]:
        yield (f"sharding {values['sharding']!r} and deepspeed {values['deepspeed']!r} both say how to shard; give one")


def degrees_fit(values: Mapping[str, Any], dims: ParallelDims) -> bool:
    """Whether groups of replicas and replicas per group give all replicas."""
    sharing = max(values["sharding_parallel_degree"], 1) if values["sharding"] else 1
    return values["data_parallel_degree"] * sharing == dims.data


def _folder(parsed: Parsed, name: str, what: str, printing: bool) -> Iterator[str]:
    if not parsed.values[name]:
        line = f"--{name} is missing: {what}"
        if printing:
            parsed.note(line)
        else:
            yield line


def _weights(parsed: Parsed, source: ModelSource) -> Iterator[str]:
    values = parsed.values
    if values["continue_training"] and source.weights is None:
        yield (
            f"--continue_training needs weights, {values['model_name_or_path']} "
            f"{'is a size only, none were ever published' if source.kind == 'preset' else 'has none'}; "
            "give a folder with model.safetensors, or start from random weights with --continue_training 0"
        )


def _oddities(parsed: Parsed, dims: ParallelDims) -> None:
    values, note = parsed.values, parsed.note
    if values["sharding"] and dims.data == 1 and "offload" not in values["sharding"]:
        note(f"--sharding {values['sharding']} has no effect: there is one replica, nothing to share")
    elif values["sharding"] and values["sharding_parallel_degree"] == 1 and dims.data > 1:
        note(f"--sharding {values['sharding']} with sharding_parallel_degree 1 shards nothing")
    if values["sequence_parallel"] and dims.tensor == 1:
        note("--sequence_parallel has no effect: it splits inside the tensor-parallel group, and that has one process")
    if values["virtual_pp_degree"] > 1 and dims.pipeline == 1:
        note(f"--virtual_pp_degree {values['virtual_pp_degree']} has no effect: pipeline_parallel_degree is 1")
    for name in PARALLEL_WORDS:
        if values[name].strip():
            note(f"--{name} {values[name].strip()!r} has no effect: those are PaddlePaddle's speed switches")
    if parsed.sources["auto_parallel_memory"] != "default" and not values["auto_parallel"]:
        note(f"{typed(parsed, 'auto_parallel_memory')} has no effect without --auto_parallel")
    if values["initializer_range"] is not None and values["continue_training"]:
        note(f"{typed(parsed, 'initializer_range')} has no effect: the weights are loaded")
    if values["no_recompute_layers"] and not values["recompute"]:
        note("--no_recompute_layers has no effect: recompute is off")
    if values["fp16_opt_level"] == "O0" and (values["fp16"] or values["bf16"]):
        note("--fp16_opt_level O0 switches mixed precision off: the run is float32")
    if values["amp_master_grad"] and values["fp16_opt_level"] != "O2":
        note("--amp_master_grad has no effect: gradients are float32 unless the level is O2")
    if values["min_learning_rate"] > values["learning_rate"]:
        note(
            f"WARNING: min_learning_rate {values['min_learning_rate']:g} is above learning_rate "
            f"{values['learning_rate']:g}: after the warm-up the rate goes up to it; were they swapped?"
        )
    if values["max_steps"] > 0 and values["warmup_steps"] > values["max_steps"]:
        note(f"warmup_steps {values['warmup_steps']:g} is above max_steps {values['max_steps']}: warm-up never ends")
    if "none" in values["report_to"] and len(values["report_to"]) > 1:
        note(f"--report_to {' '.join(values['report_to'])}: none wins")
    if values["load_best_model_at_end"] and not values["do_train"]:
        note("--load_best_model_at_end has no effect: do_train is off")
    if "autonlp" in values["report_to"]:
        note("--report_to autonlp has no effect: the service is gone")


def typed(parsed: Parsed, name: str) -> str:
    """The flag in the user's own word where there is one."""
    return parsed.typed.get(name, name)


def device_known(device: str) -> bool:
    """Whether `device` is gpu, cuda or cpu, perhaps with a card number as in gpu:1."""
    kind, _, index = device.lower().partition(":")
    return kind in ("gpu", "cuda", "cpu") and (not index or index.isdigit())
