"""One function per command: parse the words, import the recipe, and run it.

Recipes are imported when they run, so that help, wrong arguments and --print_config import nothing heavy.
"""

import atexit
import gc
import os
import stat
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from gptlm.commands.chat import CHAT, parse_chat, resolve_chat
from gptlm.commands.convert import CONVERT, parse_convert
from gptlm.commands.data import CHECK, COPY, ORDER, PREFIX, parse_check, parse_copy, parse_order, parse_prefix
from gptlm.commands.demo import DEMO, parse_demo
from gptlm.commands.evaluate import EVALUATE, parse_evaluate, resolve_evaluate
from gptlm.commands.evaluate import HELP as EVALUATE_HELP
from gptlm.commands.merge_lora import MERGE, parse_merge, resolve_merge
from gptlm.commands.plan import PLAN, parse_plan, with_layout
from gptlm.commands.predict import PREDICT, parse_predict, resolve_predict
from gptlm.commands.preprocess import PREPROCESS, parse_preprocess
from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.commands.report import REPORT, parse_report
from gptlm.commands.serve import SERVE, parse_serve, resolve_serve
from gptlm.commands.sft import SFT, parse_sft
from gptlm.commands.tokenizer import TOKENIZER, parse_tokenizer
from gptlm.compat.auto_convert import ConversionNeeded, with_conversions
from gptlm.config.args.inference import STDIN, PredictArguments
from gptlm.config.help import help_text
from gptlm.config.parser import Parsed, Vocabulary
from gptlm.config.run import Run
from gptlm.config.validate import check_readable
from gptlm.data.corpora import parse_input
from gptlm.errors import GptlmError, UsageError, flags_as_typed
from gptlm.failures import DEBUG_HELP, logged_in
from gptlm.launcher.args import HELP as LAUNCH_HELP
from gptlm.launcher.args import LAUNCH, check_cards, parse_launch
from gptlm.model.adapter_files import base_and_adapters, read_adapter_config
from gptlm.model.hub import adapter_folder
from gptlm.ranks import check_connection, world_size
from gptlm.upstream.transformers import import_quickly

# The interpreter's last garbage collection visits all that torch and transformers have made, for 1 to 3 s.
atexit.register(gc.freeze)

Answering = TypeVar("Answering", bound=PredictArguments)
HELP = ("-h", "--help")
PRINT_CONFIG = ("--print_config", "--print-config")
PRINT_HELP = """
With --print_config nothing runs: the resolved run, the origin of each value and all log lines are printed as JSON. What
the command lacks to be started, such as data, is an error all the same."""


def pretrain(argv: Sequence[str]) -> int | None:
    typed, printing = _without_print_config(argv)
    convert_first = None if printing else _convert
    words, why = with_conversions(lambda: with_layout(typed, os.environ), convert_first)
    run = with_conversions(lambda: parse_pretrain(words, os.environ, printing=printing), convert_first)
    if not run.refusals:
        try:  # before the imports, which take seconds
            with flags_as_typed(run.typed):
                if not run.data.reads_text:
                    parse_input(run.data.input_dir or "")
        except GptlmError as error:
            if not printing:
                raise
            run = replace(run, notes=(*run.notes, str(error))) if run.data.input_dir else run
    if why:
        run = replace(run, notes=(*run.notes, why))
    if printing:
        _print_run(run)
        return None
    if run.launch:  # the command asks for processes that no launcher has started
        words = [*run.launch, "-m", "gptlm", "pretrain", *typed]  # each process chooses the layout again
        with flags_as_typed(run.typed):
            return launch(words, on_gpus=not run.training.device.lower().startswith("cpu"))
    check_connection(os.environ)
    hide_other_gpus(run.training.device, os.environ)
    with logged_in(run.training.output_dir):
        with importing(trainer=True):
            from gptlm.recipes.common.hub_upload import uploading
            from gptlm.recipes.pretrain.run import pretrain as recipe
        with flags_as_typed(run.typed), uploading(run) as hooks:
            recipe(run, hooks)
    return None


