"""What one rank of many does in our code, counted in one process: exchanges, bytes, requests to the store, files.

    python benchmarks/thousand_ranks.py [--ranks 2,8,64,256,1024] [--runs ddp,parts,whole] [--json FILE]

torch's fake process group stands for the engine. Our own exchanges go through a stand-in, in which every other rank
sends what this one sends, and rank 0 what it has sent in a run of its own before. No time is measured.

Of the runs, "ddp" has the model on each rank. The others divide it with FSDP 2, and every rank writes its part of a
checkpoint, "parts", from which "whole" then puts the weights together. The files of the ranks that are not simulated
are written by the main one, uncounted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
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
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from omnitrain import AccelerateTrainer, Callback
from omnitrain.checkpoint import sharded_files
from omnitrain.checkpoint.safetensors_header import shard_folder
from omnitrain.checkpoint.writing import Writer
from omnitrain.core.files import FileSystem
from omnitrain.distributed import ranks as ranks_module
from omnitrain.distributed import rendezvous, watchdog
from omnitrain.distributed.watchdog import Heartbeat

SIZES = (2, 8, 64, 256, 1024)
RUNS = ("ddp", "parts", "whole")
STEPS = 4
MEASURED = 3
"""The step that is counted: a plain one."""


@dataclass(slots=True)
class Counts:
    """What one rank did in a phase."""

    run: str
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
        self.run = ""
        self.finished: list[Counts] = []
        self.counts: Counts | None = None
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
        self.counts = Counts(self.run, name, *ranks)

    def end(self) -> None:
        if self.counts is None:
            return
        self.counts.python = max(self.counts.python, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        self.finished.append(self.counts)
        self.counts = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        counts, self.counts = self.counts, None
        if counts is not None:
            counts.python = max(counts.python, tracemalloc.get_traced_memory()[1])
        try:
            yield
        finally:
            self.counts = counts
            if counts is not None:
                tracemalloc.reset_peak()

    def exchanged(self, what: str, sent: int, received: int) -> None:
        if self.counts is not None:
            self.counts.collectives += 1
            self.counts.sent += sent
            self.counts.received += received
            self.counts.largest = max(self.counts.largest, received)
            self.counts.names[what] = self.counts.names.get(what, 0) + received

    def _hear(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and self.counts is not None and not self.is_closed and self._is_ours(values[0]):
            self.counts.opened += 1

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, (str, Path)) and str(path).startswith(self.folder)

    @contextlib.contextmanager
    def watching_stats(self) -> Iterator[None]:
        original = os.stat

        def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if self.counts is not None and self._is_ours(path):
                self.counts.stats += 1
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
        self.entries: dict[str, bytes] = {}

    def _count(self) -> None:
        if self.recorder.counts is not None and threading.current_thread() is threading.main_thread():
            self.recorder.counts.store += 1

    def clone(self) -> Store:
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        self._count()
        self.entries[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._count()
        report = json.dumps([Heartbeat(len(self.entries), "", 0, 0, False), []]).encode()
        return self.entries.get(key, report)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        self._count()
        return all(key in self.entries or key.startswith("post/") for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._count()
        return self.entries.setdefault(key, value.encode())

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
    """Stands for torch.distributed in omnitrain.distributed.ranks.

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

    def _of_main(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self.rank:
            self._tape.append((kind, tensor.clone()))
            return tensor
        (kind_on_main, sent), self._turn = self._tape[self._turn], self._turn + 1
        assert kind_on_main == kind, f"rank 0 makes {kind_on_main} where rank {self.rank} makes {kind}"
        return sent

    def _fill(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, of_main: torch.Tensor) -> int:
        for part in parts:
            part.copy_(tensor)
        parts[0].zero_()[: len(of_main)] = of_main
        return sum(part.nbytes for part in parts)

    def all_gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Work:
        return Work(tensor.nbytes, self._fill(parts, tensor, self._of_main("all_gather", tensor)))

    def gather(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, **options: Any) -> Work:
        of_main = self._of_main("gather", tensor)
        if parts and self.of_others:
            tensor = ranks_module._pad(self.of_others.pop(0), len(tensor))
        return Work(0 if parts else tensor.nbytes, self._fill(parts, tensor, of_main) if parts else 0)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Work:
        of_main = self._of_main("all_reduce", tensor)
        if op == dist.ReduceOp.MAX and self.of_others:
            tensor.fill_(len(self.of_others[0]))
        tensor.copy_(
            torch.maximum(tensor, of_main) if op == dist.ReduceOp.MAX else tensor * (self.world_size - 1) + of_main
        )
        return Work(tensor.nbytes, tensor.nbytes)

    def scatter(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, **options: Any) -> Work:
        if parts:
            self._tape.append(("scatter", parts[-1].clone()))
            tensor.copy_(parts[0])
            return Work(sum(part.nbytes for part in parts[1:]), 0)
        tensor.copy_(self._of_main("scatter", tensor))
        return Work(0, tensor.nbytes)

    def broadcast(self, tensor: torch.Tensor, **options: Any) -> Work:
        tensor.copy_(self._of_main("broadcast", tensor))
        return Work(0 if self.rank else tensor.nbytes, tensor.nbytes if self.rank else 0)


class Simulated(ranks_module.ProcessRanks):
    """One of many ranks, whose exchanges are counted by their names."""

    recorder: Recorder
    stand_in: Exchanges
    parts_of_others: Sequence[Any] = ()
    """What the other ranks say they have written, for the main one."""

    def gather_on_main(self, what: str, values: list[Any]) -> list[list[Any]]:
        if self.is_main:
            self.stand_in.of_others = [ranks_module._pop_packed(values[::-1], 1 << 60)[1]]
        by_rank = super().gather_on_main(what, values)
        if self.is_main and self.parts_of_others:
            by_rank[1:], self.parts_of_others = [[entries] for entries in self.parts_of_others], ()
        return by_rank

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


class Unsynced(FileSystem):
    """Writes without waiting for the disk."""

    def sync(self, path: Path) -> None:
        pass


class Disk:
    """Has on the disk what the ranks that are not simulated write.

    Args:
        folder: A folder for copies.
        recorder: Does not count it.
        copies: The folders of checkpoints as the main rank had written to them, and where they were.
    """

    def __init__(self, folder: Path, recorder: Recorder, copies: list[tuple[Path, Path]]) -> None:
        self._folder, self._recorder = folder, recorder
        self.copies = copies

    @contextlib.contextmanager
    def shared(self, ranks: Simulated) -> Iterator[None]:
        """Write inside what the others do, whenever a rank writes."""
        write, local_blocks, write_shards, remove = (
            Writer.write,
            Writer._local_blocks,
            Writer._write_shards,
            FileSystem.remove,
        )
        sharded: dict[str, Any] = {}
        turns = iter(self.copies)

        def written(writer: Writer, store: Any, snapshot: Any) -> Path:
            copy, place = (None, None) if ranks.is_main else next(turns, (None, None))
            if copy and place:
                with self._recorder.paused():
                    shutil.copytree(copy, place, copy_function=os.link)
            path = write(writer, store, snapshot)
            if place:
                with self._recorder.paused():
                    shutil.rmtree(place)
            return path

        def noted(writer: Writer, file: str, tensors: Any, stages: bool) -> Any:
            sharded[file] = tensors
            return local_blocks(writer, file, tensors, stages)

        def in_parts(writer: Writer, store: Any, folder: Path, blocks: Any) -> Any:
            entries = write_shards(writer, store, folder, blocks)
            if ranks.is_main:
                with self._recorder.paused():
                    ranks.parts_of_others = [self._write(folder, sharded, rank) for rank in range(1, ranks.world_size)]
                    self._copy(folder, ranks.world_size - 1)
            return entries

        def removed(fs: FileSystem, path: Path) -> None:
            remove(fs, path)
            if ranks.is_main and path.name.startswith("rank-00000.") and path.parent.parent.suffix == ".tmp":
                with self._recorder.paused():
                    for other in path.parent.glob("rank-*"):
                        other.unlink()

        names = "write", "_local_blocks", "_write_shards"
        for name, new in zip(names, (written, noted, in_parts), strict=True):
            setattr(Writer, name, new)
        FileSystem.remove = removed
        try:
            yield
        finally:
            for name, old in zip(names, (write, local_blocks, write_shards), strict=True):
                setattr(Writer, name, old)
            FileSystem.remove = remove

    def _copy(self, folder: Path, last: int) -> None:
        copy = self._folder / f"copy-{len(self.copies)}"
        shutil.copytree(folder, copy, copy_function=os.link)
        for file in copy.glob(f"*/rank-{last:05}.*"):
            file.unlink()  # which the last rank writes: a link would change with it
        self.copies.append((copy, folder))

    def _write(self, folder: Path, files: Any, rank: int) -> Any:
        """Write what another rank has of the tensors, and return the entries of its files for the manifest."""
        entries = {}
        for file, tensors in files.items():
            part, blocks = shard_folder(file), {}
            for name, tensor in tensors.items():
                if isinstance(tensor, DTensor):
                    rows, count = tensor.shape[0], -(-tensor.shape[0] // tensor.device_mesh.size())
                    begin, end = min(rows, rank * count), min(rows, (rank + 1) * count)
                    block = torch.zeros(end - begin, *tensor.shape[1:], dtype=tensor.dtype)
                    offsets = (begin, *(0 for _ in tensor.shape[1:]))
                    blocks[name] = [sharded_files.Block(offsets, block, tuple(tensor.shape))] if end > begin else []
            written = sharded_files.write_shards(blocks, folder / part, rank, Unsynced())
            entries |= {f"{part}/{name}": entry for name, entry in written.items()}
        return entries


@contextlib.contextmanager
def simulated(rank: int, world_size: int, tape: list[Any], recorder: Recorder) -> Iterator[Simulated]:
    """Be a rank inside."""
    from accelerate.state import AcceleratorState

    where = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
    names = {name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "x", "ACCELERATE_USE_CPU": "true"}
    before, modules = dict(os.environ), (ranks_module.dist, ranks_module.distributed_c10d)
    os.environ.update(names)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    c10d: Any = types.SimpleNamespace(PrefixStore=lambda _, store: store, _set_pg_timeout=lambda *_: None)
    stand_in: Any = Exchanges(rank, world_size, tape)
    ranks_module.dist, ranks_module.distributed_c10d = stand_in, c10d
    watchdog.distributed_c10d = c10d
    wrap = DistributedDataParallel.__init__

    def wrapped(model: Any, *args: Any, **options: Any) -> None:
        wrap(model, *args, **options)
        model.register_comm_hook(None, reduced)

    DistributedDataParallel.__init__ = wrapped
    store: Any = Store(recorder, world_size)
    ranks = Simulated(store, rank, world_size)
    ranks.recorder, ranks.stand_in, ranks.world = recorder, stand_in, dist.group.WORLD
    rendezvous._ranks = ranks
    try:
        yield ranks
    finally:
        ranks._watchdog._closing.set()  # without the heartbeat of a rank that ends
        for thread in (ranks._watchdog._posting, ranks._watchdog._watching):
            thread.join(2 * watchdog.POLL_INTERVAL.total_seconds())
        rendezvous._ranks, DistributedDataParallel.__init__ = None, wrap
        ranks_module.dist, ranks_module.distributed_c10d = modules
        watchdog.distributed_c10d = modules[1]
        dist.destroy_process_group()
        AcceleratorState._reset_state(True)
        os.environ.clear()
        os.environ.update(before)


def mean_error(labels: Any, predictions: Any) -> dict[str, float]:
    return {"error": float(abs(labels - predictions).mean())}


class Wide(torch.nn.Module):
    """Weights with rows for every rank, for some, and unevenly many, and a buffer, which is not divided."""

    def __init__(self) -> None:
        super().__init__()
        rows = (768, 1024, 1500, 2048, 3000)
        self.wide = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count, 2)) for count in rows])
        self.last = torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(batch * self.scale) + sum(weight.sum() for weight in self.wide)


