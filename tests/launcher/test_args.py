"""The launcher's command line: flags of PaddlePaddle and OneFlow become torchrun's."""

import subprocess
import sys
from pathlib import Path

import pytest

from gptlm.errors import UsageError
from gptlm.launcher.args import parse_launch

EIGHT = "0,1,2,3,4,5,6,7"
FOUR = "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"
ALONE = ["torchrun", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node"]
PRETRAIN = ["-m", "gptlm", "pretrain"]
C10D = "--rdzv_backend c10d --rdzv_endpoint"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A folder with x.py, which is ours, and their/run_pretrain.py, which is PaddleNLP's."""
    (tmp_path / "x.py").write_text("print('paddle')\n")
    (tmp_path / "their").mkdir()
    (tmp_path / "their" / "run_pretrain.py").write_text("import os\nimport paddle.distributed as dist\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(words, *, cards: int = 0, own: str = "", visible: str | None = None):
    argv = words.split() if isinstance(words, str) else words
    return parse_launch(argv, visible, count_cards=lambda: cards, is_own=lambda address: address in own.split(","))


@pytest.mark.parametrize(
    "launcher", ["python -u -m paddle.distributed.launch", "python3.7 -m fleetrun", "fleetrun", ""]
)
def test_paddle_s_command(launcher):
    if "fleetrun" in launcher:
        launcher = "fleetrun"
    found = plan([*launcher.split(), "--gpus", "0,1", "run_pretrain.py", "--x", "1"])
    assert found.torchrun() == [*ALONE, "2", *PRETRAIN, "--x", "1"]
    assert found.shown().startswith("CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone ")
    assert (found.processes, found.nodes, found.devices, str(found.log_dir)) == (2, 1, ("0", "1"), "log")
    assert found.notes == ("run_pretrain.py is not here: gptlm pretrain runs instead, with the same arguments",)


def test_fleetx_s_command():
    words = f"--log_dir log_auto --devices {EIGHT} ./tools/auto.py -c a.yaml -o Model.hidden_size=1024"
    found = plan(words)
    assert found.torchrun() == [*ALONE, "8", *PRETRAIN, "-c", "a.yaml", "-o", "Model.hidden_size=1024"]
    assert (found.environment(), str(found.log_dir)) == ({"CUDA_VISIBLE_DEVICES": EIGHT}, "log_auto")


def test_fleetx_s_command_on_two_nodes_is_the_same_on_both():
    found = plan(f"--log_dir d --master=10.0.0.1:6070 --nnodes=2 --devices {EIGHT} ./tools/auto.py -c x.yaml")
    wanted = "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:6070 --rdzv_id default"
    assert found.torchrun() == [*wanted.split(), "--nproc_per_node", "8", *PRETRAIN, "-c", "x.yaml"]
    assert (found.rank, found.master, found.port) == (None, "10.0.0.1", 6070)


@pytest.mark.parametrize("rank", range(4))
def test_oneflow_s_command(rank):
    script = f"--num-gpus-per-node 8 --num-nodes 4 --node-ips {FOUR} --seq-length 1024"
    found = plan(f"python -m oneflow_gpt.training {script}", own=f"127.0.0.1,10.0.0.{rank + 1}")
    wanted = f"torchrun --nnodes 4 --node_rank {rank} --master_addr 10.0.0.1 --master_port 29500 --nproc_per_node 8"
    assert found.torchrun() == [*wanted.split(), *PRETRAIN, *script.split()]
    assert found.environment() == {}


@pytest.mark.parametrize(
    "words",
    [
        "python3 -m oneflow_gpt.training {} --rank 1",
        "--rank 1 python3 -u -m oneflow_gpt.training {}",
        "--rank 1 -m oneflow_gpt.training {} --node_rank=1",
        "-m gptlm pretrain {} --rank 1",
        "run_pretrain.py {} --node-rank 1",
    ],
)
def test_the_rank_of_a_node_before_or_after_the_script(words):
    found = plan(words.format("--num-gpus-per-node 4 --num-nodes 2 --node-ips a,b"))
    wanted = "torchrun --nnodes 2 --node_rank 1 --master_addr a --master_port 29500 --nproc_per_node 4"
    assert found.torchrun()[: len(wanted.split())] == wanted.split()
    assert found.script == ("-m", "gptlm") if words.startswith("-m gptlm") else found.script == tuple(PRETRAIN)


def test_the_rank_of_another_script_is_its_own():
    found = plan("--ips 127.0.0.1 x.py --rank 8", own="127.0.0.1")
    assert (found.rank, found.words) == (0, ("--rank", "8"))


def test_oneflow_s_module_starts_one_process_unless_a_number_is_given():
    words = "python3 -m oneflow_gpt.training --num-layers 2"
    assert plan(words, cards=8).processes == 1
    assert plan(f"--gpus 0,1 {words}", cards=8).processes == 2
    assert plan(f"{words} --num-gpus-per-node 4", cards=8).processes == 4


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--num-gpus-per-node 2 x.py", "2"),
        ("x.py --num-gpus-per-node=2 --num-nodes 1", "2"),
        ("--nproc_per_node 2 x.py", "2"),
        ("--devices 3 x.py", "1"),
        ("--ips 127.0.0.1 --nproc_per_node 3 x.py", "3"),
    ],
)
def test_one_node(words, wanted):
    script = words[words.index("x.py") :].split()
    assert plan(words, cards=8).torchrun() == [*ALONE, wanted, *script]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--master 10.0.0.1:6070 --nnodes 2 --rank 1", "--node_rank 1 --master_addr 10.0.0.1 --master_port 6070"),
        ("--master http://a:6070/ --nnodes 2:2 --rank 0", "--node_rank 0 --master_addr a --master_port 6070"),
        ("--master [::1]:6070 --nnodes 2 --rank 0", "--node_rank 0 --master_addr [::1] --master_port 6070"),
        ("--master_addr a --master_port 7 --nnodes 2 --node_rank 1", "--node_rank 1 --master_addr a --master_port 7"),
        ("--ips a,b", "--node_rank 1 --master_addr a --master_port 29500"),
        ("--ips a,b --host a", "--local_addr a --node_rank 0 --master_addr a --master_port 29500"),
        ("--ips c,d --rank 1 --start_port 7", "--node_rank 1 --master_addr c --master_port 7"),
        ("--node-ips a,b --ctrl-port 50051", "--node_rank 1 --master_addr a --master_port 50051"),
        ("--master a --nnodes 2 --job_id j", f"{C10D} a:29500 --rdzv_id j"),
        ("--master a:1 --nnodes 2 --host b --job_id j", f"--local_addr b {C10D} a:1 --rdzv_id j"),
    ],
)  # fmt: skip
def test_several_nodes(words, wanted):
    assert plan(f"{words} x.py", own="b").torchrun() == [
        *("torchrun --nnodes 2 " + wanted).split(), "--nproc_per_node", "1", "x.py"
    ]  # fmt: skip


