"""File operations of checkpoints.

Every change of the disk goes through here, so that a test can stop a save at any operation by another `FileSystem`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import operator
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from omnitrain.core.errors import CheckpointError, ConfigError
from omnitrain.core.files import create_file, open_regular
from omnitrain.core.paths import folder_path

_MIN_THREADED_BYTES = 1 << 24  # starting threads costs about a millisecond
_SMALL = 1 << 18  # bytes that are hashed faster than a thread is notified
_WRITEBACK_BYTES = 1 << 25
# The order of the entries of a folder.
BY_NAME = operator.attrgetter("name")


class FileEntry(TypedDict):
    """The entry in omnitrain.json for one other file of the checkpoint."""

    size: int
    sha256: str


class FileSystem:
    """The operations that change a disk, one method each.

    >>> import tempfile
    >>> fs, folder = FileSystem(), Path(tempfile.mkdtemp())
    >>> fs.write(folder / "a.tmp", b"text")["size"]
    4
    >>> fs.rename(folder / "a.tmp", folder / "a")
    >>> fs.remove(folder)
    >>> folder.exists()
    False
    """

    def mkdir(self, path: Path) -> None:
        """Create a folder, which must not exist, in an existing one."""
        path.mkdir()

    def write(self, path: Path, content: bytes | Iterable[bytes | memoryview]) -> FileEntry:
        """Write a file, wait until it is on the disk, and return its size and sha256.

        Another thread hashes each piece of it while that is written and the next one is made.
        """
        hasher, size, started = hashlib.sha256(), 0, 0
        with create_file(path) as file, ThreadPoolExecutor(1, thread_name_prefix="omnitrain-hash") as pool:
            hashing: Future[None] | None = None
            for piece in [content] if isinstance(content, bytes) else content:
                if hashing is not None:
                    hashing.result()
                hashing = None
                if len(piece) >= _SMALL:
                    with contextlib.suppress(RuntimeError):  # at interpreter exit, where an asynchronous save may end
                        hashing = pool.submit(hasher.update, piece)
                if hashing is None:
                    hasher.update(piece)
                size += file.write(piece)
                # by itself Linux starts the disk when a sync asks for it, or when a tenth of the memory is waiting
                if size - started >= _WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
                    with contextlib.suppress(OSError):  # only a hint: the sync reports errors of the disk
                        os.posix_fadvise(file.fileno(), started, size - started, os.POSIX_FADV_DONTNEED)
                    started = size
        self.sync(path)
        return {"size": size, "sha256": hasher.hexdigest()}

    def link(self, path: Path, name: str) -> None:
        """Create a link to `name` in the same folder; some file systems have no links."""
        path.symlink_to(name)

    def sync(self, path: Path) -> None:
        """Wait until the content of this file, or the list of names in this folder, is on the disk."""
        is_folder = path.is_dir()
        if is_folder and os.name == "nt":
            return
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # some network file systems cannot sync a folder, and nothing else makes its names durable
            if not (is_folder and error.errno in (errno.EINVAL, errno.ENOTSUP)):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or a folder atomically; a file replaces an existing one of that name."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with everything in it; a link is removed, but not its target."""
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)


def check_free_space(root: str | os.PathLike[str], needed_bytes: int) -> str | None:
    """Return a warning if the disk under `root` (which need not exist yet) has less than `needed_bytes` free."""
    root = Path(root)
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free >= needed_bytes:
        return None
    return (
        f"{str(root)!r} has {free / 1e9:.2f} GB free, and the next checkpoint needs about {needed_bytes / 1e9:.2f} GB "
        "(old ones are deleted only after a new one is complete). Free some space, or choose another `save_dir`."
    )


def check_writable(root: Path) -> None:
    """Reject a run folder (which need not exist yet) that is not writable, without writing anything.

    Raises:
        ConfigError: If it, or the folder in which it would be created, is read-only or a file.
    """
    root = folder_path(root, "save_dir")  # a file may have been created there since the first check
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"`save_dir={str(root)!r}`: {str(existing)!r} is not writable. Change its permissions, or pass another "
            "folder."
        )


def list_tree(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files under a folder, and the folder itself with all inner ones, parents first."""
    files, folders = [], [folder]
    for inner in folders:  # grows in the loop
        with os.scandir(inner) as iterator:
            entries = sorted(iterator, key=BY_NAME)
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_file(follow_symlinks=False):
                files.append(path)
            else:
                raise CheckpointError(
                    f"{str(path)!r} is not a regular file, so the checkpoint could not be moved. Copy the file."
                )
    return sorted(files), folders


def read_or_none(path: Path) -> bytes | None:
    """Return the content of a file, or None if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


@contextlib.contextmanager
def hashing(sizes: Mapping[Path, int]) -> Iterator[Iterator[str]]:
    """Yield the digests of files, given with their sizes, in order; large ones are hashed in threads.

    hashlib releases the GIL.
    """
    files = list(sizes)
    if sum(sizes.values()) < _MIN_THREADED_BYTES:
        yield map(_digest, files)
        return
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    try:
        try:
            digests = pool.map(_digest, files)
        except RuntimeError:  # at interpreter exit no threads can start: an asynchronous save ends here
            digests = map(_digest, files)
        yield digests
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
