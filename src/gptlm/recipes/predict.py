"""Continue prompts with a trained model: prompts -> model -> texts."""

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.config.args.inference import DEFAULT_PROMPTS, STDIN, PredictArguments
from gptlm.disk import write_failure
from gptlm.errors import GptlmError, doing
from gptlm.inference.chat import ChatPrompts
from gptlm.inference.generation import Stream, batch_decoder, check_rows, continue_rows, encode_prompts, text_of
from gptlm.inference.loading import find_model, load_for_inference
from gptlm.inference.sampling import Sampling
from gptlm.model.adapter_files import base_and_adapters
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.templates import use_eos
from gptlm.parallel.process_groups import Mesh
from gptlm.quiet import quiet_transformers
from gptlm.ranks import is_main_process
from gptlm.recipes.common.command_results import Maker, check_files, maker, new_file
from gptlm.recipes.common.device import (
    Device,
    choose_device,
    close_process_group,
    own_device,
    tensor_groups,
    use_device,
)
from gptlm.recipes.common.main_process_first import told_by_main
from gptlm.recipes.common.peers import Peers, find_peers
from gptlm.recipes.common.prompts import Prompt, read_prompts
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)


def predict(arguments: PredictArguments, notes: tuple[str, ...] = ()) -> list[str]:
    """Print the continuation of each prompt; returns all of them.

    Raises:
        GptlmError: if prompts, weights, adapters or tokenizer cannot be read.
    """
    log_to(notes, stderr=True)  # stdout has the continuations and nothing else, so that it can be piped
    splits = arguments.tensor_parallel_degree > 1
    with find_peers(arguments.ddp_timeout) if splits else nullcontext() as peers, close_process_group(peers):
        return _predict(arguments, peers)


def _predict(arguments: PredictArguments, peers: Peers | None) -> list[str]:
    """The main process reads prompts and writes results; the others only run their part of the model."""
    device, degree = device_of(arguments), arguments.tensor_parallel_degree
    mesh = tensor_groups(degree, own_device(device.type), peers) if degree > 1 else None
    found: list[Prompt] = []  # on the main process
    output = Path(arguments.output_file) if arguments.output_file else None

    def read() -> None:
        found.extend(read_prompts(arguments))
        if output:
            check_files("output_file", [output], _maker(arguments, found))
            _check_writable(output)

    told_by_main(peers, "the prompts", read)
    model, tokenizer = load(arguments, device, mesh)

    def encode() -> str:
        rows, names = prompt_rows(arguments, tokenizer, found), [prompt.place for prompt in found]
        check_rows(rows, model.config.n_positions, model.config.vocab_size, arguments.tgt_length, names)
        built_in = [prompt.text for prompt in found] == list(DEFAULT_PROMPTS)
        single = arguments.batch_size == arguments.num_beams == arguments.num_return_sequences == 1
        return json.dumps([rows, built_in, single and sys.stdout.isatty()])

    rows, built_in, streamed = json.loads(told_by_main(peers, "the prompts' token ids", encode) or "")
    settings: dict[str, Any] = {
        "batch_size": arguments.batch_size,
        "max_new_tokens": arguments.tgt_length,
        "sampling": sampling_of(arguments),
        # the answers to PaddleNLP's two questions end with the line
        "stop_at_eol": built_in if arguments.stop_at_eol is None else arguments.stop_at_eol,
    }
    graph, slots = uses_graph(arguments, model), arguments.batch_size * arguments.num_return_sequences
    if arguments.num_beams == 1:
        decoder = batch_decoder(model, tokenizer, rows, arguments.tgt_length, slots=slots, graph=graph)
        settings["decoder"] = decoder
    with doing("generating"):
        # The first call is slow (kernels are chosen, loaded and captured); it is not part of the measured speed.
        first = [rows[0][:2]] * min(arguments.batch_size, len(rows))
        list(continue_rows(model, tokenizer, first, **settings | {"max_new_tokens": 1}))
        torch.manual_seed(arguments.seed)  # processes that split a model draw the same numbers
        texts = _timed(_printed(model, tokenizer, rows, settings, streamed))
    if output and is_main_process():
        repeated = [prompt for prompt in found for _ in range(arguments.num_return_sequences)]
        _write(output, repeated, texts, _maker(arguments, found))
    return texts


def prompt_rows(
    arguments: PredictArguments, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]
) -> list[list[int]]:
    """The ids of each prompt, at most `src_length`; conversations are rendered in the chat template."""
    plain = [prompt for prompt in prompts if prompt.conversation is None]
    found = iter(
        encode_prompts(
            tokenizer,
            [prompt.text for prompt in plain],
            arguments.src_length,
            [prompt.place for prompt in plain],
            truncation_side=arguments.truncation_side,
            allow_special_tokens=arguments.allow_special_tokens,
        )
    )
    if len(plain) == len(prompts):
        return list(found)
    chats = ChatPrompts(tokenizer, arguments.chat_template, allow_special_tokens=arguments.allow_special_tokens)
    longest, side = arguments.src_length, arguments.truncation_side
    return [next(found) if one.conversation is None else chats(one.conversation, longest, side) for one in prompts]


