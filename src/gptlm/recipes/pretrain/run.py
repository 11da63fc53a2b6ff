"""Pretraining, from a checked run to a saved model: data -> model -> trainer -> train -> save -> metrics."""

import logging
from pathlib import Path
from typing import Any

from transformers import set_seed

from gptlm.checkpoint import folder as checkpoint
from gptlm.compat.log_lines import flops_per_sample
from gptlm.config.run import PretrainRun, with_epochs_counted
from gptlm.data.corpora import Corpus, open_corpora
from gptlm.parallel.deepspeed import setup_deepspeed
from gptlm.parallel.process_groups import Mesh
from gptlm.planner.args import sizes_of
from gptlm.recipes.common.acceleration import speed_arguments
from gptlm.recipes.common.deepspeed import deepspeed_config
from gptlm.recipes.common.device import Machine, peak_flops, process_group_closed
from gptlm.recipes.common.model import find_tokenizer, make_model
from gptlm.recipes.common.resume import output_locked
from gptlm.recipes.common.training import (
    begin,
    evaluate,
    finish,
    layout_arguments,
    say_run,
    schedule,
    train,
    trainer_arguments,
)
from gptlm.recipes.common.training_args import hf_arguments
from gptlm.recipes.pretrain.data import (
    Datasets,
    build_datasets,
    collator,
    evaluated_samples,
    order_facts,
    samples_per_epoch,
    say_blend,
    say_data,
    say_evaluations,
    say_missing_ends,
    served,
    steps_per_epoch,
    window,
)
from gptlm.training.metrics.results import summary_table
from gptlm.training.trainer import PretrainTrainer

logger = logging.getLogger(__name__)


def pretrain(run: PretrainRun) -> dict[str, float]:
    """Run it; returns the metrics that are also in `output_dir/all_results.json`.

    Raises:
        GptlmError: for anything the user can mend, before the model is built wherever that is possible.
    """
    start, machine = begin(run)
    corpora = open_corpora(run.data.input_dir or "", run.data.split, run.data.data_order)
    run = with_epochs_counted(run, steps_per_epoch(run, corpora))
    with output_locked(run), process_group_closed(run.training.ddp_timeout):
        return _run(run, machine, corpora, start)


def _run(
    run: PretrainRun, machine: Machine, corpora: list[Corpus], start: checkpoint.Checkpoint | None
) -> dict[str, float]:
    """Everything that needs the process group."""
    training = run.training
    deepspeed = deepspeed_config(run, machine)
    if deepspeed is not None:
        setup_deepspeed(on_cpu=machine.device == "cpu")
    arguments = hf_arguments(run, machine, deepspeed)
    say_data(run, corpora)
    datasets = build_datasets(run, corpora)
    say_blend(run, corpora, datasets["train"])
    tokenizer = find_tokenizer(run, corpora)
    say_missing_ends(run, corpora, tokenizer)
    say_evaluations(run, corpora, datasets)
    say_run(run, run.batch.total * training.max_steps, run.data.max_seq_length)
    set_seed(training.seed)
    mesh = Mesh(run.dims) if run.dims.is_model_parallel else None
    model = make_model(run, tokenizer, deepspeed, mesh)
    if deepspeed is None:
        model = model.to(dtype=machine.dtype)  # type: ignore[call-arg]
    uneven = "documents differ in length" if run.data.document_masking == "attention" else None
    speed = speed_arguments(run, machine, model, deepspeed, compiled=True, uneven=uneven)
    trainer = PretrainTrainer(
        model=model,
        train_dataset=served(run, mesh, datasets["train"]),
        eval_dataset=window(run, mesh, datasets["valid"], evaluated_samples(run, corpora, "valid")),
        data_collator=collator(run),
        processing_class=tokenizer,
        schedule=schedule(run),
        seq_length=run.data.max_seq_length,
        samples_per_epoch=samples_per_epoch(datasets["train"]),
        flops_per_sample=_flops(run),
        utilisation=_utilisation(run, machine),
        **speed,
        **layout_arguments(run, mesh, machine),
        **trainer_arguments(run, machine, arguments, deepspeed, start, _facts(run, datasets)),
    )
    metrics = train(run, trainer, start) if training.do_train else {}
    metrics |= _evaluate(run, trainer, corpora, datasets)
    finish(run, trainer, metrics)
    _say_summary(run, trainer)
    return metrics


def _facts(run: PretrainRun, datasets: Datasets) -> dict[str, dict[str, Any]]:
    """What is noted in each checkpoint of the samples and how they are read."""
    masking = {"document_masking": run.data.document_masking, "eod_mask_loss": run.data.eod_mask_loss}
    return {"order": order_facts(run, datasets["train"]), "settings": masking}


def _evaluate(
    run: PretrainRun, trainer: PretrainTrainer, corpora: list[Corpus], datasets: Datasets
) -> dict[str, float]:
    """The validation split where nothing was trained (training has evaluated), then the test split."""
    training = run.training
    metrics = evaluate(trainer, "eval") if training.do_eval and not training.do_train else {}
    return metrics | (_test(run, trainer, corpora, datasets) if training.do_eval or training.do_predict else {})


def _say_summary(run: PretrainRun, trainer: PretrainTrainer) -> None:
    """Megatron's table at the end of a training, in its log format."""
    if not run.training.do_train or run.training.log_format != "megatron":
        return
    name = f"{run.dims.world}p-{Path(run.training.output_dir or '').name}"
    parameters = sizes_of(run).parameters
    history, steps = trainer.state.log_history, trainer.state.global_step
    length = run.data.max_seq_length
    for line in summary_table(name, history, parameters=parameters, seq_length=length, steps=steps):
        logger.info("%s", line)


def _flops(run: PretrainRun) -> float:
    shape = run.shape
    return flops_per_sample(
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        vocabulary=shape.vocab_size,
        length=run.data.max_seq_length,
        recompute=run.training.recompute,
    )


def _utilisation(run: PretrainRun, machine: Machine) -> float | None:
    """Share of a card's peak that one token per second is: 6 N + 12 L H S operations (arXiv 2204.02311, appendix B)."""
    peak, sizes = peak_flops(machine), sizes_of(run)
    return (6 * sizes.parameters + 12 * sizes.layers * sizes.width * sizes.length) / peak if peak else None


def _test(run: PretrainRun, trainer: PretrainTrainer, corpora: list[Corpus], datasets: Datasets) -> dict[str, float]:
    """The final evaluation on the test split, where there is one."""
    dataset = window(run, trainer.mesh, datasets["test"], evaluated_samples(run, corpora, "test"))
    if dataset is None:
        logger.info("the test split is empty or shorter than a sample (--split %s): no test evaluation", run.data.split)
        return {}
    return evaluate(trainer, "test", dataset)
