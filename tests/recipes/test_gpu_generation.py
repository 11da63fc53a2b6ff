"""On a CUDA device: evaluations of fine-tuning and `predict` generate what they generate on the CPU."""

import json

import pytest
import torch

from gptlm.cli import main
from gptlm.commands.sft import parse_sft
from gptlm.recipes.sft.run import sft
from tests.recipes.test_sft_generation import model  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPTS = ["the cat", "the dog sat on", "on the mat and the dog"]


@pytest.mark.parametrize("more", [[], ["--lora"]])
def test_evaluations_generate_as_on_the_cpu(model, tmp_path, monkeypatch, more):  # noqa: F811
    """With graphs and without, before training and after it, when the weights are others."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    rows = [{"src": prompt, "tgt": "the mat"} for prompt in PROMPTS]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = {}
    for name, device, graphs in (("cpu", "cpu", 0), ("graphs", "gpu", 1), ("eager", "gpu", 0)):
        argv = ["--model_name_or_path", model, "--dataset_name_or_path", tmp_path / "d.jsonl", "--device", device]
        argv += ["--output_dir", tmp_path / name, "--do_train", "--do_eval", "--disable_tqdm", "--report_to", "none"]
        argv += ["--max_steps", 4, "--eval_steps", 2, "--evaluation_strategy", "steps", "--src_length", 20]
        argv += ["--tgt_length", 12, "--learning_rate", 1e-3, "--per_device_train_batch_size", 3, *more]
        argv += ["--cuda_graphs", graphs, "--torch_compile", 0, "--hidden_dropout_prob", 0]
        argv += ["--attention_probs_dropout_prob", 0]
        sft(parse_sft([str(word) for word in argv], {}))
        files = sorted((tmp_path / name / "predictions").glob("*.jsonl"))
        found[name] = [(file.name, file.read_text(encoding="utf-8")) for file in files]
    assert len(found["cpu"]) == 2
    assert found["graphs"] == found["eager"] == found["cpu"]


@pytest.mark.parametrize("size", [1, 2])
def test_predict_prints_what_it_prints_on_the_cpu(model, tmp_path, capsys, size):  # noqa: F811
    outputs = []
    for words in (["--device", "cpu"], ["--device", "gpu"], ["--device", "gpu", "--cuda_graphs", "0"]):
        argv = ["predict", "--model_name_or_path", str(model), "--tgt_length", "20", "--batch_size", str(size), *words]
        assert main([*argv, "--prompt", *PROMPTS]) == 0
        said = capsys.readouterr()
        outputs.append(said.out)
        assert ("replayed as a CUDA graph" in said.err) == (words == ["--device", "gpu"])
    assert outputs[0] == outputs[1] == outputs[2]
