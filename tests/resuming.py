"""Interrupted and resumed runs, and the comparison of their outcomes."""

import contextlib
import json
import math
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from recipes import rows, subscribe
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from omnitrain import Algorithm, Callback, Event, Trainer
from omnitrain.checkpoint.tensor_files import gather_to_host, is_sharded


class Killed(BaseException):
    """Stands for the end of the process: no code of the run handles it."""


class Failed(Exception):
    """Stands for an error that all ranks raise together, after which they can train again."""


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a temporary folder, in memory where the system has such a place: these tests write thousands of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


# --- training


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


class Overflowing(Net):
    """Gives infinite gradients in chosen batches, which it counts besides its buffers, as if the data caused them."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.count += self.training
        if self.count in (2, 3, 8, 12) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)
        return output


def build(save_dir: Path | None, **options: Any) -> Trainer:
    """Return a new trainer that shares no object with another: 3 steps of 8, 8 and 6 samples an epoch.

    `model`, `dataset`, `train_loader`, `callbacks` and `algorithms` are factories, `unit` is one that takes the model;
    `prepare` is called with the trainer.
    """
    parts = {name: options.pop(name)() for name in ("model", "dataset", "callbacks", "algorithms") if name in options}
    prepare = options.pop("prepare", lambda trainer: None)
    defaults: dict[str, Any] = {
        "batch_size": 4, "gradient_accumulation_steps": 2, "device": "cpu", "epochs": 3, "learning_rate": 0.05,
        "eval_dataset": Numbered(9, noisy=False), "log_steps": 2, "loss_fn": F.mse_loss, "progress_bar": False,
    }  # fmt: skip
    if "train_loader" in options:
        options["train_loader"] = options["train_loader"]()
        del defaults["batch_size"]
        data = None
    else:
        data = parts["dataset"] if "dataset" in parts else Numbered()
    model = parts["model"] if "model" in parts else Net()  # no `or`: a compiled model has no length
    if options.get("unit"):
        options["unit"] = options["unit"](model)
    trainer = Trainer(
        model, data, save_dir=save_dir, callbacks=[Rates(), *parts.get("callbacks", ())],
        algorithms=[Stream(), *parts.get("algorithms", ())], **{**defaults, **options},
    )  # fmt: skip
    prepare(trainer)
    return trainer


# --- recording


class Stream(Algorithm):
    """Records (epoch, index) of every training sample; the index is the last number of a row."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.samples += [(trainer.progress.epoch, int(index)) for index in batch[0][:, -1]]
        return batch


class Rates(Callback):
    """Records the learning rates of all groups after every step, the start of the run, and torch's generator."""

    order = -10  # before the callbacks that interrupt the run

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.start = (0, 0)
        self.generator: torch.Tensor | None = None

    def on_train_start(self, trainer: Any) -> None:
        self.start = (trainer.progress.samples, windows_of(trainer))

    def on_step_end(self, trainer: Any) -> None:
        self.rates.append([float(group["lr"]) for group in trainer.optimizer.param_groups])

    def on_train_end(self, trainer: Any) -> None:
        self.generator = torch.get_rng_state()  # the program's state is restored after the run


# --- interrupting


class Cut(Callback):
    """Ends the run after some steps: "stop" calls `trainer.stop()`, "signal" sends SIGTERM, "kill" raises `error`.

    "kill" acts before the next step, after the saves of this one. A skipped step counts as a step.
    """

    order = 98
    error: type[BaseException] = Killed

    def __init__(self, how: str, window: int) -> None:
        self.how, self.window = how, window

    def on_step_start(self, trainer: Any) -> None:
        if self.how == "kill" and windows_of(trainer) == self.window:
            raise self.error

    def on_step_end(self, trainer: Any) -> None:
        if windows_of(trainer) != self.window:
            return
        if self.how == "stop":
            trainer.stop()
        elif self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)


class KillAtEvent(Callback):
    """Raises `error` at the n-th event of the run; with n=0 it only records the events."""

    error: type[BaseException] = Killed

    def __init__(self, number: int = 0, order: int = 97) -> None:
        self.number, self.order, self.count = number, order, 0
        self.names: list[str] = []

    def handle(self, event: Event, trainer: Any, *details: Any) -> None:
        self.count += 1
        self.names.append(str(event))
        if self.count == self.number:
            self.interrupt(trainer)

    def interrupt(self, trainer: Any) -> None:
        raise self.error


subscribe(KillAtEvent, KillAtEvent.handle, set(Event) - {Event.EXCEPTION})


