"""What one rank of many does in our code, counted in one process: exchanges, bytes, requests to the store, files.

    python benchmarks/thousand_ranks.py [--ranks 2,8,64,256,1024] [--json FILE]

torch's fake process group stands for the engine. Our own exchanges go through a stand-in, in which every other rank
sends what this one sends, and rank 0 what it has sent in a run of its own before. No time is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import sys
import tempfile
import threading
import tracemalloc
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _report import table
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from omnitrain import AccelerateTrainer, Callback, distributed, rendezvous
from omnitrain.stalls import Post

SIZES = (2, 8, 64, 256, 1024)
STEPS = 4
MEASURED = 3
"""The step that is counted: a plain one."""


@dataclass(slots=True)
class Counts:
    """What one rank did in a phase."""

    phase: str
    rank: int
    world_size: int
    collectives: int = 0
    sent: int = 0
    received: int = 0
    largest: int = 0
    store: int = 0
    opened: int = 0
    stats: int = 0
    python: int = 0
    """The most bytes of Python objects at once, beyond those at its beginning."""
    names: dict[str, int] = field(default_factory=dict)
    """Bytes received by name of the exchange."""


class Recorder:
    """Counts in the phase that is under way; nothing outside of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.found: list[Counts] = []
        self.now: Counts | None = None
        self.is_closed = False
        sys.addaudithook(self._hear)  # for ever: such a hook cannot be removed

    @contextlib.contextmanager
    def phase(self, name: str, ranks: tuple[int, int]) -> Iterator[None]:
        self.begin(name, ranks)
        try:
            yield
        finally:
            self.end()

    def begin(self, name: str, ranks: tuple[int, int]) -> None:
        tracemalloc.start()
        self.now = Counts(name, *ranks)

    def end(self) -> None:
        if self.now is None:
            return
        self.now.python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.found.append(self.now)
        self.now = None

    def exchanged(self, what: str, sent: int, received: int) -> None:
        if self.now is not None:
            self.now.collectives += 1
            self.now.sent += sent
            self.now.received += received
            self.now.largest = max(self.now.largest, received)
            self.now.names[what] = self.now.names.get(what, 0) + received

    def _hear(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and self.now is not None and not self.is_closed and self._is_ours(values[0]):
            self.now.opened += 1

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, (str, Path)) and str(path).startswith(self.folder)

    @contextlib.contextmanager
    def watching_stats(self) -> Iterator[None]:
        original = os.stat

        def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if self.now is not None and self._is_ours(path):
                self.now.stats += 1
            return original(path, *args, **options)

        os.stat = stat  # type: ignore[assignment]
        try:
            yield
        finally:
            os.stat, self.is_closed = original, True  # type: ignore[assignment]


