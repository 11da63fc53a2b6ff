"""`gptlm.pretrain` and `gptlm.sft`: the commands as functions."""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from gptlm.api.keywords import words_of
from gptlm.api.objects import save_corpus, save_model, save_records, save_tokenizer
from gptlm.api.results import TrainResult
from gptlm.api.running import check_processes, checked_callbacks, choose_gpu, convert_first, running, temporary_folder
from gptlm.commands.plan import with_layout
from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.commands.sft import SFT, parse_sft
from gptlm.compat.auto_convert import with_conversions
from gptlm.config.run import Run
from gptlm.errors import UsageError
from gptlm.ranks import world_size
from gptlm.recipes.common.hooks import Hooks
from gptlm.recipes.common.hub_upload import UploadFailed, uploading
from gptlm.recipes.pretrain.run import pretrain as pretrain_recipe
from gptlm.recipes.sft.run import sft as sft_recipe
from gptlm.training.trainer import GPTTrainer

logger = logging.getLogger(__name__)


def pretrain(
    config: str | PathLike[str] | None = None,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = (),
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    compute_loss_func: Callable[..., Any] | None = None,
    **flags: Any,
) -> TrainResult:
    """`gptlm pretrain`.

    Args:
        config: an argument file or configuration, as the command takes.
        model: training starts from its weights, which stay as they are; the trained model is in the result.
        train_dataset, eval_dataset: in place of `input_dir`: texts, lists of token ids, or records with `text` or
            `input_ids`. After each text comes the end-of-text token. Without `eval_dataset`, `split` divides the
            documents.
        callbacks: instances or classes.
        compute_metrics, preprocess_logits_for_metrics, compute_loss_func: as for transformers.Trainer; labels are the
            targets of the logits at the same positions.
        flags: those of `gptlm pretrain --help`, without dashes.

    Raises:
        UsageError: for a wrong argument.
        GptlmError: for anything else that the caller can correct.
    """
    hooks = _hooks(callbacks, compute_metrics, preprocess_logits_for_metrics, compute_loss_func)
    with temporary_folder() as folder:
        words_of(PRETRAIN, flags, config)  # mistyped keywords are reported before anything is written
        added = _start(flags, model, tokenizer, folder)
        if model is not None:
            added["continue_training"] = True
        if train_dataset is not None or eval_dataset is not None:
            _refuse(flags, "input_dir", "train_dataset")
            if train_dataset is None:
                raise UsageError("eval_dataset needs a train_dataset; input_dir has splits for evaluation")
            name = _tokenizer_of({**flags, **added})
            added["input_dir"], split = save_corpus(train_dataset, eval_dataset, folder, name)
            if split is not None:
                _refuse(flags, "split", "eval_dataset")
                added |= {"split": split, **_evaluating(flags)}
        words = words_of(PRETRAIN, {**flags, **added}, config)
        check_processes()
        words, why = with_conversions(lambda: with_layout(words, os.environ), convert_first)
        run = with_conversions(
            lambda: parse_pretrain(words, os.environ, own_metrics=compute_metrics is not None), convert_first
        )
        if run.launch:
            raise UsageError("the arguments ask for several processes: start the Python script with torchrun")
        return _run(pretrain_recipe, run, hooks, (why,) if why else ())


def sft(
    config: str | PathLike[str] | None = None,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = (),
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    compute_loss_func: Callable[..., Any] | None = None,
    **flags: Any,
) -> TrainResult:
    """`gptlm sft`.

    Args:
        config: an argument file, as the command takes.
        model: training starts from its weights, which stay as they are; the trained model is in the result.
        tokenizer: that of `model`.
        train_dataset, eval_dataset: in place of `dataset_name_or_path` and `eval_dataset_name_or_path`: a list of
            records or a `datasets.Dataset`, in the forms that files may have. An `eval_dataset` is evaluated, unless
            `do_eval` says otherwise.
        callbacks: instances or classes.
        compute_metrics, preprocess_logits_for_metrics, compute_loss_func: as for transformers.Trainer; labels are the
            targets of the logits at the same positions.
        flags: those of `gptlm sft --help`, without dashes.

    Raises:
        UsageError: for a wrong argument.
        GptlmError: for anything else that the caller can correct.
    """
    hooks = _hooks(callbacks, compute_metrics, preprocess_logits_for_metrics, compute_loss_func)
    with temporary_folder() as folder:
        words_of(SFT, flags, config)
        if model is not None and tokenizer is None and not flags.get("tokenizer_name_or_path"):
            raise UsageError("give the tokenizer of the model: tokenizer, or tokenizer_name_or_path")
        if model is not None and (flags.get("lora") or flags.get("lora_path")):
            raise UsageError("adapters name the folder of their model: save it, and give model_name_or_path")
        added = _start(flags, model, tokenizer, folder)
        for name, flag, records in (
            ("train_dataset", "dataset_name_or_path", train_dataset),
            ("eval_dataset", "eval_dataset_name_or_path", eval_dataset),
        ):
            if records is not None:
                _refuse(flags, flag, name)
                added[flag] = save_records(name, records, folder / f"{name}.jsonl")
        if eval_dataset is not None:
            added |= _evaluating(flags)
        words = words_of(SFT, {**flags, **added}, config)
        check_processes()
        run = with_conversions(
            lambda: parse_sft(words, os.environ, own_metrics=compute_metrics is not None), convert_first
        )
        return _run(sft_recipe, run, hooks)


