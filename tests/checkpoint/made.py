"""Small checkpoints, and changed ones whose manifest fits their files again."""

import json

import torch

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.manifest import MANIFEST, OWN_SUM, SUMS, manifest_text
from gptlm.checksums import file_checksum
from gptlm.model.safetensors_io import LazyTensors
from gptlm.model.shards import ShardedTensors, StockWeights

FIELDS = {
    "optimizer_steps": 1,
    "consumed_samples": 8,
    "loss_sum": 1.5,
    "world_size": 1,
    "weights_only": False,
    "loss_scale": None,
}


def write_checkpoint(output_dir, step, files=None, **facts):
    """A checkpoint of `files` (path -> bytes)."""
    staging = checkpoint.staging_folder(output_dir, step)
    for name, content in (files or {"model.safetensors": bytes(100), "sub/optimizer.pt": bytes(50)}).items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(content)
    return checkpoint.commit(staging, {**FIELDS, "global_step": step, **facts})


def note_again(path, *, checksums=True, without=(), **changes):
    """Write the manifest of the files that are there now, with other fields.

    Args:
        checksums: note them; else as older versions did, which knew none.
        without: fields to leave out.
    """
    noted = json.loads((path / MANIFEST).read_text())
    fields = {name: value for name, value in (noted | changes).items() if name not in (*without, SUMS, OWN_SUM)}
    found = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != MANIFEST]
    names = [str(file.relative_to(path)) for file in found]
    fields["files"] = changes.get("files", dict(zip(names, (file.stat().st_size for file in found), strict=True)))
    if "files" in without:
        del fields["files"]
    if checksums:
        files = fields.pop("files")
        text = manifest_text(fields, files, dict(zip(names, map(file_checksum, found), strict=True)))
    else:
        text = json.dumps(fields)
    (path / MANIFEST).write_text(text)


def assert_same_tensors(whole, sharded):
    """The checkpoint in `sharded` has the weights and the optimizer state of the one in `whole`, bit for bit."""
    weights, states = LazyTensors.of_model(whole), LazyTensors(sorted(whole.glob("optimizer-*.safetensors")))
    found, own = ShardedTensors(sharded), StockWeights(sharded)
    assert found.keys() - own.keys() == states.keys() and own.keys() == weights.keys()
    for name, tensor in [*weights.items(), *states.items()]:
        other = own[name] if name in own else found[name]
        assert other.dtype == tensor.dtype and torch.equal(other, tensor), name
