"""The prompts of a command: given on the command line, in a file, or on standard input."""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlm.config.generation import DEFAULT_PROMPTS, STDIN, PredictArguments
from gptlm.data.unicode import check_text
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
    lines = _lines(sys.stdin.buffer.read(), "standard input")
    if not lines:
        logger.warning("standard input is empty: the built-in prompts are continued")
        return None
    records = [_record(line.text) for line in lines]
    if all(_text_of(record) is not None for record in records):
        logger.info("standard input is read as JSON lines, a text under %s each", " or ".join(PROMPT_KEYS))
        return [_prompt_of(line) for line in lines]
    return lines


def _from_file(path: Path) -> list[Prompt]:
    """One prompt per line of text, or of JSON in a .jsonl."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GptlmError(f"cannot read the prompts in {path}: {error.strerror}") from error
    lines = _lines(content, str(path))
    if not lines:
        raise GptlmError(f"{path} holds no prompts; expected one per line")
    return [_prompt_of(line) for line in lines] if path.suffix == ".jsonl" else lines


def _lines(content: bytes, place: str) -> list[Prompt]:
    """The lines that are not blank."""
    try:
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise GptlmError(f"{place} is not UTF-8 (byte {error.start}); convert it with iconv") from error
    return [Prompt(f"{place}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt_of(line: Prompt) -> Prompt:
    text = _text_of(_record(line.text))
    if text is None:
        raise GptlmError(f"{line.place}: expected an object with a text under {' or '.join(PROMPT_KEYS)}")
    return Prompt(line.place, text)


def _record(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _text_of(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    return next((record[key] for key in PROMPT_KEYS if isinstance(record.get(key), str)), None)
