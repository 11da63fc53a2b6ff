"""The data of a fine-tuning run: examples, their rows, and what evaluations read and continue."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from gptlm.config.origin import Origin
from gptlm.config.run import SftRun
from gptlm.data.collate import NO_TARGETS, PackCollator, RowCollator
from gptlm.data.conversations import Example, first_text, written_texts
from gptlm.data.encoder import log_special_tokens
from gptlm.data.epochs import Filled
from gptlm.data.packing import fill, pack
from gptlm.data.rows import Encoder, Lengths, PaddleEncoder, Row, Text, text_encoder, with_targets
from gptlm.errors import GptlmError, doing
from gptlm.inference.generation import before, check_rows, continue_rows, text_of
from gptlm.recipes.sft.sources import Sources, read
from gptlm.training.metrics.responses import Continuation

logger = logging.getLogger(__name__)

EVALUATION_SHARE = 20  # one in so many examples is held out where there are none for evaluation
MAX_HELD_OUT = 1000
GPU_MULTIPLE = 64  # kernels compute in tiles of this size, and few shapes are compiled


@dataclass(frozen=True)
class Prompt:
    """A prompt that generation continues: ids before a response, the response's text, and the row's other ids."""

    ids: list[int]
    response: str
    rest: list[int]


@dataclass(frozen=True)
class SftData:
    """Samples for training and evaluation (one or more rows each), and prompts that evaluations continue."""

    train: list[list[Row]]
    dev: list[list[Row]]
    prompts: list[Prompt]

    @property
    def end_ids(self) -> int | list[int] | None:
        """The id that ends responses, for `generation_config.eos_token_id`: a list if there are several."""
        ids = sorted({row.end_id for sample in self.train + self.dev for row in sample if row.end_id is not None})
        return ids[0] if len(ids) == 1 else ids or None

    @property
    def tokens_per_sample(self) -> int:
        """Mean length of a training sample in tokens."""
        total = sum(len(row.ids) - 1 for sample in self.train for row in sample)
        return max(1, round(total / max(len(self.train), 1)))


@doing("reading the examples")
def load_data(run: SftRun, sources: Sources, tokenizer: PreTrainedTokenizerBase) -> SftData:
    """Everything in `sources` (see `find_sources`) read and encoded.

    Raises:
        GptlmError: if files cannot be read, or no example has a target.
    """
    train, dev = _examples(run, sources, tokenizer)
    if not run.data.allow_special_tokens and not run.data.paddle_compat:
        for part in (train, dev):
            texts = ("\0".join(written_texts(example)) for example in part.examples)
            log_special_tokens(f"{part.name} examples of {part.source}", tokenizer, texts)
    encoder = _encoder(run, tokenizer)
    train_rows, dev_rows = (_rows(encoder, part, run.shape.vocab_size, tokenizer) for part in (train, dev))
    for row in (train_rows or dev_rows)[:1]:
        logger.info("the first example, prompt: %r", tokenizer.decode(row.ids[: row.prompt_length].tolist()))
        logger.info("the first example, response: %r", tokenizer.decode(row.ids[row.prompt_length :].tolist()))
    prompts = [prompt for row in dev_rows for prompt in _prompts(row)]
    limit = run.data.generate_num if run.data.generate_num >= 0 else len(prompts)
    if not run.data.zero_padding:
        return SftData([[row] for row in train_rows], [[row] for row in dev_rows], prompts[:limit])
    length = run.data.max_length or 0
    return SftData(_packed(train_rows, length), _packed(dev_rows, length), prompts[:limit])


def _packed(rows: list[Row], length: int) -> list[list[Row]]:
    """Samples of several rows, `length` tokens at most."""
    sizes = [len(row.ids) - 1 for row in rows]  # the last id is only a target
    packs = pack(sizes, length)
    if rows:
        logger.info(
            "%d examples are packed into %d samples of %d tokens, %.1f %% full",
            len(rows), len(packs), length, fill(sizes, len(packs), length),
        )  # fmt: skip
    return [[rows[number] for number in one] for one in packs]


def _prompts(row: Row) -> list[Prompt]:
    """One for each response of a conversation, in order; none for a response without anything before it."""
    ids = row.ids.tolist()
    responses = [*row.earlier, (row.prompt_length, row.response)]
    return [Prompt(ids[:place], text, ids[place:]) for place, text in responses if place]


def order_manifest(run: SftRun, data: SftData) -> dict[str, Any]:
    """What determines the sample order."""
    digest = hashlib.sha256()
    for sample in data.train:
        if len(sample) > 1:  # packed: where a sample starts is part of the order
            digest.update(len(sample).to_bytes(8, "little"))
        for row in sample:
            digest.update(row.ids.tobytes())
            digest.update(row.loss_mask.tobytes())
    grouped = {"grouped_batch": run.batch.total} if run.data.group_by_length and not run.data.zero_padding else {}
    return {"data": digest.hexdigest()[:16], "samples": len(data.train), "seed": run.training.seed} | grouped


def collator(run: SftRun, tokenizer: PreTrainedTokenizerBase, device: str) -> RowCollator | PackCollator:
    """How samples become batches on a `device` of that type."""
    # any id would do for padding: it is not a target, and nothing attends to it
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if run.data.zero_padding:
        return PackCollator(pad, run.data.max_length or 0)
    multiple = run.data.pad_to_multiple_of or (GPU_MULTIPLE if device == "cuda" else 1)
    return RowCollator(pad, multiple, run.data.max_length, pad_left=run.data.paddle_compat)


def evaluation_samples(run: SftRun, data: SftData) -> Dataset | None:
    """The evaluation samples, padded to whole batches on every process."""
    multiple = run.training.per_device_eval_batch_size * run.dims.data
    return Filled(data.dev, NO_TARGETS, multiple, sum(map(len, data.dev))) if data.dev else None


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
            graph=run.training.cuda_graphs is not False,
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


@dataclass(frozen=True)
class Part:
    """Examples for training or evaluation.

    Attributes:
        name: "train" or "dev".
        source: where they were read from.
        first: number of the first of them in `source`, counted from 1 over records with a response.
    """

    name: str
    examples: list[Example]
    source: Path | str = ""
    first: int = 1


def _examples(run: SftRun, sources: Sources, tokenizer: PreTrainedTokenizerBase) -> tuple[Part, Part]:
    """Examples for training and for evaluation, only those that the run needs."""
    training = run.training
    dev = _for_evaluation(run, sources, tokenizer) if training.do_eval else Part("dev", [])
    if not training.do_train and (dev.examples or not training.do_eval):
        return Part("train", []), dev
    source = sources["train"]
    train = read(source, tokenizer, questions=_asks_questions(run))
    if not train:
        use = "train" if training.do_train else "evaluate"
        raise GptlmError(f"there are no examples to {use} on in {source}")
    if not training.do_train:
        logger.info("no file for evaluation: all %d examples of %s are evaluated", len(train), source)
        return Part("train", []), Part("dev", train, source)
    if not training.do_eval or dev.examples:
        return Part("train", train, source), dev
    count = min(max(1, len(train) // EVALUATION_SHARE), MAX_HELD_OUT)
    if len(train) <= count:
        raise GptlmError(
            f"there are {len(train)} examples in {source}; one for training and one for evaluation are needed"
        )
    logger.info("there are no examples for evaluation: the last %d of %d are held out for it", count, len(train))
    kept = len(train) - count
    return Part("train", train[:kept], source), Part("dev", train[kept:], source, 1 + kept)


def _for_evaluation(run: SftRun, sources: Sources, tokenizer: PreTrainedTokenizerBase) -> Part:
    """Examples of the file for evaluation; none if there is no such file, or if training can hold some out.

    Raises:
        GptlmError: if a file that was named, or without which nothing can be evaluated, has none.
    """
    if "dev" not in sources:
        return Part("dev", [])
    source = sources["dev"]
    part = Part("dev", read(source, tokenizer, questions=_asks_questions(run)), source)
    named = run.data.eval_dataset_name_or_path
    if not part.examples and (named or not run.training.do_train):
        more = "; give another file, or leave --eval_dataset_name_or_path out" if named else ""
        raise GptlmError(f"there are no examples to evaluate on in {source}{more}")
    if not part.examples:
        logger.warning("%s has no example with a response: training examples are held out instead", source)
    return part


def _asks_questions(run: SftRun) -> bool:
    """Whether the command names a task, so that records with source, target and title are its own form."""
    return run.sources["task_name"].origin is not Origin.DEFAULT


# Rows -------------------------------------------------------------------------------------------------------------


def _encoder(run: SftRun, tokenizer: PreTrainedTokenizerBase) -> Encoder | PaddleEncoder:
    data = run.data
    eos_id, lengths = int(tokenizer.eos_token_id), Lengths(data.src_length, data.tgt_length, data.max_length or 0)
    if not data.paddle_compat:
        encode = text_encoder(tokenizer, data.allow_special_tokens)
        return Encoder(encode, eos_id, lengths, data.train_on_prompt, data.truncation_side)

    def encode_plain(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []  # type: ignore[return-value]

    return PaddleEncoder(encode_plain, eos_id, lengths, data.train_on_prompt, str(tokenizer.eos_token))


def _rows(
    encoder: Encoder | PaddleEncoder, part: Part, vocab_size: int, tokenizer: PreTrainedTokenizerBase
) -> list[Row]:
    """Rows with targets; what is skipped or truncated is logged.

    Raises:
        GptlmError: if an id is outside of the model's vocabulary, or no row has a target.
    """
    rows, name = encoder.rows(part.examples), part.name
    kept = with_targets(rows)
    if len(kept) < len(rows):
        numbers = [str(number) for number, row in enumerate(rows, start=part.first) if not row.loss_mask.any()]
        more = ", ..." if len(numbers) > 10 else ""
        logger.warning(
            "%d of %d %s examples are skipped, they have no token of a response: numbers %s%s",
            len(numbers), len(rows), name, ", ".join(numbers[:10]), more,
        )  # fmt: skip
    _check_ids(rows, part, vocab_size, tokenizer)
    skipped = [row.skipped_turns for row in kept if row.skipped_turns]
    if skipped:
        logger.warning(
            "%d turns at the ends of %d %s conversations are skipped: they do not fit into --max_length",
            sum(skipped), len(skipped), name,
        )  # fmt: skip
    if prompts := sum(row.truncated_prompts > 0 for row in kept):
        logger.warning("%d of %d %s prompts are truncated to --src_length or --max_length", prompts, len(kept), name)
    if responses := sum(row.truncated_responses > 0 for row in kept):
        logger.warning(
            "%d of %d %s responses are truncated to --tgt_length or --max_length: the model does not learn from them "
            "where a response ends", responses, len(kept), name,
        )  # fmt: skip
    if rows and not kept:
        raise GptlmError(f"no {name} example has a target token; check --src_length, --tgt_length and --max_length")
    if kept:
        longest, targets = max(len(row.ids) for row in kept), sum(int(row.loss_mask.sum()) for row in kept)
        logger.info(
            "%s: %d examples of %s, longest %d tokens, %d target tokens", name, len(kept), part.source, longest, targets
        )
    return kept


def _check_ids(rows: list[Row], part: Part, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    for number, row in enumerate(rows, start=part.first):
        highest = int(row.ids.max(initial=0))
        if highest >= vocab_size:
            text = first_text(part.examples[number - part.first])[:40]
            raise GptlmError(
                f"{part.source}, example {number} (prompt {text!r}): the tokenizer gives id {highest} "
                f"({tokenizer.convert_ids_to_tokens(highest)!r}), the model's vocabulary has {vocab_size} entries; "
                "give the model's own tokenizer"
            )