def _hooks(callbacks: Any, metrics: Any, preprocess: Any, loss: Any) -> Hooks:
    functions = {"compute_metrics": metrics, "preprocess_logits_for_metrics": preprocess, "compute_loss_func": loss}
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name} is {type(function).__name__}; expected a function")
    if preprocess is not None and metrics is None:
        raise UsageError("preprocess_logits_for_metrics needs compute_metrics")
    return Hooks(checked_callbacks(callbacks), **functions)


def _start(flags: dict[str, Any], model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """The flags that name the folders of model and tokenizer."""
    added = {}
    if model is not None:
        _refuse(flags, "model_name_or_path", "model")
        added["model_name_or_path"] = save_model(model, folder / "model")
    if tokenizer is not None:
        _refuse(flags, "tokenizer_name_or_path", "tokenizer")
        added["tokenizer_name_or_path"] = save_tokenizer(tokenizer, folder / ("model" if model else "tokenizer"))
    return added


def _refuse(flags: dict[str, Any], flag: str, name: str) -> None:
    if flags.get(flag) is not None:
        raise UsageError(f"{flag} and {name} are given; give one")


def _evaluating(flags: dict[str, Any]) -> dict[str, bool]:
    """do_train and do_eval, where the caller decides neither: data for evaluation are there to be evaluated."""
    chosen = any(flags.get(name) is not None for name in ("do_train", "do_eval", "do_predict"))
    return {} if chosen else {"do_train": True, "do_eval": True}


def _tokenizer_of(flags: dict[str, Any]) -> str | None:
    """Folder or name of the tokenizer that `flags` give."""
    name = flags.get("tokenizer_name_or_path") or flags.get("model_name_or_path")
    return None if name is None else str(name)


def _run(recipe: Callable[..., dict[str, float]], run: Any, hooks: Hooks, notes: tuple[str, ...] = ()) -> TrainResult:
    """Run `recipe`; the result has model and trainer only in a run of one process, where nothing else holds them."""
    run = replace(run, notes=(*run.notes, *notes))
    _check_parallel(run, hooks)
    choose_gpu(run.training.device)
    found: list[GPTTrainer] = []
    keeps = world_size() == 1
    failed = None
    try:
        with running(run.typed), uploading(run, hooks) as hooks:
            metrics = recipe(run, replace(hooks, finished=found.append if keeps else None))
    except UploadFailed as error:  # after the training, whose result is not lost
        failed = str(error)
        logger.error("%s", failed)
    trainer = found[0] if keeps else None
    if trainer is not None:
        trainer.model.eval()
    tokenizer: Any = trainer.processing_class if trainer else None
    return TrainResult(
        metrics=metrics,
        output_dir=Path(run.training.output_dir or ""),
        history=tuple(trainer.state.log_history) if trainer else (),
        model=trainer.model if trainer else None,
        tokenizer=tokenizer,
        trainer=trainer,
        upload_error=failed,
    )


def _check_parallel(run: Run, hooks: Hooks) -> None:
    """Raises UsageError for functions of logits where no process has all of them."""
    given = [name for name, function in hooks.of_trainer.items() if function is not None]
    if given and run.dims.is_model_parallel:
        raise UsageError(f"{given[0]} needs whole logits, tensor and pipeline parallelism split them; leave one out")
