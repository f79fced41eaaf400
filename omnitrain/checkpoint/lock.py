"""The lock of a run folder.

The lock is the file `run.lock`, which names its owner. On one machine the owner also holds it by `flock`, which ends
with the process in any case. Elsewhere (another machine, a file system without `flock`) the heartbeat of the owner
counts: the modification time of the file, compared only with times of the same file system, as clocks may differ.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
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

# Seconds between two heartbeats.
HEARTBEAT_S = 20.0
# The least seconds to wait for a heartbeat before the owner counts as gone; `STALE_S` in total.
WATCH_S = 90.0
STALE_S = 300.0
# Seconds that an owner on this machine has to exit: it may be writing its last checkpoint.
EXIT_GRACE_S = 5.0
# Seconds after which a new owner checks that no other took the lock too, on file systems without `flock`.
SETTLE_S = 1.0

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
    >>> with lock.hold():
    ...     lock.path.exists()
    True
    >>> lock.path.exists()
    False
    """

    def __init__(self, folder: Path) -> None:
        self.path: Path = folder / LOCK
        self.token: str = os.urandom(4).hex()
        self._depth = 0
        self._descriptor: int | None = None
        self._process = 0
        self._stopped = threading.Event()
        self._heartbeat: threading.Thread | None = None
        self._mutex = threading.Lock()

    @property
    def failed_to_acquire(self) -> bool:
        """Whether the lock should be held, but the disk prevented it: other runs are not kept out."""
        return self._depth > 0 and self._descriptor is None

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock, so that others are kept out."""
        return self._descriptor is not None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock inside the block; calls on the same object can be nested."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Acquire the lock; if this object holds it already, count one more holder.

        Raises:
            CheckpointError: Another run holds it.
        """
        with self._mutex:
            if self._depth == 0:
                self.token, self._process = os.urandom(4).hex(), os.getpid()
                try:
                    self._acquire(EXIT_GRACE_S)
                except OSError as error:
                    logger.warning(
                        "Cannot lock %r: %s. Nothing keeps another run out of this folder.",
                        str(self.path.parent), error,
                    )  # fmt: skip
            self._depth += 1

    def release(self) -> None:
        """Undo one `acquire`; the last one releases the lock."""
        if self._process != os.getpid():
            return
        with self._mutex:
            self._depth -= 1
            if self._depth:
                return
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    # None: the disk was full when the owner was to be written
                    if self._is_at_path(self._descriptor) and self._stored_token() in (self.token, None):
                        self.path.unlink()
            self._close()

    def check(self) -> None:
        """Check that the lock is still held; called before any change in the folder.

        Raises:
            CheckpointError: Another run has taken it.
        """
        if not self._depth or self._process != os.getpid():
            return
        with self._mutex, contextlib.suppress(OSError):  # the next write will report it
            if self._descriptor is not None and self._is_at_path(self._descriptor):
                if self._stored_token() in (self.token, None):
                    return
                raise self._taken_over_error(_read(self._descriptor))
            was_acquired = self._descriptor is not None
            self._close()
            try:
                self._acquire(0.0)  # the folder was emptied, or the disk prevented the lock earlier
            except CheckpointError as error:
                raise self._taken_over_error(None) if was_acquired else error from error

    # --- acquiring

    def _acquire(self, patience: float) -> None:
        """Acquire the lock, waiting up to `patience` seconds for an owner on this machine to exit."""
        end = time.monotonic() + patience
        while True:
            descriptor, is_new = self._open()
            try:
                if self._try_acquire(descriptor, is_new, end):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        self._descriptor = descriptor
        _acquired.add(self)
        self._stopped = threading.Event()
        # by descriptor: the file at the path may belong to another run by then
        file = descriptor if os.utime in os.supports_fd else self.path
        thread = threading.Thread(target=_heartbeat, args=(file, self._stopped), name="omnitrain-lock", daemon=True)
        with contextlib.suppress(RuntimeError):  # at interpreter exit, where no heartbeat is needed any more
            thread.start()
            self._heartbeat = thread

    def _open(self) -> tuple[int, bool]:
        """Open or create the file; return its descriptor and whether it is new.

        Raises:
            CheckpointError: It is a link, which a run would follow and overwrite.
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

    def _try_acquire(self, descriptor: int, is_new: bool, end: float) -> bool:
        """Return whether the lock was acquired; False means try again."""
        is_exclusive = _flock(descriptor)
        if is_exclusive is False:
            if time.monotonic() < end:
                time.sleep(0.05)
                return False
            raise in_use_error(str(self.path.parent), _read(descriptor))
        # its last owner deleted it after it was opened here: a lock on it keeps nobody out
        if not self._is_at_path(descriptor):
            return False
        owner, is_certain = _read(descriptor), True
        if owner is not None or not (is_new or is_exclusive):
            state = "unknown" if owner is None else _state_of(owner, descriptor, bool(is_exclusive))
            if state == "alive" and time.monotonic() < end:
                time.sleep(0.05)
                return False
            if state == "alive" or (state == "unknown" and self._sees_heartbeat(descriptor, owner)):
                raise in_use_error(str(self.path.parent), owner)
            if _read(descriptor) != owner or not self._is_at_path(descriptor):
                return False
            how = "is a copy, whose original is locked by" if state == "copy" else "was left locked by"
            logger.warning("%r %s %s. It is taken over.", str(self.path.parent), how, describe_owner(owner))
            is_certain = state != "unknown" and bool(is_exclusive)
        self._write(descriptor)
        if is_new or is_certain:
            return True
        # without `flock`, two runs may both have written their names: the later one wins, the other sees it here
        time.sleep(SETTLE_S)
        return self._is_at_path(descriptor) and (_read(descriptor) or {}).get("token") == self.token

    def _write(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        owner = {
            "token": self.token,
            **identify_process(),
            "device": stat.st_dev,
            "inode": stat.st_ino,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text = json.dumps(owner).encode()
        with contextlib.suppress(OSError):  # on a full disk the file stays empty, and is held anyway
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, text)
            os.ftruncate(descriptor, len(text))
        with contextlib.suppress(OSError):
            os.utime(descriptor if os.utime in os.supports_fd else self.path)

    def _sees_heartbeat(self, descriptor: int, owner: Owner | None) -> bool:
        """Watch the file until it changes, or has not changed for so long that its owner must be gone."""
        previous = os.fstat(descriptor).st_mtime_ns
        age = self._seconds_since(previous)
        # with a clock that was set back, the age is unknown
        patience = STALE_S if age < 0 else min(STALE_S, max(WATCH_S, STALE_S - age))
        logger.warning(
            "%r is locked by %s. Waiting for a heartbeat, at most %.0f s.",
            str(self.path.parent), describe_owner(owner), patience,
        )  # fmt: skip
        end = time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(min(1.0, HEARTBEAT_S / 4))
            try:
                reopened = os.open(self.path, os.O_RDONLY)  # NFS asks the server again only when a file is opened
            except FileNotFoundError:
                return False
            try:
                if os.fstat(reopened).st_mtime_ns != previous or _read(reopened) != owner:
                    return True
            finally:
                os.close(reopened)
        return False

    def _seconds_since(self, moment_ns: int) -> float:
        """Return the seconds since a time, by the clock of the file system; -1 if unknown."""
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

    def _taken_over_error(self, owner: Owner | None) -> CheckpointError:
        if owner is None:
            with contextlib.suppress(OSError):
                descriptor = os.open(self.path, os.O_RDONLY)
                owner = _read(descriptor)
                os.close(descriptor)
        return CheckpointError(
            f"{str(self.path.parent)!r} was taken over by {describe_owner(owner)}, because this run sent no heartbeat "
            f"or its {LOCK!r} was deleted. This run saves nothing more there, so that files of the two do not mix. The "
            "checkpoints there are complete: stop the other run, or resume from them with another `save_dir`."
        )

    # --- the file

    def _is_at_path(self, descriptor: int) -> bool:
        """Return whether the open file still has its name: another run may have deleted and created it again."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _stored_token(self) -> str | None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            owner = _read(descriptor)
        finally:
            os.close(descriptor)
        return None if owner is None else owner["token"]

    def _close(self) -> None:
        """Close the file, which also releases `flock`."""
        self._stopped.set()
        if self._heartbeat is not None:
            self._heartbeat.join(1.0)  # it must not touch a file that reuses this descriptor
        _acquired.discard(self)
        descriptor, self._descriptor, self._heartbeat = self._descriptor, None, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


