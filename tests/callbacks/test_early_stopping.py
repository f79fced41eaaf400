"""Stopping by patience is in test_parity.py; here is what the callback does by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from recipes import rows, t16

from omnitrain import AccelerateTrainer, ConfigError, EarlyStopping, HFTrainer, Trainer


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


class Third:
    """Ends the run at the third evaluation."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, step: int, score: float) -> bool:
        self.seen += 1
        return self.seen >= 3


class Kept(Third):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("trainer_class", [Trainer, AccelerateTrainer, HFTrainer])
@pytest.mark.parametrize("as_callback", [False, True])
def test_a_stopper_that_counts_goes_on_counting_after_a_resume(
    trainer_class: Any, as_callback: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(epochs: int, stopper: Any) -> Any:
        given = {"callbacks": [EarlyStopping(stopper=stopper)]} if as_callback else {"early_stopper": stopper}
        placed = {"device": "cpu"} if trainer_class is Trainer else {}
        return trainer_class(
            t16(), rows(8), rows(4), loss_fn=F.mse_loss, progress_bar=False, epochs=epochs, save_dir=tmp_path, **given,
            **placed,
        )  # fmt: skip

    make(2, Kept()).train()
    trainer = make(9, Kept())
    trainer.train(resume_from="auto")
    assert trainer.progress.epoch == 3
    assert "early stopper" not in caplog.text


def test_a_stopper_with_attributes_that_are_not_kept_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(early_stopper=Third(), save_dir=tmp_path / "run")
    assert "The early stopper Third has attributes, but no `state_dict()`" in caplog.text
    caplog.clear()
    run(early_stopper=Third())
    run(early_stopper=lambda step, score: False, save_dir=tmp_path / "other")
    assert "early stopper" not in caplog.text
