"""PaddleNLP's and FleetX's formats, written by hand, are read as stock GPT-2 bit for bit."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from gptlm.conversion.detect import detect
from gptlm.conversion.open import open_checkpoint
from gptlm.conversion.paddle.write import write_paddle
from gptlm.conversion.source import ReadOptions
from gptlm.conversion.verify import logits_of
from gptlm.errors import GptlmError
from tests.conversion.layouts import (
    HEADS,
    LAYERS,
    PADDLE_CONFIG,
    SIZE,
    VOCABULARY,
    as_array,
    column,
    logits,
    paddle_tensors,
    stock,
    write_pdparams,
)

PLAIN = ReadOptions()


def write_config(folder, **more):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**PADDLE_CONFIG, **more}))


def assert_same(path, model, options=PLAIN, dtype=torch.float32):
    with open_checkpoint(path, options) as source:
        found = dict(source.weights())
        ids = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
        if dtype == torch.float32:
            assert torch.allclose(logits_of(source, ids), logits(model), rtol=0, atol=1e-5)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            assert found[name].dtype == dtype and torch.equal(found[name], value.to(dtype)), name


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
def test_pdparams_of_every_layout(tmp_path, fused, ranks, stages):
    model = stock()
    write_config(tmp_path / "c")
    for stage in range(stages):
        layers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        for rank in range(ranks):
            shard = [f"tp{rank:02d}"] * (ranks > 1) + [f"pp{stage:02d}"] * (stages > 1)
            name = ".".join(["model_state", *(["_".join(shard)] if shard else []), "pdparams"])
            write_pdparams(tmp_path / "c" / name, paddle_tensors(model, fused, rank, ranks, layers))
    assert str(detect(tmp_path / "c")) == f"PaddleNLP, tensor parallel {ranks}, pipeline {stages}"
    assert_same(tmp_path / "c", model)


def bfloat16_stock():
    """A model whose weights are exact in bfloat16."""
    model = stock()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def test_bfloat16_as_bits(tmp_path):
    model = bfloat16_stock()
    write_config(tmp_path / "c")
    write_pdparams(tmp_path / "c/model_state.pdparams", paddle_tensors(model, True), bfloat16=True)
    assert_same(tmp_path / "c", model, dtype=torch.bfloat16)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_unified_safetensors(tmp_path, fused, bfloat16):
    model = bfloat16_stock()
    write_config(tmp_path / "c")
    arrays = {name: as_array(value, bfloat16) for name, value in paddle_tensors(model, fused).items()}
    names = sorted(arrays)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: np.ascontiguousarray(arrays[name]) for name in own}, tmp_path / "c" / file, {"format": "np"})
    places = {name: file for file, own in halves.items() for name in own}
    (tmp_path / "c/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_same(tmp_path / "c", model, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    (tmp_path / "c/model-00002-of-00002.safetensors").unlink()
    with (
        pytest.raises(GptlmError, match="model-00002-of-00002.safetensors"),
        open_checkpoint(tmp_path / "c", ReadOptions()),
    ):
        pass


def test_split_arrays_and_named_arrays(tmp_path):
    """Pickle protocols 2 and 3: arrays above 1 GiB are split; some versions store (internal name, array)."""
    model = stock()
    write_config(tmp_path / "c")
    content = {name: ("linear_3.w_0", as_array(value)) for name, value in paddle_tensors(model, True).items()}
    big = "gpt.embeddings.word_embeddings.weight"
    flat = content.pop(big)[1].reshape(-1)
    content |= {f"{big}@@.0": flat[:500], f"{big}@@.1": flat[500:]}
    facts = {"OriginShape": (VOCABULARY, 16), "slices": [f"{big}@@.0", f"{big}@@.1"]}
    content["UnpackBigParamInfor@@"] = {big: facts}
    (tmp_path / "c/model_state.pdparams").write_bytes(pickle.dumps(content, protocol=2))
    assert_same(tmp_path / "c", model)
    content.pop(f"{big}@@.1")
    (tmp_path / "c/model_state.pdparams").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(GptlmError, match=f"lacks {big}@@.1, a part of"), open_checkpoint(tmp_path / "c", ReadOptions()):
        pass


def test_the_older_configuration_format(tmp_path):
    model = stock()
    old = {name: value for name, value in PADDLE_CONFIG.items() if name != "model_type"}
    content = {"init_args": [{**old, "init_class": "GPTModel"}], "init_class": "GPTForPretraining"}
    (tmp_path / "model_config.json").write_text(json.dumps(content))
    write_pdparams(tmp_path / "model_state.pdparams", paddle_tensors(model, False))
    assert_same(tmp_path, model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fleetx_folders(tmp_path, ranks):
    """There is no configuration, so the user gives the heads. Each sharding rank has all weights."""
    model, folder = stock(), tmp_path / "epoch_0_step_500"
    for rank in range(ranks):
        place = [f"mp_{rank:02d}_sharding_{shard:02d}_pp_00" for shard in range(2)] if ranks > 1 else ["."]
        for name in place:
            write_pdparams(folder / name / "model.pdparams", paddle_tensors(model, True, rank, ranks))
    assert str(detect(folder)) == f"FleetX, tensor parallel {ranks}, pipeline 1, step 500"
    with pytest.raises(GptlmError, match="give --num_attention_heads"), open_checkpoint(folder, ReadOptions()):
        pass
    assert_same(folder, model, ReadOptions(num_attention_heads=HEADS))


def test_fleetx_pipelines_number_layers_from_the_embedding(tmp_path):
    """Paddle's PipelineLayer: 0 the embedding (shared by both end stages), 1 to n the layers, n + 1 the final norm."""
    model = stock()
    whole = paddle_tensors(model, False)
    for stage, layers in enumerate((range(2), range(2, 4))):
        tensors = {
            "shared_layers.embed.word_embeddings.weight": whole["gpt.embeddings.word_embeddings.weight"],
            "shared_layers.embed.position_embeddings.weight": whole["gpt.embeddings.position_embeddings.weight"]
            + stage,
        }
        for layer in layers:
            prefix = f"gpt.decoder.layers.{layer}."
            tensors |= {n.replace(prefix, f"{layer + 1}."): v for n, v in whole.items() if n.startswith(prefix)}
        if stage:
            tensors |= {f"5.norm.{kind}": whole[f"gpt.decoder.norm.{kind}"] for kind in ("weight", "bias")}
        write_pdparams(tmp_path / f"epoch_0_step_1/mp_00_sharding_00_pp_{stage:02d}/model.pdparams", tensors)
    assert_same(tmp_path / "epoch_0_step_1", model, ReadOptions(num_attention_heads=HEADS))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hidden_act": "relu"}, "its activation is 'relu'"),
        ({"tie_word_embeddings": False}, "untied"),
        ({"num_experts": 4}, "mixture of experts"),
        ({"normalize_before": False}, "norms after the residual connection"),
    ],
)
def test_other_networks_are_refused(tmp_path, more, message):
    write_config(tmp_path, **more)
    write_pdparams(tmp_path / "model_state.pdparams", paddle_tensors(stock(), True))
    with pytest.raises(GptlmError, match=message), open_checkpoint(tmp_path, ReadOptions()):
        pass


