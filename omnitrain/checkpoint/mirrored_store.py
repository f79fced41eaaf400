"""A run folder that is mirrored to a remote store.

Saves go to a local folder, and are uploaded in the background by `uploader.py`; `remote.py` reads a store. No torch.
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
    RemoteCheckpoint,
    RemoteFolder,
    check_address,
    download_files,
    fetch,
    local_copy,
    select_checkpoint,
    wrap_store_errors,
)
from omnitrain.checkpoint.store import Store, accept_any
from omnitrain.checkpoint.uploader import MAX_ATTEMPTS, RemoteLock, Uploader, wait_limit
from omnitrain.core.errors import CheckpointError
from omnitrain.core.paths import is_address, local_folder, run_folder

logger: logging.Logger = logging.getLogger("omnitrain")


def make_store(save_dir: str | os.PathLike[str], is_required: bool = False, replaces: bool = False) -> Store:
    """Return the store of a run whose `save_dir` is a path or an address; nothing is opened yet.

    Args:
        save_dir: The path or the address.
        is_required: Whether a failing remote store ends the run.
        replaces: Whether a new run replaces existing checkpoints.

    Raises:
        ConfigError, MissingExtraError: No installed package can write to this address.
    """
    if not is_address(save_dir):
        return Store(run_folder(save_dir, "save_dir"))
    check_address(str(save_dir), "save_dir")
    return MirroredStore(str(save_dir), is_required, replaces)


def resolve_checkpoint(
    store: Store | None,
    which: str | os.PathLike[str],
    accept: Callable[[Path, dict[str, Any]], None],
    check: Check = check_hashes,
) -> tuple[Path, dict[str, Any]] | None:
    """Return `Store.resolve(...)`; also for an address if there is no store, or only a local one."""
    if is_address(which) and not isinstance(store, MirroredStore):
        which = local_copy(str(which), "resume_from")
    return (store or Store(Path(which).parent)).resolve(which, accept, check)


class MirroredStore(Store):
    """The checkpoints of a local run folder, and their copies on a remote store.

    Checkpoints are saved as by `Store`, and uploaded by a thread once they are committed. Newer ones of the remote
    store are downloaded before a run resumes. The remote store is accessed between `acquire` and `finish`, only by the
    main rank.

    Args:
        address: The address, such as s3://bucket/run.
        is_required: Whether a failing remote store ends the run.
        replaces: Whether a new run replaces existing checkpoints.
    """

    def __init__(self, address: str, is_required: bool = False, replaces: bool = False) -> None:
        super().__init__(local_folder(address))
        self.remote: RemoteFolder = RemoteFolder(address)
        self._is_required = is_required
        self._replaces = replaces
        self._upload: Uploader | None = None
        # The remote steps when the run began, which a new run replaces.
        self._replaceable: set[int] = set()
        # Steps to delete locally once they are uploaded.
        self._postponed: set[int] = set()

    # --- beginning and end

    def acquire(self) -> None:
        """Lock the local and the remote folder.

        Raises:
            CheckpointError: Another run writes there, or the store cannot be reached.
            ConfigError: The remote store is not writable.
        """
        super().acquire()
        if self._upload is not None:
            return
        try:
            self._attach()
        except BaseException:
            self.lock.release()
            raise

    def _attach(self) -> None:
        self.remote.check_writable()
        lock = RemoteLock(self.remote)
        lock.acquire()
        try:
            with wrap_store_errors(self.remote, "read"):
                self._abort_multipart_uploads()
                listing = self.remote.list()
                copies, leftovers = self.remote.complete_checkpoints(listing), self.remote.leftovers(listing)
        except BaseException:
            lock.release()
            raise
        for key in self.remote.blocking_files(listing):
            logger.warning(
                "%s has a file %r with the name of a checkpoint's folder, so many stores reject a checkpoint of this "
                "name. Delete the file.", self.remote.name, key,
            )  # fmt: skip
        self._upload = Uploader(self.remote, self.root, copies, lock, leftovers)
        self._replaceable, self._postponed = set(copies), set()
        newest = self._newest_remote_sequence()
        for info in self.checkpoint_infos():
            if info.sequence > newest and self.path(info.step).is_dir():  # an upload was interrupted
                self._upload.add(info.step)

    def _abort_multipart_uploads(self) -> None:
        """Abort the multipart uploads of a killed run: they cost storage, and no listing shows them."""
        fs = self.remote.fs
        if not hasattr(fs, "list_multipart_uploads"):
            return
        with contextlib.suppress(Exception):  # not every store supports it, nor every account may do it
            bucket, _, prefix = self.remote.path("").partition("/")
            for upload in fs.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/"):
                    fs.call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )  # fmt: skip

    def finish(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until everything is uploaded, as long as there is progress, and unlock the remote folder.

        Args:
            tick: Called while waiting.

        Raises:
            CheckpointError: The upload failed, and it is required.
        """
        upload = self._upload
        if upload is None:
            return
        problem = "it was interrupted"
        try:
            problem = upload.wait(wait_limit(), tick, MAX_ATTEMPTS if self._is_required else None)
            self._delete_postponed()
        finally:
            self._upload = None
            if problem:
                message = (
                    f"Not everything was uploaded to {self.remote.name!r}: {problem}. It is complete in "
                    f"{str(self.root)!r}, and the next run with this `save_dir` on this machine uploads it."
                )
                logger.error("%s", message)
        if problem and self._is_required:
            raise CheckpointError(message) from OSError(problem)

    # --- saving

    def begin(self, step: int) -> Path:
        """Create the folder for the files of `step`, as `Store.begin` does."""
        if self._is_required and self._upload is not None:
            self._upload.check()
        self._delete_postponed()
        return super().begin(step)

    def commit(self, step: int, payload: Mapping[str, Any], **options: Any) -> Path:
        """Commit a checkpoint as `Store.commit` does, and start its upload."""
        path = super().commit(step, payload, **options)
        self._postponed.discard(step)
        if self._upload is not None:
            if self._replaces and self._replaceable:
                self._upload.delete_replaced(self._replaceable - {step})
            self._replaceable = set()
            self._upload.add(step)
        return path

    def delete(self, step: int) -> None:
        """Delete the local checkpoint of `step`, once it is not being uploaded."""
        if self._upload is not None and self._upload.is_uploading(step):
            self._postponed.add(step)
        else:
            super().delete(step)

    def _delete_postponed(self) -> None:
        for step in sorted(self._postponed):
            if self._upload is None or not self._upload.is_uploading(step):
                self._postponed.discard(step)
                with contextlib.suppress(OSError):
                    super().delete(step)

    def prune(
        self,
        keep_last: int | None,
        keep_best: int = 1,
        keep_every: int | None = None,
        direction: Literal["max", "min"] = "max",
    ) -> list[Path]:
        """Delete local checkpoints by the policy, and remote ones after the new checkpoint is uploaded."""
        if self._upload is not None:
            self._upload.set_retention(keep_last, keep_best, keep_every, direction)
        self._delete_postponed()
        return super().prune(keep_last, keep_best, keep_every, direction)

    # --- finding

    def _copies(self) -> dict[int, RemoteCheckpoint]:
        if self._upload is not None:
            return dict(self._upload.copies)
        with wrap_store_errors(self.remote, "read"):
            return self.remote.complete_checkpoints()

    def _newest_remote_sequence(self) -> int:
        copies = () if self._upload is None else self._upload.copies.values()
        return max((copy.info.sequence for copy in list(copies)), default=0)

    def checkpoints(self) -> list[Path]:
        """Return the folders of all committed checkpoints, sorted by step; some may exist only remotely."""
        steps = {step: self.path(step) for step in self._copies()} | {
            step: path for step, path in self.folders().items() if (path / MANIFEST).is_file()
        }
        return [path for _, path in sorted(steps.items())]

    def resolve(
        self,
        which: str | os.PathLike[str],
        accept: Callable[[Path, dict[str, Any]], None] = accept_any,
        check: Check = check_hashes,
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return a verified checkpoint as `Store.resolve` does, downloading it if the remote one is newer.

        `which` can also be an address.
        """
        resolved = self._resolve(which, accept, check)
        if resolved is not None:
            self._replaceable = set()  # a resumed run replaces nothing
        return resolved

    def _resolve(
        self, which: str | os.PathLike[str], accept: Callable[[Path, dict[str, Any]], None], check: Check
    ) -> tuple[Path, dict[str, Any]] | None:
        if is_address(which):
            return super().resolve(self._download_address(str(which)), accept, check)
        if which not in ("auto", "last", "best"):
            return super().resolve(which, accept, check)
        remote_checkpoints = self._copies()
        copies = sorted(remote_checkpoints.values(), key=lambda copy: copy.order)
        if which == "best":
            copies = [copy for copy in copies if copy.info.best][-1:]
        elif which == "last":
            copies = copies[-1:]
        local: tuple[Path, dict[str, Any]] | None = None
        problem: CheckpointError | None = None
        try:
            local = super().resolve(which, accept, check)
        except CheckpointError as error:
            problem = error
        order = (-1, -1) if local is None else (local[1]["sequence"], local[1]["step"])
        if which != "auto":
            with wrap_store_errors(self.remote, "read"):
                self.remote.check_pointer(str(which), remote_checkpoints, local_step=order[1])
        for copy in reversed([copy for copy in copies if copy.order > order]):
            try:
                folder = self._download(copy)
                resolved = folder, self.verify(folder, accept=accept, check=check)
            except CheckpointError as error:
                if which != "auto":
                    raise
                problem = error
                logger.warning("Skipped: %s", error)
                continue
            self._download_run_files()
            return resolved
        if local is None and problem is not None:
            raise problem
        return local

    def _download_address(self, address: str) -> Path:
        """Return the local folder of a checkpoint by its address, of this run or another."""
        parent, _, name = address.rstrip("/").rpartition("/")
        if parent != self.remote.address:
            return local_copy(address, "resume_from")
        return self._download(select_checkpoint(self.remote, self._copies(), name))

    def download(self, name: str) -> None:
        """Download the checkpoint of this name, if it exists only remotely."""
        folder = self.root / name
        copy = next((copy for copy in self._copies().values() if copy.name == name), None)
        if copy is not None and not folder.exists():
            self._download(copy)

    def _download(self, copy: RemoteCheckpoint) -> Path:
        """Return the local folder of a remote checkpoint, downloading it if needed."""
        folder = self.path(copy.info.step)
        if folder.exists():
            with contextlib.suppress(OSError, CheckpointError):
                if (folder / MANIFEST).read_bytes() == copy.data:
                    self.verify(folder)
                    return folder
            self._move_aside(folder, f"differs from its copy on {self.remote.name}")
        self._make_root()
        return fetch(self.remote, copy, folder, self.temporary(copy.info.step), self.fs)

    def _download_run_files(self) -> None:
        """Download the remote files of the run next to its checkpoints, which are newer."""
        with wrap_store_errors(self.remote, "read"):
            for key, info in self.remote.list().items():
                if "/" in key or key in (LOCK, "last", "best") or key.endswith((".tmp", ".probe")):
                    continue
                temporary = self.root / f"{key}.{os.getpid()}.tmp"
                temporary.mkdir()
                try:  # in pieces, as their size is not bounded
                    download_files(self.remote, {key: self.remote.size_of(key, info)}, temporary, 0)
                    self.fs.sync(temporary / key)
                    self.fs.rename(temporary / key, self.root / key)
                except FileNotFoundError:  # deleted in the meantime
                    continue
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
