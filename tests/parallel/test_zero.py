import json
from pathlib import Path

import pytest

from gptlm.parallel.zero import zero_config

FOLDER = Path(__file__).parents[2] / "ds_configs"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_files_equal_what_the_code_builds(stage, offload):
    file = FOLDER / f"zero{stage}{'_offload' if offload else ''}.json"
    assert json.loads(file.read_text()) == zero_config(stage, offload=offload)


def test_there_are_no_other_files_and_no_optimizer_blocks():
    files = sorted(FOLDER.glob("*.json"))
    assert len(files) == 6
    for file in files:
        assert not {"optimizer", "scheduler"} & set(json.loads(file.read_text()))


def test_stage_zero_is_refused():
    with pytest.raises(ValueError, match="stage 0"):
        zero_config(0)
