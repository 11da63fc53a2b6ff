"""Checkpoints of Megatron-LM's classic code (and of DeepSpeed's fork without pipeline), any TP x PP, every version.

Rows of query_key_value on a rank with n heads of size h (checkpointing.py, `checkpoint_version`): version 0 [3, n, h],
1.0 [n, h, 3], from 2.0 on [n, 3, h]. Matrices are (out, in); cut along `out` but for the two residual projections.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import LAST, WPE, WTE, layer_and_part
from gptlm.conversion.megatron import names as words
from gptlm.conversion.megatron.optimizer import adam_steps, has_masters, states_of
from gptlm.conversion.safe_pickle import StandIn, read_torch
from gptlm.conversion.source import WEIGHT, Asked, Sharded, check_variants, checked_shape, first, join_equal, near
from gptlm.errors import GptlmError
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.model.presets import GPT2_VOCABULARY, Shape

VERSIONS = (0, 1, 2, 3)
COLUMN = ("attn.c_attn.weight", "attn.c_attn.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", WTE)  # cut along dim 0
ROW = ("attn.c_proj.weight", "mlp.c_proj.weight")  # cut along dim 1


class MegatronSource(Sharded):
    """See the module.

    Raises:
        GptlmError: if ranks are missing, or the arguments are of another network or leave something open.
    """

    def __init__(self, found: Found, asked: Asked):
        super().__init__(found)
        content = read_torch(found.facts or found.files[0][0])
        if not isinstance(content, dict):
            raise GptlmError(f"{found.files[0][0]} holds no checkpoint of Megatron (a {type(content).__name__})")
        stored = content.get("args")
        self.arguments = vars(stored) if hasattr(stored, "__dict__") else stored or {}
        self.version = self._version(content)
        self.step = content.get("iteration", found.step)
        self.chunks = sum(f"model{chunk}" in content for chunk in range(64)) or 1
        self._heads: list[Tensor] | None = None
        self._check_degrees()
        _check(self.arguments, found.folder)
        self._settle(asked)

    def group_of(self, name: str) -> int:
        layer, part = layer_and_part(name)
        if layer is None:
            return len(self.found.files) - 1 if part in LAST else 0
        return layer // self._per_chunk % len(self.found.files)

    def load_group(self, group: int) -> list[dict[str, Tensor]]:
        return [self._load(path, group) for path in self.found.files[group]]

    def join(self, name: str, pieces: list[Tensor]) -> Tensor:
        part = layer_and_part(name)[1]
        if part.startswith("attn.c_attn"):
            heads = self.shape.num_attention_heads // len(pieces)
            tensor = torch.cat([by_kind(piece, heads, self.version) for piece in pieces], dim=1).flatten(0, 2)
        elif part in COLUMN:
            tensor = torch.cat(pieces, dim=0)
        elif part in ROW:
            tensor = torch.cat(pieces, dim=1)
        else:
            tensor = join_equal(pieces, name, self.found.folder)
        return tensor.t() if part in CONV1D_WEIGHTS else tensor

    def steps(self) -> tuple[int, int, int | None]:
        path = self.found.files[0][0]
        content = read_torch(path)
        if self.chunks > 1:
            raise GptlmError(f"{path}: no optimizer is read of interleaved stages; convert without --with_optimizer")
        updates = adam_steps(content, path)
        iterations = int(content.get("iteration", updates))
        return iterations, updates, words.consumed(self.arguments, iterations)

    def has_masters(self) -> bool:
        return has_masters(read_torch(self.found.files[0][0]))

    def foreign_name(self, name: str) -> str:
        module, _, kind = layer_and_part(name)[1].rpartition(".")
        return f"{words.WRITTEN[module]}.{kind}" if module in words.WRITTEN else name

    @property
    def _per_chunk(self) -> int:
        return max(self.shape.num_hidden_layers // (len(self.found.files) * self.chunks), 1)

    def _load(self, path: Path, stage: int) -> dict[str, Tensor]:
        content = read_torch(path)
        stored: dict[str, Tensor] = {}
        for chunk in range(self.chunks):
            tree = content.get(f"model{chunk}") if self.chunks > 1 else content.get("model", content.get("module"))
            if not isinstance(tree, dict):
                raise GptlmError(f"{path} holds no model; is it the optimizer's file?")
            offset = (chunk * len(self.found.files) + stage) * self._per_chunk
            tensors = flattened(tree)
            if self.kind != WEIGHT:
                tensors = states_of(content, tensors, self.kind, path)
            self._add(stored, tensors, offset, path)
        return stored

    def _add(self, stored: dict[str, Tensor], tensors: dict[str, Tensor], offset: int, path: Path) -> None:
        unknown = []
        for name, tensor in tensors.items():
            name = name.removeprefix("language_model.")
            if name in words.HEADS:
                if self.kind == WEIGHT:
                    self._check_tied(tensor, path)
            elif (own := gpt2_name(name, offset)) is not None:
                stored[own] = tensor
            elif not words.BUFFERS.search(name):
                unknown.append(name)
        if unknown:
            raise GptlmError(f"{path} holds {len(unknown)} tensors that GPT-2 does not have (first: {unknown[0]})")

    def _check_tied(self, tensor: Tensor, path: Path) -> None:
        """The last stage keeps a copy of the embedding for the head."""
        if self._heads is None:
            self._heads = [flat_embedding(read_torch(file)) for file in self.found.files[0]]
        rank = next(files.index(path) for files in self.found.files if path in files)
        if near(self._heads[rank], tensor):
            return
        if any(near(embedding, tensor) for embedding in self._heads):
            raise GptlmError(f"{self.found.folder}: the tensor ranks are mixed up at {path}; copy the folders again")
        raise GptlmError(
            f"{path} is of another network than GPT-2, or of another model than the first stage: its head is not the "
            "embedding (untied)"
        )

    def _version(self, content: Mapping[str, Any]) -> int:
        version = content.get("checkpoint_version", 0)
        if version not in VERSIONS:
            raise GptlmError(f"{self.found.folder} has checkpoint_version {version!r}; expected 0, 1.0, 2.0 or 3.0")
        self.notes.append(f"checkpoint_version {float(version):g}")
        return int(version)

    def _check_degrees(self) -> None:
        for names, own in ((words.TENSOR_DEGREE, len(self.found.files[0])), (words.PIPELINE_DEGREE, self._stages())):
            noted = first(self.arguments, names)
            if noted is not None and own is not None and noted != own:
                raise GptlmError(
                    f"{self.found.folder} is not whole: its arguments say {names[0]} {noted}, there are files of {own}"
                )

    def _stages(self) -> int | None:
        return len(self.found.files)

    def _settle(self, asked: Asked) -> None:
        """Sizes, activation and the rest from the arguments, else from the tensors and what the user says."""
        values = self.arguments
        given = {ours: first(values, theirs) for ours, theirs in words.SIZES.items()}
        self.shape = Shape(1, 1, 1, 1, 1, 1)  # until they are known
        embedding, sizes = self._measured()
        sizes |= {name: value for name, value in given.items() if value is not None}
        heads = sizes.get("num_attention_heads") or asked.num_attention_heads
        if not values:
            self.notes.append(f"{self.found.folder} holds no arguments: its sizes are those of its tensors")
        if "num_hidden_layers" not in sizes:
            raise GptlmError(f"{self.found.folder} does not say how many layers it has, and is cut into stages")
        sizes["num_attention_heads"] = heads or self.heads_by_size(sizes["num_hidden_layers"], sizes["hidden_size"])
        sizes.setdefault("intermediate_size", 4 * sizes["hidden_size"])
        self.shape = checked_shape({**sizes, "vocab_size": 1}, self.found.folder)
        rows = embedding * len(self.found.files[0])
        self.cut_vocabulary(rows, self._true_vocabulary(rows), asked, self._why_cut())
        self.activation = _activation(values, asked, self.found.folder, self.notes)
        self.epsilon = float(first(values, words.EPSILON) or 1e-5)
        self.dropouts = (float(values.get(words.DROPOUT, 0.1)), float(values.get(words.ATTENTION_DROPOUT, 0.1)))

    def _measured(self) -> tuple[int, dict[str, int]]:
        """Rows of the embedding on a rank, and the sizes that the tensors of the first stage tell."""
        tensors = self._load(self.found.files[0][0], 0)
        if WTE not in tensors or WPE not in tensors:
            raise GptlmError(f"{self.found.files[0][0]} lacks the embedding of tokens or of positions")
        sizes = {"hidden_size": tensors[WTE].shape[1], "max_position_embeddings": tensors[WPE].shape[0]}
        layers = {layer for name in tensors if (layer := layer_and_part(name)[0]) is not None}
        if len(self.found.files) == 1:
            sizes["num_hidden_layers"] = len(layers)
        inner = tensors.get("transformer.h.0.mlp.c_fc.bias")
        if inner is not None:
            sizes["intermediate_size"] = len(inner) * len(self.found.files[0])
        return tensors[WTE].shape[0], sizes

    def _true_vocabulary(self, rows: int) -> int | None:
        """The entries before padding: noted, or GPT-2's where the tokenizer is GPT-2's."""
        noted = self.arguments.get(words.TRUE_ROWS)
        if noted is not None and noted <= rows:
            return int(noted)
        key, name = words.GPT2_TOKENIZER
        gpt2 = self.arguments.get(key, name) == name
        unit = self.arguments.get(words.DIVISIBLE, 128) * len(self.found.files[0])
        return GPT2_VOCABULARY if gpt2 and rows == -(-GPT2_VOCABULARY // unit) * unit else None

    def _why_cut(self) -> str:
        return "the checkpoint's arguments" if self.arguments.get(words.TRUE_ROWS) else "GPT-2's tokenizer"


def by_kind(rows: Tensor, heads: int, version: int) -> Tensor:
    """query_key_value of one rank, (3 n h, ...) -> (3, n, h, ...)."""
    rest, size = rows.shape[1:], rows.shape[0] // (3 * heads)
    if version == 0:
        return rows.reshape(3, heads, size, *rest)
    if version == 1:
        return rows.reshape(heads, size, 3, *rest).movedim(2, 0)
    return rows.reshape(heads, 3, size, *rest).movedim(1, 0)


def gpt2_name(name: str, offset: int) -> str | None:
    """GPT-2's name of a tensor without `language_model.`; `offset` is the number of its stage's first layer."""
    if name in (words.WORDS, words.POSITIONS):
        return WTE if name == words.WORDS else WPE
    final, layer = words.FINAL.match(name), words.LAYER.match(name)
    if final:
        return f"transformer.ln_f.{final[1]}"
    part = layer_part(layer[2]) if layer else None
    return f"transformer.h.{offset + int(layer[1])}.{part}" if layer and part else None


def layer_part(name: str) -> str | None:
    """GPT-2's name of a part of a layer, such as "attn.c_attn.weight"."""
    name = words.PARTS_OF_LAYER_NORM.sub(r".layer_norm.\1", name)
    module, _, kind = name.rpartition(".")
    return f"{words.MODULES[module]}.{kind}" if module in words.MODULES and kind in ("weight", "bias") else None


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts, by dotted names."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
    return found


