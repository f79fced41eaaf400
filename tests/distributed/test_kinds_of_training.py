"""Kinds of training on two ranks: several tasks, parameter groups, Muon, initial weights, schedules in time.

Each takes the steps of one process, and resumes there or on another backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Job, asked_for, gap, launch_all, make_trainer, sound, tensors_of
from forking import joined
from marks import thinned
from recipes import ScheduleFree, Sentences, StopAt, Tagger, Trace, rows
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Callback, LinearScheduler, MultiTask, MultiTaskUnit, WSDScheduler

HERE = "test_kinds_of_training"


# --- what runs on every process


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"kind": nn.Linear(4, 3), "rare": nn.Linear(4, 1)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](self.body(x).tanh())


def tasks() -> dict[str, Any]:
    """A task of 22 samples and one of 3: most micro-batches have none of the second."""
    x, class_weights = torch.randn(25, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 3.0, 0.2])
    sets = {"kind": TensorDataset(x[:22], x[:22].argmax(1) % 3), "rare": TensorDataset(x[22:], x[22:].sum(1, True))}
    model, data = Heads(), MultiTask(sets)
    return {
        "model": model, "train_dataset": data, "eval_dataset": data.evaluation(sets, {"kind": "accuracy"}),
        "unit": MultiTaskUnit(model, {"kind": nn.CrossEntropyLoss(class_weights), "rare": F.mse_loss}, {"rare": 2.0}),
        "size": 4, "epochs": 2, "global_batch_size": 8, "lr_scheduler": "linear",
    }  # fmt: skip


class Seeded(nn.Sequential):
    """Has its seed in its state."""

    seed = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]


def deep(seed: int = 0) -> Seeded:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    model = Seeded(nn.Linear(4, 4), nn.Sequential(*blocks), nn.Linear(4, 1))
    model.seed = seed
    return model


def regression(**options: Any) -> dict[str, Any]:
    defaults = {"train_dataset": rows(20, torch.float32), "loss_fn": F.mse_loss, "size": 8, "epochs": 2}
    return {**defaults, "weight_decay": 0.1, "lr_scheduler": "cosine", **options}


def groups() -> dict[str, Any]:
    patterns = [{"match": r"^1\.1\..*weight", "lr_scale": 0.5}, {"match": "bias", "weight_decay": 0.0}]
    model = nn.Sequential(*deep())  # without the state that only a pickle can hold
    return regression(model=model, optimizer="adamw", freeze=[r"^0\."], param_groups=patterns)


def in_time(growing: bool = False) -> dict[str, Any]:
    """Over 200 tokens, in steps of four sequences, or of more and more."""
    return {
        "model": Tagger(dtype=torch.float32), "train_dataset": Sentences(20), "size": 4, "max_duration": "200tok",
        "global_batch_size": {0: 4, "0.2dur": 8, "0.6dur": 12} if growing else None,
        "lr_scheduler": LinearScheduler(warmup=2, min_lr=0.01) * WSDScheduler("0.4dur"),
    }  # fmt: skip


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "tasks": tasks,
    "groups": groups,
    "muon": lambda: regression(model=nn.Sequential(*deep()), optimizer="muon"),
    "schedule free": lambda: regression(model=nn.Sequential(*deep()), optimizer=ScheduleFree, weight_decay=0.0),
    "initial weights": lambda: regression(model=deep(int(os.environ.get("RANK", "0")) + 7)),
    "in time": in_time,
    "growing steps": lambda: in_time(growing=True),
}


def train(backend: str, kind: str, folder: str | None = None, stop: int = 0, **options: Any) -> dict[str, Any]:
    """Train, stopped after a step, or resumed from there."""
    options = {**KINDS[kind](), **options}
    trace = Trace()
    trace.asks_alone = bool(stop)  # without such a callback, the next step is read before this one is counted
    trainer = make_trainer(
        backend, options.pop("model"), batch_size=options.pop("size") // PROCESSES[backend], learning_rate=0.05,
        callbacks=[trace, *([StopAt(stop)] if stop else [])], save_dir=folder, save_steps=folder and 100, **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    return {
        "rates": [row["learning_rate"] for row in trace.logs],
        "initial rates": [group["initial_lr"] for group in trainer.optimizer.param_groups],
        "groups": trainer.backend.names_by_group(), "seed": getattr(trainer.get_model(), "seed", None),
        "evaluated": trainer.evaluate() if kind == "tasks" else {},
        "tensors": tensors_of(trainer),
    }  # fmt: skip


class Clock(Callback):
    """Moves the clock of this rank by hours in each step, and that of the second rank twice as fast."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_start(self, trainer: Any) -> None:
        trainer.lifecycle.progress.seconds += 1e5 * (1 + trainer.rank)

    def on_step_end(self, trainer: Any) -> None:
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


def train_by_clock(backend: str, folder: str) -> dict[str, Any]:
    """Train for 10 steps by the clock of the main rank, and for 5 by the other; evaluate and save by clocks too."""
    clock = Clock()
    trainer = make_trainer(
        backend, Tagger(dtype=torch.float32), Sentences(20), batch_size=2, max_duration="1000000s",
        learning_rate=0.05, lr_scheduler="linear", callbacks=[clock], max_grad_norm=None, eval_dataset=Sentences(4),
        eval_steps="250000s", save_dir=folder, save_steps="350000s", load_best_at_end=False,
    )  # fmt: skip
    metrics = trainer.train()
    evaluated = [row["step"] for row in metrics["valid"]]
    return {"rates": clock.rates, "evaluated": evaluated, "reason": metrics["stop_reason"]}


