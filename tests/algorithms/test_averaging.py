"""Averages of weights, and the order and conflicts of algorithms."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forging import forge_tensors
from recipes import StopAt, Trace, callback, distance, fit, rows, same, small_trainer, t16, weights
from torch import nn

from omnitrain import EMA, Algorithm, Callback, CheckpointError
from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.tensor_files import load_tensors


class Watch(Callback):
    """Copies the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []

    def on_step_end(self, trainer: Any) -> None:
        self.weights.append(weights(trainer.model))


def build(*algorithms: Algorithm, **options: Any) -> Any:
    return small_trainer(*algorithms, **{"eval_steps": 2, "eval_dataset": rows(9), **options})


def averaged(history: list[list[torch.Tensor]], decay: float = 0.7) -> list[torch.Tensor]:
    averages = weights(t16())
    for updates, step in enumerate(history):
        share = min(decay, (1 + updates) / (10 + updates))
        for average, weight in zip(averages, step, strict=True):
            average.mul_(share).add_(weight, alpha=1 - share)
    return averages


def loss_of(values: list[torch.Tensor]) -> float:
    model, (x, y) = t16(), rows(9).tensors
    parameters = dict(zip(dict(model.named_parameters()), values, strict=True))
    return F.mse_loss(torch.func.functional_call(model, parameters, x), y).item()


def saved(folder: Path, name: str = "model") -> list[torch.Tensor]:
    """The parameters of a file in the order of the model."""
    tensors = load_tensors(folder / f"{name}.safetensors")
    return [tensors[name] for name, _ in t16().named_parameters()]


@pytest.mark.parametrize("saves", [True, False], ids=["save_dir", "host"])
def test_average_is_evaluated_saved_and_loaded_at_the_end(saves: bool, tmp_path: Path) -> None:
    third: list[float] = []

    def save_third(trainer: Any) -> None:
        if trainer.progress.step == 3:
            trainer.save_model(tmp_path / "model")
            third.append(trainer.evaluate()["eval_loss"])

    watch, plain = Watch(), Watch()
    callbacks = [watch, callback(on_step_end=save_third)]
    trainer = build(EMA(0.7), callbacks=callbacks, save_dir=tmp_path / "run" if saves else None)
    build(callbacks=[plain]).train()
    metrics = trainer.train()
    assert all(map(same, watch.weights, plain.weights))  # training is as without
    averages = [averaged(watch.weights[:step]) for step in range(9)]
    assert distance(saved(tmp_path / "model"), averages[3]) <= 1e-12
    losses = [row["eval_loss"] for row in metrics["valid"]]
    expected = [loss_of(averages[step]) for step in (3, 2, 4, 6, 8)]
    assert [*third, *losses] == pytest.approx(expected, abs=1e-12)
    best = averages[metrics["best_step"]]
    assert distance(weights(trainer.model), best) <= 1e-12
    assert trainer.evaluate()["eval_loss"] == min(losses)
    if saves:
        assert distance(saved(tmp_path / "run" / "best"), best) <= 1e-12
        assert same(saved(tmp_path / "run" / "best", "trained"), watch.weights[metrics["best_step"] - 1])


def test_run_without_evaluations_ends_with_the_last_average(caplog: Any, tmp_path: Path) -> None:
    watch = Watch()
    trainer = build(EMA(0.7), callbacks=[watch], eval_dataset=None, eval_steps=None, epochs=1)
    with caplog.at_level(logging.INFO, "omnitrain"):
        trainer.train()
    assert distance(weights(trainer.model), averaged(watch.weights)) <= 1e-12
    assert "Algorithms in the order they run: EMA." in caplog.text and "averaged weights now" in caplog.text
    trainer.save_model(tmp_path / "model")
    assert same(saved(tmp_path / "model"), weights(trainer.model))


def test_ema_forgets_first_weights_in_short_run(caplog: pytest.LogCaptureFixture) -> None:
    """With a fixed decay of 0.999, nine tenths of the average would be the weights before training."""
    watch, options = Watch(), {"eval_dataset": None, "eval_steps": None, "epochs": 25}
    trainer = fit(build(EMA(), callbacks=[watch], **options))
    last = watch.weights[-1]
    assert distance(weights(trainer.model), last) < 0.2 * distance(weights(t16()), last)
    assert "EMA(decay=0.999) averages over about 1000 updates, and the run has 100, at whose end" in caplog.text
    caplog.clear()
    fit(build(EMA(0.9), **options))
    assert "EMA(decay" not in caplog.text


