"""The lock of a run folder: only one run at a time writes to it.

The lock is the file `run.lock`, which names its owner. On one machine the operating system knows whether the owner is
alive: the owner holds the file by `flock`, which ends with the process in any case. Otherwise (another machine, a file
system without such locks) the owner's sign of life counts: the modification time of the file. It is compared only with
itself or with other times of the same file system, so no two clocks need to agree. What is written to the folder does
not belong here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import open_file
from omnitrain.distributed.processes import identify_process, is_alive, is_in_same_container

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger: logging.Logger = logging.getLogger("omnitrain")

LOCK = "run.lock"

BEAT_S = 20.0
"""Seconds between two signs of life."""
WATCH_S = 90.0
"""Seconds to watch for a sign of life, at least, before the owner counts as gone; `STALE_S` in all."""
STALE_S = 300.0
LEAVE_S = 5.0
"""Seconds that an owner on this machine has to exit: it may be writing its last checkpoint, or be dying."""
SETTLE_S = 1.0
"""Seconds after which a new owner checks that no other took the lock too, on file systems without `flock`."""

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)

Owner = dict[str, Any]


class Lock:
    """Keeps other runs out of a folder while it is held. A failing disk does not prevent a run.

    Args:
        folder: The folder of the run; it must exist when the lock is taken.

    Attributes:
        token: A unique name for this writer.

    >>> import tempfile
    >>> lock = Lock(Path(tempfile.mkdtemp()))
    >>> with lock.held():
    ...     lock.path.exists()
    True
    >>> lock.path.exists()
    False
    """

    def __init__(self, folder: Path) -> None:
        self.path: Path = folder / LOCK
        self.token: str = secrets.token_hex(4)
        self._depth = 0
        self._descriptor: int | None = None
        self._process = 0
        self._ends = threading.Event()
        self._beat: threading.Thread | None = None
        self._changing = threading.Lock()

    @property
    def is_wanting(self) -> bool:
        """Whether it should be held but could not be taken because of the disk: then others are not kept out."""
        return self._depth > 0 and self._descriptor is None

    @property
    def is_held(self) -> bool:
        """Whether others are kept out."""
        return self._descriptor is not None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock inside; calls on the same object can be nested."""
        self.take()
        try:
            yield
        finally:
            self.release()

    def take(self) -> None:
        """Take the lock; if it is already held, count one more holder.

        Raises:
            CheckpointError: Another run has it; the message names that run.
        """
        with self._changing:
            if self._depth == 0:
                self.token, self._process = secrets.token_hex(4), os.getpid()
                try:
                    self._take(LEAVE_S)
                except OSError as error:
                    logger.warning(
                        "Cannot lock %r: %s. Nothing keeps another run out of this folder.",
                        str(self.path.parent), error,
                    )  # fmt: skip
            self._depth += 1

    def release(self) -> None:
        """Release the lock, once there was a `release` for each `take`."""
        if self._process != os.getpid():
            return
        with self._changing:
            self._depth -= 1
            if self._depth:
                return
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    if self._is_at_path(self._descriptor) and self._found_token() in (self.token, None):
                        self.path.unlink()
            self._let_go()

    def check(self) -> None:
        """Make sure that a lock that should be held still is; called before any change in the folder.

        Raises:
            CheckpointError: Another run has taken it.
        """
        if not self._depth or self._process != os.getpid():
            return
        with self._changing, contextlib.suppress(OSError):  # the next write will report it
            if self._descriptor is not None and self._is_at_path(self._descriptor):
                if self._found_token() in (self.token, None):
                    return
                raise self._loss(_read(self._descriptor))
            was_held = self._descriptor is not None
            self._let_go()
            try:
                self._take(0.0)  # the folder was emptied, or the disk prevented the lock earlier
            except CheckpointError as error:
                raise self._loss(None) if was_held else error from error

    # --- taking

    def _take(self, patience: float) -> None:
        """Take the file, waiting up to `patience` seconds for an owner on this machine to exit."""
        end = time.monotonic() + patience
        while True:
            descriptor, is_new = self._open()
            try:
                if self._has_taken(descriptor, is_new, end):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        self._descriptor = descriptor
        _held.add(self)
        self._ends = threading.Event()
        file = descriptor if os.utime in os.supports_fd else self.path
        beat = threading.Thread(target=_beat, args=(file, self._ends), name="omnitrain-lock", daemon=True)
        with contextlib.suppress(RuntimeError):  # at interpreter exit, where no sign of life is needed any more
            beat.start()
            self._beat = beat

    def _open(self) -> tuple[int, bool]:
        """Return the open file, and whether it is new.

        Raises:
            CheckpointError: It is a link, which a folder from somebody else may have.
        """
        while True:
            if self.path.is_symlink():
                raise CheckpointError(
                    f"{str(self.path)!r} is a link to {os.readlink(self.path)!r}, which a run would overwrite. "
                    "Delete the link, and look for others: who made this folder?"
                )
            with contextlib.suppress(FileExistsError):
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
            with contextlib.suppress(FileNotFoundError):  # it was released in the meantime
                return open_file(self.path, os.O_RDWR), False

    def _has_taken(self, descriptor: int, is_new: bool, end: float) -> bool:
        """Return whether the lock is ours now; False means try again."""
        is_exclusive = _flock(descriptor)
        if is_exclusive is False:
            if time.monotonic() < end:
                time.sleep(0.05)
                return False
            raise self._refusal(_read(descriptor))
        if not self._is_at_path(descriptor):
            return False
        owner, is_certain = _read(descriptor), True
        if owner is not None or not (is_new or is_exclusive):
            state = "unknown" if owner is None else _state_of(owner, descriptor, bool(is_exclusive))
            if state == "alive" and time.monotonic() < end:
                time.sleep(0.05)
                return False
            if state == "alive" or (state == "unknown" and self._shows_life(descriptor, owner)):
                raise self._refusal(owner)
            if _read(descriptor) != owner or not self._is_at_path(descriptor):
                return False
            how = "is a copy, whose original is locked by" if state == "copy" else "was left locked by"
            logger.warning("%r %s %s. It is taken over.", str(self.path.parent), how, _named(owner))
            is_certain = state != "unknown" and bool(is_exclusive)
        self._write(descriptor)
        if is_new or is_certain:
            return True
        time.sleep(SETTLE_S)
        return self._is_at_path(descriptor) and (_read(descriptor) or {}).get("token") == self.token

    def _write(self, descriptor: int) -> None:
        place = os.fstat(descriptor)
        owner = {
            "token": self.token,
            **identify_process(),
            "device": place.st_dev,
            "inode": place.st_ino,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text = json.dumps(owner).encode()
        with contextlib.suppress(OSError):  # on a full disk the file stays empty, and is held anyway
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, text)
            os.ftruncate(descriptor, len(text))
        with contextlib.suppress(OSError):
            os.utime(descriptor if os.utime in os.supports_fd else self.path)

    def _shows_life(self, descriptor: int, owner: Owner | None) -> bool:
        """Watch the file until it changes, or has not changed for so long that its owner must be gone."""
        first = os.fstat(descriptor).st_mtime_ns
        age = self._seconds_since(first)
        # with a clock that was set back, the age is unknown
        patience = STALE_S if age < 0 else min(STALE_S, max(WATCH_S, STALE_S - age))
        logger.warning(
            "%r is locked by %s. Waiting for a sign of life, %.0f s at most.",
            str(self.path.parent), _named(owner), patience,
        )  # fmt: skip
        end = time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(min(1.0, BEAT_S / 4))
            try:
                seen = os.open(self.path, os.O_RDONLY)  # opened anew, since NFS looks at the server only then
            except FileNotFoundError:
                return False
            try:
                if os.fstat(seen).st_mtime_ns != first or _read(seen) != owner:
                    return True
            finally:
                os.close(seen)
        return False

    def _seconds_since(self, moment_ns: int) -> float:
        """Return how long ago this was by the clock of the file system; -1 if unknown."""
        probe = self.path.with_name(f"{LOCK}.{self.token}")
        try:
            probe.touch(exist_ok=False)
            try:
                os.utime(probe)
                return (probe.stat().st_mtime_ns - moment_ns) / 1e9
            finally:
                probe.unlink()
        except OSError:
            return -1.0

    def _refusal(self, owner: Owner | None) -> CheckpointError:
        return CheckpointError(
            f"{str(self.path.parent)!r} is in use by {_named(owner)}. Wait for its end, end it, or pass another "
            f"`save_dir`. If you are sure that it is gone, delete {str(self.path)!r}."
        )

    def _loss(self, owner: Owner | None) -> CheckpointError:
        if owner is None:
            with contextlib.suppress(OSError):
                descriptor = os.open(self.path, os.O_RDONLY)
                owner = _read(descriptor)
                os.close(descriptor)
        return CheckpointError(
            f"{str(self.path.parent)!r} was taken over by {_named(owner)}, while no sign of life came from this run or "
            f"its {LOCK!r} was deleted. It saves nothing more, so that the two do not mix. The checkpoints there "
            "are whole: end the other run, or go on from them into another `save_dir`."
        )

    # --- what is there

    def _is_at_path(self, descriptor: int) -> bool:
        """Return whether the open file still has the name: it may have been released and created anew."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _found_token(self) -> str | None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            owner = _read(descriptor)
        finally:
            os.close(descriptor)
        return None if owner is None else owner["token"]

    def _let_go(self) -> None:
        """Close the file, which ends the system's lock too."""
        self._ends.set()
        if self._beat is not None:
            self._beat.join(1.0)  # it must not touch a file that reuses this descriptor
        _held.discard(self)
        descriptor, self._descriptor, self._beat = self._descriptor, None, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
