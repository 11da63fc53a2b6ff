"""`gptlm evaluate`: Megatron-LM's `tasks/main.py` and PaddleFleetX's `Offline_Eval` in one command."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gptlm.checkpoint.task import note_other_tasks, take_own_adapters
from gptlm.commands.tensor_parallel import find_shape, process_problems, split_problems
from gptlm.compat import paddlenlp, transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model
from gptlm.compat.fleetx.translate import evaluation_arguments
from gptlm.config.args.inference import TASKS, EvaluateArguments, SizeArguments
from gptlm.config.args.training import bad_split
from gptlm.config.field import check_fields
from gptlm.config.parser import Parsed, Vocabulary, parse
from gptlm.config.problem import Problem, usage_error
from gptlm.data.text_files import holds_records
from gptlm.errors import UsageError, named
from gptlm.model.presets import PRESETS, Shape

DETOKENIZER_OF_TASK = {"LAMBADA": "lambada", "WIKITEXT103": "wikitext", "WIKITEXT2": "wikitext", "TEXT": "none"}
LONGEST_DEFAULT = 1024  # tokens, GPT-2's position embedding
UNUSED = {  # task -> arguments without effect
    "LAMBADA": ("overlapping_eval", "split", "split_name", "json_key"),
    "WIKITEXT103": ("split", "split_name", "json_key"),
    "WIKITEXT2": ("split", "split_name", "json_key"),
    "TEXT": ("split", "split_name"),
    "DATA": ("detokenizer", "json_key", "allow_special_tokens"),
}

HELP = """
LAMBADA: accuracy of predicting the last word. Input: lines of {"text": ...}. Two metrics are always printed:
  strict      every token of the last word is the most likely one, given the text before it without the final blank
  last token  the last token of the tokenized text is the most likely one

WIKITEXT103, WIKITEXT2, TEXT: perplexity of a text file, read as one document. WIKITEXT* undo WikiText's tokenization.
TEXT reads the texts under --json_key from .jsonl, .json and .parquet, each followed by the end-of-text token.

DATA: perplexity of one split of token files, with all documents concatenated in their order.

Perplexity uses windows of --max_seq_length tokens with a stride of --overlapping_eval tokens. The first window scores
all its targets, later windows the new ones only, so every token except the first is scored once.
  loss          mean -log p per token; ppl = exp(min(20, loss))
  token_ratio   (num_tokens - 1) / (num_original_tokens - 1); original tokens are separated by blanks in the file
  adjusted_ppl  exp(min(20, loss x token_ratio)), the perplexity per original token

With torchrun, windows are distributed over processes; the results do not change. --tensor_parallel_degree N splits the
model over N processes each, for models that do not fit on one GPU: each loads its part of the weights.

