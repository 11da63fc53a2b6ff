"""Checkpoints in the formats of other libraries, written from their documented layouts without our own writers."""

import argparse
import pickle
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

LAYERS, WIDE, HEADS, SIZE, INNER, VOCABULARY, POSITIONS = 4, 16, 4, 4, 64, 50, 12
SIZES = {"n_layer": LAYERS, "n_embd": WIDE, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": POSITIONS}


def stock(activation="gelu_new", seed=0) -> GPT2LMHeadModel:
    """transformers' own GPT-2, every weight and bias random."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, activation_function=activation, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def logits(model) -> torch.Tensor:
    ids = torch.arange(2 * POSITIONS).reshape(2, POSITIONS) * 7 % VOCABULARY
    with torch.no_grad():
        return model(ids).logits


def column(part, head, place):
    """The column of c_attn that computes element `place` of head `head` of q (0), k (1) or v (2)."""
    return part * HEADS * SIZE + head * SIZE + place


def columns_of(version, heads):
    """The columns of c_attn in the order of query_key_value's rows on a rank that has `heads`."""
    if version == 0:
        return [column(part, head, place) for part in range(3) for head in heads for place in range(SIZE)]
    if version == 1.0:
        return [column(part, head, place) for head in heads for place in range(SIZE) for part in range(3)]
    return [column(part, head, place) for head in heads for part in range(3) for place in range(SIZE)]


OLD = ("transformer", "attention", "input_layernorm", "post_attention_layernorm", "final_layernorm")
NEW = ("encoder", "self_attention", "input_layernorm", "post_attention_layernorm", "final_layernorm")
NEWEST = ("encoder", "self_attention", "input_norm", "post_attention_norm", "final_norm")


def part_of(tensor, rank, ranks, dim):
    size = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * size, size).clone()


def megatron_layer(weights, layer, version, rank, ranks, names=NEW):
    """One layer on one tensor rank, by Megatron's names."""
    _, attention, first_norm, second_norm, _ = names
    here = {name.removeprefix(f"transformer.h.{layer}."): value for name, value in weights.items()}
    own = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    columns = columns_of(version, own)
    return {
        f"{first_norm}.weight": here["ln_1.weight"].clone(),
        f"{first_norm}.bias": here["ln_1.bias"].clone(),
        f"{attention}.query_key_value.weight": here["attn.c_attn.weight"].t()[columns].clone(),
        f"{attention}.query_key_value.bias": here["attn.c_attn.bias"][columns].clone(),
        f"{attention}.dense.weight": part_of(here["attn.c_proj.weight"].t(), rank, ranks, 1),
        f"{attention}.dense.bias": here["attn.c_proj.bias"].clone(),
        f"{second_norm}.weight": here["ln_2.weight"].clone(),
        f"{second_norm}.bias": here["ln_2.bias"].clone(),
        "mlp.dense_h_to_4h.weight": part_of(here["mlp.c_fc.weight"].t(), rank, ranks, 0),
        "mlp.dense_h_to_4h.bias": part_of(here["mlp.c_fc.bias"], rank, ranks, 0),
        "mlp.dense_4h_to_h.weight": part_of(here["mlp.c_proj.weight"].t(), rank, ranks, 1),
        "mlp.dense_4h_to_h.bias": here["mlp.c_proj.bias"].clone(),
    }


def padded_embedding(weights, rank, ranks):
    rows = 128 * ranks
    padded = torch.full((rows, WIDE), 9.0)
    padded[:VOCABULARY] = weights["transformer.wte.weight"]
    return part_of(padded, rank, ranks, 0)


def arguments(ranks, stages, **more):
    plain = {
        "num_layers": LAYERS, "hidden_size": WIDE, "num_attention_heads": HEADS, "max_position_embeddings": POSITIONS,
        "padded_vocab_size": 128 * ranks, "make_vocab_size_divisible_by": 128, "tokenizer_type": "GPT2BPETokenizer",
        "tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages, "params_dtype": torch.float32,
        "bias_gelu_fusion": True,
    }  # fmt: skip
    return argparse.Namespace(**{**plain, **more})


