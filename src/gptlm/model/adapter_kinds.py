"""Which kind of LoRA adapters a run trains, in PEFT's terms. This module does not import torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a layer
ALL_LINEAR = "all-linear"  # PEFT's word for all matrices but the output layer
SAVED = ("wte", "wpe", "ln_1", "ln_2", "ln_f", "lm_head")  # modules that may be trained whole beside the adapters
EMBEDDINGS = ("wte", "lm_head")  # of a tied pair, too, each has its own copy, as in PEFT
BIASES = ("none", "all", "lora_only")
CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|olora")
KEEPS_BASE = ("true", "gaussian", "orthogonal")
REFUSED_INITIALIZATIONS = {
    "loftq": "its adapters belong to a quantized copy of the base, which an adapter folder does not hold",
    "eva": "it needs a pass over the data before training",
    "corda": "it needs a pass over the data before training",
    "lora_ga": "it needs gradients before training",
    "mica": "it freezes one half of the adapters",
    "false": "adapters that start at random change the model before the first step",
}
# Keys of PEFT's configuration that change the adapters' result and that training here does not implement.
NOT_TRAINED = (
    "target_parameters", "layer_replication", "lora_bias", "use_qalora", "megatron_config", "arrow_config",
    "kasa_config", "velora_config", "monteclora_config", "use_bdlora",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AdapterKind:
    """What differs from plain LoRA.

    Attributes:
        dora: train each matrix's row norms, too (DoRA, arXiv:2402.09353).
        rslora: adapters are scaled by alpha / sqrt(rank) (arXiv:2312.03732), not alpha / rank.
        init: PEFT's `init_lora_weights`.
        bias: which biases of the model are trained.
        modules_to_save: names of modules of which a trained copy is saved whole.
        rank_pattern, alpha_pattern: names or regular expressions of matrices -> their rank or alpha.
    """

    dora: bool = False
    rslora: bool = False
    init: str = "true"
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @property
    def changes_base(self) -> bool:
        """Whether the initialization moves a part of the base weights into the adapters."""
        return CHANGES_BASE.fullmatch(self.init) is not None

    @property
    def is_plain(self) -> bool:
        """Whether the network computes what it does with plain LoRA, whatever ranks, scales and first values."""
        return not self.dora and self.bias == "none" and not self.modules_to_save

    def settings(self) -> dict[str, Any]:
        """The arguments of PEFT's `LoraConfig`."""
        return {
            "use_dora": self.dora,
            "use_rslora": self.rslora,
            "init_lora_weights": True if self.init == "true" else self.init,
            "bias": self.bias,
            "modules_to_save": list(self.modules_to_save) or None,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
        }

    def saved_scale(self, rank: int, alpha: float) -> dict[str, float]:
        """`r` and `lora_alpha` in the folder of adapters with this rank and alpha."""
        scale: dict[str, Any] = {"r": rank, "lora_alpha": alpha, **self.settings()}
        if self.changes_base:
            double_rank(scale)
        return {key: scale[key] for key in ("r", "lora_alpha")}

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What PEFT's configuration `saved` has otherwise, in words; with doubled ranks where the base is changed."""
        expected = self.settings()
        if self.changes_base:
            double_rank(expected)
        found = []
        for key in ("use_dora", "use_rslora", "bias", "rank_pattern", "alpha_pattern"):
            value = saved.get(key) or ("none" if key == "bias" else type(expected[key])())
            if value != expected[key]:
                found.append(f"{key} {value} there, {expected[key]} in the command")
        kept, wanted = (" ".join(sorted(names or ())) for names in (saved.get("modules_to_save"), self.modules_to_save))
        if kept != wanted:
            found.append(f"modules_to_save {kept or 'none'} there, {wanted or 'none'} in the command")
        return found


PLAIN = AdapterKind()


def double_rank(settings: dict[str, Any]) -> None:
    """Let PEFT's `settings` describe adapters of twice the rank with the same scale.

    PEFT's own conversion doubles `alpha_pattern` also with rsLoRA, where the scale is alpha / sqrt(rank).
    """
    factor = math.sqrt(2) if settings["use_rslora"] else 2
    for key, times in (("r", 2), ("lora_alpha", factor)):
        if key in settings:
            settings[key] *= times
    settings["rank_pattern"] = {name: 2 * rank for name, rank in settings["rank_pattern"].items()}
    # without a pattern of its own, a matrix of another rank keeps the common alpha: PEFT's scale is alpha / its rank
    settings["alpha_pattern"] = {name: factor * alpha for name, alpha in settings["alpha_pattern"].items()}


def wrong_initialization(text: str, rank: int) -> str | None:
    """What is wrong with a value of `init_lora_weights`, or None."""
    if text in REFUSED_INITIALIZATIONS:
        return f"{text}: {REFUSED_INITIALIZATIONS[text]}; use gaussian, orthogonal, pissa or olora"
    if text not in KEEPS_BASE and CHANGES_BASE.fullmatch(text) is None:
        return f"{text!r}: expected {', '.join(KEEPS_BASE)}, pissa, pissa_niter_N or olora"
    if text == "orthogonal" and rank % 2:
        return f"orthogonal: needs an even rank, not {rank}"
    return None


def matrices_of(layers: int) -> list[str]:
    """The names of the matrices that may have adapters."""
    return [f"transformer.h.{layer}.{matrix}" for layer in range(layers) for matrix in MATRICES]


def unknown_targets(targets: list[str], layers: int) -> list[str]:
    """Those of `targets` that name no matrix, as PEFT compares them: whole names or their ends."""
    names = matrices_of(layers)
    return [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
