"""Fine-tuning: which model is evaluated, the adapters, lengths and metrics that follow, and what can be wrong."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gptlm.config.adapters import LORA_ONLY, adapter_problems
from gptlm.config.args.sft import LoraArguments, SftArguments
from gptlm.config.args.training import ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.derive import more_is_better
from gptlm.config.model_size import ModelSource, find_model
from gptlm.config.origin import derived
from gptlm.config.parser import Parsed, shown
from gptlm.config.problem import Problem
from gptlm.errors import GptlmError, UsageError, named
from gptlm.json_text import parse_json
from gptlm.model.adapter_files import is_adapter, read_adapter_config
from gptlm.model.files import has_weights
from gptlm.parallel.dims import ParallelDims

RUN_FILE = "run.json"
MANIFEST = "manifest.json"  # only whole checkpoints have one
TRAINED = derived("the model in output_dir")
LESS_IS_BETTER = ("loss", "ppl")
MORE_IS_BETTER = ("accuracy", "bleu4", "rouge1", "rouge2", "rougel")
GENERATED = ("bleu4", "rouge1", "rouge2", "rougel")


def take_trained(parsed: Parsed) -> None:
    """Without training, evaluate the model (or adapters) in output_dir, unless the command names another model.

    The command of a run without --do_train names the model that the run started from. It evaluates the result, and of
    an unfinished run the newest checkpoint.

    Raises:
        GptlmError: if the adapters in output_dir are damaged.
    """
    training, lora, model = parsed[TrainingArguments], parsed[LoraArguments], parsed[ModelArguments]
    if training.do_train or not training.do_eval or not training.output_dir or lora.lora_path:
        return
    folder = Path(training.output_dir)
    trained = _trained_in(folder)
    if trained is None:
        return
    adapters = is_adapter(trained)
    start = read_adapter_config(trained).get("base_model_name_or_path") if adapters else None
    is_named = not parsed.is_default("model_name_or_path")
    if is_named and not _is_start(model.model_name_or_path or "", folder, trained, start):
        parsed.note(
            f"{model.model_name_or_path} is evaluated, not the model trained in {folder}; leave "
            f"{named('model_name_or_path')} out to evaluate that one"
        )
        return
    what = "its model with the adapters" if adapters else "the model"
    unfinished = "" if trained == folder else f"; the run has not ended, its newest checkpoint is {trained.name}"
    parsed.note(f"{what} trained in {folder} is evaluated, as nothing is trained ({named('do_train')}){unfinished}")
    if not adapters:
        parsed.put(replace(model, model_name_or_path=str(trained)), TRAINED)
        if lora.lora:
            parsed.put(replace(lora, lora=False), TRAINED)
            parsed.note(f"{named('lora')} has no effect: {trained} holds a whole model, no adapters")
        return
    parsed.put(replace(lora, lora_path=str(trained)), TRAINED)
    if not is_named:
        if not start:
            raise GptlmError(f"the adapters in {trained} do not name their model: give {named('model_name_or_path')}")
        parsed.put(replace(model, model_name_or_path=start), derived("the model of the adapters in output_dir"))


def _trained_in(folder: Path) -> Path | None:
    """`folder` if it holds a finished model or adapters, else the newest whole checkpoint in it."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    whole = [path for path, number in numbers.items() if number.isdigit() and (path / MANIFEST).is_file()]
    newest = sorted(whole, key=lambda path: -int(numbers[path]))
    return next((path for path in (folder, *newest) if is_adapter(path) or has_weights(path)), None)


def _is_start(name: str, folder: Path, trained: Path, base: str | None) -> bool:
    """Whether `name` is the model that the run in `folder` started from, or what it has trained."""
    try:
        noted = parse_json((trained / RUN_FILE).read_text(encoding="utf-8")).get("model_name_or_path")
    except (OSError, ValueError, AttributeError):
        noted = None
    same = [name == other or Path(name).resolve() == Path(other).resolve() for other in (noted, base) if other]
    return any(same) or Path(name).resolve() in (folder.resolve(), trained.resolve())


def find_start(parsed: Parsed) -> ModelSource:
    """The model to fine-tune. Raises UsageError as `find_model`, and if sizes alone are given."""
    source = find_model(parsed)
    if source.shape is None:
        raise UsageError(f"fine-tuning needs a model with weights: give {named('model_name_or_path')}")
    return source


