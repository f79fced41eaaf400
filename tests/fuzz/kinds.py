"""Kinds of models and data that fuzzed runs train; each is the text of its arguments, for readable failures."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401
from accelerate import FullyShardedDataParallelPlugin  # noqa: F401  (texts refer to it, as to others below)
from counting import Resumable, Streamed  # noqa: F401
from recipes import Holding, Sentences, Tagger, rows, t16  # noqa: F401
from resuming import Net, Numbered, Overflowing  # noqa: F401
from tiny import Short, Tokens, gpt  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate  # noqa: F401
from transformers import DataCollatorWithFlattening  # noqa: F401

import omnitrain
from omnitrain import Max, StepOutput, Sum

SIZE = 22
"""Samples of an epoch: no multiple of any batch, so that the last step is short."""


class Block(nn.Module):
    """A residual layer, which `StochasticDepth` can skip and `gradient_checkpointing` can recompute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Classifier(nn.Module):
    """4 numbers -> 3 classes, through two blocks; without anything random or that compares samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(torch.tanh(self.embed(x))))


class Scaled(Classifier):
    """The same in bf16 for one number, with a parameter of no dimension, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(6, 1), nn.Parameter(torch.tensor(1.5))
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, :4]) * self.scale


class Tied(Tagger):
    """Classes of tokens, by an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__(classes=11)
        self.out.weight = self.embed.weight


class Heads(Classifier):
    """The same with a head of one number, for the other of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Linear(6, 1).double()

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        hidden = self.blocks(torch.tanh(self.embed(x)))
        return (self.head if task == "class" else self.number)(hidden)


class Uneven(list[dict[str, torch.Tensor]]):
    """Sequences of 1 to 6 tokens, each with a label."""

    def __init__(self, size: int) -> None:
        data = Sentences(size)
        lengths = [1 + i * 5 % 6 for i in range(size)]
        super().__init__(
            {"ids": data.ids[i, :length], "labels": data.ids[i, :length] % 5} for i, length in enumerate(lengths)
        )


class Measured(Holding):
    """A unit with metrics that are not means."""

    def __call__(self, batch: Any) -> Any:
        loss, count = super().__call__(batch)
        sizes = batch[0].detach().abs()
        metrics = {"count": Sum(count), "seen": Sum(count, running=True), "largest": Max(sizes.max())}
        return StepOutput(loss, num_targets=count, metrics=metrics)


def classes(size: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Rows of 4 numbers and one of 3 classes."""
    generator = torch.Generator().manual_seed(7 + size)
    inputs = torch.randn(size, 4, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(0, 3, (size,), generator=generator))


@dataclass(frozen=True)
class Kind:
    """A model and its data, as the text of arguments, and words that options refer to.

    The data are given a size; those to evaluate are of the same kind, unless `evaluation` has others.
    `traits`: "commutes" if another split of a step gives the same numbers; "map" if the order can be shuffled;
    "single" where transformers computes the loss in single precision, whatever the model has; "singles" where an item
    of the data is a batch.
    """

    model: str
    data: str
    arguments: str
    traits: str
    evaluation: str = ""


KINDS = {
    "mlp": Kind("Classifier()", "classes({})", "loss_fn=F.cross_entropy", "map commutes classes fp64 blocks"),
    "mlp fp32": Kind("Classifier().float()", "classes({}, torch.float32)", "loss_fn=F.cross_entropy",
                     "map commutes classes fp32 blocks"),
    "batch norm": Kind("Net()", "Numbered({})", "loss_fn=F.mse_loss", "map batch_norm fp64 regression random"),
    "fp32": Kind("Net(torch.float32)", "Numbered({}, dtype=torch.float32)", "loss_fn=F.mse_loss",
                 "map batch_norm fp32 regression random"),
    "nonfinite": Kind("Overflowing(torch.float32)", "Numbered({}, dtype=torch.float32)", "loss_fn=F.mse_loss, "
                      "on_nonfinite='skip'", "map batch_norm fp32 regression random skips"),
    "scalar": Kind("Scaled()", "Numbered({}, dtype=torch.bfloat16)", "loss_fn=F.mse_loss",
                   "map bf16 blocks regression"),
    "tied": Kind("Tied()", "Sentences({})", "", "map commutes tokens fp64 tied"),
    "gpt2": Kind("gpt()", "Tokens({})", "", "map commutes single tokens fp64 gpt2"),
    "gpt2 fp32": Kind("gpt().float()", "Tokens({})", "", "map commutes single tokens fp32 gpt2"),
    "packed": Kind("gpt()", "PackedDataset(Short({0} * 2), 16)", "", "map commutes single tokens fp64 gpt2"),
    "flattened": Kind("gpt()", "Short({})", "data_collator=DataCollatorWithFlattening()",
                      "map commutes single tokens fp64 gpt2 rows"),
    "unit": Kind("t16()", "rows({})", "unit=Holding(model)", "map commutes fp64 unit"),
    "metrics": Kind("t16()", "rows({})", "unit=Measured(model)", "map commutes fp64 unit"),
    "tasks": Kind("Heads()", "MultiTask({{'class': classes(14), 'number': rows(9)}}, epoch_size={})",
                  "unit=MultiTaskUnit(model, {'class': F.cross_entropy, 'number': F.mse_loss}, {'number': 0.5})",
                  "map commutes fp64 unit tasks",
                  "MultiTask({'class': classes(9), 'number': rows(9)}).evaluation({'number': rows(7)})"),
    "by tokens": Kind("Tagger()", "BatchByTokens(Uneven({0} * 2 + 19), 12)", "",
                      "map commutes tokens fp64 singles", "Uneven(9)"),
    "stream": Kind("Classifier()", "Streamed(classes({}))", "loss_fn=F.cross_entropy",
                   "endless commutes classes fp64 blocks"),
    "shards": Kind("Net()", "ShardedStream([Streamed(Numbered(11)), Streamed(Numbered(11))])", "loss_fn=F.mse_loss",
                   "endless batch_norm fp64 regression random shards", "Numbered(9)"),
    "loader": Kind("Classifier()", "DataLoader(classes({}), 4, shuffle=True)", "loss_fn=F.cross_entropy",
                   "loader classes fp64 blocks", "classes(9)"),
    "own loader": Kind("Classifier()", "Resumable(classes({}), default_collate)", "loss_fn=F.cross_entropy",
                       "loader classes fp64 blocks", "classes(9)"),
}  # fmt: skip
NAMES: dict[str, Any] = {**{name: getattr(omnitrain, name) for name in omnitrain.__all__}, **globals()}
"""What the texts of kinds and options refer to."""
