"""Texts to token files: encode in parallel, keep the order, keep memory flat."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from gptlm.data.corpus import good_texts_of, texts_of
from gptlm.data.encoder import TextEncoder
from gptlm.data.readers import BATCH_BYTES, Batch, split_lines
from gptlm.data.sentences import Splitter, sentence_splitter
from gptlm.data.workers import Workers, one_thread
from gptlm.data.writer import IndexedTokensWriter

STEP = 1 << 22  # bytes of a large document between reports
REASONS_KEPT = 10  # bad documents named at the end


@dataclass(frozen=True)
class EncodeSettings:
    """How a document becomes ids.

    Attributes:
        tokenizer_file: a tokenizer.json.
        keys: JSON keys to encode, each into its own corpus.
        eos_id: id appended to every document that does not end with it, or None.
        strip: remove white space at both ends of a text (PaddleNLP does, Megatron does not).
        allow_special_tokens: let a text that spells a special token, such as <|endoftext|>, become its id.
        skip_bad: leave out documents that cannot be read instead of stopping.
        backend: what encodes, see `TextEncoder`.
        sentences: encode sentence by sentence: the language, see `sentence_splitter`; None encodes whole documents.
        keep_newlines: sentences keep the white space behind them.
        level: what is a sequence of the token files, "document" or "sentence".
    """

    tokenizer_file: str
    keys: tuple[str, ...]
    eos_id: int | None
    strip: bool
    allow_special_tokens: bool
    skip_bad: bool = False
    backend: str = "tokenizers"
    sentences: str | None = None
    keep_newlines: bool = False
    level: str = "document"


@dataclass(frozen=True)
class Sequences:
    """Encoded texts of some documents; documents without any token are left out.

    Attributes:
        ids: all sequences back to back, int32.
        lengths: tokens of each sequence.
        documents: sequences of each document.
    """

    ids: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray


@dataclass(frozen=True)
class Encoded:
    """One encoded batch: the sequences of each key, documents read and what is wrong with the bad ones, bytes read."""

    sequences: tuple[Sequences, ...]
    documents: int
    bad: list[str]
    read: int


@dataclass(frozen=True)
class Part:
    """How much of a batch that is not finished is encoded, in bytes of its file."""

    done: int
    size: int


Report = Callable[[Part], None]


@dataclass
class Progress:
    """Totals so far: documents read, without text, left out as bad (and why, the first few), bytes, seconds."""

    documents: int = 0
    bad: int = 0
    reasons: list[str] = field(default_factory=list)
    empty: int = 0
    read: int = 0
    seconds: float = 0.0


def encode(settings: EncodeSettings, batch: Batch, report: Report = lambda part: None) -> Encoded:
    """Encode one batch; runs in a worker process. `report` is told now and then how far a large one is."""
    documents, bad = good_texts_of(batch, settings.keys) if settings.skip_bad else (texts_of(batch, settings.keys), [])
    found = []
    characters = sum(len(text) for texts in documents for text in texts)
    steps = _Steps(batch.read, characters, report)
    for key in range(len(settings.keys)):
        texts = [texts[key].strip() if settings.strip else texts[key] for texts in documents]
        found.append(_sequences(settings, texts, steps.add))
    return Encoded(tuple(found), len(documents), bad, batch.read)


class _Steps:
    """Turns characters that are encoded into `Part`s, one per `STEP` bytes of a batch larger than that."""

    def __init__(self, size: int, characters: int, report: Report):
        self._size, self._characters, self._report = size, max(1, characters), report
        self._done, self._said = 0, 0

    def add(self, characters: int) -> None:
        self._done += characters
        done = min(self._size, self._size * self._done // self._characters)
        if self._size > STEP and done - self._said >= STEP:
            self._said = done
            self._report(Part(done, self._size))


def _sequences(settings: EncodeSettings, texts: list[str], report: Callable[[int], None]) -> Sequences:
    split = _splitter(settings.sentences, settings.keep_newlines)
    parts = [split(text) for text in texts]
    encoder = _encoder(settings.tokenizer_file, settings.backend, settings.allow_special_tokens)
    ids, lengths = encoder([part for document in parts for part in document], report)
    owner = np.repeat(np.arange(len(parts)), [len(document) for document in parts])  # the document of each part
    owner, lengths = owner[lengths > 0], lengths[lengths > 0]
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    if settings.eos_id is not None and len(owner):
        lasts = np.append(firsts[1:], len(owner)) - 1
        ends = np.cumsum(lengths)[lasts]
        if settings.allow_special_tokens:  # a text may write the end-of-text id itself
            lacking = ids[ends - 1] != settings.eos_id
            lasts, ends = lasts[lacking], ends[lacking]
        ids = np.insert(ids, ends, settings.eos_id)
        lengths[lasts] += 1
    if settings.level == "document" and len(owner):
        lengths, firsts = np.add.reduceat(lengths, firsts), np.arange(len(firsts))
    return Sequences(ids, lengths, np.diff(firsts, append=len(lengths)))


def write_corpus(
    batches: Iterable[Batch],
    settings: EncodeSettings,
    writers: Sequence[IndexedTokensWriter],
    *,
    workers: int,
    max_documents: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_part: Report = lambda part: None,
) -> Progress:
    """Encode `batches` into one writer per key, in order. The caller finishes or abandons the writers.

    Raises:
        GptlmError: as `read_batches` and `texts_of`, or if a worker process died.
    """
    progress, started = Progress(), time.monotonic()
    with closing(_encode_all(_limited(batches, max_documents), settings, workers, on_part)) as answers:
        for encoded in answers:
            for writer, found in zip(writers, encoded.sequences, strict=True):
                writer.add(found.ids, found.lengths, found.documents)
            progress.documents += encoded.documents
            progress.bad += len(encoded.bad)
            progress.reasons += encoded.bad[: REASONS_KEPT - len(progress.reasons)]
            progress.empty += encoded.documents - len(encoded.sequences[0].documents)
            progress.read += encoded.read
            progress.seconds = time.monotonic() - started
            on_progress(progress)
    return progress


@lru_cache(maxsize=1)
def _encoder(file: str, backend: str, allow_special_tokens: bool) -> TextEncoder:
    return TextEncoder(file, backend, allow_special_tokens)


@lru_cache(maxsize=1)
def _splitter(sentences: str | None, keep_newlines: bool) -> Splitter:
    return sentence_splitter(sentences, keep_newlines) if sentences else lambda text: [text]


def _limited(batches: Iterable[Batch], max_documents: int | None) -> Iterator[Batch]:
    left = max_documents
    for batch in batches:
        if left is not None:
            batch = split_lines(batch)
            batch = replace(batch, numbers=batch.numbers[:left], records=list(batch.records)[:left])
            left -= len(batch.records)
        yield batch
        if left == 0:
            return


def _encode_all(
    batches: Iterator[Batch], settings: EncodeSettings, workers: int, on_part: Report
) -> Generator[Encoded, None, None]:
    if workers == 1:
        one_thread()
        yield from (encode(settings, batch, on_part) for batch in batches)
        return
    pool: Workers[list[Batch], list[Encoded]] = Workers(workers, partial(_encode_group, settings), on_part)
    with closing(pool.map(_grouped(batches))) as answers:
        for answer in answers:
            yield from answer


def _grouped(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Batches of small files together: handing work to a process has its price."""
    group: list[Batch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.read
        if size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    yield group


def _encode_group(settings: EncodeSettings, group: list[Batch], report: Report) -> list[Encoded]:
    return [encode(settings, batch, report) for batch in group]
