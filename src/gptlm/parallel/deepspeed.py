"""What DeepSpeed needs around our code: a quiet start, a model that never lies whole on a rank, groups of replicas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlm.quiet import quiet_deepspeed
from gptlm.ranks import become_single_process, is_launched


def setup_deepspeed(*, on_cpu: bool) -> None:
    """Import DeepSpeed without its chatter; a process that no launcher started becomes a group of one."""
    if not is_launched():
        become_single_process()
    import deepspeed.ops
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    quiet_deepspeed()
    LinearFunctionForZeroStage3.forward = staticmethod(_linear)
    if on_cpu:  # compiling it takes most of a minute, and gloo does the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What stage 3 multiplies with. DeepSpeed's adds the bias in place, of which torch 2.11 compiles no gradient."""
    return torch._C._nn.linear(x, weight, bias)


def build_zero3_model(
    empty: Callable[[], Any], fill: Callable[[Any, str, nn.Module], None], config: dict[str, Any]
) -> Any:
    """A model for ZeRO stage 3, of which a rank never holds more than its share and one module.

    Args:
        empty: makes the model, its weights undefined.
        fill: (model, name, module) gives the own weights of one module their values; called on rank 0 only, once for
            each module with weights that no earlier one has.
    """
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = empty()
    filled: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = set(module.parameters(recurse=False)) - filled
        if not own:
            continue
        filled |= own
        with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            if dist.get_rank() == 0:
                fill(model, name, module)
    return model


@contextmanager
def gathered_parameters(parameters: list[nn.Parameter], *, write: bool = False) -> Iterator[None]:
    """Inside, `parameters` have their full values on every rank; with `write`, rank 0's changes reach all."""
    sharded = [p for p in parameters if hasattr(p, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None):
        yield


class ZeroLossScale:
    """Our loss scale in the form DeepSpeed's ZeRO optimizers ask for.

    They find an overflow in the global gradient norm, so all ranks agree on it. What it mends: under float16 autocast
    DeepSpeed has a `torch.amp.GradScaler` in each rank, which looks at that rank's share alone and drifts from the
    others; and it changes the scale before it unscales the gradients, which halves those of a step that doubles it.

    Args:
        scale: a `training.loss_scale.LossScale`.
    """

    dynamic = True

    def __init__(self, scale: Any):
        self.scale = scale

    @property
    def cur_scale(self) -> float:
        return self.scale.value

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scale.scale(loss)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Nothing yet: the step still unscales its gradients."""

    def attach(self, zero_optimizer: Any) -> None:
        """Let `zero_optimizer` scale its losses with it."""
        zero_optimizer.loss_scaler = self
        zero_optimizer.dynamic_loss_scale = True
        zero_optimizer.torch_autocast_gradscaler = None
        step = zero_optimizer.step

        def counted_step(*arguments: Any, **more: Any) -> Any:
            result = step(*arguments, **more)
            self.scale.count(bool(zero_optimizer.overflow))
            return result

        zero_optimizer.step = counted_step


def to_cpu_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy in host memory."""
    return tensor.detach().float().cpu().contiguous()
