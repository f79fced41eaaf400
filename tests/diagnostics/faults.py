"""Faults of models and data, also for copies of the examples, next to which this module is."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from omnitrain import Callback


class GradientWarmup(Callback):
    """Makes the gradients of the first steps smaller, and forgets its count in a resume."""

    def __init__(self) -> None:
        self.count = 0

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.count += 1
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(min(1.0, self.count / 1000))


class HeadDecay(TrainerCallback):
    """Shrinks the head of a model, less from step to step, and forgets its count in a resume."""

    count = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.count += 1
        model.classifier.weight.data.mul_(1 - 1 / (20 + self.count))


class RankNoise(Callback):
    """Draws random numbers on one rank, more from step to step, and forgets its count in a resume."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, trainer: Any) -> None:
        self.count += trainer.rank
        torch.rand(self.count)


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
