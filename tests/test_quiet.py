"""Which messages of other libraries are hidden."""

import logging
import os
import subprocess
import sys
import warnings

import pytest

from gptlm import quiet


def test_only_the_named_warnings_are_ignored():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet.warnings_ignored(FutureWarning), quiet.warnings_ignored(message="a renamed"):
            for text, category in (("x", FutureWarning), ("a renamed key", UserWarning), ("other", UserWarning)):
                warnings.warn(text, category, stacklevel=1)
        warnings.warn("later", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["other", "later"]


def test_the_trainer_s_other_warnings_are_shown(caplog):
    quiet.hide_trainer_resume_warning()
    log = logging.getLogger("transformers.trainer_utils")
    with caplog.at_level(logging.WARNING, logger=log.name):
        log.addHandler(caplog.handler)
        log.warning("The following arguments do not match the ones in the `trainer_state.json` within the checkpoint")
        log.warning("something else")
        log.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"something else"}


@pytest.mark.parametrize(("flags", "hidden"), [([], True), (["-W", "default"], False)])
def test_warnings_for_programmers_can_be_asked_for(flags, hidden):
    code = "import warnings, gptlm.quiet as q; q.quiet_libraries(); warnings.warn('old name', FutureWarning)"
    code += "; import os; print(os.environ['TQDM_DISABLE'])"
    clean = {key: value for key, value in os.environ.items() if key not in (*quiet.NO_BARS, "PYTHONWARNINGS")}
    done = subprocess.run([sys.executable, *flags, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n" and ("old name" not in done.stderr) == hidden
