"""Read checkpoints of PaddleNLP and FleetX: `.pdparams` for any TP x PP, and PaddleNLP's unified safetensors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import WPE, WTE, layer_and_part
from gptlm.conversion.paddle import layout
from gptlm.conversion.source import (
    MASTER,
    WEIGHT,
    WITHOUT_OPTIMIZER,
    Progress,
    ReadOptions,
    ShardedSource,
    check_unknown,
    check_variants,
    checked_shape,
    first_value,
    merge_replicated,
)
from gptlm.errors import GptlmError
from gptlm.model.files import CONFIG, read_config, read_json
from gptlm.model.safetensors_io import LazyTensors
from gptlm.pickles.safe_pickle import read_pickle

OLD_CONFIG = "model_config.json"
TANH_GELU = (None, "gelu", "gelu_new", "gelu_pytorch_tanh")  # PaddleNLP and FleetX compute the tanh form for "gelu"
NAME_TABLE = "StructuredToParameterName@@"  # name -> internal name, in paddle.save's files
BIG_ARRAYS = "UnpackBigParamInfor@@"
MASTER_WEIGHTS = "master_weights"


class PaddleSource(ShardedSource):
    """`model_state[.tpXX_ppYY].pdparams` of PaddleNLP, `mp_XX_sharding_YY_pp_ZZ/model.pdparams` of FleetX.

    Raises:
        GptlmError: if files are damaged, the network is not GPT-2, or sizes are missing and not given by the user.
    """

    activation = "gelu_new"

    def __init__(self, found: Found, options: ReadOptions):
        super().__init__(found)
        self.arguments = configuration(found.folder)
        check_variants(self.arguments, layout.VARIANTS, found.folder)
        self._stage_of: dict[str, int] = {}
        self._unread = list(range(len(found.files)))  # stages whose names are not known yet
        self._heads: list[Tensor] = []
        self._set_sizes(options)

    def group_of(self, name: str) -> int:
        """The stage. File names do not show layers, so stages are loaded in order until one contains `name`."""
        separate = name.replace("c_attn", layout.SPLIT_QKV[0])
        while not {name, separate} & self._stage_of.keys() and self._unread:
            self.loaded_group(self._unread[0])
        return self._stage_of.get(name, self._stage_of.get(separate, 0))

    def load_group(self, group: int) -> Sequence[Mapping[str, Tensor]]:
        ranks = [self._renamed(tensors, path, group) for tensors, path in self._load_ranks(group)]
        for name in ranks[0]:
            self._stage_of.setdefault(name, group)
        if group in self._unread:
            self._unread.remove(group)
        return ranks

    def read(self, name: str) -> Tensor:
        if "attn.c_attn" not in name:
            return super().read(name)
        separate = [name.replace("c_attn", part) for part in layout.SPLIT_QKV]
        if separate[0] in self.loaded_group(self.group_of(name))[0]:
            return torch.cat([super(PaddleSource, self).read(part) for part in separate], dim=-1)
        fused = super().read(name)
        return layout.qkv_by_kind(fused, self.shape.num_attention_heads, fused.ndim - 1)

    def merge(self, name: str, parts: list[Tensor]) -> Tensor:
        part = layer_and_part(name)[1]
        if part.startswith(layout.COLUMN_PARALLEL):
            return torch.cat(parts, dim=-1)
        return torch.cat(parts) if part in layout.ROW_PARALLEL else merge_replicated(parts, name, self.found.folder)

    def progress(self) -> Progress:
        path = self.found.folder / "trainer_state.json"  # PaddleNLP's
        state = read_json(path) if path.is_file() else {}
        schedule = _optimizer_beside(self.found.files[0][0]).get("LR_Scheduler") or {}
        steps = state.get("global_step") or schedule.get("last_epoch") or self.found.step
        if not steps:
            raise GptlmError(f"{self.found.folder} does not contain the training step; {WITHOUT_OPTIMIZER}")
        return Progress(int(steps), int(steps), state.get("consumed_samples"))

    def has_master_weights(self) -> bool:
        return bool(_optimizer_beside(self.found.files[0][0])[MASTER_WEIGHTS])

    def external_name(self, name: str) -> str:
        layer, part = layer_and_part(name)
        module, _, kind = part.rpartition(".")
        return f"decoder.layers.{layer}.{layout.WRITTEN[module]}.{kind}" if module in layout.WRITTEN else name

    def _load_ranks(self, group: int) -> list[tuple[Mapping[str, Tensor], Path]]:
        """The content of each file of a stage, by its own names, and the file."""
        files = self.found.files[group]
        return [(read_tensors(p) if self.kind == WEIGHT else _states_of(p, self.kind), p) for p in files]

    def _renamed(self, tensors: Mapping[str, Tensor], path: Path, stage: int) -> Mapping[str, Tensor]:
        """`tensors` by GPT-2's names."""
        names: dict[str, str] = {}
        unknown = []
        for name in tensors:
            own = layout.gpt2_name(name)
            if own in (WTE, WPE) and stage > 0:
                continue  # a copy for the output head on the last stage
            if own is not None:
                names[own] = name
            elif name.endswith(layout.HEADS):
                self._heads += [tensors[name]] if self.kind == WEIGHT else []
            else:
                unknown.append(name)
        check_unknown(unknown, path)
        return RenamedTensors(tensors, names)

    def _set_sizes(self, options: ReadOptions) -> None:
        values, where = self.arguments, self.found.folder
        sizes: dict[str, Any] = {ours: first_value(values, *theirs) for ours, theirs in layout.SIZES.items()}
        sizes["num_attention_heads"] = sizes["num_attention_heads"] or options.num_attention_heads
        if not values:
            self.notes.append(f"{where} has no {CONFIG}: sizes are those of the tensors, the activation is gelu_new")
        activation = first_value(values, "hidden_act", "hidden_activation")
        if activation not in TANH_GELU:
            raise GptlmError(f"{where} is not GPT-2: its activation is {activation!r}")
        measured = self._measure(all_stages=None in sizes.values())
        sizes |= {name: value for name, value in measured.items() if not sizes[name]}
        if not sizes["num_attention_heads"]:
            sizes["num_attention_heads"] = self.infer_heads(sizes["num_hidden_layers"], sizes["hidden_size"])
        self.shape = checked_shape(sizes, where)
        rows = measured["vocab_size"]
        self.set_vocabulary(
            rows, sizes["vocab_size"] if sizes["vocab_size"] < rows else None, options, "its configuration"
        )
        dropouts = (values.get(key, 0.1) for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"))
        self.dropouts = (float(next(dropouts)), float(next(dropouts)))

    def _measure(self, *, all_stages: bool) -> dict[str, int]:
        """The sizes that the tensors show; the number of layers only with `all_stages`."""
        ranks = self.loaded_group(0)
        missing = next((name for name in (WTE, WPE) if name not in ranks[0]), None)
        if missing:
            raise GptlmError(f"{self.found.files[0][0]} lacks the embedding {missing}; give the whole checkpoint")
        embeddings = [rank[WTE] for rank in ranks]
        inner = ranks[0].get("transformer.h.0.mlp.c_fc.bias")
        sizes = {
            "vocab_size": sum(map(len, embeddings)),
            "hidden_size": embeddings[0].shape[1],
            "max_position_embeddings": len(ranks[0][WPE]),
            "intermediate_size": 0 if inner is None else len(inner) * len(ranks),
        }
        while all_stages and self._unread:
            self.loaded_group(self._unread[0])
        if any(not any(torch.equal(head, own) for own in embeddings) for head in self._heads):
            raise GptlmError(f"{self.found.folder} is not GPT-2: its output head is not the embedding (untied)")
        layers = {layer for name in self._stage_of if (layer := layer_and_part(name)[0]) is not None}
        return sizes | {"num_hidden_layers": len(layers)}


class UnifiedSource(PaddleSource):
    """PaddleNLP's unified safetensors: whole tensors in one or several files, each read when it is needed."""

    def progress(self) -> Progress:
        raise GptlmError(
            f"{self.found.folder}: the optimizer states of unified checkpoints cannot be read; {WITHOUT_OPTIMIZER}"
        )

    def _load_ranks(self, group: int) -> list[tuple[Mapping[str, Tensor], Path]]:
        return [(PaddleTensors(self.found.files[0]), self.found.folder)]


class PaddleTensors(LazyTensors):
    """safetensors files of PaddleNLP, where uint16 are the bits of bfloat16."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


class RenamedTensors(Mapping[str, Tensor]):
    """`tensors` by other names, still read when they are looked up; `names`: new name -> name in `tensors`."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]):
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# Files --------------------------------------------------------------------------------------------------------------


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """The tensors in a `.pdparams` or safetensors file by its own names.

    Raises:
        GptlmError: if it cannot be read or contains anything else.
    """
    if path.suffix == ".safetensors":
        return PaddleTensors([path])
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise GptlmError(f"{path} contains no weights (a {type(content).__name__})")
    arrays = {name: value for name, value in content.items() if name not in (NAME_TABLE, BIG_ARRAYS)}
    # with pickle protocols 2 and 3 paddle.save splits arrays above 1 GiB
    for name, entry in content.get(BIG_ARRAYS, {}).items():
        missing = [piece for piece in entry["slices"] if piece not in arrays]
        if missing:
            raise GptlmError(f"{path} lacks {missing[0]}, a part of {name}; copy it again")
        pieces = [np.ravel(arrays.pop(piece)) for piece in entry["slices"]]
        arrays[name] = np.concatenate(pieces).reshape(entry["OriginShape"])
    return {name: _to_tensor(value, name, path) for name, value in arrays.items()}


def _to_tensor(value: Any, name: str, path: Path) -> Tensor:
    array = value[1] if isinstance(value, tuple) and len(value) == 2 else value  # (internal name, array)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise GptlmError(f"{path}: {name} is not an array of numbers (a {type(array).__name__})")
    array = np.require(array, requirements=["C", "W"])  # torch warns about read-only arrays
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def configuration(folder: Path) -> dict[str, Any]:
    """The content of config.json, or of model_config.json in older checkpoints; empty if there is neither.

    Raises:
        GptlmError: if it cannot be read.
    """
    if (folder / CONFIG).is_file():
        return read_config(folder / CONFIG)
    return _flat_config(read_json(folder / OLD_CONFIG)) if (folder / OLD_CONFIG).is_file() else {}


def _flat_config(content: Any) -> dict[str, Any]:
    """The older format: {"init_args": [{..., "init_class": "GPTModel"}], "init_class": ...}."""
    if not isinstance(content, dict):
        return {}
    values = {name: value for name, value in content.items() if name != "init_args"}
    inner = content.get("init_args", [])
    for part in inner if isinstance(inner, list) else [inner]:
        values |= _flat_config(part)
    return values


# Optimizer states: PaddleNLP's optimizer.pdopt, FleetX's model_state.pdopt --------------------------------------------
# Keys are internal names (linear_0.w_0_moment1_0); the weights' file has the table from its names to them. Under O2 the
# moments belong to the float32 weights (..._fp32_master_0_moment1_0). Each sharding rank has a part of the states.


def _states_of(path: Path, kind: str) -> dict[str, Tensor]:
    """The states of `kind` by the names of the weights in `path`; weights without a state are left out.

    Raises:
        GptlmError: if there is no optimizer file, or the table of names is missing.
    """
    content, states = read_pickle(path), _optimizer_beside(path)
    table = dict(content.get(NAME_TABLE, {}))
    table |= {name: value[0] for name, value in content.items() if isinstance(value, tuple) and len(value) == 2}
    if not table:
        raise GptlmError(f"{path} has no {NAME_TABLE}, the table of names of its optimizer states; {WITHOUT_OPTIMIZER}")
    found: dict[str, Tensor] = {}
    for name, internal in table.items():
        if kind == MASTER:
            value = states.get(MASTER_WEIGHTS, {}).get(internal)
        else:
            moment = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}[kind]
            value = first_value(states, f"{internal}_{moment}_0", f"{internal}_fp32_master_0_{moment}_0")
        if value is not None:
            found[name] = _to_tensor(value, f"{kind} of {name}", path)
    return found