def derive_lengths(parsed: Parsed, positions: int) -> None:
    """The longest sample; `max_length` is an upper limit, so the position table may be shorter."""
    data = parsed[SftArguments]
    if data.max_length is not None and data.max_length > positions:
        parsed.note(
            f"{named('max_length')} {data.max_length}: the position table has {positions} rows, samples are cut to "
            f"{positions} tokens"
        )
        source = derived(f"the position table, below max_length {data.max_length}")
        parsed.put(replace(data, max_length=positions), source)
    elif data.max_length is None:
        length = min(data.src_length + data.tgt_length, positions)
        source = derived("src_length + tgt_length, at most the position table", recomputed=True)
        parsed.put(replace(data, max_length=length), source)


def derive_fine_tuning(parsed: Parsed) -> None:
    """Scale of the adapters, lowest learning rate and direction of the metric; flags without effect are logged."""
    model, data, training = parsed[ModelArguments], parsed[SftArguments], parsed[TrainingArguments]
    lora = parsed[LoraArguments]
    if parsed.is_default("continue_training"):
        parsed.put(replace(model, continue_training=True), derived("fine-tuning"))
    for name in LORA_ONLY if not lora.lora else ():
        if not parsed.is_default(name):
            parsed.note(f"{named(name)} has no effect: there are no adapters without {named('lora')}")
    if data.eval_dataset_name_or_path and not training.do_eval:
        parsed.note(
            f"{named('eval_dataset_name_or_path')} {data.eval_dataset_name_or_path} has no effect: do_eval is off"
        )
    for name in ("pad_to_multiple_of", "group_by_length") if data.zero_padding else ():
        if not parsed.is_default(name):
            parsed.note(f"{named(name)} has no effect: samples of {named('zero_padding')} have the same length")
    if lora.lora_alpha is None and lora.lora_rank > 0:
        rule = derived("2 x lora_rank", recomputed=True)
        parsed.put(replace(lora, lora_alpha=2.0 * lora.lora_rank), rule)
    if parsed.is_default("min_learning_rate") and training.learning_rate >= 0:
        rate = data.lr_decay_ratio * training.learning_rate
        parsed.set("min_learning_rate", rate, derived("lr_decay_ratio x learning_rate", recomputed=True))
    metric = (training.metric_for_best_model or "").removeprefix("eval_")
    if metric and training.greater_is_better is None:
        training = parsed[TrainingArguments]
        more = metric in MORE_IS_BETTER or (metric not in LESS_IS_BETTER and more_is_better(metric))
        parsed.put(replace(training, greater_is_better=more), derived(metric))


def fine_tuning_problems(parsed: Parsed, source: ModelSource | None, own_metrics: bool = False) -> Iterator[Problem]:
    """What can be wrong with fine-tuning alone.

    Args:
        own_metrics: the caller measures metrics of other names, too.
    """
    model, data = parsed[ModelArguments], parsed[SftArguments]
    training = parsed[TrainingArguments]
    if training.do_predict and not (training.do_train or training.do_eval):
        yield Problem("do_predict", f"alone: fine-tuning data has no test split; use {named('do_eval')}")
    elif training.do_predict:
        parsed.note(f"{named('do_predict')} has no effect: fine-tuning data has no test split")
    if not model.continue_training:
        yield Problem(
            "continue_training",
            "is off: fine-tuning starts from a model's weights; pretraining starts from random ones",
        )
    for token in data.additional_special_tokens:
        if not token.strip() or token.startswith('["'):
            yield Problem("additional_special_tokens", f"{token!r} is not a token; separate tokens with blanks")
    yield from adapter_problems(parsed, source.shape if source else None)
    if parsed[ParallelArguments].auto_parallel:
        yield Problem(
            "auto_parallel",
            f"chooses layouts of pretraining; leave it out and give {named('tensor_parallel_degree')} or "
            f"{named('sharding')}",
        )
    yield from _sequence_problems(parsed, data)
    yield from _data_problems(data)
    yield from _paddle_compat_problems(parsed, data)
    yield from _metric_problems(training, data, own_metrics)


