"""A checkpoint of another library into another form: read, write aside, compare logits, give it its name."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

from gptlm.config.args.convert import Conversion, ConvertArguments, ReadingArguments, WritingArguments
from gptlm.conversion.gpt2_names import LAST, WPE, WTE, all_names, layer_names
from gptlm.conversion.huggingface import config_of
from gptlm.conversion.lora import kind_of
from gptlm.conversion.megatron.write import check_degrees, padded_rows, write_megatron
from gptlm.conversion.open import opened
from gptlm.conversion.paddle.write import check_writable, write_paddle
from gptlm.conversion.source import Asked, Source
from gptlm.conversion.verify import difference, fixed_batch, logits_of, logits_of_folder
from gptlm.disk import is_write_error, sync_folder, sync_tree, write_failure
from gptlm.errors import GptlmError, UsageError, doing
from gptlm.model.gpt import saved_generation
from gptlm.model.hub import model_folder
from gptlm.model.presets import PRESETS
from gptlm.model.safetensors_io import save_model_weights
from gptlm.model.tokenizer import fit_to_model, load_tokenizer
from gptlm.quiet import deepspeed_without_gpu, quiet_transformers
from gptlm.ranks import is_main_process
from gptlm.recipes.common.model import tokenizer_folder
from gptlm.recipes.common.resume import check_output
from gptlm.recipes.convert.lora import convert_adapters
from gptlm.recipes.convert.optimizer import finish_checkpoint, start_checkpoint
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)


def convert(conversion: Conversion) -> None:
    """The command.

    Raises:
        GptlmError: as `convert_checkpoint` does, and if the source is not there.
    """
    start_logging(main_process=True)
    deepspeed_without_gpu()
    quiet_transformers()
    named = Path(conversion.main.source or "")
    if not named.exists() and str(named) not in PRESETS:
        raise GptlmError(f"--from {named}: there is no such folder or file, and no built-in model of that name")
    path = named if named.exists() else Path(model_folder(str(named)))
    convert_checkpoint(path, conversion)


def convert_once(path: Path, folder: Path, heads: int | None, vocabulary: int | None) -> None:
    """Convert the checkpoint in `path` into `folder` of the cache, by one of the processes that want it.

    Args:
        heads: of its attention, where it does not say them.
        vocabulary: its true entries; where it has fewer rows, training adds the others.

    Raises:
        GptlmError: as `convert_checkpoint`.
    """
    start_logging(main_process=is_main_process())
    quiet_transformers()
    try:
        check_output("from", folder)
    except GptlmError as error:
        raise GptlmError(
            f"{path} has to be converted, and the folder for that cannot be written to: {folder}; let HF_HOME name "
            "another, or convert it with gptlm convert"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.once.lock")):
        if folder.is_dir():
            return
        logger.info("%s is converted once, into %s", path, folder)
        main = ConvertArguments(source=str(path), output=str(folder))
        try:
            reading = ReadingArguments(num_attention_heads=heads, vocab_size=vocabulary)
            convert_checkpoint(path, Conversion(main, reading, WritingArguments()), may_grow=True)
        except GptlmError as error:
            hint = f" (gptlm convert --from {path} has such flags)" if "--" in str(error) else ""
            raise GptlmError(f"{error}{hint}") from error


def convert_checkpoint(path: Path, conversion: Conversion, *, may_grow: bool = False) -> None:
    """Write the checkpoint in `path` as `conversion` says; nothing is left of it if that fails.

    Args:
        may_grow: more entries of the vocabulary may be asked for than there are, which changes nothing yet.

    Raises:
        GptlmError: if it cannot be read or written, or the result computes other logits.
    """
    output = Path(conversion.main.output or "")
    check_output("output", output)
    with _written(output) as staging:
        if kind_of(path):
            convert_adapters(path, staging, conversion)
        else:
            _convert(path, staging, conversion, may_grow)
    logger.info("written to %s", output)


@contextmanager
def _written(output: Path) -> Iterator[Path]:
    """A folder that becomes `output` when everything is in it; no other conversion writes there meanwhile.

    Raises:
        GptlmError: if another does, `output` is not empty, or cannot be written.
    """
    staging = output.with_name(f".{output.name}.incomplete")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(output.with_name(f".{output.name}.lock"), timeout=0) as lock:
            try:
                if output.is_dir() and any(output.iterdir()):
                    raise UsageError(f"--output {output} is not empty; give a new folder")
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
                yield staging
                if output.is_dir():
                    output.rmdir()
                sync_tree(staging)  # a conversion is looked for by its name alone
                staging.rename(output)
                sync_folder(output.parent)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise GptlmError(
            f"another conversion is writing into {output}; wait for its end, or give another --output"
        ) from None
    except (OSError, SafetensorError, RuntimeError) as error:
        if not is_write_error(error):
            raise
        raise GptlmError(f"cannot write {output}: {write_failure(error, output)}; nothing of it is left") from error


@doing("converting the weights")
def _convert(path: Path, folder: Path, conversion: Conversion, may_grow: bool) -> None:
    reading = conversion.reading
    with_states = conversion.main.with_optimizer
    asked = Asked(
        reading.vocab_size,
        reading.num_attention_heads,
        reading.activation,
        keep_padding=with_states,
        may_grow=may_grow,
    )
    with opened(path, asked, folder) as source:
        _check(source, conversion, asked)
        place = start_checkpoint(source, folder) if with_states else folder
        tokenizer = _tokenizer(path, conversion)
        if tokenizer is not None:
            fit_to_model(tokenizer, source.shape.max_position_embeddings)
        _write(source, place, conversion, tokenizer)
        if conversion.main.verify:
            _verify(source, place, conversion)
        if with_states:
            finish_checkpoint(source, place, reading.consumed_samples)


def _check(source: Source, conversion: Conversion, asked: Asked) -> None:
    heads, activation = source.shape.num_attention_heads, source.activation
    if asked.num_attention_heads not in (None, heads):
        raise GptlmError(f"--num_attention_heads {asked.num_attention_heads}: the checkpoint has {heads}; leave it out")
    if asked.activation is not None and (asked.activation == "gelu") != (activation == "gelu"):
        raise GptlmError(f"--activation {asked.activation}: the checkpoint says {activation}; leave it out")
    degrees = conversion.writing
    if conversion.main.to == "megatron":
        check_degrees(source.shape, degrees.tensor_parallel_degree, degrees.pipeline_parallel_degree)
        rows = padded_rows(source.shape, degrees.tensor_parallel_degree)
        if rows > source.shape.vocab_size:
            logger.info("the embedding is padded with zeros from %d rows to %d", source.shape.vocab_size, rows)
    if conversion.main.to == "paddle":
        check_writable(source)


def _write(source: Source, folder: Path, conversion: Conversion, tokenizer: PreTrainedTokenizerBase | None) -> None:
    main, how = conversion.main, conversion.writing
    dtype = _dtype(conversion)
    total = len(list(all_names(source.shape.num_hidden_layers)))
    with tqdm(total=total, unit="tensor", disable=None) as bar:
        if main.to == "megatron":
            degrees = {"tensor": how.tensor_parallel_degree, "pipeline": how.pipeline_parallel_degree}
            write_megatron(source, folder, **degrees, dtype=dtype, done=bar.update)
        elif main.to == "paddle":
            form = {"fused": how.paddle_qkv == "fused", "pdparams": how.paddle_file == "pdparams"}
            write_paddle(source, folder, **form, dtype=dtype, done=bar.update)
        else:
            write_folder(source, folder, dtype, tokenizer, bar.update)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_folder(
    source: Source, folder: Path, dtype: torch.dtype | None, tokenizer: PreTrainedTokenizerBase | None, done: Any
) -> None:
    """A stock GPT-2 folder: sharded safetensors and config.json."""
    kept = dtype or _widest(source)
    end = tokenizer.eos_token_id if tokenizer else source.arguments.get("eos_token_id")
    (folder / "config.json").write_text(json.dumps(config_of(source, kept, end), indent=1) + "\n", encoding="utf-8")
    if end is not None:
        saved_generation(GenerationConfig(bos_token_id=end, eos_token_id=end)).save_pretrained(folder)

    def weights() -> Any:
        for name, value in source.weights():
            yield name, value.to(kept)
            done()

    save_model_weights(folder, weights())


def _widest(source: Source) -> torch.dtype:
    """The precision that loses nothing of the embeddings, the first layer and the last norm."""
    return reduce(torch.promote_types, (source.get(name).dtype for name in (WTE, WPE, *layer_names(0), *LAST)))


def _verify(source: Source, folder: Path, conversion: Conversion) -> None:
    """Compare what was read with what was written: a stock folder as transformers loads it, others as we read them."""
    ids = fixed_batch(source.shape.vocab_size, source.shape.max_position_embeddings)
    before = logits_of(source, ids, _dtype(conversion))
    if conversion.main.to == "hf":
        after = logits_of_folder(folder, ids)
    else:
        logger.info("reading the result back")
        asked = Asked(source.shape.vocab_size, source.shape.num_attention_heads, source.activation)
        with opened(folder, asked, speaks=False) as written:
            after = logits_of(written, ids)
    logger.info("logits before and after differ by at most %.2e", difference(before, after))


def _tokenizer(path: Path, conversion: Conversion) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was named, else the checkpoint's own, else None, which is said."""
    named = conversion.main.tokenizer_name_or_path
    if named:
        return load_tokenizer(tokenizer_folder(named))
    folder = path if path.is_dir() else path.parent
    try:
        return load_tokenizer(str(folder))
    except GptlmError as error:
        logger.warning(
            "no tokenizer is put beside the weights (%s): put its files there, or name one with gptlm convert "
            "--tokenizer_name_or_path",
            error,
        )
        return None


def _dtype(conversion: Conversion) -> torch.dtype | None:
    name = conversion.main.dtype
    return None if name == "keep" else getattr(torch, name)
