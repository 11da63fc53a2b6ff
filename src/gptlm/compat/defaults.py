"""The compat mode of a pretraining command: the defaults of its original, and what follows from its aliases."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptlm.compat import megatron
from gptlm.config.args.training import DataArguments, ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.derive import derive_world
from gptlm.config.field import LARGEST_PORT, arg
from gptlm.config.files import read_json
from gptlm.config.origin import DEFAULT, Origin, Source, derived
from gptlm.config.parser import Parsed
from gptlm.config.problem import Problem
from gptlm.data.order import parse_split
from gptlm.errors import GptlmError, UsageError, named
from gptlm.model.presets import GPT2_VOCABULARY
from gptlm.ranks import launched_processes

MODES = ("paddlenlp", "fleetx-2022", "fleetx", "megatron", "oneflow")
EVALUATES = ("eval_freq",)  # aliases from scripts that always evaluate: their interval also turns evaluation on


@dataclass(frozen=True, kw_only=True)
class CompatArguments:
    """Compatibility with other libraries."""

    compat: str | None = arg(
        None, "whose defaults, schedule and log lines to use; unset: follows from the arguments", choices=MODES
    )
    make_vocab_size_divisible_by: int | None = arg(
        None, "--vocab_size is rounded up to a multiple of this times --tensor_parallel_degree; 0: as it is", ge=0
    )
    vocab_file: str | None = arg(None, "vocab.json, for the size of the vocabulary")
    zero_stage: int | None = arg(None, "0 to 3: sharding stage1 to stage3, 0 for none", ge=0, le=3)
    reset_position_ids: bool = arg(False, "same as --document_masking position")
    reset_attention_mask: bool = arg(False, "same as --document_masking attention")
    load: str | None = arg(None, "folder whose newest checkpoint the run resumes from; none there: it starts at step 0")
    num_gpus_per_node: int | None = arg(None, "processes on each node; started here if no launcher did", ge=1)
    num_nodes: int | None = arg(None, "nodes; start the same command on each; unset: number of --node_ips, or 1", ge=1)
    node_ips: list[str] = arg([], "addresses of all nodes in rank order, the first is the master's", words=True)
    rank: int | None = arg(None, "rank of this node, from 0; unset: by its address in --node_ips", ge=0)
    ctrl_port: int | None = arg(None, "port of the master; unset: 29500", ge=1, le=LARGEST_PORT)
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


OUR_NAMES = ("per_device_train_batch_size", "max_steps", "input_dir", "output_dir", "max_seq_length")
# what messages call arguments that are not given, to users who typed none of our names
CALLED = {
    "megatron": {"input_dir": "--data-path", "output_dir": "--save"},
    "oneflow": {"input_dir": "--dataset", "output_dir": "--save"},
}


def default_of_mode(mode: str, detail: str = "") -> Source:
    """The source of a default of compat mode `mode`."""
    return Source(Origin.COMPAT_DEFAULT, f"default of {mode}{detail}")


def apply_compat(parsed: Parsed) -> str:
    """Fill in the defaults of the command's compat mode and what follows from its aliases; returns the mode.

    Raises:
        UsageError: if vocab_file cannot be read.
    """
    mode = parsed[CompatArguments].compat or _detect(parsed)
    for flag, value in DEFAULTS[mode].items():
        if not parsed.given(flag):
            parsed.set(flag, value, default_of_mode(mode))
    if parsed[DataArguments].eval_iters == 0:
        _apply_no_evaluation(parsed)
    if not parsed.used.intersection(OUR_NAMES):
        for flag, alias in CALLED.get(mode, {}).items():
            parsed.typed.setdefault(flag, alias)
    if mode in ("megatron", "oneflow"):
        _apply_megatron(parsed, mode)
    _apply_sharding_and_masking(parsed)
    _apply_load(parsed)
    _apply_vocabulary(parsed, mode)
    return mode


def move_load(parsed: Parsed) -> None:
    """Let `load` follow `save` where a file gives both as one folder and the command gives another one to `save`."""
    compat, output_dir = parsed[CompatArguments], parsed[TrainingArguments].output_dir
    if compat.load and compat.load == parsed.replaced.get("output_dir") and "load" not in parsed.replaced:
        parsed.put(replace(compat, load=output_dir), derived(f"{parsed.typed_as('output_dir')}, as in the file"))


def _detect(parsed: Parsed) -> str:
    """The compat mode by the arguments in use. Where they are mixed, OneFlow's come first, then Megatron's."""
    theirs = parsed.used & {*megatron.ONEFLOW, *megatron.MEGATRON}
    mode = "oneflow" if parsed.used & {*megatron.ONEFLOW} else "megatron" if theirs else "paddlenlp"
    ours = sorted(parsed.used & {*OUR_NAMES} - {"input_dir"})
    if theirs and ours:
        shown = ", ".join("--" + name for name in (*sorted(theirs)[:2], *ours[:2]))
        parsed.note(
            f"arguments of several libraries are mixed ({shown}): defaults, schedule and log lines are {mode}'s "
            f"(change this with {named('compat')}); of two arguments that set the same value the last one counts"
        )
    return mode


def _apply_megatron(parsed: Parsed, mode: str) -> None:
    training, data, compat = parsed[TrainingArguments], parsed[DataArguments], parsed[CompatArguments]
    if not parsed.given("save_steps") and not parsed.given("save_strategy"):
        parsed.set("save_strategy", "no", default_of_mode(mode, ": no --save-interval, the end only"))
    if training.lr_scheduler_type == "cosine" and mode == "oneflow":
        parsed.put(replace(parsed[TrainingArguments], lr_scheduler_type="oneflow_cosine"))
    if training.lr_scheduler_type == "constant":
        parsed.put(replace(parsed[TrainingArguments], lr_scheduler_type="constant_with_warmup"))
    asked = parsed.given("do_eval") or training.evaluation_strategy not in (None, "no")
    if training.do_eval and not asked and not has_valid_share(data.split):
        # Megatron builds no validation data for an empty share and skips the evaluation.
        parsed.note(f"{named('split')} {data.split} leaves nothing to evaluate on: evaluations are skipped")
        parsed.put(replace(parsed[TrainingArguments], do_eval=False), derived("split"))
    if data.test_iters is None and mode == "megatron" and parsed[TrainingArguments].do_eval:
        parsed.put(replace(data, test_iters=data.eval_iters), default_of_mode(mode, ": eval_iters"))
    if training.logging_dir and not parsed.given("report_to"):
        parsed.set("report_to", ["tensorboard"], derived("a folder for its events"))
    if mode == "oneflow" and not parsed.given("data_order") and "use_external_dataset" not in parsed.used:
        parsed.note(f"{named('data_order')} megatron: {megatron.ONEFLOW_ORDER}")
    if mode == "oneflow" and compat.metric_print_format == "normal" and training.log_format == "oneflow":
        parsed.set("log_format", "oneflow-normal", parsed.sources["metric_print_format"])


def _apply_no_evaluation(parsed: Parsed) -> None:
    """`eval_iters` 0 turns evaluation off, in Megatron's commands and in all others."""
    parsed.set("eval_iters", 10, DEFAULT)
    training = parsed[TrainingArguments]
    if not training.do_eval and training.evaluation_strategy in (None, "no"):
        return
    if parsed.given("do_eval") or parsed.given("evaluation_strategy"):
        parsed.note(f"{named('eval_iters')} 0: there is no evaluation")
    parsed.set("do_eval", False, DEFAULT)
    parsed.set("evaluation_strategy", None, DEFAULT)
    if not parsed.given("eval_steps"):
        parsed.set("eval_steps", None, DEFAULT)


