"""A session: the world is built once, and cases run in worker processes."""

import os
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.cases import Case
from tests.fuzz.workers import Ended, Sending, prepare, run_command, start_workers
from tests.fuzz.world import COMMAND_LINES, build_world

WORKERS = 2


class Session:
    """Runs cases on copies of the files in `root`."""

    def __init__(self, pool: ProcessPoolExecutor, root: Path):
        self.root, self._pool = root, pool
        self.files = {name: self._files(command.reads) for name, command in COMMAND_LINES.items()}

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Ended]]:
        """How each case ends, in order."""
        running = [(case, self._pool.submit(run_case, case, self.root)) for case in cases]
        for case, ended in running:
            yield case, ended.result()

    def ended(self, case: Case, sending: Sending | None = None) -> Ended:
        """How one case ends that may get signals."""
        return self._pool.submit(run_case, case, self.root, sending).result()

    def _files(self, reads: Iterable[str]) -> list[str]:
        found = []
        for name in reads:
            path = self.root / name
            below = sorted(path.rglob("*")) if path.is_dir() else [path]
            found += [str(file.relative_to(self.root)) for file in below if file.is_file()]
        return found


@contextmanager
def started() -> Iterator[Session]:
    """Build the world and start the workers."""
    with tempfile.TemporaryDirectory(prefix="gptlm-fuzz-") as folder, start_workers(WORKERS, prepare) as pool:
        pool.submit(_build, folder).result()
        yield Session(pool, Path(folder))


def _build(root: str) -> None:
    child = os.fork()  # the worker itself must not compute: what has threads cannot fork
    if child == 0:
        code = 1
        try:
            build_world(Path(root))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the files cannot be built"


def run_case(case: Case, root: Path, sending: Sending | None = None) -> Ended:
    """Called in a worker."""
    command = COMMAND_LINES[case.command]
    with tempfile.TemporaryDirectory(prefix="gptlm-case-") as name:
        folder = Path(name) / "case"  # `..` holds nothing else: a command that reads all of it ends soon
        folder.mkdir()
        for file in {*command.reads, *command.also}:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if (root / file).is_dir():
                shutil.copytree(root / file, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(root / file, target)
        for edit in case.edits:
            edit.apply(folder)
        return run_command(case.line, folder, sending)
