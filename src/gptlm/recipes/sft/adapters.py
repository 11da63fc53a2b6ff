"""The adapters of a fine-tuning run: what they exclude, and whether a checkpoint's are the same."""

import logging
from importlib.util import find_spec
from pathlib import Path

import torch

from gptlm.config.adapters import STAGE3, whole_weight_flags
from gptlm.config.args.sft import LoraArguments
from gptlm.config.run import SftRun
from gptlm.errors import GptlmError, UsageError, named
from gptlm.model.adapter_files import read_adapter_config
from gptlm.model.adapter_initial import INITIAL
from gptlm.model.files import ADAPTER_WEIGHTS
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.quantization import quantize
from gptlm.model.safetensors_io import read_header
from gptlm.recipes.common.device import Device

logger = logging.getLogger(__name__)


def check_stage(lora: LoraArguments, stage: int) -> None:
    """Raises UsageError if the adapters need whole weights, which stage 3 of --deepspeed FILE splits."""
    flags = whole_weight_flags(lora)
    if stage == 3 and flags:
        raise UsageError(f"{named(flags[0])} {STAGE3}")


def check_split(run: SftRun, new_tokens: list[int]) -> None:
    """Raises UsageError if rows of the embedding are trained beside adapters, and the embedding is split."""
    degree = run.dims.tensor
    if run.lora.lora and new_tokens and degree > 1:
        raise UsageError(
            f"{named('tensor_parallel_degree')} {degree} with {named('lora')}: {len(new_tokens)} tokens are added to "
            f"the vocabulary, and adapters cannot hold rows of a split embedding; use {named('sharding')} stage2 with "
            f"{named('tensor_parallel_degree')} 1, or leave {named('lora')} out"
        )


def check_package(lora: LoraArguments) -> None:
    """Raises UsageError if quantized matrices are asked for and bitsandbytes is not installed."""
    if lora.bits is not None and find_spec("bitsandbytes") is None:
        raise UsageError(
            f"{named(f'load_in_{lora.bits}bit')} needs bitsandbytes, which is not installed: "
            "pip install 'gptlm[quantization]'"
        )


def quantize_matrices(lora: LoraArguments, model: GPTLMHeadModel, device: Device) -> None:
    """Quantize the frozen matrices of `model` as the flags ask."""
    if lora.bits is None:
        return
    place = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else torch.device("cpu")
    kind, nested = lora.bnb_4bit_quant_type, lora.use_bnb_nested_quant
    quantize(model, bits=lora.bits, dtype=device.dtype, device=place, kind=kind, nested=nested)
    logger.info("the frozen matrices are quantized to %s", kind if lora.bits == 4 else "int8")


def obstacle_of(lora: LoraArguments) -> str | None:
    """Why the network with these adapters is neither compiled nor captured by default, or None."""
    if lora.bits is not None:
        return "quantized matrices are bitsandbytes' layers"
    if not lora.lora or lora.kind.is_plain:
        return None
    return "DoRA, trained biases and modules_to_save use PEFT's own layers"


def check_same_adapters(lora: LoraArguments, checkpoint: Path) -> None:
    """Raises GptlmError if the adapters in `checkpoint` are others than the command's."""
    saved, kind = read_adapter_config(checkpoint), lora.kind
    expected = kind.saved_scale(lora.lora_rank, lora.lora_alpha or 0.0)
    differences = [
        f"{flag} {saved[key]:g} there, {expected[key]:g} in the command"
        for flag, key in (("lora_rank", "r"), ("lora_alpha", "lora_alpha"))
        if abs(saved[key] - expected[key]) > 1e-9 * expected[key]
    ]
    has_initial = INITIAL in read_header(checkpoint / ADAPTER_WEIGHTS).metadata
    if has_initial != kind.changes_base:
        there, here = ("pissa or olora" if has_initial else "another one"), kind.init
        differences.append(f"init_lora_weights {there} there, {here} in the command")
    differences += kind.differences(saved)
    dropout = saved.get("lora_dropout") or 0.0
    if dropout != lora.lora_dropout:
        logger.warning(
            "lora_dropout was %g in %s, is %g now: the new value holds", dropout, checkpoint.name, lora.lora_dropout
        )
    if set(saved["target_modules"]) != set(lora.lora_target_modules):
        differences.append(f"lora_target_modules {' '.join(sorted(saved['target_modules']))} there")
    if differences:
        raise GptlmError(
            f"the checkpoint {checkpoint} has other adapters: {'; '.join(differences)}; give the same, another "
            "--output_dir, or --overwrite_output_dir"
        )
