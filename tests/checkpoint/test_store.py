"""Checkpoint folders survive kills, full disks, damage and moves; retention keeps what it must."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.checkpoint import disk as disk_module
from omnitrain.checkpoint.disk import FileSystem, check_free_space
from omnitrain.checkpoint.manifest import MANIFEST
from omnitrain.checkpoint.retention import Kept, to_delete
from omnitrain.checkpoint.store import Store
from omnitrain.errors import CheckpointError


class Killed(BaseException):
    """The process is gone; whatever it tries to do afterwards does not happen."""


class FaultyDisk(FileSystem):
    """Counts operations and lets one of them, or all from one on, fail in a given way.

    "kill": this and all later operations do not happen; a write is torn in the middle.
    "power cut": the same, and every file that was not synced is empty afterwards.
    "glitch": this operation alone raises OSError; a write is torn.
    "full": from this one on, all that needs space raises OSError.
    """

    def __init__(self, at: int | None = None, mode: str = "kill") -> None:
        self.at, self.mode = at, mode
        self.count = 0
        self.log: list[tuple[str, Path]] = []
        self.unsynced: dict[int, Path] = {}

    def _perform(self, name: str, path: Path, action: Callable[[], object], torn: Callable[[], object]) -> None:
        index, self.count = self.count, self.count + 1
        if self.at is not None and index >= self.at:
            if self.mode in ("kill", "power cut"):
                if index == self.at:
                    torn()
                    self._cut_power()
                raise Killed
            if index == self.at if self.mode == "glitch" else name in ("mkdir", "write", "sync"):
                torn()
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self.log.append((name, path))
        action()

    def _cut_power(self) -> None:
        if self.mode == "power cut":
            lost = set(self.unsynced)
            for folder in {path.parent for path in self.unsynced.values()}:
                top = next((p for p in (folder, *folder.parents) if p.name == "run"), folder)
                for file in top.rglob("*"):
                    if file.is_file() and file.stat().st_ino in lost:
                        file.write_bytes(b"")

    def mkdir(self, path: Path) -> None:
        self._perform("mkdir", path, lambda: FileSystem.mkdir(self, path), lambda: None)

    def write(self, path: Path, data: bytes) -> None:
        def action() -> None:
            FileSystem.write(self, path, data)
            self.unsynced[path.stat().st_ino] = path

        self._perform("write", path, action, lambda: path.write_bytes(data[: len(data) // 2]))

    def link(self, path: Path, name: str) -> None:
        self._perform("link", path, lambda: FileSystem.link(self, path, name), lambda: None)

    def sync(self, path: Path) -> None:
        self._perform("sync", path, lambda: self.unsynced.pop(path.stat().st_ino, None), lambda: None)

    def rename(self, source: Path, target: Path) -> None:
        self._perform("rename", source, lambda: FileSystem.rename(self, source, target), lambda: None)

    def unlink(self, path: Path) -> None:
        def action() -> None:
            self.unsynced.pop(path.stat().st_ino, None)
            FileSystem.unlink(self, path)

        self._perform("unlink", path, action, lambda: None)

    def rmdir(self, path: Path) -> None:
        self._perform("rmdir", path, lambda: FileSystem.rmdir(self, path), lambda: None)


# What the run of most tests saves: (step, score, is it the best so far). The n-th save is told by its number n.
# Step 20 is saved twice; the best is not among the newest two; later the best changes hands.
SAVES = [
    (10, 3.0, True),
    (20, 9.0, True),
    (20, 9.0, True),
    (30, None, False),
    (40, 2.0, False),
    (50, 9.5, True),
]


def save(store: Store, number: int) -> None:
    """Do the `number`-th save (from 1) of SAVES and prune."""
    step, score, best = SAVES[number - 1]

    def write(folder: Path) -> None:
        store.fs.write(folder / "model.safetensors", f"weights of save {number}".encode() * 3)
        store.fs.mkdir(folder / "optimizer")
        store.fs.write(folder / "optimizer" / "shard-00001.safetensors", f"moments of save {number}".encode())
        store.fs.write(folder / "rng.json", b"[]")

    store.save(step, write, {"number": number}, score=score, best=best)
    store.prune(keep_last=2)


def attempt(store: Store, number: int) -> CheckpointError | None:
    try:
        save(store, number)
    except CheckpointError as error:
        return error
    return None


def number_of(found: tuple[Path, dict[str, Any]] | None) -> int:
    """Return which save a resolved checkpoint holds, after a look at its files; 0 for none."""
    if found is None:
        return 0
    path, content = found
    assert (path / "model.safetensors").read_text() == f"weights of save {content['number']}" * 3
    assert content["step"] == SAVES[content["number"] - 1][0]
    return content["number"]


def best_after(number: int) -> int:
    return max((n for n in range(1, number + 1) if SAVES[n - 1][2]), default=0)


def snapshot(root: Path) -> dict[str, str]:
    """Return all files under a folder with their text, less what tells one saving from a repeated one."""
    texts = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            text = path.read_text()
            if path.name == MANIFEST:
                content = json.loads(text)
                text = json.dumps({key: content[key] for key in content if key not in ("sequence", "sha256")})
            texts[path.relative_to(root).as_posix()] = text
        else:
            texts[path.relative_to(root).as_posix()] = os.readlink(path) if path.is_symlink() else ""
    return texts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def memory() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the tests that make thousands of files: in memory, where there is such a place."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], int]:
    """The files of a run that nothing happened to, and the number of its file operations."""
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    store = Store(root, FaultyDisk())
    for number in range(1, len(SAVES) + 1):
        save(store, number)
    assert isinstance(store.fs, FaultyDisk)
    return snapshot(root), store.fs.count


def resolve_after_kill(root: Path, done: int) -> int:
    """Check what a new process finds after `done` saves had returned; return the number of the save to go on from."""
    store = Store(root)
    found = number_of(store.resolve("auto"))
    assert found in (done, done + 1)
    if found:
        assert number_of(store.resolve("last")) == found
        assert number_of(store.resolve("best")) == best_after(found)
    for pointer in (root / "last", root / "best"):
        if os.path.lexists(pointer):
            name = os.readlink(pointer)
            assert (root / name).exists() or (root / f"{name}.old").exists()
    return found


def finish(root: Path, done: int, disk: FileSystem) -> None:
    store = Store(root, disk)
    for number in range(done + 1, len(SAVES) + 1):
        save(store, number)


@pytest.mark.parametrize("mode", ["kill", "power cut"])
def test_kill_at_any_operation_leaves_the_previous_or_the_new_checkpoint(
    undisturbed: tuple[dict[str, str], int], mode: str
) -> None:
    expected, operations = undisturbed
    with memory() as folder:
        for k in range(operations):
            root = Path(folder) / str(k) / "run"
            root.parent.mkdir()
            store, done = Store(root, FaultyDisk(at=k, mode=mode)), 0
            with contextlib.suppress(Killed):
                for number in range(1, len(SAVES) + 1):
                    save(store, number)
                    done = number
            assert done < len(SAVES)
            found = resolve_after_kill(root, done)
            # A last save whose pointers or pruning were cut off is repaired by whatever is saved next.
            finish(root, min(found, len(SAVES) - 1), FaultyDisk())
            assert snapshot(root) == expected
    print(f"{operations} kill points ({mode})")
    assert operations > 100


@settings(max_examples=40, deadline=None)
@given(kills=st.lists(st.integers(0, 90), max_size=8), mode=st.sampled_from(["kill", "power cut"]))
def test_kills_during_recovery_from_kills_lose_nothing_either(
    undisturbed: tuple[dict[str, str], int], kills: list[int], mode: str
) -> None:
    with memory() as folder:
        root, done = Path(folder) / "run", 0
        for k in kills:
            store = Store(root, FaultyDisk(at=k, mode=mode))
            with contextlib.suppress(Killed):
                for number in range(min(done, len(SAVES) - 1) + 1, len(SAVES) + 1):
                    save(store, number)
                    done = number
            done = resolve_after_kill(root, done)
        finish(root, min(done, len(SAVES) - 1), FaultyDisk())
        assert snapshot(root) == undisturbed[0]


def test_write_error_at_any_operation_keeps_the_previous_checkpoint_and_no_partial_one(
    undisturbed: tuple[dict[str, str], int],
) -> None:
    expected, operations = undisturbed
    refused = 0
    with memory() as folder:
        for k in range(operations):
            root = Path(folder) / str(k) / "run"
            root.parent.mkdir()
            store = Store(root, FaultyDisk(at=k, mode="glitch"))
            for number in range(1, len(SAVES) + 1):
                error = attempt(store, number)
                if error is not None:
                    refused += 1
                    assert isinstance(error.__cause__, OSError)
                    assert f"checkpoint-{SAVES[number - 1][0]}" in str(error)
                    assert not list(root.glob("*.tmp"))
                    assert all(path.with_suffix("").exists() for path in root.glob("*.old"))
                    resolve_after_kill(root, number - 1)
                    save(store, number)
            resolve_after_kill(root, len(SAVES))
            # What a failed pruning left is gone after one more save.
            save(store, len(SAVES))
            assert snapshot(root) == expected
    assert refused > 50


def test_disk_that_stays_full_keeps_the_previous_checkpoints_until_there_is_space_again(
    undisturbed: tuple[dict[str, str], int],
) -> None:
    expected, operations = undisturbed
    with memory() as folder:
        for k in range(operations):
            root = Path(folder) / str(k) / "run"
            root.parent.mkdir()
            disk = FaultyDisk(at=k, mode="full")
            store, done = Store(root, disk), 0
            for number in range(1, len(SAVES) + 1):
                error = attempt(store, number)
                assert error is not None or done == number - 1, "saved after the disk was full"
                if error is None:
                    done = number
                else:
                    assert "No space left" in str(error)
            assert not list(root.glob("checkpoint-*.*"))
            resolve_after_kill(root, done)
            disk.at = None
            for number in range(min(done, len(SAVES) - 1) + 1, len(SAVES) + 1):
                save(store, number)
            assert snapshot(root) == expected


def test_error_in_the_writer_itself_comes_through_and_leaves_nothing(run: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Store(run).save(10, write, {})
    assert list(run.iterdir()) == []


def test_everything_is_on_the_disk_before_the_checkpoint_gets_its_name(run: Path) -> None:
    disk = FaultyDisk()
    store = Store(run, disk)
    save(store, 1)
    folder = store.temporary(10)
    renamed = disk.log.index(("rename", folder))
    synced = {path for name, path in disk.log[:renamed] if name == "sync"}
    inside = {folder / path.relative_to(run / "checkpoint-10") for path in (run / "checkpoint-10").rglob("*")}
    assert synced >= inside | {folder, run.parent}
    assert disk.log[renamed + 1] == ("sync", run)
    assert [path for name, path in disk.log[:renamed] if name == "write"][-1].name == MANIFEST


def test_real_file_system_syncs_files_and_folders(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    store = Store(run)
    save(store, 1)
    everything = {path.stat().st_ino for path in run.rglob("*")} | {run.stat().st_ino}
    assert everything <= set(synced)


def damages(data: bytes) -> Iterator[bytes | None]:
    """Yield a file's content after a deletion (None), truncations, an addition and bit flips."""
    yield None
    yield b""
    yield data[:-1]
    yield data + b"\0"
    for index in range(len(data)):
        yield data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :]


