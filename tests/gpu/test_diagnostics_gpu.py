"""The commands that prove a run, on a GPU: replayed steps, plans of memory, checks that change no number."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import allocated, free_up, make
from recipes import fit, rows, same, t16, weights
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Trace, replay
from omnitrain.callbacks.trace import TRACED

FP32 = torch.float32


@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_step_is_replayed_to_the_bit(device: torch.device, kind: str, autocast: Any, tmp_path: Path) -> None:
    def build() -> Any:
        return make(
            kind, device, t16(0.2, dtype=FP32), rows(16, FP32), epochs=2, save_dir=tmp_path, callbacks=[Trace()],
            autocast=autocast,
        )  # fmt: skip

    build().train()
    result = replay(tmp_path, 7, build)
    assert result.ok and sorted(result.same) == sorted(TRACED), str(result)


def test_check_and_plan_change_no_number(device: torch.device, kind: str) -> None:
    ends = []
    for looks in (False, True):
        trainer = make(kind, device, t16(0.2, dtype=FP32), rows(32, FP32), rows(8, FP32), epochs=2)
        if looks:
            trainer.check()
            trainer.plan()
        ends.append(weights(fit(trainer).get_model()))
    assert same(*ends)


def test_memory_is_as_planned(device: torch.device, kind: str) -> None:
    width = 2048 if device.type == "cuda" else 16
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    data = TensorDataset(torch.randn(1024, width), torch.randn(1024, width))
    trainer = make(kind, device, model, data, batch_size=256, loss_fn=F.mse_loss, optimizer="adamw")
    planned = trainer.plan().memory
    free_up(device)
    others = allocated(device) - planned["weights"]  # of what ran before
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() - others == pytest.approx(planned["total"], rel=0.25)