def sft(argv: Sequence[str]) -> None:
    words, printing = _without_print_config(argv)
    run = with_conversions(lambda: parse_sft(words, os.environ, printing=printing), None if printing else _convert)
    if printing:
        _print_run(run)
        return
    check_connection(os.environ)
    hide_other_gpus(run.training.device, os.environ)
    with logged_in(run.training.output_dir):
        with importing(trainer=True):
            from gptlm.recipes.common.hub_upload import uploading
            from gptlm.recipes.sft.run import sft as recipe
        with flags_as_typed(run.typed), uploading(run) as hooks:
            recipe(run, hooks)


def merge_lora(argv: Sequence[str]) -> None:
    words, printing = _without_print_config(argv)
    if printing:
        print(resolve_merge(words).as_json())
        return
    command = with_conversions(lambda: parse_merge(words), _convert)
    read_adapter_config(adapter_folder(command.main.lora_path or ""))
    with logged_in(command.main.output_path):
        with importing():
            from gptlm.recipes.merge_lora import merge_lora as recipe
        recipe(command)


def convert(argv: Sequence[str]) -> int | None:
    conversion = parse_convert(argv)
    if conversion.main.check is not None:
        from gptlm.recipes.check_checkpoints import check_checkpoints

        return check_checkpoints(Path(conversion.main.check))
    with logged_in(Path(conversion.main.output or "").parent):
        with importing():
            from gptlm.recipes.convert import convert as recipe
        recipe(conversion)
    return None


def preprocess(argv: Sequence[str]) -> None:
    job = parse_preprocess(argv)
    with logged_in(Path(job.arguments.output_prefix or "").parent):
        from gptlm.recipes.preprocess import preprocess as recipe

        recipe(job)


def tokenizer(argv: Sequence[str]) -> None:
    arguments = parse_tokenizer(argv)
    with logged_in(arguments.output_dir):
        from gptlm.recipes.train_tokenizer import tokenizer as recipe

        recipe(arguments)


def predict(argv: Sequence[str]) -> None:
    words = _words_unless_printed(argv, lambda words: resolve_predict(words, printing=True, piped=_piped()))
    if words is None:
        return
    processes = world_size()
    arguments, notes = with_conversions(lambda: parse_predict(words, processes, piped=_piped()), _convert_on_stderr)
    check_readable("input_file", None if arguments.input_file == STDIN else arguments.input_file)
    if arguments.tensor_parallel_degree > 1:
        check_connection(os.environ)
    base_and_adapters(arguments.model_name_or_path, arguments.lora_path)
    if arguments.serve and find_spec("gradio") is None:
        raise GptlmError("--serve needs gradio; install it with pip install 'gptlm[serve]'")
    hide_other_gpus(arguments.device, os.environ)
    if arguments.serve:
        with importing():
            from gptlm.recipes.serve import serve
        serve(arguments, notes)
        return
    with importing():
        from gptlm.recipes.predict import predict as recipe
    recipe(arguments, notes)


def chat(argv: Sequence[str]) -> None:
    words = _words_unless_printed(argv, lambda words: resolve_chat(words, printing=True))
    if words is None:
        return
    arguments, notes = _conversation(parse_chat, words)
    with importing():
        from gptlm.recipes.chat import chat as recipe
    recipe(arguments, notes)


def serve(argv: Sequence[str]) -> None:
    words = _words_unless_printed(argv, lambda words: resolve_serve(words, printing=True))
    if words is None:
        return
    arguments, notes = _conversation(parse_serve, words)
    with importing():
        from gptlm.recipes.openai_server import serve_api
    serve_api(arguments, notes)


def evaluate(argv: Sequence[str]) -> None:
    words = _words_unless_printed(argv, lambda words: resolve_evaluate(words, printing=True))
    if words is None:
        return
    processes = world_size()
    arguments, notes = with_conversions(lambda: parse_evaluate(words, processes), _convert_on_stderr)
    check_readable("eval_path", arguments.eval_path)
    if processes > 1:
        check_connection(os.environ)
    hide_other_gpus(arguments.device, os.environ)
    with importing():
        from gptlm.recipes.evaluate import evaluate as recipe
    recipe(arguments, notes)


