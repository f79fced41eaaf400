"""Runs whose `save_dir` is the address of a remote store: uploads, downloads, faults, locks and kills."""

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import programs
import pytest
import stores
from forging import spoil
from fsspec.registry import known_implementations
from marks import thinned
from resuming import assert_same, build, comparable, outcome, play, train
from stores import InMemory, Watched, content_of, mirroring, remote_folders, remote_steps, save_texts

from omnitrain import CheckpointError, ConfigError, MissingExtraError
from omnitrain.callbacks.retention import to_delete
from omnitrain.checkpoint import remote, uploader
from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.mirrored_store import make_store
from omnitrain.checkpoint.remote import RemoteFolder, local_copy
from omnitrain.checkpoint.store import MANIFEST
from omnitrain.core.paths import local_folder
from omnitrain.distributed.processes import identify_process

RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "log_steps": 1}
SHORT: dict[str, Any] = {**RUN, "epochs": 1}
ADDRESS: Any = "watched://bucket/run"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Watched]]:
    for name, value in {"OMNITRAIN_LOCAL_DIR": str(tmp_path / "local"), **stores.shelf_of(tmp_path / "shelf")}.items():
        monkeypatch.setenv(name, value)
    for name, seconds in {"PAUSE_S": 0.01, "LONGEST_PAUSE_S": 0.05, "WATCH_S": 0.2}.items():
        monkeypatch.setattr(uploader, name, seconds)
    with stores.watching() as watched:
        yield watched


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of RUN in a local folder, without what each part of a run saw."""
    return comparable(play(tmp_path_factory.mktemp("undisturbed") / "run", **RUN))


class Finished(NamedTuple):
    """A run on a store that has ended: its trainer, its local folder, and the objects on the store."""

    trainer: Any
    folder: Path
    objects: dict[str, bytes]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    with pytest.MonkeyPatch.context() as patch, stores.watching():
        patch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path_factory.mktemp("finished")))
        return Finished(train(build(ADDRESS, **RUN)), local_folder(ADDRESS), content_of(ADDRESS))


@pytest.fixture
def finished(finished_run: Finished, store: type[Watched]) -> Finished:
    """A run that has ended, which the store has and this machine has not."""
    for name, data in finished_run.objects.items():
        fill(name, data)
    store.done.clear()
    return finished_run


def resolved_name(which: str) -> str:
    return make_store(ADDRESS).resolve(which)[0].name  # type: ignore[index]


def fill(name: str, data: bytes) -> None:
    """Put an object into the run on the store."""
    InMemory().pipe_file(f"/bucket/run/{name}", data)


def written(store: type[Watched]) -> list[str]:
    """Return the paths that were written, in order, without locks and probes."""
    return [path for what, path in store.done if what == "write" and not path.endswith((LOCK, ".probe"))]


def set_fault(store: type[Watched], fault: Callable[[str, str], None] = lambda what, path: None) -> None:
    store.fault = staticmethod(fault)


def failing(times: int, pattern: str = "", error: type[Exception] = OSError, what: str = "write") -> Any:
    """Return a fault by which so many operations on matching paths fail."""
    count = itertools.count()

    def fault(operation: str, path: str) -> None:
        matches = operation == what and re.search(pattern, path) and not path.endswith(".probe")
        if matches and next(count) < times:
            raise error("503 Slow Down")

    return fault


ALWAYS = 10**9


def test_upload_equals_the_local_folder_and_run(finished: Finished, undisturbed: dict[str, Any]) -> None:
    trainer, objects = finished.trainer, dict(finished.objects)
    assert_same(comparable(outcome(trainer)), undisturbed)
    assert trainer.save_dir == finished.folder
    assert remote_steps(ADDRESS) == [entry.step for entry in trainer.store.checkpoint_infos()] == [2, 4, 6]
    assert objects.pop("last") == b"checkpoint-6\n"
    assert objects.pop("best").decode().strip() == trainer.metrics["best_checkpoint"]
    for name, data in objects.items():
        assert (finished.folder / name).read_bytes() == data, name
    assert {"metrics.jsonl", "run.json", "config.yaml"} <= objects.keys() and LOCK not in objects
    assert all(f"save_dir: {ADDRESS}" in text for text in (str(trainer.config), objects["config.yaml"].decode()))


def test_upload_order_is_files_manifest_pointers(store: type[Watched]) -> None:
    """A step that is saved again sends what has changed, and the store has a complete checkpoint at any time."""
    steps: list[list[int]] = []

    def save(text: str) -> None:
        def write(folder: Path) -> None:
            (folder / "same").write_text("same")
            (folder / "other").write_text(text)

        stores.save_files(mirror, 1, write, {}, 1.0, True)

    def look(what: str, path: str) -> None:
        if what in ("write", "remove"):
            set_fault(store)
            steps.append(remote_steps(ADDRESS))
            set_fault(store, look)

    with mirroring(ADDRESS) as mirror:
        (mirror.root / "metrics.jsonl").write_text("{}")
        save("a")
        stores.wait_for(lambda: "best" in content_of(ADDRESS))
        names = written(store)
        assert set(names[:2]) == {"checkpoint-1/same", "checkpoint-1/other"}
        assert names[2:] == ["metrics.jsonl", f"checkpoint-1/{MANIFEST}", "last", "best"]
        store.done.clear()
        set_fault(store, look)
        save("b")
    changes = {path for path in written(store) if "checkpoint" in path}
    assert changes == {"checkpoint-1/other", f"checkpoint-1/{MANIFEST}"}
    assert len(steps) > 3 and all(present == [1] for present in steps)
    objects = content_of(ADDRESS)
    assert objects["checkpoint-1/other"] == b"b" and not any(".old" in name for name in objects)


def test_upload_of_save_checkpoint_before_it_returns() -> None:
    trainer = train(build(ADDRESS, **SHORT))
    stores.lose_machine(ADDRESS)
    InMemory.store.clear()
    trainer.save_checkpoint()
    assert remote_steps(ADDRESS) == [3] and LOCK not in content_of(ADDRESS)


def test_resume_does_not_download_what_is_local(finished: Finished, store: type[Watched]) -> None:
    """It updates the pointers of a killed run."""
    RemoteFolder(ADDRESS).write("last", b"checkpoint-4\n")
    for _ in range(2):
        store.done.clear()
        train(build(ADDRESS, **RUN), resume_from="auto")
        assert content_of(ADDRESS)["last"] == b"checkpoint-6\n"
    assert written(store) == []
    store.done.clear()
    assert train(build(ADDRESS, **{**RUN, "epochs": 3}), resume_from="auto").progress.step == 9
    reads = [path for what, path in store.done if what == "read" and path.endswith(".safetensors")]
    assert all(path.startswith(("checkpoint-8", "checkpoint-9")) for path in reads)


def test_resume_takes_what_is_newer_on_the_store(finished: Finished, caplog: pytest.LogCaptureFixture) -> None:
    """The machine of an earlier part of the run returns with its old folder."""
    folder = shutil.copytree(finished.folder, local_folder(ADDRESS), symlinks=True)
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.rmtree(folder / name)
    (folder / "last").unlink()
    (folder / "last").symlink_to("checkpoint-2")
    journal = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(row for row in journal if json.loads(row)["step"] <= 2))
    with caplog.at_level(logging.INFO):
        train(build(ADDRESS, **{**RUN, "epochs": 3}), resume_from="auto")
    assert "Resumed from checkpoint-6" in caplog.text
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 10))


def test_resume_skips_incomplete_checkpoints(finished: Finished, tmp_path: Path, caplog: Any) -> None:
    """It saves them again; "last" and "best" are errors."""
    del InMemory.store["/bucket/run/checkpoint-6/model.safetensors"]
    assert finished.objects["last"] == finished.objects["best"] == b"checkpoint-6\n"
    for which in ("last", "best"):
        for name, save_dir in ((which, ADDRESS), (f"{ADDRESS}/{which}", tmp_path / "other")):
            with pytest.raises(CheckpointError, match=r"'model.safetensors' is missing.* is 'checkpoint-4'"):
                build(save_dir, **RUN).load_checkpoint(name)
    with pytest.raises(CheckpointError, match="checkpoint-6' does not exist, or is not a complete checkpoint"):
        make_store(ADDRESS).resolve(f"{ADDRESS}/checkpoint-6")
    assert resolved_name("auto") == "checkpoint-4"
    assert "checkpoint-6" in caplog.text and "is incomplete" in caplog.text
    train(build(ADDRESS, **RUN), resume_from="auto")
    stores.lose_machine(ADDRESS)
    assert resolved_name("last") == "checkpoint-6"


def test_download_by_several_threads_at_once(finished: Finished, store: type[Watched]) -> None:
    barrier = threading.Barrier(4, timeout=30)

    def meet(what: str, path: str) -> None:
        if what == "read" and path.endswith("optimizer.safetensors"):
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait()

    set_fault(store, meet)
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(local_copy, [f"{ADDRESS}/last"] * 4))
    assert len(set(folders)) == 1 and folders[0].name == "checkpoint-6"
    assert [path.name for path in folders[0].parent.iterdir()] == ["checkpoint-6"]


def test_download_verifies_hashes(finished: Finished, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged local folder is replaced by what is on the store."""
    name = "checkpoint-6/model.safetensors"
    data = finished.objects[name]
    fill(name, data[:-1] + bytes([data[-1] ^ 1]))
    assert resolved_name("auto") == "checkpoint-4"
    assert "watched://bucket/run/checkpoint-6" in caplog.text and "does not match its sha256" in caplog.text
    with pytest.raises(CheckpointError, match="does not match its sha256"):
        make_store(ADDRESS).resolve("last")
    assert not list(local_folder(ADDRESS).glob("*.tmp"))
    stores.lose_machine(ADDRESS)
    folder = shutil.copytree(finished.folder, local_folder(ADDRESS), symlinks=True)
    del InMemory.store[f"/bucket/run/{name}"]
    assert resolved_name("last") == resolved_name("best") == "checkpoint-6"  # it is complete on this machine
    fill(name, data)
    spoil(folder / name, "empty")
    assert resolved_name("auto") == "checkpoint-6" and "was renamed" in caplog.text


