"""Texts to token files: encode in parallel, keep the order, keep memory flat."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from multiprocessing import get_context

import numpy as np
from tokenizers import Tokenizer

from gptlm.data.corpus import Batch, good_texts_of, texts_of
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError

REASONS_KEPT = 10  # bad documents named at the end
BATCHES_AHEAD = 4  # batches in flight per worker; bounds memory whatever the corpus size


@dataclass(frozen=True)
class EncodeSettings:
    """How a document becomes ids.

    Attributes:
        tokenizer_file: a tokenizer.json.
        keys: JSON keys to encode, each into its own corpus.
        eos_id: id appended to every document, or None.
        strip: remove white space at both ends of a text (PaddleNLP does, Megatron does not).
        skip_bad: leave out documents that cannot be read instead of stopping.
        allow_special_tokens: let a text that spells a special token, such as <|endoftext|>, become its id.
    """

    tokenizer_file: str
    keys: tuple[str, ...]
    eos_id: int | None
    strip: bool
    allow_special_tokens: bool
    skip_bad: bool = False


@dataclass(frozen=True)
class Encoded:
    """One encoded batch: per key the ids back to back (int32) and the length of each kept document; bad documents."""

    ids: tuple[np.ndarray, ...]
    lengths: tuple[list[int], ...]
    documents: int
    bad: list[str]
    read: int


@dataclass
class Progress:
    """Totals so far: documents read, without text, left out as bad (and why, the first few), bytes, seconds."""

    documents: int = 0
    bad: int = 0
    reasons: list[str] = field(default_factory=list)
    empty: int = 0
    read: int = 0
    seconds: float = 0.0


def encode(settings: EncodeSettings, batch: Batch) -> Encoded:
    """Encode one batch; runs in a worker process. Documents without any token are left out."""
    tokenizer = _tokenizer(settings.tokenizer_file, settings.allow_special_tokens)
    documents, bad = good_texts_of(batch, settings.keys) if settings.skip_bad else (texts_of(batch, settings.keys), [])
    ids, lengths = [], []
    for key in range(len(settings.keys)):
        texts = [texts[key].strip() if settings.strip else texts[key] for texts in documents]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        kept = [encoding.ids for encoding in encodings if encoding.ids]
        if settings.eos_id is not None:
            kept = [document + [settings.eos_id] for document in kept]
        lengths.append([len(document) for document in kept])
        ids.append(np.fromiter(chain.from_iterable(kept), np.int32, sum(lengths[-1])))
    return Encoded(tuple(ids), tuple(lengths), len(documents), bad, batch.read)


def write_corpus(
    batches: Iterable[Batch],
    settings: EncodeSettings,
    writers: Sequence[IndexedTokensWriter],
    *,
    workers: int,
    max_documents: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Encode `batches` into one writer per key, in order. The caller finishes or abandons the writers.

    Raises:
        GptlmError: as `read_batches` and `texts_of`, or if a worker process died.
    """
    progress, started = Progress(), time.monotonic()
    for encoded in _encode_all(_limited(batches, max_documents), settings, workers):
        for writer, ids, lengths in zip(writers, encoded.ids, encoded.lengths, strict=True):
            writer.add(ids, lengths)
        progress.documents += encoded.documents
        progress.bad += len(encoded.bad)
        progress.reasons += encoded.bad[: REASONS_KEPT - len(progress.reasons)]
        progress.empty += encoded.documents - len(encoded.lengths[0])
        progress.read += encoded.read
        progress.seconds = time.monotonic() - started
        on_progress(progress)
    return progress


@lru_cache(maxsize=1)
def _tokenizer(file: str, allow_special_tokens: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_file(file)
    tokenizer.encode_special_tokens = not allow_special_tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _limited(batches: Iterable[Batch], max_documents: int | None) -> Iterator[Batch]:
    left = max_documents
    for batch in batches:
        if left is not None:
            batch = Batch(batch.file, batch.numbers[:left], batch.records[:left], batch.is_text, batch.read)
            left -= len(batch.records)
        yield batch
        if left == 0:
            return


def _encode_all(batches: Iterator[Batch], settings: EncodeSettings, workers: int) -> Iterator[Encoded]:
    if workers == 1:
        _one_thread()
        yield from (encode(settings, batch) for batch in batches)
        return
    # spawn: a forked child would inherit the threads of tokenizers and hang
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread)
    try:
        in_flight: deque = deque()
        for batch in batches:
            in_flight.append(pool.submit(encode, settings, batch))
            if len(in_flight) >= workers * BATCHES_AHEAD:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise GptlmError(
            f"one of the {workers} worker processes died (killed, or out of memory); "
            "nothing was written, try fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    """Workers are the parallelism; tokenizers' own threads would compete with them. A user's setting stays."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
