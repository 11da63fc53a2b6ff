"""Fine-tuning on a CUDA device: passes replayed as CUDA graphs, one for each shape, equal passes kernel by kernel."""

import json
import re

import pytest
import torch

from gptlm.commands.sft import parse_sft
from gptlm.recipes.sft.run import sft
from gptlm.upstream.torch import recomputes_open_shapes
from tests.recipes.test_sft import NO_DROPOUT, WORDS, model  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BASE = (
    "--max_steps 12 --per_device_train_batch_size 2 --per_device_eval_batch_size 3 --logging_steps 1 --save_steps 6 "
    "--learning_rate 1e-2 --device gpu --disable_tqdm --report_to none --do_train --tgt_length 16 "
    "--bf16 --fp16_opt_level O2 --pad_to_multiple_of 8"
).split()
EVALUATION = "--do_eval --evaluation_strategy steps --eval_steps 5 --generate_num 2".split()
CAPTURED = re.compile(r"CUDA graph (\d+): micro-batches of (\d+) x (\d+) tokens")


@pytest.fixture
def tune(model, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Runs with answers of one to eight words: losses, and the shapes that were captured."""
    examples = tmp_path / "examples"
    examples.mkdir()
    rows = [{"src": f"{WORDS[n % 20]} ", "tgt": " ".join(WORDS[n % 11 : n % 11 + 1 + (3 * n) % 8])} for n in range(30)]
    (examples / "train.json").write_text(json.dumps(rows))
    (examples / "dev.json").write_text(json.dumps(rows[:4]))

    def run(name, *words):
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # a run on the CPU sets it
        torch._dynamo.reset()
        capsys.readouterr()
        data = ["--model_name_or_path", model, "--dataset_name_or_path", examples, "--output_dir", tmp_path / name]
        sft(parse_sft([str(word) for word in (*data, *BASE, *words)], {}))
        said = capsys.readouterr().out
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry], CAPTURED.findall(said), said

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield run


DROPOUT = "--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1"
TOKENS = "--additional_special_tokens <user> <bot>"


@pytest.mark.parametrize(
    ("words", "distance"),
    [
        (f"--torch_compile 1 {DROPOUT}", 2e-3),
        ("--torch_compile 1 --zero_padding --max_length 40", 2e-3),
        ("--torch_compile 1 --gradient_accumulation_steps 3 --amp_master_grad", 2e-3),
        # without graphs the loss is not compiled here, so that it is rounded elsewhere
        (f"--lora --lora_dropout 0.1 {DROPOUT}", 2e-2),
        (f"--lora {TOKENS} --gradient_accumulation_steps 3", 2e-2),
        ("--lora --zero_padding --max_length 40 --gradient_accumulation_steps 2", 2e-2),
        (f"--lora {TOKENS} --fp16_opt_level O1", 2e-2),
    ],
)
def test_graphs_change_nothing(tune, words, distance):
    """Losses of twelve steps."""
    words = words.split() if "dropout" in words else [*words.split(), *NO_DROPOUT]
    plain, none, _ = tune("plain", *words, "--cuda_graphs", 0)
    found, shapes, said = tune("graph", *words)
    assert found == pytest.approx(plain, abs=distance)
    assert not none and (len(shapes) == 1) == ("--zero_padding" in words)
    assert f"CUDA graphs: {len(shapes)}, one per shape" in said
    assert torch.cuda.memory_allocated() < 2**28


def test_evaluation_between_steps_and_a_resume_change_nothing(tune, tmp_path):
    words = ["--lora", "--lora_dropout", "0.1", *DROPOUT.split()]
    found, shapes, _ = tune("graph", *words)
    again, _, _ = tune("evaluated", *words, *EVALUATION)
    assert again == pytest.approx(found, abs=2e-3) and len(shapes) > 1
    resumed, _, _ = tune("resumed", *words, "--resume_from_checkpoint", tmp_path / "evaluated" / "checkpoint-6")
    assert resumed == pytest.approx(found, abs=2e-3)


@pytest.mark.parametrize("words", ["", "--lora", "--zero_padding --max_length 40"])
def test_compiled_graphs_agree_with_plain_passes(tune, words):
    words = [*words.split(), *NO_DROPOUT, "--fp16_opt_level", "O0"]
    plain, _, said = tune("plain", *words, "--torch_compile", 0)
    assert "CUDA graph" not in said
    assert tune("graph", *words)[0] == pytest.approx(plain, abs=1e-4)


def test_without_graphs_lengths_are_not_compiled(tune):
    said = tune("x", "--max_steps", 2, "--cuda_graphs", 1, "--pad_to_multiple_of", 1)[2]
    assert "--cuda_graphs has no effect: batches are as long as their longest example" in said
    assert "are compiled" not in said


@pytest.mark.parametrize("words", ["", "--lora"])
def test_recomputed_layers_of_several_lengths(tune, words):
    """Compiled where torch can; the losses are those without recomputation."""
    words = [*words.split(), *NO_DROPOUT, "--fp16_opt_level", "O0"]
    plain = tune("plain", *words, "--torch_compile", 0)[0]
    found, _, said = tune("recomputed", *words, "--recompute", 1)
    assert found == pytest.approx(plain, abs=1e-4)
    assert ("does not compile recomputed layers for several lengths" in said) == (not recomputes_open_shapes())