def test_no_damage_to_any_file_goes_unnoticed(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(run)
    for number in (1, 2):
        save(store, number)
    newest, cases = run / "checkpoint-20", 0
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        name, data = file.relative_to(newest).as_posix(), file.read_bytes()
        for damaged in damages(data):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            for which in ("last", "best", newest):
                with pytest.raises(CheckpointError, match=r"checkpoint-20.*is (damaged|incomplete)") as caught:
                    Store(run).resolve(which)
                assert repr(name) in str(caught.value)
                assert "The newest complete one is 'checkpoint-10'." in str(caught.value)
            caplog.clear()
            assert number_of(Store(run).resolve("auto")) == 1
            assert repr(name) in caplog.text and "Taking 'checkpoint-10' instead" in caplog.text
            cases += 1
        file.write_bytes(data)
    assert number_of(store.resolve("auto")) == 2
    print(f"{cases} corruption cases")
    assert cases > 500


def test_auto_is_none_only_where_there_is_no_checkpoint(run: Path) -> None:
    assert Store(run).resolve("auto") is None
    save(Store(run), 1)
    (run / "checkpoint-10" / "rng.json").unlink()
    with pytest.raises(CheckpointError, match=r"None of the checkpoints .*'rng.json' is missing"):
        Store(run).resolve("auto")


def test_names_and_paths_that_are_not_there_are_errors(run: Path) -> None:
    store = Store(run)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        store.resolve("last")
    store.save(10, lambda folder: None, {})
    with pytest.raises(CheckpointError, match=r"No checkpoint .* was saved as the best"):
        store.resolve("best")
    with pytest.raises(CheckpointError, match=r"checkpoint-30' does not exist\. The newest .*'checkpoint-10'"):
        store.resolve(run / "checkpoint-30")
    with pytest.raises(CheckpointError, match=r"is a run folder.*checkpoint-10"):
        store.resolve(run)


def test_checkpoint_is_found_by_path_by_name_and_by_the_path_of_a_pointer(run: Path) -> None:
    store = Store(run)
    for number in (1, 2, 4):
        save(store, number)
    assert number_of(store.resolve(str(run / "checkpoint-20"))) == 2
    assert number_of(store.resolve("checkpoint-20")) == 2
    assert number_of(store.resolve(run / "best")) == 2
    assert number_of(Store(run.parent / "another run").resolve(run / "last")) == 4


def test_pointers_are_links_beside_the_checkpoints(run: Path) -> None:
    store = Store(run)
    for number in (1, 2, 4):
        save(store, number)
    assert (os.readlink(run / "last"), os.readlink(run / "best")) == ("checkpoint-30", "checkpoint-20")
    assert json.loads((run / "last" / MANIFEST).read_text())["step"] == 30
    for which in ("last", run / "last", f"{run}/last/"):
        assert store.resolve(which)[0].name == "checkpoint-30"  # type: ignore[index]


def test_pointers_are_text_files_where_there_are_no_links_and_both_kinds_are_read(run: Path) -> None:
    class Plain(FileSystem):
        def link(self, path: Path, name: str) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

    for number, fs in ((1, Plain()), (2, None), (4, Plain())):
        save(Store(run, fs), number)
    assert (run / "last").read_text() == "checkpoint-30\n" and (run / "best").is_symlink()
    assert number_of(Store(run).resolve("last")) == 4 and number_of(Store(run).resolve("best")) == 2


@pytest.mark.parametrize("name", ["/etc", "../other/checkpoint-10", "checkpoint-10.tmp", "missing", "last", ".."])
def test_pointer_that_leads_elsewhere_is_none(run: Path, name: str) -> None:
    store = Store(run)
    for number in (1, 2):
        save(store, number)
        save(Store(run.with_name("other")), number)
    (run / "last").unlink()
    (run / "last").symlink_to(name)
    assert number_of(store.resolve("last")) == 2 and store.resolve(run / "last")[0] == run / "checkpoint-20"  # type: ignore[index]
    save(store, 4)
    assert os.readlink(run / "last") == "checkpoint-30"


def test_copy_that_followed_the_links_is_a_run_like_any_other(run: Path) -> None:
    for number in (1, 2):
        save(Store(run), number)
    copy = Store(shutil.copytree(run, run.with_name("copy")))
    assert (copy.root / "last").is_dir() and not (copy.root / "last").is_symlink()
    save(copy, 4)
    assert os.readlink(copy.root / "last") == "checkpoint-30"
    assert number_of(copy.resolve(copy.root / "last")) == 4 and number_of(copy.resolve(copy.root / "best")) == 2


def test_pointer_that_is_a_pipe_is_not_waited_for(run: Path) -> None:
    store = Store(run)
    save(store, 1)
    (run / "last").unlink()
    os.mkfifo(run / "last")
    assert number_of(store.resolve("last")) == 1


def test_damaged_best_is_an_error_and_not_a_lesser_one_even_after_further_saves(run: Path) -> None:
    store = Store(run)
    for number in (1, 2):
        save(store, number)
    (run / "checkpoint-20" / MANIFEST).write_text("{}")
    save(store, 4)
    with pytest.raises(CheckpointError, match=r"checkpoint-20.*is damaged"):
        store.resolve("best")


def test_checkpoint_of_a_newer_format_asks_for_an_upgrade(run: Path) -> None:
    save(Store(run), 1)
    manifest = run / "checkpoint-10" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match=r"format_version 2.*Upgrade omnitrain"):
        Store(run).resolve(manifest.parent)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..\\secret"])
