"""The planner: what it offers is possible, fits, and runs as typed."""

import itertools
import json
import shlex
import time
from dataclasses import replace

import pytest

from gptlm.cli import main
from gptlm.commands.plan import parse_plan, with_layout
from gptlm.commands.pretrain import parse_pretrain
from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.derive import LAYOUT
from gptlm.errors import GptlmError, UsageError
from gptlm.planner.args import words_of
from gptlm.planner.memory import GIB, Layout, Sizes
from gptlm.planner.search import USABLE, Cluster, candidates, layouts, smallest

M345 = Sizes(layers=24, width=1024, inner=4096, heads=16, vocabulary=50304, positions=1024, length=1024)
M13B = Sizes(layers=40, width=5120, inner=20480, heads=40, vocabulary=50432, positions=2048, length=2048)
M175B = Sizes(layers=96, width=12288, inner=49152, heads=96, vocabulary=51200, positions=2048, length=2048)


@pytest.mark.parametrize(("sizes", "cards", "batch"), [(M345, 8, 64), (M13B, 16, 480), (M345, 6, 12)])
def test_every_layout_is_possible(sizes, cards, batch):
    found = list(layouts(sizes, Cluster(cards), batch, "O2"))
    assert found and len(set(found)) == len(found)
    for layout in found:
        assert layout.tensor * layout.pipeline * layout.data == cards
        assert layout.micro * layout.accumulation * layout.data == batch
        assert sizes.heads % layout.tensor == 0 and layout.pipeline * layout.chunks <= sizes.layers
        assert layout.stage <= (1 if layout.pipeline > 1 else 3) and layout.data % layout.shards == 0


def test_what_is_offered_fits_and_the_fastest_is_first():
    found = candidates(M13B, Cluster(16, memory=40 * GIB), 480, "O2")
    assert all(candidate.memory.total <= 40 * GIB * USABLE for candidate in found)
    seconds = [round(candidate.seconds, 4) for candidate in found]
    assert seconds == sorted(seconds) and len(found) > 10


def test_two_nodes_may_hold_the_weights_of_stage_3_each():
    """They fetch weights inside a node then, which takes less time and more memory."""
    found = [c for c in candidates(M13B, Cluster(16), 512, "O2") if (c.layout.stage, c.layout.tensor) == (3, 1)]
    pairs = {c.layout: c for c in found}
    halves = [c for c in found if c.layout.shards == 8]
    assert halves and {c.layout.shards for c in found} == {8, 16}
    for half in halves:
        whole = pairs[replace(half.layout, shards=16)]
        assert half.seconds < whole.seconds and half.memory.total > whole.memory.total
    assert not [x for x in layouts(M13B, Cluster(16), 512, "O2") if 1 < x.shards < x.data and x.stage < 3]
    assert all(x.shards in (1, x.data) for x in layouts(M345, Cluster(8), 64, "O2"))


def test_a_small_model_is_only_replicated():
    best = candidates(M345, Cluster(8), 64, "O2")[0].layout
    assert (best.tensor, best.pipeline, best.data, best.stage, best.recompute) == (1, 1, 8, 0, "")


def test_a_large_model_is_split():
    best = candidates(M175B, Cluster(1024), 1536, "O2")[0].layout
    assert best.tensor > 1 and best.pipeline > 1
    assert not candidates(M175B, Cluster(8), 1536, "O2")
    assert smallest(M175B, Cluster(8), 1536, "O2").memory.total > 80 * GIB


def test_a_thousand_cards_take_seconds():
    started = time.process_time()
    assert candidates(M175B, Cluster(1024), 1536, "O2")
    assert time.process_time() - started < 30


WORDS = "--model_name_or_path gpt2-medium-en --global_batch_size 32 --bf16 --fp16_opt_level O2"


