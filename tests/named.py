"""Parts of runs that configuration files name: models, data, losses and callbacks."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from omnitrain import Callback, StepOutput, Trainer


class Net(nn.Module):
    """A classifier with arguments of many types."""

    def __init__(
        self,
        width: int = 8,
        activation: nn.Module | None = None,
        kind: Literal["plain", "deep"] = "plain",
        sizes: tuple[int, int] = (4, 2),
        scale: float = 1.0,
        init: Callable[[torch.Tensor], Any] | None = None,
        folder: Path | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = nn.ReLU() if activation is None else activation
        self.kind, self.scale, self.folder, self.sizes = kind, scale, folder, sizes
        self.body = nn.Sequential(
            nn.Linear(sizes[0], width), self.activation, nn.Dropout(dropout), nn.Linear(width, sizes[1])
        )
        if init is not None:
            init(next(self.body.parameters()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.body(x)


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


@dataclasses.dataclass
class Options:
    width: int = 8


class Typed(nn.Module):
    """Keeps arguments of more types, some of which name functions and classes at several depths."""

    def __init__(
        self,
        first: Any = None,
        /,
        color: Color | None = None,
        options: Options | None = None,
        device: torch.device | None = None,
        functions: dict[str, Callable[..., Any]] | None = None,
        modules: dict[str, nn.Module] | None = None,
        kind: type[nn.Module] = nn.ReLU,
        weight: torch.Tensor | None = None,
        either: int | nn.Module | None = None,
        pair: tuple[Callable[..., Any], int] | None = None,
        lists: list[list[Callable[..., Any]]] | None = None,
    ) -> None:
        super().__init__()
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.given, self.layer = given, nn.Linear(4, 2)


class Texts(nn.Linear):
    """Keeps arguments that may be texts."""

    def __init__(
        self,
        untyped=None,  # type: ignore[no-untyped-def]
        anything: Any = None,
        maybe: str | None = None,
        either: int | str = 0,
        choice: Literal["7", "true"] = "7",
        listed: list[Any] | None = None,
        bare: list = [],  # type: ignore[type-arg]  # noqa: B006
        pair: tuple[int, str] = (0, ""),
        mapped: dict[str, int | str] | None = None,
        nested: Any = None,
        number: int | None = None,
        switch: bool = False,
    ) -> None:
        super().__init__(4, 2)
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


class Own(nn.Module):
    """Computes its own loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = Net(**options)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class MySGD(torch.optim.SGD):
    """An optimizer of one's own."""


def rows(size: int = 32, seed: int = 0) -> TensorDataset:
    """Samples that do not depend on the seed of the run."""
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def drawn(size: int = 32) -> TensorDataset:
    """Samples that depend on the seed of the run."""
    inputs = torch.randn(size, 4)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def dicts(size: int = 32) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for x, y in rows(size)]


def loader(dataset: Any, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size)


CONSTANT = rows(16, seed=5)


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels)


def weighted_loss(outputs: torch.Tensor, labels: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    return weight * F.cross_entropy(outputs, labels)


def collate(samples: list[Any]) -> Any:
    return tuple(map(torch.stack, zip(*samples, strict=True)))


def make_collate(times: float = 1.0) -> Callable[[list[Any]], Any]:
    return functools.partial(_collate_times, times=times)


def _collate_times(samples: list[Any], times: float) -> Any:
    inputs, labels = collate(samples)
    return times * inputs, labels


def share_of_ones(predictions: Any, labels: Any) -> dict[str, float]:
    return {"ones": float((predictions == 1).mean())}


def stop_early(step: int, score: float) -> bool:
    return step >= 8


class Unit:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, batch: Any) -> StepOutput:
        inputs, labels = batch
        logits = self.model(inputs)
        return StepOutput(F.cross_entropy(logits, labels, reduction="sum"), len(labels))


class Counts(Callback):
    """A callback with arguments."""

    def __init__(self, every: int = 1, *, name: str = "steps") -> None:
        self.every, self.name, self.seen = every, name, 0

    def on_step_end(self, trainer: Any) -> None:
        self.seen += 1


class MyTrainer(Trainer):
    """A trainer with the constructor that it inherits."""


class OtherTrainer(Trainer):
    """A trainer with a constructor of its own."""

    def __init__(self, *args: Any, weight: float = 1.0, **kwargs: Any) -> None:
        self.weight = weight
        super().__init__(*args, **kwargs)


def fails() -> None:
    raise RuntimeError("no data today")


def slow() -> None:
    raise AssertionError("this was called by a check")
