"""Rows of fine-tuning from records: parsed, rendered and encoded in worker processes, written to an Arrow file."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gptlm.data.bare_tokenizer import BareTokenizer
from gptlm.data.conversations import Chat, PlainHeadings, first_text, written_texts
from gptlm.data.documents import Batch
from gptlm.data.encoder import special_tokens
from gptlm.data.examples import Columns, Renderer, read_examples, records_of
from gptlm.data.rows import Encoder, Lengths, PaddleEncoder, text_encoder
from gptlm.data.stored_rows import SCHEMA, to_arrow
from gptlm.data.workers import Workers
from gptlm.errors import GptlmError
from gptlm.json_text import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2  # of the files; other ones are built again


@dataclass(frozen=True)
class RowSettings:
    """Everything that makes rows of records.

    Attributes:
        tokenizer: in worker processes a `BareTokenizer` where there is no chat template.
        vocab_size: ids that the model has a row for.
        questions, columns: see `read_examples`.
        renders_texts: prompts and responses are rendered in the chat template, not only messages.
    """

    tokenizer: "PreTrainedTokenizerBase"
    lengths: Lengths
    vocab_size: int
    train_on_prompt: bool = False
    truncation_side: str = "left"
    allow_special_tokens: bool = False
    paddle_compat: bool = False
    questions: bool = False
    columns: Columns = Columns()
    renders_texts: bool = False

    def key(self) -> dict[str, Any]:
        """What rows depend on besides the records, for the name of a cache entry."""
        template = str(self.tokenizer.chat_template or "")
        backend = parse_json(self.tokenizer.backend_tokenizer.to_str())
        content = [
            type(self.tokenizer).__name__,
            backend | {"truncation": None, "padding": None},  # encoding switches both off
            template,
            sorted((name, str(token)) for name, token in self.tokenizer.special_tokens_map.items()),
        ]
        others = ("tokenizer", "lengths", "columns")
        settings = {name: value for name, value in vars(self).items() if name not in others}
        return settings | {
            "format": FORMAT,
            "lengths": asdict(self.lengths),
            "columns": asdict(self.columns),
            "tokenizer": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "tokenizers": version("tokenizers"),
            "transformers": version("transformers"),
            "date": time.strftime("%Y-%m-%d") if "strftime_now" in template else "",  # the template writes it
        }


@dataclass
class Facts:
    """What was seen in records.

    Attributes:
        forms, ignored, skipped: as in `Examples`.
        ends: id that ends the turns of a conversation, -1 for none -> number of conversations.
        open_ends: conversations in which the end of a turn is no target.
        first_surplus: the first example with an id that the model lacks: (its number, from 0, the id, its text).
    """

    forms: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    open_ends: int = 0
    first_surplus: tuple[int, int, str] | None = None

    def add(self, other: "Facts") -> None:
        for name in ("forms", "ignored", "skipped", "ends"):
            getattr(self, name).update(getattr(other, name))
        self.open_ends += other.open_ends

    def as_json(self) -> dict[str, Any]:
        names = ("forms", "ignored", "skipped")
        return {name: dict(getattr(self, name)) for name in names} | {
            "ends": [[*pair] for pair in self.ends.items()],
            "open_ends": self.open_ends,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Facts":
        forms, ignored, skipped = (Counter(found[name]) for name in ("forms", "ignored", "skipped"))
        return cls(forms, ignored, skipped, Counter(dict(found["ends"])), found["open_ends"])


@dataclass(frozen=True)
class Built:
    """The rows of a batch, what was seen in it, and how many bytes it is of its file."""

    rows: pa.RecordBatch
    facts: Facts
    read: int


class RowBuilder:
    """Makes rows of a batch of records. Worker processes get the settings, and of the tokenizer only what they need."""

    def __init__(self, settings: RowSettings):
        self.settings = settings
        tokenizer = settings.tokenizer
        self.render = _renderer(tokenizer, settings.renders_texts)
        self.encoder = _encoder(settings)
        looks = not settings.allow_special_tokens and not settings.paddle_compat
        self.pattern = special_tokens(tokenizer) if looks else None

    def __reduce__(self) -> tuple:
        tokenizer = self.settings.tokenizer
        bare: Any = tokenizer if tokenizer.chat_template else BareTokenizer.of(tokenizer)
        return RowBuilder, (replace(self.settings, tokenizer=bare),)

    def __call__(self, batch: Batch) -> Built:
        settings = self.settings
        found = read_examples(records_of(batch), self.render, questions=settings.questions, columns=settings.columns)
        facts = Facts(found.forms, found.ignored, found.skipped)
        chats = [example for example in found.examples if isinstance(example, Chat)]
        facts.ends.update(-1 if chat.end_id is None else chat.end_id for chat in chats)
        facts.open_ends = sum(not chat.end_in_loss for chat in chats)
        rows = self.encoder.rows(found.examples)
        special: list[str | None] = []
        for number, (row, example) in enumerate(zip(rows, found.examples, strict=True)):
            match = self.pattern.search("\0".join(written_texts(example))) if self.pattern else None
            special.append(match.group() if match else None)
            highest = int(row.ids.max(initial=0))
            if facts.first_surplus is None and highest >= self.settings.vocab_size:
                facts.first_surplus = number, highest, first_text(example)
        return Built(to_arrow(rows, special), facts, batch.read)


def _renderer(tokenizer: "PreTrainedTokenizerBase", renders_texts: bool) -> Renderer:
    if not tokenizer.chat_template:
        return PlainHeadings()
    from gptlm.data.chat_template import ChatTemplate  # imports transformers

    return ChatTemplate(tokenizer, renders_texts)


def _encoder(settings: RowSettings) -> Encoder | PaddleEncoder:
    tokenizer = settings.tokenizer
    eos_id, prompt = int(tokenizer.eos_token_id), settings.train_on_prompt  # type: ignore[arg-type]
    if not settings.paddle_compat:
        encode = text_encoder(tokenizer, settings.allow_special_tokens)
        return Encoder(encode, eos_id, settings.lengths, prompt, settings.truncation_side)

    def encode_plain(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []  # type: ignore[return-value]

    return PaddleEncoder(encode_plain, eos_id, settings.lengths, prompt, str(tokenizer.eos_token))


def build_rows(
    batches: Iterable[Batch],
    settings: RowSettings,
    path: Path,
    *,
    name: str,
    workers: int,
    on_progress: Callable[[int, int], None],
) -> Facts:
    """Write the rows of all `batches` in order into `path`.

    Args:
        name: of the data, for messages.
        workers: processes; 1: this one.
        on_progress: gets the bytes read and the examples encoded so far.

    Raises:
        GptlmError: for records that cannot be read, and ids that the model lacks.
        OSError: if the file cannot be written.
    """
    builder, facts, done, examples = RowBuilder(settings), Facts(), 0, 0
    with (
        open(path, "wb") as file,
        pa.ipc.new_stream(file, SCHEMA) as writer,
        closing(_results(batches, builder, workers)) as results,
    ):
        for built in results:
            if built.facts.first_surplus is not None:
                raise _surplus(name, examples, built.facts.first_surplus, settings)
            if built.rows.num_rows:
                writer.write_batch(built.rows)
            facts.add(built.facts)
            done, examples = done + built.read, examples + built.rows.num_rows
            on_progress(done, examples)
    return facts


def _results(batches: Iterable[Batch], builder: RowBuilder, workers: int) -> Generator[Built, None, None]:
    if workers == 1:
        return (builder(batch) for batch in batches)
    pool: Workers[Batch, Built] = Workers(workers, builder)
    return pool.map(batches)


def _surplus(name: str, before: int, found: tuple[int, int, str], settings: RowSettings) -> GptlmError:
    number, highest, text = found
    return GptlmError(
        f"{name}, example {before + number + 1} (prompt {text[:40]!r}): the tokenizer gives id {highest} "
        f"({settings.tokenizer.convert_ids_to_tokens(highest)!r}), the model's vocabulary has {settings.vocab_size} "
        "entries; give the model's own tokenizer"
    )
