"""What servers read from a model folder, as facts from the source of vLLM (0.4 to 0.11) and text-generation-inference.

No server runs here: the files are compared with what the loaders ask for.
"""

import json
from pathlib import Path

from safetensors.torch import load_file
from tokenizers import Tokenizer

LAYER = {  # (rows, columns) in units of (hidden, inner); matrices are (in, out): both servers transpose them
    "ln_1.weight": "h", "ln_1.bias": "h", "attn.c_attn.weight": "h 3h", "attn.c_attn.bias": "3h",
    "attn.c_proj.weight": "h h", "attn.c_proj.bias": "h", "ln_2.weight": "h", "ln_2.bias": "h",
    "mlp.c_fc.weight": "h i", "mlp.c_fc.bias": "i", "mlp.c_proj.weight": "i h", "mlp.c_proj.bias": "h",
}  # fmt: skip


def wanted_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors. vLLM looks up each name of the files among its parameters: there is no other.

    The output head is the embedding (`tie_word_embeddings`); no `lm_head.weight` is asked for.
    """
    hidden = config["n_embd"]
    sizes = {"h": hidden, "3h": 3 * hidden, "i": config["n_inner"] or 4 * hidden}
    found = {"wte.weight": (config["vocab_size"], hidden), "wpe.weight": (config["n_positions"], hidden)}
    for layer in range(config["n_layer"]):
        found |= {f"h.{layer}.{part}": tuple(sizes[size] for size in text.split()) for part, text in LAYER.items()}
    found |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    return {f"transformer.{name}": shape for name, shape in found.items()}


def assert_servers_can_read(folder: Path) -> None:
    """Config, weights, tokenizer and generation settings of a saved model."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["model_type"] == "gpt2"  # chooses vLLM's class
    # vLLM asserts that these are off; GPT2Config's default is off
    assert not any(
        config.get(name)
        for name in ("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    )
    assert config["tie_word_embeddings"] is True and config.get("scale_attn_weights", True)
    assert "auto_map" not in config and "quantization_config" not in config

    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted_tensors(config)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{config['dtype']}"}  # vLLM's --dtype auto

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))  # TGI's router and llama.cpp's script read this file
    assert backend.get_vocab_size() <= config["vocab_size"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == config["n_positions"]  # vLLM takes the smaller one as context length
    template = folder / "chat_template.jinja"
    # new versions of transformers look into the file first, older ones and TGI's router know the key only
    assert settings.get("chat_template") == (template.read_text() if template.is_file() else None)

    generation = json.loads((folder / "generation_config.json").read_text())
    ends = generation["eos_token_id"]
    for token in [*(ends if isinstance(ends, list) else [ends]), generation["pad_token_id"]]:
        assert 0 <= token < config["vocab_size"]
    assert "temperature" not in generation and "top_p" not in generation  # vLLM takes them as its defaults
