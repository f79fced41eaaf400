"""Run folders on remote stores, read and written through fsspec.

::

    <address>/checkpoint-120/...            as in a run folder; omnitrain.json is uploaded last
    <address>/last, <address>/best          text files that name a folder; uploaded after it is complete
    <address>/metrics.jsonl, run.json, ...  the files of the run
    <address>/run.lock                      identifies the run that writes here

`uploader.py` uploads a run in a thread; `mirrored_store.py` keeps a local and a remote folder in sync. This module does
not import torch.
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
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.filesize import decimal as format_bytes

from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    SAVE_ORDER,
    CheckpointInfo,
    inspect,
    parse_manifest,
)
from omnitrain.core.errors import CheckpointError, ConfigError, MissingExtraError, OmnitrainError
from omnitrain.core.files import FileEntry, create_file, is_inside
from omnitrain.core.paths import local_folder
from omnitrain.core.secrets import mask_text

logger: logging.Logger = logging.getLogger("omnitrain")

Listing = Mapping[str, Mapping[str, Any]]
"""The store's `info` of each file, by its path."""

S = TypeVar("S")
T = TypeVar("T")

# Files to upload or download at the same time.
WORKERS = 4
# The largest file, in bytes, that is read back after its upload if the store has no checksum of it.
SMALL = 1 << 20

# The most files of a run folder.
MAX_OBJECTS = 1_000_000
# Seconds after which a listing is abandoned; a million files take about 100.
LISTING_S = 300.0
# The most bytes of a safetensors file before its tensors: the length, and a header of the package's maximum size.
MAX_HEADER_BYTES = 8 + 100_000_000

