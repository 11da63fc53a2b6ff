"""Every command in the README parses, and the targets it names exist."""

import re
import shlex

import pytest

from gptlm.config.data_tools import parse_order, parse_prefix
from gptlm.config.evaluation import EVALUATE
from gptlm.config.generation import parse_predict
from gptlm.config.parser import parse
from gptlm.config.run import parse_pretrain
from gptlm.config.sft import parse_merge, parse_sft
from gptlm.config.tools import parse_preprocess, parse_tokenizer
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.S)
LINES = [line.strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line.strip()]
COMMANDS = [line for line in LINES if "scripts/" in line]


def parse_data(words):
    tool, rest = words[0], words[1:]
    return parse_order(rest) if tool in ("order", "show") else parse_prefix(rest)


PARSERS = {
    "data_tools": parse_data,
    "run_pretrain": lambda words: parse_pretrain(words, {"WORLD_SIZE": "1"}),
    "preprocess_data": parse_preprocess,
    "train_tokenizer": parse_tokenizer,
    "predict_generation": parse_predict,
    "finetune_generation": lambda words: parse_sft(words, {"WORLD_SIZE": "1"}),
    "merge_lora": parse_merge,
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
    assert PARSERS[script](words[words.index(f"scripts/{script}.py") + 1 :])


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", TEXT + (ROOT / "CONTRIBUTING.md").read_text()):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_files_named_in_the_map_exist():
    for folder in re.findall(r"^\| `(\w+)/` \|", TEXT, flags=re.M):
        assert (ROOT / "src" / "gptlm" / folder).is_dir()
