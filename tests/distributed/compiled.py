"""DeepSpeed's communication op, compiled into a folder of this run of the tests.

In DeepSpeed's own folder, which all programs of a user share, the lock of a run that was killed makes every later one
wait forever. Compiling takes a minute, so the result is kept in pytest's cache and copied from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import programs

if sys.platform == "linux":
    import fcntl

_NAME = "deepspeed_shm_comm"
_BUILD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder; Builder().load()"


def compile_once() -> None:
    """Make sure that DeepSpeed finds its op compiled in the folder of this run; one process does it for all."""
    place = os.environ.get("TORCH_EXTENSIONS_DIR", "")
    if not place or sys.platform != "linux" or (Path(place) / "complete").exists():
        return
    with open(Path(place) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process that has it
        if not (Path(place) / "complete").exists():
            _fill(Path(place))
            (Path(place) / "complete").touch()


def _fill(place: Path) -> None:
    what = f"{sys.executable} {sys.version} {version('torch')} {version('deepspeed')}"
    root = os.environ.get("TORCH_EXTENSIONS_KEPT", "")
    kept = Path(root) / hashlib.sha256(what.encode()).hexdigest()[:16] if root else None
    if kept is not None and kept.exists():
        shutil.copytree(kept, place / _NAME)
        return
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = programs.run(sys.executable, "-c", _BUILD, env=environment, timeout=900)
    if done.returncode or not (place / _NAME / f"{_NAME}.so").exists():
        raise RuntimeError(f"DeepSpeed cannot compile its op:\n{(done.stdout + done.stderr)[-3000:]}")
    if kept is not None:
        made = Path(tempfile.mkdtemp(dir=kept.parent))
        shutil.copytree(place / _NAME, made / _NAME)
        with contextlib.suppress(OSError):  # another run was quicker
            (made / _NAME).rename(kept)
        shutil.rmtree(made, ignore_errors=True)
