"""Values that callbacks add to rows of logs, and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import rows, t16

from omnitrain import Callback, ConfigError, Trainer


class Adds(Callback):
    """Adds a value to each row, and collects rows and reports."""

    def __init__(self, name: str = "weights_seen") -> None:
        self.name = name
        self.rows: list[dict[str, float]] = []
        self.reports: list[Mapping[str, Any]] = []

    def log_values(self, trainer: Any) -> Mapping[str, float]:
        trainer.lifecycle.report({"note": f"step {trainer.progress.step}"})
        return {self.name: 3.0}

    def on_log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        self.rows.append(dict(logs))

    def on_report(self, trainer: Any, values: Mapping[str, Any]) -> None:
        self.reports.append(values)


def run(callback: Callback) -> None:
    Trainer(
        t16(), rows(12), batch_size=4, epochs=1, log_steps=1, loss_fn=F.mse_loss, callbacks=[callback],
        progress_bar=False,
    ).train()  # fmt: skip


def test_log_values_are_in_rows_and_reports_reach_callbacks() -> None:
    callback = Adds()
    run(callback)
    assert [row["weights_seen"] for row in callback.rows] == [3.0] * 3
    assert callback.reports == [{"note": f"step {step}"} for step in (1, 2, 3)]


def test_log_values_must_have_new_names() -> None:
    with pytest.raises(ConfigError, match=r"Adds\.log_values returns 'loss', which the row of logs has already"):
        run(Adds("loss"))


@pytest.mark.parametrize("values", [3, {"note": "text"}, {"pair": [1.0, 2.0]}])
def test_log_values_must_be_numbers(values: Any) -> None:
    class Wrong(Callback):
        def log_values(self, trainer: Any) -> Any:
            return values

    with pytest.raises(TypeError, match="log_values must return a dict of numbers") as raised:
        run(Wrong())
    assert "Raised by the callback Wrong.log_values." in raised.value.__notes__


def test_log_values_may_be_tensors_of_one_number() -> None:
    class Measures(Adds):
        def log_values(self, trainer: Any) -> Any:
            return {"half": torch.tensor(0.5)}

    callback = Measures()
    run(callback)
    assert [type(row["half"]) for row in callback.rows] == [float] * 3
