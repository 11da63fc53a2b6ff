"""`gptlm.load`, `gptlm.generate` and `gptlm.evaluate`."""

import json
from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gptlm.api.keywords import words_of
from gptlm.api.objects import save_model, save_records, save_tokenizer
from gptlm.api.results import Evaluation, Generation, Loaded
from gptlm.api.running import check_processes, choose_gpu, convert_first, temporary_folder
from gptlm.commands.evaluate import EVALUATE, parse_evaluate
from gptlm.commands.predict import PREDICT, parse_predict
from gptlm.compat.auto_convert import with_conversions
from gptlm.config.args.inference import PredictArguments
from gptlm.data.conversations import parse_conversation
from gptlm.data.text_files import check_text
from gptlm.errors import UsageError, doing
from gptlm.inference.generation import check_rows, continue_rows, numbered, text_of
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.ranks import world_size
from gptlm.recipes.common.prompts import Prompt
from gptlm.recipes.evaluate import evaluate as evaluate_recipe
from gptlm.recipes.predict import load as load_for_predict
from gptlm.recipes.predict import log_to, prompt_rows, sampling_of, uses_graph

Messages = list[dict[str, Any]]
Model = str | PathLike[str] | PreTrainedModel | PeftModel
NOT_HERE = ("prompt", "input_file", "output_file", "overwrite", "serve", "host", "port")  # of a command, not a function


def load(path: str | PathLike[str], **flags: Any) -> Loaded:
    """The model in a folder, with its tokenizer, in evaluation mode on its device.

    Args:
        path: a model folder, a folder of adapters (which names its model), or a built-in name.
        flags: `lora_path`, `device`, `bf16`, `fp16`, as `gptlm predict` has them.

    Raises:
        GptlmError: if something cannot be found or read.
    """
    known = ("lora_path", "device", "bf16", "fp16")
    if unknown := [name for name in flags if name not in known]:
        raise UsageError(f"{unknown[0]} is not an argument of load; it takes {', '.join(known)}")
    arguments, notes = _predict_arguments(path, flags)
    log_to(notes)
    return Loaded(*load_for_predict(arguments))


def generate(
    model: Model,
    prompts: str | Messages | Iterable[str | Messages],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **flags: Any,
) -> list[Generation]:
    """Continue prompts, without printing them.

    Args:
        model: a folder or built-in name, or a model of this package from `load` or a training.
        prompts: one or several; messages, {"role": ..., "content": ...}, are rendered in the chat template.
        tokenizer: that of a `model` object.
        flags: those of `gptlm predict --help`, without dashes: `tgt_length`, `batch_size`, `do_sample`, `seed`, ...

    Returns:
        One for each prompt, in order; with `num_return_sequences` as many for each.

    Raises:
        UsageError: for a wrong argument.
        GptlmError: for a prompt without tokens or that is too long, or if the model cannot be read.
    """
    given = _list_of(prompts)
    if unused := next((name for name in NOT_HERE if name in flags), None):
        raise UsageError(f"{unused} is for the command; prompts go to the function, and it returns what it generates")
    if flags.get("tensor_parallel_degree") is not None:
        raise UsageError("tensor_parallel_degree is for the command, gptlm predict: its processes answer together")
    is_path = isinstance(model, (str, PathLike))
    arguments, notes = _predict_arguments(model if is_path else "model", flags)
    log_to(notes)
    if not given:
        return []
    names = numbered(len(given))
    asked = [_prompt_of(one, name) for one, name in zip(given, names, strict=True)]
    network, used = load_for_predict(arguments) if is_path else _given(model, tokenizer)
    rows = prompt_rows(arguments, used, asked)
    check_rows(rows, network.config.n_positions, network.config.vocab_size, arguments.tgt_length, names)
    torch.manual_seed(arguments.seed)
    was_training = network.training
    try:
        # the cache grows with each token, for code compiled in training every step were a new shape
        with doing("generating"), torch.compiler.set_stance("force_eager"):
            found = continue_rows(
                network.eval(),
                used,
                rows,
                batch_size=arguments.batch_size,
                max_new_tokens=arguments.tgt_length,
                sampling=sampling_of(arguments),
                stop_at_eol=bool(arguments.stop_at_eol),
                graph=uses_graph(arguments, network),
            )
            new = list(found)
    finally:
        network.train(was_training)
    owners = [prompt for prompt in given for _ in range(arguments.num_return_sequences)]
    return [Generation(prompt, text_of(used, ids), ids) for prompt, ids in zip(owners, new, strict=True)]


