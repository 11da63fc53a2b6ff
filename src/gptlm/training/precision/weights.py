"""How weights are kept, and what happens to their gradients: accumulate, flatten, unscale, clip, update."""

from typing import Any

import torch
from torch import Tensor

from gptlm.errors import GptlmError
from gptlm.training.precision.loss_scale import LossScale
from gptlm.training.precision.master_adamw import MasterWeightAdamW, clip
from gptlm.upstream.deepspeed import flat_partitions, sharded_gradients


class Float32Weights:
    """float32 weights. Computation is float32, or autocast (O1), which accelerate applies to the model's forward.

    Args:
        loss_scale: of float16; None in other precisions.

    Attributes:
        float32_sums: gradients of half-precision weights are accumulated in float32.
        grad_norm: global norm of the last step's gradients before clipping, a tensor on the device or a float.
        flat_target: see `MasterWeights`.
    """

    float32_sums = False
    flat_target: Any = None

    def __init__(self, loss_scale: LossScale | None = None):
        self.loss_scale = loss_scale
        self.grad_norm: Tensor | float | None = None

    def start(self, model: Any, optimizer: Any) -> None:
        """Called when training starts, with the wrapped model and the optimizer."""
        self.model, self.optimizer = model, optimizer

    @property
    def scale_value(self) -> float:
        """The factor on the loss."""
        return self.loss_scale.value if self.loss_scale is not None else 1.0

    @property
    def gradients(self) -> list[Tensor]:
        """The tensors that hold gradients before an update."""
        return [weight.grad for weight in self.model.parameters() if weight.grad is not None]

    @property
    def masters(self) -> list[Tensor]:
        """The tensors that hold float32 copies of the weights."""
        return []

    @property
    def moments(self) -> list[Tensor]:
        """The tensors that the optimizer keeps of each weight."""
        return _tensors(self.optimizer.state)

    def scale(self, loss: Tensor) -> Tensor:
        return self.loss_scale.scale(loss) if self.loss_scale is not None else loss

    def accumulate_gradients(self) -> None:
        """After each micro-batch."""

    def flatten_gradients(self) -> None:
        """After the last micro-batch."""

    def unscale_gradients(self) -> None:
        if self.loss_scale is not None:
            self.loss_scale.unscale_(self.optimizer)

    def clip_gradients(self, max_norm: float) -> None:
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def update(self) -> bool:
        """Update the weights; False where an overflow skipped it."""
        if self.loss_scale is None:
            self.optimizer.step()
            return True
        is_applied = self.loss_scale.step(self.optimizer)
        self.loss_scale.update()
        return is_applied


class MasterWeights(Float32Weights):
    """Half-precision weights (O2) with float32 masters that `MasterWeightAdamW` updates.

    Attributes:
        flat_target: this object; the step runner writes flattened gradients to its `flat`.
        flat: gradients that the step runner has flattened already.
    """

    optimizer: MasterWeightAdamW

    def __init__(self, loss_scale: LossScale | None = None, *, float32_sums: bool = False):
        super().__init__(loss_scale)
        self.float32_sums = float32_sums
        self.flat_target, self.flat = self, None

    def make_optimizer(self, kind: Any, groups: list[dict[str, Any]], settings: dict[str, Any]) -> MasterWeightAdamW:
        """The optimizer for `kind`, the stock class of the same update.

        Raises:
            GptlmError: for any class but AdamW.
        """
        if kind is not torch.optim.AdamW:
            raise GptlmError(
                f"half-precision weights with float32 masters are trained with AdamW, not {kind.__name__}; give "
                "optim='adamw_torch', or a float32 model and bf16=True or fp16=True"
            )
        return MasterWeightAdamW(groups, **settings)

    @property
    def parameters(self) -> list[Tensor]:
        return self.optimizer.weights

    @property
    def gradients(self) -> list[Tensor]:
        return [*super().gradients, self.optimizer.gradient]

    @property
    def masters(self) -> list[Tensor]:
        return self.optimizer.masters

    @property
    def moments(self) -> list[Tensor]:
        return self.optimizer.moments

    @property
    def views(self) -> list[Tensor]:
        return self.optimizer.gradient_views

    def flatten(self, into: Tensor | None = None) -> Tensor:
        return self.optimizer.flat_gradients(into)

    def accumulate_gradients(self) -> None:
        if self.float32_sums:
            self.optimizer.add_gradients()

    def flatten_gradients(self) -> None:
        self.optimizer.take_gradients(self.flat)
        self.flat = None

    def clip_gradients(self, max_norm: float) -> None:
        self.grad_norm = clip(self.optimizer, max_norm)


class DeepSpeedWeights(Float32Weights):
    """Weights whose masters and moments DeepSpeed shards: its engine unscales, clips and updates in one call."""

    @property
    def gradients(self) -> list[Tensor]:
        return [*super().gradients, *sharded_gradients(self.model.optimizer)]

    @property
    def masters(self) -> list[Tensor]:
        return flat_partitions(self.model.optimizer) if self.model.zero_optimization() else []

    @property
    def moments(self) -> list[Tensor]:
        return _tensors(getattr(self.model.optimizer, "optimizer", self.model.optimizer).state)

    def unscale_gradients(self) -> None:
        """`update` does it."""

    def clip_gradients(self, max_norm: float) -> None:
        """`update` does it; the DeepSpeed configuration holds the norm."""

    def update(self) -> bool:
        self.model.step()
        norm = self.model.get_global_grad_norm()
        self.grad_norm = norm.item() if isinstance(norm, Tensor) else norm
        return not getattr(self.model.optimizer, "overflow", False)


def _tensors(state: Any) -> list[Tensor]:
    """Those of an optimizer's `state`."""
    return [value for kept in state.values() for value in kept.values() if isinstance(value, Tensor)]
