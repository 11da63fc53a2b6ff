"""Merge adapters: base weights + adapters -> one plain GPT-2 folder."""

import logging
from pathlib import Path

import torch

from gptlm.checkpoint.folder import writing
from gptlm.config.args.convert import MergeArguments
from gptlm.errors import GptlmError, doing, named
from gptlm.inference.loading import load_for_inference
from gptlm.model.adapter_files import base_hint, base_model_of, read_eos_token_id
from gptlm.model.files import has_weights
from gptlm.model.hub import model_folder
from gptlm.model.tokenizer import fit_to_model
from gptlm.quiet import deepspeed_without_gpu, quiet_transformers
from gptlm.recipes.common.resume import check_output
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)


def merge_lora(arguments: MergeArguments) -> None:
    """Check the folders, then `merge`.

    Raises:
        GptlmError: as `merge` does, and if the output folder is one of the inputs or holds a model.
    """
    start_logging(main_process=True)
    deepspeed_without_gpu()
    quiet_transformers()
    adapters, output = Path(arguments.lora_path or ""), Path(arguments.output_path or "")
    base = arguments.model_name_or_path or base_model_of(adapters)
    check_output("output_path", output)
    source = model_folder(base, base_hint(str(adapters)))
    for what, folder in (("adapters", adapters), ("model", Path(source))):
        if output.resolve() == folder.resolve():
            raise GptlmError(f"{named('output_path')} {output} is the folder of the {what}; give another one")
    if has_weights(output):
        raise GptlmError(f"{named('output_path')} {output} holds a model already; give a new folder")
    merge(source, adapters, output, getattr(torch, arguments.dtype))


@doing("merging the adapters")
def merge(base: str, adapters: Path, output: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model in the folder `base` with `adapters` added to its weights into `output`.

    Raises:
        GptlmError: if one of them cannot be read, they do not fit, a sum is NaN or infinite, or `output` cannot be
            written.
    """
    model, tokenizer = load_for_inference(base, lora_path=str(adapters))
    _check_finite(model, adapters, dtype)
    if read_eos_token_id(adapters) is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    fit_to_model(tokenizer, model.config.n_positions)
    with writing(output, "the merged model", more=""):
        output.mkdir(parents=True, exist_ok=True)
        model.to(dtype=dtype).save_pretrained(output)  # type: ignore[call-arg]
        tokenizer.save_pretrained(output)
    logger.info("adapters of %s merged into %s: %s", adapters, base, output)


def _check_finite(model: torch.nn.Module, adapters: Path, dtype: torch.dtype) -> None:
    """Raises GptlmError if a weight is NaN or infinite, in float32 or in `dtype`."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise GptlmError(
                f"{name} has NaN or infinite values with the adapters in {adapters}: they or the base are damaged, or "
                "their training diverged; nothing is written"
            )
        if not torch.isfinite(weight.to(dtype)).all():
            raise GptlmError(
                f"{name} has values up to {weight.abs().max().item():.3g}, which {dtype} cannot hold; give "
                f"{named('dtype')} bfloat16 or float32"
            )
