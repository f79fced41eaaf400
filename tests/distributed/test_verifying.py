"""Checkpoints that all processes hash a share of: damage that only one of them sees is noticed by both."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import test_sharded_saves  # noqa: E402
import torch  # noqa: E402
from forking import ON_CPU, Case, Found, Outcome, play  # noqa: E402
from recipes import rows  # noqa: E402

from omnitrain import Callback, CheckpointError  # noqa: E402
from omnitrain.checkpoint import checkpointer, manifest, reading, verifying  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_verifying"
DAMAGE = ("none", "flipped", "truncated", "missing", "unreadable", "unseen")


class Began(Callback):
    def on_train_start(self, trainer: Any) -> None:
        self.step = trainer.progress.step


def noted_hashes(trouble: str = "", fail_on: int = -1) -> list[str]:
    """Have hashing shared out however small the files are, and return a list that gets the names of this rank's."""
    verifying._WORTH_IT = 0
    rank, hashed = int(os.environ["RANK"]), list[str]()
    keep = manifest.check_hashes

    def check(place: Path, files: Any) -> None:
        hashed.extend(files)
        if trouble == "unreadable" and rank == fail_on and place.name == "checkpoint-4" and files:
            place = place.with_name("gone")
        keep(place, files)

    verifying.check_hashes = check
    if trouble == "unseen" and rank == fail_on:  # as on a disk of its own
        verifying._read = lambda path: None
    return hashed


def begin(folder: str, source: str) -> dict[str, Any]:
    """Train with the weights of a checkpoint."""
    hashed = noted_hashes()
    trainer = test_sharded_saves.make(folder, consolidate=False, max_steps=1, init_from=source)
    trainer.train()
    return {"hashed": hashed}


def resume(folder: str, which: str = "auto", trouble: str = "", fail_on: int = -1) -> dict[str, Any]:
    """Resume, where a rank may not be able to read its share of the files."""
    hashed, began = noted_hashes(trouble, fail_on), Began()
    trainer = test_sharded_saves.make(
        folder, consolidate=False, max_steps=6, save_steps=100, save_total_limit=None, callbacks=[began]
    )
    trainer.train(resume_from=which)
    return {"hashed": hashed, "step": began.step, "state": test_sharded_saves.state_of(trainer)}


def break_reading(fail_on: int, is_local: bool) -> None:
    """Have the disk fail one rank in the middle of reading; each reads its part, or the main one all."""
    calls, keep, choose = itertools.count(), reading.TensorFile._fill, checkpointer.hashed_by_all

    def fill(self: Any, name: str, box: Any, target: Any) -> None:
        if int(os.environ["RANK"]) == fail_on and next(calls) == 3:
            raise CheckpointError(f"{name} cannot be read")
        keep(self, name, box, target)

    def chosen(*args: Any) -> Any:
        found = choose(*args)
        reading.TensorFile._fill = fill
        return found

    checkpointer.hashed_by_all = chosen
    if not is_local:
        reading.TensorFile._is_local = lambda self: self._ranks.world_size == 1


def read(folder: str, fail_on: int, is_local: bool) -> dict[str, Any]:
    """Resume, where the disk fails one rank in the middle of reading."""
    break_reading(fail_on, is_local)
    trainer = test_sharded_saves.make(folder, consolidate=False, max_steps=6, save_total_limit=None)
    trainer.train(resume_from="auto")
    return {"step": trainer.progress.step}


def end(folder: str, backend: str, fail_on: int, is_local: bool) -> dict[str, Any]:
    """Train, where the disk fails one rank in the middle of reading the best weights at the end."""
    break_reading(fail_on, is_local)
    load, last = checkpointer.Checkpointer.load_best, dict[str, str]()

    def load_best(self: Any) -> None:
        last.update(test_sharded_saves.state_of(trainer))
        load(self)

    checkpointer.Checkpointer.load_best = load_best
    trainer = test_sharded_saves.make(
        folder, backend, consolidate=False, save_total_limit=None, learning_rate=0.1,
        eval_dataset=rows(60, torch.float32), eval_steps=2, optimization_metric="loss", optimization_direction="max",
    )  # fmt: skip
    trainer.train()
    best, newest = (trainer.store.resolve(which)[0].name for which in ("best", "last"))
    return {"last": last, "now": test_sharded_saves.state_of(trainer), "best": best, "newest": newest}


def train(folder: str) -> None:
    test_sharded_saves.make(folder, consolidate=False, save_total_limit=None).train()


def damage(folder: Path, kind: str, rank: int, of: str = "optimizer") -> None:
    """Damage this rank's part in the last checkpoint."""
    part = folder / "checkpoint-4" / of / f"rank-{rank:05d}.safetensors"
    content = bytearray(part.read_bytes())
    if kind == "flipped":
        content[-1] ^= 1
        part.write_bytes(content)
    elif kind == "truncated":
        part.write_bytes(content[:-1])
    elif kind == "missing":
        part.unlink()


READS = [("own-0", 0, True), ("own-1", 1, True), ("main", 0, False)]
ENDS = [("fsdp", 1, True), ("fsdp", 0, False), ("zero1", 1, True), ("zero3", 1, True), ("zero3", 0, False)]


