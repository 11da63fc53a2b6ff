"""The data of a fine-tuning run: examples, their rows, and what evaluations read and continue."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from gptlm.config.origin import Origin
from gptlm.config.run import SftRun
from gptlm.data.collate import NO_TARGETS, PackCollator, RowCollator
from gptlm.data.encoder import log_found_tokens
from gptlm.data.epochs import Filled
from gptlm.data.examples import Columns
from gptlm.data.packing import fill, pack
from gptlm.data.row_building import RowSettings
from gptlm.data.rows import Lengths, Row, Text, text_encoder
from gptlm.data.stored_rows import NO_END, NO_ROWS, Samples, StoredRows
from gptlm.data.templates import form_of
from gptlm.errors import GptlmError, doing, named
from gptlm.inference.generation import before, check_rows, continue_rows, text_of
from gptlm.recipes.sft.rows import read_rows
from gptlm.recipes.sft.sources import Source, Sources
from gptlm.training.metrics.responses import Continuation

logger = logging.getLogger(__name__)

EVALUATION_SHARE = 20  # one in so many examples is held out where there are none for evaluation
MAX_HELD_OUT = 1000
SPLIT_SEED = 42  # of --val_size: runs that differ in --seed are compared on the same examples
GPU_MULTIPLE = 64  # kernels compute in tiles of this size, and few shapes are compiled


@dataclass(frozen=True)
class Prompt:
    """A prompt that generation continues: ids before a response, the response's text, and the row's other ids."""

    ids: list[int]
    response: str
    rest: list[int]


@dataclass(frozen=True)
class Part:
    """Examples for training or evaluation.

    Attributes:
        name: "train" or "dev".
        rows: of all examples of the source.
        source: where they were read from.
        examples: (n,) which of them are in this part, counted from 0 over records with a response, ascending.
    """

    name: str
    rows: StoredRows
    source: str = ""
    examples: np.ndarray = field(default_factory=lambda: np.arange(0))


@dataclass(frozen=True)
class SftData:
    """Samples for training and evaluation (one or more rows each), and prompts that evaluations continue.

    Attributes:
        digest: of the rows and their order in `train`.
        sources: where the examples for training and for evaluation were read from.
    """

    train: Samples
    dev: Samples
    prompts: list[Prompt]
    digest: str
    sources: tuple[str, str] = ("", "")

    @property
    def end_ids(self) -> int | list[int] | None:
        """The id that ends responses, for `generation_config.eos_token_id`: a list if there are several."""
        found = {int(end) for part in (self.train, self.dev) for end in np.unique(part.used(part.rows.end_ids))}
        ids = sorted(found - {NO_END})
        return ids[0] if len(ids) == 1 else ids or None

    @property
    def form(self) -> str:
        """The form of most records, for `plain_template`."""
        return form_of(self.train.rows.forms or self.dev.rows.forms)

    @property
    def sizes(self) -> np.ndarray:
        """(samples, 2): training examples and tokens of each sample, see `Epochs`."""
        return np.stack((self.train.counts(), self.train.sums(self.train.rows.lengths - 1)), axis=1)

    @property
    def tokens_per_sample(self) -> int:
        """Mean length of a training sample in tokens."""
        return max(1, round(int(self.sizes[:, 1].sum()) / max(len(self.train), 1)))


@doing("reading the examples")
def load_data(run: SftRun, sources: Sources, tokenizer: PreTrainedTokenizerBase) -> SftData:
    """Everything in `sources` (see `find_sources`) encoded, or loaded as an earlier run has encoded it.

    Raises:
        GptlmError: if files cannot be read, or no example has a target.
    """
    train, dev = _parts(run, sources, tokenizer)
    train, dev = _limited(train, run.data.max_train_samples), _limited(dev, run.data.max_eval_samples)
    if not run.training.do_train:
        train = Part("train", NO_ROWS)
    if not run.training.do_eval:
        dev = Part("dev", NO_ROWS)
    train_rows, dev_rows = (_with_targets(part) for part in (train, dev))
    for part, rows in ((train, train_rows), (dev, dev_rows)):
        if len(rows):
            row = part.rows[int(rows[0])]
            logger.info("the first example, prompt: %r", tokenizer.decode(row.ids[: row.prompt_length].tolist()))
            logger.info("the first example, response: %r", tokenizer.decode(row.ids[row.prompt_length :].tolist()))
            break
    limit = run.data.generate_num if run.data.generate_num >= 0 else None
    prompts = list(islice((prompt for number in dev_rows for prompt in _prompts(dev.rows[int(number)])), limit))
    samples = _samples(run, train, train_rows)
    sources_read = (train.source, dev.source)
    return SftData(samples, _samples(run, dev, dev_rows), prompts, samples.digest(), sources_read)


def data_table(data: SftData) -> list[dict[str, str | int]]:
    """A row for the examples of training, and one for those of evaluation."""
    parts = zip(("train", "evaluation"), data.sources, (data.train, data.dev), strict=True)
    return [
        {
            "split": name,
            "source": source,
            "examples": part.examples,
            "samples": len(part),
            "tokens": int(part.sums(part.rows.lengths - 1).sum()) if len(part) else 0,
        }
        for name, source, part in parts
    ]


def _samples(run: SftRun, part: Part, rows: np.ndarray) -> Samples:
    """One row each, or packed to several rows of `max_length` tokens at most."""
    if not run.data.zero_padding:
        return Samples(part.rows, rows)
    length = run.data.max_length or 0
    sizes = part.rows.lengths[rows] - 1  # the last id is only a target
    packs = pack(sizes, length)
    if len(rows):
        logger.info(
            "%d examples are packed into %d samples of %d tokens, %.1f %% full",
            len(rows), len(packs), length, fill(sizes, len(packs), length),
        )  # fmt: skip
    return Samples(part.rows, rows, packs)


def _prompts(row: Row) -> list[Prompt]:
    """One for each response of a conversation, in order; none for a response without anything before it."""
    ids = row.ids.tolist()
    responses = [*row.earlier, (row.prompt_length, row.response)]
    return [Prompt(ids[:place], text, ids[place:]) for place, text in responses if place]


def order_manifest(run: SftRun, data: SftData) -> dict[str, Any]:
    """What determines the sample order."""
    grouped = {"grouped_batch": run.batch.total} if run.data.group_by_length and not run.data.zero_padding else {}
    return {"data": data.digest, "samples": len(data.train), "seed": run.order_seed} | grouped


def collator(run: SftRun, tokenizer: PreTrainedTokenizerBase, device: str) -> RowCollator | PackCollator:
    """How samples become batches on a `device` of that type."""
    # any id would do for padding: it is not a target, and nothing attends to it
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if run.data.zero_padding:
        return PackCollator(pad, run.data.max_length or 0)
    multiple = run.data.pad_to_multiple_of or (GPU_MULTIPLE if device == "cuda" else 1)
    if run.parallel.sequence_parallel:  # each process has an equal part of a sequence
        multiple = math.lcm(multiple, run.dims.tensor)
    return RowCollator(pad, multiple, run.data.max_length, pad_left=run.data.paddle_compat)


def evaluation_samples(run: SftRun, data: SftData) -> Dataset | None:
    """The evaluation samples, padded to whole batches on every process."""
    multiple = run.training.per_device_eval_batch_size * run.dims.data
    return Filled(data.dev, NO_TARGETS, multiple, data.dev.examples) if data.dev else None


def continuation(run: SftRun, data: SftData, tokenizer: PreTrainedTokenizerBase) -> Continuation | None:
    """What evaluations generate; None where they do not."""
    if not run.data.eval_with_do_generation or not data.prompts:
        return None
    prompts = [prompt.ids for prompt in data.prompts]
    names = [f"evaluation prompt {number}" for number in range(1, len(prompts) + 1)]
    positions, longest = run.shape.max_position_embeddings, run.data.tgt_length
    check_rows(prompts, positions, run.shape.vocab_size, longest, names)

    def generate(model: Any, rows: Sequence[list[int]]) -> list[str]:
        # ZeRO stage 3: a process runs the model while any other still generates, so the longest prompt limits all
        sharded = is_deepspeed_zero3_enabled()
        new = continue_rows(
            model,
            tokenizer,
            rows,
            batch_size=run.training.per_device_eval_batch_size,
            max_new_tokens=min(longest, positions - max(map(len, prompts))) if sharded else longest,
            graph=run.training.cuda_graphs is not False and not run.dims.is_model_parallel,  # processes communicate
            sharded=sharded,
        )
        return [text_of(tokenizer, ids) for ids in new]

    return Continuation(
        prompts=prompts,
        texts=[text_of(tokenizer, prompt) for prompt in prompts],
        answers=_references(run, data, tokenizer),
        generate=generate,
        level=run.data.metric_level,
        clean=_paddle_clean if run.data.paddle_compat else str.strip,
    )


def _references(run: SftRun, data: SftData, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The whole responses as text decoded from their ids, as predictions are."""
    if run.data.paddle_compat:
        return [text_of(tokenizer, prompt.rest) for prompt in data.prompts]
    encode = text_encoder(tokenizer, run.data.allow_special_tokens)
    responses = encode([Text(prompt.response) for prompt in data.prompts])
    return [text_of(tokenizer, before(response.ids, [tokenizer.eos_token_id])) for response in responses]


