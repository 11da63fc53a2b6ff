"""The data of a pretraining run: how many samples, checked datasets, what fixes their order."""

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase

from gptlm.config.run import TEST_FACTOR, PretrainRun
from gptlm.data.blend import BlendedDataset
from gptlm.data.blocks import BlocksWithDocuments, PretrainingDataset, UnreadBlocks, build_split
from gptlm.data.cache import IndexCache
from gptlm.data.collate import IGNORED, DocumentCollator, collate_blocks
from gptlm.data.corpora import (
    SPLITS,
    Corpus,
    check_ids,
    default_cache_folders,
    missing_eos,
    open_corpora,
    refuse_short,
)
from gptlm.data.epochs import Filled
from gptlm.data.indexed import content_fingerprint
from gptlm.errors import GptlmError, doing
from gptlm.parallel.process_groups import Mesh
from gptlm.ranks import is_main_process, local_rank
from gptlm.recipes.common.main_process_first import main_process_first, told_by_main
from gptlm.recipes.common.peers import Peers
from gptlm.recipes.common.resume import SAMPLED

logger = logging.getLogger(__name__)

EPOCHS_WARNING = 4
SKIP_FLAGS = {"train": "--do_train 0", "valid": "--eval_iters 0", "test": "--do_predict 0"}
MAX_SAMPLES = 1 << 36  # 68 billion; their index would take 800 GB

Datasets = dict[str, PretrainingDataset | None]


def open_together(run: PretrainRun, peers: Peers | None) -> list[Corpus]:
    """The corpora of `run`. Rank 0 reads large indices whole, the others find in the cache what it has found.

    Raises:
        GptlmError: as `open_corpora`, and on a rank that waited longer than `--ddp_timeout`.
    """
    corpora = []

    def read() -> None:
        corpora.extend(open_run_corpora(run))

    told_by_main(peers, "the token files", read)
    return corpora or open_run_corpora(run)


def open_run_corpora(run: PretrainRun) -> list[Corpus]:
    return open_corpora(run.data.input_dir or "", run.data.split, run.data.data_order, data_cache(run))


