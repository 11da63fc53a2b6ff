"""The items of a JSON array in parts, without the whole array in memory."""

import re
from collections.abc import Iterator
from json import JSONDecodeError
from typing import BinaryIO, NamedTuple

from gptlm.data.text_files import RAW_DECODE
from gptlm.errors import GptlmError

CHUNK = 1 << 20  # bytes per read
WHITE = re.compile(r"[ \t\r\n]*")


class BrokenArrayError(ValueError):
    """The bytes are not a JSON array in UTF-8."""


class ArrayPart(NamedTuple):
    """Consecutive items of an array with the commas between them.

    Attributes:
        number: of the first item, from 1.
        items: how many there are.
        start: byte of the stream in which the first item begins.
        content: the bytes.
    """

    number: int
    items: int
    start: int
    content: bytes


def array_parts(stream: BinaryIO, path: str, size: int) -> Iterator[ArrayPart]:
    """All items of the array in `stream` in parts of at least `size` bytes, except the last one.

    Raises:
        BrokenArrayError: if it is not valid JSON or not UTF-8.
        GptlmError: if an item is nested too deeply.
    """
    # Latin-1 makes a character of each byte, so that places are places in the file. Items end where they do in UTF-8,
    # because all bytes of its other characters are 0x80 or above.
    text, base, number = _Text(stream), 1, 1
    place = text.expect(0, "[")
    first = place = text.white(place)
    while text.at(place) != "]" or number != 1:
        try:
            place = text.end_of_value(place)
        except RecursionError as error:
            line = text.lines + text.text.count("\n", 0, place) + 1
            raise GptlmError(f"{path}, line {line}: the JSON is nested too deeply") from error
        number += 1
        stop, place = place, text.white(place)
        is_last = text.at(place) == "]"
        if is_last or stop - first >= size:
            yield ArrayPart(base, number - base, text.base + first, text.between(first, stop))
            base = number
        if is_last:
            break
        place = text.white(text.expect(place, ","))
        if base == number:
            place -= text.drop(place)
            first = place
    if text.at(text.white(place + 1)):
        raise BrokenArrayError


class _Text:
    """The part of a stream that is being parsed, one character for each byte.

    Attributes:
        base: place of the first character in the stream.
        lines: line ends before it.
    """

    def __init__(self, stream: BinaryIO):
        self.stream, self.text, self.base, self.lines, self.ended = stream, "", 0, 0, False

    def at(self, place: int) -> str:
        """The character at `place`; empty at the end of the stream."""
        while place >= len(self.text) and not self.ended:
            self._read()
        return self.text[place : place + 1]

    def white(self, place: int) -> int:
        """The place after white space."""
        while True:
            found = WHITE.match(self.text, place)
            place = found.end() if found else place
            if place < len(self.text) or not self.at(place):
                return place

    def expect(self, place: int, letter: str) -> int:
        place = self.white(place)
        if self.at(place) != letter:
            raise BrokenArrayError
        return place + 1

    def end_of_value(self, place: int) -> int:
        """Where the JSON value at `place` ends."""
        while True:
            try:
                end = RAW_DECODE(self.text, place)[1]
                if end + 2 < len(self.text) or self.ended:  # else a number such as 1e+7 can continue in the next chunk
                    return end
            except ValueError as error:
                if self.ended or not isinstance(error, JSONDecodeError):  # a number has thousands of digits
                    raise BrokenArrayError from error
            self._read()

    def between(self, start: int, stop: int) -> bytes:
        content = self.text[start:stop].encode("latin-1")
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BrokenArrayError from error
        return content

    def drop(self, place: int) -> int:
        """Forget the text before `place` where it is long; returns how much."""
        if place < CHUNK:
            return 0
        self.lines += self.text.count("\n", 0, place)
        self.base += place
        self.text = self.text[place:]
        return place

    def _read(self) -> None:
        # as much again as there is: a long value is parsed a few times only
        chunk = self.stream.read(max(CHUNK, len(self.text)))
        self.text += chunk.decode("latin-1")
        self.ended = not chunk
