"""Which model a command means: its sizes, and where its weights and tokenizer lie. Reads small JSON files only."""

import difflib
from dataclasses import asdict, dataclass
from pathlib import Path

from gptlm.config.parser import Parsed
from gptlm.errors import UsageError, named
from gptlm.model.files import has_weights, shape_of_config, tokenizer_size
from gptlm.model.presets import CHINESE, GPT2_VOCABULARY, PRESETS, Preset, Shape

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pdparams")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
ROUND_VOCABULARY = 128  # PaddleNLP and Megatron pad the embedding to a multiple of this


@dataclass(frozen=True)
class ModelSource:
    """What `model_name_or_path` stands for.

    Attributes:
        kind: "preset", "folder", "config" (a .json file) or "flags" (sizes given one by one, no name).
        origin: for `--print_config`: the words that name it.
        shape: its sizes, None for "flags".
        preset: the table row of a built-in name.
        weights: folder or hub id to load weights from; None if there are none.
    """

    kind: str
    origin: str
    shape: Shape | None = None
    preset: Preset | None = None
    weights: str | None = None


def find_model(parsed: Parsed) -> ModelSource:
    """Look `model_name_or_path` up.

    Raises:
        UsageError: if it is neither a built-in name, nor a model folder, nor a config file.
        GptlmError: if its config.json cannot be read.
    """
    name = parsed.values["model_name_or_path"]
    if name == "":
        raise UsageError(
            f"{named('model_name_or_path')} is empty; give a built-in name, a folder or a config .json file"
        )
    unnamed = parsed.sources["model_name_or_path"] == "default"
    if name is None or (unnamed and all(parsed.values[size] is not None for size in SIZES[:3])):
        missing = [size for size in SIZES[:3] if parsed.values[size] is None]
        if missing:
            raise UsageError(f"without a model name --{', --'.join(missing)} must be given")
        return ModelSource("flags", "the size flags")
    path = Path(name)
    if path.is_dir():
        weights = str(path) if has_weights(path) else None
        return ModelSource("folder", f"{path}/config.json", shape_of_config(path / "config.json"), None, weights)
    if path.is_file() and path.suffix in WEIGHT_SUFFIXES:
        raise UsageError(
            f"{named('model_name_or_path')} {name} is a file of weights; give the folder that holds it: {path.parent}"
        )
    if path.is_file():
        return ModelSource("config", name, shape_of_config(path))
    preset = PRESETS.get(name.removesuffix(".json"))  # run_gpt3.sh says gpt3-13B-en.json
    if preset is None:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"{named('model_name_or_path')} {name!r} is neither a folder, nor a config .json file, nor a built-in name"
            f"{hint or ';'} built-in are {', '.join(key for key in PRESETS if '/' not in key)}"
        )
    return ModelSource("preset", f"preset {name}", preset.shape, preset, preset.hub_id)


def resolve_shape(parsed: Parsed, source: ModelSource) -> Shape:
    """Fill the size flags that were not given; returns the final sizes.

    Raises:
        UsageError: if sizes contradict the weights, each other, or the length of a sample.
    """
    values = parsed.values
    continuing = values["continue_training"]
    base = asdict(source.shape) if source.shape else {}
    for name in SIZES:
        given = values[name]
        if given is None:
            value = base.get(name) if source.shape else 4 * values["hidden_size"]
            parsed.set(name, value, source.origin if source.shape else "derived: 4 x hidden_size")
        elif continuing and given != base.get(name):
            raise UsageError(
                f"--{named(name)} {given} contradicts the weights of {values['model_name_or_path']} "
                f"({base.get(name)}); leave it out, or train from random weights with --{named('continue_training')} 0"
            )
    if parsed.sources["intermediate_size"] == source.origin and values["hidden_size"] != base.get("hidden_size"):
        parsed.set("intermediate_size", 4 * values["hidden_size"], "derived: 4 x hidden_size")
    _resolve_vocabulary(parsed, source, base.get("vocab_size"))
    _check_vocabulary(parsed)
    _resolve_positions(parsed, source, base.get("max_position_embeddings"))
    shape = Shape(**{name: values[name] for name in (*SIZES, "vocab_size", "max_position_embeddings")})
    for name, size in asdict(shape).items():
        if size < 1:
            raise UsageError(f"--{named(name)} {size}: expected at least 1")
    if shape.hidden_size % shape.num_attention_heads:
        raise UsageError(
            f"{named('hidden_size')} {shape.hidden_size} is not a multiple of {named('num_attention_heads')} "
            f"{shape.num_attention_heads}; "
            f"{shape.hidden_size // shape.num_attention_heads * shape.num_attention_heads or shape.num_attention_heads}"
            " would be"
        )
    return shape


def _resolve_vocabulary(parsed: Parsed, source: ModelSource, base: int | None) -> None:
    given, continuing = parsed.values["vocab_size"], parsed.values["continue_training"]
    if given is not None:
        if continuing and base is not None and given < base:
            raise UsageError(f"--{named('vocab_size')} {given} is below the {base} rows of the weights; leave it out")
        return
    entries = _tokenizer_entries(parsed)
    if continuing and base is not None:
        parsed.set("vocab_size", base, source.origin)
    elif entries is None:
        value = base if base is not None else _rounded(GPT2_VOCABULARY)
        parsed.set("vocab_size", value, source.origin if base else "derived: GPT-2's 50257 rounded up to 128")
    elif base is not None and base >= _rounded(entries):
        parsed.set("vocab_size", base, source.origin)
    else:
        parsed.set("vocab_size", _rounded(entries), f"derived: tokenizer's {entries} rounded up to 128")


def _check_vocabulary(parsed: Parsed) -> None:
    """Tensor parallelism splits the rows of the embedding."""
    degree, size = max(parsed.values["tensor_parallel_degree"], 1), parsed.values["vocab_size"]
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


def _resolve_positions(parsed: Parsed, source: ModelSource, base: int | None) -> None:
    given = parsed.values["max_position_embeddings"]
    flag = "max_seq_length" if "max_seq_length" in parsed.values else "max_length"
    length = parsed.values[flag]
    if given is None:
        if base is None or (base < length and not parsed.values["continue_training"]):
            parsed.set("max_position_embeddings", length, f"derived: {flag}")
        else:
            parsed.set("max_position_embeddings", base, source.origin)
    elif parsed.values["continue_training"] and given != base:
        raise UsageError(f"--{named('max_position_embeddings')} {given} contradicts the weights ({base}); leave it out")
    positions = parsed.values["max_position_embeddings"]
    if length > positions:
        remedy = (
            f"random weights with a longer table (--{named('continue_training')} 0)"
            if parsed.values["continue_training"]
            else f"--{named('max_position_embeddings')} {length}"
        )
        raise UsageError(
            f"{named(flag)} {length} is longer than the position table of {positions}; use --{named(flag)} "
            f"{positions}, or {remedy}"
        )


def _tokenizer_entries(parsed: Parsed) -> int | None:
    """Ids of the tokenizer, as far as known without network."""
    name = parsed.values["tokenizer_name_or_path"] or parsed.values["model_name_or_path"]
    if parsed.sources["tokenizer_name_or_path"] == "default" and find_model(parsed).kind == "flags":
        return None
    name = name.removesuffix(".json") if name else name
    if name in CHINESE:
        return PRESETS[name].shape.vocab_size
    if name in PRESETS:
        return GPT2_VOCABULARY
    return tokenizer_size(Path(name)) if name else None


def _rounded(entries: int) -> int:
    return -(-entries // ROUND_VOCABULARY) * ROUND_VOCABULARY
