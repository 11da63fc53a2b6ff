"""Windows score every target once; losses equal stock GPT-2's for every batch size."""

import itertools

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from gptlm.errors import GptlmError
from gptlm.inference.scoring import BATCH_TOKENS, Row, Windows, batches, score
from gptlm.kernels.linear_cross_entropy import token_scores
from gptlm.model.build import load_model
from tests.golden import recorded


def scored_targets(windows: Windows) -> list[int]:
    """Positions in the text; works for tokens that are their own position."""
    return [int(i) for row in windows for i in row.ids[-row.scored :]]


@pytest.mark.parametrize("count", [2, 10, 63, 64, 65, 66, 100, 1000])
@pytest.mark.parametrize("step", [1, 16, 32, 63, 64])
def test_every_target_is_scored_once_from_the_context_that_the_stride_leaves(count, step):
    windows = Windows(range(count), 64, step)
    assert scored_targets(windows) == list(range(1, count))
    assert len(windows) == len(list(windows))
    for number, row in enumerate(windows):
        assert row.ids[0] == number * step and len(row.ids) <= 65
        assert number == 0 or row.scored <= step
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_the_windows_are_megatron_s_without_its_empty_ones():
    """Its tokens are 1000 and up; 50256 pads."""
    for case in recorded("megatron/evaluation.json")["windows"]:
        count, length = case["num_tokens"], case["seq_length"]
        windows = Windows(np.arange(count), length, case["overlapping_eval"] or length)
        assert len(windows) == case["num_windows"] - case["windows_with_nothing_scored"]
        assert len(scored_targets(windows)) == case["targets_scored"]
        shown = case["first_windows"]
        for row, expected in zip(windows, shown, strict=False):
            padded = [1000 + int(i) for i in row.ids] + [50256] * (length + 1 - len(row.ids))
            assert (padded[:8], padded[-4:]) == (expected["tokens_first8"], expected["tokens_last4"])
            assert [int(row.ids[-row.scored]), int(row.ids[-1])] == expected["scored"]
        assert all(window["scored"] == [] for window in shown[len(windows) :])


def brute_force(folder, tokens, length, step) -> float:
    """Mean -log p, one token at a time from its own context, by stock code."""
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    losses = []
    for target in range(1, len(tokens)):
        start = 0 if target <= length else -(-(target - length) // step) * step
        with torch.no_grad():
            logits = model(torch.tensor([tokens[start:target]])).logits[0, -1].double()
        losses.append(torch.logsumexp(logits, 0).item() - logits[tokens[target]].item())
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.RandomState(1).randint(0, 500, 150).tolist()


@pytest.mark.parametrize(("length", "step"), [(32, 1), (32, 7), (32, 32), (64, 16)])
def test_the_mean_loss_is_that_of_a_token_by_token_computation(tiny_model, tokens, length, step):
    expected = brute_force(tiny_model, tokens, length, step)
    model = load_model(str(tiny_model)).eval()
    windows = Windows(tokens, length, step)
    for batch_size in (1, 4, None):
        scores = [one for batch in score(model, windows, batches(windows, batch_size)) for _, one in batch]
        assert sum(len(one.hits) for one in scores) == 149
        assert sum(one.loss for one in scores) / 149 == pytest.approx(expected, abs=1e-5)


def test_rows_of_different_lengths_share_a_batch(tiny_model, tokens):
    """Padding is never seen; hits are the argmax of stock GPT-2."""
    rows = [Row(tokens[:5], 2), Row(tokens[20:60], 1), Row(tokens[7:9], 1), Row(tokens[10:40], 29)]
    model = load_model(str(tiny_model)).eval()
    stock = GPT2LMHeadModel.from_pretrained(tiny_model).eval()
    with torch.no_grad():
        logits = [stock(torch.tensor([row.ids[:-1]])).logits[0, -row.scored :] for row in rows]
    best = [
        tuple((part.argmax(-1) == torch.tensor(row.ids[-row.scored :])).tolist()) for part, row in zip(logits, rows)
    ]
    (batch,) = score(model, rows, [range(4)])
    assert [number for number, _ in batch] == [0, 1, 2, 3]
    assert [one.hits for _, one in batch] == best
    for (_, one), part, row in zip(batch, logits, rows):
        loss = torch.nn.functional.cross_entropy(part, torch.tensor(row.ids[-row.scored :]), reduction="sum")
        assert one.loss == pytest.approx(loss.item(), abs=1e-4)


def test_hits_are_the_argmax(tiny_model, tokens):
    stock = GPT2LMHeadModel.from_pretrained(tiny_model).eval()
    with torch.no_grad():
        best = int(stock(torch.tensor([tokens[:10]])).logits[0, -1].argmax())
    rows = [Row([*tokens[:10], best], 1), Row([*tokens[:10], (best + 1) % 500], 1)]
    (((_, right), (_, wrong)),) = score(load_model(str(tiny_model)).eval(), rows, [range(2)])
    assert right.hits == (True,) and wrong.hits == (False,) and right.loss < wrong.loss


def test_batches_come_in_order_and_hold_every_row_once(tiny_model, tokens):
    """Also where more are in flight than there are, and where fewer."""
    model = load_model(str(tiny_model)).eval()
    windows = Windows(tokens, 16, 8)
    for size in (1, 4, 5, 100):
        scored = list(score(model, windows, batches(windows, size)))
        assert [n for batch in scored for n, _ in batch] == list(range(len(windows)))
        assert max(map(len, scored)) <= size


def test_a_batch_has_as_many_rows_as_tokens_fit():
    rows = [Row(range(1 + n), 1) for n in (*[1024] * 17, *[90] * 400, *[2 * BATCH_TOKENS], 7)]
    found = batches(rows, None)
    assert [number for batch in found for number in batch] == list(range(len(rows)))
    assert [len(batch) for batch in found][:2] == [16, 16] and found[-2:] == [range(417, 418), range(418, 419)]
    for batch, after in itertools.pairwise(found):
        longest = max(len(rows[number].ids) - 1 for number in batch)
        assert len(batch) == 1 or len(batch) * longest <= BATCH_TOKENS
        assert (len(batch) + 1) * max(longest, len(rows[after[0]].ids) - 1) > BATCH_TOKENS


def test_only_scored_positions_get_logits(tiny_model, tokens):
    model = load_model(str(tiny_model)).eval()
    seen = []

    def scores(hidden, weight, targets):
        seen.append(hidden.shape)
        return token_scores(hidden, weight, targets)

    model.output_scores = scores
    windows = Windows(tokens, 64, 8)
    list(score(model, windows, batches(windows, 4)))
    assert sum(shape[0] for shape in seen) == 149 and all(len(shape) == 2 for shape in seen)


def test_nan_weights_are_reported(tiny_model, tokens):
    model = load_model(str(tiny_model)).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(GptlmError, match="computes NaN or infinity"):
        list(score(model, Windows(tokens, 64, 8), [range(2)]))
