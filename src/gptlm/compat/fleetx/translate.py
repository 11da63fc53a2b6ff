"""A FleetX configuration as our arguments for one command."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gptlm.compat.fleetx import keys
from gptlm.compat.fleetx.load import Configuration, matching, read_configuration
from gptlm.compat.fleetx.validate import CALCULATED, is_auto, problems_of, unknown_keys
from gptlm.config.files import Argument, Arguments, as_texts
from gptlm.config.origin import Origin, Source
from gptlm.errors import UsageError

NO_CHANGE: tuple[Any, ...] = (None, "", False, [], {})  # values of keys without effect that need no log line
LONGEST = 512  # new tokens, the original's limit


def training_arguments(path: str, overrides: list[str]) -> Arguments:
    """A pretraining command.

    Raises:
        UsageError: listing everything that is wrong.
    """
    configuration = read_configuration(path, overrides)
    problems = list(problems_of(configuration))
    if problems:
        raise UsageError("\n".join(problems))
    mode = "fleetx" if configuration.generation == "sections" else "fleetx-2022"
    given = [Argument("compat", (mode,), _file(configuration), configuration.path)]
    elsewhere = CALCULATED if configuration.value("Model.module") != "GPTFinetuneModule" else (*CALCULATED, *keys.DATA)
    renamed = {key: flag for key, flag in keys.TRAINING_RENAMED.items() if key not in elsewhere}
    given += _renamed(configuration, renamed)
    for several in (_precision, _evaluation, _passes, _sharding, _schedule, _tuning):
        given += several(configuration)
    notes = [
        *configuration.notes,
        *_without_effect(configuration, keys.TRAINING_RENAMED, keys.TRAINING_IGNORED),
        *_other_data(configuration),
    ]
    return Arguments(given, notes, refusals=_refusals(configuration, "pretrain"))


def evaluation_arguments(path: str, overrides: list[str]) -> Arguments:
    """An evaluation: `Offline_Eval`, precision and device. Raises UsageError."""
    configuration = read_configuration(path, overrides)
    given = [*_renamed(configuration, keys.EVALUATION_RENAMED), *_half_weights(configuration)]
    return _task(configuration, given, keys.EVALUATION_RENAMED, "evaluate")


def generation_arguments(path: str, overrides: list[str]) -> Arguments:
    """Continuing prompts: `Generation`, seed and device. Raises UsageError."""
    configuration = read_configuration(path, overrides)
    given = _renamed(configuration, keys.GENERATION_RENAMED)
    longest = configuration.value("Generation.max_dec_len")
    if isinstance(longest, int) and not 0 <= longest <= LONGEST:
        configuration.notes.append(f"{configuration.typed('Generation.max_dec_len')} {longest}: {LONGEST} at most")
        given = [replace(g, values=(str(LONGEST),)) if g.name == "tgt_length" else g for g in given]
    if not any(argument.name == "model_name_or_path" for argument in given):
        typed = configuration.typed("Engine.save_load.ckpt_dir")
        given.append(Argument("model_name_or_path", ("",), _file(configuration), typed))
    return _task(configuration, given, keys.GENERATION_RENAMED, "predict")


def _task(configuration: Configuration, given: list[Argument], renamed: Mapping[str, str], command: str) -> Arguments:
    unknown = list(unknown_keys(configuration))
    if unknown:
        raise UsageError("\n".join(unknown))
    notes = [*configuration.notes, *_without_effect(configuration, renamed, keys.TASK_IGNORED)]
    return Arguments(given, notes, refusals=_refusals(configuration, command))


def _file(configuration: Configuration) -> Source:
    return Source(Origin.FILE, configuration.path)


# Arguments -------------------------------------------------------------------------------------------------------


def _argument(configuration: Configuration, key: str, flag: str, value: Any) -> Argument:
    leaf = configuration.leaves.get(key)
    texts = (",".join(as_texts(value)),) if flag == "split" else as_texts(value)
    return Argument(flag, texts, leaf.source if leaf else _file(configuration), configuration.typed(key))


def _renamed(configuration: Configuration, table: Mapping[str, str]) -> list[Argument]:
    """An argument for each key with a value, overrides last; an empty value counts as none."""
    return [
        _argument(configuration, key, table[key], configuration.value(key))
        for key in configuration.leaves
        if key in table and configuration.value(key) is not None
    ]


def _half_weights(configuration: Configuration) -> list[Argument]:
    """fp16 or bf16, where mixed precision is on."""
    mix = "Engine.mix_precision"
    key = f"{mix}.enable" if f"{mix}.enable" in configuration.leaves else f"{mix}.use_pure_fp16"
    enabled = configuration.value(key)
    if enabled is None and is_auto(configuration):
        key, enabled = f"{mix}.level", configuration.value(f"{mix}.level")
    if not enabled:
        return []
    kind = configuration.value(f"{mix}.dtype", "float16")
    return [_argument(configuration, key, "bf16" if kind == "bfloat16" else "fp16", True)]


def _precision(configuration: Configuration) -> list[Argument]:
    given, key = _half_weights(configuration), "Engine.mix_precision.level"
    if not given:
        return []
    level = str(configuration.value(key, "O2")).upper()
    if level == "O3":
        configuration.notes.append(f"{configuration.typed(key)} {level}: taken as O2")
    return [*given, _argument(configuration, key, "fp16_opt_level", "O2" if level == "O3" else level)]


def _evaluation(configuration: Configuration) -> list[Argument]:
    frequency = configuration.value("Engine.eval_freq", -1)
    batches = configuration.value("Engine.eval_iters", 0)
    if frequency >= 1 and batches < 1:
        given = "is not given" if configuration.value("Engine.eval_iters") is None else f"is {batches}"
        configuration.notes.append(
            f"{configuration.typed('Engine.eval_freq')} {frequency} has no effect: "
            f"{configuration.typed('Engine.eval_iters')} {given}, an evaluation would read no batch; give it, as 10"
        )
    if frequency < 1 or batches < 1:
        return []
    steps = configuration.value("Engine.max_steps", -1)
    if is_auto(configuration) and steps > 0:
        configuration.notes.append(
            f"{configuration.typed('Engine.eval_freq')} {frequency} counts passes over the data in tools/auto.py, and "
            "a run is one pass: evaluated at its end"
        )
        frequency = steps
    return [
        _argument(configuration, "Engine.eval_freq", "do_train", True),
        _argument(configuration, "Engine.eval_freq", "do_eval", True),
        _argument(configuration, "Engine.eval_freq", "eval_steps", frequency),
        _argument(configuration, "Engine.eval_iters", "eval_iters", batches),
    ]


def _passes(configuration: Configuration) -> list[Argument]:
    """Saving, tests and epochs."""
    given: list[Argument] = []
    every = configuration.value("Engine.save_load.save_steps", -1)
    test = configuration.value("Engine.test_iters", -1)
    if every < 1:
        given.append(_argument(configuration, "Engine.save_load.save_steps", "save_strategy", "no"))
    else:
        given.append(_argument(configuration, "Engine.save_load.save_steps", "save_steps", every))
    if test > 0:
        given.append(_argument(configuration, "Engine.test_iters", "test_iters", test))
    epochs = configuration.value("Engine.num_train_epochs", 1)
    if epochs > 0:
        given.append(_argument(configuration, "Engine.num_train_epochs", "num_train_epochs", epochs))
    return given


def _sharding(configuration: Configuration) -> list[Argument]:
    """Sharding and data parallelism. In auto.py dp_degree counts all replicas, elsewhere groups that share shards."""
    where = "Distributed.sharding"
    degree = configuration.value(f"{where}.sharding_degree", 1)
    groups = configuration.value("Distributed.dp_degree")
    given: list[Argument] = []
    if degree > 1:
        stage = configuration.value(f"{where}.sharding_stage", 1 if is_auto(configuration) else 2)
        offload = " offload" if configuration.value(f"{where}.sharding_offload", False) else ""
        given.append(_argument(configuration, f"{where}.sharding_stage", "sharding", f"stage{stage}{offload}"))
        given.append(_argument(configuration, f"{where}.sharding_degree", "sharding_parallel_degree", degree))
    if groups is not None:
        if is_auto(configuration):
            groups //= degree
        given.append(_argument(configuration, "Distributed.dp_degree", "data_parallel_degree", groups))
    return given


def _schedule(configuration: Configuration) -> list[Argument]:
    start = 0 if configuration.value("Optimizer.lr.use_increments", False) else 1
    name = configuration.value("Optimizer.lr.name", keys.SCHEDULE)
    if name != keys.SCHEDULE and name in keys.SCHEDULE_NAMES:
        configuration.notes.append(f"{configuration.typed('Optimizer.lr.name')} {name} is taken as {keys.SCHEDULE}")
    return [
        _argument(configuration, "Optimizer.lr.name", "lr_scheduler_type", "cosine"),
        _argument(configuration, "Optimizer.lr.use_increments", "lr_start_step", start),
        _argument(configuration, "Data.Train.dataset.name", "data_order", _order(configuration)),
    ]


def _tuning(configuration: Configuration) -> list[Argument]:
    """Fully automatic parallelism."""
    if not configuration.value("Tuning.enable", False):
        return []
    return [_argument(configuration, "Tuning.enable", "auto_parallel", configuration.value("Tuning.enable"))]


def _order(configuration: Configuration) -> str:
    """Since March 2023 documents are shuffled as in Megatron; those files have `mix_precision.enable`."""
    return "megatron" if "Engine.mix_precision.enable" in configuration.leaves else "fleetx"


# Log lines and refusals -------------------------------------------------------------------------------------------


def _without_effect(
    configuration: Configuration, renamed: Mapping[str, str], ignored: Mapping[str, str]
) -> Iterator[str]:
    """One line for each reason, with its keys."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for key in configuration.leaves:
        reason = None if key in renamed or key in keys.SETTLED else matching(key, ignored)
        usual = (*NO_CHANGE, *keys.SAME.get(key, ()), *_as_train(configuration, key))
        if reason is not None and configuration.value(key) not in usual:
            by_reason[reason].append(configuration.original[key])
    for reason, found in by_reason.items():
        shown = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
        yield f"{configuration.path}: {shown} has no effect here ({reason})"


