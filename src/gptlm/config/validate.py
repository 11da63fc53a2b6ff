"""What can be wrong with a run, said before anything heavy is imported or read."""

from collections.abc import Iterator, Mapping
from typing import Any

from gptlm.compat.paddlenlp import PARALLEL_WORDS
from gptlm.config.model_size import ModelSource
from gptlm.config.parser import Parsed
from gptlm.config.validate_layout import layout_problems
from gptlm.errors import GptlmError, named
from gptlm.parallel.dims import ParallelDims

TRACKERS = ("visualdl", "tensorboard", "wandb", "all", "none", "autonlp")
SHARE_UNIT = 1_000_000
FOR_TRAINING = ("max_steps", "num_train_epochs", "learning_rate")  # who types these wants to train


def problems_of(parsed: Parsed, dims: ParallelDims | None, source: ModelSource | None, printing: bool) -> list[str]:
    """Everything that makes the run impossible, one sentence each; harmless oddities are added to the notes.

    Without `dims` or `source`, which were refused before, what follows from them is left out.
    """
    problems = [*_numbers(parsed), *_training(parsed)]
    if dims is not None:
        problems += [*layout_problems(parsed, dims), *(_float8(parsed, dims) if parsed.values["fp8"] else ())]
        _oddities(parsed, dims)
    if source is not None:
        problems += _weights(parsed, source)
    problems += _folder(parsed, "output_dir", "the folder for results", printing)
    return problems


def pretrain_problems(parsed: Parsed, printing: bool) -> Iterator[str]:
    """What can be wrong with a run on token files alone."""
    values = parsed.values
    if values["load_best_model_at_end"] and values["do_train"]:
        if values["metric_for_best_model"] not in ("loss", "eval_loss"):
            yield (
                f"{named('metric_for_best_model')} {values['metric_for_best_model']!r}: pretraining evaluates the "
                "loss only"
            )
    if values["greater_is_better"]:
        yield f"{named('greater_is_better')} true: the metric of pretraining is the loss, of which less is better"
    yield from _folder(parsed, "input_dir", "the folder with token files", printing)


