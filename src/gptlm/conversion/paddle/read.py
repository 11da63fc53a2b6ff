"""Checkpoints of PaddleNLP and FleetX: `.pdparams` over tensor and pipeline ranks, and unified safetensors.

Matrices are (in, out) as GPT-2's. Fused `qkv_proj`: its columns are [heads, 3, head size], so a tensor rank's slice is
whole heads. Column-parallel weights and biases are cut along the last dim, row-parallel ones and the embedding along
the first. bfloat16 is stored as the bits of uint16 (paddle.save), in safetensors also as itself.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import WPE, WTE, layer_and_part
from gptlm.conversion.paddle import names as words
from gptlm.conversion.paddle.arrays import PaddleTensors, Renamed, tensors_of
from gptlm.conversion.paddle.optimizer import MASTERS, SCHEDULE, optimizer_of, states_of
from gptlm.conversion.source import WEIGHT, Asked, Sharded, check_variants, checked_shape, first, join_equal
from gptlm.errors import GptlmError, reason_of
from gptlm.model.files import read_config

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
        self._heads: list[Tensor] = []
        self._settle(asked)

    def group_of(self, name: str) -> int:
        """The stage; stages are looked through in order until one has it."""
        fused = name.replace("c_attn", words.SPLIT[0]) if name not in self._stage_of else name
        while name not in self._stage_of and fused not in self._stage_of and self._unseen:
            self.hold(self._unseen[0])
        return self._stage_of.get(name, self._stage_of.get(fused, 0))

    def load_group(self, group: int) -> Sequence[Mapping[str, Tensor]]:
        ranks = [self._named(tensors, where, group) for tensors, where in self._ranks(group)]
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

    def steps(self) -> tuple[int, int, int | None]:
        noted = _trainer_state(self.found.folder)
        optimizer = optimizer_of(self.found.files[0][0])
        steps = noted.get("global_step") or (optimizer.get(SCHEDULE) or {}).get("last_epoch") or self.found.step
        if not steps:
            raise GptlmError(f"{self.found.folder} does not say at which step it is; convert without --with_optimizer")
        return int(steps), int(steps), noted.get("consumed_samples")

    def has_masters(self) -> bool:
        return bool(optimizer_of(self.found.files[0][0])[MASTERS])

    def foreign_name(self, name: str) -> str:
        layer, part = layer_and_part(name)
        module, _, kind = part.rpartition(".")
        theirs = {ours: theirs for theirs, ours in words.MODULES.items()}.get(module)
        return f"decoder.layers.{layer}.{theirs}.{kind}" if theirs else name

    def _by_kind(self, tensor: Tensor) -> Tensor:
        """Columns [heads, 3, size] -> [3, heads, size]."""
        heads = self.shape.num_attention_heads
        return tensor.unflatten(-1, (heads, 3, -1)).movedim(-2, -3).flatten(-3)

    def _ranks(self, group: int) -> list[tuple[Mapping[str, Tensor], Path]]:
        """What the files of a stage hold, and where it lies."""
        read = tensors_of if self.kind == WEIGHT else partial(states_of, kind=self.kind)
        return [(read(path), path) for path in self.found.files[group]]

    def _named(self, tensors: Mapping[str, Tensor], where: Path, stage: int) -> Mapping[str, Tensor]:
        names: dict[str, str] = {}
        unknown = []
        for name in tensors:
            own = gpt2_name(name)
            if own in (WTE, WPE) and stage > 0:
                continue  # a pipeline's copy for the head
            if own is not None:
                names[own] = name
            elif name.endswith(words.HEADS):
                self._heads += [tensors[name]] if self.kind == WEIGHT else []
            else:
                unknown.append(name)
        if unknown:
            raise GptlmError(f"{where} holds {len(unknown)} tensors that GPT-2 does not have (first: {unknown[0]})")
        return Renamed(tensors, names)

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
        self.shape = checked_shape(sizes, where)
        true = sizes["vocab_size"] if sizes["vocab_size"] < measured["vocab_size"] else None
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
        if any(not any(torch.equal(head, own) for own in embeddings) for head in self._heads):
            raise GptlmError(f"{self.found.folder} is of another network than GPT-2: its head is not the embedding")
        layers = {layer for name in self._stage_of if (layer := layer_and_part(name)[0]) is not None}
        return sizes | {"num_hidden_layers": len(layers)}


class UnifiedSource(PaddleSource):
    """PaddleNLP's unified safetensors: whole tensors in one or several files, each read when it is needed."""

    def steps(self) -> tuple[int, int, int | None]:
        raise GptlmError(
            f"{self.found.folder}: no optimizer is read of unified checkpoints; convert without --with_optimizer"
        )

    def _ranks(self, group: int) -> list[tuple[Mapping[str, Tensor], Path]]:
        return [(PaddleTensors(self.found.files[0]), self.found.folder)]


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
        raise GptlmError(f"{path} cannot be read ({reason_of(error)}); copy the folder again") from error


def _initial(content: Any) -> dict[str, Any]:
    """The old form: {"init_args": [{..., "init_class": "GPTModel"}], "init_class": ...}."""
    if not isinstance(content, dict):
        return {}
    values = {name: value for name, value in content.items() if name != "init_args"}
    inner = content.get("init_args", [])
    for part in inner if isinstance(inner, list) else [inner]:
        values |= _initial(part)
    return values


def _trainer_state(folder: Path) -> dict[str, Any]:
    """PaddleNLP's trainer_state.json; empty if there is none."""
    path = folder / "trainer_state.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise GptlmError(f"{path} is damaged ({reason_of(error)}); copy the folder again") from error
