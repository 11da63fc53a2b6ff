"""The decode loop against stock transformers: rows of any length, in slots, that end at different times."""

import copy
from itertools import pairwise, takewhile

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2LMHeadModel

from gptlm.inference.decoding import Decoder
from gptlm.inference.sampling import GREEDY, Sampling
from gptlm.model.build import new_model
from gptlm.model.presets import Shape

POSITIONS, ENTRIES, STOP = 48, 300, 7


def decided(shape, seed=3):
    """A model with random weights so large that logits are far apart, and rounding cannot matter."""
    torch.manual_seed(seed)
    model = new_model(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model in our code and in stock code."""
    own = decided(Shape(2, 48, 3, 96, ENTRIES, POSITIONS))
    folder = tmp_path_factory.mktemp("decoding")
    own.save_pretrained(folder)
    return own, GPT2LMHeadModel.from_pretrained(folder).eval()


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(0, ENTRIES, (length,), generator=generator).tolist() for length in lengths]


def stock_rows(stock, rows, stops, longest, **options):
    """Each row alone, through stock `generate`."""
    found = []
    for row in rows:
        out = stock.generate(
            torch.tensor([row]),
            attention_mask=torch.ones(1, len(row)),
            max_new_tokens=min(longest, POSITIONS - len(row)),
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            do_sample=False,
            **options,
        )
        found.append(list(takewhile(lambda token: token not in stops, out[0, len(row) :].tolist())))
    return found


def decode(model, rows, stops, longest, *, slots, sampling=GREEDY, never=(), capacity=POSITIONS, graph=True):
    decoder = Decoder(model, slots=slots, capacity=capacity, never=never, graph=graph)
    done = {row.number: row.new for row in decoder.decode(rows, longest, sampling, stops) if row.ended}
    return [done[number] for number in range(len(rows))]


@pytest.mark.parametrize(
    ("options", "never"),
    [({}, []), ({"repetition_penalty": 1.4}, []), ({"min_new_tokens": 3}, []), ({}, list(range(0, ENTRIES, 2)))],
)
def test_rows_in_slots_equal_single_ones_in_stock_code(models, options, never):
    """Ten rows, of which many end early or reach the end of the position table."""
    own, stock = models
    rows, longest = [*prompts(8), [5] * 40, [9] * 47], 12
    stock_options = options | ({"suppress_tokens": never} if never else {})
    free = decode(own, rows, [], longest, slots=10, sampling=Sampling(**options), never=never)
    stops = sorted({row[length] for row, length in zip(free, (0, 3, 6, 9), strict=False)})
    wanted = stock_rows(stock, rows, stops, longest, **stock_options)
    assert len({len(row) for row in wanted}) > 2 and [len(row) for row in free[-2:]] == [8, 1]
    for slots in (1, 3, 16):
        found = decode(own, rows, stops, longest, slots=slots, sampling=Sampling(**options), never=never)
        assert found == wanted, slots


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"temperature": 0.7, "top_k": 20},
        {"top_k": 0, "top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 3.0, "top_k": 50, "top_p": 0.9, "min_new_tokens": 4},
    ],
)
@pytest.mark.parametrize("copies", [1, 3])
def test_a_batch_of_equal_lengths_draws_as_stock_code(models, options, copies):
    own, stock = models
    rows = torch.randint(0, ENTRIES, (4, 9), generator=torch.Generator().manual_seed(1))
    stop = {"eos_token_id": STOP} if "min_new_tokens" in options else {}
    torch.manual_seed(11)
    wanted = stock.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=True,
        max_new_tokens=4 if stop else 12,
        num_return_sequences=copies,
        pad_token_id=0,
        **stop,
        **options,
    )[:, 9:]
    torch.manual_seed(11)
    repeated = [row for row in rows.tolist() for _ in range(copies)]
    sampling = Sampling(do_sample=True, **options)
    stops = [STOP] if stop else []
    assert decode(own, repeated, stops, 4 if stop else 12, slots=12, sampling=sampling) == wanted.tolist()


def test_a_decoder_is_used_again_after_a_row_was_given_up(models):
    own, stock = models
    rows = prompts(3, seed=5)
    decoder = Decoder(own, slots=2, capacity=POSITIONS)
    next(decoder.decode(rows, 20, GREEDY, [])).new  # noqa: B018
    again = {row.number: row.new for row in decoder.decode(rows, 6, GREEDY, []) if row.ended}
    assert [again[number] for number in range(3)] == stock_rows(stock, rows, [], 6)
    penalised = Sampling(repetition_penalty=2.0)
    again = {row.number: row.new for row in decoder.decode(rows, 6, penalised, []) if row.ended}
    assert [again[number] for number in range(3)] == stock_rows(stock, rows, [], 6, repetition_penalty=2.0)


def test_progress_grows_to_the_whole_row(models):
    own, stock = models
    rows = prompts(1, seed=2)
    decoder = Decoder(own, slots=1, capacity=POSITIONS)
    parts = [list(row.new) for row in decoder.decode(rows, 10, GREEDY, [])]
    assert parts[-1] == stock_rows(stock, rows, [], 10)[0]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(parts))


def test_adapters_are_part_of_a_step(models):
    """Not merged, in a head as well; the same as PEFT through transformers' loop."""
    own, _ = models
    torch.manual_seed(4)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc", "lm_head"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(own), config).eval()
    rows = prompts(6, seed=3)
    wanted = stock_rows(adapted, rows, [], 8)
    assert decode(adapted, rows, [], 8, slots=4) == wanted != decode(own, rows, [], 8, slots=4)


def test_weights_changed_in_place_are_used():
    model = decided(Shape(1, 48, 3, 96, ENTRIES, POSITIONS))
    decoder = Decoder(model, slots=1, capacity=POSITIONS)
    rows = prompts(1, seed=9)

    def run():
        return [row.new for row in decoder.decode(rows, 8, GREEDY, [])][-1]

    before = run()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    assert before != run() == decode(model, rows, [], 8, slots=1)[0]
