"""File operations of run folders, whose content is not trusted.

A file in an archive, on a shared disk or a remote store can be a link to any other file of the user, or a pipe. All
files of a run folder are opened here, so that nothing is written through a link, and opening never waits. Checkpoints
change the disk only through a `FileSystem`, so that a test can stop a save at any operation. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import operator
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypedDict

from omnitrain.core.errors import CheckpointError, ConfigError
from omnitrain.core.paths import folder_path

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_MIN_THREADED_BYTES = 1 << 24  # starting threads costs about a millisecond
_SMALL = 1 << 18  # bytes that are hashed faster than a thread is notified
_WRITEBACK_BYTES = 1 << 25
# The order of the entries of a folder.
BY_NAME = operator.attrgetter("name")


def is_inside(name: str) -> bool:
    """Return whether a relative path with slashes stays in the folder that it is joined to, on every system.

    >>> is_inside("checkpoint-8/model.safetensors"), is_inside("../.bashrc"), is_inside("/etc/passwd")
    (True, False, False)
    """
    path = PurePosixPath(name)
    if path.as_posix() != name or name == "." or path.is_absolute() or ".." in path.parts:
        return False
    return set(name).isdisjoint("\\\0:" if os.name == "nt" else "\\\0")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a parsed JSON object; a key that is in it twice is an error, as the last one would win silently."""
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("the same key twice in an object")
    return parsed


def check_not_link(path: Path) -> None:
    """Reject a path that exists and is neither a file nor a device such as /dev/full.

    Raises:
        OSError: It is a link, a folder or a pipe.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, f"It is a link to {os.readlink(path)!r}: delete it", str(path))
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise OSError(errno.EINVAL, "It is not a file: delete it", str(path))


def create_folder(path: Path) -> None:
    """Create a folder in the folder of a run, if it does not exist.

    Raises:
        OSError: It is a link, through which a run would write elsewhere, or it cannot be made.
    """
    if path.is_symlink():
        check_not_link(path)
    path.mkdir(parents=True, exist_ok=True)


def open_file(path: str | Path, flags: int) -> int:
    """Return a descriptor as `os.open` does, but follow no link and wait for no pipe: an `opener` for `open`.

    Raises:
        OSError: It is a link, or no file, or cannot be opened.
    """
    check_not_link(Path(path))  # for the message, and for systems without O_NOFOLLOW
    return os.open(path, flags | _FLAGS, 0o666)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe could block forever, and a device may do anything.

    Raises:
        OSError: If it is missing, cannot be read, or is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("the path is not a regular file")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # replaced in the meantime
        os.close(descriptor)
        raise OSError("the path is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def open_to_append(path: Path) -> io.FileIO:
    """Open a file, created if needed, to append to it without a buffer: a killed process loses nothing."""
    return open(path, "ab", buffering=0, opener=open_file)


def create_file(path: Path) -> BinaryIO:
    """Open a new file for writing, after deleting a file or link of its name.

    Raises:
        OSError: A folder has its name, or another process has created it.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")  # which follows no link


def replace_file(path: Path, content: bytes | Iterable[bytes | memoryview], sync: bool = True) -> None:
    """Write a file and replace an existing one atomically; the target of a link stays unchanged.

    Args:
        path: The file.
        content: Its bytes, or its lines, which may be read from the old file.
        sync: Whether to flush it to the disk, so that a power cut leaves either the old file or the new one.

    Raises:
        OSError: It cannot be written. The old file stays.
    """
    new = path.with_name(f"{path.name}.tmp")
    try:
        with create_file(new) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


# --- checkpoints


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