_acquired: weakref.WeakSet[Lock] = weakref.WeakSet()


def _drop_in_child() -> None:
    # a worker of a data loader may outlive the run by seconds, and would hold its lock
    for lock in list(_acquired):
        lock._close()
        lock._depth, lock._mutex = 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)


def _heartbeat(file: int | Path, stopped: threading.Event) -> None:
    # in a thread, as a step may take longer than others wait
    while not stopped.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):
            os.utime(file)


def _flock(descriptor: int) -> bool | None:
    """Acquire `flock`; return False if another process has it, None if this file system has no locks."""
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
    """Return the owner named in the file; None if it cannot be read."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        owner = json.loads(os.read(descriptor, 1 << 14))
    except ValueError:
        return None
    # the file may be of another tool, or cut off by a full disk
    types = {"token": str, "host": str, "boot": str, "namespace": str, "pid": int, "device": int, "inode": int}
    if isinstance(owner, dict) and all(isinstance(owner.get(key), kind) for key, kind in types.items()):
        return owner
    return None


def _state_of(
    owner: Mapping[str, Any], descriptor: int, is_exclusive: bool
) -> Literal["gone", "copy", "alive", "unknown"]:
    """Return the state of an owner; with `is_exclusive`, this process has `flock` on the file."""
    stat, is_same_container = os.fstat(descriptor), is_in_same_container(owner)
    if owner["boot"] == identify_process()["boot"] and (owner["device"] == stat.st_dev or is_same_container):
        if (owner["device"], owner["inode"]) != (stat.st_dev, stat.st_ino):
            return "copy"
        if is_exclusive:
            return "gone"
    if not is_same_container:
        return "unknown"
    if owner["pid"] == os.getpid():
        return "alive" if any(lock.token == owner["token"] for lock in _acquired) else "gone"
    return "alive" if is_alive(owner) else "gone"


def describe_owner(owner: Mapping[str, Any] | None) -> str:
    """Return the owner of a lock as text for errors."""
    if owner is None:
        return "an unknown run"
    return f"process {owner.get('pid')} on {owner['host']!r}, run {owner['token']}, since {owner.get('since')}"


def in_use_error(folder: str, owner: Mapping[str, Any] | None) -> CheckpointError:
    """Return the error for a folder that another run has locked."""
    return CheckpointError(
        f"{folder!r} is in use by {describe_owner(owner)}. Wait until it ends, stop it, or pass another `save_dir`. If "
        f"you are sure that it is gone, delete {f'{folder}/{LOCK}'!r}."
    )
