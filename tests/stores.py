"""Saves of any files, and remote stores: in memory, in a folder that outlives a process, S3's on the loopback."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import programs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from omnitrain.checkpoint.mirrored_store import MirroredStore, make_store
from omnitrain.checkpoint.remote import RemoteFolder
from omnitrain.checkpoint.store import Store
from omnitrain.core.paths import local_folder


def save_files(
    store: Store, step: int, write: Callable[[Path], object], payload: dict[str, Any] | None = None, *details: Any
) -> Path:
    """Save a checkpoint of any files that `write` writes to its folder."""
    with store.saving(step) as folder:
        write(folder)
        return store.commit(step, folder, payload or {}, *details)


Fault = Callable[[str, str], None]
"""Called with what is done ("write", "read", "remove", "copy") and the path; raises, waits or kills."""


class Watched:
    """Records what is done to a store, in order, and calls a fault before it."""

    done: ClassVar[list[tuple[str, str]]] = []
    fault: ClassVar[Fault] = staticmethod(lambda what, path: None)

    @classmethod
    def record(cls, what: str, path: str) -> None:
        Watched.done.append((what, path.partition("run/")[2] or path))
        Watched.fault(what, path)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self.record("write", path)
        super().pipe_file(path, value, **options)  # type: ignore[misc]

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self.record("write", rpath)
        super().put_file(lpath, rpath, **options)  # type: ignore[misc]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.record("read", path)
        return super().cat_file(path, start=start, end=end, **options)  # type: ignore[misc]

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        self.record("read", rpath)
        super().get_file(rpath, lpath, **options)  # type: ignore[misc]

    def rm_file(self, path: str) -> None:
        self.record("remove", path)
        super().rm_file(path)  # type: ignore[misc]

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.record("copy", path2)
        super().cp_file(path1, path2, **options)  # type: ignore[misc]


class InMemory(Watched, MemoryFileSystem):
    """A store in memory: watched://bucket/run."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return MemoryFileSystem._strip_protocol(str(path).replace("watched://", "memory://", 1))

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        self.record("read", rpath)
        # that of the parent shares the position in a file between threads
        Path(lpath).write_bytes(MemoryFileSystem.cat_file(self, rpath))


class InFolder(Watched, LocalFileSystem):
    """A store whose objects are files under `$OMNITRAIN_TEST_SHELF`: shelf://bucket/run outlives a process."""

    protocol = "shelf"
    local_file = False

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = str(path)
        if text.startswith("shelf://"):
            text = f"{os.environ['OMNITRAIN_TEST_SHELF']}/{text.removeprefix('shelf://')}"
        return LocalFileSystem._strip_protocol(text)


def register() -> None:
    """Register these classes with fsspec, not those of another import of this file, such as that of doctests."""
    fsspec.register_implementation("watched", InMemory, clobber=True)
    fsspec.register_implementation("shelf", InFolder, clobber=True)


register()


@contextlib.contextmanager
def watching() -> Iterator[type[Watched]]:
    """Empty the store in memory, and remove faults before and after."""
    register()
    InMemory.store.clear()
    InMemory.pseudo_dirs[:] = [""]
    Watched.done, Watched.fault = [], staticmethod(lambda what, path: None)
    try:
        yield Watched
    finally:
        Watched.fault = staticmethod(lambda what, path: None)


def content_of(address: str) -> dict[str, bytes]:
    """Return every object under an address, by its name there."""
    fs, root = fsspec.core.url_to_fs(address)
    fs.invalidate_cache()
    start = len(root.strip("/")) + 1
    return {path.strip("/")[start:]: fs.cat_file(path) for path in sorted(fs.find(root))}


@contextlib.contextmanager
def mirroring(address: str) -> Iterator[MirroredStore]:
    """Take the store inside; at the end all is uploaded."""
    mirror = make_store(address)
    assert isinstance(mirror, MirroredStore)
    mirror.acquire()
    try:
        yield mirror
    finally:
        mirror.finish()
        mirror.lock.release()


def save_texts(mirror: MirroredStore, *steps: int, text: str = "weights") -> None:
    """Save checkpoints with a small file, model.safetensors."""
    for step in steps:
        save_files(mirror, step, lambda folder: (folder / "model.safetensors").write_text(text))


def remote_steps(address: str) -> list[int]:
    """Return the steps of the complete checkpoints there."""
    return sorted(RemoteFolder(address).complete_checkpoints())


def remote_folders(address: str) -> set[str]:
    """Return the names of all folders there."""
    return {name.partition("/")[0] for name in content_of(address) if "/" in name}


def lose_machine(address: str) -> None:
    """Delete all that was written on this machine."""
    shutil.rmtree(local_folder(address).parent)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + programs.LIMIT
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


class S3:
    """moto's S3 server on the loopback, with faults.

    A fault is called with the method, the path, WSGI's environment and `start_response`; it may return a body instead.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *_: Any) -> None:
                """Write nothing."""

        self._moto = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[str, str, Any, Any], list[bytes] | None] = lambda method, path, environ, answer: None
        self.requests: list[tuple[str, str]] = []
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.address = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        body = self.fault(method, path, environ, start_response)
        return self._moto(environ, start_response) if body is None else body

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)


def s3_variables(server: S3) -> dict[str, str]:
    """Return the environment variables by which s3fs connects to the server, without long retries."""
    return {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.address, "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


def shelf_of(folder: Path) -> dict[str, str]:
    """Return the environment variables by which shelf:// finds its folder."""
    return {"OMNITRAIN_TEST_SHELF": str(folder)}
