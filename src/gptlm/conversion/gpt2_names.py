"""Names and shapes of stock GPT-2's weights: the format between all formats.

Matrices are (in, out), as transformers' Conv1D stores them. The output dim of `c_attn` is [q | k | v], each of them
[heads, head size].
"""

import re
from collections.abc import Iterator

from gptlm.model.presets import Shape

WTE, WPE = "transformer.wte.weight", "transformer.wpe.weight"
FINAL_NORM = ("transformer.ln_f.weight", "transformer.ln_f.bias")
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
    """Every weight of a model with `layers` layers, in order. The output head shares WTE and has no name."""
    yield from (WTE, WPE)
    for layer in range(layers):
        yield from layer_names(layer)
    yield from FINAL_NORM


def layer_and_part(name: str) -> tuple[int | None, str]:
    """(3, "mlp.c_fc.bias") for a weight of layer 3, (None, name) for a weight outside the layers."""
    found = LAYER.match(name)
    return (int(found[1]), found[2]) if found else (None, name)


def shape_of(name: str, shape: Shape) -> tuple[int, ...]:
    """The shape of the weight `name` in a model of `shape`."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        WTE: (shape.vocab_size, hidden),
        WPE: (shape.max_position_embeddings, hidden),
        "attn.c_attn.weight": (hidden, 3 * hidden),
        "attn.c_attn.bias": (3 * hidden,),
        "attn.c_proj.weight": (hidden, hidden),
        "mlp.c_fc.weight": (hidden, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, hidden),
    }
    return shapes.get(layer_and_part(name)[1], (hidden,))
