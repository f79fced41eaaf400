"""File systems that fail at one of their operations."""

import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from resuming import Killed

from omnitrain.core.files import FileEntry, FileSystem

Fault = Callable[["FaultyDisk"], None]


class FaultyDisk(FileSystem):
    """Records its operations in a folder, and calls a fault in one of them; a file is half written by then."""

    def __init__(self, root: Path, at: int | None = None, fault: Fault | None = None) -> None:
        self.root, self.at, self.fault, self.has_ended = root, at, fault, False
        self.operations: list[tuple[str, Path]] = []
        self.unsynced: set[int] = set()

    def _begin(self, kind: str, path: Path, half: bytes | None = None) -> None:
        if self.has_ended:
            raise Killed
        if half is not None:
            path.write_bytes(half)
        self.operations.append((kind, path))
        if self.fault is not None and len(self.operations) - 1 == self.at:
            self.fault(self)

    def empty_unsynced(self) -> None:
        """Empty the files that were not synced, wherever they have been moved to, as if the power were cut."""
        for file in self.root.rglob("*"):
            if file.is_file() and file.stat().st_ino in self.unsynced:
                file.write_bytes(b"")

    def mkdir(self, path: Path) -> None:
        self._begin("mkdir", path)
        super().mkdir(path)

    def write(self, path: Path, content: bytes | Iterable[bytes | memoryview]) -> FileEntry:
        self._begin("write", path, b"half of a file")

        def pieces() -> Iterator[bytes | memoryview]:
            self.unsynced.add(path.stat().st_ino)
            yield from [content] if isinstance(content, bytes) else content

        return super().write(path, pieces())

    def link(self, path: Path, name: str) -> None:
        self._begin("link", path)
        super().link(path, name)

    def sync(self, path: Path) -> None:
        self._begin("sync", path)
        self.unsynced.discard(path.stat().st_ino)

    def rename(self, source: Path, target: Path) -> None:
        self._begin("rename", source)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove file by file, so that a fault can leave a part of a folder."""
        for inner in sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else ():
            self.remove(inner)
        self._begin("remove", path)
        self.unsynced.discard(path.lstat().st_ino)
        super().remove(path)


def end_process(disk: FaultyDisk) -> None:
    """Stop here: this and later operations do not happen."""
    disk.has_ended = True
    raise Killed


def cut_power(disk: FaultyDisk) -> None:
    disk.empty_unsynced()
    end_process(disk)


def fail_once(disk: FaultyDisk) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
