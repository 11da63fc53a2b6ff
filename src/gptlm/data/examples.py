"""Prompts and answers from files in the formats people have them."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlm.data.unicode import ESCAPED, check_record
from gptlm.errors import GptlmError, reason_of

SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "eval", "test")}
SUFFIXES = (".json", ".jsonl", ".parquet")
KNOWN = "src/tgt, source/target, instruction/output, prompt/response, messages, conversations, question/context/answers"
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Turn:
    """What is given and what is to be learnt.

    Attributes:
        prompt: its end is cut where it is too long.
        cue: the end of the prompt that is never cut, such as "### Response:".
        answer: the text to learn.
    """

    prompt: str
    answer: str
    cue: str = ""


Example = list[Turn]
Render = Callable[[list[dict[str, str]]], Example]


@dataclass(frozen=True)
class Examples:
    """What a file holds: its examples, and why records were left out (reason -> how many)."""

    examples: list[Example]
    left_out: Counter


def find_files(path: Path, split: str) -> list[Path]:
    """The files (or saved datasets) of "train" or "dev" in the folder `path`, best first; empty if there is none."""
    names = [f"{stem}{suffix}" for stem in SPLITS[split] for suffix in SUFFIXES]
    found = [path / name for name in names if (path / name).is_file()]
    return found + [path / stem for stem in SPLITS[split] if is_saved_dataset(path / stem)]


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `datasets.Dataset.save_to_disk` wrote."""
    return (path / "state.json").is_file()


def read_examples(records: Iterable[tuple[str, Any]], render: Render) -> Examples:
    """Examples from records of any known form.

    Args:
        records: (place, record), the place for messages.
        render: makes the turns of a conversation.

    Raises:
        GptlmError: naming the place of a record of no known form.
    """
    examples: list[Example] = []
    left_out: Counter = Counter()
    for place, record in records:
        for turns in _turns(record, place, render):
            kept = [turn for turn in turns if turn.answer.strip()]
            if kept:
                examples.append(kept)
            else:
                left_out["without an answer"] += 1
    return Examples(examples, left_out)


def _turns(record: Any, place: str, render: Render) -> Iterator[Example]:
    if not isinstance(record, dict):
        raise GptlmError(f"{place}: expected an object, found {type(record).__name__}")
    if isinstance(record.get("data"), list):  # a SQuAD file
        yield from _squad(record["data"], place)
    elif "messages" in record or "conversations" in record:
        yield render(_messages(record, place))
    elif {"question", "context", "answers"} <= record.keys():
        yield _question(record["question"], record["context"], record["answers"])
    elif {"source", "target", "title"} <= record.keys():  # PaddleNLP's question generation: the title is the answer
        yield _question(record["target"], record["source"], {"text": [record["title"]]})
    else:
        yield _pairs(record, place)


def _pairs(record: dict[str, Any], place: str) -> Example:
    """Forms with one key for prompts and one for answers."""
    if "instruction" in record and "output" in record:
        more = _text(record.get("input") or "", place)
        prompt = f"### Instruction:\n{_text(record['instruction'], place)}"
        prompt += f"\n\n### Input:\n{more}" if more.strip() else ""
        return [Turn(prompt, _text(record["output"], place), "\n\n### Response:\n")]
    for given, wanted in (("src", "tgt"), ("source", "target"), ("prompt", "response"), ("prompt", "completion")):
        if given in record and wanted in record:
            prompts, answers = record[given], record[wanted]
            if isinstance(prompts, str) or isinstance(answers, str):
                prompts, answers = [prompts], [answers]
            if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
                raise GptlmError(f"{place}: {given} and {wanted} are lists of different lengths, or no texts")
            pairs = zip(prompts, answers, strict=True)
            return [Turn(_text(prompt, place), _text(answer, place)) for prompt, answer in pairs]
    raise GptlmError(f"{place}: the keys {', '.join(map(str, record))} are of no known form; expected {KNOWN}")


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
                    yield _question(question["question"], paragraph["context"], answers)
    except (TypeError, KeyError) as error:
        raise GptlmError(f"{place}: no SQuAD file: {error} is missing or of another form") from error


def _question(question: str, context: str, answers: Any) -> Example:
    """Question generation, as in PaddleNLP's finetune_generation.py; empty where there is no answer to ask for."""
    texts = answers.get("text", []) if isinstance(answers, dict) else [answer["text"] for answer in answers]
    if not len(texts):
        return []
    return [Turn(f"answer: {texts[0]} context: {context}", f"question: {question}", "\n")]


def _messages(record: dict[str, Any], place: str) -> list[dict[str, str]]:
    """`{"role", "content"}` each; also from `{"from", "value"}`."""
    messages = []
    for message in record.get("messages") or record.get("conversations") or ():
        try:
            role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        except AttributeError as error:
            raise GptlmError(f"{place}: a message is no object") from error
        messages.append({"role": ROLES.get(role, role), "content": _text(content, place)})
    unknown = {message["role"] for message in messages} - {"system", "user", "assistant"}
    if unknown or not messages:
        raise GptlmError(f"{place}: unknown roles {unknown or 'in an empty conversation'}; expected user and assistant")
    return messages


def plain_conversation(messages: list[dict[str, str]]) -> Example:
    """Turns of a conversation, for tokenizers without a chat template."""
    turns, before = [], ""
    for message in messages:
        if message["role"] == "assistant":
            turns.append(Turn(before, message["content"], "### Assistant:\n"))
            before = ""
        else:
            before += f"### {message['role'].capitalize()}:\n{message['content']}\n\n"
    return turns


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
    else:
        records = iter([(str(path), whole)]) if whole is not None else _lines(text, path)
    if ESCAPED.search(text):
        records = ((place, check_record(record, place)) for place, record in records)
    yield from records


def _whole(text: str) -> Any:
    """The file as one JSON value; None where it is lines."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except ValueError as error:
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
