"""Private names of accelerate. Tried with 1.15.0."""

import sys

from gptlm.upstream.check import Needed, available, problem

UNWRAP = (
    Needed("accelerate.utils.other", "extract_model_from_parallel", uses=("is_deepspeed_available", "DeepSpeedEngine")),
    Needed("accelerate.utils.other", "is_deepspeed_available"),
)
ALL = UNWRAP


def check(needed: tuple[Needed, ...] = ALL) -> str | None:
    """One line about the first of the private names that this accelerate lacks; None where it has all of them."""
    return problem("accelerate", needed)


def unwrap_without_deepspeed() -> None:
    """Let `unwrap_model` look for DeepSpeed's engine only if DeepSpeed is imported: the import takes long."""
    if available("accelerate", UNWRAP, "training imports DeepSpeed, which it may not use"):
        from accelerate.utils import other

        other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
