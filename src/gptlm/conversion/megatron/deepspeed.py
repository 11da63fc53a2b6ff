"""Megatron-DeepSpeed's pipeline checkpoints: one file per layer and tensor rank, `layer_LL-model_TT-model_states.pt`.

The first file is the embedding, the last the final norm, those between are the layers (their numbers have a gap where a
step without weights stands). Tensors are laid out as Megatron's.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gptlm.conversion.gpt2_names import LAST, WPE, WTE, layer_and_part
from gptlm.conversion.megatron import names as words
from gptlm.conversion.megatron.read import MegatronSource, gpt2_name, layer_part
from gptlm.conversion.safe_pickle import read_torch
from gptlm.errors import GptlmError


class DeepSpeedLayers(MegatronSource):
    """See the module; raises as `MegatronSource`."""

    def group_of(self, name: str) -> int:
        layer, part = layer_and_part(name)
        if layer is None:
            return len(self.found.files) - 1 if part in LAST else 0
        return 1 + layer

    def load_group(self, group: int) -> list[dict[str, Tensor]]:
        return [self._named(read_torch(path), group) for path in self.found.files[group]]

    def steps(self) -> tuple[int, int, int | None]:
        raise GptlmError(
            f"{self.found.folder}: DeepSpeed keeps its optimizer in flat pieces over all ranks, which are not read; "
            "convert without --with_optimizer"
        )

    def _named(self, content: Mapping[str, Any], group: int) -> dict[str, Tensor]:
        stored, unknown = {}, []
        for name, tensor in content.items():
            if words.BUFFERS.search(name) or not isinstance(tensor, Tensor):
                continue
            own = self._own_name(name, group)
            if own is None:
                unknown.append(name)
            else:
                stored[own] = tensor
        if unknown:
            path = self.found.files[group][0]
            raise GptlmError(f"{path} holds {len(unknown)} tensors that GPT-2 does not have (first: {unknown[0]})")
        return stored

    def _own_name(self, name: str, group: int) -> str | None:
        if group == 0:
            return gpt2_name(f"embedding.{name.removeprefix('embedding.')}", 0)
        if group == len(self.found.files) - 1:
            return f"transformer.ln_f.{name}" if name in ("weight", "bias") else None
        part = layer_part(name)
        return f"transformer.h.{group - 1}.{part}" if part else None

    def _stages(self) -> int | None:
        return None  # its layers lie apart, whatever the number of stages

    def _measured(self) -> tuple[int, dict[str, int]]:
        first, layer = self.load_group(0)[0], self.load_group(1)[0]
        if WTE not in first or WPE not in first:
            raise GptlmError(f"{self.found.files[0][0]} lacks the embedding of tokens or of positions")
        layers, noted = len(self.found.files) - 2, self.arguments.get(words.SIZES["num_hidden_layers"][0])
        if noted is not None and noted != layers:
            raise GptlmError(
                f"{self.found.folder} is not whole: it has files of {layers} layers, its arguments say {noted}"
            )
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": first[WTE].shape[1],
            "max_position_embeddings": first[WPE].shape[0],
            "intermediate_size": len(layer["transformer.h.0.mlp.c_fc.bias"]) * len(self.found.files[0]),
        }
        return first[WTE].shape[0], sizes
