"""The planner's arithmetic against what was measured on H100 and H200 cards (torch.cuda.max_memory_allocated, GiB).

benchmarks/strategies.py, 345M, 1024 tokens, 20 steps: micro-batch 16 on one card, 8 on two; with DeepSpeed's own
buckets of 5e8 elements, but for NOW. LAYOUTS: the first process of two to eight that share
one H200; tensor 2 ran without the other.
"""

from dataclasses import replace

import pytest

from gptlm.planner.memory import GIB, Layout, Sizes, in_flight, memory_of

M345 = Sizes(layers=24, width=1024, inner=4096, heads=16, vocabulary=50304, positions=1024, length=1024)
TWO = {"data": 2, "shards": 2, "micro": 8}
MEASURED = [
    (Layout(micro=16, precision="fp32"), 29.0),
    (Layout(micro=16, precision="O1"), 19.3),
    (Layout(micro=16), 19.0),
    (Layout(micro=16, recompute="full"), 7.7),
    (Layout(micro=16, recompute="full_attn"), 16.0),
    (Layout(micro=16, recompute="core_attn"), 19.0),
    (Layout(**TWO, precision="O1"), 13.7),
    (Layout(**TWO), 13.6),
    (Layout(**TWO, stage=1), 10.8),
    (Layout(**TWO, stage=2), 10.8),
    (Layout(**TWO, stage=3), 11.2),
    (Layout(**TWO, stage=2, precision="O1"), 18.5),
]


BILLION = Sizes(layers=24, width=2048, inner=8192, heads=16, vocabulary=50304, positions=1024, length=1024)
LARGER = [  # 1.3B, one H200
    (Layout(micro=8), 35.26),
    (Layout(micro=8, recompute="full"), 25.13),
    (Layout(micro=8, recompute="full_attn"), 32.24),
    (Layout(data=2, shards=2, micro=4, stage=2), 18.09),
]
M67 = Sizes(layers=32, width=4096, inner=16384, heads=32, vocabulary=50304, positions=1024, length=1024)
LAYOUTS = [
    (M345, Layout(tensor=2, micro=16), 11.0),
    (M345, Layout(tensor=4, micro=16), 7.09),
    (M345, Layout(tensor=4, micro=16, sequence=True), 4.82),
    (M345, Layout(pipeline=4, micro=2, accumulation=8), 3.55),
    (M345, Layout(tensor=2, pipeline=2, micro=2, accumulation=8), 2.58),
    (M345, Layout(tensor=2, data=2, shards=2, stage=2, micro=8), 5.92),
    (M345, Layout(data=4, shards=4, stage=2, micro=4), 5.95),
    (M345, Layout(**TWO, stage=3), 10.32),
    (M345, Layout(data=8, shards=8, stage=2, accumulation=2, recompute="full"), 2.45),
    (BILLION, Layout(data=4, shards=4, stage=2, micro=2), 10.91),
    (M67, Layout(tensor=4, micro=1, recompute="full"), 31.12),
]
TWO_CARDS = [  # two H200, 345M and 1.3B
    (M345, Layout(micro=16, data=2, shards=2, stage=3), 16.96),
    (M345, Layout(tensor=2, micro=16, accumulation=2, sequence=True), 9.51),
    (M345, Layout(pipeline=2, micro=4, accumulation=8), 6.22),
    (BILLION, Layout(micro=8, accumulation=2), 32.77),
    (BILLION, Layout(micro=8, data=2, shards=2, stage=3), 25.12),
    (BILLION, Layout(tensor=2, micro=8, accumulation=2), 17.95),
    (BILLION, Layout(tensor=2, micro=8, accumulation=2, sequence=True), 16.45),
    (BILLION, Layout(pipeline=2, micro=2, accumulation=8), 13.78),
]


NOW = [  # one and two H200, gradients exchanged in one go; benchmarks/train.py
    (M345, Layout(micro=8), 11.6),
    (M345, Layout(micro=16), 18.2),
    (M345, Layout(micro=32), 30.3),
    (BILLION, Layout(micro=8), 30.3),
    (replace(BILLION, float8_layers=22), Layout(micro=8), 30.9),
    (M345, Layout(micro=16, data=2, shards=2, stage=1), 16.9),
    (M345, Layout(micro=16, data=2, shards=2, stage=2), 16.9),
]


