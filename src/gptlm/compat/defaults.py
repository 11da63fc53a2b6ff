"""Whose command it is: the defaults of its original, and the flags that follow from its words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlm.compat import megatron as megatron
from gptlm.config.field import arg
from gptlm.config.parser import Parsed
from gptlm.data.order import parse_split
from gptlm.errors import GptlmError, UsageError, named
from gptlm.model.presets import GPT2_VOCABULARY

DIALECTS = ("paddlenlp", "fleetx-2022", "fleetx", "megatron", "oneflow")


@dataclass(frozen=True, kw_only=True)
class DialectArguments:
    """Whose command it is, and words that other flags follow from."""

    dialect: str | None = arg(
        None, "whose defaults, schedule and log line hold; unset: those of the words", choices=DIALECTS
    )
    make_vocab_size_divisible_by: int | None = arg(
        None, "vocab_size is rounded up to a multiple of this times tensor_parallel_degree; 0: as it is", ge=0
    )
    vocab_file: str | None = arg(None, "vocab.json, for the size of the vocabulary")
    zero_stage: int | None = arg(None, "0 to 3: sharding stage1 to stage3, 0 for none", ge=0, le=3)
    reset_position_ids: bool = arg(False, "document_masking position")
    reset_attention_mask: bool = arg(False, "document_masking attention")
    load: str | None = arg(None, "folder whose newest checkpoint the run goes on from; none there: it starts anew")
    num_gpus_per_node: int | None = arg(None, "processes on each node; started here if no launcher did")
    num_nodes: int = arg(1, "nodes, each of which gets the same command")
    node_ips: str | None = arg(None, "addresses of the nodes, the first is the master's", words=True)
    metric_print_format: str = arg("table", "form of OneFlow's log line", choices=("normal", "table"))


_LINES_ONLY = {"disable_tqdm": True, "report_to": ["none"]}
_MEGATRON_FAMILY = {
    **_LINES_ONLY,
    "do_train": True,
    "split": "969,30,1",
    "data_order": "megatron",
    "lr_start_step": 0,
    "min_learning_rate": 0.0,
    "weight_decay": 0.01,
    "scale_loss": 2.0**32,
    "loss_scale_window": 1000,
    "logging_steps": 100,
    "make_vocab_size_divisible_by": 128,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "paddlenlp": {},
    "fleetx-2022": {**_LINES_ONLY, "do_train": True, "seed": 1024, "logging_steps": 1, "log_format": "fleetx-2022"},
    "fleetx": {**_LINES_ONLY, "do_train": True, "seed": 1024, "logging_steps": 1, "log_format": "fleetx"},
    "megatron": {
        **_MEGATRON_FAMILY,
        "do_eval": True,
        "seed": 1234,
        "hysteresis": 2,
        "eval_steps": 1000,
        "eval_iters": 100,
        "dataloader_num_workers": 2,
        "fp16_opt_level": "O2",
        "log_format": "megatron",
    },
    "oneflow": {**_MEGATRON_FAMILY, "seed": 12345, "learning_rate": 1e-3, "log_format": "oneflow"},
}


def resolve_dialect(parsed: Parsed) -> str:
    """Fill in the defaults of the command's dialect and what follows from its words; returns its name."""
    name = parsed.values["dialect"] or _spoken(parsed)
    parsed.set("dialect", name, parsed.sources["dialect"])
    for flag, value in DEFAULTS[name].items():
        if not parsed.given(flag):
            parsed.set(flag, value, f"default of {name}")
    if parsed.values["eval_iters"] == 0:
        _settle_no_evaluation(parsed)
    if name in ("megatron", "oneflow"):
        _settle_megatron(parsed, name)
    _settle_words(parsed)
    _settle_vocabulary(parsed, name)
    return name


def _spoken(parsed: Parsed) -> str:
    """The dialect by its words; a command in several has the defaults of the first of these that it speaks."""
    spoken = parsed.spoken
    theirs = spoken & {*megatron.ONEFLOW, *megatron.MEGATRON}
    name = "oneflow" if spoken & {*megatron.ONEFLOW} else "megatron" if theirs else "paddlenlp"
    ours = sorted(spoken & {"per_device_train_batch_size", "max_steps", "output_dir", "max_seq_length"})
    if theirs and ours:
        shown = ", ".join("--" + word for word in (*sorted(theirs)[:2], *ours[:2]))
        parsed.note(
            f"words of several dialects are mixed ({shown}): defaults, schedule and log line are {name}'s (--dialect "
            "says otherwise), and where two words are one setting the last one counts"
        )
    return name


