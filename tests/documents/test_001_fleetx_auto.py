"""PaddleFleetX's page on automatic parallelism: its files, log, commands in order, and table of combinations."""

import itertools
import os
import re
import socket
import subprocess
import sys

import pytest

from gptlm.cli import main
from gptlm.commands.plan import with_layout
from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import UsageError
from gptlm.launcher.args import parse_launch
from gptlm.planner.args import precision_of, sizes_of
from gptlm.planner.memory import Layout, memory_of
from gptlm.planner.search import Cluster, layouts
from tests.conftest import ROOT, write_tokens

HERE = "./ppfleetx/configs/nlp/gpt/auto"  # there is no checkout
FILES = {  # of the page's table: processes; layers, width, heads, feed-forward width; replicas, sharding, recompute
    "345M_single_card": (1, (24, 1024, 16, 4096), (1, "", False)),
    "1.3B_single_card": (1, (24, 2048, 16, 8192), (1, "", True)),
    "1.3B_dp8": (8, (24, 2048, 16, 8192), (8, "", True)),
    "6.7B_sharding16": (16, (32, 4096, 32, 16384), (16, "stage2", True)),
}
RATES = "5.555556e-09 8.333333e-09 1.111111e-08 1.388889e-08 1.666667e-08 1.944444e-08 2.222222e-08 2.500000e-08"
LINE = re.compile(
    r"\[INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \w+\.py:\d+\] "
    r"\[train\] epoch: 0 step: (\d) lr: (\S+) loss: \d+\.\d{6}"
)
TINY = (
    "Model.num_layers=2 Model.num_attention_heads=2 Model.vocab_size=500 Model.ffn_hidden_size= "
    "Model.max_position_embeddings=64 Data.Train.dataset.max_seq_len=32 Engine.eval_iters=1 Global.device=cpu "
    "Global.local_batch_size=2 Global.micro_batch_size=2"
).split()


def overrides(*texts):
    return [word for text in texts for word in ("-o", text)]


def configured(name, *texts, world):
    words = ["-c", f"{HERE}/pretrain_gpt_{name}.yaml", *overrides(*texts), "--world_size", str(world)]
    return parse_pretrain(words, {}, printing=True)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_the_files_have_the_documented_values(name):
    world, (layers, width, heads, inner), (replicas, sharding, recompute) = FILES[name]
    run = configured(name, world=world)
    shape, training = run.shape, run.training
    assert (shape.num_hidden_layers, shape.hidden_size, shape.num_attention_heads) == (layers, width, heads)
    assert (shape.intermediate_size, run.dims.data, run.dims.tensor, run.dims.pipeline) == (inner, replicas, 1, 1)
    assert (run.parallel.sharding, training.recompute, training.fp16, precision_of(run)) == (
        sharding, recompute, True, "O2",
    )  # fmt: skip
    assert run.batch.total == 8 * world and training.log_format == "fleetx" and training.logging_steps == 1
    file = f"configs/fleetx/gpt/auto/pretrain_gpt_{name}.yaml"
    assert run.notes[0] == f"there is no file {HERE}/pretrain_gpt_{name}.yaml: gptlm's own {file} is read"
    half = configured(name, f"Model.hidden_size={width // 2}", world=world)  # for GPUs of 16 GB
    assert half.shape.hidden_size == width // 2
    assert half.shape.intermediate_size == (4096 if name.startswith("345M") else 2 * width)


@pytest.mark.parametrize("name", FILES)
def test_the_other_command_has_its_own_files(name):
    """`tools/train.py` of the same names: found by their folder."""
    words = ["-c", f"./ppfleetx/configs/nlp/gpt/pretrain_gpt_{name}.yaml", "--world_size", str(FILES[name][0])]
    run = parse_pretrain(words, {}, printing=True)
    assert run.sources["hidden_size"].text.startswith(f"configs/fleetx/gpt/pretrain_gpt_{name}.yaml:")
    assert (run.training.learning_rate, run.training.min_learning_rate, run.training.eval_steps) == (5e-5, 1e-5, 500)