def _numbers(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    if values["max_steps"] == -1 and values["num_train_epochs"] <= 0:
        yield f"{named('num_train_epochs')} {values['num_train_epochs']:g}: expected more than 0"
    count = values["num_hidden_layers"]
    outside = [layer for layer in values["no_recompute_layers"] if count and not 0 <= layer < count]
    if outside:
        yield f"{named('no_recompute_layers')} {' '.join(map(str, outside))}: the layers are 0 to {count - 1}"


def _training(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    if values["fp16"] and values["bf16"]:
        yield "At most one of fp16 and bf16 can be True, but not both"
    if ":" in values["device"] and (values["world_size"] or 1) > 1:
        yield (
            f"{named('device')} {values['device']!r} is one card, there are {values['world_size']} processes; use "
            f"--{named('device')} gpu"
        )
    for tracker in values["report_to"]:
        if tracker not in TRACKERS:
            yield f"{named('report_to')} {tracker!r}: expected {', '.join(TRACKERS[:5])}"
    resume = (values["resume_from_checkpoint"] or "").lower()
    if resume in ("false", "0", "no"):
        yield (
            f"{named('resume_from_checkpoint')} {resume}: to start anew give --{named('overwrite_output_dir')} or "
            f"another --{named('output_dir')}"
        )
    if not (values["do_train"] or values["do_eval"] or values["do_predict"]):
        yield f"{named('do_train')}, {named('do_eval')} and {named('do_predict')} are all off: there is nothing to do"
    if values["load_best_model_at_end"] and values["do_train"]:
        yield from _best_model(parsed)


def _float8(parsed: Parsed, dims: ParallelDims) -> Iterator[str]:
    values = parsed.values
    if not values["bf16"] or values["fp16_opt_level"] == "O0":
        yield f"{named('fp8')} is for the products of bfloat16 training; give --{named('bf16')} with it"
    if dims.is_model_parallel:
        yield (
            f"{named('fp8')} goes without tensor and pipeline parallelism ({dims}): layers that are split multiply in "
            "bfloat16"
        )
    if "stage3" in values["sharding"]:
        yield f"{named('fp8')} goes without sharding stage3, which takes the weights apart; use stage1 or stage2"
    if values.get("lora"):
        yield f"{named('fp8')} goes without lora: adapters are small, and their products too"
    if values["hidden_size"] and values["hidden_size"] % 16:
        yield f"{named('hidden_size')} {values['hidden_size']}: fp8 needs a multiple of 16"


def _best_model(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    if values["evaluation_strategy"] == "no" or values["evaluation_strategy"] != values["save_strategy"]:
        yield (
            f"{named('load_best_model_at_end')} needs evaluation and saving at the same times; "
            f"{named('evaluation_strategy')} is {values['evaluation_strategy']}, {named('save_strategy')} is "
            f"{values['save_strategy']}"
        )
    elif values["evaluation_strategy"] == "steps":
        yield from steps_apart(values)


def steps_apart(values: Mapping[str, Any]) -> Iterator[str]:
    """Raised or reported where checkpoints do not come with evaluations, which load_best_model_at_end needs."""
    save, evaluate = values["save_steps"], values["eval_steps"] or 1
    mixed = (save < 1) != (evaluate < 1)  # max_steps is not known yet; shares of it are compared as in transformers
    if mixed or round(save * SHARE_UNIT) % round(evaluate * SHARE_UNIT):
        yield (
            f"{named('load_best_model_at_end')} needs {named('save_steps')} ({save:g}) to be a multiple of "
            f"{named('eval_steps')} ({evaluate:g})"
        )


def _folder(parsed: Parsed, name: str, what: str, printing: bool) -> Iterator[str]:
    if not parsed.values[name]:
        line = f"--{named(name)} is missing: {what}"
        if printing:
            parsed.note(line)
        else:
            yield line


def _weights(parsed: Parsed, source: ModelSource) -> Iterator[str]:
    values = parsed.values
    if values["continue_training"] and source.weights is None:
        yield (
            f"--{named('continue_training')} needs weights, {values['model_name_or_path']} "
            f"{'is a size only, none were ever published' if source.kind == 'preset' else 'has none'}; "
            f"give a folder with model.safetensors, or start from random weights with --{named('continue_training')} 0"
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
    if parsed.given("auto_parallel_memory") and not values["auto_parallel"]:
        note(f"{named('auto_parallel_memory')} has no effect without --auto_parallel")
    if values["initializer_range"] is not None and values["continue_training"]:
        note(f"{named('initializer_range')} has no effect: the weights are loaded")
    if values["no_recompute_layers"] and not values["recompute"]:
        note("--no_recompute_layers has no effect: recompute is off")
    if parsed.given("recompute_granularity") and not values["recompute"]:
        note(f"{named('recompute_granularity')} has no effect: recompute is off")
    if values["fp16_opt_level"] == "O0" and (values["fp16"] or values["bf16"]):
        note("--fp16_opt_level O0 switches mixed precision off: the run is float32")
    if values["amp_master_grad"] and values["fp16_opt_level"] != "O2":
        note("--amp_master_grad has no effect: gradients are float32 unless the level is O2")
    if values["min_learning_rate"] > values["learning_rate"]:
        note(
            f"WARNING: {named('min_learning_rate')} {values['min_learning_rate']:g} is above {named('learning_rate')} "
            f"{values['learning_rate']:g}: after the warm-up the rate goes up to it; were they swapped?"
        )
    if values["max_steps"] > 0 and values["warmup_steps"] > values["max_steps"]:
        note(f"warmup_steps {values['warmup_steps']:g} is above max_steps {values['max_steps']}: warm-up never ends")
    if "none" in values["report_to"] and len(values["report_to"]) > 1:
        note(f"--report_to {' '.join(values['report_to'])}: none wins")
    if values["load_best_model_at_end"] and not values["do_train"]:
        note("--load_best_model_at_end has no effect: do_train is off")
    wanted = [parsed.typed_as(name) for name in FOR_TRAINING if name in parsed.typed]
    if wanted and not values["do_train"] and parsed.sources["do_train"] == "default":
        only = "--do_eval" if values["do_eval"] else "--do_predict"
        note(f"nothing is trained, although {', '.join(wanted)} is given: {only} without --do_train only evaluates")
    if "autonlp" in values["report_to"]:
        note("--report_to autonlp has no effect: the service is gone")


def check_readable(flag: str, path: str | None) -> None:
    """Raises GptlmError if the file that `flag` names cannot be opened; None is no file."""
    try:
        if path:
            open(path, "rb").close()
    except OSError as error:
        raise GptlmError(f"cannot read --{flag} {path}: {error.strerror}") from error
