"""Fine-tuning, from a resolved run to a saved model: tokenizer -> examples -> model -> trainer -> train -> evaluate."""

import logging
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from gptlm.checkpoint.folder import Checkpoint
from gptlm.config.run import SftRun, with_epochs_counted
from gptlm.data.collate import NO_TARGETS
from gptlm.data.epochs import BEGIN, Epochs, Position, steps_in, steps_left
from gptlm.data.templates import plain_template
from gptlm.errors import GptlmError
from gptlm.model.files import shape_of_config
from gptlm.model.lora import (
    ADAPTER,
    add_adapters,
    check_base,
    fingerprint_of,
    load_adapters,
    resize_call,
    warn_if_other_base,
)
from gptlm.model.tokenizer import fit_to_model
from gptlm.parallel.adapters import split_adapters
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import full_shape
from gptlm.parallel.zero_config import stage_of
from gptlm.ranks import is_main_process
from gptlm.recipes.common.acceleration import accelerate
from gptlm.recipes.common.device import Device, close_process_group
from gptlm.recipes.common.hooks import NO_HOOKS, Hooks
from gptlm.recipes.common.model import generator_device, is_sequence_parallel, make_model, weights_folder
from gptlm.recipes.common.output_folder import MERGED
from gptlm.recipes.common.peers import Peers, find_peers
from gptlm.recipes.common.restart import continued
from gptlm.recipes.common.resume import check_output, check_shape, is_same_order, lock_output
from gptlm.recipes.common.training import Job, build_trainer, check_run, evaluate, finish, log_run, start_job, train
from gptlm.recipes.common.updates import stock_schedule
from gptlm.recipes.merge_lora import merge_beside
from gptlm.recipes.sft.adapters import (
    check_package,
    check_same_adapters,
    check_split,
    check_stage,
    obstacle_of,
    quantize_matrices,
)
from gptlm.recipes.sft.data import (
    SftData,
    collator,
    continuation,
    data_table,
    evaluation_samples,
    load_data,
    order_manifest,
)
from gptlm.recipes.sft.sources import find_sources
from gptlm.recipes.sft.tokenizer import check_added_tokens, check_tokenizer, find_sft_tokenizer
from gptlm.training.callbacks import EndOfTurn
from gptlm.training.lr_schedule import Schedule, StockSchedule
from gptlm.training.metrics.responses import ResponseMetrics
from gptlm.training.progress import EpochProgress

logger = logging.getLogger(__name__)


def sft(run: SftRun, hooks: Hooks = NO_HOOKS) -> dict[str, float]:
    """Run it; returns the metrics that are also in `output_dir/all_results.json`.

    Raises:
        GptlmError: for anything the user can fix, before the model is built wherever that is possible.
    """
    with find_peers(run.training.ddp_timeout) as peers:
        check_package(run.lora)
        run = continued(run, peers)
        device, resume = check_run(run, peers, _check_resume)
        if run.lora.merge_weights and run.lora.lora:
            check_output("output_dir", Path(run.training.output_dir or "") / MERGED)
        sources = find_sources(run)
        tokenizer, new_tokens = find_sft_tokenizer(run)
        if resume is not None:
            check_tokenizer(resume.path, tokenizer)
        elif run.adapters:
            check_added_tokens(run.adapters, tokenizer, new_tokens)
        check_split(run, new_tokens)
        entries = max(run.shape.vocab_size, len(tokenizer))  # an embedding for every entry of the tokenizer
        run = replace(run, shape=replace(run.shape, vocab_size=entries))
        if resume is not None and not run.lora.lora:
            check_shape(run, resume)
        fit_to_model(tokenizer, run.shape.max_position_embeddings)
        data = load_data(run, sources, tokenizer)
        if not tokenizer.chat_template:
            tokenizer.chat_template = plain_template(data.form, paddle=run.data.paddle_compat)
        position, position_text = _position(run, data, resume)
        steps = (len(data.train), run.batch.total)
        done = resume.manifest.global_step if resume else 0
        last = done + steps_left(run.training.num_train_epochs, position, *steps)
        run = with_epochs_counted(run, steps_in(*steps), last_step=last)
        epochs = _epochs(run, data, done, position)
        with lock_output(run, peers), close_process_group(peers):
            # a function of its own: the trainer has to be gone when the process group closes
            metrics = _run(run, device, resume, peers, tokenizer, new_tokens, data, epochs, position_text, hooks)
    if run.lora.merge_weights and run.lora.lora and run.training.do_train and is_main_process():
        unset_hf_deepspeed_config()  # else one process alone would load the model for all of stage 3
        output = Path(run.training.output_dir or "")
        merge_beside(weights_folder(run), output, MERGED)
    return metrics


