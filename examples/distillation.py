"""Distillation: a small network learns from the probabilities of a large one, on images without labels.

    python examples/distillation.py

A unit computes the loss of a batch, and may call several models. The student has 1,300 handwritten digits, 100 of them
with labels. Trained on those, it reads less than half of the others; taught by the teacher on all, more than 80 %.
In plain PyTorch: about 38 lines for loops, both losses and the best weights; with unit and trainer 27.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from omnitrain import StepOutput, Trainer


class Distillation:
    """How far the student is from the teacher; at a higher temperature, unlikely classes count more."""

    def __init__(self, student: nn.Module, teacher: nn.Module, temperature: float = 1.5) -> None:
        self.student, self.teacher = student, teacher.eval().requires_grad_(False)
        self.temperature = temperature

    def __call__(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, _ = batch
        teacher_scores = F.log_softmax(self.teacher(images) / self.temperature, dim=1)
        student_scores = F.log_softmax(self.student(images) / self.temperature, dim=1)
        return F.kl_div(student_scores, teacher_scores, reduction="batchmean", log_target=True) * self.temperature**2

    def evaluate(self, batch: tuple[Tensor, Tensor]) -> StepOutput:
        images, labels = batch
        logits = self.student(images)
        return StepOutput(F.cross_entropy(logits, labels), logits, labels)


def network(width: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))


def main(epochs: int = 20) -> dict[str, float]:
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits, dtype=torch.float32) / 16, torch.tensor(classes)
    results: dict[str, float] = {}

    def train(name: str, model: nn.Module, samples: int, **options: Any) -> None:
        trainer = Trainer(
            model,
            (images[:samples], labels[:samples]),
            (images[1300:], labels[1300:]),
            compute_metrics="accuracy",
            epochs=epochs,
            batch_size=32,
            eval_batch_size=500,
            learning_rate=1e-2,
            lr_scheduler="cosine",
            progress_bar=False,
            **options,
        )
        results[name] = trainer.train()["best_valid"]["accuracy"]
        weights = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {weights} weights, accuracy {results[name]:.3f}")

    torch.manual_seed(0)  # the weights that the networks start from
    teacher, student, alone = network(256, dropout=0.3), network(6), network(6)
    alone.load_state_dict(student.state_dict())
    train("teacher, 1,300 labels", teacher, 1300, loss_fn=F.cross_entropy)
    train("student, 100 labels", alone, 100, loss_fn=F.cross_entropy)
    train("student, taught by the teacher", student, 1300, unit=Distillation(student, teacher))
    return results


if __name__ == "__main__":
    main()
