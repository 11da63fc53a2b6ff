"""Who may import whom: a folder imports from lower floors only, and inside a folder there are no circles."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gptlm"
SCRIPTS = Path(__file__).parents[1] / "scripts"
FLOORS = {
    "errors": -1,
    "failures": 0,
    "quiet": 0,
    "data": 0,
    "model": 0,
    "parallel": 0,
    "checkpoints": 1,
    "config": 2,
    "training": 2,
    "inference": 2,
    "recipes": 3,
    "cli": 4,
    "__main__": 5,
    "launch": 5,
    "__init__": -2,
}


def room(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


def imports(file: Path) -> set[str]:
    """Dotted names below `gptlm` that `file` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gptlm."):
            found.add(node.module.removeprefix("gptlm."))
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("gptlm.") for alias in node.names if alias.name.startswith("gptlm.")}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_a_room_imports_from_lower_floors_only(file):
    own = room(file)
    for name in imports(file):
        other = name.split(".")[0]
        assert other == own or FLOORS[other] < FLOORS[own], (
            f"{own} imports {other}: floor {FLOORS[own]} <- {FLOORS[other]}"
        )


@pytest.mark.parametrize("folder", sorted(p.parent for p in SOURCE.rglob("__init__.py") if p.parent != SOURCE))
def test_no_circles_inside_a_folder(folder):
    graph = {
        f.stem: {n.split(".")[1] for n in imports(f) if n.startswith(f"{folder.name}.")} for f in folder.glob("*.py")
    }
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) == len(graph)


def test_leaves_know_neither_ranks_nor_config():
    for folder in ("model", "data"):
        for file in (SOURCE / folder).glob("*.py"):
            text = file.read_text(encoding="utf-8")
            for word in ("world_size", "deepspeed", "torch.distributed", "_degree"):
                assert word not in text, f"{file.name} speaks of {word}"


def test_scripts_are_thin():
    for file in SCRIPTS.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 30, file.name


def test_foreign_words_occur_in_the_spellings_only():
    from gptlm.cli import COMMANDS

    flags = {flag for command in COMMANDS.values() for flag in command.vocabulary.flags()}
    renamed = {word for command in COMMANDS.values() for word in command.vocabulary.renamed}
    foreign = {word for word in renamed - flags if "_" in word}
    # also words of HuggingFace's libraries and DeepSpeed, which are handed to them
    foreign -= {"eval_strategy", "max_new_tokens", "base_model_name_or_path", "eval_dataset", "train_dataset"}
    foreign -= {"train_batch_size", "processing_class", "save_only_model"}
    # also names of arguments of Python functions, which no command line is spelled with
    foreign -= {"hidden_dropout", "attention_dropout", "seq_length", "num_workers", "deepspeed_config", "node_rank"}
    assert len(foreign) > 10
    for file in FILES:
        if file.name.startswith("spellings"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            word = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
            assert not (isinstance(word, str) and word in foreign), f"{file.name} says {word}"


def test_the_door_imports_nothing_heavy():
    """Neither help, nor a resolved run, nor an error waits for torch."""
    code = """
import sys, gptlm.cli
for words in (["--help"], ["--print_config", "--model_name_or_path", "gpt2-en"], ["--max_stepz", "1"]):
    gptlm.cli.main(["pretrain", *words])
print([m for m in ("torch", "transformers", "datasets", "deepspeed", "tokenizers") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]" and "did you mean --max_steps" in result.stderr