def test_load_checkpoint_by_address_or_name(finished: Finished, tmp_path: Path) -> None:
    for which, name in (("checkpoint-2", "checkpoint-2"), ("best", "checkpoint-6")):
        assert build(tmp_path / "other", **RUN).load_checkpoint(f"{ADDRESS}/{which}").name == name
        assert build(ADDRESS, **RUN).load_checkpoint(f"{ADDRESS}/{which}") == local_folder(ADDRESS) / name
    assert train(build(tmp_path / "new", **RUN), resume_from=f"{ADDRESS}/best").progress.step == 6
    stores.lose_machine(ADDRESS)
    mirror = make_store(ADDRESS)
    mirror.download("checkpoint-6")  # as the best weights of a run that ends on another machine are loaded
    assert mirror.verify(mirror.root / "checkpoint-6")["best"]
    mirror.download("checkpoint-77")  # which does not exist


def test_init_from_address(finished: Finished) -> None:
    def weights(source: Any) -> dict[str, Any]:
        return dict(build(None, epochs=1, init_from=source).get_model().state_dict())

    for name in ("checkpoint-6", "last", "checkpoint-6/model.safetensors"):
        assert_same(weights(f"{ADDRESS}/{name}"), weights(finished.folder / "checkpoint-6"), name)
    with pytest.raises(CheckpointError, match=r"is a run folder.*Did you mean 'watched://bucket/run/checkpoint-6'"):
        build(None, init_from=ADDRESS)
    with pytest.raises(CheckpointError, match="does not exist, or is empty"):
        build(None, init_from="watched://bucket/none")


