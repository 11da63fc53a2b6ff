"""`gptlm serve`: a server for clients of OpenAI's API."""

from collections.abc import Sequence

from gptlm.commands.chat import NOT_HERE, resolve_model
from gptlm.compat import transformers
from gptlm.config.args.chat import ServeArguments
from gptlm.config.parser import Parsed, Vocabulary, parse

OF_REQUESTS = "each request decides; see the API"
FIXED = NOT_HERE | {"do_sample": "requests sample unless their temperature is 0", "seed": OF_REQUESTS}
FIXED |= {"num_return_sequences": "requests have n", "stop_at_eol": 'requests have stop, such as "\\n"'}
SERVE = Vocabulary(
    (ServeArguments,),
    transformers.CHAT_RENAMED,
    transformers.INFERENCE_IGNORED,
    transformers.INFERENCE_REFUSED,
    settings=transformers.INFERENCE_SETTINGS,
    fixed=FIXED,
)


def parse_serve(argv: Sequence[str]) -> tuple[ServeArguments, tuple[str, ...]]:
    """The resolved arguments and the lines to log. Raises as `resolve_serve`."""
    parsed = resolve_serve(argv)
    return parsed[ServeArguments], tuple(parsed.notes)


def resolve_serve(argv: Sequence[str], *, printing: bool = False) -> Parsed:
    """The command with everything filled in, as `resolve_chat`."""
    parsed = parse(SERVE, argv)
    resolve_model(parsed, parsed[ServeArguments], SERVE.fixed, (), printing)
    return parsed
