"""What other libraries print is not ours to show: notes at their import, warnings for programmers, bars in files."""

import logging
import os
import sys
import warnings

NOISY = ("torchao", "torch.utils._pytree")  # which say something at every import of torchao, by peft, too
NO_BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
FOR_PROGRAMMERS = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)


def quiet_libraries() -> None:
    """Before other libraries are imported: they read these settings then."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:  # else the user asked for them: python -W, PYTHONWARNINGS
        for kind in FOR_PROGRAMMERS:
            warnings.filterwarnings("ignore", category=kind)
    if not sys.stderr.isatty():
        for name in NO_BARS:
            os.environ.setdefault(name, "1")