def test_retention_on_the_store_follows_the_folder(finished: Finished, store: type[Watched]) -> None:
    """It includes checkpoints that are only on the store, and deletes nothing before the new one is complete."""
    trainer = train(build(ADDRESS, **{**RUN, "epochs": 3}, save_total_limit=1, keep_best=1), resume_from="auto")
    steps = remote_steps(ADDRESS)
    assert steps == [entry.step for entry in trainer.store.checkpoint_infos()]
    assert 9 in steps and len(steps) <= 2 and 2 not in steps
    assert remote_folders(ADDRESS) == {f"checkpoint-{step}" for step in steps}
    changes = [what for what, path in store.done if path.endswith(MANIFEST) and what in ("write", "remove")]
    assert changes[0] == "write" and "remove" in changes


def test_retention_waits_for_a_running_upload(store: type[Watched]) -> None:
    proceed, is_uploading = threading.Event(), threading.Event()

    def block(what: str, path: str) -> None:
        if what == "write" and "checkpoint-1/model" in path:
            is_uploading.set()
            assert proceed.wait(programs.LIMIT)

    set_fault(store, block)
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 1)
        assert is_uploading.wait(programs.LIMIT)
        for step in (2, 3):
            save_texts(mirror, step)
            mirror.prune(lambda infos: to_delete(infos, keep_last=1))
        assert [entry.step for entry in mirror.checkpoint_infos()] == [1, 3]
        proceed.set()
    assert [entry.step for entry in mirror.checkpoint_infos()] == [3] and remote_steps(ADDRESS) == [3]
    assert content_of(ADDRESS)["last"] == b"checkpoint-3\n"


