"""A forked process does what a new interpreter does."""

import inspect
import os
import signal
import subprocess
import sys
import time

import pytest
from coverage import CoverageData

from gptlm.planner.report import plan
from tests.processes import ROOT, Forked, clean_environment, run, start

SHOW = """
import atexit, json, os, random, sys
import numpy as np
print(json.dumps([sys.argv, sys.path, sys.orig_argv, __name__, __file__, os.getcwd()]))
print(sorted(os.listdir("/proc/self/fd")))
print(json.dumps([sorted(os.environ.items()), sys.stdout.line_buffering, sys.stderr.line_buffering]))
atexit.register(print, "the end")
print(os.getpid(), random.random(), np.random.rand(), file=sys.stderr)
"""
ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('a sentence')": 1,
    "sys.exit()": 0,
    "1 / 0": 1,
    "os._exit(7)": 7,
    "os.kill(os.getpid(), signal.SIGKILL)": -9,
    "os.kill(os.getpid(), signal.SIGTERM)": -15,
    "os.kill(os.getpid(), signal.SIGINT)": -2,
    "os.close(1)": 120,  # what was printed cannot be written
}


def both(command, **more):
    """The command in a new interpreter and forked."""
    environment = clean_environment(**more.pop("environment", {}))
    new = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, **more)
    return new, run(command, env=environment, **more)


def test_what_a_process_finds(tmp_path):
    script = tmp_path / "folder" / "show.py"
    script.parent.mkdir()
    script.write_text(SHOW)
    for environment in ({}, {"PYTHONPATH": f"{ROOT}:/nowhere", "RANK": "1"}):
        new, forked = both([sys.executable, script, "a b", ""], cwd=tmp_path, environment=environment)
        assert (new.returncode, forked.returncode) == (0, 0), forked.stderr
        assert new.stdout == forked.stdout and new.stdout.endswith("\nthe end\n")
        (_, *new_numbers), (_, *numbers) = (done.stderr.split() for done in (new, forked))
        assert not set(new_numbers) & set(numbers)
        again = run([sys.executable, script], cwd=tmp_path, env=clean_environment())
        assert not set(again.stderr.split()) & set(numbers)


@pytest.mark.parametrize("code", ENDS)
def test_how_a_process_ends(code, tmp_path):
    (tmp_path / "end.py").write_text(f"import os, signal, sys\nprint('out')\n{code}\n")
    new, forked = both([sys.executable, tmp_path / "end.py"])
    assert (new.returncode, forked.returncode) == (ENDS[code], ENDS[code])
    assert new.stdout == forked.stdout and new.stderr.splitlines()[-1:] == forked.stderr.splitlines()[-1:]


def test_a_training_is_the_same(corpus_folder, tiny_model, tmp_path):
    """All files that it writes, but for times and speeds; and its log."""
    words = "--max_seq_length 16 --max_steps 4 --save_steps 2 --logging_steps 1 --split 80,10,10 --do_train --do_eval"
    words += f" --eval_iters 1 --report_to none --input_dir {corpus_folder / 'mmap'} --model_name_or_path {tiny_model}"
    words += " --continue_training --device cpu --disable_tqdm --output_dir"
    command = [sys.executable, ROOT / "scripts" / "run_pretrain.py", *words.split()]
    environment = clean_environment()
    ran = subprocess.run([*map(str, command), tmp_path / "new"], env=environment, capture_output=True, text=True)
    forked = run([*command, tmp_path / "forked"])
    assert (ran.returncode, forked.returncode) == (0, 0), forked.stderr
    assert len(ran.stdout.splitlines()) == len(forked.stdout.splitlines()) and ran.stderr == forked.stderr
    names = [{str(f.relative_to(tmp_path / name)) for f in (tmp_path / name).rglob("*")} for name in ("new", "forked")]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith((".safetensors", ".pt", ".bin")):
            assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "forked" / name).read_bytes(), name
    assert "checkpoint-2/model.safetensors" in names[0]


def test_what_is_read_at_the_start_gets_an_interpreter(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text("import time\ntime.sleep(60)\n")
    ended = []
    for more, kind in (({}, Forked), ({"LC_ALL": "C"}, subprocess.Popen), ({"OMP_NUM_THREADS": 2}, subprocess.Popen)):
        process = start([sys.executable, script], env=clean_environment(**more))
        assert type(process) is kind
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        ended.append(process.wait(60))
    assert ended == [-signal.SIGTERM] * 3


def test_ranks_meet_and_end_together(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "numbers = torch.tensor([dist.get_rank() + 1])\n"
        "dist.all_reduce(numbers)\n"
        "print(numbers.item(), flush=True)\n"
        "if len(sys.argv) > 1:\n"
        "    sys.exit(3) if dist.get_rank() else time.sleep(60)\n"
        "dist.destroy_process_group()\n"
    )
    good = run([sys.executable, script], processes=3)
    assert (good.returncode, good.stdout) == (0, "6\n" * 3), good.stderr
    begun = time.monotonic()
    bad = run([sys.executable, script, "fails"], processes=2)
    assert (bad.returncode, bad.stdout) == (1, "3\n" * 2) and time.monotonic() < begun + 55


def test_nothing_outlives_the_session(tmp_path):
    """Also where it is killed: the server and what it has forked end."""
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "session.py").write_text(
        "import sys, time\nfrom tests.processes import server, start\n"
        f"process = start([sys.executable, {str(tmp_path / 'wait.py')!r}])\n"
        "print(process.pid, server()._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    environment = clean_environment(PYTHONPATH=ROOT)
    session = subprocess.Popen([sys.executable, tmp_path / "session.py"], env=environment, stdout=subprocess.PIPE)
    pids = session.stdout.readline().split()
    session.kill()
    session.wait()
    session.stdout.close()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{int(pid)}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(os.path.exists(f"/proc/{int(pid)}") for pid in pids)


MEASURED = """
import sys
from tests.processes import run
WORDS = "plan --num_hidden_layers 4 --hidden_size 64 --num_attention_heads 4 --max_seq_length 16 --max_steps 3"
def test_plan():
    done = run([sys.executable, "-m", "gptlm", *WORDS.split()])
    assert done.returncode == 0, done.stderr
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_coverage_counts_what_a_forked_command_runs(workers, tmp_path):
    (tmp_path / "test_measured.py").write_text(MEASURED)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_sessionfinish\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--cov", "--cov-report=", *workers]
    command += ["-c", ROOT / "pyproject.toml", f"--cov-config={ROOT / 'pyproject.toml'}", tmp_path]
    environment = {**clean_environment(PYTHONPATH=ROOT), "COVERAGE_FILE": str(tmp_path / "measured")}
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    data = CoverageData(str(tmp_path / "measured"))
    data.read()
    lines, first = inspect.getsourcelines(plan)
    assert set(data.lines(inspect.getsourcefile(plan)) or ()) & set(range(first + 1, first + len(lines)))
