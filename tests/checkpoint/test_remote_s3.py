"""Runs on S3's protocol: s3fs with moto's server on the loopback, and the faults of real stores."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from resuming import assert_same, build, comparable, play, train

from omnitrain import ConfigError
from omnitrain.callbacks.retention import to_delete
from omnitrain.checkpoint import remote, uploader
from omnitrain.checkpoint.remote import RemoteFolder
from omnitrain.core.files import FileEntry
from omnitrain.core.paths import local_folder

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")

from stores import S3, content_of, lose_machine, mirroring, remote_folders, remote_steps, s3_variables, save_texts  # noqa: E402

pytestmark = pytest.mark.processes  # a server, whose requests have limits in seconds

RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "log_steps": 1}
ADDRESS: Any = "s3://bucket/some/run"


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
    monkeypatch.setattr(uploader, "PAUSE_S", 0.02)
    monkeypatch.setattr(uploader, "LONGEST_PAUSE_S", 0.1)
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


def test_s3_run_is_uploaded_and_resumed(tmp_path: Path) -> None:
    train(build(ADDRESS, **RUN))
    objects = content_of(ADDRESS)
    assert remote_steps(ADDRESS) == [2, 4, 6]
    for name in objects.keys() - {"last", "best"}:
        assert (local_folder(ADDRESS) / name).read_bytes() == objects[name]
    lose_machine(ADDRESS)
    undisturbed, result = play(tmp_path / "undisturbed" / "run", **RUN), play(ADDRESS, [{}], **RUN)
    assert_same(comparable(result), comparable(undisturbed))
    assert remote_steps(ADDRESS)[-1] == 6 and content_of(ADDRESS)["last"] == b"checkpoint-6\n"


def test_s3_checksums_and_bulk_deletes_are_used(store: S3) -> None:
    with mirroring(ADDRESS) as mirror:
        for step in (1, 2, 3):
            save_texts(mirror, step)
            mirror.prune(lambda infos: to_delete(infos, keep_last=1))
    methods = {method for method, path in store.requests if path.endswith(".safetensors")}
    assert "HEAD" in methods and "GET" not in methods  # nothing is downloaded again to verify it
    assert remote_steps(ADDRESS) == [entry.step for entry in mirror.checkpoint_infos()] == [3]
    assert remote_folders(ADDRESS) == {"checkpoint-3"}


def reject(environ: Any, answer: Any) -> list[bytes]:
    answer("503 Slow Down", [("Content-Type", "application/xml")])
    return [b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>No.</Message></Error>"]


def cut(environ: Any, answer: Any) -> None:
    environ["werkzeug.socket"].shutdown(2)


@pytest.mark.parametrize("fault", [reject, cut])
def test_s3_faults_end_with_a_complete_upload(fault: Any, store: S3, caplog: pytest.LogCaptureFixture) -> None:
    count = itertools.count()

    def fail_six_uploads(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        is_upload = method == "PUT" and "/checkpoint-" in path
        return fault(environ, answer) if is_upload and next(count) < 6 else None

    store.fault = fail_six_uploads
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 1, 2, 3)
    assert remote_steps(ADDRESS) == [1, 2, 3]
    assert [caplog.text.count(text) for text in ("Nothing can be uploaded", "uploading works again")] == [1, 1]


def test_s3_multipart_upload_is_checked_by_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs uploads in parts of 50 MiB; with smaller ones the test is quicker."""
    part, put_file = 5 << 20, s3fs.S3FileSystem._put_file

    async def put(self: Any, lpath: str, rpath: str, **options: Any) -> None:
        await put_file(self, lpath, rpath, chunksize=part, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put)
    monkeypatch.setattr(remote, "_PART_BYTES", part)
    s3fs.S3FileSystem.clear_instance_cache()
    file = tmp_path / "large"
    with open(file, "wb") as stream:
        stream.write(os.urandom(1 << 20))
        stream.truncate(2 * part + (1 << 20) + 3)
    place, entry = RemoteFolder(ADDRESS), FileEntry(size=file.stat().st_size, sha256="not used")
    place.put(file, "checkpoint-1/large", entry)
    info = place.fs.info(place.path("checkpoint-1/large"))
    assert info["ETag"].strip('"').endswith("-3") and place.has_same(info, file, entry) is True
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


@pytest.mark.parametrize("missing", ["bucket", "server"])
def test_s3_errors_are_raised_before_the_first_step(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "bucket":
        s3fs.S3FileSystem().rmdir("bucket")
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{programs.free_port()}")
        s3fs.S3FileSystem.clear_instance_cache()
    trainer = build(ADDRESS, **RUN)
    with pytest.raises(ConfigError, match=r"`save_dir='s3://bucket/some/run'`: files cannot be written"):
        trainer.train()
    assert trainer.progress.step == 0
    assert missing == "server" or not s3fs.S3FileSystem().exists("bucket")  # it is not created
