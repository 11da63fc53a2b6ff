"""Where the value of an argument comes from."""

from dataclasses import dataclass
from enum import Enum, auto


class Origin(Enum):
    """The kind of place that sets a value."""

    DEFAULT = auto()  # of the argument itself
    COMPAT_DEFAULT = auto()  # of the library whose command it is
    FILE = auto()  # an argument file, a configuration, a DeepSpeed file
    OVERRIDE = auto()  # -o KEY=VALUE
    CLI = auto()
    ENVIRONMENT = auto()
    MODEL = auto()  # the model's config.json, its adapters, or a preset
    DERIVED = auto()  # follows from other values


@dataclass(frozen=True)
class Source:
    """The origin of one value.

    Attributes:
        text: what --print_config shows.
        recomputed: a rule gives this value again from the rest of run.json, so run.json omits it. Otherwise a later
            `--max_steps` beside run.json would meet, say, the decay steps of the earlier run.
        share: the value was given as this share of max_steps; run.json keeps the share.
    """

    origin: Origin
    text: str
    recomputed: bool = False
    share: float | None = None


DEFAULT = Source(Origin.DEFAULT, "default")


def derived(rule: str, *, recomputed: bool = False, share: float | None = None) -> Source:
    """The source of a value that follows from others by `rule`."""
    return Source(Origin.DERIVED, f"derived: {rule}", recomputed, share)
