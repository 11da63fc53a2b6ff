"""The prompts of a command: given on the command line, in a file, or on standard input."""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlm.config.args.inference import DEFAULT_PROMPTS, STDIN, PredictArguments
from gptlm.data.text_files import check_text, decode, parse_array, read_text
from gptlm.errors import GptlmError

logger = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt", "src", "text")


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and where it was given, for messages."""

    place: str
    text: str


def read_prompts(arguments: PredictArguments) -> list[Prompt]:
    """All prompts in order.

    Raises:
        GptlmError: if the file cannot be read, holds none, or one is no valid Unicode.
    """
    found = _from_stdin() if arguments.input_file == STDIN else None
    if found is None and arguments.input_file not in (None, STDIN):
        found = _from_file(Path(arguments.input_file or ""))
    if found is None:
        given = arguments.prompt or DEFAULT_PROMPTS
        found = [Prompt(f"--prompt, text {number}", text) for number, text in enumerate(given, start=1)]
    for prompt in found:
        check_text(prompt.text, prompt.place)
    return found


def _from_stdin() -> list[Prompt] | None:
    """One prompt per line, or JSON lines as in a .jsonl if every line is such a record; None if there is nothing."""
    logger.info("reading prompts from standard input (--prompt and --input_file give others)")
    content = sys.stdin.buffer.read() if sys.stdin else b""  # None: it is closed
    lines = _lines(decode(content, "standard input"), "standard input")
    if not lines:
        logger.warning("standard input is empty: the built-in prompts are continued")
        return None
    records = [_record(line.text) for line in lines]
    if all(_text_of(record) is not None for record in records):
        logger.info("standard input is read as JSON lines, a text under %s each", " or ".join(PROMPT_KEYS))
        return [_prompt_of(line) for line in lines]
    return lines


def _from_file(path: Path) -> list[Prompt]:
    """One prompt per line of text, or of JSON in a .jsonl; or per item of the array in a .json."""
    text = read_text(path, f"the prompts in {path}")
    lines = _lines(text, str(path))
    if not lines:
        raise GptlmError(f"{path} holds no prompts; expected one per line")
    if path.suffix == ".json" and lines[0].text.lstrip().startswith("["):
        return _from_array(text, str(path))
    return [_prompt_of(line) for line in lines] if path.suffix in (".json", ".jsonl") else lines


def _from_array(text: str, place: str) -> list[Prompt]:
    items = parse_array(text, place)
    if not items:
        raise GptlmError(f"{place} holds no prompts; expected texts, or records with one")
    return [_prompt(item, f"{place}, item {number}") for number, item in enumerate(items, start=1)]


def _lines(text: str, place: str) -> list[Prompt]:
    """The lines that are not blank."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [Prompt(f"{place}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt_of(line: Prompt) -> Prompt:
    return _prompt(_record(line.text), line.place)


def _prompt(record: Any, place: str) -> Prompt:
    text = _text_of(record)
    if text is None:
        raise GptlmError(f"{place}: expected an object with a text under {' or '.join(PROMPT_KEYS)}")
    return Prompt(place, text)


def _record(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _text_of(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    return next((record[key] for key in PROMPT_KEYS if isinstance(record.get(key), str)), None)