def write_megatron(model, root, version, ranks, stages, names=NEW, **more) -> Path:
    """`iter_0000100/mp_rank_XX[_YYY]/model_optim_rng.pt` with the RNG states that Megatron saves."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    for stage in range(stages):
        for rank in range(ranks):
            layers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
            stack = {
                f"layers.{layer - layers[0]}.{name}": value
                for layer in layers
                for name, value in megatron_layer(weights, layer, version, rank, ranks, names).items()
            }
            language, tree = {}, {}
            if stage == 0:
                language["embedding"] = {
                    "word_embeddings": {"weight": padded_embedding(weights, rank, ranks)},
                    "position_embeddings": {"weight": weights["transformer.wpe.weight"].clone()},
                }
            if stage == stages - 1:
                stack[f"{names[4]}.weight"] = weights["transformer.ln_f.weight"].clone()
                stack[f"{names[4]}.bias"] = weights["transformer.ln_f.bias"].clone()
                if stages > 1:
                    tree["word_embeddings_for_head"] = {"weight": padded_embedding(weights, rank, ranks)}
            language[names[0]] = stack
            content = {
                "args": arguments(ranks, stages, **more),
                "iteration": 100,
                "model": {"language_model": language, **tree},
                "np_rng_state": np.random.get_state(),
                "rng_state": torch.get_rng_state(),
            }
            if version:  # missing in the oldest checkpoints
                content["checkpoint_version"] = version
            place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            path = root / "iter_0000100" / place / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(content, path)
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root


def write_deepspeed(model, root, ranks) -> Path:
    """`global_step7`: 01 the embedding, 02 without a file, 03 on the layers, then the final norm."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    folder = root / "global_step7"
    folder.mkdir(parents=True)
    for rank in range(ranks):
        files = {
            1: {
                "word_embeddings.weight": padded_embedding(weights, rank, ranks),
                "position_embeddings.weight": weights["transformer.wpe.weight"].clone(),
            },
            **{3 + layer: megatron_layer(weights, layer, 3.0, rank, ranks) for layer in range(LAYERS)},
            3 + LAYERS + 1: {kind: weights[f"transformer.ln_f.{kind}"].clone() for kind in ("weight", "bias")},
        }
        for number, content in files.items():
            torch.save(content, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        facts = {"args": arguments(ranks, 2), "checkpoint_version": 3.0, "iteration": 7, "module": None}
        torch.save(facts, folder / f"mp_rank_{rank:02d}_model_states.pt")
    (root / "latest").write_text("global_step7")
    return root


def as_array(tensor, bfloat16=False):
    array = tensor.contiguous().numpy()
    return (array.view(np.uint32) >> 16).astype(np.uint16) if bfloat16 else array


def paddle_tensors(model, fused, rank=0, ranks=1, layers=range(LAYERS)) -> dict[str, torch.Tensor]:
    """PaddleNLP's names and tensors, (in, out), of one tensor-parallel rank."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    own = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    apart = [[column(part, head, place) for head in own for place in range(SIZE)] for part in range(3)]
    together = [column(part, head, place) for head in own for part in range(3) for place in range(SIZE)]
    result = {}
    for layer in layers:
        here = {name.removeprefix(f"transformer.h.{layer}."): value for name, value in weights.items()}
        there = f"gpt.decoder.layers.{layer}"
        for kind in ("weight", "bias"):
            result[f"{there}.norm1.{kind}"] = here[f"ln_1.{kind}"]
            result[f"{there}.norm2.{kind}"] = here[f"ln_2.{kind}"]
            result[f"{there}.linear1.{kind}"] = part_of(here[f"mlp.c_fc.{kind}"], rank, ranks, -1)
            if fused:
                result[f"{there}.self_attn.qkv_proj.{kind}"] = here[f"attn.c_attn.{kind}"][..., together]
            else:
                for name, columns in zip("qkv", apart):
                    result[f"{there}.self_attn.{name}_proj.{kind}"] = here[f"attn.c_attn.{kind}"][..., columns]
        result[f"{there}.self_attn.out_proj.weight"] = part_of(here["attn.c_proj.weight"], rank, ranks, 0)
        result[f"{there}.self_attn.out_proj.bias"] = here["attn.c_proj.bias"]
        result[f"{there}.linear2.weight"] = part_of(here["mlp.c_proj.weight"], rank, ranks, 0)
        result[f"{there}.linear2.bias"] = here["mlp.c_proj.bias"]
    if 0 in layers:
        result["gpt.embeddings.word_embeddings.weight"] = part_of(weights["transformer.wte.weight"], rank, ranks, 0)
        result["gpt.embeddings.position_embeddings.weight"] = weights["transformer.wpe.weight"]
    if LAYERS - 1 in layers:
        for kind in ("weight", "bias"):
            result[f"gpt.decoder.norm.{kind}"] = weights[f"transformer.ln_f.{kind}"]
    return result


PADDLE_CONFIG = {
    "model_type": "gpt", "num_hidden_layers": LAYERS, "hidden_size": WIDE, "num_attention_heads": HEADS,
    "intermediate_size": INNER, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


def write_pdparams(path: Path, tensors, bfloat16=False, protocol=4) -> None:
    """As paddle.save does: arrays by name, and the table of internal names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {name: as_array(value, bfloat16) for name, value in tensors.items()}
    content["StructuredToParameterName@@"] = {name: f"linear_{i}.w_0" for i, name in enumerate(tensors)}
    path.write_bytes(pickle.dumps(content, protocol=protocol))