def _run(
    run: SftRun,
    device: Device,
    resume: Checkpoint | None,
    peers: Peers | None,
    tokenizer: PreTrainedTokenizerBase,
    new_tokens: list[int],
    data: SftData,
    epochs: Epochs,
    position_text: str | None,
    hooks: Hooks,
) -> dict[str, float]:
    training = run.training
    job = start_job(run, device, resume, peers)
    log_run(run, data.train.examples, data.tokens_per_sample)
    hooks.log(run.training.label_smoothing_factor)
    check_stage(run.lora, stage_of(job.deepspeed or {}))

    model: Any = make_model(run, tokenizer, job.deepspeed, job.groups)
    ends = tokenizer.eos_token_id if data.end_ids is None else data.end_ids
    model.generation_config.eos_token_id = ends
    collate = collator(run, tokenizer, device.type)
    uneven = hooks.graph_obstacle or (
        None if collate.shapes_repeat else "batches are as long as their longest example (see --pad_to_multiple_of)"
    )
    varies = not run.data.zero_padding
    acceleration = accelerate(
        run, device, model, job.deepspeed, lengths_vary=varies, uneven=uneven, adapters=obstacle_of(run.lora)
    )
    if run.lora.lora:
        quantize_matrices(run.lora, model, device)
        model = _with_adapters(run, model, new_tokens, device, job)
        if resume is None and run.adapters:
            warn_if_other_base(run.adapters, weights_folder(run))
    if job.deepspeed is None:  # DeepSpeed converts the weights itself
        model = model.to(dtype=device.dtype)

    trainer = build_trainer(
        run,
        job,
        model,
        acceleration,
        hooks,
        order=order_manifest(run, data),
        data_settings={"zero_padding": run.data.zero_padding},
        data_table=data_table(data),
        train_dataset=epochs,
        eval_dataset=evaluation_samples(run, data),
        data_collator=collate,
        processing_class=tokenizer,
        schedule=_schedule(run),
        progress=EpochProgress(epochs),
        metrics=ResponseMetrics(continuation(run, data, tokenizer), run.evaluated),
    )
    trainer.add_callback(EndOfTurn(ends))

    metrics = train(run, job, trainer, position_text) if training.do_train else {}
    if training.do_eval and "eval_loss" not in metrics:
        metrics |= evaluate(trainer, "eval")
    finish(run, trainer, metrics)
    hooks.end(trainer)
    if new_tokens and run.lora.lora and training.do_train:
        logger.info(
            "the adapters contain rows for %d added tokens: plain PEFT needs %s before PeftModel.from_pretrained",
            len(new_tokens), resize_call(run.shape.vocab_size),
        )  # fmt: skip
    return metrics


def _position(run: SftRun, data: SftData, resume: Checkpoint | None) -> tuple[Position, str | None]:
    """Where in its epochs the run continues, and that in words; the beginning of an epoch where it is unknown."""
    if resume is None:
        return BEGIN, None
    noted, count = resume.manifest.epoch_position, len(data.train)
    if noted is None:
        epoch = resume.manifest.consumed_samples // max(count, 1)
        return Position(epoch, 0), f"it does not note its position in the epoch: epoch {epoch + 1} starts again"
    position = Position(*noted)
    if position.place and not is_same_order(resume, order_manifest(run, data)):
        return Position(position.epoch, 0), f"data or order have changed: epoch {position.epoch + 1} starts again"
    return position, f"epoch {position.epoch + 1} continues after {position.place:,} of its {count:,} samples"


