"""Sharded checkpoints in one process: parts are read back as whole tensors, and damage is one sentence."""

import json
import random

import pytest
import torch

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint import shards
from gptlm.checkpoint.optimizer_state import StoredStates
from gptlm.errors import GptlmError
from gptlm.model.shards import ShardedTensors
from gptlm.model.shards_index import rectangles, size_of
from gptlm.parallel.sharding import full_shape, own_boxes, shard
from tests.checkpoint.made import FIELDS, note_again

STEP_OF_IT = 20
WEIGHT, BIAS = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.ln_1.bias"
FIRST, SECOND = "weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"


class Coordinates:
    """What `own_boxes` and `shard` need of a mesh."""

    def __init__(self, rank, degree):
        self.tensor_rank, self.dims = rank, type("Dims", (), {"tensor": degree})


def tensors():
    torch.manual_seed(1)
    return {WEIGHT: torch.randn(12, 5), BIAS: torch.randn(7).bfloat16(), f"{WEIGHT}|exp_avg": torch.randn(12, 5)}


def held(whole, number, processes=2):
    """What process `number` writes of tensors that all hold."""
    parts = []
    for name, tensor in whole.items():
        shape, (box,) = own_boxes(None, name, tensor.shape)
        parts.append(shards.Held(name, shape, box, 0, tensor.view(-1)))
    return shards._share(parts, number, processes)


def write(output_dir, step=STEP_OF_IT, processes=2):
    """A checkpoint of `tensors` that two processes wrote."""
    staging = checkpoint.staging_folder(output_dir, step)
    staging.mkdir(parents=True)
    written = [shards.write(staging, held(tensors(), n, processes), step, n, processes) for n in range(processes)]
    shards.write_index(staging, written, step)
    sums = {name: one for each in written for name, one in each.checksums.items()}
    return checkpoint.commit(staging, {**FIELDS, "global_step": step, "checkpoint_format": "sharded"}, known=sums)


def rewritten(path, change):
    """Change the index of the checkpoint in `path`, and note its files again."""
    index = json.loads((path / "shards.json").read_text())
    change(index)
    (path / "shards.json").write_text(json.dumps(index))
    note_again(path)


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_what_is_written_is_read(tmp_path, processes):
    path = write(tmp_path, processes=processes)
    checkpoint.check_content(checkpoint.read(path))  # the checksums that writers computed are those of the files
    stored = ShardedTensors(path)
    assert {name: tensor.dtype for name, tensor in stored.items()} == {n: t.dtype for n, t in tensors().items()}
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors().items())
    sizes = [sum(f.stat().st_size for f in path.glob(f"*-{n + 1:05d}-of-*")) for n in range(processes)]
    assert len(sizes) == processes and max(sizes) - min(sizes) < 600  # headers and rounding


def test_boxes_are_read_from_any_parts(tmp_path):
    stored, generator = ShardedTensors(write(tmp_path, processes=7)), random.Random(0)
    for _ in range(50):
        top, left = generator.randrange(12), generator.randrange(5)
        bottom, right = generator.randint(top + 1, 12), generator.randint(left + 1, 5)
        assert torch.equal(stored.box(WEIGHT, (top, bottom, left, right)), tensors()[WEIGHT][top:bottom, left:right])


def test_elements_of_boxes_are_read_from_any_parts(tmp_path):
    """As under ZeRO: a part of a shard, which is several boxes of the tensor one after the other."""
    stored, generator = ShardedTensors(write(tmp_path, processes=7)), random.Random(1)
    boxes = [(0, 2, 0, 5), (4, 6, 0, 5), (8, 10, 1, 4)]
    values = torch.cat([tensors()[WEIGHT][top:bottom, left:right].flatten() for top, bottom, left, right in boxes])
    for _ in range(50):
        start, stop = sorted(generator.choices(range(len(values) + 1), k=2))
        assert torch.equal(stored.elements(WEIGHT, boxes, start, stop), values[start:stop])


