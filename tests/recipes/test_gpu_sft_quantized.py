"""QLoRA on a GPU: matrices in 4 and 8 bits train in bfloat16."""

import pytest

from tests.recipes.test_sft import NO_DROPOUT, examples, losses, model, tune  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("flag", ["--load_in_4bit", "--load_in_8bit"])
def test_quantized_matrices_train(tune, flag):  # noqa: F811
    pytest.importorskip("bitsandbytes")
    words = (*NO_DROPOUT, "--lora", "--device", "gpu", "--bf16", "--fp16_opt_level", "O2")
    plain, quantized = (losses(tune(*words, *more, output=str(len(more)))[1]) for more in ((), (flag,)))
    assert quantized[-1] < quantized[0]
    assert quantized == pytest.approx(plain, rel=0.05)
