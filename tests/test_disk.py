"""Messages about failed writes: free space is mentioned where it is short, other causes have their own advice."""

import errno
import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from gptlm.checkpoint.folder import writing
from gptlm.disk import write_failure
from gptlm.errors import GptlmError


def of(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "bytes are free there); make room"),
        (errno.EDQUOT, "bytes are free there); make room"),
        (errno.EFBIG, "File too large; raise the limit"),
        (errno.EACCES, "Permission denied; make the folder writable"),
        (errno.EROFS, "Read-only file system; make the folder writable"),
        (errno.ENOENT, "does another run write into this folder?"),
    ],
)
def test_each_cause_has_its_advice(tmp_path, number, says):
    told = write_failure(of(number), tmp_path / "x")
    assert says in told and ("free" in told) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in ("file/x", "file/deeper/x"):
        for attempt in (lambda path: path.parent.mkdir(parents=True, exist_ok=True), lambda path: path.write_text("")):
            with pytest.raises(OSError) as caught:
                attempt(tmp_path / place)
            told = write_failure(caught.value, tmp_path / place)
            assert f"{tmp_path / 'file'} is a file, not a folder" in told and "free" not in told


def test_what_safetensors_and_torch_say_of_a_limit_is_understood(tmp_path):
    """A limit on the size of files: both libraries wrap the system's error in their own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors = {"a": torch.zeros(100_000)}
    for save in (lambda: save_file(tensors, tmp_path / "x"), lambda: torch.save(tensors, tmp_path / "y")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            with (
                pytest.raises(GptlmError, match="cannot write the model") as caught,
                writing(tmp_path / "x", "the model"),
            ):
                save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "free" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), AssertionError(), RuntimeError("ZeRO")]
)
def test_what_is_no_failure_of_writing_passes(tmp_path, error):
    with pytest.raises(type(error)) as caught, writing(tmp_path / "x", "the checkpoint"):
        raise error
    assert caught.value is error and caught.value.__notes__ == ["while saving the checkpoint"]