def _maker(arguments: PredictArguments, prompts: list[Prompt]) -> Maker:
    """The command with its prompts, wherever they come from, and the files that it reads."""
    names = base_and_adapters(arguments.model_name_or_path, arguments.lora_path)
    inputs = (arguments.input_file if arguments.input_file != STDIN else None, *names)
    read = [Path(name) for name in inputs if name]
    given = asdict(arguments) | {"prompt": [prompt.text for prompt in prompts]}
    return maker("predict", given, read, overwrite=arguments.overwrite)


def log_to(notes: Sequence[str], *, stderr: bool = False) -> None:
    """Start the log of the package, with `notes` as its first lines, and silence transformers'."""
    start_logging(main_process=is_main_process(), to_stderr=stderr)
    quiet_transformers()
    for note in notes:
        logger.info("%s", note)


def device_of(arguments: PredictArguments) -> Device:
    """The device and precision that are available; a fallback is logged as a warning."""
    device = choose_device(arguments.device, fp16=arguments.fp16, bf16=arguments.bf16, level="O2")
    use_device(device)
    return device


def load(
    arguments: PredictArguments, device: Device | None = None, mesh: Mesh | None = None
) -> tuple[GPTLMHeadModel, PreTrainedTokenizerBase]:
    """The model with its adapters, on its device and in its precision; and the tokenizer.

    Args:
        device: from `device_of`, if it has been called.
        mesh: splits the layers over processes.

    Raises:
        GptlmError: if something cannot be found or read.
    """
    folder, adapters = find_model(arguments.model_name_or_path, arguments.lora_path)
    device = device or device_of(arguments)
    place = torch.device(device.type) if mesh is None else own_device(device.type)
    model, tokenizer = load_for_inference(folder, place, dtype=device.dtype, lora_path=adapters, mesh=mesh)
    use_eos(tokenizer, arguments.eos_token)
    return model, tokenizer


def uses_graph(arguments: PredictArguments, model: GPTLMHeadModel) -> bool:
    """Whether each step is replayed as a CUDA graph, as --cuda_graphs asks; unset, wherever that is possible."""
    obstacle = "there is no GPU" if model.device.type != "cuda" else None
    if arguments.num_beams > 1:
        obstacle = "transformers makes beam search"
    if obstacle is None and arguments.tensor_parallel_degree > 1:
        obstacle = "each step has collective operations (tensor_parallel_degree)"
    if obstacle is None and arguments.cuda_graphs is not False:
        logger.info("each step is replayed as a CUDA graph (--cuda_graphs 0 switches this off)")
        return True
    if obstacle is not None and arguments.cuda_graphs:
        logger.warning("--cuda_graphs has no effect: %s", obstacle)
    return False


def sampling_of(arguments: PredictArguments) -> Sampling:
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


def _printed(
    model: GPTLMHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    settings: dict[str, Any],
    streamed: bool,
) -> Iterator[tuple[str, int]]:
    """Yield each continuation with its number of tokens. The main process prints it, `streamed` token by token."""

    def show(text: str = "", end: str = "\n") -> None:
        if is_main_process():
            print(text, end=end, flush=True)

    if not streamed:
        for ids in continue_rows(model, tokenizer, rows, **settings):
            text = text_of(tokenizer, ids)
            show(text)
            yield text, len(ids)
        return
    names = ("max_new_tokens", "sampling", "stop_at_eol")
    for row in rows:
        stream = Stream(settings["decoder"], tokenizer, row, **{name: settings[name] for name in names})
        pieces = []
        for piece in stream:
            show(piece, end="")
            pieces.append(piece)
        show()
        yield "".join(pieces), len(stream.ids)


def _timed(found: Iterator[tuple[str, int]]) -> list[str]:
    """All texts; the log gets the number of tokens per second."""
    started, texts, tokens = time.perf_counter(), [], 0
    for text, count in found:
        texts.append(text)
        tokens += count
    seconds = time.perf_counter() - started
    logger.info("%d tokens in %.2f s: %.1f tokens/s, without loading", tokens, seconds, tokens / max(seconds, 1e-9))
    return texts


def _check_writable(path: Path) -> None:
    """Raises GptlmError, before the model is loaded, if the results cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise GptlmError(f"cannot write {path}: {write_failure(error, path)}") from error


def _write(path: Path, prompts: list[Prompt], texts: list[str], by: Maker) -> None:
    given = [{"prompt": p.text} if p.conversation is None else {"messages": p.conversation.messages} for p in prompts]
    rows = zip(given, texts, strict=True)
    lines = [json.dumps(prompt | {"continuation": text}, ensure_ascii=False) for prompt, text in rows]
    try:
        content = "\n".join(lines) + "\n"
        if path.exists() and not path.is_file():  # a pipe, a terminal
            path.write_text(content, encoding="utf-8")
        else:
            with new_file(path, by) as file:
                file.write(content.encode())
    except OSError as error:
        raise GptlmError(f"cannot write {path}: {write_failure(error, path)}") from error
    logger.info("%d continuations written to %s", len(texts), path)
