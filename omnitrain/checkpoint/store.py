"""The run folder with its checkpoints.

::

    <root>/checkpoint-120/omnitrain.json   written last; a folder without a valid one is no checkpoint
    <root>/checkpoint-120/...              whatever the caller wrote; size and sha256 of each are in omnitrain.json
    <root>/last, <root>/best                  links to one of these folders; text files if links are not possible
    checkpoint-120.1f2e3d4c.tmp            being written: never read, removed by the next save
    checkpoint-120.old                     renamed while the same step is saved again; counts if there is no new one
    checkpoint-120.deleting                being deleted: never read, removed by the next save
    <root>/run.lock                           names the run that writes here: see `lock.py`

`manifest.py` writes omnitrain.json and verifies files; all changes of the disk go through `FileSystem`. The meaning of
the files (tensors, names, settings) belongs to `contents.py`. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omnitrain.checkpoint.lock import Lock
from omnitrain.checkpoint.manifest import (
    MANIFEST,
    SAVE_ORDER,
    Check,
    CheckpointInfo,
    check_hashes,
    encode,
    inspect,
    is_run_file,
    read_manifest,
)
from omnitrain.checkpoint.remote import local_copy
from omnitrain.core.errors import CheckpointError, is_disk_error
from omnitrain.core.files import BY_NAME, FileEntry, FileSystem, hashing, list_tree, open_regular
from omnitrain.core.paths import is_address

logger: logging.Logger = logging.getLogger("omnitrain")

# A checkpoint, or a temporary file or folder: step and suffix.
_NAME = re.compile(
    r"(?:checkpoint-(0|[1-9][0-9]*)|(?:last|best)(?=\.[0-9a-f]{8}\.tmp))"
    r"(?:\.[0-9a-f]{8}(?=\.tmp))?(\.tmp|\.old|\.deleting)?"
)
_MAX_NAME_LENGTH = 255

Entries = Mapping[str, list[tuple[int, Path]]]
"""Step and path of the folders of checkpoints, by the suffix of their names."""
Accept = Callable[[Path, dict[str, Any]], Any]
"""Returns what a caller reads from a checkpoint with this content; raises a CheckpointError if it cannot use it."""
Choice = Callable[[list[CheckpointInfo]], list[int]]
"""Returns the steps of checkpoints to delete, of all complete ones."""


def is_pointer(path: Path) -> bool:
    """Return whether a path is `last` or `best` in a run, and not a run of that name."""
    if path.name not in ("last", "best"):
        return False
    # a copy of a run that followed its links has folders there, as old as the copy
    return path.is_symlink() or not path.is_dir() or bool(Store(path.parent).folders())


class Store:
    """Saves the checkpoints of a run folder atomically, and finds them again.

    A lock ensures that only one process at a time saves to a folder. Any number may read at the same time. The folder
    need not exist: nothing is written before the first save or before the lock is acquired.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> with store.saving(120) as folder:
    ...     entry = store.fs.write(folder / "a.txt", b"hello")
    ...     store.commit(120, folder, {"progress": {"step": 120}}, written={"a.txt": entry}).name
    'checkpoint-120'
    >>> path, content = store.resolve("auto")
    >>> path.name, content["progress"], list(content["files"])
    ('checkpoint-120', {'step': 120}, ['a.txt'])
    """

    def __init__(self, root: str | os.PathLike[str], fs: FileSystem | None = None) -> None:
        self.root: Path = Path(root)
        self.fs: FileSystem = fs or FileSystem()
        self.lock: Lock = Lock(self.root)
        # The complete checkpoints found by the latest `begin`, updated by later saves and deletions.
        self._infos: dict[int, CheckpointInfo] = {}
        # The token of the lock at that time: the list is valid as long as this lock is held.
        self._infos_token = ""
        # The sequence of each checkpoint known to be undamaged, by step.
        self._verified: dict[int, int] = {}
        # Step and sequence of each checkpoint that was reduced to its weights.
        self._reduced: set[tuple[int, int]] = set()

    def path(self, step: int) -> Path:
        """Return the folder for the checkpoint of `step`, whether it exists or not."""
        return self.root / f"checkpoint-{step}"

    # Saving

    def acquire(self) -> None:
        """Lock the folder, creating it if needed; call `lock.release()` afterwards.

        Raises:
            CheckpointError: Another run writes there.
        """
        with contextlib.suppress(OSError):  # the lock reports a failing disk
            self._make_root()
        self.lock.acquire()

    def finish(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until all copies of the checkpoints are written; `tick` is called while waiting."""

    def download(self, name: str) -> None:
        """Download the checkpoint of this name, if it exists only remotely."""

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Lock the run folder, and yield a new folder for the files of `step`; after an error it is removed.

        The leftovers of a killed save are removed before.

        Raises:
            CheckpointError: It could not be written, because of an error of the disk. Earlier checkpoints are
                unchanged.
        """
        self.acquire()
        folder = self.root / f"checkpoint-{step}.{self.lock.token}.tmp"
        try:
            with self.reporting_errors(step):
                self.lock.check()
                self._make_root()
                self._scan()
                self.fs.mkdir(folder)
                yield folder
        except Exception:
            with contextlib.suppress(OSError):  # as far as the disk allows
                if folder.exists():
                    self.fs.remove(folder)
            raise
        finally:
            self.lock.release()

    def _make_root(self) -> None:
        for path in (*reversed(self.root.parents), self.root):
            if not path.exists():
                with contextlib.suppress(FileExistsError):  # another process was faster
                    self.fs.mkdir(path)
                self.fs.sync(path.parent)

    def commit(
        self,
        step: int,
        folder: Path,
        payload: Mapping[str, Any],
        score: float | None = None,
        best: bool = False,
        written: Mapping[str, FileEntry] | None = None,
    ) -> Path:
        """Atomically turn the files in the folder of `saving(step)` into the checkpoint of `step`.

        Every process that writes to the folder must have closed its files.

        Args:
            step: The optimizer update after which the state was captured.
            folder: The folder with the files.
            payload: Further content of omnitrain.json; JSON types only.
            score: The value of the metric to optimize at this step, if it was evaluated.
            best: Whether that value is the best so far; `best` then points here.
            written: Size and sha256 of files, by their path in the folder, that their writers have already synced to
                the disk; all others are read back.

        Score and best belong to this save: pass them again if a step is saved again.
        """
        files, folders = list_tree(folder)
        entries, infos = dict(written or {}), self.all_infos()
        sizes: dict[Path, int] = {}
        for file in files:
            if file.relative_to(folder).as_posix() not in entries:
                sizes[file] = file.stat().st_size
        with hashing(sizes) as digests:  # while the disk writes
            for file in sizes:
                self.fs.sync(file)
            for (file, size), digest in zip(sizes.items(), digests, strict=True):
                entries[file.relative_to(folder).as_posix()] = {"size": size, "sha256": digest}
        content = {
            "step": step,
            # counts saves, not steps: a run that was resumed from an earlier step saves lower steps later
            "sequence": 1 + (infos[-1].sequence if infos else 0),
            "score": float(score) if score is not None and math.isfinite(score) else None,
            "best": best,
            **payload,
            "files": dict(sorted(entries.items())),
        }
        # written last: a folder without it is no checkpoint
        self.fs.write(folder / MANIFEST, encode(content))
        # a synced file in a folder that was not synced may be gone after a power failure
        for inner in reversed(folders):
            self.fs.sync(inner)
        self.lock.check()  # another run may have taken the folder while this one wrote
        self._publish(step, folder)
        self._verified[step] = content["sequence"]
        self._infos[step] = CheckpointInfo.from_manifest(content)
        self._update_pointers(step, best)
        return self.path(step)

    @contextlib.contextmanager
    def reporting_errors(self, step: int) -> Iterator[None]:
        """Turn an error of the disk into a CheckpointError about the checkpoint of `step`."""
        try:
            yield
        except Exception as error:
            if not is_disk_error(error):
                raise
            raise CheckpointError(
                f"Cannot save {str(self.path(step))!r}: {error}. Earlier checkpoints are unchanged. "
                "Free some space or repair the disk; the next save tries again."
            ) from error

    def _publish(self, step: int, source: Path) -> None:
        """Rename the finished folder, after an existing checkpoint of the same step."""
        target = self.path(step)
        self._infos.pop(step, None)
        if target.exists() and not (target / MANIFEST).exists():
            # a foreign folder, or a checkpoint that lost its manifest: nobody knows, so it is kept
            self._move_aside(target, f"has no {MANIFEST}")
        if not target.exists():
            self.fs.rename(source, target)
        else:
            old = target.with_name(target.name + ".old")
            self.fs.rename(target, old)
            try:
                self.fs.rename(source, target)
            except OSError:
                self.fs.rename(old, target)
                raise
        self.fs.sync(self.root)

    def _update_pointers(self, step: int, best: bool) -> None:
        """Update `last` and `best` after a commit; the checkpoint is complete, so a failure is only a warning."""
        path = self.path(step)
        old = path.with_name(f"{path.name}.old")
        try:
            self._write_pointer("last", step)
            if best:
                self._write_pointer("best", step)
            else:
                best_step = self._pointer_step("best", self.all_infos())
                if best_step is not None and self._folder_of(best_step).is_dir():  # it may be on a remote store
                    self._write_pointer("best", best_step)
            if old.is_dir():
                self._delete_folder(old)
        except OSError as error:
            logger.warning("%r is complete, but the cleanup after it failed: %s.", str(path), error)

    def _scan(self) -> None:
        """Clear the leftovers of killed saves and deletions, and list the checkpoints, reading each only once."""
        entries = self._entries()
        # .deleting first: deleting an .old needs that name
        leftovers = [*entries[".deleting"], *entries[".old"], *entries[".tmp"]]
        for _, path in leftovers:
            self._clear(path)
        if leftovers:
            entries = self._entries()
        known = self._infos if self._infos_token == self.lock.token else {}
        self._infos = {info.step: info for info in self._check_all(self.folders(entries), known)[0]}
        self._infos_token = self.lock.token if self.lock.is_held else ""

    def _clear(self, leftover: Path) -> None:
        """Undo or finish a killed save or deletion."""
        # it may belong to another run, if no lock was acquired
        if self.lock.failed_to_acquire and not leftover.name.endswith(f".{self.lock.token}.tmp"):
            return
        try:
            if leftover.suffix != ".old":
                self.fs.remove(leftover)
            elif leftover.with_suffix("").exists():
                self._delete_folder(leftover)
            else:
                self.fs.rename(leftover, leftover.with_suffix(""))
        except OSError as error:
            logger.warning("Cannot clear %r, left by an interrupted save: %s.", str(leftover), error)

    def all_infos(self) -> list[CheckpointInfo]:
        """Return `checkpoint_infos()`, with remote ones, and without reading the disk again while the lock is held."""
        if self.lock.is_held and self._infos_token == self.lock.token:
            return sorted(self._infos.values(), key=SAVE_ORDER)
        return self.checkpoint_infos()

    # Finding

    def checkpoints(self) -> list[Path]:
        """Return the folders of all committed checkpoints, sorted by step. `verify` checks them for damage."""
        return [path for _, path in sorted(self._committed().items())]

    def _committed(self) -> dict[int, Path]:
        return {step: path for step, path in self.folders().items() if (path / MANIFEST).is_file()}

    def checkpoint_infos(self) -> list[CheckpointInfo]:
        """Return step, score and so on of each complete checkpoint (all files have their sizes), in save order."""
        return self._check_all(self.folders())[0]

    def verify(
        self,
        path: str | os.PathLike[str],
        hashes: bool = True,
        accept: Accept | None = None,
        check: Check = check_hashes,
    ) -> Any:
        """Return the content of omnitrain.json after checking every file of the checkpoint against it.

        Args:
            path: The folder. Files that omnitrain.json does not list are ignored.
            hashes: Whether to read and hash all files, instead of only comparing sizes.
            accept: Checks the content, and returns what is returned in its place.
            check: Hashes the files.

        Raises:
            CheckpointError: A file is missing or damaged; the message has its name, and the newest complete checkpoint.
        """
        path = Path(path)
        try:
            content = inspect(path, hashes, check)
            return content if accept is None else accept(path, content)
        except CheckpointError as error:
            names = [f"checkpoint-{info.step}" for info in Store(path.parent).checkpoint_infos()]
            newest = next((name for name in reversed(names) if name != path.name), None)
            advice = "There is no other." if newest is None else f"The newest complete one is {newest!r}."
            raise CheckpointError(f"{error} {advice}") from error.__cause__

    def resolve(
        self, which: str | os.PathLike[str], accept: Accept | None = None, check: Check = check_hashes
    ) -> tuple[Path, Any] | None:
        """Return the folder of a verified checkpoint and the content of its omnitrain.json.

        Args:
            which: "last" (saved last), "best" (saved last as the best so far), a path, an address, or "auto": the
                latest undamaged one; skipped ones are logged with the reason. Only "auto" can return None, if no
                checkpoint exists.
            accept: Checks the content, and returns what is returned in its place.
            check: Hashes the files of a checkpoint.

        Raises:
            CheckpointError: The checkpoint is missing or damaged; for "auto": all existing ones are damaged.
        """
        if which != "auto":
            folder = self.locate(which)
            return folder, self.verify(folder, accept=accept, check=check)
        folders = self.folders()
        infos, reasons = self._check_all(folders)
        for info in reversed(infos):
            path = folders[info.step]
            try:
                content = inspect(path, hashes=True, check=check)
                content = content if accept is None else accept(path, content)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                logger.warning("Skipped: %s Using %r instead.", reason, path.name)
            return path, content
        if not reasons:
            return None
        raise CheckpointError(
            f"None of the checkpoints in {str(self.root)!r} can be used. " + " ".join(reasons) + " "
            "Repair them or move them away, or choose another `save_dir` for a new run."
        )

    def locate(self, which: str | os.PathLike[str]) -> Path:
        """Return the folder of "last", of "best", of a path or of an address, damaged or not.

        Raises:
            CheckpointError: No such folder exists, or the path is a run.
        """
        if which not in ("last", "best"):
            return self._locate_path(Path(local_copy(str(which), "resume_from") if is_address(which) else which))
        folders = self.folders()
        infos, _ = self._check_all(folders)
        step = self._pointer_step(str(which), infos)
        if step is not None:
            return folders.get(step) or self.path(step)
        if which == "best" and infos:
            raise CheckpointError(
                f"No checkpoint in {str(self.root)!r} was saved as the best. Pass 'last', or evaluate before saving."
            )
        raise CheckpointError(f"{str(self.root)!r} has no complete checkpoint. Pass 'auto' to start a new run then.")

    def _locate_path(self, path: Path) -> Path:
        if is_pointer(path):
            return Store(path.parent).locate(path.name)
        candidates = [path, self.root / path]
        if _NAME.fullmatch(path.name):
            candidates += [path.with_name(f"{path.name}.old"), (self.root / path).with_name(f"{path.name}.old")]
        folder = next(filter(Path.is_dir, candidates), None)
        if folder is None:
            infos = self.checkpoint_infos()
            hint = "Pass an existing one, 'last' or 'best'."
            if infos:
                hint = f"The newest complete one is {self.path(infos[-1].step).name!r}."
            raise CheckpointError(f"Can't find a valid checkpoint at {str(path)!r}, which does not exist. {hint}")
        infos = Store(folder).checkpoint_infos() if not (folder / MANIFEST).exists() else []
        if infos:
            newest = str(Store(folder).path(infos[-1].step))
            raise CheckpointError(f"{str(folder)!r} is a run folder, not a checkpoint. Did you mean {newest!r}?")
        return folder

    def newest_size(self) -> int | None:
        """Return the bytes of the checkpoint saved last, an estimate for the next one; None if none exists."""
        infos = self.checkpoint_infos()
        if not infos:
            return None
        path = self._folder_of(infos[-1].step)
        return sum(entry["size"] for entry in read_manifest(path)["files"].values()) + (path / MANIFEST).stat().st_size

    def _entries(self) -> Entries:
        entries: dict[str, list[tuple[int, Path]]] = {"": [], ".old": [], ".deleting": [], ".tmp": []}
        if not self.root.is_dir():
            return entries
        with os.scandir(self.root) as iterator:
            for entry in sorted(iterator, key=BY_NAME):
                match = _NAME.fullmatch(entry.name)
                # folders need no `stat`, and links to folders count
                is_folder = entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))
                if match and (is_folder or match[1] is None):
                    entries[match[2] or ""].append((int(match[1] or -1), Path(entry.path)))
        return entries

    def folders(self, entries: Entries | None = None) -> dict[int, Path]:
        """Return the folder of each step, damaged or not; an .old one counts until its successor is renamed."""
        entries = entries or self._entries()
        return dict([*entries[".old"], *entries[""]])

    def _folder_of(self, step: int) -> Path:
        """Return the folder of a step, which may not exist, without listing the run folder."""
        path = self.path(step)
        old = path.with_name(f"{path.name}.old")
        return old if old.is_dir() and not path.is_dir() else path

    def _check_all(
        self, folders: Mapping[int, Path], known: Mapping[int, CheckpointInfo] | None = None
    ) -> tuple[list[CheckpointInfo], list[str]]:
        """Return the complete checkpoints, whose files have the right sizes, in save order, and what others lack."""
        infos, reasons = [], []
        for step, path in sorted(folders.items(), reverse=True):
            try:
                if known and step in known:
                    infos.append(known[step])
                    continue
                content = inspect(path, hashes=False)
                if content["step"] != step:
                    raise CheckpointError(f"{str(path)!r} was saved as step {content['step']}, and renamed since.")
                infos.append(CheckpointInfo.from_manifest(content))
            except CheckpointError as error:
                reasons.append(str(error))
        return sorted(infos, key=SAVE_ORDER), reasons

    # Pointers

    def _pointer_step(self, which: str, infos: Sequence[CheckpointInfo]) -> int | None:
        """Return the step to which `last` or `best` refers, given the complete checkpoints."""
        # A process may be killed between a commit and its pointers, so the manifests decide. But a pointer to a damaged
        # or missing checkpoint is followed, so that an older one is never used silently.
        pointed = newest = self._read_pointer(which)
        is_complete = pointed is None
        for info in infos:
            is_complete = is_complete or info.step == pointed
            if which == "last" or info.best:
                newest = info.step
        return newest if is_complete else pointed

    def _read_pointer(self, which: str) -> int | None:
        """Return the step of the folder in a pointer; None if it leads out of the run folder."""
        path = self.root / which
        try:
            if path.is_symlink():
                name = os.readlink(path)
            else:
                with open_regular(path) as file:
                    name = file.read(_MAX_NAME_LENGTH).decode().strip()
        except (OSError, ValueError):
            return None
        match = _NAME.fullmatch(name)
        return int(match[1]) if match and not match[2] else None

    def _write_pointer(self, which: str, step: int) -> None:
        if self._read_pointer(which) == step:
            return
        temporary, name = self.root / f"{which}.{self.lock.token}.tmp", self.path(step).name
        try:
            self.fs.link(temporary, name)
        except (OSError, NotImplementedError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                raise
            # a file system without links, or a user without the right to create them
            self.fs.write(temporary, f"{name}\n".encode())
        if (self.root / which).is_dir() and not (self.root / which).is_symlink():
            self._move_aside(self.root / which, "is a copy of a checkpoint")
        self.fs.rename(temporary, self.root / which)
        self.fs.sync(self.root)

    def _move_aside(self, path: Path, why: str) -> None:
        names = (path.with_name(f"{path.name}.aside-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self.fs.rename(path, aside)
        logger.warning("%r %s, so it was renamed to %r.", str(path), why, aside.name)

    # Retention

    def prune(self, choose: Choice) -> list[int]:
        """Delete the complete checkpoints that `choose` returns; damaged and foreign folders stay.

        A folder that cannot be deleted is logged, and tried again the next time. Nothing is deleted unless at least
        one of the remaining checkpoints is verified.
        """
        self.lock.check()
        infos, pointed = self.all_infos(), (self._read_pointer("last"), self._read_pointer("best"))
        steps = [step for step in choose(infos) if step not in pointed]
        if not steps:
            return []
        if not self._has_verified([info for info in infos if info.step not in steps]):
            logger.warning("None is deleted from %r: no remaining checkpoint would be undamaged.", str(self.root))
            return []
        return self.delete(steps)

    def keep_only_weights(self) -> None:
        """Remove from all checkpoints but the newest what a resumed run needs besides the weights.

        A kill leaves each of them complete or reduced; a folder that cannot be reduced is logged. Nothing is removed
        unless the newest checkpoint is verified.
        """
        self.lock.check()
        infos = self.all_infos()
        former = [info for info in infos[:-1] if (info.step, info.sequence) not in self._reduced]
        if not former or not self._has_verified(infos[-1:]):
            return
        for info in former:
            try:
                self._reduce(self._folder_of(info.step))
                self._reduced.add((info.step, info.sequence))
            except (OSError, CheckpointError) as error:
                logger.warning("Cannot reduce %r to its weights: %s.", str(self.path(info.step)), error)

    def _reduce(self, folder: Path) -> None:
        """Rewrite omnitrain.json without the files of a run, and then remove these, or what a kill has left of them."""
        content = read_manifest(folder)
        if not content.get("only_model"):
            kept_files = {name: entry for name, entry in content["files"].items() if not is_run_file(name)}
            del content["sha256"]
            temporary = folder / f"{MANIFEST}.tmp"
            self.fs.write(temporary, encode({**content, "only_model": True, "files": kept_files}))
            self.fs.rename(temporary, folder / MANIFEST)
            self.fs.sync(folder)
        for file in list_tree(folder)[0]:
            if is_run_file(file.relative_to(folder).as_posix()):
                self.fs.remove(file)

    def _has_verified(self, infos: Sequence[CheckpointInfo]) -> bool:
        """Return whether one of these is undamaged; those saved by this process were hashed when written."""
        for info in reversed(infos):
            is_hashed = self._verified.get(info.step) == info.sequence
            with contextlib.suppress(CheckpointError):
                inspect(self._folder_of(info.step), hashes=not is_hashed)
                self._verified[info.step] = info.sequence
                return True
        return False

    def delete(self, steps: Iterable[int]) -> list[int]:
        """Delete checkpoints, none partially if the process is killed, and return the steps of those deleted.

        A folder that cannot be deleted is logged.
        """
        deleted = []
        for step in steps:
            self.lock.check()
            try:
                if self._delete(step):
                    deleted.append(step)
            except OSError as error:
                logger.warning("Cannot delete %r: %s.", str(self.path(step)), error)
        return deleted

    def _delete(self, step: int) -> bool:
        self._infos.pop(step, None)
        self._delete_folder(self._folder_of(step))
        return True

    def _delete_folder(self, path: Path) -> None:
        deleting = path.with_name(path.name.removesuffix(".old") + ".deleting")
        if deleting.exists():
            self.fs.remove(deleting)
        self.fs.rename(path, deleting)
        self.fs.remove(deleting)
