"""On a CUDA device: precisions agree, the log has memory fields."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F

from gptlm.checkpoint.folder import read
from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import GptlmError
from gptlm.kernels.fused_gelu import GELU_AUX_BIAS, _products, linear_gelu, linear_gelu_gradient
from gptlm.recipes.pretrain.run import pretrain
from gptlm.training.precision.master_adamw import MasterWeightAdamW, clip
from tests.conftest import ROOT, run_script

LOGGED = "forward and backward of a micro-batch are replayed as a CUDA graph"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def losses(tiny_model, corpus_folder, tmp_path, monkeypatch):
    def run(name, *words):
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # a run on the CPU sets it
        base = (
            f"--model_name_or_path {tiny_model} --continue_training --input_dir {corpus_folder}/mmap "
            f"--max_seq_length 32 --output_dir {tmp_path}/{name} --max_steps 8 --logging_steps 1 "
            "--per_device_train_batch_size 4 --learning_rate 1e-3 --split 90,5,5 "
            "--device gpu --disable_tqdm --report_to none "
            "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0"
        )
        if "--deepspeed" in words:  # it keeps its process group for the life of a process
            done = run_script("run_pretrain", *base.split(), *words)
            assert done.returncode == 0, done.stderr[-2000:]
        else:
            pretrain(parse_pretrain([*base.split(), *map(str, words)], {}))
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        return [entry for entry in history if "loss" in entry]

    return run


def test_a_profile_has_the_kernels_of_replayed_graphs(losses, tmp_path):
    losses("profiled", "--bf16", "--fp16_opt_level", "O2", "--profile", "2")
    trace = json.loads((tmp_path / "profiled" / "profile" / "steps-4-5.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in trace) > 10
    assert "CUDA" in (tmp_path / "profiled" / "profile" / "steps-4-5.txt").read_text()


def test_precisions_agree(losses):
    wanted = [entry["loss"] for entry in losses("cpu", "--device", "cpu")]
    full = losses("fp32")
    assert [entry["loss"] for entry in full] == pytest.approx(wanted, abs=1e-3)
    assert full[0]["max_memory_allocated"] > 0
    for flag in ("--bf16", "--fp16"):
        half = [entry["loss"] for entry in losses(flag.strip("-"), flag, "--recompute", "1")]
        assert half == pytest.approx(wanted, abs=3e-2)


@pytest.mark.parametrize("flag", ["--bf16", "--fp16"])
def test_half_weights_agree_with_autocast(losses, flag):
    """Also with gradients added up in float32, and with a float16 scale that starts so high that steps are skipped."""
    wanted = [entry["loss"] for entry in losses("o1", flag)]
    for name, more in (("o2", []), ("master", ["--amp_master_grad"])):
        found = [entry["loss"] for entry in losses(name, flag, "--fp16_opt_level", "O2", *more)]
        assert found == pytest.approx(wanted, abs=1e-2), name
    if flag == "--fp16":
        found = losses("skips", flag, "--fp16_opt_level", "O2", "--scale_loss", 2.0**40)
        assert found[1]["loss"] == pytest.approx(found[0]["loss"], abs=0.1) and found[-1]["loss"] < 7


@pytest.mark.parametrize("flag", [(), ("--bf16",)])
def test_document_masking_agrees_with_the_cpu(losses, flag):
    words = ("--document_masking", "attention", "--eod_mask_loss")
    wanted = [entry["loss"] for entry in losses("cpu", *words, "--device", "cpu")]
    assert [entry["loss"] for entry in losses("gpu", *words, *flag)] == pytest.approx(wanted, abs=2e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("file", [(), *(("--deepspeed", ROOT / f"ds_configs/zero{stage}.json") for stage in (1, 2, 3))])
def test_the_loss_scale_goes_on(losses, tmp_path, level, file):
    """Window 3: the scale doubles at steps 3 and 6; a run resumed at step 4 doubles at 6 as well, and ends the same."""
    words = (
        "--fp16",
        "--scale_loss",
        256,
        "--loss_scale_window",
        3,
        "--save_steps",
        4,
        "--fp16_opt_level",
        level,
        *file,
    )
    whole = losses("whole", *words)
    resumed = losses("resumed", *words, "--resume_from_checkpoint", tmp_path / "whole" / "checkpoint-4")
    assert [entry["loss"] for entry in resumed] == pytest.approx([entry["loss"] for entry in whole], abs=1e-3)
    scales = [read(tmp_path / name / "checkpoint-8").manifest.loss_scale for name in ("whole", "resumed")]
    assert scales[0] == scales[1] and scales[0]["value"] == 1024
    assert read(tmp_path / "whole" / "checkpoint-4").manifest.loss_scale["value"] == 512


@pytest.mark.parametrize("more", [(), ("--fp16_opt_level", "O2")])
def test_an_overflow_at_the_lowest_scale_ends_the_run(losses, tmp_path, more):
    with pytest.raises(GptlmError, match=r"gradients overflow at the lowest loss .* at step 1, no loss was finite"):
        losses("x", "--fp16", "--loss_scale", 1e30, "--save_steps", 1, *more)
    assert not list((tmp_path / "x").glob("checkpoint-*"))


def test_one_compiled_pass_updates_as_adamw_does():
    """Learning rates that change, weights of odd sizes, one without a gradient in some steps."""

    def make(fused):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s, device="cuda").bfloat16()) for s in ((1000, 333), (77,), (5, 5))]
        groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
        return weights, MasterWeightAdamW(groups, lr=1e-2, fused=fused)

    pairs = [make(True), make(False)]
    for step in range(20):
        for number in range(3):
            gradient = torch.randn(pairs[0][0][number].shape, device="cuda").bfloat16()
            for weights, _ in pairs:
                weights[number].grad = None if number == 1 and step % 7 == 3 else gradient.clone()
        for _, optimizer in pairs:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (step + 1) / 20
            optimizer.take_gradients()
            clip(optimizer, 1.0)
            optimizer.step()
    for one, other in zip(pairs[0][1].masters, pairs[1][1].masters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_compiling_and_not_compiling_agree(losses):
    """Everything on and everything off, with the same random numbers: float32 to 1e-5, bfloat16 to 2e-3."""
    dropout = ("--hidden_dropout_prob", "0.1", "--attention_probs_dropout_prob", "0.1")
    half = ("--bf16", "--fp16_opt_level", "O2")
    for name, words, distance in (("f", (), 1e-5), ("d", dropout, 1e-5), ("b", half, 2e-3)):
        on, off = losses(f"{name}-on", *words), losses(f"{name}-off", *words, "--torch_compile", "0")
        assert [e["loss"] for e in on] == pytest.approx([e["loss"] for e in off], abs=distance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_gelu_are_product_and_gelu(dtype):
    """Also where no kernel has the shape, and again with other tensors of a shape that was there before."""
    torch.manual_seed(0)
    for rows, width, inner in ((64, 32, 128), (4096, 256, 1024), (64, 32, 128), (7, 36, 20)):
        make = functools.partial(torch.randn, device="cuda", dtype=dtype)
        x, weight, bias, gradient = make(rows, width), make(inner, width) / 8, make(inner), make(rows, width)
        if inner > 20:
            assert _products(0)(GELU_AUX_BIAS, weight, x, bias, make(rows, inner)) is not None
        made, before = linear_gelu(x, weight, bias)
        wanted = F.linear(x.float(), weight.float(), bias.float()).requires_grad_()
        gelu = F.gelu(wanted, approximate="tanh")
        torch.testing.assert_close(before.float(), wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(made.float(), gelu, rtol=2e-2, atol=2e-2)
        found = linear_gelu_gradient(gradient, weight.T.contiguous(), before)
        gelu.backward(gradient.float() @ weight.T.float())
        torch.testing.assert_close(found.float(), wanted.grad, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--bf16",
        "--bf16 --fp16_opt_level O2 --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1",
        "--bf16 --fp16_opt_level O2 --gradient_accumulation_steps 3",
        "--bf16 --fp16_opt_level O2 --gradient_accumulation_steps 3 --amp_master_grad",
        "--fp16 --fp16_opt_level O2 --scale_loss 65536 --loss_scale_window 3",
        "--bf16 --fp16_opt_level O2 --recompute 1 --hidden_dropout_prob 0.1",
        "--bf16 --fp16_opt_level O2 --document_masking attention",
    ],
)
def test_cuda_graphs_change_nothing(losses, capsys, tmp_path, words):
    """Losses and weights, with evaluations between the steps; resumed too."""
    words = [*words.split(), "--do_eval", "--do_train", "--eval_steps", "3", "--save_steps", "4"]
    plain = losses("plain", *words, "--cuda_graphs", "0")
    assert LOGGED not in capsys.readouterr().out
    graph = losses("graph", *words)
    assert LOGGED in capsys.readouterr().out
    assert [e["loss"] for e in graph] == pytest.approx([e["loss"] for e in plain], abs=1e-5)
    resumed = losses("resumed", *words, "--resume_from_checkpoint", tmp_path / "graph" / "checkpoint-4")
    assert [e["loss"] for e in resumed] == pytest.approx([e["loss"] for e in graph], abs=1e-5)
    assert torch.cuda.memory_allocated() < 2**28


def test_a_run_logs_why_there_is_no_cuda_graph(losses, capsys):
    losses("x", "--cuda_graphs", "1", "--torch_compile", "0", "--max_steps", "1")
    assert "--cuda_graphs has no effect: the blocks are not compiled" in capsys.readouterr().out