def steps_per_epoch(run: PretrainRun, corpora: list[Corpus]) -> int:
    """Optimizer steps in one pass over the training split, at least 1."""
    tokens = sum(corpus.token_count("train") for corpus in corpora if corpus.weight > 0)
    return max(1, (tokens - 1) // run.data.max_seq_length // run.batch.total)


def sample_counts(run: PretrainRun, corpora: list[Corpus]) -> dict[str, int]:
    """Samples asked of each split (PaddleNLP's numbers): they fix the number of epochs, and so the order.

    An evaluation that would read more than the whole split is asked for one pass, whose samples are all different.
    """
    training = run.training
    batch = training.per_device_eval_batch_size * run.dims.data
    test = run.data.eval_iters * TEST_FACTOR if run.data.test_iters is None else run.data.test_iters
    interval = training.eval_steps if training.evaluation_strategy == "steps" else None
    evaluations = int(training.max_steps // interval) + 1 if interval else 1
    counts = {
        "train": run.batch.total * training.max_steps,
        "valid": batch * run.data.eval_iters * evaluations,
        "test": batch * test,
    }
    for split in ("valid", "test"):
        if 0 < (whole := _whole_split(run, corpora, split)) < _wanted(run, split):
            counts[split] = whole
    return counts


def evaluated_samples(run: PretrainRun, corpora: list[Corpus], split: str) -> int:
    """Samples that one evaluation reads."""
    return min(_wanted(run, split), _whole_split(run, corpora, split) or MAX_SAMPLES)


def _wanted(run: PretrainRun, split: str) -> int:
    """Samples that eval_iters or test_iters ask for."""
    batches = run.eval_batches if split == "valid" else run.test_batches
    return batches * run.training.per_device_eval_batch_size * run.dims.data


def _whole_split(run: PretrainRun, corpora: list[Corpus], split: str) -> int:
    """Samples in which everything of a split is read at least once; 0 if there are none.

    They are one pass over a single corpus. A blend reads its corpora by weight, so some are read again before the
    last one has been read to its end.
    """
    length = run.data.max_seq_length
    present = [corpus for corpus in corpora if corpus.weight > 0 and corpus.token_count(split) > length]
    total = sum(corpus.weight for corpus in present)
    sizes = [(corpus.token_count(split) - 1) // length / (corpus.weight / total) for corpus in present]
    return math.ceil(max(sizes, default=0))


def log_evaluations(run: PretrainRun, corpora: list[Corpus], datasets: Datasets) -> None:
    """One line per evaluated split: how much of it an evaluation reads, and that nothing is repeated."""
    for split, flag in (("valid", "eval_iters"), ("test", "test_iters")):
        wanted, whole = _wanted(run, split), _whole_split(run, corpora, split)
        if datasets[split] is None or not whole:
            continue
        count = wanted / whole
        passes = f"{wanted:,} samples, {count:{',.0f' if count >= 100 else '.3g'}} passes over the {split} split"
        if wanted <= whole:
            outcome = "are read by an evaluation"
        elif isinstance(datasets[split], BlendedDataset):
            outcome = (
                f"would be read: the evaluation stops after {whole:,} samples, when every corpus has been read once; "
                "some samples repeat because of the weights"
            )
        else:
            outcome = f"would be read: each of its {whole:,} samples is evaluated once, the loss is that of the split"
        logger.info("%s: %s %s", flag, passes, outcome)


def samples_per_epoch(dataset: PretrainingDataset | None) -> float | None:
    """Samples of one pass over the training split, each corpus once; the index may hold several passes."""
    if dataset is None:
        return None
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    return sum(len(part) / part.order.epochs for part in parts)


@doing("building the sample index")
def build_datasets(run: PretrainRun, corpora: list[Corpus]) -> Datasets:
    """Checked datasets; one process per node builds the index (one in all with share_folder), or compares it
    with its checksums; the others wait.

    Raises:
        GptlmError: if ids do not fit the model, a split is too short, one that is needed is empty, or building takes
            longer than `--ddp_timeout`.
    """
    with main_process_first("the sample index", run.training.ddp_timeout, per_node=not run.data.share_folder):
        return load_or_build_datasets(run, corpora, verify=local_rank() == 0)


def load_or_build_datasets(run: PretrainRun, corpora: list[Corpus], *, verify: bool = False) -> Datasets:
    """The datasets of the splits a run needs, their index taken from the cache or built and kept there.

    Args:
        verify: compare all of an index in the cache with its checksums.

    Raises:
        GptlmError: as `build_datasets`.
    """
    cache = data_cache(run, verify=verify)
    _refuse_empty(run, corpora)
    samples = sample_counts(run, corpora)
    _refuse_too_many(samples)
    needed = [split for split in SPLITS if _required(run, split)]
    for split in needed:
        refuse_short(corpora, split, run.data.max_seq_length)
    if run.training.do_eval and "test" not in needed and _test_is_long_enough(run, corpora):
        needed.append("test")
    check_ids(corpora, run.shape.vocab_size, cache)
    datasets = {
        split: build_split(
            corpora,
            split,
            num_samples=samples[split],
            seq_length=run.data.max_seq_length,
            seed=run.order_seed,
            cache=cache,
            data_order=run.data.data_order,
        )
        for split in needed
    }
    return {split: datasets.get(split) for split in SPLITS}


def data_cache(run: PretrainRun, *, verify: bool = False) -> IndexCache:
    """Where the sample index of `run` is kept."""
    output_dir = run.training.output_dir or ""
    folders = default_cache_folders(run.data.input_dir or "", run.data.data_cache, output_dir)
    return IndexCache(folders, verify=verify)


def evaluation_samples(
    run: PretrainRun, mesh: Mesh | None, dataset: PretrainingDataset | None, count: int
) -> Filled | None:
    """The first `count` samples in batches of all processes: each evaluation reads the same ones."""
    if dataset is None:
        return None
    size = run.training.per_device_eval_batch_size * run.dims.data
    samples: Any = loader_samples(run, mesh, dataset)
    filler: Any = np.full(run.data.max_seq_length + 1, IGNORED)
    if _needs_documents(run):
        filler = filler, [len(filler)]
    return Filled(Subset(samples, range(min(count, len(dataset)))), filler, size)


def loader_samples(
    run: PretrainRun, mesh: Mesh | None, dataset: PretrainingDataset | None
) -> PretrainingDataset | UnreadBlocks | BlocksWithDocuments | None:
    """What the loader reads: blocks, with the lengths of their documents where the batch needs them."""
    if dataset is None:
        return None
    blocks = dataset if mesh is None or mesh.needs_tokens else UnreadBlocks(dataset)
    return BlocksWithDocuments(blocks) if _needs_documents(run) else blocks


def collator(run: PretrainRun) -> Callable[[list], dict[str, Any]]:
    """What makes a batch of `loader_samples` samples."""
    return (
        DocumentCollator(run.data.document_masking, run.data.eod_mask_loss) if _needs_documents(run) else collate_blocks
    )


def _needs_documents(run: PretrainRun) -> bool:
    return run.data.document_masking != "none" or run.data.eod_mask_loss


def order_manifest(run: PretrainRun, dataset: PretrainingDataset | None) -> dict[str, Any]:
    """What fixes the sample order; a resumed run with other facts would read other samples.

    The content is known to rank 0 alone, which notes and compares the facts: other ranks may need no tokens at all.
    """
    if dataset is None:
        return {}
    parts = getattr(dataset, "datasets", [dataset])
    reads = is_main_process()
    content = {SAMPLED: [content_fingerprint(part.tokens) for part in parts]} if reads else {}
    return content | {
        "data_order": run.data.data_order,
        "data": [part.tokens.sizes_hash for part in parts],
        "max_seq_length": run.data.max_seq_length,
        "seed": run.order_seed,
        "split": run.data.split,
        "epochs": [part.order.epochs for part in parts],
        "separate_last_epoch": [part.order.separate_last_epoch for part in parts],
    }


def log_data(run: PretrainRun, corpora: list[Corpus]) -> None:
    """Whose order is reproduced, and one line per corpus: sequences and tokens of each split."""
    oneflow = "; OneFlow's own C++ shuffle is not reproduced" if run.data.data_order == "megatron" else ""
    logger.info("sample order: %s%s", run.data.data_order, oneflow)
    for corpus in corpora:
        counts = ", ".join(
            f"{split} {last - first} sequences {corpus.token_count(split):,} tokens"
            for split in SPLITS
            for first, last in [corpus.sequences(split)]
        )
        logger.info("data %s (weight %.3g): %s", corpus.tokens.prefix, corpus.weight, counts)


def log_missing_ends(run: PretrainRun, corpora: list[Corpus], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """One warning per corpus whose documents do not end with the end-of-text id; logged by rank 0."""
    if not is_main_process():
        return
    for corpus in corpora:
        eos_id = tokenizer.eos_token_id if tokenizer else corpus.metadata.get("eos_token_id")
        if corpus.weight > 0 and (problem := missing_eos(corpus.tokens, eos_id)):
            logger.warning("%s", problem)


def log_blend(run: PretrainRun, corpora: list[Corpus], dataset: PretrainingDataset | None) -> None:
    """A table of the training data: weight, tokens, samples the run draws, and how often a corpus repeats in them.

    More than 4 epochs are warned of: beyond them repeated text is worth less and less (arXiv:2305.16264).
    """
    if dataset is None:
        return
    drawn = _drawn(run, corpora, dataset)
    width = max(len(corpus.tokens.prefix) for corpus, _, _ in drawn)
    logger.info("%s", f"{'training data':<{width}} {'weight':>8} {'tokens':>18} {'samples':>15} {'epochs':>9}")
    for corpus, count, epochs in drawn:
        tokens = corpus.token_count("train")
        row = f"{corpus.tokens.prefix:<{width}} {corpus.weight:>8.3g} {tokens:>18,} {count:>15,} {epochs:>9.2f}"
        if epochs > EPOCHS_WARNING:
            logger.warning("%s, more than %d epochs: consider fewer steps or more text", row, EPOCHS_WARNING)
        else:
            logger.info("%s", row)


def _drawn(run: PretrainRun, corpora: list[Corpus], dataset: PretrainingDataset) -> list[tuple[Corpus, int, float]]:
    """The corpora that the run trains on, the samples that it draws from each, and the passes over it that they are."""
    samples = run.batch.total * run.training.max_steps
    present = [corpus for corpus in corpora if corpus.weight > 0 and corpus.token_count("train") > 0]
    counts = [samples]
    if isinstance(dataset, BlendedDataset):
        counts = dataset.counts(samples)
    return [
        (corpus, count, count * run.data.max_seq_length / corpus.token_count("train"))
        for corpus, count in zip(present, counts, strict=True)
    ]


def data_table(
    run: PretrainRun, corpora: list[Corpus], dataset: PretrainingDataset | None
) -> list[dict[str, str | int | float]]:
    """A row for each corpus: its splits, and with training data `dataset` what the run draws from it."""
    drawn = {id(corpus): found for corpus, *found in (_drawn(run, corpora, dataset) if dataset is not None else ())}
    table = []
    for corpus in corpora:
        row: dict[str, str | int | float] = {"corpus": corpus.tokens.prefix, "weight": round(corpus.weight, 6)}
        for split in SPLITS:
            first, last = corpus.sequences(split)
            row |= {f"{split} sequences": last - first, f"{split} tokens": corpus.token_count(split)}
        samples, epochs = drawn.get(id(corpus), (0, 0.0))
        table.append(row | {"samples drawn": samples, "epochs": round(epochs, 3)})
    return table


def _refuse_empty(run: PretrainRun, corpora: list[Corpus]) -> None:
    for split in SPLITS:
        empty = all(corpus.weight == 0 or corpus.token_count(split) == 0 for corpus in corpora)
        if _required(run, split) and empty:
            counts = ", ".join(str(len(corpus.tokens)) for corpus in corpora)
            raise GptlmError(
                f"the {split} split is empty: --split {run.data.split} leaves none of the {counts} sequences for it; "
                f"give it a larger share, add documents, or leave that evaluation out ({SKIP_FLAGS[split]})"
            )


def _refuse_too_many(samples: dict[str, int]) -> None:
    for split, count in samples.items():
        if count > MAX_SAMPLES:
            raise GptlmError(
                f"the {split} split is asked for {count:,} samples (batch x steps), whose index fits no memory; "
                "lower --max_steps or the batch size"
            )


def _test_is_long_enough(run: PretrainRun, corpora: list[Corpus]) -> bool:
    """do_eval ends with a test where there is something to test on; only do_predict insists on it."""
    try:
        refuse_short(corpora, "test", run.data.max_seq_length)
    except GptlmError:
        return False
    return True


def _required(run: PretrainRun, split: str) -> bool:
    training = run.training
    return bool({"train": training.do_train, "valid": training.do_eval, "test": training.do_predict}[split])
