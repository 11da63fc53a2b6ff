"""`gptlm convert`: checkpoints of other libraries to HuggingFace's format, and back."""

from collections.abc import Iterator, Sequence

from gptlm.compat import paddlenlp, transformers
from gptlm.config.args.convert import Conversion, ConvertArguments, ReadingArguments, WritingArguments
from gptlm.config.args.hub import RepositoryArguments
from gptlm.config.field import check_fields
from gptlm.config.parser import Parsed, Vocabulary, parse
from gptlm.config.problem import Problem, usage_error
from gptlm.config.uploads import upload_problems
from gptlm.errors import named

CONVERT = Vocabulary(
    (ConvertArguments, ReadingArguments, WritingArguments, RepositoryArguments),
    paddlenlp.CONVERT_RENAMED | transformers.HUB_RENAMED,
    refused=transformers.HUB_REFUSED,
)
ON_HUB = ("hf", "gguf")  # formats that others load from there
OF_FORMAT = {
    "megatron": ("tensor_parallel_degree", "pipeline_parallel_degree"),
    "paddle": ("paddle_qkv", "paddle_file"),
    "gguf": ("gguf_type",),
}


def parse_convert(argv: Sequence[str]) -> Conversion:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(CONVERT, argv)
    groups = parsed[ConvertArguments], parsed[ReadingArguments], parsed[WritingArguments], parsed[RepositoryArguments]
    problems = [*check_fields(*groups), *_problems(parsed)]
    if problems:
        raise usage_error(problems, {"source": "--from"} | parsed.typed)
    return Conversion(*groups)


def _problems(parsed: Parsed) -> Iterator[Problem]:
    main, reading = parsed[ConvertArguments], parsed[ReadingArguments]
    if main.check is not None:
        for name in parsed.aliases:
            if name != "check":
                yield Problem(name, f"has no effect with {named('check')}, which converts nothing; leave it out")
        return
    if not main.source:
        yield Problem("source", "is missing")
    if not main.output:
        yield Problem("output", "is missing")
    for form, names in OF_FORMAT.items():
        given = [name for name in names if parsed.given(name)]
        if given and main.to != form:
            yield Problem(given[0], f"needs {named('to')} {form}; the command has {named('to')} {main.to}")
    if parsed[RepositoryArguments].push_to_hub and main.to not in ON_HUB:
        yield Problem("push_to_hub", f"needs {named('to')} {' or '.join(ON_HUB)}: others cannot load {main.to} there")
    elif parsed[RepositoryArguments].push_to_hub and main.with_optimizer:
        yield Problem("push_to_hub", f"does not work with {named('with_optimizer')}: optimizer states are not uploaded")
    yield from upload_problems(parsed)
    if main.with_optimizer and main.to != "hf":
        yield Problem("with_optimizer", f"needs {named('to')} hf: other formats get no optimizer state")
    if main.to == "gguf" and main.dtype != "keep":
        yield Problem("dtype", f"has no meaning with {named('to')} gguf; give {named('gguf_type')}")
    if reading.consumed_samples is not None and not main.with_optimizer:
        yield Problem("consumed_samples", f"needs {named('with_optimizer')}")
