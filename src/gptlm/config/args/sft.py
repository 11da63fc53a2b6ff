"""One fine-tuning run, resolved: the flags of PaddleNLP's `finetune_generation.py` and of its argument files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlm.compat import paddlenlp as spellings
from gptlm.compat import transformers as spellings_transformers
from gptlm.compat.auto_convert import take_foreign_adapters, take_foreign_model, take_foreign_start
from gptlm.config.args.training import ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.derive import resolve_strategies, resolve_world
from gptlm.config.field import arg
from gptlm.config.model_size import ModelSource, find_model
from gptlm.config.parser import Parsed, Vocabulary, build, parse, shown
from gptlm.config.run import Run, resolve, tried
from gptlm.config.tokenizer_class import drop_class
from gptlm.config.trained import take_trained
from gptlm.errors import UsageError, named
from gptlm.model.adapter_files import check_fit, settings_of
from gptlm.model.files import ADAPTER_CONFIG
from gptlm.model.presets import Shape

LESS_IS_BETTER = ("loss", "ppl")
MORE_IS_BETTER = ("accuracy", "bleu4", "rouge1", "rouge2", "rougel")
GENERATED = ("bleu4", "rouge1", "rouge2", "rougel")
METRIC_LEVELS = ("word", "char")


@dataclass(frozen=True, kw_only=True)
class SftArguments:
    """The examples and how they become samples."""

    dataset_name_or_path: str | None = arg(
        None, "a file (.json, .jsonl, .parquet), a folder with train and dev files, or a dataset; unset: task_name"
    )
    eval_dataset_name_or_path: str | None = arg(None, "examples for evaluation; unset: dev, else a share of train")
    task_name: str = arg("squad", "a dataset of the HuggingFace hub, when dataset_name_or_path is not given")
    src_length: int = arg(1024, "most tokens of a prompt; headings and a chat template's own text are never cut", ge=1)
    tgt_length: int = arg(
        142, "most tokens of an answer with its end-of-text token, in training and in evaluation", ge=2
    )
    max_length: int | None = arg(
        None,
        "most tokens of a sample; unset: src_length + tgt_length or the position table; cuts the prompt first",
        ge=2,
    )
    zero_padding: bool = arg(False, "pack short examples into samples of max_length; none attends to another")
    train_on_prompt: bool = arg(False, "prompts are targets, too, not only answers")
    paddle_compat: bool = arg(False, "PaddleNLP's encoding: </s> is text, padding on the left is attended to")
    truncation_side: str = arg(
        "left", "of a prompt that is too long: left cuts its beginning, right its end", choices=("left", "right")
    )
    allow_special_tokens: bool = arg(False, "let <|endoftext|> written in a text become its id")
    additional_special_tokens: list[str] = arg(
        [], "tokens to add to the vocabulary; a text that spells one gets it, where no chat template writes it"
    )
    lr_decay_ratio: float = arg(0.1, "last learning rate of the linear schedule as a share of the highest", ge=0, le=1)
    eval_with_do_generation: bool = arg(True, "evaluations also continue prompts and compare the texts")
    generate_num: int = arg(100, "evaluation prompts that are continued; 0: none, -1: all", ge=-1)
    metric_level: str = arg("word", "what BLEU and ROUGE count", choices=METRIC_LEVELS)


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """Low-rank adapters."""

    lora: bool = arg(False, "train adapters only; the model's own weights stay")
    lora_rank: int = arg(8, "rank of the adapters", ge=1)
    lora_alpha: float | None = arg(None, "adapters are scaled by lora_alpha / lora_rank; unset: 2 x lora_rank", gt=0)
    lora_dropout: float = arg(0.0, "dropout before the adapters", ge=0, lt=1)
    lora_target_modules: list[str] = arg(
        ["c_attn", "c_proj", "c_fc"], "matrices that get an adapter: c_attn, c_proj, c_fc", words=True
    )
    lora_path: str | None = arg(None, "a folder with adapters to start from")
    merge_weights: bool = arg(False, "also write output_dir/merged: the model with the adapters added to its weights")


REPLICAS = "fine-tuning runs on replicas; --sharding stage3 is for models that do not fit on one card"
FIXED = {  # flags of training that fine-tuning leaves no choice in
    "continue_training": "always on, fine-tuning starts from a model's weights",
    "do_predict": "no effect, fine-tuning data has no test split",
    "initializer_range": "no effect, the weights are loaded",
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"), "the model's"),
    "max_position_embeddings": "the model's",
    "auto_parallel": REPLICAS,
    "auto_parallel_memory": REPLICAS,
    **dict.fromkeys(("tensor_parallel_degree", "pipeline_parallel_degree"), f"1, {REPLICAS}"),
    **dict.fromkeys(("virtual_pp_degree", "sequence_parallel"), REPLICAS),
    **dict.fromkeys(("tensor_parallel_config", "pipeline_parallel_config"), REPLICAS),
}

SFT = Vocabulary(
    groups=(ModelArguments, SftArguments, LoraArguments, ParallelArguments, TrainingArguments),
    renamed=spellings.PRETRAIN_RENAMED | spellings_transformers.SFT_RENAMED | spellings.SFT_RENAMED,
    ignored=spellings.PRETRAIN_IGNORED | spellings_transformers.SFT_IGNORED | spellings.SFT_IGNORED,
    refused=spellings.PRETRAIN_REFUSED | spellings_transformers.SFT_REFUSED | spellings.SFT_REFUSED,
    settings=spellings_transformers.SFT_SETTINGS,
    defaults={"min_learning_rate": "lr_decay_ratio x learning_rate"},
    fixed=FIXED,
)


@dataclass(frozen=True, kw_only=True)
class MergeArguments:
    """Adapters into a model."""

    model_name_or_path: str | None = arg(None, "the model; unset: the one that lora_path names")
    lora_path: str | None = arg(None, "folder with adapters")
    output_path: str | None = arg(None, "folder for the merged model")
    dtype: str = arg("float32", "of the merged weights", choices=("float32", "bfloat16", "float16"))


MERGE = Vocabulary(
    (MergeArguments,),
    spellings.MERGE_RENAMED | spellings_transformers.MODEL_RENAMED,
    spellings.MERGE_IGNORED | spellings_transformers.MODEL_IGNORED,
    spellings_transformers.MODEL_REFUSED,
)


def parse_merge(argv: Sequence[str]) -> MergeArguments:
    """Raises UsageError listing everything that is wrong."""
    return build(MergeArguments, resolve_merge(argv).values)


def resolve_merge(argv: Sequence[str]) -> Parsed:
    """The command with everything filled in. Raises UsageError listing everything that is wrong."""
    parsed = parse(MERGE, argv)
    missing = [f"--{named(name)} is missing" for name in ("lora_path", "output_path") if not parsed.values[name]]
    if missing:
        raise UsageError("\n".join(missing))
    take_foreign_model(parsed)
    take_foreign_adapters(parsed)
    return parsed


PLAIN = {  # keys of PEFT's configuration -> what they are where adapters are as those trained here
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "modules_to_save": (None,),
}
LORA_ONLY = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "merge_weights")


@dataclass(frozen=True, kw_only=True)
class SftRun(Run):
    """A run on prompts and answers."""

    data: SftArguments
    lora: LoraArguments

    @property
    def groups(self) -> tuple[Any, ...]:
        return (self.model, self.data, self.lora, self.parallel, self.training)

    @property
    def evaluated(self) -> str | None:
        base, adapters = super().evaluated, self.lora.lora_path
        if base is None or not adapters:
            return base
        own = Path(adapters).resolve() == Path(self.training.output_dir or "").resolve()
        return None if own else f"{base} with the adapters {Path(adapters).resolve()}"

    @property
    def trains_all(self) -> bool:
        return not self.lora.lora


def parse_sft(argv: Sequence[str], environment: Mapping[str, str], *, printing: bool = False) -> SftRun:
    """The run that `argv` and the launcher's `environment` describe.

    Args:
        printing: the run is for --print_config.

    Raises:
        UsageError: listing everything that is wrong.
        GptlmError: if the files of the model or of lora_path cannot be read.
    """
    parsed = parse(SFT, argv)
    take_foreign_start(parsed)
    take_foreign_model(parsed)
    take_foreign_adapters(parsed)
    drop_class(parsed, "tokenizer_name_or_path")
    take_trained(parsed)
    problems: list[str] = []
    tried(lambda: resolve_world(parsed, environment, printing), problems)
    resolve_strategies(parsed)
    source = tried(lambda: _find_model(parsed), problems)
    if source is not None and source.shape is not None:
        _resolve_lengths(parsed, source.shape.max_position_embeddings)
        problems += _resolve_adapters(parsed, source.shape, printing)
    _resolve_training(parsed)
    fields = resolve(parsed, SFT, source, printing, problems, lambda: _problems(parsed, source))
    return SftRun(data=build(SftArguments, parsed.values), lora=build(LoraArguments, parsed.values), **fields)


def _find_model(parsed: Parsed) -> ModelSource:
    source = find_model(parsed)
    if source.shape is None:
        raise UsageError(f"fine-tuning needs a model with weights: give --{named('model_name_or_path')}")
    return source


def _resolve_lengths(parsed: Parsed, positions: int) -> None:
    """The longest sample; `max_length` is an upper limit, so the position table may be shorter."""
    values = parsed.values
    if values["max_length"] is not None and values["max_length"] > positions:
        parsed.note(
            f"{named('max_length')} {values['max_length']}: the position table has {positions} rows, samples are cut "
            f"to {positions} tokens"
        )
        parsed.set("max_length", positions, f"derived: the position table, below max_length {values['max_length']}")
    if values["max_length"] is None:
        length = min(values["src_length"] + values["tgt_length"], positions)
        parsed.set("max_length", length, "derived: src_length + tgt_length, at most the position table")


def _resolve_adapters(parsed: Parsed, shape: Shape, printing: bool) -> list[str]:
    """Rank, scale and places of the adapters in lora_path; returns what the command says otherwise."""
    values = parsed.values
    folder = Path(values["lora_path"] or "")
    if not values["lora_path"]:
        return []
    if not values["lora"]:
        parsed.set("lora", True, "derived: lora_path")
        parsed.note(f"{parsed.typed_as('lora_path')} {folder}: its adapters are trained, --lora is on")
    if printing and not folder.is_dir():
        parsed.note(f"lora_path {folder} is not there: rank and scale of its adapters are not known")
        return []
    settings = settings_of(folder)
    check_fit(folder, shape)
    odd = [key for key, plain in PLAIN.items() if settings.get(key) not in plain]
    if odd or not isinstance(settings.get("target_modules"), list):
        key = (odd or ["target_modules"])[0]
        return [
            f"{named('lora_path')} {folder}: its adapters have {key} = {settings.get(key)!r}, which fine-tuning here "
            "does not go on from; merge them with scripts/merge_lora.py and start from the merged model"
        ]
    stored: dict[str, Any] = {
        "lora_rank": settings["r"],
        "lora_alpha": float(settings["lora_alpha"]),
        "lora_target_modules": sorted(settings["target_modules"]),
    }
    problems = []
    for flag, value in stored.items():
        listed = isinstance(value, list)
        if parsed.sources[flag] == "default":
            parsed.set(flag, value, f"{folder / ADAPTER_CONFIG}")
        elif (sorted(values[flag]) if listed else values[flag]) != value:
            told = " ".join(value) if listed else f"{value:g}"
            problems.append(f"{named(flag)}: the adapters in {folder} have {told}; leave the flag out")
    return problems


def _resolve_training(parsed: Parsed) -> None:
    values = parsed.values
    if parsed.sources["continue_training"] == "default":
        parsed.set("continue_training", True, "derived: fine-tuning")
    idle = [name for name in LORA_ONLY if parsed.sources[name] != "default"] if not values["lora"] else []
    for name in idle:
        parsed.note(f"{parsed.typed_as(name)} has no effect: there are no adapters without --lora")
    flag = "eval_dataset_name_or_path"
    if values[flag] and not values["do_eval"]:
        parsed.note(f"{parsed.typed_as(flag)} {values[flag]} has no effect: do_eval is off")
    if values["lora_alpha"] is None and values["lora_rank"] > 0:
        parsed.set("lora_alpha", 2.0 * values["lora_rank"], "derived: 2 x lora_rank")
    if parsed.sources["min_learning_rate"] == "default" and values["learning_rate"] >= 0:
        rate = values["lr_decay_ratio"] * values["learning_rate"]
        parsed.set("min_learning_rate", rate, "derived: lr_decay_ratio x learning_rate")
    metric = (values["metric_for_best_model"] or "").removeprefix("eval_")
    if metric and values["greater_is_better"] is None:
        parsed.set("greater_is_better", metric in MORE_IS_BETTER, f"derived: {metric}")


def _problems(parsed: Parsed, source: ModelSource | None) -> Iterator[str]:
    values = parsed.values
    if values["do_predict"] and not (values["do_train"] or values["do_eval"]):
        yield f"{named('do_predict')}: fine-tuning data has no test split; use --{named('do_eval')}"
    elif values["do_predict"]:
        parsed.note("--do_predict has no effect: fine-tuning data has no test split")
    if not values["continue_training"]:
        yield (
            f"{named('continue_training')} is off: fine-tuning starts from a model's weights; pretraining starts from "
            "random ones"
        )
    for token in values["additional_special_tokens"]:
        if not token.strip() or token.startswith('["'):
            yield f"{named('additional_special_tokens')} {token!r} is no token; give each as a word of its own"
    if values["merge_weights"] and values["lora"] and not values["do_train"]:
        output = values["output_dir"] or "OUTPUT_DIR"
        yield (
            f"{named('merge_weights')} merges the adapters that a run trains, this one trains none: add --do_train, or "
            f"merge those in {output} with scripts/merge_lora.py --lora_path {output} --output_path {output}/merged"
        )
    width = source.shape.hidden_size if source and source.shape else 0
    if width and values["lora"] and values["lora_rank"] > width:
        yield (
            f"{named('lora_rank')} {values['lora_rank']}: the matrices have rank {width}, more is of no use; give less"
        )
    unknown = [name for name in values["lora_target_modules"] if name not in ("c_attn", "c_proj", "c_fc")]
    if unknown or not values["lora_target_modules"]:
        yield (
            f"{named('lora_target_modules')} {' '.join(values['lora_target_modules'])}: expected some of c_attn, "
            "c_proj, c_fc"
        )
    if values["auto_parallel"]:
        yield f"{named('auto_parallel')} chooses layouts of pretraining; fine-tuning runs on replicas, leave it out"
    if values["paddle_compat"] and values["zero_padding"]:
        yield (
            f"{named('paddle_compat')} pads every example on the left, {named('zero_padding')} packs without padding; "
            "use one"
        )
    cuts_left = parsed.sources["truncation_side"] != "default" and values["truncation_side"] == "left"
    if values["paddle_compat"] and cuts_left:
        yield (
            f"{named('truncation_side')} left: {named('paddle_compat')} cuts the end of prompts, as the original does; "
            "leave it out"
        )
    if values["paddle_compat"] and values["allow_special_tokens"]:
        parsed.note("--allow_special_tokens has no effect: --paddle_compat always does, as the original")
    yield from _metric_problems(parsed)


def _metric_problems(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    metric = (values["metric_for_best_model"] or "").removeprefix("eval_")
    known = (*LESS_IS_BETTER, *MORE_IS_BETTER)
    if metric and metric not in known:
        yield f"{named('metric_for_best_model')} {metric!r}: expected {', '.join(known)}"
    if metric in GENERATED and (not values["eval_with_do_generation"] or values["generate_num"] == 0):
        yield (
            f"{named('metric_for_best_model')} {metric} compares generated texts; use "
            f"--{named('eval_with_do_generation')} 1"
        )
    if metric and values["greater_is_better"] != (metric in MORE_IS_BETTER) and metric in known:
        given = shown(values["greater_is_better"])
        yield f"{named('greater_is_better')} {given}: of {metric} {_better(metric)} is better"


def _better(metric: str) -> str:
    return "more" if metric in MORE_IS_BETTER else "less"
