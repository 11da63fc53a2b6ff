"""Built-in names -> local folders: from the hub's cache, else downloaded. Without a network: an error in seconds."""

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, snapshot_download

from gptlm.errors import GptlmError, named, reason_of
from gptlm.model.files import (
    CONFIG,
    GENERATION_CONFIG,
    MERGES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    has_tokenizer,
    has_weights,
)
from gptlm.model.presets import PRESETS

TOKENIZER_FILES = [TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, MERGES, "special_tokens_map.json"]
MODEL_FILES = [CONFIG, GENERATION_CONFIG, "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES]
CONNECT_SECONDS = 5
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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
    files = MODEL_FILES if weights else TOKENIZER_FILES
    cached = _cached(hub_id)
    if cached is not None and (has_weights(cached) if weights else has_tokenizer(cached)):
        return str(cached)
    try:
        _require_network()
        return snapshot_download(hub_id, allow_patterns=files)
    except Exception as error:  # huggingface_hub and its HTTP library have many error types
        what = "weights of" if weights else "tokenizer files of"
        reason = reason_of(error)
        raise GptlmError(
            f"the {what} {hub_id} are neither in the local cache nor could they be downloaded ({reason}): on a "
            f"machine with network run `hf download {hub_id} --local-dir DIR` and give the folder DIR instead"
        ) from error


def _cached(hub_id: str) -> Path | None:
    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except Exception:  # not cached; the type depends on the version of huggingface_hub
        return None


def _require_network() -> None:
    """Fail within seconds where the hub cannot be reached; huggingface_hub's own retries take over a minute."""
    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return  # the proxy connects, so that the hub itself need not be reachable
    host = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((host.hostname, host.port or 443), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"no connection to {host.hostname}: {error.strerror or error}") from error


def model_folder(name: str, hint: str = "") -> str:
    """The local folder of the trained model `name`, a folder or a built-in name.

    Args:
        hint: end of the message if it is neither.

    Raises:
        GptlmError: if it is neither, was never published with weights, or cannot be downloaded.
    """
    if Path(name).is_dir():
        return name
    preset = PRESETS.get(name)
    if preset is None:
        known = ", ".join(key for key in PRESETS if "/" not in key)
        raise GptlmError(
            f"{named('model_name_or_path')} {name!r} is neither a folder nor a built-in name{hint}; "
            f"built-in are {known}"
        )
    if preset.hub_id is None:
        raise GptlmError(f"no weights were ever published for {name}, it is a size only; give a trained folder")
    return hub_folder(preset.hub_id, weights=True)
