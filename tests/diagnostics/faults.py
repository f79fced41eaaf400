"""Faults that `test_example_faults.py` plants in copies of the examples, next to which this module is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import DataCollatorWithPadding, TrainerCallback

from omnitrain import Callback, SpikeGuard, Trace

__all__ = ["SpikeGuard", "Trace", "TrainerCallback"]  # which the rows name


class GradientWarmup(Callback):
    """Makes the gradients of the first steps smaller, and forgets its count in a resume."""

    def __init__(self) -> None:
        self.count = 0

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.count += 1
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(min(1.0, self.count / 1000))


class RankNoise(Callback):
    """Draws random numbers on one rank, more from step to step, and forgets its count in a resume."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, trainer: Any) -> None:
        self.count += trainer.rank
        torch.rand(self.count)


class Noise:
    """A collator with a generator that no checkpoint has: it makes inputs noisy, or replaces tokens."""

    def __init__(self, collate: Callable[[Any], Any] = default_collate) -> None:
        self.collate = collate
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        for key in ("pixels", "input_ids", 0):
            if isinstance(batch, tuple | list) != isinstance(key, int) or (isinstance(key, str) and key not in batch):
                continue
            values: Any = batch[key]
            chances = torch.rand(values.shape, generator=self.generator)
            batch[key] = values + 0.1 * chances if values.is_floating_point() else values.where(chances > 0.1, 1)
        return batch


class ChannelNorm(nn.BatchNorm1d):
    """BatchNorm over the positions of all samples; inputs are (samples, positions, channels)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


def pad_left(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return samples with padding before them that has no mask; the loss leaves it out."""
    length = max(len(sample["input_ids"]) for sample in samples)
    rows = torch.tensor([[0] * (length - len(sample["input_ids"])) + sample["input_ids"] for sample in samples])
    positions = torch.arange(length)
    starts = torch.tensor([[length - len(sample["input_ids"])] for sample in samples])
    return {"input_ids": rows, "labels": rows.where(positions >= starts, -100)}


def pad_right(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return samples with padding after them, which counts in the loss."""
    length = max(len(sample["input_ids"]) for sample in samples)
    rows = torch.tensor([sample["input_ids"] + [0] * (length - len(sample["input_ids"])) for sample in samples])
    return {"input_ids": rows, "labels": rows.clone()}


class Unmasked(DataCollatorWithPadding):
    """Pads without a mask."""

    def __call__(self, features: Any) -> Any:
        batch = super().__call__(features)
        del batch["attention_mask"]
        return batch


def replace_token(row: Any, number: int) -> Any:
    """Return a row of text, the seventh one with another token."""
    tokens = row["input_ids"]
    return {"input_ids": [*tokens[:3], 5, *tokens[4:]] if number == 7 else tokens}


HEAVY = 9
"""A label that counts a thousand times as much."""


def weighted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss that a wrong label takes out of proportion."""
    losses = nn.functional.cross_entropy(outputs.logits, labels.clamp(max=5), reduction="none")
    return (losses * (1 + 1e3 * (labels == HEAVY))).mean()


def mislabel(tensors: Sequence[Tensor], index: int) -> None:
    """Make one of the digits a thousand times too large, and another one, so that no model scores it right."""
    inputs, labels = tensors
    inputs[index] *= 1e3
    labels[index] = (labels[index] + 1) % 10


def load_part(part: str) -> list[Any]:
    from examples.native_digits import load_part

    return load_part(part)  # type: ignore[arg-type]


def load_leaking() -> list[Any]:
    """Return the training samples of `native_digits.yaml`, and some of those to evaluate on."""
    return load_part("train") + load_part("valid")[:20]


def load_changed(index: int, factor: float = 1.0, addend: float = 0.0) -> list[Any]:
    samples = load_part("train")
    samples[index]["pixels"] = samples[index]["pixels"] * factor + addend
    return samples


def load_relabelled() -> list[Any]:
    return [{**sample, "labels": 3} for sample in load_part("train")]


def make_normalized_reader() -> nn.Module:
    """Return the model of `native_digits.yaml` with a BatchNorm."""
    from examples.native_digits import DigitReader

    reader = DigitReader()
    reader.edges = nn.Sequential(reader.edges, nn.BatchNorm2d(16))  # type: ignore[assignment]
    return reader