def test_a_process_reads_the_files_with_its_own_part_only(tmp_path):
    path = write(tmp_path)
    (path / SECOND).unlink()
    stored = StoredStates(path, None)
    assert torch.equal(stored.part(BIAS, None, (7,), 0, 4), tensors()[BIAS][:4])
    with pytest.raises(GptlmError, match=f"cannot read .*{SECOND}"):
        stored.part(BIAS, None, (7,), 0, 5)
    with pytest.raises(GptlmError, match=r"is of another model: .* is \[12, 5\] instead of \[12, 6\]"):
        stored.part(WEIGHT, None, (12, 6), 0, 30)
    with pytest.raises(GptlmError, match="exp_avg_sq; resume from another checkpoint"):
        stored.part(WEIGHT, "exp_avg_sq", (12, 5), 0, 30)


@pytest.mark.parametrize(
    ("name", "shape", "degree"),
    [
        ("transformer.wte.weight", (11, 3), 3),
        ("transformer.h.0.mlp.c_fc.weight", (8, 3), 4),
        ("transformer.h.0.mlp.c_fc.bias", (8,), 2),
        (WEIGHT, (24, 4), 4),
        ("transformer.h.0.attn.c_attn.bias", (24,), 2),
        ("transformer.h.0.mlp.c_proj.weight", (3, 8), 2),
        (BIAS, (4,), 2),
    ],
)
def test_boxes_are_the_shards_of_tensor_parallelism(name, shape, degree):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    matrix = whole.view(shape[0], -1)
    for rank in range(degree):
        own = shard(name, whole, rank, degree)
        mesh = Coordinates(rank, degree)
        found, boxes = own_boxes(mesh, name, shape)
        values = torch.cat([matrix[top:bottom, left:right] for top, bottom, left, right in boxes])
        assert full_shape(mesh, name, own.shape, 11) == list(shape)
        assert found == own.shape and torch.equal(values.view(found), own)


def test_rectangles_fill_a_part():
    generator = random.Random(0)
    for _ in range(200):
        rows, columns = generator.randint(1, 5), generator.randint(1, 5)
        start, stop = sorted(generator.sample(range(rows * columns + 1), 2))
        places = torch.full((9, 9), -1)
        for box, place in rectangles(shards.Part("f", "k", (2, 2 + rows, 3, 3 + columns), start, stop)):
            values = torch.arange(place, place + size_of(box)).view(box[1] - box[0], -1)
            places[box[0] : box[1], box[2] : box[3]] = values
        flat = places[2 : 2 + rows, 3 : 3 + columns].flatten()
        assert flat[start:stop].tolist() == list(range(stop - start)) and (places >= 0).sum() == stop - start


def first_part(index):
    return index["tensors"][WEIGHT]["parts"][0]


