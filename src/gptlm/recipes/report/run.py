"""`gptlm report`: write the page of runs, or serve it while they go on."""

import logging
from pathlib import Path

from gptlm.commands.report import ReportArguments
from gptlm.recipes.report.reading import find_runs
from gptlm.recipes.report.watch import watch
from gptlm.recipes.report.write import write_page

logger = logging.getLogger(__name__)


def report(arguments: ReportArguments) -> None:
    """Write the page, or serve it until Ctrl-C.

    Raises:
        GptlmError: if there is no run, a file of one is damaged, or the page cannot be written or served.
    """
    folders = [Path(name) for name in arguments.runs]
    if arguments.watch:
        watch(folders, arguments.port)
        return
    runs = find_runs(folders)
    write_page(arguments.path, runs)
    print(f"{arguments.path}: {', '.join(run.name for run in runs)}")
