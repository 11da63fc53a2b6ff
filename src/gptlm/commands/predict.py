"""`gptlm predict`: text generation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gptlm.checkpoint.task import note_other_tasks, take_own_adapters
from gptlm.commands.tensor_parallel import find_shape, process_problems, split_problems
from gptlm.compat import paddlenlp, transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model
from gptlm.compat.defaults import default_of_mode
from gptlm.compat.fleetx.translate import generation_arguments
from gptlm.config.args.inference import STDIN, PredictArguments
from gptlm.config.field import check_fields
from gptlm.config.origin import Origin, Source
from gptlm.config.parser import Parsed, Vocabulary, parse, shown
from gptlm.config.problem import Problem, usage_error
from gptlm.errors import named
from gptlm.model.presets import PRESETS

FLEETX_PROMPT = "Hi, GPT2. Tell me who Jack Ma is."

PREDICT = Vocabulary(
    (PredictArguments,),
    transformers.INFERENCE_RENAMED | paddlenlp.PREDICT_RENAMED,
    transformers.INFERENCE_IGNORED | paddlenlp.PREDICT_IGNORED,
    transformers.INFERENCE_REFUSED | paddlenlp.PREDICT_REFUSED,
    settings=transformers.INFERENCE_SETTINGS,
    sections=generation_arguments,
)


def parse_predict(
    argv: Sequence[str], processes: int = 1, *, piped: bool = False
) -> tuple[PredictArguments, tuple[str, ...]]:
    """The resolved arguments and the lines to log. Raises as `resolve_predict`."""
    parsed = resolve_predict(argv, processes, piped=piped)
    return parsed[PredictArguments], tuple(parsed.notes)


def resolve_predict(argv: Sequence[str], processes: int = 1, *, printing: bool = False, piped: bool = False) -> Parsed:
    """The command with everything filled in.

    Args:
        printing: for --print_config: a missing model is in `Parsed.missing`.
        piped: standard input is a pipe or a file. It is the input if no argument gives one.

    Raises:
        UsageError: listing everything that is wrong.
        GptlmError: if a model that is to be split cannot be found.
    """
    parsed = parse(PREDICT, argv)
    take_external_model(parsed)
    take_own_adapters(parsed)
    take_external_adapters(parsed)
    note_other_tasks(parsed)
    problems = [*check_fields(parsed[PredictArguments]), *_length_problems(parsed), *_derive_sampling(parsed)]
    problems += _conflicts(parsed[PredictArguments])
    problems += _degree_problems(parsed, processes, printing)
    _derive_input(parsed, piped)
    if parsed.aliases.get("tgt_length") == "max_length":
        parsed.note(
            f"{named('tgt_length')} {parsed[PredictArguments].tgt_length} counts new tokens, as in PaddleNLP; "
            "transformers counts the prompt, too (--max_new_tokens is the same in both)"
        )
    problems += [Problem("", line) for line in parsed.refusals if not printing]
    if not parsed[PredictArguments].model_name_or_path:
        missing = Problem("model_name_or_path", "is empty: give --model_name_or_path, the folder of a model")
        if printing:
            parsed.note_missing(missing)
        else:
            problems.append(missing)
    if problems:
        raise usage_error(problems, parsed.typed)
    _log_unused(parsed)
    return parsed


def _degree_problems(parsed: Parsed, processes: int, printing: bool) -> Iterator[Problem]:
    """Fill in `tensor_parallel_degree`.

    Raises:
        GptlmError: if a model that is to be split cannot be found.
    """
    arguments = parsed[PredictArguments]
    degree, name = max(arguments.tensor_parallel_degree, 1), arguments.model_name_or_path
    parsed.put(replace(arguments, tensor_parallel_degree=degree))
    if degree == 1:
        return
    if arguments.serve:
        yield Problem("serve", f"with {named('tensor_parallel_degree')} {degree}: one process answers; leave one out")
    if ":" in arguments.device:
        remedy = f"use {named('device')} gpu"
        yield Problem("device", f"{arguments.device!r} is one GPU for {degree} processes; {remedy}")
    if not printing:
        yield from process_problems(degree, processes, "predict", replicas=False)
    if name and not (printing and name not in PRESETS and not Path(name).is_dir()):
        yield from split_problems(degree, name, arguments.lora_path, find_shape(name, arguments.lora_path))


def _derive_input(parsed: Parsed, piped: bool) -> None:
    """Without prompts on the command line: standard input. PaddleFleetX's prompt replaces an empty one."""
    arguments = parsed[PredictArguments]
    if arguments.prompt or arguments.input_file not in (None, STDIN) or arguments.serve:
        return
    if parsed.from_sections:
        arguments = parsed.put(replace(arguments, prompt=[FLEETX_PROMPT]), default_of_mode("fleetx"))
    if piped and arguments.input_file is None:
        parsed.put(replace(arguments, input_file=STDIN), Source(Origin.ENVIRONMENT, "standard input"))


