"""The probes on lightning.Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from material import (
    DIRECTIONS,
    Clock,
    Facts,
    Listener,
    Regressor,
    Rows,
    Sentences,
    Slope,
    Tagger,
    are_finite,
    damaged_copies,
    distance,
    new_process,
    outcomes,
    seen_gradients,
    weights,
)  # fmt: skip
from torch import Tensor, nn
from torch.utils.data import DataLoader

LOGGERS = ("lightning.pytorch", "lightning.fabric")


class Module(LightningModule):
    """Wraps a model that takes a dict batch and returns its loss."""

    def __init__(self, model: nn.Module, sgd: bool = False, decays: bool = False) -> None:
        super().__init__()
        self.model, self.decays = model, decays
        parameters = model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=0.1) if sgd else torch.optim.AdamW(parameters, lr=1e-2)
        )

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.model(**batch)["loss"]

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        if not self.decays:
            return self.optimizer
        scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, total_iters=15)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StopAt(Callback):
    """Ends the run at a step, after its evaluation if it has one."""

    def __init__(self, step: int, evaluates: bool = False) -> None:
        self.step, self.evaluates = step, evaluates

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.evaluates:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class FirstStep(Callback):
    """Notes the first step that a run takes."""

    step = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.step = self.step or trainer.global_step


def trainer_of(folder: Path, **settings: Any) -> Trainer:
    settings = {"max_epochs": 1, "enable_checkpointing": False, **settings}
    return Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, num_sanity_val_steps=0, **settings,
    )  # fmt: skip


def r1(folder: Path) -> Facts:
    def train(batch_size: int) -> list[Tensor]:
        module = Module(Tagger(), sgd=True)
        trainer_of(folder, accumulate_grad_batches=8 // batch_size).fit(module, DataLoader(Sentences(), batch_size))
        return weights(module.model)

    whole = train(8)
    return {"difference": distance(whole, train(1)), "update": distance(whole, weights(Tagger()))}


def r2(folder: Path) -> Facts:
    module = Module(Slope(), sgd=True)
    gradients = seen_gradients(module.optimizer)
    data: Any = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 3
    trainer_of(folder, accumulate_grad_batches=2).fit(module, DataLoader(data, 1))
    return {"gradients": gradients}


def leg(folder: Path, noise: bool, workers: int, *, stop: int | None, resume: bool, seeds: bool = True) -> Regressor:
    model = Regressor()
    if seeds:
        new_process()
    loader = DataLoader(Rows(noise=noise), 4, shuffle=True, num_workers=workers)
    saver = ModelCheckpoint(folder, "step-{step}", every_n_train_steps=7, save_top_k=-1)
    trainer = trainer_of(folder, callbacks=[saver, *([StopAt(stop)] if stop else [])], enable_checkpointing=True)
    trainer.fit(Module(model), loader, ckpt_path=folder / "step-step=7.ckpt" if resume else None)
    return model


def r3(folder: Path) -> Facts:
    facts = {}
    for noise in (False, True):
        for workers in (0, 2):
            name = f"{'random' if noise else 'plain'} data, {workers} workers"
            straight = leg(folder / f"{name} a", noise, workers, stop=None, resume=False)
            leg(folder / f"{name} b", noise, workers, stop=7, resume=False)
            resumed = leg(folder / f"{name} b", noise, workers, stop=None, resume=True)
            facts[name] = distance(weights(straight), weights(resumed))
    return facts


def r4(folder: Path) -> Facts:
    with Listener(*LOGGERS) as before:
        first = leg(folder, False, 0, stop=7, resume=False).stream
    with Listener(*LOGGERS) as after:
        second = leg(folder, False, 0, stop=None, resume=True).stream
    torch.manual_seed(987)
    unseeded = leg(folder, False, 0, stop=None, resume=True, seeds=False).stream
    return {"before": first, "after": second, "after, not seeded": unseeded, "said": sorted(after - before)}


def r5(folder: Path) -> Facts:
    def resume(run: Path, epochs: int = 3, resumes: bool = True) -> Facts:
        new_process()
        model, first = Regressor(), FirstStep()
        saver = ModelCheckpoint(run, every_n_train_steps=5, save_top_k=-1, save_last=True)
        trainer = trainer_of(run, max_epochs=epochs, callbacks=[first, saver], enable_checkpointing=True)
        loader = DataLoader(Rows(20), 4, shuffle=True)
        try:
            with Listener(*LOGGERS) as messages:
                trainer.fit(Module(model, decays=True), loader, ckpt_path="last" if resumes else None)
        except Exception as error:
            return {"error": type(error).__name__}
        return {"first_step": first.step, "weights": weights(model), "said": messages}

    run = folder / "first"
    resume(run, epochs=2, resumes=False)
    return outcomes({name: resume(copy) for name, copy in damaged_copies(run, run / "last.ckpt")})


def r6() -> Facts:
    return {name: ModelCheckpoint(monitor=name).mode for name in (*DIRECTIONS, "foo")}


def r7(folder: Path) -> Facts:
    new_process()
    model, error = Regressor(), ""
    trainer = trainer_of(folder, max_epochs=2)
    try:
        trainer.fit(Module(model), DataLoader(Rows(nan_at=5), 4, shuffle=True))
    except Exception as raised:
        error = type(raised).__name__
    return {"steps": trainer.global_step, "of": 30, "finite": are_finite(model), "error": error}


def r8(folder: Path) -> Facts:
    def train(*evaluation: Any, **settings: Any) -> list[Tensor]:
        new_process()
        model = Regressor()
        loader = DataLoader(Rows(), 4, shuffle=True)
        trainer_of(folder, max_epochs=2, **settings).fit(Module(model), loader, *evaluation)
        return weights(model)

    return {"difference": distance(train(), train(DataLoader(Rows(20), 4), val_check_interval=5))}


def r9(folder: Path) -> Facts:
    def train(run: Path, stop: int | None, resume: bool) -> int:
        new_process()
        saver = ModelCheckpoint(run, "step-{step}", monitor="val_loss", save_top_k=-1)  # after each validation
        callbacks = [EarlyStopping("val_loss", patience=3), saver, *([StopAt(stop, evaluates=True)] if stop else [])]
        trainer = trainer_of(run, max_epochs=2, callbacks=callbacks, enable_checkpointing=True, val_check_interval=2)
        loaders = DataLoader(Rows(), 4, shuffle=True), DataLoader(Rows(4), 4)
        path = run / "step-step=6.ckpt" if resume else None
        trainer.fit(Module(Clock(), sgd=True), *loaders, ckpt_path=path)
        return trainer.global_step

    straight = train(folder / "a", None, False)
    train(folder / "b", 6, False)
    return {"straight": straight, "resumed": train(folder / "b", None, True)}