def test_failed_evaluation_restores_the_weights_in_training() -> None:
    def fail(trainer: Any, *details: Any) -> None:
        if watch.weights and not same(weights(trainer.model), watch.weights[-1]):
            raise RuntimeError("no average")

    watch = Watch()
    trainer = build(EMA(0.7), callbacks=[watch, callback(on_eval_batch_start=fail)])
    with pytest.raises(RuntimeError, match="no average"):
        trainer.train()
    assert len(watch.weights) == 2 and same(weights(trainer.model), watch.weights[-1])


@pytest.mark.parametrize("later", [True, False], ids=["added", "left out"])
def test_resume_may_add_or_remove_averages_if_allowed(later: bool, tmp_path: Path) -> None:
    first, second = ([], [EMA(0.7)]) if later else ([EMA(0.7)], [])
    build(*first, save_dir=tmp_path, callbacks=[StopAt(3)]).train()
    with pytest.raises(CheckpointError, match="algorithms"):
        build(*second, save_dir=tmp_path).train(resume_from="auto")
    resumed, straight = Watch(), Watch()
    build(*second, save_dir=tmp_path, callbacks=[resumed]).train(resume_from="auto", allow_change={"algorithms"})
    build(callbacks=[straight]).train()
    assert len(resumed.weights) == 5 and all(map(same, resumed.weights, straight.weights[3:]))


def test_checkpoint_of_another_model_changes_no_weights(tmp_path: Path) -> None:
    """Its averages fit, its weights in training do not."""
    build(EMA(0.7), save_dir=tmp_path, callbacks=[StopAt(3)]).train()
    trainer = build(EMA(0.7), save_dir=tmp_path)
    before = weights(trainer.model)
    folder = tmp_path / "checkpoint-3"
    forge_tensors(folder, "trained.safetensors", lambda tensors: tensors.update({"0.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match="shape"):
        trainer.load_checkpoint(folder)
    assert same(weights(trainer.model), before)


def test_averages_ignore_tensors_of_custom_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with custom loading code may have saved buffers that it does not have now."""
    trainer = build(EMA(0.7), save_dir=tmp_path, callbacks=[StopAt(3)])
    trainer.train()
    folder = tmp_path / "checkpoint-3"
    monkeypatch.setattr(state_dicts, "has_custom_loader", lambda module: True)
    forge_tensors(folder, "trained.safetensors", lambda tensors: tensors.update({"queue": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"'queue' is not in 'model\.safetensors'"):
        trainer.load_checkpoint(folder)
    forge_tensors(folder, "model.safetensors", lambda tensors: tensors.update({"queue": torch.zeros(3)}))
    assert trainer.load_checkpoint(folder) == folder


def test_algorithms_are_called_in_order() -> None:
    calls: list[str] = []

    def note(name: str) -> Any:
        def method(self: Any, trainer: Any, value: Any = None) -> Any:
            calls.append(f"{self.name}.{name}")
            return value

        return method

    order = [
        *(("set_up", "ab"), ("begin_epoch", "ab"), ("transform_batch", "ab"), ("transform_output", "ba")),
        *(("transform_loss", "ba"), ("before_update", "ab"), ("after_update", "ab"), ("end_epoch", "ab")),
        ("transform_metrics", "ba"),
    ]
    kind = type("Noted", (Algorithm,), {method: note(method) for method, _ in order})
    pair = [kind(), kind()]
    pair[0].name, pair[1].name = "a", "b"
    build(*pair, epochs=1, batch_size=16, eval_steps=None).train()
    assert calls == [f"{name}.{method}" for method, names in order for name in names]


class Grow(Algorithm):
    def before_update(self, trainer: Any) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(100)


def test_changed_gradients_are_clipped() -> None:
    norms, logged = list[float](), list[float]()
    gradients_of = lambda trainer: [parameter.grad for parameter in trainer.model.parameters()]  # noqa: E731
    look = callback(
        on_before_optimizer_step=lambda trainer: norms.append(float(nn.utils.get_total_norm(gradients_of(trainer))))
    )
    for algorithms in ([], [Grow()]):
        trace = Trace()
        build(*algorithms, callbacks=[look, trace], max_steps=1, epochs=None, log_steps=1, max_grad_norm=5.0).train()
        logged.append(trace.logs[0]["grad_norm"])
    assert logged[0] == logged[1] < 5 and norms == pytest.approx([logged[0], 5.0], rel=1e-5)


def test_averages_have_the_dtype_of_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed updates weights of float64 in float32, and a checkpoint holds them so."""
    average = EMA(0.5)
    trainer = small_trainer(average)
    monkeypatch.setattr(trainer.backend, "has_master_weights", True)
    trainer.train()
    assert {tensor.dtype for tensor in average._averages.values()} == {torch.float32}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float64}
