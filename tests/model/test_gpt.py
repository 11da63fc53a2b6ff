"""The network against stock GPT-2: same checkpoint, same logits, same loss, same generation."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config

from gptlm.data.collate import documents_in
from gptlm.errors import GptlmError
from gptlm.model.build import load_model, new_model
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.presets import Shape

SHAPE = Shape(3, 48, 4, 100, 130, 32)


@pytest.fixture
def ids():
    return torch.randint(0, 500, (3, 20), generator=torch.Generator().manual_seed(1))


def test_stock_checkpoints_load_and_ours_load_in_stock(tiny_model, tmp_path, ids):
    stock = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ours = load_model(str(tiny_model)).eval()
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=0, atol=1e-5)
    ours.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again).__name__ == "GPT2LMHeadModel" and not any(report.values())
    for (name, a), b in zip(stock.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["use_cache"] is True


def test_a_new_model_saves_as_gpt2_with_another_ffn_width(tmp_path):
    torch.manual_seed(0)
    ours = new_model(SHAPE).eval()
    ours.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 130, (2, 32))
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_round_trip(tmp_path, tied):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=tied)
    config.bos_token_id = config.eos_token_id = 0
    ours = GPTLMHeadModel(config).eval()
    assert (ours.lm_head.weight is ours.transformer.wte.weight) == tied
    ours.save_pretrained(tmp_path)
    again = load_model(str(tmp_path)).eval()
    ids = torch.randint(0, 50, (1, 8))
    assert torch.equal(ours(ids).logits, again(ids).logits)


def test_initialization_is_gpt2_s():
    torch.manual_seed(0)
    model = new_model(Shape(8, 256, 4, 1024, 1000, 64))
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight"):
            assert parameter.std().item() == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.05), name
        elif "ln_" in name:
            assert (parameter == (1 if name.endswith("weight") else 0)).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


def test_losses_by_hand(tiny_model, ids):
    model = load_model(str(tiny_model)).eval()
    logits = model(ids).logits
    labels = ids.clone()
    labels[0, :10] = -100
    shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert model(ids, labels=labels).loss.item() == pytest.approx(shifted.item(), abs=1e-6)
    assert model(ids, labels=labels).logits is None
    as_they_are = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    out = model(ids, labels=labels, shift_labels=labels)
    assert out.loss.item() == pytest.approx(as_they_are.item(), abs=1e-6)
    counted = model(ids, shift_labels=labels, num_items_in_batch=torch.tensor(25))
    assert counted.loss.item() == pytest.approx(as_they_are.item() * 50 / 25, abs=1e-5)


def test_padding_on_the_right_needs_no_mask(tiny_model, ids):
    """The same logits of real tokens, loss and gradients as with a mask, of ours and of the stock network."""
    mask = torch.arange(20) < torch.tensor([[20], [7], [1]])
    labels = ids.masked_fill(~mask, -100)
    found = []
    for network, given in (
        (load_model, None),
        (load_model, mask.long()),
        (AutoModelForCausalLM.from_pretrained, mask.long()),
    ):
        model = network(str(tiny_model)).eval()
        model(ids, attention_mask=given, labels=labels).loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((model(ids, attention_mask=given).logits[mask], gradients))
    for logits, gradients in found[:2]:
        torch.testing.assert_close(logits, found[2][0], rtol=0, atol=1e-5)
        for name, gradient in gradients.items():
            theirs = found[2][1][name]
            theirs = theirs if theirs.shape == gradient.shape and "c_" not in name else theirs.t()
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=1e-5, msg=name)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def packed_sample(rows, total):
    """Model inputs: `rows` in one sample of `total` positions with a tail, and how many targets they have."""
    tail = torch.zeros(total - sum(map(len, rows)), dtype=torch.int64)
    targets = torch.cat([F.pad(row[1:], (0, 1), value=-100) for row in rows] + [tail - 100])[None]
    inputs = {"input_ids": torch.cat([*rows, tail])[None], "shift_labels": targets}
    count = int((targets != -100).sum())
    return inputs | documents_in([*map(len, rows), len(tail)], total) | {"num_items_in_batch": torch.tensor(count)}


@pytest.mark.parametrize("recompute", [None, "full", "full_attn", "core_attn"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_packed_rows_are_rows_alone(tiny_model, ids, recompute, device):
    """Three rows in one sample: loss and gradients of each alone, however attention is recomputed."""
    rows = [row[:length] for row, length in zip(ids, (20, 7, 1), strict=True)]
    packed, alone = (load_model(str(tiny_model), hidden_dropout=0.0, attention_dropout=0.0).train() for _ in range(2))
    packed.to(device).transformer.set_recompute(recompute)
    inputs = packed_sample(rows, 40)
    on_device = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    found = packed(**on_device).loss
    wanted = sum(
        alone(row[None], labels=row[None], num_items_in_batch=inputs["num_items_in_batch"]).loss for row in rows
    )
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-5)
    for (name, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_packed_rows_in_bfloat16_are_as_near_as_stock_rows(tiny_model, ids):
    """Gradients differ from float32 ones by twice as much as those of the stock network in bfloat16 at most."""
    rows = [row[:length] for row, length in zip(ids, (20, 7, 1), strict=True)]
    inputs = packed_sample(rows, 40)
    how = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

    def stock(dtype):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype, **how).cuda().train()
        for row in rows[:2]:
            logits = model(row[None].cuda()).logits[0, :-1].float()
            (F.cross_entropy(logits, row[1:].cuda(), reduction="sum") / inputs["num_items_in_batch"]).backward()
        return {name: (p.grad.t() if "c_" in name else p.grad).float() for name, p in model.named_parameters()}

    ours = load_model(str(tiny_model), hidden_dropout=0.0, attention_dropout=0.0).bfloat16().cuda().train()
    ours(
        **{name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    ).loss.backward()
    exact, theirs = stock(torch.float32), stock(torch.bfloat16)
    far = lambda gradients: sum((gradients[name] - exact[name]).square().sum().item() for name in exact) ** 0.5  # noqa: E731
    assert 0 < far({name: p.grad.float() for name, p in ours.named_parameters()}) < 2 * far(theirs)


def test_recompute_changes_no_gradient(tiny_model, ids):
    gradients = []
    for recompute in (None, "full", "full_attn", "only_attn", "core_attn"):
        torch.manual_seed(3)
        model = load_model(str(tiny_model), hidden_dropout=0.1, attention_dropout=0.2).train()
        model.transformer.set_recompute(recompute, keep=[1])
        torch.manual_seed(5)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_the_two_dropouts_go_where_paddlenlp_has_them(tiny_model):
    model = load_model(str(tiny_model), hidden_dropout=0.3, attention_dropout=0.5)
    block = model.transformer.h[0]
    assert (model.transformer.drop.p, block.mlp.dropout.p) == (0.3, 0.3)
    assert (block.attn.dropout, block.attn.resid_dropout.p) == (0.5, 0.5)


def test_generation_with_cache_and_left_padding_equals_single_prompts(tiny_model):
    model = load_model(str(tiny_model)).eval()
    stock = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 500, (length,), generator=generator) for length in (1, 5, 17, 40)]
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    singles = [
        model.generate(p[None], attention_mask=torch.ones_like(p[None]), **options)[0, len(p) :] for p in prompts
    ]
    without_cache = model.generate(prompts[2][None], use_cache=False, **options)[0, 17:]
    assert without_cache.tolist() == singles[2].tolist()
    for prompt, single in zip(prompts, singles):
        assert stock.generate(prompt[None], **options)[0, len(prompt) :].tolist() == single.tolist()
    ids = torch.stack([F.pad(p, (40 - len(p), 0)) for p in prompts])
    mask = torch.stack([F.pad(torch.ones_like(p), (40 - len(p), 0)) for p in prompts])
    together = model.generate(ids, attention_mask=mask, **options)[:, 40:]
    assert together.tolist() == [single.tolist() for single in singles]


def test_growing_the_vocabulary_keeps_the_old_rows(tiny_model, ids):
    old, new = load_model(str(tiny_model)), load_model(str(tiny_model), vocab_size=512)
    assert new.lm_head.weight.shape == (512, 32) and new.lm_head.weight is new.transformer.wte.weight
    assert torch.equal(new.lm_head.weight[:500], old.lm_head.weight)
    assert 0 < new.lm_head.weight[500:].std() < 0.1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_unsupported_variants_are_refused(tiny_model, tmp_path, change, says):
    config = {**json.loads((tiny_model / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(GptlmError, match=says):
        load_model(str(tmp_path))


def test_missing_truncated_and_incomplete_weights_are_refused(tiny_model, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(GptlmError, match="cannot load model weights"):
        load_model(str(tmp_path))
    weights = (tiny_model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(GptlmError, match="cannot load model weights"):
        load_model(str(tmp_path))
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 3}))
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(GptlmError, match=r"tensors are missing.*h\.2\."):
        load_model(str(tmp_path))