def test_the_printed_command_resolves(capsys):
    assert main(["plan", "--num_gpus", "4", "--gpu_memory", "5", *WORDS.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == "TP PP DP ZeRO micro accum recompute GiB tokens/s bubble".split()
    words = shlex.split(lines[-1])
    run = parse_pretrain([*words[words.index("pretrain") + 1 :], "--world_size", "4"], {}, printing=True)
    row = lines[2].split()
    assert (run.dims.tensor, run.dims.pipeline, run.batch.total) == (int(row[0]), int(row[1].split("x")[0]), 32)
    assert float(row[7]) <= 5 * USABLE
    assert lines[-2].endswith(f"the format {run.training.checkpoint_format} (4 processes, up to 1,000,000,000 weights)")


@pytest.mark.parametrize(
    ("words", "form"),
    [("gpt3-1.3B-en", "sharded (8 processes, more than"), ("gpt3-1.3B-en --checkpoint_format hf", "hf (--checkpoint")],
)
def test_the_format_of_checkpoints_is_printed(words, form, capsys):
    assert main(["plan", "--global_batch_size", "8", "--model_name_or_path", *words.split()]) == 0
    assert f"checkpoints are written in the format {form}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--num_gpus 0", "--num_gpus 0: expected at least 1"),
        ("--num_gpuss 8", "--num_gpuss is unknown; did you mean --num_gpus?"),
        ("--num_gpu 4", "--num_gpu is unknown; did you mean --num_gpus?"),
        ("--num-gpus-per-node 4", "--num-gpus-per-node: use --num_gpus"),
        ("--gpu_memry=4", "--gpu_memry=4 is unknown; did you mean --gpu_memory?"),
        ("--tensor_paralel_degree 4", "did you mean --tensor_parallel_degree?"),
        (
            "--tensor_parallel_degree 1 --pipeline_parallel_degree 2 --world_size 2",
            "chooses tensor and pipeline degrees",
        ),
        ("-c pretrain_gpt_1.3B_dp8 -o Distributed.mp_degree=2", "chooses tensor and pipeline degrees"),
        ("--world_size 2", "--world_size 2: use --num_gpus"),
    ],
)
def test_what_cannot_be_planned(words, says):
    with pytest.raises(UsageError, match=says):
        parse_plan([*words.split(), *WORDS.split()])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--num_gpus 1 --model_name_or_path gpt3-13B-en",
            r"nothing fits into 80 GiB a card: the smallest layout .* GiB; use more cards or --sharding",
        ),
        ("--num_gpus 29 --model_name_or_path gpt2-medium-en", "make the global batch a multiple of the cards"),
    ],
)
def test_what_does_not_fit(words, says):
    from gptlm.planner.report import plan

    with pytest.raises(GptlmError, match=says):
        plan(parse_plan(f"{words} --global_batch_size 32 --bf16 --fp16_opt_level O2".split()))


