"""Checkpoints that all processes hash a share of: damage that only one of them sees is an error on both."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_sharded_saves
import torch
from backends import asked_for
from forking import ON_CPU, Case, Found, Outcome, play
from marks import thinned
from recipes import rows

from omnitrain import Callback, CheckpointError
from omnitrain.checkpoint import checkpointer, manifest, tensor_reader, verifying

HERE = "test_verifying"
WHICH = ("auto", "checkpoint-4")


class FirstStep(Callback):
    def on_train_start(self, trainer: Any) -> None:
        self.step = trainer.progress.step


def noted_hashes(trouble: str = "", fail_on: int = -1) -> list[str]:
    """Have hashing shared out however small the files are, and return a list that gets the names of this rank's."""
    verifying._MIN_SHARED_BYTES = 0
    rank, hashed = int(os.environ["RANK"]), list[str]()
    check_hashes = manifest.check_hashes

    def check(place: Path, files: Any) -> None:
        hashed.extend(files)
        if trouble == "unreadable" and rank == fail_on and place.name == "checkpoint-4" and files:
            place = place.with_name("gone")
        check_hashes(place, files)

    verifying.check_hashes = check
    if trouble == "unseen" and rank == fail_on:  # as on a local disk
        verifying.read_or_none = lambda path: None
    return hashed


def begin(folder: str, source: str) -> dict[str, Any]:
    """Train with the weights of a checkpoint."""
    hashed = noted_hashes()
    trainer = test_sharded_saves.make(folder, consolidate=False, max_steps=1, init_from=source)
    trainer.train()
    return {"hashed": hashed}


def resume(folder: str, which: str = "auto", trouble: str = "", fail_on: int = -1) -> dict[str, Any]:
    """Resume, where a rank may not be able to read its share of the files."""
    hashed, first = noted_hashes(trouble, fail_on), FirstStep()
    trainer = test_sharded_saves.make(
        folder, consolidate=False, max_steps=6, save_steps=100, save_total_limit=None, callbacks=[first]
    )
    trainer.train(resume_from=which)
    return {"hashed": hashed, "step": first.step, "state": test_sharded_saves.state_of(trainer)}


def break_reading(fail_on: int, is_local: bool) -> None:
    """Have the disk fail one rank in the middle of reading; each reads its part, or the main one all."""
    calls, original, choose = itertools.count(), tensor_reader.TensorFile._fill, checkpointer.find_with_shared_hashing

    def fill(self: Any, name: str, box: Any, target: Any) -> None:
        if int(os.environ["RANK"]) == fail_on and next(calls) == 3:
            raise CheckpointError(f"{name} cannot be read")
        original(self, name, box, target)

    def choose_and_break(*args: Any) -> Any:
        chosen = choose(*args)  # whose reads work
        tensor_reader.TensorFile._fill = fill
        return chosen

    checkpointer.find_with_shared_hashing = choose_and_break
    if not is_local:
        tensor_reader.TensorFile._is_local = lambda self: self._ranks.world_size == 1


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


READS = [(0, True), (1, True), (0, False)]
"""Which rank cannot read, and whether each rank reads its part or the main one all."""
ENDS = [("fsdp", 1, True), ("fsdp", 0, False), ("zero1", 1, True), ("zero3", 1, True), ("zero3", 0, False)]
INTACT = [("none", 0, which) for which in WHICH] + [("unseen", rank, which) for rank in (0, 1) for which in WHICH]
DAMAGED = [
    case for kind, rank in (("flipped", 1), ("truncated", 0), ("missing", 1), ("unreadable", 1))
    for case in ((kind, rank, "auto"), (kind, 1 - rank, "checkpoint-4"))
]  # fmt: skip
QUICK = [
    ("none", 0, "auto"), ("unseen", 1, "auto"), ("flipped", 1, "auto"), ("unreadable", 0, "checkpoint-4"),
]  # fmt: skip