def _length_problems(parsed: Parsed) -> Iterator[Problem]:
    arguments = parsed[PredictArguments]
    if arguments.min_new_tokens > max(arguments.tgt_length, 0):
        default = "" if parsed.given("tgt_length") else ", its default"
        limit = f"{named('tgt_length')} ({arguments.tgt_length}{default})"
        yield Problem("min_new_tokens", f"{arguments.min_new_tokens}: expected at most {limit}")
    if arguments.do_sample and not 1e-4 <= arguments.temperature <= 1e4:
        remedy = f"leave {named('do_sample')} out for greedy decoding"
        yield Problem("temperature", f"{arguments.temperature:g}: expected 0.0001 to 10000; {remedy}")


def _derive_sampling(parsed: Parsed) -> Iterator[Problem]:
    """PaddleFleetX's decode_strategy in HuggingFace's arguments."""
    arguments = parsed[PredictArguments]
    strategy, beams = arguments.decode_strategy, arguments.num_beams
    if strategy is None:
        return
    if strategy == "sampling" and parsed.is_default("do_sample"):
        source = Source(parsed.sources["decode_strategy"].origin, "decode_strategy")
        arguments = parsed.put(replace(arguments, do_sample=True), source)
    if arguments.do_sample != (strategy == "sampling"):
        other = f"{named('do_sample')} {shown(arguments.do_sample)}"
        yield Problem("decode_strategy", f"{strategy} and {other} contradict each other; use one")
    if strategy == "beam_search" and beams < 2:
        yield Problem("decode_strategy", f"beam_search needs {named('num_beams')} of 2 or more")
    if strategy == "greedy_search" and beams > 1:
        yield Problem("decode_strategy", f"greedy_search has one beam, {named('num_beams')} is {beams}; use one")


def _conflicts(arguments: PredictArguments) -> Iterator[Problem]:
    if arguments.prompt and arguments.input_file:
        yield Problem("prompt", f"and {named('input_file')} both give prompts; use one")
    if arguments.bf16 and arguments.fp16:
        yield Problem("bf16", f"and {named('fp16')} are both given; use one")
    copies, beams, sample = arguments.num_return_sequences, arguments.num_beams, arguments.do_sample
    add_beams = f"{named('num_beams')}"
    if copies > 1 and not sample and beams == 1:
        remedy = f"add {named('do_sample')} or {add_beams} {copies}"
        yield Problem("num_return_sequences", f"{copies}: greedy search finds one; {remedy}")
    elif copies > beams > (1 if sample else 0):  # num_beams below 1 is out of range anyway
        remedy = f"raise {add_beams}" + ("" if sample else f" or add {named('do_sample')}")
        yield Problem("num_return_sequences", f"{copies} is more than {add_beams} {beams}; {remedy}")
    if arguments.serve:
        given = {
            "prompt": arguments.prompt,
            "input_file": arguments.input_file,
            "output_file": arguments.output_file,
            "num_beams": beams > 1,
            "num_return_sequences": copies > 1,
        }
        wrong = " ".join(f"{named(name)}" for name, value in given.items() if value)
        if wrong:
            yield Problem("serve", f"streams one continuation per prompt typed on the page; leave out {wrong}")


def _log_unused(parsed: Parsed) -> None:
    arguments = parsed[PredictArguments]
    needed = {  # argument -> whether it is on, and the arguments without effect if not
        "do_sample": (arguments.do_sample or arguments.serve, ("top_k", "top_p", "temperature")),
        "num_beams": (arguments.num_beams > 1, ("length_penalty", "early_stopping")),
        "serve": (arguments.serve, ("host", "port")),
        "tensor_parallel_degree": (arguments.tensor_parallel_degree > 1, ("ddp_timeout",)),
    }
    for flag, (on, names) in needed.items():
        given = [f"--{name}" for name in names if not parsed.is_default(name)]
        if given and not on:
            parsed.note(f"{', '.join(given)} has no effect without --{flag}")
