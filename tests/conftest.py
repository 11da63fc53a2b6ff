"""Shared fixtures: a corpus in both formats, sentence data, a tiny model, running the scripts."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gptlm.data.writer import IndexedTokensWriter
from tests.golden.corpora import numbered_documents, random_documents, write_documents
from tests.imports import freeze_imports
from tests.processes import clean_environment, close_servers, first_environment, run

CACHE = tempfile.TemporaryDirectory(prefix="gptlm-tests-")  # runs keep encoded examples there, not in the user's
os.environ["HF_DATASETS_CACHE"] = CACHE.name
os.environ["OMP_NUM_THREADS"] = "1"  # as the commands of tests: results on some processors depend on it
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
first_environment()
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # as under nohup and in the background: tests send them
        signal.signal(number, usual)
ROOT = Path(__file__).parents[1]
# a minute or more in one fixture: begun last, one of them would keep one of two workers busy while the other has ended
LONGEST = tuple(
    f"recipes/test_{name}.py" for name in ("sft_distributed", "layouts", "originals", "sharding", "sft_layouts")
)


@pytest.fixture(scope="session")
def golden_corpora(tmp_path_factory) -> Path:
    """The inputs of `tests/golden`: `paddlenlp/{mmap,npy}/{a,b}` and `megatron/{a,c}`."""
    root = tmp_path_factory.mktemp("golden")
    for name in ("a", "b"):
        for layout in ("mmap", "npy"):
            write_documents(root / "paddlenlp" / layout / name, random_documents(name), layout)
    for name in ("a", "c"):
        write_documents(root / "megatron" / name, numbered_documents(name))
    return root


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """120 documents of 20 to 80 tokens below 500, as `mmap/c.bin|.idx` and `npy/c_ids.npy|_idx.npz`."""
    root = tmp_path_factory.mktemp("corpus")
    for layout in ("mmap", "npy"):
        write_tokens(root / layout / "c", layout=layout)
    return root


def write_tokens(prefix: Path, *, layout: str = "mmap", documents: int = 120, vocab_size: int = 500, seed: int = 0):
    """Random documents under `prefix`; returns the prefix."""
    rng = np.random.RandomState(seed)
    writer = IndexedTokensWriter(str(prefix), vocab_size, layout)
    for _ in range(documents):
        ids = rng.randint(0, vocab_size, rng.randint(20, 81))
        writer.add(ids, [len(ids)])
    writer.finish({})
    return prefix


def write_sentence_data(folder: Path, prose: str):
    """nltk's English punkt data, trained on `prose` instead of downloaded; returns its tokenizer.

    nltk writes only below a folder in `nltk.data.path`.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer, save_punkt_params

    parameters = PunktTrainer(prose).get_params()
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    save_punkt_params(parameters, str(english))
    return PunktSentenceTokenizer(parameters)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with random stock GPT-2 weights: 2 layers, width 32, 2 heads, vocabulary 500, 64 positions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    folder = tmp_path_factory.mktemp("tiny-model")
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def script() -> Callable[..., subprocess.CompletedProcess]:
    """Run `python scripts/NAME.py WORDS`, in `processes` as torchrun would; output captured."""
    return run_script


def run_script(
    name: str, *words: object, processes: int = 0, cwd: Path | None = None, environment: dict | None = None
) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", *words]
    return run(command, cwd=cwd, env=clean_environment(**(environment or {})), processes=processes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


def pytest_runtest_setup() -> None:
    freeze_imports()
    log = logging.getLogger("gptlm")
    log.propagate = True  # else pytest adds its handler here, and a test that lets it propagate sees each line twice
    if log.level == logging.ERROR:  # a test ran a command as another rank than 0
        log.setLevel(logging.INFO)


def pytest_runtest_teardown() -> None:
    freeze_imports()


def pytest_sessionfinish() -> None:
    close_servers()


@pytest.fixture
def browser():
    """Headless Chromium; needs `pip install playwright` and a Chromium."""
    api = pytest.importorskip("playwright.sync_api")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()
