"""Faults of models and data, also for copies of the examples, next to which this module is."""

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


class Sentences(list[Any]):
    """Samples of 3 to 9 tokens, which are padded with 0, and a label, with a mask or without."""

    def __init__(self, has_mask: bool = False) -> None:
        super().__init__()
        for index in range(32):
            tokens = torch.randint(1, 20, (3 + index % 7,), generator=torch.Generator().manual_seed(index))
            mask = {"attention_mask": torch.ones_like(tokens)} if has_mask else {}
            self.append({"input_ids": tokens, **mask, "labels": int(tokens[0]) % 3})


class Pooled(nn.Module):
    """The mean of embeddings, of the padding too unless a mask is used."""

    def __init__(self, masks: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.head, self.masks = nn.Embedding(20, 8), nn.Linear(8, 3), masks
        self.head.weight.data.mul_(scale)  # a small one gives all samples almost the same scores

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        if attention_mask is None or not self.masks:
            return self.head(hidden.mean(1))
        mask = attention_mask[..., None]
        return self.head((hidden * mask).sum(1) / mask.sum(1))


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


def spoil(inputs: Tensor, index: int = 7) -> Tensor:
    """Return inputs of which one is a thousand times too large."""
    inputs = inputs.clone()
    inputs[index] *= 1e3
    return inputs


def mislabel(tensors: Sequence[Tensor], index: int) -> None:
    """Make one of the digits a thousand times too large, and another one, so that no model scores it right."""
    inputs, labels = tensors
    inputs[index] *= 1e3
    labels[index] = (labels[index] + 1) % 10


def load_leaking() -> list[Any]:
    """Return the training samples of `native_digits.yaml`, and some of those to evaluate on."""
    return load_part("train") + load_part("valid")[:20]


def load_spoilt() -> list[Any]:
    samples = load_part("train")
    samples[472]["pixels"] = samples[472]["pixels"] * 1e3
    return samples


def load_nudged() -> list[Any]:
    samples = load_part("train")
    samples[7]["pixels"] = samples[7]["pixels"] + 1e-3
    return samples


def load_relabelled() -> list[Any]:
    return [{**sample, "labels": 3} for sample in load_part("train")]


def load_part(part: str) -> list[Any]:
    from examples.native_digits import load_part

    return load_part(part)  # type: ignore[arg-type]


def make_normalized_reader() -> nn.Module:
    """Return the model of `native_digits.yaml` with a BatchNorm."""
    from examples.native_digits import DigitReader

    reader = DigitReader()
    reader.edges = nn.Sequential(reader.edges, nn.BatchNorm2d(16))  # type: ignore[assignment]
    return reader
