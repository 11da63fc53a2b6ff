"""LoRA adapters of PaddleNLP into PEFT's form and back."""

import logging
from pathlib import Path

import torch

from gptlm.config.args.convert import Conversion
from gptlm.conversion.lora import Adapters, kind_of, largest_difference, read_paddle, read_peft, write_peft
from gptlm.conversion.lora import write_paddle as write_paddle_adapters
from gptlm.errors import GptlmError, UsageError

logger = logging.getLogger(__name__)

LIMIT = 1e-6


def convert_adapters(path: Path, folder: Path, conversion: Conversion) -> None:
    """Write the adapters in `path` into the new `folder`, and compare what they add to each weight.

    Raises:
        GptlmError: if they cannot be read, or the result adds something else.
    """
    kind, form, heads = kind_of(path), conversion.main.to, conversion.reading.num_attention_heads
    logger.info("%s holds adapters of %s", path, "PaddleNLP" if kind == "paddle" else "PEFT")
    fused = form == "paddle" and conversion.writing.paddle_qkv == "fused"
    _check_flags(conversion)
    if form == "megatron":
        raise UsageError("Megatron-LM has no form of adapters; merge them with scripts/merge_lora.py and convert that")
    if fused and heads is None:
        raise UsageError("one qkv_proj is ordered by heads, which adapters do not say: give --num_attention_heads")
    adapters = read_paddle(path, heads) if kind == "paddle" else read_peft(path)
    dtype = None if conversion.main.dtype == "keep" else getattr(torch, conversion.main.dtype)
    if form == "paddle":
        write_paddle_adapters(adapters, folder, dtype, heads if fused else None)
    else:
        write_peft(adapters, folder, dtype)
    rank = max(len(pair.a) for pair in adapters.pairs.values())
    logger.info("%d adapters, rank %d, scale %g", len(adapters.pairs), rank, adapters.scale)
    if conversion.main.verify and dtype is not None:
        logger.info("nothing is compared: the adapters are rounded to --dtype %s", conversion.main.dtype)
    elif conversion.main.verify:
        _verify(adapters, read_paddle(folder, heads) if form == "paddle" else read_peft(folder))


def _check_flags(conversion: Conversion) -> None:
    """Raises UsageError if a flag is given that means nothing for adapters."""
    main, reading = conversion.main, conversion.reading
    given = {
        "--with_optimizer": main.with_optimizer,
        "--tokenizer_name_or_path": main.tokenizer_name_or_path,
        "--vocab_size": reading.vocab_size,
        "--activation": reading.activation,
        "--paddle_file": conversion.writing.paddle_file == "pdparams",
    }
    for flag, value in given.items():
        if value:
            raise UsageError(f"{flag} is for models, the checkpoint holds adapters; leave it out")


def _verify(before: Adapters, after: Adapters) -> None:
    largest = largest_difference(before, after)
    if not largest <= LIMIT:
        raise GptlmError(f"the converted adapters add something else to the weights (by {largest:.2e}); please report")
    logger.info("what the adapters add to the weights differs by at most %.2e", largest)
