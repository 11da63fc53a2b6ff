"""Checkpoints of other libraries as the model of training, fine-tuning, evaluation and prediction."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gptlm.cli import main
from gptlm.compat.auto_convert import cache_folder
from gptlm.model.tokenizer import train_tokenizer
from tests.conftest import write_tokens
from tests.conversion.layouts import (
    HEADS,
    INNER,
    LAYERS,
    POSITIONS,
    WIDE,
    paddle_tensors,
    stock,
    write_megatron,
    write_pdparams,
)
from tests.conversion.test_paddle import write_config


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory with token files `data/c` and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_tokens(tmp_path / "data/c", vocab_size=50)
    return tmp_path


SHORT = (
    "--input_dir data --max_steps 2 --per_device_train_batch_size 2 --max_seq_length 8 --split 90,10,0 --device cpu "
    "--learning_rate 1e-9 --min_learning_rate 0 --do_train --save_steps 100"
).split()


def test_pretraining_starts_from_paddles_weights(work, capsys):
    write_config(work / "old")
    write_pdparams(work / "old/model_state.pdparams", paddle_tensors(stock(), True))
    command = ["pretrain", "--model_name_or_path", "old", "--continue_training", "--output_dir", "new", *SHORT]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "old is a checkpoint of PaddleNLP" in said and "is converted once, into" in said
    trained, original = AutoModelForCausalLM.from_pretrained("new"), stock()
    for name, value in original.state_dict().items():
        assert torch.allclose(trained.state_dict()[name], value, rtol=0, atol=1e-6), name
    assert main([*command, "--overwrite_output_dir"]) == 0
    assert "is converted once" not in capsys.readouterr().out
    assert not list((work / "cache").rglob("*.lock"))


@pytest.mark.parametrize("flag", ["--load", "--resume_from_checkpoint"])
def test_a_run_starts_from_megatrons_checkpoint_and_resumes_from_its_own(work, capsys, flag):
    write_megatron(stock(), work / "old", 2.0, 2, 2, vocab_size=50)
    command = ["pretrain", flag, "old", "--output_dir", "new", *SHORT, "--save_steps", "1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"{flag} old is a checkpoint of Megatron-LM, tensor parallel 2, pipeline 2, step 100: where" in said
    trained, original = load_file("new/model.safetensors"), stock().state_dict()
    for name, value in trained.items():
        assert torch.allclose(value, original[name], rtol=0, atol=1e-6), name
    assert main([*command, "--max_steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "weights from new/checkpoint-2" in said


def test_fleetx_starts_from_ckpt_dir(work, capsys):
    """The number of heads is in the configuration, not in the checkpoint."""
    write_pdparams(work / "epoch_0_step_5/model.pdparams", paddle_tensors(stock(), True))
    configuration = f"""
Global: {{seed: 1, local_batch_size: 2, micro_batch_size: 2}}
Engine: {{max_steps: 2, save_load: {{output_dir: new, ckpt_dir: epoch_0_step_5}}, mix_precision: {{enable: False}}}}
Model: {{module: GPTModule, name: GPT, vocab_size: 50, hidden_size: {WIDE}, num_layers: {LAYERS},
  num_attention_heads: {HEADS}, ffn_hidden_size: {INNER}, max_position_embeddings: {POSITIONS}}}
Data: {{Train: {{dataset: {{name: GPTDataset, input_dir: data, split: [90, 10, 0], max_seq_len: 8}}}}}}
Optimizer: {{name: FusedAdamW, lr: {{max_lr: 1.0e-9, min_lr: 0.0, warmup_rate: 0.1, decay_steps: 10}}}}
"""
    (work / "c.yaml").write_text(configuration)
    assert main(["pretrain", "-c", "c.yaml", "--device", "cpu"]) == 0, capsys.readouterr().err
    assert "epoch_0_step_5 is a checkpoint of FleetX" in capsys.readouterr().out
    trained, original = load_file("new/model.safetensors"), stock().state_dict()
    for name, value in trained.items():
        assert torch.allclose(value, original[name], rtol=0, atol=1e-6), name


@pytest.fixture
def old(work):
    """A small model with a tokenizer in PaddleNLP's format, in `old`; the stock folder in `plain`."""
    tokenizer = train_tokenizer(["the cat sat on the mat and the dog sat on the log"], 270)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained("plain")
    tokenizer.save_pretrained("plain")
    assert main(["convert", "--from", "plain", "--to", "paddle", "--output", "old"]) == 0
    return work


def test_prediction_and_evaluation_equal_those_of_the_stock_folder(old, capsys):
    (old / "text.txt").write_text("the cat sat on the log and the dog sat on the mat")
    capsys.readouterr()
    results = []
    for name in ("plain", "old"):
        predict = ["predict", "--model_name_or_path", name, "--prompt", "the cat", "--tgt_length", "6"]
        assert main([*predict, "--device", "cpu"]) == 0, capsys.readouterr().err
        predicted = capsys.readouterr().out  # the log of the conversion is on stderr
        evaluate = ["evaluate", "--task", "TEXT", "--eval_path", "text.txt", "--model_name_or_path", name, "--json"]
        assert main([*evaluate, "--device", "cpu"]) == 0, capsys.readouterr().err
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        results.append((predicted, {key: value for key, value in report.items() if key not in ("model", "seconds")}))
    assert results[0] == results[1]


