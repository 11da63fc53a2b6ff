"""A process that waits too long for another ends with one sentence that names the flag."""

import sys

import pytest

from gptlm.commands.evaluate import parse_evaluate
from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import GptlmError, UsageError
from gptlm.recipes.common.peers import explain_timeout
from tests.processes import run

BOTH = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from gptlm.errors import GptlmError
from gptlm.recipes.common.main_process_first import main_process_first
from gptlm.recipes.common.peers import explain_timeout

def until(path):
    while not path.exists():
        time.sleep(0.05)

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
order = []
for per_node in (False, True):  # the second way round, and again: each wait has an entry of its own
    for number in range(2):
        with main_process_first("the sample index", 600, per_node=per_node):
            if rank == 0:
                time.sleep(0.2)
                (folder / f"built {per_node} {number}").touch()
            order.append((folder / f"built {per_node} {number}").exists())
dist.barrier()
short = dist.new_group(timeout=timedelta(seconds=3))
said = ["", ""]
if rank == 0:
    with main_process_first("the sample index", 600, per_node=True):
        until(folder / "given up")
    until(folder / "given up again")
else:
    try:
        with main_process_first("the sample index", 1, per_node=True):
            said[0] = "it did not wait"
    except GptlmError as error:
        said[0] = str(error)
    (folder / "given up").touch()
    try:
        with explain_timeout(3):
            dist.barrier(short)
    except GptlmError as error:
        said[1] = str(error)
    (folder / "given up again").touch()
(folder / f"said {rank}").write_text("\\n".join([str(all(order)), *said]))
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_waits_are_limited(tmp_path):
    (tmp_path / "both.py").write_text(BOTH)
    result = run([sys.executable, tmp_path / "both.py", tmp_path], processes=2)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "said 0").read_text().split("\n")[0] == "True"
    in_order, index, barrier = (tmp_path / "said 1").read_text().split("\n")
    assert in_order == "True"
    assert index.startswith("rank 0 makes the sample index for longer than 1 s") and "--ddp_timeout" in index
    assert barrier.startswith("another process let this one wait longer than 3 s") and "--ddp_timeout" in barrier


def test_other_errors_stay_what_they_are():
    for text in ("CUDA out of memory", "the run timed out of patience", "gloo: connection reset"):
        with pytest.raises(RuntimeError, match=text), explain_timeout(5):
            raise RuntimeError(text)
    with pytest.raises(GptlmError, match="--ddp_timeout"), explain_timeout(5):
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation")


def test_the_flag(tmp_path):
    words = f"--model_name_or_path gpt2-medium-en --input_dir {tmp_path} --output_dir {tmp_path}/o --max_steps 3"
    assert parse_pretrain([*words.split(), "--ddp_timeout", "7"], {}).training.ddp_timeout == 7
    with pytest.raises(UsageError, match="--ddp_timeout 0: expected 1 to 1000000000 seconds"):
        parse_pretrain([*words.split(), "--ddp_timeout", "0"], {})
    with pytest.raises(UsageError, match="--ddp_timeout 9000000000: expected 1 to 1000000000"):  # 292 years
        parse_pretrain([*words.split(), "--ddp_timeout", "9000000000"], {})
    words = ["--task", "TEXT", "--eval_path", "x", "--model_name_or_path", str(tmp_path)]
    with pytest.raises(UsageError, match="--ddp_timeout 0: expected 1 to 1000000000 seconds"):
        parse_evaluate([*words, "--ddp_timeout", "0"], 1)
    with pytest.raises(UsageError, match="--ddp_timeout 9000000000: expected 1 to 1000000000"):
        parse_evaluate([*words, "--ddp_timeout", "9000000000"], 1)
