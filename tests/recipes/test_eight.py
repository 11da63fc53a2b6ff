"""Eight processes: the 8-GPU recipes, resolved as typed and without a GPU, and small ones that train."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from gptlm.cli import main
from gptlm.commands.pretrain import parse_pretrain
from gptlm.launcher.args import parse_launch
from gptlm.parallel.sharding import stage_layers
from gptlm.planner.args import precision_of, sizes_of
from gptlm.planner.memory import GIB, Layout, memory_of
from gptlm.planner.search import USABLE
from gptlm.recipes.pretrain.run import pretrain
from gptlm.training.sampler import ConsecutiveBatches
from tests.config.test_run import README
from tests.conftest import ROOT
from tests.parallel.test_process_groups import GROUPS, places
from tests.recipes.test_layouts import BASE, case, stock_model, weights
from tests.recipes.test_pretrain import reference_run
from tests.recipes.test_sharding import losses, norms, run_session

# As typed -----------------------------------------------------------------------------------------------------------

LAUNCHER = "python -u -m paddle.distributed.launch --log_dir log"
STAGE3 = "-o Distributed.sharding.sharding_degree=8 -o Distributed.sharding.sharding_stage=3"
SCRIPT = "bash scripts/train_full_8p.sh --data_path=data/my-gpt_text_sentence --model_size="
PLAIN = 2 + 2 + 4 + 8  # bytes of a parameter: weight, gradient, float32 weight, moments


@dataclass(frozen=True)
class Recipe:
    """What a command is on eight cards: its numbers in the originals, or arithmetic.

    Attributes:
        degrees: tensor, pipeline, data.
        batch: micro-batch, accumulation, global batch.
        model: layers, width, positions, rows of the embedding.
        stages: layers of each pipeline stage.
        sharded: stage of ZeRO; `states` bytes of a parameter are left on each card.
    """

    typed: str
    degrees: tuple[int, int, int]
    batch: tuple[int, int, int]
    model: tuple[int, int, int, int]
    stages: tuple[int, ...]
    sharded: int = 0
    states: float = PLAIN


RECIPES = {
    "345M": Recipe(f"{SCRIPT}345M", (1, 2, 4), (4, 1, 16), (24, 1024, 1024, 50304), (12, 12)),
    "1.3B": Recipe(f"{SCRIPT}1.3B", (2, 2, 2), (8, 2, 32), (24, 2048, 1024, 50432), (12, 12)),
    "2.7B": Recipe(f"{SCRIPT}2.7B", (2, 2, 2), (8, 2, 32), (32, 2560, 2048, 50432), (16, 16)),
    "3.7B": Recipe(f"{SCRIPT}3.7B", (2, 2, 2), (4, 2, 16), (32, 3072, 2048, 50432), (16, 16)),
    "345M_without_mp": Recipe(f"{SCRIPT}345M_without_mp", (1, 1, 8), (8, 1, 64), (24, 1024, 1024, 50304), (24,)),
    "345M stage 2": Recipe(
        f'{LAUNCHER} --gpus "0,1,2,3,4,5,6,7" run_pretrain.py {README}',
        (1, 1, 8), (1, 2, 16), (24, 1024, 1024, 50304), (24,), sharded=2, states=2 + 14 / 8,
    ),
    "6.7B stage 3": Recipe(
        f'{LAUNCHER} --devices "0,1,2,3,4,5,6,7" ./tools/auto.py '
        f"-c pretrain_gpt_6.7B_sharding16 {STAGE3}",
        (1, 1, 8), (8, 1, 64), (32, 4096, 1024, 50304), (32,), sharded=3, states=16 / 8,
    ),
}  # fmt: skip


def launched(typed):
    """The launcher's plan for a command: `bash` ones are asked what they would start."""
    words = shlex.split(typed)
    if words[0] != "bash":
        return parse_launch(words)
    environment = {**os.environ, "PYTHON": "echo"}
    said = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    script, *words = shlex.split(said)
    assert script == "scripts/run_pretrain.py"
    return parse_launch([*parse_pretrain(words, {}).launch, "-m", "gptlm", "pretrain", *words])


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


