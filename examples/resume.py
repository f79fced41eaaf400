"""A run that is killed three times ends with the weights, to the bit, of one that nothing interrupted.

    python examples/resume.py

Each kill is a SIGKILL in the middle of an epoch, as when a machine loses its power: no handler runs, nothing is
saved. The training has what makes this hard: dropout, random augmentation, a schedule, an optimizer with momentum. It
takes less than a minute, most of which goes into starting Python five times.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from omnitrain import Callback, Trainer
from omnitrain.trainer.base import BaseTrainer

KILLS = (23, 67, 110)
"""The steps after which the process dies. An epoch has 38, and a checkpoint is saved every 10."""


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    """Points on two spirals, each time a little beside where they were the last time."""

    def __init__(self, size: int, seed: int) -> None:
        turns = torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 2
        self.labels = torch.arange(size) % 2
        angles = torch.pi * (turns + self.labels)
        self.points = turns.unsqueeze(1) * torch.stack([angles.cos(), angles.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(2) * np.random.uniform(0, 0.1)
        return self.points[index] + noise, self.labels[index]


class Killer(Callback):
    """Kills its own process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: BaseTrainer) -> None:
        if trainer.progress.step == self.step:
            print(f"  killed after step {self.step}, at epoch {trainer.progress.epochs:.2f}", flush=True)
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has but one way to kill


def train(folder: Path, kill_at: int | None = None) -> Trainer:
    """This is all that a script has to do to survive: always the same call, with `resume_from="auto"`."""
    torch.set_num_threads(1)  # the model is so small that more would wait for each other
    torch.manual_seed(0)  # for the weights that the model starts from
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    trainer = Trainer(
        model,
        Spirals(1200, seed=1),
        Spirals(400, seed=2),
        loss_fn=nn.functional.cross_entropy,
        epochs=4,
        batch_size=32,
        learning_rate=0.01,
        lr_scheduler="cosine",
        save_dir=folder,
        save_steps=10,
        save_total_limit=2,
        device="cpu",
        progress_bar=False,
        callbacks=[] if kill_at is None else [Killer(kill_at)],
    )
    trainer.train(resume_from="auto")
    return trainer


def main() -> bool:
    with tempfile.TemporaryDirectory() as place:
        whole, killed = Path(place, "whole"), Path(place, "killed")
        print("A run that nothing interrupts:", flush=True)
        trainer = train(whole)
        print(f"  {trainer.progress.step} steps, loss {trainer.metrics['best_valid']['eval_loss']:.4f}")

        print("The same run, started again until it is done:", flush=True)
        for kill_at in (*KILLS, None):
            words = [] if kill_at is None else ["--kill-at", str(kill_at)]
            child = subprocess.run([sys.executable, __file__, "--into", str(killed), *words])
            if (child.returncode == 0) != (kill_at is None):
                raise SystemExit(f"The process ended with exit code {child.returncode}.")
        return is_equal(whole, killed)


def is_equal(whole: Path, killed: Path) -> bool:
    """Compare the checkpoints that two runs end with: `last` in a run's folder is the newest."""
    equal = []
    for file in ("model.safetensors", "optimizer/state.safetensors"):
        a, b = (load_file(run / "last" / file) for run in (whole, killed))
        equal.append(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a))
        print(f"{file}: {len(a)} tensors, {'equal to the bit' if equal[-1] else 'NOT EQUAL'}")
    return all(equal)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="only train, or go on training, in this folder")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="die after this step")
    args = parser.parse_args()
    if args.into is None:
        raise SystemExit(0 if main() else 1)
    resumed = train(args.into, args.kill_at)
    print(f"  done after step {resumed.progress.step}", flush=True)
