"""When things are asked for, over a run that is only counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from omnitrain.callbacks.cadence import Cadence
from omnitrain.duration import Duration, Every, Limits
from omnitrain.events import Control
from omnitrain.progress import Progress


def asked(limits: Limits, **intervals: str | int | None) -> list[str]:
    """Run epochs of 4 steps of 5 samples until the end is asked for, and write down what is asked when."""
    every = {
        name: None if value is None else Every(Duration.parse(value, "ba", name), limits)
        for name, value in {"log": 100, "evaluate": None, "save": None, **intervals}.items()
    }
    cadence = Cadence(limits, every["log"], every["evaluate"], every["save"])  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(progress=Progress(epoch_size=20), control=Control())
    cadence.on_train_start(trainer)
    seen: list[str] = []

    def note(where: str) -> None:
        seen.extend(
            f"{name} {where}" for name in ("log", "evaluate", "save") if getattr(trainer.control.taken(name), name)
        )

    while not trainer.control.stop:
        for _ in range(4):
            trainer.progress.advance(samples=5)
            cadence.on_step_end(trainer)
            note(f"step {trainer.progress.step}")
            if trainer.control.stop:
                break
        trainer.progress.close_epoch(complete=trainer.progress.is_epoch_consumed)
        cadence.on_epoch_end(trainer)
        note(f"epoch {trainer.progress.epoch}")
    return [*seen, trainer.control.stop]


def test_steps_are_counted_over_epochs() -> None:
    assert asked(Limits(epochs=2), log=3) == ["log step 3", "log step 6", "epochs"]


def test_whole_epochs_are_asked_for_at_their_end_and_not_at_their_last_step() -> None:
    assert asked(Limits(epochs=2), evaluate="1ep", save="1ep") == [
        "evaluate epoch 1", "save epoch 1", "evaluate epoch 2", "save epoch 2", "epochs",
    ]  # fmt: skip


def test_parts_of_an_epoch_and_of_the_run() -> None:
    assert asked(Limits(epochs=1), evaluate="0.5ep") == ["evaluate step 2", "evaluate epoch 1", "epochs"]
    assert asked(Limits(max_steps=6), save="0.5dur") == ["save step 3", "save step 6", "max_steps"]


def test_samples_and_tokens_count_too() -> None:
    assert asked(Limits(epochs=1), log="10sp") == ["log step 2", "log step 4", "epochs"]


def test_a_run_that_has_reached_its_limit_already_does_not_start() -> None:
    limits = Limits(max_steps=3)
    cadence = Cadence(limits, Every(Duration.parse(1, "ba", "log_steps")), None, None)
    trainer: Any = SimpleNamespace(progress=Progress(step=3), control=Control())
    cadence.on_train_start(trainer)
    assert trainer.control.stop == "max_steps"
