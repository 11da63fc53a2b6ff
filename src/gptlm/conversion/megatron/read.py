"""Read checkpoints of Megatron-LM's classic code and of Megatron-DeepSpeed, for any TP x PP and every version."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import FINAL_NORM, WPE, WTE, layer_and_part
from gptlm.conversion.megatron import layout
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
    nearly_equal,
)
from gptlm.errors import GptlmError, named
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.model.presets import GPT2_VOCABULARY, Shape
from gptlm.pickles.safe_pickle import StandIn
from gptlm.pickles.torch_file import read_torch

MASTER_WEIGHTS = "fp32_from_fp16_params"


class MegatronSource(ShardedSource):
    """One file per tensor-parallel rank and pipeline stage: `mp_rank_XX[_YYY]/model_optim_rng.pt`.

    Raises:
        GptlmError: if ranks are missing, the network is not GPT-2, or sizes are missing and not given by the user.
    """

    def __init__(self, found: Found, options: ReadOptions):
        super().__init__(found)
        content = read_torch(found.arguments_file or found.files[0][0])
        if not isinstance(content, dict):
            raise GptlmError(f"{found.files[0][0]} is not a checkpoint of Megatron (a {type(content).__name__})")
        stored = content.get("args")
        self.arguments = vars(stored) if hasattr(stored, "__dict__") else stored or {}
        version = content.get("checkpoint_version", 0)
        if version not in layout.VERSIONS:
            raise GptlmError(f"{found.folder} has checkpoint_version {version!r}; expected 0, 1.0, 2.0 or 3.0")
        self.version = int(version)
        self.notes.append(f"checkpoint_version {float(version):g}")
        # model chunks per stage: interleaved (virtual) stages have model0, model1, ...
        self.chunks = sum(f"model{chunk}" in content for chunk in range(64)) or 1
        self._embeddings: list[Tensor] | None = None
        self._check_degrees()
        _check_network(self.arguments, found.folder)
        self._set_sizes(options)

    def group_of(self, name: str) -> int:
        layer, part = layer_and_part(name)
        if layer is None:
            return len(self.found.files) - 1 if part in FINAL_NORM else 0
        return layer // self._layers_per_chunk % len(self.found.files)

    def load_group(self, group: int) -> list[dict[str, Tensor]]:
        return [self._load(path, group) for path in self.found.files[group]]

    def merge(self, name: str, parts: list[Tensor]) -> Tensor:
        part = layer_and_part(name)[1]
        if part.startswith("attn.c_attn"):
            heads = self.shape.num_attention_heads // len(parts)
            tensor = torch.cat([layout.split_qkv(rows, heads, self.version) for rows in parts], dim=1).flatten(0, 2)
        elif part in layout.COLUMN_PARALLEL:
            tensor = torch.cat(parts, dim=0)
        elif part in layout.ROW_PARALLEL:
            tensor = torch.cat(parts, dim=1)
        else:
            tensor = merge_replicated(parts, name, self.found.folder)
        return tensor.t() if part in CONV1D_WEIGHTS else tensor

    def progress(self) -> Progress:
        path = self.found.files[0][0]
        content = read_torch(path)
        if self.chunks > 1:
            raise GptlmError(f"{path}: optimizer states of interleaved stages cannot be read; {WITHOUT_OPTIMIZER}")
        adam = _adam(content, path)
        steps = [group["step"] for group in adam["param_groups"] if "step" in group]
        steps += [state["step"] for state in adam["state"].values() if "step" in state]
        updates = int(steps[0]) if steps else int(content.get("iteration", 0))
        iterations = int(content.get("iteration", updates))
        samples, batch = self.arguments.get("consumed_train_samples"), self.arguments.get("global_batch_size")
        if samples is not None and (samples or not iterations):
            return Progress(iterations, updates, int(samples))
        if not batch or self.arguments.get("rampup_batch_size"):
            return Progress(iterations, updates, None)
        return Progress(iterations, updates, iterations * int(batch))

    def has_master_weights(self) -> bool:
        return MASTER_WEIGHTS in (read_torch(self.found.files[0][0]).get("optimizer") or {})

    def external_name(self, name: str) -> str:
        module, _, kind = layer_and_part(name)[1].rpartition(".")
        return f"{layout.WRITTEN[module]}.{kind}" if module in layout.WRITTEN else name

    @property
    def _layers_per_chunk(self) -> int:
        return max(self.shape.num_hidden_layers // (len(self.found.files) * self.chunks), 1)

    def _load(self, path: Path, stage: int) -> dict[str, Tensor]:
        content = read_torch(path)
        stored: dict[str, Tensor] = {}
        unknown = []
        for chunk in range(self.chunks):
            model = content.get(f"model{chunk}") if self.chunks > 1 else content.get("model", content.get("module"))
            if not isinstance(model, dict):
                raise GptlmError(f"{path} contains no model; is it the optimizer's file?")
            # interleaved stages: chunk c of stage s comes after the chunks c of the stages before it
            first_layer = (chunk * len(self.found.files) + stage) * self._layers_per_chunk
            tensors = layout.flatten(model)
            if self.kind != WEIGHT:
                tensors = _states_of(content, tensors, self.kind, path)
            for name, tensor in tensors.items():
                name = name.removeprefix("language_model.")
                if name in layout.HEADS:
                    self._check_head(tensor, path)
                elif (own := layout.gpt2_name(name, first_layer)) is not None:
                    stored[own] = tensor
                elif not layout.BUFFERS.search(name):
                    unknown.append(name)
        check_unknown(unknown, path)
        return stored

    def _check_head(self, tensor: Tensor, path: Path) -> None:
        """The copy of the embedding on the last stage, for the output head."""
        if self.kind != WEIGHT:
            return
        if self._embeddings is None:
            self._embeddings = [_embedding_in(read_torch(file)) for file in self.found.files[0]]
        rank = next(files.index(path) for files in self.found.files if path in files)
        if nearly_equal(self._embeddings[rank], tensor):
            return
        if any(nearly_equal(embedding, tensor) for embedding in self._embeddings):
            raise GptlmError(f"{self.found.folder}: the tensor-parallel ranks are mixed up at {path}; copy it again")
        raise GptlmError(
            f"{path} is not GPT-2, or belongs to another model than the first stage: its output head is not the "
            "embedding (untied)"
        )

    def _check_degrees(self) -> None:
        degrees: list[tuple[tuple[str, ...], int]] = [
            (("tensor_model_parallel_size", "model_parallel_size"), len(self.found.files[0]))
        ]
        if self.found.arguments_file is None:  # files by stage, not by layer
            degrees.append((("pipeline_model_parallel_size",), len(self.found.files)))
        for names, files in degrees:
            degree = first_value(self.arguments, *names)
            if degree not in (None, files):
                raise GptlmError(
                    f"{self.found.folder} is incomplete: its arguments have {names[0]} {degree}, there are files of "
                    f"{files}; copy it again"
                )

    def _set_sizes(self, options: ReadOptions) -> None:
        """Sizes and activation from the arguments, else from the tensors and the user's options."""
        values, where = self.arguments, self.found.folder
        self.shape = Shape(1, 1, 1, 1, 1, 1)  # until known: `_load` needs a number of layers
        rank_rows, sizes = self._measure()
        given = {ours: values.get(theirs) for ours, theirs in layout.SIZES.items()}
        sizes |= {name: value for name, value in given.items() if value is not None}
        if not values:
            self.notes.append(f"{where} contains no arguments: sizes are those of the tensors")
        if "num_hidden_layers" not in sizes:
            raise GptlmError(f"{where} does not contain the number of layers and has several stages; it cannot be read")
        heads = sizes.get("num_attention_heads") or options.num_attention_heads
        sizes["num_attention_heads"] = heads or self.infer_heads(sizes["num_hidden_layers"], sizes["hidden_size"])
        sizes.setdefault("intermediate_size", 4 * sizes["hidden_size"])  # Megatron's default of --ffn-hidden-size
        self.shape = checked_shape({**sizes, "vocab_size": 1}, where)
        rows = rank_rows * len(self.found.files[0])
        reason = "the checkpoint's arguments" if values.get("vocab_size") else "GPT-2's tokenizer"
        self.set_vocabulary(rows, self._vocabulary(rows), options, reason)
        self.activation = _activation(values, options, where, self.notes)
        self.epsilon = float(first_value(values, "layernorm_epsilon", "norm_epsilon") or 1e-5)
        self.dropouts = (float(values.get("hidden_dropout", 0.1)), float(values.get("attention_dropout", 0.1)))

    def _measure(self) -> tuple[int, dict[str, int]]:
        """Rows of the embedding on one rank, and the sizes that the tensors of the first stage show."""
        tensors = self._load(self.found.files[0][0], 0)
        sizes = self._embedding_sizes(tensors)
        if len(self.found.files) == 1:
            layers = {layer for name in tensors if (layer := layer_and_part(name)[0]) is not None}
            sizes["num_hidden_layers"] = len(layers)
        inner = tensors.get("transformer.h.0.mlp.c_fc.bias")
        if inner is not None:
            sizes["intermediate_size"] = len(inner) * len(self.found.files[0])
        return tensors[WTE].shape[0], sizes

    def _embedding_sizes(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        if WTE not in tensors or WPE not in tensors:
            raise GptlmError(f"{self.found.files[0][0]} lacks the token or position embedding; copy it again")
        return {"hidden_size": tensors[WTE].shape[1], "max_position_embeddings": tensors[WPE].shape[0]}

    def _vocabulary(self, rows: int) -> int | None:
        """The entries before padding: from the arguments, or GPT-2's if the tokenizer is GPT-2's."""
        size = self.arguments.get("vocab_size")
        if size is not None and size <= rows:
            return int(size)
        gpt2 = self.arguments.get("tokenizer_type", "GPT2BPETokenizer") == "GPT2BPETokenizer"
        unit = self.arguments.get("make_vocab_size_divisible_by", 128) * len(self.found.files[0])
        return GPT2_VOCABULARY if gpt2 and rows == -(-GPT2_VOCABULARY // unit) * unit else None


class DeepSpeedLayers(MegatronSource):
    """Megatron-DeepSpeed with pipeline: one file per layer and tensor-parallel rank, without stages.

    `layer_LL-model_TT-model_states.pt` (DeepSpeed, runtime/pipe/module.py): the first file is the embedding, the last
    one the final norm. Tensors have Megatron's layout.
    """

    def group_of(self, name: str) -> int:
        layer, part = layer_and_part(name)
        if layer is None:
            return len(self.found.files) - 1 if part in FINAL_NORM else 0
        return 1 + layer

    def progress(self) -> Progress:
        raise GptlmError(
            f"{self.found.folder}: DeepSpeed stores its optimizer states in flat pieces over all ranks, which cannot "
            f"be read; {WITHOUT_OPTIMIZER}"
        )

    def _load(self, path: Path, stage: int) -> dict[str, Tensor]:
        stored, unknown = {}, []
        for name, tensor in read_torch(path).items():
            if layout.BUFFERS.search(name) or not isinstance(tensor, Tensor):
                continue
            if stage == 0:
                own = layout.gpt2_name(f"embedding.{name.removeprefix('embedding.')}", 0)
            elif stage == len(self.found.files) - 1:
                own = f"transformer.ln_f.{name}" if name in ("weight", "bias") else None
            else:
                part = layout.layer_part(name)
                own = f"transformer.h.{stage - 1}.{part}" if part else None
            if own is None:
                unknown.append(name)
            else:
                stored[own] = tensor
        check_unknown(unknown, path)
        return stored

    def _measure(self) -> tuple[int, dict[str, int]]:
        embedding, layer = (self._load(self.found.files[group][0], group) for group in (0, 1))
        sizes = self._embedding_sizes(embedding)
        layers, expected = len(self.found.files) - 2, self.arguments.get("num_layers")
        if expected not in (None, layers):
            raise GptlmError(
                f"{self.found.folder} is incomplete: it has files of {layers} layers, its arguments have {expected}; "
                "copy it again"
            )
        inner = len(layer["transformer.h.0.mlp.c_fc.bias"]) * len(self.found.files[0])
        return embedding[WTE].shape[0], {**sizes, "num_hidden_layers": layers, "intermediate_size": inner}


def _embedding_in(content: Mapping[str, Any]) -> Tensor:
    """The token embedding in a rank's file."""
    model: Any = next((content[key] for key in ("model", "model0", "module") if key in content), {})
    tensors = layout.flatten(model).items()
    return next((t for name, t in tensors if name.endswith("embedding.word_embeddings.weight")), torch.empty(0))


def _check_network(arguments: Mapping[str, Any], where: Path) -> None:
    def plain(value: Any) -> Any:  # Megatron's enums, whose value is their first argument
        return value.arguments[0] if isinstance(value, StandIn) and value.arguments else value

    values = {name: plain(value) for name, value in arguments.items()}
    groups, heads = values.get("num_query_groups"), values.get("num_attention_heads")
    if groups == heads:  # every head has its own keys and values: plain attention
        values.pop("group_query_attention", None)
    check_variants(values, layout.VARIANTS, where)
    hidden, size = values.get("hidden_size"), values.get("kv_channels")
    if hidden and size and heads and heads * size != hidden:
        raise GptlmError(f"{where} is not GPT-2: {heads} heads of {size} are not the hidden size {hidden}")


def _activation(values: Mapping[str, Any], options: ReadOptions, where: Path, notes: list[str]) -> str:
    """HuggingFace's name of the activation.

    Megatron's fused kernel (bias_gelu_fusion) and openai_gelu compute the tanh form, F.gelu without them the erf form.
    """
    tanh = next((name for name in ("bias_gelu_fusion", "openai_gelu") if values.get(name)), None)
    if tanh:
        notes.append(f"activation gelu_new (argument {tanh})")
        return "gelu_new"
    if "bias_gelu_fusion" in values:
        notes.append("activation gelu (erf), because bias_gelu_fusion is off; training here computes gelu_new only")
        return "gelu"
    if options.activation:
        notes.append(f"activation {options.activation} (--activation)")
        return options.activation
    raise GptlmError(
        f"{where} does not contain the form of GELU (bias_gelu_fusion): give {named('activation')} gelu_new (the "
        f"fused kernel, Megatron's default, and NVIDIA's published 345M model) or {named('activation')} gelu"
    )


# Optimizer states ---------------------------------------------------------------------------------------------------
# megatron/optimizer/__init__.py: one parameter group with weight decay (matrices and embeddings) and one without
# (biases and norms), each in the order of the model's tensors. megatron/optimizer/optimizer.py: in half precision
# "optimizer" wraps Adam and stores float32 weights as fp32_from_fp16_params, by group.


def _states_of(content: Mapping[str, Any], tensors: dict[str, Tensor], kind: str, path: Path) -> dict[str, Tensor]:
    """The states of `kind` by the names in `tensors`, which are the model in `content`.

    Raises:
        GptlmError: if there is no optimizer state, or it belongs to other tensors.
    """
    adam = _adam(content, path)
    names = [name for name in tensors if not layout.BUFFERS.search(name)]
    decayed = [name for name in names if tensors[name].ndim > 1 and not name.endswith(".bias")]
    others = [name for name in names if name not in set(decayed)]
    sizes = [len(group["params"]) for group in adam["param_groups"]]
    groups = next((g for g in ([decayed, others], [names]) if [len(group) for group in g] == sizes), None)
    if groups is None:
        raise GptlmError(
            f"{path}: the optimizer has groups of {sizes} parameters, the model {len(decayed)} with weight decay and "
            f"{len(others)} without; {WITHOUT_OPTIMIZER}"
        )
    found: dict[str, Tensor] = {}
    for number, group in enumerate(groups):
        if kind == MASTER:
            values = content["optimizer"][MASTER_WEIGHTS][number]
        else:
            values = [adam["state"][key][kind] for key in adam["param_groups"][number]["params"]]
        found |= dict(zip(group, values))
    for name in names:
        if name in found and found[name].shape != tensors[name].shape:
            raise GptlmError(
                f"{path}: {kind} of {name} has shape {tuple(found[name].shape)}, the weight "
                f"{tuple(tensors[name].shape)}; the order of the optimizer's parameters is not known; "
                f"{WITHOUT_OPTIMIZER}"
            )
    return found


def _adam(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Adam's state_dict, without the wrapper of half precision."""
    optimizer = content.get("optimizer")
    adam = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(adam, dict) or not {"state", "param_groups"} <= set(adam):
        raise GptlmError(
            f"{path} contains no optimizer state that can be read (a distributed optimizer is stored in flat pieces, a "
            f"release has none); {WITHOUT_OPTIMIZER}"
        )
    return adam
