"""The data of a fine-tuning run: which examples there are, what they become, what evaluations read and continue."""

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
from gptlm.data.epochs import Filled
from gptlm.data.paddle_rows import PaddleEncoder
from gptlm.data.rows import Encoder, Lengths, Row, Text, text_encoder, with_targets
from gptlm.data.sft import NO_TARGETS, PackCollator, RowCollator, packed
from gptlm.data.special_tokens import log_spelled
from gptlm.data.turns import Example, beginning, said
from gptlm.errors import GptlmError, doing
from gptlm.inference.generation import before, check_rows, continue_rows, text_of
from gptlm.recipes.sft.sources import Sources, read
from gptlm.training.metrics.responses import Continuation

logger = logging.getLogger(__name__)

HELD_OUT = 20  # one in so many examples, where there are none for evaluation
MOST_HELD_OUT = 1000


@dataclass(frozen=True)
class Prompt:
    """What generation continues: ids before an answer, with earlier answers; the answer's text; the row's other ids."""

    ids: list[int]
    answer: str
    rest: list[int]


@dataclass(frozen=True)
class SftData:
    """Samples for training and evaluation (one or more rows each), and what evaluations continue."""

    train: list[list[Row]]
    dev: list[list[Row]]
    prompts: list[Prompt]

    @property
    def ends(self) -> int | list[int] | None:
        """The id that ends answers, as `generation_config.eos_token_id` has it: a list where there are several."""
        ends = sorted({row.end for sample in self.train + self.dev for row in sample if row.end is not None})
        return ends[0] if len(ends) == 1 else ends or None

    @property
    def tokens_per_sample(self) -> int:
        """Mean length of a training sample in tokens."""
        total = sum(len(row.ids) - 1 for sample in self.train for row in sample)
        return max(1, round(total / max(len(self.train), 1)))


@doing("reading the examples")
def load_data(run: SftRun, sources: Sources, tokenizer: PreTrainedTokenizerBase) -> SftData:
    """Everything in `sources` (see `find_sources`) read and encoded.

    Raises:
        GptlmError: if files cannot be read, or nothing can be learnt from them.
    """
    parts = _examples(run, sources, tokenizer)
    if not run.data.allow_special_tokens and not run.data.paddle_compat:
        for part in parts:
            texts = ("\0".join(said(example)) for example in part.examples)
            log_spelled(f"{part.name} examples of {part.source}", tokenizer, texts)
    encoder = _encoder(run, tokenizer)
    rows = {part.name: _rows(encoder, part, run.shape.vocab_size, tokenizer) for part in parts}
    shown = rows["train"] or rows["dev"]
    if shown:
        _show(shown[0], tokenizer)
    length = run.data.max_length or 0
    samples = {
        name: packed(found, length) if run.data.zero_padding else [[row] for row in found]
        for name, found in rows.items()
    }
    if run.data.zero_padding:
        logger.info(
            "%d examples are packed into %d samples of %d tokens", len(rows["train"]), len(samples["train"]), length
        )
    prompts = [prompt for row in rows["dev"] for prompt in _prompts(row)]
    limit = run.data.generate_num if run.data.generate_num >= 0 else len(prompts)
    return SftData(samples["train"], samples["dev"], prompts[:limit])


def _prompts(row: Row) -> list[Prompt]:
    """One for each answer of a conversation, in order; none for an answer without anything before it."""
    ids = row.ids.tolist()
    places = [*row.earlier, (row.prompt, row.answer)]
    return [Prompt(ids[:place], text, ids[place:]) for place, text in places if place]


