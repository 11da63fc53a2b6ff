"""Random numbers of processes that share a layer."""

import pytest
import torch

from gptlm.parallel.tensor import own_random_numbers

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=GPU)])
def test_dropout_of_split_work_is_each_process_s_own_and_the_rest_is_common(kind):
    device = torch.device(kind)

    def drawn(rank, seed=5):
        torch.manual_seed(seed)
        found = [torch.rand(40, device=device)]
        for _ in range(2):
            with own_random_numbers(rank, device):
                found.append(torch.rand(40, device=device))
            found.append(torch.rand(40, device=device))
        return torch.stack(found)

    first, again, second, other = drawn(0), drawn(0), drawn(1), drawn(0, seed=6)
    common, own = [0, 2, 4], [1, 3]
    assert torch.equal(first, again)
    assert torch.equal(first[common], second[common])
    different = [*first, *second[own], *other]
    for number, one in enumerate(different):
        assert not any(torch.equal(one, another) for another in different[:number])


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_same_is_drawn_again_from_the_same_state(kind):
    """As recomputing a block does, which restores the generators."""
    device = torch.device(kind)
    devices = [] if kind == "cpu" else [torch.cuda.current_device()]

    def block():
        with own_random_numbers(1, device):
            return torch.rand(40, device=device)

    torch.rand(7, device=device)
    with torch.random.fork_rng(devices):
        first = block()
    assert torch.equal(block(), first)