def _epochs(run: SftRun, data: SftData, done: int, position: Position) -> Epochs:
    """The training data from `position` on; `done` steps are trained."""
    return Epochs(
        data.train,
        sizes=data.sizes,
        filler=NO_TARGETS,
        batch=run.batch.total,
        steps=max(0, run.training.max_steps - done),
        seed=run.order_seed,
        grouped=run.data.group_by_length and not run.data.zero_padding,
        start=position,
    )


def _with_adapters(run: SftRun, model: Any, new_tokens: list[int], device: Device, job: Job) -> Any:
    lora, kind, resume = run.lora, run.lora.kind, job.resume
    set_seed(run.training.seed)  # the same adapters, however the model was filled
    adapted = add_adapters(
        model,
        rank=lora.lora_rank,
        alpha=lora.lora_alpha or 0.0,
        dropout=lora.lora_dropout,
        targets=lora.lora_target_modules,
        base=_base_name(run),
        new_tokens=() if {*kind.modules_to_save} & {"wte"} else new_tokens,  # there all rows are trained
        base_fingerprint=fingerprint_of(Path(weights_folder(run))),
        kind=kind,
        bits=lora.bits,
        initial=resume.path if resume is not None and kind.changes_base else None,
    )
    if job.mesh is not None:
        split_adapters(adapted, job.mesh, ADAPTER, sequence=is_sequence_parallel(run), device=generator_device())
    if run.adapters:
        load_adapters(adapted, run.adapters, job.mesh)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # PEFT makes them float32
            parameter.data = parameter.data.to(device.dtype)
    vocabulary = adapted.config.vocab_size
    sizes = [(_size(name, p, job.mesh, vocabulary), p.requires_grad) for name, p in adapted.named_parameters()]
    trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
    logger.info(
        "adapters: %s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total
    )
    return adapted


def _size(name: str, parameter: Any, mesh: Mesh | None, vocabulary: int) -> int:
    """Elements of the whole parameter."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # those of ZeRO stage 3 are empty
    return prod(full_shape(mesh, name, shape, vocabulary))


def _base_name(run: SftRun) -> str:
    """What plain PEFT finds the model's own weights by: a name of the hub, or a folder."""
    weights = run.source.weights or ""
    return weights if run.source.kind in ("preset", "hub") else str(Path(weights).absolute())


def _schedule(run: SftRun) -> Schedule | StockSchedule:
    """PaddleNLP's fine-tuning decays linearly to lr_decay_ratio; its first update is step 0 of the warm-up."""
    training = run.training
    if (stock := stock_schedule(training)) is not None:
        return stock
    linear = training.lr_scheduler_type == "linear"
    return Schedule(
        kind="polynomial" if linear else training.lr_scheduler_type,
        maximum=training.learning_rate,
        minimum=training.min_learning_rate,
        warmup=training.warmup_steps,
        decay=training.decay_steps or training.max_steps,
        end=training.min_learning_rate if linear else training.lr_end,
        power=1.0 if linear else training.power,
    )


def _check_resume(run: SftRun, found: Checkpoint) -> None:
    """Raises GptlmError if the checkpoint is of another kind of fine-tuning than the command's."""
    has_adapters = (found.path / "adapter_config.json").is_file()
    if has_adapters != run.lora.lora:
        what, other = ("adapters", "--lora") if has_adapters else ("a whole model", "no --lora")
        raise GptlmError(
            f"the checkpoint {found.path} is of {what}; give {other}, another --output_dir, or --overwrite_output_dir"
        )
    if not has_adapters:  # tokens that are added count when the tokenizer is there
        entries = shape_of_config(found.path / "config.json").vocab_size
        check_shape(replace(run, shape=replace(run.shape, vocab_size=entries)), found)
        return
    check_base(found.path, Path(weights_folder(run)))
    check_same_adapters(run.lora, found.path)
