"""The probes on transformers.Trainer."""

from __future__ import annotations

import shutil
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
from torch import Tensor
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments


class StopAt(TrainerCallback):
    """Ends the run at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


class FirstStep(TrainerCallback):
    """Notes the first step that a run takes."""

    step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = self.step or state.global_step


def arguments(folder: Path | str, **settings: Any) -> TrainingArguments:
    settings = {
        "num_train_epochs": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_strategy": "no", **settings,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **settings)


def r1(folder: Path) -> Facts:
    def train(batch_size: int) -> list[Tensor]:
        model = Tagger()
        args = arguments(folder, per_device_train_batch_size=batch_size, gradient_accumulation_steps=8 // batch_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(model, args, train_dataset=Sentences(), optimizers=(optimizer, None)).train()  # type: ignore[arg-type]
        return weights(model)

    whole = train(8)
    return {"difference": distance(whole, train(1)), "update": distance(whole, weights(Tagger()))}


def r2(folder: Path) -> Facts:
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = seen_gradients(optimizer)
    data: Any = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 3
    args = arguments(folder, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    Trainer(model, args, train_dataset=data, optimizers=(optimizer, None)).train()  # type: ignore[arg-type]
    return {"gradients": gradients}


def leg(folder: Path, noise: bool, workers: int, *, stop: int | None, resume: bool) -> Regressor:
    new_process()
    model = Regressor()
    args = arguments(
        folder, per_device_train_batch_size=4, dataloader_num_workers=workers, learning_rate=1e-2,
        save_strategy="steps", save_steps=7,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=Rows(noise=noise), callbacks=[StopAt(stop)] if stop else [])
    trainer.train(resume_from_checkpoint=True if resume else None)
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
    with Listener("transformers", "accelerate") as before:
        first = leg(folder, False, 0, stop=7, resume=False).stream
    with Listener("transformers", "accelerate") as after:
        second = leg(folder, False, 0, stop=None, resume=True).stream
    return {"before": first, "after": second, "said": sorted(after - before)}


def r5(folder: Path) -> Facts:
    def resume(run: Path, stop: int = 15, resumes: bool = True) -> Facts:
        new_process()
        model, first = Regressor(), FirstStep()
        args = arguments(
            run, num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="linear",
            save_strategy="steps", save_steps=5,
        )  # fmt: skip
        try:
            with Listener("transformers", "accelerate") as messages:
                trainer = Trainer(model, args, train_dataset=Rows(20), callbacks=[first, StopAt(stop)])
                trainer.train(resume_from_checkpoint=resumes)
        except Exception as error:
            return {"error": type(error).__name__}
        return {"first_step": first.step, "weights": weights(model), "said": messages}

    run = folder / "first"
    resume(run, stop=10, resumes=False)
    return outcomes({name: resume(copy) for name, copy in damaged_copies(run, run / "checkpoint-10")})


def r6(folder: Path) -> Facts:
    def direction(name: str) -> str:
        args = arguments(
            folder, metric_for_best_model=name, load_best_model_at_end=True, eval_strategy="steps", eval_steps=1,
            save_strategy="steps", save_steps=1,
        )  # fmt: skip
        return "max" if args.greater_is_better else "min"

    return {name: direction(name) for name in (*DIRECTIONS, "foo")}


def r7(folder: Path) -> Facts:
    new_process()
    model, error = Regressor(), ""
    args = arguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-2, logging_strategy="steps",
        logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=Rows(nan_at=5))
    try:
        trainer.train()
    except Exception as raised:
        error = type(raised).__name__
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {
        "steps": trainer.state.global_step, "of": 30, "finite": are_finite(model), "error": error,
        "logged": "finite" if all(torch.tensor(logged).isfinite()) else "NaN",
    }  # fmt: skip


def r8(folder: Path) -> Facts:
    def train(**settings: Any) -> list[Tensor]:
        new_process()
        model = Regressor()
        args = arguments(folder, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-2, **settings)
        Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(20)).train()
        return weights(model)

    return {"difference": distance(train(), train(eval_strategy="steps", eval_steps=3))}


def r9(folder: Path) -> Facts:
    def train(run: Path, stop: int | None, resume: bool, **settings: Any) -> int:
        new_process()
        args = arguments(
            run, num_train_epochs=2, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2,
            save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
            **settings,
        )  # fmt: skip
        callbacks = [EarlyStoppingCallback(3), *([StopAt(stop)] if stop else [])]
        trainer = Trainer(Clock(), args, train_dataset=Rows(), eval_dataset=Rows(4), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=True if resume else None)
        return trainer.state.global_step

    straight = train(folder / "a", None, False)
    train(folder / "b", 6, False)
    shutil.copytree(folder / "b", folder / "c")
    resumed = train(folder / "b", None, True)
    option = "restore_callback_states_from_checkpoint"
    return {
        "straight": straight,
        "resumed": resumed,
        f"{option}=True": train(folder / "c", None, True, **{option: True}),
    }
