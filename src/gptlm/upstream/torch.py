"""Private names of torch. Tried with 2.11.0 and 2.13.0."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.upstream.check import Needed, available, problem, require

try:
    import torch.distributed._functional_collectives as functional  # traced by torch.compile, slow elsewhere
except ImportError:
    functional = None  # type: ignore[assignment]

_COLLECTIVES = "torch.distributed._functional_collectives"
_C10D = "torch.distributed.distributed_c10d"
# torch 2.13 renamed the collectives on single tensors; the old names warn there
_RENAMED = {"all_gather_single": "all_gather_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def _new_name(name: str) -> str:
    return name if functional is None or hasattr(functional, name) else _RENAMED[name]


COLLECTIVES = (
    Needed(_COLLECTIVES, "all_reduce", ("self", "reduceOp", "group")),
    Needed(_COLLECTIVES, _new_name("all_gather_single"), ("self", "gather_dim", "group")),
    Needed(_COLLECTIVES, _new_name("reduce_scatter_single"), ("self", "reduceOp", "scatter_dim", "group")),
    Needed(_COLLECTIVES, "wait_tensor", ("tensor",)),
)
GROUP_NAMES = (Needed(_C10D, "_resolve_process_group", ("group_name",)),)
STORE = (Needed(_C10D, "_get_default_store"),)
GROUP_TIMEOUTS = (Needed(_C10D, "default_pg_timeout"), Needed(_C10D, "default_pg_nccl_timeout"))
LINEAR = (Needed("torch._C._nn", "linear"),)
# `torch.nn.attention.varlen` calls it, too, but has no dropout
ATTENTION = (Needed("torch", "ops.aten._flash_attention_forward"),)
FLOAT8 = (Needed("torch", "_scaled_mm"),)
NVLINK = (
    Needed("torch._C._distributed_c10d", "_detect_dma_connectivity"),
    Needed("torch._C._autograd", "DeviceType.CUDA"),
)
TRITON = (Needed("torch.utils._triton", "has_triton"),)
DYNAMIC = (Needed("torch._dynamo", "maybe_mark_dynamic", ("t", "index")),)
STAGE = (Needed("torch.distributed.pipelining", "PipelineStage._prepare_forward_infra"),)
LAST_LR = (Needed("torch.optim.lr_scheduler", "LRScheduler", uses=("_last_lr",)),)
ALL = (
    *COLLECTIVES,
    *GROUP_NAMES,
    *STORE,
    *GROUP_TIMEOUTS,
    *LINEAR,
    *ATTENTION,
    *FLOAT8,
    *NVLINK,
    *TRITON,
    *DYNAMIC,
    *STAGE,
    *LAST_LR,
)


def check(needed: tuple[Needed, ...] = ALL) -> str | None:
    """One line about the first of the private names that this torch lacks; None where it has all of them."""
    return problem("torch", needed)


# Collectives ----------------------------------------------------------------------------------------------------------


def check_tensor_parallel(*, sequence: bool) -> None:
    """Called before a model is split.

    Raises:
        GptlmError: if sequence parallelism, which names its group inside a compiled block, is impossible.
    """
    available("torch", COLLECTIVES, "collectives of tensor parallelism are not compiled together with the blocks")
    if sequence:
        require("torch", GROUP_NAMES, "sequence parallelism")


def traces_collectives() -> bool:
    """Whether torch.compile is tracing, and has functional collectives to put into the graph."""
    return torch.compiler.is_compiling() and functional is not None


def traced_all_reduce(x: Tensor, operation: str, group: Any) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, operation, group))


def traced_all_gather(x: Tensor, group: Any) -> Tensor:
    """(n, ...) -> (world x n, ...)."""
    return getattr(functional, _new_name("all_gather_single"))(x, 0, group)


def traced_reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """(world x n, ...) -> the sum of part `rank`, (n, ...)."""
    return getattr(functional, _new_name("reduce_scatter_single"))(x, "sum", 0, group)


def all_gather_into(output: Tensor, x: Tensor, group: Any) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, x, group=group)


def reduce_scatter_into(output: Tensor, x: Tensor, group: Any) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, x, group=group)


def group_of_name(name: str) -> Any:
    """The process group whose `group_name` is `name`: operators of torch.library take strings, not groups."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def default_store() -> dist.Store:
    """The store by which the processes found each other. Waiting there has a time limit of its own, unlike NCCL's.

    Raises:
        GptlmError: if this torch does not give it.
    """
    require("torch", STORE, "waiting for the main process")
    return dist.distributed_c10d._get_default_store()


