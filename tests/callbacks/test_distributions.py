"""Numbers and histograms of weights, gradients, updates and activations."""

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
    """Copies weights and gradients around the second step, and keeps what is logged and reported of it."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.row: dict[str, float] = {}
        self.reports: dict[str, Histogram] = {}

    def on_before_optimizer_step(self, trainer: Any) -> None:
        if trainer.progress.step == 1:
            for name, one in trainer.model.named_parameters():
                self.tensors[f"gradients/{name}"] = one.grad.numpy().copy()
                self.tensors[f"before/{name}"] = one.detach().numpy().copy()

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 2:
            for name, one in trainer.model.named_parameters():
                self.tensors[f"weights/{name}"] = one.detach().numpy().copy()
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


@pytest.mark.parametrize("kind", [Trainer, AccelerateTrainer, HFTrainer])
def test_numbers_and_histograms_are_those_of_numpy(kind: Any) -> None:
    hand = ByHand()
    trained(kind, hand, Distributions(of=EVERYTHING, every="2ba", bins=8), max_grad_norm=0.05)
    for name, one in hand.tensors.items():
        what, _, rest = name.partition("/")
        if what == "before":
            continue
        expected = {
            "norm": np.linalg.norm(one), "mean": one.mean(), "std": one.std(), "min": one.min(), "max": one.max(),
        }  # fmt: skip
        for statistic, value in expected.items():
            assert hand.row[f"{what}_{statistic}/{rest}"] == pytest.approx(value, rel=1e-9, abs=1e-12)
        found = hand.reports[name]
        if one.size > 1:
            assert list(found.counts) == np.histogram(one, found.edges)[0].tolist()
        assert (found.low, found.high, found.total) == pytest.approx((one.min(), one.max(), one.sum()))
    ratio = np.linalg.norm(hand.tensors["updates/0.weight"]) / np.linalg.norm(hand.tensors["before/0.weight"])
    assert hand.row["update_ratio/0.weight"] == pytest.approx(ratio, rel=1e-9)


def test_units_that_are_zero_over_the_whole_step_are_dead() -> None:
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


def test_what_is_not_there_or_cannot_be_seen_is_refused() -> None:
    with pytest.raises(ConfigError, match="`match='nothing'` of Distributions is found in no name"):
        trained(Trainer, Distributions("nothing"))
    with pytest.raises(ConfigError, match=r"`of` must hold some of 'weights', .*Did you mean 'weights'"):
        Distributions(of=("weigths",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`bins` must be an even number"):
        Distributions(bins=3)
    with pytest.raises(ConfigError, match="a compiled model does not call the hooks"):
        trained(Trainer, Distributions(of="activations"), compile={"backend": "eager"})


def test_the_console_leaves_the_numbers_of_each_parameter_out(capsys: pytest.CaptureFixture[str]) -> None:
    trained(Trainer, Distributions("^0"), progress_bar=None)
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "weights_norm" not in printed and "update_ratio" not in printed