# The bytes of a file to read at once.
_PIECE = 1 << 25
# The bytes of a part in multipart uploads of s3fs, on which the ETag of the file depends.
_PART_BYTES = 50 << 20
# The folders of checkpoints.
FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]*)(\.old)?")
# Stores with real folders, which must exist before a file is written; the others have names with slashes.
_DIRECTORY_PROTOCOLS = {"sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "arrow_hdfs", "dropbox", "box"}
# Protocols of fsspec for the local disk, and for places that cannot be written to.
_UNSUPPORTED_PROTOCOLS = {"file", "local", "http", "https", "data"}


def check_address(address: str, name: str) -> None:
    """Reject an address, that of the argument `name`, that fsspec cannot write to; makes no connection.

    Raises:
        ConfigError: The protocol is unknown or not that of a writable store, or the address has no folder.
        MissingExtraError: fsspec's package for this protocol is not installed.
    """
    shown, protocol = f"`{name}={mask_text(address)!r}`", address.partition("://")[0].lower()
    # torch needs fsspec, so it is installed
    import fsspec
    from fsspec.registry import known_implementations

    if protocol in _UNSUPPORTED_PROTOCOLS:
        remedy = "Pass the path of a folder" if protocol in ("file", "local") else "Nothing can be written there"
        raise ConfigError(f"{shown}: {protocol!r} is not a remote store. {remedy}.")
    if not address.partition("://")[2].strip("/"):
        raise ConfigError(f"{shown} names no folder. Pass one, such as '{protocol}://bucket/run'.")
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        implementation: Any = known_implementations.get(protocol, {})
        package = implementation.get("class", "fsspec").partition(".")[0]
        if package == "fsspec":  # fsspec has the file system, but a dependency of it is missing
            raise ConfigError(
                f"{shown}: {implementation.get('err') or error}. Install it, or pass another address."
            ) from error
        raise MissingExtraError(shown, package) from error
    except ValueError as error:
        raise ConfigError(
            f"{shown}: fsspec knows no file system {protocol!r}. Pass an address such as 's3://bucket/run', "
            "'gs://bucket/run' or 'hf://datasets/name/run', or a local path."
        ) from error


def in_parallel(work: Callable[[T], S], items: Iterable[T], workers: int, limit: float | None = None) -> list[S]:
    """Return the results of `work` on each item, computed in daemon threads.

    Those that take longer than `limit` seconds are missing.

    Raises:
        Exception: The first error, once the other threads have finished their items.
    """
    queue, results, errors = deque(enumerate(items)), dict[int, S](), list[BaseException]()

    def run() -> None:
        with contextlib.suppress(IndexError):
            while not errors:
                number, item = queue.popleft()
                try:
                    results[number] = work(item)
                except BaseException as error:
                    errors.append(error)

    # not a ThreadPoolExecutor, whose threads the interpreter joins at exit, however long a store hangs
    threads = [
        threading.Thread(target=run, name="omnitrain-store", daemon=True) for _ in range(min(workers, len(queue)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join(limit)
    finally:
        queue.clear()
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


@contextlib.contextmanager
def wrap_store_errors(remote: RemoteFolder, operation: str) -> Iterator[None]:
    """Turn any exception of a store inside the block into a CheckpointError: it cannot be "read", or so on."""
    try:
        yield
    except OmnitrainError:
        raise
    except Exception as error:  # each fsspec package has its own exceptions
        raise CheckpointError(
            f"{remote.name!r} cannot be {operation}: {one_line_error(error)}. Check the address, the credentials and "
            "the connection."
        ) from error


def one_line_error(error: BaseException) -> str:
    """Return an error as one line of text, without secrets."""
    return mask_text(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}").rstrip(".")


@dataclass(slots=True)
class RemoteCheckpoint:
    """A complete checkpoint on a store."""

    name: str
    info: CheckpointInfo
    data: bytes
    """The bytes of its omnitrain.json."""
    files: dict[str, FileEntry]
    """Size and sha256 of every other file."""

    @classmethod
    def parse(cls, name: str, data: bytes, where: str) -> RemoteCheckpoint:
        """Return the checkpoint with this omnitrain.json.

        Raises:
            CheckpointError: `data` is damaged.
        """
        content = parse_manifest(data, where)
        return cls(name, CheckpointInfo.from_manifest(content), data, content["files"])


Copies = Mapping[int, RemoteCheckpoint]
"""The complete checkpoints on a store, by step."""


class RemoteFolder:
    """A folder of a remote store, with the operations that a run needs.

    Exceptions of the store's package are not converted: see `wrap_store_errors`.

    Args:
        address: The address of the folder, such as s3://bucket/run.
    """

    def __init__(self, address: str) -> None:
        self.address: str = address.rstrip("/")
        self.name: str = mask_text(self.address)
        self.protocol: str = address.partition("://")[0].lower()
        self._trusts_checksums = True
        # The errors of incomplete checkpoints, by folder, from the latest call of `complete_checkpoints`.
        self._incomplete: dict[str, CheckpointError] = {}

    @functools.cached_property
    def _fs_and_root(self) -> tuple[Any, str]:
        import fsspec

        # cached listings would miss what other machines write
        fs, root = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
        return fs, root.rstrip("/")

    @property
    def fs(self) -> Any:
        """The fsspec file system."""
        return self._fs_and_root[0]

    def path(self, key: str) -> str:
        """Return the path in the file system of a file of this folder, or of the folder itself for ""."""
        root = self._fs_and_root[1]
        return f"{root}/{key}" if key else root

    @property
    def has_history(self) -> bool:
        """Whether each write is a commit to a repository; heartbeats would fill its history."""
        return self.protocol == "hf"

    def check_writable(self) -> None:
        """Check that a small file can be written and deleted.

        Raises:
            ConfigError: It cannot.
        """
        if self.has_history:
            return
        key = f"omnitrain-{os.urandom(4).hex()}.probe"
        try:
            self.write(key, b"A run checks that it can write here.\n")
            self.remove(key)
        except Exception as error:  # each fsspec package has its own exceptions
            raise ConfigError(
                f"`save_dir={self.name!r}`: files cannot be written or deleted there: {one_line_error(error)}. Check "
                "the address, the credentials and the permissions, or pass another address."
            ) from error

    # --- reading

    def list(self, under: str = "") -> dict[str, dict[str, Any]]:
        """Return the store's `info` of each file under a folder, by its path in it.

        Raises:
            CheckpointError: A name leads out of the folder, the folder has too many files, or listing takes too long.
        """
        # some packages ignore `use_listings_cache=False`
        self.fs.invalidate_cache()
        try:  # in a daemon thread, which is abandoned if the listing never ends
            listings = in_parallel(lambda path: self.fs.find(path, detail=True), [self.path(under)], 1, LISTING_S)
        except FileNotFoundError:
            return {}
        if not listings:
            raise CheckpointError(
                f"{self.name!r} was still being listed after {LISTING_S:.0f} s, and a run folder has few files. Check "
                "the address and the store."
            )
        if len(listings[0]) > MAX_OBJECTS:
            raise CheckpointError(
                f"{self.name!r} has {len(listings[0]):,} files, more than the {MAX_OBJECTS:,} of any run folder. Check "
                "the address."
            )
        # packages differ in whether their paths begin with a slash or with the bucket
        start = len(self.fs._strip_protocol(self.path(under)).strip("/")) + 1
        files = {
            name.strip("/")[start:]: info for name, info in listings[0].items()
            if info.get("type") != "directory" and len(name.strip("/")) > start
        }  # fmt: skip
        for key in files:
            if not is_inside(key):
                raise CheckpointError(
                    f"{self.name!r} has the file {key!r}, whose name leads out of its folder: somebody may want to "
                    "overwrite files on this machine. Delete it there, and find out who wrote it."
                )
        return files

    def sizes(self, listing: Listing) -> dict[str, int]:
        """Return the bytes of each file in the result of `list`.

        Raises:
            CheckpointError: The store reports no valid size.
        """
        for key, info in listing.items():
            if not isinstance(info.get("size"), int) or info["size"] < 0:
                raise CheckpointError(
                    f"{self.name!r}: the store reports {info.get('size')!r} as the size of {key!r}, not a number of "
                    "bytes. Write the file again, or delete it there."
                )
        return {key: info["size"] for key, info in listing.items()}

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file, or the bytes [start, end) of it."""
        return self.fs.cat_file(self.path(key), start=start, end=end)

    def read_small(self, key: str, info: Mapping[str, Any] | None = None, max_bytes: int = SMALL) -> bytes | None:
        """Return the content of a small file, or None if it does not exist; `info` is the store's, if known.

        Raises:
            CheckpointError: It has more than `max_bytes`.
        """
        try:
            size = (self.fs.info(self.path(key)) if info is None else info).get("size")
            if not isinstance(size, int) or size <= max_bytes:
                # some stores give no size: it is checked after reading
                data = self.read(key)
                size = len(data)
                if size <= max_bytes:
                    return data
        except FileNotFoundError:
            return None
        raise CheckpointError(
            f"{self.name!r}: {key!r} has {size} bytes, and at most {max_bytes} are read. Delete it there, and find out "
            "who wrote it."
        )

    def read_pointer(self, which: str) -> str:
        """Return the name in `last` or `best`; "" if it does not exist."""
        return (self.read_small(which) or b"").decode(errors="replace").strip()

    def complete_checkpoints(self, listing: Listing | None = None) -> dict[int, RemoteCheckpoint]:
        """Return the complete checkpoints, by step: the files in their omnitrain.json are listed with their sizes."""
        folders: dict[str, dict[str, Mapping[str, Any]]] = {}
        for path, info in (self.list() if listing is None else listing).items():
            name, _, file = path.partition("/")
            if FOLDER.fullmatch(name) and file:
                folders.setdefault(name, {})[file] = info

        def parse(name: str) -> RemoteCheckpoint | CheckpointError:
            try:
                return self._parse_complete(name, folders[name])
            except CheckpointError as error:
                logger.warning("Skipped: %s", error)
                return error

        # .old copies first, so that the checkpoint that replaces one overwrites it below if it is complete
        names = sorted((name for name in folders if MANIFEST in folders[name]), key=lambda name: name[-4:] != ".old")
        # more threads than for files, as small requests are bound by latency and not by bandwidth
        results = in_parallel(parse, names, 4 * WORKERS)
        self._incomplete = {
            name: result for name, result in zip(names, results, strict=True) if isinstance(result, CheckpointError)
        }
        return {copy.info.step: copy for copy in results if isinstance(copy, RemoteCheckpoint)}

    def _parse_complete(self, name: str, files: Listing) -> RemoteCheckpoint:
        where = f"{self.name}/{name}"
        data = self.read_small(f"{name}/{MANIFEST}", files[MANIFEST], LARGEST_MANIFEST)
        if data is None:
            raise CheckpointError(f"{where!r} is incomplete: {MANIFEST!r} is missing.")
        copy = RemoteCheckpoint.parse(name, data, repr(where))
        for file, entry in copy.files.items():
            if file not in files:
                raise CheckpointError(f"{where!r} is incomplete: {file!r} is missing.")
            if files[file].get("size") not in (None, entry["size"]):
                raise CheckpointError(
                    f"{where!r} is incomplete: {file!r} has {files[file]['size']} bytes, and {entry['size']} were "
                    "written."
                )
        if copy.info.step != int(FOLDER.fullmatch(name)[1]):  # type: ignore[index]
            raise CheckpointError(f"{where!r} was saved as step {copy.info.step}, and renamed since.")
        return copy

    def candidates(self, which: str, copies: Copies, local_step: int = -1) -> list[RemoteCheckpoint]:
        """Return the checkpoints that "last", "best", "auto" or the name of a folder can mean, in the order of saves.

        Args:
            which: The name.
            copies: The result of `complete_checkpoints`, and the checkpoints that were uploaded since.
            local_step: The step of the local checkpoint; -1 if there is none.

        Raises:
            CheckpointError: `last` or `best` refers to an incomplete checkpoint: an older one is not used silently.
        """
        saved = sorted(copies.values(), key=lambda copy: SAVE_ORDER(copy.info))
        if which in ("last", "best"):
            name = self.read_pointer(which)
            error, match = self._incomplete.get(name), FOLDER.fullmatch(name)
            if error is not None and match is not None and int(match[1]) not in copies and int(match[1]) > local_step:
                remedy = f" The newest complete one is {saved[-1].name!r}: pass it, or pass 'auto'." if saved else ""
                raise CheckpointError(f"{error}{remedy}") from error
        if which == "best":
            return [copy for copy in saved if copy.info.best]
        if which in ("last", "auto"):
            return saved
        return [copy for copy in saved if copy.name.removesuffix(".old") == which.removesuffix(".old")]

    def select(self, which: str, copies: Copies) -> RemoteCheckpoint:
        """Return the latest of `candidates`.

        Raises:
            CheckpointError: None exists, or `last` or `best` refers to an incomplete one.
        """
        with wrap_store_errors(self, "read"):
            candidates = self.candidates(which, copies)
        if not candidates:
            complete = ", ".join(f"'{copy.name}'" for copy in self.candidates("auto", copies))
            raise CheckpointError(
                f"'{self.name}/{which}' does not exist, or is not a complete checkpoint. "
                f"Complete: {complete or 'none'}."
            )
        return candidates[-1]

    # --- writing

    def write(self, key: str, data: bytes) -> None:
        """Write a small file."""
        self._make_parent(key)
        self.fs.pipe_file(self.path(key), data)

    def put(self, file: Path, key: str, entry: FileEntry, on_progress: Callable[[], None] = lambda: None) -> None:
        """Upload a file, and check it by size, and by checksum or by reading it back.

        Args:
            file: The file on this machine.
            key: Its path in this folder.
            entry: Its size and hash.
            on_progress: Called for each part that is uploaded.

        Raises:
            OSError: The remote file differs.
        """
        from fsspec.callbacks import Callback

        class UploadCallback(Callback):
            def relative_update(self, inc: int = 1) -> None:
                on_progress()

        self._make_parent(key)
        self.fs.put_file(str(file), self.path(key), callback=UploadCallback())
        info = self.fs.info(self.path(key))
        if info.get("size") != entry["size"]:
            raise OSError(f"{key!r} has {info.get('size')} bytes after its upload, not {entry['size']}")
        is_same = self.has_same(info, file, entry)
        # a large file without a checksum is not read back
        if is_same or (is_same is None and entry["size"] > SMALL):
            return
        digest = hashlib.sha256()  # in pieces: the files that some packages open are too simple for `file_digest`
        for start in range(0, entry["size"], _PIECE):
            digest.update(self.read(key, start, min(start + _PIECE, entry["size"])))
        if digest.hexdigest() != entry["sha256"]:
            raise OSError(f"the content of {key!r} differs from what was uploaded")
        if is_same is False:  # the store encrypts files, for instance
            logger.debug("%s has checksums that are not those of the content. They are not used.", self.name)
            self._trusts_checksums = False

    def has_same(self, info: Mapping[str, Any], file: Path, entry: FileEntry) -> bool | None:
        """Return whether a remote file equals the local one by size and the store's checksum; None if it has none."""
        if info.get("size") != entry["size"]:
            return False
        lfs = info.get("lfs")  # of the Hugging Face Hub
        if lfs and getattr(lfs, "sha256", None):
            return lfs.sha256 == entry["sha256"]
        if not self._trusts_checksums:
            return None
        tag = str(info.get("ETag", "")).strip('"')  # of S3
        if info.get("md5Hash"):  # of Google Cloud Storage
            tag = base64.b64decode(info["md5Hash"]).hex()
        match = re.fullmatch("[0-9a-f]{32}(?:-([0-9]+))?", tag)
        if match is None or (match[1] and int(match[1]) != -(-entry["size"] // _PART_BYTES)):
            return None
        md5 = functools.partial(hashlib.md5, usedforsecurity=False)
        with open(file, "rb") as opened:
            if not match[1]:
                return hashlib.file_digest(opened, md5).hexdigest() == tag
            # S3's tag of a multipart upload is the digest of the digests of its parts
            digests = [md5(part).digest() for part in iter(lambda: opened.read(_PART_BYTES), b"")]
        return f"{md5(b''.join(digests)).hexdigest()}-{len(digests)}" == tag

    def _make_parent(self, key: str) -> None:
        if self.protocol in _DIRECTORY_PROTOCOLS:  # elsewhere it would create a bucket for a misspelled name
            self.fs.makedirs(self.path(key).rpartition("/")[0], exist_ok=True)

    def remove(self, key: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(key))

    def remove_folder(self, name: str) -> None:
        """Delete a checkpoint, its omnitrain.json first, so that no partial checkpoint remains."""
        self.remove(f"{name}/{MANIFEST}")
        rest = [key for key in self.list(name) if key != MANIFEST]
        in_parallel(lambda key: self.remove(f"{name}/{key}"), rest, WORKERS)
        if self.protocol in _DIRECTORY_PROTOCOLS:
            with contextlib.suppress(Exception):
                self.fs.rm(self.path(name), recursive=True)

    def duplicate(self, copy: RemoteCheckpoint, name: str) -> None:
        """Copy a checkpoint within the store, its omnitrain.json last."""
        for file in (*copy.files, MANIFEST):
            self._make_parent(f"{name}/{file}")
            self.fs.cp_file(self.path(f"{copy.name}/{file}"), self.path(f"{name}/{file}"))

    # --- downloading

    def get(self, sizes: Mapping[str, int], into: Path, under: str = "") -> None:
        """Download files, several at a time.

        Args:
            sizes: The bytes of each file by its path in the folder `under`.
            into: An empty local folder.
            under: A folder in this one; "" is this one.

        Raises:
            CheckpointError: The files do not fit on the disk, or their sizes differ from `sizes`.
        """
        prefix = f"{under}/" if under else ""
        total, free = sum(sizes.values()), shutil.disk_usage(into).free
        if total > free:
            largest = max(sizes, key=lambda key: sizes[key])
            raise CheckpointError(
                f"{self.name!r} has {format_bytes(total)} to download, and {str(into)!r} has {format_bytes(free)} "
                f"free. The largest file is {prefix + largest!r} of {format_bytes(sizes[largest])}. Free some space, "
                "or set OMNITRAIN_LOCAL_DIR to a larger disk."
            )

        def get(key: str) -> None:
            self.fs.get_file(self.path(prefix + key), str(into / key))
            size = (into / key).stat().st_size
            if size != sizes[key]:
                raise CheckpointError(
                    f"{self.name!r}: {prefix + key!r} has {size} bytes, and the store reports {sizes[key]}. It was "
                    "changed meanwhile, or the store or a cache is faulty: try again, or write the file again."
                )

        for key in sizes:
            (into / key).parent.mkdir(parents=True, exist_ok=True)
        in_parallel(get, sizes, 2 * WORKERS)

    @contextlib.contextmanager
    def downloading(self, sizes: Mapping[str, int], target: Path, under: str = "") -> Iterator[Path]:
        """Yield a temporary folder with the files as `get` downloads them, and rename it to `target` in the end."""
        temporary = target.with_name(f"{target.name}.{os.urandom(4).hex()}.tmp")
        try:
            with wrap_store_errors(self, "read"):
                temporary.mkdir(parents=True)
                self.get(sizes, temporary, under)
            yield temporary
            try:
                os.replace(temporary, target)
            except OSError:
                if not target.exists():  # another process was faster
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def fetch(self, copy: RemoteCheckpoint, root: Path, discard: Callable[[Path], None] = shutil.rmtree) -> Path:
        """Return the local folder of a checkpoint; unless it is there undamaged, it is downloaded and verified.

        Args:
            copy: The checkpoint.
            root: The parent of the local folder.
            discard: Called with a local folder that differs.

        Raises:
            CheckpointError: It cannot be read, or is damaged; nothing remains on the disk.
        """
        folder = root / copy.name.removesuffix(".old")
        if folder.exists():  # first: another process may be about to rename its own
            with contextlib.suppress(CheckpointError, OSError):
                if (folder / MANIFEST).read_bytes() == copy.data and inspect(folder, hashes=True):
                    return folder
            discard(folder)
        sizes = {file: entry["size"] for file, entry in copy.files.items()}
        logger.info("Downloading %s/%s (%s).", self.name, copy.name, format_bytes(sum(sizes.values())))
        with self.downloading(sizes, folder, copy.name) as temporary:
            (temporary / MANIFEST).write_bytes(copy.data)
            try:
                inspect(temporary, hashes=True)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(str(temporary), f"{self.name}/{copy.name}")) from error
        return folder


def local_copy(address: str, name: str = "path") -> Path:
    """Return the local path of a checkpoint or of weights, downloading them unless they are in the cache.

    Args:
        address: A checkpoint, `last` or `best` of a run, or a file or folder of weights of any program.
        name: The argument with the address, for errors.

    Raises:
        ConfigError, MissingExtraError: The address cannot be read.
        CheckpointError: Nothing exists at the address, or it is damaged.
    """
    check_address(address, name)
    parent, _, last = address.rstrip("/").rpartition("/")
    remote, run, is_pointer = RemoteFolder(address), RemoteFolder(parent), last in ("last", "best")
    downloads = local_folder(parent).with_name(local_folder(parent).name + "-downloads")
    if is_pointer or FOLDER.fullmatch(last):
        with wrap_store_errors(run, "read"):
            listing = run.list() if is_pointer else {f"{last}/{key}": info for key, info in run.list(last).items()}
            copies = run.complete_checkpoints(listing)
        if copies or not is_pointer:
            return run.fetch(run.select(last, copies), downloads)
    with wrap_store_errors(remote, "read"):
        is_file = remote.fs.isfile(remote.path(""))
        listing = {last: remote.fs.info(remote.path(""))} if is_file else remote.list()
        copies = {} if is_file else remote.complete_checkpoints(listing)
    if not listing:
        raise CheckpointError(f"{remote.name!r} does not exist, or is empty.")
    if copies:
        newest = remote.candidates("auto", copies)[-1]
        raise CheckpointError(
            f"{remote.name!r} is a run folder, not a checkpoint. Did you mean '{remote.name}/{newest.name}'?"
        )
    version = hashlib.sha256(repr(sorted((key, str(info)) for key, info in listing.items())).encode()).hexdigest()[:12]
    target = downloads / (version if is_file else f"{last}-{version}")
    if not target.exists():
        source = run if is_file else remote
        with source.downloading(source.sizes(listing), target):
            pass  # nothing is known of the files that could be verified
    return target / last if is_file else target


def download_run(address: str, into: Path, with_tensors: bool) -> Path:
    """Download a run, or one of its checkpoints, without verifying it, and return its local path.

    Args:
        address: The run, a checkpoint of it, or its `last` or `best`.
        into: An empty folder.
        with_tensors: Whether to download the tensors; otherwise their files are sparse, with only the headers.

    Raises:
        CheckpointError: The store cannot be read.
        ConfigError, MissingExtraError: No checkpoints exist, or the address is not supported.
    """
    check_address(address, "path")
    parent, _, last = address.rstrip("/").rpartition("/")
    is_checkpoint = last in ("last", "best") or FOLDER.fullmatch(last) is not None
    remote = RemoteFolder(parent if is_checkpoint else address)
    with wrap_store_errors(remote, "read"):
        listing = remote.list()
        if is_checkpoint:
            name = last if last.startswith("checkpoint") else remote.read_pointer(last)
            listing = {key: info for key, info in listing.items() if key.startswith(f"{name}/") or key == last}
        # what lies in other folders is not read
        listing = {key: info for key, info in listing.items() if "/" not in key or FOLDER.fullmatch(key.split("/")[0])}
        if not any("/" in key for key in listing):
            raise ConfigError(f"{mask_text(address)!r} has no checkpoints, or does not exist. Pass a run's `save_dir`.")
        sizes = remote.sizes({key: info for key, info in listing.items() if not key.endswith(LOCK)})
        sizes_to_read = {
            key: size for key, size in sizes.items() if with_tensors or key.endswith(MANIFEST) or "/" not in key
        }
        remote.get(sizes_to_read, into)
        for key in sizes.keys() - sizes_to_read.keys():
            (into / key).parent.mkdir(parents=True, exist_ok=True)
            with create_file(into / key) as file:
                file.write(_read_header_bytes(remote, key, sizes[key]) if key.endswith(".safetensors") else b"")
                file.truncate(sizes[key])
    return into / last if is_checkpoint else into


def _read_header_bytes(remote: RemoteFolder, key: str, size: int) -> bytes:
    """Return the start of a safetensors file up to the end of its header."""
    head = remote.read(key, 0, min(size, SMALL))
    end = min(8 + int.from_bytes(head[:8], "little"), MAX_HEADER_BYTES)
    return remote.read(key, 0, min(size, end)) if len(head) < end else head