def collator(run: SftRun, tokenizer: PreTrainedTokenizerBase) -> RowCollator | PackCollator:
    """How samples become batches."""
    pad = padding_id(tokenizer)
    return PackCollator(pad) if run.data.zero_padding else RowCollator(pad, pad_left=run.data.paddle_compat)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id would do: padding is no target, and nothing attends to it."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def evaluation_samples(run: SftRun, data: SftData) -> Dataset | None:
    """The evaluation samples, filled up to whole batches on every process."""
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
        # with sharded weights a process runs the model for as long as any other still generates: all of them must fit
        together = is_deepspeed_zero3_enabled()
        new = continue_rows(
            model,
            tokenizer,
            rows,
            batch_size=run.training.per_device_eval_batch_size,
            max_new_tokens=min(longest, positions - max(map(len, prompts))) if together else longest,
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
    """The answers as they read if the model gives them token by token: predictions are compared with their like.

    An answer that was cut for training counts whole.
    """
    if run.data.paddle_compat:
        return [text_of(tokenizer, prompt.rest) for prompt in data.prompts]
    encode = text_encoder(tokenizer, run.data.allow_special_tokens)
    answers = encode([Text(prompt.answer) for prompt in data.prompts])
    return [text_of(tokenizer, before(answer.ids, [tokenizer.eos_token_id])) for answer in answers]


def order_facts(run: SftRun, data: SftData) -> dict[str, Any]:
    """What fixes which samples come when."""
    digest = hashlib.sha256()
    for sample in data.train:
        if len(sample) > 1:  # packed: where a sample begins is a part of the order
            digest.update(len(sample).to_bytes(8, "little"))
        for row in sample:
            digest.update(row.ids.tobytes())
            digest.update(row.learnt.tobytes())
    return {"data": digest.hexdigest()[:16], "samples": len(data.train), "seed": run.training.seed}


def _paddle_clean(text: str) -> str:
    """PaddleNLP's: it strips these characters, in any order, from both ends."""
    return text.strip().strip("question:")


@dataclass(frozen=True)
class Part:
    """Examples of one use.

    Attributes:
        name: "train" or "dev".
        source: where they were read from.
        first: number of the first of them in `source`, counted from 1 over records with an answer.
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
    count = min(max(1, len(train) // HELD_OUT), MOST_HELD_OUT)
    if len(train) <= count:
        raise GptlmError(
            f"there are {len(train)} examples in {source}; one for training and one for evaluation are needed"
        )
    logger.info("there are no examples for evaluation: the last %d of %d are held out for it", count, len(train))
    kept = len(train) - count
    return Part("train", train[:kept], source), Part("dev", train[kept:], source, 1 + kept)


def _for_evaluation(run: SftRun, sources: Sources, tokenizer: PreTrainedTokenizerBase) -> Part:
    """Examples of the file for evaluation; none where there is no such file, or where training can hold some out.

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
        logger.warning("%s holds no example with an answer: training examples are held out instead", source)
    return part


def _asks_questions(run: SftRun) -> bool:
    """Whether the command names a task, so that records with source, target and title are its own form."""
    return run.sources["task_name"].origin is not Origin.DEFAULT


def _encoder(run: SftRun, tokenizer: PreTrainedTokenizerBase) -> Encoder | PaddleEncoder:
    data = run.data
    end, lengths = int(tokenizer.eos_token_id), Lengths(data.src_length, data.tgt_length, data.max_length or 0)
    if not data.paddle_compat:
        encode = text_encoder(tokenizer, data.allow_special_tokens)
        return Encoder(encode, end, lengths, data.train_on_prompt, data.truncation_side)

    def plain(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []  # type: ignore[return-value]

    return PaddleEncoder(plain, end, lengths, data.train_on_prompt, str(tokenizer.eos_token))


def _rows(encoder: Encoder | PaddleEncoder, part: Part, entries: int, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Rows with targets; `entries` is the size of the model's vocabulary."""
    rows, name = encoder.rows(part.examples), part.name
    kept = with_targets(rows)
    if len(kept) < len(rows):
        numbers = [str(number) for number, row in enumerate(rows, start=part.first) if not row.learnt.any()]
        more = ", ..." if len(numbers) > 10 else ""
        logger.warning(
            "%d of %d %s examples are left out, no token of an answer is in them: numbers %s%s",
            len(numbers), len(rows), name, ", ".join(numbers[:10]), more,
        )  # fmt: skip
    _check_ids(rows, part, entries, tokenizer)
    shortened = [row.left_out for row in kept if row.left_out]
    if shortened:
        logger.warning(
            "%d turns at the ends of %d %s conversations are left out: --max_length has no room for them",
            sum(shortened), len(shortened), name,
        )  # fmt: skip
    _say_cuts(kept, name)
    if rows and not kept:
        raise GptlmError(f"no {name} example has a token to learn; check --src_length, --tgt_length and --max_length")
    if kept:
        longest, learnt = max(len(row.ids) for row in kept), sum(int(row.learnt.sum()) for row in kept)
        logger.info(
            "%s: %d examples of %s, longest %d tokens, %d tokens to learn",
            name, len(kept), part.source, longest, learnt,
        )  # fmt: skip
    return kept


def _check_ids(rows: list[Row], part: Part, entries: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises GptlmError, which names the example, if an id is beyond the model's vocabulary."""
    for number, row in enumerate(rows, start=part.first):
        highest = int(row.ids.max(initial=0))
        if highest >= entries:
            text = beginning(part.examples[number - part.first])[:40]
            raise GptlmError(
                f"{part.source}, example {number} (prompt {text!r}): the tokenizer gives id {highest} "
                f"({tokenizer.convert_ids_to_tokens(highest)!r}), the model's vocabulary has {entries} entries; give "
                "the model's own tokenizer"
            )


def _say_cuts(rows: list[Row], name: str) -> None:
    prompts, answers = sum(row.cut_prompts > 0 for row in rows), sum(row.cut_answers > 0 for row in rows)
    if prompts:
        logger.warning("%d of %d %s prompts are cut at --src_length or --max_length", prompts, len(rows), name)
    if answers:
        logger.warning(
            "%d of %d %s answers are cut at --tgt_length or --max_length: those teach no end of an answer",
            answers, len(rows), name,
        )  # fmt: skip


def _show(row: Row, tokenizer: PreTrainedTokenizerBase) -> None:
    """The first example as the model sees it."""
    logger.info("the first example, prompt: %r", tokenizer.decode(row.ids[: row.prompt].tolist()))
    logger.info("the first example, answer: %r", tokenizer.decode(row.ids[row.prompt :].tolist()))
