"""A command imports what it uses: imports are nearly all of the time to a first step or token."""

import json
import shutil
import subprocess
import sys

import pytest

from gptlm.model.tokenizer import train_tokenizer
from tests.processes import run as run_processes

SLOW = (
    "torchao",
    "torch._inductor.decomposition",
    "deepspeed",
    "datasets",
    "pandas",
    "multiprocess",
    "sklearn",
    "scipy",
)
FOR_FEW = ("sacrebleu", "rouge_score", "nltk", "matplotlib", "gradio")
INFERENCE = (*SLOW, *FOR_FEW, "peft", "pyarrow", "transformers.trainer", "tensorboard")
TRAIN = "--max_steps 1 --do_train --overwrite_output_dir --output_dir {out}"
COMMANDS = {
    "predict": (INFERENCE, "--model_name_or_path {folder}/model --prompt Hello --tgt_length 1"),
    "evaluate": (INFERENCE, "--model_name_or_path {folder}/model --task LAMBADA --eval_path {folder}/lambada.jsonl"),
    "pretrain": (
        (*SLOW, *FOR_FEW, "pyarrow"),
        "--num_hidden_layers 1 --hidden_size 8 --num_attention_heads 1 --vocab_size 500 --max_seq_length 16 "
        f"--input_dir {{corpus}}/mmap --split 1,0,0 {TRAIN}",
    ),
    "sft": (
        (*SLOW, *FOR_FEW),
        f"--model_name_or_path {{folder}}/model --dataset_name_or_path {{folder}}/sft --max_length 32 {TRAIN}",
    ),
}


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A model with its tokenizer, a text to evaluate, and rows to fine-tune on."""
    path = tmp_path_factory.mktemp("start")
    shutil.copytree(tiny_model, path / "model")
    train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 300).save_pretrained(path / "model")
    (path / "lambada.jsonl").write_text(json.dumps({"text": "the cat sat on the mat"}))
    (path / "sft").mkdir()
    (path / "sft" / "train.json").write_text(json.dumps({"src": "the cat", "tgt": "sat on the mat"}))
    return path


def imported(code: str, names: tuple[str, ...]) -> str:
    """Which of `names` a new process has imported after `code`."""
    code = f"import sys\n{code}\nprint([name for name in {names!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_import_what_they_use(command, folder, corpus_folder, tmp_path):
    names, flags = COMMANDS[command]
    flags = flags.format(folder=folder, corpus=corpus_folder, out=tmp_path / "out") + " --device cpu"
    words = [command, *flags.split()]
    run = f"from gptlm.cli import main; assert main({words!r}) == 0"
    if command == "sft":  # the first start encodes the rows, for which Arrow imports pandas
        encoded = run_processes([sys.executable, "-m", "gptlm", *words])
        assert encoded.returncode == 0, encoded.stderr
    assert imported(run, names) == "[]"


def test_deepspeed_is_imported_by_runs_that_use_it_only(tmp_path):
    """Processes that are forked from one that has not imported it: what is imported before does not matter."""
    prepare = "from gptlm.upstream.accelerate import unwrap_without_deepspeed; unwrap_without_deepspeed()"
    unwrap = """
import torch
from accelerate import Accelerator
assert isinstance(Accelerator(cpu=True).unwrap_model(torch.nn.DataParallel(torch.nn.Linear(1, 1))), torch.nn.Linear)
"""
    found = []
    for number, code in enumerate((prepare + unwrap, unwrap)):
        (tmp_path / f"{number}.py").write_text(f"{code}\nimport sys\nprint('deepspeed' in sys.modules)")
        done = run_processes([sys.executable, tmp_path / f"{number}.py"])
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines()[-1])
    assert found == ["False", "True"]  # else this needs no patch any more


def test_imports_do_not_collect_garbage_and_are_never_visited_by_later_collections():
    code = """
import gc
from gptlm.entry_points import importing
with importing():
    assert not gc.isenabled()
frozen = gc.get_freeze_count()
assert gc.isenabled() and frozen > 100_000 > len(gc.get_objects())
gc.disable()
with importing():
    more = [[] for _ in range(1000)]
assert not gc.isenabled() and gc.get_freeze_count() <= frozen
"""
    assert imported(code, ("transformers.trainer",)) == "[]"


def test_models_of_transformers_are_listed_once_and_completely():
    code = """
from gptlm.entry_points import importing
from gptlm.upstream.transformers import names_of_models
from transformers.utils import import_utils
with importing():
    pass
assert import_utils.define_import_structure.cache_info().hits == 1, "the list is not the one that transformers has made"
import transformers.models
listed = import_utils.define_import_structure(transformers.models.__file__)
assert len(listed) > 3 and names_of_models() == listed
"""
    assert imported(code, ()) == "[]"
