"""A command of which one process fails at a chosen moment of its first start.

    failing.py HOW RANK WHEN COMMAND [argument ...]

HOW: "kill", "stop" (SIGSTOP), "full" (no file may grow beyond 20,000 bytes from then on), "node" (with its launcher),
"alone" (it waits until it gets SIGTERM, if it is the only process, and handles that as commands do) or "late" (it fails
never, and starts two seconds after the others when they are restarted).
"HOW@nodes": each process is alone on a node whose file system has no locks, in the folder nodeRANK if that exists; the
clock of node 1 is a day behind.
WHEN: "step N", when that step has ended; "evaluation", at its first batch; or a part of a path, when it is opened.
"""

import errno
import fcntl
import os
import resource
import signal
import sys
import time
from contextlib import nullcontext

from transformers import TrainerCallback

from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError
from gptlm.failures import is_lost_process
from gptlm.recipes.common.hooks import Hooks
from gptlm.signals import Terminated, ending_on_signals, installed


def fail(how: str) -> None:
    if how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    elif how == "alone":
        while os.environ["WORLD_SIZE"] == "1" and (handler := installed()) and handler.received is None:
            time.sleep(0.1)
    else:
        if how == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


class Failing(TrainerCallback):
    def __init__(self, how: str, when: str):
        self.how, self.when = how, when

    def on_step_end(self, args, state, control, **_):
        if self.when == f"step {state.global_step}":
            fail(self.how)

    def on_prediction_step(self, args, state, control, **_):
        if self.when == "evaluation":
            self.when = ""
            fail(self.how)


def run(command: str, words: list[str], callbacks: tuple) -> None:
    if command == "pretrain":
        from gptlm.recipes.pretrain.run import pretrain

        pretrain(parse_pretrain(words, os.environ), Hooks(callbacks=callbacks))
    elif command == "sft":
        from gptlm.recipes.sft.run import sft

        sft(parse_sft(words, os.environ), Hooks(callbacks=callbacks))
    else:
        from gptlm.commands.evaluate import parse_evaluate
        from gptlm.recipes.evaluate import evaluate

        evaluate(*parse_evaluate(words, int(os.environ["WORLD_SIZE"])))


def be_a_node(rank: str) -> None:
    """What differs on another machine, for this process."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank)
    if os.path.isdir(f"node{rank}"):
        os.chdir(f"node{rank}")

    def flock(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = flock
    if rank == "1":
        now = time.time
        time.time = lambda: now() - 86400


def main(how: str, rank: str, when: str, command: str, *words: str) -> int:
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    callbacks: tuple = ()
    how, _, nodes = how.partition("@")
    if nodes:
        be_a_node(os.environ["RANK"])
    if os.environ["RANK"] == rank:
        if not is_first:
            time.sleep(2)  # the others find what this process has left in the store before
        elif how != "late":
            callbacks = (Failing(how, when),)
            pending = [when]

            def at_path(event: str, arguments: tuple) -> None:
                if event == "open" and pending and pending[0] in str(arguments[0]):
                    pending.clear()
                    fail(how)

            sys.addaudithook(at_path)
    try:
        with ending_on_signals(is_launched=True) if how == "alone" else nullcontext():
            run(command, list(words), callbacks)
    except Terminated as signalled:
        return signalled.reported(command)
    except GptlmError as error:
        print(f"rank {os.environ['RANK']}: error: {error}", file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        print(f"rank {os.environ['RANK']}: another process ended", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