BAD_INDEXES = [
    (lambda i: i.update(version=2), "no index of version 1"),
    (lambda i: i.update(step="x"), "the step is 'x'"),
    (lambda i: i.update(step=19), "they are not of one checkpoint"),
    (lambda i: i["files"].__setitem__(0, "../x.safetensors"), "is no safetensors file of the folder"),
    (lambda i: i["files"].__setitem__(0, "/etc/x.safetensors"), "is no safetensors file of the folder"),
    (lambda i: i["files"].__setitem__(0, 5), "5 is no safetensors file"),
    (lambda i: i["files"].pop(), "index out of range"),
    (lambda i: i.pop("files"), "'files' is missing"),
    (lambda i: i.update(tensors=[]), "list"),
    (lambda i: i.update(tensors={}), "names no weights"),
    (lambda i: i["tensors"][BIAS].update(dtype="F99"), "the type of"),
    (lambda i: i["tensors"][BIAS].update(dtype="F16"), "shards.json says F16"),
    (lambda i: i["tensors"][BIAS].update(shape=[8]), "1 elements of"),
    (lambda i: i["tensors"][BIAS].update(shape=[6]), "outside of its shape"),
    (lambda i: i["tensors"][BIAS].update(shape=[-7]), "the shape of"),
    (lambda i: i["tensors"][BIAS].update(shape=[2**40, 2**40]), "the shape of"),
    (lambda i: i["tensors"][BIAS].update(shape=[True] * 7), "the shape of"),
    (lambda i: i["tensors"][WEIGHT]["parts"].pop(), "are in no file"),
    (lambda i: i["tensors"][WEIGHT]["parts"].append(first_part(i)), "overlap"),
    (lambda i: first_part(i).__setitem__(1, "x"), "lacks x"),
    (lambda i: first_part(i).__setitem__(2, [0, 99, 0, 5]), "outside of its shape"),
    (lambda i: first_part(i).__setitem__(2, [0, 12, 0]), "a part of"),
    (lambda i: first_part(i).__setitem__(3, [3, 3]), "outside of its shape"),
    (lambda i: first_part(i).__setitem__(3, ["0", 3]), "a part of"),
    (lambda i: first_part(i).__setitem__(0, -1), "a part of"),
]


@pytest.mark.parametrize(("change", "says"), BAD_INDEXES)
def test_a_wrong_index_is_one_sentence_and_the_checkpoint_before_is_used(tmp_path, change, says):
    """Its checksum fits, as where a program wrote it."""
    write(tmp_path, 10)
    rewritten(write(tmp_path), change)
    found, skipped = checkpoint.newest(tmp_path)
    assert found.path.name == "checkpoint-10"
    assert len(skipped) == 1 and "checkpoint-20 is damaged" in skipped[0] and says in skipped[0]
    assert "\n" not in skipped[0] and len(skipped[0]) < 500


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"version": 1}'])
def test_an_index_that_is_none_is_one_sentence(tmp_path, text):
    path = write(tmp_path)
    (path / "shards.json").write_bytes(text)
    with pytest.raises(GptlmError, match=r"shards.json is damaged"):
        ShardedTensors(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path, other: (path / SECOND).unlink(), f"{SECOND} is missing"),
        (lambda path, other: (path / "shards.json").unlink(), "shards.json is missing"),
        (lambda path, other: (path / SECOND).write_bytes((path / SECOND).read_bytes()[:-1]), "bytes long"),
        (
            lambda path, other: (path / SECOND).write_bytes((path / SECOND).read_bytes()[:-1] + b"\x7f"),
            f"the content of {SECOND} is not what was written",
        ),
        (lambda path, other: (path / FIRST).write_bytes((other / FIRST).read_bytes()), f"the content of {FIRST}"),
    ],
)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_used(tmp_path, damage, says):
    damage(write(tmp_path), write(tmp_path, 10))
    found, skipped = checkpoint.newest(tmp_path)
    assert found.path.name == "checkpoint-10" and len(skipped) == 1 and says in skipped[0]


def test_shards_of_another_step_are_noticed_without_checksums(tmp_path):
    path, other = write(tmp_path), write(tmp_path, 10)
    (path / FIRST).write_bytes((other / FIRST).read_bytes())
    note_again(path, checksums=False)
    assert "is of step 10, shards.json of step 20" in checkpoint.newest(tmp_path)[1][0]


def test_parts_that_do_not_fit_together_are_not_committed(tmp_path):
    written = [shards.write(tmp_path, held(tensors(), 0), STEP_OF_IT, 0, 2)]
    with pytest.raises(RuntimeError, match="do not fit together"):
        shards.write_index(tmp_path, written, STEP_OF_IT)


def test_a_folder_that_is_not_shared_is_named(tmp_path):
    with pytest.raises(GptlmError, match="process 1 does not see the folder .*nowhere.* all machines share"):
        shards.write(tmp_path / "nowhere", held(tensors(), 1), STEP_OF_IT, 1, 2)
