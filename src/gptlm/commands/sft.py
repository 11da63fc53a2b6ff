"""`gptlm sft`: fine-tuning with the arguments of PaddleNLP, transformers, TRL, LLaMA-Factory and litgpt."""

from collections.abc import Mapping, Sequence

from gptlm.checkpoint.task import LORA, note_other_tasks, take_own_adapters, take_own_folder
from gptlm.checkpoint.task import SFT as WHOLE
from gptlm.compat import litgpt, llamafactory, paddlenlp, transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model, take_external_start
from gptlm.compat.defaults import apply_evaluation_alias
from gptlm.compat.other_yaml import refuse_other_yaml
from gptlm.config.adapters import derive_adapters, find_adapters
from gptlm.config.args.hub import HubArguments
from gptlm.config.args.sft import LoraArguments, SftArguments
from gptlm.config.args.training import ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.derive import derive_actions, derive_evaluations, derive_world
from gptlm.config.fine_tuning import (
    derive_fine_tuning,
    derive_lengths,
    find_start,
    fine_tuning_problems,
    fine_tuning_refusals,
    take_trained,
)
from gptlm.config.model_size import drop_tokenizer_class
from gptlm.config.parser import Vocabulary, parse
from gptlm.config.problem import Problem
from gptlm.config.run import SftRun, refusals_of, resolve, tried

NO_PIPELINE = "fine-tuning has no pipelines; --tensor_parallel_degree or --sharding stage3 split a model"
FIXED = {  # arguments of training that fine-tuning leaves no choice in
    "continue_training": "always on, fine-tuning starts from a model's weights",
    "do_predict": "no effect, fine-tuning data has no test split",
    "initializer_range": "no effect, the weights are loaded",
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"), "the model's"),
    "max_position_embeddings": "the model's",
    **dict.fromkeys(("auto_parallel", "auto_parallel_memory"), "refused, it chooses layouts of pretraining"),
    **dict.fromkeys(("pipeline_parallel_degree", "virtual_pp_degree"), f"1, {NO_PIPELINE}"),
    "pipeline_parallel_config": NO_PIPELINE,
}
SFT = Vocabulary(
    groups=(ModelArguments, SftArguments, LoraArguments, ParallelArguments, TrainingArguments, HubArguments),
    renamed=paddlenlp.PRETRAIN_RENAMED
    | transformers.SFT_RENAMED
    | paddlenlp.SFT_RENAMED
    | llamafactory.SFT_RENAMED
    | litgpt.SFT_RENAMED,
    ignored=paddlenlp.PRETRAIN_IGNORED | transformers.SFT_IGNORED | paddlenlp.SFT_IGNORED | llamafactory.SFT_IGNORED,
    refused=paddlenlp.PRETRAIN_REFUSED
    | transformers.SFT_REFUSED
    | paddlenlp.SFT_REFUSED
    | llamafactory.SFT_REFUSED
    | litgpt.SFT_REFUSED,
    settings=transformers.SFT_SETTINGS | paddlenlp.SFT_SETTINGS | llamafactory.SFT_SETTINGS | litgpt.SFT_SETTINGS,
    alias_values=transformers.TRAINING_VALUES | llamafactory.SFT_VALUES | litgpt.SFT_VALUES,
    defaults={"min_learning_rate": "lr_decay_ratio x learning_rate"},
    fixed=FIXED,
    check_tree=refuse_other_yaml,
)


def parse_sft(
    argv: Sequence[str], environment: Mapping[str, str], *, printing: bool = False, own_metrics: bool = False
) -> SftRun:
    """The run that `argv` and the launcher's `environment` describe.

    Args:
        printing: the run is for --print_config.
        own_metrics: the caller measures metrics of other names, too, of which one may choose the best checkpoint.

    Raises:
        UsageError: listing everything that is wrong.
        GptlmError: if the files of the model or of lora_path cannot be read.
    """
    parsed = parse(SFT, argv)
    take_external_start(parsed)
    take_external_model(parsed)
    take_own_adapters(parsed)
    take_external_adapters(parsed)
    note_other_tasks(parsed)
    drop_tokenizer_class(parsed, "tokenizer_name_or_path", parsed[ModelArguments].model_name_or_path)
    problems: list[Problem] = []
    lora = parsed[LoraArguments]
    task = LORA if lora.lora or lora.lora_path else WHOLE
    tried(lambda: take_own_folder(parsed, task), problems)
    take_trained(parsed)
    tried(lambda: derive_world(parsed, environment, printing), problems)
    derive_actions(parsed)
    apply_evaluation_alias(parsed)
    derive_evaluations(parsed)
    adapters = find_adapters(parsed, printing)
    source = tried(lambda: find_start(parsed), problems)
    if source is not None and source.shape is not None:
        derive_lengths(parsed, source.shape.max_position_embeddings)
        problems += derive_adapters(parsed, source.shape, adapters)
    derive_fine_tuning(parsed)
    found = resolve(
        parsed,
        source,
        printing,
        problems,
        lambda: fine_tuning_problems(parsed, source, own_metrics),
        length_flag="max_length",
    )
    return SftRun(
        model=parsed[ModelArguments],
        data=parsed[SftArguments],
        lora=parsed[LoraArguments],
        adapters=adapters,
        parallel=parsed[ParallelArguments],
        training=parsed[TrainingArguments],
        hub=parsed[HubArguments],
        source=found.source,
        shape=found.shape,
        dims=found.dims,
        task=task,
        sources=parsed.sources,
        typed=parsed.typed,
        notes=tuple(parsed.notes),
        refusals=refusals_of(parsed, fine_tuning_refusals(parsed, found.dims)),
        missing=tuple(parsed.missing),
    )
