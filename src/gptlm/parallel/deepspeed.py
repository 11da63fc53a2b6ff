"""DeepSpeed around our code: set-up, models of ZeRO stage 3, and our loss scale in its optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gptlm.parallel.process_groups import Mesh
from gptlm.quiet import quiet_deepspeed
from gptlm.ranks import become_single_process, is_launched
from gptlm.upstream.deepspeed import (
    compile_stage3_linear,
    disable_shm_collectives,
    import_deepspeed,
    use_loss_scaler,
    wrap_step,
)


def setup_deepspeed(*, on_cpu: bool) -> None:
    """Import DeepSpeed without its log lines; a process that no launcher started becomes a group of one."""
    if not is_launched():
        become_single_process()
    import_deepspeed()  # sets the log level, so it comes first
    quiet_deepspeed()
    compile_stage3_linear()
    if on_cpu:
        disable_shm_collectives()


def build_zero3_model(
    empty: Callable[[], Any],
    fill: Callable[[Any, str, nn.Module], None],
    config: dict[str, Any],
    groups: Mesh | None = None,
) -> Any:
    """A model for ZeRO stage 3. A rank never holds more than its shard and one whole module.

    Args:
        empty: makes the model with undefined weights.
        fill: (model, name, module) initializes the weights of one module. It is called on the first rank of each group
            that shards, once for each module that has weights of its own; a tied weight belongs to the first module
            that has it.
        groups: whose ZeRO group shards; None: all ranks do.
    """
    import deepspeed

    is_first = (dist.get_rank() if groups is None else groups.get_data_parallel_rank()) == 0
    with deepspeed.zero.Init(
        config_dict_or_path=config, data_parallel_group=None if groups is None else groups.zero_group
    ):
        model = empty()
    filled: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = set(module.parameters(recurse=False)) - filled
        if not own:
            continue
        filled |= own
        with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            if is_first:
                fill(model, name, module)
    return model


@contextmanager
def gathered_parameters(parameters: list[nn.Parameter], *, write: bool = False) -> Iterator[None]:
    """Inside, `parameters` have their full values on every rank; with `write`, the changes of the first rank of each
    group that shards are broadcast in it.
    """
    sharded = [p for p in parameters if hasattr(p, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None):
        yield


class ZeroLossScale:
    """Our loss scale with the interface of DeepSpeed's loss scalers.

    ZeRO finds an overflow in the global gradient norm, so all ranks agree on it. Under float16 autocast, DeepSpeed's
    own way has two faults that this replaces. Each rank has a `torch.amp.GradScaler` that looks at the rank's own
    shard, so the scales diverge. And the scale changes before the gradients are unscaled, which halves the gradients
    of a step that doubles it.

    Args:
        scale: a `training.precision.loss_scale.LossScale`.
    """

    dynamic = True

    def __init__(self, scale: Any):
        self.scale = scale

    @property
    def cur_scale(self) -> float:
        return self.scale.value

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.scale.scale(loss)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Nothing: DeepSpeed calls this before it unscales the gradients of the step. `attach` updates after it."""

    def attach(self, zero_optimizer: Any) -> None:
        """Let `zero_optimizer` scale its losses with it.

        Raises:
            GptlmError: if this version of DeepSpeed cannot.
        """
        use_loss_scaler(zero_optimizer, self)
        wrap_step(zero_optimizer, after=lambda: self.scale.count(bool(zero_optimizer.overflow)))


def to_cpu_float32(tensor: Tensor) -> Tensor:
    """A float32 copy in host memory."""
    return tensor.detach().float().cpu().contiguous()
