"""`gptlm chat`: a conversation in the terminal."""

from collections.abc import Iterable, Mapping, Sequence

from gptlm.checkpoint.task import note_other_tasks, take_own_adapters
from gptlm.compat import transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model
from gptlm.config.args.chat import ChatArguments
from gptlm.config.args.inference import PredictArguments
from gptlm.config.field import check_fields
from gptlm.config.parser import Parsed, Vocabulary, parse
from gptlm.config.problem import Problem, usage_error

ONE = "one answer is generated at a time, see gptlm predict"
NO_BEAMS = "answers are streamed, which beam search cannot; see gptlm predict"
NOT_HERE = {  # arguments of predict that are none of a conversation
    **dict.fromkeys(("prompt", "input_file", "output_file", "overwrite"), "messages are the input; see gptlm predict"),
    **dict.fromkeys(("src_length", "truncation_side"), "all of the conversation that fits is used"),
    **dict.fromkeys(("batch_size", "num_return_sequences"), ONE),
    **dict.fromkeys(("num_beams", "length_penalty", "early_stopping", "decode_strategy"), NO_BEAMS),
    "serve": "gptlm predict opens a page in the browser",
    **dict.fromkeys(("tensor_parallel_degree", "ddp_timeout"), "one process answers; see gptlm predict"),
}
TERMINAL = {"host": "gptlm serve listens on an address", "port": "gptlm serve listens on a port"}


CHAT = Vocabulary(
    (ChatArguments,),
    transformers.CHAT_RENAMED,
    transformers.INFERENCE_IGNORED,
    transformers.INFERENCE_REFUSED,
    settings=transformers.INFERENCE_SETTINGS,
    fixed=NOT_HERE | TERMINAL,
)


def parse_chat(argv: Sequence[str]) -> tuple[ChatArguments, tuple[str, ...]]:
    """The resolved arguments and the lines to log. Raises as `resolve_chat`."""
    parsed = resolve_chat(argv)
    return parsed[ChatArguments], tuple(parsed.notes)


def resolve_chat(argv: Sequence[str], *, printing: bool = False) -> Parsed:
    """The command with everything filled in.

    Args:
        printing: for --print_config: a missing model is in `Parsed.missing`.

    Raises:
        UsageError: listing everything that is wrong.
    """
    parsed = parse(CHAT, argv)
    arguments = parsed[ChatArguments]
    problems = []
    if arguments.do_sample and not 1e-4 <= arguments.temperature <= 1e4:
        problems.append(Problem("temperature", f"{arguments.temperature:g}: expected 0.0001 to 10000"))
    resolve_model(parsed, arguments, CHAT.fixed, problems, printing)
    return parsed


def resolve_model(
    parsed: Parsed, arguments: PredictArguments, fixed: Mapping[str, str], more: Iterable[Problem], printing: bool
) -> None:
    """Find model and adapters of `arguments`.

    Args:
        fixed: arguments of predict that the command does not have -> why.
        more: what is wrong already.
        printing: for --print_config: a missing model is in `Parsed.missing`.

    Raises:
        UsageError: for everything that is wrong.
    """
    problems = [*check_fields(arguments), *more]
    problems += [Problem(name, f"has no effect here: {reason}") for name, reason in fixed.items() if parsed.given(name)]
    if arguments.bf16 and arguments.fp16:
        problems.append(Problem("bf16", "and --fp16 are both given; use one"))
    if not arguments.model_name_or_path:
        missing = Problem("model_name_or_path", "is empty: give --model_name_or_path, the folder of a model")
        if printing:
            parsed.note_missing(missing)
        else:
            problems.append(missing)
    if problems:
        raise usage_error(problems, parsed.typed)
    take_external_model(parsed)
    take_own_adapters(parsed)
    take_external_adapters(parsed)
    note_other_tasks(parsed)
