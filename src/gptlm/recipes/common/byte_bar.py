"""Progress through the bytes of files: a bar on a terminal, log lines elsewhere."""

import logging
import sys
from time import monotonic

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS = 10.0  # between log lines


class ByteBar:
    """A bar of `size` bytes on stderr; log lines every `SECONDS` where that is no terminal or `shown` is False."""

    def __init__(self, size: int, what: str, *, shown: bool = True):
        self.size, self.what, self.logged = max(size, 1), what, monotonic()
        hidden = not (shown and sys.stderr.isatty())
        self.bar = tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc=what, disable=hidden)

    def __enter__(self) -> "ByteBar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def show(self, done: int, more: str) -> None:
        """`done` bytes of all are read, `more` says what was made of them."""
        if not self.bar.disable:
            self.bar.set_postfix_str(more, refresh=False)
            self.bar.update(done - self.bar.n)
        elif monotonic() - self.logged >= SECONDS:
            self.logged = monotonic()
            logger.info("%s: %.0f %%, %s", self.what, 100 * done / self.size, more)
