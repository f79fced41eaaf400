"""The lock of a run folder.

It is filelock's lease on the file `run.lock`, which names its owner. The lease of a process that has ended on this
machine is free at once. That of another machine or container is free when it shows no heartbeat (a changed modification
time) for `LEASE_S` seconds of this process's clock, as clocks may differ.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omnitrain.core.errors import CheckpointError

if TYPE_CHECKING:
    from filelock import OwnerRecord, SoftFileLease

logger: logging.Logger = logging.getLogger("omnitrain")

LOCK = "run.lock"

# Seconds between two heartbeats, and without one until a lease ends; all runs on a folder must have the same values.
HEARTBEAT_S = 20.0
LEASE_S = 90.0
# Seconds that an owner on this machine has to exit: it may be writing its last checkpoint.
EXIT_GRACE_S = 5.0

# The tokens of leases that this process has released: their files remain if the disk fails.
_released: set[str | None] = set()


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
        self._reset()

    def _reset(self) -> None:
        self.token: str = os.urandom(4).hex()
        self._process = os.getpid()
        self._depth = 0
        self._lease: SoftFileLease | None = None
        self._mutex = threading.Lock()

    @property
    def failed_to_acquire(self) -> bool:
        """Whether the lock should be held, but the disk prevented it: other runs are not kept out."""
        return self._depth > 0 and self._lease is None

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock, so that others are kept out."""
        return self._lease is not None and self._process == os.getpid()

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
        if self._process != os.getpid():
            self._reset()
        with self._mutex:
            if self._depth == 0:
                self.token = os.urandom(4).hex()
                try:
                    self._lease = self._acquire(EXIT_GRACE_S)
                except CheckpointError:
                    raise
                except (OSError, RuntimeError) as error:  # at interpreter exit, no thread can start
                    logger.warning(
                        "Cannot lock %r: %s. Nothing keeps another run out of this folder.",
                        str(self.path.parent), error,
                    )  # fmt: skip
            self._depth += 1

    def release(self) -> None:
        """Undo one `acquire`; the last one releases the lock. A forked process leaves its parent's lock unchanged."""
        if self._process != os.getpid():
            return
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._end_lease()

    def check(self) -> None:
        """Check that the lock is still held; called before any change in the folder.

        Raises:
            CheckpointError: Another run has taken it.
        """
        if not self._depth or self._process != os.getpid():
            return
        with self._mutex, contextlib.suppress(OSError):  # the next write will report it
            if self._lease is not None:
                owner = self._lease.owner
                if owner is not None and owner.token != self._lease.token:
                    raise CheckpointError(
                        f"{str(self.path.parent)!r} was taken over by {_describe(owner)}, "
                        f"because this run sent no heartbeat or its {LOCK!r} was deleted. This run saves nothing more "
                        "there, so that files of the two do not mix. The checkpoints there are complete: stop the "
                        "other run, or resume from them with another `save_dir`."
                    )
                if owner is not None and self._lease.compromise is None:
                    return
                self._end_lease()  # the folder was emptied, or the disk failed so long that the heartbeats have ended
            self._lease = self._acquire(0.0)

    def _end_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            _released.add(lease.token)
            with contextlib.suppress(OSError):
                lease.release(force=True)

    def _acquire(self, patience: float) -> SoftFileLease:
        """Return the acquired lease, after up to `patience` seconds for an owner on this machine to exit."""
        from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

        folder = str(self.path.parent)
        if self.path.is_symlink():
            raise CheckpointError(
                f"{str(self.path)!r} is a link to {os.readlink(self.path)!r}, which a run would overwrite. Delete the "
                "link, and look for others: who made this folder?"
            )
        lease = SoftFileLease(self.path, lease_duration=LEASE_S, heartbeat_interval=HEARTBEAT_S, thread_local=False)
        previous = lease.owner
        if previous is not None and previous.token in _released:
            lease.force_break()
            previous = None
        try:
            try:
                lease.acquire(timeout=patience)
            except Timeout:
                if self._is_on_this_machine(lease.owner):
                    raise
                self._wait_for_end(lease)
        except (Timeout, LeaseSettingsMismatch):
            raise in_use_error(folder, _describe(lease.owner)) from None
        if previous is not None:
            logger.warning(
                "%r was locked by %s, which has ended or shows no heartbeat. It is taken over.",
                folder, _describe(previous),
            )  # fmt: skip
        return lease

    def _is_on_this_machine(self, owner: OwnerRecord | None) -> bool:
        from filelock import SoftFileLease

        if owner is None:
            return False
        try:
            # filelock's name of a machine and container is private, except for what it writes into a lease
            with SoftFileLease(f"{self.path}.{self.token}") as probe:
                return probe.owner is not None and probe.owner.hostname == owner.hostname
        except OSError:  # on a full disk: rather an error than two runs
            return True

    def _wait_for_end(self, lease: SoftFileLease) -> None:
        """Acquire a lease of another machine once it shows no heartbeat; raises filelock's Timeout if it does."""
        from filelock import Timeout

        def last_beat() -> int | None:
            with contextlib.suppress(OSError):
                return self.path.stat().st_mtime_ns
            return None

        owner, first_beat = lease.owner, last_beat()
        logger.warning(
            "%r is locked by %s. Waiting for a heartbeat, at most %.0f s.",
            str(self.path.parent), _describe(owner), LEASE_S,
        )  # fmt: skip
        pause = min(1.0, HEARTBEAT_S / 4)
        try:
            lease.acquire(
                timeout=LEASE_S + 4 * pause,
                poll_interval=pause,
                cancel_check=lambda: last_beat() not in (None, first_beat),
            )
        except Timeout:
            if owner is not None or last_beat() != first_beat:
                raise
            lease.force_break()  # filelock waits forever for the owner of an empty file, which a power cut leaves
            lease.acquire(timeout=0.0)


def describe_owner(pid: int, host: str) -> str:
    """Return the owner of a lock as text for errors."""
    return f"process {pid} on {host!r}"


def in_use_error(folder: str, owner: str) -> CheckpointError:
    """Return the error for a folder that another run has locked."""
    return CheckpointError(
        f"{folder!r} is in use by {owner}. Wait until it ends, stop it, or pass another `save_dir`. If you are sure "
        f"that it is gone, or this folder is a copy of its folder, delete {f'{folder}/{LOCK}'!r}."
    )


def _describe(owner: OwnerRecord | None) -> str:
    if owner is None:
        return "an unknown run"
    return describe_owner(owner.pid, owner.hostname.partition("?")[0])  # filelock appends the container
