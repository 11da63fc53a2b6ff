"""Prompts and answers from files in the formats people have them."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gptlm.data.messages import ROLES, Conversation, PlainHeadings, conversation
from gptlm.data.turns import Chat, Content, Example, Turn
from gptlm.data.unicode import ESCAPED, check_record
from gptlm.errors import GptlmError, reason_of

logger = logging.getLogger(__name__)

SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "eval", "test")}
SUFFIXES = (".json", ".jsonl", ".parquet")
KNOWN = "src/tgt, source/target, instruction/output, prompt/response, messages, conversations, question/context/answers"
PAIRS = (("src", "tgt"), ("source", "target"), ("prompt", "response"), ("prompt", "completion"))
ASSISTANTS = tuple(name for name, role in ROLES.items() if role == "assistant")


class Renderer(Protocol):
    """Makes an example of a conversation."""

    uses_tools: bool

    def __call__(self, talk: Conversation) -> Example: ...


@dataclass(frozen=True)
class Examples:
    """What a file holds.

    Attributes:
        left_out: why records are no examples -> how many.
        forms: how records were read -> how many.
        ignored: keys that are not used -> in how many records.
    """

    examples: list[Example]
    left_out: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)


def find_files(path: Path, split: str) -> list[Path]:
    """The files (or saved datasets) of "train" or "dev" in the folder `path`, best first; empty if there is none."""
    names = [f"{stem}{suffix}" for stem in SPLITS[split] for suffix in SUFFIXES]
    found = [path / name for name in names if (path / name).is_file()]
    return found + [path / stem for stem in SPLITS[split] if is_saved_dataset(path / stem)]


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `datasets.Dataset.save_to_disk` wrote."""
    return (path / "state.json").is_file()


def read_examples(records: Iterable[tuple[str, Any]], render: Renderer, *, questions: bool = False) -> Examples:
    """Examples from records of any known form.

    Args:
        records: (place, record), the place for messages.
        render: makes examples of conversations.
        questions: records with source, target and title ask for the question (PaddleNLP's question generation).

    Raises:
        GptlmError: naming the place of a record of no known form.
    """
    found = Examples([])
    for place, record in records:
        if not isinstance(record, dict):
            raise GptlmError(f"{place}: expected an object, found {type(record).__name__}")
        form = _form(record, place, render, questions)
        found.forms[form.name] += 1
        found.ignored.update(key for key, value in record.items() if key not in form.used and value is not None)
        found.ignored.update(f"messages.{key}" for key in form.ignored)
        for example in form.examples:
            if isinstance(example, Chat):
                learnt = any(answer.learnt for answer in example.answers)
            else:
                learnt = any(turn.learnt for turn in example)
            if learnt:
                found.examples.append(example)
            else:
                found.left_out["without an answer"] += 1
    return found


@dataclass(frozen=True)
class _Form:
    """How a record is read.

    Attributes:
        used: its keys that are.
        ignored: keys of its messages that are not.
    """

    name: str
    used: tuple[str, ...]
    examples: Iterable[Example]
    ignored: frozenset[str] = frozenset()


def _form(record: dict[str, Any], place: str, render: Renderer, questions: bool) -> _Form:
    keys = record.keys()
    if isinstance(record.get("data"), list):
        return _Form("SQuAD articles, question generation", ("data", "version"), _squad(record["data"], place))
    if "messages" in keys or "conversations" in keys:
        return _conversation(record, place, render)
    if {"question", "context", "answers"} <= keys:
        example = _question(record["question"], record["context"], record["answers"], place)
        name = "question/context/answers, question generation"
        return _Form(name, ("question", "context", "answers"), [example])
    if questions and {"source", "target", "title"} <= keys:
        example = _question(record["target"], record["source"], {"text": [record["title"]]}, place)
        return _Form("source/title/target, question generation", ("source", "target", "title"), [example])
    if "instruction" in keys and "output" in keys:
        used = ("instruction", "input", "output", "system", "history")
        return _Form("instruction/input/output", used, [_alpaca(record, place)])
    for given, wanted in PAIRS:
        if given in keys and wanted in keys:
            return _pairs(record, given, wanted, place, render)
    raise GptlmError(f"{place}: the keys {', '.join(map(str, record))} are of no known form; expected {KNOWN}")


def _conversation(record: dict[str, Any], place: str, render: Renderer) -> _Form:
    name = "messages" if record.get("messages") or "conversations" not in record else "conversations"
    talk = conversation(record[name], place, system=record.get("system"), tools=record.get("tools"))
    first = record[name][0]
    own_system = first.get("role", first.get("from")) == "system"
    used = (name, *(() if own_system else ("system",)), *(("tools",) if render.uses_tools else ()))
    more = {key for message in talk.messages for key in message} - {"role", "content"}
    ignored = frozenset(more) if isinstance(render, PlainHeadings) else frozenset()
    return _Form(name, used, [render(talk)], ignored)


