"""A file that becomes shorter while a library has mapped it ends the command with a sentence, and with its clean-up."""

import os
import time

import pytest
import torch
from safetensors.torch import save_file

from gptlm import GptlmError
from gptlm.api.running import running
from gptlm.mapped_files import FileCutOff
from gptlm.model.safetensors_io import LazyTensors
from gptlm.pickles.torch_file import read_torch
from gptlm.signals import ending_on_signals, held

NUMBERS = 100_000  # so many that both threads of torch read behind the end


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def of_safetensors(path):
    save_file({"a": torch.ones(NUMBERS)}, path)
    return LazyTensors([path])["a"]


def of_torch(path):
    torch.save({"a": torch.ones(NUMBERS)}, path)
    return read_torch(path)["a"]


def wait():
    """Until a thread interrupts this one, at most a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.filterwarnings("error")  # of an exception that is lost
@pytest.mark.parametrize("read", [of_safetensors, of_torch])
def test_it_is_named_also_where_signals_are_held(tmp_path, read):
    path = tmp_path / "weights"
    with pytest.raises(FileCutOff, match=f"^{path} became shorter while it was read"), ending_on_signals(), held():
        tensor = read(path)
        os.truncate(path, 9000)
        tensor.sum()
        wait()
        raise AssertionError("the command goes on")


def test_a_library_that_drops_the_exception_does_not_make_it_a_success(tmp_path):
    found = []

    def dropping():
        try:
            tensor = of_safetensors(tmp_path / "x")
            os.truncate(tmp_path / "x", 9000)
            tensor.sum()
            wait()
        except BaseException as error:
            found.append(error)

    with pytest.raises(GptlmError, match="x became shorter"), running({}):
        dropping()
    assert isinstance(found[0], FileCutOff)
