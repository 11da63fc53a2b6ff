"""Built-in names from the hub's cache, without a network."""

import time

import pytest

from gptlm.errors import GptlmError
from gptlm.model.hub import hub_folder, is_hub_id


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    repository = tmp_path / "models--openai-community--gpt2"
    snapshot = repository / "snapshots" / "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return snapshot


def test_what_is_cached_is_used(cache):
    (cache / "vocab.json").write_text("{}")
    assert hub_folder("openai-community/gpt2", weights=False) == str(cache)
    with pytest.raises(GptlmError, match="weights of openai-community/gpt2"):
        hub_folder("openai-community/gpt2", weights=True)
    (cache / "model.safetensors").write_bytes(b"x")
    assert hub_folder("openai-community/gpt2", weights=True) == str(cache)


def test_without_network_one_line_within_seconds(cache, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    started = time.monotonic()
    with pytest.raises(
        GptlmError, match="no connection to 127.0.0.1.*hf download other/model --local-dir DIR"
    ) as caught:
        hub_folder("other/model", weights=True)
    assert time.monotonic() - started < 10 and len(str(caught.value).splitlines()) == 1


def test_a_local_path_is_not_a_hub_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GptlmError, match=f"tokenizer.json is a file; give the folder that holds it: {tmp_path}"):
        hub_folder(str(tmp_path / "tokenizer.json"), weights=False)
    for name in (str(tmp_path / "no"), "./no/where", "a/b/c", "~/model"):
        with pytest.raises(GptlmError, match=f"{name}: there is no such folder"):
            hub_folder(name, weights=False)


def test_old_weights_of_a_cached_model_are_used(cache):
    (cache / "pytorch_model.bin").write_bytes(b"x")
    assert hub_folder("openai-community/gpt2", weights=True) == str(cache)


def test_a_repository_is_owner_and_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "model").mkdir(parents=True)
    names = {"owner/name": True, "out/model": False, "name": False, "a/b/c": False, "./no": False, "/no/where": False}
    assert {name: is_hub_id(name) for name in names} == names