def _alpaca(record: dict[str, Any], place: str) -> list[Turn]:
    """One turn, after those of `history`, as LLaMA-Factory reads it: answers in it are targets, too."""
    turns = []
    history = record.get("history")
    for number, pair in enumerate([] if history is None else history, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise GptlmError(f"{place}: history {number} is no pair of a prompt and an answer")
        turns.append((_text(pair[0], place), "", _text(pair[1], place)))
    turns.append((_text(record["instruction"], place), _text(record.get("input") or "", place), ""))
    turns[-1] = (*turns[-1][:2], _text(record["output"], place))
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


def _pairs(record: dict[str, Any], given: str, wanted: str, place: str, render: Renderer) -> _Form:
    """A prompt and an answer; lists of them are the turns of one conversation (PaddleNLP), or messages (TRL)."""
    prompts, answers, name = record[given], record[wanted], f"{given}/{wanted}"
    if _messages(prompts) and _messages(answers):
        context = [message | {"weight": 0} if _speaks(message) else message for message in prompts]
        talk = conversation(context + answers, place, tools=record.get("tools"))
        used = (given, wanted, *(("tools",) if render.uses_tools else ()))
        return _Form(f"{name} of messages", used, [render(talk)])
    if isinstance(prompts, str) or isinstance(answers, str):
        prompts, answers = [prompts], [answers]
    elif isinstance(prompts, list):
        name += " of several turns"
    if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
        raise GptlmError(f"{place}: {given} and {wanted} are lists of different lengths, or no texts")
    pairs = [(_text(prompt, place), _text(answer, place)) for prompt, answer in zip(prompts, answers, strict=True)]
    turns = [Turn(prompt, answer, learnt=bool(answer.strip())) for prompt, answer in pairs]
    return _Form(name, (given, wanted), [turns])


def _messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _speaks(message: dict[str, Any]) -> bool:
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
        raise GptlmError(f"{place}: no SQuAD file: {error} is missing or of another form") from error


def _question(question: Any, context: Any, answers: Any, place: str) -> Example:
    """Question generation, as in PaddleNLP's finetune_generation.py; empty where there is no answer to ask for."""
    try:
        texts = answers.get("text", []) if isinstance(answers, dict) else [answer["text"] for answer in answers]
    except (TypeError, KeyError) as error:
        raise GptlmError(f"{place}: answers have no text; expected {{'text': [...]}}") from error
    if not len(texts):
        return []
    before = f"answer: {_text(texts[0], place)} context: "
    prompt = before + _text(context, place)
    wanted = f"question: {_text(question, place)}"
    return [Turn(prompt, wanted, "\n", (Content(len(before), len(prompt)),))]


# Files ------------------------------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, record) of a .jsonl or .json file (an array, one object, or lines), a .parquet file, or a saved dataset.

    Raises:
        GptlmError: saying what cannot be read, and where.
    """
    if path.suffix == ".parquet" or path.is_dir():
        yield from _dataset(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise GptlmError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GptlmError(f"{path} is not UTF-8 (byte {error.start}); convert it with iconv") from error
    whole = _whole(text)
    records: Iterator[tuple[str, Any]]
    if isinstance(whole, list):
        records = ((f"{path}, record {number}", record) for number, record in enumerate(whole, start=1))
    elif isinstance(whole, dict) and path.suffix != ".jsonl" and (rows := _table(whole)):
        logger.info("%s is a table by columns (%s): %d examples", path, ", ".join(whole), len(rows))
        records = ((f"{path}, row {number}", row) for number, row in enumerate(rows))
    elif whole is not None:
        records = iter([(f"{path}, line 1" if path.suffix == ".jsonl" else str(path), whole)])
    else:
        records = _lines(text, path)
    if ESCAPED.search(text):
        records = ((place, check_record(record, place)) for place, record in records)
    yield from records


def _whole(text: str) -> Any:
    """The file as one JSON value; None where it is lines."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _table(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an object that has a list of values (or an object of them by row, pandas' form) for each column.

    Empty for a single record: lists of messages and SQuAD's articles are none.
    """
    if any(_messages(whole.get(key)) for key in ("messages", "conversations", "data", "prompt")):
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


def _lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise GptlmError(f"{path}, line {number}: no valid JSON ({error})") from error


def _dataset(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        rows = (
            datasets.Dataset.from_parquet(str(path))
            if path.suffix == ".parquet"
            else datasets.load_from_disk(str(path))
        )
    except Exception as error:  # datasets, pyarrow and OSError
        raise GptlmError(f"{path} cannot be read as a dataset: {reason_of(error)}") from error
    yield from ((f"{path}, row {number}", dict(row)) for number, row in enumerate(rows))
