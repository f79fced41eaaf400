"""Runs that are cut and resumed, and how two of them are compared; for the tests of saving, resuming and killing."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from recipes import rows
from torch import nn
from torch.utils.data import Dataset

from omnitrain import Algorithm, Callback, Trainer

Build = Callable[..., Trainer]


class Killed(BaseException):
    """The process is gone: nothing of the run comes after it."""


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with an augmentation that draws from all three generators, and their own index as the last number."""

    def __init__(self, size: int = 22, noisy: bool = True) -> None:
        self.x, self.y = rows(size).tensors
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.noisy:
            x = x + 0.1 * torch.randn(4, dtype=torch.float64) + 0.1 * random.random() + 0.1 * np.random.rand()
        return torch.cat([x, torch.tensor([float(index)], dtype=torch.float64)]), self.y[index]


class Net(nn.Module):
    """4 -> 8 -> 1 with dropout and batch norm, in float64 unless told otherwise."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, :4].to(self.head.weight.dtype)))


class Stream(Algorithm):
    """Writes down (epoch, index) of every sample that was trained on; the index is the last number of a row."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.seen += [(trainer.progress.epoch, int(index)) for index in batch[0][:, -1]]
        return batch


class Rates(Callback):
    """Writes down the learning rates of all groups after every step."""

    order = 99

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append([float(group["lr"]) for group in trainer.optimizer.param_groups])


class Cut(Callback):
    """Ends the run after a number of windows, in one of the ways that runs end.

    "stop" asks for it, "signal" sends SIGTERM, "kill" raises `Killed` after the step was saved, if it was to be.
    """

    order = 98

    def __init__(self, how: str, window: int) -> None:
        self.how, self.window = how, window

    def on_step_start(self, trainer: Any) -> None:
        if self.how == "kill" and windows_of(trainer) == self.window:
            raise Killed

    def on_step_end(self, trainer: Any) -> None:
        if windows_of(trainer) != self.window:
            return
        if self.how == "stop":
            trainer.stop()
        elif self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)


def windows_of(trainer: Any) -> int:
    """Steps taken and skipped."""
    return trainer.progress.step + trainer.progress.skipped_steps


def build(save_dir: Path | None, **options: Any) -> Trainer:
    """Make a trainer of objects that no other trainer has: 3 windows of 8, 8 and 6 samples an epoch."""
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "device": "cpu",
        "epochs": 3,
        "learning_rate": 0.05,
        "log_steps": 2,
        "loss_fn": F.mse_loss,
        "progress_bar": False,
        "eval_dataset": Numbered(9, noisy=False),
        "algorithms": [Stream()],
    }
    model = options.pop("model", None) or Net
    dataset = options.pop("dataset", None) or Numbered
    callbacks = [Rates(), *options.pop("callbacks", ())]
    prepare = options.pop("prepare", lambda trainer: None)
    trainer = Trainer(model(), dataset(), save_dir=save_dir, callbacks=callbacks, **{**defaults, **options})
    prepare(trainer)
    return trainer


def disturb_generators() -> None:
    """Leave the global generators as another process would have them."""
    seed = random.SystemRandom().randrange(1 << 30)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(trainer: Trainer, **options: Any) -> Trainer:
    """Train until the run ends in any way but an error."""
    disturb_generators()
    try:
        trainer.train(**options)
    except (Killed, SystemExit):
        pass
    return trainer


def played(save_dir: Path, cuts: list[tuple[str, int]], make: Build = build, **options: Any) -> dict[str, Any]:
    """Run, cut and resume as often as told, then to the end; return what came of it, the parts joined."""
    stream: list[Any] = []
    rates: list[Any] = []
    for number, cut in enumerate([*cuts, None]):
        callbacks = [Cut(*cut)] if cut else []
        trainer = make(save_dir, callbacks=[*options.get("callbacks", lambda: [])(), *callbacks],
                       **{k: v for k, v in options.items() if k != "callbacks"})  # fmt: skip
        at: dict[str, int] = {}

        class Note(Callback):
            def on_train_start(self, trainer: Any) -> None:
                at.update(samples=trainer.progress.samples, windows=windows_of(trainer))  # noqa: B023

        trainer.lifecycle.seat([*trainer.lifecycle.callbacks, Note()])
        train(trainer, resume_from="auto" if number else None)
        stream = stream[: at["samples"]] + trainer.algorithms[0].seen
        rates = rates[: at["windows"]] + next(c for c in trainer.lifecycle.callbacks if isinstance(c, Rates)).seen
    return {"stream": stream, "rates": rates, **outcome(trainer)}


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Everything that two equal runs must agree on."""
    tensors = {f"model/{name}": tensor for name, tensor in trainer.get_model().state_dict().items()}
    for index, entry in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": value for name, value in entry.items()}
    scaler = getattr(trainer, "scaler", None)
    return {
        "tensors": tensors,
        "groups": trainer.optimizer.state_dict()["param_groups"],
        "schedule": trainer.lr_scheduler.state_dict() if trainer.lr_scheduler is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "metrics": trainer.metrics.to_dict(),
        "journal": journal(trainer.save_dir) if trainer.save_dir is not None else None,
        "objective": trainer.objective.state_dict(),
        "position": trainer.progress.state_dict() | {"seconds": 0},
        "torch": torch.get_rng_state(),
    }


def journal(save_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without speeds, and without those that close a run."""
    found = []
    for line in (save_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if not row.get("final"):
            found.append({key: value for key, value in row.items() if not key.endswith("_per_second")})
    return found


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Name what differs between two outcomes; tensors and floats must be equal to the bit, NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [f"{where}: {a.flatten()[:3].tolist()} != {b.flatten()[:3].tolist()}"]
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            d for key in {**a, **b} for d in differences(a.get(key, "absent"), b.get(key, "absent"), f"{where}/{key}")
        ]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {str(a)[:300]} != {str(b)[:300]}"]