def _paddle_clean(text: str) -> str:
    return text.strip().strip("question:")  # as PaddleNLP: strips these characters, in any order, from both ends


# Examples ---------------------------------------------------------------------------------------------------------


def _parts(run: SftRun, sources: Sources, tokenizer: PreTrainedTokenizerBase) -> tuple[Part, Part]:
    """Examples for training and for evaluation, only those that the run needs."""
    training = run.training
    settings = _row_settings(run, tokenizer)
    dev = Part("dev", NO_ROWS)
    if run.data.val_size:
        if "dev" in sources:
            logger.info("%s is not read: --val_size takes examples of %s", sources["dev"], sources["train"])
    elif training.do_eval:
        dev = _for_evaluation(run, sources, settings)
    if not training.do_train and (len(dev.examples) or not training.do_eval):
        return Part("train", NO_ROWS), dev
    source = sources["train"]
    rows = read_rows(run, source, settings)
    count = len(rows)
    if not count:
        use = "train" if training.do_train else "evaluate"
        raise GptlmError(f"there are no examples to {use} on in {source}")
    if run.data.val_size:
        numbers = _random_split(run.data.val_size, count, source)
        return Part("train", rows, str(source), numbers[0]), Part("dev", rows, str(source), numbers[1])
    if not training.do_train:
        logger.info("no file for evaluation: %s of %s %s evaluated", _all(count), source, "is" if count == 1 else "are")
        return Part("train", NO_ROWS), Part("dev", rows, str(source), np.arange(count))
    if not training.do_eval or len(dev.examples):
        return Part("train", rows, str(source), np.arange(count)), dev
    held = min(max(1, count // EVALUATION_SHARE), MAX_HELD_OUT)
    if count <= held:
        raise GptlmError(f"there are {count} examples in {source}; one for training and one for evaluation are needed")
    logger.info("there are no examples for evaluation: the last %d of %d are held out for it", held, count)
    kept = count - held
    return Part("train", rows, str(source), np.arange(kept)), Part("dev", rows, str(source), np.arange(kept, count))


def _random_split(size: float, count: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of `count` examples that are for training and for evaluation, the same ones for every --seed.

    Raises:
        GptlmError: if none is left for training.
    """
    held = math.ceil(size * count) if size < 1 else int(size)
    if held >= count:
        raise GptlmError(f"{named('val_size')} {size:g}: there are {count} examples in {source}, none is left to train")
    order = np.random.RandomState(SPLIT_SEED).permutation(count)
    logger.info("%d of %d examples of %s are held out for evaluation, chosen at random", held, count, source)
    return np.sort(order[held:]), np.sort(order[:held])


def _limited(part: Part, limit: int | None) -> Part:
    """`part` with its first `limit` examples."""
    if limit is None or len(part.examples) <= limit:
        return part
    logger.info("the first %d of %d %s examples of %s are used", limit, len(part.examples), part.name, part.source)
    return replace(part, examples=part.examples[:limit])


def _for_evaluation(run: SftRun, sources: Sources, settings: RowSettings) -> Part:
    """Examples of the file for evaluation; none if there is no such file, or if training can hold some out.

    Raises:
        GptlmError: if a file that was named, or without which nothing can be evaluated, has none.
    """
    if "dev" not in sources:
        return Part("dev", NO_ROWS)
    source = sources["dev"]
    rows = read_rows(run, source, settings)
    named = run.data.eval_dataset_name_or_path
    if not len(rows) and (named or not run.training.do_train):
        more = "; give another file, or leave --eval_dataset_name_or_path out" if named else ""
        raise GptlmError(f"there are no examples to evaluate on in {source}{more}")
    if not len(rows):
        logger.warning("%s has no example with a response: training examples are held out instead", source)
    return Part("dev", rows, str(source), np.arange(len(rows)))


def _row_settings(run: SftRun, tokenizer: PreTrainedTokenizerBase) -> RowSettings:
    data = run.data
    return RowSettings(
        tokenizer,
        Lengths(data.src_length, data.tgt_length, data.max_length or 0),
        run.shape.vocab_size,
        train_on_prompt=data.train_on_prompt,
        truncation_side=data.truncation_side,
        allow_special_tokens=data.allow_special_tokens,
        paddle_compat=data.paddle_compat,
        renders_texts=data.chat_template is not None and tokenizer.chat_template is not None,
        # a task that the command names: records with source, target and title are its own form
        questions=run.sources["task_name"].origin is not Origin.DEFAULT,
        columns=Columns(data.prompt_column, data.response_column, data.text_column),
    )


def _all(count: int) -> str:
    return "the only example" if count == 1 else f"all {count} examples"


def _with_targets(part: Part) -> np.ndarray:
    """The examples that have targets; what is skipped or truncated is logged.

    Raises:
        GptlmError: if there are examples, and none has a target.
    """
    rows, name, examples = part.rows, part.name, part.examples
    log_found_tokens(f"{name} examples of {part.source}", rows.special_tokens(part.examples))
    kept = examples[rows.targets[examples] > 0]
    if len(kept) < len(examples):
        numbers = [str(number + 1) for number in examples[rows.targets[examples] == 0]]
        more = ", ..." if len(numbers) > 10 else ""
        logger.warning(
            "%d of %d %s examples are skipped, they have no token of a response: numbers %s%s",
            len(numbers), len(examples), name, ", ".join(numbers[:10]), more,
        )  # fmt: skip
    skipped = rows.skipped_turns[kept]
    if skipped.any():
        logger.warning(
            "%d turns at the ends of %d %s conversations are skipped: they do not fit into --max_length",
            skipped.sum(), np.count_nonzero(skipped), name,
        )  # fmt: skip
    if prompts := np.count_nonzero(rows.truncated_prompts[kept]):
        logger.warning("%d of %d %s prompts are truncated to --src_length or --max_length", prompts, len(kept), name)
    if responses := np.count_nonzero(rows.truncated_responses[kept]):
        logger.warning(
            "%d of %d %s responses are truncated to --tgt_length or --max_length: the model does not learn from them "
            "where a response ends", responses, len(kept), name,
        )  # fmt: skip
    if len(examples) and not len(kept):
        raise GptlmError(f"no {name} example has a target token; check --src_length, --tgt_length and --max_length")
    if len(kept):
        longest, targets = rows.lengths[kept].max(), rows.targets[kept].sum(dtype=np.int64)
        logger.info(
            "%s: %d examples of %s, longest %d tokens, %d target tokens", name, len(kept), part.source, longest, targets
        )
    return kept
