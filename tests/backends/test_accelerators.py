"""The accelerators of trainers that follow each other in one process."""

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from recipes import rows
from torch import nn

from omnitrain import AccelerateTrainer


def test_new_accelerator_forgets_fsdp_of_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU accelerate notes FSDP for the process, and takes no plugin of the next accelerator."""
    options = {"loss_fn": F.mse_loss, "max_steps": 1, "progress_bar": False}
    kind = AccelerateTrainer(nn.Linear(4, 1), rows(8, torch.float32), **options).accelerator.distributed_type
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.FSDP)
    trainer = AccelerateTrainer(nn.Linear(4, 1), rows(8, torch.float32), **options)
    assert trainer.accelerator.distributed_type == kind != DistributedType.FSDP
    trainer.train()
