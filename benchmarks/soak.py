"""A long run: does anything grow with the steps that were done? Memory, files, the manifest, the time of a save.

    python benchmarks/soak.py [--steps 200000] [--json FILE]

A small model on one thread, so that a minute has tens of thousands of steps, with a log every 10, an evaluation every
100 and a checkpoint about every 1,000 of them. The table has a row for each twentieth of the run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _timing import machine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from omnitrain import Callback, Trainer
from omnitrain.checkpoint.manifest import MANIFEST

ROWS = 20
SAVE_STEPS = 997  # shares no step with the logs and evaluations, so that a save is timed alone


@dataclass(slots=True)
class Row:
    """What there was at the end of a stretch of the run, and the medians of what took time in it.

    Attributes:
        seconds: Since the start of the run.
        resident: MB of memory of the process.
        objects: That the garbage collector knows.
        descriptors: Open files of the process.
        files: In `save_dir`, those of the checkpoints included.
        manifest: KB of the latest omnitrain.json.
        checkpoint: KB of the latest checkpoint.
        save: Milliseconds of a save.
        step: Microseconds of a step, logs and all else included.
    """

    steps: int
    seconds: float
    resident: float
    objects: int
    threads: int
    descriptors: int
    files: int
    manifest: float
    checkpoint: float
    save: float
    step: float


class Watch(Callback):
    """Takes a row after each stretch of the run, at the first checkpoint in it."""

    order = 95

    def __init__(self, steps: int, folder: Path) -> None:
        self.folder = folder
        self.stretch = max(steps // ROWS, SAVE_STEPS)
        self.rows: list[Row] = []
        self._asked = self._start = self._last = time.perf_counter()
        self._step = 0
        self._saves: list[float] = []

    def on_step_end(self, trainer: Trainer) -> None:
        if not trainer.progress.step % SAVE_STEPS:
            self._asked = time.perf_counter()

    def on_save_end(self, trainer: Trainer) -> None:
        clock, step = time.perf_counter(), trainer.progress.step
        if not step % SAVE_STEPS and step % 100:
            self._saves.append(clock - self._asked)
        if step >= (len(self.rows) + 1) * self.stretch and self._saves:
            self.rows.append(self._row(step, clock))
            self._saves, self._step, self._last = [], step, time.perf_counter()

    def _row(self, step: int, clock: float) -> Row:
        gc.collect()
        folder = self.folder
        newest = max(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime_ns)
        return Row(
            steps=step,
            seconds=clock - self._start,
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
            objects=len(gc.get_objects()),
            threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
            files=sum(path.is_file() for path in folder.rglob("*")),
            manifest=(newest / MANIFEST).stat().st_size / 1e3,
            checkpoint=sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) / 1e3,
            save=statistics.median(self._saves) * 1e3,
            step=(clock - self._last) / (step - self._step) * 1e6,
        )


def soak(steps: int) -> list[Row]:
    """Train for so many steps, and return what was seen on the way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    points = torch.randn(2048, 16)
    data = TensorDataset(points, (points.sum(1) > 0).long())
    with tempfile.TemporaryDirectory(prefix="omnitrain-soak-") as folder:
        watch = Watch(steps, Path(folder))
        Trainer(
            model,
            data,
            TensorDataset(*(tensor[:256] for tensor in data.tensors)),
            loss_fn=cross_entropy,
            compute_metrics=["accuracy", "f1_macro"],
            max_steps=steps,
            epochs=None,
            learning_rate=1e-4,
            lr_scheduler="cosine",
            eval_batch_size=256,
            eval_steps=100,
            save_steps=SAVE_STEPS,
            save_dir=folder,
            save_total_limit=3,
            keep_best=2,
            progress_bar=False,
            callbacks=[watch],
            device="cpu",
        ).train()
    return watch.rows


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = soak(arguments.steps)
    names = list(asdict(rows[0]))
    units = {"seconds": "s", "resident": "MB", "manifest": "KB", "checkpoint": "KB", "save": "ms", "step": "us"}
    titles = [f"{name} {units[name]}" if name in units else name for name in names]
    print("  ".join(f"{title:>8}" for title in titles))
    for row in rows:
        cells = zip(titles, asdict(row).values(), strict=True)
        print("  ".join(f"{round(value, 1):>{max(len(title), 8)}}" for title, value in cells))
    if arguments.json:
        arguments.json.write_text(json.dumps({**machine(), "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
