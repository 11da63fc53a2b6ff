"""Garbage collection without what imports have made: accelerate collects after each training run, for 0.4 s each."""

import gc
import sys

MANY = 50  # new modules that are worth another freeze
_seen = [0]


def freeze_imports() -> None:
    """Exclude all objects from later collections, if many modules have been imported since the last call."""
    if len(sys.modules) > _seen[0] + MANY:
        gc.collect()
        gc.freeze()
        _seen[0] = len(sys.modules)