def has_valid_share(split: str) -> bool:
    """Whether the validation split has a share; a malformed split is reported elsewhere."""
    try:
        return parse_split(split)[1] > 0
    except GptlmError:
        return True


def _apply_sharding_and_masking(parsed: Parsed) -> None:
    compat, parallel, sources = parsed[CompatArguments], parsed[ParallelArguments], parsed.sources
    if compat.zero_stage in (1, 2, 3) and not parallel.sharding and not parallel.deepspeed:
        parsed.put(replace(parallel, sharding=f"stage{compat.zero_stage}"), sources["zero_stage"])
    if not parsed.given("document_masking"):
        if compat.reset_position_ids:
            parsed.set("document_masking", "position", sources["reset_position_ids"])
        if compat.reset_attention_mask:
            parsed.set("document_masking", "attention", sources["reset_attention_mask"])
    if compat.reset_attention_mask and not compat.reset_position_ids:
        parsed.note(f"{named('reset_attention_mask')}: positions restart with each document, too")


def _apply_load(parsed: Parsed) -> None:
    training, load = parsed[TrainingArguments], parsed[CompatArguments].load
    if not load:
        return
    folder, own = Path(load), training.output_dir
    if own and folder.resolve() == Path(own).resolve():
        return  # a run always resumes from the newest checkpoint in output_dir
    if not folder.is_dir() or not any(folder.iterdir()):
        parsed.note(f"{named('load')} {folder}: there is nothing to load, the run starts at step 0")
    elif training.resume_from_checkpoint is None:
        parsed.put(replace(training, resume_from_checkpoint=str(folder)), parsed.sources["load"])