def name_of(*words: Any) -> str:
    return "-".join(map(str, words))


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    first = play([Case("train", f"{HERE}:train", {"folder": str(folder / "run")})], folder / "cases")
    assert [one.code for one in first["train"]] == [0, 0], first["train"]

    def case(name: str, function: str, environment: dict[str, str] = ON_CPU, **options: Any) -> Case:
        options = {"folder": str(folder / name), **options}
        return Case(name, f"{HERE}:{function}", options, environment=environment)

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / "run", folder / name, symlinks=True))

    cases = []
    for kind, rank, which in sorted({("none", 0, "auto"), *asked_for(request, "kind", "rank", "which")}):
        run = copy(name_of(kind, rank, which))
        damage(run, kind, rank)
        checkpoint = which if which == "auto" else str(run / which)
        cases.append(case(run.name, "resume", which=checkpoint, trouble=kind, fail_on=rank))
    for name in ("initial", "initial-flipped"):
        source = copy(f"{name}-source")
        if name == "initial-flipped":
            damage(source, "flipped", 1, of="model")
        cases.append(case(name, "begin", source=str(source / "checkpoint-4")))
    for rank, is_local in sorted(asked_for(request, "rank", "is_local")):
        name = copy(name_of("read", rank, is_local)).name
        cases.append(case(name, "read", fail_on=rank, is_local=is_local))
    for backend, rank, is_local in sorted(asked_for(request, "backend", "rank", "is_local")):
        environment = {"DS_ACCELERATOR": "cpu"} if "zero" in backend else ON_CPU
        options = {"backend": backend, "fail_on": rank, "is_local": is_local}
        cases.append(case(name_of(backend, rank), "end", environment, **options))
    return play(cases, folder / "resumed")


@pytest.mark.parametrize(("kind", "rank", "which"), thinned(INTACT, [one for one in INTACT if one in QUICK]))
def test_each_file_is_hashed_by_one_rank_that_has_it(outcomes: Any, kind: str, rank: int, which: str) -> None:
    ranks = outcomes[name_of(kind, rank, which)]
    assert [one.code for one in ranks] == [0, 0], ranks
    shares = [one.result["hashed"] for one in ranks]
    assert len({*shares[0], *shares[1]}) == len(shares[0]) + len(shares[1])
    assert all(f"optimizer/rank-0000{k}.safetensors" in shares[0] + shares[1] for k in (0, 1))
    assert bool(shares[1]) == (kind == "none")
    assert [one.result["step"] for one in ranks] == [4, 4]


def test_initial_weights_are_hashed_by_both_ranks(outcomes: Any) -> None:
    ranks = outcomes["initial"]
    assert [one.code for one in ranks] == [0, 0], ranks
    assert all(len(one.result["hashed"]) == 1 for one in ranks)
    names = {name for one in ranks for name in one.result["hashed"]}
    assert names == {f"model/rank-0000{rank}.safetensors" for rank in (0, 1)}
    ranks = outcomes["initial-flipped"]
    assert [one.code for one in ranks] == [1, 1], ranks
    for one in ranks:
        assert "CheckpointError" in one.output and "'model/rank-00001.safetensors' does not match" in one.output


@pytest.mark.parametrize(("kind", "rank", "which"), thinned(DAMAGED, [one for one in DAMAGED if one in QUICK]))
def test_damage_is_an_error_or_an_older_checkpoint(outcomes: Any, kind: str, rank: int, which: str) -> None:
    ranks = outcomes[name_of(kind, rank, which)]
    if which == "auto":
        assert [one.code for one in ranks] == [0, 0], ranks
        assert [one.result["step"] for one in ranks] == [2, 2]
        assert ranks[0].result["state"] == outcomes["none-0-auto"][0].result["state"]
        assert "Using 'checkpoint-2' instead" in ranks[0].output, ranks[0].output
        return
    assert [one.code for one in ranks] == [1, 1], ranks
    for one in ranks:
        assert "CheckpointError" in one.output and "checkpoint-4" in one.output, one.output
        assert kind == "unreadable" or f"optimizer/rank-0000{rank}.safetensors" in one.output, one.output


@pytest.mark.parametrize(("rank", "is_local"), thinned(READS, READS[1:2]))
def test_read_error_on_one_rank_ends_both(outcomes: Any, rank: int, is_local: bool) -> None:
    ranks = outcomes[name_of("read", rank, is_local)]
    assert [one.code for one in ranks] == [1, 1], ranks
    assert "cannot be read" in ranks[rank].output, ranks[rank].output
    assert "Error" in ranks[1 - rank].output and "cannot be read" in ranks[1 - rank].output, ranks[1 - rank]


@pytest.mark.parametrize(("backend", "rank", "is_local"), thinned(ENDS, ENDS[:1]))
def test_unreadable_best_weights_leave_the_last_ones(outcomes: Any, backend: str, rank: int, is_local: bool) -> None:
    ranks = outcomes[name_of(backend, rank)]
    assert [one.code for one in ranks] == [0, 0], ranks
    for one in ranks:
        assert one.result["best"] != one.result["newest"]
        assert one.result["now"] == one.result["last"]
        assert "cannot be read" in one.output and "keeps those of the last step" in one.output, one.output