class Store:
    """A store in which all other ranks have done what this one has."""

    def __init__(self, recorder: Recorder, world_size: int) -> None:
        self.recorder, self.world_size = recorder, world_size
        self.kept: dict[str, bytes] = {}

    def _count(self) -> None:
        if self.recorder.now is not None and threading.current_thread() is threading.main_thread():
            self.recorder.now.store += 1

    def clone(self) -> Store:
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        self._count()
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._count()
        post = json.dumps(Post(len(self.kept), "", 0, 0, False)).encode()
        return self.kept.get(key, post)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        self._count()
        return all(key in self.kept or key.startswith(("post/", "process/")) for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self._count()
        return self.kept.setdefault(key, wanted.encode())

    def add(self, key: str, amount: int) -> int:
        self._count()
        return self.world_size


@dataclass(slots=True)
class Work:
    """An exchange that is done; `_wait` of the ranks adds its name."""

    sent: int
    received: int

    def wait(self, timeout: Any = None) -> bool:
        return True


class Exchanges:
    """Stands for torch.distributed in omnitrain.distributed.

    Args:
        rank: The rank that is simulated.
        world_size: The number of ranks.
        tape: What rank 0 has sent so far; it adds to it, and the others read it in the same order.
    """

    def __init__(self, rank: int, world_size: int, tape: list[tuple[str, torch.Tensor]]) -> None:
        self.rank, self.world_size, self._tape, self._turn = rank, world_size, tape, 0
        self.of_others: list[bytes] = []
        """What each other rank is about to send to the main one, which sends nothing then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def new_group(self, **options: Any) -> Any:
        return object()

    def _of_main(self, kind: str, own: torch.Tensor) -> torch.Tensor:
        if not self.rank:
            self._tape.append((kind, own.clone()))
            return own
        (there, sent), self._turn = self._tape[self._turn], self._turn + 1
        assert there == kind, f"rank 0 makes {there} where rank {self.rank} makes {kind}"
        return sent

    def _fill(self, parts: Sequence[torch.Tensor], own: torch.Tensor, of_main: torch.Tensor) -> int:
        for part in parts:
            part.copy_(own)
        parts[0].zero_()[: len(of_main)] = of_main
        return sum(part.nbytes for part in parts)

    def all_gather(self, parts: Sequence[torch.Tensor], own: torch.Tensor, **options: Any) -> Work:
        return Work(own.nbytes, self._fill(parts, own, self._of_main("all_gather", own)))

    def gather(self, own: torch.Tensor, parts: Sequence[torch.Tensor] | None, **options: Any) -> Work:
        of_main = self._of_main("gather", own)
        if parts and self.of_others:
            own = distributed._with_length(self.of_others.pop(0), len(own) - distributed._HEAD)
        return Work(0 if parts else own.nbytes, self._fill(parts, own, of_main) if parts else 0)

    def all_reduce(self, own: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Work:
        of_main = self._of_main("all_reduce", own)
        if op == dist.ReduceOp.MAX and self.of_others:
            own.fill_(len(self.of_others[0]))
        own.copy_(torch.maximum(own, of_main) if op == dist.ReduceOp.MAX else own * (self.world_size - 1) + of_main)
        return Work(own.nbytes, own.nbytes)

    def scatter(self, own: torch.Tensor, parts: Sequence[torch.Tensor] | None, **options: Any) -> Work:
        if parts:
            self._tape.append(("scatter", parts[-1].clone()))
            own.copy_(parts[0])
            return Work(sum(part.nbytes for part in parts[1:]), 0)
        own.copy_(self._of_main("scatter", own))
        return Work(0, own.nbytes)

    def broadcast(self, own: torch.Tensor, **options: Any) -> Work:
        own.copy_(self._of_main("broadcast", own))
        return Work(0 if self.rank else own.nbytes, own.nbytes if self.rank else 0)


class Simulated(distributed.ProcessRanks):
    """One of many ranks, whose exchanges are counted by their names."""

    recorder: Recorder
    stand_in: Exchanges

    def gather_on_main(self, what: str, values: list[Any]) -> list[list[Any]]:
        if self.is_main:
            self.stand_in.of_others = [b"".join(map(pickle.dumps, values))]
        return super().gather_on_main(what, values)

    def _wait(self, work: Any, what: str, seconds: float | None = None) -> None:
        self.recorder.exchanged(what, work.sent, work.received)
        super()._wait(work, what, seconds)


class Marks(Callback):
    """Ends the phase of the start at the first step, and counts a plain step."""

    asks_alone = False

    def __init__(self, recorder: Recorder, ranks: tuple[int, int]) -> None:
        self.recorder, self.ranks = recorder, ranks

    def on_step_end(self, trainer: Any) -> None:
        self.recorder.end()
        if trainer.progress.step == MEASURED - 1:
            self.recorder.begin("step", self.ranks)


def reduced(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the gradients as they are; DDP gets nothing back from the fake group."""
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares them with the types themselves
reduced.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


@contextlib.contextmanager
def simulated(rank: int, world_size: int, tape: list[Any], recorder: Recorder) -> Iterator[None]:
    """Be a rank inside."""
    from accelerate.state import AcceleratorState

    where = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
    names = {name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "x", "ACCELERATE_USE_CPU": "true"}
    before, modules = dict(os.environ), (distributed.dist, distributed.distributed_c10d)
    os.environ.update(names)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    named: Any = types.SimpleNamespace(PrefixStore=lambda _, store: store, _set_pg_timeout=lambda *_: None)
    stand_in: Any = Exchanges(rank, world_size, tape)
    distributed.dist, distributed.distributed_c10d = stand_in, named
    wrap = DistributedDataParallel.__init__

    def wrapped(model: Any, *args: Any, **given: Any) -> None:
        wrap(model, *args, **given)
        model.register_comm_hook(None, reduced)

    DistributedDataParallel.__init__ = wrapped
    store: Any = Store(recorder, world_size)
    ranks = Simulated(store, rank, world_size)
    ranks.recorder, ranks.stand_in, ranks.world = recorder, stand_in, dist.group.WORLD
    rendezvous._met = ranks
    try:
        yield
    finally:
        ranks._closing.set()
        ranks._posting.join()
        ranks._watch.join()
        rendezvous._met, DistributedDataParallel.__init__ = None, wrap
        distributed.dist, distributed.distributed_c10d = modules
        dist.destroy_process_group()
        AcceleratorState._reset_state(True)
        os.environ.clear()
        os.environ.update(before)


def mean_error(labels: Any, predictions: Any) -> dict[str, float]:
    return {"error": float(abs(labels - predictions).mean())}


def live(rank: int, world_size: int, folder: Path, recorder: Recorder) -> None:
    """Do all that a rank does in a run; each part of it is a phase."""
    ranks = rank, world_size
    data = torch.utils.data.TensorDataset(torch.zeros(world_size * STEPS, 4), torch.zeros(world_size * STEPS, 1))

    def make() -> Any:
        torch.manual_seed(0)
        return AccelerateTrainer(
            torch.nn.Linear(4, 1), data, data, loss_fn=mse_loss, epochs=1, batch_size=1, eval_batch_size=STEPS,
            save_dir=folder, eval_steps=None, save_steps=None, log_steps=100, progress_bar=False, sanity=False,
            compute_metrics=mean_error, callbacks=[Marks(recorder, ranks)], load_best_at_end=False,
        )  # fmt: skip

    recorder.begin("start", ranks)
    trainer = make()
    trainer.train()
    with recorder.phase("evaluate", ranks):
        trainer.evaluate()
    with recorder.phase("save", ranks):
        path = trainer.save_checkpoint()
    again = make()
    with recorder.phase("load", ranks):
        again.load_checkpoint(path)


def count(world_size: int, others: Sequence[int] = (1,)) -> list[Counts]:
    """Return the counts of rank 0, and of other ranks, in a run of so many."""
    tape: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder).resolve())
        with recorder.watching_stats():
            for rank in (0, *others):
                with simulated(rank, world_size, tape, recorder):
                    live(rank, world_size, Path(recorder.folder) / "run", recorder)
    return recorder.found


def show(found: Sequence[Counts]) -> list[str]:
    """Return the lines of the table."""
    head = ["phase", "rank", "ranks", "exchanges", "sent", "received", "largest", "store", "opened", "stat", "Python"]
    order = {name: number for number, name in enumerate(dict.fromkeys(one.phase for one in found))}
    ordered = sorted(found, key=lambda one: (order[one.phase], one.rank, one.world_size))
    numbers = ("collectives", "sent", "received", "largest", "store", "opened", "stats", "python")
    rows = [
        [one.phase, str(one.rank), str(one.world_size), *(f"{getattr(one, name):,}" for name in numbers)]
        for one in ordered
    ]
    return table(head, rows, range(1, len(head)))


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default=",".join(map(str, SIZES)), help="how many there are, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there too")
    options = parser.parse_args()
    found = [one for size in map(int, options.ranks.split(",")) for one in count(size)]
    print("\n".join(show(found)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