MORE = {"1.3B_dp8": "1024", "6.7B_sharding16": "2048"}
LAUNCHED = [
    (name, nodes, more)
    for name, nodes in (("1.3B_dp8", []), ("6.7B_sharding16", ["--master=10.0.0.1:8090", "--nnodes=2"]))
    for more in ([], overrides(f"Model.hidden_size={MORE[name]}"))
]


@pytest.mark.parametrize(("name", "nodes", "more"), LAUNCHED)
def test_the_launched_commands(name, nodes, more):
    """As typed after `python -m paddle.distributed.launch`."""
    words = ["--log_dir", "log_auto", *nodes, "--devices", "0,1,2,3,4,5,6,7", "./tools/auto.py"]
    words += ["-c", f"{HERE}/pretrain_gpt_{name}.yaml", *more]
    plan = parse_launch(words, is_own=lambda address: False)
    assert (plan.processes, plan.nodes, plan.script[-1]) == (8, 2 if nodes else 1, "pretrain")
    run = parse_pretrain(plan.words, {"WORLD_SIZE": str(8 * plan.nodes)})
    assert run.dims.world == run.dims.data == 8 * plan.nodes and not run.refusals
    assert not more or run.shape.hidden_size == int(MORE[name])


def test_placeholders_are_named():
    words = [
        "--log_dir",
        "d",
        "--master=master节点ip:可用的空闲端口号",
        "--nnodes=2",
        "./tools/auto.py",
        "-c",
        "x.yaml",
    ]
    with pytest.raises(UsageError, match="--master master节点ip:可用的空闲端口号: expected ADDRESS:PORT"):
        parse_launch(words, is_own=lambda address: False)


def test_one_card_twice_then_automatic(tmp_path, capfd):
    """The log of the page; a second start has nothing to train; another width in the same folder is refused."""
    write_tokens(tmp_path / "data" / "c", layout="npy")
    start = ["pretrain", "-c", f"{HERE}/pretrain_gpt_1.3B_single_card.yaml"]
    tiny = overrides(*TINY, "Engine.max_steps=8")
    lines = []
    for _ in range(2):
        assert main([*start, *tiny, *overrides("Model.hidden_size=32")]) == 0
        lines.append(LINE.findall(capfd.readouterr().out))
    assert lines == [[(str(step), rate) for step, rate in enumerate(RATES.split())], []]
    assert main([*start, *tiny, *overrides("Model.hidden_size=16")]) == 1
    assert "is of another model: hidden_size 32 there, 16 in the command" in capfd.readouterr().err
    tuned = overrides("Model.hidden_size=16", "Engine.save_load.output_dir=./tuned", "Tuning.enable=True")
    assert main([*start, *tiny, *tuned]) == 0
    out = capfd.readouterr().out
    assert "-o Tuning.enable takes tensor_parallel_degree 1, pipeline_parallel_degree 1," in out
    assert re.search(r"-o Tuning.enable: of \d+ layouts that fit into 80 GiB this one is the fastest by estimate", out)


def launch(*words, folder, wait=True):
    """`launch.py` in `folder`: the exit code and output, or the process."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "launch.py"), *words],
        cwd=folder, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return finished(process) if wait else process


def finished(process):
    text, _ = process.communicate(timeout=300)
    return process.returncode, text


@pytest.mark.distributed
def test_data_parallelism_twice(tmp_path):
    """Two processes for the page's eight. The log of a process goes on where it ended."""
    write_tokens(tmp_path / "data" / "c", layout="npy")
    words = ["--log_dir", "log_auto", "--devices", "0,1", "./tools/auto.py", "-c", f"{HERE}/pretrain_gpt_1.3B_dp8.yaml"]
    words += overrides(*TINY, "Engine.max_steps=2", "Model.hidden_size=32", "Distributed.dp_degree=2")
    for again in (False, True):
        code, text = launch(*words, folder=tmp_path)
        assert code == 0, text[-3000:]
        log = (tmp_path / "log_auto" / "workerlog.0").read_text()
        assert [rate for _, rate in LINE.findall(log)] == RATES.split()[:2]
        assert ("nothing to train" in log) == again


