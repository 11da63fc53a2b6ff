"""Private and undocumented names of transformers, except for those of its Trainer. Tried with 5.24.0."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
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
_LISTS = "transformers.utils.import_utils"
IMPORTS = (
    Needed(_LISTS, "define_import_structure", ("module_path", "prefix")),
    Needed("transformers.utils", "is_torchao_available"),
    Needed("transformers.utils", "is_datasets_available"),
)
ALL = (*CONVERSION, *HOOKS, *ATTENTION, *GENERATION, *DEVICES, *IMPORTS)


def check(needed: tuple[Needed, ...] = ALL) -> str | None:
    """One line about the first of the names that this transformers lacks; None where it has all of them."""
    return problem("transformers", needed)


def import_quickly(*, trainer: bool) -> None:
    """Import what all models of transformers share, and the Trainer if asked, without parts that no command uses.

    - transformers lists its models by reading the source of all of them, and `transformers.models` does it once more.
    - The quantizers import torchao.
    - The Trainer imports `datasets`, which brings pandas, to recognize its data sets.
    """
    if not available("transformers", IMPORTS, "commands take longer to start"):
        return
    names = names_of_models()
    with _replaced(_LISTS, "define_import_structure", lambda module_path: names):
        import_module("transformers.models")
    with _replaced("transformers.utils", "is_torchao_available", lambda: False):
        import_module("transformers.quantizers.auto")
    if trainer:
        with _replaced("transformers.utils", "is_datasets_available", lambda: False):
            import_module("transformers.trainer")


def names_of_models() -> dict[frozenset[str], dict[str, Any]]:
    """Names in each module of `transformers.models` by the libraries they need, as the import of transformers found."""
    import_utils: Any = import_module(_LISTS)
    folder = Path(import_utils.__file__).parents[1] / "models"
    found = import_utils.define_import_structure(folder, prefix="models")  # transformers' own call, which is cached
    return {
        libraries: {
            module.removeprefix("models."): names for module, names in modules.items() if module.startswith("models.")
        }
        for libraries, modules in found.items()
    }


@contextmanager
def _replaced(module_name: str, name: str, function: Any) -> Iterator[None]:
    module = import_module(module_name)
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


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
