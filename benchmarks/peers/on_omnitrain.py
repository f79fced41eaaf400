"""The probes on omnitrain's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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

from omnitrain import Callback, OmnitrainError, Trainer


class StopAt(Callback):
    """Ends the run at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step:
            trainer.stop()


class FirstStep(Callback):
    """Notes the first step that a run takes."""

    step = 0

    def on_step_end(self, trainer: Trainer) -> None:
        self.step = self.step or trainer.progress.step


def trainer_of(model: nn.Module, data: Any, **settings: Any) -> Trainer:
    settings = {"device": "cpu", "progress_bar": False, "epochs": 1, "max_grad_norm": None, **settings}
    return Trainer(model, data, **settings)


def r1() -> Facts:
    def train(batch_size: int) -> list[Tensor]:
        model = Tagger()
        trainer_of(
            model, Sentences(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=batch_size,
            gradient_accumulation_steps=8 // batch_size,
        ).train()  # fmt: skip
        return weights(model)

    whole = train(8)
    return {"difference": distance(whole, train(1)), "update": distance(whole, weights(Tagger()))}


def r2() -> Facts:
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = seen_gradients(optimizer)
    data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 3
    trainer_of(model, data, optimizer=optimizer, batch_size=1, gradient_accumulation_steps=2).train()
    return {"gradients": gradients}


def leg(save_dir: Path, noise: bool, workers: int, *, stop: int | None, resume: bool) -> Regressor:
    new_process()
    model = Regressor()
    trainer_of(
        model, Rows(noise=noise), batch_size=4, num_workers=workers, learning_rate=1e-2, save_dir=save_dir,
        callbacks=[StopAt(stop)] if stop else [],
    ).train(resume_from="last" if resume else None)  # fmt: skip
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
    with Listener() as before:
        first = leg(folder, False, 0, stop=7, resume=False).stream
    with Listener() as after:
        second = leg(folder, False, 0, stop=None, resume=True).stream
    return {"before": first, "after": second, "said": sorted(after - before)}


def r5(folder: Path) -> Facts:
    def resume(run: Path, stop: int = 15) -> Facts:
        new_process()
        model, first = Regressor(), FirstStep()
        trainer = trainer_of(
            model, Rows(20), epochs=3, batch_size=4, learning_rate=1e-2, lr_scheduler="linear", save_steps=5,
            save_dir=run, callbacks=[first, StopAt(stop)],
        )  # fmt: skip
        try:
            with Listener() as messages:
                trainer.train(resume_from="auto")
        except Exception as error:
            return {"error": type(error).__name__}
        return {"first_step": first.step, "weights": weights(model), "said": messages}

    run = folder / "first"
    resume(run, stop=10)
    return outcomes({name: resume(copy) for name, copy in damaged_copies(run, run / "checkpoint-10")})


def r6() -> Facts:
    def direction(name: str) -> str:
        try:
            return trainer_of(
                Regressor(),
                Rows(),
                eval_dataset=Rows(4),
                compute_metrics=lambda y_true, y_pred: {name: 0.0},
                optimization_metric=name,
            ).objective.direction
        except OmnitrainError as error:
            return type(error).__name__

    return {name: direction(name) for name in (*DIRECTIONS, "foo")}


def r7() -> Facts:
    model, last = Regressor(), {"step": 0}

    class Count(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            last["step"] = trainer.progress.step

    trainer = trainer_of(model, Rows(nan_at=5), epochs=2, batch_size=4, learning_rate=1e-2, callbacks=[Count()])
    error = ""
    try:
        trainer.train()
    except Exception as raised:
        error = type(raised).__name__
    return {"steps": last["step"], "of": 30, "finite": are_finite(model), "error": error}


def r8() -> Facts:
    def train(**settings: Any) -> list[Tensor]:
        new_process()
        model = Regressor()
        trainer_of(model, Rows(), epochs=2, batch_size=4, learning_rate=1e-2, **settings).train()
        return weights(model)

    return {"difference": distance(train(), train(eval_dataset=Rows(20), eval_steps=3, load_best_at_end=False))}


def r9(folder: Path) -> Facts:
    def train(run: Path, stop: int | None, resume: bool) -> int:
        new_process()
        trainer = trainer_of(
            Clock(), Rows(), eval_dataset=Rows(4), epochs=2, batch_size=4, eval_steps=2, save_steps=2, patience=3,
            save_dir=run, load_best_at_end=False, callbacks=[StopAt(stop)] if stop else [],
        )  # fmt: skip
        trainer.train(resume_from="last" if resume else None)
        return trainer.progress.step

    straight = train(folder / "a", None, False)
    train(folder / "b", 6, False)
    return {"straight": straight, "resumed": train(folder / "b", None, True)}
