"""One flag as it was written, wherever it was written."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Word:
    """A flag and its values.

    Attributes:
        name: with underscores.
        values: as texts; none for a bare switch.
        place: where it came from, for `--print_config`: "--seed", "-o", "args.json", "configs/x.yaml:12".
        typed: the same for messages: "--seed", "-o Global.seed", "args.json: seed", "Global.seed (configs/x.yaml:12)".
        nested: the value is a list or mapping of such, as JSON in `values`; no flag takes one.
    """

    name: str
    values: tuple[str, ...]
    place: str
    typed: str
    nested: bool = False

    @property
    def switched(self) -> str:
        """What is asked of a switch: where nothing follows it on the command line, "true"."""
        bare = not self.values and self.place.startswith("--")
        return "true" if bare else " ".join(self.values).strip("'\"")


def canonical(name: str) -> str:
    """`name` with underscores."""
    return name.replace("-", "_")


def as_texts(value: object) -> tuple[str, ...]:
    """A value of a file as the words that would be typed for it."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


@dataclass
class Translation:
    """Words for the parser, lines for the log, what is wrong, and why the run can be shown but not started.

    `from_sections`: a FleetX configuration was read.
    """

    words: list[Word] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    from_sections: bool = False
