"""The model of a command: its sizes, and where its weights and tokenizer are. Reads small JSON files only."""

import difflib
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gptlm.config.args.training import ModelArguments, ParallelArguments
from gptlm.config.origin import DEFAULT, Origin, Source, derived
from gptlm.config.parser import Parsed
from gptlm.errors import GptlmError, UsageError, named
from gptlm.model.adapter_files import is_adapter
from gptlm.model.files import adapters_alone, has_weights, shape_of_config, tokenizer_size
from gptlm.model.hub import hub_config, is_hub_id
from gptlm.model.presets import CHINESE, GPT2_VOCABULARY, PRESETS, Preset, Shape

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pdparams")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
ROUND_VOCABULARY = 128  # PaddleNLP and Megatron pad the embedding to a multiple of this
TOKENIZER_CLASS = re.compile(r"[A-Z]\w*Tokenizer(Fast)?")  # as PaddleNLP and transformers name them
GPT2_CLASSES = ("GPTTokenizer", "GPT2Tokenizer", "GPT2TokenizerFast")  # what a GPT-2 folder holds anyway
FOUR_TIMES = derived("4 x hidden_size")


@dataclass(frozen=True)
class ModelSource:
    """What `model_name_or_path` stands for.

    Attributes:
        kind: "preset", "folder", "hub" (OWNER/NAME), "config" (a .json file) or "flags" (sizes given one by one,
            no name).
        origin: of the sizes.
        shape: its sizes, None for "flags".
        preset: the table row of a built-in name.
        weights: folder or hub id to load weights from; None if there are none.
    """

    kind: str
    origin: Source
    shape: Shape | None = None
    preset: Preset | None = None
    weights: str | None = None


def find_model(parsed: Parsed) -> ModelSource:
    """Look `model_name_or_path` up.

    Raises:
        UsageError: if it is neither a built-in name, nor a model folder, nor a config file.
        GptlmError: if its config.json cannot be read, or it holds adapters.
    """
    model = parsed[ModelArguments]
    name = model.model_name_or_path
    if name == "":
        raise UsageError(
            f"{named('model_name_or_path')} is empty; give a built-in name, a folder or a config .json file"
        )
    sizes = {size: parsed.value(size) for size in SIZES[:3]}
    missing = [size for size, value in sizes.items() if value is None]
    if name is None or (parsed.is_default("model_name_or_path") and not missing):
        if missing:
            raise UsageError(f"without a model name {', '.join(f'{named(size)}' for size in missing)} must be given")
        return ModelSource("flags", Source(Origin.CLI, "the size flags"))
    path = Path(name)
    if path.is_dir():
        config, weights = path / "config.json", str(path) if has_weights(path) else None
        return ModelSource("folder", Source(Origin.MODEL, str(config)), shape_of_config(config), None, weights)
    if path.is_file() and path.suffix in WEIGHT_SUFFIXES:
        raise UsageError(
            f"{named('model_name_or_path')} {name} is a file of weights; give the folder that holds it: {path.parent}"
        )
    if path.is_file():
        return ModelSource("config", Source(Origin.MODEL, name), shape_of_config(path))
    if is_hub_id(name):
        config = hub_config(name)
        if is_adapter(config.parent):
            raise GptlmError(adapters_alone(name))
        shape = shape_of_config(config)
        return ModelSource("hub", Source(Origin.MODEL, f"{name} of the hub"), shape, None, name)
    preset = PRESETS.get(name.removesuffix(".json"))  # PaddleNLP's run_gpt3.sh uses gpt3-13B-en.json
    if preset is None:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"{named('model_name_or_path')} {name!r} is neither a folder, nor a config .json file, nor a built-in name"
            f"{hint or ';'} a model of the hub is OWNER/NAME, built-in are "
            f"{', '.join(key for key in PRESETS if '/' not in key)}"
        )
    return ModelSource("preset", Source(Origin.MODEL, f"preset {name}"), preset.shape, preset, preset.hub_id)


def derive_shape(parsed: Parsed, source: ModelSource, length_flag: str) -> Shape:
    """Fill in the sizes that were not given; returns the final ones.

    Args:
        length_flag: the argument with the tokens of a sample.

    Raises:
        UsageError: if sizes contradict the weights, each other, or the length of a sample.
    """
    base, continuing = source.shape, parsed[ModelArguments].continue_training
    for name in SIZES:
        given, own = parsed.value(name), getattr(base, name) if base else None
        if given is None and base:
            parsed.set(name, own, source.origin)
        elif given is None:
            parsed.set(name, 4 * parsed.value("hidden_size"), FOUR_TIMES)
        elif continuing and given != own:
            raise UsageError(
                f"{named(name)} {given} contradicts the weights of {parsed[ModelArguments].model_name_or_path} "
                f"({own}); leave it out, or train from random weights with {named('continue_training')} 0"
            )
    width = parsed.value("hidden_size")
    if base and parsed.sources["intermediate_size"] == source.origin and width != base.hidden_size:
        parsed.set("intermediate_size", 4 * width, FOUR_TIMES)
    _derive_vocabulary(parsed, source)
    _check_vocabulary(parsed)
    _derive_positions(parsed, source, length_flag)
    shape = Shape(**{name: parsed.value(name) for name in (*SIZES, "vocab_size", "max_position_embeddings")})
    for name, size in asdict(shape).items():
        if size < 1:
            raise UsageError(f"{named(name)} {size}: expected at least 1")
    heads = shape.num_attention_heads
    if shape.hidden_size % heads:
        raise UsageError(
            f"{named('hidden_size')} {shape.hidden_size} is not a multiple of {named('num_attention_heads')} {heads}; "
            f"{shape.hidden_size // heads * heads or heads} would be"
        )
    return shape


