"""Loggers, warnings and progress bars of other libraries. The only module that changes them."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

NOISY = ("torchao", "torch.utils._pytree")  # both log at every import of torchao, which PEFT imports too
NO_BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
FOR_PROGRAMMERS = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)


def quiet_libraries() -> None:
    """Call this before other libraries are imported: they read these settings at import."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:  # else the user asked for them: python -W, PYTHONWARNINGS
        for kind in FOR_PROGRAMMERS:
            warnings.filterwarnings("ignore", category=kind)
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled")  # the compiler, about few tokens
    if not sys.stderr.isatty():
        for name in NO_BARS:
            os.environ.setdefault(name, "1")


def quiet_transformers() -> None:
    """Errors only and no progress bars: our own log reports what a run does."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def hide_trainer_resume_warning() -> None:
    """Drop the Trainer's warning about arguments that differ from the checkpoint: our own log lists them."""
    logging.getLogger("transformers.trainer_utils").addFilter(_is_not_resume_warning)


def _is_not_resume_warning(record: logging.LogRecord) -> bool:
    return "arguments do not match the ones in the `trainer_state.json`" not in str(record.msg)


def quiet_deepspeed() -> None:
    """Warnings and errors only. Call this after DeepSpeed is imported: the import sets the level to INFO."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def deepspeed_without_gpu() -> None:
    """Tell DeepSpeed that there is no accelerator: it searches for one when PEFT or accelerate imports it, and logs."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextmanager
def warnings_ignored(category: type[Warning] = Warning, message: str = "") -> Iterator[None]:
    """Ignore warnings of `category` whose text begins with the regular expression `message`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield
