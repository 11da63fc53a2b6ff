"""Prompts and responses from files, in the record formats of other libraries."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gptlm.data.conversations import (
    ROLES,
    Content,
    Conversation,
    Example,
    PlainHeadings,
    Turn,
    has_targets,
    parse_conversation,
)
from gptlm.data.documents import read_batches
from gptlm.data.text_files import check_record, format_of, is_dataset, parse_line, read_text
from gptlm.errors import GptlmError

logger = logging.getLogger(__name__)

SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "eval", "test")}
SUFFIXES = (".json", ".jsonl", ".parquet")
KNOWN = "src/tgt, source/target, instruction/output, prompt/response, messages, conversations, question/context/answers"
PAIRS = (("src", "tgt"), ("source", "target"), ("prompt", "response"), ("prompt", "completion"))
ASSISTANTS = tuple(name for name, role in ROLES.items() if role == "assistant")
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Renderer(Protocol):
    """Makes an example of a conversation."""

    uses_tools: bool

    def __call__(self, conversation: Conversation) -> Example: ...


@dataclass(frozen=True)
class Examples:
    """The examples of a file.

    Attributes:
        skipped: reason -> number of records that are not examples.
        forms: record format -> number of records.
        ignored: key that is not used -> number of records that have it.
    """

    examples: list[Example]
    skipped: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)


def find_files(path: Path, split: str) -> list[Path]:
    """The files (or saved datasets) of "train" or "dev" in the folder `path`, best first; empty if there is none."""
    names = [f"{stem}{suffix}" for stem in SPLITS[split] for suffix in SUFFIXES]
    found = [path / name for name in names if (path / name).is_file()]
    return found + [path / stem for stem in SPLITS[split] if is_dataset(path / stem)]


def read_examples(records: Iterable[tuple[str, Any]], render: Renderer, *, questions: bool = False) -> Examples:
    """Examples from records of any known form.

    Args:
        records: (place, record), the place for messages.
        render: makes examples of conversations.
        questions: records with source, target and title ask for the question (PaddleNLP's question generation).

    Raises:
        GptlmError: with the place of a record of unknown form.
    """
    found = Examples([])
    for place, record in records:
        if not isinstance(record, dict):
            raise GptlmError(f"{place}: expected an object, found {type(record).__name__}")
        form = _parse(record, place, render, questions)
        found.forms[form.name] += 1
        found.ignored.update(key for key, value in record.items() if key not in form.used and value is not None)
        found.ignored.update(f"messages.{key}" for key in form.ignored)
        for example in form.examples:
            if has_targets(example):
                found.examples.append(example)
            else:
                found.skipped["without a response"] += 1
    return found


@dataclass(frozen=True)
class _Parsed:
    """A record as examples: its form, its keys that are used, and keys of its messages that are not."""

    name: str
    used: tuple[str, ...]
    examples: Iterable[Example]
    ignored: frozenset[str] = frozenset()


def _parse(record: dict[str, Any], place: str, render: Renderer, questions: bool) -> _Parsed:
    keys = record.keys()
    if isinstance(record.get("data"), list):
        return _Parsed("SQuAD articles, question generation", ("data", "version"), _squad(record["data"], place))
    if "messages" in keys or "conversations" in keys:
        return _conversation(record, place, render)
    if {"question", "context", "answers"} <= keys:
        example = _question(record["question"], record["context"], record["answers"], place)
        name = "question/context/answers, question generation"
        return _Parsed(name, ("question", "context", "answers"), [example])
    if questions and {"source", "target", "title"} <= keys:
        example = _question(record["target"], record["source"], {"text": [record["title"]]}, place)
        return _Parsed("source/title/target, question generation", ("source", "target", "title"), [example])
    if "instruction" in keys and "output" in keys:
        used = ("instruction", "input", "output", "system", "history")
        return _Parsed("instruction/input/output", used, [_alpaca(record, place)])
    for prompt, response in PAIRS:
        if prompt in keys and response in keys:
            return _pairs(record, prompt, response, place, render)
    raise GptlmError(f"{place}: the keys {', '.join(map(str, record))} are not a known form; expected {KNOWN}")


def _conversation(record: dict[str, Any], place: str, render: Renderer) -> _Parsed:
    name = "messages" if record.get("messages") or "conversations" not in record else "conversations"
    conversation = parse_conversation(record[name], place, system=record.get("system"), tools=record.get("tools"))
    first = record[name][0]
    own_system = first.get("role", first.get("from")) == "system"
    used = (name, *(() if own_system else ("system",)), *(("tools",) if render.uses_tools else ()))
    more = {key for message in conversation.messages for key in message} - {"role", "content"}
    ignored = frozenset(more) if isinstance(render, PlainHeadings) else frozenset()
    return _Parsed(name, used, [render(conversation)], ignored)


def _alpaca(record: dict[str, Any], place: str) -> list[Turn]:
    """One turn, after those of `history`, as LLaMA-Factory reads it: responses in it are targets, too."""
    turns = []
    history = record.get("history")
    for number, pair in enumerate([] if history is None else history, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise GptlmError(f"{place}: history {number} is not a pair of a prompt and a response")
        turns.append((_text(pair[0], place), "", _text(pair[1], place)))
    last = record["instruction"], record.get("input") or "", record["output"]
    turns.append((_text(last[0], place), _text(last[1], place), _text(last[2], place)))
    system = _text(record.get("system") or "", place)
    found = []
    for number, (instruction, more, output) in enumerate(turns):
        prompt, texts = "", list[Content]()
        pieces = [("", system, "system")] if system and number == 0 else []
        pieces.append(("### Instruction:\n", instruction, "user"))
        pieces += [("### Input:\n", more, "user")] if more.strip() else []
        for heading, text, role in pieces:
            prompt += ("\n\n" if prompt else "") + heading
            texts.append(Content(len(prompt), len(prompt) + len(text), role))
            prompt += text
        found.append(Turn(prompt, output, "\n\n### Response:\n", tuple(texts), bool(output.strip())))
    return found


def _pairs(record: dict[str, Any], prompt_key: str, response_key: str, place: str, render: Renderer) -> _Parsed:
    """A prompt and a response; lists of them are the turns of one conversation (PaddleNLP), or messages (TRL)."""
    prompts, responses, name = record[prompt_key], record[response_key], f"{prompt_key}/{response_key}"
    if is_messages(prompts) and is_messages(responses):
        context = [message | {"weight": 0} if _is_from_assistant(message) else message for message in prompts]
        conversation = parse_conversation(context + responses, place, tools=record.get("tools"))
        used = (prompt_key, response_key, *(("tools",) if render.uses_tools else ()))
        return _Parsed(f"{name} of messages", used, [render(conversation)])
    if isinstance(prompts, str) or isinstance(responses, str):
        prompts, responses = [prompts], [responses]
    elif isinstance(prompts, list):
        name += " of several turns"
    if not isinstance(prompts, list) or not isinstance(responses, list) or len(prompts) != len(responses):
        raise GptlmError(f"{place}: {prompt_key} and {response_key} are lists of different lengths, or not texts")
    pairs = [(_text(prompt, place), _text(text, place)) for prompt, text in zip(prompts, responses, strict=True)]
    turns = [Turn(prompt, response, in_loss=bool(response.strip())) for prompt, response in pairs]
    return _Parsed(name, (prompt_key, response_key), [turns])


def _is_from_assistant(message: dict[str, Any]) -> bool:
    return message.get("role", message.get("from")) in ("assistant", *ASSISTANTS)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise GptlmError(f"{place}: expected a text, found {type(value).__name__}")
    return value


def _squad(articles: list[Any], place: str) -> Iterator[Example]:
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = {"text": [answer["text"] for answer in question.get("answers", [])]}
                    yield _question(question["question"], paragraph["context"], answers, place)
    except (TypeError, KeyError) as error:
        raise GptlmError(f"{place}: not a SQuAD file: {error} is missing or has another form") from error


def _question(question: Any, context: Any, answers: Any, place: str) -> Example:
    """Question generation, as in PaddleNLP's finetune_generation.py; empty where there is no answer."""
    try:
        texts = answers.get("text", []) if isinstance(answers, dict) else [answer["text"] for answer in answers]
    except (TypeError, KeyError) as error:
        raise GptlmError(f"{place}: answers have no text; expected {{'text': [...]}}") from error
    if not len(texts):
        return []
    answer = f"answer: {_text(texts[0], place)} context: "
    prompt = answer + _text(context, place)
    response = f"question: {_text(question, place)}"
    return [Turn(prompt, response, "\n", (Content(len(answer), len(prompt)),))]


# Files ------------------------------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, record) of a .jsonl or .json file (an array, one object, or lines), a .parquet file, or a saved dataset.

    Raises:
        GptlmError: with the place of what cannot be read.
    """
    if format_of(path) in (".parquet", "dataset"):
        for batch in read_batches([path], keys=None):
            yield from ((f"{path}, record {number}", row) for number, row in zip(batch.numbers, batch.records))
        return
    text = read_text(path)
    whole = _as_json(text)
    records: Iterable[tuple[str, Any]]
    if isinstance(whole, list):
        records = ((f"{path}, record {number}", record) for number, record in enumerate(whole, start=1))
    elif isinstance(whole, dict) and path.suffix != ".jsonl" and (rows := _table_rows(whole)):
        logger.info("%s is a table by columns (%s): %d examples", path, ", ".join(whole), len(rows))
        records = ((f"{path}, record {number}", row) for number, row in enumerate(rows, start=1))
    elif whole is not None:
        records = [(f"{path}, line 1" if path.suffix == ".jsonl" else str(path), whole)]
    else:
        records = _json_lines(text, path)
    check = ESCAPED_SURROGATE.search(text) is not None  # nothing else in valid UTF-8 can be invalid Unicode
    yield from ((place, check_record(record, place) if check else record) for place, record in records)


def _json_lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, parse_line(line)
            except GptlmError as error:
                raise GptlmError(f"{place}: {error}") from error


def _as_json(text: str) -> Any:
    """The file as one JSON value; None where it is lines."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _table_rows(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an object that has for each column a list of values (or an object of them by row, pandas' form).

    Empty for a single record, such as one with lists of messages or SQuAD's articles.
    """
    if any(is_messages(whole.get(key)) for key in ("messages", "conversations", "data", "prompt")):
        return []
    columns: dict[str, list[Any]] = {}
    index = next((values.keys() for values in whole.values() if isinstance(values, dict)), None)
    for key, values in whole.items():
        if isinstance(values, dict) and values.keys() == index:
            values = list(values.values())
        if not isinstance(values, list):
            return []
        columns[key] = values
    if len({len(values) for values in columns.values()}) != 1:
        return []
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def is_messages(value: Any) -> bool:
    """Whether `value` is a list of objects, such as the messages of a conversation."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
