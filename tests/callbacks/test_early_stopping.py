"""Stopping by patience is in test_parity.py; here is what the callback does by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from recipes import rows, t16

from omnitrain import ConfigError, EarlyStopping, Trainer


def run(**options: Any) -> Trainer:
    trainer = Trainer(
        t16(), rows(8), rows(4), loss_fn=F.mse_loss, device="cpu", progress_bar=False, epochs=5, **options
    )
    trainer.train()
    return trainer


def test_a_callable_gets_step_and_score_and_ends_the_run() -> None:
    seen: list[tuple[int, float]] = []

    def stopper(step: int, score: float) -> bool:
        seen.append((step, score))
        return step >= 2

    trainer = run(early_stopper=stopper)
    assert trainer.metrics["stop_reason"] == "early_stopping" and trainer.progress.step == 2
    assert seen == [(row["step"], row["eval_loss"]) for row in trainer.metrics["valid"]]


def test_it_may_be_given_as_a_callback_too() -> None:
    trainer = run(callbacks=[EarlyStopping(stopper=lambda step, score: True)])
    assert trainer.progress.epoch == 1


def test_minus_one_and_none_never_stop() -> None:
    assert run(patience=-1).progress.epoch == run(patience=None).progress.epoch == 5


@pytest.mark.parametrize("patience", [0, -2, 1.5, True, "3"])
def test_a_wrong_patience_is_refused_with_its_value(patience: Any) -> None:
    with pytest.raises(ConfigError, match="patience"):
        EarlyStopping(patience)


def test_a_stopper_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="stopper"):
        EarlyStopping(stopper=3)  # type: ignore[arg-type]
