"""Statistics and histograms of weights, gradients, updates and activations."""

from typing import Any

import numpy as np
import pytest
import torch
from recipes import Trace, rows, small_trainer, t16

from omnitrain import Callback, ConfigError, Distributions, Histogram, Trainer

EVERYTHING = ("weights", "gradients", "updates", "activations")


class ByHand(Callback):
    """Copies weights and gradients around the second step."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}

    def on_before_optimizer_step(self, trainer: Any) -> None:
        if trainer.progress.step == 1:
            for name, parameter in trainer.model.named_parameters():
                self.tensors[f"gradients/{name}"] = parameter.grad.numpy().copy()
                self.tensors[f"before/{name}"] = parameter.detach().numpy().copy()

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 2:
            for name, parameter in trainer.model.named_parameters():
                self.tensors[f"weights/{name}"] = parameter.detach().numpy().copy()
                self.tensors[f"updates/{name}"] = self.tensors[f"weights/{name}"] - self.tensors[f"before/{name}"]


def logged_in_step_2(trace: Trace) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Return the row of the second step, and what was reported in it."""
    (row,) = [row for row in trace.logs if row["step"] == 2]
    reports: dict[str, Histogram] = {}
    for step, values in trace.reports:
        if step == 2:
            reports |= values
    return row, reports


def trained(kind: Any, *callbacks: Callback, **options: Any) -> None:
    options = {"log_steps": 5, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "epochs": 1, **options}
    small_trainer(kind=kind, data=rows(24), callbacks=callbacks, **options).train()


def test_statistics_and_histograms_equal_numpy(trainer_class: Any) -> None:
    hand, trace = ByHand(), Trace()
    trained(trainer_class, hand, trace, Distributions(of=EVERYTHING, every="2ba", bins=8), max_grad_norm=0.05)
    row, reports = logged_in_step_2(trace)
    for name, values in hand.tensors.items():
        kind, _, parameter = name.partition("/")
        if kind == "before":
            continue
        expected = {
            "norm": np.linalg.norm(values), "mean": values.mean(), "std": values.std(), "min": values.min(),
            "max": values.max(),
        }  # fmt: skip
        for statistic, value in expected.items():
            assert row[f"{kind}_{statistic}/{parameter}"] == pytest.approx(value, rel=1e-9, abs=1e-12)
        histogram = reports[name]
        if values.size > 1:
            assert list(histogram.counts) == np.histogram(values, histogram.edges)[0].tolist()
        assert (histogram.low, histogram.high, histogram.total) == pytest.approx(
            (values.min(), values.max(), values.sum())
        )
    ratio = np.linalg.norm(hand.tensors["updates/0.weight"]) / np.linalg.norm(hand.tensors["before/0.weight"])
    assert row["update_ratio/0.weight"] == pytest.approx(ratio, rel=1e-9)


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
    assert dead >= 0.25
    assert row["activations_dead/1"] == pytest.approx(dead)
    assert row["activations_norm/1"] == pytest.approx(float(output.norm()), rel=1e-4)
    assert sum(reports["activations/1"].counts) == output.numel()
    assert not model[1]._forward_hooks  # type: ignore[index]


def test_distributions_are_checked_and_omitted_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    trained(Trainer, Distributions("^0"), progress_bar=None)
    printed = capsys.readouterr().out
    assert "loss" in printed and "weights_norm" not in printed and "update_ratio" not in printed
    for distributions, options, message in (
        (Distributions("nothing"), {}, "`match='nothing'` of Distributions matches no name"),
        (Distributions(of="activations"), {"compile": {"backend": "eager"}}, "compiled model does not call the hooks"),
    ):
        with pytest.raises(ConfigError, match=message):
            trained(Trainer, distributions, **options)