def test_manifest_that_lists_a_file_outside_of_the_folder_is_refused(run: Path, name: str) -> None:
    save(Store(run), 1)
    (run / "secret").write_text("x")
    manifest = run / "checkpoint-10" / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][name] = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    content["sha256"] = "0" * 64
    blank = json.dumps(content)
    manifest.write_text(blank.replace("0" * 64, hashlib.sha256(blank.encode()).hexdigest(), 1))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        Store(run).verify(manifest.parent)


def test_link_among_the_written_files_is_refused(run: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a regular file"):
        Store(run).save(10, lambda folder: (folder / "model").symlink_to("/etc/hostname"), {})


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"callbacks": {"Mine": {"seen": {3, 4}}}}, r"`callbacks\.Mine\.seen` is a set"),
        ({"history": [{}, {"loss": object()}]}, r"`history\[1\]\.loss` is a object"),
        ({"callbacks": {"Mine": {1: "one"}}}, r"`callbacks\.Mine` has the key 1"),
        ({"files": {}}, r"may not have the keys \['files'\]"),
    ],
)
def test_payload_that_would_not_come_back_from_json_is_refused(run: Path, payload: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Store(run).save(10, lambda folder: None, payload)
    assert list(run.iterdir()) == []


def test_payload_comes_back_as_it_was(run: Path) -> None:
    payload = {
        "progress": {"step": 10, "seconds": 0.1 + 0.2},
        "name": "Prüfung \U0001f600",
        "none": None,
        "e": [1, 1.5],
    }
    path = Store(run).save(10, lambda folder: None, payload, score=float("nan"))
    content = Store(run).verify(path)
    assert {key: content[key] for key in payload} == payload
    assert content["score"] is None


def test_run_folder_can_be_moved_and_read_from_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "first")
    for number in range(1, 6):
        save(Store("runs/a"), number)
    for path in Path("runs/a").rglob("*"):
        if path.is_file():
            assert str(tmp_path) not in path.read_text() and "runs/a" not in path.read_text()
    shutil.move("runs/a", tmp_path / "second" / "b")
    monkeypatch.chdir(tmp_path / "second" / "deep")
    store = Store("../b")
    assert number_of(store.resolve("auto")) == number_of(store.resolve("last")) == 5
    assert number_of(store.resolve("best")) == 3
    save(store, 6)
    assert (os.readlink("../b/last"), os.readlink("../b/best")) == ("checkpoint-50",) * 2