@pytest.mark.parametrize(
    ("words", "total"),
    [
        ("--per_device_train_batch_size 2 --gradient_accumulation_steps 3", 2 * 3 * 16),
        ("--local_batch_size 5", 5 * 16),
        ("--global_batch_size 24", 24),
        ("-c gpt-3.7b", 16),  # the file's
        ("-c pretrain_gpt_1.3B_dp8", 8 * 16),
        ("-c pretrain_gpt_13B_mp2_pp8 -o Global.global_batch_size= -o Global.local_batch_size=8", 8 * 16 // (2 * 8)),
    ],
)
def test_the_global_batch_is_that_of_all_cards(words, total):
    assert parse_plan(["--num_gpus", "16", *words.split()]).global_batch == total


def test_the_printed_command_takes_back_what_the_job_says():
    """Sharding, recomputation, chunks, the sequence and the local batch are those of the row."""
    words = (
        "-c pretrain_gpt_6.7B_sharding16 --virtual_pp_degree 2 --sequence_parallel 1 --data_parallel_degree 2".split()
    )
    job = parse_plan(["--num_gpus", "8", *words])
    taken = [Layout(data=8, micro=4, accumulation=2), Layout(data=8, micro=8, stage=3, shards=4)]
    for layout in (*taken, Layout(pipeline=2, data=4, micro=16, stage=1, shards=4)):
        run = parse_pretrain([*words, *words_of(layout, job.parallel, job.training)], {"WORLD_SIZE": "8"})
        stage = f"stage{layout.stage}" if layout.stage else ""
        assert (run.parallel.sharding, run.parallel.sharding_parallel_degree) == (stage, layout.shards)
        assert (run.parallel.virtual_pp_degree, run.parallel.sequence_parallel, run.training.recompute) == (1, 0, 0)
        assert (run.batch.micro, run.batch.accumulation) == (layout.micro, layout.accumulation)


@pytest.mark.parametrize(
    ("more", "only"),
    [
        ("--fp8", {(1, 1, stage, recompute) for stage in (0, 1, 2) for recompute in ("", "full")}),
        ("--fp16_opt_level O1 --optim adafactor", {(1, 1, 0, recompute) for recompute in ("", "full", "full_attn")}),
    ],
)
def test_only_layouts_that_the_other_arguments_allow(more, only, capsys):
    """Seven cards could have a pipeline alone."""
    words = [*WORDS.split(), *more.split()]
    job = parse_plan(["--num_gpus", "4", *words])
    found = [c.layout for c in candidates(M345, Cluster(4), 32, "O2", job.refusal)]
    assert {(x.tensor, x.pipeline, x.stage, x.recompute) for x in found} == only
    assert main(["plan", "--num_gpus", "7", *words]) == 1
    said = capsys.readouterr().err
    assert "the other arguments allow no layout of 7 cards" in said
    assert "does not work with tensor and pipeline parallelism (tensor degree 1, pipeline degree 7)" in said
    with pytest.raises(UsageError, match="no layout of 7 processes fits"):
        with_layout([*words, "--auto_parallel"], {"WORLD_SIZE": "7"})


def test_auto_parallel_takes_the_best(capsys):
    words = with_layout([*WORDS.split(), "--auto_parallel", "--auto_parallel_memory", "5"], {"WORLD_SIZE": "4"})[0]
    run = parse_pretrain(words, {"WORLD_SIZE": "4"}, printing=True)
    cluster = Cluster(4, 4, 5 * GIB)
    best = candidates(M345, cluster, 32, "O2")[0].layout
    assert (run.dims.tensor, run.dims.pipeline) == (best.tensor, best.pipeline)
    assert (run.batch.micro, run.batch.accumulation, run.batch.total) == (best.micro, best.accumulation, 32)
    assert "auto_parallel" not in json.loads(run.as_arguments())
    with pytest.raises(UsageError, match="leave them out"):
        with_layout([*WORDS.split(), "--auto_parallel", "--sharding", "stage1"], {"WORLD_SIZE": "4"})
    with pytest.raises(UsageError, match="no layout of 4 processes fits into 1 GiB"):
        with_layout([*WORDS.split(), "--auto_parallel", "--auto_parallel_memory", "1"], {"WORLD_SIZE": "4"})


def test_all_that_a_layout_decides_is_told():
    """But for what is taken back (-1) or follows from the batch."""
    layout = Layout(tensor=2, pipeline=2, chunks=2, data=4, stage=1, shards=2, recompute="full", sequence=True)
    words = words_of(layout, ParallelArguments(), TrainingArguments())
    assert {word.removeprefix("--") for word in words[::2]} == set(LAYOUT)


def test_auto_parallel_says_what_it_took():
    """Of it are the layout and the batch of a card, also where something else was typed."""
    words = [*WORDS.split(), "--auto_parallel", "--per_device_train_batch_size", "3"]
    run = parse_pretrain(with_layout(words, {"WORLD_SIZE": "4"})[0], {"WORLD_SIZE": "4"}, printing=True)
    for name in ("per_device_train_batch_size", "tensor_parallel_degree"):
        assert run.sources[name].text == "--auto_parallel"
    micro, steps = run.batch.micro, run.batch.accumulation
    taken = f"per_device_train_batch_size {micro}, gradient_accumulation_steps {steps}"
    notes = [note for note in run.notes if note.startswith("--auto_parallel takes tensor_parallel_degree 1,")]
    assert len(notes) == 1 and taken in notes[0]


def test_auto_parallel_says_what_of_the_command_it_does_not_take():
    words = [*WORDS.split(), "--auto_parallel", "--per_device_train_batch_size", "3", "--recompute", "1"]
    run = parse_pretrain(with_layout(words, {"WORLD_SIZE": "4"})[0], {"WORLD_SIZE": "4"}, printing=True)
    micro = run.batch.micro
    assert micro != 3 and not run.training.recompute
    said = f"--per_device_train_batch_size 3 has no effect: --per_device_train_batch_size {micro} comes after it"
    assert said in run.notes
    assert "--recompute true has no effect: --recompute false comes after it" in run.notes


def test_the_fastest_comes_first_where_steps_are_short_too():
    """Equally fast is what differs in rounding alone, not what differs by less than 0.1 ms."""
    tiny = Sizes(layers=4, width=32, inner=128, heads=4, vocabulary=512, positions=32, length=32)
    found = [candidate.seconds for candidate in candidates(tiny, Cluster(2, 2), 8, "O2")]
    assert found[0] < 1e-4 and all(a <= b * (1 + 1e-8) for a, b in itertools.pairwise(found))


def test_auto_parallel_takes_layouts_that_data_parallelism_has_none_of():
    """Seven cards divide neither the batch nor the heads: a pipeline of seven stages is left."""
    words = with_layout([*WORDS.split(), "--auto_parallel"], {"WORLD_SIZE": "7"})[0]
    run = parse_pretrain(words, {"WORLD_SIZE": "7"}, printing=True)
    assert (run.dims.tensor, run.dims.pipeline, run.dims.data, run.batch.total) == (1, 7, 1, 32)


def test_auto_parallel_s_batch_is_that_of_all_processes():
    """Two samples on each of four are eight in a step; OneFlow's flags say how many processes there are."""
    words = "--model_name_or_path gpt2-medium-en --per_device_train_batch_size 2 --auto_parallel --input_dir d"
    for more, environment in (("", {"WORLD_SIZE": "4"}), (" --num_gpus_per_node 4", {})):
        found = with_layout([*(words + more).split(), "--output_dir", "o"], environment)[0]
        assert found[found.index("--global_batch_size") + 1] == "8"
