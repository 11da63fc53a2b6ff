"""Whether the nodes of a run share its output folder."""

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from gptlm import owned
from gptlm.config.run import Run
from gptlm.errors import GptlmError, named
from gptlm.ranks import is_main_process, local_rank, local_world_size, rank, world_size
from gptlm.recipes.common.peers import Peers

logger = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds: NFS keeps attributes of a folder so long
POLL = 0.5


def check_shared(run: Run, peers: Peers | None) -> None:
    """Check that the first process of each node sees a file that rank 0 makes in `output_dir`.

    Every process writes its random states, and perhaps its share, into the folder of a checkpoint, and reads them.

    Raises:
        GptlmError: on all processes, naming one that does not see it. Without checkpoints it is a warning.
    """
    if peers is None or local_world_size() in (None, world_size()):
        return
    folder = Path(run.training.output_dir or "")
    name = f".{uuid4().hex}.incomplete"
    if is_main_process():
        owned.begin(folder, [name], owned.RUN)
        (folder / name).touch()
    peers.publish("file", name if is_main_process() else "")
    is_first = local_rank() == 0
    missing = is_first and not _appears(folder / peers.collect("file")[0])
    peers.publish("machine without the folder", socket.gethostname() if missing else "")
    machines = peers.collect("machine without the folder")
    if is_main_process():
        owned.end(folder, [name])
    found = [number for number, machine in enumerate(machines) if machine]
    if not found:
        return
    text = (
        f"rank {found[0]} on {machines[found[0]]} does not see the {named('output_dir')} {folder} of rank 0: the nodes "
        "of a run must share it"
    )
    if run.training.save_strategy != "no":
        raise GptlmError(f"{text}; give a folder on a file system that all of them mount")
    if rank() == 0:
        logger.warning("%s to write checkpoints", text.replace(named("output_dir"), "output_dir"))


def _appears(path: Path) -> bool:
    """Whether `path` is there, at last after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent.parent)  # lets NFS look for new folders
            os.listdir(path.parent)
        time.sleep(POLL)
    return True
