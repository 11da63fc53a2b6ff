"""`gptlm data`: tools for token files and their sample order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from gptlm.compat import paddlenlp
from gptlm.config.args.data import CheckArguments, CopyArguments, OrderArguments, OrderQuestion, PrefixArguments
from gptlm.config.field import check_fields
from gptlm.config.parser import Vocabulary, parse
from gptlm.config.problem import missing, not_a_folder, usage_error
from gptlm.errors import UsageError

ORDER = Vocabulary((OrderArguments,), paddlenlp.ORDER_RENAMED)
COPY = Vocabulary((CopyArguments,), paddlenlp.COPY_RENAMED)
PREFIX = Vocabulary((PrefixArguments,))
Arguments = TypeVar("Arguments", bound=PrefixArguments)
CHECK = Vocabulary((CheckArguments,))


def parse_order(argv: Sequence[str]) -> OrderQuestion:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(ORDER, argv)
    arguments = parsed[OrderArguments]
    if problems := [*missing(arguments, "input_dir"), *check_fields(arguments)]:
        raise usage_error(problems, parsed.typed)
    train, valid, test = (int(count) for count in arguments.num_samples.split(","))
    return OrderQuestion(arguments, (train, valid, test))


def parse_copy(argv: Sequence[str]) -> CopyArguments:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(COPY, argv)
    arguments = parsed[CopyArguments]
    problems = missing(arguments, "input", "output_prefix")
    problems += [*not_a_folder("output_prefix", arguments.output_prefix), *check_fields(arguments)]
    if problems:
        raise usage_error(problems, parsed.typed)
    return replace(arguments, input=[_prefix(name) for name in arguments.input])


def parse_prefix(argv: Sequence[str]) -> PrefixArguments:
    """`PREFIX` or `--prefix PREFIX`. Raises UsageError listing everything that is wrong."""
    return _one_corpus(PrefixArguments, PREFIX, argv)


def parse_check(argv: Sequence[str]) -> CheckArguments:
    """As `parse_prefix`, with the flags of `check`."""
    return _one_corpus(CheckArguments, CHECK, argv)


def _one_corpus(group: type[Arguments], vocabulary: Vocabulary, argv: Sequence[str]) -> Arguments:
    words = list(argv)
    if words and not words[0].startswith("--"):
        words.insert(0, "--prefix")
    parsed = parse(vocabulary, words)
    arguments = parsed[group]
    if not arguments.prefix:
        raise UsageError("the prefix of the token files is missing: gptlm data check PREFIX")
    if problems := check_fields(arguments):
        raise usage_error(problems, parsed.typed)
    return replace(arguments, prefix=_prefix(arguments.prefix))


def _prefix(name: str) -> str:
    """The prefix of a pair of token files, also if `name` is one of the files."""
    for suffix in (".bin", ".idx", "_ids.npy", "_idx.npz", "_ids.npz"):
        name = name.removesuffix(suffix)
    return name