def test_a_port_for_one_node():
    words = "torchrun --nnodes 1 --master_addr 127.0.0.1 --master_port 6070 --nproc_per_node 1 x.py"
    for given in ("--master 10.0.0.1:6070 --nnodes 1", "--ctrl-port 6070"):
        assert plan(f"{given} x.py").torchrun() == words.split()
    (note,) = plan("--master 10.0.0.1:6070 x.py").notes
    assert note == "--master has no effect with one node; for several add --nnodes"


@pytest.mark.parametrize(
    ("visible", "cards", "processes"), [(None, 4, 4), (None, 0, 1), ("1,2", 4, 2), ("", 4, 1), ("-1", 4, 1)]
)
def test_one_process_per_visible_gpu(visible, cards, processes):
    assert plan("x.py", cards=cards, visible=visible).processes == processes


def test_gpus_are_counted_only_if_no_flag_gives_the_number():
    def count():
        raise AssertionError("counted")

    for words in (["--devices", "0,1"], ["--nproc_per_node", "2"]):
        assert parse_launch([*words, "x.py"], count_cards=count).processes == 2


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("tools/train.py", PRETRAIN),
        ("PaddleFleetX/tools/train.py", PRETRAIN),
        ("./tools/eval.py", ["-m", "gptlm", "evaluate"]),
        ("-m oneflow_gpt.training", PRETRAIN),
        ("their/run_pretrain.py", PRETRAIN),
        ("scripts/evaluate.py", ["-m", "gptlm", "evaluate"]),
    ],
)
def test_scripts_of_other_frameworks_are_replaced(words, wanted):
    found = plan(words)
    assert found.torchrun() == [*ALONE, "1", *wanted]
    name = words.split()[-1]
    assert found.notes[0].startswith(f"{name} is ") and f"gptlm {wanted[-1]} runs instead" in found.notes[0]


def test_a_command_of_gptlm_is_launched_by_its_name():
    found = plan("--nproc_per_node 2 --log_dir sft pretrain --max_steps 3 --input_dir x.py")
    assert found.torchrun() == [*ALONE, "2", *PRETRAIN, "--max_steps", "3", "--input_dir", "x.py"]
    assert (str(found.log_dir), found.notes) == ("sft", ())
    assert plan("evaluate --task TEXT").torchrun() == [*ALONE, "1", "-m", "gptlm", "evaluate", "--task", "TEXT"]
    assert plan("--log_dir predict x.py sft").torchrun() == [*ALONE, "1", "x.py", "sft"]


