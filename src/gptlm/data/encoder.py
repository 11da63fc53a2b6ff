"""Texts to ids: by `tokenizers`, or with the same result many times faster by gigatoken."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gptlm.data.cutting import PIECE, Cutter
from gptlm.errors import GptlmError, reason_of

COMPARED = 1 << 16  # characters of each of the first texts that both encode

Ids = tuple[np.ndarray, np.ndarray]


class TextEncoder:
    """`encoder(texts)` gives the ids of all texts back to back (int32) and the length of each text (int64).

    Long texts are encoded in pieces, as far as that changes no id: the results of `tokenizers` take 140 bytes per
    character on the way.

    The first texts gigatoken encodes are encoded by `tokenizers` as well and must come out the same.

    Args:
        tokenizer_file: a tokenizer.json.
        backend: "tokenizers" or "gigatoken".
        allow_special_tokens: let a text that spells a special token, such as <|endoftext|>, become its id.

    Raises:
        GptlmError: if gigatoken is not installed, cannot read the tokenizer, or gives other ids.
    """

    def __init__(self, tokenizer_file: str, backend: str = "tokenizers", allow_special_tokens: bool = False):
        self.tokenizer = Tokenizer.from_file(tokenizer_file)
        self.tokenizer.encode_special_tokens = not allow_special_tokens
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.fast = _gigatoken(tokenizer_file, allow_special_tokens) if backend == "gigatoken" else None
        self.compared = False
        self.cutter = Cutter(self.tokenizer, allow_special_tokens, self._lists)

    def __call__(self, texts: Sequence[str], report: Callable[[int], None] = lambda characters: None) -> Ids:
        """The ids of `texts`. `report` is told how many characters are encoded, now and then."""
        found: list[np.ndarray] = []
        lengths = np.zeros(len(texts), np.int64)
        for owners, pieces in self._groups(texts):
            ids, sizes = self._encode_group(pieces)
            found.append(ids)
            np.add.at(lengths, owners, sizes)
            report(sum(map(len, pieces)))
        return np.concatenate(found) if found else np.empty(0, np.int32), lengths

    def _groups(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Texts and pieces of texts of some `PIECE` characters together, and which text each belongs to."""
        owners: list[int] = []
        pieces: list[str] = []
        size = 0
        for number, text in enumerate(texts):
            for piece in self.cutter.pieces(text) if len(text) > 2 * PIECE else (text,):
                owners.append(number)
                pieces.append(piece)
                size += len(piece)
                if size >= PIECE:
                    yield owners, pieces
                    owners, pieces, size = [], [], 0
        if pieces:
            yield owners, pieces

    def _lists(self, texts: list[str]) -> list[list[int]]:
        ids, lengths = self._encode(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]

    def _encode_group(self, texts: Sequence[str]) -> Ids:
        if self.fast is None:
            return self._encode(texts)
        if not self.compared and texts:
            self._compare([text[:COMPARED] for text in texts])
        return self._encode_fast(texts)

    def _encode(self, texts: Sequence[str]) -> Ids:
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths

    def _encode_fast(self, texts: Sequence[str]) -> Ids:
        import awkward

        encoded = self.fast.encode_batch(list(texts), parallel=False)  # type: ignore[union-attr]
        lengths = np.asarray(awkward.num(encoded), np.int64)
        return np.asarray(awkward.flatten(encoded)).astype(np.int32), lengths

    def _compare(self, texts: Sequence[str]) -> None:
        for mine, wanted in zip(self._encode_fast(texts), self._encode(texts), strict=True):
            if not np.array_equal(mine, wanted):
                raise GptlmError("gigatoken gives other ids than tokenizers here; leave out --tokenizer_backend")
        self.compared = True


def _gigatoken(tokenizer_file: str, allow_special_tokens: bool) -> Any:
    try:
        import gigatoken
    except ImportError as error:
        raise GptlmError(
            "--tokenizer_backend gigatoken needs the package: pip install -c requirements/constraints.txt 'gptlm[fast]'"
        ) from error
    content = json.loads(Path(tokenizer_file).read_text(encoding="utf-8"))
    if not allow_special_tokens:
        added = content.get("added_tokens") or []
        content["added_tokens"] = [token for token in added if not token.get("special")]
    try:
        return gigatoken.Tokenizer.from_json(json.dumps(content))
    except Exception as error:  # its own Rust errors have no common class
        raise GptlmError(
            f"gigatoken cannot read this tokenizer ({reason_of(error)}); leave out --tokenizer_backend gigatoken"
        ) from error
