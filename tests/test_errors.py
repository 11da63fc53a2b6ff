"""The text of another library's error: one whole sentence, without terminal codes."""

import errno
import os
import pickle

import numpy as np
import pytest
import torch

from gptlm.errors import GptlmError, UsageError, doing, from_worker, is_out_of_memory, printed, reason_of, stage_of


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no room. Try more.\nSecond line"), "no room"),
        (
            ValueError("pip 1.5 of e.g. torch is old, \x1b[1mdo not\x1b[0m use it\nmore"),
            "pip 1.5 of e.g. torch is old, do not use it",
        ),
        (
            RuntimeError("Error(s) in loading X:\n\tsize mismatch for a.\n\tsize mismatch for b."),
            "Error(s) in loading X: size mismatch for a",
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), "No space left on device"),
        (KeyError("cpu"), "'cpu' is missing"),
        (ValueError(), "ValueError"),
        (ValueError("w " * 300 + "end"), "w " * 300 + "end"),
    ],
)
def test_a_reason_is_a_whole_sentence(error, says):
    assert reason_of(error) == says


class Failing(torch.utils.data.Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, number):
        raise self.error


@pytest.mark.parametrize("error", [GptlmError("the file is cut: copy it again"), ZeroDivisionError("division by zero")])
def test_an_error_of_a_dataloader_worker_has_no_traceback(error):
    with pytest.raises(type(error)) as caught:
        list(torch.utils.data.DataLoader(Failing(error), num_workers=1))
    assert "Traceback" in str(caught.value)
    assert from_worker(str(caught.value)) == str(error)
    assert from_worker(str(error)) == str(error)


def test_torch_s_long_message_about_pickles_is_one_sentence(tmp_path):
    """The text that torch writes today: bold type, advice to trust the file, links."""
    torch.save({"a": np.float64(1)}, tmp_path / "x")
    with pytest.raises(pickle.UnpicklingError) as caught:
        torch.load(tmp_path / "x", weights_only=True)
    assert "\x1b[1m" in str(caught.value)
    assert reason_of(caught.value) == "Weights only load failed"


def test_the_innermost_stage_counts_and_our_own_errors_have_none():
    def fail(error):
        with doing("training"), doing(lambda: "reading row 3"):
            raise error

    with pytest.raises(ZeroDivisionError) as caught:
        fail(ZeroDivisionError())
    assert stage_of(caught.value) == "while reading row 3"
    with pytest.raises(GptlmError) as ours:
        fail(GptlmError("x"))
    assert stage_of(ours.value) is None


def test_every_out_of_memory_error_is_recognized():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("x"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("out of memory lane"))


def test_many_problems_of_a_command_are_three_lines():
    """A problem has a semicolon of its own, so numbers separate those that share a line."""
    problems = [f"--a {n} is not positive; give 1 or more" for n in range(5)]
    for count in (1, 2, 3):
        assert printed(UsageError("\n".join(problems[:count]))) == "\n".join(problems[:count])
    first, second, third = printed(UsageError("\n".join(problems))).splitlines()
    assert (first, second) == (problems[0], problems[1])
    assert third == f"3 more: (3) {problems[2]} (4) {problems[3]} (5) {problems[4]}"
    assert printed(GptlmError("one\ntwo\nthree\nfour")).count("\n") == 3
