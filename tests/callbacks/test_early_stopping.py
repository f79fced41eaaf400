"""Early stopping: the callback itself; stopping by patience is in test_parity.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from recipes import rows, t16

from omnitrain import AccelerateTrainer, EarlyStopping, HFTrainer, Trainer


def run(**options: Any) -> Trainer:
    trainer = Trainer(
        t16(), rows(8), rows(4), loss_fn=F.mse_loss, device="cpu", progress_bar=False, epochs=5, **options
    )
    trainer.train()
    return trainer


def test_stopper_gets_step_and_score_and_ends_the_run() -> None:
    calls: list[tuple[int, float]] = []

    def stopper(step: int, score: float) -> bool:
        calls.append((step, score))
        return step >= 2

    trainer = run(early_stopper=stopper)
    assert trainer.metrics["stop_reason"] == "early_stopping" and trainer.progress.step == 2
    assert calls == [(row["step"], row["eval_loss"]) for row in trainer.metrics["valid"]]
    assert run(patience=-1).progress.epoch == run(patience=None).progress.epoch == 5  # which never stop


class Third:
    """Ends the run at the third evaluation."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int, score: float) -> bool:
        self.count += 1
        return self.count >= 3


class Stateful(Third):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(
    ("trainer_class", "as_callback"),
    [(Trainer, False), (Trainer, True), (AccelerateTrainer, False), (HFTrainer, False)],
)
def test_stopper_state_is_restored_by_a_resume(
    trainer_class: Any, as_callback: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(epochs: int, stopper: Any) -> Any:
        argument = {"callbacks": [EarlyStopping(stopper=stopper)]} if as_callback else {"early_stopper": stopper}
        device = {"device": "cpu"} if trainer_class is Trainer else {}
        return trainer_class(
            t16(), rows(8), rows(4), loss_fn=F.mse_loss, progress_bar=False, epochs=epochs, save_dir=tmp_path,
            **argument, **device,
        )  # fmt: skip

    make(2, Stateful()).train()
    trainer = make(9, Stateful())
    trainer.train(resume_from="auto")
    assert trainer.progress.epoch == 3
    assert "early stopper" not in caplog.text


@pytest.mark.parametrize("trainer_class", [Trainer, AccelerateTrainer, HFTrainer])
def test_stopper_has_ended_the_run_for_each_resume(trainer_class: Any, tmp_path: Path) -> None:
    """Until it is left out, or the run is made longer in this process."""

    def make(**options: Any) -> Any:
        device = {"device": "cpu"} if trainer_class is Trainer else {}
        return trainer_class(
            t16(), rows(8), rows(4), loss_fn=F.mse_loss, progress_bar=False, epochs=5, save_dir=tmp_path, **device,
            **options,
        )  # fmt: skip

    trainer = make(early_stopper=lambda step, score: True)
    trainer.train()
    for _ in range(2):
        resumed = make(early_stopper=lambda step, score: True)
        resumed.train(resume_from="auto")
        assert (resumed.progress.epoch, resumed.metrics["stop_reason"]) == (1, "early_stopping")
        assert len(resumed.metrics["valid"]) == 1
    trainer.train(more=1)
    assert trainer.progress.epoch == 2
    free = make()
    free.train(resume_from="auto")
    assert free.progress.epoch == 5
    fresh = make(early_stopper=lambda step, score: True, overwrite=True)
    fresh.train()
    assert fresh.progress.epoch == 1


def test_stopper_without_state_dict_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(early_stopper=Third(), save_dir=tmp_path / "run")
    assert "The early stopper Third has attributes, but no `state_dict()`" in caplog.text
    caplog.clear()
    run(early_stopper=Third())
    run(early_stopper=lambda step, score: False, save_dir=tmp_path / "other")
    assert "early stopper" not in caplog.text