def report(argv: Sequence[str]) -> None:
    arguments = parse_report(argv)
    from gptlm.recipes.report.run import report as recipe

    recipe(arguments)


def demo(argv: Sequence[str]) -> None:
    arguments = parse_demo(argv)
    with logged_in(arguments.output_dir):
        from gptlm.recipes.demo import demo as recipe

        recipe(arguments)


def launch(argv: Sequence[str], *, on_gpus: bool = False) -> int:
    """Start processes; `on_gpus` refuses more of them than there are GPUs."""
    from gptlm.launcher.run import count_cards, is_own
    from gptlm.launcher.run import launch as recipe

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    plan = parse_launch(argv, visible, count_cards=count_cards, is_own=is_own)
    if on_gpus:
        check_cards(plan, visible, count_cards)
    return recipe(plan)


def plan(argv: Sequence[str]) -> None:
    job = parse_plan(argv)
    from gptlm.planner.report import plan as recipe

    recipe(job)


def data(argv: Sequence[str]) -> None:
    tool, words = (argv[0], argv[1:]) if argv else ("", [])
    if not argv:
        raise UsageError(f"give a data tool: {', '.join(DATA_TOOLS)}")
    if tool not in DATA_TOOLS:
        raise UsageError(f"{tool!r} is not a data tool; expected one of {', '.join(DATA_TOOLS)}")
    if any(word in HELP for word in words):
        print(help_text(f"gptlm data {tool}", DATA_TOOLS[tool][0] + DEBUG_HELP, DATA_TOOLS[tool][1]), end="")
        return
    parsed = DATA_TOOLS[tool][2](words)
    from gptlm.recipes import data_tools as recipes

    tools: dict[str, Callable[[Any], object]] = {
        "check": recipes.check,
        "stats": recipes.stats,
        "show": recipes.show,
        "order": recipes.order,
        "index": recipes.index,
        "merge": recipes.copy,
        "convert": recipes.copy,
    }
    tools[tool](parsed)


@contextmanager
def importing(*, trainer: bool = False) -> Iterator[None]:
    """transformers is imported quickly, and what is imported here without garbage collection.

    Collecting takes a seventh of the time of large imports and finds nothing. Later collections skip what they made,
    which is most of the objects of a small run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import_quickly(trainer=trainer)
        yield
    finally:
        if not gc.get_freeze_count():  # a second run of one process must not keep the garbage of the first
            gc.freeze()
        if was_enabled:
            gc.enable()


def _conversation(
    parse: Callable[[Sequence[str]], tuple[Answering, tuple[str, ...]]], argv: Sequence[str]
) -> tuple[Answering, tuple[str, ...]]:
    """Arguments and notes of a command that answers messages, after its model and GPU are found."""
    arguments, notes = with_conversions(lambda: parse(argv), _convert_on_stderr)
    base_and_adapters(arguments.model_name_or_path, arguments.lora_path)
    hide_other_gpus(arguments.device, os.environ)
    return arguments, notes


def _convert(needed: ConversionNeeded) -> None:
    from gptlm.recipes.convert import convert_once

    convert_once(needed.path, needed.result.parent, needed.heads, needed.vocabulary)


def _convert_on_stderr(needed: ConversionNeeded) -> None:
    """For commands with results on stdout."""
    with redirect_stdout(sys.stderr):
        _convert(needed)


def _piped() -> bool:
    """Whether standard input is a pipe, a file or a socket, and not closed, a terminal or /dev/null."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # closed, or an object without a file descriptor
        return False


def _without_print_config(argv: Sequence[str]) -> tuple[list[str], bool]:
    words = [word for word in argv if word not in PRINT_CONFIG]
    return words, len(words) < len(argv)


def _words_unless_printed(argv: Sequence[str], resolve: Callable[[Sequence[str]], Parsed]) -> list[str] | None:
    """The words of a command that is to run; None if --print_config was among them, and what `resolve` returns printed.

    Raises:
        UsageError: as `_print_json`.
    """
    words, printing = _without_print_config(argv)
    if not printing:
        return words
    found = resolve(words)
    _print_json(found.as_json(), found.missing)
    return None