@pytest.fixture
def words(recipe):
    command = launched(recipe.typed).torchrun()
    return command[command.index("pretrain") + 1 :]


@pytest.fixture
def run(words):
    """What each of the eight processes reads out of its words."""
    return parse_pretrain(words, {"WORLD_SIZE": "8"})


def test_a_recipe_is_what_the_original_says(recipe, run):
    assert launched(recipe.typed).processes == 8 and run.refusals == () and not run.launch
    assert (run.dims.tensor, run.dims.pipeline, run.dims.data) == recipe.degrees
    assert (run.batch.micro, run.batch.accumulation, run.batch.total) == recipe.batch
    micro, accumulation, total = recipe.batch
    assert micro * accumulation * recipe.degrees[2] == total
    shape = run.shape
    found = (shape.num_hidden_layers, shape.hidden_size, shape.max_position_embeddings, shape.vocab_size)
    assert found == recipe.model and run.data.max_seq_length == recipe.model[2]
    assert run.parallel.sharding == (f"stage{recipe.sharded}" if recipe.sharded else "")


def test_the_layers_of_each_stage(recipe):
    stages, layers = recipe.degrees[1], recipe.model[0]
    shares = [stage_layers(stage, stages, layers) for stage in range(stages)]
    assert tuple(map(len, shares)) == recipe.stages
    assert [layer for share in shares for layer in share] == list(range(layers))


