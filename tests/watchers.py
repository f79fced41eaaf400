"""One of each watcher, for runs that are compared with an unwatched one: a new watcher gets a line here."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from recipes import fit, rows, subscribe, t16
from torch import nn

from omnitrain import (
    Callback,
    CsvLogger,
    Distributions,
    Event,
    GarbageCollection,
    GradientCheck,
    HookCallback,
    MemoryMonitor,
    Periodic,
    Preview,
    Profiler,
    TensorBoardLogger,
    Throughput,
)
from omnitrain.checkpoint.tensor_files import gather_to_host
from omnitrain.core.events import Histogram


class Listener(Callback):
    """Subscribes to every event, and reports what loggers show besides numbers; `heard` has the events' names."""

    def __init__(self) -> None:
        self.heard = set[str]()

    def log_values(self, trainer: Any) -> Mapping[str, float]:
        return {"listened": float(len(self.heard))}

    def handle(self, event: Event, trainer: Any, *_: Any) -> None:
        self.heard.add(str(event))
        if event is Event.LOG:
            trainer.lifecycle.report({"words": "a text", "values": Histogram([0.0, 1.0], [2], 0.0, 1.0, 1.0, 1.0)})


subscribe(Listener, Listener.handle, Event)


def watchers(folder: Path) -> dict[str, Callback]:
    """Return one of each, by name, that writes to the folder; `run` adds JSON lines and the progress bar."""
    return {
        "listener": Listener(),
        "hooks": HookCallback({"on_train_step_end": lambda *_, **__: None}),
        "tensorboard": TensorBoardLogger(folder / "tensorboard"),
        "csv": CsvLogger(),
        "profiler": Profiler(skip=1, warmup=1, active=1, folder=folder / "profile"),
        "distributions": Distributions(every=2, of=("weights", "gradients", "updates", "activations")),
        "periodic": Periodic(lambda trainer: {"drawn": float(torch.rand(()))}, every=2),
        "preview": Preview([0.1], every=3, function=lambda model, prompt: str(torch.rand(()) + prompt), timeout="60s"),
        "memory": MemoryMonitor(),
        "throughput": Throughput(window=2, peak=1e12),
        "garbage": GarbageCollection("2ba", generation=2),
        "gradients": GradientCheck(2),
    }


def run(make: Callable[..., Any], folder: Path | None) -> Any:
    """Train a small model with dropout for two epochs; with all watchers if there is a folder, else with none."""
    options: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss, "batch_size": 4, "epochs": 2, "learning_rate": 0.05,
        "load_best_at_end": False, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    if folder is None:
        options |= {"log_steps": 1000, "progress_bar": False}
    else:
        options |= {
            "log_steps": 1, "progress_bar": True, "save_dir": folder / "run",
            "callbacks": list(watchers(folder).values()),
        }  # fmt: skip
    torch.manual_seed(1)
    return fit(make(t16(0.3), rows(28), rows(9), **options))


def outcome(trainer: Any) -> dict[str, Any]:
    """Return what watching may not change: the weights (which depend on dropout), this rank's moments, the history."""
    moments = {
        f"{place}/{name}": value.to_local() if hasattr(value, "to_local") else value
        for place, state in enumerate(trainer.optimizer.state.values())
        for name, value in state.items() if torch.is_tensor(value)
    }  # fmt: skip
    assert moments
    return {
        "tensors": {name: gather_to_host(value) for name, value in trainer.backend.model_tensors().items()} | moments,
        "history": {name: trainer.metrics[name] for name in ("train_metrics_history", "valid", "best_valid")},
    }


TRACES = ("tensorboard/*", "run/metrics.csv", "run/metrics.jsonl", "run/run.json", "profile/*.json.gz")
"""Files of the watchers in the folder."""
