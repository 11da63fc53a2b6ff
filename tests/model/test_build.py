"""A network with random weights."""

import json
import shutil

import pytest

from gptlm.errors import GptlmError
from gptlm.model.build import check_memory, load_model, new_model
from gptlm.model.presets import Shape


def test_a_model_larger_than_the_machine_is_refused_before_it_is_built():
    billions = (2 * 12 * 2**40 + 2 * 2**10 * 2**20) / 1e9  # 12 D^2 weights in each layer, and the embeddings
    with pytest.raises(GptlmError, match=f"has {billions:,.1f} billion weights, which take {4 * billions:,.0f} GB"):
        new_model(Shape(2, 2**20, 2, 2**22, 2**10, 2**10))


def test_a_vocabulary_larger_than_the_machine_is_refused():
    with pytest.raises(GptlmError, match="give smaller sizes"):
        check_memory(Shape(1, 4096, 2, 4096, 2**31 - 1, 16))


def test_small_ones_are_allowed():
    check_memory(Shape(2, 64, 2, 256, 500, 64))


@pytest.mark.parametrize("size", [{"n_embd": 100_000}, {"n_layer": 9_000}, {"vocab_size": 10**9}])
def test_a_config_of_more_weights_than_the_files_hold_is_refused_before_the_network_is_built(
    tiny_model, tmp_path, size
):
    shutil.copytree(tiny_model, tmp_path / "m")
    config = tmp_path / "m/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | size | {"n_inner": None}))
    with pytest.raises(
        GptlmError, match=r"sizes of [\d,]+ weights, its files hold [\d,]+ bytes: config.json and weights"
    ):
        load_model(str(tmp_path / "m"))
