"""What a checkpoint costs: the time that training waits for one save, its bytes on disk, and what a resume reads again.

    python benchmarks/checkpoint.py [--quick] [--only NAME ...] [--json FILE]

The model has 25 million parameters (100 MB) and AdamW's two moments, so a checkpoint has 300 MB; the files are written
below the current folder. Case "save" is against torch.save as most use it, which returns before anything is on the
disk; "save, on disk" has those alone that wait for the disk. "x ref calm" compares the fastest rounds, which other
programs on the machine disturb least. Of an asynchronous save only the time is counted in which training stands still;
the first of a run takes longer, for it asks the system for the memory that the later ones copy into.
Nothing here is a test of speed: it fails only if a variant did not do its work.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import Value
from pathlib import Path
from typing import Any

import torch
from _timing import Row, Sample, interleaved, machine, show, summarize
from accelerate import skip_first_batches
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

from omnitrain import Callback, Trainer
from omnitrain.core.files import FileSystem
from omnitrain.core.progress import Progress

SEED = 42
STEPS, SAVED_AT = 16, (4, 12)

# --- what is saved


class Encoder(nn.Module):
    """Transformer layers alone: 12 tensors and 3.15 million parameters each at the default width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Gaps(Callback):
    """Measures how long training stands still between two steps, with a checkpoint in two of the gaps."""

    order = 99

    def __init__(self) -> None:
        self.ended: float | None = None
        self.gaps: dict[int, float] = {}
        self.committed = 0

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step in SAVED_AT:
            trainer.request_save()
        self.ended = time.perf_counter()

    def on_save_end(self, trainer: Trainer) -> None:
        self.committed += 1

    def on_step_start(self, trainer: Trainer) -> None:
        if self.ended is not None:
            self.gaps[trainer.progress.step] = time.perf_counter() - self.ended

    def blocked(self, step: int) -> float:
        """The gap with the checkpoint of `step`, less what those without one take."""
        return self.gaps[step] - statistics.median(gap for at, gap in self.gaps.items() if at not in SAVED_AT)


class Unsynced(FileSystem):
    """Leaves it to the operating system when the files reach the disk. No setting of the trainer does this."""

    def sync(self, path: Path) -> None:
        pass


def trainer_of(save_dir: Path, quick: bool, **settings: Any) -> Trainer:
    """Return a trainer that trains the model on next to nothing and saves only when it is told to, and at the end."""
    torch.manual_seed(SEED)
    layers, width = (1, 32) if quick else (8, 512)
    x = torch.randn(STEPS, 4, width)
    settings = {"max_steps": STEPS, "save_steps": 10**9, "log_steps": 10**9, "progress_bar": False, **settings}
    data = TensorDataset(x, x)
    return Trainer(
        Encoder(layers, width), data, loss_fn=mse_loss, batch_size=1, device="cpu", save_dir=save_dir, **settings
    )


# --- the ways to save it


@dataclass(slots=True)
class Format:
    """One way to save model and optimizer into a folder, and to read the weights back.

    Attributes:
        save: Writes into the folder; with the second argument true, it returns when all is on the disk.
        load: Returns the weights.
        pickle: Whether reading it runs pickle.
    """

    name: str
    save: Callable[[Path, bool], object]
    load: Callable[[Path], dict[str, Tensor]]
    pickle: bool


