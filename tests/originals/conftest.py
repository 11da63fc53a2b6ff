"""These tests are collected where the originals' files lie beside the repository, in `../shared`."""

from pathlib import Path

import pytest

from tests.conftest import ROOT

SHARED = ROOT.parent / "shared"
collect_ignore_glob = [] if SHARED.is_dir() else ["test_*.py"]


@pytest.fixture(scope="session")
def shared() -> Path:
    return SHARED


@pytest.fixture(scope="session")
def gpt2(shared, tmp_path_factory) -> Path:
    """The tokenizer.json of GPT-2's own vocabulary."""
    from gptlm.model.tokenizer import load_gpt2_files

    folder = shared / "data" / "gpt2-tokenizer"
    tokenizer = load_gpt2_files(str(folder / "vocab.json"), str(folder / "merges.txt"))
    file = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    tokenizer.backend_tokenizer.save(str(file))
    return file