def fine_tuning_refusals(parsed: Parsed, dims: ParallelDims) -> Iterator[Problem]:
    """Fine-tuning runs that are sensible but not implemented."""
    tensor, pipeline = named("tensor_parallel_degree"), named("pipeline_parallel_degree")
    if dims.pipeline > 1:
        split = dims.tensor * dims.pipeline
        yield Problem(
            "pipeline_parallel_degree",
            f"{dims.pipeline}: stages exchange batches of one length, those of fine-tuning differ; use {tensor} "
            f"{split} with {pipeline} 1, or {named('sharding')} stage3",
        )


def _sequence_problems(parsed: Parsed, data: SftArguments) -> Iterator[Problem]:
    """Whether sequences can be split among the processes of a tensor-parallel group."""
    parallel = parsed[ParallelArguments]
    degree = max(parallel.tensor_parallel_degree, 1)
    if not parallel.sequence_parallel or degree == 1:
        return
    if data.max_length and data.max_length % degree:
        yield Problem(
            "max_length",
            f"{data.max_length} is not a multiple of {named('tensor_parallel_degree')} ({degree}), which "
            f"{named('sequence_parallel')} needs; give {named('max_length')} {data.max_length // degree * degree}",
        )
    if data.paddle_compat:
        yield Problem(
            "sequence_parallel",
            f"pads sequences to a multiple of {degree}; with {named('paddle_compat')} padding is attended to, so more "
            "of it changes the results; leave one of them out",
        )


def _data_problems(data: SftArguments) -> Iterator[Problem]:
    if (data.prompt_column is None) != (data.response_column is None):
        given, other = ("prompt_column", "response_column")[:: -1 if data.prompt_column is None else 1]
        text = f"is given without {named(other)}; for texts without prompts give {named('text_column')} instead"
        yield Problem(given, text)
    elif data.text_column is not None and data.prompt_column is not None:
        yield Problem("text_column", f"names plain texts, {named('prompt_column')} prompts; give one of them")
    if data.text_column is not None and data.paddle_compat:
        yield Problem("text_column", f"does not work with {named('paddle_compat')}, which encodes prompts")
    if data.val_size and data.eval_dataset_name_or_path:
        text = f"takes examples for evaluation from the training data; leave {named('eval_dataset_name_or_path')} out"
        yield Problem("val_size", text)


def _paddle_compat_problems(parsed: Parsed, data: SftArguments) -> Iterator[Problem]:
    if not data.paddle_compat:
        return
    if data.zero_padding:
        yield Problem(
            "paddle_compat",
            f"pads every example on the left, {named('zero_padding')} packs without padding; use one",
        )
    if data.pad_to_multiple_of not in (None, 1):
        yield Problem(
            "pad_to_multiple_of",
            f"{data.pad_to_multiple_of}: with {named('paddle_compat')} padding is attended to, so more of it changes "
            "the results; leave it out",
        )
    if data.truncation_side == "left" and not parsed.is_default("truncation_side"):
        yield Problem(
            "truncation_side",
            f"left: {named('paddle_compat')} cuts the end of prompts, as the original does; leave it out",
        )
    if data.allow_special_tokens:
        parsed.note(
            f"{named('allow_special_tokens')} has no effect: {named('paddle_compat')} always does, as the original"
        )


def _metric_problems(training: TrainingArguments, data: SftArguments, own_metrics: bool) -> Iterator[Problem]:
    metric = (training.metric_for_best_model or "").removeprefix("eval_")
    known = (*LESS_IS_BETTER, *MORE_IS_BETTER)
    if metric and metric not in known and not own_metrics:
        yield Problem("metric_for_best_model", f"{metric!r}: expected {', '.join(known)}")
    if metric in GENERATED and (not data.eval_with_do_generation or data.generate_num == 0):
        yield Problem(
            "metric_for_best_model",
            f"{metric} compares generated texts; use {named('eval_with_do_generation')} 1",
        )
    if metric in known and training.greater_is_better != (metric in MORE_IS_BETTER):
        better = "more" if metric in MORE_IS_BETTER else "less"
        yield Problem("greater_is_better", f"{shown(training.greater_is_better)}: of {metric} {better} is better")
