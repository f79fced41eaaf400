"""`train(more=...)`: the run that has ended goes on, as if it had been longer from the start."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Pages, StopAt, Trace, rows, same, t16, weights

from omnitrain import EMA, Callback, CheckpointError, ConfigError, HookCallback, Trainer


def made(folder: Path | None = None, *, momentum: float = 0.9, **options: Any) -> Trainer:
    model = options.pop("model", None) or t16(dropout=0.2)
    options = {"train_dataset": rows(12), "loss_fn": F.mse_loss, "batch_size": 4} | options
    options.setdefault("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=momentum))
    return Trainer(model, device="cpu", progress_bar=False, log_steps=1, save_dir=folder, **options)


class Falling:
    """A metric that gets worse from one evaluation to the next."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, targets: Any, predictions: Any) -> dict[str, float]:
        self.calls += 1
        return {"score": -float(self.calls)}


def test_more_continues_from_the_last_weights_not_the_best(folder: Path | None) -> None:
    options: dict[str, Any] = {
        "eval_dataset": rows(8), "eval_steps": 1, "optimization_metric": "score", "optimization_direction": "max",
        "sanity": False,
    }  # fmt: skip
    trainer = made(folder, max_steps=4, compute_metrics=Falling(), **options)
    metrics = trainer.train()
    assert metrics["best_step"] == 1
    best = weights(trainer.model)
    metrics = trainer.train(more="3ba")
    whole = made(max_steps=7, compute_metrics=Falling(), load_best_at_end=False, **options)
    whole.train()
    assert metrics["best_step"] == 1 and same(weights(trainer.model), best)  # of the first part
    trainer.train(more="1ba")
    whole.train(more="1ba")
    assert metrics["stop_reason"] == "max_steps" and trainer.progress.step == 8
    assert all(
        torch.equal(state["momentum_buffer"], other["momentum_buffer"])
        for state, other in zip(trainer.optimizer.state.values(), whole.optimizer.state.values(), strict=True)
    )


def test_more_keeps_no_part_of_the_earlier_run_in_memory(tmp_path: Path) -> None:
    references: list[Any] = []

    def look(trainer: Any) -> None:
        gc.collect()
        assert not [reference for reference in references if reference() is not None]
        references[:] = [weakref.ref(trainer.optimizer), weakref.ref(trainer.lifecycle)]

    trainer = made(tmp_path, max_steps=2, callbacks=[HookCallback({"on_train_start": look})])
    trainer.train()
    trainer.train(more="1ba")
    trainer.train(resume_from="last", more=None)


def test_save_in_a_callback_waits_for_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Saves(Callback):
        def on_step_end(self, trainer: Any) -> None:
            before = len(waits)
            trainer.save_checkpoint()
            assert len(waits) == before

    waits: list[str] = []
    trainer = made(tmp_path, max_steps=2, callbacks=[Saves()])
    assert trainer.store is not None
    monkeypatch.setattr(trainer.store, "finish", lambda tick: waits.append("waited"))
    trainer.train()
    trainer.train(more="2ba")
    trainer.save_checkpoint()
    assert len(waits) >= 3


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path


def test_more_drops_the_closing_evaluation_of_the_first_run(folder: Path | None) -> None:
    options: dict[str, Any] = {"eval_dataset": rows(12), "eval_steps": 3, "momentum": 0.0}
    trainer = made(folder, max_steps=5, model=t16(), algorithms=[EMA(0.5)], **options)
    assert [row["step"] for row in trainer.train()["valid"]] == [3, 5]
    assert trainer.metrics["best_step"] == 5
    more = trainer.train(more="5ba")
    whole = made(max_steps=10, model=t16(), algorithms=[EMA(0.5)], **options)
    assert [row["step"] for row in more["valid"]] == [3, 6, 9, 10] and more["valid"] == whole.train()["valid"]
    assert same(weights(trainer.model), weights(whole.model))


def test_more_restarts_patience_after_early_stopping() -> None:
    trainer = made(
        max_steps=50, eval_dataset=rows(8), eval_steps=1, patience=2, sanity=False,
        compute_metrics=Falling(), optimization_metric="score", optimization_direction="max",
    )  # fmt: skip
    assert trainer.train()["stop_reason"] == "early_stopping" and trainer.progress.step == 3
    assert trainer.train(more="4ba")["stop_reason"] == "early_stopping"
    assert trainer.progress.step == 5


