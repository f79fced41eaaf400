"""Early stopping; by patience it is in test_parity.py, its state in checkpoint/test_stateful_parts.py."""

from pathlib import Path
from typing import Any

import pytest
from marks import TRAINERS
from recipes import StopAt, fit, rows, small_trainer

from omnitrain import EarlyStopping


def run(resume_from: Any = None, **options: Any) -> Any:
    options = {"data": rows(8), "eval_dataset": rows(4), "batch_size": 8, "epochs": 5, **options}
    return fit(small_trainer(**options), resume_from=resume_from)


def test_stopper_gets_step_and_score_and_ends_the_run() -> None:
    calls: list[tuple[int, float]] = []
    trainer = run(early_stopper=lambda *call: calls.append(call) or len(calls) == 2)
    assert trainer.metrics["stop_reason"] == "early_stopping" and trainer.progress.step == 2
    assert calls == [(row["step"], row["eval_loss"]) for row in trainer.metrics["valid"]]
    assert run(patience=-1).progress.epoch == run(patience=None).progress.epoch == 5  # which never stop


class Third:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int, score: float) -> bool:
        self.count += 1
        return self.count >= 3


def test_stopper_has_ended_the_run_for_each_resume(trainer_class: Any, tmp_path: Path) -> None:
    stops: dict[str, Any] = {"kind": trainer_class, "save_dir": tmp_path, "early_stopper": lambda step, score: True}
    trainer = run(**stops)
    for _ in range(2):
        resumed = run("auto", **stops)
        assert (resumed.progress.epoch, resumed.metrics["stop_reason"]) == (1, "early_stopping")
        assert len(resumed.metrics["valid"]) == 1
    trainer.train(more=1)
    assert trainer.progress.epoch == 2
    assert run("auto", kind=trainer_class, save_dir=tmp_path).progress.epoch == 5
    assert run(overwrite=True, **stops).progress.epoch == 1


def test_stopper_without_state_dict_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(early_stopper=Third(), save_dir=tmp_path / "run")
    assert "The early stopper Third has attributes, but no `state_dict()`" in caplog.text
    caplog.clear()
    run(early_stopper=Third())
    run(early_stopper=lambda step, score: False, save_dir=tmp_path / "other")
    methods = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    run(early_stopper=type("Stateful", (Third,), methods)(), save_dir=tmp_path / "stateful")
    assert "early stopper" not in caplog.text


@pytest.mark.parametrize(("kind", "patience", "last"), [
    ("native", "2ep", 10), ("native", "6ba", 8), ("native", "0.5dur", 14), ("native", "20ep", 24),
    ("accelerate", "6ba", 8), ("hf", "2ep", 10), ("hf", "20ep", 24),
])  # fmt: skip
def test_patience_is_a_duration(kind: str, patience: str, last: int, tmp_path: Path) -> None:
    """From the last gain, at step 2, to the first evaluation after it; as a callback, and resumed before and after."""
    options = {"kind": TRAINERS[kind], "data": rows(16), "batch_size": 4, "epochs": 6, "learning_rate": 0.0}
    options |= {"eval_steps": 2, "load_best_at_end": False}
    reason = "epochs" if last == 24 else "early_stopping"
    for way in ({"patience": patience}, {"callbacks": [EarlyStopping(patience)]}):
        trainer = run(**options, **way)
        assert (trainer.progress.step, trainer.metrics["stop_reason"]) == (last, reason)
    run(**options, patience=patience, save_dir=tmp_path, callbacks=[StopAt(5)])
    for _ in range(2):  # in the middle, and where it has ended
        resumed = run("auto", **options, patience=patience, save_dir=tmp_path)
        assert (resumed.progress.step, resumed.metrics["stop_reason"]) == (last, reason)
    if last == 8:
        trainer.train(more="5ba")
        assert trainer.progress.step == 13


def test_patience_of_steps_ends_at_an_evaluation_after_a_resume(tmp_path: Path) -> None:
    """The last gain is at step 4, and step 9 is five steps later, but the next evaluation at step 12."""
    options = {"data": rows(16), "batch_size": 4, "epochs": 6, "learning_rate": 0.0, "eval_steps": 4, "patience": "5ba"}
    run(**options, save_dir=tmp_path, callbacks=[StopAt(9)])
    assert run("auto", **options, save_dir=tmp_path).progress.step == run(**options).progress.step == 12