def synced(path: Path) -> None:
    """Wait until a file, and its name, are on the disk."""
    for entry in (path, path.parent):
        descriptor = os.open(entry, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def formats(trainer: Trainer) -> list[Format]:
    """Return what is compared: all save the state of the same trainer."""
    model, optimizer = trainer.model, trainer.optimizer

    def save_torch(folder: Path, sync: bool) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
        if sync:
            synced(folder / "checkpoint.pt")

    def save_safetensors(folder: Path, sync: bool) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        for index, entry in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in entry.items()}
        save_file(tensors, folder / "checkpoint.safetensors")
        if sync:
            synced(folder / "checkpoint.safetensors")

    def load_safetensors(folder: Path) -> dict[str, Tensor]:
        tensors = load_file(folder / "checkpoint.safetensors")
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}

    def save_distributed(folder: Path, sync: bool) -> None:
        weights, rest = get_state_dict(model, optimizer)
        writer = FileSystemWriter(folder, sync_files=sync)
        state_dict_saver.save({"model": weights, "optimizer": rest}, storage_writer=writer, no_dist=True)

    def load_distributed(folder: Path) -> dict[str, Tensor]:
        weights, rest = get_state_dict(model, optimizer)
        state_dict_loader.load(
            {"model": weights, "optimizer": rest}, storage_reader=FileSystemReader(folder), no_dist=True
        )
        return dict(model.state_dict())  # read in place

    def save_omnitrain(folder: Path, sync: bool) -> None:
        assert trainer.store is not None
        trainer.store.root, trainer.store.fs = folder, FileSystem() if sync else Unsynced()
        trainer.save_checkpoint()

    def load_omnitrain(folder: Path) -> dict[str, Tensor]:
        trainer.load_checkpoint(next(folder.glob("checkpoint-*")))
        return dict(model.state_dict())

    return [
        Format(
            "torch.save",
            save_torch,
            lambda folder: torch.load(folder / "checkpoint.pt", weights_only=True)["model"],
            pickle=True,
        ),
        Format("safetensors", save_safetensors, load_safetensors, pickle=False),
        Format("torch.distributed.checkpoint", save_distributed, load_distributed, pickle=True),
        Format("omnitrain", save_omnitrain, load_omnitrain, pickle=False),
    ]


# --- the time that training waits


def empty(folder: Path) -> Path:
    """Return a new empty folder in the place of an old one, with nothing left to be written from earlier saves."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    return folder


def took(seconds: float) -> Sample:
    return Sample(seconds, [seconds])


def seconds_of(way: Format, folder: Path, sync: bool) -> Callable[[], Sample]:
    """Measure one save into an empty folder."""

    def sample() -> Sample:
        empty(folder)
        start = time.perf_counter()
        way.save(folder, sync)
        return took(time.perf_counter() - start)

    return sample


def seconds_of_async_omnitrain(folder: Path, quick: bool, step: int) -> Callable[[], Sample]:
    """Measure by how much the checkpoint of `step`, in the background, widens the gap between two steps of a run."""
    gaps = Gaps()
    trainer = trainer_of(folder, quick, async_save=True, callbacks=[gaps])

    def sample() -> Sample:
        empty(folder)
        gaps.__init__()
        trainer.train()
        assert gaps.committed >= len(SAVED_AT) and (folder / f"checkpoint-{step}").is_dir()
        return took(gaps.blocked(step))

    return sample


def seconds_of_async_distributed(trainer: Trainer, folder: Path) -> Callable[[], Sample]:
    """Measure until torch's asynchronous save lets go of the caller."""

    def sample() -> Sample:
        empty(folder)
        start = time.perf_counter()
        weights, rest = get_state_dict(trainer.model, trainer.optimizer)
        writer = FileSystemWriter(folder, sync_files=True)
        written: Any = state_dict_saver.async_save(
            {"model": weights, "optimizer": rest}, storage_writer=writer, no_dist=True
        )
        blocked = time.perf_counter() - start
        written.result()
        return took(blocked)

    return sample


