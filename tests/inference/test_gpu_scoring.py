"""On a CUDA device: evaluation compiled and in half precision gives the scores of the CPU."""

import shutil

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from gptlm.commands.evaluate import parse_evaluate
from gptlm.inference.scoring import Row, Windows, batches, score
from gptlm.kernels.compiling import compile_model
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.evaluate import evaluate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def model() -> GPTLMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=509, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    return GPTLMHeadModel(config).eval()


def scores(model, rows, size=None):
    found = [one for batch in score(model, rows, batches(rows, size)) for _, one in batch]
    return np.array([one.loss for one in found]), [one.hits for one in found]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_cpu(model, dtype, compiled):
    rng = np.random.RandomState(0)
    rows = [Row(rng.randint(0, 509, rng.randint(3, 128)).tolist(), 2) for _ in range(300)]
    windows = Windows(rng.randint(0, 509, 3000), 128, 32)
    wanted = [scores(model, part) for part in (rows, windows)]
    on_gpu = GPTLMHeadModel(model.config).eval()
    on_gpu.load_state_dict(model.state_dict())
    on_gpu.to("cuda", dtype)
    if compiled:
        compile_model(on_gpu, lengths_vary=True)
    for part, (losses, hits) in zip((rows, windows), wanted):
        for size in (7, None):
            found, found_hits = scores(on_gpu, part, size)
            tolerance = 1e-3 if dtype == torch.float32 else 0.3
            np.testing.assert_allclose(found, losses, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=tolerance)
            same = [a == b for mine, other in zip(found_hits, hits) for a, b in zip(mine, other)]
            assert np.mean(same) > (0.999 if dtype == torch.float32 else 0.97)


def test_a_command_gives_the_same_numbers_compiled(tiny_model, tmp_path):
    """The vocabulary is no multiple of 128."""
    text = "the cat sat on the mat and then the crow bit the cat " * 60
    (tmp_path / "text.txt").write_text(text)
    shutil.copytree(tiny_model, tmp_path / "model")
    train_tokenizer([text], 330).save_pretrained(tmp_path / "model")
    words = ["--task", "TEXT", "--eval_path", tmp_path / "text.txt", "--model_name_or_path", tmp_path / "model"]
    words += ["--max_seq_length", 32, "--overlapping_eval", 8]
    cases = {"cpu": ("--device", "cpu"), "eager": ("--torch_compile", 0), "compiled": ("--torch_compile", 1)}
    reports = {name: evaluate(*parse_evaluate([*map(str, (*words, *more))])) for name, more in cases.items()}
    for name in ("eager", "compiled"):
        assert reports[name]["num_scored"] == reports["cpu"]["num_scored"] > 200
        assert reports[name]["loss"] == pytest.approx(reports["cpu"]["loss"], abs=1e-4)
