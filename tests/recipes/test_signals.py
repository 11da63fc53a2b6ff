"""SIGTERM and SIGHUP: a checkpoint first, no lock and no partial file left, and a resumed run equals a whole one."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from gptlm import cli
from gptlm.checkpoint import folder as checkpoint
from gptlm.model.build import load_model
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.common import heartbeat, training
from gptlm.recipes.common.model import make_model
from tests.processes import start

WORDS = (
    "--continue_training --max_seq_length 16 --max_steps 12 --save_steps 5 --logging_steps 4 --split 80,10,10 "
    "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --eval_iters 2 --device cpu --disable_tqdm "
    "--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1 --learning_rate 1e-2 --report_to none --do_train"
).split()
EVALUATED = "--do_eval --eval_steps 3 --save_steps 3 --load_best_model_at_end --learning_rate 0.3".split()


class Sender(TrainerCallback):
    """Sends this process signal `number` at `event` of the global step `step`."""

    def __init__(self, event: str, step: int, number: int = signal.SIGTERM, times: int = 1):
        self.event, self.step, self.number, self.times = event, step, number, times

    def __getattribute__(self, name):
        if name.startswith("on_") and name == object.__getattribute__(self, "event"):
            return self._send
        return object.__getattribute__(self, name)

    def _send(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.fixture
def command(tiny_model, corpus_folder, tmp_path, monkeypatch, capfd):
    """Run `gptlm pretrain` here, with a callback that sends a signal; returns exit code, stderr and output folder."""
    build = training.build_trainer

    def run(*words, name="out", sender=None):
        def with_sender(*arguments, **more):
            trainer = build(*arguments, **more)
            if sender is not None:
                trainer.add_callback(sender)
            return trainer

        monkeypatch.setattr("gptlm.recipes.pretrain.run.build_trainer", with_sender)
        output = tmp_path / name
        data = ["--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model, "--output_dir", output]
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
        code = cli.main(["pretrain", *map(str, data), *WORDS, *map(str, words)])
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
        assert not list(output.rglob("*.lock")) and not list(output.rglob("*.incomplete*"))
        run.log, error = capfd.readouterr()
        return code, error, output

    return run


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(a[name].equal(b[name]) for name in a)


def evaluations(output: Path) -> list[tuple]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]


def test_a_resumed_run_equals_the_whole_one(command):
    """Signals in a step, at a step that is saved anyway, and after the writing of a checkpoint."""
    _, _, whole = command(name="whole")
    cases = [
        (Sender("on_step_begin", 6), 7),
        (Sender("on_step_end", 5, signal.SIGHUP), 5),
        (Sender("on_save", 10), 10),
    ]
    for sender, step in cases:
        code, error, output = command(name=f"signal-{step}", sender=sender)
        assert code == 128 + sender.number
        assert error == (
            f"gptlm pretrain: ended by {sender.number.name} after step {step}; {output}/checkpoint-{step} is where the "
            "same command resumes\n"
        )
        assert checkpoint.newest(output)[0].manifest.global_step == step
        assert not (output / "model.safetensors").exists()
        page = (output / "report.html").read_text()
        assert f">{step} of 12<" in page and ">stopped<" in page
        assert command(name=output.name)[0] == 0
        assert same_weights(output, whole), step


def test_an_evaluation_that_a_signal_ends_is_made_first_by_the_resumed_run(command):
    """The best model depends on it. On the way the resumed run is ended in the same evaluation again."""
    _, _, whole = command(*EVALUATED, name="whole")
    for _ in range(2):
        code, error, output = command(*EVALUATED, sender=Sender("on_prediction_step", 6))
        assert code == 143 and "after step 6; " in error
        assert checkpoint.newest(output)[0].manifest.evaluation_is_due is True
    assert command(*EVALUATED)[0] == 0
    assert evaluations(output) == evaluations(whole) and len(evaluations(whole)) == 4
    assert same_weights(output, whole)


def test_a_due_evaluation_is_left_to_the_resumed_run(command):
    code, _, output = command(*EVALUATED, sender=Sender("on_step_end", 3))
    assert code == 143 and checkpoint.newest(output)[0].manifest.evaluation_is_due is True
    assert command(*EVALUATED)[0] == 0 and [step for step, _ in evaluations(output)] == [3, 6, 9, 12]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_a_new_folder_is_removed(command, tmp_path, monkeypatch, number):
    def interrupted(*arguments):
        os.kill(os.getpid(), number)
        return make_model(*arguments)

    monkeypatch.setattr("gptlm.recipes.pretrain.run.make_model", interrupted)
    (tmp_path / "there").mkdir()
    for name in ("above/new", "there"):
        code, error, output = command(name=name)
        assert code == 128 + number and error.count("\n") == 1, error
        assert output.exists() == (name == "there")
    assert not (tmp_path / "above").exists() and not list((tmp_path / "there").iterdir())


def test_without_saving(command):
    code, error, output = command("--save_on_signal", 0, sender=Sender("on_step_begin", 6))
    assert code == 143 and error.endswith("SIGTERM after step 7, without a checkpoint of it (save_on_signal 0)\n")
    assert [path.name for path in checkpoint.folders(output)] == ["checkpoint-5"]


def test_a_command_that_begins_anew_is_told_how_to_resume(command):
    code, error, output = command("--overwrite_output_dir", sender=Sender("on_step_begin", 6))
    assert code == 143 and error.endswith(
        "checkpoint-7 is where the same command resumes without --overwrite_output_dir\n"
    )
    assert command()[0] == 0 and checkpoint.newest(output)[0].manifest.global_step == 12


def test_weights_only(command):
    code, error, output = command("--ignore_save_lr_and_optim", sender=Sender("on_step_begin", 6))
    assert code == 143 and error.endswith(f"after step 7; {output}/checkpoint-7 holds its weights\n")
    assert not list((output / "checkpoint-7").glob("optimizer*"))


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin"])
def test_before_the_first_step_is_done_there_is_nothing_to_save(command, event):
    code, error, output = command(sender=Sender(event, 0))
    assert (code, error) == (143, "gptlm pretrain: ended by SIGTERM\n")
    assert not checkpoint.folders(output)


def test_a_second_signal_ends_a_run_at_once(command):
    code, error, output = command(sender=Sender("on_step_begin", 6, times=2))
    assert (code, error) == (143, "gptlm pretrain: ended by SIGTERM\n")
    assert [path.name for path in checkpoint.folders(output)] == ["checkpoint-5"]


def test_a_second_signal_while_a_checkpoint_is_written_leaves_nothing_of_it(command, monkeypatch):
    sender, original = Sender("on_step_begin", 6), checkpoint.sync_tree

    def sync_tree(folder):
        original(folder)
        if folder.name.startswith(".checkpoint-7"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoint, "sync_tree", sync_tree)
    code, error, output = command(sender=sender)  # looks for what is left
    assert (code, error) == (143, "gptlm pretrain: ended by SIGTERM\n")
    assert [path.name for path in checkpoint.folders(output)] == ["checkpoint-5"]
    assert not (output / "report.html").exists()


def test_after_the_last_step_the_model_is_written(command):
    code, error, output = command(sender=Sender("on_train_end", 12))
    assert (code, error) == (143, "gptlm pretrain: ended by SIGTERM\n")
    assert (output / "model.safetensors").exists()


def test_a_run_that_ended_before_its_first_checkpoint_starts_again_and_says_so(command):
    code, _, output = command(sender=Sender("on_step_end", 3, signal.SIGINT))
    says = f"no checkpoint in {output} yet: training starts at step 0 (--save_strategy and --save_steps"
    assert code == 130 and says not in command.log and not checkpoint.folders(output)
    code, error, _ = command()
    assert (code, error) == (0, "")
    assert says in command.log


def test_ctrl_c_saves_nothing(command):
    code, error, output = command(sender=Sender("on_step_end", 7, signal.SIGINT))
    assert (code, error) == (130, "gptlm pretrain: interrupted\n")
    assert [path.name for path in checkpoint.folders(output)] == ["checkpoint-5"]


def test_an_ignored_signal_stays_ignored(command):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert command(sender=Sender("on_step_end", 7, signal.SIGHUP))[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_workers_of_the_data_loader_survive_a_signal_to_the_whole_process_group(command):
    """As batch systems send it."""

    class ToChildren(Sender):
        def _send(self, args, state, control, **kwargs):
            if state.global_step == self.step:
                for worker in multiprocessing.active_children():  # no fork server of the tests
                    os.kill(worker.pid, self.number)
                os.kill(os.getpid(), self.number)

    code, error, output = command("--dataloader_num_workers", 2, sender=ToChildren("on_step_begin", 6))
    assert code == 143 and f"{output}/checkpoint-7" in error, error


def launched(folder: Path, *words: str) -> subprocess.Popen:
    """`gptlm launch` of two processes in `folder`."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "gptlm", "launch", "--nproc_per_node", "2", "-m", "gptlm", "pretrain", *map(str, words)],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(launcher: subprocess.Popen) -> dict[int, psutil.Process]:
    processes = psutil.Process(launcher.pid).children(recursive=True)
    return {int(one.environ()["RANK"]): one for one in processes if "RANK" in one.environ()}


