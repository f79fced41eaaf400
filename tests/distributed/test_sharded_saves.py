"""Checkpoints that every process writes and hashes a part of: kills, full disks, locked folders, damaged files."""

import errno
import hashlib
import itertools
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import asked_for, make_trainer
from disks import FaultyDisk
from forking import Case, Found, Outcome, current_rank, mark, play
from marks import thinned
from recipes import callback, rows, t16

from omnitrain import CheckpointError
from omnitrain.checkpoint import checkpointer, lock, manifest, tensor_files
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_files import gather_to_host
from omnitrain.distributed import watchdog

HERE = "test_sharded_saves"
ASYNC = {"async_save": True}
PARTS = {"consolidate": False}
WAYS: dict[str, dict[str, Any]] = {"parts": PARTS, "async-parts": PARTS | ASYNC}
MORE: dict[str, dict[str, Any]] = {"whole": {}, "async": ASYNC, "ddp": {"backend": "ddp"}}
for _backend, _options in {"zero3": PARTS, "hf_fsdp": PARTS, "hf_zero2": {}}.items():
    MORE |= {
        _backend: {"backend": _backend, **_options},
        f"{_backend}-async": {"backend": _backend, **_options, **ASYNC},
    }
"""Ways that only `make test-all` tests."""
SAME = [("parts", "async-parts"), ("whole", "async"),
        *((backend, f"{backend}-async") for backend in ("zero3", "hf_fsdp", "hf_zero2"))]  # fmt: skip
RECORD = ("config.yaml", "metrics.jsonl", "run.json", "run.lock")
"""What is in a run's folder besides its checkpoints."""
KINDS = ("write rank-", "rename")
"""The file operations that are disturbed in `make test`."""


class Disk(FaultyDisk):
    """Notes what is done to it, and has a fault at one of the operations, by its number or its first words."""

    def __init__(self, root: Path, place: int | str | None = None, how: str = "kill") -> None:
        super().__init__(root)
        self.place, self.how, self.noted, self.lock = place, how, list[str](), threading.Lock()

    def _begin(self, kind: str, path: Path, half: bytes | None = None) -> None:
        if half is not None:
            path.write_bytes(half)
        with self.lock:
            operation, number = f"{kind} {path.name}", len(self.noted)
            self.noted.append(operation)
        if operation.startswith(self.place) if isinstance(self.place, str) else number == self.place:
            mark()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def state_of(trainer: Any) -> dict[str, str]:
    """Return a digest of each weight and moment; all ranks call this."""
    moments, _ = trainer.backend.optimizer_state()
    tensors = sorted({**trainer.backend.model_tensors(), **moments}.items())
    return {name: hashlib.sha256(gather_to_host(tensor).numpy().tobytes()).hexdigest() for name, tensor in tensors}


def make(folder: str, backend: str = "fsdp", **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "global_batch_size": 12, "batch_size": 6, "max_steps": 4, "save_steps": 2, "save_total_limit": 1,
        "loss_fn": F.mse_loss, "learning_rate": 0.01, "save_dir": folder,
    }  # fmt: skip
    return make_trainer(backend, t16(dtype=torch.float32), rows(60, torch.float32), **{**defaults, **options})


def run(
    folder: str, rank: int = -1, at: int | str | None = None, fault: str = "kill", **options: Any
) -> dict[str, Any]:
    """Train from the latest checkpoint, with a fault of the disk of one process."""
    watchdog.GRACE_S = 1.0
    trainer = make(folder, **options)
    disk = Disk(Path(folder), at if current_rank() == rank else None, fault)
    trainer.store.fs = disk
    trainer.train(resume_from="auto")
    _, content = trainer.store.resolve("last")
    files = {name: entry["sha256"] for name, entry in content["files"].items() if name.endswith(".safetensors")}
    return {"noted": disk.noted, "state": state_of(trainer), "step": trainer.progress.step, "files": files}


def case(way: str, name: str, **options: Any) -> Case:
    return Case(name, f"{HERE}:run", {**(WAYS | MORE)[way], **options})


