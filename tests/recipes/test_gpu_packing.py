"""On a CUDA device: packed and padded fine-tuning have the losses of each row alone."""

import pytest
import torch

from tests.recipes.test_sft import NO_DROPOUT, ROWS, by_hand, examples, losses, model, tune  # noqa: F401 - fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PACKED = ("--zero_padding", "--max_length", 40)


@pytest.mark.parametrize("packing", [(), PACKED, ("--pad_to_multiple_of", 8)], ids=["padded", "packed", "short"])
@pytest.mark.parametrize(
    ("compiled", "precision"),
    [(0, ()), (0, ("--bf16",)), (1, ()), (1, ("--bf16", "--fp16_opt_level", "O2"))],
    ids=["eager fp32", "eager O1", "compiled fp32", "compiled O2"],
)
def test_losses_are_those_of_each_row(tune, model, packing, compiled, precision):  # noqa: F811
    """All rows in one step that changes nothing; the evaluation as well."""
    words = [*NO_DROPOUT, "--per_device_train_batch_size", len(ROWS), "--max_steps", 2, "--learning_rate", 0]
    words += ["--do_eval", "--generate_num", 0, "--device", "gpu", "--torch_compile", compiled, *packing, *precision]
    metrics, history = tune(*words)
    tolerance = 2e-2 if precision else 1e-5
    assert losses(history) == pytest.approx([by_hand(model, ROWS)[0]] * 2, abs=tolerance)
    assert metrics["eval_loss"] == pytest.approx(by_hand(model, ROWS[:5])[0], abs=tolerance)


def test_dropout_of_packed_rows_follows_the_seed(tune):  # noqa: F811
    """The first loss exactly; the order of flash attention's sums for the gradient of q is free."""
    words = ["--attention_probs_dropout_prob", 0.2, "--hidden_dropout_prob", 0, "--device", "gpu", *PACKED]
    first, again, other = (
        losses(tune(*words, "--bf16", "--fp16_opt_level", "O2", "--seed", seed, output=name)[1])
        for name, seed in (("one", 1), ("two", 1), ("three", 2))
    )
    assert first[0] == again[0] != other[0] and first == pytest.approx(again, abs=5e-2)
