"""The names and shapes of stock GPT-2's weights, which every checkpoint here is read as and written from.

Matrices are stored (in, out), as transformers' Conv1D keeps them; `c_attn` is [q | k | v], each heads x head size wide.
"""

import re
from collections.abc import Iterator

from gptlm.model.presets import Shape

WTE, WPE = "transformer.wte.weight", "transformer.wpe.weight"
LAST = ("transformer.ln_f.weight", "transformer.ln_f.bias")
PARTS = tuple(
    f"{module}.{kind}"
    for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
)
LAYER = re.compile(r"^transformer\.h\.(\d+)\.(.+)$")


def layer_names(layer: int) -> list[str]:
    """The weights of one layer, in order."""
    return [f"transformer.h.{layer}.{part}" for part in PARTS]


def all_names(layers: int) -> Iterator[str]:
    """Every weight of a model with `layers` layers, in order; the head is the embedding."""
    yield WTE
    yield WPE
    for layer in range(layers):
        yield from layer_names(layer)
    yield from LAST


def layer_and_part(name: str) -> tuple[int | None, str]:
    """(3, "mlp.c_fc.bias") of a layer's weight, (None, name) of another."""
    found = LAYER.match(name)
    return (int(found[1]), found[2]) if found else (None, name)


def shape_of(name: str, shape: Shape) -> tuple[int, ...]:
    """The shape of the weight `name` in a model of `shape`."""
    wide, inner = shape.hidden_size, shape.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        WTE: (shape.vocab_size, wide),
        WPE: (shape.max_position_embeddings, wide),
        "attn.c_attn.weight": (wide, 3 * wide),
        "attn.c_attn.bias": (3 * wide,),
        "attn.c_proj.weight": (wide, wide),
        "mlp.c_fc.weight": (wide, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, wide),
    }
    return shapes.get(layer_and_part(name)[1], (wide,))