def run_in_turn(folders: list[str]) -> list[Any]:
    lock.EXIT_GRACE_S, results = 0.1, []
    for folder in folders:
        trainer, message = make(folder, "ddp"), ""
        try:
            trainer.train()
        except CheckpointError as error:
            message = str(error)
        results.append((trainer.progress.step, message))
    return results


# --- kills and full disks


SHARES = 40
"""A run of the slow tests disturbs one operation in so many, and two runs a twentieth of them."""


@pytest.fixture(scope="module", params=[None, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 6))])
def part(request: pytest.FixtureRequest) -> int | None:
    """Which share of all operations is disturbed; None for a few of them."""
    return request.param


@pytest.fixture(scope="module")
def undisturbed(part: int | None, tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    """How each way ends if nothing happens, and what it does to the disk."""
    folder, ways = tmp_path_factory.mktemp("undisturbed"), WAYS if part is None else WAYS | MORE
    outcomes = play([case(way, way, folder=str(folder / way)) for way in ways], folder / "cases")
    for way in ways:
        assert_code(outcomes[way], 0)
    return outcomes


def assert_code(ranks: list[Outcome], code: int, *words: str) -> None:
    """Assert that both processes have ended with a code, and have written these words."""
    for rank in ranks:
        assert rank.code == code and all(word in rank.output for word in words), rank.output


def test_async_saves_write_the_files_of_other_saves(undisturbed: Found[list[Outcome]]) -> None:
    pairs = [pair for pair in SAME if set(pair) <= set(undisturbed)]
    assert len(pairs) in (1, len(SAME))
    for way, async_way in pairs:
        for outcome, other in zip(undisturbed[way], undisturbed[async_way], strict=True):
            assert outcome.result["files"] == other.result["files"], (way, async_way)
            assert any("optimizer" in name or "states" in name for name in outcome.result["files"])


Point = tuple[str, int, int]


def points(outcomes: Found[list[Outcome]], part: int | None, kinds: tuple[str, ...], until: str = "") -> list[Point]:
    """Return the operations to disturb, up to one that begins so: a part of them, or one of each of these kinds."""
    operations: dict[Point, str] = {}
    for way, rank in itertools.product(outcomes, range(2)):
        noted = outcomes[way][rank].result["noted"]
        ends = [k + 1 for k, operation in enumerate(noted) if until and operation.startswith(until)]
        end = ends[0] if ends else len(noted) // (2 if until else 1)
        operations |= {(way, rank, k): noted[k] for k in range(end)}
    if part is not None:
        return list(operations)[part::SHARES]
    few: list[Point] = []
    for number, kind in enumerate(kinds):
        of_kind = [point for point, operation in operations.items() if operation.startswith(kind)]
        few += of_kind[len(of_kind) * (number + 1) // (len(kinds) + 1) :][:1]  # another way and rank for each kind
    return few


def disturb(points: list[Point], fault: str, folder: Path) -> tuple[Found[list[Outcome]], list[Case]]:
    """Train with a fault at each of these operations; return the outcomes, and cases that resume the runs."""
    again = [case(way, f"{way}-{rank}-{k}", folder=str(folder / f"{way}-{rank}-{k}")) for way, rank, k in points]
    faults = [{"rank": rank, "at": k, "fault": fault} for _, rank, k in points]
    cases = [replace(run, options=run.options | how) for run, how in zip(again, faults, strict=True)]
    return play(cases, folder / "disturbed"), again


def test_kill_at_any_file_operation_costs_only_recent_work(
    part: int | None, undisturbed: Found[list[Outcome]], tmp_path: Path
) -> None:
    """The other process ends with an error; the next run ends as one that nothing happened to."""
    chosen = points(undisturbed, part, KINDS)
    names = [undisturbed[way][rank].result["noted"][k] for way, rank, k in chosen]
    assert part is not None or all(any(name.startswith(kind) for name in names) for kind in KINDS)
    killed, again = disturb(chosen, "kill", tmp_path)
    resumed = play(again, tmp_path / "resumed")
    errors = []
    for (way, rank, k), run in zip(chosen, again, strict=True):
        name = f"{run.name}: {undisturbed[way][rank].result['noted'][k]}"
        victim, other = killed[run.name][rank], killed[run.name][1 - rank]
        if victim.code != -signal.SIGKILL or other.code != 1 or "DistributedError" not in other.output:
            errors.append(f"{name}: ended with {victim.code}, {other.code}\n{other.output[-1500:]}")
        states = [outcome.result and outcome.result["state"] for outcome in resumed[run.name]]
        if states != [undisturbed[way][0].result["state"]] * 2:
            errors.append(f"{name}: not the same end\n{resumed[run.name][0].output[-1500:]}")
    assert not errors, "\n".join(errors)


def test_full_disk_at_any_operation_costs_one_checkpoint(
    part: int | None, undisturbed: Found[list[Outcome]], tmp_path: Path
) -> None:
    chosen = points(undisturbed, part, KINDS[:1], until="rename checkpoint-2.")
    assert chosen
    (full, runs), errors = disturb(chosen, "full", tmp_path), []
    for (way, rank, k), run in zip(chosen, runs, strict=True):
        name, folder, outcomes = undisturbed[way][rank].result["noted"][k], tmp_path / run.name, full[run.name]
        if [rank.result and rank.result["state"] for rank in outcomes] != [undisturbed[way][0].result["state"]] * 2:
            errors.append(f"{run.name}: {name}: {[(rank.code, rank.output[-1500:]) for rank in outcomes]}")
            continue
        files = sorted(path.name for path in folder.iterdir() if path.name not in RECORD)
        if files != ["checkpoint-4", "last"]:
            errors.append(f"{run.name}: {name}: left {files}")
        is_shard = name.startswith("write ") and ".safetensors" in name
        if is_shard and not any("Cannot save" in rank.output for rank in outcomes):
            errors.append(f"{run.name}: {name}: no message")
        Store(folder).verify(folder / "checkpoint-4")
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(("way", "rank"), thinned([("ddp", 0), ("parts", 1), ("async", 1)], [("parts", 1)]))
def test_required_save_that_fails_on_one_rank_ends_both(way: str, rank: int, tmp_path: Path) -> None:
    at = "sync model" if way == "ddp" else "write rank-"
    failing = case(way, "run", folder=str(tmp_path / "run"), rank=rank, at=at, fault="full", save_required=True)
    ranks = play([failing], tmp_path / "cases")["run"]
    assert_code(ranks, 1, "CheckpointError: Cannot save", "No space left")
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_lock_of_another_run_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folders = {"folders": [str(folder), str(tmp_path / "free")]}
    with lock.Lock(folder).hold():
        outcomes = play([Case("train", f"{HERE}:run_in_turn", folders)], tmp_path / "cases")["train"]
    for outcome in outcomes:
        (step, message), unlocked = outcome.result
        assert step == 0 and "in use by process" in message and unlocked == [4, ""]
    assert not list(tmp_path.rglob(lock.LOCK)) and not list(folder.glob("checkpoint-*"))


# --- hashes and reads that the processes share


def noted_hashes(trouble: str = "", fail_on: int = -1) -> list[str]:
    """Have hashing shared out however small the files are, and return a list that gets the names of this rank's."""
    manifest._MIN_SHARED_BYTES = 0
    rank, hashed = current_rank(), list[str]()
    check_hashes = manifest.check_hashes

    def check(place: Path, files: Any) -> None:
        hashed.extend(files)
        if trouble == "unreadable" and rank == fail_on and place.name == "checkpoint-4" and files:
            place = place.with_name("gone")
        check_hashes(place, files)

    manifest.check_hashes = check
    if trouble == "unseen" and rank == fail_on:  # as on a local disk
        manifest.read_or_none = lambda path: None
    return hashed


def begin(folder: str, source: str) -> dict[str, Any]:
    hashed = noted_hashes()
    make(folder, consolidate=False, max_steps=1, init_from=source).train()
    return {"hashed": hashed}


def resume(folder: str, which: str = "auto", trouble: str = "", fail_on: int = -1) -> dict[str, Any]:
    """Resume, where a rank may not be able to read its share of the files, or the disk fails it while it reads."""
    if trouble.startswith("read"):
        break_reading(fail_on, trouble == "read locally")
    hashed, steps = noted_hashes(trouble, fail_on), list[int]()
    first = callback(on_train_start=lambda trainer: steps.append(trainer.progress.step))
    trainer = make(folder, consolidate=False, max_steps=6, save_steps=100, save_total_limit=None, callbacks=[first])
    trainer.train(resume_from=which)
    return {"hashed": hashed, "step": steps[0], "state": state_of(trainer)}


def break_reading(fail_on: int, is_local: bool) -> None:
    """Have the disk fail one rank in the middle of reading; each reads its part, or the main one all."""
    calls, choose = itertools.count(), checkpointer.find_with_shared_hashing
    original = tensor_files.TensorFile._read

    def read(self: Any, numbers: Any, requests: Any) -> None:
        if current_rank() == fail_on and next(calls) == 1:
            raise CheckpointError(f"{', '.join(requests)} cannot be read")
        original(self, numbers, requests)

    def choose_and_break(*args: Any) -> Any:
        chosen = choose(*args)  # whose reads work
        tensor_files.TensorFile._read = read
        return chosen

    checkpointer.find_with_shared_hashing = choose_and_break
    if not is_local:
        tensor_files.TensorFile._is_local = lambda self: self._ranks.world_size == 1


def end(folder: str, backend: str, fail_on: int, is_local: bool) -> dict[str, Any]:
    """Train, where the disk fails one rank in the middle of reading the best weights at the end."""
    break_reading(fail_on, is_local)
    load, last = checkpointer.Checkpointer.load_best, dict[str, str]()

    def load_best(self: Any) -> None:
        last.update(state_of(trainer))
        load(self)

    checkpointer.Checkpointer.load_best = load_best
    trainer = make(
        folder, backend, consolidate=False, save_total_limit=None, learning_rate=0.1,
        eval_dataset=rows(60, torch.float32), eval_steps=2, optimization_metric="loss", optimization_direction="max",
    )  # fmt: skip
    trainer.train()
    best, newest = (trainer.store.resolve(which)[0].name for which in ("best", "last"))
    return {"last": last, "now": state_of(trainer), "best": best, "newest": newest}


def damage(folder: Path, kind: str, rank: int, of: str) -> None:
    part = folder / "checkpoint-4" / of / f"rank-{rank:05d}.safetensors"
    content = part.read_bytes()
    if kind in ("flipped", "truncated"):
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) * (kind == "flipped"))
    elif kind == "missing":
        part.unlink()


