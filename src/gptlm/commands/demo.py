"""`gptlm demo`: every step from text to generation on a small model."""

from collections.abc import Sequence

from gptlm.config.args.data import DemoArguments
from gptlm.config.field import check_fields
from gptlm.config.parser import Vocabulary, parse
from gptlm.config.problem import usage_error

DEMO = Vocabulary((DemoArguments,))


def parse_demo(argv: Sequence[str]) -> DemoArguments:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(DEMO, argv)
    if problems := check_fields(parsed[DemoArguments]):
        raise usage_error(problems, parsed.typed)
    return parsed[DemoArguments]
