"""Models and adapters of the hub as local folders, cached or downloaded. Without a network: an error in 2 s."""

import re
import socket
from functools import cache
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, snapshot_download

from gptlm.errors import GptlmError, named, reason_of
from gptlm.model.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    GENERATION_CONFIG,
    MERGES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    WORD_LIST,
    has_tokenizer,
    has_weights,
)
from gptlm.model.presets import PRESETS

TOKENIZER_FILES = [
    TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, MERGES, WORD_LIST, "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
]  # fmt: skip
SIZE_FILES = [CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG, *TOKENIZER_FILES]
ADAPTER_FILES = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, GENERATION_CONFIG, *TOKENIZER_FILES]
MODEL_FILES = [CONFIG, GENERATION_CONFIG, "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES]
CONNECT_SECONDS = 2
DEFAULT_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
OLD_WEIGHTS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_hub_id(name: str) -> bool:
    """Whether `name` can only be a repository of the hub, OWNER/NAME: no built-in name, no file or folder."""
    return "/" in name and name not in PRESETS and HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def hub_folder(hub_id: str, *, weights: bool) -> str:
    """The local folder with the tokenizer of `hub_id` and, if asked for, its weights.

    Raises:
        GptlmError: if they are neither cached nor downloadable, or `hub_id` is a local path.
    """
    path = Path(hub_id)
    if path.is_file():
        raise GptlmError(f"{hub_id} is a file; give the folder that holds it: {path.parent}")
    if not HUB_ID.fullmatch(hub_id):
        raise GptlmError(f"{hub_id}: there is no such folder")
    cached = _cached(hub_id)
    if cached is not None and (has_weights(cached) if weights else has_tokenizer(cached)):
        return str(cached)
    what = f"{'weights' if weights else 'tokenizer files'} of {hub_id} (no folder here has this name)"
    folder = _downloaded(hub_id, MODEL_FILES if weights else TOKENIZER_FILES, what)
    if weights and not has_weights(Path(folder)):  # published without safetensors
        folder = _downloaded(hub_id, OLD_WEIGHTS, what)
    return folder


def hub_config(hub_id: str) -> Path:
    """The config.json of `hub_id`, which is not a local folder. A repository of adapters has none, but theirs beside.

    Raises:
        GptlmError: if it is neither cached nor downloadable.
    """
    cached = _cached(hub_id)
    if cached is not None and any((cached / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        return cached / CONFIG
    folder = _downloaded(hub_id, SIZE_FILES, f"sizes of {hub_id} (no folder here has this name)")
    return Path(folder) / CONFIG


def adapter_folder(name: str) -> Path:
    """The local folder of the adapters `name`, a folder, which need not exist, or a repository of the hub.

    Raises:
        GptlmError: if they are neither cached nor downloadable, or the repository holds none.
    """
    if not is_hub_id(name):
        return Path(name)
    folder, files = _cached(name), (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    if folder is None or not all((folder / file).is_file() for file in files):
        folder = Path(_downloaded(name, ADAPTER_FILES, f"adapters of {name} (no folder here has this name)"))
    if missing := next((file for file in files if not (folder / file).is_file()), None):
        raise GptlmError(
            f"{name} of the hub holds no adapters that can be read here: {missing} is missing (adapter_model.bin is "
            "not read: load it with PEFT and save it again)"
        )
    return folder


def _downloaded(hub_id: str, files: list[str], what: str) -> str:
    """Download `files`; returns the folder. Errors begin with `what`."""
    try:
        require_network()
        return snapshot_download(hub_id, allow_patterns=files)
    except Exception as error:  # huggingface_hub and its HTTP library have many error types
        raise GptlmError(
            f"the {what} are neither in the local cache nor could they be downloaded ({reason_of(error)}): on a "
            f"machine with network run `hf download {hub_id} --local-dir DIR` and give the folder DIR instead"
        ) from error


def _cached(hub_id: str) -> Path | None:
    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except Exception:  # not cached; the type depends on the version of huggingface_hub
        return None


def require_network() -> None:
    """Raises ConnectionError, naming the reason, if the hub cannot be reached: huggingface_hub's retries take a minute.

    A process tries to connect once.
    """
    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    host = urlsplit(constants.ENDPOINT)
    name, proxies = host.hostname or "", getproxies()
    proxy = proxies.get(host.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(name):
        host = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    reason = _obstacle(host.hostname or "", host.port or DEFAULT_PORTS.get(host.scheme, 443))
    if reason:
        raise ConnectionError(f"no connection to {host.hostname}: {reason}")


@cache
def _obstacle(host: str, port: int) -> str | None:
    """Why `host` cannot be reached within seconds; None if it can. Looking its name up has no time limit of its own."""
    found: list[str] = [f"no answer within {CONNECT_SECONDS} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            found.clear()
        except OSError as error:
            found[:] = [error.strerror or str(error)]

    attempt = Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(CONNECT_SECONDS)
    return next(iter(found), None)


def model_folder(name: str, hint: str = "") -> str:
    """The local folder of the trained model `name`, a folder, a built-in name or a repository of the hub.

    Args:
        hint: end of the message if it is none of them.

    Raises:
        GptlmError: if it is none of them, was never published with weights, or cannot be downloaded.
    """
    if Path(name).is_dir():
        return name
    preset = PRESETS.get(name)
    if preset is None and is_hub_id(name):
        return hub_folder(name, weights=True)
    if preset is None:
        known = ", ".join(key for key in PRESETS if "/" not in key)
        raise GptlmError(
            f"{named('model_name_or_path')} {name!r} is neither a folder nor a built-in name{hint}; a model of the "
            f"hub is OWNER/NAME, built-in are {known}"
        )
    if preset.hub_id is None:
        raise GptlmError(f"no weights were ever published for {name}, it is a size only; give a trained folder")
    return hub_folder(preset.hub_id, weights=True)
