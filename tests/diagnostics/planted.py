"""A script that trains in a moment, with the fault that its first argument names, in the folder of its second."""

import random
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from omnitrain import AccelerateTrainer, Callback, Collator, Trainer


class Halving(Callback):
    """Halves the rate once, and forgets its count in a resume."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, trainer: Any) -> None:
        self.count += 1
        if self.count == 12:
            trainer.optimizer.param_groups[0]["lr"] *= 0.5


class Rejecting(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("cannot be restored")


class Noise:
    """A collator with a generator that no checkpoint has."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = Collator()(samples)
        return inputs + 0.1 * torch.randn(inputs.shape, generator=self.generator), targets


chance = random.Random(3)


def scale(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return a batch that depends on a generator of the module."""
    inputs, targets = Collator()(samples)
    return inputs * chance.uniform(0.9, 1.1), targets


def differ_by_kernels(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that differs from run to run unless kernels have to be deterministic, as on a GPU."""
    loss = nn.functional.mse_loss(outputs, targets)
    return loss if torch.are_deterministic_algorithms_enabled() else loss * (1 + time.time() % 1)


def has_no_kernel(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return such a loss of an operation without a deterministic kernel."""
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("nll_loss2d does not have a deterministic implementation")
    return differ_by_kernels(outputs, targets)


def main(fault: str, folder: str) -> None:
    if fault == "raises":
        raise RuntimeError("broken by itself")
    if fault == "trains nothing":
        return
    if fault != "unseeded":
        torch.manual_seed(0)
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    layers = [] if fault == "stateless" else [nn.BatchNorm1d(8), nn.Dropout(0.1)]
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 1))
    options: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss, "epochs": 5, "batch_size": 8, "learning_rate": 1e-2, "save_steps": 3,
        "save_dir": f"{folder}/run", "lr_scheduler": "cosine", "progress_bar": False,
    }  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "callback": {"callbacks": [Halving()], "lr_scheduler": None},
        "kernels": {"loss_fn": differ_by_kernels},
        "no kernel": {"loss_fn": has_no_kernel},
        "rejecting": {"callbacks": [Rejecting()]},
        "collator": {"data_collator": Noise()},
        "function": {"data_collator": scale},
        "late save": {"save_steps": 1000, "keep_best": 0},
        "clock": {"compute_metrics": lambda targets, outputs: {"pace": time.perf_counter()}},
        "time": {"compute_metrics": lambda targets, outputs: {"arrival_time": 1.0}},
        "no folder": {"save_dir": None, "save_steps": None},
        "only weights": {"save_only_model": True},
    }
    options |= changes.get(fault, {})
    if fault == "transformers":
        from transformers import TrainingArguments

        from omnitrain import HFTrainer

        args = TrainingArguments(
            f"{folder}/run", save_steps=3, eval_strategy="epoch", num_train_epochs=5, per_device_train_batch_size=8,
            use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        HFTrainer(model, args, data, data, loss_fn=nn.functional.mse_loss).train()
        return
    if fault == "two processes":
        AccelerateTrainer(model, data, data, eval_steps=4, **options).train()
        return
    trainer = Trainer(model, data, data, eval_steps=4, device="cpu", **options)
    trainer.train()
    if fault == "stateless":
        raise SystemExit("what comes after the steps is not run")
    if fault == "several runs":
        options["save_dir"] = f"{folder}/other"
        Trainer(model, data, device="cpu", **options).train(resume_from="auto")
        options |= {"save_dir": None, "save_steps": None, "epochs": 2}
        last = Trainer(model, data, device="cpu", **options)
        last.train()
        last.train()
        last.train(more=1)
        last.save_model(f"{folder}/model")


if __name__ == "__main__":
    main(*sys.argv[1:])
