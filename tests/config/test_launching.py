"""The launcher's command lines, as plans in torchrun's terms."""

import pytest

from gptlm.config.launching import parse_launch
from gptlm.errors import UsageError


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Parse a command line in a folder with a script run.py; `cards` GPUs, `own` addresses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text("print(1)\n")

    def parse(text, visible=None, cards=0, own=()):
        return parse_launch(text.split(), visible, count_cards=lambda: cards, is_own=lambda address: address in own)

    return parse


EIGHT = tuple("01234567")


def test_paddlepaddle_s_words(plan):
    found = plan("--gpus 0,1 run.py --x 1")
    assert (found.processes, found.nodes, found.devices) == (2, 1, ("0", "1"))
    assert found.torchrun() == [
        "torchrun", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2", "run.py", "--x", "1",
    ]  # fmt: skip
    assert found.shown().startswith("CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone ")
    assert plan('python -u -m paddle.distributed.launch --gpus "0,1" run.py').processes == 2


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("./tools/auto.py", "pretrain"),
        ("tools/train.py", "pretrain"),
        ("./tools/eval.py", "evaluate"),
        ("run_pretrain.py", "pretrain"),
        ("finetune_generation.py", "sft"),
        ("-m oneflow_gpt.training", "pretrain"),
    ],
)
def test_scripts_of_the_originals_are_ours(plan, script, command):
    found = plan(f"--log_dir log_auto --devices 0,1,2,3,4,5,6,7 {script} -c a.yaml -o Model.hidden_size=1024")
    assert found.script == ("-m", "gptlm", command) and found.processes == 8 and found.devices == EIGHT
    assert found.words == ("-c", "a.yaml", "-o", "Model.hidden_size=1024") and str(found.log_dir) == "log_auto"
    assert any(f"gptlm {command} runs in its place" in note for note in found.notes)


def test_several_nodes_meet_at_the_master(plan):
    found = plan("--log_dir d --master=10.0.0.1:6070 --nnodes=2 --devices 0,1,2,3,4,5,6,7 ./tools/auto.py -c x.yaml")
    words = found.torchrun()
    assert (found.nodes, found.master, found.port, found.node_rank) == (2, "10.0.0.1", 6070, None)
    assert words[words.index("--rdzv_endpoint") + 1] == "10.0.0.1:6070" and words[words.index("--nnodes") + 1] == "2"
    ranked = plan("--master 10.0.0.1:6070 --nnodes 2 --rank 1 --devices 0 run.py").torchrun()
    assert ranked[ranked.index("--node_rank") + 1] == "1" and ranked[ranked.index("--master_port") + 1] == "6070"


def test_a_node_finds_itself_among_addresses(plan):
    words = "--ips 10.0.0.1,10.0.0.2 --gpus 0 run.py"
    assert plan(words, own=("10.0.0.2",)).node_rank == 1
    assert plan(words, own=("10.0.0.2",)).master == "10.0.0.1"
    with pytest.raises(UsageError, match="none of the nodes 10.0.0.1,10.0.0.2 is this machine: add --rank N"):
        plan(words)


def test_oneflow_s_words_stand_among_the_script_s(plan):
    ips = "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"
    text = f"python3 -m oneflow_gpt.training --num-layers 24 --num-gpus-per-node 8 --num-nodes 4 --node-ips {ips}"
    found = plan(text, own=("10.0.0.3",))
    assert (found.processes, found.nodes, found.node_rank, found.master) == (8, 4, 2, "10.0.0.1")
    assert found.words[:2] == ("--num-layers", "24") and "--num-gpus-per-node" in found.words
    assert found.script == ("-m", "gptlm", "pretrain")
    assert plan("-m gptlm pretrain --num-gpus-per-node 2").processes == 2


@pytest.mark.parametrize(
    ("words", "visible", "cards", "processes"),
    [
        ("run.py", None, 4, 4),
        ("run.py", "2,3", 4, 2),
        ("run.py", None, 0, 1),
        ("--nproc_per_node 3 run.py", None, 0, 3),
    ],
)
def test_how_many_processes(plan, words, visible, cards, processes):
    assert plan(words, visible, cards).processes == processes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpus 0,1", "there is nothing to launch"),
        ("gone.py", "the script gone.py does not exist"),
        ("--gpus a run.py", "expected the numbers of cards"),
        ("--gpus 0,0 run.py", "a card is named twice"),
        ("--gpuss 0 run.py", "did you mean --gpus"),
        ("--nnodes 2 run.py", "2 nodes need to know where to meet: add --master ADDRESS:PORT"),
        ("--nnodes 2:4 --master a:1 run.py", "elastic runs are not implemented"),
        ("--nnodes 2 --master etcd://a:1 run.py", "etcd is not used"),
        ("--nnodes 2 --master a:b run.py", "expected ADDRESS:PORT"),
        ("--nnodes 2 --master a:1 --rank 2 run.py", "--rank 2: expected 0 to 1"),
        ("--xpus 0 run.py", "NVIDIA GPUs and CPUs"),
        ("--servers a run.py", "parameter servers are not used"),
        ("--nproc_per_node 2 --gpus 0 run.py", "one process needs one card"),
        ("--nproc_per_node 0 run.py", "expected at least 1"),
        ("--num-gpus-per-node 2 run.py --num-gpus-per-node 4", "contradicts"),
    ],
)
def test_what_cannot_be_launched(plan, words, says):
    with pytest.raises(UsageError) as error:
        plan(words)
    assert says in str(error.value)


def test_words_without_effect_are_noted(plan):
    notes = plan("--max_restart 3 --gpus 0 run.py").notes
    assert len(notes) == 1 and "--max_restart has no effect here" in notes[0]
