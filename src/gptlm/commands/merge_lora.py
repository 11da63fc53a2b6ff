"""`gptlm merge-lora`: LoRA adapters added to the weights of their model."""

from collections.abc import Sequence

from gptlm.checkpoint.task import take_own_adapters
from gptlm.compat import paddlenlp, transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model
from gptlm.config.args.convert import Merge, MergeArguments
from gptlm.config.args.hub import RepositoryArguments
from gptlm.config.field import check_fields
from gptlm.config.parser import Parsed, Vocabulary, parse
from gptlm.config.problem import missing, usage_error
from gptlm.config.uploads import upload_problems

MERGE = Vocabulary(
    (MergeArguments, RepositoryArguments),
    paddlenlp.MERGE_RENAMED | transformers.MODEL_RENAMED | transformers.HUB_RENAMED,
    paddlenlp.MERGE_IGNORED | transformers.MODEL_IGNORED,
    transformers.MODEL_REFUSED | transformers.HUB_REFUSED,
)


def parse_merge(argv: Sequence[str]) -> Merge:
    """Raises as `resolve_merge`."""
    parsed = resolve_merge(argv)
    return Merge(parsed[MergeArguments], parsed[RepositoryArguments])


def resolve_merge(argv: Sequence[str]) -> Parsed:
    """The command with everything filled in. Raises UsageError listing everything that is wrong."""
    parsed = parse(MERGE, argv)
    problems = missing(parsed[MergeArguments], "lora_path", "output_path")
    problems += [*check_fields(parsed[RepositoryArguments]), *upload_problems(parsed)]
    if problems:
        raise usage_error(problems, parsed.typed)
    take_external_model(parsed)
    take_own_adapters(parsed)
    take_external_adapters(parsed)
    return parsed
