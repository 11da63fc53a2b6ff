"""`gptlm tokenizer`: a tokenizer trained on text."""

from collections.abc import Sequence

from gptlm.compat import paddlenlp
from gptlm.config.args.data import TokenizerArguments
from gptlm.config.field import check_fields
from gptlm.config.parser import Vocabulary, parse
from gptlm.config.problem import missing, usage_error

TOKENIZER = Vocabulary((TokenizerArguments,), paddlenlp.TOKENIZER_RENAMED)


def parse_tokenizer(argv: Sequence[str]) -> TokenizerArguments:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(TOKENIZER, argv)
    arguments = parsed[TokenizerArguments]
    if problems := [*missing(arguments, "input_path", "output_dir"), *check_fields(arguments)]:
        raise usage_error(problems, parsed.typed)
    return arguments