def test_foreign_folders_and_files_are_neither_counted_nor_touched(run: Path) -> None:
    foreign = ["checkpoint-0500", "checkpoint-00010", "checkpoint-abc", "checkpoint-1-backup", "wandb", "tmp.tmp"]
    for name in foreign:
        (run / name).mkdir(parents=True)
        (run / name / "keep.txt").write_text("mine")
        (run / name / MANIFEST).write_text("{}")
    (run / "checkpoint-99").write_text("a file")
    (run / "metrics.jsonl").write_text("{}")
    (run / "checkpoint-98").mkdir()
    (run / "checkpoint-98" / "trainer_state.json").write_text("another tool's")
    store = Store(run)
    assert store.checkpoints() == [] and store.prune(keep_last=1) == []
    for number in range(1, len(SAVES) + 1):
        save(store, number)
    assert [path.name for path in store.checkpoints()] == [f"checkpoint-{n}" for n in (40, 50)]
    assert all((run / name / "keep.txt").read_text() == "mine" for name in foreign)
    assert (run / "checkpoint-99").read_text() == "a file"
    assert (run / "checkpoint-98" / "trainer_state.json").exists()


def test_folders_named_by_earlier_versions_are_read_followed_and_deleted(run: Path) -> None:
    for number in (1, 2):
        save(Store(run), number)
    for pointer in ("last", "best"):
        (run / pointer).unlink(missing_ok=True)
    for step in (10, 20):
        (run / f"checkpoint-{step}").rename(run / f"checkpoint-{step:06d}")
    (run / "last").symlink_to("checkpoint-000020")
    store = Store(run)
    for which in ("auto", "last", run / "checkpoint-000020"):
        found = store.resolve(which)
        assert found is not None and found[0].name == "checkpoint-000020" and number_of(found) == 2
    store.save(20, lambda folder: None, {})  # once more, under its present name
    store.save(30, lambda folder: None, {})
    assert [path.name for path in store.checkpoints()] == ["checkpoint-000010", "checkpoint-20", "checkpoint-30"]
    assert [path.name for path in store.prune(keep_last=1)] == ["checkpoint-20"]
    assert os.readlink(run / "best") == "checkpoint-000010"
    store.delete(10)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-30"]


