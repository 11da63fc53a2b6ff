"""Flags of continuing prompts, on the command line and on the page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptlm.compat import paddlenlp as spellings
from gptlm.compat import transformers as spellings_transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model
from gptlm.compat.fleetx.translate import generation_arguments
from gptlm.config.args.training import bad_device
from gptlm.config.field import LARGEST_SEED, arg, check_fields
from gptlm.config.origin import Origin, Source
from gptlm.config.parser import Parsed, Vocabulary, build, parse, shown
from gptlm.config.problem import Problem, usage_error
from gptlm.errors import UsageError, named

STDIN = "-"  # as input_file
DEFAULT_PROMPTS = (
    "问题：中国的首都是哪里？答案：北京。\n问题：苹果的CEO是谁? 答案：",
    "问题：中国的首都是哪里？答案：北京。\n问题：广东的省会是哪个城市? 答案：",
)


@dataclass(frozen=True, kw_only=True)
class PredictArguments:
    """Continue prompts with a trained model."""

    model_name_or_path: str = arg("gpt-cpm-large-cn", "folder of a trained model or of adapters, or a built-in name")
    lora_path: str | None = arg(None, "folder of LoRA adapters (PEFT's files), added to the model's weights in memory")
    prompt: list[str] = arg(
        [], "texts to continue; unset: input_file, else piped standard input, else PaddleNLP's two Chinese questions"
    )
    input_file: str | None = arg(
        None,
        "one prompt per line, or .jsonl or .json with the key prompt, src or text; -: standard input",
    )
    output_file: str | None = arg(None, "also write prompts and continuations here as .jsonl")
    batch_size: int = arg(1, "prompts continued together", ge=1)
    src_length: int = arg(200, "longest prompt in tokens; a longer one is cut, and the log says so", ge=1)
    truncation_side: str = arg(
        "left", "of a prompt that is too long: left cuts its beginning, right its end", choices=("left", "right")
    )
    allow_special_tokens: bool = arg(False, "let <|endoftext|> written in a prompt become its id")
    tgt_length: int = arg(200, "most new tokens; the prompt does not count", ge=1)
    min_new_tokens: int = arg(0, "fewest tokens to add", ge=0)
    seed: int = arg(20, "seed of sampling", ge=0, le=LARGEST_SEED)
    decode_strategy: str | None = arg(
        None,
        "FleetX's word: sampling is do_sample, beam_search needs num_beams, greedy_search is neither",
        choices=("sampling", "greedy_search", "beam_search"),
    )
    do_sample: bool = arg(False, "draw tokens instead of taking the likeliest")
    top_k: int = arg(50, "with do_sample: draw among the k likeliest; 0: all", ge=0)
    top_p: float = arg(
        1.0, "with do_sample: draw among the likeliest that make up this probability; 1.0: all", gt=0, le=1
    )
    temperature: float = arg(1.0, "with do_sample: above 1 flattens, below 1 sharpens")
    repetition_penalty: float = arg(
        1.0, "above 1 makes tokens of prompt and continuation less likely to come again", gt=0
    )
    num_beams: int = arg(1, "beams of a beam search; 1: none", ge=1)
    length_penalty: float = arg(1.0, "with num_beams: above 0 favours long continuations, below 0 short ones")
    early_stopping: bool = arg(False, "with num_beams: end as soon as num_beams continuations have ended")
    num_return_sequences: int = arg(1, "continuations of each prompt; needs do_sample or num_beams", ge=1)
    stop_at_eol: bool | None = arg(None, "stop at a line break; unset: only for the built-in questions")
    device: str = arg("gpu", "gpu or cpu; gpu falls back to cpu, loudly, when there is none", check=bad_device)
    bf16: bool = arg(False, "keep weights and compute in bfloat16")
    fp16: bool = arg(False, "keep weights and compute in float16; GPU only")
    serve: bool = arg(False, "open a local web page instead, on which prompts are typed; extra 'serve'")
    host: str = arg("127.0.0.1", "with serve: address the page listens on")
    port: int = arg(7860, "with serve: port the page listens on", ge=1, le=2**16 - 1)


FLEETX_PROMPT = "Hi, GPT2. Tell me who Jack Ma is."

PREDICT = Vocabulary(
    (PredictArguments,),
    spellings_transformers.INFERENCE_RENAMED | spellings.PREDICT_RENAMED,
    spellings_transformers.INFERENCE_IGNORED | spellings.PREDICT_IGNORED,
    spellings_transformers.INFERENCE_REFUSED | spellings.PREDICT_REFUSED,
    settings=spellings_transformers.INFERENCE_SETTINGS,
    sections=generation_arguments,
)

WITH = {  # flags -> the flag without which they have no effect
    "do_sample": ("top_k", "top_p", "temperature"),
    "num_beams": ("length_penalty", "early_stopping"),
    "serve": ("host", "port"),
}


def parse_predict(argv: Sequence[str], *, piped: bool = False) -> tuple[PredictArguments, tuple[str, ...]]:
    """The arguments and the lines to log; `piped` as in `resolve_predict`.

    Raises:
        UsageError: listing everything that is wrong.
    """
    parsed = resolve_predict(argv, piped=piped)
    return build(PredictArguments, parsed.values), tuple(parsed.notes)


def resolve_predict(argv: Sequence[str], *, printing: bool = False, piped: bool = False) -> Parsed:
    """The command with everything filled in.

    Args:
        printing: for --print_config: a missing model is noted.
        piped: standard input is a pipe or a file: it is the input where no flag gives one.

    Raises:
        UsageError: listing everything that is wrong.
    """
    parsed = parse(PREDICT, argv)
    take_external_model(parsed)
    take_external_adapters(parsed)
    problems = [problem.marked for problem in check_fields(build(PredictArguments, parsed.values))]
    problems += [*_ranges(parsed), *_strategy(parsed), *_combinations(parsed.values)]
    _fill_in_prompts(parsed, piped)
    if parsed.aliases.get("tgt_length") == "max_length":
        parsed.note(
            f"{parsed.typed['tgt_length']} {parsed.values['tgt_length']} counts new tokens, as PaddleNLP does; in "
            "transformers it counts the prompt, too (--max_new_tokens is the same in both)"
        )
    if parsed.refusals and not printing:
        problems += parsed.refusals
    if not parsed.values["model_name_or_path"]:
        missing = (
            f"{parsed.typed_as('model_name_or_path')} is empty: give {named('model_name_or_path')}, the folder of a "
            "model"
        )
        if not printing:
            raise UsageError(missing)
        parsed.note(missing)
    if problems:
        raise usage_error((Problem("", problem) for problem in problems), parsed.typed)
    used = {**parsed.values, "num_beams": parsed.values["num_beams"] > 1}
    for flag, names in WITH.items():
        given = [name for name in names if not parsed.is_default(name)]
        if given and not used[flag] and not (parsed.values["serve"] and flag == "do_sample"):
            parsed.note(f"{', '.join('--' + name for name in given)} has no effect without --{flag}")
    return parsed


def _fill_in_prompts(parsed: Parsed, piped: bool) -> None:
    """Where no flag gives prompts: standard input, and for the case that it is empty those of the original."""
    values = parsed.values
    if values["prompt"] or values["input_file"] not in (None, STDIN) or values["serve"]:
        return
    if parsed.from_sections:
        parsed.set("prompt", [FLEETX_PROMPT], Source(Origin.COMPAT_DEFAULT, "default of fleetx"))
    if piped and values["input_file"] is None:
        parsed.set("input_file", STDIN, Source(Origin.ENVIRONMENT, "standard input"))


def _ranges(parsed: Parsed) -> Iterator[str]:
    values = parsed.values
    if values["min_new_tokens"] > max(values["tgt_length"], 0):
        default = "" if "tgt_length" in parsed.typed else ", its default"
        yield (
            f"{named('min_new_tokens')} {values['min_new_tokens']}: expected at most {named('tgt_length')} "
            f"({values['tgt_length']}{default})"
        )
    if values["do_sample"] and not 1e-4 <= values["temperature"] <= 1e4:
        yield (
            f"{named('temperature')} {values['temperature']:g}: expected 0.0001 to 10000; leave "
            f"{named('do_sample')} out for greedy"
        )


def _strategy(parsed: Parsed) -> Iterator[str]:
    """FleetX's decode_strategy in HuggingFace's words."""
    values, strategy = parsed.values, parsed.values["decode_strategy"]
    if strategy is None:
        return
    if strategy == "sampling" and parsed.is_default("do_sample"):
        parsed.set("do_sample", True, Source(Origin.DERIVED, "decode_strategy"))
    if values["do_sample"] != (strategy == "sampling"):
        yield (
            f"{named('decode_strategy')} {strategy} and {named('do_sample')} {shown(values['do_sample'])} "
            "contradict each other; use one"
        )
    if strategy == "beam_search" and values["num_beams"] < 2:
        yield f"{named('decode_strategy')} beam_search needs {named('num_beams')} of 2 or more"
    if strategy == "greedy_search" and values["num_beams"] > 1:
        yield (
            f"{named('decode_strategy')} greedy_search has one beam, {named('num_beams')} {values['num_beams']} "
            "is given; use one"
        )


def _combinations(values: Mapping[str, Any]) -> Iterator[str]:
    if values["prompt"] and values["input_file"]:
        yield f"{named('prompt')} and {named('input_file')} both give prompts; use one"
    if values["bf16"] and values["fp16"]:
        yield f"{named('bf16')} and {named('fp16')} are both given; use one"
    copies, beams = values["num_return_sequences"], values["num_beams"]
    if copies > 1 and not values["do_sample"] and beams == 1:
        yield (
            f"{named('num_return_sequences')} {copies}: greedy search finds one; add {named('do_sample')} or "
            f"{named('num_beams')} {copies}"
        )
    elif copies > beams > 0 and not values["do_sample"]:  # num_beams below 1 is refused on its own
        yield (
            f"{named('num_return_sequences')} {copies} is more than {named('num_beams')} {beams}; raise "
            f"{named('num_beams')} or add {named('do_sample')}"
        )
    elif copies > beams > 1:
        yield (
            f"{named('num_return_sequences')} {copies} is more than {named('num_beams')} {beams}; raise "
            f"{named('num_beams')}"
        )
    if values["serve"]:
        given = [name for name in ("prompt", "input_file", "output_file") if values[name]]
        given += [name for name in ("num_beams", "num_return_sequences") if values[name] > 1]
        if given:
            yield (
                f"{named('serve')} shows one continuation of what is typed as it is made; leave out "
                f"--{' --'.join(given)}"
            )