def _optimizer_beside(path: Path) -> dict[str, Any]:
    """The optimizer states of the weights in `path`, with those of all sharding ranks.

    Raises:
        GptlmError: if there are none.
    """
    files = _optimizer_files(path)
    if not files:
        raise GptlmError(f"there is no optimizer file (.pdopt) beside {path}; {WITHOUT_OPTIMIZER}")
    states: dict[str, Any] = {}
    for file in files:
        content = read_pickle(file)
        if not isinstance(content, dict):
            raise GptlmError(f"{file} contains no optimizer states (a {type(content).__name__})")
        masters = states.get(MASTER_WEIGHTS, {}) | (content.get(MASTER_WEIGHTS) or {})
        states |= content
        states[MASTER_WEIGHTS] = masters
    return states


def _optimizer_files(path: Path) -> list[Path]:
    """model_state.RANKS.pdparams -> optimizer.RANKS[_shardNN].pdopt; model.pdparams -> model_state.pdopt."""
    if path.name.startswith("model_state"):
        ranks = path.name.removeprefix("model_state").removesuffix(".pdparams").removeprefix(".")
        pattern = re.compile(rf"^optimizer\.?{re.escape(ranks)}[._]?(?:shard\d+)?\.pdopt$")
        return sorted(file for file in path.parent.glob("optimizer*.pdopt") if pattern.match(file.name))
    name = path.name.replace("model", "model_state", 1).replace(".pdparams", ".pdopt")
    folders = [path.parent]
    if re.search(r"_sharding_\d+", path.parent.name):  # each sharding rank has its own folder
        folders = sorted(path.parent.parent.glob(re.sub(r"_sharding_\d+", "_sharding_*", path.parent.name)))
    return [folder / name for folder in folders if (folder / name).is_file()]
