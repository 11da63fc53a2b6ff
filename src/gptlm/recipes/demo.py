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

from gptlm.commands.pretrain import parse_pretrain
from gptlm.config.args.predict import parse_predict
from gptlm.config.args.preprocess import DemoArguments, parse_preprocess, parse_tokenizer
from gptlm.recipes.predict import predict
from gptlm.recipes.preprocess import preprocess
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.train_tokenizer import tokenizer

PROMPTS = ("Return a list of", "The function raises", "This class is used to")
MIN_CHARACTERS = 80  # shorter docstrings carry little text
VOCABULARY = 2048


def demo(arguments: DemoArguments) -> dict[str, float]:
    """Run the four commands, printing each as it would be typed; returns the metrics of pretraining."""
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    print(f"text of this Python ({sysconfig.get_python_version()}): {_write_corpus(corpus) / 1e6:.1f} MB in {corpus}")
    tokenizer(parse_tokenizer(_print_command("train_tokenizer.py", _tokenizer_words(folder))))
    preprocess(parse_preprocess(_print_command("preprocess_data.py", _preprocess_words(folder, arguments.workers))))
    run = parse_pretrain(_print_command("run_pretrain.py", _pretrain_words(folder, arguments.max_steps)), os.environ)
    metrics = pretrain(run)
    predict(*parse_predict(_print_command("predict_generation.py", _predict_words(folder))))
    _summary(folder, metrics)
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


def _print_command(script: str, words: list[str]) -> list[str]:
    command = " ".join(f'"{word}"' if " " in word else word for word in words)
    print(f"\n$ python scripts/{script} {command}", flush=True)
    return words


def _tokenizer_words(folder: Path) -> list[str]:
    return [
        *("--input_path", f"{folder}/corpus.jsonl"),
        *("--output_dir", f"{folder}/tokenizer", "--vocab_size", str(VOCABULARY)),
    ]


def _preprocess_words(folder: Path, workers: int) -> list[str]:
    return [
        *("--input_path", f"{folder}/corpus.jsonl", "--model_name_or_path", f"{folder}/tokenizer"),
        *("--output_prefix", f"{folder}/data/python", "--append_eos", "--workers", str(workers)),
    ]


def _pretrain_words(folder: Path, steps: int) -> list[str]:
    tenth = max(1, steps // 10)
    return [
        *("--num_hidden_layers", "3", "--hidden_size", "256", "--num_attention_heads", "4"),
        *("--vocab_size", str(VOCABULARY), "--max_seq_length", "128", "--input_dir", f"{folder}/data"),
        *("--output_dir", f"{folder}/model", "--overwrite_output_dir", "--split", "90,8,2"),
        *("--per_device_train_batch_size", "16", "--per_device_eval_batch_size", "16"),
        *("--max_steps", str(steps), "--learning_rate", "2e-3", "--min_learning_rate", "2e-4"),
        *("--lr_scheduler_type", "cosine", "--warmup_steps", str(tenth), "--weight_decay", "0.1"),
        *("--hidden_dropout_prob", "0", "--attention_probs_dropout_prob", "0"),
        *("--logging_steps", str(tenth), "--eval_steps", str(tenth * 5), "--save_steps", str(steps)),
        *("--do_train", "--do_eval", "--eval_on_start", "--eval_iters", "4", "--device", "cpu"),
    ]


def _predict_words(folder: Path) -> list[str]:
    return [
        *("--model_name_or_path", f"{folder}/model", "--tgt_length", "40", "--device", "cpu"),
        *("--do_sample", "--top_k", "20", "--temperature", "0.7"),
        *("--output_file", f"{folder}/continuations.jsonl", "--prompt", *PROMPTS),
    ]


def _summary(folder: Path, metrics: dict[str, float]) -> None:
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
