"""Restarts by torchrun (`--max-restarts`, `--nnodes MIN:MAX`): the command starts again, the run continues.

The list of files of the output folder notes which torchrun processes have started the run that writes there.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.config.run import Run
from gptlm.errors import GptlmError, named
from gptlm.ranks import launcher, world_size
from gptlm.recipes.common.main_process_first import told_by_main
from gptlm.recipes.common.output_folder import read_checkpoints
from gptlm.recipes.common.peers import Peers

AnyRun = TypeVar("AnyRun", bound=Run)


def continued(run: AnyRun, peers: Peers | None) -> AnyRun:
    """`run`; if torchrun has started it before, without the flags that had their effect at the first start.

    A restarted run would remove its own checkpoints with --overwrite_output_dir, train the steps after
    --resume_from_checkpoint a second time, and lose its optimizer state with --ignore_load_lr_and_optim.

    Raises:
        GptlmError: if another number of processes would change the global batch.
    """
    training = run.training
    if not training.do_train or launcher() is None:
        return run
    if peers is not None:
        peers.publish("launcher", launcher() or "")
    answer = told_by_main(peers, "what a restarted run has written", lambda: _own_checkpoint(run, peers))
    if answer is None:
        return run
    own = json.loads(answer)
    ignores = training.ignore_load_lr_and_optim and own["weights_only"]
    training = replace(
        training, overwrite_output_dir=False, resume_from_checkpoint=None, ignore_load_lr_and_optim=ignores
    )
    return replace(run, training=training, notes=(*run.notes, f"restarted: the run continues from {own['path']}"))


def note_start(run: Run, peers: Peers | None, step: int) -> None:
    """Note in the output folder that this run writes there from step `step` on; called by rank 0.

    Raises:
        OSError: if it cannot be written.
    """
    found = _launchers(peers)
    if not found:
        return
    folder = Path(run.training.output_dir or "")
    before = _noted(folder, found)
    if before is not None:
        found, step = sorted({*found, *before.launchers}), before.step
    owned.note_start(folder, owned.Started(found, step, run.batch.total))


def _own_checkpoint(run: Run, peers: Peers | None) -> str | None:
    """The newest checkpoint that this run wrote before a restart, as JSON; None: not restarted, or none written."""
    output_dir, training = Path(run.training.output_dir or ""), run.training
    noted = _noted(output_dir, _launchers(peers))
    if noted is None:
        return None
    if noted.global_batch_size != run.batch.total:
        raise GptlmError(
            f"the run was restarted with another number of processes, {world_size()} now: its global batch would be "
            f"{run.batch.total} samples instead of {noted.global_batch_size}; give {named('global_batch_size')} "
            f"{noted.global_batch_size}, which is kept with any number of processes"
        )
    if not (training.overwrite_output_dir or training.resume_from_checkpoint or training.ignore_load_lr_and_optim):
        return None
    newest, _ = checkpoint.newest(output_dir, read_checkpoints(run))
    if newest is None or newest.manifest.global_step <= noted.step:
        return None
    return json.dumps({"path": str(newest.path), "weights_only": newest.manifest.weights_only})


def _launchers(peers: Peers | None) -> list[str]:
    """The torchrun processes that have started this run now; empty without torchrun. `continued` was called before."""
    if launcher() is None:
        return []
    return sorted(set(peers.collect("launcher"))) if peers is not None else [launcher() or ""]


def _noted(folder: Path, launchers: list[str]) -> owned.Started | None:
    """What the folder notes about the start of its run, if one of `launchers` has started it."""
    noted = owned.noted_start(folder)
    return noted if noted is not None and {*noted.launchers} & {*launchers} else None
