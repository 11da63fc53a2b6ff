"""Prompts and responses from files, in the record formats of other libraries."""

import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import zstandard

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
from gptlm.data.documents import BATCH_ROWS, Batch, decode_document, read_batches, split_lines
from gptlm.data.templates import RESPONSE_CUE, conversation_of
from gptlm.data.text_files import (
    BOM,
    COMPRESSED,
    check_record,
    decompressed,
    format_of,
    is_dataset,
    parse_line,
    refuse_table,
    size_of,
)
from gptlm.errors import GptlmError, named, reason_of
from gptlm.json_text import parse_json

logger = logging.getLogger(__name__)

SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "eval", "test")}
SUFFIXES = (".json", ".jsonl", ".parquet")
KNOWN = (
    "src/tgt, source/target, instruction/output, prompt/response, prompt/completion, question/answer, messages, "
    "conversations, question/context/answers, text"
)
PAIRS = (
    ("src", "tgt"), ("source", "target"), ("prompt", "response"), ("prompt", "completion"), ("question", "answer"),
)  # fmt: skip
ASSISTANTS = tuple(name for name, role in ROLES.items() if role == "assistant")
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Renderer(Protocol):
    """Makes an example of a conversation."""

    uses_tools: bool
    renders_texts: bool  # prompts and responses that are plain texts, too

    def __call__(self, conversation: Conversation) -> Example: ...


@dataclass(frozen=True)
class Columns:
    """Names of columns that hold prompts and responses, or plain texts; all None: records have a known form."""

    prompt: str | None = None
    response: str | None = None
    text: str | None = None


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
    """What holds "train" or "dev" in the folder `path`, best first; empty if there is nothing.

    Each is a file, a glob of files as the HuggingFace hub names them (train-00000-of-00002.parquet), a saved dataset,
    or a folder of files.
    """
    found: list[Path] = []
    for stem in SPLITS[split]:
        names = [f"{stem}{suffix}{packed}" for suffix in SUFFIXES for packed in ("", *COMPRESSED)]
        found += [path / name for name in names if (path / name).is_file()]
    for stem in SPLITS[split]:
        globs = [f"{stem}-*-of-*{suffix}" for suffix in SUFFIXES]
        found += [path / name for name in globs if any(path.glob(name))]
    folders = [path / stem for stem in SPLITS[split] if (path / stem).is_dir()]
    return found + [folder for folder in folders if is_dataset(folder) or files_in(folder)]


def files_in(folder: Path) -> tuple[Path, ...]:
    """The files with records in a folder, sorted by name."""
    found = (file for file in folder.rglob("*") if (file.is_file() or is_dataset(file)) and not is_dataset(file.parent))
    return tuple(sorted(file for file in found if format_of(file) not in (None, ".txt")))