--json prints one flat object: task, model, num_examples, batch_size (null: unset), max_seq_length. LAMBADA adds
num_correct_strict, accuracy_strict, num_correct_last_token, accuracy_last_token. The other tasks (an example is a
window) add num_original_tokens, num_tokens, num_scored, loss, ppl, token_ratio, adjusted_ppl, overlapping_eval,
detokenizer. token_ratio and adjusted_ppl are null for a text without a blank and for DATA. For DATA,
num_original_tokens and detokenizer are null too."""

EVALUATE = Vocabulary(
    (EvaluateArguments, SizeArguments),
    transformers.EVALUATE_RENAMED | paddlenlp.EVALUATE_RENAMED,
    transformers.INFERENCE_IGNORED | paddlenlp.EVALUATE_IGNORED,
    transformers.INFERENCE_REFUSED | paddlenlp.EVALUATE_REFUSED,
    settings=transformers.INFERENCE_SETTINGS,
    sections=evaluation_arguments,
)


def parse_evaluate(argv: Sequence[str], processes: int = 1) -> tuple[EvaluateArguments, tuple[str, ...]]:
    """The resolved arguments and the lines to log. Raises as `resolve_evaluate`."""
    parsed = resolve_evaluate(argv, processes)
    return parsed[EvaluateArguments], tuple(parsed.notes)


def resolve_evaluate(argv: Sequence[str], processes: int = 1, *, printing: bool = False) -> Parsed:
    """The command with task, detokenizer and lengths filled in.

    Args:
        printing: for --print_config: a missing model is in `Parsed.missing`.

    Raises:
        UsageError: listing everything that is wrong.
        GptlmError: if the model's config cannot be read.
    """
    parsed = parse(EVALUATE, argv)
    take_external_model(parsed)
    take_own_adapters(parsed)
    take_external_adapters(parsed)
    note_other_tasks(parsed)
    _derive_task(parsed)
    arguments, sizes = parsed[EvaluateArguments], parsed[SizeArguments]
    degree = max(arguments.tensor_parallel_degree, 1)
    arguments = parsed.put(replace(arguments, tensor_parallel_degree=degree))
    task = arguments.task or ""
    problems = [
        *check_fields(arguments, sizes),
        *_input_problems(arguments, task),
        *_device_problems(arguments, processes),
        *(process_problems(degree, processes, "evaluate", replicas=True) if not printing else ()),
    ]
    name = arguments.model_name_or_path
    missing = Problem("model_name_or_path", "is missing: the folder of a trained model")
    if not name and printing:
        parsed.note_missing(missing)
    elif not name:
        problems.append(missing)
    problems += [Problem("", line) for line in parsed.refusals if not printing]
    for unused in UNUSED[task]:
        if not parsed.is_default(unused):
            parsed.note(f"{named(unused)} has no effect with {named('task')} {task}")
    if problems:
        raise usage_error(problems, parsed.typed)
    if not name:
        return parsed
    if printing and name not in PRESETS and not Path(name).is_dir():
        parsed.note(f"model {name} not found: sizes and lengths are not checked")
        return parsed
    shape = find_shape(name, arguments.lora_path)
    problems = [
        *split_problems(arguments.tensor_parallel_degree, name, arguments.lora_path, shape),
        *_size_problems(sizes, name, shape),
        *_derive_lengths(parsed, name, shape.max_position_embeddings),
    ]
    if problems:
        raise usage_error(problems, parsed.typed)
    return parsed


def _derive_task(parsed: Parsed) -> None:
    arguments = parsed[EvaluateArguments]
    task, cloze = arguments.task, arguments.cloze_eval
    if task is None and cloze is None:
        raise UsageError(f"{named('task')} is missing: one of {', '.join(TASKS)}")
    if task is not None and cloze is not None and (task == "LAMBADA") != cloze:
        other = f"{named('cloze_eval')} {str(cloze).lower()}"
        text = f"{task} and {other} name different tasks; give {named('task')} alone"
        raise usage_error([Problem("task", text)], parsed.typed)
    task = task or ("LAMBADA" if cloze else "WIKITEXT103")
    detokenizer = arguments.detokenizer
    if task == "DATA":
        detokenizer = "none"
    elif detokenizer == "auto":
        detokenizer = DETOKENIZER_OF_TASK[task]
    parsed.put(replace(arguments, task=task, detokenizer=detokenizer))


def _input_problems(arguments: EvaluateArguments, task: str) -> Iterator[Problem]:
    """Arguments that the task needs, and arguments of another task."""
    if task == "DATA":
        if not arguments.input_dir:
            yield Problem("input_dir", "is missing: the prefix of the token files")
        if arguments.eval_path:
            remedy = f"give {named('input_dir')}, or {named('task')} TEXT"
            yield Problem("eval_path", f"is a text, {named('task')} DATA reads token files: {remedy}")
        if wrong := bad_split(arguments.split):
            yield Problem("split", wrong)
        return
    if not arguments.eval_path:
        yield Problem("eval_path", f"is missing: the file that {named('task')} {task} reads")
    if arguments.input_dir:
        remedy = f"give {named('task')} DATA"
        yield Problem("input_dir", f"names token files, {named('task')} {task} reads a text: {remedy}")
    elif task.startswith("WIKITEXT") and holds_records(arguments.eval_path or ""):
        yield Problem(
            "task",
            f"{task} reads a whole file as one text, {arguments.eval_path} holds records: give {named('task')} TEXT, "
            "which reads the texts in them",
        )


def _device_problems(arguments: EvaluateArguments, processes: int) -> Iterator[Problem]:
    device = arguments.device
    if ":" in device and processes > 1:
        remedy = f"use {named('device')} gpu"
        yield Problem("device", f"{device!r} is one GPU for {processes} processes; {remedy}")
    if arguments.fp16 and arguments.bf16:
        yield Problem("fp16", f"and {named('bf16')} exclude each other; give one")


def _size_problems(sizes: SizeArguments, name: str, shape: Shape) -> Iterator[Problem]:
    pairs = {
        "num_layers": (sizes.num_layers, shape.num_hidden_layers),
        "hidden_size": (sizes.hidden_size, shape.hidden_size),
        "num_attention_heads": (sizes.num_attention_heads, shape.num_attention_heads),
        "max_position_embeddings": (sizes.max_position_embeddings, shape.max_position_embeddings),
    }
    for flag, (given, own) in pairs.items():
        if given is not None and given != own:
            yield Problem(flag, f"{given}: the model {name} has {own}; leave the flag out")


def _derive_lengths(parsed: Parsed, name: str, positions: int) -> Iterator[Problem]:
    """Fill in `max_seq_length` and `overlapping_eval`."""
    arguments, seq_length = parsed[EvaluateArguments], parsed[SizeArguments].seq_length
    length, step = arguments.max_seq_length, arguments.overlapping_eval
    if length is not None and seq_length is not None and length != seq_length:
        yield Problem("max_seq_length", f"{length} and {named('seq_length')} {seq_length} differ; give one")
        return
    length = length or seq_length or min(positions, LONGEST_DEFAULT)
    if length > positions:
        remedy = f"give {positions} or less"
        yield Problem("max_seq_length", f"{length}: the model {name} has a position table of {positions}; {remedy}")
    if step is None or (step > length and parsed.is_default("overlapping_eval")):
        step = length
    elif step > length and arguments.task != "LAMBADA":
        yield Problem("overlapping_eval", f"{step}: expected 1 to {named('max_seq_length')} ({length})")
    parsed.put(replace(arguments, max_seq_length=length, overlapping_eval=step))
