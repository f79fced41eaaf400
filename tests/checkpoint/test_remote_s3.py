"""Runs on S3's protocol: by s3fs, against moto's server on the loopback, with the faults that real stores have."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from resuming import build, differences, play, train

from omnitrain import CheckpointError, ConfigError
from omnitrain.checkpoint import upload
from omnitrain.checkpoint.manifest import FileEntry
from omnitrain.checkpoint.mirror import make_store
from omnitrain.checkpoint.remote import Place
from omnitrain.settings import local_folder

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")

from stores import S3, content_of, s3_variables  # noqa: E402

RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "log_steps": 1}
ADDRESS = "s3://bucket/some/run"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    made = S3()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def store(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The server with an empty bucket, no faults, and s3fs without long pauses."""
    for name, value in s3_variables(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setattr(upload, "PAUSE_S", 0.05)
    monkeypatch.setattr(upload, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    with contextlib.suppress(FileNotFoundError):
        fs.rm("bucket", recursive=True)
    with contextlib.suppress(FileExistsError):
        fs.mkdir("bucket")
    server.asked.clear()
    yield server
    server.fault = lambda method, path, environ, answer: None
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return play(tmp_path_factory.mktemp("undisturbed") / "run", **RUN)


def lose_machine() -> None:
    shutil.rmtree(local_folder(ADDRESS).parent)


def is_upload(method: str, path: str) -> bool:
    return method == "PUT" and "/checkpoint-" in path


def test_a_run_is_on_the_store_and_goes_on_without_its_folder(undisturbed: dict[str, Any]) -> None:
    train(build(ADDRESS, **RUN, callbacks=lambda: []))  # type: ignore[arg-type]
    there = content_of(ADDRESS)
    assert sorted(Place(ADDRESS).copies()) == [2, 4, 6] and there["last"] == b"checkpoint-6\n"
    for name, content in there.items():
        if name not in ("last", "best"):
            assert (local_folder(ADDRESS) / name).read_bytes() == content
    lose_machine()
    found = play(ADDRESS, [{}], **RUN)  # type: ignore[arg-type]
    assert not differences({name: undisturbed[name] for name in found if name not in ("stream", "rates")},
                           {name: found[name] for name in found if name not in ("stream", "rates")})  # fmt: skip


def test_what_is_pruned_here_is_pruned_there() -> None:
    trainer = train(build(ADDRESS, **{**RUN, "epochs": 3}, save_total_limit=1))  # type: ignore[arg-type]
    assert trainer.store is not None
    assert sorted(Place(ADDRESS).copies()) == [kept.step for kept in trainer.store.kept()]
    assert {name.split("/")[0] for name in content_of(ADDRESS) if "/" in name} == {
        f"checkpoint-{kept.step}" for kept in trainer.store.kept()
    }


def refusing(status: str, times: int) -> Callable[..., list[bytes] | None]:
    left = [times]

    def fault(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        if not is_upload(method, path) or left[0] <= 0:
            return None
        left[0] -= 1
        answer(status, [("Content-Type", "application/xml")])
        return [b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>"]

    return fault


def cutting(times: int) -> Callable[..., list[bytes] | None]:
    left = [times]

    def fault(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        if is_upload(method, path) and left[0] > 0:
            left[0] -= 1
            environ["werkzeug.socket"].shutdown(2)
        return None

    return fault


def slow(seconds: float, times: int) -> Callable[..., list[bytes] | None]:
    left = [times]

    def fault(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        if is_upload(method, path) and left[0] > 0:
            left[0] -= 1
            time.sleep(seconds)
        return None

    return fault


@pytest.mark.parametrize(
    ("fault", "is_told"),
    [
        (refusing("503 Slow Down", 6), True),
        (refusing("500 Internal Server Error", 6), True),
        (cutting(6), True),
        (slow(0.2, 6), False),
    ],
    ids=["503", "500", "cut", "slow"],
)
def test_a_store_that_fails_for_a_while_has_everything_in_the_end(
    fault: Any, is_told: bool, store: S3, caplog: pytest.LogCaptureFixture
) -> None:
    store.fault = fault
    trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert trainer.progress.step == 6 and sorted(Place(ADDRESS).copies()) == [2, 4, 6]
    assert caplog.text.count("Nothing can be uploaded") == caplog.text.count("uploading works again") == int(is_told)


def test_a_store_that_does_not_answer_is_given_up_and_asked_again(store: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 1, "connect_timeout": 1}})
    s3fs.S3FileSystem.clear_instance_cache()
    store.fault = slow(3, 1)
    train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    assert sorted(Place(ADDRESS).copies()) == [2, 3]  # asked again by s3fs itself, or after a pause


def test_an_object_that_the_store_forgot_is_uploaded_again(store: S3, caplog: pytest.LogCaptureFixture) -> None:
    lost = [2]

    def forget(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        if is_upload(method, path) and path.endswith("model.safetensors") and lost[0]:
            lost[0] -= 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            answer("200 OK", [("ETag", '"0"')])
            return [b""]
        return None

    store.fault = forget
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert lost == [0] and sorted(Place(ADDRESS).copies()) == [2, 4, 6] and "FileNotFoundError" in caplog.text


def test_a_checksum_of_the_store_spares_reading_back(store: S3) -> None:
    train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    assert not [path for method, path in store.asked if method == "GET" and path.endswith(".safetensors")]
    assert [path for method, path in store.asked if method == "HEAD" and path.endswith(".safetensors")]


def test_a_large_file_is_uploaded_in_parts_and_checked_by_their_checksums(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with open(file, "wb") as opened:
        opened.write(os.urandom(1 << 20))
        opened.truncate((101 << 20) + 3)
    place, entry = Place(ADDRESS), FileEntry(size=file.stat().st_size, sha256="not looked at")
    place.put(file, "checkpoint-1/large")
    info = place.fs.info(place.path("checkpoint-1/large"))
    assert info["ETag"].strip('"').endswith("-3") and place.has_same(info, file, entry) is True
    place.check("checkpoint-1/large", file, entry)
    with open(file, "r+b") as opened:
        opened.write(b"other")
    assert place.has_same(info, file, entry) is False


def test_uploads_in_parts_of_a_killed_run_are_given_up() -> None:
    fs = s3fs.S3FileSystem()
    for key in ("some/run/checkpoint-1/a", "some/other/a"):
        fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    assert [found["Key"] for found in fs.list_multipart_uploads("bucket")] == ["some/other/a"]


def test_a_bucket_that_does_not_exist_is_refused_and_not_made(store: S3) -> None:
    trainer = build("s3://missing-bucket/run", **RUN)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`save_dir='s3://missing-bucket/run'`: nothing can be written"):
        trainer.train()
    assert trainer.progress.step == 0 and not s3fs.S3FileSystem().exists("missing-bucket")


def test_wrong_credentials_are_told_before_the_first_step(store: S3) -> None:
    def refuse(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        if method != "PUT":
            return None
        answer("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]

    store.fault = refuse
    with pytest.raises(ConfigError, match="nothing can be written there, or deleted: PermissionError"):
        build(ADDRESS, **RUN).train()  # type: ignore[arg-type]


def test_a_server_that_is_gone_is_told_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{programs.free_port()}")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match="nothing can be written"):
        build(ADDRESS, **RUN).train()  # type: ignore[arg-type]


def test_a_server_that_goes_away_during_the_run_costs_no_step(
    store: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMNITRAIN_UPLOAD_WAIT", "1")
    store.fault = refusing("503 Slow Down", 10**9)
    with caplog.at_level(logging.INFO):
        trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert trainer.progress.step == 6 and "Not everything was uploaded" in caplog.text
    assert not Place(ADDRESS).copies()


# --- killed


def script() -> str:
    return textwrap.dedent(
        f"""
        import sys, time
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from resuming import Callback, build, disturb_generators

        class Waits(Callback):  # so that checkpoints are uploaded in order
            def on_step_start(self, trainer):
                while not trainer.store._upload._is_idle():
                    time.sleep(0.01)

        disturb_generators()
        build({ADDRESS!r}, callbacks=lambda: [Waits()], **{RUN!r}).train(resume_from="auto")
        """
    )


@pytest.mark.parametrize(
    "at", ["checkpoint-4/model.safetensors", "checkpoint-4/omnitrain.json", "run/last", "checkpoint-6/optimizer"]
)
def test_a_run_killed_in_the_middle_of_an_upload_goes_on_on_another_machine(
    at: str, store: S3, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    started: list[int] = []
    is_known, is_dead = threading.Event(), threading.Event()

    def kill(method: str, path: str, environ: Any, answer: Any) -> list[bytes] | None:
        if method == "PUT" and at in path and not is_dead.is_set() and (at != "run/last" or 4 in there):
            assert is_known.wait(60)
            os.kill(started[0], signal.SIGKILL)
            is_dead.set()
            answer("500 Internal Server Error", [])
            return [b""]
        if method == "PUT" and path.endswith("checkpoint-4/omnitrain.json"):
            there.append(4)
        return None

    there: list[int] = []
    store.fault = kill
    environment = {**os.environ, "OMNITRAIN_LOCAL_DIR": str(tmp_path / "first machine"), "PYTHONPATH": str(ROOT)}
    with programs.started(sys.executable, "-c", script(), env=environment) as program:
        started.append(program.pid)
        is_known.set()
        assert program.wait(programs.LIMIT) == -signal.SIGKILL
    assert is_dead.is_set()
    store.fault = lambda method, path, environ, answer: None
    complete = sorted(Place(ADDRESS).copies())
    assert complete == ([2] if "checkpoint-4" in at else [2, 4])
    found = play(ADDRESS, [{}], **RUN)  # type: ignore[arg-type]
    assert not differences({name: undisturbed[name] for name in found if name not in ("stream", "rates")},
                           {name: found[name] for name in found if name not in ("stream", "rates")})  # fmt: skip
    assert max(Place(ADDRESS).copies()) == 6 and content_of(ADDRESS)["last"] == b"checkpoint-6\n"


def test_a_checkpoint_there_is_refused_if_one_object_is_missing() -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    lose_machine()
    s3fs.S3FileSystem().rm_file("bucket/some/run/checkpoint-6/model.safetensors")
    with pytest.raises(CheckpointError, match="checkpoint-6' does not exist, or is no complete checkpoint"):
        make_store(ADDRESS).resolve(f"{ADDRESS}/checkpoint-6")
    found = make_store(ADDRESS).resolve("auto")
    assert found is not None and found[0].name == "checkpoint-4"
