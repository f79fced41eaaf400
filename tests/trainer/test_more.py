"""`train(more=...)`: the run that has ended goes on, as if it had been longer from the start."""

import gc
import itertools
import logging
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import FailsAt, Pages, StopAt, Trace, fit, rows, same, t16, weights

from omnitrain import EMA, Callback, CheckpointError, ConfigError, HookCallback, Trainer


def made(folder: Path | None = None, *, momentum: float = 0.9, **options: Any) -> Trainer:
    model = options.pop("model", None) or t16(dropout=0.2)
    options = {"train_dataset": rows(12), "loss_fn": F.mse_loss, "batch_size": 4} | options
    options.setdefault("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=momentum))
    return Trainer(model, device="cpu", progress_bar=False, log_steps=1, save_dir=folder, **options)


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path


def falling() -> dict[str, Any]:
    calls = itertools.count()
    metric = {"compute_metrics": lambda targets, predictions: {"score": -float(next(calls))}, "sanity": False}
    objective = {"optimization_metric": "score", "optimization_direction": "max"}
    return {"eval_dataset": rows(8), "eval_steps": 1, **metric, **objective}


def test_more_continues_from_the_last_weights_not_the_best(folder: Path | None) -> None:
    trainer = made(folder, max_steps=4, **falling())
    assert trainer.train()["best_step"] == 1
    best = weights(trainer.model)
    metrics = trainer.train(more="3ba")
    longer = fit(made(max_steps=7, load_best_at_end=False, **falling()))
    assert metrics["best_step"] == 1 and same(weights(trainer.model), best)  # of the first part
    fit(trainer, more="1ba"), fit(longer, more="1ba")
    assert metrics["stop_reason"] == "max_steps" and trainer.progress.step == 8
    runs = (trainer, longer)
    assert same(*([state["momentum_buffer"] for state in run.optimizer.state.values()] for run in runs))


def test_more_continues_a_run_resumed_at_its_end(tmp_path: Path) -> None:
    """It saves nothing itself: the longer run continues from the checkpoint of the program before."""
    longer = fit(made(max_steps=5))
    made(tmp_path, max_steps=3).train()
    trainer = fit(made(tmp_path, max_steps=3), resume_from="auto")
    trainer.train(more="2ba")
    assert same(weights(trainer.model), weights(longer.model))


def test_more_keeps_no_part_of_the_earlier_run_in_memory(tmp_path: Path) -> None:
    references: list[Any] = []

    def look(trainer: Any) -> None:
        gc.collect()
        assert not [reference for reference in references if reference() is not None]
        references[:] = [weakref.ref(trainer.optimizer), weakref.ref(trainer.lifecycle)]

    trainer = fit(made(tmp_path, max_steps=2, callbacks=[HookCallback({"on_train_start": look})]))
    trainer.train(more="1ba")
    trainer.train(resume_from="last", more=None)


def test_save_in_a_callback_waits_for_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(trainer: Any) -> None:
        before = len(waits)
        trainer.save_checkpoint()
        assert len(waits) == before

    waits: list[Any] = []
    trainer: Any = made(tmp_path, max_steps=2, callbacks=[HookCallback({"on_step_end": save})])
    monkeypatch.setattr(trainer.store, "finish", waits.append)
    trainer.train()
    trainer.train(more="2ba")
    trainer.save_checkpoint()
    assert len(waits) >= 3


def test_more_drops_the_closing_evaluation_of_the_first_run(folder: Path | None) -> None:
    def new(folder: Path | None, steps: int) -> Trainer:
        options: dict[str, Any] = {"eval_dataset": rows(12), "eval_steps": 3, "momentum": 0.0, "max_steps": steps}
        return fit(made(folder, model=t16(), algorithms=[EMA(0.5)], **options))

    trainer, longer = new(folder, 5), new(None, 10)
    assert [row["step"] for row in trainer.metrics["valid"]] == [3, 5] and trainer.metrics["best_step"] == 5
    more = trainer.train(more="5ba")
    assert [row["step"] for row in more["valid"]] == [3, 6, 9, 10] and more["valid"] == longer.metrics["valid"]
    assert same(weights(trainer.model), weights(longer.model))


def test_more_restarts_patience_after_early_stopping() -> None:
    trainer = made(max_steps=50, patience=2, **falling())
    assert trainer.train()["stop_reason"] == "early_stopping" and trainer.progress.step == 3
    assert trainer.train(more="4ba")["stop_reason"] == "early_stopping"
    assert trainer.progress.step == 5


def test_more_continues_in_mid_epoch(folder: Path | None) -> None:
    trainer, longer = fit(made(folder, epochs=9, callbacks=[StopAt(4)])), made(max_steps=7)
    assert trainer.stop_reason == "requested"
    metrics = trainer.train(more="1ep")
    assert trainer.epochs == pytest.approx(7 / 3) and trainer.progress.step == 7
    assert metrics["train_metrics_history"] == longer.train()["train_metrics_history"]
    assert same(weights(trainer.model), weights(longer.model))


def test_more_warns_of_a_jump_of_the_schedule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace()
    trainer = fit(made(tmp_path, max_steps=4, lr_scheduler="cosine", callbacks=[trace]))
    with caplog.at_level(logging.WARNING, "omnitrain"):
        trainer.train(more="4ba")
    message = "rate at step 4 goes from 0 to 0.025, since the schedule spans 8 steps now (before: 4 steps)."
    assert message in caplog.text
    after = fit(made(max_steps=8, lr_scheduler="cosine"), resume_from=tmp_path / "checkpoint-4")
    assert same(weights(trainer.model), weights(after.model))
    assert trace.learning_rates[4] == pytest.approx(0.05 * (1 + math.cos(math.pi * 5 / 8)) / 2)
    constant = fit(made(max_steps=2))
    constant.optimizer.param_groups[0]["lr"] = 0.5
    constant.train(more="1ba")
    assert constant.optimizer.param_groups[0]["lr"] == 0.5


class CountsEvaluations(Callback):
    count = 0

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_more_keeps_callback_state_and_test_rows(tmp_path: Path) -> None:
    counting, sets = CountsEvaluations(), {"eval_dataset": rows(8), "test_dataset": rows(4)}
    trainer = fit(made(tmp_path, max_steps=5, eval_steps=3, callbacks=[counting], **sets))
    trainer.test()
    metrics = trainer.train(more="1ba")
    assert counting.count == 2  # those of steps 3 and 6: that of step 5 closed a run which is now longer
    assert [row["step"] for row in metrics["test"]] == [trainer.metrics["best_step"]]


def test_more_continues_streams(tmp_path: Path) -> None:
    longer = fit(made(max_steps=8, train_dataset=Pages(12)))
    for folder, length in ((tmp_path, {"max_steps": 4}), (None, {"epochs": 1})):
        trainer = fit(made(folder, train_dataset=Pages(12), **length))
        trainer.train(more=f"{8 - trainer.progress.step}ba")
        assert same(weights(trainer.model), weights(longer.model))
    lost = fit(made(max_steps=4, train_dataset=Pages(12)))
    with pytest.raises(ConfigError, match="inside an epoch needs a `save_dir`"):
        lost.train(more="1ba")


def test_more_that_cannot_continue_is_an_error(tmp_path: Path) -> None:
    def reject(trainer: Trainer, words: str, *args: Any, more: Any = 1, error: type[Exception] = ConfigError) -> None:
        with pytest.raises(error, match=words):
            trainer.train(*args, more=more)

    trainer = made(tmp_path, max_steps=2)
    reject(trainer, "it has not trained yet")
    trainer.train()
    for more, words in (("0.5dur", "cannot be a share"), (0, "positive duration"), ("soon", "positive duration")):
        reject(trainer, words, more=more)
    reject(trainer, "`resume_from` with one from a checkpoint", "last")
    assert trainer.train(more="1ba")["stop_reason"] == "max_steps" and trainer.progress.step == 3
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    reject(trainer, r"`trainer\.optimizer` was assigned since")
    trainer.load_checkpoint("last")
    reject(trainer, r"load_checkpoint\(\) has restored another state")
    light = fit(made(tmp_path / "light", max_steps=1, save_only_model=True))
    reject(light, "save_only_model=True keeps only weights")
    failing = made(model=FailsAt(2), max_steps=2)
    with pytest.raises(RuntimeError, match="boom"):
        failing.train()
    reject(failing, "its last run failed")
    lost = fit(made(tmp_path / "lost", max_steps=1))
    (tmp_path / "lost" / "checkpoint-1" / "omnitrain.json").unlink()
    reject(lost, "checkpoint-1", more="1ba", error=CheckpointError)