@pytest.mark.parametrize("script", ["sft", "-m gptlm sft", "-m gptlm.cli sft"])
def test_a_token_reaches_our_processes_by_their_environment(script):
    found = plan(f"{script} --max_steps 3 --hub_token abc")
    assert found.secrets == {"HF_TOKEN": "abc"} and "abc" not in found.torchrun()
    assert plan("x.py --hub_token abc").secrets == {}  # a script of others may read it from its own command line


@pytest.mark.parametrize("words", ["x.py", "-m gptlm sft", "-m some.module", "./x.py a.py -m b"])
def test_any_other_script_runs_unchanged(words):
    found = plan(words)
    assert found.torchrun() == [*ALONE, "1", *words.split()] and found.notes == ()


def test_flags_without_effect_are_noted():
    found = plan(
        "--max_restart 3 --elastic_level -1 --run_mode collective --log_level INFO --gpus 0,1 --nproc_per_node 1 x.py"
    )
    assert [note.split(" has no")[0].split(" leaves")[0] for note in found.notes] == [
        "--max_restart",
        "--log_level",
        "--nproc_per_node 1",
    ]
    assert found.processes == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--gpus 0,1",
            "no script to launch: after the launcher's flags give FILE.py, -m MODULE, or a command such as pretrain",
        ),
        ("--gpus 0,1 -m", "no script to launch"),
        ("--gpus 0,1 y.py", "the script y.py does not exist"),
        ("--gpu 0 --devises 0 x.py", "--devises is unknown; did you mean --devices"),
        ("--xpus 0,1 x.py", "--xpus 0,1: gptlm runs on NVIDIA GPUs and CPUs"),
        ("--npus 0 x.py", "--npus 0: gptlm runs on NVIDIA GPUs"),
        ("--gpus a,b x.py", "--gpus 'a,b': expected GPU indices"),
        ("--gpus 0,0 x.py", "a GPU is listed twice"),
        ("--gpus 0,1 --nproc_per_node 3 x.py", "--nproc_per_node 3 with 2 devices"),
        ("--nproc_per_node 0 x.py", "expected at least 1"),
        ("--nnodes 2:4 --master a:1 x.py", "--nnodes 2:4: elastic training is not implemented"),
        ("--nnodes 0 x.py", "--nnodes 0: expected the number of nodes"),
        ("--nnodes two x.py", "--nnodes two: expected the number of nodes"),
        ("--nnodes 2 x.py", "2 nodes need a rendezvous: add --master ADDRESS:PORT"),
        ("x.py --num-nodes 2", "2 nodes need a rendezvous"),
        ("--nnodes 2 --master etcd://a:1 x.py", "etcd is not supported; give ADDRESS:PORT"),
        ("--nnodes 2 --master a:0 x.py", "--master a:0: expected ADDRESS:PORT"),
        ("--nnodes 2 --master a:1 --port 2 x.py", "name different ports"),
        ("--nnodes 2 --master a:1 --rank 2 x.py", "--rank 2: expected 0 to 1"),
        ("--ips a,b --nnodes 3 x.py", "--ips has 2 addresses, --nnodes is 3"),
        ("--rank 1 run_pretrain.py --rank 0", "--rank 0 among the script's arguments contradicts --rank 1"),
        ("--ips a,b x.py", "--ips a,b: none of the addresses belongs to this machine; add --rank N"),
        ("--ips own,own x.py", "--ips own,own: more than one of the addresses belongs to this machine; add --rank N"),
        ("--ips a,b --host c x.py", "--ips a,b: none of the addresses belongs to c"),
        ("--port 70000 x.py", "--port 70000: expected 1 to 65535"),
        ("--elastic_level 1 x.py", "the number of nodes is fixed"),
        ("--run_mode ps x.py", "parameter servers are not used"),
        (
            "--gpus 0 --num-nodes 2 --ips a,b x.py --num-nodes 3",
            "among the script's arguments contradicts",
        ),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(UsageError) as error:
        plan(words, own="own")
    assert message in str(error.value)


def test_the_number_of_addresses_is_compared_first():
    with pytest.raises(UsageError) as error:
        plan("-m oneflow_gpt.training --num-nodes 4 --node-ips a,b,c --rank 7")
    assert str(error.value) == "--node-ips has 3 addresses, --num-nodes is 4; they must agree"


def test_all_problems_are_reported_together():
    with pytest.raises(UsageError) as error:
        plan("--devises 0 --xpus 1 y.py")
    assert [line.split()[0] for line in str(error.value).splitlines()] == ["the", "--devises", "--xpus"]


def test_a_gpu_that_the_environment_hides():
    assert plan("--gpus 1 x.py", visible="1,2").devices == ("1",)
    with pytest.raises(UsageError, match="GPU 0 is not in CUDA_VISIBLE_DEVICES=1,2"):
        plan("--gpus 0,1 x.py", visible="1,2")


def test_planning_imports_no_torch():
    code = "import sys, gptlm.launcher.args; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
