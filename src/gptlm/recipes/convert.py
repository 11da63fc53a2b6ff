"""Convert a checkpoint of another library: read it, write into a staging folder, compare logits, rename."""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerState

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint import optimizer_state
from gptlm.config.args.convert import Conversion, ConvertArguments, ReadingArguments, WritingArguments
from gptlm.conversion import gguf, lora
from gptlm.conversion.gpt2_names import FINAL_NORM, WPE, WTE, all_names, layer_and_part, layer_names, shape_of
from gptlm.conversion.huggingface import config_of
from gptlm.conversion.megatron.write import check_degrees, padded_rows, write_megatron
from gptlm.conversion.open import open_checkpoint
from gptlm.conversion.paddle.write import check_writable, write_paddle
from gptlm.conversion.source import ReadOptions, Source
from gptlm.conversion.verify import check_stock, fixed_batch, logits_of, max_difference
from gptlm.errors import GptlmError, UsageError, doing, named
from gptlm.locks import locked
from gptlm.model.adapter_files import is_adapter
from gptlm.model.files import CONFIG, CONV1D_WEIGHTS
from gptlm.model.gpt import saved_generation
from gptlm.model.hub import adapter_folder, hub_config, is_hub_id, model_folder
from gptlm.model.presets import PRESETS
from gptlm.model.tensor_files import save_model_one_by_one
from gptlm.model.tokenizer import fit_to_model, load_tokenizer, save_tokenizer
from gptlm.quiet import deepspeed_without_gpu, quiet_transformers
from gptlm.ranks import is_main_process
from gptlm.recipes.common.command_results import check_folder, maker, new_folder
from gptlm.recipes.common.hub_upload import Upload, uploading_result
from gptlm.recipes.common.model import tokenizer_folder
from gptlm.recipes.common.model_card import card_of_folder
from gptlm.recipes.common.resume import check_output
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)

LORA_DIFFERENCE = 1e-6  # of what adapters add to a weight, in float64

GGUF_DIFFERENCE = {"f32": 0.0, "f16": 2**-11, "q8_0": 1 / 200}  # half a unit of float16; half of 1 / 127 and rounding


def convert(conversion: Conversion) -> None:
    """The command. Raises GptlmError as `convert_checkpoint`, and if the source does not exist."""
    start_logging(main_process=True)
    deepspeed_without_gpu()
    quiet_transformers()
    source = Path(conversion.main.source or "")
    if not source.exists() and str(source) not in PRESETS and not is_hub_id(str(source)):
        raise GptlmError(f"--from {source}: there is no such folder, file or built-in model")
    convert_checkpoint(source if source.exists() else _published(str(source)), conversion)


def _published(name: str) -> Path:
    """The folder of the model or adapters `name`. Raises GptlmError if it cannot be downloaded."""
    if is_hub_id(name) and is_adapter(hub_config(name).parent):
        return adapter_folder(name)
    return Path(model_folder(name))


