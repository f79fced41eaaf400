"""Remote stores by fsspec: what lies under an address such as s3://bucket/run, and bringing it to this machine.

::

    <address>/checkpoint-120/...            as in a run folder; omnitrain.json is uploaded last
    <address>/last, <address>/best          text files that name a folder; uploaded after it is complete
    <address>/metrics.jsonl, run.json, ...  the files of the run
    <address>/run.lock                      names the run that writes here at present

`upload.py` has the thread that brings a run there, `mirror.py` the run folder that is kept in both places. No torch.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omnitrain.checkpoint.disk import FileSystem, listing
from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.manifest import LARGEST_MANIFEST, MANIFEST, FileEntry, inspect, parse_manifest
from omnitrain.checkpoint.retention import Kept
from omnitrain.core.errors import CheckpointError, ConfigError, MissingExtraError, OmnitrainError
from omnitrain.core.files import create_file, is_inside, open_file
from omnitrain.core.paths import local_folder
from omnitrain.core.secrets import mask_text

logger: logging.Logger = logging.getLogger("omnitrain")

S = TypeVar("S")
T = TypeVar("T")

WORKERS = 4
"""Files that are sent at the same time, or pieces that are fetched."""
PIECE = 1 << 25
"""Bytes that are fetched with one request."""
SMALL = 1 << 20
"""Files up to so many bytes are read back where the store tells no checksum."""

MOST_OBJECTS = 1_000_000
"""Files under an address, above which it is no run folder."""
LISTING_S = 300.0
"""Seconds after which a listing counts as endless; a million files take about a third of it."""
LARGEST_HEAD = 8 + 100_000_000
"""The most bytes of a safetensors file before its tensors, by the limit of that package."""

_PART = 50 << 20
"""The bytes of a part in s3fs' uploads in parts, on which the checksum of the whole depends."""
_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]*|0[0-9]{5})(\.old)?")
_WITH_FOLDERS = {"sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "arrow_hdfs", "dropbox", "box"}
"""Stores that need a folder to be made before a file is written; in the others names have slashes, and no more."""
_OF_HERE = {"file", "local", "http", "https", "data"}


def check_address(address: str, name: str) -> None:
    """Refuse an address that no installed package of fsspec can write to, without connecting to anything.

    Args:
        address: The address.
        name: The argument that has it.

    Raises:
        ConfigError: The kind of store is unknown, or is none.
        MissingExtraError: fsspec, or the package for this kind of store, is not installed.
    """
    shown, protocol = f"`{name}={mask_text(address)!r}`", address.partition("://")[0].lower()
    try:
        import fsspec
        from fsspec.registry import known_implementations
    except ImportError:
        raise MissingExtraError(shown, "fsspec", "remote") from None
    if protocol in _OF_HERE:
        remedy = "Pass the path of a folder" if protocol in ("file", "local") else "Nothing can be written there"
        raise ConfigError(f"{shown}: {protocol!r} is no store for a run. {remedy}.")
    if not address.partition("://")[2].strip("/"):
        raise ConfigError(f"{shown} names no folder. Pass one, such as '{protocol}://bucket/run'.")
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        known: Any = known_implementations.get(protocol, {})
        package = known.get("class", "fsspec").partition(".")[0]
        if package == "fsspec":  # it is there, and what its file system needs is not
            raise ConfigError(f"{shown}: {known.get('err') or error}. Install that, or pass another place.") from error
        raise MissingExtraError(shown, package) from error
    except ValueError as error:
        raise ConfigError(
            f"{shown}: fsspec knows no file system {protocol!r}. Pass an address such as 's3://bucket/run', "
            "'gs://bucket/run' or 'hf://datasets/name/run', or a local path."
        ) from error


def in_parallel(work: Callable[[T], S], items: Iterable[T], workers: int) -> list[S]:
    """Return the results of `work` on each item, which daemon threads do: no exit waits for a store that hangs.

    Raises:
        Exception: The first error, once the other threads have ended what they were doing.
    """
    left, found, errors = deque(enumerate(items)), dict[int, S](), list[BaseException]()

    def run() -> None:
        while not errors:
            try:
                number, item = left.popleft()
            except IndexError:
                return
            try:
                found[number] = work(item)
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=run, name="omnitrain-store", daemon=True) for _ in range(min(workers, len(left)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        left.clear()
    if errors:
        raise errors[0]
    return [found[number] for number in sorted(found)]


@contextlib.contextmanager
def reaching(place: Place, doing: str) -> Iterator[None]:
    """Turn whatever a store raises inside into a CheckpointError.

    Args:
        place: The store.
        doing: What is done, as in "cannot be ...".
    """
    try:
        yield
    except OmnitrainError:
        raise
    except Exception as error:  # each package has its own errors
        raise CheckpointError(
            f"{place.name!r} cannot be {doing}: {worded(error)}. Check the address, the credentials and the connection."
        ) from error


def worded(error: BaseException) -> str:
    """Return an error in a line, without secrets."""
    return mask_text(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}").rstrip(".")


@dataclass(slots=True)
class Copy:
    """A complete checkpoint on a store.

    Attributes:
        name: Its folder.
        kept: The facts for retention.
        data: Its omnitrain.json.
        files: Size and sha256 of every other file.
        best: Whether it was the best so far when it was saved.
    """

    name: str
    kept: Kept
    data: bytes
    files: dict[str, FileEntry]

    @classmethod
    def of(cls, name: str, data: bytes, where: str) -> Copy:
        """Return it from the text of its omnitrain.json.

        Raises:
            CheckpointError: The text is damaged.
        """
        content = parse_manifest(data, where)
        facts = (content["step"], content["score"], content["sequence"], content["best"])
        return cls(name, Kept(*facts, bool(content.get("for_best"))), data, content["files"])

    @property
    def order(self) -> tuple[int, int]:
        """The place in the order of saves."""
        return self.kept.sequence, self.kept.step

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return len(self.data) + sum(entry["size"] for entry in self.files.values())


class Place:
    """A folder of a remote store, with the operations that a run needs of it.

    What the store's package raises is raised as it is: see `reaching`.

    Args:
        address: The address of the folder, such as s3://bucket/run.
    """

    def __init__(self, address: str) -> None:
        self.address: str = address.rstrip("/")
        self.name: str = mask_text(self.address)
        self.protocol: str = address.partition("://")[0].lower()
        self._trusts_checksums = True
        self._incomplete: dict[str, CheckpointError] = {}
        """What the latest `copies` has found incomplete, by folder."""

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
        return fs, root.rstrip("/")

    @property
    def fs(self) -> Any:
        """Fsspec's file system."""
        return self._opened[0]

    def path(self, key: str) -> str:
        """Return the path of a file in the file system."""
        return f"{self._opened[1]}/{key}" if key else self._opened[1]

    @property
    def has_history(self) -> bool:
        """Whether each write is a commit of a repository, so that signs of life would fill it."""
        return self.protocol == "hf"

    def check_writable(self) -> None:
        """Write and delete a small file.

        Raises:
            ConfigError: That does not succeed; the message has the reason.
        """
        if self.has_history:
            return
        key = f"omnitrain-{os.urandom(4).hex()}.probe"
        try:
            self.write(key, b"A run checks that it can write here.\n")
            self.remove(key)
        except Exception as error:  # each package has its own errors
            raise ConfigError(
                f"`save_dir={self.name!r}`: nothing can be written there, or deleted: {worded(error)}. Check the "
                "address, the credentials and the rights, or pass another place."
            ) from error

    # --- reading

    def list(self, under: str = "") -> dict[str, dict[str, Any]]:
        """Return what the store tells of each file under a folder, by its path in it.

        Raises:
            CheckpointError: A name leads out of the folder, or there are too many.
        """
        found = self._find(under)
        start = len(self.fs._strip_protocol(self.path(under)).strip("/")) + 1
        files = {
            name.strip("/")[start:]: info for name, info in found.items()
            if info.get("type") != "directory" and len(name.strip("/")) > start
        }  # fmt: skip
        for key in files:
            if not is_inside(key):
                raise CheckpointError(
                    f"{self.name!r} has the file {key!r}, whose name leads out of its folder: somebody may want to "
                    "overwrite files here. Delete it there, and find out who wrote it."
                )
        return files

    def _find(self, under: str) -> dict[str, dict[str, Any]]:
        """Return what the store lists, in a thread that is left behind if that never ends."""
        found: list[dict[str, dict[str, Any]]] = []
        errors: list[BaseException] = []

        def find() -> None:
            try:
                found.append(self.fs.find(self.path(under), detail=True))
            except FileNotFoundError:
                found.append({})
            except BaseException as error:
                errors.append(error)

        self.fs.invalidate_cache()
        thread = threading.Thread(target=find, name="omnitrain-listing", daemon=True)
        thread.start()
        thread.join(LISTING_S)
        if errors:
            raise errors[0]
        if not found:
            raise CheckpointError(
                f"{self.name!r} was still being listed after {LISTING_S:.0f} s. Expected a run folder, which has few "
                "files: check the address, and the store."
            )
        if len(found[0]) > MOST_OBJECTS:
            raise CheckpointError(
                f"{self.name!r} has {len(found[0]):,} files, more than the {MOST_OBJECTS:,} of any run folder. Check "
                "the address."
            )
        return found[0]

    def size_of(self, key: str, info: Mapping[str, Any]) -> int:
        """Return the bytes of a file, of which the store has told `info`.

        Raises:
            CheckpointError: It has told no number of bytes.
        """
        size = info.get("size")
        if not isinstance(size, int) or size < 0:
            raise CheckpointError(
                f"{self.name!r}: the store gives {size!r} as the size of {key!r}, and a number of bytes is expected. "
                "Write the file again, or delete it there."
            )
        return size

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file, or the bytes [start, end) of it."""
        return self.fs.cat_file(self.path(key), start=start, end=end)

    def read_if_there(self, key: str, info: Mapping[str, Any] | None = None, most: int = SMALL) -> bytes | None:
        """Return a small file, or None if there is none.

        Args:
            key: Its path.
            info: What the store has told of it; None asks.
            most: How many bytes it may have.

        Raises:
            CheckpointError: It has more.
        """
        try:
            size = (self.fs.info(self.path(key)) if info is None else info).get("size")
            if not isinstance(size, int) or size <= most:
                data = self.read(key)
                size = len(data)
                if size <= most:
                    return data
        except FileNotFoundError:
            return None
        raise CheckpointError(
            f"{self.name!r}: {key!r} has {size} bytes, and more than {most} are not read. Delete it there, and find "
            "out who wrote it."
        )

    def copies(self, found: Mapping[str, Mapping[str, Any]] | None = None) -> dict[int, Copy]:
        """Return the complete checkpoints by step: all files of their omnitrain.json are there, with their sizes.

        Args:
            found: What `list` has returned; None lists.
        """
        folders: dict[str, dict[str, Mapping[str, Any]]] = {}
        for path, info in (self.list() if found is None else found).items():
            name, _, file = path.partition("/")
            if _FOLDER.fullmatch(name) and file:
                folders.setdefault(name, {})[file] = info
        names = [name for name, files in folders.items() if MANIFEST in files]

        def read_manifest(name: str) -> tuple[str, bytes | CheckpointError | None]:
            try:
                return name, self.read_if_there(f"{name}/{MANIFEST}", folders[name][MANIFEST], LARGEST_MANIFEST)
            except CheckpointError as error:
                return name, error

        read = in_parallel(read_manifest, names, 4 * WORKERS)
        complete: dict[int, Copy] = {}
        self._incomplete = {}
        for name, data in sorted(read, key=lambda pair: not pair[0].endswith(".old")):
            try:
                if isinstance(data, CheckpointError):
                    raise data
                copy = self._copy_of(name, data, folders[name])
            except CheckpointError as error:
                logger.warning("Not used: %s", error)
                self._incomplete[name] = error
            else:
                complete[copy.kept.step] = copy
        return complete

    def check_named(self, which: str, copies: Mapping[int, Copy], here: int = -1) -> None:
        """Refuse to take an older checkpoint in silence for the one that `last` or `best` names.

        Args:
            which: "last" or "best".
            copies: What `copies` has returned, and what was uploaded since.
            here: The step of what was found on this machine.

        Raises:
            CheckpointError: The one that it names is incomplete.
        """
        name = (self.read_if_there(which) or b"").decode(errors="replace").strip()
        error, known = self._incomplete.get(name), _FOLDER.fullmatch(name)
        if error is None or known is None or int(known[1]) in copies or int(known[1]) <= here:
            return
        newest = max(copies.values(), key=lambda copy: copy.order, default=None)
        more = "" if newest is None else f" The newest complete one is {newest.name!r}: name it, or resume from 'auto'."
        raise CheckpointError(f"{error}{more}") from error

    def obstacles(self, found: Mapping[str, Any]) -> list[str]:
        """Return the files, among what `list` has returned, that have the name of a checkpoint's folder."""
        return [key for key in found if _FOLDER.fullmatch(key)]

    def leftovers(self, found: Mapping[str, Any]) -> set[str]:
        """Return the folders, among what `list` has returned, that a killed upload or deletion has left."""
        names = {path.partition("/")[0] for path in found if "/" in path}
        whole = {name for name in names if f"{name}/{MANIFEST}" in found}
        left = {name for name in names - whole if _FOLDER.fullmatch(name)}
        return left | {name for name in whole if name.endswith(".old") and name.removesuffix(".old") in whole}

    def _copy_of(self, name: str, data: bytes | None, files: Mapping[str, Mapping[str, Any]]) -> Copy:
        where = f"{self.name}/{name}"
        if data is None:
            raise CheckpointError(f"{where!r} is incomplete: {MANIFEST!r} is missing.")
        copy = Copy.of(name, data, repr(where))
        for file, entry in copy.files.items():
            if file not in files:
                raise CheckpointError(f"{where!r} is incomplete: {file!r} is missing.")
            if files[file].get("size") not in (None, entry["size"]):
                raise CheckpointError(
                    f"{where!r} is incomplete: {file!r} has {files[file]['size']} bytes, and {entry['size']} were "
                    "written."
                )
        if copy.kept.step != int(_FOLDER.fullmatch(name)[1]):  # type: ignore[index]
            raise CheckpointError(f"{where!r} was saved as step {copy.kept.step}, and renamed since.")
        return copy

    # --- writing

    def write(self, key: str, data: bytes) -> None:
        """Write a small file."""
        self._make_parent(key)
        self.fs.pipe_file(self.path(key), data)

    def put(self, file: Path, key: str, moved: Callable[[], None] = lambda: None) -> None:
        """Upload a file.

        Args:
            file: The file on this machine.
            key: Its path in this folder.
            moved: Called for each part that is there.
        """
        from fsspec.callbacks import Callback

        class Moving(Callback):
            def relative_update(self, inc: int = 1) -> None:
                moved()

        self._make_parent(key)
        self.fs.put_file(str(file), self.path(key), callback=Moving())

    def _make_parent(self, key: str) -> None:
        if self.protocol in _WITH_FOLDERS:  # elsewhere it would make a bucket of a misspelled name
            self.fs.makedirs(self.path(key).rpartition("/")[0], exist_ok=True)

    def remove(self, key: str) -> None:
        """Delete a file; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(key))

    def remove_folder(self, name: str) -> None:
        """Delete a checkpoint; its omnitrain.json first, without which it is none."""
        self.remove(f"{name}/{MANIFEST}")
        rest = [key for key in self.list(name) if key != MANIFEST]
        in_parallel(lambda key: self.remove(f"{name}/{key}"), rest, WORKERS)
        if self.protocol in _WITH_FOLDERS:
            with contextlib.suppress(Exception):
                self.fs.rm(self.path(name), recursive=True)

    def duplicate(self, copy: Copy, name: str) -> None:
        """Copy a checkpoint inside of the store, its omnitrain.json last."""
        for file in (*copy.files, MANIFEST):
            self._make_parent(f"{name}/{file}")
            self.fs.cp_file(self.path(f"{copy.name}/{file}"), self.path(f"{name}/{file}"))

    def check(self, key: str, file: Path, entry: FileEntry) -> None:
        """Make sure that the store has a file as it is here: by size, and by checksum or by reading it back.

        Raises:
            OSError: It has not.
        """
        info = self.fs.info(self.path(key))
        if info.get("size") != entry["size"]:
            raise OSError(f"{key!r} has {info.get('size')} bytes there after its upload, and {entry['size']} here")
        is_same = self.has_same(info, file, entry)
        if is_same or (is_same is None and entry["size"] > SMALL):
            return
        if _digest_of_pieces(self, key, entry["size"]) != entry["sha256"]:
            raise OSError(f"the content of {key!r} differs from what was uploaded")
        if is_same is False:  # encrypted with a key of its own, for instance
            logger.debug("%s tells checksums that are not of the content: they are not used.", self.name)
            self._trusts_checksums = False

    def has_same(self, info: Mapping[str, Any], file: Path, entry: FileEntry) -> bool | None:
        """Return whether a file there is the one here, by the checksum that the store tells; None if it tells none."""
        if info.get("size") != entry["size"]:
            return False
        large = info.get("lfs")
        if large and getattr(large, "sha256", None):
            return large.sha256 == entry["sha256"]
        if not self._trusts_checksums:
            return None
        tag = str(info.get("ETag", "")).strip('"')
        if info.get("md5Hash"):
            tag = base64.b64decode(info["md5Hash"]).hex()
        if re.fullmatch("[0-9a-f]{32}", tag):
            return _md5(file) == tag
        parts = re.fullmatch("[0-9a-f]{32}-([0-9]+)", tag)
        if parts and int(parts[1]) == -(-entry["size"] // _PART):
            return _md5_of_parts(file) == tag
        return None


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    with open(file, "rb") as opened:
        while piece := opened.read(size):
            yield piece


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in _pieces(file, 1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _md5_of_parts(file: Path) -> str:
    digests = [hashlib.md5(piece, usedforsecurity=False).digest() for piece in _pieces(file, _PART)]
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def _digest_of_pieces(place: Place, key: str, size: int) -> str:
    digest = hashlib.sha256()
    for start in range(0, size, PIECE):
        digest.update(place.read(key, start, min(start + PIECE, size)))
    return digest.hexdigest()


# --- to this machine


def fetch(place: Place, copy: Copy, folder: Path, temporary: Path, fs: FileSystem | None = None) -> Path:
    """Download a checkpoint, check it against its omnitrain.json, and give it its name when it is whole.

    Args:
        place: Where it is.
        copy: The checkpoint.
        folder: Its folder here, which must not exist.
        temporary: The folder for the meantime, in the same place.
        fs: The operations on the disk here.

    Raises:
        CheckpointError: It cannot be read, or is damaged; nothing is left here.
    """
    fs = fs or FileSystem()
    logger.info("Downloading %s/%s (%s).", place.name, copy.name, in_bytes(copy.size))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with reaching(place, "read"):
            temporary.mkdir(parents=True)
            sizes = {f"{copy.name}/{file}": entry["size"] for file, entry in copy.files.items()}
            download_files(place, sizes, temporary, len(copy.name) + 1)
        fs.write(temporary / MANIFEST, copy.data)
        inspect(temporary, hashes=True)
        files, folders = listing(temporary)
        for path in (*files, *reversed(folders)):
            fs.sync(path)
        fs.rename(temporary, folder)
        fs.sync(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointError) and str(temporary) in str(error):
            raise CheckpointError(str(error).replace(str(temporary), f"{place.name}/{copy.name}")) from error
        raise
    return folder


def download_files(place: Place, sizes: Mapping[str, int], into: Path, prefix: int) -> None:
    """Write files by pieces, several at a time.

    Args:
        place: Where they are.
        sizes: Their bytes by their path there.
        into: A folder here.
        prefix: How much of the paths to leave out here.

    Raises:
        CheckpointError: They do not fit on the disk.
    """
    total, free = sum(sizes.values()), shutil.disk_usage(into).free
    if total > free:
        raise CheckpointError(
            f"{place.name!r} has {in_bytes(total)} to download, and {str(into)!r} has room for {in_bytes(free)}. Make "
            "room, or set OMNITRAIN_LOCAL_DIR to a larger disk."
        )

    def piece(which: tuple[str, int]) -> None:
        key, start = which
        end = min(start + PIECE, sizes[key])
        data = place.read(key, start, end) if end > start else b""
        if len(data) != end - start:
            raise OSError(f"{key!r}: {len(data)} bytes came of the {end - start} from {start} on")
        with open(into / key[prefix:], "r+b", opener=open_file) as file:
            file.seek(start)
            file.write(data)

    for key, size in sizes.items():
        path = into / key[prefix:]
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_file(path) as file:
            file.truncate(size)
    in_parallel(piece, [(key, start) for key, size in sizes.items() for start in range(0, size, PIECE)], 2 * WORKERS)


def local_copy(address: str, name: str = "path") -> Path:
    """Download what an address names, unless it is here already, and return its path here.

    Args:
        address: A checkpoint, `last` or `best` of a run, or a file or folder of weights of any program.
        name: The argument that has it.

    Raises:
        ConfigError, MissingExtraError: It is no address that can be read.
        CheckpointError: There is nothing, or it is damaged.
    """
    check_address(address, name)
    parent, _, last = address.rstrip("/").rpartition("/")
    place = Place(address)
    downloads = local_folder(parent).with_name(local_folder(parent).name + "-downloads")
    if last in ("last", "best") or _FOLDER.fullmatch(last):
        run = Place(parent)
        with reaching(run, "read"):
            found = (
                run.list() if last in ("last", "best") else {f"{last}/{key}": i for key, i in run.list(last).items()}
            )
            copies = run.copies(found)
        if copies or last.startswith("checkpoint"):
            copy = chosen(run, copies, last)
            return kept_or_fetched(run, copy, downloads)
    with reaching(place, "read"):
        if place.fs.isfile(place.path("")):
            place, found = Place(parent), {last: place.fs.info(place.path(""))}
        else:
            found = place.list()
            copies = place.copies(found)
    if not found:
        raise CheckpointError(f"{place.name!r} does not exist, or is empty.")
    if place.address != parent and copies:
        newest = max(copies.values(), key=lambda copy: copy.order)
        raise CheckpointError(
            f"{place.name!r} is a run folder, not a checkpoint. Did you mean '{place.name}/{newest.name}'?"
        )
    version = hashlib.sha256(repr(sorted((key, str(info)) for key, info in found.items())).encode()).hexdigest()[:12]
    target = downloads / (f"{last}-{version}" if place.address != parent else version)
    if not target.exists():
        temporary = target.with_name(f"{target.name}.{os.urandom(4).hex()}.tmp")
        try:
            with reaching(place, "read"):
                temporary.mkdir(parents=True)
                download_files(place, {key: place.size_of(key, info) for key, info in found.items()}, temporary, 0)
                with contextlib.suppress(OSError):  # another process was faster
                    os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target / last if place.address == parent else target


def download_run(address: str, into: Path, whole: bool) -> Path:
    """Download a run, or one of its checkpoints, as it is on a store, damaged or not; return its path here.

    Args:
        address: The run, a checkpoint of it, or its `last` or `best`.
        into: An empty folder.
        whole: Whether the tensors are wanted; otherwise files of the right size have their names and shapes alone.

    Raises:
        CheckpointError: The store cannot be read.
        ConfigError, MissingExtraError: There are no checkpoints, or it is no address that can be read.
    """
    check_address(address, "path")
    parent, _, last = address.rstrip("/").rpartition("/")
    is_one = last in ("last", "best") or _FOLDER.fullmatch(last) is not None
    place = Place(parent if is_one else address)
    with reaching(place, "read"):
        found = place.list()
        if is_one:
            named = last if last.startswith("checkpoint") else (place.read_if_there(last) or b"").decode().strip()
            found = {key: info for key, info in found.items() if key.startswith(f"{named}/") or key == last}
        folders = {name for name in {key.partition("/")[0] for key in found} if _FOLDER.fullmatch(name)}
        found = {key: info for key, info in found.items() if "/" not in key or key.partition("/")[0] in folders}
        if not folders:
            raise ConfigError(
                f"{mask_text(address)!r} holds no checkpoints, or does not exist. Give a run's `save_dir`."
            )
        sizes = {key: place.size_of(key, info) for key, info in found.items() if not key.endswith(LOCK)}
        read = {key: size for key, size in sizes.items() if whole or key.endswith(MANIFEST) or "/" not in key}
        download_files(place, read, into, 0)
        for key in sizes.keys() - read.keys():
            (into / key).parent.mkdir(parents=True, exist_ok=True)
            with create_file(into / key) as file:
                file.write(_head(place, key, sizes[key]) if key.endswith(".safetensors") else b"")
                file.truncate(sizes[key])
    return into / last if is_one else into


def _head(place: Place, key: str, size: int) -> bytes:
    """Return the beginning of a safetensors file, with the names and shapes of its tensors."""
    head = place.read(key, 0, min(size, SMALL))
    end = min(8 + int.from_bytes(head[:8], "little"), LARGEST_HEAD)
    return place.read(key, 0, min(size, end)) if len(head) < end else head


def chosen(place: Place, copies: Mapping[int, Copy], which: str) -> Copy:
    """Return the complete checkpoint that "last", "best" or the name of a folder means.

    Raises:
        CheckpointError: There is none, or `last` or `best` there names one that is incomplete.
    """
    if which in ("last", "best"):
        with reaching(place, "read"):
            place.check_named(which, copies)
    those = {
        "last": list(copies.values()),
        "best": [copy for copy in copies.values() if copy.kept.best],
    }.get(which, [copy for copy in copies.values() if copy.name.removesuffix(".old") == which.removesuffix(".old")])
    if not those:
        there = ", ".join(f"'{copy.name}'" for copy in sorted(copies.values(), key=lambda copy: copy.order))
        raise CheckpointError(
            f"'{place.name}/{which}' does not exist, or is no complete checkpoint. Complete there: {there or 'none'}."
        )
    return max(those, key=lambda copy: copy.order)


def kept_or_fetched(place: Place, copy: Copy, root: Path) -> Path:
    """Return the folder in `root` of a checkpoint, which is downloaded unless it is there, undamaged."""
    folder = root / copy.name.removesuffix(".old")
    if folder.exists():
        with contextlib.suppress(CheckpointError, OSError):
            if (folder / MANIFEST).read_bytes() == copy.data:
                inspect(folder, hashes=True)
                return folder
        shutil.rmtree(folder)
    root.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=root))
    try:
        return fetch(place, copy, folder, temporary)
    except OSError:  # another process was faster
        if (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == copy.data:
            return folder
        raise


def in_bytes(size: float) -> str:
    """Return a size in words.

    >>> in_bytes(1234567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "GB" else f"{size:.2f} GB"
        size /= 1000
    return f"{size:.2f} TB"
