"""Bringing a run to a remote store: a thread that uploads what was saved, and the lock of the folder there.

The order makes a checkpoint there whole or none: its files, then the files of the run, then its omnitrain.json, then
`last` and `best`. What was uploaded is checked, what fails is tried again. Reading a store is in `remote.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.manifest import MANIFEST, FileEntry
from omnitrain.checkpoint.remote import WORKERS, Copy, Place, in_bytes, in_parallel, reaching, worded
from omnitrain.checkpoint.retention import to_delete
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.processes import identify_process, is_alive, is_in_same_container

logger: logging.Logger = logging.getLogger("omnitrain")

PAUSE_S = 1.0
"""Seconds until the first new attempt after a failure; each further pause is twice as long, up to the longest."""
LONGEST_PAUSE_S = 60.0
ENOUGH = 3
"""Attempts after which a store counts as failing where checkpoints are required."""
BEAT_S = 30.0
"""Seconds between two signs of life."""
WATCH_S = 100.0
"""Seconds to watch for a sign of life before the owner counts as gone."""
_FILES = -1
"""What is being uploaded, in place of a step, while it is the files of the run."""
STALE_S = 3600.0
"""The age of a sign of life, by the clocks of two machines, from which on nobody needs to watch."""
LAST_S = 5.0
"""Seconds that the end of a run waits for what is being written, once it waits for no upload."""
SAID_S = 5.0
"""Seconds of waiting at the end of a run after which it is said what for."""


_released: set[str] = set()
"""The tokens of the locks that this process has released."""


class RemoteLock:
    """The object `run.lock`, which names the run that writes to a store.

    Stores have no locks: two runs that begin in the same second can both go on. It keeps out the second of two runs
    that were started by mistake, which is what happens.

    Args:
        place: The folder there.

    Attributes:
        lost: Who has taken the folder over, once another run has.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._token = secrets.token_hex(4)
        self._ends = threading.Event()
        self._writing = threading.Lock()
        self._beats = 0
        self._since = _now()
        self.lost: str = ""

    def take(self) -> None:
        """Write the object, after waiting for a sign of life of a run that may be gone.

        Raises:
            CheckpointError: Another run writes there, or the store cannot be reached.
        """
        if self._place.has_history:
            logger.warning("%s: nothing keeps another run out of this place, so start only one.", self._place.name)
            return
        with reaching(self._place, "locked"):
            owner = self._read()
            if owner is not None:
                if not self._is_gone(owner):
                    raise self._refusal(owner)
                logger.warning("%s was left locked by %s. It is taken over.", self._place.name, _named(owner))
            self._write()
            owner = self._read()
        if owner is not None and owner["token"] != self._token:
            raise self._refusal(owner)
        threading.Thread(target=self._beat, name="omnitrain-remote-lock", daemon=True).start()

    def release(self) -> None:
        """Delete the object, unless another run has it."""
        self._ends.set()
        _released.add(self._token)  # the object may stay there, if the store fails
        if self._place.has_history or self.lost or not self._writing.acquire(timeout=LAST_S):
            return
        try:
            owner = self._read()
            if owner is not None and owner["token"] == self._token:
                self._place.remove(LOCK)
        except Exception as error:  # the next run will find that this process has ended
            logger.debug("%s keeps its lock: %s", self._place.name, worded(error))
        finally:
            self._writing.release()

    def check(self) -> None:
        """Raise a CheckpointError if another run has taken the folder over."""
        if self.lost:
            raise CheckpointError(
                f"{self._place.name!r} was taken over by {self.lost}. This run uploads nothing more, so that the two "
                "do not mix; its checkpoints stay on this machine. End the other run, or choose another `save_dir`."
            )

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            with contextlib.suppress(Exception), self._writing:  # a store that fails is reported by what is uploaded
                if self._ends.is_set():
                    return
                owner = self._read()
                if owner is not None and owner["token"] != self._token:
                    self.lost = _named(owner)
                    return
                self._write()

    def _read(self) -> dict[str, Any] | None:
        """Return the owner; None if there is none, or what is there names none."""
        data = self._place.read_if_there(LOCK)
        with contextlib.suppress(ValueError):
            owner = json.loads(data or b"null")
            if isinstance(owner, dict) and all(isinstance(owner.get(key), str) for key in _NAMES):
                return owner
        return None

    def _write(self) -> None:
        self._beats += 1
        owner = {
            "token": self._token,
            **identify_process(),
            "since": self._since,
            "beat": self._beats,
            "at": time.time(),
        }
        self._place.write(LOCK, json.dumps(owner).encode())

    def _is_gone(self, owner: Mapping[str, Any]) -> bool:
        if is_in_same_container(owner):
            return owner["token"] in _released or not is_alive(owner)
        if time.time() - float(owner.get("at") or 0) > STALE_S:
            return True
        logger.warning(
            "%s is locked by %s. Waiting for a sign of life, %.0f s at most.", self._place.name, _named(owner), WATCH_S
        )
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(min(2.0, WATCH_S / 4))
            found = self._read()
            if found is None or found != owner:
                return found is None
        return True

    def _refusal(self, owner: Mapping[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"{self._place.name!r} is in use by {_named(owner)}. Wait for its end, end it, or pass another `save_dir`. "
            f"If you are sure that it is gone, delete '{self._place.name}/{LOCK}'."
        )


_NAMES = ("token", "host", "boot", "namespace")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _named(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner['host']!r}, run {owner['token']}, since {owner.get('since')}"


class _EndedError(Exception):
    """The run waits for no upload any more."""


class Upload:
    """Uploads the checkpoints of a run folder in a thread, the newest first, and deletes there what is not kept.

    The thread has the lock of the folder there: it releases it when it ends, so that nothing is written afterwards.

    Args:
        place: The folder there.
        root: The run folder here.
        copies: The complete checkpoints there, by step.
        lock: The lock of the folder there.
        leftovers: Folders there that a killed upload or deletion has left.

    Attributes:
        copies: The complete checkpoints there, by step.
    """

    def __init__(
        self, place: Place, root: Path, copies: Mapping[int, Copy], lock: RemoteLock, leftovers: Collection[str] = ()
    ) -> None:
        self._place, self._root, self._lock, self._leftovers = place, root, lock, set(leftovers)
        self.copies: dict[int, Copy] = dict(copies)
        self._changed = threading.Condition()
        self._pending: dict[int, None] = {}
        self._uploading: int | None = None
        self._doomed: set[int] = set()
        """Steps to delete there, whatever retention says."""
        self._policy: tuple[Any, ...] | None = None
        self._owes_files = self._owes_pointers = False
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of the run's files when they were uploaded."""
        self._pointers: dict[str, str] = {}
        self._has_new = False
        """Whether a checkpoint was completed there: before that, nothing is deleted."""
        self._moves = 0
        self._attempts = 0
        self._reason = ""
        self._is_obstructed = False
        """Whether the latest attempt has failed because of what has the name of a file or folder there."""
        self._is_told = False
        """Whether the present outage was reported; it ends when nothing waits any more."""
        self._ends = False
        self._thread: threading.Thread | None = None

    # --- asked for by the run

    def add(self, step: int) -> None:
        """Upload the checkpoint of this step, which is complete here."""
        with self._changed:
            self._pending.pop(step, None)
            self._pending[step] = None
            self._doomed.discard(step)
            self._owes_files = True
            self._changed.notify_all()
            self._start()

    def _start(self) -> threading.Thread:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="omnitrain-upload", daemon=True)
            self._thread.start()
        return self._thread

    def replace(self, steps: set[int]) -> None:
        """Delete these checkpoints there, of an earlier run, once a new one is complete there."""
        with self._changed:
            self._doomed |= steps
            for step in steps:
                self._pending.pop(step, None)

    def keep(self, *policy: Any) -> None:
        """Delete there what `retention.to_delete` says with these further arguments, after each upload."""
        with self._changed:
            self._policy = policy

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of this step is being read at present."""
        with self._changed:
            return self._uploading == step

    def check(self) -> None:
        """Raise a CheckpointError if several attempts in a row have failed, or another run has the folder."""
        self._lock.check()
        if self._attempts >= ENOUGH:
            raise CheckpointError(
                f"Checkpoints cannot be uploaded to {self._place.name!r}: {self._reason}. They are in "
                f"{str(self._root)!r}. Repair the store, or leave out `save_required`."
            ) from OSError(self._reason)

    def wait(self, limit: float, tick: Callable[[], None] = lambda: None, enough: int | None = None) -> str:
        """Upload what is left and the files of the run, and end the thread, which unlocks the folder there.

        Args:
            limit: Seconds without any progress after which waiting ends.
            tick: Called about twice a second.
            enough: Attempts in a row that may fail; None ends by time alone.

        Returns:
            What could not be uploaded, in words; "" if everything is there.
        """
        with self._changed:
            self._owes_files = self._thread is not None  # without a checkpoint, the files there may be newer
            self._owes_pointers = bool(self.copies)
            thread = self._start()
            self._changed.notify_all()
        seen, since, said = self._moves, time.monotonic(), time.monotonic() + SAID_S
        try:
            while thread.is_alive():
                with self._changed:
                    if self._changed.wait_for(self._is_idle, 0.5):
                        return ""
                tick()
                now = time.monotonic()
                if self._moves != seen:
                    seen, since = self._moves, now
                if now > said:
                    said = float("inf")
                    logger.info("Waiting for the upload of %s to %s.", self._left(), self._place.name)
                if now - since > limit or self._is_obstructed or (enough is not None and self._attempts >= enough):
                    break
            return f"{self._left()}: {self._reason or self._lock.lost or f'nothing has moved for {limit:.0f} s'}"
        finally:
            with self._changed:
                self._ends = True
                self._changed.notify_all()
            thread.join(LAST_S)
            if thread.is_alive():
                logger.warning(
                    "%s stays locked until what is being written there has ended, or this process.", self._place.name
                )

    def _is_idle(self) -> bool:
        is_owed = self._owes_files or self._owes_pointers
        return not (self._pending or is_owed or self._leftovers) and self._uploading is None

    def _left(self) -> str:
        with self._changed:
            steps = sorted(step for step in {*self._pending, self._uploading} if step is not None and step >= 0)
        if not steps:
            return "the files of the run"
        size = 0
        for step in steps:
            with contextlib.suppress(OSError):
                size += sum(path.stat().st_size for path in self._folder(step).rglob("*") if path.is_file())
        return f"{', '.join(f'checkpoint-{step}' for step in steps)} ({in_bytes(size)})"

    def _folder(self, step: int) -> Path:
        return self._root / f"checkpoint-{step}"

    # --- the thread

    def _run(self) -> None:
        try:
            while self._waits_for_work():
                try:
                    self._check()
                    self._work()
                except _EndedError:
                    return
                except Exception as error:  # each package has its own errors, and none may end the thread
                    if self._lock.lost:
                        logger.error("%s", error)
                        return
                    self._failed(error)
        finally:
            self._lock.release()

    def _waits_for_work(self) -> bool:
        """Wait until there is something to upload; returns whether there is, before the run ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends or not self._is_idle())
            return not self._ends

    def _check(self) -> None:
        """Raise an error if nothing may be written there any more."""
        self._lock.check()
        if self._ends:
            raise _EndedError

    def _failed(self, error: Exception) -> None:
        self._attempts, self._reason = self._attempts + 1, worded(error)
        self._is_obstructed = isinstance(error, (FileExistsError, NotADirectoryError, IsADirectoryError))
        if self._is_obstructed:
            self._reason += ". Something of this name is in the way: delete it there"
        if not self._is_told:
            logger.error(
                "Nothing can be uploaded to %s at present: %s. Checkpoints stay in %r, and are tried again; training "
                "goes on.", self._place.name, self._reason, str(self._root),
            )  # fmt: skip
        self._is_told = True
        logger.debug("Attempt %d to upload has failed.", self._attempts, exc_info=True)
        pause = min(PAUSE_S * 2 ** min(self._attempts - 1, 20), LONGEST_PAUSE_S)
        with self._changed:
            self._changed.wait_for(lambda: self._ends, pause)

    def _work(self) -> None:
        """Bring the store up to date: each checkpoint that waits, then the files of the run."""
        while (step := self._take_next()) is not None:
            is_done = False
            try:
                self._upload(step)
                is_done = True
            finally:
                with self._changed:
                    self._uploading = None
                    if not is_done:  # before what has come since
                        self._pending = {step: None, **self._pending}
                    self._changed.notify_all()
            self._settle()
        with self._changed:
            files, self._owes_files = self._owes_files, False
            pointers, self._owes_pointers = self._owes_pointers, False
            if files or pointers:
                self._uploading = _FILES
        try:
            if files:
                self._settle()
            elif pointers:
                self._write_pointers()
            self._clear_leftovers()
            if self._is_told and not self._ends:
                logger.warning("%s: uploading works again, and everything is there.", self._place.name)
                self._is_told = False
        except BaseException:
            self._owes_files, self._owes_pointers = files or self._owes_files, pointers or self._owes_pointers
            raise
        finally:
            with self._changed:
                self._uploading = None
                self._changed.notify_all()

    def _take_next(self) -> int | None:
        with self._changed:
            if not self._pending or self._ends:
                return None
            self._uploading = next(reversed(self._pending))  # the newest is worth most
            del self._pending[self._uploading]
            return self._uploading

    def _moved(self) -> None:
        self._moves += 1

    def _worked(self) -> None:
        self._moves += 1
        self._attempts, self._reason, self._is_obstructed = 0, "", False

    def _upload(self, step: int) -> None:
        """Upload one checkpoint, unless it is there, or gone or replaced here in the meantime."""
        folder, place = self._folder(step), self._place
        data = _read(folder / MANIFEST)
        if data is None:  # not kept
            return
        copy, there = Copy.of(folder.name, data, repr(str(folder))), self.copies.get(step)
        if there is not None and (there.data, there.name) == (data, copy.name):
            return
        found = place.list(copy.name)
        self._check()
        if there is not None:
            if len(self.copies) == 1 and there.name == copy.name:  # never without a complete one
                place.duplicate(there, f"{copy.name}.old")
            self.copies.pop(step)
        if MANIFEST in found:
            place.remove(f"{copy.name}/{MANIFEST}")
        known = there.files if there is not None and there.name == copy.name else {}

        def send(file: str) -> None:
            entry, info, path = copy.files[file], found.get(file), folder / file
            is_there = info is not None and info.get("size") == entry["size"]
            if is_there and (known.get(file) == entry or place.has_same(info or {}, path, entry)):
                return
            self._send(path, f"{copy.name}/{file}", entry)

        try:
            in_parallel(send, copy.files, WORKERS)
        except OSError:
            if _read(folder / MANIFEST) != data:  # the files are gone, and another save may have come
                return
            raise
        if _read(folder / MANIFEST) != data:
            return
        self._send_files()  # before it counts: a run that goes on from it needs all rows up to it
        self._check()
        place.write(f"{copy.name}/{MANIFEST}", data)
        if place.read(f"{copy.name}/{MANIFEST}") != data:
            raise OSError(f"{copy.name}/{MANIFEST} differs there from what was uploaded")
        self.copies[step] = copy
        self._has_new = True
        self._worked()
        for key in found.keys() - copy.files.keys() - {MANIFEST}:  # of an earlier checkpoint of this step
            self._check()
            place.remove(f"{copy.name}/{key}")
        if there is not None:
            self._check()
            place.remove_folder(f"{copy.name}.old")

    def _send(self, path: Path, key: str, entry: FileEntry) -> None:
        self._check()
        self._place.put(path, key, self._moved)
        self._place.check(key, path, entry)
        self._moves += 1

    def _settle(self) -> None:
        """Upload the files of the run, write the pointers, and delete what is not kept."""
        self._send_files()
        self._write_pointers()
        self._worked()
        self._clear_leftovers()
        self._prune()

    def _write_pointers(self) -> None:
        newest = sorted(self.copies.values(), key=lambda copy: copy.order)
        for which, those in (("last", newest), ("best", [copy for copy in newest if copy.kept.best])):
            if which not in self._pointers:
                self._pointers[which] = (self._place.read_if_there(which) or b"").decode(errors="replace").strip()
            if those and self._pointers[which] != those[-1].name:
                self._check()
                self._place.write(which, f"{those[-1].name}\n".encode())
                self._pointers[which] = those[-1].name

    def _send_files(self) -> None:
        for path in sorted(self._root.iterdir()):
            is_other = path.name in (LOCK, "last", "best") or path.name.endswith(".tmp") or path.name.startswith(".")
            if is_other or path.is_symlink() or not path.is_file():
                continue
            stat = path.stat()
            version = stat.st_size, stat.st_mtime_ns
            if self._sent.get(path.name) != version:
                try:
                    data = path.read_bytes()
                except FileNotFoundError:  # deleted in the meantime
                    continue
                self._check()
                self._place.write(path.name, data)
                self._sent[path.name] = version
                self._moves += 1

    def _clear_leftovers(self) -> None:
        """Delete what a killed upload or deletion has left there, unless it is about to be uploaded again."""
        for name in sorted(self._leftovers):
            with self._changed:
                if name in {self._folder(step).name for step in self._pending}:
                    continue
            if name not in {copy.name for copy in self.copies.values()}:
                self._check()
                self._place.remove_folder(name)
                self._moves += 1
            self._leftovers.discard(name)

    def _prune(self) -> None:
        with self._changed:
            policy, doomed = self._policy, set(self._doomed)
        if not self._has_new:
            return
        kept = [copy.kept for step, copy in self.copies.items() if step not in doomed]
        if not kept:
            return
        if policy is not None:
            doomed |= set(to_delete(kept, *policy))
        for step in sorted(doomed & self.copies.keys()):
            self._check()
            copy = self.copies.pop(step)
            try:
                self._place.remove_folder(copy.name)
            except BaseException:
                with self._changed:  # tried again: without its omnitrain.json it does not count any more
                    self._doomed.add(step)
                self.copies.setdefault(step, copy)
                raise
            with self._changed:
                self._doomed.discard(step)
            self._moves += 1


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def wait_limit() -> float:
    """Return the seconds without progress after which the end of a run waits no longer for its upload.

    Raises:
        CheckpointError: `OMNITRAIN_UPLOAD_WAIT` is no number.
    """
    given = os.environ.get("OMNITRAIN_UPLOAD_WAIT", "600")
    try:
        return float(given)
    except ValueError:
        raise CheckpointError(f"OMNITRAIN_UPLOAD_WAIT={given!r} must be a number of seconds.") from None
