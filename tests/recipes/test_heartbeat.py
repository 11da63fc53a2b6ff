"""The thread that shows the other ranks that this one is alive."""

import subprocess
import sys

CODE = """
import atexit, threading
import torch.distributed as dist
from gptlm.recipes.common.heartbeat import Heartbeat

atexit.register(lambda: print("at exit:", [thread.name for thread in threading.enumerate()]))  # runs last
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
beat = Heartbeat(store, 0, 1, 60, is_served_by_rank_0=True)
print("running:", [thread.name for thread in threading.enumerate()])
beat.end()
"""


def test_the_thread_has_ended_when_the_interpreter_ends():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    running, at_exit = done.stdout.splitlines()
    assert "heartbeat" in running
    assert "heartbeat" not in at_exit
