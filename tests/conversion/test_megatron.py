"""Megatron's and Megatron-DeepSpeed's formats, written by hand, are read as stock GPT-2 bit for bit."""

import logging
import re
import sys
import types
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from gptlm.conversion.detect import detect
from gptlm.conversion.megatron.write import write_megatron as write_ours
from gptlm.conversion.open import open_checkpoint
from gptlm.conversion.source import ReadOptions
from gptlm.conversion.verify import logits_of
from gptlm.errors import GptlmError
from gptlm.recipes.convert import write_huggingface
from tests.conversion.layouts import (
    HEADS,
    LAYERS,
    NEW,
    NEWEST,
    OLD,
    SIZE,
    VOCABULARY,
    WIDE,
    column,
    logits,
    stock,
    write_deepspeed,
    write_megatron,
)

OPTIONS = ReadOptions(vocab_size=VOCABULARY)


def assert_same(path, model, options=OPTIONS):
    """Compare every weight bit for bit."""
    with open_checkpoint(path, options) as source:
        found = dict(source.weights())
    wanted = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("version", "names"), [(0, OLD), (1.0, OLD), (2.0, NEW), (3.0, NEWEST)])
def test_every_version_and_layout(tmp_path, version, names, ranks, stages):
    model = stock()
    path = write_megatron(model, tmp_path / "m", version, ranks, stages, names)
    assert_same(path, model)
    with open_checkpoint(path, OPTIONS) as source:
        (tmp_path / "hf").mkdir()
        write_huggingface(source, tmp_path / "hf", None, None, lambda: None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.allclose(logits(loaded), logits(model), rtol=0, atol=1e-5)


def test_the_log_names_other_checkpoints_in_the_folder(tmp_path, caplog):
    """Not those that are incomplete or consist of the same files."""
    model = stock()
    path = write_megatron(model, tmp_path / "both", 3.0, 1, 1)
    plain = "Megatron-LM, tensor parallel 1, pipeline 1, step 100"
    assert str(detect(path)) == plain
    (path / "model_state.tp01.pdparams").write_bytes(b"")  # tp00 is missing
    assert str(detect(path)) == plain
    stock(seed=1).save_pretrained(path)
    caplog.set_level("INFO")
    assert_same(path, model)
    note = "(the folder also contains one of HuggingFace GPT-2; to use that, move it into a folder of its own)"
    assert f"{path} is a checkpoint of {plain} {note}" in caplog.messages
    for file in ("config.json", "model.safetensors"):
        (path / file).rename(tmp_path / file)
    assert str(detect(tmp_path)) == "HuggingFace GPT-2"
    assert_same(tmp_path, stock(seed=1))
    assert str(detect(path)) == plain
    save_file({"gpt.decoder.layers.0.norm1.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert str(detect(tmp_path)) == "PaddleNLP, tensor parallel 1, pipeline 1"


@pytest.mark.parametrize("ranks", [1, 2])
def test_layer_files_of_megatron_deepspeed(tmp_path, ranks):
    model = stock()
    path = write_deepspeed(model, tmp_path / "ds", ranks)
    assert_same(path, model)
    assert str(detect(path)) == f"Megatron-DeepSpeed, tensor parallel {ranks}, step 7"


def test_megatron_deepspeed_without_pipeline(tmp_path):
    model = stock()
    source = write_megatron(model, tmp_path / "m", 3.0, 1, 1) / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    content = torch.load(source, weights_only=False)
    content["module"] = content.pop("model")
    (tmp_path / "ds/global_step9").mkdir(parents=True)
    torch.save(content, tmp_path / "ds/global_step9/mp_rank_00_model_states.pt")
    (tmp_path / "ds/latest").write_text("global_step9")
    assert_same(tmp_path / "ds", model)


def test_megatron_core_names_and_interleaved_stages(tmp_path):
    """Two chunks per stage: stage 0 has layers 0 and 2, stage 1 layers 1 and 3."""
    model = stock()
    write_megatron(model, tmp_path / "m", 3.0, 1, 1)
    file = "mp_rank_00/model_optim_rng.pt"
    whole = torch.load(tmp_path / "m/iter_0000100" / file, weights_only=False)
    language = whole["model"]["language_model"]
    core = {
        "self_attention.query_key_value": "self_attention.linear_qkv",
        "self_attention.dense": "self_attention.linear_proj",
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp.dense_h_to_4h": "mlp.linear_fc1",
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
    }
    layers = {}
    for name, value in language["encoder"].items():
        for old, new in core.items():
            name = name.replace(old, new)
        layers[f"decoder.{name}"] = value
    words = language["embedding"]["word_embeddings"]["weight"]
    positions = language["embedding"]["position_embeddings"]["weight"]
    whole["args"].pipeline_model_parallel_size = 2
    for stage, own in enumerate(([0, 2], [1, 3])):
        content = {key: value for key, value in whole.items() if key != "model"}
        for chunk, layer in enumerate(own):
            prefix = f"decoder.layers.{layer}."
            content[f"model{chunk}"] = {
                name.replace(prefix, "decoder.layers.0."): v for name, v in layers.items() if name.startswith(prefix)
            }
        if stage == 0:
            content["model0"]["embedding.word_embeddings.weight"] = words
            content["model0"]["embedding.position_embeddings.weight"] = positions
        else:
            content["model1"]["output_layer.weight"] = words.clone()
            content["model1"] |= {n: v for n, v in layers.items() if n.startswith("decoder.final_layernorm")}
        path = tmp_path / f"core/iter_0000100/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(content, path)
    (tmp_path / "core/latest_checkpointed_iteration.txt").write_text("100")
    assert_same(tmp_path / "core", model)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_release_without_arguments_in_the_old_file_format(tmp_path, zipped, caplog):
    """As NVIDIA's 345M zip: no arguments, version 0, torch's format before zip files."""
    model = stock()
    write_megatron(model, tmp_path / "m", 0, 1, 1, OLD)
    file = tmp_path / "m/iter_0000100/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    del content["args"]
    release = tmp_path / "r/release/mp_rank_00/model_optim_rng.pt"
    release.parent.mkdir(parents=True)
    torch.save(content, release, _use_new_zipfile_serialization=False)
    (tmp_path / "r/latest_checkpointed_iteration.txt").write_text("release")
    path = tmp_path / "r"
    if zipped:
        path = tmp_path / "megatron_lm_345m.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tmp_path / "r/latest_checkpointed_iteration.txt", "latest_checkpointed_iteration.txt")
            archive.write(release, "release/mp_rank_00/model_optim_rng.pt")
    with pytest.raises(GptlmError, match="give --num_attention_heads"), open_checkpoint(path, OPTIONS):
        pass
    with (
        pytest.raises(GptlmError, match="form of GELU.*--activation gelu_new"),
        open_checkpoint(path, ReadOptions(VOCABULARY, HEADS)),
    ):
        pass
    assert_same(path, model, ReadOptions(VOCABULARY, HEADS, "gelu_new"))


@pytest.mark.parametrize(
    ("fused", "tanh", "activation"), [(True, False, "gelu_new"), (False, True, "gelu_new"), (False, False, "gelu")]
)
def test_the_activation_follows_the_arguments(tmp_path, fused, tanh, activation):
    model = stock(activation)
    path = write_megatron(model, tmp_path / "m", 3.0, 1, 1, bias_gelu_fusion=fused, openai_gelu=tanh)
    ids = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
    with open_checkpoint(path, OPTIONS) as source:
        assert source.activation == activation
        assert float((logits_of(source, ids) - logits(model)).abs().max()) < 1e-5
        source.activation = "gelu" if activation == "gelu_new" else "gelu_new"
        assert float((logits_of(source, ids) - logits(model)).abs().max()) > 1e-5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"group_query_attention": True, "num_query_groups": 2}, "grouped-query attention"),
        ({"use_rotary_position_embeddings": True}, "rotary position embeddings"),
        ({"position_embedding_type": "rope"}, "position embeddings that are not learned"),
        ({"swiglu": True}, "SwiGLU"),
        ({"untie_embeddings_and_output_weights": True}, "untied"),
        ({"normalization": "RMSNorm"}, "another norm"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"kv_channels": 8}, "4 heads of 8 are not the hidden size 16"),
        ({"num_attention_heads": 3}, "hidden size 16 is not divisible by 3 heads"),
        ({"num_layers": "x"}, "num_hidden_layers is 'x'"),
        ({"make_vocab_size_divisible_by": 0}, "but unexpected content"),
    ],
)
def test_other_networks_are_refused(tmp_path, more, message):
    path = write_megatron(stock(), tmp_path / "m", 3.0, 1, 1, **more)
    with pytest.raises(GptlmError, match=re.escape(message)), open_checkpoint(path, OPTIONS):
        pass