READS = [("read locally", 1, "auto"), ("read", 0, "auto")]
ENDS = [("fsdp", 1, True), ("fsdp", 0, False), ("zero3", 1, True)]
"""Backend, which rank cannot read, and whether each rank reads its part or the main one all."""
INTACT = [("none", 0, "auto"), ("unseen", 1, "auto"), ("none", 0, "checkpoint-4"), ("unseen", 0, "checkpoint-4")]
DAMAGED = [
    ("flipped", 1, "auto"), ("unreadable", 0, "checkpoint-4"), ("truncated", 0, "auto"), ("missing", 1, "auto"),
    ("flipped", 0, "checkpoint-4"), ("truncated", 1, "checkpoint-4"), ("missing", 0, "checkpoint-4"),
    ("unreadable", 1, "auto"),
]  # fmt: skip


def name_of(*words: Any) -> str:
    return "-".join(map(str, words))


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    first = play([case("parts", "train", folder=str(folder / "run"), save_total_limit=None)], folder / "cases")
    assert_code(first["train"], 0)

    def resumed(name: str, function: str, **options: Any) -> Case:
        return Case(name, f"{HERE}:{function}", {"folder": str(folder / name), **options})

    def copy(name: str, kind: str, rank: int, of: str = "optimizer") -> Path:
        run = Path(shutil.copytree(folder / "run", folder / name, symlinks=True))
        damage(run, kind, rank, of)
        return run

    cases = []
    for kind, rank, which in sorted({("none", 0, "auto"), *asked_for(request, "kind", "rank", "which")}):
        run = copy(name_of(kind, rank, which), kind, rank)
        checkpoint = which if which == "auto" else str(run / which)
        cases.append(resumed(run.name, "resume", which=checkpoint, trouble=kind, fail_on=rank))
    for name, kind in {"initial": "none", "initial-flipped": "flipped"}.items():
        source = copy(f"{name}-source", kind, 1, "model")
        cases.append(resumed(name, "begin", source=str(source / "checkpoint-4")))
    for backend, rank, is_local in sorted(asked_for(request, "backend", "rank", "is_local")):
        cases.append(resumed(name_of(backend, rank), "end", backend=backend, fail_on=rank, is_local=is_local))
    return play(cases, folder / "resumed")


