"""Rules of the source: imports go to lower layers without cycles, each thing has one place, files are one topic."""

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gptlm"
SCRIPTS = Path(__file__).parents[1] / "scripts"
LAYERS = {  # a package imports from packages with a smaller number only
    "__init__": -4,
    "errors": -3,
    "mapped_files": -4,
    "secret": -3,
    "signals": -3,
    "locks": -2,
    "disk": -2,
    "json_text": -2,
    "owned": -1,
    "quiet": -1,
    "checksums": -1,
    "ranks": -1,
    "streams": -1,
    "upstream": -1,
    "failures": 0,
    "data": 0,
    "kernels": 0,
    "parallel": 0,
    "pickles": 0,
    "model": 1,
    "conversion": 2,
    "inference": 2,
    "config": 3,
    "compat": 4,
    "planner": 5,
    "launcher": 5,
    "training": 5,
    "checkpoint": 4,
    "commands": 6,
    "recipes": 7,
    "entry_points": 8,
    "api": 9,
    "cli": 9,
    "__main__": 10,
    "launch": 10,
}
TOGETHER: tuple[set[str], ...] = ()  # packages not separated yet
LONGEST_FILE = 450  # lines


def package(file: Path) -> str:
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
def test_a_package_imports_from_lower_layers_only(file):
    own = package(file)
    for name in imports(file):
        other = name.split(".")[0]
        assert other == own or {own, other} in TOGETHER or LAYERS[other] < LAYERS[own], (
            f"{own} (layer {LAYERS[own]}) imports {other} (layer {LAYERS[other]})"
        )


def test_no_import_cycles():
    modules = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in FILES}
    graph = {name: imports(file) & modules.keys() for name, file in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


def test_leaves_know_neither_ranks_nor_config():
    for folder in ("model", "data", "kernels"):
        for file in (SOURCE / folder).glob("*.py"):
            text = file.read_text(encoding="utf-8")
            for word in ("world_size", "deepspeed", "torch.distributed", "_degree"):
                assert word not in text, f"{file.name} contains {word}"


def lines_with(pattern: str, *, but: str) -> list[str]:
    """`file: line` of the source that match `pattern`, outside the module `but`."""
    return [
        f"{file.relative_to(SOURCE)}: {line.strip()}"
        for file in FILES
        if file != SOURCE / but
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(pattern, line)
    ]


def test_only_ranks_reads_the_launcher_s_environment():
    name = r"""["'](RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|LOCAL_SIZE)["']"""
    pattern = rf"(get|getenv|pop|setdefault)\({name}|\[{name}|{name} (not )?in "
    assert lines_with(pattern, but="ranks.py") == []


def test_only_pretrained_calls_from_pretrained():
    """It is the place that refuses the code of a folder."""
    calls = [
        file.relative_to(SOURCE).as_posix()
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
    ]
    assert calls == ["model/pretrained.py"]


def test_pickles_are_read_and_written_in_one_place():
    """Writing: the files of Paddle and Megatron, which are pickles."""
    assert lines_with(r"torch\.load\(|pickle\.loads?\(|Unpickler|allow_pickle=True", but="") == []
    writers = {line.split(":")[0] for line in lines_with(r"torch\.save\(|pickle\.dumps?\(", but="")}
    assert writers == {"conversion/megatron/write.py", "conversion/paddle/write.py", "conversion/lora.py"}


def test_only_quiet_changes_other_libraries_logs():
    foreign_logger = r"getLogger\((?!__name__\)|\"gptlm\"\))"
    pattern = rf"{foreign_logger}|set_verbosity|(dis|en)able_progress|filterwarnings|simplefilter|DS_ACCELERATOR"
    assert lines_with(pattern, but="quiet.py") == []


def test_a_file_is_one_topic():
    for file in FILES:
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert lines <= LONGEST_FILE, f"{file.relative_to(SOURCE)} has {lines} lines; split it by topic"


def test_file_names_tell_the_difference():
    vague = {"utils", "util", "helpers", "helper", "misc", "common", "base"}
    assert [file for file in FILES if file.stem in vague] == []
    repeated = Counter("/".join(file.parts[-2:]) for file in FILES)  # folder and name
    assert [name for name, count in repeated.items() if count > 1] == []


def test_functions_that_log_are_named_log():
    assert lines_with(r"def _?(say|tell)(_|\()", but="") == []


def test_scripts_are_thin():
    for file in SCRIPTS.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 30, file.name


def test_external_arguments_occur_in_compat_only():
    from gptlm.cli import COMMANDS

    flags = {flag for command in COMMANDS.values() for flag in command.vocabulary.flags()}
    renamed = {word for command in COMMANDS.values() for word in command.vocabulary.renamed}
    foreign = {word for word in renamed - flags if "_" in word}
    # also names of arguments of HuggingFace's libraries and DeepSpeed
    foreign -= {"eval_strategy", "max_new_tokens", "base_model_name_or_path", "eval_dataset", "train_dataset"}
    foreign -= {"train_batch_size", "processing_class", "save_only_model", "enable_jit_checkpoint"}
    # also parameters of Python functions
    foreign -= {"hidden_dropout", "attention_dropout", "seq_length", "num_workers", "deepspeed_config", "node_rank"}
    foreign -= {"push_to_hub_token"}  # a token is hidden under every name
    assert len(foreign) > 10
    for file in FILES:
        if package(file) == "compat" or file.parent.name == "launcher" or file.parent.parent.name == "conversion":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            word = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
            assert not (isinstance(word, str) and word in foreign), f"{file.name} uses {word}"


def test_the_command_line_imports_nothing_heavy():
    """Help, a resolved run and errors must appear without the import time of torch."""
    code = """
import sys, gptlm.cli
for words in (["--help"], ["--print_config", "--model_name_or_path", "gpt2-en"], ["--max_stepz", "1"]):
    gptlm.cli.main(["pretrain", *words])
print([m for m in ("torch", "transformers", "datasets", "deepspeed", "tokenizers") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]" and "did you mean --max_steps" in result.stderr


CONFIGURATION = [file for file in FILES if package(file) in ("config", "compat", "commands", "planner", "launcher")]


def test_resolution_reads_typed_groups():
    """After parsing, values are attributes of argument groups, which mypy checks; tables use `Parsed.value`."""
    for file in CONFIGURATION:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and isinstance(getattr(node.slice, "value", None), str):
                owner = getattr(node.value, "attr", None) or getattr(node.value, "id", None)
                assert owner != "values", f"{file.name}:{node.lineno} reads values[{node.slice.value!r}]"


def test_display_texts_decide_nothing():
    """Code compares the origin of a source, never its text. mypy's strict_equality refuses a source == "text"."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                operands = [ast.unparse(side) for side in (node.left, *node.comparators)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                operands = [ast.unparse(node.func.value), *map(ast.unparse, node.args)] if called(node) else []
            else:
                continue
            shown = [text for text in operands if text.endswith(".text") and "source" in text]
            assert shown == [], f"{file.name}:{node.lineno} decides by {shown[0]}"


def called(node: ast.Call) -> bool:
    """Whether a call examines a text."""
    return node.func.attr in ("startswith", "endswith", "match", "search", "fullmatch", "find", "partition")


def test_messages_are_not_rewritten():
    """References to arguments are marks (`errors.named`): no regular expression searches a finished message."""
    for file in (*CONFIGURATION, SOURCE / "errors.py"):
        text = file.read_text(encoding="utf-8")
        assert not any(f"re.{name}(" in text for name in ("sub", "subn", "findall", "finditer")), file.name
