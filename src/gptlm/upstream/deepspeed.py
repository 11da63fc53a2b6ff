"""Private names and replaced methods of DeepSpeed. Tried with 0.19.8; DeepSpeed is imported where it is used only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from gptlm.errors import GptlmError
from gptlm.upstream import torch as upstream_torch
from gptlm.upstream.check import Needed, available, problem, require

_ZERO_2 = ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
_ZERO_3 = ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
_SCALER = ("loss_scaler", "dynamic_loss_scale", "torch_autocast_gradscaler", "cur_scale", "update_scale", "overflow")

MPU = (
    Needed("deepspeed", "initialize", ("mpu",)),
    Needed("deepspeed.utils.groups", "mpu"),
    Needed("deepspeed.runtime.engine", "DeepSpeedEngine.__init__", ("mpu",), uses=("mpu",)),
    # by these the norm counts a weight that several processes hold once
    Needed("deepspeed.runtime.utils", "is_model_parallel_parameter", uses=("model_parallel", "tensor_model_parallel")),
    Needed(*_ZERO_2, uses=("is_model_parallel_parameter", "model_parallel_group", "dp_process_group")),
    Needed(*_ZERO_3, uses=("is_model_parallel_parameter", "model_parallel_group", "dp_process_group")),
)
LOSS_SCALE = (
    Needed(*_ZERO_2, uses=_SCALER),
    Needed(*_ZERO_3, uses=_SCALER),
    Needed("deepspeed.runtime.base_optimizer", "ZeROOptimizer", uses=("scale_loss",)),
)
STEP = (Needed(_ZERO_2[0], "DeepSpeedZeroOptimizer.step"), Needed(*_ZERO_2, uses=("averaged_gradients",)))
_OFFLOADED = ("cpu_offload", "params_in_partition", "grad_position", "norm_for_param_grads", "local_overflow")
COPIES = (
    *STEP,
    Needed(*_ZERO_2, uses=("single_partition_of_fp32_groups", "get_param_id", *_OFFLOADED)),
    Needed(_ZERO_3[0], "DeepSpeedZeroOptimizer_Stage3.step"),
    Needed(_ZERO_3[0], "DeepSpeedZeroOptimizer_Stage3._finalize_offload_gradient_accumulation"),
    Needed(*_ZERO_3, uses=("grad_partitions_flat_buffer", "offload_optimizer")),
    Needed("deepspeed.runtime.zero.partition_parameters", "Init.__init__", ("data_parallel_group",)),
)
FLAT_GRAD_SYNC = (
    *STEP,
    Needed(_ZERO_2[0], "DeepSpeedZeroOptimizer.scaled_global_norm", ("norm_type",)),
    Needed(_ZERO_2[0], "DeepSpeedZeroOptimizer.step", uses=("scaled_global_norm",)),
    Needed(_ZERO_2[0], "DeepSpeedZeroOptimizer._model_parallel_all_reduce", ("tensor", "op")),
    Needed(*_ZERO_2, uses=("_grad_acc_hooks", "bit16_groups", "bit16_groups_flat", "real_dp_process_group")),
    Needed("deepspeed.utils.tensor_fragment", "tensor_fragment", ("lp_fragment",)),
)
STATE = (
    Needed(_ZERO_2[0], "DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state"),
    Needed(*_ZERO_2, uses=("_hp_optimizer_states_linked",)),
    Needed(*_ZERO_3, uses=("fp32_partitioned_groups_flat",)),
)
SHARDS = (
    Needed(_ZERO_3[0], "DeepSpeedZeroOptimizer_Stage3.get_local_fp32_param", ("param", "optim_state_key")),
    Needed(_ZERO_3[0], "DeepSpeedZeroOptimizer_Stage3.set_local_hp_param", ("value", "param", "optim_state_key")),
    Needed(*_ZERO_3, uses=("fp16_groups",)),
    Needed("deepspeed.runtime.zero.partition_parameters", "Init", uses=("ds_tensor", "ds_numel", "ds_process_group")),
    Needed("deepspeed.runtime.zero.partition_parameters", "Init", uses=("ds_secondary_tensor", "final_location")),
    Needed("deepspeed.utils.tensor_fragment", "tensor_fragment.get_hp_fragment", ("optim_state_key",)),
    Needed("deepspeed.utils.tensor_fragment", "tensor_fragment", ("lp_fragment_address",)),
    Needed("deepspeed.utils.tensor_fragment", "get_full_hp_param", uses=("_hp_mapping", "lp_fragment_address")),
)
LINEAR = (Needed("deepspeed.runtime.zero.linear", "LinearFunctionForZeroStage3.forward", ("input", "weight", "bias")),)
ALL = (*MPU, *LOSS_SCALE, *COPIES, *FLAT_GRAD_SYNC, *STATE, *SHARDS, *LINEAR)


def import_deepspeed() -> None:
    """Import it for the first time; an old version fails with the new torch.

    Raises:
        GptlmError: if it cannot be imported, with the version that is installed.
    """
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        try:
            found = f"DeepSpeed {version('deepspeed')}"
        except PackageNotFoundError:
            found = "DeepSpeed"
        raise GptlmError(
            f"{found} cannot be imported ({error}); pip install -r requirements.txt installs the version that gptlm "
            "is tested with"
        ) from error


def check(needed: tuple[Needed, ...] = ALL) -> str | None:
    """One line about the first of the private names that this DeepSpeed lacks; None where it has all of them."""
    return problem("deepspeed", needed)


# Start ----------------------------------------------------------------------------------------------------------------


def compile_stage3_linear() -> None:
    """Let stage 3 multiply with torch's own operator: DeepSpeed's adds the bias in place, and torch 2.11 compiles no
    gradient of that.
    """
    otherwise = "ZeRO stage 3 multiplies with DeepSpeed's own operator, which torch.compile may refuse"
    if available("deepspeed", LINEAR, otherwise) and available("torch", upstream_torch.LINEAR, otherwise):
        from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

        LinearFunctionForZeroStage3.forward = staticmethod(upstream_torch.linear)


def disable_shm_collectives() -> None:
    """Compiling DeepSpeed's shared-memory collectives for CPUs takes most of a minute; gloo does the same."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextmanager
def initialized_with(mpu: Any) -> Iterator[None]:
    """Inside, `deepspeed.initialize`, which accelerate calls without one, is given `mpu`; None: all are replicas.

    Raises:
        GptlmError: if this DeepSpeed cannot use it, or the engine has another one in the end: gradients would be
            averaged, and their norm taken, over the wrong processes.
    """
    import deepspeed
    from deepspeed.utils import groups

    if mpu is None:
        groups.mpu = None  # it keeps that of an earlier run
        yield
        return
    require("deepspeed", MPU, "process groups of its own (tensor, pipeline or sharding degrees)")
    original, engines = deepspeed.initialize, list[Any]()

    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs, mpu=mpu)
        engines.append(made[0])
        return made

    deepspeed.initialize = initialize
    try:
        yield
    finally:
        deepspeed.initialize = original
    if not engines or engines[0].mpu is not mpu:
        raise GptlmError(
            f"DeepSpeed {deepspeed.__version__} was not set up with gptlm's process groups, so gradients would be "
            "averaged over the wrong processes; install the versions that pyproject.toml allows"
        )


# ZeRO optimizers ------------------------------------------------------------------------------------------------------


def wrap_step(
    optimizer: Any, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Call `before` and `after` at each `optimizer.step`, which DeepSpeed's engine calls."""
    step = optimizer.step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            before()
        result = step(*args, **kwargs)
        if after:
            after()
        return result

    optimizer.step = wrapped


def use_loss_scaler(optimizer: Any, scaler: Any) -> None:
    """Let a ZeRO `optimizer` of any stage scale its losses with `scaler`, also under autocast.

    Raises:
        GptlmError: if this DeepSpeed would keep a loss scale of its own beside it.
    """
    require("deepspeed", LOSS_SCALE, "float16 (--fp16)")
    optimizer.loss_scaler = scaler
    optimizer.dynamic_loss_scale = True
    optimizer.torch_autocast_gradscaler = None


def check_copies() -> None:
    """Raises GptlmError if this DeepSpeed cannot average over groups that shard."""
    require("deepspeed", COPIES, "--sharding_parallel_degree below the number of replicas")


def average_gradients(optimizer: Any, average: Callable[[Tensor], None]) -> None:
    """Call `average`, which works in place, with the reduced gradients of this rank's shard; before a step.

    With an offloaded optimizer, DeepSpeed has taken the norms of the gradients before; they are taken again.
    """
    if is_stage3(optimizer):
        average(optimizer.grad_partitions_flat_buffer)
        _synchronize(optimizer.grad_partitions_flat_buffer)  # DeepSpeed reads it on a stream of its own
        if optimizer.offload_optimizer:
            optimizer._finalize_offload_gradient_accumulation()
    elif optimizer.cpu_offload:
        _average_offloaded(optimizer, average)
    else:
        for gradients in optimizer.averaged_gradients.values():
            if gradients:
                _average_together(gradients, average)


def _average_together(gradients: list[Tensor], average: Callable[[Tensor], None]) -> None:
    """`average` all `gradients` together."""
    if len(gradients) == 1 and gradients[0].is_contiguous():
        average(gradients[0])
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    average(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        list(gradients), [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    )


def _average_offloaded(optimizer: Any, average: Callable[[Tensor], None]) -> None:
    """The gradients of stages 1 and 2 in host memory; an overflow in one of the groups is one in all."""
    partitions = optimizer.single_partition_of_fp32_groups
    for flat, weights in zip(partitions, optimizer.params_in_partition, strict=True):
        _synchronize(weights[0] if weights else flat)  # copies to host memory have arrived
        average(flat.grad)
        for weight in weights:
            number = optimizer.get_param_id(weight)
            if number in optimizer.norm_for_param_grads:
                _, _, start, count = optimizer.grad_position[number]
                optimizer.norm_for_param_grads[number] = flat.grad.view(-1)[start : start + count].norm()
    optimizer.local_overflow = not all(flat.grad.isfinite().all() for flat in partitions)


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def has_flat_grad_sync(*, needed: bool = False) -> bool:
    """Whether gradients can be reduced after backward; else one log line says that DeepSpeed's hooks do it.

    Raises:
        GptlmError: if they cannot, and are `needed`: DeepSpeed does not accumulate a pipeline's gradients in float32.
    """
    if needed:
        require("deepspeed", FLAT_GRAD_SYNC, "a pipeline with --amp_master_grad")
    return available("deepspeed", FLAT_GRAD_SYNC, "DeepSpeed's own hooks reduce gradients during backward")


def remove_gradient_hooks(optimizer: Any, weights: list[Any]) -> None:
    """Stop stage 1 or 2 from reducing gradients during backward, and free `weights` from the graphs that it keeps.

    `lp_fragment` holds the node that accumulates a weight's gradient. That node is bound to a stream, while the
    capture of a CUDA graph uses its own.
    """
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    for weight in weights:
        mapping = getattr(weight, "_hp_mapping", None)
        if mapping is not None:
            mapping.lp_fragment = mapping.lp_fragment.detach()


def replace_norm(optimizer: Any, norm: Callable[[], Tensor]) -> None:
    """Let stage 1 or 2 clip with `norm`: of the still scaled gradients; -1 stands for NaN or infinite ones."""
    optimizer.scaled_global_norm = norm


def sum_over_model_parallel(optimizer: Any, total: Tensor) -> None:
    """All-reduce `total` in place over the processes that share a replica."""
    from torch.distributed import ReduceOp

    optimizer._model_parallel_all_reduce(tensor=total, op=ReduceOp.SUM)


def link_optimizer_state(optimizer: Any) -> None:
    """Link every parameter to its optimizer state, for `safe_get_full_optimizer_state` and its like.

    Stage 1 and 2 do so once, after the first group has been stepped; a resumed run has states before any step.
    """
    if is_stage3(optimizer):
        return
    require("deepspeed", STATE, "saving the optimizer state")
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def is_stage3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def own_weight_range(parameter: Any) -> tuple[int, Tensor] | None:
    """Stage 3: the first element of `parameter` that this rank keeps, and its elements from there on, without padding.

    None: of another stage, where each rank keeps the whole parameter.
    """
    if not hasattr(parameter, "ds_id"):
        return None
    start, stop = _range_of(parameter)
    return start, parameter.ds_tensor.detach().view(-1)[: stop - start]


def own_state_range(optimizer: Any, parameter: Any, kind: str | None) -> tuple[int, Tensor] | None:
    """The first element of `parameter` whose state this rank keeps, and its state from there on; None: it has none.

    Args:
        kind: of the state; None: the float32 copy.
    """
    require("deepspeed", SHARDS, "a sharded checkpoint")
    if is_stage3(optimizer):
        start, stop = _range_of(parameter)
        return start, optimizer.get_local_fp32_param(parameter, kind).detach().view(-1)[: stop - start]
    mapping = parameter._hp_mapping
    if mapping is None:  # the parameter lies in the flat parts of other ranks
        return None
    return mapping.lp_fragment_address.start, mapping.get_hp_fragment(kind).detach()


def fill_own_weight(parameter: Any, read: Callable[[int, int], Tensor]) -> bool:
    """Stage 3: put `read(start, stop)`, elements `start` to `stop` of `parameter`, into this rank's partition of it.

    Returns:
        False where nothing was done: the partition is not all of it that this rank keeps, or lies on a disk.
    """
    require("deepspeed", SHARDS, "resuming under stage 3")
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    partition = parameter.ds_tensor
    if parameter.ds_secondary_tensor is not None or partition.final_location == OffloadDeviceEnum.nvme:
        return False
    parameter.partition()  # whole values that were gathered before
    start, stop = _range_of(parameter)
    if start < stop:
        partition.detach().view(-1)[: stop - start].copy_(read(start, stop))
    return True


def fill_own_state(optimizer: Any, parameter: Any, kind: str | None, read: Callable[[int, int], Tensor]) -> None:
    """Put `read(start, stop)` into the state of `parameter` that this rank keeps, as `fill_own_weight` does.

    Args:
        kind: of the state; None: the float32 copy.
    """
    require("deepspeed", SHARDS, "resuming with ZeRO")
    if not is_stage3(optimizer):
        own = own_state_range(optimizer, parameter, kind)
        if own is not None:
            start, values = own
            values.copy_(read(start, start + len(values)))
        return
    start, stop = _range_of(parameter)
    values = torch.zeros(parameter.ds_tensor.ds_numel)  # with padding; DeepSpeed moves it to where the state lies
    if start < stop:
        values[: stop - start] = read(start, stop)
    optimizer.set_local_hp_param(values, parameter, kind)


def partition_count(optimizer: Any) -> int:
    """Processes that together hold the state of a ZeRO optimizer once."""
    from deepspeed import comm

    if is_stage3(optimizer):
        return int(comm.get_world_size(group=optimizer.fp16_groups[0][0].ds_process_group))
    return int(comm.get_world_size(group=optimizer.dp_process_group))


def _range_of(parameter: Any) -> tuple[int, int]:
    """The elements of a parameter of stage 3 that lie in this rank's partition."""
    from deepspeed import comm

    size, total = parameter.ds_tensor.ds_numel, parameter.ds_numel
    start = comm.get_rank(group=parameter.ds_process_group) * size
    return min(start, total), min(start + size, total)


def flat_partitions(optimizer: Any) -> list[Tensor]:
    """This rank's flat pieces of the float32 parameters, which AdamW updates."""
    if is_stage3(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    return [part for group in optimizer.optimizer.param_groups for part in group["params"]]


def sharded_gradients(optimizer: Any) -> list[Tensor]:
    """The tensors in which a ZeRO optimizer keeps this rank's gradients before its step; none of another one."""
    groups = getattr(optimizer, "averaged_gradients", {}).values()
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    return [*([] if buffer is None else [buffer]), *(part for group in groups for part in group or ())]