def test_foreign_folder_with_the_name_of_a_checkpoint_is_put_aside(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("first", "second"):
        shutil.rmtree(run / "checkpoint-10", ignore_errors=True)
        (run / "checkpoint-10").mkdir(parents=True)
        (run / "checkpoint-10" / "theirs.txt").write_text(text)
        save(Store(run), 1)
    assert number_of(Store(run).resolve("last")) == 1
    assert [(run / f"checkpoint-10.aside-{n}" / "theirs.txt").read_text() for n in (1, 2)] == ["first", "second"]
    assert "checkpoint-10.aside-1" in caplog.text


def test_extra_files_in_a_checkpoint_are_tolerated(run: Path) -> None:
    save(Store(run), 1)
    (run / "checkpoint-10" / "trainer_state.json").write_text("{}")
    assert number_of(Store(run).resolve("last")) == 1


def test_steps_are_ordered_as_numbers_whatever_their_length(run: Path) -> None:
    store = Store(run)
    for step in (7, 42, 999_999, 1_000_000, 12_345_678):
        store.save(step, lambda folder: None, {})
    names = ["checkpoint-7", "checkpoint-42", "checkpoint-999999", "checkpoint-1000000", "checkpoint-12345678"]
    assert [path.name for path in store.checkpoints()] == names
    found = store.resolve("auto")
    assert found is not None and found[0].name == names[-1]
    assert [path.name for path in store.prune(keep_last=2)] == names[:3]


def test_order_is_that_of_saving_and_never_of_file_times(run: Path) -> None:
    store = Store(run)
    for number in (1, 2, 4, 5):
        save(store, number)
    for age, path in enumerate(store.checkpoints()):
        for file in (path, path / MANIFEST):
            os.utime(file, (1e9 - age, 1e9 - age))
    assert number_of(Store(run).resolve("auto")) == 5
    assert [path.name for path in Store(run).prune(keep_last=1)] == ["checkpoint-30"]


def test_run_that_went_back_keeps_what_it_saves_from_there(run: Path) -> None:
    store = Store(run)
    for step in (100, 200, 300):
        store.save(step, lambda folder: None, {}, score=step, best=True)
    store.save(150, lambda folder: None, {})
    store.prune(keep_last=1)
    assert [path.name for path in store.checkpoints()] == ["checkpoint-150", "checkpoint-300"]
    for which in ("auto", "last"):
        found = store.resolve(which)
        assert found is not None and found[0].name == "checkpoint-150"


def test_damaged_checkpoint_takes_no_place_among_the_kept_and_is_not_deleted(run: Path) -> None:
    store = Store(run)
    for step in (10, 20, 30):
        store.save(step, lambda folder: (folder / "a").write_bytes(b"a"), {})
    (run / "checkpoint-30" / "a").unlink()
    assert [path.name for path in store.prune(keep_last=1)] == ["checkpoint-10"]
    assert (run / "checkpoint-30").exists()


def test_sizes_are_checked_without_reading_the_files(run: Path) -> None:
    path = Store(run).save(10, lambda folder: (folder / "a").write_bytes(b"abc"), {})
    (path / "a").write_bytes(b"xyz")
    assert Store(run).verify(path, hashes=False)["step"] == 10
    (path / "a").write_bytes(b"ab")
    with pytest.raises(CheckpointError, match="'a' has 2 bytes, and 3 were written"):
        Store(run).verify(path, hashes=False)
    assert Store(run).kept() == []


def test_renamed_copy_of_a_checkpoint_is_neither_the_newest_nor_deleted(run: Path) -> None:
    for number in (1, 4):
        save(Store(run), number)
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-99")
    assert number_of(Store(run).resolve("auto")) == 4
    assert [kept.step for kept in Store(run).kept()] == [10, 30]
    assert Store(run).prune(keep_last=1) == []
    assert number_of((run / "checkpoint-99", Store(run).verify(run / "checkpoint-99"))) == 1


def test_checkpoint_that_stepped_aside_before_a_kill_is_found_under_its_own_path(run: Path) -> None:
    save(Store(run), 1)
    (run / "checkpoint-10").rename(run / "checkpoint-10.old")
    for which in ("auto", "last", "best", run / "checkpoint-10", "checkpoint-10"):
        assert number_of(Store(run).resolve(which)) == 1


def test_several_processes_write_into_one_checkpoint(run: Path) -> None:
    main, other = Store(run), Store(run)
    folder = main.begin(10)  # its name is this writer's own: the others are told
    assert folder == main.temporary(10) != other.temporary(10)
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "rank-1").write_bytes(b"1")
    (folder / "optimizer" / "rank-0").write_bytes(b"0")
    assert other.resolve("auto") is None
    content = other.verify(main.commit(10, {"world_size": 2}))
    assert content["files"]["optimizer/rank-1"] == {"size": 1, "sha256": hashlib.sha256(b"1").hexdigest()}
    main.begin(20)
    main.abandon(20)
    assert not list(run.glob("*.tmp"))


