"""`loops.c`: what would take long in Python or numpy, compiled when it is needed with the C compiler of the machine."""

import ctypes
import logging
import os
import shlex
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.ctypeslib import ndpointer

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("loops.c")
COMPILER_FLAGS = ("-O2", "-shared", "-fPIC", "-ffp-contract=off")  # no flag that changes how sums are rounded
COMPILE_SECONDS = 60


@lru_cache(maxsize=1)
def compiled_loops() -> ctypes.CDLL | None:
    """The functions of `loops.c`; None, with a log message, where it cannot be compiled."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    try:
        with tempfile.TemporaryDirectory(prefix="gptlm-") as folder:  # not shared with other processes
            library = str(Path(folder) / "loops.so")
            command = [*compiler, *COMPILER_FLAGS, "-o", library, str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS, stdin=subprocess.DEVNULL)
            return _declared(ctypes.CDLL(library))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.info(
            "the sample index is built without compiled loops (%s): a blend takes 2 s per million samples, the shuffle "
            "of a large corpus 7 times as long",
            _reason(error),
        )
        return None


def _declared(loops: ctypes.CDLL) -> ctypes.CDLL:
    """`loops` with the types of its functions; AttributeError if one is missing."""
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    weights, taken, parts = (ndpointer(dtype, 1, flags="C") for dtype in (np.float64, np.int64, np.uint8))
    loops.blend_order.argtypes, loops.blend_order.restype = [weights, number, number, number, taken, parts], None
    for function, dtype in ((loops.shuffle_32, np.uint32), (loops.shuffle_64, np.uint64)):
        function.argtypes, function.restype = [ndpointer(dtype, 1, flags=("C", "W")), number, pointer, pointer], None
    return loops


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no C compiler {error.filename!r}"
    lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    return lines[0] if lines else str(error) or type(error).__name__