def windows_of(trainer: Any) -> int:
    """Steps taken and skipped."""
    return trainer.progress.step + trainer.progress.skipped_steps


# --- playing


def disturb_generators() -> None:
    """Put the global generators into the state of some other process."""
    seed = random.SystemRandom().randrange(1 << 30)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(trainer: Trainer, **options: Any) -> Trainer:
    """Train until the run ends in any way but an error."""
    disturb_generators()
    with contextlib.suppress(Killed, Failed, SystemExit):
        trainer.train(**options)
    return trainer


def play(
    save_dir: Path, parts: Iterable[Mapping[str, Any]] = ({},), make: Callable[..., Trainer] = build, **options: Any
) -> dict[str, Any]:
    """Train in parts, each with a new trainer that resumes from "auto"; return the outcome, streams and rates joined.

    A part has the options that differ from `options`; its "cut" is (how, window), or a callback that ends the run, and
    "allow_change" is an argument of its `train`.
    """
    stream: list[Any] = []
    rates: list[Any] = []
    for part in parts:
        changed = {**options, **part}
        cut, allowed = changed.pop("cut", None), changed.pop("allow_change", ())
        cuts = [] if cut is None else [cut if isinstance(cut, Callback) else Cut(*cut)]
        callbacks = [*changed.pop("callbacks", list)(), *cuts]
        trainer = make(save_dir, callbacks=lambda: callbacks, **changed)  # noqa: B023
        train(trainer, resume_from="auto", allow_change=allowed)
        record = next(callback for callback in trainer.lifecycle.callbacks if isinstance(callback, Rates))
        samples, windows = record.start
        stream = stream[:samples] + trainer.algorithms[0].samples  # type: ignore[attr-defined]
        rates = rates[:windows] + record.rates
    return {"stream": stream, "rates": rates, **outcome(trainer)}


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return what two equal runs must agree on, in memory and in the last checkpoint."""
    tensors = {f"model/{name}": tensor for name, tensor in trainer.get_model().state_dict().items()}
    for index, entry in trainer.optimizer.state_dict()["state"].items():
        entries = entry if isinstance(entry, dict) else {"shared": entry}
        tensors |= {f"optimizer/{index}/{name}": value for name, value in entries.items()}
    for name, value in tensors.items():
        tensors[name] = gather_to_host(value) if is_sharded(value) else value
    scaler = getattr(trainer, "scaler", None)
    result = {
        "metrics": trainer.metrics.to_dict(),
        "objective": trainer.objective.state_dict(),
        "position": trainer.progress.state_dict() | {"seconds": 0},
        "groups": trainer.optimizer.state_dict()["param_groups"],
        "schedule": trainer.lr_scheduler.state_dict() if trainer.lr_scheduler is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "callbacks": [state for callback in trainer.lifecycle.callbacks if (state := callback.state_dict())],
        "generator": [record.generator for record in trainer.lifecycle.callbacks if isinstance(record, Rates)],
        "tensors": tensors,
    }
    for state in result["callbacks"]:
        state.get("gained_at", {}).pop("seconds", None)  # of early stopping
    if trainer.store is not None and (last := trainer.store.resolve("auto")) is not None:
        files = sorted(file for file in last[1]["files"] if file.endswith(".safetensors"))
        result["last"] = {file: load_file(last[0] / file) for file in files}
        result["journal"] = journal(trainer.store.root)
    return result


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome without what the process that was killed took with it: its samples and rates."""
    return {key: value for key, value in result.items() if key not in ("stream", "rates")}


def assert_same(result: Any, expected: Any, case: object = "") -> None:
    """Assert that two outcomes are equal bit for bit."""
    problems = differences(result, expected)
    assert not problems, f"{case}: {problems[:5]}"


def journal(save_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without speeds, and without the final row of a run."""
    result = []
    for line in (save_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if not row.get("final"):
            result.append({key: value for key, value in row.items() if not key.endswith("_per_second")})
    return result


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Describe how two outcomes differ; tensors and numbers must be equal to the bit, NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype == b.dtype and torch.equal(a, b):
            return []
        return [f"{where}: {a.flatten()[:3].tolist()} != {b.flatten()[:3].tolist()}"]
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {**a, **b}
        return [text for key in keys for text in differences(a.get(key), b.get(key), f"{where}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [text for i, (left, right) in pairs for text in differences(left, right, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {str(a)[:200]} != {str(b)[:200]}"]