def test_digest_that_is_known_is_taken_and_only_the_other_files_are_read_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, digests = [], dict[str, Future[str]]()
    hashed = disk_module._digest
    monkeypatch.setattr(disk_module, "_digest", lambda path: read.append(path.name) or hashed(path))

    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        for name in ("a", "inner/b"):
            (folder / name).write_text(name)
        for name in ("inner/b", "never written"):
            digests[name] = Future()
            digests[name].set_result(hashlib.sha256(name.encode()).hexdigest())

    store = Store(run)
    path = store.save(10, write, {}, digests=digests)
    assert read == ["a"]
    assert list(store.verify(path)["files"]) == ["a", "inner/b"]


def test_file_that_is_not_what_its_known_digest_is_of_is_damaged(run: Path) -> None:
    digests: dict[str, Future[str]] = {"a": Future()}
    digests["a"].set_result(hashlib.sha256(b"what was meant").hexdigest())
    store = Store(run)
    path = store.save(10, lambda folder: (folder / "a").write_text("what came out"), {}, digests=digests)
    with pytest.raises(CheckpointError, match="'a' does not match its sha256"):
        store.verify(path)


def test_reader_sees_a_step_that_another_process_saved_again(run: Path) -> None:
    writer, reader = Store(run), Store(run)
    writer.save(10, lambda folder: None, {})
    assert [kept.best for kept in reader.kept()] == [False]
    writer.save(10, lambda folder: None, {}, score=1.0, best=True)
    assert [kept.best for kept in reader.kept()] == [True]


