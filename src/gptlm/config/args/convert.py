"""Flags of `gptlm convert`: a checkpoint of another library into another form."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptlm.compat import paddlenlp as spellings
from gptlm.config.field import arg, check_fields
from gptlm.config.parser import Parsed, Vocabulary, build, parse
from gptlm.errors import UsageError, with_flags_shown

FORMS = ("hf", "megatron", "paddle")


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """What is read, what is written."""

    source: str | None = arg(
        None,
        "the checkpoint: a folder, a .pdparams, .pt or .zip file, or a built-in name; its kind is "
        "recognised: HuggingFace, Megatron-LM, Megatron-DeepSpeed, PaddleNLP, FleetX, adapters of PaddleNLP or PEFT",
    )
    to: str = arg("hf", "the form that is written", choices=FORMS)
    output: str | None = arg(None, "new or empty folder for it")
    dtype: str = arg("keep", "of the written weights", choices=("keep", "float32", "bfloat16", "float16"))
    with_optimizer: bool = arg(
        False, "hf: also Adam's moments and step, as output/checkpoint-N, which a run with that output_dir goes on from"
    )
    verify: bool = arg(True, "compare the logits of a fixed batch before and after; over 1e-3 is an error")
    tokenizer_name_or_path: str | None = arg(None, "tokenizer to put beside the weights; unset: the checkpoint's")


@dataclass(frozen=True, kw_only=True)
class ReadingArguments:
    """What the checkpoint does not say itself."""

    vocab_size: int | None = arg(None, "true entries of the vocabulary; the embedding's rows after them are cut", ge=1)
    num_attention_heads: int | None = arg(None, "attention heads, where the checkpoint has no arguments", ge=1)
    consumed_samples: int | None = arg(
        None, "with_optimizer: samples that training has read, where the checkpoint does not say it", ge=0
    )
    activation: str | None = arg(
        None, "GELU's form, where the checkpoint does not say it: tanh or erf", choices=("gelu_new", "gelu")
    )


@dataclass(frozen=True, kw_only=True)
class WritingArguments:
    """How Megatron's and PaddleNLP's forms are written."""

    tensor_parallel_degree: int = arg(1, "megatron: ranks each layer is cut over", ge=1)
    pipeline_parallel_degree: int = arg(1, "megatron: stages the layers are cut into", ge=1)
    paddle_qkv: str = arg("split", "paddle: q, k and v apart or as one qkv_proj", choices=("split", "fused"))
    paddle_file: str = arg(
        "safetensors", "paddle: sharded files or one, built in memory", choices=("safetensors", "pdparams")
    )


CONVERT = Vocabulary((ConvertArguments, ReadingArguments, WritingArguments), spellings.CONVERT_RENAMED)


@dataclass(frozen=True)
class Conversion:
    """A checked command."""

    main: ConvertArguments
    reading: ReadingArguments
    writing: WritingArguments


def parse_convert(argv: Sequence[str]) -> Conversion:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(CONVERT, argv)
    main, reading, writing = (build(group, parsed.values) for group in CONVERT.groups)
    problems = [
        *(with_flags_shown(problem.marked, parsed.typed) for problem in check_fields(main, reading, writing)),
        *_problems(parsed),
    ]
    if problems:
        raise UsageError("\n".join(problems))
    return Conversion(main, reading, writing)


def _problems(parsed: Parsed) -> list[str]:
    values = parsed.values
    flags = {"source": "--from", "output": "--output"}
    problems = [f"{flag} is missing" for name, flag in flags.items() if not values[name]]
    of_forms = {
        "megatron": ("tensor_parallel_degree", "pipeline_parallel_degree"),
        "paddle": ("paddle_qkv", "paddle_file"),
    }
    for form, names in of_forms.items():
        given = [name for name in names if not parsed.is_default(name)]
        if given and values["to"] != form:
            problems.append(f"{parsed.typed_as(given[0])} is for --to {form}; the command says --to {values['to']}")
    if values["with_optimizer"] and values["to"] != "hf":
        problems.append(f"{parsed.typed_as('with_optimizer')}: states of the optimizer are written with --to hf only")
    if values["consumed_samples"] is not None and not values["with_optimizer"]:
        problems.append(f"{parsed.typed_as('consumed_samples')} goes with --with_optimizer")
    return problems
