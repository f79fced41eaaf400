"""The folder of a run: checkpoints, atomic commit, retention, `last` and `best`, and finding a checkpoint to resume.

::

    <root>/checkpoint-120/omnitrain.json   written last; a folder without a valid one is no checkpoint
    <root>/checkpoint-120/...              whatever the caller wrote; size and sha256 of each are in omnitrain.json
    <root>/last, <root>/best                  links to one of these folders; text files if links are not possible
    checkpoint-120.1f2e3d4c.tmp            being written: never read, removed by the next save
    checkpoint-120.old                     renamed while the same step is saved again; counts if it is alone
    checkpoint-120.deleting                being deleted: never read, removed by the next save
    <root>/run.lock                           names the run that writes here at present: see `lock.py`

`manifest.py` writes omnitrain.json and verifies files; everything that changes the disk goes through `disk.py`. The
meaning of the files (tensors, names, settings) does not belong here: that is in `state.py`. No torch.
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
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from omnitrain.checkpoint.disk import FileSystem, hashing, listing
from omnitrain.checkpoint.lock import Lock
from omnitrain.checkpoint.manifest import (
    MANIFEST,
    Check,
    FileEntry,
    check_hashes,
    check_payload,
    check_sizes,
    encode,
    inspect,
    read_manifest,
)
from omnitrain.checkpoint.retention import Kept, to_delete
from omnitrain.checkpoint.safetensors_header import open_regular
from omnitrain.core.errors import CheckpointError, is_disk_error

logger: logging.Logger = logging.getLogger("omnitrain")

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*|0[0-9]{5})(?:\.[0-9a-f]{8}(?=\.tmp))?(\.tmp|\.old|\.deleting)?")

_LONGEST_NAME = 255
_POINTER = re.compile(r"(last|best)\.[0-9a-f]{8}\.tmp")


def is_pointer(path: Path) -> bool:
    """Whether a path is `last` or `best` in a run, and not a run of that name.

    If a copy of a run followed its links, these are folders, which are as old as the copy.
    """
    if path.name not in ("last", "best"):
        return False
    return path.is_symlink() or not path.is_dir() or bool(Store(path.parent).folders())


def _any(folder: Path, content: dict[str, Any]) -> None:
    """Accept any content."""


def _facts(content: Mapping[str, Any]) -> Kept:
    """Return the facts for retention, from the content of omnitrain.json."""
    for_best = bool(content.get("for_best"))  # missing in the first checkpoints of format 1
    return Kept(content["step"], content["score"], content["sequence"], content["best"], for_best)


def _in_order(kept: Iterable[Kept]) -> list[Kept]:
    return sorted(kept, key=lambda found: (found.sequence, found.step))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; for a folder without another look at the disk."""
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