def test_writers_that_take_turns_see_what_the_others_saved_and_deleted(run: Path) -> None:
    one, other = Store(run), Store(run)
    for step, store in enumerate((one, other, one, other, one), start=1):
        with store.lock.held() if run.exists() else contextlib.nullcontext():
            store.save(step, lambda folder: None, {})
            store.prune(keep_last=2)
        assert [kept.step for kept in Store(run).kept()] == list(range(max(1, step - 1), step + 1))
        assert Store(run).verify(store.path(step))["sequence"] == step


def test_what_is_deleted_or_added_by_hand_during_a_run_is_noticed_by_the_next_save(run: Path, caplog: Any) -> None:
    store = Store(run)
    with contextlib.ExitStack() as stack:
        store.take()
        stack.callback(store.lock.release)
        for step in (10, 20):
            store.save(step, lambda folder: None, {})
        shutil.rmtree(run / "checkpoint-10")
        shutil.copytree(run / "checkpoint-20", run / "checkpoint-15")  # says that it is step 20
        store.path(5).mkdir()
        store.save(30, lambda folder: None, {})
        assert store.prune(keep_last=2) == []
        store.save(40, lambda folder: None, {})
        assert store.prune(keep_last=2) == [store.path(20)]
    assert sorted(path.name for path in run.iterdir()) == [
        *(f"checkpoint-{step}" for step in (15, 30, 40, 5)), "last",
    ]  # fmt: skip
    assert not caplog.records


def test_nothing_is_deleted_for_a_new_checkpoint_that_was_damaged_right_after(run: Path) -> None:
    store = Store(run)
    store.take()
    for step in (10, 20):
        store.save(step, lambda folder: (folder / "a").write_bytes(b"abc"), {})
    (run / "checkpoint-20" / "a").write_bytes(b"ab")
    assert store.prune(keep_last=1) == []
    store.lock.release()


def test_large_files_are_hashed_and_checked_in_threads_alike(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_WORTH_A_THREAD", 0)
    for number in (1, 2):
        save(Store(run), number)
    assert number_of(Store(run).resolve("last")) == 2
    for file in ("model.safetensors", "rng.json"):
        entry = Store(run).verify(run / "checkpoint-10")["files"][file]
        assert entry["sha256"] == hashlib.sha256((run / "checkpoint-10" / file).read_bytes()).hexdigest()
    (run / "checkpoint-20" / "rng.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"rng\.json' does not match"):
        Store(run).resolve("last")


def test_save_that_outlives_the_main_thread_is_completed(run: Path) -> None:
    script = f"""
import concurrent.futures.thread, threading, time
from omnitrain.checkpoint import disk, store
disk._WORTH_A_THREAD = 0
def late():
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.001)
    store.Store({str(run)!r}).save(10, lambda folder: (folder / "a").write_bytes(b"a"), {{}})
threading.Thread(target=late).start()
"""
    programs.run(sys.executable, "-c", script, check=True)
    assert Store(run).resolve("last") is not None


def test_size_of_the_newest_is_that_of_all_its_files(run: Path) -> None:
    store = Store(run)
    assert store.newest_size() is None
    for number in (1, 2):
        save(store, number)
    newest = run / "checkpoint-20"
    assert store.newest_size() == sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())


def test_too_little_free_space_is_said_with_both_numbers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2_000_000_000))
    assert check_free_space(run / "not yet", 2_000_000_000) is None
    warning = check_free_space(run / "not yet", 3_500_000_000)
    assert warning is not None and "2.00 GB free" in warning and "3.50 GB" in warning


