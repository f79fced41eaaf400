"""Objects with `state_dict` and `load_state_dict` that are no callbacks: optimizers, units, datasets, losses."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import TRAINERS, make_small
from recipes import StopAt, callback, fit, rows, same
from resuming import Cut, Killed, assert_same
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

from omnitrain import Algorithm, Callback, CheckpointError, ConfigError


class Counter:
    """Counts its calls, which change what it returns; the count is its state, a part of it a tensor."""

    def __init__(self) -> None:
        self.calls, self.sums = 0, torch.zeros(2)

    def count(self) -> float:
        self.calls += 1
        self.sums += 1
        return 1.0 + float(self.sums[0]) / 10 + self.calls / 100

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.sums = state["calls"], state["sums"].clone()


class Collate(Counter):
    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x * self.count(), y


class Data(Counter, Dataset[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = rows(24, torch.float32).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * self.count(), self.y[index]


class Loss(Counter):
    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, labels) * self.count()


class Unit(Counter):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __call__(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1]) * self.count()


class UnitModule(nn.Module):
    """Has the model, and a buffer of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scale", torch.ones(()))

    def forward(self, batch: Any) -> torch.Tensor:
        self.get_buffer("scale").mul_(1.1)
        return F.mse_loss(self.model(batch[0]), batch[1]) * self.get_buffer("scale")


class Lookahead(torch.optim.SGD):
    """Every second step goes half of the way from slow weights, which its state has under a key of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.fast = [parameter for group in self.param_groups for parameter in group["params"]]
        self.slow, self.count = [parameter.detach().clone() for parameter in self.fast], 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1
        for slow, parameter in zip(self.slow, self.fast, strict=True) if self.count % 2 == 0 else ():
            parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": dict(enumerate(self.slow)), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.slow = [tensor.clone() for tensor in state_dict["slow"].values()]
        self.count = state_dict["count"]


class Loose(Lookahead):
    """With a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict(), "slow": self.slow}


PARTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "module": lambda model: {"unit": UnitModule(model), "loss_fn": None},
    "loss": lambda model: {"loss_fn": Loss()},
    "subset": lambda model: {"data": Subset(Data(), range(1, 24))},
}


def build(kind: str, part: str | None, save_dir: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    defaults: dict[str, Any] = {
        "data": rows(24, torch.float32), "max_steps": 8, "learning_rate": 0.05, "optimizer": "torch.optim.SGD",
        "save_steps": 2 if save_dir else None, **(PARTS[part](model) if part else {}),
    }  # fmt: skip
    return make_small(kind, model, save_dir=save_dir, **{**defaults, **options})


class Noting(Counter, Callback):
    def on_step_end(self, trainer: Any) -> None:
        self.count()


class Scaled(Counter, Algorithm):
    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.count()


class Stopper(Counter):
    def __call__(self, step: int, score: float) -> bool:
        return self.count() > 100


def train_everything(kind: str, folder: Path | None = None, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
    """Train with all that has a state by the documentation; return the states at the end by their names there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    parts = {"unit": Unit(model), "early_stopper": Stopper(), "data_collator": Collate()}
    data, noting, scaled = Data(), Noting(), Scaled()
    trainer = make_small(
        kind, model, data, **parts, loss_fn=None, eval_dataset=rows(8, torch.float32), eval_steps=2, max_steps=8,
        optimizer=Lookahead, learning_rate=0.05, lr_scheduler="cosine", save_dir=folder, algorithms=[scaled],
        save_steps=1 if folder else None, load_best_at_end=False, callbacks=[noting, *callbacks],
    )  # fmt: skip
    trainer.train(**arguments)
    counters = {**parts, "train_dataset": data, "callbacks": noting, "algorithms": scaled}
    return {
        **{name: part.state_dict() for name, part in counters.items()},
        "model": trainer.get_model().state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "lr_scheduler": {"rates": trainer.lr_scheduler.get_last_lr(), "step": trainer.lr_scheduler.last_epoch},
        "progress": {**trainer.progress.state_dict(), "seconds": 0, "history": trainer.metrics["valid"]},
    }


@pytest.mark.parametrize(("source", "target"), [("native", "hf"), ("hf", "accelerate"), ("accelerate", "native")])
def test_states_of_the_table_survive_a_kill_and_a_move(source: str, target: str, tmp_path: Path) -> None:
    """To the bit: all that the documentation lists."""
    expected = train_everything(target)
    with pytest.raises(Killed):
        train_everything(source, tmp_path, Cut("kill", 5))
    assert_same(train_everything(target, tmp_path, resume_from="auto"), expected)
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    table = text.partition("## What a state is")[2].partition("\n## ")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert listed == {*expected, "loss_fn"}  # with a unit it is unused: `PARTS` has it


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_state_of_parts_survives_a_resume(kind: str, part: str, tmp_path: Path) -> None:
    """On the next trainer, too, bit for bit, and evaluations leave it unchanged."""
    evaluations: dict[str, Any] = {}
    if part == "subset":  # the others run in evaluations, too, and handle these themselves
        evaluations = {"eval_dataset": rows(8, torch.float32), "eval_steps": 3, "load_best_at_end": False}
    straight = fit(build(kind, part))
    build(kind, part, tmp_path, callbacks=[StopAt(5)], **evaluations).train()
    resumed = fit(build("hf" if kind == "native" else kind, part, tmp_path, **evaluations), resume_from="auto")
    assert same(resumed.model.parameters(), straight.model.parameters())


def test_states_that_cannot_be_saved_are_an_error(tmp_path: Path) -> None:
    """Before the first step, and nothing is written."""
    with pytest.raises(ConfigError, match=r"`data_collator` \(Collate\) has a state_dict\(\), and num_workers=1"):
        build("native", None, tmp_path, data_collator=Collate(), num_workers=1).train()
    with pytest.raises(CheckpointError, match=r"`optimizer` \(Loose\) has a state_dict\(\) with 'base', 'slow'"):
        build("native", None, tmp_path, optimizer=Loose).train()
    assert not list(tmp_path.glob("checkpoint*"))
    build("native", None, optimizer=Loose).train()  # without checkpoints it is nobody's business


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("kind", TRAINERS)
def test_schedule_by_epoch_resumes_at_the_end_of_an_epoch(kind: str, tmp_path: Path) -> None:
    """Which moves it before this process has made an update: no reason for PyTorch to warn."""

    def kill_after_save(trainer: Any) -> None:
        if trainer.progress.step == 6:  # at the end of an epoch, before the epoch is over
            raise Killed

    options = {"lr_scheduler": "linear", "scheduler_interval": "epoch", "max_steps": None, "epochs": 3}
    with pytest.raises(Killed):
        build(kind, "loss", tmp_path, callbacks=[callback(on_save_end=kill_after_save)], **options).train()
    assert fit(build(kind, "loss", tmp_path, **options), resume_from="auto").progress.step == 18
