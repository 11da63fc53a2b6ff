"""The prompts of a command: given on the command line, in a file, or on standard input."""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlm.config.args.inference import DEFAULT_PROMPTS, STDIN, PredictArguments
from gptlm.data.conversations import Conversation, parse_conversation
from gptlm.data.text_files import check_text, decode, parse_array, read_text
from gptlm.errors import GptlmError
from gptlm.json_text import parse_json

logger = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt", "src", "text")


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and where it was given, for messages.

    Attributes:
        text: of a conversation, its messages as JSON.
        conversation: the messages, if it is not a plain text.
    """

    place: str
    text: str
    conversation: Conversation | None = None


def read_prompts(arguments: PredictArguments) -> list[Prompt]:
    """All prompts in order.

    Raises:
        GptlmError: if the file cannot be read or has no prompts, or a prompt is not valid Unicode.
    """
    found = None
    if arguments.input_file == STDIN:
        found = _from_stdin()
    elif arguments.input_file is not None:
        found = _from_file(Path(arguments.input_file))
    if found is None:
        texts = arguments.prompt or DEFAULT_PROMPTS
        found = [Prompt(f"--prompt, text {number}", text) for number, text in enumerate(texts, start=1)]
    for prompt in found:
        check_text(prompt.text, prompt.place)
    return found


def _from_stdin() -> list[Prompt] | None:
    """One prompt per line, or JSON lines if every line is a record as in a .jsonl; None if there is no input."""
    logger.info("reading prompts from standard input (--prompt and --input_file give others)")
    content = sys.stdin.buffer.read() if sys.stdin else b""  # None: standard input is closed
    lines = _lines(decode(content, "standard input"), "standard input")
    if not lines:
        logger.warning("standard input is empty: the built-in prompts are continued")
        return None
    records = [(line.place, _parsed(line.text)) for line in lines]
    if any(_text_of(record) is None and not _is_chat(record) for _, record in records):
        return lines
    logger.info("standard input is read as JSON lines, a text under %s each, or messages", " or ".join(PROMPT_KEYS))
    return _prompts_of(records)


def _from_file(path: Path) -> list[Prompt]:
    """One prompt per line of text, per JSON line of a .jsonl, or per item of the array in a .json."""
    text = read_text(path, f"the prompts in {path}")
    lines = _lines(text, str(path))
    if not lines:
        raise GptlmError(f"{path} holds no prompts; expected one per line")
    if path.suffix not in (".json", ".jsonl"):
        return lines
    if path.suffix == ".jsonl" or not text.lstrip().startswith("["):
        return _prompts_of([(line.place, _parsed(line.text)) for line in lines])
    items = parse_array(text, str(path))
    if not items:
        raise GptlmError(f"{path} holds no prompts; expected texts, or records with one")
    return _prompts_of([(f"{path}, item {number}", item) for number, item in enumerate(items, start=1)])


def _lines(text: str, place: str) -> list[Prompt]:
    """The lines that are not blank."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [Prompt(f"{place}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _parsed(line: str) -> Any:
    """The JSON value in `line`; None if it is none."""
    try:
        return parse_json(line)
    except ValueError:
        return None


def _text_of(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    return next((record[key] for key in PROMPT_KEYS if isinstance(record.get(key), str)), None)


def _is_chat(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("messages"), list)


def _prompts_of(records: list[tuple[str, Any]]) -> list[Prompt]:
    """The prompts in pairs of (place, record)."""
    prompts = []
    for place, record in records:
        text = _text_of(record)
        if text is None and _is_chat(record):
            messages = record["messages"]
            conversation = parse_conversation(messages, place, system=record.get("system"), tools=record.get("tools"))
            prompts.append(Prompt(place, json.dumps(messages, ensure_ascii=False), conversation))
            continue
        if text is None:
            keys = " or ".join(PROMPT_KEYS)
            raise GptlmError(f"{place}: expected an object with a text under {keys}, or with messages")
        prompts.append(Prompt(place, text))
    return prompts