def test_grouped_queries_of_one_head_each_are_plain_attention(tmp_path):
    model = stock()
    more = {"group_query_attention": True, "num_query_groups": HEADS, "position_embedding_type": "learned_absolute"}
    assert_same(write_megatron(model, tmp_path / "m", 3.0, 1, 1, **more), model)


def test_missing_and_damaged_parts_are_errors(tmp_path):
    root = write_megatron(stock(), tmp_path / "m", 3.0, 2, 2) / "iter_0000100"
    file = root / "mp_rank_01_001/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    stack = content["model"]["language_model"]["encoder"]

    def fails(match):
        with pytest.raises(GptlmError, match=match), open_checkpoint(tmp_path / "m", OPTIONS) as source:
            list(source.weights())

    torch.save({**content, "model": {"language_model": {"encoder": {
        k: v for k, v in stack.items() if k != "layers.1.mlp.dense_h_to_4h.bias"}}}}, file)  # fmt: skip
    fails("mp_rank_01_001/model_optim_rng.pt lacks mlp.dense_h_to_4h.bias")
    stack["layers.1.mlp.gate.weight"] = torch.ones(2)
    torch.save(content, file)
    fails(r"tensors that GPT-2 does not have \(first: encoder.layers.1.mlp.gate.weight\)")
    del stack["layers.1.mlp.gate.weight"]
    stack["layers.1.mlp.dense_4h_to_h.bias"] = torch.ones(3)
    torch.save(content, file)
    fails("have different transformer.h.3.mlp.c_proj.bias")
    stack["layers.1.mlp.dense_h_to_4h.weight"] = torch.ones(32, 15)
    torch.save(content, file)
    fails("the parts of transformer.h.3.mlp.c_fc.weight do not fit together")
    stack["layers.1.mlp.dense_h_to_4h.weight"] = torch.ones(31, 16)
    torch.save(content, file)
    fails(r"transformer.h.3.mlp.c_fc.weight has shape \(16, 63\), expected \(16, 64\)")
    stack["layers.1.mlp.dense_h_to_4h.weight"] = torch.ones(32, 16)
    content["model"]["word_embeddings_for_head"]["weight"] += 1
    stack["layers.1.mlp.dense_4h_to_h.bias"] = stock().state_dict()["transformer.h.3.mlp.c_proj.bias"]
    torch.save(content, file)
    fails("untied")
    file.write_bytes(file.read_bytes()[:-3000])
    fails("is damaged or cut off")
    file.unlink()
    fails("has no model_optim_rng.pt")
    file.parent.rmdir()
    fails("lacks mp_rank_01_001: its other files have tensor parallel 2 x pipeline 2")
    for rank in root.glob("*_001"):
        (rank / "model_optim_rng.pt").unlink()
        rank.rmdir()
    fails("pipeline_model_parallel_size 2, there are files of 1")


