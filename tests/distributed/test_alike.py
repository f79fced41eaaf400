"""Differences between ranks: all ranks report them before they matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import asked_for, make_trainer
from compiled import compile_once
from forking import Case, Found, Outcome, case_folder, current_rank, play
from marks import thinned
from recipes import rows, t16
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from omnitrain import Callback


def train(backend: str, what: str, values: list[Any] | None) -> list[float]:
    """Train on two ranks that differ in one thing; return the weights."""
    rank, folder = current_rank(), case_folder() / "run"
    model, data, evaluation = t16(dtype=torch.float32), rows(32, torch.float32), rows(8, torch.float32)
    options: dict[str, Any] = {"batch_size": 4, "epochs": 1, "loss_fn": F.mse_loss, "eval_dataset": evaluation}
    resume_from = None
    torch.manual_seed(rank)  # by default, every process has a seed of its own
    if what == "samples":
        data = random_split(data, [24, 8])[0]
    elif what == "samples of evaluation":
        options["eval_dataset"] = TensorDataset(*(part + rank for part in evaluation.tensors))
    elif what == "samples in a loader":
        data = DataLoader(random_split(data, [24, 8])[0], 4, sampler=DistributedSampler(range(24), 2, rank))
    elif what == "length":
        data = rows(32 - 4 * rank, torch.float32)
    elif what == "evaluation set":
        options["eval_dataset"] = evaluation if rank == 0 else None
    elif what == "loss_fn":
        options["loss_fn"] = F.mse_loss if rank == 0 else F.l1_loss
    elif what == "shape":
        model = nn.Linear(4, 1 + rank)
    elif what == "frozen":
        next(model.children()).requires_grad_(rank == 0)
    elif what == "optimizer":
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank))
    elif what == "resume_from":
        resume_from, options["save_dir"] = (None if rank == 0 else "auto"), folder
    elif what == "save_dir":
        options["save_dir"] = folder if rank == 0 else None
    elif what == "allowed":
        options |= {"save_dir": f"{folder}/{rank}", "callbacks": [Callback()] * rank, "num_workers": rank}
        data = TensorDataset(*(part * (1 + 1e-6 * rank) for part in data.tensors))  # as of another processor
        options |= {"progress_bar": rank == 0, "timeout": 600 + rank, "trial_name": f"rank {rank}"}
    elif values is not None:
        options[what] = values[rank]
    trainer = make_trainer(backend, model, data, **options)
    if what == "evaluate":
        trainer.evaluate(rows(8 + rank, torch.float32))
    if what == "rate":
        trainer.optimizer.param_groups[0]["lr"] = 0.1 * rank
    trainer.train(resume_from=resume_from)
    return [float(one.sum()) for one in trainer.model.parameters()]


SHAPES = '"torch.float32 of shape (16, 4), which trains" on rank 0 and'
DIFFERENCES: dict[str, tuple[str, str, list[Any] | None]] = {
    "batch_size": ("ddp", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "eval_steps": ("ddp", '`eval_steps` is 2 on rank 0 and "1ep" on rank 1', [2, "1ep"]),
    "max_grad_norm": ("ddp", "`max_grad_norm` is 1.0 on rank 0 and null on rank 1", [1.0, None]),
    "loss_fn": ("ddp", '`loss_fn` is "torch.nn.functional.mse_loss" on rank 0 and "torch.nn.functional.l1_loss"', None),
    "evaluation set": ("ddp", '`eval_dataset` is "torch.utils.data.dataset.TensorDataset" on rank 0 and null on', None),
    "length": ("ddp", "`the training set` is 32 on rank 0 and 28 on rank 1", None),
    "samples": ("ddp", "of the training set is not the same on all ranks", None),
    "samples of evaluation": ("ddp", "of the evaluation set is not the same on all ranks", None),
    "samples in a loader": ("ddp", "of the training set is not the same on all ranks", None),
    "samples of HFTrainer": ("hf2", "of the training set is not the same on all ranks", None),
    "evaluate": ("ddp", "`the dataset` is 8 on rank 0 and 9 on rank 1", None),
    "shape": ("ddp", '`weight` is "torch.float32 of shape (1, 4), which trains" on rank 0 and', None),
    "optimizer": ("ddp", '`optimizer_groups` is [{"lr": 0.1, ', None),
    "rate": ("ddp", "`learning_rates` is [0.0] on rank 0 and [0.1] on rank 1", None),
    "resume_from": ("ddp", '`resume_from` is null on rank 0 and "auto" on rank 1', None),
    "save_dir": ("ddp", '`save_dir` is "a folder" on rank 0 and null on rank 1', None),
    "batch_size of HFTrainer": ("hf2", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "batch_size of FSDP": ("fsdp", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "frozen of ZeRO": ("zero3", SHAPES, None),
}
"""What differs: on which backend, what the error says, and the values of the ranks."""
QUICK = (
    "batch_size", "length", "samples", "samples of evaluation", "shape", "resume_from", "batch_size of HFTrainer",
    "frozen of ZeRO",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    cases = []
    for name in sorted({"allowed"} | asked_for(request, "name")):
        backend, _, values = DIFFERENCES.get(name, ("ddp", "", None))
        what = name.removesuffix(" of HFTrainer").removesuffix(" of FSDP").removesuffix(" of ZeRO")
        options = {"backend": backend, "what": what, "values": values}
        cases.append(Case(name, "test_alike:train", options))
    compile_once()
    return play(cases, folder)


@pytest.mark.parametrize("name", thinned(DIFFERENCES, QUICK))
def test_difference_between_ranks_is_an_error_on_all(name: str, outcomes: Any) -> None:
    words = DIFFERENCES[name][1]
    for outcome in outcomes[name]:
        assert outcome.code == 1
        assert "DistributedError" in outcome.output
        assert words in outcome.output
        assert "every rank" in outcome.output
    assert words not in outcomes[name][0].output.partition("DistributedError")[0]


def test_allowed_differences_between_ranks_are_no_error(outcomes: Any) -> None:
    first, second = outcomes["allowed"]
    assert (first.code, second.code) == (0, 0), (first.output, second.output)
    assert first.result == second.result