def test_overwrite_is_needed_to_replace_a_run(finished: Finished) -> None:
    with pytest.raises(ConfigError, match="already holds checkpoints, the newest being 'checkpoint-6'"):
        build(ADDRESS, **RUN).train()
    train(build(ADDRESS, **SHORT, overwrite=True))
    assert remote_steps(ADDRESS) == [2, 3] and content_of(ADDRESS)["last"] == b"checkpoint-3\n"
    copies = RemoteFolder(ADDRESS).complete_checkpoints().values()
    assert max(copy.info.sequence for copy in copies) > 3  # newer than what it replaced


# --- faults


@pytest.mark.processes
def test_upload_outage_is_logged_once(store: type[Watched], caplog: pytest.LogCaptureFixture) -> None:
    fails, fails_for_file = failing(7, "checkpoint-2/"), failing(2, "/run.json$", FileNotFoundError)
    set_fault(store, lambda what, path: (fails(what, path), fails_for_file(what, path))[0])
    with caplog.at_level(logging.INFO):
        trainer = train(build(ADDRESS, **RUN))
    assert trainer.progress.step == 6 and remote_steps(ADDRESS) == [2, 4, 6]
    assert {"run.json", "config.yaml", "metrics.jsonl"} <= content_of(ADDRESS).keys()
    assert caplog.text.count("Nothing can be uploaded") == 1 and caplog.text.count("uploading works again") == 1
    assert "503 Slow Down" in caplog.text