# --- tests

STRAIGHT = [
    *(("tasks", backend) for backend in ("ddp", "fsdp", "hf2", "zero3")),
    *(("groups", backend) for backend in ("ddp", "fsdp", "zero2", "hf2", "zero3")),
    *(("muon", backend) for backend in ("fsdp", "ddp", "hf2")),
    *(("schedule free", backend) for backend in ("fsdp", "ddp", "hf2")),
    *(("initial weights", backend) for backend in ("fsdp", "ddp", "hf2", "zero3")),
    *(("in time", backend) for backend in ("ddp", "hf2", "fsdp", "zero3")),
    *(("growing steps", backend) for backend in ("ddp", "hf2")),
]
QUICK = [
    ("tasks", "ddp"), ("tasks", "fsdp"), ("groups", "fsdp"), ("groups", "zero2"), ("muon", "fsdp"),
    ("schedule free", "fsdp"), ("initial weights", "fsdp"), ("in time", "hf2"), ("growing steps", "ddp"),
]  # fmt: skip
RESUMED = [
    ("groups", "fsdp", "native"), ("muon", "ddp", "fsdp"), ("tasks", "ddp", "ddp"), ("growing steps", "ddp", "ddp"),
    ("schedule free", "ddp", "fsdp"), ("groups", "zero2", "ddp"), ("tasks", "zero3", "zero3"),
    ("in time", "hf2", "hf2"), ("in time", "fsdp", "fsdp"), ("in time", "zero3", "zero3"),
]  # fmt: skip
"""Kind, where a run is cut, and where it is resumed."""


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    torch.save(deep().state_dict(), folder / "weights.pt")

    def job(name: str, backend: str, kind: str, **options: Any) -> Job:
        initial = {"init_from": str(folder / "weights.pt")} if kind == "initial weights" else {}
        return Job(f"{kind}-{name}", backend, f"{HERE}:train", {"kind": kind, **initial, **options})

    moves = sorted(asked_for(request, "kind", "source", "target"))
    straight = asked_for(request, "kind", "backend") | {(kind, target) for kind, _, target in moves}
    straight |= {(kind, "native") for kind, _ in straight} | {("muon", "zero2")}
    first, second = [job(backend, backend, kind) for kind, backend in sorted(straight)], []
    for kind, source, target in moves:
        saved = {"folder": str(folder / f"{kind}-{source}")}
        first.append(job(f"cut-{source}", source, kind, stop=3, **saved))
        second.append(job(f"{source}-{target}", target, kind, **saved))
    first.append(Job("clock", "ddp", f"{HERE}:train_by_clock", {"folder": str(folder / "clock")}))
    results = launch_all(first, folder / "first")
    error = results.pop("muon-zero2")
    results = joined(sound(results), sound(launch_all(second, folder / "second")))
    results["muon-zero2"] = error
    return results


@pytest.mark.parametrize(("kind", "backend"), thinned(STRAIGHT, QUICK))
def test_kinds_match_one_process(results: Any, kind: str, backend: str) -> None:
    (expected,) = results[f"{kind}-native"]
    for rank in results[f"{kind}-{backend}"]:
        assert gap(rank["tensors"], expected["tensors"]) <= 1e-5
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        for name in ("rates", "initial rates", "groups"):
            assert rank[name] == expected[name], name
        assert rank["seed"] == (0 if kind == "initial weights" else None)
    if kind == "groups":
        assert expected["groups"] == [
            ["1.1.0.weight"], ["1.0.0.bias", "1.1.0.bias", "2.bias"], ["1.0.0.weight", "2.weight"]
        ]  # fmt: skip
        assert expected["initial rates"] == [0.025, 0.05, 0.05]
        assert all(torch.equal(expected["tensors"][f"0.{name}"], one) for name, one in deep()[0].named_parameters())


@pytest.mark.parametrize(("kind", "source", "target"), thinned(RESUMED, RESUMED[:4]))
def test_kinds_resume(results: Any, kind: str, source: str, target: str) -> None:
    """To the bit on the same backend."""
    runs = (results[f"{kind}-{name}"] for name in (target, f"cut-{source}", f"{source}-{target}"))
    for straight, cut, resumed in zip(*runs, strict=source == target):
        assert cut["rates"] + resumed["rates"] == straight["rates"] and len(set(straight["rates"])) > 3
        assert gap(resumed["tensors"], straight["tensors"]) <= (0 if source == target else 1e-5)


def test_ranks_with_different_clocks_take_the_same_steps(results: Any) -> None:
    """With the rate of the main rank's clock; the run ends when the first of the clocks is there."""
    first, second = results["clock"]
    assert first == second and first["reason"] == "max_duration" and len(first["evaluated"]) >= 2
    assert first["rates"] == pytest.approx([0.045, 0.04, 0.035, 0.03, 0.025], abs=5e-4)


def test_muon_is_an_error_with_zero(results: Any) -> None:
    for rank in results["muon-zero2"]:
        assert rank["error"] == "ConfigError" and "`optimizer='muon'` does not work with DeepSpeed" in rank["message"]
