"""Runs that are cut short and resumed, and how two of them are compared: for the tests of saving and of killing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from recipes import rows
from torch import nn
from torch.utils.data import Dataset

from omnitrain import Algorithm, Callback, Event, Trainer
from omnitrain.checkpoint.state import load_tensors


class Killed(BaseException):
    """The process is gone: nothing of the run comes after it."""


# --- what is trained


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with an augmentation that draws from all three generators, and their own index as the last number."""

    def __init__(self, size: int = 22, noisy: bool = True, dtype: torch.dtype = torch.float64) -> None:
        self.x, self.y = rows(size, dtype).tensors
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.noisy:
            x = x + 0.1 * torch.randn(4, dtype=x.dtype) + 0.1 * random.random() + 0.1 * np.random.rand()
        return torch.cat([x, torch.tensor([float(index)], dtype=x.dtype)]), self.y[index]


class Net(nn.Module):
    """4 -> 8 -> 1 with dropout and batch norm."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, :4].to(self.head.weight.dtype)))


def build(save_dir: Path | None, **options: Any) -> Trainer:
    """Make a trainer of objects that no other trainer has: 3 windows of 8, 8 and 6 samples an epoch.

    `model`, `dataset`, `train_loader`, `callbacks` and `algorithms` are made by calling what is given, `unit` from the
    model; `prepare` gets the trainer.
    """
    made = {name: options.pop(name)() for name in ("model", "dataset", "callbacks", "algorithms") if name in options}
    prepare = options.pop("prepare", lambda trainer: None)
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "device": "cpu",
        "epochs": 3,
        "eval_dataset": Numbered(9, noisy=False),
        "learning_rate": 0.05,
        "log_steps": 2,
        "loss_fn": F.mse_loss,
        "progress_bar": False,
    }
    if "train_loader" in options:
        options["train_loader"] = options["train_loader"]()
        del defaults["batch_size"]
        data = None
    else:
        data = made.get("dataset", Numbered())
    model = made["model"] if "model" in made else Net()
    if options.get("unit"):
        options["unit"] = options["unit"](model)
    trainer = Trainer(
        model,
        data,
        save_dir=save_dir,
        callbacks=[Rates(), *made.get("callbacks", ())],
        algorithms=[Stream(), *made.get("algorithms", ())],
        **{**defaults, **options},
    )
    prepare(trainer)
    return trainer


# --- what is noted


class Stream(Algorithm):
    """Writes down (epoch, index) of every sample that was trained on; the index is the last number of a row."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.seen += [(trainer.progress.epoch, int(index)) for index in batch[0][:, -1]]
        return batch


class Rates(Callback):
    """Writes down the learning rates of all groups after every step, where the run began, and torch's generator."""

    order = -10  # before whatever kills

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.start = (0, 0)
        self.generator: torch.Tensor | None = None

    def on_train_start(self, trainer: Any) -> None:
        self.start = (trainer.progress.samples, windows_of(trainer))

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append([float(group["lr"]) for group in trainer.optimizer.param_groups])

    def on_train_end(self, trainer: Any) -> None:
        self.generator = torch.get_rng_state()  # the program's own comes back after the run


# --- how it ends


class Cut(Callback):
    """Ends the run after a number of windows: "stop" asks for it, "signal" sends SIGTERM, "kill" raises `Killed`.

    A kill strikes before the next window, when what was to be saved is saved.
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


class KillAtEvent(Callback):
    """Raises `Killed` at the n-th event of the run, whatever it is; counts them all with n=0."""

    def __init__(self, number: int = 0, order: int = 97) -> None:
        self.number, self.order, self.count = number, order, 0


def _counting(event: Event) -> Any:
    def count(self: KillAtEvent, trainer: Any, *details: Any) -> None:
        self.count += 1
        if self.count == self.number:
            raise Killed

    return count


for _event in Event:
    if _event is not Event.EXCEPTION:
        setattr(KillAtEvent, f"on_{_event}", _counting(_event))


def windows_of(trainer: Any) -> int:
    """Steps taken and skipped."""
    return trainer.progress.step + trainer.progress.skipped_steps


# --- what is played


def disturb_generators() -> None:
    """Leave the global generators as another process would have them."""
    seed = random.SystemRandom().randrange(1 << 30)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(trainer: Trainer, **options: Any) -> Trainer:
    """Train until the run ends in any way but an error."""
    disturb_generators()
    with contextlib.suppress(Killed, SystemExit):
        trainer.train(**options)
    return trainer


def play(
    save_dir: Path,
    parts: Iterable[Mapping[str, Any]] = ({},),
    make: Callable[..., Trainer] = build,
    **options: Any,
) -> dict[str, Any]:
    """Train in parts, each a new trainer that resumes from "auto"; return what came of it, streams and rates joined.

    A part is what differs from `options` in it: "cut" is (how, window), or a callback that ends the run.
    """
    stream: list[Any] = []
    rates: list[Any] = []
    for part in parts:
        changed = {**options, **part}
        cut = changed.pop("cut", None)
        cuts = [] if cut is None else [cut if isinstance(cut, Callback) else Cut(*cut)]
        own = changed.pop("callbacks", list)
        trainer = make(save_dir, callbacks=lambda: [*own(), *cuts], **changed)  # noqa: B023
        train(trainer, resume_from="auto")
        noted = next(callback for callback in trainer.lifecycle.callbacks if isinstance(callback, Rates))
        samples, windows = noted.start
        stream = stream[:samples] + trainer.algorithms[0].seen  # type: ignore[attr-defined]
        rates = rates[:windows] + noted.seen
    return {"stream": stream, "rates": rates, **outcome(trainer)}


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Everything that two equal runs must agree on, in memory and in the last checkpoint."""
    tensors = {f"model/{name}": tensor for name, tensor in trainer.get_model().state_dict().items()}
    for index, entry in trainer.optimizer.state_dict()["state"].items():
        entries = entry if isinstance(entry, dict) else {"shared": entry}
        tensors |= {f"optimizer/{index}/{name}": value for name, value in entries.items()}
    scaler = getattr(trainer, "scaler", None)
    found = {
        "metrics": trainer.metrics.to_dict(),
        "objective": trainer.objective.state_dict(),
        "position": trainer.progress.state_dict() | {"seconds": 0},
        "groups": trainer.optimizer.state_dict()["param_groups"],
        "schedule": trainer.lr_scheduler.state_dict() if trainer.lr_scheduler is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "callbacks": [state for callback in trainer.lifecycle.callbacks if (state := callback.state_dict())],
        "generator": [one.generator for one in trainer.lifecycle.callbacks if isinstance(one, Rates)],
        "tensors": tensors,
    }
    if trainer.store is not None and (last := trainer.store.resolve("auto")) is not None:
        files = sorted(file for file in last[1]["files"] if file.endswith(".safetensors"))
        found["last"] = {file: load_tensors(last[0] / file) for file in files}
        found["journal"] = journal(trainer.store.root)
    return found


def journal(save_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without speeds, and without those that close a run."""
    found = []
    for line in (save_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if not row.get("final"):
            found.append({key: value for key, value in row.items() if not key.endswith("_per_second")})
    return found


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Name what differs between two outcomes; tensors and numbers must be equal to the bit, NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype == b.dtype and torch.equal(a, b):
            return []
        return [f"{where}: {a.flatten()[:3].tolist()} != {b.flatten()[:3].tolist()}"]
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {**a, **b}
        return [found for key in keys for found in differences(a.get(key), b.get(key), f"{where}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [found for i, (one, other) in pairs for found in differences(one, other, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {str(a)[:200]} != {str(b)[:200]}"]
