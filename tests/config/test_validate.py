"""Checks of files before a run."""

import os

import pytest

from gptlm.config.validate import check_readable
from gptlm.errors import GptlmError


def test_a_pipe_is_not_opened_twice(tmp_path):
    """Its writer would end, as with `--input_file <(head prompts.txt)`."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_readable("input_file", str(path))  # returns, although nothing writes to it
    with pytest.raises(GptlmError, match="cannot read .*none.txt"):
        check_readable("input_file", str(tmp_path / "none.txt"))