# Retention


@pytest.mark.parametrize("direction", ["max", "min"])
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_newest_and_best_are_on_disk_after_every_save(run: Path, limit: int, direction: Literal["max", "min"]) -> None:
    store, scores = Store(run, FaultyDisk()), [3, 9, 1, 2, 8, 4]
    better = max if direction == "max" else min
    for index, score in enumerate(scores):
        so_far = scores[: index + 1]
        store.save(index + 1, lambda folder: None, {}, score=score, best=score == better(so_far))
        store.prune(limit, direction=direction)
        there = [kept.step for kept in store.kept()]
        best = so_far.index(better(so_far)) + 1
        newest = list(range(1, index + 2))[-limit:]
        assert there == sorted({best, *newest})
        assert len(there) <= limit + (best not in newest)
        for which, step in (("last", index + 1), ("best", best)):
            found = store.resolve(which)
            assert found is not None and found[1]["step"] == step


def naively_kept(
    checkpoints: list[Kept], last: int, best: int, every: int | None, direction: Literal["max", "min"]
) -> set[int]:
    """Pick what to keep one by one, without any sorting."""
    keep: set[int] = set()
    rest = list(checkpoints)
    for _ in range(max(1, last)):
        if rest:
            newest = rest[0]
            for kept in rest:
                if (kept.sequence, kept.step) > (newest.sequence, newest.step):
                    newest = kept
            keep.add(newest.step)
            rest.remove(newest)
    rest = [kept for kept in checkpoints if kept.score is not None and math.isfinite(kept.score)]
    for _ in range(max(1, best)):
        top = None
        for kept in rest:
            assert kept.score is not None
            if top is None or top.score is None:
                top = kept
            elif kept.score == top.score:
                top = kept if kept.step < top.step else top
            elif (kept.score > top.score) == (direction == "max"):
                top = kept
        if top is not None:
            keep.add(top.step)
            rest.remove(top)
    return keep | {kept.step for kept in checkpoints if every and kept.step % every == 0}


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.integers(0, 60), unique=True, max_size=10),
    sequence=st.permutations(range(10)),
    scores=st.lists(st.sampled_from([None, math.nan, math.inf, -math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=10),
    last=st.integers(0, 5),
    best=st.integers(0, 4),
    every=st.none() | st.integers(1, 20),
    direction=st.sampled_from(["max", "min"]),
)
def test_retention_agrees_with_a_naive_model(
    steps: list[int],
    sequence: list[int],
    scores: list[float | None],
    last: int,
    best: int,
    every: int | None,
    direction: Literal["max", "min"],
) -> None:
    checkpoints = [Kept(*facts) for facts in zip(steps, scores, sequence, strict=False)]
    gone = to_delete(checkpoints, last, best, every, direction)
    assert set(gone) == set(steps) - naively_kept(checkpoints, last, best, every, direction)
    assert gone == sorted(gone, key=lambda step: sequence[steps.index(step)])
    assert to_delete(checkpoints, None, best, every, direction) == []


def test_checkpoint_that_was_saved_as_the_best_stays_even_without_a_score() -> None:
    assert to_delete([Kept(1, best=True), Kept(2, best=True), Kept(3), Kept(4)], keep_last=1) == [1, 3]


def test_checkpoints_that_were_saved_for_being_the_best_go_when_others_are_better() -> None:
    saved = [
        Kept(100, 0.5, 1), Kept(110, 0.6, 2, best=True, for_best=True), Kept(120, 0.7, 3, best=True, for_best=True),
        Kept(200, 0.1, 4), Kept(210, 0.8, 5, best=True, for_best=True), Kept(300, 0.2, 6),
    ]  # fmt: skip
    assert to_delete(saved, keep_last=None) == [110, 120]
    assert to_delete(saved, keep_last=None, keep_best=2) == [110]
    assert to_delete(saved, keep_last=2) == [100, 110, 120]  # they do not count among the newest
    assert to_delete(saved[:3], keep_last=1) == [110]
