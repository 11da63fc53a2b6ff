"""Continue prompts with a trained model: prompts -> model -> texts."""

import json
import logging
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from gptlm.config.tools import DEFAULT_PROMPTS, PredictArguments
from gptlm.errors import GptlmError
from gptlm.inference.generation import Sampling, continue_prompts
from gptlm.inference.loading import load_for_inference
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.hub import hub_folder
from gptlm.model.presets import PRESETS
from gptlm.recipes.machine import choose_machine, use_device
from gptlm.training.logging import start_logging

logger = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt", "src", "text")


def predict(arguments: PredictArguments, notes: tuple[str, ...] = ()) -> list[str]:
    """Run it; prints each continuation and returns them.

    Raises:
        GptlmError: if prompts, weights or tokenizer cannot be read.
    """
    start_logging(speaks=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for note in notes:
        logger.info("%s", note)
    prompts = _prompts(arguments)
    if arguments.output_file:
        _make_room(Path(arguments.output_file))
    machine = choose_machine(arguments.device, fp16=False, bf16=False, level="O1")
    use_device(machine)
    model, tokenizer = _load(arguments, torch.device(machine.device))
    stop_at_eol = arguments.stop_at_eol
    torch.manual_seed(arguments.seed)
    texts = continue_prompts(
        model,
        tokenizer,
        prompts,
        batch_size=arguments.batch_size,
        max_prompt_tokens=arguments.src_length,
        max_new_tokens=arguments.tgt_length,
        sampling=Sampling(arguments.do_sample, arguments.top_k, arguments.top_p, arguments.temperature),
        stop_at_eol=prompts == list(DEFAULT_PROMPTS) if stop_at_eol is None else stop_at_eol,
    )
    results = []
    for text in texts:
        print(text, flush=True)
        results.append(text)
    if arguments.output_file:
        _write(Path(arguments.output_file), prompts, results)
    return results


def _prompts(arguments: PredictArguments) -> list[str]:
    if arguments.prompt:
        return list(arguments.prompt)
    if arguments.input_file is None:
        return list(DEFAULT_PROMPTS)
    path = Path(arguments.input_file)
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except OSError as error:
        raise GptlmError(f"cannot read the prompts in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GptlmError(f"{path} is not UTF-8 (byte {error.start}); convert it with iconv") from error
    if path.suffix == ".jsonl":
        lines = [_prompt_of(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1)]
    if not lines:
        raise GptlmError(f"{path} holds no prompts; expected one per line")
    return lines


def _prompt_of(line: str, place: str) -> str:
    try:
        record = json.loads(line)
        return next(record[key] for key in PROMPT_KEYS if isinstance(record.get(key), str))
    except (ValueError, StopIteration, AttributeError) as error:
        raise GptlmError(f"{place}: expected an object with a text under {' or '.join(PROMPT_KEYS)}") from error


def _load(arguments: PredictArguments, device: torch.device) -> tuple[GPTLMHeadModel, PreTrainedTokenizerBase]:
    name = arguments.model_name_or_path
    if Path(name).is_dir():
        return load_for_inference(name, device)
    preset = PRESETS.get(name)
    if preset is None:
        raise GptlmError(f"model_name_or_path {name!r} is neither a folder nor a built-in name")
    if preset.hub_id is None:
        raise GptlmError(f"no weights were ever published for {name}, it is a size only; give a trained folder")
    return load_for_inference(hub_folder(preset.hub_id, weights=True), device)


def _make_room(path: Path) -> None:
    """Find out before the work that the results could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise GptlmError(f"cannot write {path}: {error.strerror}") from error


def _write(path: Path, prompts: list[str], results: list[str]) -> None:
    rows = zip(prompts, results, strict=True)
    lines = [json.dumps({"prompt": prompt, "continuation": text}, ensure_ascii=False) for prompt, text in rows]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise GptlmError(f"cannot write {path}: {error.strerror}") from error
    logger.info("%d continuations written to %s", len(results), path)
