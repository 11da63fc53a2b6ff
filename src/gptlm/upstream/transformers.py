"""Private and undocumented names of transformers, except for those of its Trainer. Tried with 5.24.0."""

from collections.abc import Iterable
from typing import Any

from gptlm.upstream.check import Needed, available, problem, require

CONVERSION = (
    Needed("transformers.conversion_mapping", "register_checkpoint_conversion_mapping", ("mapping", "overwrite")),
    Needed("transformers.core_model_loading", "WeightConverter.__init__", ("operations",)),
    Needed("transformers.core_model_loading", "Transpose.__init__", ("dim0", "dim1")),
)
HOOKS = (Needed("transformers", "PreTrainedModel._init_weights", ("module",)),)
ATTENTION = (Needed("transformers", "PreTrainedConfig._attn_implementation"),)
GENERATION = (Needed("transformers", "GenerationConfig", uses=("_from_model_config",)),)
DEVICES = (Needed("transformers", "TrainingArguments", uses=("_n_gpu",)),)
ALL = (*CONVERSION, *HOOKS, *ATTENTION, *GENERATION, *DEVICES)


def check(needed: tuple[Needed, ...] = ALL) -> str | None:
    """One line about the first of the names that this transformers lacks; None where it has all of them."""
    return problem("transformers", needed)


def transpose_on_disk(model_class: str, weights: Iterable[str]) -> None:
    """Let `from_pretrained` and `save_pretrained` of `model_class` transpose `weights`, regular expressions of names.

    Raises:
        GptlmError: if this transformers cannot: weights would be loaded and saved the wrong way round.
    """
    require("transformers", (*CONVERSION, *HOOKS), "loading and saving GPT-2 weights")
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    converters: Any = [WeightConverter(name, name, operations=[Transpose(0, 1)]) for name in weights]
    register_checkpoint_conversion_mapping(model_class, converters, overwrite=True)


def use_eager_attention(config: Any) -> None:
    """Let blocks made from `config` compute attention without fused kernels."""
    require("transformers", ATTENTION, "the comparison with the stock GPT-2 block")
    config._attn_implementation = "eager"


def detach_from_model_config(generation_config: Any) -> None:
    """Let a saved generation_config.json be read as it is; else transformers replaces it by the model's settings."""
    if available("transformers", GENERATION, "later edits of generation_config.json may not be read"):
        generation_config._from_model_config = None


def use_one_gpu(arguments: Any) -> None:
    """Keep the Trainer from nn.DataParallel, which is slow and multiplies the batch by the number of visible GPUs.

    Raises:
        GptlmError: if this transformers would use it nevertheless.
    """
    if arguments.n_gpu > 1:
        require("transformers", DEVICES, "training on one of several visible GPUs (CUDA_VISIBLE_DEVICES hides them)")
        arguments._n_gpu = 1