def _settle_megatron(parsed: Parsed, name: str) -> None:
    values, sources = parsed.values, parsed.sources
    if not parsed.given("save_steps") and not parsed.given("save_strategy"):
        parsed.set("save_strategy", "no", f"default of {name}: no --save-interval, the end only")
    if values["lr_scheduler_type"] == "cosine" and name == "oneflow":
        parsed.set("lr_scheduler_type", "oneflow_cosine", sources["lr_scheduler_type"])
    if values["lr_scheduler_type"] == "constant":
        parsed.set("lr_scheduler_type", "constant_with_warmup", sources["lr_scheduler_type"])
    asked = parsed.given("do_eval") or values["evaluation_strategy"] not in (None, "no")
    if values["do_eval"] and not asked and not valid_share(values["split"]):
        parsed.note(f"--{named('split')} {values['split']} leaves nothing to evaluate on: evaluations are skipped")
        parsed.set("do_eval", False, "derived: split")
    if values["test_iters"] is None and name == "megatron" and values["do_eval"]:
        parsed.set("test_iters", values["eval_iters"], "default of megatron: eval_iters")
    if values["logging_dir"] and not parsed.given("report_to"):
        parsed.set("report_to", ["tensorboard"], "derived: a folder for its events")
    if name == "oneflow":
        if values["metric_print_format"] == "normal" and values["log_format"] == "oneflow":
            parsed.set("log_format", "oneflow-normal", sources["metric_print_format"])


def _settle_no_evaluation(parsed: Parsed) -> None:
    """No batch is no evaluation, in Megatron's words and in all others."""
    parsed.set("eval_iters", 10, "default")
    if not parsed.values["do_eval"] and parsed.values["evaluation_strategy"] in (None, "no"):
        return
    if parsed.given("do_eval") or parsed.given("evaluation_strategy"):
        parsed.note(f"--{named('eval_iters')} 0: there is no evaluation")
    parsed.set("do_eval", False, parsed.sources["eval_iters"])
    parsed.set("evaluation_strategy", None, parsed.sources["eval_iters"])
    if not parsed.given("eval_steps"):
        parsed.set("eval_steps", None, "default")


def valid_share(split: str) -> bool:
    """Whether the validation split has a share; of a malformed split other messages speak."""
    try:
        return parse_split(split)[1] > 0
    except GptlmError:
        return True


def _settle_words(parsed: Parsed) -> None:
    values, sources = parsed.values, parsed.sources
    stage = values["zero_stage"]
    if stage in (1, 2, 3) and not values["sharding"] and not values["deepspeed"]:
        parsed.set("sharding", f"stage{stage}", sources["zero_stage"])
    for word, masking in (("reset_position_ids", "position"), ("reset_attention_mask", "attention")):
        if values[word] and not parsed.given("document_masking"):
            parsed.set("document_masking", masking, sources[word])
    if values["reset_attention_mask"] and not values["reset_position_ids"]:
        parsed.note(f"{parsed.typed_as('reset_attention_mask')}: positions restart with each document, too")
    if values["load"]:
        _settle_load(parsed)


def _settle_load(parsed: Parsed) -> None:
    load = Path(parsed.values["load"])
    own = parsed.values["output_dir"]
    if own and load.resolve() == Path(own).resolve():
        return  # going on from the newest checkpoint in output_dir is what always happens
    if not load.is_dir() or not any(load.iterdir()):
        parsed.note(f"{parsed.typed_as('load')} {load}: there is nothing to load, the run starts anew")
    elif parsed.values["resume_from_checkpoint"] is None:
        parsed.set("resume_from_checkpoint", str(load), parsed.sources["load"])


def _settle_vocabulary(parsed: Parsed, name: str) -> None:
    """Rows of the embedding: the vocabulary rounded up, as Megatron and PaddleFleetX do."""
    values = parsed.values
    if values["vocab_file"]:
        size = _entries(values["vocab_file"], parsed.typed_as("vocab_file"))
        if not parsed.given("vocab_size"):
            parsed.set("vocab_size", size, parsed.sources["vocab_file"])
    named = values["tokenizer_name_or_path"] or parsed.sources["model_name_or_path"] != "default"
    if values["vocab_size"] is None and name in ("megatron", "oneflow") and not named:
        parsed.set("vocab_size", GPT2_VOCABULARY, f"default of {name}: GPT-2's")
    unit = values["make_vocab_size_divisible_by"]
    size = values["vocab_size"]
    if not unit or unit < 0 or not size or size < 1:
        return
    multiple = unit * max(values["tensor_parallel_degree"], 1)
    rounded = -(-size // multiple) * multiple
    if rounded != size:
        parsed.set("vocab_size", rounded, f"derived: {size} rounded up to a multiple of {multiple}")


def _entries(path: str, typed: str) -> int:
    try:
        return len(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{typed} {path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{typed} {path}: no JSON vocabulary ({error})") from error


def wanted_processes(values: Mapping[str, Any]) -> int | None:
    """Processes that the command itself asks for; None if it does not say."""
    per_node, nodes = values["num_gpus_per_node"], values["num_nodes"]
    return None if per_node is None else per_node * nodes


def launch_words(values: Mapping[str, Any]) -> tuple[str, ...]:
    """What the launcher is told of the processes that the command or its file asks for."""
    given = {name: values[name] for name in ("num_gpus_per_node", "num_nodes", "node_ips")}
    return tuple(word for name, value in given.items() if value is not None for word in (f"--{name}", str(value)))