@pytest.mark.processes
def test_upload_that_never_works_is_left_to_the_next_run(store: type[Watched], caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OMNITRAIN_UPLOAD_WAIT", "0.1")
    monkeypatch.setattr(uploader, "WAIT_NOTICE_S", 0.0)
    set_fault(store, failing(ALWAYS, "checkpoint"))
    with caplog.at_level(logging.INFO):
        trainer = train(build(ADDRESS, **RUN))
    assert trainer.progress.step == 6 and remote_steps(ADDRESS) == []
    assert "Waiting for the upload of checkpoint-2, checkpoint-4, checkpoint-6 (" in caplog.text
    assert "Not everything was uploaded" in caplog.text and str(trainer.save_dir) in caplog.text
    set_fault(store)
    monkeypatch.delenv("OMNITRAIN_UPLOAD_WAIT")
    train(build(ADDRESS, **RUN), resume_from="auto")
    assert remote_steps(ADDRESS) == [2, 4, 6]


@pytest.mark.processes
def test_upload_does_not_wait_if_a_name_is_blocked(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has the name of a checkpoint's folder: this is reported at the start, and the end waits for nothing."""
    monkeypatch.setenv("OMNITRAIN_UPLOAD_WAIT", "60")
    fill("checkpoint-4", b"x")
    trainer = train(build(ADDRESS, **RUN))
    assert trainer.progress.step == 6 and 4 not in remote_steps(ADDRESS)
    for text in ("has a file 'checkpoint-4' with the name of a checkpoint's folder", "Not everything was uploaded",
                 "Delete the file or folder with this name there"):  # fmt: skip
        assert text in caplog.text
    assert "no progress" not in caplog.text


@pytest.mark.processes
def test_upload_failure_ends_a_run_with_save_required(store: type[Watched]) -> None:
    set_fault(store, failing(ALWAYS, "checkpoint"))
    with pytest.raises(CheckpointError, match=r"cannot be uploaded|Not everything was uploaded"):
        build(ADDRESS, **RUN, save_required=True).train()
    assert LOCK not in content_of(ADDRESS)


@pytest.mark.processes
def test_upload_after_its_timeout_keeps_the_lock(store: Any, caplog: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Nothing is written after the run has given up, and no other run begins before that is certain."""
    proceed, is_hanging, later = threading.Event(), threading.Event(), list[str]()

    def hang(what: str, path: str) -> None:
        if is_hanging.is_set():
            later.append(path if what == "write" else "")
        elif what == "write" and "checkpoint-6/model" in path:
            is_hanging.set()
            proceed.wait(programs.LIMIT)

    set_fault(store, hang)
    with monkeypatch.context() as patch:
        patch.setenv("OMNITRAIN_UPLOAD_WAIT", "0.1")
        patch.setattr(uploader, "SHUTDOWN_S", 0.1)
        with mirroring(ADDRESS) as mirror:
            save_texts(mirror, 6)
            assert is_hanging.wait(programs.LIMIT)
    assert "Not everything was uploaded" in caplog.text
    assert "stays locked until the current upload" in caplog.text
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="is in use by process"):
        make_store(ADDRESS).acquire()
    later.clear()
    proceed.set()
    stores.wait_for(lambda: LOCK not in content_of(ADDRESS))
    assert not [path for path in later if path and not path.endswith(LOCK)]
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 7)
    assert remote_steps(ADDRESS) == [7] and remote_folders(ADDRESS) == {"checkpoint-7"}


@pytest.mark.processes
def test_upload_that_hangs_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    script = """
import time, stores
from omnitrain.checkpoint import uploader
uploader.SHUTDOWN_S = 0.1
stores.Watched.fault = staticmethod(lambda what, path: time.sleep(10**6 * ("model" in path)))
with stores.mirroring("watched://bucket/run") as mirror:
    stores.save_texts(mirror, 1)
"""
    environment = programs.launch_environment(OMNITRAIN_UPLOAD_WAIT="0.1", OMNITRAIN_LOCAL_DIR=str(tmp_path))
    programs.run(sys.executable, "-c", script, env=environment, check=True)


@pytest.mark.parametrize("how", ["lost", "cut", "changed"])
def test_upload_is_verified_and_retried(how: str, store: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    count, put_file = itertools.count(), InMemory.put_file

    def put_wrong(self: InMemory, lpath: str, rpath: str, **options: Any) -> None:
        put_file(self, lpath, rpath, **options)
        if next(count) < 3:
            data = self.cat_file(rpath)
            self.rm_file(rpath)
            if how != "lost":
                self.pipe_file(rpath, data[:-1] if how == "cut" else data[:-1] + b"\0")

    monkeypatch.setattr(InMemory, "put_file", put_wrong)
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 2)
    assert next(count) == 4 and remote_steps(ADDRESS) == [2]
    assert content_of(ADDRESS)["checkpoint-2/model.safetensors"] == b"weights"


def test_save_dir_is_probed_before_the_first_step(store: type[Watched]) -> None:
    def reject(what: str, path: str) -> None:
        raise PermissionError("Access Denied for key=AKIA secret=abcdef")

    set_fault(store, reject)
    trainer = build(ADDRESS, **SHORT)
    message = r"`save_dir='watched://bucket/run'`: files cannot be written.*Access Denied"
    with pytest.raises(ConfigError, match=message) as caught:
        trainer.train()
    assert trainer.progress.step == 0 and "abcdef" not in str(caught.value)
    set_fault(store)
    trainer.train()  # nothing is left locked


def test_listing_of_a_store_is_bounded(finished: Finished, store: type[Watched], monkeypatch: Any) -> None:
    """Neither one that never ends nor one that fills the memory; a store that cannot be read is an error."""

    def fail(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            build(ADDRESS, **RUN).train(resume_from="auto")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "MAX_OBJECTS", 3)
        fail("files, more than the 3 of any run")
    set_fault(store, failing(ALWAYS, MANIFEST, ValueError, "read"))
    fail(r"cannot be read: ValueError: 503 Slow Down. Check the address")
    ends = threading.Event()
    monkeypatch.setattr(remote, "LISTING_S", 0.05)
    monkeypatch.setattr(InMemory, "find", lambda *args, **options: ends.wait(programs.LIMIT) and {})
    try:
        fail("still being listed after 0 s")
    finally:
        ends.set()


@pytest.mark.parametrize(("name", "read"), [
    ("last", lambda: local_copy(f"{ADDRESS}/last")), ("run.lock", lambda: build(ADDRESS, **RUN).train()),
    (f"checkpoint-6/{MANIFEST}", lambda: local_copy(f"{ADDRESS}/checkpoint-6")),
    ("metrics.jsonl", lambda: build(ADDRESS, **RUN).train(resume_from="auto")),
])  # fmt: skip
def test_size_of_remote_files_is_bounded(
    name: str, read: Any, finished: Finished, store: type[Watched], monkeypatch: Any, caplog: Any
) -> None:
    """By what the store says, before it fills the memory or the disk."""
    info, find = InMemory.info, InMemory.find
    fill(name, finished.objects.get(name, b"{}"))

    def enlarged(entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"size": 1 << 50} if entry["name"].endswith(f"/bucket/run/{name}") else entry

    def find_enlarged(self: Any, *args: Any, **options: Any) -> Any:
        return {key: enlarged(entry) for key, entry in find(self, *args, **options).items()}

    monkeypatch.setattr(InMemory, "info", lambda self, key, **options: enlarged(info(self, key, **options)))
    monkeypatch.setattr(InMemory, "find", find_enlarged)
    with pytest.raises(CheckpointError) as caught:
        read()
    message = "1.1 PB to download" if name == "metrics.jsonl" else "has 1125899906842624 bytes, and at most"
    assert message in str(caught.value) + caplog.text
    assert ("read", name) not in store.done


@pytest.mark.parametrize("more", [-5, 5])
def test_download_reports_objects_of_other_sizes(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the store lists: a file that is cut off would be a file of other weights."""
    fill("a", bytes(50))
    listing = {"/bucket/run/a": {"name": "/bucket/run/a", "size": 50 + more, "type": "file"}}
    monkeypatch.setattr(InMemory, "find", lambda *args, **options: listing)
    with pytest.raises(CheckpointError, match=f"'a' has 50 bytes, and the store reports {50 + more}"):
        local_copy(ADDRESS)


@pytest.mark.parametrize(("address", "error", "message"), [
    ("nosuch://bucket/run", ConfigError, "fsspec knows no file system 'nosuch'"),
    ("file" + ":///runs/a", ConfigError, "Pass the path of a folder"),
    ("https://host/run", ConfigError, "Nothing can be written there"),
    ("memory://", ConfigError, "names no folder"),
    ("gone://bucket/run", MissingExtraError, "pip install gone_package"),
    ("sunk://bucket/run", ConfigError, 'Sunk requires "paramiko" to be installed. Install it'),
])  # fmt: skip
def test_save_dir_address_is_validated_by_the_constructor(
    address: Any, error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sunk = {"class": "fsspec.implementations.nothing.Sunk", "err": 'Sunk requires "paramiko" to be installed'}
    monkeypatch.setitem(known_implementations, "sunk", sunk)
    monkeypatch.setitem(known_implementations, "gone", {"class": "gone_package.Gone", "err": "gone"})
    with pytest.raises(error, match=message):
        build(address, **RUN)
    with pytest.raises(error, match=message):
        build(None).load_checkpoint(f"{address}/checkpoint-1" if address != "memory://" else address)


# --- two runs


def owner(**changes: Any) -> bytes:
    return json.dumps({**identify_process(), "token": "0badcafe", "at": time.time(), **changes}).encode()


def lock_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "omnitrain-remote-lock"}


def test_lock_rejects_a_second_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: type[Watched]) -> None:
    """One that could not be removed is taken again."""
    with mirroring(ADDRESS):
        set_fault(store, failing(ALWAYS, what="remove"))
    assert LOCK in content_of(ADDRESS)
    with mirroring(ADDRESS):
        set_fault(store)
        monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "other machine"))
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on '{socket.gethostname()}'"):
            build(ADDRESS, **RUN).train()
    assert LOCK not in content_of(ADDRESS)
    train(build(ADDRESS, **SHORT))


