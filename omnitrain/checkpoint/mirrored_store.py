"""The folder of a run that is kept on a remote store too: it is written here, and uploaded behind the run.

`upload.py` has the thread that uploads, `remote.py` what reads a store. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.manifest import MANIFEST, Check, check_hashes
from omnitrain.checkpoint.remote import (
    Copy,
    Place,
    check_address,
    chosen,
    download_files,
    fetch,
    local_copy,
    reaching,
)
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.uploader import ENOUGH, RemoteLock, Upload, wait_limit
from omnitrain.core.errors import CheckpointError
from omnitrain.core.paths import is_address, local_folder, run_folder

logger: logging.Logger = logging.getLogger("omnitrain")


def make_store(place: str | os.PathLike[str], is_required: bool = False, replaces: bool = False) -> Store:
    """Return the checkpoints of a run whose `save_dir` is a path or an address; nothing is opened yet.

    Args:
        place: The path or the address.
        is_required: Whether a store that fails ends the run.
        replaces: Whether a fresh run replaces the checkpoints that are there.

    Raises:
        ConfigError, MissingExtraError: No installed package can write to this address.
    """
    if not is_address(place):
        return Store(run_folder(place, "save_dir"))
    check_address(str(place), "save_dir")
    return MirroredStore(str(place), is_required, replaces)


def resolved(
    store: Store | None,
    which: str | os.PathLike[str],
    accept: Callable[[Path, dict[str, Any]], None],
    check: Check = check_hashes,
) -> tuple[Path, dict[str, Any]] | None:
    """Return what `Store.resolve` does; without a store, or with one of this machine, for an address too."""
    if is_address(which) and not isinstance(store, MirroredStore):
        which = local_copy(str(which), "resume_from")
    return (store or Store(Path(which).parent)).resolve(which, accept, check)


def _any(folder: Path, content: dict[str, Any]) -> None:
    """Accept any content."""


class MirroredStore(Store):
    """The checkpoints of a run folder on this machine, and their copies on a remote store.

    Saving is that of a `Store`; a thread uploads what was committed. What is newer there is downloaded before a run
    resumes. The store is reached from `take` until `finish`, on the main rank alone.

    Args:
        address: The address, such as s3://bucket/run.
        is_required: Whether a store that fails ends the run.
        replaces: Whether a fresh run replaces the checkpoints that are there.
    """

    def __init__(self, address: str, is_required: bool = False, replaces: bool = False) -> None:
        super().__init__(local_folder(address))
        self.place: Place = Place(address)
        self._is_required = is_required
        self._replaces = replaces
        self._upload: Upload | None = None
        self._earlier: set[int] = set()
        """The steps there when the run began, which a fresh run replaces."""
        self._owed: set[int] = set()
        """Steps to delete here once they are uploaded."""

    # --- beginning and end

    def take(self) -> None:
        """Lock the folder here and there; nothing is uploaded before.

        Raises:
            CheckpointError: Another run writes there, or the store cannot be reached.
            ConfigError: Nothing can be written there.
        """
        super().take()
        if self._upload is not None:
            return
        try:
            self._attach()
        except BaseException:
            self.lock.release()
            raise

    def _attach(self) -> None:
        self.place.check_writable()
        lock = RemoteLock(self.place)
        lock.take()
        try:
            with reaching(self.place, "read"):
                self._clear_parts()
                found = self.place.list()
                copies, left = self.place.copies(found), self.place.leftovers(found)
        except BaseException:
            lock.release()
            raise
        for key in self.place.obstacles(found):
            logger.warning(
                "%s has a file %r, where a checkpoint has its folder: many stores then take no checkpoint of this "
                "name. Delete the file there.", self.place.name, key,
            )  # fmt: skip
        self._upload = Upload(self.place, self.root, copies, lock, left)
        self._earlier, self._owed = set(copies), set()
        newest = self._newest_elsewhere()
        for kept in self.kept():
            if kept.sequence > newest and self.path(kept.step).is_dir():  # an upload was interrupted
                self._upload.add(kept.step)

    def _clear_parts(self) -> None:
        """Give up the uploads in parts that a killed run has left: they cost storage, and no listing shows them."""
        fs = self.place.fs
        if not hasattr(fs, "list_multipart_uploads"):
            return
        with contextlib.suppress(Exception):  # not every store or account has a right to this
            bucket, _, prefix = self.place.path("").partition("/")
            for found in fs.list_multipart_uploads(bucket):
                if found["Key"].startswith(f"{prefix}/"):
                    fs.call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=found["Key"], UploadId=found["UploadId"]
                    )  # fmt: skip

    def finish(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until everything is uploaded, as long as there is progress, and unlock the store.

        Args:
            tick: Called while waiting.

        Raises:
            CheckpointError: It could not be uploaded, and it is required.
        """
        upload = self._upload
        if upload is None:
            return
        left = "it was interrupted"
        try:
            left = upload.wait(wait_limit(), tick, ENOUGH if self._is_required else None)
            self._delete_owed()
        finally:
            self._upload = None
            if left:
                message = (
                    f"Not everything was uploaded to {self.place.name!r}: {left}. It is complete in "
                    f"{str(self.root)!r}, and the next run with this `save_dir` on this machine uploads it."
                )
                logger.error("%s", message)
        if left and self._is_required:
            raise CheckpointError(message) from OSError(left)

    # --- saving

    def begin(self, step: int) -> Path:
        """Create the folder for the files of `step`; see `Store.begin`."""
        if self._is_required and self._upload is not None:
            self._upload.check()
        self._delete_owed()
        return super().begin(step)

    def commit(self, step: int, payload: Mapping[str, Any], **options: Any) -> Path:
        """Commit a checkpoint here, and have it uploaded; see `Store.commit`."""
        path = super().commit(step, payload, **options)
        self._owed.discard(step)
        if self._upload is not None:
            if self._replaces and self._earlier:
                self._upload.replace(self._earlier - {step})
            self._earlier = set()
            self._upload.add(step)
        return path

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step` here, as soon as it is not being uploaded."""
        if self._upload is not None and self._upload.holds(step):
            self._owed.add(step)
        else:
            super().delete(step)

    def _delete_owed(self) -> None:
        for step in sorted(self._owed):
            if self._upload is None or not self._upload.holds(step):
                self._owed.discard(step)
                with contextlib.suppress(OSError):
                    super().delete(step)

    def prune(
        self,
        keep_last: int | None,
        keep_best: int = 1,
        keep_every: int | None = None,
        direction: Literal["max", "min"] = "max",
    ) -> list[Path]:
        """Delete here and there what is not kept; there, after the new one is complete there."""
        if self._upload is not None:
            self._upload.keep(keep_last, keep_best, keep_every, direction)
        self._delete_owed()
        return super().prune(keep_last, keep_best, keep_every, direction)

    # --- finding

    def _copies(self) -> dict[int, Copy]:
        if self._upload is not None:
            return dict(self._upload.copies)
        with reaching(self.place, "read"):
            return self.place.copies()

    def _newest_elsewhere(self) -> int:
        copies = () if self._upload is None else self._upload.copies.values()
        return max((copy.kept.sequence for copy in list(copies)), default=0)

    def checkpoints(self) -> list[Path]:
        """Return the folders of all committed checkpoints, sorted by step; some may be on the store alone."""
        steps = {step: self.path(step) for step in self._copies()} | {
            step: path for step, path in self.folders().items() if (path / MANIFEST).is_file()
        }
        return [path for _, path in sorted(steps.items())]

    def resolve(
        self,
        which: str | os.PathLike[str],
        accept: Callable[[Path, dict[str, Any]], None] = _any,
        check: Check = check_hashes,
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return a verified checkpoint, downloading it if that of the store is newer than what is here.

        See `Store.resolve`; `which` can be an address too.
        """
        found = self._resolve(which, accept, check)
        if found is not None:
            self._earlier = set()  # the run goes on, and replaces nothing
        return found

    def _resolve(
        self, which: str | os.PathLike[str], accept: Callable[[Path, dict[str, Any]], None], check: Check
    ) -> tuple[Path, dict[str, Any]] | None:
        if is_address(which):
            return super().resolve(self._brought(str(which)), accept, check)
        if which not in ("auto", "last", "best"):
            return super().resolve(which, accept, check)
        there = self._copies()
        copies = sorted(there.values(), key=lambda copy: copy.order)
        if which == "best":
            copies = [copy for copy in copies if copy.kept.best][-1:]
        elif which == "last":
            copies = copies[-1:]
        here: tuple[Path, dict[str, Any]] | None = None
        problem: CheckpointError | None = None
        try:
            here = super().resolve(which, accept, check)
        except CheckpointError as error:
            problem = error
        order = (-1, -1) if here is None else (here[1]["sequence"], here[1]["step"])
        if which != "auto":
            with reaching(self.place, "read"):
                self.place.check_named(str(which), there, here=order[1])
        for copy in reversed([copy for copy in copies if copy.order > order]):
            try:
                folder = self._bring(copy)
                found = folder, self.verify(folder, accept=accept, check=check)
            except CheckpointError as error:
                if which != "auto":
                    raise
                problem = error
                logger.warning("Passed over: %s", error)
                continue
            self._bring_files()
            return found
        if here is None and problem is not None:
            raise problem
        return here

    def _brought(self, address: str) -> Path:
        """Return the folder here of a checkpoint by its address, of this run or of another."""
        parent, _, name = address.rstrip("/").rpartition("/")
        if parent != self.place.address:
            return local_copy(address, "resume_from")
        return self._bring(chosen(self.place, self._copies(), name))

    def bring(self, name: str) -> None:
        """Download the checkpoint of this name, if it is on the store and not here."""
        folder = self.root / name
        copy = next((copy for copy in self._copies().values() if copy.name == name), None)
        if copy is not None and not folder.exists():
            self._bring(copy)

    def _bring(self, copy: Copy) -> Path:
        """Return the folder here of a checkpoint of the store, downloading it unless it is here already."""
        folder = self.path(copy.kept.step)
        if folder.exists():
            with contextlib.suppress(OSError, CheckpointError):
                if (folder / MANIFEST).read_bytes() == copy.data:
                    self.verify(folder)
                    return folder
            self._set_aside(folder, f"differs from that on {self.place.name}")
        self._make_root()
        return fetch(self.place, copy, folder, self.temporary(copy.kept.step), self.fs)

    def _bring_files(self) -> None:
        """Download the files of the run beside its checkpoints: what is there is newer."""
        with reaching(self.place, "read"):
            for key, info in self.place.list().items():
                if "/" in key or key in (LOCK, "last", "best") or key.endswith((".tmp", ".probe")):
                    continue
                temporary = self.root / f"{key}.{os.getpid()}.tmp"
                temporary.mkdir()
                try:  # in pieces, for nobody bounds the size of what is there
                    download_files(self.place, {key: self.place.size_of(key, info)}, temporary, 0)
                    self.fs.sync(temporary / key)
                    self.fs.rename(temporary / key, self.root / key)
                except FileNotFoundError:  # deleted there in the meantime
                    continue
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
