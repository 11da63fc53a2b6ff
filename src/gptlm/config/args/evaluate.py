"""Flags of `gptlm evaluate`: Megatron's `tasks/main.py` and FleetX's `Offline_Eval`, in one vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptlm.compat import paddlenlp as spellings
from gptlm.compat import transformers as spellings_transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model
from gptlm.compat.fleetx.translate import evaluation_arguments
from gptlm.config.args.training import bad_device, bad_split
from gptlm.config.field import arg, check_fields
from gptlm.config.parser import Parsed, Vocabulary, build, parse
from gptlm.config.problem import Problem, usage_error
from gptlm.data.text_files import holds_records
from gptlm.errors import GptlmError, UsageError, named
from gptlm.model.adapter_files import base_and_adapters, base_hint, check_fit
from gptlm.model.files import shape_of_config
from gptlm.model.presets import PRESETS, Shape

TASKS = ("LAMBADA", "WIKITEXT103", "WIKITEXT2", "TEXT", "DATA")
DETOKENIZERS = ("auto", "wikitext", "lambada", "ptb", "none")
AUTO = {"LAMBADA": "lambada", "WIKITEXT103": "wikitext", "WIKITEXT2": "wikitext", "TEXT": "none", "DATA": "none"}
LONGEST_DEFAULT = 1024  # tokens, GPT-2's position table

HELP = """
LAMBADA: can the model foretell the last word? Lines of {"text": ...}. Two measures are always printed:
  strict      every token of the whole last word (its context is the text before it, without the blank) is the likeliest
  last token  the last token of the text as it is tokenized is the likeliest
WIKITEXT103, WIKITEXT2, TEXT: perplexity of a text file, read as one piece; WIKITEXT* undo WikiText's tokenization.
Of .jsonl, .json and .parquet, TEXT reads the texts under json_key, each followed by the end-of-text token.
DATA: perplexity of one split of token files, its documents laid end to end in their order.
Perplexities: windows of max_seq_length tokens move on by overlapping_eval tokens; the first one scores all its targets,
each later one those that are new, so that every token but the first, which nothing foretells, is scored once.
  loss          mean -log p per token, ppl = exp(min(20, loss))
  token_ratio   (num_tokens - 1) / (num_original_tokens - 1); original tokens are what stands between blanks in the file
  adjusted_ppl  exp(min(20, loss x token_ratio)), the perplexity per original token