def test_wrong_tensors_are_errors(tmp_path):
    write_config(tmp_path)
    path = tmp_path / "model_state.pdparams"

    def fails(match, change):
        tensors = paddle_tensors(stock(), True)
        change(tensors)
        write_pdparams(path, tensors)
        with pytest.raises(GptlmError, match=match), open_checkpoint(tmp_path, ReadOptions()) as source:
            list(source.weights())

    layer = "gpt.decoder.layers.2."
    fails("lacks decoder.layers.2.linear2.bias", lambda t: t.pop(f"{layer}linear2.bias"))
    fails("lacks decoder.layers.2.self_attn.qkv_proj.weight", lambda t: t.pop(f"{layer}self_attn.qkv_proj.weight"))
    fails(
        r"does not have \(first: gpt.decoder.layers.2.gate.weight\)",
        lambda t: t.update({f"{layer}gate.weight": torch.ones(1)}),
    )
    fails(
        r"transformer.h.2.ln_1.bias has shape \(3,\), expected \(16,\)",
        lambda t: t.update({f"{layer}norm1.bias": torch.ones(3)}),
    )
    fails("its output head is not the embedding", lambda t: t.update({"lm_head.weight": torch.ones(VOCABULARY, 16)}))
    write_pdparams(path, paddle_tensors(stock(), True) | {"lm_head.weight": stock().lm_head.weight.detach()})
    assert_same(tmp_path, stock())


def test_a_missing_tensor_parallel_rank_is_an_error(tmp_path):
    write_config(tmp_path)
    write_pdparams(tmp_path / "model_state.tp01.pdparams", paddle_tensors(stock(), True, 1, 2))
    with (
        pytest.raises(GptlmError, match="lacks model_state.tp00_pp00.pdparams"),
        open_checkpoint(tmp_path, ReadOptions()),
    ):
        pass


@pytest.mark.parametrize("pdparams", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_the_writer_uses_paddles_layout(tmp_path, fused, pdparams):
    """Read with plain pickle and safetensors, compared with the layout written by hand."""
    model = stock()
    (tmp_path / "in").mkdir()
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with open_checkpoint(tmp_path / "in", ReadOptions()) as source:
        write_paddle(source, tmp_path / "out", fused=fused, pdparams=pdparams, dtype=None, done=lambda: None)
    if pdparams:
        content = pickle.loads((tmp_path / "out/model_state.pdparams").read_bytes())
        found = {name: torch.from_numpy(value) for name, value in content.items()}
    else:
        found = load_file(tmp_path / "out/model.safetensors")
    wanted = paddle_tensors(model, fused)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["fuse_attention_qkv"] is fused and config["num_attention_heads"] == HEADS
    if fused:  # element 1 of k of head 2 follows two heads of q, k, v and that head's q
        place = 2 * 3 * SIZE + SIZE + 1
        own = model.state_dict()["transformer.h.0.attn.c_attn.bias"][column(1, 2, 1)]
        assert found["gpt.decoder.layers.0.self_attn.qkv_proj.bias"][place] == own