def _print_run(run: Run) -> None:
    if run.parallel.deepspeed:  # checking this file needs torch and DeepSpeed
        with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout, which is for the JSON here
            from gptlm.recipes.common.deepspeed import check_file

            check_file(run)
    _print_json(run.as_json(), run.missing)


def _print_json(text: str, missing: Sequence[str]) -> None:
    """Print a resolved command. Raises UsageError if it lacks something to be started, as its start would."""
    print(text, flush=True)
    if missing:
        raise UsageError("\n".join(missing))


def _parse_index(argv: Sequence[str]) -> Run:
    return parse_pretrain(argv, os.environ, printing=True)


INDEX_SUMMARY = "Build the sample index of a pretraining command; takes its arguments and --world_size."
DATA_TOOLS: dict[str, tuple[str, Vocabulary, Callable[[Sequence[str]], Any]]] = {
    "check": ("Check that token files are complete.", CHECK, parse_check),
    "stats": ("Statistics of one corpus.", PREFIX, parse_prefix),
    "show": ("Print one training sample with its document boundaries.", ORDER, parse_order),
    "order": ("Print which samples each split contains, with a hash.", ORDER, parse_order),
    "merge": ("Merge corpora into one.", COPY, parse_copy),
    "convert": ("Write a corpus in another format.", COPY, parse_copy),
    "index": (INDEX_SUMMARY, PRETRAIN, _parse_index),
}


@dataclass(frozen=True)
class Command:
    """One command: its function, summary, script in scripts/, and arguments."""

    run: Callable[[Sequence[str]], int | None]
    summary: str
    script: str
    vocabulary: Vocabulary
    more_help: str = ""


COMMANDS = {
    "pretrain": Command(pretrain, "Pretrain a GPT on token files.", "run_pretrain.py", PRETRAIN, PRINT_HELP),
    "sft": Command(sft, "Fine-tune a GPT on prompts and responses.", "finetune_generation.py", SFT, PRINT_HELP),
    "merge-lora": Command(merge_lora, "Merge LoRA adapters into the weights of a model.", "merge_lora.py", MERGE),
    "convert": Command(convert, "Convert checkpoints from and to other libraries.", "convert_checkpoint.py", CONVERT),
    "preprocess": Command(preprocess, "Turn text into token files.", "preprocess_data.py", PREPROCESS),
    "tokenizer": Command(tokenizer, "Train a tokenizer on text.", "train_tokenizer.py", TOKENIZER),
    "predict": Command(predict, "Continue prompts with a trained model.", "predict_generation.py", PREDICT),
    "chat": Command(chat, "Talk to a model in the terminal.", "chat.py", CHAT),
    "serve": Command(serve, "Serve a model to clients of OpenAI's API.", "serve.py", SERVE),
    "evaluate": Command(evaluate, "Accuracy and perplexity of a model.", "evaluate.py", EVALUATE, EVALUATE_HELP),
    "report": Command(report, "Draw the curves and the data of training runs as a page.", "report.py", REPORT),
    "data": Command(data, "Inspect token files: " + ", ".join(DATA_TOOLS) + ".", "data_tools.py", Vocabulary(())),
    "plan": Command(plan, "Find parallel layouts for a number of GPUs.", "plan.py", PLAN),
    "launch": Command(launch, "Start a script on all GPUs of one or several nodes.", "launch.py", LAUNCH, LAUNCH_HELP),
    "demo": Command(demo, "Run the complete workflow on text that every Python contains.", "demo.py", DEMO),
}


def hide_other_gpus(device: str, environment: MutableMapping[str, str]) -> None:
    """With `gpu:N` this process sees GPU N only. Must be called before CUDA is initialized."""
    _, _, index = device.partition(":")
    if index:
        visible = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        known = visible[int(index)] if int(index) < len(visible) else "-1"
        environment["CUDA_VISIBLE_DEVICES"] = known if visible else index