def save(quick: bool, scratch: Path) -> tuple[list[Row], Any]:
    trainer = trainer_of(scratch / "sync", quick)
    trainer.train()
    ways = {way.name: way for way in formats(trainer)}
    folder = scratch / "save"
    first = ways.pop("torch.save")
    loose = {first.name: seconds_of(first, folder, False), "torch.save again (A/A)": seconds_of(first, folder, False)}
    loose |= {name: seconds_of(way, folder, False) for name, way in ways.items() if name != "omnitrain"}
    loose |= {"omnitrain, had it no fsync": seconds_of(ways["omnitrain"], folder, False)}
    safe = {f"{name} + fsync": seconds_of(way, folder, True) for name, way in {first.name: first, **ways}.items()}
    safe["omnitrain"] = safe.pop("omnitrain + fsync")
    later = {
        "torch.distributed.checkpoint, async": seconds_of_async_distributed(trainer, folder),
        "omnitrain, async_save=True, first of a run": seconds_of_async_omnitrain(scratch / "async", quick, SAVED_AT[0]),
        "omnitrain, async_save=True, later": seconds_of_async_omnitrain(scratch / "async", quick, SAVED_AT[1]),
    }
    samples = interleaved({**loose, **safe, **later}, 1 if quick else 9, warm_up=0 if quick else 1)
    durable = {name: samples[name] for name in (*safe, *later)}
    return summarize("save", samples, "ms", 1e3) + summarize("save, on disk", durable, "ms", 1e3), None


# --- what is on the disk, and what it withstands


@dataclass(slots=True)
class Kept:
    """What a format leaves on the disk.

    Attributes:
        megabytes: Of all files of one checkpoint.
        failed_save: What becomes of the checkpoint in the place where a later save fails half-way.
        flipped_bit: What reading the file with the weights says of one changed bit in its middle.
        pickle: Whether reading it runs pickle.
    """

    name: str
    megabytes: float
    failed_save: str
    flipped_bit: str
    pickle: bool


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Have every file fail to grow beyond `size` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def after_failed_save(way: Format, folder: Path, weights: dict[str, Tensor], limit: int) -> str:
    """Return what is left of a good checkpoint when a save into the same place fails."""
    way.save(empty(folder), True)
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        tensor.add_(1)
    try:
        with small_disk(limit):
            way.save(folder, True)
        return "did not fail"
    except (Exception, CheckpointException):  # torch's is no Exception
        pass
    try:
        loaded = way.load(folder)
    except (Exception, CheckpointException):
        return "lost"
    return "kept" if all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()) else "mixed"


def after_flipped_bit(way: Format, folder: Path) -> str:
    """Return whether reading a checkpoint notices that one bit in the middle of its largest file has changed."""
    way.save(empty(folder), True)
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    try:
        way.load(folder)
    except (Exception, CheckpointException):
        return "noticed"
    return "loaded"


