"""A model whose layers are split over processes, for inference."""

import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig

from gptlm.errors import GptlmError, is_out_of_memory, named
from gptlm.kernels.linear_cross_entropy import linear_cross_entropy
from gptlm.model.build import StoredWeights, blank_model, check_complete, check_size, loaded_config, unreadable
from gptlm.model.files import GENERATION_CONFIG
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.pretrained import load_pretrained
from gptlm.parallel.parallelize import parallelize
from gptlm.parallel.process_groups import Mesh

logger = logging.getLogger(__name__)


def load_split(source: str, mesh: Mesh, dtype: torch.dtype) -> GPTLMHeadModel:
    """This process's part of the network with the weights in the local folder `source`.

    Weights are read one at a time, so a process never holds more than its part and one module.

    Args:
        mesh: splits layers over processes, without pipeline stages.

    Raises:
        GptlmError: as `load_model`, and if the output layer is not the token embedding.
    """
    config = loaded_config(source, None, None)
    if not config.tie_word_embeddings:
        raise GptlmError(
            f"{source} has an output layer of its own (tie_word_embeddings is false), which is not split over "
            f"processes; leave {named('tensor_parallel_degree')} out"
        )
    check_size(Path(source))
    try:
        stored = StoredWeights(source)
        with torch.device("meta"):
            model: Any = blank_model(config).to(dtype=dtype)  # type: ignore[call-arg]
        check_complete(source, stored.compared_with(model))
        total = model.num_parameters()
        parallelize(model, mesh, partial(_fill, stored), linear_cross_entropy)
        if (Path(source) / GENERATION_CONFIG).is_file():
            model.generation_config = load_pretrained(GenerationConfig, source)
    except GptlmError:
        raise
    except Exception as error:  # of safetensors, json and torch
        if is_out_of_memory(error):
            raise
        raise GptlmError(unreadable(source, error)) from error
    model.name_or_path = source
    model.names_of_group = partial(_names_of_group, mesh.tensor_group)
    count = sum(weight.numel() for weight in model.parameters())
    logger.info(
        "tensor parallelism: %d processes split each layer, this one holds %s of %s weights",
        *(mesh.dims.tensor, f"{count:,}", f"{total:,}"),
    )
    return model.eval()


@torch.no_grad()
def _fill(stored: StoredWeights, model: GPTLMHeadModel, name: str, module: nn.Module) -> None:
    for own, weight in module.named_parameters(recurse=False):
        weight.copy_(stored.get(f"{name}.{own}"))


def _names_of_group(group: Any, names: Collection[str]) -> list[str]:
    """Names that any process of `group` gives. All of them must call it: they compute the same results."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, list(names), group=group)
    return list(dict.fromkeys(name for part in found for name in part))
