"""A switch of datasets and huggingface_hub that is an environment variable only. Tried with 5.2.0 and 2.4.0."""

from collections.abc import Iterator
from contextlib import contextmanager

from gptlm.upstream.check import Needed, available

OFFLINE = (
    Needed("huggingface_hub.constants", "is_offline_mode", uses=("HF_HUB_OFFLINE",)),
    Needed("datasets.config", "HF_HUB_OFFLINE"),
)
ALL = OFFLINE


@contextmanager
def offline() -> Iterator[None]:
    """Inside, datasets are read from the cache alone, without a request."""
    import datasets
    from huggingface_hub import constants

    if not available("datasets", OFFLINE, "requests are repeated for a minute where there is no network"):
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
