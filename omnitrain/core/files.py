"""Safe reading and writing in folders whose content is not trusted.

A file in an archive, on a shared disk or a remote store can be a link to any other file of the user, or a pipe. All
files of a run folder are opened here, so that nothing is written through a link, and opening never waits. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


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

    Args:
        path: The file.
        flags: As for `os.open`.

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
