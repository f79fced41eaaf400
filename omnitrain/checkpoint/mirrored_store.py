"""A run folder that is mirrored to a remote store.

Saves go to a local folder, and are uploaded in the background by `uploader.py`; `remote.py` reads a store. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.manifest import (
    MANIFEST,
    SAVE_ORDER,
    Check,
    CheckpointInfo,
    check_hashes,
    read_manifest,
)
from omnitrain.checkpoint.remote import (
    FOLDER,
    RemoteCheckpoint,
    RemoteFolder,
    check_address,
    wrap_store_errors,
)
from omnitrain.checkpoint.store import Accept, Choice, Store
from omnitrain.checkpoint.uploader import MAX_ATTEMPTS, RemoteLock, Uploader, wait_limit
from omnitrain.core.errors import CheckpointError
from omnitrain.core.paths import is_address, local_folder, run_folder

logger: logging.Logger = logging.getLogger("omnitrain")


def make_store(save_dir: str | os.PathLike[str], is_required: bool = False) -> Store:
    """Return the store of a run, whose `save_dir` is a path or an address; nothing is opened yet.

    Raises:
        ConfigError, MissingExtraError: No installed package can write to this address.
    """
    if not is_address(save_dir):
        return Store(run_folder(save_dir, "save_dir"))
    check_address(str(save_dir), "save_dir")
    return MirroredStore(str(save_dir), is_required)


class MirroredStore(Store):
    """The checkpoints of a local run folder, and their copies on a remote store.

    Checkpoints are saved as by `Store`, and uploaded by a thread once they are committed. Newer ones of the remote
    store are downloaded before a run resumes. The remote store is accessed between `acquire` and `finish`, only by the
    main rank.

    Args:
        address: The address, such as s3://bucket/run.
        is_required: Whether a failing remote store ends the run.
    """

    def __init__(self, address: str, is_required: bool = False) -> None:
        super().__init__(local_folder(address))
        self.remote: RemoteFolder = RemoteFolder(address)
        self._is_required = is_required
        self._upload: Uploader | None = None
        # The argument of the latest call of `prune`.
        self._choose: Choice | None = None

    # --- beginning and end

    def acquire(self) -> None:
        """Lock the local and the remote folder.

        Raises:
            CheckpointError: Another run writes there, the store cannot be reached, or a required upload has failed.
            ConfigError: The remote store is not writable.
        """
        super().acquire()
        try:
            if self._upload is None:
                self._attach()
            elif self._is_required:
                self._upload.check()
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
                copies = self.remote.complete_checkpoints(listing)
        except BaseException:
            lock.release()
            raise
        for key in listing:
            if FOLDER.fullmatch(key):
                logger.warning(
                    "%s has a file %r with the name of a checkpoint's folder, so many stores reject a checkpoint of "
                    "this name. Delete the file.", self.remote.name, key,
                )  # fmt: skip
        # what a killed upload or deletion left behind: no omnitrain.json, or a copy whose successor has one
        folders = {key.partition("/")[0] for key in listing if "/" in key}
        committed = {folder for folder in folders if f"{folder}/{MANIFEST}" in listing}
        leftovers = {folder for folder in folders - committed if FOLDER.fullmatch(folder)}
        leftovers |= {f"{folder}.old" for folder in committed} & committed
        self._upload = Uploader(self.remote, self.root, copies, lock, leftovers)
        self._choose = None
        newest = max((copy.info.sequence for copy in copies.values()), default=0)
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

        Raises:
            CheckpointError: The upload failed, and it is required.
        """
        if self._upload is None:
            return
        problem = "it was interrupted"
        try:
            problem = self._upload.wait(wait_limit(), tick, MAX_ATTEMPTS if self._is_required else None)
            if self._choose is not None:  # what was being uploaded at the latest save can be deleted now
                with contextlib.suppress(CheckpointError, OSError):
                    super().prune(self._choose)
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

    def commit(self, step: int, *details: Any) -> Path:
        """Commit a checkpoint as `Store.commit` does, and start its upload."""
        path = super().commit(step, *details)
        if self._upload is not None:
            self._upload.add(step)
        return path

    def all_infos(self) -> list[CheckpointInfo]:
        """Return the properties of all local checkpoints, and while locked those of the remote ones, in save order."""
        copies = {} if self._upload is None else dict(self._upload.copies)
        infos = {step: copy.info for step, copy in copies.items()} | {info.step: info for info in super().all_infos()}
        return sorted(infos.values(), key=SAVE_ORDER)

    def prune(self, choose: Choice) -> list[int]:
        """Delete the chosen local checkpoints, and remote ones after the new checkpoint is uploaded."""
        self._choose = choose
        return super().prune(choose)

    def _delete(self, step: int) -> bool:
        """Delete the checkpoint of `step`; return False if the local one stays, as it is being uploaded."""
        if self._upload is not None:
            self._upload.delete(step)
            if self._upload.is_uploading(step):
                return False
        return not self._folder_of(step).is_dir() or super()._delete(step)

    # --- finding

    def _copies(self) -> dict[int, RemoteCheckpoint]:
        if self._upload is not None:
            return dict(self._upload.copies)
        with wrap_store_errors(self.remote, "read"):
            return self.remote.complete_checkpoints()

    def _committed(self) -> dict[int, Path]:
        return {step: self.path(step) for step in self._copies()} | super()._committed()

    def resolve(
        self, which: str | os.PathLike[str], accept: Accept | None = None, check: Check = check_hashes
    ) -> tuple[Path, Any] | None:
        """Return a verified checkpoint as `Store.resolve` does, downloading it if the remote one is newer.

        `which` can also be an address, of this run or another.
        """
        if is_address(which):
            parent, _, name = str(which).rstrip("/").rpartition("/")
            if parent == self.remote.address:
                which = self._download(self.remote.select(name, self._copies()))
        if which not in ("auto", "last", "best"):
            return super().resolve(which, accept, check)
        copies = self._copies()
        local: tuple[Path, Any] | None = None
        problem: CheckpointError | None = None
        try:
            local = super().resolve(which, accept, check)
        except CheckpointError as error:
            problem = error
        order = (-1, -1) if local is None else SAVE_ORDER(CheckpointInfo.from_manifest(read_manifest(local[0])))
        with wrap_store_errors(self.remote, "read"):
            candidates = self.remote.candidates(str(which), copies, local_step=order[1])
        newer = [copy for copy in candidates if SAVE_ORDER(copy.info) > order]
        for copy in reversed(newer if which == "auto" else newer[-1:]):
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

    def download(self, name: str) -> None:
        """Download the checkpoint of this name, if it exists only remotely."""
        copy = next((copy for copy in self._copies().values() if copy.name == name), None)
        if copy is not None and not (self.root / name).exists():
            self._download(copy)

    def _download(self, copy: RemoteCheckpoint) -> Path:
        self._make_root()
        reason = f"differs from its copy on {self.remote.name}"
        return self.remote.fetch(copy, self.root, lambda folder: self._move_aside(folder, reason))

    def _download_run_files(self) -> None:
        """Download the remote files of the run next to its checkpoints, which are newer."""
        with wrap_store_errors(self.remote, "read"):
            for key, info in self.remote.list().items():
                if "/" in key or key in (LOCK, "last", "best") or key.endswith((".tmp", ".probe")):
                    continue
                with (
                    tempfile.TemporaryDirectory(prefix=f"{key}.", suffix=".tmp", dir=self.root) as temporary,
                    contextlib.suppress(FileNotFoundError),  # deleted in the meantime
                ):
                    self.remote.get(self.remote.sizes({key: info}), Path(temporary))
                    self.fs.sync(Path(temporary, key))
                    self.fs.rename(Path(temporary, key), self.root / key)
