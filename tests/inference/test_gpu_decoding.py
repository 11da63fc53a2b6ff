"""The decode loop on a CUDA device: replayed steps equal eager ones and those of the CPU, and free their memory."""

import gc

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from gptlm.inference.decoding import STEPS, Decoder
from gptlm.inference.sampling import GREEDY, NextToken, Sampling
from gptlm.model.presets import Shape
from tests.inference.test_decoding import decided, decode, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

POSITIONS, ENTRIES = 48, 300


def small(width=64, heads=2, layers=2, entries=ENTRIES, positions=POSITIONS):
    return decided(Shape(layers, width, heads, 2 * width, entries, positions))


@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_attention_of_one_token_is_torch_s(width):
    """Rows of 0 to 299 tokens, with one and several programs for each row and head."""
    from gptlm.kernels.decode_attention import DecodeAttention

    for rows, dtype, error in ((1, torch.float32, 1e-5), (3, torch.bfloat16, 2e-2), (20, torch.float16, 3e-3)):
        heads, places = 4, 300
        generator = torch.Generator("cuda").manual_seed(rows)
        new = torch.randn(rows, 1, 3 * heads * width, device="cuda", generator=generator).to(dtype)
        q, k, v = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in new.chunk(3, dim=-1))
        keys, values = (
            torch.randn(rows, heads, places, width, device="cuda", generator=generator).to(dtype) for _ in range(2)
        )
        kernel = DecodeAttention(rows, heads, width, keys.device)
        for length in (0, 63, 299):
            lengths = (torch.arange(rows, device="cuda") * 37 + length) % places
            own_keys, own_values = keys.clone(), values.clone()
            found = kernel(q, k, v, own_keys, own_values, lengths)
            for row, past in enumerate(lengths.tolist()):
                all_keys = torch.cat((keys[row, :, :past], k[row]), dim=1)
                all_values = torch.cat((values[row, :, :past], v[row]), dim=1)
                wanted = F.scaled_dot_product_attention(q[row].float(), all_keys.float(), all_values.float())
                torch.testing.assert_close(found[row].float(), wanted, atol=error, rtol=error)
                assert torch.equal(own_keys[row, :, past], k[row, :, 0]) and torch.equal(
                    own_values[row, :, past], v[row, :, 0]
                )
                keep = [place for place in range(places) if place != past]
                assert torch.equal(own_keys[row][:, keep], keys[row][:, keep])


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}, {"min_new_tokens": 3}])
def test_replayed_steps_equal_eager_ones_and_the_cpu_s(options):
    """24 rows, of which some end early: slots are filled again, and given up in the end."""
    model, rows, sampling = small(), prompts(24), Sampling(**options)
    free = decode(model, rows, [], 12, slots=24, sampling=sampling)
    stops = sorted({row[length] for row, length in zip(free, (0, 3, 6, 9), strict=False)})
    wanted = decode(model, rows, stops, 12, slots=24, sampling=sampling)
    assert len({len(row) for row in wanted}) > 2
    model = model.cuda()
    for slots, graph in ((1, True), (1, False), (3, True), (3, False), (24, True), (24, False)):
        found = decode(model, rows, stops, 12, slots=slots, sampling=sampling, graph=graph)
        assert found == wanted, (slots, graph)


def test_torch_s_attention_replayed_gives_the_same(monkeypatch):
    """Where there is no Triton."""
    model, rows = small(), prompts(9)
    wanted = decode(model, rows, [], 20, slots=4)
    monkeypatch.setattr("gptlm.inference.slots.compile_obstacle", lambda device: "no Triton")
    model = model.cuda()
    for graph in (True, False):
        assert decode(model, rows, [], 20, slots=4, graph=graph) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entries", [300, 50257])
def test_half_precision_follows_float32(dtype, entries):
    """Two models, one after the other, with a head of a number of rows that is no multiple of 128."""
    for width, heads in ((64, 1), (160, 2)):
        model = small(width, heads, entries=entries, positions=700).cuda()
        rows = [row * 12 for row in prompts(6)]
        capacity = {"capacity": 700}
        wanted = decode(model, rows, [], 12, slots=6, **capacity)
        found = decode(model.to(dtype), rows, [], 12, slots=6, **capacity)
        same = sum(one[0] == other[0] for one, other in zip(found, wanted, strict=True))
        assert same >= 5 and max(map(max, found)) < entries


def test_draws_follow_the_seed_and_are_those_of_multinomial():
    model, rows = small().cuda(), prompts(5)
    wild = Sampling(do_sample=True, top_k=0, top_p=0.95, temperature=1.5)
    decoder = Decoder(model, slots=5, capacity=POSITIONS)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        done = {row.number: row.new for row in decoder.decode(rows, 15, wild, []) if row.ended}
        drawn.append([done[number] for number in range(5)])
    assert drawn[0] == drawn[1] != drawn[2]
    logits = torch.randn(5, ENTRIES, device="cuda")
    choose = NextToken(Sampling(do_sample=True, top_k=0), [], [], ENTRIES, logits.device)
    torch.manual_seed(4)
    chosen, _ = choose(logits, rows, logits.new_zeros(5))
    torch.manual_seed(4)
    assert torch.equal(chosen, torch.multinomial(logits.softmax(-1), 1)[:, 0])


def test_adapters_and_changed_weights_are_part_of_the_graph():
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc"], init_lora_weights=False)
    torch.manual_seed(4)
    model = get_peft_model(small(), config).eval()
    rows = prompts(4)
    wanted = decode(model, rows, [], 10, slots=4)
    model = model.cuda()
    decoder = Decoder(model, slots=4, capacity=POSITIONS)

    def run():
        done = {row.number: row.new for row in decoder.decode(rows, 10, GREEDY, []) if row.ended}
        return [done[number] for number in range(4)]

    assert run() == wanted
    assert decoder._batch._head.shape[0] == 384  # 300 rows, padded to a multiple of 128
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        model.get_base_model().lm_head.weight.normal_(std=0.4)
    changed = run()
    assert changed != wanted and changed == decode(model.cpu(), rows, [], 10, slots=4)


def test_memory_is_freed():
    model = small(256, 4, layers=4, positions=1024).cuda()
    decode(model, [[1, 2]], [], 2, slots=1)  # libraries keep workspaces
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    decode(model, prompts(64), [], 2 * STEPS, slots=64, capacity=1024)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 200), (1024, 3072), (1280, 1280), (6400, 1600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_a_vector_is_torch_s(inputs, outputs, dtype):
    from gptlm.kernels.vector_linear import vector_linear

    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, device="cuda")
    norm = torch.nn.LayerNorm(inputs, device="cuda")
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x, residual = torch.randn(1, inputs, device="cuda"), torch.randn(1, outputs, device="cuda")
    for module in (linear, norm):
        module.to(dtype)
    x, residual = x.to(dtype), residual.to(dtype)
    error = 2e-5 if dtype == torch.float32 else 3e-2
    with torch.no_grad():
        normed = linear.float()(norm.float()(x.float()).to(dtype).float())
        plain = linear(x.float()) + residual.float()
        wanted = (F.gelu(normed, approximate="tanh"), plain)
        linear, norm = linear.to(dtype), norm.to(dtype)
        found = (vector_linear(x, linear, norm=norm, gelu=True), vector_linear(x, linear, residual=residual))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, atol=error, rtol=error)
