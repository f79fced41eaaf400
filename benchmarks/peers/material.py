"""What the probes train: small models and datasets that write down what they see. Knows of no trainer."""

from __future__ import annotations

import itertools
import logging
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

Facts = dict[str, Any]
"""What one trainer did in one probe, as numbers and words; `probes.py` judges them by the same rule for all."""

DIRECTIONS = {
    "wer": "min", "perplexity": "min", "mae": "min", "rmse": "min", "error_rate": "min",
    "accuracy": "max", "f1": "max", "auc": "max", "bleu": "max", "r2": "max",
}  # fmt: skip
"""Which way each metric is better."""


def new_process(seed: int = 42) -> None:
    """Leave the global generators as a script does that has just been started and has seeded them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Tagger(nn.Module):
    """Predicts a class per token; its loss is the mean over the labels of the batch that are not -100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.embed(ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Sentences(Dataset[dict[str, Tensor]]):
    """Eight sequences of six tokens, of which one to six have a label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 11, (8, 6), generator=generator)
        self.labels = torch.randint(0, 5, (8, 6), generator=generator)
        for i in range(8):
            self.labels[i, 1 + i % 6 :] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index], "labels": self.labels[index]}


class Slope(nn.Module):
    """One weight, whose gradient is 1 for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * x).mean(), "logits": self.weight * x}


class Regressor(nn.Module):
    """4 -> 16 -> 1 with dropout; keeps the indices of the samples that it was trained on."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.stream: list[int] = []

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.stream += index.tolist()
        logits = self.body(x)
        return {"loss": F.mse_loss(logits, labels), "logits": logits}


class Clock(nn.Module):
    """Counts its training steps; the loss of an evaluation is that count, so the first one is the best."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.steps += 1
        loss = (self.weight * x).mean() if self.training else self.steps.clone()
        return {"loss": loss, "logits": self.weight * x[:, :1]}


class Rows(Dataset[dict[str, Tensor]]):
    """Fixed rows of four numbers and a target; with `noise`, an augmentation that draws from torch's generator."""

    def __init__(self, size: int = 60, noise: bool = False, nan_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 4, generator=generator)
        self.labels = torch.randn(size, 1, generator=generator)
        self.noise = noise
        if nan_at is not None:
            self.labels[nan_at] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index] + 0.1 * torch.randn(4) if self.noise else self.x[index]
        return {"x": x, "labels": self.labels[index], "index": torch.tensor(index)}


def weights(model: nn.Module) -> list[Tensor]:
    """Return a copy of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference between two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def are_finite(model: nn.Module) -> bool:
    """Return whether every weight is finite."""
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def seen_gradients(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return a list that gets the first gradient of each of the optimizer's steps."""
    gradients: list[float] = []

    def note(stepped: torch.optim.Optimizer, *_: Any) -> None:
        gradients.append(float(stepped.param_groups[0]["params"][0].grad.flatten()[0]))

    optimizer.register_step_post_hook(note)  # the closure that Lightning hands to `step` computes the last of them
    return gradients


class Listener(logging.Handler):
    """Collects what a trainer says as warnings, in either way that Python has."""

    def __init__(self, *loggers: str) -> None:
        super().__init__(logging.WARNING)
        self.loggers = [logging.getLogger(name) for name in ("", *loggers)]
        self.said: set[str] = set()
        self.warnings = warnings.catch_warnings(record=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.add(record.getMessage())

    def __enter__(self) -> set[str]:
        self.raised = self.warnings.__enter__()
        warnings.simplefilter("always")
        for logger in self.loggers:
            logger.addHandler(self)
        return self.said

    def __exit__(self, *_: object) -> None:
        self.said |= {str(warning.message) for warning in self.raised or ()}
        self.warnings.__exit__(None, None, None)
        for logger in self.loggers:
            logger.removeHandler(self)


def damaged_copies(run: Path, newest: Path) -> Iterator[tuple[str, Path]]:
    """Yield copies of a run folder, in one place: the first as it is, each other with one file of `newest` damaged."""
    copy = run.with_name("copy")
    files = [newest] if newest.is_file() else sorted(path for path in newest.rglob("*") if path.is_file())
    for file, how in [(newest, UNDAMAGED), *itertools.product(files, DAMAGES)]:
        shutil.copytree(run, copy)
        damage(copy / file.relative_to(run), how)
        yield UNDAMAGED if how == UNDAMAGED else f"{file.name} {how}", copy
        shutil.rmtree(copy)


def outcomes(facts: dict[str, Facts]) -> Facts:
    """Return what the resumes from these copies did, beside the one from the undamaged, for `probes.py` to judge."""
    whole, judged = facts.pop(UNDAMAGED), {}
    for name, fact in facts.items():
        judged[name] = fact
        if "error" not in fact:
            difference = distance(fact["weights"], whole["weights"])
            judged[name] = {
                **fact,
                "weights": None,
                "difference": difference,
                "said": sorted(fact["said"] - whole["said"]),
            }
    return judged


UNDAMAGED = "undamaged"
DAMAGES = ("missing", "cut to 20 bytes", "one bit flipped")


def damage(path: Path, how: str) -> None:
    """Do to a file what a crash, or a bad disk, does."""
    if how == UNDAMAGED:
        return
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut to 20 bytes":
        path.write_bytes(data[:20])
    elif how == "one bit flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
