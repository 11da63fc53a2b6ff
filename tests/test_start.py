"""A command imports what it uses: imports are nearly all of the time to a first step or token."""

import subprocess
import sys

import pytest

TRAINING = ("deepspeed", "sacrebleu", "rouge_score", "nltk", "matplotlib", "torch.utils.tensorboard", "gradio")
INFERENCE = (*TRAINING, "peft", "datasets", "pandas", "pyarrow", "transformers.trainer", "tensorboard", "multiprocess")


def imported(code: str, names: tuple[str, ...]) -> str:
    """Which of `names` a new process has imported after `code`."""
    code = f"import sys\n{code}\nprint([name for name in {names!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "recipes, names",
    [("predict, gptlm.recipes.evaluate", INFERENCE), ("sft.run, gptlm.recipes.pretrain.run", TRAINING)],
    ids=["inference", "training"],
)
def test_recipes_import_what_they_use(recipes, names):
    assert imported(f"import gptlm.cli, gptlm.recipes.{recipes}", names) == "[]"


def test_deepspeed_is_imported_by_runs_that_use_it_only():
    prepare = "from gptlm.upstream.accelerate import unwrap_without_deepspeed; unwrap_without_deepspeed()"
    unwrap = """
import torch
from accelerate import Accelerator
assert isinstance(Accelerator(cpu=True).unwrap_model(torch.nn.DataParallel(torch.nn.Linear(1, 1))), torch.nn.Linear)
"""
    assert imported(prepare + unwrap, ("deepspeed",)) == "[]"
    assert imported(unwrap, ("deepspeed",)) == "['deepspeed']"  # else this needs no patch any more


def test_imports_do_not_collect_garbage():
    code = """
import gc
from gptlm.cli import importing
with importing():
    assert not gc.isenabled()
print(gc.isenabled())
gc.disable()
with importing():
    pass
assert not gc.isenabled()
"""
    assert imported(code, ("torch",)) == "[]"