@pytest.mark.distributed
def test_sharding_on_two_nodes_twice(tmp_path):
    """A process on each for the page's eight; both nodes are this machine, so each command has its rank."""
    write_tokens(tmp_path / "data" / "c", layout="npy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"--master=127.0.0.1:{free.getsockname()[1]}"
    words = ["./tools/auto.py", "-c", f"{HERE}/pretrain_gpt_6.7B_sharding16.yaml"]
    words += overrides(*TINY, "Engine.max_steps=2", "Model.hidden_size=32", "Distributed.sharding.sharding_degree=2")
    for again in (False, True):
        nodes = [
            launch(
                "--log_dir", f"log_{rank}", master, "--nnodes=2", f"--rank={rank}", "--devices", "0", *words,
                folder=tmp_path, wait=False,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        for code, text in [finished(node) for node in nodes]:
            assert code == 0, text[-3000:]
        log = (tmp_path / "log_0" / "workerlog.0").read_text()
        assert [rate for _, rate in LINE.findall(log)] == RATES.split()[:2]
        assert ("nothing to train" in log) == again


# The table of combinations -----------------------------------------------------------------------------------------

WORLD = 16
PIPELINE = re.compile(
    r"sharding_stage.* stage[23] does not work with -o Distributed.pp_degree \d, .* sent for every micro-batch; "
    r"(stage[23]) with .*mp_degree.* (\d), --sequence_parallel 1 and -o Distributed.pp_degree 1 needs no more memory, "
    r"or use stage1 with this pipeline"
)
CELLS = list(itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2), ("o1", "o2"), (False, True)))


def cell(stage, tensor, pipeline, groups, level, recompute):
    """6.7B on 16 ranks; `groups`: ranks that hold the same shards."""
    replicas = WORLD // (tensor * pipeline)
    texts = [f"Distributed.mp_degree={tensor}", f"Distributed.pp_degree={pipeline}"]
    texts += [f"Distributed.sharding.sharding_stage={stage}", f"Distributed.dp_degree={replicas}"]
    texts += [f"Distributed.sharding.sharding_degree={replicas // groups}"]
    texts += [f"Engine.mix_precision.level={level}", f"Model.use_recompute={recompute}"]
    return configured("6.7B_sharding16", *texts, "Global.micro_batch_size=1", world=WORLD), replicas


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_combination_runs_or_is_refused_by_name(stage):
    """What is not refused is a layout that the planner knows, too."""
    ran = set()
    for parts in (parts for parts in CELLS if parts[0] == stage and WORLD // (parts[1] * parts[2]) > parts[3]):
        _, tensor, pipeline, groups, level, recompute = parts
        if pipeline > 1 and stage > 1:
            says = PIPELINE.pattern
        else:
            run, replicas = cell(*parts)
            assert (run.dims.tensor, run.dims.pipeline, run.dims.data) == (tensor, pipeline, replicas)
            assert (run.parallel.sharding, run.training.recompute) == (f"stage{stage}", recompute)
            assert precision_of(run) == level.upper() and not run.refusals
            assert run.parallel.sharding_parallel_degree == replicas // groups
            if groups == 1 or stage == 3:
                known = layouts(sizes_of(run), Cluster(WORLD, 8), run.batch.total, level.upper())
                assert any(
                    (found.tensor, found.pipeline, found.data, found.stage, found.shards, found.recompute)
                    == (tensor, pipeline, replicas, stage, replicas // groups, "full" if recompute else "")
                    for found in known
                )
            ran |= {name for name, on in zip(("tensor", "pipeline", "groups"), (tensor, pipeline, groups)) if on > 1}
            continue
        with pytest.raises(UsageError, match=says):
            cell(*parts)
    assert ran == {"tensor", "groups"} | ({"pipeline"} if stage == 1 else set())


def memory(run, *, tensor, pipeline, data, stage, sequence=False):
    """Bytes by the planner's formula."""
    training = run.training
    layout = Layout(
        tensor=tensor, pipeline=pipeline, data=data, stage=stage, shards=data, micro=run.batch.micro,
        accumulation=run.batch.accumulation, recompute="full" if training.recompute else "", sequence=sequence,
        precision=precision_of(run),
    )  # fmt: skip
    return memory_of(sizes_of(run), layout).total


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("stage", "pipeline"), [(2, 2), (2, 4), (3, 2), (3, 4)])
@pytest.mark.parametrize("micro", [1, 8])
def test_the_layout_that_a_refusal_names_needs_no_more_memory(name, stage, pipeline, micro):
    replicas = WORLD // pipeline
    texts = [f"Distributed.pp_degree={pipeline}", f"Distributed.dp_degree={replicas}"]
    texts += [f"Distributed.sharding.sharding_stage={stage}", f"Global.micro_batch_size={micro}"]
    texts += [f"Distributed.sharding.sharding_degree={replicas}"]
    with pytest.raises(UsageError) as error:
        configured(name, *texts, world=WORLD)
    other, tensor = PIPELINE.search(str(error.value).splitlines()[0]).groups()
    instead = [f"Distributed.mp_degree={tensor}", "Distributed.pp_degree=1", "Model.sequence_parallel=True"]
    run = configured(name, *texts, *instead, world=WORLD)
    assert other == run.parallel.sharding == f"stage{stage}" and run.dims.data == replicas
    named = memory(run, tensor=int(tensor), pipeline=1, data=replicas, stage=stage, sequence=True)
    assert named <= memory(run, tensor=1, pipeline=pipeline, data=replicas, stage=stage)
    configured(name, *texts, "Distributed.sharding.sharding_stage=1", world=WORLD)


def test_heads_that_do_not_split_have_another_layout():
    """24 layers of 25 heads: tensor parallelism cannot take the place of the pipeline."""
    texts = ["Model.hidden_size=1600", "Model.num_attention_heads=25", "Distributed.pp_degree=4"]
    texts += ["Distributed.dp_degree=4", "Distributed.sharding.sharding_degree=4"]
    with pytest.raises(UsageError, match="stage3 with -o Distributed.pp_degree 1 splits weights and optimizer states"):
        configured("6.7B_sharding16", *texts, world=WORLD)
    texts[2:] = ["Distributed.pp_degree=1", "Distributed.sharding.sharding_stage=3"]
    assert configured("6.7B_sharding16", *texts, world=WORLD).dims.data == WORLD


@pytest.mark.parametrize("name", FILES)
def test_fully_automatic(name):
    """Every file of the page on its number of processes, and on other numbers than its degrees are for."""
    for world in {FILES[name][0], 4, 32}:
        words = ["-c", f"{HERE}/pretrain_gpt_{name}.yaml", "-o", "Tuning.enable=True", "--auto_parallel_memory", "32"]
        environment = {"WORLD_SIZE": str(world)}
        if (name, world) == ("6.7B_sharding16", 4):
            with pytest.raises(UsageError, match="-o Tuning.enable: no layout of 4 processes fits into 32 GiB"):
                with_layout(words, environment)
            continue
        laid, why = with_layout(words, environment)
        run = parse_pretrain(laid, environment)
        assert run.dims.world == world and run.batch.total == 8 * world
        assert why.startswith("-o Tuning.enable: of ") and " GiB per GPU, " in why
        taken = [note for note in run.notes if note.startswith("-o Tuning.enable takes ")]
        assert len(taken) == 1 and f"tensor_parallel_degree {run.dims.tensor}," in taken[0]