def flat_embedding(content: Mapping[str, Any]) -> Tensor:
    """The token embedding of a rank's file."""
    tree: Any = next((content[key] for key in ("model", "model0", "module") if key in content), {})
    return next((t for name, t in flattened(tree).items() if name.endswith(words.WORDS)), torch.empty(0))


def _check(arguments: Mapping[str, Any], where: Path) -> None:
    values = {name: value.arguments[0] if _is_enum(value) else value for name, value in arguments.items()}
    groups, heads = values.get("num_query_groups"), values.get("num_attention_heads")
    if groups == heads or not values.get("group_query_attention"):
        values.pop("group_query_attention", None)
    check_variants(values, words.VARIANTS, where)
    width, size = values.get("hidden_size"), values.get("kv_channels")
    if width and size and heads and heads * size != width:
        raise GptlmError(f"{where} is of another network than GPT-2: heads of {size} x {heads} do not make {width}")


def _is_enum(value: Any) -> bool:
    return isinstance(value, StandIn) and bool(value.arguments)


def _activation(values: Mapping[str, Any], asked: Asked, where: Path, notes: list[str]) -> str:
    """HuggingFace's name of the activation: Megatron's fused kernel is the tanh form, without it erf is computed."""
    if values.get(words.FUSED_GELU) or values.get(words.TANH_GELU):
        name = words.FUSED_GELU if values.get(words.FUSED_GELU) else words.TANH_GELU
        notes.append(f"activation gelu_new, by the argument {name}")
        return "gelu_new"
    if words.FUSED_GELU in values:
        notes.append(f"activation gelu (erf), as {words.FUSED_GELU} is off; training here computes gelu_new only")
        return "gelu"
    if asked.activation:
        notes.append(f"activation {asked.activation}, by --activation")
        return asked.activation
    raise GptlmError(
        f"{where} does not say which GELU it has ({words.FUSED_GELU}): give --activation gelu_new (the fused kernel, "
        "Megatron's default, and NVIDIA's published 345M model) or --activation gelu"
    )