def set_group_timeout(seconds: int) -> None:
    """The time limit of process groups that are created without one; torch's is 10 minutes with NCCL."""
    if available("torch", GROUP_TIMEOUTS, "groups of some of the processes have torch's own time limit"):
        c10d: Any = dist.distributed_c10d
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)


# Devices --------------------------------------------------------------------------------------------------------------


def has_nvlink(devices: int) -> bool:
    """Whether NVLink joins each two of the first `devices` GPUs; False where that is unknown."""
    if torch.cuda.device_count() < devices:
        return False
    if not available("torch", NVLINK, "assuming that there is no NVLink"):
        return False
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    detect: Any = _distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
    try:
        links = detect(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:  # the driver does not tell
        return False
    return all(links[one][other] for one in range(devices) for other in range(devices) if one != other)


def triton_obstacle() -> str | None:
    """Why torch.compile cannot use Triton on this GPU, or None."""
    missing = check(TRITON)
    if missing:
        return missing
    from torch.utils._triton import has_triton

    return None if has_triton() else "Triton is not installed, or does not support this GPU"


# Compilation ----------------------------------------------------------------------------------------------------------


def opens_dimensions() -> bool:
    """Whether `leave_open` works with this torch."""
    return available("torch", DYNAMIC, "blocks are compiled twice where lengths vary")


def leave_open(x: Tensor, *, dimensions: tuple[int, ...]) -> None:
    """Let compiled code that meets `x` serve all sizes of `dimensions`, where it would first serve these alone."""
    torch._dynamo.maybe_mark_dynamic(x, dimensions)


def recomputes_open_shapes() -> bool:
    """Whether torch compiles checkpoints for open shapes. 2.11 fails ("Node add_225 was invalid, but is output")."""
    return torch.__version__ >= "2.13"


# Attention ------------------------------------------------------------------------------------------------------------


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, longest: int, dropout: float, scale: float
) -> Tensor:
    """Causal attention, three (B, T, H, E) -> (B, T, H, E), in half precision on a GPU.

    Args:
        offsets: (n + 1,) int32, where sequences start, then N; with them it is three (N, H, E) -> (N, H, E), and
            attention stays inside each sequence.
        longest: T, or the length of the longest sequence, or more.
    """
    forward = torch.ops.aten._flash_attention_forward
    return forward(q, k, v, offsets, offsets, longest, longest, dropout, True, False, scale=scale)[0]


# Others ---------------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` itself, which DeepSpeed's `zero.Init` replaces in `torch.nn.functional`."""
    return torch._C._nn.linear(x, weight, bias)


def float8_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Float8 (M, K), (N, K) -> (a a_scale) (b b_scale)^T + bias, (M, N), on a GPU; `fast`: add in 14 bits."""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, bias, out_dtype=dtype, use_fast_accum=fast)


def keep_random_state(stage: Any) -> None:
    """Let a `PipelineStage` restore the RNG after shape inference, a forward pass that draws numbers before 2.13."""
    if not available("torch", STAGE, "dropout of a pipeline may differ from that of torch 2.11 and 2.13"):
        return
    devices = [] if stage.device.type == "cpu" else [stage.device]
    infer = stage._prepare_forward_infra

    def infer_without_drawing(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=devices):
            return infer(*args, **kwargs)

    stage._prepare_forward_infra = infer_without_drawing


def set_last_lr(scheduler: Any, rates: list[float]) -> None:
    """Let `scheduler.get_last_lr()` return `rates`; calling `step` instead would count one."""
    if available("torch", LAST_LR, "the learning rate in the first log line after a resume may be wrong"):
        scheduler._last_lr = rates