def _list_of(prompts: str | Messages | Iterable[str | Messages]) -> list[str | Messages]:
    """One prompt for each continuation. Raises UsageError."""
    if isinstance(prompts, str):
        return [prompts]
    found: list[Any] = list(prompts)
    if found and all(isinstance(one, dict) for one in found):
        return [found]
    for one in found:
        if not isinstance(one, (str, list)):
            raise UsageError(f"prompts hold {type(one).__name__}; expected texts, or lists of messages")
    return found


def _prompt_of(given: str | Messages, name: str) -> Prompt:
    """Raises GptlmError for a text that is not valid Unicode, and for messages of another form."""
    if isinstance(given, str):
        check_text(given, name)
        return Prompt(name, given)
    text = json.dumps(given, ensure_ascii=False, default=str)
    check_text(text, name)
    return Prompt(name, text, parse_conversation(given, name))


def evaluate(
    model: Model,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    texts: Iterable[str] | None = None,
    **flags: Any,
) -> Evaluation:
    """`gptlm evaluate`.

    Args:
        model: a folder, adapter folder or built-in name, or a model object.
        tokenizer: that of a `model` object.
        texts: documents, in place of `eval_path`; the task is TEXT unless `task` names another.
        flags: those of `gptlm evaluate --help`, without dashes: `task`, `eval_path`, `batch_size`, ...

    Raises:
        UsageError: for a wrong argument.
        GptlmError: if data, weights or tokenizer cannot be read or do not fit each other.
    """
    with temporary_folder() as folder:
        added: dict[str, Any] = {"model_name_or_path": model}
        if not isinstance(model, (str, PathLike)):
            whole = model.get_base_model() if isinstance(model, PeftModel) else model
            if whole is not model:
                raise UsageError("model has adapters; give the folder that holds them, or model.merge_and_unload()")
            if tokenizer is None:
                raise UsageError("give the tokenizer of the model")
            added["model_name_or_path"] = save_model(whole, folder / "model")
            save_tokenizer(tokenizer, folder / "model")
        if texts is not None:
            if flags.get("eval_path") is not None:
                raise UsageError("eval_path and texts are given; give one")
            lines = [{"text": text} for text in ([texts] if isinstance(texts, str) else texts)]
            added |= {"eval_path": save_records("texts", lines, folder / "texts.jsonl"), "task": "TEXT"}
        words = words_of(EVALUATE, {**added, **flags})
        check_processes()
        arguments, notes = with_conversions(lambda: parse_evaluate(words, world_size()), convert_first)
        choose_gpu(arguments.device)
        report = evaluate_recipe(arguments, notes)
    return Evaluation(
        task=str(report["task"]),
        loss=report.get("loss"),
        ppl=report.get("ppl"),
        accuracy=report.get("accuracy_strict"),
        report=dict(report),
    )


def _predict_arguments(model: Any, flags: dict[str, Any]) -> tuple[PredictArguments, tuple[str, ...]]:
    words = words_of(PREDICT, {**flags, "model_name_or_path": model})
    arguments, notes = with_conversions(lambda: parse_predict(words), convert_first)
    choose_gpu(arguments.device)
    return arguments, notes


def _given(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """Raises UsageError for a model of another class, or without a tokenizer."""
    network = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(network, GPTLMHeadModel):
        kind = type(network).__name__
        raise UsageError(f"model is {kind}; give its folder, or a model of gptlm.load, which reads GPT-2 folders")
    if tokenizer is None:
        raise UsageError("give the tokenizer of the model")
    return model, tokenizer
