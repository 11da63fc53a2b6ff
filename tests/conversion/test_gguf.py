"""GGUF files: gguf's own reader gives back weights and tokenizer; llama.cpp computes what stock GPT-2 does."""

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gptlm.cli import main
from gptlm.conversion.gguf import tensor_name
from gptlm.conversion.gpt2_names import all_names
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.model.tokenizer import train_tokenizer

TEXT = "the cat sat on a mat while two dogs ran far away from all those birds in our old garden"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random stock GPT-2 with 2 layers, 64 wide, and more rows than its tokenizer has entries."""
    folder = tmp_path_factory.mktemp("gguf") / "my-model"
    tokenizer = train_tokenizer([TEXT] * 5, 310)
    tokenizer.add_tokens(["<user>"])
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer) + 3, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():  # biases and norms that are not 0 and 1
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder


def converted(folder, output, kind):
    assert main(["convert", "--from", str(folder), "--to", "gguf", "--output", str(output), "--gguf_type", kind]) == 0
    assert [path.name for path in output.iterdir() if path.suffix == ".gguf"] == [f"model-{kind}.gguf"]
    return output / f"model-{kind}.gguf"


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_weights_come_back(folder, tmp_path, kind):
    stored = load_file(folder / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(converted(folder, tmp_path / "out", kind)).tensors}
    names = list(all_names(2))
    assert set(tensors) == {tensor_name(name) for name in names}
    for name in names:
        matrix = name.endswith((*CONV1D_WEIGHTS, "wte.weight"))
        value = (stored[name].t() if name.endswith(CONV1D_WEIGHTS) else stored[name]).contiguous().numpy()
        tensor = tensors[tensor_name(name)]
        assert tensor.tensor_type.name == (kind.upper() if matrix else "F32")
        expected = value if not matrix else dequantize(quantize(value, tensor.tensor_type), tensor.tensor_type)
        assert np.array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(value.shape), expected), name
        assert np.abs(expected - value).max() <= {"f32": 0, "f16": 1e-3, "q8_0": 5e-3}[kind] * np.abs(value).max()


def test_sizes_and_tokenizer(folder, tmp_path):
    reader = GGUFReader(converted(folder, tmp_path / "out", "f32"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert {name.partition(".")[2]: facts[name] for name in facts if name.startswith("gpt2.")} == {
        "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 256,
        "attention.head_count": 2, "attention.layer_norm_epsilon": pytest.approx(1e-5),
    }  # fmt: skip
    assert (facts["general.architecture"], facts["general.name"]) == ("gpt2", "my-model")
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[len(tokenizer) :] == [f"[PAD{len(tokenizer) + i}]" for i in range(3)] and types[-3:] == [5] * 3
    assert types[tokenizer.eos_token_id] == 3 and types[tokenizer.convert_tokens_to_ids("<user>")] == 4
    assert (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert facts["tokenizer.ggml.eos_token_id"] == facts["tokenizer.ggml.bos_token_id"] == 0
    assert not facts["tokenizer.ggml.add_bos_token"] and facts["tokenizer.chat_template"] == "{{ messages }}"
    assert len(facts["tokenizer.ggml.merges"]) == 310 - 257 and all(" " in m for m in facts["tokenizer.ggml.merges"])


def test_what_llama_cpp_would_encode_or_compute_differently(folder, tmp_path, capsys):
    words = ["convert", "--from", str(folder), "--to", "gguf", "--output", str(tmp_path / "out")]
    assert main([*words, "--dtype", "float16"]) != 0
    assert "has no meaning with --to gguf; give --gguf_type" in capsys.readouterr().err
    backend = train_tokenizer([TEXT], 290).backend_tokenizer
    backend.normalizer = normalizers.Lowercase()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path / "lower")
    assert main([*words, "--tokenizer_name_or_path", str(tmp_path / "lower")]) != 0
    assert "not GPT-2's byte-level BPE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_llama_cpp_computes_what_transformers_does(folder, tmp_path):
    """Logits in float32, the ids of a text, and 50 tokens of greedy search."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = converted(folder, tmp_path / "out", "f32")
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(TEXT[:40])["input_ids"][:10]
    assert llama.tokenize(TEXT[:40].encode(), add_bos=True)[:10] == ids
    llama.eval(ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
        greedy = model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=None)[0]
    assert np.abs(np.array(llama.scores[: len(ids)]) - expected.numpy()).max() < 1e-2
    made = list(ids)
    llama.reset()
    for token in llama.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
        made.append(token)
        if len(made) == len(ids) + 50:
            break
    assert made == greedy.tolist()
