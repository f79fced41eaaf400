"""Runs whose `save_dir` is the address of a remote store: what comes there, in which order, and what is made of it."""

from __future__ import annotations

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from resuming import build, differences, outcome, play, train
from stores import InMemory, Watched, content_of, shelf_of, watching

from omnitrain import CheckpointError, ConfigError, MissingExtraError
from omnitrain.checkpoint import remote, upload
from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.mirror import MirroredStore, make_store
from omnitrain.checkpoint.remote import Place, local_copy
from omnitrain.checkpoint.store import MANIFEST, Store
from omnitrain.cli import main
from omnitrain.processes import own_process
from omnitrain.settings import local_folder

RUN: dict[str, Any] = {"epochs": 2, "save_steps": 2, "eval_steps": 2, "log_steps": 1}
ADDRESS = "watched://bucket/run"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Watched]]:
    torch.manual_seed(1)  # for the weights that models begin with: which step is best depends on them
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setattr(upload, "PAUSE_S", 0.01)
    monkeypatch.setattr(upload, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(upload, "WATCH_S", 0.2)
    for name, value in shelf_of(tmp_path / "shelf").items():
        monkeypatch.setenv(name, value)
    with watching() as watched:
        yield watched


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of RUN in a folder, if nothing happens to it."""
    return play(tmp_path_factory.mktemp("undisturbed") / "run", **RUN)


def lose_machine() -> None:
    """Leave nothing of what was written on this machine."""
    shutil.rmtree(local_folder(ADDRESS).parent)


def save(mirror: MirroredStore, step: int, text: str = "weights", **options: Any) -> Path:
    return mirror.save(step, lambda folder: (folder / "a.txt").write_text(f"{text} {step}"), {}, **options)


def mirror_of(**options: Any) -> MirroredStore:
    made = make_store(ADDRESS, **options)
    assert isinstance(made, MirroredStore)
    return made


def steps_there(address: str = ADDRESS) -> list[int]:
    return sorted(Place(address).copies())


# --- what is uploaded


def test_a_run_is_on_the_store_as_it_is_on_this_machine() -> None:
    trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert trainer.save_dir == local_folder(ADDRESS)
    there, here = content_of(ADDRESS), trainer.save_dir
    assert trainer.store is not None and steps_there() == [kept.step for kept in trainer.store.kept()] == [2, 4, 6]
    assert there.pop("last") == b"checkpoint-6\n"
    assert there.pop("best").decode().strip() == trainer.metrics["best_checkpoint"]
    for name, content in there.items():
        assert (here / name).read_bytes() == content, name
    assert {"metrics.jsonl", "run.json", "config.yaml"} <= there.keys() and LOCK not in there


def test_the_manifest_comes_after_the_files_and_the_pointers_after_everything(store: type[Watched]) -> None:
    train(build(ADDRESS, **{**RUN, "epochs": 1, "save_steps": 3, "keep_best": 0}))  # type: ignore[arg-type]
    written = [path for what, path in store.done if what == "write"]
    manifest = written.index(f"checkpoint-3/{MANIFEST}")
    files = [written.index(path) for path in set(written) if path.startswith("checkpoint-3/") and MANIFEST not in path]
    assert len(files) >= 4 and max(files) < written.index("metrics.jsonl") < manifest < written.index("last")
    assert written.index("run.json") < manifest and written.index("config.yaml") < manifest < written.index("best")


def test_the_config_of_a_run_names_the_address() -> None:
    trainer = train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    assert (
        f"save_dir: {ADDRESS}" in str(trainer.config)
        and f"save_dir: {ADDRESS}" in content_of(ADDRESS)["config.yaml"].decode()
    )


def test_a_step_that_is_saved_again_sends_only_what_has_changed(store: type[Watched]) -> None:
    mirror = mirror_of()

    def write(folder: Path, other: str) -> None:
        (folder / "same").write_text("same")
        (folder / "other").write_text(other)

    mirror.take()
    mirror.save(1, lambda folder: write(folder, "a"), {})
    wait_for(lambda: steps_there() == [1] and "last" in content_of(ADDRESS))
    store.done.clear()
    mirror.save(1, lambda folder: write(folder, "b"), {})
    mirror.finish()
    mirror.lock.release()
    assert {path for what, path in store.done if what == "write" and "checkpoint" in path} == {
        "checkpoint-1/other", f"checkpoint-1/{MANIFEST}"
    }  # fmt: skip
    there = content_of(ADDRESS)
    assert there["checkpoint-1/other"] == b"b" and not any(".old" in name for name in there)


def test_the_only_checkpoint_is_never_missing_there_while_it_is_saved_again(store: type[Watched]) -> None:
    mirror = mirror_of()
    mirror.take()
    save(mirror, 1, "first")
    wait_for(lambda: "last" in content_of(ADDRESS))
    seen: list[list[int]] = []
    store.fault = staticmethod(lambda what, path: seen.append(steps_looked()) if what in ("write", "remove") else None)
    save(mirror, 1, "second")
    mirror.finish()
    mirror.lock.release()
    assert len(seen) > 4 and all(steps == [1] for steps in seen)
    assert content_of(ADDRESS)["checkpoint-1/a.txt"] == b"second 1"


def steps_looked() -> list[int]:
    fault, Watched.fault = Watched.fault, staticmethod(lambda what, path: None)
    try:
        return steps_there()
    finally:
        Watched.fault = fault


def wait_for(condition: Any, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_async_saves_are_uploaded_too() -> None:
    train(build(ADDRESS, **RUN, async_save=True))  # type: ignore[arg-type]
    assert steps_there() == [2, 4, 6]


def test_a_checkpoint_saved_outside_of_a_run_is_uploaded_before_the_call_returns() -> None:
    trainer = train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    lose_machine()
    InMemory.store.clear()
    trainer.save_checkpoint()
    assert steps_there() == [3] and LOCK not in content_of(ADDRESS)


# --- resuming


@pytest.mark.parametrize("limit", [None, 1])
def test_a_run_that_goes_on_without_its_folder_ends_with_the_same_bits(
    undisturbed: dict[str, Any], limit: int | None
) -> None:
    parts: list[dict[str, Any]] = [{"cut": ("kill", 3)}, {"cut": ("kill", 5)}, {}]
    whole: dict[str, Any] = {}
    stream, rates = [], []
    for part in parts:
        found = play(ADDRESS, [part], **RUN, save_total_limit=limit)  # type: ignore[arg-type]
        stream, rates = [*stream, found["stream"]], [*rates, found["rates"]]
        whole = found
        lose_machine()
    assert [len(one) for one in stream]  # each part has trained
    expected = {name: value for name, value in undisturbed.items() if name not in ("stream", "rates")}
    found = {name: value for name, value in whole.items() if name not in ("stream", "rates")}
    assert not differences(expected, found)


def test_pointers_that_a_killed_run_has_left_behind_are_brought_up_to_date(store: type[Watched]) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    Place(ADDRESS).write("last", b"checkpoint-4\n")
    lose_machine()
    train(build(ADDRESS, **RUN), resume_from="auto")  # type: ignore[arg-type]
    assert content_of(ADDRESS)["last"] == b"checkpoint-6\n"
    store.done.clear()
    train(build(ADDRESS, **RUN), resume_from="auto")  # type: ignore[arg-type]
    assert [path for what, path in store.done if what == "write" and not path.endswith((LOCK, ".probe"))] == []


def test_what_is_newest_here_is_not_downloaded(store: type[Watched]) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    store.done.clear()
    again = train(build(ADDRESS, **{**RUN, "epochs": 3}), resume_from="auto")  # type: ignore[arg-type]
    assert again.progress.step == 9
    assert not [path for what, path in store.done if what == "read" and path.endswith(".safetensors")
                and not path.startswith(("checkpoint-8", "checkpoint-9"))]  # fmt: skip


def test_what_is_newer_there_is_taken_from_there() -> None:
    train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    here = local_folder(ADDRESS)
    shutil.copytree(here, here.with_name("kept"), symlinks=True)
    lose = local_folder(ADDRESS)
    shutil.rmtree(lose)
    train(build(ADDRESS, **RUN), resume_from="last")  # type: ignore[arg-type]
    shutil.rmtree(lose)
    here.with_name("kept").rename(here)  # the machine of the first part comes back
    trainer = build(ADDRESS, **{**RUN, "epochs": 3})  # type: ignore[arg-type]
    train(trainer, resume_from="auto")
    assert trainer._checkpointer.resumed is not None and trainer._checkpointer.resumed[0].name == "checkpoint-6"
    rows = [json.loads(row) for row in (here / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 10))


def test_a_checkpoint_that_lost_an_object_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    lose_machine()
    name = next(path for path in InMemory.store if "checkpoint-6/optimizer" in path)
    del InMemory.store[name]
    assert mirror_of().resolve("auto")[0].name == "checkpoint-4"  # type: ignore[index]
    assert "checkpoint-6" in caplog.text and "is incomplete" in caplog.text


@pytest.mark.parametrize("how", ["run", "address"])
@pytest.mark.parametrize("which", ["last", "best"])
def test_an_older_checkpoint_is_never_taken_for_the_last_or_best_one(which: str, how: str, tmp_path: Path) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    name = content_of(ADDRESS)[which].decode().strip()
    assert name == "checkpoint-6"
    here = mirror_of().resolve(which)  # it is whole on this machine
    lose_machine()
    del InMemory.store[f"/bucket/run/{name}/model.safetensors"]
    assert here is not None and here[0].name == name
    wanted, place = (which, ADDRESS) if how == "run" else (f"{ADDRESS}/{which}", tmp_path / "other")
    expected = r"checkpoint-6' is incomplete: 'model.safetensors' is missing. The newest complete one is 'checkpoint-4'"
    with pytest.raises(CheckpointError, match=expected):
        build(place, **RUN).load_checkpoint(wanted)  # type: ignore[arg-type]
    train(build(ADDRESS, **RUN), resume_from="auto")  # type: ignore[arg-type]
    assert mirror_of().resolve(which)[0].name == "checkpoint-6"  # type: ignore[index]


def test_downloads_of_one_checkpoint_at_the_same_time_all_succeed(store: type[Watched]) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    lose_machine()
    together = threading.Barrier(4, timeout=30)

    def meet(what: str, path: str) -> None:
        if what == "read" and path.endswith("optimizer.safetensors"):
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait()

    store.fault = staticmethod(meet)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(local_copy, [f"{ADDRESS}/last"] * 4))
    assert len(set(found)) == 1 and found[0].name == "checkpoint-6"
    assert [path.name for path in found[0].parent.iterdir()] == ["checkpoint-6"]


def test_a_damaged_object_is_found_by_its_hash_and_the_checkpoint_before_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    lose_machine()
    fs = Place(ADDRESS).fs
    path = "/bucket/run/checkpoint-6/model.safetensors"
    data = bytearray(fs.cat_file(path))
    data[-1] ^= 1
    fs.pipe_file(path, bytes(data))
    mirror = mirror_of()
    assert mirror.resolve("auto")[0].name == "checkpoint-4"  # type: ignore[index]
    assert "watched://bucket/run/checkpoint-6" in caplog.text and "does not match its sha256" in caplog.text
    with pytest.raises(CheckpointError, match="does not match its sha256"):
        mirror.resolve("last")
    assert not [path for path in mirror.root.iterdir() if path.name.endswith(".tmp")]


def test_a_damaged_folder_here_is_replaced_by_the_copy_there(caplog: pytest.LogCaptureFixture) -> None:
    trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert trainer.store is not None
    (trainer.store.path(6) / "model.safetensors").write_bytes(b"damaged")
    found = mirror_of().resolve("auto")
    assert found is not None and found[0].name == "checkpoint-6" and "was renamed" in caplog.text


@pytest.mark.parametrize("which", ["checkpoint-2", "last", "best"])
def test_a_checkpoint_is_named_by_its_address(which: str, tmp_path: Path) -> None:
    whole = train(build(ADDRESS, **RUN, keep_best=2))  # type: ignore[arg-type]
    lose_machine()
    trainer = build(tmp_path / "other", **RUN)
    folder = trainer.load_checkpoint(f"{ADDRESS}/{which}")
    expected = {"checkpoint-2": "checkpoint-2", "last": "checkpoint-6", "best": whole.metrics["best_checkpoint"]}
    assert folder.name == expected[which]
    own = build(ADDRESS, **RUN)  # type: ignore[arg-type]
    assert own.load_checkpoint(f"{ADDRESS}/{which}") == local_folder(ADDRESS) / expected[which]
    assert train(build(tmp_path / "new", **RUN), resume_from=f"{ADDRESS}/{which}").progress.step == 6


def test_weights_begin_with_those_of_an_address() -> None:
    whole = train(build(ADDRESS, **RUN, load_best_at_end=False))  # type: ignore[arg-type]
    for place in (f"{ADDRESS}/checkpoint-6", f"{ADDRESS}/last", f"{ADDRESS}/checkpoint-6/model.safetensors"):
        trainer = build(None, epochs=1, init_from=place)
        for name, tensor in whole.get_model().state_dict().items():
            assert torch.equal(tensor, trainer.get_model().state_dict()[name]), (place, name)
    with pytest.raises(CheckpointError, match=r"is a run folder.*Did you mean 'watched://bucket/run/checkpoint-6'"):
        build(None, init_from=ADDRESS)
    with pytest.raises(CheckpointError, match="does not exist, or is empty"):
        build(None, init_from="watched://bucket/none")


def test_the_best_weights_are_fetched_if_the_run_ends_on_another_machine() -> None:
    grown: dict[str, Any] = {**RUN, "learning_rate": 0.5, "keep_best": 1, "save_total_limit": 1}
    first = train(build(ADDRESS, **{**grown, "epochs": 1}))  # type: ignore[arg-type]
    best = first.metrics["best_checkpoint"]
    lose_machine()
    mirror = mirror_of()
    mirror.bring(best)
    assert mirror.verify(mirror.root / best)["best"]
    mirror.bring("checkpoint-77")  # which is nowhere: no error


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    InMemory().pipe_file("/bucket/x/../../evil.safetensors", b"evil")
    with pytest.raises(CheckpointError, match=r"leads out of its folder|does not exist"):
        local_copy("watched://bucket/x")
    assert not list(tmp_path.rglob("evil*"))


# --- retention


def test_what_is_pruned_here_is_pruned_there() -> None:
    trainer = train(build(ADDRESS, **{**RUN, "epochs": 4}, save_total_limit=1, keep_best=1))  # type: ignore[arg-type]
    assert trainer.store is not None
    assert steps_there() == [kept.step for kept in trainer.store.kept()] and len(steps_there()) <= 2
    assert {name.partition("/")[0] for name in content_of(ADDRESS) if name.startswith("checkpoint-")} == {
        f"checkpoint-{step}" for step in steps_there()
    }


def test_checkpoints_that_only_the_store_has_are_pruned_too() -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert steps_there() == [2, 4, 6]
    lose_machine()
    longer = {**RUN, "epochs": 3, "save_total_limit": 1}
    train(build(ADDRESS, **longer), resume_from="auto")  # type: ignore[arg-type]
    assert 9 in steps_there() and len(steps_there()) <= 2 and 2 not in steps_there()


def test_nothing_is_deleted_there_before_the_new_one_is_complete(store: type[Watched]) -> None:
    train(build(ADDRESS, **{**RUN, "epochs": 3}, save_total_limit=1, keep_best=1))  # type: ignore[arg-type]
    complete = 0
    for what, path in store.done:
        complete += what == "write" and path.endswith(MANIFEST)
        if what == "remove" and path.endswith(MANIFEST):
            complete -= 1
            assert complete >= 1


def test_a_checkpoint_that_is_being_uploaded_is_kept_until_it_is_there(store: type[Watched]) -> None:
    goes_on, is_slow = threading.Event(), threading.Event()

    def slow(what: str, path: str) -> None:
        if what == "write" and "checkpoint-1/a.txt" in path:
            is_slow.set()
            assert goes_on.wait(60)

    store.fault = staticmethod(slow)
    mirror = mirror_of()
    mirror.take()
    save(mirror, 1)
    assert is_slow.wait(60)
    for step in (2, 3):
        save(mirror, step)
        mirror.prune(keep_last=1)
    assert [kept.step for kept in mirror.kept()] == [1, 3]
    goes_on.set()
    mirror.finish()
    mirror.lock.release()
    assert [kept.step for kept in mirror.kept()] == [3] and steps_there() == [3]
    assert content_of(ADDRESS)["last"] == b"checkpoint-3\n"


def test_a_fresh_run_replaces_what_is_there_only_if_it_may(store: type[Watched]) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    lose_machine()
    with pytest.raises(ConfigError, match="already holds checkpoints, the newest being 'checkpoint-6'"):
        build(ADDRESS, **RUN).train()  # type: ignore[arg-type]
    train(build(ADDRESS, **{**RUN, "epochs": 1}, overwrite=True))  # type: ignore[arg-type]
    assert steps_there() == [2, 3] and content_of(ADDRESS)["last"] == b"checkpoint-3\n"
    assert max(copy.kept.sequence for copy in Place(ADDRESS).copies().values()) > 3  # newer than what it replaced


# --- faults


def failing(times: int, matches: str = "", error: type[Exception] = OSError) -> Any:
    left = [times]

    def fault(what: str, path: str) -> None:
        if what == "write" and re.search(matches, path) and not path.endswith(".probe") and left[0] > 0:
            left[0] -= 1
            raise error("503 Slow Down")

    return staticmethod(fault)


@pytest.mark.parametrize("error", [OSError, ValueError, PermissionError])
def test_an_outage_is_told_once_and_does_not_end_the_run(
    store: type[Watched], caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    store.fault = failing(7, "checkpoint-2/", error)
    with caplog.at_level(logging.INFO):
        trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert trainer.progress.step == 6 and steps_there() == [2, 4, 6]
    assert caplog.text.count("Nothing can be uploaded") == 1 and caplog.text.count("uploading works again") == 1
    assert "503 Slow Down" in caplog.text


def test_a_store_that_never_works_again_leaves_everything_here_and_the_next_run_uploads_it(
    store: type[Watched], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNITRAIN_UPLOAD_WAIT", "0.3")
    monkeypatch.setattr(upload, "SAID_S", 0.0)
    store.fault = failing(10**9, "checkpoint")
    with caplog.at_level(logging.INFO):
        trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert trainer.progress.step == 6 and steps_there() == []
    assert "Waiting for the upload of checkpoint-2, checkpoint-4, checkpoint-6 (" in caplog.text
    assert "Not everything was uploaded" in caplog.text and str(trainer.save_dir) in caplog.text
    store.fault = failing(0)
    train(build(ADDRESS, **RUN), resume_from="auto")  # type: ignore[arg-type]
    assert steps_there() == [2, 4, 6]


def test_a_store_that_fails_ends_a_run_whose_checkpoints_are_required(store: type[Watched]) -> None:
    store.fault = failing(10**9, "checkpoint")
    with pytest.raises(CheckpointError, match=r"cannot be uploaded|Not everything was uploaded"):
        build(ADDRESS, **RUN, save_required=True).train()  # type: ignore[arg-type]
    assert LOCK not in content_of(ADDRESS)


def test_a_file_of_the_run_that_a_store_refuses_is_sent_again(store: type[Watched]) -> None:
    left = [2]

    def refuse(what: str, path: str) -> None:
        if what == "write" and path.endswith("/run.json") and left[0]:
            left[0] -= 1
            raise FileNotFoundError("The specified bucket does not exist")

    store.fault = staticmethod(refuse)
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert left == [0] and {"run.json", "config.yaml", "metrics.jsonl"} <= content_of(ADDRESS).keys()


class Hanging:
    """A store that hangs at the model of a checkpoint, from the second file of it on, until it is let go."""

    def __init__(self) -> None:
        self.go, self.hangs, self.later = threading.Event(), threading.Event(), list[tuple[str, str]]()

    def __call__(self, what: str, path: str) -> None:
        if self.hangs.is_set():
            self.later.append((what, path))
        elif what == "write" and "checkpoint-6/model" in path:
            self.hangs.set()
            self.go.wait(60)


def test_a_run_that_waits_no_longer_writes_nothing_more_and_keeps_its_lock_until_it_is_certain(
    store: type[Watched], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMNITRAIN_UPLOAD_WAIT", "0.3")
    monkeypatch.setattr(upload, "LAST_S", 0.3)
    hanging = Hanging()
    store.fault = staticmethod(hanging)
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert hanging.hangs.is_set() and "Not everything was uploaded" in caplog.text
    assert "stays locked until what is being written there has ended" in caplog.text
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="is in use by process"):
        build(ADDRESS, **RUN, overwrite=True).train()  # type: ignore[arg-type]
    hanging.later.clear()
    hanging.go.set()
    wait_for(lambda: LOCK not in content_of(ADDRESS))
    assert [one for one in hanging.later if one[0] == "write" and not one[1].endswith(LOCK)] == []
    train(build(ADDRESS, **RUN, overwrite=True))  # type: ignore[arg-type]
    assert steps_there() == [2, 4, 6] and content_of(ADDRESS)["last"] == b"checkpoint-6\n"


def test_a_store_that_hangs_keeps_no_process_alive(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import time, stores, torch\n"
        "from omnitrain import Trainer\n"
        "stores.Watched.fault = staticmethod(lambda what, path: time.sleep(600 * ('model' in path)))\n"
        "x = torch.ones(8, 1)\n"
        "with stores.watching():\n"
        "    options = dict(loss_fn=torch.nn.functional.mse_loss, device='cpu', progress_bar=False)\n"
        "    Trainer(torch.nn.Linear(1, 1), (x, x), epochs=1, save_dir='watched://bucket/run', **options).train()\n"
        "print('trained')\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMNITRAIN_UPLOAD_WAIT": "0.3"}
    done = programs.run(sys.executable, str(script), env=environment, timeout=60)
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("how", ["lost", "cut", "changed"])
def test_an_upload_that_the_store_took_wrongly_is_made_again(
    how: str, store: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [3]
    proper = InMemory.put_file

    def put_file(self: InMemory, lpath: str, rpath: str, **options: Any) -> None:
        proper(self, lpath, rpath, **options)
        if "checkpoint-2/" in rpath and wrong[0]:
            wrong[0] -= 1
            data = self.cat_file(rpath)
            self.rm_file(rpath)
            if how != "lost":
                self.pipe_file(rpath, data[:-1] if how == "cut" else data[:-1] + b"\0\0"[: 1 + (not data)])

    monkeypatch.setattr(InMemory, "put_file", put_file)
    trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    assert wrong == [0] and steps_there() == [2, 4, 6] and trainer.save_dir is not None
    for name, content in content_of(ADDRESS).items():
        if name.startswith("checkpoint-"):
            assert (trainer.save_dir / name).read_bytes() == content, name


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(store: type[Watched]) -> None:
    def refuse(what: str, path: str) -> None:
        raise PermissionError("Access Denied for key=AKIA secret=abcdef")

    store.fault = staticmethod(refuse)
    trainer = build(ADDRESS, **RUN)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"`save_dir='watched://bucket/run'`: nothing can be written.*Access Denied"
    ) as told:
        trainer.train()
    assert trainer.progress.step == 0 and "abcdef" not in str(told.value)
    store.fault = staticmethod(lambda what, path: None)
    trainer.train()  # nothing is left locked


def test_a_store_that_cannot_be_read_is_told_before_the_first_step(store: type[Watched]) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]

    def refuse(what: str, path: str) -> None:
        if what == "read" and path.endswith(MANIFEST):
            raise ValueError("Internal Error")

    store.fault = staticmethod(refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read: ValueError: Internal Error. Check the address"):
        build(ADDRESS, **RUN).train(resume_from="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("nosuch://bucket/run", ConfigError, "fsspec knows no file system 'nosuch'"),
        ("file" + ":///runs/a", ConfigError, "Pass the path of a folder"),
        ("https://host/run", ConfigError, "Nothing can be written there"),
        ("memory://", ConfigError, "names no folder"),
        ("gone://bucket/run", MissingExtraError, "pip install gone_package"),
        ("sunk://bucket/run", ConfigError, 'Sunk requires "paramiko" to be installed. Install that'),
    ],
)
def test_an_address_that_cannot_work_is_refused_when_the_trainer_is_made(
    address: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.registry import known_implementations

    monkeypatch.setitem(known_implementations, "gone", {"class": "gone_package.Gone", "err": "gone"})
    sunk = {"class": "fsspec.implementations.nothing.Sunk", "err": 'Sunk requires "paramiko" to be installed'}
    monkeypatch.setitem(known_implementations, "sunk", sunk)
    with pytest.raises(error, match=words):
        build(address, **RUN)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        build(None).load_checkpoint(f"{address}/checkpoint-1" if address != "memory://" else address)


# --- two runs


def owner(**changes: Any) -> bytes:
    return json.dumps({**own_process(), "token": "0badcafe", "since": "today", "at": time.time(), **changes}).encode()


def test_a_second_run_on_one_store_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mirror = mirror_of()
    mirror.take()
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "other machine"))
    try:
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on '{socket.gethostname()}'"):
            build(ADDRESS, **RUN).train()  # type: ignore[arg-type]
    finally:
        mirror.finish()
        mirror.lock.release()
    train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"pid": 2**22 + 5}, {"boot": "another", "at": 0}, {"boot": "another"}], ids=["dead", "old", "silent"]
)
def test_the_lock_of_a_run_that_is_gone_is_taken_over(changes: dict[str, Any], caplog: Any) -> None:
    Place(ADDRESS).write(LOCK, owner(**changes))
    train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    assert "was left locked by process" in caplog.text and LOCK not in content_of(ADDRESS)


def test_the_lock_of_a_run_that_shows_life_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "WATCH_S", 20.0)
    place, ends = Place(ADDRESS), threading.Event()
    place.write(LOCK, owner(boot="another"))

    def live() -> None:
        for beat in range(1000):
            place.write(LOCK, owner(boot="another", beat=beat))
            if ends.wait(0.05):
                return

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="is in use by"):
            build(ADDRESS, **RUN).train()  # type: ignore[arg-type]
    finally:
        ends.set()
        thread.join()


def test_a_lock_is_gone_for_good_once_it_is_released(store: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "BEAT_S", 0.05)
    for _ in range(5):
        mirror, beating = mirror_of(), threading.Event()

        def slow(what: str, path: str, beating: threading.Event = beating) -> None:
            if what == "write" and path.endswith(LOCK) and threading.current_thread().name == "omnitrain-remote-lock":
                beating.set()
                time.sleep(0.1)

        mirror.take()
        store.fault = staticmethod(slow)
        assert beating.wait(10)
        mirror.finish()
        mirror.lock.release()
        time.sleep(0.3)
        assert LOCK not in content_of(ADDRESS)


def test_a_lock_that_a_failing_store_has_kept_does_not_keep_its_own_process_out(store: type[Watched]) -> None:
    def refuse(what: str) -> None:
        if what == "remove":
            raise OSError("503 Slow Down")

    mirror = mirror_of()
    mirror.take()
    store.fault = staticmethod(lambda what, path: refuse(what))
    mirror.finish()
    mirror.lock.release()
    store.fault = failing(0)
    assert LOCK in content_of(ADDRESS)
    train(build(ADDRESS, **{**RUN, "epochs": 1}))  # type: ignore[arg-type]
    assert LOCK not in content_of(ADDRESS)


def test_a_run_whose_store_was_taken_over_uploads_nothing_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload, "BEAT_S", 0.02)
    mirror = mirror_of()
    mirror.take()
    save(mirror, 1)
    wait_for(lambda: "last" in content_of(ADDRESS))
    place = Place(ADDRESS)

    def is_lost() -> bool:
        place.write(LOCK, owner())
        time.sleep(0.05)
        assert mirror._upload is not None
        return bool(mirror._upload._lock.lost)

    wait_for(is_lost)
    save(mirror, 2)
    mirror.finish()
    mirror.lock.release()
    assert steps_there() == [1] and LOCK in content_of(ADDRESS) and "was taken over by" in caplog.text


# --- the command line


def test_the_commands_take_addresses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    lose_machine()
    assert main(["checkpoint", "ls", ADDRESS]) in (0, None)
    listed = capsys.readouterr().out
    assert re.search(r"checkpoint-6 +6 .* complete", listed) and "score: " in listed
    assert main(["checkpoint", "verify", ADDRESS]) in (0, None)
    assert "3 of 3 complete" in capsys.readouterr().out
    assert main(["checkpoint", "export", f"{ADDRESS}/last", str(tmp_path / "out")]) in (0, None)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert main(["checkpoint", "show", f"{ADDRESS}/checkpoint-2"]) in (0, None)
    assert main(["checkpoint", "diff", f"{ADDRESS}/checkpoint-2", f"{ADDRESS}/last"]) in (0, None)
    assert main(["checkpoint", "ls", "watched://bucket/none"]) == 2
    fs = Place(ADDRESS).fs
    fs.pipe_file("/bucket/run/checkpoint-4/model.safetensors", b"x")
    assert main(["checkpoint", "verify", ADDRESS]) == 1
    assert "checkpoint-4" in capsys.readouterr().out


def test_outcomes_are_those_of_a_local_run(undisturbed: dict[str, Any]) -> None:
    trainer = train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    found, expected = outcome(trainer), dict(undisturbed)
    assert not differences({name: expected[name] for name in found}, found)


def test_sizes_of_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    train(build(ADDRESS, **RUN))  # type: ignore[arg-type]
    lose_machine()
    monkeypatch.setattr(remote, "PIECE", 100)
    found = mirror_of().resolve("last")
    assert found is not None and Store(found[0].parent).verify(found[0])["step"] == 6


# --- killed

SHELF = "shelf://bucket/run"
KILLED: dict[str, Any] = {**RUN, "save_total_limit": 1}


class Killing:
    """Kills this process at one of the operations on the store."""

    def __init__(self, at: int) -> None:
        self._at, self._count = at, itertools.count()

    def __call__(self, what: str, path: str) -> None:
        if next(self._count) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_killed(at: int) -> int:
    """Train in a child process that is killed at this operation; return its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            Watched.fault = Killing(at)
            train(build(SHELF, **KILLED), resume_from="auto")  # type: ignore[arg-type]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_a_run_killed_at_any_operation_on_the_store_goes_on_on_another_machine(
    every: int, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    kept = {name: value for name, value in undisturbed.items() if name not in ("stream", "rates")}
    for at in itertools.count(every // 2, every):
        shutil.rmtree(tmp_path / "shelf", ignore_errors=True)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        (tmp_path / "shelf" / "bucket").mkdir(parents=True)
        code = run_killed(at)
        if code == 0:
            assert at > 30
            return
        assert code == -signal.SIGKILL
        shutil.rmtree(tmp_path / "local")
        found = play(SHELF, [{}], **KILLED)  # type: ignore[arg-type]
        assert not differences(kept, {name: found[name] for name in kept}), at
        assert 6 in Place(SHELF).copies() and content_of(SHELF)["last"] == b"checkpoint-6\n", at
        there = {name.partition("/")[0] for name in content_of(SHELF) if "/" in name}
        assert there == {f"checkpoint-{step}" for step in Place(SHELF).copies()}, at
        assert len(there) <= 2 and LOCK not in content_of(SHELF), at