def read_examples(
    records: Iterable[tuple[str, Any]], render: Renderer, *, questions: bool = False, columns: Columns = Columns()
) -> Examples:
    """Examples from records of any known form, or of the form that `columns` describes.

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
        named_form = _named_columns(record, place, render, columns)
        form = _parse(record, place, render, questions) if named_form is None else named_form
        found.forms[form.name] += 1
        found.ignored.update(key for key, value in record.items() if key not in form.used and value is not None)
        found.ignored.update(f"messages.{key}" for key in form.ignored)
        for example in form.examples:
            if render.renders_texts and isinstance(example, list) and any(turn.prompt for turn in example):
                example = render(conversation_of(example, place))
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
    if {"prompt", "completion"} <= keys and record.get("label") is False:
        raise GptlmError(
            f"{place}: a label of false marks a completion that is not wanted (KTO), which gptlm does not train on; "
            "leave such records out"
        )
    for prompt, response in PAIRS:
        if prompt in keys and response in keys:
            return _pairs(record, prompt, response, place, render)
    if {"chosen", "rejected"} <= keys:
        raise GptlmError(
            f"{place}: chosen and rejected responses are preference data (DPO), which gptlm does not train on; to "
            f"fine-tune on the chosen ones give {named('prompt_column')} prompt {named('response_column')} chosen"
        )
    if isinstance(record.get("text"), str):
        return _plain_text(record, "text", place)
    raise GptlmError(
        f"{place}: the keys {', '.join(map(str, record))} are not a known form; expected {KNOWN}; name other columns "
        f"with {named('prompt_column')} and {named('response_column')}, or with {named('text_column')}"
    )


def _named_columns(record: dict[str, Any], place: str, render: Renderer, columns: Columns) -> _Parsed | None:
    """The record by the columns that the command names; None if it names none."""
    asked = {"prompt_column": columns.prompt, "response_column": columns.response, "text_column": columns.text}
    for flag, column in asked.items():
        if column is not None and column not in record:
            found = ", ".join(map(str, record))
            raise GptlmError(f"{place}: {named(flag)} {column}: there is no such column; there are {found}")
    if columns.text is not None:
        return _plain_text(record, columns.text, place)
    if columns.prompt is not None and columns.response is not None:
        return _pairs(record, columns.prompt, columns.response, place, render)
    return None


def _plain_text(record: dict[str, Any], column: str, place: str) -> _Parsed:
    text = _text(record[column], place)
    return _Parsed(f"{column}, plain text", (column,), [[Turn("", text, in_loss=bool(text.strip()), is_text=True)]])


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
    if not isinstance(history, list | None):
        raise GptlmError(f"{place}: history is {history!r:.40}, not a list of pairs of a prompt and a response")
    for number, pair in enumerate(history or [], start=1):
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
        found.append(Turn(prompt, output, RESPONSE_CUE, tuple(texts), bool(output.strip())))
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


def record_batches(files: Sequence[Path]) -> Iterator[Batch]:
    """The records of .jsonl and .json files (an array, one object, or lines; also .gz, .zst), .parquet, saved datasets.

    Raises:
        GptlmError: with the place of what cannot be read.
    """
    for file in files:
        refuse_table(file)
        kind = format_of(file)
        if kind == ".txt":
            raise GptlmError(f"{file}: plain text has no prompts and responses; give .json, .jsonl or .parquet")
        whole = None if kind in (".parquet", "dataset") else _one_object(file)
        if whole is None:
            yield from _numbered(read_batches([file], keys=None))
            continue
        rows = [] if format_of(file) == ".jsonl" else _table_rows(whole)
        if not rows:
            yield Batch(str(file), [], [whole], False, size_of(file))
            continue
        logger.info("%s is a table by columns (%s): %d examples", file, ", ".join(whole), len(rows))
        for first in range(0, len(rows), BATCH_ROWS):
            part = rows[first : first + BATCH_ROWS]
            share = size_of(file) * len(part) // len(rows)
            yield Batch(str(file), range(first + 1, first + 1 + len(part)), part, False, share)


def _numbered(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches of one file; ranges of lines know the number of their first line, for messages."""
    number = 1
    for batch in batches:
        if isinstance(batch.records, tuple) and not batch.is_array:
            start, stop = batch.records
            batch = replace(batch, numbers=[number], skipped=0)
            with open(batch.file, "rb") as file:
                file.seek(start)
                number += file.read(stop - start).count(b"\n")
        yield batch


def records_of(batch: Batch) -> Iterator[tuple[str, Any]]:
    """(place, record) of each record of `batch`.

    Raises:
        GptlmError: with the place of what is not valid JSON or not valid Unicode.
    """
    is_lines = not isinstance(batch.records, list) and not batch.is_array
    batch = split_lines(batch)
    if not batch.numbers:  # one object
        yield from ((batch.file, check_record(record, batch.file)) for record in batch.records)
        return
    for number, record in zip(batch.numbers, batch.records, strict=True):
        place = f"{batch.file}, {'line' if is_lines else 'record'} {number}"
        if isinstance(record, bytes):
            try:
                value = parse_line(decode_document(record))
            except GptlmError as error:
                raise GptlmError(f"{place}: {error}") from error
            # nothing else in valid UTF-8 can be invalid Unicode
            yield place, check_record(value, place) if ESCAPED_SURROGATE.search(record) else value
        else:
            yield place, check_record(record, place)


def _one_object(file: Path) -> dict[str, Any] | None:
    """The object that is all of a file, such as SQuAD's; None where the file is lines, an array or damaged."""
    try:
        with open(file, "rb") as raw:
            stream = decompressed(raw, file)
            first = next((line for line in stream if line.strip()), b"")
            if first.removeprefix(BOM).lstrip()[:1] != b"{":
                return None
            is_line = isinstance(_as_json(first), dict)
            if is_line and (format_of(file) == ".jsonl" or any(line.strip() for line in stream)):
                return None
            whole = _as_json(first if is_line else first + stream.read())
    except FileNotFoundError as error:
        raise GptlmError(f"cannot read {file}: {reason_of(error)}") from error
    except (OSError, EOFError, zlib.error, zstandard.ZstdError):
        return None  # the reader of lines says what is wrong
    return whole if isinstance(whole, dict) else None


def _as_json(content: bytes) -> Any:
    try:
        return parse_json(content.removeprefix(BOM).decode("utf-8"))
    except ValueError:
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