With torchrun the windows are dealt out, each to one process; the numbers stay the same.
--json prints one flat object alone on stdout (the log goes to stderr): task, model, num_examples, batch_size,
max_seq_length; LAMBADA also num_correct_strict, accuracy_strict, num_correct_last_token, accuracy_last_token; the
others (an example is a window) also num_original_tokens, num_tokens, num_scored, loss, ppl, token_ratio, adjusted_ppl,
overlapping_eval, detokenizer. token_ratio and adjusted_ppl are null where there are no words: for a text without a
blank and for DATA, whose num_original_tokens and detokenizer are null too."""


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
    """What a trained model is worth on a public task, a text or token files."""

    task: str | None = arg(None, "what to measure", choices=TASKS)
    model_name_or_path: str | None = arg(
        None, "folder of a trained model with its tokenizer or of adapters, or a built-in name"
    )
    lora_path: str | None = arg(None, "folder of LoRA adapters (PEFT's files), added to the model's weights in memory")
    eval_path: str | None = arg(
        None,
        "LAMBADA: lines of JSON with a text; WIKITEXT*, TEXT: a text file in UTF-8; TEXT also .jsonl, .json, .parquet",
    )
    json_key: str = arg("text", "TEXT: key of the texts in .jsonl, .json and .parquet")
    cloze_eval: bool | None = arg(None, "FleetX's word for the task: true is LAMBADA, false is WIKITEXT103")
    input_dir: str | None = arg(None, "DATA: prefix of token files, or a folder with one pair of them")
    split: str = arg("949,50,1", "DATA: shares of train, valid and test, by sequence")
    split_name: str = arg("valid", "DATA: the split to score", choices=("train", "valid", "test"))
    max_seq_length: int | None = arg(
        None,
        "tokens in a window; unset: the model's position table, at most 1024. LAMBADA: a longer text keeps its end",
        ge=1,
    )
    overlapping_eval: int | None = arg(
        32, "new tokens in each window after the first, 1 to max_seq_length; none: max_seq_length", ge=1
    )
    batch_size: int = arg(
        8, "windows or texts that go through the model together; the numbers do not depend on it", ge=1
    )
    max_examples: int | None = arg(None, "stop after this many texts (LAMBADA) or windows; unset: all", ge=1)
    detokenizer: str = arg(
        "auto",
        "how a tokenized text is made prose; auto goes by the task, lambada changes nothing",
        choices=DETOKENIZERS,
    )
    allow_special_tokens: bool = arg(False, "let <|endoftext|> written in a text become its id")
    json: bool = arg(False, "print the result as one JSON object alone on stdout, everything else on stderr")
    logging_freq: int = arg(10, "batches between lines of progress", ge=1)
    ddp_timeout: int = arg(
        1800, "seconds a process waits for the others before it gives up", ge=1, le=1_000_000_000, unit="seconds"
    )
    device: str = arg("gpu", "gpu or cpu; gpu falls back to cpu, loudly, when there is none", check=bad_device)
    bf16: bool = arg(False, "load the weights in bfloat16; the loss is float32")
    fp16: bool = arg(False, "load the weights in float16; the loss is float32; float32 on a CPU")


@dataclass(frozen=True, kw_only=True)
class MegatronArguments:
    """Sizes that Megatron's commands repeat; here the model's config.json knows them, and these must agree with it."""

    num_layers: int | None = arg(None, "transformer layers")
    hidden_size: int | None = arg(None, "width of a token's vector")
    num_attention_heads: int | None = arg(None, "attention heads per layer")
    max_position_embeddings: int | None = arg(None, "rows of the position table")
    seq_length: int | None = arg(None, "the same as --max_seq_length", ge=1)


EVALUATE = Vocabulary(
    (EvaluateArguments, MegatronArguments),
    spellings_transformers.EVALUATE_RENAMED | spellings.EVALUATE_RENAMED,
    spellings_transformers.INFERENCE_IGNORED | spellings.EVALUATE_IGNORED,
    spellings_transformers.INFERENCE_REFUSED | spellings.EVALUATE_REFUSED,
    settings=spellings_transformers.INFERENCE_SETTINGS,
    sections=evaluation_arguments,
)


def parse_evaluate(argv: Sequence[str], processes: int = 1) -> tuple[EvaluateArguments, tuple[str, ...]]:
    """The arguments, with task, lengths and detokenizer resolved, and the lines to log.

    Raises:
        UsageError: listing everything that is wrong.
        GptlmError: if the model's config cannot be read.
    """
    parsed = resolve_evaluate(argv, processes)
    return build(EvaluateArguments, parsed.values), tuple(parsed.notes)


def resolve_evaluate(argv: Sequence[str], processes: int = 1, *, printing: bool = False) -> Parsed:
    """The command with everything filled in.

    Args:
        printing: for --print_config: a missing model is noted.

    Raises:
        UsageError: listing everything that is wrong.
        GptlmError: if the model's config cannot be read.
    """
    parsed = parse(EVALUATE, argv)
    take_external_model(parsed)
    take_external_adapters(parsed)
    _settle_task(parsed)
    groups = (build(group, parsed.values) for group in EVALUATE.groups)
    out_of_range = [problem.marked for problem in check_fields(*groups)]
    problems = [*out_of_range, *_missing(parsed, printing), *_device(parsed, processes)]
    if parsed.refusals and not printing:
        problems += parsed.refusals
    _refuse(problems, parsed)
    name = parsed.values["model_name_or_path"]
    if printing and not (name and (name in PRESETS or Path(name).is_dir())):
        parsed.note(f"the model {name} is not there: sizes and lengths are not checked")
    else:
        shape = _shape(name, parsed.values["lora_path"])
        _refuse([*_sizes(parsed, shape), *_lengths(parsed, shape)], parsed)
    return parsed


def _refuse(problems: list[str], parsed: Parsed) -> None:
    if problems:
        raise usage_error((Problem("", problem) for problem in problems), parsed.typed)


def _settle_task(parsed: Parsed) -> None:
    values = parsed.values
    task, cloze = values["task"], values["cloze_eval"]
    if task is None and cloze is None:
        raise UsageError(f"{named('task')} is missing: one of {', '.join(TASKS)}")
    if task is not None and cloze is not None and (task == "LAMBADA") != cloze:
        raise UsageError(
            f"{named('task')} {task} and {named('cloze_eval')} {str(cloze).lower()} name different tasks; give "
            f"{named('task')} alone"
        )
    values["task"] = task or ("LAMBADA" if cloze else "WIKITEXT103")
    if values["detokenizer"] == "auto":
        values["detokenizer"] = AUTO[values["task"]]


def _missing(parsed: Parsed, printing: bool) -> Iterator[str]:
    """Flags that the task needs, and given ones that another task needs."""
    values = parsed.values
    if not values["model_name_or_path"] and not printing:
        yield f"{named('model_name_or_path')} is missing: the folder of a trained model"
    if values["task"] == "DATA":
        if not values["input_dir"]:
            yield f"{named('input_dir')} is missing: the prefix of the token files"
        if values["eval_path"]:
            yield (
                f"{named('eval_path')} is a text, {named('task')} DATA scores token files: give "
                f"{named('input_dir')}, or {named('task')} TEXT"
            )
        if wrong := bad_split(values["split"]):
            yield Problem("split", wrong).marked
    else:
        if not values["eval_path"]:
            yield f"{named('eval_path')} is missing: the file {named('task')} {values['task']} reads"
        if values["input_dir"]:
            yield (
                f"{named('input_dir')} names token files, {named('task')} {values['task']} reads a text: give "
                f"{named('task')} DATA"
            )
        elif values["task"].startswith("WIKITEXT") and holds_records(values["eval_path"] or ""):
            yield (
                f"{named('task')} {values['task']} reads a whole file as one text, {values['eval_path']} holds "
                f"records: give {named('task')} TEXT, which reads the texts in them"
            )
    _note_other_tasks(parsed)


def _note_other_tasks(parsed: Parsed) -> None:
    task = parsed.values["task"]
    idle = {
        "LAMBADA": ("overlapping_eval", "split", "split_name", "json_key"),
        "DATA": ("detokenizer", "json_key", "allow_special_tokens"),
        "TEXT": ("split", "split_name"),
    }
    for name in idle.get(task, ("split", "split_name", "json_key")):
        if not parsed.is_default(name):
            parsed.note(f"--{name} has no effect with --task {task}")
    if task == "DATA":
        parsed.values["detokenizer"] = "none"


def _device(parsed: Parsed, processes: int) -> Iterator[str]:
    device = parsed.values["device"]
    if ":" in device and processes > 1:
        yield (f"{named('device')} {device!r} is one card, there are {processes} processes; use {named('device')} gpu")
    if parsed.values["fp16"] and parsed.values["bf16"]:
        yield f"{named('fp16')} and {named('bf16')} exclude each other; give one"


def _shape(name: str, lora_path: str | None) -> Shape:
    """The sizes of the model `name`, from its config.json or our table; adapters must be of these sizes."""
    base, adapters = base_and_adapters(name, lora_path)
    shape = _base_shape(base, base_hint(adapters))
    if adapters:
        check_fit(Path(adapters), shape)
    return shape


def _base_shape(name: str, hint: str) -> Shape:
    if Path(name).is_dir():
        return shape_of_config(Path(name) / "config.json")
    preset = PRESETS.get(name)
    if preset is None:
        raise GptlmError(f"{named('model_name_or_path')} {name!r} is neither a folder nor a built-in name{hint}")
    if preset.hub_id is None:
        raise GptlmError(f"no weights were ever published for {name}, it is a size only; give a trained folder")
    return preset.shape


def _sizes(parsed: Parsed, shape: Shape) -> Iterator[str]:
    owned = {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    for name, own in owned.items():
        given = parsed.values[name]
        if given is not None and given != own:
            yield (
                f"{named(name)} {given}: the model {parsed.values['model_name_or_path']} has {own}; leave the flag out"
            )


def _lengths(parsed: Parsed, shape: Shape) -> Iterator[str]:
    """Settle `max_seq_length` and `overlapping_eval`."""
    values, positions = parsed.values, shape.max_position_embeddings
    given = {values[name] for name in ("max_seq_length", "seq_length")} - {None}
    if len(given) > 1:
        yield (
            f"{named('max_seq_length')} {values['max_seq_length']} and {named('seq_length')} "
            f"{values['seq_length']} differ; give one"
        )
        return
    length = values["max_seq_length"] = given.pop() if given else min(positions, LONGEST_DEFAULT)
    if length > positions:
        yield (
            f"{named('max_seq_length')} {length}: the model {values['model_name_or_path']} has a position table of "
            f"{positions}; give {positions} or less"
        )
    step = values["overlapping_eval"]
    if step is None or (step > length and parsed.is_default("overlapping_eval")):
        values["overlapping_eval"] = length
    elif step > length and values["task"] != "LAMBADA":
        yield f"{named('overlapping_eval')} {step}: expected 1 to {named('max_seq_length')} ({length})"
