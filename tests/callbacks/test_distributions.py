"""Statistics and histograms of weights, gradients, updates and activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipes import rows, t16

from omnitrain import AccelerateTrainer, Callback, ConfigError, Distributions, HFTrainer, Histogram, Trainer

EVERYTHING = ("weights", "gradients", "updates", "activations")


class ByHand(Callback):
    """Copies weights and gradients around the second step, and what is logged and reported of it."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.row: dict[str, float] = {}
        self.reports: dict[str, Histogram] = {}

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

    def on_log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        if trainer.progress.step == 2:
            self.row = dict(logs)

    def on_report(self, trainer: Any, values: Mapping[str, Any]) -> None:
        if trainer.progress.step == 2:
            self.reports |= values


def trained(kind: Any, *callbacks: Callback, **options: Any) -> Any:
    options = {"log_steps": 5, "gradient_accumulation_steps": 2, "progress_bar": False, **options}
    trainer = kind(
        t16(), rows(24), batch_size=4, epochs=1, loss_fn=F.mse_loss, learning_rate=0.01,
        callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("trainer_class", [Trainer, AccelerateTrainer, HFTrainer])
def test_statistics_and_histograms_equal_numpy(trainer_class: Any) -> None:
    hand = ByHand()
    trained(trainer_class, hand, Distributions(of=EVERYTHING, every="2ba", bins=8), max_grad_norm=0.05)
    for name, values in hand.tensors.items():
        kind, _, parameter = name.partition("/")
        if kind == "before":
            continue
        expected = {
            "norm": np.linalg.norm(values), "mean": values.mean(), "std": values.std(), "min": values.min(),
            "max": values.max(),
        }  # fmt: skip
        for statistic, value in expected.items():
            assert hand.row[f"{kind}_{statistic}/{parameter}"] == pytest.approx(value, rel=1e-9, abs=1e-12)
        histogram = hand.reports[name]
        if values.size > 1:
            assert list(histogram.counts) == np.histogram(values, histogram.edges)[0].tolist()
        assert (histogram.low, histogram.high, histogram.total) == pytest.approx(
            (values.min(), values.max(), values.sum())
        )
    ratio = np.linalg.norm(hand.tensors["updates/0.weight"]) / np.linalg.norm(hand.tensors["before/0.weight"])
    assert hand.row["update_ratio/0.weight"] == pytest.approx(ratio, rel=1e-9)


def test_activations_that_are_zero_in_a_full_step_are_dead() -> None:
    hand, model = ByHand(), t16()
    with torch.no_grad():
        model[0].bias[:4] = -100.0  # type: ignore[index]
    watch = Distributions(of="activations", every=2, modules="^1$", bins=8)
    Trainer(
        model, rows(16), batch_size=8, epochs=1, loss_fn=F.mse_loss, progress_bar=False, callbacks=[hand, watch],
        learning_rate=1e-6, shuffle=False,
    ).train()  # fmt: skip
    output = torch.relu(model[0](rows(16).tensors[0][8:])).detach()  # type: ignore[index]
    dead = float((output == 0).all(0).double().mean())
    assert dead >= 0.25
    assert hand.row["activations_dead/1"] == pytest.approx(dead)
    assert hand.row["activations_norm/1"] == pytest.approx(float(output.norm()), rel=1e-4)
    assert sum(hand.reports["activations/1"].counts) == output.numel()
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
