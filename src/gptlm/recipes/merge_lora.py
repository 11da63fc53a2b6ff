"""Merge adapters: base weights + adapters -> one plain GPT-2 folder."""

import logging
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from gptlm import owned
from gptlm.checkpoint.folder import start, writing
from gptlm.config.args.convert import Merge
from gptlm.errors import GptlmError, doing, named
from gptlm.inference.loading import load_for_inference
from gptlm.model.adapter_files import base_hint, base_model_of, read_eos_token_id
from gptlm.model.hub import adapter_folder, model_folder
from gptlm.model.tokenizer import fit_to_model, save_tokenizer
from gptlm.quiet import deepspeed_without_gpu, quiet_transformers
from gptlm.recipes.common.command_results import check_folder, maker, new_folder
from gptlm.recipes.common.hub_upload import Upload, uploading_result
from gptlm.recipes.common.model_card import card_of_folder
from gptlm.recipes.common.resume import check_output
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)

STAGING = ".merged.incomplete"


def merge_lora(command: Merge) -> None:
    """Check the folders and the repository of an upload, then merge.

    Raises:
        GptlmError: as `merged` and `uploading_result` do, and if the output folder holds an input or files of others.
    """
    start_logging(main_process=True)
    deepspeed_without_gpu()
    quiet_transformers()
    arguments = command.main
    name, output = arguments.lora_path or "", Path(arguments.output_path or "")
    adapters = adapter_folder(name)
    base = arguments.model_name_or_path or base_model_of(adapters)
    check_output("output_path", output)
    source = model_folder(base, base_hint(name))
    by = maker("merge-lora", asdict(arguments), (adapters, Path(source)), overwrite=arguments.overwrite)
    check_folder("output_path", output, by)
    texts = (base, str(source), name)
    with uploading_result(Upload(command.hub, output, "output_path", texts, "the merge", "Merge LoRA adapters")):
        model = merged(source, adapters, getattr(torch, arguments.dtype))
        with new_folder("output_path", output, by) as staging:
            save(*model, staging)
            card_of_folder(staging, "merged with LoRA adapters", base)
        logger.info("adapters of %s merged into %s: %s", name, base, output)


def merge_beside(base: str, run_folder: Path, name: str) -> None:
    """Write the model in the folder `base` with the adapters in `run_folder` into its sub-folder `name`.

    Raises:
        GptlmError: as `merged`, or if the files cannot be written.
    """
    model, staging = merged(base, run_folder), run_folder / STAGING
    with writing(run_folder / name, "the merged model", resumes=False):
        start(staging)
        try:
            (staging / name).mkdir()
            save(*model, staging / name)
            card_of_folder(staging / name, "merged with LoRA adapters", base_model_of(run_folder))
            owned.move_in(staging, run_folder, owned.RUN)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    logger.info("adapters of %s merged into %s: %s", run_folder, base, run_folder / name)


@doing("merging the adapters")
def merged(
    base: str, adapters: Path, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """The model in the folder `base` with `adapters` added to its weights, and the tokenizer.

    Raises:
        GptlmError: if one of them cannot be read, they do not fit, or a sum is NaN or infinite.
    """
    model, tokenizer = load_for_inference(base, lora_path=str(adapters))
    _check_finite(model, adapters, dtype)
    if read_eos_token_id(adapters) is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    fit_to_model(tokenizer, model.config.n_positions)
    return model.to(dtype=dtype), tokenizer  # type: ignore[call-arg]


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with doing("saving the merged model"):
        model.save_pretrained(folder)  # type: ignore[operator]
        save_tokenizer(tokenizer, folder)


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