def test_fine_tuning_starts_from_it(old, capsys):
    (old / "examples.jsonl").write_text(json.dumps({"src": "the cat", "tgt": "sat"}) + "\n")
    words = (
        "--model_name_or_path old --dataset_name_or_path examples.jsonl --output_dir sft --max_steps 1 --do_train "
        "--src_length 8 --tgt_length 8 --learning_rate 1e-9 --min_learning_rate 0 --device cpu"
    )
    assert main(["sft", *words.split()]) == 0, capsys.readouterr().err
    assert "old is a checkpoint of PaddleNLP" in capsys.readouterr().out
    trained, original = load_file("sft/model.safetensors"), load_file("plain/model.safetensors")
    for name, value in original.items():
        assert torch.allclose(trained[name], value, rtol=0, atol=1e-6), name


def test_failed_conversions(work, capsys):
    """--print_config converts nothing. The error names what is missing in the checkpoint."""
    write_pdparams(work / "model_state.pdparams", paddle_tensors(stock(), True))
    words = ["--model_name_or_path", ".", "--output_dir", "new", "--continue_training", *SHORT]
    assert main(["pretrain", *words, "--print_config"]) == 1
    assert "has to be converted first" in capsys.readouterr().err and not (work / "cache").exists()
    assert main(["pretrain", *words]) == 1
    said = capsys.readouterr().err
    assert "does not contain the number of heads" in said and "gptlm convert --from . has these arguments" in said
    assert not list((work / "cache/gptlm/converted").glob("[!.]*"))


def test_megatrons_own_command_starts_from_its_checkpoint(work, capsys):
    """The checkpoint of two tensor ranks has 256 rows; one rank pads the command's 50 entries to 128."""
    write_megatron(stock(), work / "old", 2.0, 2, 2)
    words = (
        "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 12 "
        "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1e-9 --data-path data/c --vocab-size 50 "
        "--split 90,10,0 --load old --save new --device cpu"
    )
    assert main(["pretrain", *words.split()]) == 0, capsys.readouterr().err
    assert "reduced from 256 rows to 50" in capsys.readouterr().out
    trained = load_file("new/model.safetensors")
    assert trained["transformer.wte.weight"].shape == (128, 16)
    assert torch.allclose(trained["transformer.wte.weight"][:50], stock().transformer.wte.weight, rtol=0, atol=1e-6)


def test_paddles_adapters_are_merged_trained_and_predicted_with(old, capsys):
    """Adapters of separate q, k and v on a model of 2 layers and hidden size 16; q of layer 1 is compared by hand."""
    rng = np.random.RandomState(0)
    arrays = {
        f"gpt.decoder.layers.{layer}.self_attn.{name}_proj.lora_{half}": rng.randn(*shape).astype(np.float32)
        for layer in range(2)
        for name in "qkv"
        for half, shape in (("A", (16, 2)), ("B", (2, 16)))
    }
    (old / "adapters").mkdir()
    (old / "adapters/lora_model_state.pdparams").write_bytes(pickle.dumps(arrays))
    (old / "adapters/lora_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    words = ["--model_name_or_path", "old", "--lora_path", "adapters"]
    assert main(["merge-lora", *words, "--output_path", "merged"]) == 0, capsys.readouterr().err
    name, place = "transformer.h.1.attn.c_attn.weight", "gpt.decoder.layers.1.self_attn.q_proj.lora_"
    change = load_file("merged/model.safetensors")[name] - load_file("plain/model.safetensors")[name]
    assert torch.allclose(change[:, :16], torch.from_numpy(2 * arrays[f"{place}A"] @ arrays[f"{place}B"]), atol=1e-5)
    assert main(["predict", *words, "--prompt", "the cat", "--tgt_length", "2", "--device", "cpu"]) == 0
    assert "adapters holds adapters of PaddleNLP; they are read from" in capsys.readouterr().err
    (old / "examples.jsonl").write_text(json.dumps({"src": "the cat", "tgt": "sat"}) + "\n")
    more = "--dataset_name_or_path examples.jsonl --output_dir lora --max_steps 1 --do_train --src_length 8".split()
    assert main(["sft", *words, *more, "--tgt_length", "8", "--device", "cpu"]) == 0, capsys.readouterr().err
    assert json.loads((old / "lora/adapter_config.json").read_text())["r"] == 6
    assert main(["predict", "--model_name_or_path", "adapters", "--prompt", "the", "--device", "cpu"]) == 1
    assert "adapters contains adapters of PaddleNLP, not a model" in capsys.readouterr().err


def test_a_new_tokenizer_is_converted_again(tmp_path):
    """The cache folder depends on all source files, the tokenizer included."""
    before = cache_folder(tmp_path, [], None)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert cache_folder(tmp_path, [], None) != before