def wait_for(condition, launcher: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and launcher.poll() is None, launcher.communicate(timeout=60)
        time.sleep(0.05)


@pytest.mark.distributed
def test_all_ranks_save_the_step_at_which_one_of_them_or_the_launcher_has_a_signal(tiny_model, corpus_folder, tmp_path):
    """Two ZeRO processes: a signal to rank 1, then to the launcher; the whole run has the same weights."""
    words = [*WORDS, "--max_steps", 2000, "--save_steps", 1000, "--sharding", "stage2"]
    words += ["--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model]
    for number, name in ((signal.SIGHUP, "rank"), (signal.SIGTERM, "launcher")):
        output = tmp_path / name / "out"
        launcher = launched(tmp_path / name, *words, "--output_dir", output)
        log = tmp_path / name / "log" / "workerlog.0"
        wait_for(lambda: log.exists() and "global_step: 4" in log.read_text(), launcher)  # noqa: B023
        ranks = ranks_of(launcher)
        (ranks[1] if name == "rank" else launcher).send_signal(number)
        printed, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 128 + number, printed
        saved = checkpoint.newest(output)[0]
        step = saved.manifest.global_step
        assert printed.count(f"ended by {number.name} after step {step}; {saved.path} is where") == 1, printed
        assert "error" not in printed and not (output / ".lock").exists()
        assert not any(rank.is_running() for rank in ranks.values())


@pytest.mark.distributed
def test_a_stopped_rank_ends_the_run_and_is_named(tiny_model, corpus_folder, tmp_path):
    words = [*WORDS, "--max_steps", 4000, "--save_steps", 4000, "--ddp_timeout", 8]
    words += ["--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model]
    output = tmp_path / "here" / "out"
    launcher = launched(tmp_path / "here", *words, "--output_dir", output)
    log = tmp_path / "here" / "log" / "workerlog.0"
    wait_for(lambda: log.exists() and "global_step: 4" in log.read_text(), launcher)
    time.sleep(3 * heartbeat.INTERVAL)  # so that signs of life tell a step
    ranks = ranks_of(launcher)
    ranks[1].suspend()
    printed, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 1
    assert "rank 1 lets the others wait longer than 8 s and gives no sign of life after step " in printed, printed
    assert "--ddp_timeout" in printed and not (output / ".lock").exists()
    assert not any(rank.is_running() for rank in ranks.values())


def signalled(words: list, number: int, log: Path, begun) -> tuple[int, str]:
    """Send a signal to a command once `begun()`; returns the exit code and stderr, which is in `log`."""
    with log.open("w") as file:
        process = start([sys.executable, "-m", "gptlm", *words], stdout=subprocess.DEVNULL, stderr=file)
    deadline = time.monotonic() + 200
    while not begun():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    process.send_signal(number)
    return process.wait(100), log.read_text()


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGTERM, 143, "gptlm serve: ended by SIGTERM\n"), (signal.SIGINT, 0, "] - ended\n")],
)
def test_a_server_ends(tiny_model, tmp_path, number, code, says):
    folder, log = tmp_path / "model", tmp_path / "log"
    load_model(str(tiny_model)).save_pretrained(folder)
    train_tokenizer(["the cat sat on the mat " * 20], 280).save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "--model_name_or_path", folder, "--device", "cpu", "--port", port]
    ended, error = signalled(words, number, log, lambda: "(Ctrl-C ends it)\n" in log.read_text())
    assert ended == code and error.partition("ends it)\n")[2].count("\n") == 1 and error.endswith(says), error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("part", ["corpus.jsonl", "data", "model"])
def test_a_demo_ends_in_any_of_its_commands(tmp_path, part, number):
    words = ["demo", "--output_dir", tmp_path / "out", "--max_steps", 100_000]
    code, error = signalled(words, number, tmp_path / "log", (tmp_path / "out" / part).exists)
    says = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    assert code == 128 + number and error.splitlines()[-1].startswith(f"gptlm demo: {says}"), error
    assert "Traceback" not in error
    left = [path.name for path in tmp_path.rglob("*")]
    assert not [name for name in left if name.endswith((".lock", ".incomplete")) or name.startswith(".tokenizer-")]
