"""Writes `report.html`, over an earlier report of gptlm only."""

import logging
from collections.abc import Sequence
from pathlib import Path

from gptlm import owned
from gptlm.disk import new_folders, replacing, write_failure
from gptlm.errors import GptlmError, reason_of
from gptlm.recipes.report.page import page_of
from gptlm.recipes.report.reading import Recorded, find_runs

logger = logging.getLogger(__name__)


def report_training(folder: Path) -> None:
    """Write the report of the run that has just ended in `folder`. A failure is only logged: the run is complete."""
    try:
        write_page(folder / owned.REPORT, find_runs([folder]))
    except Exception as error:
        again = f"gptlm report {folder}"
        logger.warning("the report of the run could not be written (%s); %s writes it", reason_of(error), again)
    else:
        logger.info("report of the run: %s", folder / owned.REPORT)


def write_page(path: Path, runs: Sequence[Recorded]) -> None:
    """Write the page of `runs` to `path`.

    Raises:
        GptlmError: if a file is there that is not a report of gptlm, or the page cannot be written.
    """
    folder, name = path.parent, path.name
    if path.exists() and owned.entry_of(folder, name) is None:
        raise GptlmError(f"{path} would be replaced, and gptlm did not write it; move it, or give another --output")
    text = page_of(runs)
    is_run = owned.holds_run(folder)
    try:
        with new_folders(folder):
            if is_run:  # noted before, as all files of a run
                owned.note(folder, [name], owned.RUN)
            with replacing(path) as file:
                file.write(text.encode())
            if not is_run:
                owned.note(folder, [name], "report", key=name)
    except OSError as error:
        raise GptlmError(f"cannot write {path}: {write_failure(error, path)}") from error
