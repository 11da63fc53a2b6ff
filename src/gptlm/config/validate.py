"""What can be wrong with a training run, checked before anything heavy is imported or read."""

import os
import stat
from collections.abc import Iterator

from gptlm.config.args.training import DataArguments, ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.derive import degrees_fit, sharing, wants_best
from gptlm.config.field import check_fields
from gptlm.config.model_size import ModelSource
from gptlm.config.parser import Parsed
from gptlm.config.problem import Problem
from gptlm.config.validate_options import option_problems
from gptlm.errors import GptlmError, named
from gptlm.parallel.dims import ParallelDims, bubble_fraction

SHARE_UNIT = 1_000_000
FOR_TRAINING = ("max_steps", "num_train_epochs", "learning_rate")  # given by users who want to train
PIPELINE_STAGE = "pipeline parallel is not compatible for sharding stage2 or stage3, please using sharding stage1"
PARALLEL_WORDS = {  # values that PaddleNLP accepts
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


def problems_of(parsed: Parsed, dims: ParallelDims | None, source: ModelSource | None, printing: bool) -> list[Problem]:
    """Everything that makes a training run impossible; arguments without effect are logged.

    Without `dims` or `source`, which were refused before, the checks that need them are omitted.
    """
    problems = [*check_fields(*parsed.groups.values()), *_training(parsed), *option_problems(parsed, dims)]
    if dims is not None:
        problems += [*_parallel_layout(parsed, dims), *_float8(parsed, dims)]
        _log_no_effect(parsed, dims)
    if source is not None:
        problems += _weights(parsed, source)
    return [*problems, *missing_folder(parsed, "output_dir", "the folder for results", printing)]


def pretrain_problems(parsed: Parsed, printing: bool, own_metrics: bool = False) -> Iterator[Problem]:
    """What can be wrong with pretraining alone.

    Args:
        own_metrics: the caller measures metrics beside the loss.
    """
    training = parsed[TrainingArguments]
    metric = training.metric_for_best_model
    of_caller = own_metrics and metric not in (None, "loss", "eval_loss")
    if wants_best(training) and training.do_train and metric not in ("loss", "eval_loss") and not of_caller:
        yield Problem("metric_for_best_model", f"{metric!r}: pretraining evaluates the loss only")
    if training.greater_is_better and not of_caller:
        yield Problem("greater_is_better", "true: the metric of pretraining is the loss, of which less is better")
    length, degree = parsed[DataArguments].max_seq_length, max(parsed[ParallelArguments].tensor_parallel_degree, 1)
    if parsed[ParallelArguments].sequence_parallel and length % degree:
        yield Problem(
            "max_seq_length",
            f"{length} is not a multiple of {named('tensor_parallel_degree')} ({degree}): {named('sequence_parallel')}",
        )
    yield from _pretraining_data(parsed, printing)


def _pretraining_data(parsed: Parsed, printing: bool) -> Iterator[Problem]:
    data = parsed[DataArguments]
    given = [name for name in ("input_dir", "train_file", "dataset_name") if parsed.value(name)]
    if not given:
        what = f"the folder with token files; or give text with {named('train_file')} or {named('dataset_name')}"
        yield from missing_folder(parsed, "input_dir", what, printing)
    elif len(given) > 1:
        yield Problem(given[0], f"and {named(given[1])} each name the data; give one of them")
    if data.validation_file and not data.train_file:
        yield Problem("validation_file", f"needs {named('train_file')}; other data is divided by {named('split')}")
    elif data.validation_file and parsed.given("split"):
        yield Problem("validation_file", f"and {named('split')} each say what is evaluated on; give one of them")
    for name in ("dataset_config", "dataset_split", "streaming"):
        if parsed.given(name) and not data.dataset_name:
            parsed.note(f"{named(name)} has no effect without {named('dataset_name')}")
    for name in ("text_column", "preprocessing_num_workers"):
        if parsed.given(name) and not data.reads_text:
            parsed.note(f"{named(name)} has no effect: token files are encoded already")


def missing_folder(parsed: Parsed, name: str, what: str, printing: bool) -> Iterator[Problem]:
    """A folder that is not given; --print_config shows the run all the same."""
    problem = Problem(name, f"is missing: {what}")
    if not parsed.value(name) and printing:
        parsed.note_missing(problem)
    elif not parsed.value(name):
        yield problem


def _training(parsed: Parsed) -> Iterator[Problem]:
    model, training = parsed[ModelArguments], parsed[TrainingArguments]
    if training.max_steps == -1 and training.num_train_epochs <= 0:
        yield Problem("num_train_epochs", f"{training.num_train_epochs:g}: expected more than 0")
    count = model.num_hidden_layers
    outside = [layer for layer in training.no_recompute_layers if count and not 0 <= layer < count]
    if outside and count:
        yield Problem("no_recompute_layers", f"{' '.join(map(str, outside))}: the layers are 0 to {count - 1}")
    if training.fp16 and training.bf16:
        yield Problem("fp16", f"and {named('bf16')} exclude each other; give one")
    world = parsed[ParallelArguments].world_size or 1
    if ":" in training.device and world > 1:
        yield Problem(
            "device",
            f"{training.device!r} is one GPU for {world} processes; use {named('device')} gpu",
        )
    resume = (training.resume_from_checkpoint or "").lower()
    if resume in ("false", "0", "no"):
        yield Problem(
            "resume_from_checkpoint",
            f"{resume}: to start at step 0 give {named('overwrite_output_dir')} or another {named('output_dir')}",
        )
    if not (training.do_train or training.do_eval or training.do_predict):
        yield Problem(
            "do_train", f"and {named('do_eval')} and {named('do_predict')} are all off: there is nothing to do"
        )
    if training.load_best_model_at_end and training.do_train:
        yield from _best_model(training)


def _best_model(training: TrainingArguments) -> Iterator[Problem]:
    if training.save_strategy == "best":
        return
    if training.evaluation_strategy == "no" or training.evaluation_strategy != training.save_strategy:
        yield Problem(
            "load_best_model_at_end",
            f"needs evaluation and saving at the same times; {named('evaluation_strategy')} is "
            f"{training.evaluation_strategy}, {named('save_strategy')} is {training.save_strategy}",
        )
    elif training.evaluation_strategy == "steps":
        yield from steps_apart(training)


def steps_apart(training: TrainingArguments) -> Iterator[Problem]:
    """Whether a checkpoint comes without an evaluation, which load_best_model_at_end needs."""
    if training.save_strategy == "best":
        return
    save, evaluate = training.save_steps, training.eval_steps or 1
    mixed = (save < 1) != (evaluate < 1)  # max_steps is not known yet; shares of it are compared as in transformers
    if mixed or round(save * SHARE_UNIT) % round(evaluate * SHARE_UNIT):
        yield Problem(
            "load_best_model_at_end",
            f"needs {named('save_steps')} ({save:g}) to be a multiple of {named('eval_steps')} ({evaluate:g})",
        )


def _float8(parsed: Parsed, dims: ParallelDims) -> Iterator[Problem]:
    training, model = parsed[TrainingArguments], parsed[ModelArguments]
    if not training.fp8:
        return
    if not training.bf16 or training.fp16_opt_level == "O0":
        yield Problem("fp8", f"needs {named('bf16')}")
    if dims.is_model_parallel:
        yield Problem(
            "fp8",
            f"does not work with tensor and pipeline parallelism ({dims}): split layers multiply in bfloat16",
        )
    if "stage3" in parsed[ParallelArguments].sharding:
        yield Problem("fp8", "does not work with sharding stage3, which splits the weights; use stage1 or stage2")
    if training.recompute and training.recompute_granularity in ("full_attn", "only_attn"):
        yield Problem(
            "fp8",
            f"does not work with {named('recompute_granularity')} {training.recompute_granularity}; use full or "
            "core_attn",
        )
    for name in ("hidden_size", "intermediate_size"):
        if (size := getattr(model, name)) and size % 16:
            yield Problem(name, f"{size}: fp8 needs a multiple of 16")
    skipped, layers = training.fp8_skip, model.num_hidden_layers
    if layers and 2 * skipped >= layers:
        yield Problem("fp8_skip", f"{skipped}: none of the {layers} layers is left; use a smaller number")


def _weights(parsed: Parsed, source: ModelSource) -> Iterator[Problem]:
    model = parsed[ModelArguments]
    if model.continue_training and source.weights is None:
        lack = "is a size only, none were ever published" if source.kind == "preset" else "has none"
        yield Problem(
            "continue_training",
            f"needs weights, {model.model_name_or_path} {lack}; give a folder with model.safetensors, or start from "
            f"random weights with {named('continue_training')} 0",
        )


def _parallel_layout(parsed: Parsed, dims: ParallelDims) -> Iterator[Problem]:
    """What can be wrong with degrees and sharding."""
    parallel, training = parsed[ParallelArguments], parsed[TrainingArguments]
    for name, known in PARALLEL_WORDS.items():
        for word in parsed.value(name).replace(",", " ").split():
            if word not in known:
                yield Problem(name, f"{word!r} is unknown; expected {', '.join(known)}")
    sizes = {name: parsed.value(name) for name in ("num_attention_heads", "hidden_size", "intermediate_size")}
    split = dims.tensor * dims.pipeline  # as tensor parallelism
    yield from _sharding(parallel, dims, all(not size or size % split == 0 for size in sizes.values()))
    for name, size in sizes.items():
        if dims.tensor > 1 and size and size % dims.tensor:
            yield Problem(name, f"{size} is not a multiple of {named('tensor_parallel_degree')} ({dims.tensor})")
    yield from _stages(parsed, dims)
    steps = training.gradient_accumulation_steps
    if dims.pipeline > 1 and parallel.virtual_pp_degree > 1 and steps % dims.pipeline:
        yield Problem(
            "gradient_accumulation_steps",
            f"{steps} is not a multiple of {named('pipeline_parallel_degree')} {dims.pipeline}, which "
            f"{named('virtual_pp_degree')} {parallel.virtual_pp_degree} needs; raise the global batch size or set "
            f"{named('virtual_pp_degree')} 1\n  (PaddleFleetX: num of microbatches {steps} should be divisible of "
            f"pp_degree {dims.pipeline} when using interleave pipeline)",
        )
    if "enable_dp_comm_overlap" in parallel.pipeline_parallel_config and dims.pipeline > 1 and dims.data > 1:
        yield Problem(
            "pipeline_parallel_config",
            "enable_dp_comm_overlap with data parallelism: overlap has accuracy issue",
        )


def _stages(parsed: Parsed, dims: ParallelDims) -> Iterator[Problem]:
    """Layers against pipeline stages."""
    layers = parsed[ModelArguments].num_hidden_layers
    chunks = parsed[ParallelArguments].virtual_pp_degree if dims.pipeline > 1 else 1
    stages = dims.pipeline * chunks
    if dims.pipeline == 1 or not layers:
        return
    if layers < stages:
        yield Problem(
            "num_hidden_layers", f"{layers} is less than the {stages} stages of the pipeline; lower the degrees"
        )
    elif layers % stages and chunks > 1:
        yield Problem(
            "num_hidden_layers",
            f"{layers} is not a multiple of {named('pipeline_parallel_degree')} {dims.pipeline} x "
            f"{named('virtual_pp_degree')} {chunks}\n  (PaddleFleetX: virtual pp doesn't support uneven layer split.)",
        )
    elif layers % stages:
        parsed.note(
            f"{named('num_hidden_layers')} {layers} does not divide by {named('pipeline_parallel_degree')} {stages}: "
            f"the first {layers % stages} stages have {layers // stages + 1} layers, the others {layers // stages}"
        )
    steps = parsed[TrainingArguments].gradient_accumulation_steps
    parsed.note(
        f"pipeline: {dims.pipeline} stages, {steps} micro-batches in a step: the bubble is "
        f"{bubble_fraction(dims.pipeline, chunks, steps):.0%} of the time (more micro-batches make it smaller)"
    )


def _sharding(parallel: ParallelArguments, dims: ParallelDims, splits: bool) -> Iterator[Problem]:
    """What can be wrong with sharding; `splits`: layers can be split by all degrees of the model's parallelism."""
    words = parallel.sharding.replace(",", " ").replace("_", " ").split()
    unknown = [word for word in words if word not in ("stage1", "stage2", "stage3", "offload")]
    stages = [word for word in words if word.startswith("stage")]
    if unknown:
        yield Problem("sharding", f"{parallel.sharding!r}: expected stage1, stage2 or stage3, optionally with offload")
        return
    if words and len(stages) != 1:
        yield Problem("sharding", f"{parallel.sharding!r}: exactly one of stage1, stage2 and stage3 is needed")
        return
    if stages and stages[0] != "stage1" and dims.pipeline > 1:
        yield Problem("sharding", _with_pipeline(stages[0], dims, splits))
    if parallel.sharding and parallel.deepspeed:
        yield Problem(
            "sharding",
            f"{parallel.sharding!r} and {named('deepspeed')} {parallel.deepspeed!r} both set the sharding; give one",
        )
    yield from _groups(parallel, dims)
    if stages:
        yield from _shares(parallel.sharding_parallel_degree, dims)


def _with_pipeline(stage: str, dims: ParallelDims, splits: bool) -> str:
    """Why a pipeline has no such stage, and the layouts that do the job; tests compare their memory."""
    sent = "gradients" if stage == "stage2" else "weights and gradients"
    pipeline, replicas = named("pipeline_parallel_degree"), dims.data * dims.pipeline
    if splits:
        other = (
            f"{stage} with {named('tensor_parallel_degree')} {dims.tensor * dims.pipeline}, "
            f"{named('sequence_parallel')} 1 and {pipeline} 1 needs no more memory"
        )
    else:
        other = f"stage3 with {pipeline} 1 splits weights and optimizer states between all {replicas} replicas"
    return (
        f"{stage} does not work with {pipeline} {dims.pipeline}, {sent} would be sent for every micro-batch; {other}, "
        f"or use stage1 with this pipeline\n  (PaddleNLP: {PIPELINE_STAGE})"
    )


def _groups(parallel: ParallelArguments, dims: ParallelDims) -> Iterator[Problem]:
    """Whether groups and shares make up all replicas. The last line is PaddleFleetX's."""
    shares, groups = sharing(parallel), parallel.data_parallel_degree
    if dims.data % shares or degrees_fit(parallel, dims):
        return
    needed = groups * shares * dims.tensor * dims.pipeline
    yield Problem(
        "data_parallel_degree",
        f"{groups} x "
        f"{named('sharding_parallel_degree')} {shares} x {named('tensor_parallel_degree')} {dims.tensor} x "
        f"{named('pipeline_parallel_degree')} {dims.pipeline} = {needed} is not the number of processes "
        f"({dims.world}); launch {needed} ({named('world_size')} {needed} with --print_config), leave "
        f"{named('data_parallel_degree')} out, or add {named('adapt_dp')}\n"
        "  (PaddleFleetX: unreasonable config of dist_strategy.)",
    )


def _shares(degree: int, dims: ParallelDims) -> Iterator[Problem]:
    """Whether so many replicas can share."""
    if dims.data % degree:
        yield Problem(
            "sharding_parallel_degree",
            f"{degree} does not divide the {dims.data} data-parallel replicas ({dims.world} processes / "
            f"({dims.tensor} x {dims.pipeline}))",
        )


def _log_no_effect(parsed: Parsed, dims: ParallelDims) -> None:
    """Log the arguments that change nothing in this run, and values that are probably mistakes."""
    _log_parallel(parsed, dims)
    model, training, note = parsed[ModelArguments], parsed[TrainingArguments], parsed.note
    if model.initializer_range is not None and model.continue_training:
        note(f"{named('initializer_range')} has no effect: the weights are loaded")
    if training.no_recompute_layers and not training.recompute:
        note(f"{named('no_recompute_layers')} has no effect: recompute is off")
    if parsed.given("recompute_granularity") and not training.recompute:
        note(f"{named('recompute_granularity')} has no effect: recompute is off")
    if parsed.given("fp8_skip") and not training.fp8:
        note(f"{named('fp8_skip')} has no effect: {named('fp8')} is off")
    if training.fp16_opt_level == "O0" and (training.fp16 or training.bf16):
        note(f"{named('fp16_opt_level')} O0 switches mixed precision off: the run is float32")
    if training.amp_master_grad and training.fp16_opt_level != "O2":
        note(f"{named('amp_master_grad')} has no effect: gradients are float32 unless the level is O2")
    lowest, highest = training.min_learning_rate, training.learning_rate
    if lowest > highest:
        note(
            f"WARNING: {named('min_learning_rate')} {lowest:g} is above {named('learning_rate')} {highest:g}: after "
            "the warm-up the rate goes up to it; were they swapped?"
        )
    warmup, steps = training.warmup_steps, training.max_steps
    if 0 < steps < warmup:
        note(
            f"{named('warmup_steps')} {warmup:g} is above {named('max_steps')} {steps}: "
            "the run ends before the warm-up does"
        )
    if "none" in training.report_to and len(training.report_to) > 1:
        note(f"{named('report_to')} {' '.join(training.report_to)}: none takes precedence")
    if "autonlp" in training.report_to:
        note(f"{named('report_to')} autonlp has no effect: the service was discontinued")
    if training.load_best_model_at_end and not training.do_train:
        note(f"{named('load_best_model_at_end')} has no effect: do_train is off")
    wanted = [parsed.typed_as(name) for name in FOR_TRAINING if name in parsed.typed]
    if wanted and not training.do_train and parsed.is_default("do_train"):
        only = named("do_eval" if training.do_eval else "do_predict")
        note(
            f"nothing is trained, although {', '.join(wanted)} is given: {only} without {named('do_train')} only "
            "evaluates"
        )


def _log_parallel(parsed: Parsed, dims: ParallelDims) -> None:
    parallel, note = parsed[ParallelArguments], parsed.note
    if parallel.sharding and dims.data == 1 and "offload" not in parallel.sharding:
        note(f"{named('sharding')} {parallel.sharding} has no effect: there is one replica, nothing to share")
    elif parallel.sharding and parallel.sharding_parallel_degree == 1 and dims.data > 1:
        note(f"{named('sharding')} {parallel.sharding} with {named('sharding_parallel_degree')} 1 shards nothing")
    if parallel.sequence_parallel and dims.tensor == 1:
        note(
            f"{named('sequence_parallel')} has no effect: it splits inside the tensor-parallel group, and that has "
            "one process"
        )
    if parallel.virtual_pp_degree > 1 and dims.pipeline == 1:
        note(
            f"{named('virtual_pp_degree')} {parallel.virtual_pp_degree} has no effect: "
            f"{named('pipeline_parallel_degree')} is 1"
        )
    for name in PARALLEL_WORDS:
        words = parsed.value(name).strip()
        if words:
            note(f"{named(name)} {words!r} has no effect: these switch optimizations of PaddlePaddle")
    if parsed.given("auto_parallel_memory") and not parallel.auto_parallel:
        note(f"{named('auto_parallel_memory')} has no effect without {named('auto_parallel')}")


def check_readable(flag: str, path: str | None) -> None:
    """Raises GptlmError if the file of `flag` cannot be opened; None is no file."""
    try:
        if path and not stat.S_ISFIFO(os.stat(path).st_mode):  # closing a pipe would end its writer
            open(path, "rb").close()
    except OSError as error:
        raise GptlmError(f"cannot read {named(flag)} {path}: {error.strerror}") from error