def live(ranks: tuple[int, int], folder: Path, recorder: Recorder) -> None:
    """Do all that a rank does in a run; each part of it is a phase."""
    _, world_size = ranks
    engine: dict[str, Any] = {}
    if recorder.run != "ddp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        engine = {"fsdp_plugin": plugin, "consolidate": recorder.run == "whole"}
    data = torch.utils.data.TensorDataset(torch.zeros(world_size * STEPS, 4), torch.zeros(world_size * STEPS, 1))

    def make() -> Any:
        torch.manual_seed(0)
        return AccelerateTrainer(
            Wide() if engine else torch.nn.Linear(4, 1), data, data, loss_fn=mse_loss, epochs=1, batch_size=1,
            eval_batch_size=STEPS,
            save_dir=folder, eval_steps=None, save_steps=None, log_steps=100, progress_bar=False, sanity=False,
            compute_metrics=mean_error, callbacks=[Marks(recorder, ranks)], load_best_at_end=False,
            **engine,
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


def _live_alone(rank: int, world_size: int, run: str, folder: Path, before: bytes) -> bytes:
    """Be a rank in a process of its own, as PyTorch remembers where it is in a mesh."""
    tape, copies = pickle.loads(before)
    recorder = Recorder(folder / "run")
    recorder.run, disk = run, Disk(folder, recorder, copies)
    with recorder.watching_stats(), simulated(rank, world_size, tape, recorder) as ranks, disk.shared(ranks):
        live((rank, world_size), folder / "run", recorder)
    return pickle.dumps((recorder.finished, (tape, disk.copies)))


def _import_all() -> None:
    """Import here what takes seconds in each process otherwise."""
    import torch.distributed.fsdp  # noqa: F401
    from accelerate import Accelerator  # noqa: F401
    from accelerate.utils import is_deepspeed_available

    if is_deepspeed_available():  # which accelerate imports to find out what a model is
        import deepspeed  # noqa: F401


def count(world_size: int, run: str = "ddp") -> list[Counts]:
    """Return the counts of the first and the last rank in a run of so many."""
    _import_all()
    counts, before = [], pickle.dumps(([], []))
    with tempfile.TemporaryDirectory() as place:
        for rank in (0, world_size - 1):
            with multiprocessing.get_context("fork").Pool(1) as alone:
                result = alone.apply(_live_alone, (rank, world_size, run, Path(place).resolve(), before))
            of_rank, after = pickle.loads(result)
            counts, before = counts + of_rank, pickle.dumps(after)
    return counts


def page(counts: Sequence[Counts]) -> list[str]:
    """Return the tables of results/thousand-ranks.md: exchanges, with the bytes sent and received, and files."""
    lines: list[str] = []
    for run in dict.fromkeys(entry.run for entry in counts):
        by_place = {(entry.phase, entry.rank > 0, entry.world_size): entry for entry in counts if entry.run == run}
        sizes = sorted({size for _, _, size in by_place})
        head = ["phase", "rank", *(f"{size:,}" for size in sizes[:-1]), f"{sizes[-1]:,} ranks"]
        exchanges, files = [], []
        for phase, is_other in dict.fromkeys((phase, other) for phase, other, _ in by_place):
            row = [by_place[phase, is_other, size] for size in sizes]
            name = [phase, "another" if is_other else "main"]
            exchanges.append(
                name + [f"{entry.collectives}, {_bytes(entry.sent)}, {_bytes(entry.received)}" for entry in row]
            )
            if phase in ("start", "save", "load"):
                files.append(name + [f"{entry.opened:,}, {entry.stats:,}" for entry in row])
        for rows in (exchanges, files):
            order = sorted(rows, key=lambda row: ("start", "step", "evaluate", "save", "load").index(row[0]))
            lines += [f"{run}:", "", *table(head, order, range(2, len(head))), ""]
    return lines


def _bytes(count: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def main() -> None:
    """Count, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default=",".join(map(str, SIZES)), help="how many there are, separated by commas")
    parser.add_argument("--runs", default=",".join(RUNS), help="which runs, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there too")
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    counts = [entry for run in options.runs.split(",") for size in sizes for entry in count(size, run)]
    print("\n".join(page(counts)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(entry) for entry in counts], indent=1))


if __name__ == "__main__":
    main()