@pytest.mark.parametrize(
    ("sizes", "layout", "measured"),
    [(M345, *row) for row in [*MEASURED, (Layout(micro=32), 30.95)]] + [(BILLION, *row) for row in LARGER],
)
def test_measured_memory_is_foretold_within_15_percent(sizes, layout, measured):
    assert memory_of(sizes, layout, bucket=5 * 10**8).total / GIB == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("sizes", "layout", "measured"), NOW + LAYOUTS + TWO_CARDS)
def test_so_it_is_with_our_own_buckets(sizes, layout, measured):
    assert memory_of(sizes, layout).total / GIB == pytest.approx(measured, rel=0.15)


def test_a_large_model_needs_most_in_the_update():
    """6.7B over 4 tensor-parallel cards, recomputed: gradients in half precision and in float32, 6 bytes each."""
    found = memory_of(M67, Layout(tensor=4, micro=1, recompute="full"))
    own = (M67.parameters - 2 * 4096) / 4
    assert found.update == pytest.approx(6 * own)
    assert found.total == pytest.approx((14 + 6) * own)


@pytest.mark.parametrize(("precision", "bytes_each"), [("O2", 2), ("fp32", 4)])
def test_tensor_parallelism_has_two_buckets(precision, bytes_each):
    """Of 5e7 elements where nothing else is said: 200 MB in half precision, however small the model.

    Where half-precision gradients are exchanged in one go it has none.
    """
    layout = Layout(tensor=2, precision=precision, stage=3)
    assert memory_of(M345, layout).buffers == 2 * 5 * 10**7 * bytes_each
    assert memory_of(M345, layout, bucket=1000).buffers == 2 * 1000 * bytes_each
    assert memory_of(M345, Layout(tensor=2, stage=1)).buffers == 0


def test_matrices_have_two_float8_copies():
    """Those of 22 layers: 12 D^2 values of one byte, as they are and transposed."""
    more = memory_of(replace(M345, float8_layers=22), Layout()).total - memory_of(M345, Layout()).total
    assert more == 22 * 2 * 12 * 1024**2


def test_parameters():
    """Those of GPT-2 medium with a padded vocabulary: 24 x (12 D^2 + 13 D) + (50304 + 1024) D + 2 D, D = 1024."""
    assert M345.parameters == 24 * (12 * 1024**2 + 13 * 1024) + (50304 + 1024) * 1024 + 2 * 1024


def test_what_each_strategy_saves():
    """Bytes by hand: 16 per parameter without sharding under O2; over 4 replicas 16 / 4 of them at stage 3."""
    parameters = M345.parameters - 2 * 1024  # the final norm is left out
    plain = memory_of(M345, Layout(micro=1))
    assert plain.weights + plain.gradients + plain.optimizer == pytest.approx(16 * parameters)
    for stage, share in ((1, 2 + 2 + 12 / 4), (2, 2 + 2 / 4 + 12 / 4), (3, 16 / 4)):
        found = memory_of(M345, Layout(micro=1, data=4, shards=4, stage=stage))
        assert found.weights + found.gradients + found.optimizer == pytest.approx(share * parameters)
    halved = memory_of(M345, Layout(micro=1, tensor=2))
    assert halved.weights == pytest.approx(plain.weights / 2)


def test_activations_of_sequence_parallelism_are_a_share_of_all():
    whole = memory_of(M345, Layout(micro=4)).activations
    assert memory_of(M345, Layout(micro=4, tensor=4, sequence=True)).activations == pytest.approx(whole / 4)
    assert memory_of(M345, Layout(micro=4, tensor=4)).activations > whole / 4


def test_micro_batches_in_flight():
    assert in_flight(Layout()) == 1
    assert in_flight(Layout(pipeline=4, accumulation=8)) == 4
    assert in_flight(Layout(pipeline=4, accumulation=2)) == 2
    assert in_flight(Layout(pipeline=4, accumulation=8, chunks=2)) == 4 * (1 + 3 / 8)


def test_an_output_embedding_that_has_to_be_padded_is_copied():
    """In half precision; the embedding itself with its gradient and optimizer state is smaller by 47 rows."""
    padded, plain = (memory_of(replace(M345, vocabulary=rows), Layout(micro=16)) for rows in (50257, 50304))
    assert padded.output - plain.output == pytest.approx(50257 * 1024 * 2, rel=0.02)
