"""DeepSpeed's communication operator, compiled once and loaded before others are forked."""

import contextlib
import os
import sys

import programs

from omnitrain.backends.compile_cache import cache_folder

_BUILD = """
from omnitrain.backends.compile_cache import use_compile_cache
use_compile_cache()
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()
"""


def compile_once() -> None:
    """Make sure that the operator is compiled, which takes a minute the first time."""
    if sys.platform != "linux" or next(cache_folder().glob("*/*.so"), None):
        return
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = programs.run(sys.executable, "-c", _BUILD, env=environment, timeout=900)
    if done.returncode:
        raise RuntimeError(f"DeepSpeed cannot compile its operator:\n{(done.stdout + done.stderr)[-3000:]}")


def load_operators() -> None:
    """Load the operator into this process, for all that are forked from it; DeepSpeed asks ninja about it otherwise."""
    if next(cache_folder().glob("*/*.so"), None):
        with contextlib.suppress(ImportError):
            exec(_BUILD, {})