def convert_once(path: Path, folder: Path, heads: int | None, vocabulary: int | None) -> None:
    """Convert the checkpoint in `path` into `folder` of the cache, for another command.

    Safe to call in several processes: one of them converts, the others wait.

    Args:
        heads: attention heads, where the checkpoint does not contain them.
        vocabulary: entries without padding; if the checkpoint has fewer rows, training adds the others.

    Raises:
        GptlmError: as `convert_checkpoint`.
    """
    start_logging(main_process=is_main_process())
    quiet_transformers()
    try:
        check_output("from", folder)
    except GptlmError as error:
        raise GptlmError(
            f"{path} has to be converted, but {folder} cannot be written to; let HF_HOME name another cache, or "
            "convert it with gptlm convert"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.once.lock"), wait=True):
        if folder.is_dir():
            return
        logger.info("%s is converted once, into %s", path, folder)
        main = ConvertArguments(source=str(path), output=str(folder))
        reading = ReadingArguments(num_attention_heads=heads, vocab_size=vocabulary)
        try:
            convert_checkpoint(path, Conversion(main, reading, WritingArguments()), may_grow=True)
        except GptlmError as error:
            hint = f" (gptlm convert --from {path} has these arguments)" if "--" in str(error) else ""
            raise GptlmError(f"{error.marked}{hint}") from error


def convert_checkpoint(path: Path, conversion: Conversion, *, may_grow: bool = False) -> None:
    """Convert the checkpoint or the adapters in `path`; on failure nothing is left.

    Args:
        may_grow: allow a vocabulary size above the stored rows.

    Raises:
        GptlmError: if it cannot be read, written or uploaded, or the result computes something else.
    """
    output = Path(conversion.main.output or "")
    check_output("output", output)
    groups = (conversion.main, conversion.reading, conversion.writing)
    arguments = {name: value for group in groups for name, value in asdict(group).items()}
    tokenizer = conversion.main.tokenizer_name_or_path
    inputs = (path, *([Path(tokenizer)] if tokenizer else []))
    by = maker("convert", arguments, inputs, overwrite=conversion.main.overwrite)
    check_folder("output", output, by)
    texts = tuple(str(place) for place in inputs)
    with uploading_result(Upload(conversion.hub, output, "output", texts, "the conversion", "Convert the model")):
        with new_folder("output", output, by) as staging:
            if lora.format_of(path):
                _convert_adapters(path, staging, conversion)
            else:
                _convert_model(path, staging, conversion, may_grow)
        logger.info("written to %s", output)


# Models -------------------------------------------------------------------------------------------------------------


@doing("converting the weights")
def _convert_model(path: Path, folder: Path, conversion: Conversion, may_grow: bool) -> None:
    reading, with_optimizer = conversion.reading, conversion.main.with_optimizer
    options = ReadOptions(
        reading.vocab_size,
        reading.num_attention_heads,
        reading.activation,
        keep_padding=with_optimizer,
        may_grow=may_grow,
    )
    with open_checkpoint(path, options, folder) as source:
        _check_arguments(source, conversion)
        tokenizer = _tokenizer(path, conversion)
        if conversion.main.to == "gguf":
            gguf.check_writable(source, tokenizer)
        target = folder
        if with_optimizer:
            target = checkpoint.staging_folder(folder, source.progress().iterations)
            target.mkdir()
        if tokenizer is not None:
            fit_to_model(tokenizer, source.shape.max_position_embeddings)
        _write(source, target, conversion, tokenizer)
        if conversion.main.verify:
            _verify(source, target, conversion)
        if with_optimizer:
            _finish_checkpoint(source, target, reading.consumed_samples)


def _check_arguments(source: Source, conversion: Conversion) -> None:
    """Raises GptlmError if arguments contradict the checkpoint, or it cannot be written in the target format."""
    heads, activation = conversion.reading.num_attention_heads, conversion.reading.activation
    if heads not in (None, source.shape.num_attention_heads):
        raise GptlmError(
            f"{named('num_attention_heads')} {heads}: the checkpoint has {source.shape.num_attention_heads}; leave "
            "it out"
        )
    if activation is not None and (activation == "gelu") != (source.activation == "gelu"):
        raise GptlmError(f"{named('activation')} {activation}: the checkpoint has {source.activation}; leave it out")
    if conversion.main.to == "megatron":
        tensor = conversion.writing.tensor_parallel_degree
        check_degrees(source.shape, tensor, conversion.writing.pipeline_parallel_degree)
        size, rows = source.shape.vocab_size, padded_rows(source.shape, tensor)
        if rows > size:
            logger.info("the embedding is padded with zeros from %d rows to %d", size, rows)
    elif conversion.main.to == "paddle":
        check_writable(source)


def _write(source: Source, folder: Path, conversion: Conversion, tokenizer: PreTrainedTokenizerBase | None) -> None:
    writing, dtype = conversion.writing, _dtype(conversion)
    total = len(list(all_names(source.shape.num_hidden_layers)))
    with tqdm(total=total, unit="tensor", disable=None) as bar:
        if conversion.main.to == "megatron":
            degrees = {"tensor": writing.tensor_parallel_degree, "pipeline": writing.pipeline_parallel_degree}
            write_megatron(source, folder, **degrees, dtype=dtype, done=bar.update)
        elif conversion.main.to == "paddle":
            form = {"fused": writing.paddle_qkv == "fused", "pdparams": writing.paddle_file == "pdparams"}
            write_paddle(source, folder, **form, dtype=dtype, done=bar.update)
        elif tokenizer is not None and conversion.main.to == "gguf":
            name = Path(conversion.main.source or "").name
            gguf.write_gguf(source, folder, tokenizer, kind=writing.gguf_type, name=name, done=bar.update)
            card_of_folder(folder, "converted")
            return  # the file contains the tokenizer
        else:
            write_huggingface(source, folder, dtype, tokenizer, bar.update)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    if conversion.main.to == "hf":
        card_of_folder(folder, "converted")


def write_huggingface(
    source: Source, folder: Path, dtype: torch.dtype | None, tokenizer: PreTrainedTokenizerBase | None, done: Any
) -> None:
    """Write a stock GPT-2 folder: safetensors, config.json and generation_config.json.

    Args:
        dtype: of the weights; None: the widest dtype of the embeddings, the first layer and the final norm.
        done: called after each weight.
    """
    if dtype is None:
        dtypes = (source.get(name).dtype for name in (WTE, WPE, *layer_names(0), *FINAL_NORM))
        dtype = reduce(torch.promote_types, dtypes)
    eos = tokenizer.eos_token_id if tokenizer else source.arguments.get("eos_token_id")
    (folder / CONFIG).write_text(json.dumps(config_of(source, dtype, eos), indent=1) + "\n", encoding="utf-8")
    if eos is not None:
        saved_generation(GenerationConfig(bos_token_id=eos, eos_token_id=eos)).save_pretrained(folder)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for weight in source.weights():
            yield weight
            done()

    names = all_names(source.shape.num_hidden_layers)
    save_model_one_by_one(folder, {name: (shape_of(name, source.shape), dtype) for name in names}, weights())


def _verify(source: Source, folder: Path, conversion: Conversion) -> None:
    """Compare what was read with what was written, one layer in memory at a time."""
    if conversion.main.to == "gguf":
        kind = conversion.writing.gguf_type
        largest = gguf.max_difference(source, folder, kind)
        if largest > GGUF_DIFFERENCE[kind]:
            raise GptlmError(f"weights in the file differ by up to {largest:.2e} of the largest in their tensor")
        logger.info("weights before and after differ by at most %.2e of the largest in their tensor", largest)
        return
    ids = fixed_batch(source.shape.vocab_size, source.shape.max_position_embeddings)
    before = logits_of(source, ids, _dtype(conversion))
    if conversion.main.to == "hf":
        check_stock(folder)
    logger.info("reading the result")
    options = ReadOptions(source.shape.vocab_size, source.shape.num_attention_heads, source.activation)
    with open_checkpoint(folder, options, log=False) as written:
        after = logits_of(written, ids)
    logger.info("logits before and after differ by at most %.2e", max_difference(before, after))


def _tokenizer(path: Path, conversion: Conversion) -> PreTrainedTokenizerBase | None:
    """The tokenizer given by the user, else the checkpoint's, else None with a warning."""
    name = conversion.main.tokenizer_name_or_path
    if name:
        return load_tokenizer(tokenizer_folder(name))
    try:
        return load_tokenizer(str(path if path.is_dir() else path.parent))
    except GptlmError as error:
        logger.warning(
            "no tokenizer is saved with the weights (%s): copy its files there, or give one with gptlm convert "
            "--tokenizer_name_or_path",
            error,
        )
        return None


def _dtype(conversion: Conversion) -> torch.dtype | None:
    return None if conversion.main.dtype == "keep" else getattr(torch, conversion.main.dtype)


def _finish_checkpoint(source: Source, folder: Path, consumed: int | None) -> None:
    """Write the optimizer states and make `folder` a checkpoint of this package, which training resumes from.

    Args:
        consumed: consumed training samples; None: from the checkpoint.
    """

    def states() -> Iterator[tuple[str, Tensor]]:
        for name, kind, value in source.optimizer_state():
            is_conv1d = layer_and_part(name)[1] in CONV1D_WEIGHTS  # training's own files have nn.Linear's (out, in)
            yield f"{name}|{kind}", (value.t() if is_conv1d else value).float().contiguous()

    progress = source.progress()
    optimizer_state.write(folder, states(), writes=True)
    state = TrainerState(global_step=progress.iterations, max_steps=progress.iterations, train_batch_size=1)
    state.save_to_json(str(folder / "trainer_state.json"))
    samples = progress.consumed_samples if consumed is None else consumed
    if samples is None:
        logger.warning(
            "the checkpoint does not contain the number of consumed samples: training starts at the first one "
            "(--consumed_samples N)"
        )
    facts = {
        "order": {},
        "settings": {},
        "global_step": progress.iterations,
        "optimizer_steps": progress.optimizer_steps,
        "loss_scale": None,
        "world_size": 0,  # no RNG states
        "weights_only": False,
        "consumed_samples": samples or 0,
        "loss_sum": 0.0,
        "steps_without_loss": progress.iterations,
    }
    final = checkpoint.commit(folder, facts)
    logger.info(
        "%s: step %d, %d updates, %d samples consumed", final.name, progress.iterations, progress.optimizer_steps,
        samples or 0,
    )  # fmt: skip


# LoRA adapters ------------------------------------------------------------------------------------------------------


def _convert_adapters(path: Path, folder: Path, conversion: Conversion) -> None:
    """Convert between PaddleNLP's and PEFT's formats, and compare what the adapters add to each weight.

    Raises:
        GptlmError: if they cannot be read, or the result adds something else.
    """
    main, heads = conversion.main, conversion.reading.num_attention_heads
    fused = main.to == "paddle" and conversion.writing.paddle_qkv == "fused"
    from_paddle = lora.format_of(path) == "paddle"
    logger.info("%s contains adapters in %s's format", path, "PaddleNLP" if from_paddle else "PEFT")
    unused = {
        "with_optimizer": main.with_optimizer,
        "tokenizer_name_or_path": main.tokenizer_name_or_path,
        "vocab_size": conversion.reading.vocab_size,
        "activation": conversion.reading.activation,
        "paddle_file": conversion.writing.paddle_file == "pdparams",
    }
    for flag in (flag for flag, value in unused.items() if value):
        raise UsageError(f"{named(flag)} is for models, but {path} contains adapters; leave it out")
    if main.to == "gguf":
        raise UsageError("a GGUF file holds a model; merge the adapters with gptlm merge-lora and convert that")
    if main.to == "megatron":
        raise UsageError(
            "Megatron-LM has no format for adapters; merge them with gptlm merge-lora and convert the result"
        )
    if fused and heads is None:
        raise UsageError(
            f"the columns of a fused qkv_proj are ordered by heads; give {named('num_attention_heads')}, which "
            "adapters do not contain"
        )
    adapters = lora.read_paddle(path, heads) if from_paddle else lora.read_peft(path)
    dtype = _dtype(conversion)
    if main.to == "paddle":
        lora.write_paddle(adapters, folder, dtype, heads if fused else None)
    else:
        lora.write_peft(adapters, folder, dtype)
    logger.info("%d adapters, rank %d, scale %g", len(adapters.modules), adapters.max_rank(), adapters.scale)
    if main.verify and dtype is not None:
        logger.info("not compared: the adapters are rounded to --dtype %s", main.dtype)
    elif main.verify:
        written = lora.read_paddle(folder, heads) if main.to == "paddle" else lora.read_peft(folder)
        largest = lora.max_difference(adapters, written)
        if not largest <= LORA_DIFFERENCE:
            raise GptlmError(
                f"the converted adapters add something else to the weights (difference {largest:.2e}); do not use "
                "the result, and please report this"
            )
        logger.info("what the adapters add to the weights differs by at most %.2e", largest)
