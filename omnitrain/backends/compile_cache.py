"""The folder that DeepSpeed compiles its operators into, and its lock."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

logger: logging.Logger = logging.getLogger("omnitrain")

_VARIABLE = "TORCH_EXTENSIONS_DIR"
# The longest time, in seconds, that compiling may take.
_STALE_S = 600.0
# How long, in seconds, a process waits for another one that compiles before it says so.
_REPORT_S = 30.0


class CompileLock:
    """A lock of the system instead of torch's `FileBaton`, with the same methods.

    torch's lock is a file: a process that is killed leaves it behind, and every later one waits for it forever. This
    one is released when its process ends, however it ends. It is on a file next to torch's.
    """

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1, warn_after_seconds: float | None = None) -> None:
        # Not torch's name: a program without omnitrain would take the file, which stays, for a lock that is held.
        self._folder = Path(lock_file_path).parent
        self._lock = FileLock(self._folder / "omnitrain.lock")

    def try_acquire(self) -> bool:
        """Acquire the lock, after any other process that compiles here, and return True.

        Whoever waited builds too: that takes no time if the other process finished, and repairs it if it was killed.
        """
        try:
            self._lock.acquire(timeout=_REPORT_S)
        except Timeout:
            logger.warning("Waiting for another process that compiles in %s.", self._folder)
            self._lock.acquire()
        return True

    def wait(self) -> None:
        """Return at once: whoever acquires the lock has waited already."""

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()


def cache_folder() -> Path:
    """Return the folder of the current user for operators compiled in this environment.

    It is named after the versions of Python, torch and DeepSpeed, and a digest of where they are installed: of two
    environments that shared a folder, each would compile again what the other has compiled.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    place = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    name = f"{python}-torch{version('torch')}-deepspeed{version('deepspeed')}-{place}"
    return root / "omnitrain" / "torch_extensions" / name


def use_compile_cache() -> None:
    """Have DeepSpeed compile into a folder of omnitrain's, under a lock that ends with its process.

    A folder that the user chose with TORCH_EXTENSIONS_DIR is shared with other programs and keeps torch's locks. Old
    ones are reported.
    """
    from torch.utils import cpp_extension

    if sys.platform == "win32":
        return
    folder = cache_folder()
    if os.environ.get(_VARIABLE, str(folder)) != str(folder):
        _warn_stale_locks(Path(os.environ[_VARIABLE]))
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a home that is read-only
        logger.warning("%s: DeepSpeed compiles into torch's folder instead.", error)
        _warn_stale_locks(Path(cpp_extension.get_default_build_root()))
        return
    os.environ[_VARIABLE] = str(folder)
    cpp_extension.FileBaton = CompileLock  # type: ignore[misc, assignment]


def _warn_stale_locks(root: Path) -> None:
    """Warn about locks that killed programs left: DeepSpeed would wait for them forever."""
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        with contextlib.suppress(OSError):  # released
            age = time.time() - lock.stat().st_mtime
            if age > _STALE_S:
                logger.warning(
                    "%s is %d minutes old, and DeepSpeed waits as long as it exists. Remove it, unless another "
                    "program compiles there: one that was killed leaves it behind.", lock, age / 60,
                )  # fmt: skip
