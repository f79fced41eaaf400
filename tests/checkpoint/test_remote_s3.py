"""Runs on S3's protocol: s3fs with moto's server on the loopback, and the faults of real stores."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from marks import thinned
from resuming import build, differences, play, train

from omnitrain import Callback, CheckpointError, ConfigError
from omnitrain.checkpoint import remote, upload
from omnitrain.checkpoint.manifest import FileEntry
from omnitrain.checkpoint.mirror import make_store
from omnitrain.checkpoint.remote import Place
from omnitrain.settings import local_folder

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")

from stores import (  # noqa: E402
    S3,
    content_of,
    lose_machine,
    mirroring,
    remote_folders,
    remote_steps,
    s3_variables,
    save_texts,
    wait_for,
)

pytestmark = pytest.mark.processes  # a server, whose requests have limits in seconds

RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "log_steps": 1}
ADDRESS: Any = "s3://bucket/some/run"
Fault = Callable[[str, str, Any, Any], list[bytes] | None]


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    server = S3()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def store(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The server with an empty bucket, no faults, and s3fs without long pauses."""
    for name, value in s3_variables(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setattr(upload, "PAUSE_S", 0.02)
    monkeypatch.setattr(upload, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    with contextlib.suppress(FileNotFoundError):
        fs.rm("bucket", recursive=True)
    with contextlib.suppress(FileExistsError):
        fs.mkdir("bucket")
    server.requests.clear()
    yield server
    server.fault = lambda method, path, environ, answer: None
    s3fs.S3FileSystem.clear_instance_cache()


def check_resumes(folder: Path) -> None:
    """Check that the run is completed on this machine as if nothing had happened."""
    undisturbed, result = play(folder / "undisturbed" / "run", **RUN), play(ADDRESS, [{}], **RUN)
    names = result.keys() - {"stream", "rates"}
    assert not differences({name: undisturbed[name] for name in names}, {name: result[name] for name in names})
    assert remote_steps(ADDRESS)[-1] == 6 and content_of(ADDRESS)["last"] == b"checkpoint-6\n"


def test_s3_run_is_uploaded_and_resumed(tmp_path: Path) -> None:
    train(build(ADDRESS, **RUN))
    objects = content_of(ADDRESS)
    assert remote_steps(ADDRESS) == [2, 4, 6]
    for name in objects.keys() - {"last", "best"}:
        assert (local_folder(ADDRESS) / name).read_bytes() == objects[name]
    lose_machine(ADDRESS)
    check_resumes(tmp_path)


def test_s3_retention_follows_the_folder() -> None:
    with mirroring(ADDRESS) as mirror:
        for step in (1, 2, 3):
            save_texts(mirror, step)
            mirror.prune(keep_last=1)
    assert remote_steps(ADDRESS) == [entry.step for entry in mirror.kept()] == [3]
    assert remote_folders(ADDRESS) == {"checkpoint-3"}


# --- faults


def for_uploads(times: int, fault: Callable[[Any, Any], list[bytes] | None]) -> Fault:
    """Return a fault for so many uploads of files of checkpoints; it gets WSGI's environment and `start_response`."""
    count = itertools.count()

    def call(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        is_upload = method == "PUT" and "/checkpoint-" in path
        return fault(environ, answer) if is_upload and next(count) < times else None

    return call


def rejecting(status: str, code: str = "SlowDown") -> Callable[[Any, Any], list[bytes]]:
    def fault(environ: Any, answer: Any) -> list[bytes]:
        answer(status, [("Content-Type", "application/xml")])
        return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No.</Message></Error>".encode()]

    return fault


def cut(environ: Any, answer: Any) -> None:
    environ["werkzeug.socket"].shutdown(2)


def slow(environ: Any, answer: Any) -> None:
    time.sleep(0.05)


FAULTS = {"503": rejecting("503 Slow Down"), "500": rejecting("500 Internal Server Error"), "cut": cut, "slow": slow}


@pytest.mark.parametrize("kind", thinned(FAULTS, ["503"]))
def test_s3_faults_end_with_a_complete_upload(kind: str, store: S3, caplog: pytest.LogCaptureFixture) -> None:
    store.fault = for_uploads(6, FAULTS[kind])
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 1, 2, 3)
    assert remote_steps(ADDRESS) == [1, 2, 3]
    logs = [caplog.text.count(message) for message in ("Nothing can be uploaded", "uploading works again")]
    assert logs == [kind != "slow"] * 2


@pytest.mark.slow
def test_s3_request_without_an_answer_is_repeated(store: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeated by s3fs itself, or after a pause."""
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 2, "connect_timeout": 2}})
    s3fs.S3FileSystem.clear_instance_cache()
    ends = threading.Event()
    with mirroring(ADDRESS) as mirror:
        store.fault = for_uploads(1, lambda environ, answer: ends.wait(programs.LIMIT) and None)
        save_texts(mirror, 1)
    ends.set()
    assert remote_steps(ADDRESS) == [1]


def test_s3_object_that_was_lost_is_uploaded_again(store: S3, caplog: pytest.LogCaptureFixture) -> None:
    def forget(environ: Any, answer: Any) -> list[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        answer("200 OK", [("ETag", '"0"')])
        return [b""]

    store.fault = for_uploads(2, forget)
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 1)
    assert remote_steps(ADDRESS) == [1] and "FileNotFoundError" in caplog.text


def test_s3_checksums_are_used_instead_of_downloads(store: S3) -> None:
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 1)
    methods = {method for method, path in store.requests if path.endswith(".safetensors")}
    assert "HEAD" in methods and "GET" not in methods


@pytest.mark.parametrize("megabytes", thinned([5, 50], [5]))
def test_s3_multipart_upload_is_checked_by_its_checksum(
    megabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs uploads in parts of 50 MiB; with smaller ones the test is quicker."""
    part, put_file = megabytes << 20, s3fs.S3FileSystem._put_file
    if megabytes != 50:

        async def put(self: Any, lpath: str, rpath: str, **options: Any) -> None:
            await put_file(self, lpath, rpath, chunksize=part, **options)

        monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put)
        monkeypatch.setattr(remote, "_PART", part)
        s3fs.S3FileSystem.clear_instance_cache()
    file = tmp_path / "large"
    with open(file, "wb") as stream:
        stream.write(os.urandom(1 << 20))
        stream.truncate(2 * part + (1 << 20) + 3)
    place, entry = Place(ADDRESS), FileEntry(size=file.stat().st_size, sha256="not used")
    place.put(file, "checkpoint-1/large")
    info = place.fs.info(place.path("checkpoint-1/large"))
    assert info["ETag"].strip('"').endswith("-3") and place.has_same(info, file, entry) is True
    place.check("checkpoint-1/large", file, entry)
    with open(file, "r+b") as stream:
        stream.write(b"other")
    assert place.has_same(info, file, entry) is False


def test_s3_multipart_uploads_of_a_killed_run_are_aborted() -> None:
    fs = s3fs.S3FileSystem()
    for key in ("some/run/checkpoint-1/a", "some/other/a"):
        fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    with mirroring(ADDRESS):
        pass
    assert [part["Key"] for part in fs.list_multipart_uploads("bucket")] == ["some/other/a"]


def remove_bucket(store: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs.S3FileSystem().rmdir("bucket")


def reject_credentials(store: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    reject = rejecting("403 Forbidden", "AccessDenied")
    store.fault = lambda method, path, environ, answer: reject(environ, answer) if method == "PUT" else None


def remove_server(store: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{programs.free_port()}")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (remove_bucket, r"`save_dir='s3://bucket/some/run'`: nothing can be written"),
        (reject_credentials, "nothing can be written there, or deleted: PermissionError"),
        (remove_server, "nothing can be written"),
    ],
    ids=["bucket", "credentials", "server"],
)
def test_s3_errors_are_raised_before_the_first_step(
    prepare: Any, message: str, store: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(store, monkeypatch)
    trainer = build(ADDRESS, **RUN)
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert trainer.progress.step == 0
    if prepare is remove_bucket:
        assert not s3fs.S3FileSystem().exists("bucket")  # it is not created


def test_s3_outage_during_a_run_does_not_end_it(
    store: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMNITRAIN_UPLOAD_WAIT", "0.1")
    store.fault = for_uploads(10**9, FAULTS["503"])
    with caplog.at_level(logging.INFO):
        trainer = train(build(ADDRESS, **RUN))
    assert trainer.progress.step == 6 and "Not everything was uploaded" in caplog.text
    assert remote_steps(ADDRESS) == []


def test_s3_checkpoint_with_a_missing_object_is_rejected() -> None:
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 4, 6)
    lose_machine(ADDRESS)
    s3fs.S3FileSystem().rm_file("bucket/some/run/checkpoint-6/model.safetensors")
    with pytest.raises(CheckpointError, match="checkpoint-6' does not exist, or is no complete checkpoint"):
        make_store(ADDRESS).resolve(f"{ADDRESS}/checkpoint-6")
    folder, _ = make_store(ADDRESS).resolve("auto")  # type: ignore[misc]
    assert folder.name == "checkpoint-4"


# --- killed


class WaitForUpload(Callback):
    """Waits until each checkpoint is uploaded, so that they are in order."""

    def on_step_start(self, trainer: Any) -> None:
        step = trainer.progress.step
        if step in (2, 4):
            wait_for(lambda: Place(ADDRESS).read_if_there("last") == f"checkpoint-{step}\n".encode())


KILLS = ["checkpoint-4/model.safetensors", "checkpoint-4/omnitrain.json", "run/last", "checkpoint-6/optimizer"]


@pytest.mark.parametrize("path", thinned(KILLS, [KILLS[0]]))
def test_s3_run_killed_in_an_upload_resumes_elsewhere(
    path: str, store: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    is_started, is_complete, is_dead = threading.Event(), threading.Event(), threading.Event()

    def kill(method: str, name: str, environ: Any, answer: Any) -> list[bytes] | None:
        if method == "PUT" and path in name and not is_dead.is_set() and (path != "run/last" or is_complete.is_set()):
            assert is_started.wait(programs.LIMIT)
            os.kill(pids[0], signal.SIGKILL)
            is_dead.set()
            answer("500 Internal Server Error", [])
            return [b""]
        if method == "PUT" and name.endswith("checkpoint-4/omnitrain.json"):
            is_complete.set()
        return None

    store.fault = kill
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "first machine"))
    s3fs.S3FileSystem.clear_instance_cache()
    pid = os.fork()
    if not pid:
        try:
            train(build(ADDRESS, callbacks=lambda: [WaitForUpload()], **RUN), resume_from="auto")
        finally:
            os._exit(1)
    pids.append(pid)
    is_started.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL and is_dead.is_set()
    store.fault = lambda method, path, environ, answer: None
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "second machine"))
    assert remote_steps(ADDRESS) == ([2] if "checkpoint-4" in path else [2, 4])
    check_resumes(tmp_path)