def _derive_vocabulary(parsed: Parsed, source: ModelSource) -> None:
    model, base = parsed[ModelArguments], source.shape.vocab_size if source.shape else None
    given, continuing = model.vocab_size, model.continue_training
    if given is not None:
        if continuing and base is not None and given < base:
            raise UsageError(f"{named('vocab_size')} {given} is below the {base} rows of the weights; leave it out")
        return
    entries = _tokenizer_entries(parsed)
    if base is not None and (continuing or entries is None or base >= _rounded(entries)):
        parsed.put(replace(model, vocab_size=base), source.origin)
    elif entries is None:
        rule = derived("GPT-2's 50257 rounded up to 128")
        parsed.put(replace(model, vocab_size=_rounded(GPT2_VOCABULARY)), rule)
    else:
        rule = derived(f"tokenizer's {entries} rounded up to 128")
        parsed.put(replace(model, vocab_size=_rounded(entries)), rule)


def _check_vocabulary(parsed: Parsed) -> None:
    """Tensor parallelism splits the rows of the embedding."""
    degree, size = max(parsed[ParallelArguments].tensor_parallel_degree, 1), parsed[ModelArguments].vocab_size or 0
    if degree > size:
        raise UsageError(
            f"{named('vocab_size')} {size} is below {named('tensor_parallel_degree')} {degree}: each process needs a "
            "row"
        )
    if size % degree:
        parsed.note(
            f"{named('vocab_size')} {size} is split over {named('tensor_parallel_degree')} {degree} with a row more "
            f"on the first {size % degree}; a GPU multiplies multiples of 64 rows faster "
            f"({-(-size // 64 // degree) * 64 * degree})"
        )


def _derive_positions(parsed: Parsed, source: ModelSource, length_flag: str) -> None:
    model, base = parsed[ModelArguments], source.shape.max_position_embeddings if source.shape else None
    length, given = parsed.value(length_flag), model.max_position_embeddings
    if given is None:
        if base is None or (base < length and not model.continue_training):
            positions, origin = length, derived(length_flag)
        else:
            positions, origin = base, source.origin
        parsed.put(replace(model, max_position_embeddings=positions), origin)
    elif model.continue_training and given != base:
        raise UsageError(f"{named('max_position_embeddings')} {given} contradicts the weights ({base}); leave it out")
    else:
        positions = given
    if length > positions:
        remedy = (
            f"random weights with a longer table ({named('continue_training')} 0)"
            if model.continue_training
            else f"{named('max_position_embeddings')} {length}"
        )
        raise UsageError(
            f"{named(length_flag)} {length} is longer than the position table of {positions}; use "
            f"{named(length_flag)} {positions}, or {remedy}"
        )


def _tokenizer_entries(parsed: Parsed) -> int | None:
    """Ids of the tokenizer, as far as known without network."""
    model = parsed[ModelArguments]
    if parsed.is_default("tokenizer_name_or_path") and find_model(parsed).kind == "flags":
        return None
    name = (model.tokenizer_name_or_path or model.model_name_or_path or "").removesuffix(".json")
    if name in CHINESE:
        return PRESETS[name].shape.vocab_size
    if name in PRESETS:
        return GPT2_VOCABULARY
    if is_hub_id(name) and parsed.is_default("tokenizer_name_or_path"):
        return tokenizer_size(hub_config(name).parent)
    return tokenizer_size(Path(name)) if name else None


def _rounded(entries: int) -> int:
    return -(-entries // ROUND_VOCABULARY) * ROUND_VOCABULARY


def is_tokenizer_class(name: str | None) -> bool:
    """Whether `name` is a class such as GPTTokenizer and no folder."""
    return bool(name and TOKENIZER_CLASS.fullmatch(name) and not Path(name).exists())


def drop_tokenizer_class(parsed: Parsed, flag: str, model: str | None) -> None:
    """Ignore a class as the value of `flag`, with a log line unless it is GPT-2's own: the files of `model` decide."""
    name = parsed.value(flag)
    if not is_tokenizer_class(name):
        return
    parsed.set(flag, None, DEFAULT)
    if name not in GPT2_CLASSES:
        parsed.note(f"{named(flag)} {name} has no effect: the files of {model or 'the model'} determine the tokenizer")
