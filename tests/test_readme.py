"""README.md stays one page, and what the migration pages say to type instead of an old command resolves."""

import re
import shlex

import pytest

from gptlm.commands.evaluate import EVALUATE, resolve_evaluate
from gptlm.commands.merge_lora import parse_merge
from gptlm.commands.pretrain import parse_pretrain
from gptlm.config.parser import parse
from gptlm.launcher.args import parse_launch
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
TABLES = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/migration").glob("*.md")))


def test_it_is_one_page():
    assert len(TEXT.splitlines()) <= 200
    assert len(TEXT.split()) <= 1300


def test_it_has_what_a_stranger_looks_for():
    for heading in ("Install", "Quickstart", "Tasks", "Coming from", "Performance", "Status and known limits"):
        assert f"\n## {heading}\n" in TEXT
    for page in ("paddlenlp", "paddlefleetx", "megatron", "oneflow"):
        assert f"(docs/migration/{page}.md)" in TEXT
    assert re.search(r"one NVIDIA \w+, torch [\d.]+, 20\d\d-\d\d-\d\d", TEXT)  # card, version and date of the numbers


def test_its_numbers_are_measured():
    measured = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    table = TEXT.partition("## Performance")[2].partition("\n## ")[0]
    numbers = [number for row in re.findall(r"^\|.*\|$", table, flags=re.M) for number in re.findall(r"[\d.,]*\d", row)]
    numbers = [number for number in numbers if number not in ("1", "16")]  # prompts
    assert len(numbers) >= 15
    assert [number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,])", measured)] == []


TYPED = r"^\| (`(?:python3?|bash) .*?`) \| (`.*?`) \|$"
ROWS = [tuple(cell.strip(" `") for cell in row) for row in re.findall(TYPED, TABLES, flags=re.M)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the table's commands name, in a working directory of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").mkdir()
    text = (ROOT / "src/gptlm/configs/fleetx/gpt/pretrain_gpt_base.yaml").read_text()
    text += "Distributed: {dp_degree: , mp_degree: 1, pp_degree: 1}\nOffline_Eval: {eval_path: x, cloze_eval: False}\n"
    for name in ("X.yaml", "configs_345m_single_card.yaml"):
        (tmp_path / name).write_text(text)
    (tmp_path / "args.json").write_text('{"input_dir": "./data", "output_dir": "output/gpt", "max_steps": 10}')
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
        if "-c" in rest:
            return resolve_evaluate([*rest, "-o", "Model.module=GPTEvalModule"], printing=True).as_json()
        return parse(EVALUATE, rest)
    if script == "merge_lora":
        return parse_merge(rest)
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
    rows = re.findall(r"^\| ((?:`[\w/.]+`(?:, )?)+) \|", TEXT.partition("## Package map")[2], flags=re.M)
    named = re.findall(r"`([\w/.]+)`", " ".join(rows))
    packages = {path.name + "/" for path in (ROOT / "src/gptlm").iterdir() if (path / "__init__.py").is_file()}
    assert packages <= set(named)
    assert [name for name in named if not (ROOT / "src/gptlm" / name).exists()] == []
    first = re.findall(r"`([\w/]+\.py)` \(|`(model/gpt\.py)`", TEXT)
    read_first = [name or other for name, other in first]
    assert len(read_first) == 6
    assert [name for name in read_first if not (ROOT / "src/gptlm" / name.removeprefix("src/gptlm/")).is_file()] == []


def test_files_named_for_contributors_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - {"utils.py"}
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).is_file() and not (ROOT / "src/gptlm" / name).is_file()] == []


PROSE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", *PROSE])
def test_sentences_are_short(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"^(\||#).*$", "", text, flags=re.M)  # tables and headings
    text = re.sub(r"`[^`]*`", "X", text)
    lengths = [len(found.split()) for found in re.split(r"(?<=[.!?])\s+|\n\n|\n[-\d]+\.? ", text) if found.strip()]
    assert sum(lengths) / len(lengths) < 20
