"""Every command in the README parses, and the targets it names exist."""

import re
import shlex

import pytest

from gptlm.commands.convert import parse_convert
from gptlm.commands.data import parse_order, parse_prefix
from gptlm.commands.evaluate import EVALUATE, resolve_evaluate
from gptlm.commands.merge_lora import parse_merge
from gptlm.commands.plan import parse_plan
from gptlm.commands.predict import parse_predict
from gptlm.commands.preprocess import parse_preprocess
from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.commands.tokenizer import parse_tokenizer
from gptlm.config.parser import parse
from gptlm.launcher.args import parse_launch
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.S)
LINES = [line.strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line.strip()]
COMMANDS = [line for line in LINES if re.search(r"scripts/\w+\.py", line)]


def parse_data(words):
    tool, rest = words[0], words[1:]
    return parse_order(rest) if tool in ("order", "show") else parse_prefix(rest)


PARSERS = {
    "data_tools": parse_data,
    "run_pretrain": parse_pretrain,
    "plan": parse_plan,
    "preprocess_data": parse_preprocess,
    "train_tokenizer": parse_tokenizer,
    "predict_generation": parse_predict,
    "finetune_generation": lambda words: parse_sft(words, {"WORLD_SIZE": "1"}),
    "merge_lora": parse_merge,
    "convert_checkpoint": parse_convert,
    "evaluate": lambda words: parse(EVALUATE, words),  # parse_evaluate reads the model's config
}


def test_there_are_commands():
    assert len(COMMANDS) >= 7
    assert {re.search(r"scripts/(\w+)\.py", line)[1] for line in COMMANDS} == set(PARSERS)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line[:60])
def test_the_command_parses(line):
    script = re.search(r"scripts/(\w+)\.py", line)[1]
    words = shlex.split(line)
    assert (ROOT / "scripts" / f"{script}.py").is_file()
    rest = words[words.index(f"scripts/{script}.py") + 1 :]
    processes = words[words.index("--nproc_per_node") + 1] if "--nproc_per_node" in words else "1"
    if script == "run_pretrain":
        assert not parse_pretrain(rest, {"WORLD_SIZE": processes}).refusals
    else:
        assert PARSERS[script](rest)


ROWS = [tuple(cell.strip(" `") for cell in row) for row in re.findall(r"^\| (`.*?`) \| (`.*?`) \|$", TEXT, flags=re.M)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the table's commands name, in a working directory of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").mkdir()
    text = (ROOT / "src/gptlm/configs/fleetx/gpt/pretrain_gpt_base.yaml").read_text()
    text += "Distributed: {dp_degree: , mp_degree: 1, pp_degree: 1}\nOffline_Eval: {eval_path: x, cloze_eval: False}\n"
    for name in ("X.yaml", "configs_345m_single_card.yaml"):
        (tmp_path / name).write_text(text)
    return tmp_path


def printed(words):
    """Whether a command of the table resolves."""
    script, rest = words[1].removeprefix("scripts/").removesuffix(".py"), words[2:]
    if script == "launch":
        plan = parse_launch(rest, is_own=lambda address: False)
        return plan.script[-1] == "pretrain" and printed(["python", "run_pretrain.py", *plan.words])
    rest = [word for word in rest if word != "..."]
    if script == "run_pretrain":
        return parse_pretrain(rest, {}, printing=True).as_json()
    if script == "evaluate":
        return resolve_evaluate([*rest, "-o", "Model.module=GPTEvalModule"], printing=True).as_json()
    known = ("finetune_generation", "predict_generation", "preprocess_data", "oneflow/tools/launch_container")
    return script in known


def test_the_table_has_a_row_for_each_command():
    assert len(ROWS) >= 18
    for words in (
        "tools/auto.py",
        "tools/train.py",
        "oneflow_gpt.training",
        "examples/pretrain_1n8d",
        "train_full_8p",
    ):
        assert any(words in typed for typed, _ in ROWS)


@pytest.mark.parametrize(("typed", "now"), ROWS, ids=[typed[:50] for typed, _ in ROWS])
def test_what_the_table_says_to_type(files, typed, now):
    now = now.replace("IP:PORT", "10.0.0.1:6070").replace("IP1,IP2,IP3,IP4", "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4")
    if "--num-layers 24 ..." in now:
        now = now.replace("...", "--hidden-size 8 --num-attention-heads 2")
    words = shlex.split(now)
    assert (ROOT / words[1]).is_file()
    if words[0] == "bash":
        assert typed.split()[1].rpartition("/")[2].rpartition(".")[0] == words[1].rpartition("/")[2].rpartition(".")[0]
    else:
        assert printed(words)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", TEXT + (ROOT / "CONTRIBUTING.md").read_text()):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_files_named_in_the_map_exist():
    for folder in re.findall(r"^\| `(\w+)/` \|", TEXT, flags=re.M):
        assert (ROOT / "src" / "gptlm" / folder).is_dir()


def test_files_named_for_contributors_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - {"utils.py"}
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).is_file() and not (ROOT / "src/gptlm" / name).is_file()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_sentences_are_short(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"^(\||#).*$", "", text, flags=re.M)  # tables and headings
    text = re.sub(r"`[^`]*`", "X", text)
    lengths = [len(found.split()) for found in re.split(r"(?<=[.!?])\s+|\n\n|\n[-\d]+\.? ", text) if found.strip()]
    assert sum(lengths) / len(lengths) < 20
