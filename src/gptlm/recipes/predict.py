"""Continue prompts with a trained model: prompts -> model -> texts."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.config.args.predict import DEFAULT_PROMPTS, PredictArguments
from gptlm.disk import write_failure
from gptlm.errors import GptlmError, doing
from gptlm.inference.generation import (
    Sampling,
    Stream,
    check_rows,
    continue_apart,
    continue_rows,
    encode_prompts,
    text_of,
)
from gptlm.inference.loading import load_for_inference
from gptlm.model.adapter_files import base_and_adapters, base_hint
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.hub import model_folder
from gptlm.quiet import quiet_transformers
from gptlm.recipes.common.device import choose_machine, use_device
from gptlm.recipes.common.prompts import read_prompts
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)


def predict(arguments: PredictArguments, notes: tuple[str, ...] = ()) -> list[str]:
    """Run it; prints each continuation and returns them.

    Raises:
        GptlmError: if prompts, weights, adapters or tokenizer cannot be read.
    """
    log_to(sys.stderr, notes)  # continuations alone go to stdout
    prompts = read_prompts(arguments)
    texts = [prompt.text for prompt in prompts]
    names = [prompt.place for prompt in prompts]
    if arguments.output_file:
        _make_room(Path(arguments.output_file))
    model, tokenizer = load(arguments)
    rows = encode_prompts(
        tokenizer,
        texts,
        arguments.src_length,
        names,
        truncation_side=arguments.truncation_side,
        allow_special_tokens=arguments.allow_special_tokens,
    )
    settings = _settings(arguments, texts)
    check_rows(rows, model.config.n_positions, model.config.vocab_size, arguments.tgt_length, names)
    with doing("generating"):
        results = _results(model, tokenizer, rows, arguments, settings)
    if arguments.output_file:
        copies = [text for text in texts for _ in range(arguments.num_return_sequences)]
        _write(Path(arguments.output_file), copies, results)
    return results


def _results(
    model: GPTLMHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    arguments: PredictArguments,
    settings: dict[str, Any],
) -> list[str]:
    """The continuations, which are printed as they come."""
    next(continue_rows(model, tokenizer, [[rows[0][0]]], batch_size=1, max_new_tokens=1))  # the slow first call
    torch.manual_seed(arguments.seed)
    alone = arguments.batch_size == arguments.num_beams == arguments.num_return_sequences == 1
    if alone and sys.stdout.isatty():
        found = _streamed(model, tokenizer, rows, settings)
    else:
        found = _printed(tokenizer, continue_apart(model, tokenizer, rows, batch_size=arguments.batch_size, **settings))
    return _timed(found)


def log_to(stream: TextIO, notes: Sequence[str]) -> None:
    """Start our own log on stdout or stderr with `notes` in it; transformers keeps silent."""
    start_logging(main_process=True, to_stderr=stream is sys.stderr)
    quiet_transformers()
    for note in notes:
        logger.info("%s", note)


def load(arguments: PredictArguments) -> tuple[GPTLMHeadModel, PreTrainedTokenizerBase]:
    """The model on its device, with its adapters, in its precision; and the tokenizer.

    Raises:
        GptlmError: if something cannot be found or read.
    """
    name, adapters = base_and_adapters(arguments.model_name_or_path, arguments.lora_path)
    folder = model_folder(name, base_hint(adapters))
    machine = choose_machine(arguments.device, fp16=arguments.fp16, bf16=arguments.bf16, level="O2")
    use_device(machine)
    return load_for_inference(folder, torch.device(machine.device), dtype=machine.dtype, lora_path=adapters)


def sampling_of(arguments: PredictArguments) -> Sampling:
    """What the flags say of choosing tokens."""
    return Sampling(
        do_sample=arguments.do_sample,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        temperature=arguments.temperature,
        repetition_penalty=arguments.repetition_penalty,
        min_new_tokens=arguments.min_new_tokens,
        num_beams=arguments.num_beams,
        length_penalty=arguments.length_penalty,
        early_stopping=arguments.early_stopping,
        num_return_sequences=arguments.num_return_sequences,
    )


def _settings(arguments: PredictArguments, prompts: list[str]) -> dict[str, Any]:
    asked = arguments.stop_at_eol
    return {
        "max_new_tokens": arguments.tgt_length,
        "sampling": sampling_of(arguments),
        "stop_at_eol": prompts == list(DEFAULT_PROMPTS) if asked is None else asked,
    }


def _printed(tokenizer: PreTrainedTokenizerBase, rows: Iterator[list[int]]) -> Iterator[tuple[str, int]]:
    """Text and number of tokens of each continuation, which is printed."""
    for ids in rows:
        text = text_of(tokenizer, ids)
        print(text, flush=True)
        yield text, len(ids)


def _streamed(
    model: GPTLMHeadModel, tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], settings: dict[str, Any]
) -> Iterator[tuple[str, int]]:
    """As `_printed`, on a terminal: each piece as it comes."""
    for row in rows:
        stream, pieces = Stream(model, tokenizer, row, **settings), []
        for piece in stream:
            print(piece, end="", flush=True)
            pieces.append(piece)
        print(flush=True)
        yield "".join(pieces), len(stream.ids)


def _timed(found: Iterator[tuple[str, int]]) -> list[str]:
    started, results, count = time.perf_counter(), [], 0
    for text, tokens in found:
        results.append(text)
        count += tokens
    seconds = time.perf_counter() - started
    logger.info("%d tokens in %.2f s: %.1f tokens/s, without loading", count, seconds, count / max(seconds, 1e-9))
    return results


def _make_room(path: Path) -> None:
    """Find out before the work that the results could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise GptlmError(f"cannot write {path}: {write_failure(error, path)}") from error


def _write(path: Path, prompts: list[str], results: list[str]) -> None:
    rows = zip(prompts, results, strict=True)
    lines = [json.dumps({"prompt": prompt, "continuation": text}, ensure_ascii=False) for prompt, text in rows]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise GptlmError(f"cannot write {path}: {write_failure(error, path)}") from error
    logger.info("%d continuations written to %s", len(results), path)
