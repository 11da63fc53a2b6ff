"""Fine-tuning with every kind of adapters: resume, evaluation of the folder, and flags that are refused."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError, UsageError
from tests.recipes.test_sft import BASE, NO_DROPOUT, examples, losses, model, tune  # noqa: F401

PISSA = ("--pissa", "--use_dora", "--rslora", "--lora_rank", 4, "--lora_rank_pattern", '{"c_fc": 2}')


def test_a_changed_base_resumes_bit_for_bit_and_is_saved_as_plain_lora(tune, model, tmp_path):  # noqa: F811
    metrics, whole = tune(*NO_DROPOUT, "--lora", *PISSA, "--do_eval", "--generate_num", 0, "--merge_weights")
    _, resumed = tune(
        *NO_DROPOUT, "--lora", *PISSA, "--resume_from_checkpoint", tmp_path / "out/checkpoint-3", output="again"
    )
    assert losses(resumed) == losses(whole)
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "out").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged").eval()
    ids = torch.tensor([[5, 9, 200, 31]])
    assert torch.allclose(stock(ids).logits, merged(ids).logits, atol=1e-4)
    words = ("--do_train", 0, "--do_eval", "--generate_num", 0, "--lora_path", tmp_path / "out")
    started, _ = tune(*words, output="eval")  # the folder as a start: plain DoRA of twice the rank
    assert started["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-5)
    with pytest.raises(GptlmError, match="init_lora_weights pissa or olora there, true in the command"):
        tune("--lora", "--use_dora", "--use_rslora", "--lora_rank", 8)


def test_modules_biases_and_targets_that_are_not_plain(tune, model, tmp_path):  # noqa: F811
    words = (
        "--lora", "--lora_target_modules", "h.0.mlp.c_fc", "c_attn", "--lora_bias", "all",
        "--modules_to_save", "ln_f", "wte",
    )  # fmt: skip
    metrics, _ = tune(*NO_DROPOUT, *words, "--do_eval", "--generate_num", 0)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name for name in stored if "lora_A" in name and "c_fc" in name} == {
        "base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight"
    }
    base = load_file(model / "model.safetensors")
    for name in ("wte.weight", "ln_f.weight", "h.1.ln_1.bias"):
        assert not torch.equal(stored[f"base_model.model.transformer.{name}"], base[f"transformer.{name}"])
    path = tmp_path / "out" / "adapter_config.json"  # a regular expression, as plain PEFT may have it
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": r".*(c_attn|h\.0\.mlp\.c_fc)"}))
    evaluate = ("--do_train", 0, "--do_eval", "--generate_num", 0, "--lora_path", tmp_path / "out")
    assert tune(*evaluate, output="eval")[0]["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--init_lora_weights", "loftq"], "init_lora_weights loftq: its adapters belong to a quantized copy"),
        (["--modules_to_save", "c_attn"], "modules_to_save c_attn: expected some of wte"),
        (["--lora_target_modules", "q_proj"], "lora_target_modules q_proj: expected all-linear"),
        (["--lora_rank_pattern", "c_fc=2"], "lora_rank_pattern 'c_fc=2' is not JSON"),
        (["--lora_rank_pattern", '{"c_fc": 2.5}'], "lora_rank_pattern c_fc: 2.5: expected a whole number"),
        (["--lora_alpha_pattern", '{"q_proj": 2}'], "lora_alpha_pattern q_proj: no matrix has this name"),
        (["--use_dora", "--sharding", "stage3"], "use_dora does not work with sharding stage3"),
    ],
)
def test_adapters_that_cannot_be(model, words, says):  # noqa: F811
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", "--lora"]
    with pytest.raises(UsageError, match=says):
        parse_sft([*argv, *words], {})


TWO, DEGREE = {"WORLD_SIZE": "2"}, ["--tensor_parallel_degree", "2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lora", "--use_dora"], "use_dora does not work with --tensor_parallel_degree 2, which splits the weights"),
        (["--lora", "--init_lora_weights", "pissa"], "init_lora_weights does not work with --tensor_parallel_degree 2"),
        (["--lora", "--lora_bias", "all"], "lora_bias does not work with --tensor_parallel_degree 2"),
        (["--lora", "--modules_to_save", "ln_f"], "modules_to_save does not work .* use --sharding stage2 with"),
        (["--sequence_parallel", "1", "--max_length", "33"], "max_length 33 is not a multiple .* give --max_length 32"),
        (["--sequence_parallel", "1", "--paddle_compat"], "sequence_parallel pads sequences to a multiple of 2"),
    ],
)
def test_what_split_layers_exclude(model, words, says):  # noqa: F811
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", *DEGREE]
    with pytest.raises(UsageError, match=says):
        parse_sft([*argv, *words], TWO)


def test_a_pipeline_is_refused_with_the_nearest_layout(model):  # noqa: F811
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o"]
    run = parse_sft([*argv, "--pipeline_parallel_degree", "2"], TWO)
    (refusal,) = run.refusals
    assert "use --tensor_parallel_degree 2 with --pipeline_parallel_degree 1, or --sharding stage3" in refusal
    assert not parse_sft([*argv, *DEGREE, "--lora"], TWO).refusals


def test_all_linear_is_every_matrix_but_the_head(model):  # noqa: F811
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", "--lora"]
    run = parse_sft([*argv, "--lora_target_modules", "all-linear"], {})
    assert run.lora.lora_target_modules == ["c_attn", "c_proj", "c_fc"]
