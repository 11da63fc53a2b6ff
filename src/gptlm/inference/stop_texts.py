"""Texts that end a continuation, found in a stream of pieces."""

from collections.abc import Iterable, Iterator, Sequence


class UntilStop:
    """Iterates over `pieces` up to the first of `stops`, which may span pieces. What may begin one is held back.

    Attributes:
        found: whether one of `stops` has ended the text.
    """

    def __init__(self, pieces: Iterable[str], stops: Sequence[str]):
        self._pieces, self._stops, self.found = pieces, [stop for stop in stops if stop], False

    def __iter__(self) -> Iterator[str]:
        held = ""
        for piece in self._pieces:
            held += piece
            places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
            if places:
                self.found = True
                yield held[: min(places)]
                return
            kept = self._beginning(held)
            yield held[: len(held) - kept]
            held = held[len(held) - kept :]
        yield held

    def _beginning(self, text: str) -> int:
        """How many characters at the end of `text` begin a stop."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
