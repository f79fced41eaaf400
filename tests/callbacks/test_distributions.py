"""Statistics and histograms of weights, gradients, updates and activations."""

from typing import Any

import numpy as np
import pytest
import torch
from recipes import Trace, rows, small_trainer, t16

from omnitrain import Callback, ConfigError, Distributions, Histogram, Trainer

EVERYTHING = ("weights", "gradients", "updates", "activations")


class ByHand(Callback):
    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}

    def copy(self, trainer: Any, kind: str) -> None:
        for name, parameter in trainer.model.named_parameters():
            tensor = parameter.grad if kind == "gradients" else parameter.detach()
            self.tensors[f"{kind}/{name}"] = tensor.numpy().copy()

    def on_before_optimizer_step(self, trainer: Any) -> None:
        if trainer.progress.step == 1:
            self.copy(trainer, "gradients")
            self.copy(trainer, "before")

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 2:
            self.copy(trainer, "weights")


def logged_in_step_2(trace: Trace) -> tuple[dict[str, float], dict[str, Histogram]]:
    (row,) = [row for row in trace.logs if row["step"] == 2]
    return row, {name: value for step, values in trace.reports if step == 2 for name, value in values.items()}


def trained(kind: Any, *callbacks: Callback, **options: Any) -> None:
    options = {"log_steps": 5, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "epochs": 1, **options}
    small_trainer(kind=kind, data=rows(24), callbacks=callbacks, **options).train()


def test_statistics_and_histograms_equal_numpy(trainer_class: Any) -> None:
    hand, trace = ByHand(), Trace()
    trained(trainer_class, hand, trace, Distributions(of=EVERYTHING, every="2ba", bins=8), max_grad_norm=0.05)
    row, reports = logged_in_step_2(trace)
    for parameter in ("0.weight", "0.bias", "3.weight", "3.bias"):
        tensors = {kind: hand.tensors[f"{kind}/{parameter}"] for kind in ("weights", "gradients", "before")}
        before = tensors.pop("before")
        tensors["updates"] = tensors["weights"] - before
        for kind, values in tensors.items():
            expected = [np.linalg.norm(values), values.mean(), values.std(), values.min(), values.max()]
            logged = [row[f"{kind}_{statistic}/{parameter}"] for statistic in ("norm", "mean", "std", "min", "max")]
            assert logged == pytest.approx(expected, rel=1e-9, abs=1e-12)
            histogram = reports[f"{kind}/{parameter}"]
            if values.size > 1:
                assert list(histogram.counts) == np.histogram(values, histogram.edges)[0].tolist()
            totals = (histogram.low, histogram.high, histogram.total)
            assert totals == pytest.approx((values.min(), values.max(), values.sum()))
        ratio = np.linalg.norm(tensors["updates"]) / np.linalg.norm(before)
        assert row[f"update_ratio/{parameter}"] == pytest.approx(ratio, rel=1e-9)


def test_activations_that_are_zero_in_a_full_step_are_dead() -> None:
    trace, model = Trace(), t16()
    with torch.no_grad():
        model[0].bias[:4] = -100.0  # type: ignore[index]
    watch = Distributions(of="activations", every=2, modules="^1$", bins=8)
    options = {"batch_size": 8, "epochs": 1, "learning_rate": 1e-6, "shuffle": False}
    small_trainer(model=model, callbacks=[trace, watch], **options).train()
    row, reports = logged_in_step_2(trace)
    output = torch.relu(model[0](rows(16).tensors[0][8:])).detach()  # type: ignore[index]
    dead = float((output == 0).all(0).double().mean())
    assert row["activations_dead/1"] == pytest.approx(dead) and dead >= 0.25
    assert row["activations_norm/1"] == pytest.approx(float(output.norm()), rel=1e-4)
    assert sum(reports["activations/1"].counts) == output.numel()
    assert not model[1]._forward_hooks  # type: ignore[index]


def test_distributions_are_checked_and_omitted_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    trained(Trainer, trace, Distributions("^0"), progress_bar=None, log_steps=1)
    assert trace.logs and all("weights_norm/0.weight" in row for row in trace.logs)
    printed = capsys.readouterr().out
    assert "loss" in printed and "weights_norm" not in printed and "update_ratio" not in printed
    with pytest.raises(ConfigError, match="`match` of Distributions: 'nothing' is found in no name"):
        trained(Trainer, Distributions("nothing"))
    with pytest.raises(ConfigError, match="compiled model does not call the hooks"):
        trained(Trainer, Distributions(of="activations"), compile={"backend": "eager"})
