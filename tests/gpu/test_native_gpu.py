"""What only a GPU can show of the native Trainer: a loop that does not wait, a real fp16 scaler, NaN found late."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Trace, rows, same, t16, weights
from torch.utils.data import TensorDataset

from omnitrain import Callback, NonFiniteError, Trainer

pytestmark = pytest.mark.gpu


def make(model: Any, data: Any, **options: Any) -> Trainer:
    return Trainer(
        model,
        data,
        **{"device": "cuda", "progress_bar": False, "loss_fn": F.mse_loss, "learning_rate": 0.01, **options},
    )


def test_the_loop_does_not_wait_for_the_device_between_logs() -> None:
    class Forbid(Callback):
        def on_step_end(self, trainer: Any) -> None:
            step = trainer.progress.step
            torch.cuda.set_sync_debug_mode("error" if step % 10 and step < 49 else "default")

        def on_train_end(self, trainer: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    trainer = make(t16(dtype=torch.float32), rows(400, torch.float32), log_steps=10, epochs=1, callbacks=[Forbid()])
    trainer.train()
    assert trainer.progress.step == 50


def test_fp16_trains_and_its_scaler_adapts() -> None:
    trace = Trace()
    trainer = make(t16(dtype=torch.float32), rows(400, torch.float32), autocast="fp16", epochs=4, callbacks=[trace])
    trainer.train()
    assert trainer.scaler.is_enabled() and trace.logs[-1]["loss"] < trace.logs[0]["loss"]


def test_nan_stops_updates_before_its_report() -> None:
    x, y = (tensor.clone() for tensor in rows(64, torch.float32).tensors)
    y[17] = math.nan
    model, before = t16(dtype=torch.float32), []

    class Keep(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 2:  # samples 0 to 15; the third step has the NaN
                torch.cuda.synchronize()
                before.extend(weights(model))

    trainer = make(model, TensorDataset(x, y), shuffle=False, epochs=3, callbacks=[Keep()])
    with pytest.raises(NonFiniteError, match=r"step 3 .* 17"):
        trainer.train()
    assert same(before, weights(model))