def _as_train(configuration: Configuration, key: str) -> tuple[Any, ...]:
    """Values of a key of another split that need no line: those of Data.Train; `_other_data` logs the others."""
    section, _, rest = key.partition(".")
    split, _, name = rest.partition(".")
    if section != "Data" or split not in ("Eval", "Test"):
        return ()
    return (
        (configuration.value(key),)
        if f"Data.Train.{name}" in keys.DATA
        else (configuration.value(f"Data.Train.{name}"),)
    )


def _other_data(configuration: Configuration) -> Iterator[str]:
    for split in ("Eval", "Test"):
        for own in keys.DATA:
            other = own.replace("Train", split)
            given = configuration.value(other)
            if given is not None and given != configuration.value(own):
                yield (
                    f"{configuration.typed(other)} {given} has no effect: all splits come from {own} "
                    f"({configuration.value(own)})"
                )


def _refusals(configuration: Configuration, command: str) -> list[str]:
    found = []
    module = configuration.value("Model.module")
    owner = keys.MODULES.get(str(module), command) if module else _owner(configuration, command)
    if owner in ("pretrain", "evaluate", "predict"):
        if owner != command:
            found.append(f"{configuration.path} is for gptlm {owner} -c {configuration.path}")
    else:
        found.append(f"{configuration.typed('Model.module')} {module}: {owner}")
    for key, reason in keys.COMPRESSION.items():
        if configuration.value(key):
            found.append(f"{configuration.typed(key)} {configuration.value(key)}: {reason}")
    if any(key.startswith(("Compress.Distillation.", "Model.teacher.")) for key in configuration.leaves):
        found.append(f"{configuration.path}: {keys.COMPRESSION['Compress.Distillation.enable']}")
    if configuration.has("Inference") and configuration.generation == "sections" and command == "predict":
        found.append(
            f"{configuration.typed('Inference.model_dir')}: models exported for PaddlePaddle's inference engine cannot "
            "be run; leave the Inference section out and name a folder with Engine.save_load.ckpt_dir"
        )
    if not configuration.has("Model") and command == "pretrain":
        found.append(
            f"{configuration.path} has no Model section, it is for exporting; a saved model is the export here"
        )
    experts = configuration.value("Model.num_experts")
    if configuration.has("Model.moe_configs") or experts not in (None, 1, (1,), [1]):
        found.append(f"{configuration.path}: {keys.MODULES['MoEModule']}")
    return list(dict.fromkeys(found))


def _owner(configuration: Configuration, command: str) -> str:
    """The command of a file without Model.module (examples/ of 2023), by its sections."""
    if configuration.generation == "sections":
        if configuration.has("Offline_Eval"):
            return "evaluate"
        if configuration.has("Generation"):
            return "predict"
    return command