def test_padding_is_dropped_by_the_arguments_or_the_user(tmp_path, caplog):
    path = write_megatron(stock(), tmp_path / "m", 3.0, 1, 1)
    with open_checkpoint(path, ReadOptions()) as source:
        assert source.shape.vocab_size == 128 and "all 128 rows" in " ".join(source.notes)
    with open_checkpoint(path, OPTIONS) as source:
        assert source.shape.vocab_size == 50 and "reduced from 128 rows to 50 (--vocab_size)" in " ".join(source.notes)
    noted = write_megatron(stock(), tmp_path / "n", 3.0, 1, 1, vocab_size=50)
    with open_checkpoint(noted, ReadOptions()) as source:
        assert source.shape.vocab_size == 50
    with pytest.raises(GptlmError, match="the embedding in .* has 128 rows"), open_checkpoint(path, ReadOptions(500)):
        pass


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2), (4, 1)])
def test_the_writer_uses_the_layout_of_version_3(tmp_path, ranks, stages):
    """Read with plain torch: rows [heads, 3, size], columns and rows split, the embedding padded to 128 x ranks."""
    model = stock()
    path = write_megatron(model, tmp_path / "m", 0, 1, 1, OLD)
    with open_checkpoint(path, OPTIONS) as source:
        write_ours(source, tmp_path / "w", tensor=ranks, pipeline=stages, dtype=None, done=lambda: None)
    assert (tmp_path / "w/latest_checkpointed_iteration.txt").read_text() == "release"
    weights = model.state_dict()
    layer, stage, rank = LAYERS - 1, stages - 1, ranks - 1
    place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
    content = torch.load(tmp_path / "w/release" / place / "model_optim_rng.pt", weights_only=False)
    assert content["checkpoint_version"] == 3.0 and content["args"].padded_vocab_size == 128 * ranks
    assert content["args"].tensor_model_parallel_size == ranks and content["args"].num_layers == LAYERS
    stack = content["model"]["language_model"]["encoder"]
    local = f"layers.{layer % (LAYERS // stages)}."
    rows = stack[f"{local}self_attention.query_key_value.weight"]
    head = HEADS - 1  # the last head of the last rank: element 2 of its k
    row = (HEADS // ranks - 1) * 3 * SIZE + SIZE + 2
    assert torch.equal(rows[row], weights[f"transformer.h.{layer}.attn.c_attn.weight"][:, column(1, head, 2)])
    dense = weights[f"transformer.h.{layer}.attn.c_proj.weight"]  # (in, out): the last rank has the last inputs
    assert torch.equal(stack[f"{local}self_attention.dense.weight"], dense[-WIDE // ranks :].t())
    if stages > 1:
        head_copy = content["model"]["word_embeddings_for_head"]["weight"]
        assert head_copy.shape == (128, WIDE) and not head_copy[VOCABULARY - 128 * rank :].any()
    assert_same(tmp_path / "w", model, ReadOptions())


def test_enums_of_megatron_are_inert(tmp_path, monkeypatch):
    """An argument may be an enum of Megatron: its value is read without its class."""
    enums = types.ModuleType("megatron.enums")
    exec("import enum\nclass PositionEmbeddingType(enum.Enum):\n rotary = 1\n absolute = 2", enums.__dict__)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
        patch.setitem(sys.modules, "megatron.enums", enums)
        for kind in enums.PositionEmbeddingType:
            write_megatron(stock(), tmp_path / kind.name, 3.0, 1, 1, position_embedding_type=kind)
    assert_same(tmp_path / "absolute", stock())
    with (
        pytest.raises(GptlmError, match="position embeddings that are not learned"),
        open_checkpoint(tmp_path / "rotary", OPTIONS),
    ):
        pass


def test_norms_that_differ_by_rounding_are_averaged(tmp_path, caplog):
    root = write_megatron(stock(), tmp_path / "m", 3.0, 2, 1)
    file = root / "iter_0000100/mp_rank_01/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["language_model"]["encoder"]["layers.0.input_layernorm.weight"] += 1e-3
    torch.save(content, file)
    logging.getLogger("gptlm").propagate = True
    with open_checkpoint(root, OPTIONS) as source:
        found = source.get("transformer.h.0.ln_1.weight")
    assert torch.allclose(found, stock().transformer.h[0].ln_1.weight + 5e-4, rtol=0, atol=1e-6)
    assert "slightly different transformer.h.0.ln_1.weight" in caplog.text


def test_padding_is_kept_for_resuming(tmp_path):
    path = write_megatron(stock(), tmp_path / "m", 3.0, 1, 1, vocab_size=50)
    with open_checkpoint(path, ReadOptions(keep_padding=True)) as source:
        assert source.shape.vocab_size == 128 and float(source.get("transformer.wte.weight")[-1, 0]) == 9.0
