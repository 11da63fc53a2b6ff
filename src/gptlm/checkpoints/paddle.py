"""Checkpoints of PaddleNLP and FleetX: `.pdparams` over tensor and pipeline ranks, and unified safetensors.

Matrices are (in, out) as GPT-2's. Fused `qkv_proj`: its columns are [heads, 3, head size], so a tensor rank's slice is
whole heads. Column-parallel weights and biases are cut along the last dim, row-parallel ones and the embedding along
the first. bfloat16 is stored as the bits of uint16 (paddle.save), in safetensors also as itself.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from gptlm.checkpoints import spellings_paddle as words
from gptlm.checkpoints.kinds import Found
from gptlm.checkpoints.naming import WPE, WTE, layer_and_part
from gptlm.checkpoints.pickles import read_pickle
from gptlm.checkpoints.source import Asked, Sharded, check_variants, first, join_equal
from gptlm.errors import GptlmError
from gptlm.model.files import check_safetensors
from gptlm.model.presets import Shape, read_config

CONFIG, OLD_CONFIG = "config.json", "model_config.json"
SAME_GELU = (None, "gelu", "gelu_new", "gelu_pytorch_tanh")  # PaddleNLP and FleetX compute the tanh form for "gelu"
COLUMN = ("attn.c_attn", "mlp.c_fc", *(f"attn.{part}" for part in words.SPLIT))  # cut along the last dim
ROW = ("attn.c_proj.weight", "mlp.c_proj.weight", WTE)  # cut along the first


class PaddleSource(Sharded):
    """See the module.

    Raises:
        GptlmError: if files are damaged, or the configuration is of another network or leaves something open.
    """

    activation = "gelu_new"

    def __init__(self, found: Found, asked: Asked):
        super().__init__(found)
        self.arguments = configuration(found.folder)
        check_variants(self.arguments, words.VARIANTS, found.folder)
        self._stage_of: dict[str, int] = {}
        self._unseen = list(range(len(found.files)))
        self._embedding: list[Tensor] = []
        self._settle(asked)

    def group_of(self, name: str) -> int:
        """The stage; stages are looked through in order until one has it."""
        fused = name.replace("c_attn", words.SPLIT[0]) if name not in self._stage_of else name
        while name not in self._stage_of and fused not in self._stage_of and self._unseen:
            self.hold(self._unseen[0])
        return self._stage_of.get(name, self._stage_of.get(fused, 0))

    def load_group(self, group: int) -> list[dict[str, Tensor]]:
        ranks = [self._named(path, group) for path in self._rank_files(group)]
        for name in ranks[0]:
            self._stage_of.setdefault(name, group)
        if group in self._unseen:
            self._unseen.remove(group)
        return ranks

    def read(self, name: str) -> Tensor:
        if "attn.c_attn" not in name:
            return self.join(name, self.pieces(name))
        apart = [name.replace("c_attn", part) for part in words.SPLIT]
        if apart[0] not in self.hold(self.group_of(name))[0]:
            return self._by_kind(self.join(name, self.pieces(name)))
        return torch.cat([self.join(part, self.pieces(part)) for part in apart], dim=-1)

    def join(self, name: str, pieces: list[Tensor]) -> Tensor:
        part = layer_and_part(name)[1]
        if part.startswith(COLUMN):
            return torch.cat(pieces, dim=-1)
        return torch.cat(pieces, dim=0) if part in ROW else join_equal(pieces, name, self.found.folder)

    def foreign_name(self, name: str) -> str:
        layer, part = layer_and_part(name)
        module, _, kind = part.rpartition(".")
        theirs = {ours: theirs for theirs, ours in words.MODULES.items()}.get(module)
        return f"decoder.layers.{layer}.{theirs}.{kind}" if theirs else name

    def _by_kind(self, tensor: Tensor) -> Tensor:
        """Columns [heads, 3, size] -> [3, heads, size]."""
        heads = self.shape.num_attention_heads
        return tensor.unflatten(-1, (heads, 3, -1)).movedim(-2, -3).flatten(-3)

    def _rank_files(self, group: int) -> tuple[Path, ...]:
        return self.found.files[group]

    def _named(self, path: Path, stage: int) -> dict[str, Tensor]:
        stored, unknown = {}, []
        for name, tensor in tensors_of(path).items():
            own = gpt2_name(name)
            if own in (WTE, WPE) and stage > 0:
                continue  # a pipeline's copy for the head
            if own is not None:
                stored[own] = tensor
            elif name.endswith(words.HEADS):
                self._embedding.append(tensor)
            else:
                unknown.append(name)
        if unknown:
            raise GptlmError(f"{path} holds {len(unknown)} tensors that GPT-2 does not have (first: {unknown[0]})")
        return stored

    def _settle(self, asked: Asked) -> None:
        values, where = self.arguments, self.found.folder
        sizes: dict[str, Any] = {ours: first(values, theirs) for ours, theirs in words.SIZES.items()}
        sizes["num_attention_heads"] = sizes["num_attention_heads"] or asked.num_attention_heads
        if not values:
            self.notes.append(f"{where} holds no {CONFIG}: sizes are those of the tensors, the activation is gelu_new")
        activation = first(values, words.ACTIVATION)
        if activation not in SAME_GELU:
            raise GptlmError(f"{where} is of another network than GPT-2: its activation is {activation!r}")
        measured = self._measured(complete=None in sizes.values())
        sizes |= {name: value for name, value in measured.items() if not sizes[name]}
        if not sizes["num_attention_heads"]:
            sizes["num_attention_heads"] = self.heads_by_size(sizes["num_hidden_layers"], sizes["hidden_size"])
        true = sizes["vocab_size"] if sizes["vocab_size"] < measured["vocab_size"] else None
        self.shape = Shape(**sizes)
        self.cut_vocabulary(measured["vocab_size"], true, asked, "its configuration")
        self.dropouts = (float(values.get(words.DROPOUT, 0.1)), float(values.get(words.ATTENTION_DROPOUT, 0.1)))

    def _measured(self, *, complete: bool) -> dict[str, int]:
        """What the tensors tell of the sizes; `complete` looks through all stages for the number of layers."""
        ranks = self.hold(0)
        lacking = next((name for name in (WTE, WPE) if name not in ranks[0]), None)
        if lacking:
            raise GptlmError(f"{self.found.files[0][0]} lacks {lacking}, the embedding; give the whole checkpoint")
        inner = ranks[0].get("transformer.h.0.mlp.c_fc.bias")
        sizes = {
            "vocab_size": sum(len(rank[WTE]) for rank in ranks),
            "hidden_size": ranks[0][WTE].shape[1],
            "max_position_embeddings": len(ranks[0][WPE]),
            "intermediate_size": 0 if inner is None else len(inner) * len(ranks),
        }
        embeddings = [rank[WTE] for rank in ranks]
        while complete and self._unseen:
            self.hold(self._unseen[0])
        if any(not any(torch.equal(head, own) for own in embeddings) for head in self._embedding):
            raise GptlmError(f"{self.found.folder} is of another network than GPT-2: its head is not the embedding")
        layers = {layer for name in self._stage_of if (layer := layer_and_part(name)[0]) is not None}
        return sizes | {"num_hidden_layers": len(layers)}


class UnifiedSource(PaddleSource):
    """PaddleNLP's unified safetensors: whole tensors in one or several files, read when they are used."""

    def _rank_files(self, group: int) -> tuple[Path, ...]:
        return self.found.files[0][:1]

    def _named(self, path: Path, stage: int) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for file in self.found.files[0]:
            check_safetensors(file)
            stored |= super()._named(file, stage)
        return stored


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors in a `.pdparams` or safetensors file, by its own names.

    Raises:
        GptlmError: if it cannot be read or holds anything else.
    """
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:  # the bits of bfloat16 come as uint16 where paddle wrote them
            return {name: _as_bfloat16(file.get_tensor(name)) for name in file.keys()}
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise GptlmError(f"{path} holds no weights (a {type(content).__name__})")
    whole = _joined(content, path)
    return {name: as_tensor(value, name, path) for name, value in whole.items()}


def as_tensor(value: Any, name: str, path: Path) -> Tensor:
    """An array, or paddle's (internal name, array), as a tensor; uint16 are the bits of bfloat16."""
    array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise GptlmError(f"{path}: {name} is no array of numbers (a {type(array).__name__})")
    array = np.require(array, requirements=["C", "W"])
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _joined(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Without the table of names; arrays over 1 GiB, which pickle protocols 2 and 3 get in pieces, are put together."""
    arrays = {name: value for name, value in content.items() if name not in (words.NAME_TABLE, words.BIG)}
    for name, facts in content.get(words.BIG, {}).items():
        missing = [piece for piece in facts["slices"] if piece not in arrays]
        if missing:
            raise GptlmError(f"{path} lacks {missing[0]}, a piece of {name}; copy it again")
        pieces = [np.ravel(arrays.pop(piece)) for piece in facts["slices"]]
        arrays[name] = np.concatenate(pieces).reshape(facts["OriginShape"])
    return arrays


def gpt2_name(name: str) -> str | None:
    """GPT-2's name of a tensor; q, k and v apart are called attn.q_proj and so on."""
    name = name.removeprefix("gpt.").removeprefix("model.")
    if name.startswith(words.SHARED):
        name = f"embeddings.{name.removeprefix(words.SHARED)}"
    if name in (words.WORDS, words.POSITIONS):
        return WTE if name == words.WORDS else WPE
    final = name.removeprefix(words.FINAL)
    if final in ("weight", "bias") and final != name:
        return f"transformer.ln_f.{final}"
    layer, numbered = words.LAYER.match(name), words.STAGE_LAYER.match(name)
    if layer:
        return _in_layer(int(layer[1]), layer[2])
    if numbered is None:
        return None
    last = numbered[2].removeprefix("norm.")
    if last in ("weight", "bias"):
        return f"transformer.ln_f.{last}"
    return _in_layer(int(numbered[1]) - 1, numbered[2])


def _in_layer(layer: int, name: str) -> str | None:
    module, _, kind = name.rpartition(".")
    own = words.MODULES.get(module)
    if module in words.SEPARATE:
        own = f"attn.{module.split('.')[-1]}"
    return f"transformer.h.{layer}.{own}.{kind}" if own and kind in ("weight", "bias") else None


def configuration(folder: Path) -> dict[str, Any]:
    """What `config.json`, or `model_config.json` of old, says; empty where there is neither.

    Raises:
        GptlmError: if it cannot be read.
    """
    if (folder / CONFIG).is_file():
        return read_config(folder / CONFIG)
    path = folder / OLD_CONFIG
    if not path.is_file():
        return {}
    try:
        return _initial(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise GptlmError(f"{path} cannot be read ({error}); copy the folder again") from error


def _initial(content: Any) -> dict[str, Any]:
    """The old form: {"init_args": [{..., "init_class": "GPTModel"}], "init_class": ...}."""
    if not isinstance(content, dict):
        return {}
    values = {name: value for name, value in content.items() if name != "init_args"}
    inner = content.get("init_args", [])
    for part in inner if isinstance(inner, list) else [inner]:
        values |= _initial(part)
    return values