def test_it_fits_on_cards_of_80_gib(recipe, run, words, capsys):
    tensor, pipeline, data = recipe.degrees
    micro, accumulation, total = recipe.batch
    layers, width, positions, rows = recipe.model
    layout = Layout(
        tensor=tensor, pipeline=pipeline, data=data, micro=micro, accumulation=accumulation, stage=recipe.sharded,
        shards=data if recipe.sharded else 1, recompute="full" if run.training.recompute else "",
        precision=precision_of(run),
    )  # fmt: skip
    memory = memory_of(sizes_of(run), layout)
    own = (layers / pipeline * (12 * width**2 + 13 * width) + (rows + positions) * width) / tensor
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(recipe.states * own)
    assert recipe.states * own < memory.total < 80 * GIB * USABLE
    assert main(["plan", "--num_gpus", "8", "--gpu_memory", "80", "--rows", "1000", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"global batch {total}, O2, 8 cards of 80 GiB" in lines[0]
    ours = [*map(str, (tensor, pipeline, data, recipe.sharded, micro, accumulation)), layout.recompute or "-"]
    (row,) = [line.split() for line in lines[2:-2] if line.split()[:7] == ours]
    assert 0 < float(row[7]) <= memory.total / GIB + 0.05  # the plan splits activations along the sequence, too
    best = lines[2].split()
    planned = shlex.split(lines[-1])
    found = parse_pretrain(planned[planned.index("pretrain") + 1 :], {"WORLD_SIZE": "8"})
    assert [str(found.dims.tensor), str(found.dims.pipeline), str(found.dims.data)] == best[:3]
    assert (found.parallel.sharding or "stage0") == f"stage{best[3]}" and found.batch.total == total
    assert (found.training.recompute_granularity if found.training.recompute else "-") == best[6]


def test_replicas_read_the_batch_of_one_process_together(recipe, run):
    """In the order of one process; the processes of a replica read the same."""
    tensors, replicas, pipelines = GROUPS[recipe.degrees]
    steps, total = 3, recipe.batch[2]
    own = {"batch_size": run.step_batch, "batches": steps * run.step_accumulation, "replicas": run.dims.data}
    found = places(*recipe.degrees[:2])
    read = [list(ConsecutiveBatches(start=0, replica=place.data_rank, **own)) for place in found]
    alone = ConsecutiveBatches(start=0, batch_size=total, batches=steps, replica=0, replicas=1)
    for step, wanted in enumerate(alone):
        turns = range(step * run.step_accumulation, (step + 1) * run.step_accumulation)
        for group in replicas:
            assert [sample for turn in turns for rank in group for sample in read[rank][turn]] == wanted
        assert wanted == list(range(step * total, (step + 1) * total))
    for group in (*tensors, *pipelines):
        assert all(read[rank] == read[group[0]] for rank in group)


# Trained, small -----------------------------------------------------------------------------------------------------

STEPS = 4
SMALL = (
    "--num_hidden_layers 4 --hidden_size 32 --num_attention_heads 4 --max_seq_length 32 --max_position_embeddings 32 "
    f"--vocab_size 512 --split 80,10,10 --max_steps {STEPS} --decay_steps {STEPS} --warmup_steps 0 --logging_steps 1 "
    "--learning_rate 1e-2 --min_learning_rate 1e-3 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 "
    "--do_eval 0 --evaluation_strategy no --save_strategy no --dataloader_num_workers 0 --device cpu --report_to none"
).split()
STAGE2 = "--sharding stage2 --recompute 1 --per_device_train_batch_size 1 --gradient_accumulation_steps 2"
TRAINED = {
    "345M_without_mp": "-c gpt2-345m-without-mp",
    "345M stage 2": STAGE2,
    "6.7B stage 3": f"-c pretrain_gpt_6.7B_sharding16 {STAGE3}",
    "345M": "-c gpt2-345m",
    "3.7B": "-c gpt-3.7b",
}
GROUPS_OF_2 = "--per_device_train_batch_size 1 --sharding_parallel_degree 2 --sharding"
LAYOUTS = {
    "tp2 dp4 stage1": "--tensor_parallel_degree 2 --sharding stage1 --per_device_train_batch_size 1",
    "pp4 dp2": "--pipeline_parallel_degree 4 --per_device_train_batch_size 1",
    "tp8": "--tensor_parallel_degree 8 --per_device_train_batch_size 8",
    **{
        f"tp2 dp2 sharding 2 stage{stage}": f"--tensor_parallel_degree 2 {GROUPS_OF_2} stage{stage}"
        for stage in (1, 2, 3)
    },
    "pp2 dp2 sharding 2 stage1": f"--pipeline_parallel_degree 2 {GROUPS_OF_2} stage1",
    "tp2 dp4 sharding 1 stage2": f"--tensor_parallel_degree 2 {GROUPS_OF_2} stage2 --sharding_parallel_degree 1",
}
GROUPED_HALF = {  # in half precision
    "pp2 half": f"{LAYOUTS['pp2 dp2 sharding 2 stage1']} --bf16 --fp16_opt_level O2 --amp_master_grad",
    "tp2 half": f"{LAYOUTS['tp2 dp2 sharding 2 stage2']} --bf16 --fp16_opt_level O2",
}
FLEETX_16 = (  # as typed, but for the micro-batch
    "-c ppfleetx/configs/nlp/gpt/pretrain_gpt_6.7B_sharding16.yaml -o Distributed.dp_degree=2 "
    "-o Distributed.sharding.sharding_degree=8 -o Distributed.sharding.sharding_stage=2 "
    "-o Global.micro_batch_size=1 -o Global.local_batch_size=2"
)


@pytest.fixture(scope="module")
def alone(corpus_folder, tmp_path_factory):
    """One process that trains the global batch of a recipe in its micro-batches: its history."""

    def run(words, name):
        folder = tmp_path_factory.mktemp("alone")
        micro, _, total = RECIPES[name].batch
        more = "--tensor_parallel_degree 1 --pipeline_parallel_degree 1 --sharding none --sharding_parallel_degree 1"
        more += f" --per_device_train_batch_size {micro} --gradient_accumulation_steps {total // micro}"
        more += f" --local_batch_size {total} --global_batch_size {total}"
        more += " --num_gpus_per_node 1" if "-c gpt" in words else ""  # the file asks for 8
        argv = [*words.split(), *SMALL, *more.split(), "--input_dir", corpus_folder / "mmap", "--output_dir", folder]
        pretrain(parse_pretrain([str(word) for word in argv], {}))
        return history_in(folder)

    return run


def history_in(folder):
    return {"history": json.loads((folder / "trainer_state.json").read_text())["log_history"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stock_model(tmp_path_factory.mktemp("eight") / "model", heads=8)


@pytest.fixture(scope="module")
def trained(model, corpus_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    data = ["--input_dir", corpus_folder / "mmap"]
    cases = [(name, [*more.split(), *SMALL, *data, "--output_dir", folder / name]) for name, more in TRAINED.items()]
    words = [*BASE, *data, "--model_name_or_path", model]
    words += f"--max_steps {STEPS} --decay_steps 6 --do_eval 0 --evaluation_strategy no --save_strategy no".split()
    cases += [case(words, folder, name, more) for name, more in {**LAYOUTS, **GROUPED_HALF}.items()]
    return folder, run_session(8, cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_recipes_train_like_one_process(trained, alone, name):
    wanted = alone(TRAINED[name], name)
    assert len(losses(wanted)) == STEPS
    assert losses(trained[1][name]) == pytest.approx(losses(wanted), abs=1e-5)
    assert norms(trained[1][name]) == pytest.approx(norms(wanted), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_train_like_a_plain_loop(trained, model, corpus_folder, name):
    wanted, final, lengths = reference_run(model, corpus_folder / "mmap", STEPS, 1, 8)
    folder, results = trained
    assert losses(results[name]) == pytest.approx(wanted, abs=1e-5)
    assert norms(results[name]) == pytest.approx(lengths, abs=1e-4)
    for key, value in weights(folder / name.replace(" ", "_")).items():
        # a wrong gradient moves a weight by the learning rate, 1e-2; Adam makes 1e-4 of the rounding of one near 0
        torch.testing.assert_close(value, final[key], atol=5e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED_HALF)
def test_smaller_groups_in_half_precision(trained, model, corpus_folder, name):
    wanted, _, lengths = reference_run(model, corpus_folder / "mmap", STEPS, 1, 8)
    assert losses(trained[1][name]) == pytest.approx(wanted, abs=4e-3)
    assert norms(trained[1][name]) == pytest.approx(lengths, rel=0.02)


@pytest.mark.slow
def test_two_groups_of_eight_among_sixteen(corpus_folder, tmp_path):
    """PaddleFleetX's dp_degree 2 and sharding_degree 8 in stage 2."""
    data = ["--input_dir", corpus_folder / "mmap", "--output_dir"]
    found = run_session(16, [("sixteen", [*FLEETX_16.split(), *SMALL, *data, tmp_path / "sixteen"])], tmp_path)
    (elements,) = set(found["sixteen"]["moments"])
    alone = "--sharding none --sharding_parallel_degree 1 --data_parallel_degree 1 --local_batch_size 32"
    argv = [*FLEETX_16.split(), *SMALL, *alone.split(), "--global_batch_size", 32, *data, tmp_path / "alone"]
    run = parse_pretrain([str(word) for word in argv], {})
    pretrain(run)
    assert run.batch.total == 32
    assert losses(found["sixteen"]) == pytest.approx(losses(history_in(tmp_path / "alone")), abs=1e-5)
    total = sum(value.numel() for value in weights(tmp_path / "alone").values()) - 512 * 32  # the head is the embedding
    assert total / 8 <= elements < total / 8 * 1.02


@pytest.mark.slow
def test_the_8_card_script_starts_eight(corpus_folder, alone, tmp_path):
    """As typed: its file says how many, and they train like one."""
    data = next((corpus_folder / "mmap").glob("*.bin")).with_suffix("")
    words = [f"--data_path={data}", "--model_size=1.3B", f"--train_iters={STEPS}", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "train_full_8p.sh", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-2500:]
    assert {path.name for path in (tmp_path / "log").iterdir()} == {f"workerlog.{rank}" for rank in range(8)}
    found = history_in(tmp_path / "ckpts" / "ckpts_tmp" / "1.3B")
    assert losses(found) == pytest.approx(losses(alone("-c gpt-1.3b", "1.3B")), abs=1e-5)