"""The locks that this process holds."""


def _leave_to_parent() -> None:
    # A loader's worker may outlive the run by seconds, and would hold its lock.
    for lock in list(_held):
        lock._let_go()
        lock._depth, lock._changing = 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _beat(file: int | Path, ends: threading.Event) -> None:
    """Show that the run is alive, however long a step takes."""
    while not ends.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(file)


def _flock(descriptor: int) -> bool | None:
    """Take the system's lock; False if another process has it, None if this file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _read(descriptor: int) -> Owner | None:
    """Return the owner that the file names; None if it cannot be read."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        owner = json.loads(os.read(descriptor, 1 << 14))
    except ValueError:
        return None
    wanted = {"token": str, "host": str, "boot": str, "namespace": str, "pid": int, "device": int, "inode": int}
    if isinstance(owner, dict) and all(isinstance(owner.get(key), kind) for key, kind in wanted.items()):
        return owner
    return None


def _state_of(
    owner: Mapping[str, Any], descriptor: int, is_exclusive: bool
) -> Literal["gone", "copy", "alive", "unknown"]:
    """Return the state of an owner.

    Args:
        owner: The owner that the file names.
        descriptor: The file.
        is_exclusive: Whether the system's lock on the file is ours.
    """
    place, can_tell = os.fstat(descriptor), is_in_same_container(owner)
    if owner["boot"] == identify_process()["boot"] and (owner["device"] == place.st_dev or can_tell):
        if (owner["device"], owner["inode"]) != (place.st_dev, place.st_ino):
            return "copy"
        if is_exclusive:
            return "gone"
    if not can_tell:
        return "unknown"
    if owner["pid"] == os.getpid():
        return "alive" if any(lock.token == owner["token"] for lock in _held) else "gone"
    return "alive" if is_alive(owner) else "gone"


def _named(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "a run that left no name"
    return f"process {owner['pid']} on {owner['host']!r}, run {owner['token']}, since {owner.get('since')}"
