"""`gptlm report`: the page about runs, from what they recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptlm.config.field import LARGEST_PORT, arg, check_fields
from gptlm.config.parser import Vocabulary, parse
from gptlm.config.problem import usage_error
from gptlm.errors import UsageError, named
from gptlm.owned import REPORT as FILE_NAME

SWITCH_VALUES = ("0", "1", "true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """What to report, and where"""

    runs: list[str] = arg(
        [], "output folders of trainings, or folders that have some directly in them; the flag may be left out"
    )
    output: str | None = arg(
        None, "file to write; unset: report.html in the folder, of several folders in the current one"
    )
    watch: bool = arg(
        False, "write nothing, but serve the page on 127.0.0.1; it reloads itself while the runs go on, until Ctrl-C"
    )
    port: int = arg(8717, "--watch: port to listen on", ge=1, le=LARGEST_PORT)

    @property
    def path(self) -> Path:
        """The file to write."""
        return Path(self.output or (Path(self.runs[0]) / FILE_NAME if len(self.runs) == 1 else FILE_NAME))


REPORT = Vocabulary((ReportArguments,))


def parse_report(argv: Sequence[str]) -> ReportArguments:
    """`DIR ... [--flag value ...]`. Raises UsageError listing everything that is wrong."""
    parsed = parse(REPORT, _with_runs_named(argv))
    arguments = parsed[ReportArguments]
    if not arguments.runs:
        raise UsageError("the folder of a run is missing: gptlm report DIR")
    if problems := check_fields(arguments):
        raise usage_error(problems, parsed.typed)
    if arguments.watch and arguments.output:
        raise UsageError(f"{named('watch')} writes no file; leave {named('output')} out")
    return arguments


def _with_runs_named(argv: Sequence[str]) -> list[str]:
    """`argv` with the words that are the value of no flag behind --runs."""
    runs: list[str] = []
    others: list[str] = []
    awaited: tuple[str, ...] | None = ()  # values that the next word may have to be one; None: any
    for word in argv:
        if word.startswith("-"):
            name, has_value, _ = word.lstrip("-").partition("=")
            if name != "runs":
                others.append(word)
            awaited = () if has_value or name == "runs" else SWITCH_VALUES if name == "watch" else None
        elif awaited is None or word.lower() in awaited:
            others.append(word)
            awaited = ()
        else:
            runs.append(word)
    return [*(["--runs", *runs] if runs else []), *others]