class Store:
    """The checkpoints of one run folder: saves them whole or not at all, and finds them again.

    A lock ensures that only one process at a time saves to a folder, one save at a time. Any number may read meanwhile.
    The folder need not exist: nothing is written before the first save or before the lock is taken.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> store.save(120, lambda folder: (folder / "a.txt").write_text("hello"), {"progress": {"step": 120}}).name
    'checkpoint-120'
    >>> path, content = store.resolve("auto")
    >>> path.name, content["progress"], list(content["files"])
    ('checkpoint-120', {'step': 120}, ['a.txt'])
    """

    def __init__(self, root: str | os.PathLike[str], fs: FileSystem | None = None) -> None:
        self.root: Path = Path(root)
        self.fs: FileSystem = fs or FileSystem()
        self.lock: Lock = Lock(self.root)
        self._glances: dict[str, tuple[tuple[int, int], Kept, dict[str, FileEntry]]] = {}
        self._present: dict[int, Kept] = {}
        """The complete checkpoints found by the latest `begin`, updated by later saves and deletions."""
        self._present_under = ""
        """The token of the lock held then: the list is valid as long as this lock is held."""
        self._sound: dict[int, int] = {}
        """Step and sequence of the checkpoints known to be undamaged."""

    def path(self, step: int) -> Path:
        """Return the folder for the checkpoint of `step`, existing or not."""
        return self.root / f"checkpoint-{step}"

    def _earlier_path(self, step: int) -> Path:
        """Return the folder of a step as earlier versions named it, which is still read."""
        return self.root / f"checkpoint-{step:06d}"

    def temporary(self, step: int) -> Path:
        """Return the temporary folder for the checkpoint of `step`, created by `begin`."""
        return self.root / f"checkpoint-{step}.{self.lock.token}.tmp"

    # Saving

    def take(self) -> None:
        """Lock the folder, creating it if needed; call `lock.release()` afterwards.

        Raises:
            CheckpointError: Another run writes there.
        """
        with contextlib.suppress(OSError):  # the lock reports a failing disk
            self._make_root()
        self.lock.take()

    def finish(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until what was saved is everywhere where it is to be; `tick` is called meanwhile."""

    def _newest_elsewhere(self) -> int:
        """Return the number of the latest save in another copy of this folder; 0 if there is none."""
        return 0

    def bring(self, name: str) -> None:
        """Have the checkpoint of this name here, if there is one elsewhere."""

    def save(
        self,
        step: int,
        write: Callable[[Path], object],
        payload: Mapping[str, Any],
        *,
        score: float | None = None,
        best: bool = False,
        digests: Mapping[str, Future[str]] | None = None,
    ) -> Path:
        """Save a checkpoint and return its folder: `begin`, `write(folder)`, `commit`; `write` may fill `digests`.

        Raises:
            CheckpointError: It could not be written; an error of the disk is its cause. Earlier checkpoints are
                untouched, and what was written is removed.
        """
        with self.saving(step) as folder:
            write(folder)
            return self.commit(step, payload, score=score, best=best, digests=digests)

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Lock the run's folder, and yield the new folder for the files of `step`; after an error it is removed.

        Raises:
            CheckpointError: As for `save`.
        """
        self.take()
        try:
            folder = self.begin(step)
            with self._saving(step):
                yield folder
        finally:
            self.lock.release()

    def begin(self, step: int) -> Path:
        """Create the folder for the files of `step`, and remove what a killed save left behind."""
        with self._saving(step):
            self.lock.check()
            self._make_root()
            self._look_around()
            self.fs.mkdir(self.temporary(step))
        return self.temporary(step)

    def _make_root(self) -> None:
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was faster
                self.fs.mkdir(path)
            self.fs.sync(path.parent)

    def commit(
        self,
        step: int,
        payload: Mapping[str, Any],
        *,
        score: float | None = None,
        best: bool = False,
        digests: Mapping[str, Future[str]] | None = None,
        written: Mapping[str, FileEntry] | None = None,
    ) -> Path:
        """Atomically turn what was written since `begin(step)` into the checkpoint of `step`.

        Every process that writes to the folder must have closed its files.

        Args:
            step: The optimizer update after which it was captured.
            payload: Further content of omnitrain.json; JSON types only.
            score: The value of the metric to optimize at this step, if it was evaluated.
            best: Whether that value is the best so far; `best` then points here.
            digests: The sha256 of files by their path in the folder, known or being computed from what was written;
                all other files are read back.
            written: Size and sha256 of files that are on the disk already, synced by those who wrote them.

        Score and best belong to this save: pass them again if a step is saved again.
        """
        with self._saving(step):
            folder = self.temporary(step)
            check_payload(payload)
            files, folders = listing(folder)
            content = {
                "step": step,
                "sequence": 1 + max((self._newest_elsewhere(), *(kept.sequence for kept in self._known()))),
                "score": float(score) if score is not None and math.isfinite(score) else None,
                "best": best,
                **payload,
                "files": self._seal(
                    folder, [file for file in files if file != folder / MANIFEST], digests or {}, written or {}
                ),
            }
            self.fs.write(folder / MANIFEST, encode(content))
            self.fs.sync(folder / MANIFEST)
            for inner in reversed(folders):
                self.fs.sync(inner)
            self.lock.check()
            self._publish(step)
        self._sound[step] = content["sequence"]
        self._present[step] = _facts(content)
        self._point_to(step, best)
        return self.path(step)

    def abandon(self, step: int) -> None:
        """Remove what was written since `begin(step)`, as far as the disk allows."""
        folder = self.temporary(step)
        with contextlib.suppress(OSError):
            if folder.exists():
                self.fs.remove(folder)

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Leave nothing of `step` behind after an error. After a kill, the next `begin` cleans up."""
        try:
            with self.reporting(step):
                yield
        except Exception:
            self.abandon(step)
            raise

    @contextlib.contextmanager
    def reporting(self, step: int) -> Iterator[None]:
        """Raise a CheckpointError that names the checkpoint of `step` for an error of the disk inside."""
        try:
            yield
        except Exception as error:
            if not is_disk_error(error):
                raise
            raise CheckpointError(
                f"Cannot save {str(self.path(step))!r}: {error}. Earlier checkpoints are untouched. "
                "Free some space or repair the disk; the next save tries again."
            ) from error

    def _seal(
        self, folder: Path, files: list[Path], known: Mapping[str, Future[str]], written: Mapping[str, FileEntry]
    ) -> dict[str, FileEntry]:
        """Sync all files and return their manifest entries; hashing runs while the disk writes."""
        named = {file.relative_to(folder).as_posix(): file for file in files}
        open_ones = {name: file for name, file in named.items() if name not in written}
        with hashing(file for name, file in open_ones.items() if name not in known) as digests:
            for file in open_ones.values():
                self.fs.sync(file)
            entries: dict[str, FileEntry] = {
                name: {
                    "size": file.stat().st_size,
                    "sha256": known[name].result() if name in known else next(digests),
                }
                for name, file in open_ones.items()
            }
        return {name: written.get(name) or entries[name] for name in sorted({*named, *written})}

    def _publish(self, step: int) -> None:
        """Give the finished folder its name; an existing checkpoint of that name is renamed first."""
        source, target = self.temporary(step), self.path(step)
        self._glances.pop(target.name, None)
        self._present.pop(step, None)
        if target.exists() and not (target / MANIFEST).exists():
            # Not ours, or ours without its manifest: we cannot know, so it is kept.
            self._set_aside(target, f"has no {MANIFEST}")
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

    def _point_to(self, step: int, best: bool) -> None:
        """Update the links after a commit. The checkpoint is safe by now, so a failure here is only a warning."""
        try:
            self._write_pointer("last", step)
            best_step = step if best else self._pointed("best", self._known())
            if best_step is not None:
                self._write_pointer("best", best_step)
            path, earlier = self.path(step), self._earlier_path(step)
            for old in (path.with_name(path.name + ".old"), *([] if earlier == path else [earlier])):
                if old.is_dir():
                    self._delete_folder(old)
        except OSError as error:
            logger.warning("%r is complete, but tidying up after it failed: %s.", str(self.path(step)), error)

    def _look_around(self) -> None:
        """Remove what a killed save left behind, and list the checkpoints, reading each only once."""
        listing = self._listing()
        if self._clear_leftovers(listing):
            listing = self._listing()
        known = self._present if self._present_under == self.lock.token else {}
        self._present, self._present_under = {}, self.lock.token if self.lock.is_held else ""
        for step, path in self._folders(listing).items():
            with contextlib.suppress(CheckpointError):
                self._present[step] = known[step] if step in known else self._glance(step, path)

    def _known(self) -> list[Kept]:
        """Return what `kept` does, without reading the disk again while the lock keeps others out."""
        if self.lock.is_held and self._present_under == self.lock.token:
            return _in_order(self._present.values())
        return self.kept()

    def _clear_leftovers(self, listing: Sequence[os.DirEntry[str]]) -> bool:
        """Undo or finish what a killed save or deletion had begun; leftovers that cannot be removed give a warning.

        Returns:
            Whether there were any leftovers.
        """
        left = [Path(entry.path) for entry in listing if _POINTER.fullmatch(entry.name) and not self.lock.is_wanting]
        for path in left:
            with contextlib.suppress(OSError):
                self.fs.remove(path)
        for suffix in (".deleting", ".old", ".tmp"):  # .deleting first: deleting an .old needs that name
            for step, path in self._entries(suffix, listing):
                if self.lock.is_wanting and path != self.temporary(step):
                    continue  # it may belong to another run, which no lock keeps out
                left.append(path)
                try:
                    if suffix == ".old" and not path.with_suffix("").exists():
                        self.fs.rename(path, path.with_suffix(""))
                    elif suffix == ".old":
                        self._delete_folder(path)
                    else:
                        self.fs.remove(path)
                except OSError as error:
                    logger.warning("Cannot clear %r, left by an interrupted save: %s.", str(path), error)
        return bool(left)

    # Finding

    def checkpoints(self) -> list[Path]:
        """Return the folders of all committed checkpoints, sorted by step. `verify` checks them for damage."""
        return [path for _, path in sorted(self.folders().items()) if (path / MANIFEST).is_file()]

    def kept(self) -> list[Kept]:
        """Return the facts about each complete checkpoint (files and sizes are right), in save order."""
        kept = []
        for step, path in self.folders().items():
            with contextlib.suppress(CheckpointError):
                kept.append(self._glance(step, path))
        return _in_order(kept)

    def verify(
        self,
        path: str | os.PathLike[str],
        hashes: bool = True,
        accept: Callable[[Path, dict[str, Any]], None] = _any,
        check: Check = check_hashes,
    ) -> dict[str, Any]:
        """Return the content of a checkpoint's omnitrain.json after checking every file against it.

        Args:
            path: The folder. Files that omnitrain.json does not list are ignored.
            hashes: Whether to read and hash all files, instead of only comparing sizes.
            accept: Raises a CheckpointError if this content of omnitrain.json cannot be used, even with right hashes.
            check: Hashes the files.

        Raises:
            CheckpointError: Something is missing or damaged; the message names it, and the newest complete one.
        """
        path = Path(path)
        try:
            content = inspect(path, hashes, check)
            accept(path, content)
            return content
        except CheckpointError as error:
            beside = Store(path.parent)
            others = [kept.step for kept in beside.kept() if beside.path(kept.step).name != path.name]
            advice = f"The newest complete one is {beside.path(others[-1]).name!r}." if others else "There is no other."
            raise CheckpointError(f"{error} {advice}") from error.__cause__

    def resolve(
        self,
        which: str | os.PathLike[str],
        accept: Callable[[Path, dict[str, Any]], None] = _any,
        check: Check = check_hashes,
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return a verified checkpoint's folder and the content of its omnitrain.json.

        Args:
            which: "last" (saved last), "best" (saved last as the best so far), a path, or "auto": the latest
                undamaged one; each one skipped is logged with the reason. Only "auto" can return None, if there is no
                checkpoint at all.
            accept: Raises a CheckpointError if this content of omnitrain.json cannot be used, even with right hashes.
            check: Hashes the files of a checkpoint.

        Raises:
            CheckpointError: The checkpoint is missing or damaged; for "auto": there are checkpoints, all damaged.
        """
        if which == "auto":
            return self._newest_verified(accept, check)
        folder = self.named(which) if isinstance(which, str) and which in ("last", "best") else self._given(Path(which))
        return folder, self.verify(folder, accept=accept, check=check)

    def newest_size(self) -> int | None:
        """Return the size in bytes of the checkpoint saved last: about what the next one will need."""
        kept = self.kept()
        if not kept:
            return None
        path = self.folders()[kept[-1].step]
        files = self._glances[path.name][2]
        return sum(entry["size"] for entry in files.values()) + (path / MANIFEST).stat().st_size

    def _listing(self) -> list[os.DirEntry[str]]:
        """Return the entries of the run folder, sorted by name; none if it does not exist."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as found:
            return sorted(found, key=lambda entry: entry.name)

    def _entries(self, suffix: str, listing: Sequence[os.DirEntry[str]]) -> list[tuple[int, Path]]:
        """Return step and path of our folders with this suffix; everything else in the run folder is ignored."""
        return [
            (int(match[1]), Path(entry.path))
            for match, entry in ((_NAME.fullmatch(entry.name), entry) for entry in listing)
            if match and (match[2] or "") == suffix and _is_folder(entry)
        ]

    def folders(self) -> dict[int, Path]:
        """Return the folder of each step, damaged or not; an .old one counts until its successor has the name."""
        return self._folders(self._listing())

    def _folders(self, listing: Sequence[os.DirEntry[str]]) -> dict[int, Path]:
        return dict(self._entries(".old", listing)) | dict(self._entries("", listing))

    def _folder_of(self, step: int) -> Path:
        """Return the folder of a step like `folders`, without a listing; it may not exist."""
        named = self.path(step), self._earlier_path(step)
        places = [path.with_name(path.name + suffix) for suffix in ("", ".old") for path in named]
        return next((path for path in places if path.is_dir()), named[0])

    def _glance(self, step: int, path: Path) -> Kept:
        """Check the sizes and return the facts about one checkpoint; an unchanged manifest is read only once."""
        try:
            stat = (path / MANIFEST).stat()
        except OSError:
            raise CheckpointError(f"{str(path)!r} is incomplete: {MANIFEST!r} is missing.") from None
        signature = (stat.st_ino, stat.st_mtime_ns)
        known = self._glances.get(path.name)
        if known is None or known[0] != signature:
            content = read_manifest(path)
            known = self._glances[path.name] = (signature, _facts(content), content["files"])
        if known[1].step != step:
            raise CheckpointError(f"{str(path)!r} was saved as step {known[1].step}, and renamed since.")
        check_sizes(path, known[2])
        return known[1]

    def _newest_verified(
        self, accept: Callable[[Path, dict[str, Any]], None], check: Check
    ) -> tuple[Path, dict[str, Any]] | None:
        folders, candidates, reasons = self.folders(), [], []
        for step, path in sorted(folders.items(), reverse=True):
            try:
                candidates.append(self._glance(step, path))
            except CheckpointError as error:
                reasons.append(str(error))
        for kept in reversed(_in_order(candidates)):
            path = folders[kept.step]
            try:
                content = inspect(path, hashes=True, check=check)
                accept(path, content)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                logger.warning("Passed over: %s Taking %r instead.", reason, path.name)
            return path, content
        if not reasons:
            return None
        raise CheckpointError(
            f"None of the checkpoints in {str(self.root)!r} can be used. " + " ".join(reasons) + " "
            "Repair them or move them away, or choose another `save_dir`, to start afresh."
        )

    def named(self, which: str) -> Path:
        """Return the folder to which "last" or "best" refers, damaged or not.

        Raises:
            CheckpointError: There is no such folder.
        """
        kept = self.kept()
        step = self._pointed(which, kept)
        if step is not None:
            return self._folder_of(step)
        if which == "best" and kept:
            raise CheckpointError(
                f"No checkpoint in {str(self.root)!r} was saved as the best. Pass 'last', or evaluate before saving."
            )
        raise CheckpointError(f"{str(self.root)!r} holds no complete checkpoint. Pass 'auto' to start afresh then.")

    def _given(self, path: Path) -> Path:
        if is_pointer(path):
            return Store(path.parent).named(path.name)
        here = [path, self.root / path]
        aside = [place.with_name(place.name + ".old") for place in here if _NAME.fullmatch(place.name)]
        found = next((place for place in here + aside if place.is_dir()), path)
        inside = Store(found).kept() if not (found / MANIFEST).exists() else []
        if inside:
            newest = str(Store(found).path(inside[-1].step))
            raise CheckpointError(f"{str(found)!r} is a run folder, not a checkpoint. Did you mean {newest!r}?")
        return found

    # Pointers

    def _pointed(self, which: str, kept: Sequence[Kept]) -> int | None:
        """Return the step to which `last` or `best` refers, given the complete checkpoints.

        A process may be killed between a commit and its pointers, so the manifests decide. But a pointer to a damaged
        or missing checkpoint is followed, so that an older one is never used silently.
        """
        named = self._read_pointer(which)
        if named is not None and named not in {found.step for found in kept}:
            return named
        steps = [found.step for found in kept if which == "last" or found.best]
        return steps[-1] if steps else named

    def _read_pointer(self, which: str) -> int | None:
        """Return the step of the folder that a pointer names; one that leads out of the run folder is not ours."""
        path = self.root / which
        try:
            if path.is_symlink():
                name = os.readlink(path)
            else:
                with open_regular(path) as file:
                    name = file.read(_LONGEST_NAME).decode().strip()
        except (OSError, ValueError):
            return None
        match = _NAME.fullmatch(name)
        return int(match[1]) if match and not match[2] else None

    def _write_pointer(self, which: str, step: int) -> None:
        if self._read_pointer(which) == step:
            return
        temporary = self.root / f"{which}.{self.lock.token}.tmp"
        if temporary.is_symlink() or temporary.exists():
            self.fs.remove(temporary)
        name = self._folder_of(step).name.removesuffix(".old")
        try:
            self.fs.link(temporary, name)
        except (OSError, NotImplementedError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                raise
            # a file system without links, or a user without the right to create them
            self.fs.write(temporary, f"{name}\n".encode())
            self.fs.sync(temporary)
        if (self.root / which).is_dir() and not (self.root / which).is_symlink():
            self._set_aside(self.root / which, "is a copy of a checkpoint")
        self.fs.rename(temporary, self.root / which)
        self.fs.sync(self.root)

    def _set_aside(self, path: Path, why: str) -> None:
        names = (path.with_name(f"{path.name}.aside-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self.fs.rename(path, aside)
        logger.warning("%r %s, so it was renamed to %r.", str(path), why, aside.name)

    # Retention

    def prune(
        self,
        keep_last: int | None,
        keep_best: int = 1,
        keep_every: int | None = None,
        direction: Literal["max", "min"] = "max",
    ) -> list[Path]:
        """Delete the complete checkpoints named by `to_delete`; damaged and foreign folders stay.

        A folder that cannot be deleted stays, with a warning, and is tried again the next time. Nothing is deleted
        unless at least one of the checkpoints that stay is verified.
        """
        self.lock.check()
        pointed = (self._read_pointer("last"), self._read_pointer("best"))
        kept = self._known()
        doomed = [s for s in to_delete(kept, keep_last, keep_best, keep_every, direction) if s not in pointed]
        if doomed and not self._has_sound([found for found in kept if found.step not in doomed]):
            logger.warning("No checkpoint in %r would be left that verifies: none is deleted.", str(self.root))
            return []
        deleted = []
        for step in doomed:
            try:
                self.delete(step)
                deleted.append(self.path(step))
            except OSError as error:
                logger.warning("Cannot delete %r: %s.", str(self.path(step)), error)
        return deleted

    def _has_sound(self, kept: Sequence[Kept]) -> bool:
        """Return whether one of these verifies, the newest first; those saved here were hashed when written."""
        for found in reversed(kept):
            is_hashed = self._sound.get(found.step) == found.sequence
            with contextlib.suppress(CheckpointError):
                inspect(self._folder_of(found.step), hashes=not is_hashed)
                self._sound[found.step] = found.sequence
                return True
        return False

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`; if killed meanwhile, nothing is left that looks like a checkpoint."""
        self.lock.check()
        self._present.pop(step, None)
        self._delete_folder(self._folder_of(step))

    def _delete_folder(self, path: Path) -> None:
        self._glances.pop(path.name, None)
        doomed = path.with_name(path.name.removesuffix(".old") + ".deleting")
        if doomed.exists():
            self.fs.remove(doomed)
        self.fs.rename(path, doomed)
        self.fs.remove(doomed)