def named(kind: str, rank: int, which: str) -> str:
    return f"{kind}-{rank}-{which}"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    folder = tmp_path_factory.mktemp("verifying")
    first = play([Case("train", f"{HERE}:train", {"folder": str(folder / "run")})], folder / "cases")
    assert [one.code for one in first["train"]] == [0, 0], first["train"]
    cases = []
    for kind in DAMAGE:
        for rank in (0, 1):
            for which in ("auto", "checkpoint-4"):
                name = named(kind, rank, which)
                shutil.copytree(folder / "run", folder / name, symlinks=True)
                damage(folder / name, kind, rank)
                which = which if which == "auto" else str(folder / name / which)
                options = {"folder": str(folder / name), "which": which, "trouble": kind, "fail_on": rank}
                cases.append(Case(name, f"{HERE}:resume", options))
    for name in ("initial", "initial-flipped"):
        shutil.copytree(folder / "run", folder / f"{name}-source", symlinks=True)
        source = folder / f"{name}-source" / "checkpoint-4"
        cases.append(Case(name, f"{HERE}:begin", {"folder": str(folder / name), "source": str(source)}))
    damage(folder / "initial-flipped-source", "flipped", 1, of="model")
    for name, rank, is_local in READS:
        shutil.copytree(folder / "run", folder / name, symlinks=True)
        options = {"folder": str(folder / name), "fail_on": rank, "is_local": is_local}
        cases.append(Case(name, f"{HERE}:read", options))
    return play(cases, folder / "resumed")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    folder, cases = tmp_path_factory.mktemp("ended"), []
    for backend, rank, is_local in ENDS:
        name = f"{backend}-{rank}"
        options = {"folder": str(folder / name), "backend": backend, "fail_on": rank, "is_local": is_local}
        environment = {"DS_ACCELERATOR": "cpu"} if "zero" in backend else dict(ON_CPU)
        cases.append(Case(name, f"{HERE}:end", options, environment=environment))
    return play(cases, folder / "cases")


@pytest.mark.parametrize("kind", ["none", "unseen"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_file_is_hashed_by_one_of_those_that_see_it(resumed: Found[list[Outcome]], kind: str, rank: int) -> None:
    for which in ("auto", "checkpoint-4"):
        outcomes = resumed[named(kind, rank, which)]
        assert [one.code for one in outcomes] == [0, 0], outcomes
        shares = [one.result["hashed"] for one in outcomes]
        assert len({*shares[0], *shares[1]}) == len(shares[0]) + len(shares[1])
        assert all(f"optimizer/rank-0000{k}.safetensors" in shares[0] + shares[1] for k in (0, 1))
        assert bool(shares[1]) == (kind == "none")
        assert [one.result["step"] for one in outcomes] == [4, 4]


def test_weights_to_begin_with_are_hashed_by_both(resumed: Found[list[Outcome]]) -> None:
    outcomes = resumed["initial"]
    assert [one.code for one in outcomes] == [0, 0], outcomes
    names = {f"model/rank-0000{rank}.safetensors" for rank in (0, 1)}
    assert all(len(one.result["hashed"]) == 1 for one in outcomes)
    assert {name for one in outcomes for name in one.result["hashed"]} == names
    outcomes = resumed["initial-flipped"]
    assert [one.code for one in outcomes] == [1, 1], outcomes
    for one in outcomes:
        assert "CheckpointError" in one.output and "'model/rank-00001.safetensors' does not match" in one.output


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing", "unreadable"])
@pytest.mark.parametrize("rank", [0, 1])
def test_damage_is_named_on_both_or_an_older_checkpoint_taken(
    resumed: Found[list[Outcome]], kind: str, rank: int
) -> None:
    asked = resumed[named(kind, rank, "checkpoint-4")]
    assert [one.code for one in asked] == [1, 1], asked
    for one in asked:
        assert "CheckpointError" in one.output and "checkpoint-4" in one.output, one.output
        assert kind == "unreadable" or f"optimizer/rank-0000{rank}.safetensors" in one.output, one.output
    found = resumed[named(kind, rank, "auto")]
    assert [one.code for one in found] == [0, 0], found
    assert [one.result["step"] for one in found] == [2, 2]
    assert found[0].result["state"] == resumed[named("none", 0, "auto")][0].result["state"]
    assert "Taking 'checkpoint-2' instead" in found[0].output, found[0].output


@pytest.mark.parametrize(("name", "rank", "is_local"), READS)
def test_a_disk_that_fails_one_of_them_in_the_middle_of_reading_ends_both(
    resumed: Found[list[Outcome]], name: str, rank: int, is_local: bool
) -> None:
    outcomes = resumed[name]
    assert [one.code for one in outcomes] == [1, 1], outcomes
    assert "cannot be read" in outcomes[rank].output, outcomes[rank].output
    assert "Error" in outcomes[1 - rank].output and "cannot be read" in outcomes[1 - rank].output, outcomes[1 - rank]
    assert max(one.seconds for one in outcomes) < 60


@pytest.mark.parametrize("name", [f"{backend}-{rank}" for backend, rank, _ in ENDS])
def test_best_weights_that_one_of_them_cannot_read_leave_the_last_ones_on_both(
    ended: Found[list[Outcome]], name: str
) -> None:
    outcomes = ended[name]
    assert [one.code for one in outcomes] == [0, 0], outcomes
    for one in outcomes:
        assert one.result["best"] != one.result["newest"]
        assert one.result["now"] == one.result["last"]
        assert "cannot be read" in one.output and "keeps those of the last step" in one.output, one.output
