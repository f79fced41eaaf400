"""Upload thread of a run, and the lock of its remote folder.

The order of uploads makes a checkpoint complete or invisible: its files, then the files of the run, then its
omnitrain.json, then `last` and `best`. Uploaded files are checked, failed uploads are repeated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rich.filesize import decimal as format_bytes

from omnitrain.checkpoint.lock import LOCK, describe_owner, in_use_error
from omnitrain.checkpoint.manifest import MANIFEST, SAVE_ORDER
from omnitrain.checkpoint.remote import (
    WORKERS,
    Copies,
    RemoteCheckpoint,
    RemoteFolder,
    in_parallel,
    one_line_error,
    wrap_store_errors,
)
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import read_or_none
from omnitrain.distributed.processes import identify_process, is_alive, is_in_same_container

logger: logging.Logger = logging.getLogger("omnitrain")

# Seconds until the first retry after a failure; each further pause is twice as long, up to the longest.
PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# Failed attempts after which a run ends if its uploads are required.
MAX_ATTEMPTS = 3
# Seconds between two heartbeats.
HEARTBEAT_S = 30.0
# Seconds to watch for a heartbeat before the owner counts as gone.
WATCH_S = 100.0
# The age of a heartbeat, by the clocks of two machines, above which the owner counts as gone without watching.
STALE_S = 3600.0
# Seconds that the end of a run waits for the file being written, after it stopped waiting for uploads.
SHUTDOWN_S = 5.0
# Seconds of waiting at the end of a run after which the reason is logged.
WAIT_NOTICE_S = 5.0

# The tokens of the locks that this process has released.
_released: set[str] = set()


class RemoteLock:
    """The object `run.lock`, which names the run that writes to a store.

    Stores have no locks, so two runs that start in the same second can both continue. The object keeps out a run that
    is started later by mistake.

    Args:
        remote: The remote folder.

    Attributes:
        lost: The run that has taken over the folder, if any.
    """

    def __init__(self, remote: RemoteFolder) -> None:
        self._remote = remote
        self._token = os.urandom(4).hex()
        self._stopping = threading.Event()
        self._writing = threading.Lock()
        self._beats = 0
        self.lost: str = ""

    def acquire(self) -> None:
        """Write the object, after waiting for a heartbeat of an owner that may be gone.

        Raises:
            CheckpointError: Another run writes there, or the store cannot be reached.
        """
        if self._remote.has_history:
            logger.warning("%s cannot be locked against other runs: start only one.", self._remote.name)
            return
        with wrap_store_errors(self._remote, "locked"):
            owner = self._read()
            other_run = self._describe_other(owner)
            if owner is None or self._is_gone(owner, other_run):
                if other_run:
                    logger.warning("%s was left locked by %s. It is taken over.", self._remote.name, other_run)
                self._write()
                other_run = self._describe_other(self._read())
        if other_run:
            raise in_use_error(self._remote.name, other_run)
        threading.Thread(target=self._beat, name="omnitrain-remote-lock", daemon=True).start()

    def release(self) -> None:
        """Delete the object, unless another run has taken over."""
        self._stopping.set()
        # another trainer in this process may take the folder before the object is gone
        _released.add(self._token)  # the object may remain if the store fails
        if self._remote.has_history or self.lost or not self._writing.acquire(timeout=SHUTDOWN_S):
            return
        try:
            if not self._describe_other(self._read()):
                self._remote.remove(LOCK)
        except Exception as error:  # the next run notices that this process has ended
            logger.debug("%s keeps its lock: %s", self._remote.name, one_line_error(error))
        finally:
            self._writing.release()

    def check(self) -> None:
        """Raise a CheckpointError if another run has taken the folder over."""
        if self.lost:
            raise CheckpointError(
                f"{self._remote.name!r} was taken over by {self.lost}. This run uploads nothing more, so that files of "
                "the two do not mix. Its checkpoints are on this machine: stop the other run, or pass another "
                "`save_dir`."
            )

    def _beat(self) -> None:
        while not self._stopping.wait(HEARTBEAT_S):
            with contextlib.suppress(Exception), self._writing:  # the uploads report a failing store
                if self._stopping.is_set():
                    return
                self.lost = self._describe_other(self._read())
                if self.lost:
                    return
                self._write()

    def _read(self) -> dict[str, Any] | None:
        """Return the owner; None if there is no valid one."""
        data = self._remote.read_small(LOCK)
        with contextlib.suppress(ValueError):
            owner = json.loads(data or b"null")
            types = {"token": str, "host": str, "boot": str, "namespace": str, "pid": int}
            if isinstance(owner, dict) and all(isinstance(owner.get(key), kind) for key, kind in types.items()):
                return owner
        return None

    def _describe_other(self, owner: dict[str, Any] | None) -> str:
        """Return the owner as text; "" if there is none, or it is this run."""
        return describe_owner(owner["pid"], owner["host"]) if owner and owner["token"] != self._token else ""

    def _write(self) -> None:
        self._beats += 1
        # each heartbeat changes the content, even if the clock is set back
        owner = {"token": self._token, **identify_process(), "beat": self._beats, "at": time.time()}
        self._remote.write(LOCK, json.dumps(owner).encode())

    def _is_gone(self, owner: dict[str, Any], description: str) -> bool:
        if is_in_same_container(owner):
            return owner["token"] in _released or not is_alive(owner)
        # the clocks of two machines may differ by minutes, so a recent time proves nothing: then heartbeats are watched
        if time.time() - float(owner.get("at") or 0) > STALE_S:
            return True
        logger.warning(
            "%s is locked by %s. Waiting for a heartbeat, at most %.0f s.", self._remote.name, description, WATCH_S
        )  # fmt: skip
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(min(2.0, WATCH_S / 4))
            current = self._read()
            if current != owner:
                return current is None
        return True


class _StoppedError(Exception):
    """Ends the thread once the run stopped waiting for uploads."""


class Uploader:
    """Uploads the checkpoints of a run folder in a thread, the newest first, and deletes remote ones.

    The thread releases the lock of the remote folder when it ends, so that nothing is written without the lock.

    Args:
        remote: The remote folder.
        root: The local run folder.
        copies: The complete remote checkpoints, by step; the attribute of this name includes later ones.
        lock: The lock of the remote folder, acquired.
        leftovers: Remote folders that a killed upload or deletion left behind.
    """

    def __init__(
        self, remote: RemoteFolder, root: Path, copies: Copies, lock: RemoteLock, leftovers: Collection[str]
    ) -> None:
        self._remote, self._root, self._lock, self._leftovers = remote, root, lock, set(leftovers)
        self.copies: dict[int, RemoteCheckpoint] = dict(copies)
        self._changed = threading.Condition()
        # Steps to upload, the newest last, and remote ones to delete.
        self._pending: dict[int, None] = {}
        self._to_delete: set[int] = set()
        self._uploading: int | None = None
        # Whether something is to be done, and whether the thread is doing something.
        self._is_dirty = self._is_busy = False
        # Whether the run has saved a checkpoint: before that, its files on the store may be newer than the local ones.
        self._has_saved = False
        # Size and modification time of the run's files when they were uploaded, and the pointers on the store.
        self._sent: dict[str, tuple[int, int]] = {}
        self._pointers: dict[str, str] = {}
        self._progress = 0
        self._attempts = 0
        # The error of the latest attempt, and whether it was that a file has the name of a folder, or the other way.
        self._reason, self._is_blocked = "", False
        # Whether the current outage was logged; it ends once everything is uploaded.
        self._outage_reported = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --- called by the run

    def add(self, step: int) -> None:
        """Start the upload of a complete local checkpoint."""
        with self._changed:
            self._pending.pop(step, None)
            self._pending[step] = None
            self._to_delete.discard(step)
            self._has_saved = True
            self._wake()

    def delete(self, step: int) -> None:
        """Delete the remote checkpoint of `step` after the pending uploads, once another one remains."""
        with self._changed:
            self._pending.pop(step, None)
            self._to_delete.add(step)
            self._wake()

    def is_uploading(self, step: int) -> bool:
        """Return whether the local checkpoint of this step is being read."""
        with self._changed:
            return self._uploading == step

    def _wake(self) -> threading.Thread:
        self._is_dirty = True
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="omnitrain-upload", daemon=True)
            self._thread.start()
        return self._thread

    def check(self) -> None:
        """Raise a CheckpointError if several attempts in a row failed, or another run took over the folder."""
        self._lock.check()
        if self._attempts >= MAX_ATTEMPTS:
            raise CheckpointError(
                f"Checkpoints cannot be uploaded to {self._remote.name!r}: {self._reason}. They are in "
                f"{str(self._root)!r}. Repair the store, or leave out `save_required`."
            ) from OSError(self._reason)

    def wait(self, limit: float, tick: Callable[[], None] = lambda: None, attempts: int | None = None) -> str:
        """Wait for all uploads and the files of the run, and end the thread, which unlocks the remote folder.

        Args:
            limit: Seconds without any progress after which waiting ends.
            tick: Called about twice a second.
            attempts: Attempts in a row that may fail; None only limits the time.

        Returns:
            A message about what was not uploaded; "" if everything was.
        """
        with self._changed:
            thread = self._wake()
        progress, progressed_at, notice_at = self._progress, time.monotonic(), time.monotonic() + WAIT_NOTICE_S
        try:
            while thread.is_alive():
                with self._changed:
                    if self._changed.wait_for(lambda: not self._is_dirty and not self._is_busy, 0.5):
                        return ""
                tick()
                now_s = time.monotonic()
                if self._progress != progress:
                    progress, progressed_at = self._progress, now_s
                if now_s > notice_at:
                    notice_at = float("inf")
                    logger.info("Waiting for the upload of %s to %s.", self._describe_pending(), self._remote.name)
                if now_s - progressed_at > limit or self._is_blocked:
                    break
                if attempts is not None and self._attempts >= attempts:
                    break
            # the latest error explains more than the time that has passed
            reason = self._reason or self._lock.lost or f"no progress for {limit:.0f} s"
            return f"{self._describe_pending()}: {reason}"
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            thread.join(SHUTDOWN_S)
            if thread.is_alive():
                logger.warning("%s stays locked until the current upload or this process has ended.", self._remote.name)

    def _describe_pending(self) -> str:
        with self._changed:
            steps = sorted(step for step in {*self._pending, self._uploading} if step is not None)
        if not steps:
            return "the files of the run"
        size = 0
        for step in steps:
            with contextlib.suppress(OSError):
                size += sum(path.stat().st_size for path in self._folder(step).rglob("*") if path.is_file())
        return f"{', '.join(f'checkpoint-{step}' for step in steps)} ({format_bytes(size)})"

    def _folder(self, step: int) -> Path:
        return self._root / f"checkpoint-{step}"

    # --- the thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._check()
                    self._synchronize()
                except _StoppedError:
                    return
                except Exception as error:  # each package has its own errors, and none may end the thread
                    if self._lock.lost:
                        logger.error("%s", error)
                        return
                    self._record_failure(error)
                else:
                    with self._changed:
                        self._is_busy = False
                        self._changed.notify_all()
        finally:
            self._lock.release()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do, or the run ends; return False at its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._is_dirty)
            self._is_dirty, self._is_busy = False, not self._stopping
            return self._is_busy

    def _check(self) -> None:
        """Raise an error if nothing may be written to the store any more."""
        self._lock.check()
        if self._stopping:
            raise _StoppedError

    def _record_failure(self, error: Exception) -> None:
        self._attempts, self._reason = self._attempts + 1, one_line_error(error)
        self._is_blocked = isinstance(error, (FileExistsError, NotADirectoryError, IsADirectoryError))
        if self._is_blocked:
            self._reason += ". Delete the file or folder with this name there"
        if not self._outage_reported:
            logger.error(
                "Nothing can be uploaded to %s: %s. Checkpoints stay in %r until a later attempt; training continues.",
                self._remote.name, self._reason, str(self._root),
            )  # fmt: skip
        self._outage_reported = True
        logger.debug("Attempt %d to upload failed.", self._attempts, exc_info=True)
        pause = min(PAUSE_S * 2 ** min(self._attempts - 1, 20), LONGEST_PAUSE_S)
        with self._changed:
            self._is_dirty, self._is_busy = True, False
            # a pause that the end of the run cuts short
            self._changed.wait_for(lambda: self._stopping, pause)

    def _synchronize(self) -> None:
        """Upload each pending checkpoint and the files of the run, write the pointers, and delete what is to go."""
        while True:
            with self._changed:
                # the newest first: a resumed run needs it
                step = self._uploading = self._pending.popitem()[0] if self._pending else None
            if step is not None:
                try:
                    self._upload(step)
                except BaseException:
                    with self._changed:
                        self._pending = {step: None, **self._pending}  # before newer ones, which are uploaded first
                    raise
                finally:
                    with self._changed:
                        self._uploading = None
            self._send_files()
            self._write_pointers()
            self._attempts, self._reason, self._is_blocked = 0, "", False
            self._clear_leftovers()
            self._delete_steps()
            if step is None:
                break
        if self._outage_reported and not self._stopping:
            logger.warning("%s: uploading works again, and everything is uploaded.", self._remote.name)
            self._outage_reported = False

    def _count_progress(self) -> None:
        self._progress += 1

    def _upload(self, step: int) -> None:
        """Upload a checkpoint, unless it is uploaded already, or was deleted or replaced locally."""
        folder, remote = self._folder(step), self._remote
        data = read_or_none(folder / MANIFEST)
        if data is None:  # deleted by retention
            return
        copy, previous = RemoteCheckpoint.parse(folder.name, data, repr(str(folder))), self.copies.get(step)
        if previous is not None and (previous.data, previous.name) == (data, copy.name):
            return
        listing = remote.list(copy.name)
        self._check()
        if previous is not None:
            if len(self.copies) == 1 and previous.name == copy.name:  # never without a complete one
                remote.duplicate(previous, f"{copy.name}.old")
            self.copies.pop(step)
        # first its omnitrain.json: a half replaced checkpoint must not look complete
        if MANIFEST in listing:
            remote.remove(f"{copy.name}/{MANIFEST}")
        # files that did not change, such as frozen weights, are not sent again
        known = previous.files if previous is not None and previous.name == copy.name else {}

        def send(file: str) -> None:
            entry, info, path = copy.files[file], listing.get(file), folder / file
            is_there = info is not None and info.get("size") == entry["size"]
            if is_there and (known.get(file) == entry or remote.has_same(info or {}, path, entry)):
                return
            self._check()
            remote.put(path, f"{copy.name}/{file}", entry, self._count_progress)
            self._progress += 1

        try:
            in_parallel(send, copy.files, WORKERS)
        except OSError:
            if read_or_none(folder / MANIFEST) != data:  # the files were deleted, or replaced by another save
                return
            raise
        if read_or_none(folder / MANIFEST) != data:
            return
        self._send_files()  # before the manifest: a run that resumes from it needs all rows up to it
        self._check()
        remote.write(f"{copy.name}/{MANIFEST}", data)
        # what makes the checkpoint count is read back, whatever the store says of the write
        if remote.read(f"{copy.name}/{MANIFEST}") != data:
            raise OSError(f"{copy.name}/{MANIFEST} differs from what was uploaded")
        self.copies[step] = copy
        self._progress += 1
        for key in listing.keys() - copy.files.keys() - {MANIFEST}:  # of an earlier checkpoint of this step
            self._check()
            remote.remove(f"{copy.name}/{key}")
        if previous is not None:
            self._check()
            remote.remove_folder(f"{copy.name}.old")

    def _write_pointers(self) -> None:
        for which in ("last", "best"):
            saved = [copy for copy in self.copies.values() if which == "last" or copy.info.best]
            newest = max(saved, key=lambda copy: SAVE_ORDER(copy.info), default=None)
            if newest is None:
                continue
            if which not in self._pointers:
                self._pointers[which] = self._remote.read_pointer(which)
            if self._pointers[which] != newest.name:
                self._check()
                self._remote.write(which, f"{newest.name}\n".encode())
                self._pointers[which] = newest.name

    def _send_files(self) -> None:
        for path in sorted(self._root.iterdir()) if self._has_saved else ():
            is_other = path.name in ("last", "best") or path.name.startswith((LOCK, ".")) or path.name.endswith(".tmp")
            if is_other or path.is_symlink() or not path.is_file():
                continue
            try:
                stat = path.stat()
                version = stat.st_size, stat.st_mtime_ns
                data = None if self._sent.get(path.name) == version else path.read_bytes()
            except FileNotFoundError:  # deleted in the meantime
                continue
            if data is not None:
                self._check()
                self._remote.write(path.name, data)
                self._sent[path.name] = version
                self._progress += 1

    def _clear_leftovers(self) -> None:
        """Delete the leftovers of a killed upload or deletion, unless they are about to be uploaded again."""
        for name in sorted(self._leftovers):
            with self._changed:
                if name in {self._folder(step).name for step in self._pending}:
                    continue
            if name not in {copy.name for copy in self.copies.values()}:
                self._check()
                self._remote.remove_folder(name)
                self._progress += 1
            self._leftovers.discard(name)

    def _delete_steps(self) -> None:
        with self._changed:
            steps = sorted(self._to_delete & self.copies.keys())
        if len(steps) == len(self.copies):
            return
        for step in steps:
            self._check()
            # if it fails, it is a leftover: without its omnitrain.json it is no checkpoint any more
            copy = self.copies.pop(step)
            self._leftovers.add(copy.name)
            self._remote.remove_folder(copy.name)
            self._leftovers.discard(copy.name)
            self._progress += 1


def wait_limit() -> float:
    """Return the seconds without progress after which a run stops waiting for its uploads at its end.

    Raises:
        CheckpointError: `OMNITRAIN_UPLOAD_WAIT` is not a number.
    """
    text = os.environ.get("OMNITRAIN_UPLOAD_WAIT", "600")
    try:
        return float(text)
    except ValueError:
        raise CheckpointError(f"OMNITRAIN_UPLOAD_WAIT={text!r} must be a number of seconds.") from None
