"""Two trainers of one's own: one with a loop written by hand, one that trains several tasks at once.

    python examples/custom_trainer.py

Both keep what `Trainer` offers around the loop: evaluation, early stopping, logs, the MetricsDict. They train on small
real sets that scikit-learn ships, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from omnitrain import BaseTrainer, ConfigError, MetricsDict, Trainer

# --- a loop written by hand


class CustomTrainer(BaseTrainer):
    """Overrides three methods; in fp16 on a GPU it scales its loss, in any other precision the scaler does nothing."""

    def _setup_training_components(self) -> None:
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision.name == "fp16")

    def _prepare_batch(self, batch: Any) -> Any:
        pixels, labels = batch
        return pixels.to(self.device) / 16, labels.to(self.device)

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        total_loss = torch.zeros((), device=self.device)  # reading it in every step would make a GPU wait
        for batch in self.train_loader:
            pixels, labels = self._prepare_batch(batch)
            with self._autocast():
                loss = F.cross_entropy(self.model(pixels), labels)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total_loss += loss.detach()
        return total_loss.item() / len(self.train_loader)


def train_by_hand(epochs: int = 10) -> MetricsDict:
    pixels, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    samples = TensorDataset(pixels.float(), labels)
    train, valid = random_split(samples, [1497, 300], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    trainer = CustomTrainer(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        train,
        valid,
        loss_fn=F.cross_entropy,  # for the evaluation
        compute_metrics="accuracy",
        optimization_metric="accuracy",
        epochs=epochs,
        patience=3,
        batch_size=32,
        learning_rate=3e-3,
        autocast="fp16" if torch.cuda.is_available() else "fp32",  # a CPU has no fp16
        log_steps="1ep",
    )
    return trainer.train()


# --- several tasks, one model


class MultiTaskTrainer(Trainer):
    """Takes one batch of every task in each step, and minimizes the weighted sum of their losses.

    An epoch ends with the smallest task. The steps of the epoch are taken with the trainer's own hooks, so that fp16
    and clipping work as in `Trainer`.

    Args:
        model: The model; its `forward` is told the task by the batch.
        task_datasets: The samples of each task, by its name.
        task_weights: How much each task counts; 1.0 for every one that is not named.
        kwargs: What `Trainer` takes. There is no `train_dataset`.
    """

    def __init__(
        self,
        model: nn.Module,
        task_datasets: Mapping[str, Any],
        task_weights: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        unknown = set(task_weights or {}) - set(task_datasets)
        if unknown:
            raise ConfigError(f"`task_weights` names {sorted(unknown)}, but the tasks are {sorted(task_datasets)}.")
        super().__init__(model, **kwargs)
        self.task_weights = {**dict.fromkeys(task_datasets, 1.0), **(task_weights or {})}
        self.task_loaders = {
            task: DataLoader(dataset, batch_size=self.batch_size, shuffle=True)
            for task, dataset in task_datasets.items()
        }

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        total_loss, steps = torch.zeros((), device=self.device), 0
        for batches in zip(*self.task_loaders.values(), strict=False):
            for task, batch in zip(self.task_loaders, batches, strict=True):
                batch = self._prepare_batch(batch)
                with self._autocast():
                    loss = self.task_weights[task] * self._forward(self.model, batch).loss
                self._backward(loss)  # adds to the gradients of the tasks before
                total_loss += loss.detach()
            self._clip_gradients()
            self._apply_update()
            self.optimizer.zero_grad()
            steps += 1
        return total_loss.item() / steps


class SharedBody(nn.Module):
    """One network for all tasks, with an entrance and an exit for each."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]], width: int = 32) -> None:
        super().__init__()
        self.entrances = nn.ModuleDict({task: nn.Linear(features, width) for task, (features, _) in sizes.items()})
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.exits = nn.ModuleDict({task: nn.Linear(width, classes) for task, (_, classes) in sizes.items()})

    def forward(self, inputs: Tensor, task: list[str]) -> Tensor:
        return self.exits[task[0]](self.body(self.entrances[task[0]](inputs)))


def load_task(task: str, features: Any, classes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the samples of a task, each of which names it, to train on and to evaluate on."""
    train, valid = train_test_split(range(len(classes)), test_size=0.25, random_state=0, stratify=classes)
    inputs = torch.tensor(features, dtype=torch.float32)
    inputs = (inputs - inputs[train].mean(dim=0)) / inputs[train].std(dim=0)
    samples = [{"inputs": inputs[i], "labels": int(classes[i]), "task": task} for i in range(len(classes))]
    return [samples[i] for i in train], [samples[i] for i in valid]


def train_two_tasks(epochs: int = 20) -> MetricsDict:
    tasks = {
        "wine": load_task("wine", *load_wine(return_X_y=True)),
        "cancer": load_task("cancer", *load_breast_cancer(return_X_y=True)),
    }
    torch.manual_seed(0)
    trainer = MultiTaskTrainer(
        SharedBody({"wine": (13, 3), "cancer": (30, 2)}),  # features and classes of each
        task_datasets={task: train for task, (train, _) in tasks.items()},
        task_weights={"wine": 0.5},
        eval_dataset={task: valid for task, (_, valid) in tasks.items()},  # eval_wine_accuracy, eval_cancer_accuracy
        loss_fn=F.cross_entropy,
        compute_metrics="accuracy",
        epochs=epochs,
        patience=5,
        batch_size=16,
        learning_rate=3e-3,
        log_steps="1ep",
    )
    return trainer.train()


def main(epochs: int | None = None) -> tuple[MetricsDict, MetricsDict]:
    lengths = {} if epochs is None else {"epochs": epochs}
    print("A loop written by hand:")
    by_hand = train_by_hand(**lengths)
    print(by_hand, "\n\nTwo tasks, one model:")
    two_tasks = train_two_tasks(**lengths)
    print(two_tasks)
    return by_hand, two_tasks


if __name__ == "__main__":
    main()
