"""`gptlm plan`: prints the layouts that fit a cluster, the fastest by estimate first, and the command of the best."""

import shlex

from gptlm.config.checkpoints import default_format
from gptlm.errors import GptlmError
from gptlm.parallel.dims import bubble_fraction
from gptlm.planner.args import PlanJob, cluster_of, precision_of, sizes_of, words_of
from gptlm.planner.memory import GIB, Layout, Sizes
from gptlm.planner.search import Candidate, Cluster, candidates, smallest
from gptlm.secret import without_secrets

HEAD = ("TP", "PP", "DP", "ZeRO", "micro", "accum", "recompute", "GiB", "tokens/s", "bubble")


def plan(job: PlanJob) -> Candidate:
    """Print the table; returns the best.

    Raises:
        GptlmError: if nothing fits; the message has the parallel layout that needs least memory.
    """
    sizes, machine = sizes_of(job.run), cluster_of(job.machine)
    batch, precision = job.global_batch, precision_of(job.run)
    found = candidates(sizes, machine, batch, precision, job.refusal)
    _check(job, found, sizes, machine, precision)
    print(
        f"{sizes.parameters / 1e9:.2f}B parameters, {sizes.length} tokens a sample, global batch {batch}, {precision}, "
        f"{machine.cards} cards of {machine.memory / GIB:g} GiB; {len(found)} layouts fit"
    )
    rows = [HEAD, *(_row(candidate, sizes) for candidate in found[: job.machine.rows])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("memory is within about 15 % of what was measured; tokens/s are a rough model, good for an order")
    form, why = default_format(job.run.shape, machine.cards)
    if job.training.checkpoint_format is not None:
        form, why = job.training.checkpoint_format, "--checkpoint_format"
    print(f"checkpoints are written in the format {form} ({why})")
    print(command(job, found[0].layout))
    return found[0]


def command(job: PlanJob, layout: Layout) -> str:
    """The command line of `layout`."""
    nodes = -(-job.machine.num_gpus // job.machine.gpus_per_node)
    each = job.machine.num_gpus // nodes
    start = f"torchrun --nproc_per_node {each}" + (f" --nnodes {nodes} --rdzv_backend c10d ..." if nodes > 1 else "")
    words = [*without_secrets(job.typed, "none")[0], *words_of(layout, job.parallel, job.training)]
    if job.parallel.auto_parallel:  # of the file: this command has its layout
        words += ["--auto_parallel", "0"]
    return f"{start} -m gptlm.cli pretrain {shlex.join(words)}"


def _row(candidate: Candidate, sizes: Sizes) -> tuple[str, ...]:
    layout = candidate.layout
    stages, chunks = layout.pipeline, layout.chunks
    bubble = bubble_fraction(stages, chunks, layout.accumulation)
    zero = f"{layout.stage}/{layout.shards}" if layout.stage and layout.shards < layout.data else layout.stage
    numbers = (layout.tensor, f"{stages}x{chunks}" if chunks > 1 else stages, layout.data, zero, layout.micro)
    return (
        *map(str, numbers),
        str(layout.accumulation),
        layout.recompute or "-",
        f"{candidate.memory.total / GIB:.1f}",
        f"{candidate.tokens_per_second(sizes):,.0f}",
        f"{bubble:.0%}" if stages > 1 else "-",
    )


def _check(job: PlanJob, found: list[Candidate], sizes: Sizes, machine: Cluster, precision: str) -> None:
    if found:
        return
    batch = job.global_batch
    least = smallest(sizes, machine, batch, precision, job.refusal)
    refused = smallest(sizes, machine, batch, precision)
    if least is None and refused is not None:
        words = " ".join(words_of(refused.layout, job.parallel, job.training))
        raise GptlmError(
            f"the other arguments allow no layout of {machine.cards} cards with a global batch of {batch}; with "
            f"{words}: {job.refusal(refused.layout)}"
        )
    if least is None:
        raise GptlmError(
            f"no layout divides: {machine.cards} cards, global batch {batch}, {sizes.heads} heads, {sizes.layers} "
            "layers; make the global batch a multiple of the cards"
        )
    words = " ".join(words_of(least.layout, job.parallel, job.training))
    half = ", half precision (--bf16 --fp16_opt_level O2)," if precision != "O2" else ""
    raise GptlmError(
        f"nothing fits into {machine.memory / GIB:g} GiB a card: the smallest layout ({words}) needs "
        f"{least.memory.total / GIB:.2g} GiB; use more cards{half} or --sharding 'stage3 offload'"
    )
