"""The complete workflow on text that every Python contains: tokenizer, token files, pretraining, continuations."""

import ast
import json
import math
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from gptlm.commands.predict import parse_predict
from gptlm.commands.preprocess import parse_preprocess
from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.tokenizer import parse_tokenizer
from gptlm.config.args.data import DemoArguments
from gptlm.disk import write_failure
from gptlm.errors import GptlmError
from gptlm.recipes.common.command_results import check_files, maker, note_files
from gptlm.recipes.predict import predict
from gptlm.recipes.preprocess import preprocess
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.train_tokenizer import tokenizer

PROMPTS = ("Return a list of", "The function raises", "This class is used to")
MIN_CHARACTERS = 80  # shorter docstrings carry little text
TOKENIZER = """--input_path {folder}/corpus.jsonl --output_dir {folder}/tokenizer --vocab_size 2048
    --overwrite"""
PREPROCESS = """--input_path {folder}/corpus.jsonl --model_name_or_path {folder}/tokenizer
    --output_prefix {folder}/data/python --append_eos --workers {workers} --overwrite"""
PRETRAIN = """--num_hidden_layers 3 --hidden_size 256 --num_attention_heads 4 --vocab_size 2048 --max_seq_length 128
    --input_dir {folder}/data --output_dir {folder}/model --overwrite_output_dir --split 90,8,2
    --per_device_train_batch_size 16 --per_device_eval_batch_size 16
    --max_steps {steps} --learning_rate 2e-3 --min_learning_rate 2e-4
    --lr_scheduler_type cosine --warmup_steps {tenth} --weight_decay 0.1
    --hidden_dropout_prob 0 --attention_probs_dropout_prob 0
    --logging_steps {tenth} --eval_steps {half} --save_steps {steps}
    --do_train --do_eval --eval_on_start --eval_iters 4 --device cpu"""
PREDICT = """--model_name_or_path {folder}/model --tgt_length 40 --device cpu --do_sample --top_k 20 --temperature 0.7
    --output_file {folder}/continuations.jsonl --overwrite --prompt"""


def demo(arguments: DemoArguments) -> dict[str, float]:
    """Run the four commands, printing each as it would be typed; returns the metrics of pretraining."""
    folder, steps = Path(arguments.output_dir), arguments.max_steps
    tenth = max(1, steps // 10)
    values = {"folder": folder, "workers": arguments.workers, "steps": steps, "tenth": tenth, "half": tenth * 5}

    def command(name: str, flags: str, more: tuple[str, ...] = ()) -> list[str]:
        words = [*(word.format_map(values) for word in flags.split()), *more]  # split first: the folder may have spaces
        shown = " ".join(f'"{word}"' if " " in word else word for word in words)
        print(f"\n$ gptlm {name} {shown}", flush=True)
        return words

    corpus = folder / "corpus.jsonl"
    by = maker("demo", {}, [], overwrite=True)
    check_files("output_dir", [corpus], by)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size = _write_corpus(corpus)
        note_files([corpus], by)
    except OSError as error:
        raise GptlmError(f"cannot write {corpus}: {write_failure(error, corpus)}") from error
    print(f"text of this Python ({sysconfig.get_python_version()}): {size / 1e6:.1f} MB in {corpus}")
    tokenizer(parse_tokenizer(command("tokenizer", TOKENIZER)))
    preprocess(parse_preprocess(command("preprocess", PREPROCESS)))
    metrics = pretrain(parse_pretrain(command("pretrain", PRETRAIN), os.environ))
    predict(*parse_predict(command("predict", PREDICT, PROMPTS)))
    _print_summary(folder)
    return metrics


def _write_corpus(path: Path) -> int:
    with open(path, "w", encoding="utf-8") as file:
        for text in _documents():
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path.stat().st_size


def _documents() -> Iterator[str]:
    """Yield the topics of the language reference and every docstring of the standard library, in a fixed order."""
    yield from (_unwrap(topics.topics[name]) for name in sorted(topics.topics))
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "lib2to3"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) >= MIN_CHARACTERS:
                    yield _unwrap(text)


def _unwrap(text: str) -> str:
    """Join the lines of each paragraph. Indented lines are code and stay."""
    return re.sub(r"(?<=\S)\n(?=[A-Za-z(`'\"])", " ", text)


def _print_summary(folder: Path) -> None:
    history = json.loads((folder / "model" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    print()
    for line in (folder / "continuations.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        print(f"{row['prompt']!r} -> {row['continuation']!r}")
    print(f"\nvalidation loss: {losses[0]:.3f} before training, {losses[-1]:.3f} after {history[-1]['step']} steps")
    print(f"validation perplexity: {math.exp(losses[0]):.1f} before, {math.exp(losses[-1]):.1f} after")
    print(
        f"written: {folder}/tokenizer, {folder}/data, {folder}/model (loads with AutoModelForCausalLM), "
        f"{folder}/continuations.jsonl"
    )
