"""Checkpoint folders under kills, full disks, damage and moves; and retention."""

import contextlib
import hashlib
import itertools
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import programs
import pytest
from disks import FaultyDisk, cut_power, end_process, fail_once
from forging import content_of, seal, spoil
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import thinned
from resuming import Killed
from stores import save_files

from omnitrain.callbacks.retention import to_delete
from omnitrain.checkpoint.manifest import MANIFEST, CheckpointInfo
from omnitrain.checkpoint.store import Store
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import FileSystem

# What most tests save: (step, score, whether it is the best so far). Step 20 is saved twice; the best is not among the
# newest two; later the best changes.
SAVES = [(10, 3.0, True), (20, 9.0, True), (20, 9.0, True), (30, None, False), (40, 2.0, False), (50, 9.5, True)]


FILES_OF_RUN = ["optimizer/shard-00001.safetensors", "rng.json"]


def save(store: Store, *numbers: int) -> Store:
    """Do these saves (from 1) of SAVES, and prune after each."""
    for number in numbers:
        step, score, best = SAVES[number - 1]

        def write(folder: Path, number: int = number) -> None:
            store.fs.write(folder / "model.safetensors", f"weights of save {number}".encode() * 3)
            store.fs.mkdir(folder / "optimizer")
            store.fs.write(folder / "optimizer" / "shard-00001.safetensors", f"moments of save {number}".encode())
            store.fs.write(folder / "rng.json", b"[]")

        save_files(store, step, write, {"number": number}, score, best)
        prune(store, 2)
    return store


def save_steps(store: Store, *steps: int, details: Any = ()) -> None:
    """Save checkpoints with one small file."""
    for step in steps:
        save_files(store, step, lambda folder: (folder / "a").write_bytes(b"abc"), {}, *details)


def prune(store: Store, keep_last: int) -> list[int]:
    return store.prune(lambda infos: to_delete(infos, keep_last))


def number_of(result: tuple[Path, dict[str, Any]] | None) -> int:
    """Return the number of the save in a resolved checkpoint, after a look at its files; 0 for none."""
    if result is None:
        return 0
    path, content = result
    assert (path / "model.safetensors").read_text() == f"weights of save {content['number']}" * 3
    assert content["step"] == SAVES[content["number"] - 1][0]
    return content["number"]


def name_of(store: Store, which: Any) -> str:
    return store.resolve(which)[0].name  # type: ignore[index]


def steps_in(store: Store) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in store.checkpoints()]


@pytest.fixture
def run(folder: Path) -> Path:
    return folder / "run"


def test_store_keeps_checkpoints_at_a_write_error(run: Path) -> None:
    for at in itertools.count():
        root = run / str(at)
        disk = FaultyDisk(root, at, fail_once)
        store = Store(root, disk)
        for number in (1, 2, 3):
            try:
                save(store, number)
            except CheckpointError:
                assert not list(root.glob("*.tmp"))
                assert all(path.with_suffix("").exists() for path in root.glob("*.old"))
                assert number_of(Store(root).resolve("auto")) in (number - 1, number)  # its folder may be complete
                save(store, number)
        assert number_of(Store(root).resolve("last")) == number_of(Store(root).resolve("best")) == 3
        if len(disk.operations) <= at:
            break
    assert at > 50


