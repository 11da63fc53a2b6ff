"""`gptlm pretrain`: our arguments, and the command lines and files of PaddleNLP, FleetX, Megatron and OneFlow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gptlm.checkpoint.task import PRETRAIN as TASK
from gptlm.checkpoint.task import take_own_folder
from gptlm.compat import megatron, paddlenlp, transformers
from gptlm.compat.auto_convert import take_external_model, take_external_start
from gptlm.compat.defaults import (
    CompatArguments,
    apply_compat,
    apply_evaluation_alias,
    derive_processes,
    move_load,
)
from gptlm.compat.fleetx.translate import training_arguments
from gptlm.compat.other_yaml import refuse_other_yaml
from gptlm.config.args.hub import HubArguments
from gptlm.config.args.training import DataArguments, ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.derive import derive_actions, derive_evaluations, derive_own_metric, name_auto_parallel
from gptlm.config.model_size import drop_tokenizer_class, find_model
from gptlm.config.origin import derived
from gptlm.config.parser import Parsed, Vocabulary, parse
from gptlm.config.problem import Problem
from gptlm.config.run import PretrainRun, refusals_of, resolve, tried
from gptlm.config.validate import pretrain_problems
from gptlm.errors import UsageError, named
from gptlm.model.files import has_weights

PRETRAIN = Vocabulary(
    groups=(ModelArguments, DataArguments, ParallelArguments, TrainingArguments, HubArguments, CompatArguments),
    renamed=paddlenlp.PRETRAIN_RENAMED | transformers.PRETRAIN_RENAMED | megatron.RENAMED,
    ignored=paddlenlp.PRETRAIN_IGNORED | transformers.PRETRAIN_IGNORED | megatron.IGNORED,
    refused=paddlenlp.PRETRAIN_REFUSED | transformers.PRETRAIN_REFUSED | megatron.REFUSED,
    settings=transformers.TRAINING_SETTINGS,
    alias_values=megatron.VALUES | transformers.TRAINING_VALUES,
    sections=training_arguments,
    check_tree=refuse_other_yaml,
)


def parse_pretrain(
    argv: Sequence[str], environment: Mapping[str, str], *, printing: bool = False, own_metrics: bool = False
) -> PretrainRun:
    """The run that `argv` and the launcher's `environment` describe.

    Args:
        printing: the run is for --print_config: `--world_size` counts, folders that are not given are in `missing`.
        own_metrics: the caller measures metrics beside the loss, of which one may choose the best checkpoint.

    Raises:
        UsageError: listing everything that is wrong.
    """
    parsed = parse(PRETRAIN, argv)
    move_load(parsed)
    take_external_start(parsed)
    take_external_model(parsed)
    problems: list[Problem] = []
    mode = tried(lambda: apply_compat(parsed), problems)
    name_auto_parallel(parsed)
    launch = tried(lambda: derive_processes(parsed, environment, printing), problems)
    derive_actions(parsed)
    apply_evaluation_alias(parsed)
    derive_evaluations(parsed)
    if own_metrics:
        derive_own_metric(parsed)
    drop_tokenizer_class(parsed, "tokenizer_name_or_path", parsed[ModelArguments].model_name_or_path)
    tried(lambda: take_own_folder(parsed, TASK), problems)
    tried(lambda: _derive_weights(parsed), problems)
    source = tried(lambda: find_model(parsed), problems)
    found = resolve(
        parsed,
        source,
        printing,
        problems,
        lambda: pretrain_problems(parsed, printing, own_metrics),
        length_flag="max_seq_length",
        global_evaluation=mode != "paddlenlp",
    )
    return PretrainRun(
        model=parsed[ModelArguments],
        data=parsed[DataArguments],
        parallel=parsed[ParallelArguments],
        training=parsed[TrainingArguments],
        hub=parsed[HubArguments],
        source=found.source,
        shape=found.shape,
        dims=found.dims,
        task=TASK,
        sources=parsed.sources,
        typed=parsed.typed,
        notes=tuple(parsed.notes),
        refusals=refusals_of(parsed, ()),
        missing=tuple(parsed.missing),
        launch=launch or (),
    )


def _derive_weights(parsed: Parsed) -> None:
    """Evaluation without training needs weights: those of output_dir unless a model is named with them."""
    training, model = parsed[TrainingArguments], parsed[ModelArguments]
    evaluates_only = not training.do_train and (training.do_eval or training.do_predict)
    if not evaluates_only or model.continue_training or not training.output_dir:
        return
    if not parsed.is_default("model_name_or_path") or not has_weights(Path(training.output_dir)):
        raise UsageError(
            f"evaluation without training needs weights: add {named('continue_training')} to use those of "
            f"{model.model_name_or_path}, or leave the model out and give the {named('output_dir')} of a finished run"
        )
    trained = replace(model, model_name_or_path=training.output_dir, continue_training=True)
    parsed.put(trained, derived("the model in output_dir"))