@pytest.mark.parametrize(("kind", "rank", "which"), thinned(INTACT, INTACT[:2]))
def test_each_file_is_hashed_by_one_rank_that_has_it(outcomes: Any, kind: str, rank: int, which: str) -> None:
    ranks = outcomes[name_of(kind, rank, which)]
    assert_code(ranks, 0)
    first, second = (outcome.result["hashed"] for outcome in ranks)
    assert len({*first, *second}) == len(first) + len(second) and bool(second) == (kind == "none")
    assert {f"optimizer/rank-0000{k}.safetensors" for k in (0, 1)} <= {*first, *second}
    assert [outcome.result["step"] for outcome in ranks] == [4, 4]


def test_initial_weights_are_hashed_by_both_ranks(outcomes: Any) -> None:
    assert_code(outcomes["initial"], 0)
    hashed = sorted(outcome.result["hashed"] for outcome in outcomes["initial"])
    assert hashed == [[f"model/rank-0000{rank}.safetensors"] for rank in (0, 1)]
    assert_code(outcomes["initial-flipped"], 1, "CheckpointError", "'model/rank-00001.safetensors' does not match")


@pytest.mark.parametrize(("kind", "rank", "which"), thinned(DAMAGED, DAMAGED[:2]))
def test_damage_is_an_error_or_an_older_checkpoint(outcomes: Any, kind: str, rank: int, which: str) -> None:
    ranks = outcomes[name_of(kind, rank, which)]
    if which == "auto":
        assert_code(ranks, 0)
        assert [outcome.result["step"] for outcome in ranks] == [2, 2]
        assert ranks[0].result["state"] == outcomes["none-0-auto"][0].result["state"]
        assert "Using 'checkpoint-2' instead" in ranks[0].output, ranks[0].output
    else:
        file = [] if kind == "unreadable" else [f"optimizer/rank-0000{rank}.safetensors"]
        assert_code(ranks, 1, "CheckpointError", "checkpoint-4", *file)


@pytest.mark.parametrize(("kind", "rank", "which"), thinned(READS, READS[:1]))
def test_read_error_on_one_rank_ends_both(outcomes: Any, kind: str, rank: int, which: str) -> None:
    assert_code(outcomes[name_of(kind, rank, which)], 1, "Error", "cannot be read")


@pytest.mark.parametrize(("backend", "rank", "is_local"), thinned(ENDS, ENDS[:1]))
def test_unreadable_best_weights_leave_the_last_ones(outcomes: Any, backend: str, rank: int, is_local: bool) -> None:
    ranks = outcomes[name_of(backend, rank)]
    assert_code(ranks, 0, "cannot be read", "keeps those of the last step")
    for outcome in ranks:
        assert outcome.result["best"] != outcome.result["newest"]
        assert outcome.result["now"] == outcome.result["last"]