@pytest.mark.parametrize(
    "changes", [{"pid": 2**22 + 5}, {"boot": "another", "at": 0}, {"boot": "another"}], ids=["dead", "old", "silent"]
)
def test_lock_of_a_run_that_is_gone_is_taken_over(changes: dict[str, Any], caplog: Any) -> None:
    RemoteFolder(ADDRESS).write(LOCK, owner(**changes))
    with mirroring(ADDRESS):
        assert b"0badcafe" not in content_of(ADDRESS)[LOCK]
    assert "was left locked by process" in caplog.text and LOCK not in content_of(ADDRESS)


def test_lock_of_a_living_run_is_respected(store: type[Watched]) -> None:
    place, beats = RemoteFolder(ADDRESS), itertools.count()
    place.write(LOCK, owner(boot="another"))

    def beat(what: str, path: str) -> None:
        if what == "read" and path.endswith(LOCK):
            place.write(LOCK, owner(boot="another", beat=next(beats)))

    set_fault(store, beat)
    with pytest.raises(CheckpointError, match="is in use by"):
        make_store(ADDRESS).acquire()


def test_lock_is_not_written_after_its_release(store: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """The release waits for a heartbeat that is being written."""
    monkeypatch.setattr(uploader, "HEARTBEAT_S", 0.02)
    is_beating, proceed = threading.Event(), threading.Event()

    def block(what: str, path: str) -> None:
        if what == "write" and path.endswith(LOCK) and threading.current_thread() in lock_threads():
            is_beating.set()
            proceed.wait(programs.LIMIT)

    with mirroring(ADDRESS):
        set_fault(store, block)
        assert is_beating.wait(programs.LIMIT)
        threads = lock_threads()
        threading.Timer(0.05, proceed.set).start()
    for thread in threads:
        thread.join(programs.LIMIT)
    assert LOCK not in content_of(ADDRESS)


@pytest.mark.processes
def test_lock_taken_over_ends_uploads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(uploader, "HEARTBEAT_S", 0.02)
    earlier = lock_threads()
    with mirroring(ADDRESS) as mirror:
        save_texts(mirror, 1)
        stores.wait_for(lambda: "last" in content_of(ADDRESS))
        while lock_threads() - earlier:  # they end when they see another owner
            RemoteFolder(ADDRESS).write(LOCK, owner())
            time.sleep(0.05)
        save_texts(mirror, 2)
    assert remote_steps(ADDRESS) == [1] and LOCK in content_of(ADDRESS) and "was taken over by" in caplog.text


# --- killed

SHELF: Any = "shelf://bucket/run"
KILLED: dict[str, Any] = {**RUN, "save_total_limit": 1, "async_save": True}


def train_until_killed(at: int, operation: str) -> None:
    """Train until an operation of this kind on the store, which kills the process."""
    count = itertools.count()

    def kill(what: str, path: str) -> None:
        if operation in ("any", what) and next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    set_fault(Watched, kill)
    train(build(SHELF, **KILLED), resume_from="auto")


def check_killed(at: int, operation: str, undisturbed: dict[str, Any], folder: Path) -> bool:
    """Kill a run at an operation and resume it on another machine; return whether it was killed."""
    for name in ("shelf", "local"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "shelf" / "bucket").mkdir(parents=True)
    code = programs.exit_code(programs.fork(lambda: train_until_killed(at, operation)))
    if code == 0:
        return False
    assert code == -signal.SIGKILL
    shutil.rmtree(folder / "local")
    was_complete = 6 in remote_steps(SHELF)
    assert_same(comparable(play(SHELF, [{}], **KILLED)), undisturbed)
    objects, steps = content_of(SHELF), remote_steps(SHELF)
    assert 6 in steps and objects["last"] == b"checkpoint-6\n" and LOCK not in objects, at
    assert remote_folders(SHELF) == {f"checkpoint-{step}" for step in steps}, at
    assert len(steps) <= 2 or was_complete, at  # only a new checkpoint has others deleted
    return True


KILLS = [("write", 9), ("read", 4), ("remove", 1)]


@pytest.mark.processes
@pytest.mark.parametrize(("operation", "at"), thinned([*KILLS, ("any", 30)], KILLS))
def test_run_killed_at_store_operation_resumes(operation: str, at: int, undisturbed: Any, tmp_path: Path) -> None:
    """Of one kind; or at each of them, whatever it is."""
    assert check_killed(at, operation, undisturbed, tmp_path)
    if operation == "any":
        next(number for number in itertools.count() if not check_killed(number, operation, undisturbed, tmp_path))
