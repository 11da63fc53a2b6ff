"""The migration pages: what their tables tell users to type resolves."""

import re
import shlex

import pytest

from gptlm.commands.evaluate import EVALUATE, resolve_evaluate
from gptlm.commands.pretrain import parse_pretrain
from gptlm.config.parser import parse
from gptlm.launcher.args import parse_launch
from tests.conftest import ROOT

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/migration").glob("*.md"))}
COMMAND = re.compile(r"^\| (`(?:python3?|bash) .*?`) \| (`(?:python3?|bash) .*?`) \|$", re.M)
ROWS = [tuple(cell.strip("`") for cell in row) for text in PAGES.values() for row in COMMAND.findall(text)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the commands name, in a working directory of their own."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "src/gptlm/configs/fleetx/gpt/pretrain_gpt_base.yaml").read_text()
    text += "Distributed: {dp_degree: , mp_degree: 1, pp_degree: 1}\nOffline_Eval: {eval_path: x, cloze_eval: False}\n"
    (tmp_path / "X.yaml").write_text(text)
    (tmp_path / "args.json").write_text('{"input_dir": "data", "output_dir": "out", "max_steps": 1}')


def resolves(words):
    """Whether a command resolves without being started."""
    script, rest = words[1].removeprefix("scripts/").removesuffix(".py"), [word for word in words[2:] if word != "..."]
    if script == "launch":
        plan = parse_launch(rest, is_own=lambda address: False)
        return plan.script[-1] == "pretrain" and resolves(["python", "run_pretrain.py", *plan.words])
    if script == "run_pretrain":
        return parse_pretrain(rest, {}, printing=True).as_json()
    if script == "evaluate":
        return (
            resolve_evaluate([*rest, "-o", "Model.module=GPTEvalModule"], printing=True).as_json()
            if "-c" in rest
            else parse(EVALUATE, rest)
        )
    known = ("finetune_generation", "predict_generation", "preprocess_data", "merge_lora")
    return script in (*known, "oneflow/tools/launch_container")


def test_the_tables_have_a_row_for_each_command_of_the_originals():
    assert len(ROWS) >= 24
    for words in (
        "paddle.distributed.launch --gpus",
        "finetune_generation",
        "predict_generation",
        "create_pretraining_data",
        "tools/auto.py",
        "tools/train.py",
        "tools/eval.py",
        "tools/preprocess_data.py",
        "oneflow_gpt.training",
        "example/pretrain_345M.sh",
        "examples/pretrain_1n8d",
        "examples/distribute_pretrain_4n8d",
        "launch_container.py",
        "dataset_preprocess_gpt",
        "train_full_8p",
        "train_performance_8p",
    ):
        assert any(words in typed for typed, _ in ROWS), words


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("typed", "now"), ROWS, ids=[typed[:50] for typed, _ in ROWS])
def test_what_the_table_says_to_type(typed, now):
    now = now.replace("IP:PORT", "10.0.0.1:6070").replace("IP1,IP2,IP3,IP4", "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4")
    if "--num-layers 24 ..." in now:
        now = now.replace("...", "--hidden-size 8 --num-attention-heads 2")
    words = shlex.split(now)
    assert (ROOT / words[1]).is_file()
    if words[0] == "bash":
        assert typed.split()[1].rpartition("/")[2].rpartition(".")[0] == words[1].rpartition("/")[2].rpartition(".")[0]
    else:
        assert resolves(words)