def test_leftovers_that_cannot_be_removed_give_a_warning(run: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(FileSystem, "remove", Mock(side_effect=PermissionError))
    (run / "checkpoint-20.tmp").mkdir(parents=True)
    save_steps(Store(run), 30)
    assert "Cannot clear" in caplog.text and "checkpoint-20.tmp" in caplog.text


def test_store_syncs_before_it_renames(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk(run)
    save(Store(run, disk), 1)
    renamed = next(n for n, (kind, path) in enumerate(disk.operations) if kind == "rename" and path.suffix == ".tmp")
    folder = disk.operations[renamed][1]
    files = {kind: [path for what, path in disk.operations[:renamed] if what == kind] for kind in ("sync", "write")}
    inside = {folder / path.relative_to(run / "checkpoint-10") for path in (run / "checkpoint-10").rglob("*")}
    assert {*files["sync"]} >= inside | {folder, run.parent} and files["write"][-1].name == MANIFEST
    assert disk.operations[renamed + 1] == ("sync", run)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    shutil.rmtree(run)
    save(Store(run), 1)
    assert {path.stat().st_ino for path in run.rglob("*")} | {run.stat().st_ino} <= set(synced)


@pytest.mark.parametrize("every", thinned([1, 19], [19]))
def test_resolve_detects_any_damage(run: Path, every: int, caplog: pytest.LogCaptureFixture) -> None:
    """Another kind of file, a deletion (None), truncations, an addition and bit flips."""
    save(Store(run), 1, 2)
    newest, count = run / "checkpoint-20", 0
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        name, data = repr(file.relative_to(newest).as_posix()), file.read_bytes()
        flips = [data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :] for i in range(0, len(data), every)]
        for damaged in ("folder", "pipe", "device", "dangling", None, b"", data[:-1], data + b"\0", *flips):
            if isinstance(damaged, str):
                spoil(file, damaged)
            elif damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            for which in ("last", "best", newest):
                with pytest.raises(
                    CheckpointError, match=r"checkpoint-20.*(damaged|incomplete|cannot be read)"
                ) as caught:
                    Store(run).resolve(which)
                assert name in str(caught.value)
                assert "The newest complete one is 'checkpoint-10'." in str(caught.value)
            caplog.clear()
            assert number_of(Store(run).resolve("auto")) == 1
            assert name in caplog.text and "Using 'checkpoint-10' instead" in caplog.text
            file.rmdir() if damaged == "folder" else file.unlink(missing_ok=True)
            file.write_bytes(data)
            count += 1
    assert number_of(Store(run).resolve("auto")) == 2
    assert count > 500 // every


def test_resolve_of_missing_names_is_an_error(run: Path) -> None:
    """Only "auto" is None without checkpoints."""
    assert Store(run).resolve("auto") is None
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        Store(run).resolve("last")
    save_steps(Store(run), 10)
    for which, message in (
        ("best", "was saved as the best"), (run / "checkpoint-30", r"The newest .*'checkpoint-10'"),
        (run, r"is a run folder.*checkpoint-10"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            Store(run).resolve(which)
    (run / "checkpoint-10" / "a").unlink()
    with pytest.raises(CheckpointError, match=r"None of the checkpoints .*'a' is missing"):
        Store(run).resolve("auto")


def test_verify_of_sizes_does_not_read_files(run: Path) -> None:
    store, path = Store(run), run / "checkpoint-10"
    save_steps(store, 10)
    (path / "a").write_bytes(b"xyz")
    assert store.verify(path, hashes=False)["step"] == 10
    (path / "a").write_bytes(b"ab")
    with pytest.raises(CheckpointError, match="'a' has 2 bytes, and 3 were written"):
        store.verify(path, hashes=False)
    assert Store(run).checkpoint_infos() == []


def test_pointers_are_links_or_text_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = save(Store(run), 1, 2, 4)
    assert (os.readlink(run / "last"), os.readlink(run / "best")) == ("checkpoint-30", "checkpoint-20")
    for which in ("last", run / "last", f"{run}/last/"):
        assert number_of(store.resolve(which)) == 4
    for which in (str(run / "checkpoint-20"), "checkpoint-20", run / "best"):
        assert number_of(store.resolve(which)) == 2
    assert number_of(Store(run.parent / "another run").resolve(run / "last")) == 4
    shutil.rmtree(run)
    for number in (1, 2, 4):
        with monkeypatch.context() as patch:
            if number != 2:
                patch.setattr(FileSystem, "link", Mock(side_effect=PermissionError))
            save(Store(run), number)
    assert (run / "last").read_text() == "checkpoint-30\n" and (run / "best").is_symlink()
    assert number_of(Store(run).resolve("last")) == 4 and number_of(Store(run).resolve("best")) == 2


@pytest.mark.parametrize(
    "name", ["/etc", "../other/checkpoint-10", "checkpoint-10.tmp", "last", "..", "a pipe", "a copy"]
)
def test_pointer_elsewhere_is_ignored_and_replaced(name: str, run: Path) -> None:
    save(Store(run.with_name("other")), 1, 2)
    store = save(Store(run), 1, 2)
    (run / "last").unlink()
    if name == "a pipe":
        os.mkfifo(run / "last")
    elif name == "a copy":  # one that followed the links
        shutil.copytree(run / "checkpoint-20", run / "last")
    else:
        (run / "last").symlink_to(name)
    assert number_of(store.resolve("last")) == 2
    assert name == "a copy" or store.resolve(run / "last")[0] == run / "checkpoint-20"  # type: ignore[index]
    save(store, 4)
    assert os.readlink(run / "last") == "checkpoint-30"


def test_manifest_that_is_damaged_or_forged_is_rejected(run: Path) -> None:
    save(Store(run), 1, 2)
    (run / "checkpoint-20" / MANIFEST).write_text("{}")
    save(Store(run), 4)
    with pytest.raises(CheckpointError, match=r"checkpoint-20.*is damaged"):
        Store(run).resolve("best")
    (run / "secret").write_text("x")
    content = content_of(run / "checkpoint-30")
    for name in ("../secret", "/etc/passwd", "a/../../secret", "..\\secret"):
        forged = {**content["files"], name: entry_of("x")}
        seal(run / "checkpoint-30", {**content, "files": forged})
        with pytest.raises(CheckpointError, match="outside of the folder"):
            Store(run).verify(run / "checkpoint-30")
    manifest = run / "checkpoint-30" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match=r"format_version 2.*Upgrade omnitrain"):
        Store(run).resolve(manifest.parent)


def test_failed_save_leaves_nothing(run: Path) -> None:
    def write_half(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise ZeroDivisionError

    unsavable = {"callbacks": {"Mine": {"seen": {3, 4}}}}
    cases: list[Any] = [(write_half, {}, "^$"), (Path.exists, unsavable, "JSON cannot hold: Object of type set")]
    cases += [(lambda folder: (folder / "model").symlink_to("/etc/hostname"), {}, "is not a regular file")]
    for write, payload, message in cases:
        with pytest.raises((CheckpointError, ZeroDivisionError), match=message):
            save_files(Store(run), 10, write, payload)
        assert list(run.iterdir()) == []


def test_payload_is_read_back_unchanged(run: Path) -> None:
    payload = {"progress": {"step": 10, "seconds": 0.1 + 0.2}, "name": "Prüfung \U0001f600", "e": [1, 1.5, None]}
    assert Store(run).newest_size() is None
    path = save_files(Store(run), 10, lambda folder: (folder / "a").write_text("abc"), payload, float("nan"))
    content = Store(run).verify(path)
    assert {key: content[key] for key in payload} == payload and content["score"] is None
    assert Store(run).newest_size() == sum(file.stat().st_size for file in path.iterdir())


# --- folders


def test_foreign_folders_are_left_unchanged(run: Path) -> None:
    names = ["checkpoint-0500", "checkpoint-00010", "checkpoint-abc", "checkpoint-1-backup", "wandb", "tmp.tmp"]
    files = {f"{name}/{file}": "{}" for name in names for file in (MANIFEST, "keep.txt")}
    files |= {"checkpoint-99": "a file", "checkpoint-98/trainer_state.json": "another tool's"}
    for name, text in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    store = Store(run)
    assert store.checkpoints() == [] and prune(store, 1) == []
    save(store, *range(1, len(SAVES) + 1))
    (run / "checkpoint-50" / "trainer_state.json").write_text("another tool's")
    assert number_of(store.resolve("last")) == 6 and steps_in(store) == [40, 50]
    assert {name: (run / name).read_text() for name in files} == files


def test_foreign_folder_with_a_checkpoint_name_is_renamed(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("first", "second"):
        shutil.rmtree(run / "checkpoint-10", ignore_errors=True)
        (run / "checkpoint-10").mkdir(parents=True)
        (run / "checkpoint-10" / "theirs.txt").write_text(text)
        save(Store(run), 1)
    assert number_of(Store(run).resolve("last")) == 1
    assert [(run / f"checkpoint-10.aside-{n}" / "theirs.txt").read_text() for n in (1, 2)] == ["first", "second"]
    assert "checkpoint-10.aside-1" in caplog.text


def test_steps_are_ordered_as_numbers_not_by_file_times(run: Path) -> None:
    store, steps = Store(run), [7, 42, 999_999, 1_000_000, 12_345_678]
    save_steps(store, *steps)
    for age, path in enumerate(store.checkpoints()):
        for file in (path, path / MANIFEST):
            os.utime(file, (1e9 - age, 1e9 - age))
    assert steps_in(store) == steps
    assert name_of(Store(run), "auto") == f"checkpoint-{steps[-1]}"
    assert prune(Store(run), 2) == steps[:3]


def test_newest_is_the_last_saved_after_going_back(run: Path) -> None:
    store = Store(run)
    for step in (100, 200, 300):
        save_steps(store, step, details=(step, True))
    save_steps(store, 150)
    prune(store, 1)
    assert steps_in(store) == [150, 300]
    assert name_of(store, "auto") == name_of(store, "last") == "checkpoint-150"


def test_renamed_copy_of_a_checkpoint_does_not_count(run: Path) -> None:
    save(Store(run), 1, 4)
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-99")
    assert number_of(Store(run).resolve("auto")) == 4
    assert [entry.step for entry in Store(run).checkpoint_infos()] == [10, 30]
    assert prune(Store(run), 1) == []
    assert number_of((run / "checkpoint-99", Store(run).verify(run / "checkpoint-99"))) == 1


def test_checkpoint_renamed_to_old_before_a_kill_is_found(run: Path) -> None:
    save(Store(run), 1)
    (run / "checkpoint-10").rename(run / "checkpoint-10.old")
    for which in ("auto", "last", "best", run / "checkpoint-10", "checkpoint-10"):
        assert number_of(Store(run).resolve(which)) == 1
    assert steps_in(save(Store(run), 2)) == [10, 20]


def entry_of(text: str) -> dict[str, Any]:
    return {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def test_writers_that_alternate_see_each_other(run: Path) -> None:
    stores = Store(run), Store(run)
    save_steps(stores[0], 1)
    assert [entry.best for entry in stores[1].checkpoint_infos()] == [False]
    save_steps(stores[0], 1, details=(1.0, True))
    assert [entry.best for entry in stores[1].checkpoint_infos()] == [True]
    shutil.rmtree(run)
    for step in range(1, 6):
        store = stores[step % 2]
        with store.lock.hold() if run.exists() else contextlib.nullcontext():
            save_steps(store, step)
            prune(store, 2)
        assert [entry.step for entry in Store(run).checkpoint_infos()] == list(range(max(1, step - 1), step + 1))
        assert Store(run).verify(store.path(step))["sequence"] == step


def test_changes_by_hand_are_seen_by_the_next_save(run: Path, caplog: Any) -> None:
    store = Store(run)
    with store.lock.hold():
        save_steps(store, 10, 20)
        shutil.rmtree(run / "checkpoint-10")
        shutil.copytree(run / "checkpoint-20", run / "checkpoint-15")  # which is step 20
        store.path(5).mkdir()
        save_steps(store, 30)
        assert prune(store, 2) == []
        save_steps(store, 40)
        assert prune(store, 2) == [20]
    assert sorted(os.listdir(run)) == [*(f"checkpoint-{step}" for step in (15, 30, 40, 5)), "last"]
    assert not caplog.records


@pytest.mark.processes
def test_large_files_are_hashed_after_the_end_of_the_main_thread(run: Path) -> None:
    """By threads of their own: those of an executor start no more then."""
    script = f"""
import concurrent.futures.thread, threading, time
from omnitrain.checkpoint import store
from omnitrain.core import files
files._MIN_THREADED_BYTES = 0
def late():
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.001)
    run = store.Store({str(run)!r})
    with run.saving(10) as folder:
        (folder / "a").write_bytes(b"a")
        run.commit(10, folder, {{}})
threading.Thread(target=late).start()
"""
    programs.run(sys.executable, "-c", script, check=True)
    assert Store(run).resolve("last") is not None


# --- retention


def test_prune_ignores_and_keeps_damaged_checkpoints(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is deleted by a writer if the new one was damaged right after the save."""
    store = Store(run)
    with store.lock.hold():
        save_steps(store, 10, 20)
        (run / "checkpoint-20" / "a").write_bytes(b"ab")
        assert prune(store, 1) == []
    save_steps(store, 20, 30)
    (run / "checkpoint-30" / "a").unlink()
    assert prune(store, 1) == [10] and (run / "checkpoint-30").exists()
    save_steps(store, 40)
    (run / "checkpoint-40" / "a").write_bytes(b"xyz")
    assert prune(Store(run), 1) == []
    assert "no remaining checkpoint would be undamaged" in caplog.text
    assert name_of(Store(run), "auto") == "checkpoint-20"


@pytest.mark.parametrize("fault", [end_process, cut_power])
def test_reduced_checkpoints_survive_a_kill(run: Path, fault: Any) -> None:
    """Each is complete or reduced, the newest stays complete, and the next call removes what was left."""
    for at in itertools.count():
        root = run / str(at)
        save(Store(root), 1, 2, 5)
        disk = FaultyDisk(root, at, fault)
        store = Store(root, disk)
        with store.lock.hold(), contextlib.suppress(Killed):
            store.keep_only_weights()
        left = Store(root)
        contents = [left.verify(path) for path in left.checkpoints()]
        for path, content in zip(left.checkpoints(), contents, strict=True):
            rest = [] if content.get("only_model") else FILES_OF_RUN
            assert sorted(content["files"]) == ["model.safetensors", *rest] and number_of((path, content))
        assert not contents[-1].get("only_model")
        with left.lock.hold():
            left.keep_only_weights()
            left.keep_only_weights()
        files = [file.name for path in left.checkpoints()[:-1] for file in path.rglob("*") if file.is_file()]
        assert {*files} == {"model.safetensors", MANIFEST} and all(map(left.verify, left.checkpoints()))
        if len(disk.operations) <= at:
            break
    assert at >= 6


def test_only_damaged_newest_checkpoint_reduces_none(run: Path) -> None:
    save(Store(run), 1, 2)
    store = Store(run)
    (store.path(20) / "rng.json").write_bytes(b"()")
    with store.lock.hold():
        store.keep_only_weights()
    assert sorted(store.verify(store.path(10))["files"]) == ["model.safetensors", *FILES_OF_RUN]


@settings(max_examples=60)
@given(
    steps=st.lists(st.integers(0, 60), unique=True, max_size=10),
    sequence=st.permutations(range(10)),
    scores=st.lists(st.sampled_from([None, math.nan, math.inf, -math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=10),
    last=st.integers(0, 5),
    best=st.integers(0, 4),
    every=st.none() | st.integers(1, 20),
    direction=st.sampled_from(["max", "min"]),
)
def test_to_delete_keeps_newest_best_and_every(
    steps: list[int], sequence: list[int], scores: list[Any], last: int, best: int, every: Any, direction: Any
) -> None:
    checkpoints = [CheckpointInfo(*facts) for facts in zip(steps, scores, sequence, strict=False)]
    newest = sorted(checkpoints, key=lambda entry: entry.sequence)[-max(1, last) :]
    sign = -1 if direction == "max" else 1
    scored = [entry for entry in checkpoints if entry.score is not None and math.isfinite(entry.score)]
    bests = sorted(scored, key=lambda entry: (sign * entry.score, entry.step))[: max(1, best)]  # type: ignore[operator]
    regular = [entry for entry in checkpoints if every and entry.step % every == 0]
    deleted = to_delete(checkpoints, last, best, every, direction)
    assert set(deleted) == set(steps) - {entry.step for entry in [*newest, *bests, *regular]}
    assert deleted == sorted(deleted, key=lambda step: sequence[steps.index(step)])
    assert to_delete(checkpoints, None, best, every, direction) == []


def test_to_delete_includes_former_bests_saved_as_such() -> None:
    bests = [CheckpointInfo(step, best=step < 3) for step in range(1, 5)]
    assert to_delete(bests, keep_last=1) == [1, 3]
    scores, for_best = {100: 0.5, 110: 0.6, 120: 0.7, 200: 0.1, 210: 0.8, 300: 0.2}, (110, 120, 210)
    rows = [(step, score, number) for number, (step, score) in enumerate(scores.items(), start=1)]
    saved = [CheckpointInfo(*row, best=row[0] in for_best, for_best=row[0] in for_best) for row in rows]
    assert to_delete(saved, keep_last=None) == [110, 120]
    assert to_delete(saved, keep_last=None, keep_best=2) == [110]
    assert to_delete(saved, keep_last=2) == [100, 110, 120]  # they do not count among the newest
    assert to_delete(saved[:3], keep_last=1) == [110]
