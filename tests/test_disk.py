"""Messages about failed writes: free space is mentioned where it is short, other causes have their own advice."""

import errno
import os
import resource
import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from gptlm import disk
from gptlm.checkpoint.folder import writing
from gptlm.cli import main
from gptlm.disk import read_file, write_failure
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import train_tokenizer


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
            with pytest.raises(OSError) as caught:  # noqa: PT011 - the test is about its message
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


@contextmanager
def files_limited_to(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def world(tiny_model, tmp_path_factory):
    """A model with its tokenizer, adapters of it, a text, and the record of a training."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(tiny_model, folder / "model")
    train_tokenizer(["the cat sat on the mat " * 20], 300).save_pretrained(folder / "model")
    model = GPT2LMHeadModel.from_pretrained(tiny_model)
    settings = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    get_peft_model(model, settings).save_pretrained(folder / "adapters")
    (folder / "text.txt").write_text("the cat sat on the mat\n\n" * 500)
    (folder / "run").mkdir()
    (folder / "run" / "run_log.jsonl").write_text('{"event": "start", "step": 0, "max_steps": 1}\n')
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "tokenizer --input_path text.txt --vocab_size 300 --output_dir {new}",
        "convert --from model --to megatron --output {new}",
        "convert --from model --to hf --output {new}",
        "convert --from model --to gguf --output {new}",
        "convert --from model --to paddle --output {new}",
        "convert --from model --to paddle --paddle_file pdparams --output {new}",
        "convert --from adapters --to paddle --output {new}",
        "merge-lora --lora_path adapters --model_name_or_path model --output_path {new}",
        "preprocess --input_path text.txt --model_name_or_path model --output_prefix {new}/t --workers 1",
        "report run --output {new}.html",
    ],
)
def test_a_full_disk_is_one_sentence_and_nothing_is_left(world, tmp_path, monkeypatch, capsys, line):
    """A limit on the size of files stands for the full disk."""
    monkeypatch.chdir(world)
    with files_limited_to(1000):
        code = main(line.format(new=tmp_path / "made" / "new").split())
    (said,) = [text for text in capsys.readouterr().err.splitlines() if " error: " in text]
    assert code == 1 and "error: cannot write " in said and "File too large; raise the limit" in said
    assert list(tmp_path.iterdir()) == []


def test_no_space_behind_another_error_of_torch_is_found(tmp_path):
    """torch's zip writer fails again when it closes the file, and says that only."""
    try:
        try:
            raise of(errno.ENOSPC)
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 8192 vs 8080")
    except RuntimeError as error:
        assert write_failure(error, tmp_path).startswith("No space left on device (")


def test_devices_are_not_read(tmp_path):
    for device in ("/dev/zero", "/dev/full", "/dev/urandom"):
        with pytest.raises(OSError, match="it is a device"):
            read_file(device)
    assert read_file("/dev/null") == b""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"text"))
    writer.start()
    assert read_file(tmp_path / "pipe") == b"text"
    writer.join()


def test_a_pipe_without_a_writer_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PATIENCE", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nothing was written to this pipe"):
        read_file(tmp_path / "pipe")


def test_a_writer_may_take_longer_than_its_first_byte_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PATIENCE", 0.2)
    source, sink = os.pipe()

    def write():
        time.sleep(0.6)
        os.write(sink, b"te")
        time.sleep(0.1)
        os.write(sink, b"xt" * 100_000)
        os.close(sink)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_file(f"/dev/fd/{source}") == b"te" + b"xt" * 100_000
    writer.join()
    os.close(source)


def test_earlier_checkpoints_are_mentioned_where_there_are_any(tmp_path):
    def said(path):
        with pytest.raises(GptlmError) as caught, writing(path, "it"):
            raise of(errno.ENOSPC)
        return str(caught.value)

    paths = (tmp_path / ".checkpoint-4.incomplete", tmp_path, tmp_path / "train_results.json")
    assert not any("intact" in said(path) for path in paths)
    (tmp_path / "checkpoint-2").mkdir()
    assert all("earlier checkpoints are intact" in said(path) for path in paths)


def test_a_tokenizer_is_written_whole_or_not_at_all(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(f"word{i} and {i * 7919} more" for i in range(400)))
    words = f"tokenizer --input_path {tmp_path}/text.txt --output_dir {tmp_path}/tok --vocab_size 400".split()
    with files_limited_to(3000):
        assert main(words) == 1
    said = capsys.readouterr().err
    assert "cannot write the tokenizer" in said and "File too large" in said and said.count("\n") == 1
    assert not (tmp_path / "tok").exists()
    assert main(words) == 0 and (tmp_path / "tok" / "vocab.json").is_file()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), AssertionError(), RuntimeError("ZeRO")]
)
def test_what_is_no_failure_of_writing_passes(tmp_path, error):
    with pytest.raises(type(error)) as caught, writing(tmp_path / "x", "the checkpoint"):
        raise error
    assert caught.value is error and caught.value.__notes__ == ["while saving the checkpoint"]
