"""The loss of an evaluation keeps its name to itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import rows, t16
from torch.nn import functional as F

from omnitrain import AccelerateTrainer, ConfigError, HFTrainer, Trainer


@pytest.mark.parametrize("trainer_class", [Trainer, AccelerateTrainer, HFTrainer])
@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_metric_called_loss_is_rejected_before_the_first_step(name: str, trainer_class: Any) -> None:
    data = rows(8, torch.float32)
    trainer = trainer_class(
        t16(dtype=torch.float32), data, data, loss_fn=F.mse_loss, epochs=1, batch_size=4, progress_bar=False,
        compute_metrics=lambda outputs, labels: {name: 0.0}, sanity=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="A metric is called 'loss'"):
        trainer.train()
    assert trainer.progress.step == 0