def files(quick: bool, scratch: Path) -> tuple[list[Row], list[Kept]]:
    trainer = trainer_of(scratch / "files", quick)
    trainer.train()
    weights, results = {name: tensor.detach() for name, tensor in trainer.model.state_dict().items()}, []
    for way in formats(trainer):
        folder = scratch / "kept"
        way.save(empty(folder), True)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        failed = after_failed_save(way, folder, weights, size // 8)
        results.append(Kept(way.name, size / 1e6, failed, after_flipped_bit(way, folder), way.pickle))
    return [], results


def show_files(results: list[Kept]) -> str:
    lines = [("on disk", "MB", "earlier one, after a failed save", "a flipped bit", "pickle")]
    for result in results:
        pickle = "yes" if result.pickle else "no"
        lines.append((result.name, f"{result.megabytes:.1f}", result.failed_save, result.flipped_bit, pickle))
    return "\n".join("{:30}  {:>6}  {:34}  {:15}  {}".format(*line) for line in lines)


# --- going on in the middle of a long run


class Counted(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that counts the samples that are read, in worker processes too."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, Value("q", 0)
        self.row = torch.zeros(4)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with self.read.get_lock():
            self.read.value += 1
        return self.row, self.row


class FirstStep(Callback):
    """Notes when the first step of a run has its batch, and where the run is then."""

    def on_step_start(self, trainer: Trainer) -> None:
        self.time, self.position = time.perf_counter(), trainer.progress.samples_in_epoch


def seek(quick: bool, scratch: Path) -> tuple[list[Row], dict[str, int]]:
    """Measure from the start of a resume to its first batch; epoch 2 of 1e6 samples, 75,000 batches of it done."""
    size, batch_size, step = (8000, 8, 1600) if quick else (1_000_000, 8, 200_000)
    position = step * batch_size % size
    data, reads = Counted(size), dict[str, int]()

    def build(workers: int, save_dir: Path, steps: int, *callbacks: Callback) -> Trainer:
        return Trainer(
            nn.Linear(4, 4), data, loss_fn=mse_loss, batch_size=batch_size, epochs=None, max_steps=steps, device="cpu",
            num_workers=workers, save_dir=save_dir, progress_bar=False, callbacks=callbacks,
        )  # fmt: skip

    def note(name: str, seconds: float) -> Sample:
        reads[name], data.read.value = data.read.value, 0
        return took(seconds)

    def replayed(name: str, skip: Callable[[Any, int], Any]) -> Callable[[], Sample]:
        def sample() -> Sample:
            loader = DataLoader(data, batch_size, shuffle=True, generator=torch.Generator())
            start = time.perf_counter()
            next(iter(skip(loader, position // batch_size)))
            return note(name, time.perf_counter() - start)

        return sample

    def by_trainer(name: str, workers: int, resumes: bool) -> Callable[[], Sample]:
        run = scratch / f"seek-{workers}-{resumes}"
        if resumes:  # 200,000 steps would take minutes; where a run is, is all that its Progress says
            far = build(workers, run, step)
            far.lifecycle.progress = Progress(
                step * batch_size // size, step, position, step * batch_size, epoch_size=size
            )
            far.save_checkpoint()

        def sample() -> Sample:
            gc.collect()  # an earlier trainer's workers, before they are inherited by those of this one
            data.read.value = 0
            first = FirstStep()
            trainer = build(workers, scratch / f"on-{workers}-{resumes}", (step if resumes else 0) + 1, first)
            start = time.perf_counter()
            trainer.train(resume_from=run / f"checkpoint-{step}" if resumes else None)
            assert first.position == (position if resumes else 0)
            shutil.rmtree(scratch / f"on-{workers}-{resumes}")
            return note(name, first.time - start)

        return sample

    again, skipping = "a DataLoader, batches read and dropped", "accelerate.skip_first_batches"
    variants = {
        again: replayed(again, lambda loader, batches: islice(loader, batches, None)),
        skipping: replayed(skipping, skip_first_batches),
    }
    for workers in (0, 2):
        for resumes in (True, False):
            name = f"omnitrain, {'resumed' if resumes else 'from the start'}, {workers} workers"
            variants[name] = by_trainer(name, workers, resumes)
    return summarize("seek", interleaved(variants, 1 if quick else 5, warm_up=0), "ms", 1e3), reads


def show_reads(reads: dict[str, int]) -> str:
    return "\n".join(
        ["samples read until the first step"] + [f"{name:45}  {count:9,}" for name, count in reads.items()]
    )


# --- all together

CASES: dict[str, tuple[Callable[[bool, Path], tuple[list[Row], Any]], Callable[[Any], str]]] = {
    "save": (save, lambda _: ""),
    "files": (files, show_files),
    "seek": (seek, show_reads),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model; the figures mean little")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled|Detected an existing checkpoint", UserWarning)
    about, rows, tables = {**machine(), "quick": options.quick}, list[Row](), list[str]()
    for name in options.only:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        measure, describe = CASES[name]
        with tempfile.TemporaryDirectory(prefix="omnitrain-", dir=".") as scratch:
            measured, extra = measure(options.quick, Path(scratch).absolute())
        rows += measured
        tables.append(describe(extra))
        about[name] = [asdict(result) for result in extra] if name == "files" else extra
    print(", ".join(f"{key} {value}" for key, value in machine().items()), show(rows), *tables, sep="\n\n")
    if options.json is not None:
        content = {**about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