def _apply_vocabulary(parsed: Parsed, mode: str) -> None:
    """Rows of the embedding: the vocabulary rounded up, as Megatron and PaddleFleetX do."""
    compat, model = parsed[CompatArguments], parsed[ModelArguments]
    if compat.vocab_file:
        content = read_json(compat.vocab_file, f"{named('vocab_file')} {compat.vocab_file}")
        if not parsed.given("vocab_size"):
            model = parsed.put(replace(model, vocab_size=len(content)), parsed.sources["vocab_file"])
    is_named = model.tokenizer_name_or_path or not parsed.is_default("model_name_or_path")
    if model.vocab_size is None and mode in ("megatron", "oneflow") and not is_named:
        model = parsed.put(replace(model, vocab_size=GPT2_VOCABULARY), default_of_mode(mode, ": GPT-2's"))
    unit, size = compat.make_vocab_size_divisible_by, model.vocab_size
    if not unit or unit < 0 or not size or size < 1:
        return
    multiple = unit * max(parsed[ParallelArguments].tensor_parallel_degree, 1)
    rounded = -(-size // multiple) * multiple
    parsed.put(replace(model, vocab_size=rounded), derived(f"{size} rounded up to a multiple of {multiple}"))


def apply_evaluation_alias(parsed: Parsed) -> None:
    """Turn evaluation on where an alias of `EVALUATES` gives its interval and nothing else decides."""
    training, asked = parsed[TrainingArguments], parsed.aliases.get("eval_steps") in EVALUATES
    if asked and training.do_train and not parsed.given("do_eval") and not parsed.given("evaluation_strategy"):
        parsed.set("do_eval", True, derived(parsed.typed_as("eval_steps")))


def derive_processes(parsed: Parsed, environment: Mapping[str, str], printing: bool) -> tuple[str, ...]:
    """The number of processes of a run; the launcher's arguments if they are still to be started, else ().

    Raises:
        UsageError: if the command asks for another number than the launcher has started; as `derive_world`.
    """
    compat = parsed[CompatArguments]
    nodes, per_node = _count_nodes(compat), compat.num_gpus_per_node or 1
    given = launched_processes(environment)
    unset = compat.num_gpus_per_node is None and (nodes == 1 or given is not None)
    wanted = None if unset else per_node * nodes
    launch: tuple[str, ...] = ()
    if given is not None:
        _compare_rank(parsed, environment)
    elif nodes > 1 and not compat.node_ips:
        problem = Problem("node_ips", f"is missing: the addresses of the {nodes} nodes, the same list on each")
        if not printing:
            raise UsageError(problem.marked)
        parsed.note_missing(problem)
    if wanted is not None and given is None:
        if printing and parsed[ParallelArguments].world_size is None:
            parsed.set("world_size", wanted, derived(f"{per_node} x {nodes}"))
        launch = _launch_arguments(compat, per_node, nodes) if wanted > 1 and not printing else ()
    elif wanted is not None and given != wanted:
        raise UsageError(
            f"{named('num_gpus_per_node')} {per_node} x {named('num_nodes')} {nodes} are "
            f"{wanted} processes, the launcher started {given} (WORLD_SIZE)"
        )
    derive_world(parsed, environment, printing)
    if launch:
        parsed.set("world_size", wanted, derived("processes that are started"))
    return launch


def _count_nodes(compat: CompatArguments) -> int:
    """The number of nodes. Raises UsageError if the addresses or the rank contradict it."""
    addresses, rank = len(compat.node_ips), compat.rank
    nodes = compat.num_nodes or addresses or 1
    if addresses and addresses != nodes:
        names = f"{addresses} address{'es' if addresses > 1 else ''}"
        raise UsageError(
            f"{named('node_ips')} names {names}, {named('num_nodes')} is {nodes}; give one address for each node"
        )
    if rank is not None and rank >= nodes:
        expected = f"0 to {nodes - 1} with {nodes} nodes" if nodes > 1 else f"0 without {named('num_nodes')}"
        raise UsageError(f"{named('rank')} {rank}: expected {expected}")
    return nodes


def _compare_rank(parsed: Parsed, environment: Mapping[str, str]) -> None:
    """Compare `rank` with the node's rank that torchrun gives. Raises UsageError."""
    rank, launched = parsed[CompatArguments].rank, environment.get("GROUP_RANK")
    if rank is None:
        return
    if launched is None:
        parsed.note(f"{named('rank')} {rank} has no effect: the launcher has started the processes of all nodes")
    elif launched != str(rank):
        raise UsageError(f"{named('rank')} {rank}: the launcher started this node as {launched} (GROUP_RANK)")


def _launch_arguments(compat: CompatArguments, per_node: int, nodes: int) -> tuple[str, ...]:
    """The arguments of `gptlm launch` for the processes that the command asks for."""
    given = (
        ("num_gpus_per_node", per_node),
        ("num_nodes", nodes),
        ("node_ips", ",".join(compat.node_ips) or None),
        ("rank", compat.rank),
        ("ctrl_port", compat.ctrl_port),
    )
    return tuple(word for name, value in given if value is not None for word in (f"--{name}", str(value)))
