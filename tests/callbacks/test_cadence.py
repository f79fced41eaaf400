"""Requests for logs, evaluations and checkpoints, over counted runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from omnitrain.callbacks.cadence import Cadence
from omnitrain.core.duration import Duration, Every, Limits
from omnitrain.core.events import Control
from omnitrain.core.progress import Progress


def requests(limits: Limits, **intervals: str | int | None) -> list[str]:
    """Count epochs of 4 steps of 5 samples until the end is requested; return the requests."""
    every = {
        name: None if value is None else Every(Duration.parse(value, "ba", name), limits)
        for name, value in {"log": 100, "evaluate": None, "save": None, **intervals}.items()
    }
    cadence = Cadence(limits, every["log"], every["evaluate"], every["save"])  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(progress=Progress(epoch_size=20), control=Control())
    cadence.on_train_start(trainer)
    noted: list[str] = []

    def note(moment: str) -> None:
        noted.extend(
            f"{name} {moment}" for name in ("log", "evaluate", "save") if getattr(trainer.control.pop(name), name)
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
    return [*noted, trainer.control.stop]


def test_intervals_in_any_unit_span_epochs() -> None:
    assert requests(Limits(epochs=2), log=3) == ["log step 3", "log step 6", "epochs"]
    assert requests(Limits(epochs=2), evaluate="1ep", save="1ep") == [
        "evaluate epoch 1", "save epoch 1", "evaluate epoch 2", "save epoch 2", "epochs",
    ]  # fmt: skip
    assert requests(Limits(epochs=1), evaluate="0.5ep") == ["evaluate step 2", "evaluate epoch 1", "epochs"]
    assert requests(Limits(max_steps=6), save="0.5dur") == ["save step 3", "save step 6", "max_steps"]
    assert requests(Limits(epochs=1), log="10sp") == ["log step 2", "log step 4", "epochs"]


def test_run_at_its_limit_stops_at_the_start() -> None:
    limits = Limits(max_steps=3)
    cadence = Cadence(limits, Every(Duration.parse(1, "ba", "log_steps")), None, None)
    trainer: Any = SimpleNamespace(progress=Progress(step=3), control=Control())
    cadence.on_train_start(trainer)
    assert trainer.control.stop == "max_steps"