@pytest.mark.parametrize("ends_by_signal", [False, True])
def test_more_continues_in_mid_epoch(folder: Path | None, ends_by_signal: bool) -> None:
    interrupt = HookCallback(
        {"on_step_end": lambda trainer: signal.raise_signal(signal.SIGINT) if trainer.progress.step == 4 else None}
    )
    trainer, whole = made(folder, epochs=9, callbacks=[interrupt if ends_by_signal else StopAt(4)]), made(max_steps=7)
    with pytest.raises(KeyboardInterrupt) if ends_by_signal else contextlib.nullcontext():
        assert trainer.train()["stop_reason"] == "requested"
    metrics = trainer.train(more="1ep")
    assert trainer.epochs == pytest.approx(7 / 3) and trainer.progress.step == 7
    assert metrics["train_metrics_history"] == whole.train()["train_metrics_history"]
    assert same(weights(trainer.model), weights(whole.model))


def test_more_warns_of_a_jump_of_the_schedule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace()
    trainer = made(tmp_path, max_steps=4, lr_scheduler="cosine", callbacks=[trace])
    trainer.train()
    with caplog.at_level(logging.WARNING, "omnitrain"):
        trainer.train(more="4ba")
    message = "rate at step 4 goes from 0 to 0.025, since the schedule spans 8 steps now (before: 4 steps)."
    assert message in caplog.text
    after = made(max_steps=8, lr_scheduler="cosine")
    after.train(resume_from=tmp_path / "checkpoint-4")
    assert same(weights(trainer.model), weights(after.model))
    assert trace.learning_rates[4] == pytest.approx(0.05 * (1 + torch.cos(torch.tensor(torch.pi * 5 / 8))) / 2)


def test_more_keeps_a_learning_rate_set_by_hand() -> None:
    trainer = made(max_steps=2)
    trainer.train()
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    trainer.train(more="1ba")
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5


def test_more_keeps_callback_state_and_test_rows(tmp_path: Path) -> None:
    class Counting(Callback):
        def __init__(self) -> None:
            self.evaluations = 0

        def on_eval_end(self, trainer: Any, metrics: Any) -> None:
            self.evaluations += 1

        def state_dict(self) -> dict[str, Any]:
            return {"evaluations": self.evaluations}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.evaluations = state["evaluations"]

    counting, sets = Counting(), {"eval_dataset": rows(8), "test_dataset": rows(4)}
    trainer = made(tmp_path, max_steps=5, eval_steps=3, callbacks=[counting], **sets)
    trainer.train()
    trainer.test()
    metrics = trainer.train(more="1ba")
    assert counting.evaluations == 2  # those of steps 3 and 6: that of step 5 closed a run which is now longer
    assert [row["step"] for row in metrics["test"]] == [trainer.metrics["best_step"]]


def test_more_continues_streams(tmp_path: Path) -> None:
    for folder, length in ((tmp_path, {"max_steps": 4}), (None, {"epochs": 1})):
        trainer, whole = made(folder, train_dataset=Pages(12), **length), made(max_steps=8, train_dataset=Pages(12))
        trainer.train()
        trainer.train(more=f"{8 - trainer.progress.step}ba")
        whole.train()
        assert same(weights(trainer.model), weights(whole.model))
    lost = made(max_steps=4, train_dataset=Pages(12))
    lost.train()
    with pytest.raises(ConfigError, match="inside an epoch needs a `save_dir`"):
        lost.train(more="1ba")


def test_more_that_cannot_continue_is_an_error(tmp_path: Path) -> None:
    trainer = made(tmp_path, max_steps=2)
    with pytest.raises(ConfigError, match="it has not trained yet"):
        trainer.train(more=1)
    trainer.train()
    for more, words in (("0.5dur", "cannot be a share"), (0, "positive duration"), ("soon", "positive duration")):
        with pytest.raises(ConfigError, match=words):
            trainer.train(more=more)
    with pytest.raises(ConfigError, match="`resume_from` with one from a checkpoint"):
        trainer.train("last", more=1)
    assert trainer.train(more="1ba")["stop_reason"] == "max_steps" and trainer.progress.step == 3
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"`trainer\.optimizer` was assigned since"):
        trainer.train(more=1)
    trainer.load_checkpoint("last")
    with pytest.raises(ConfigError, match=r"load_checkpoint\(\) has restored another state"):
        trainer.train(more=1)
    light = made(tmp_path / "light", max_steps=1, save_only_model=True)
    light.train()
    with pytest.raises(ConfigError, match="save_only_model=True keeps only weights"):
        light.train(more=1)

    class Failing(Callback):
        def on_step_end(self, trainer: Any) -> None:
            raise ValueError("no")

    failing = made(max_steps=2, callbacks=[Failing()])
    with pytest.raises(ValueError, match="no"):
        failing.train()
    with pytest.raises(ConfigError, match="its last run failed"):
        failing.train(more=1)
    lost = made(tmp_path / "lost", max_steps=1)
    lost.train()
    (tmp_path / "lost" / "checkpoint-1" / "omnitrain.json").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-1"):
        lost.train(more="1ba")
