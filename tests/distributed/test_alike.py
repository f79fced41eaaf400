"""What must be the same on all ranks is compared before it matters: an error on all of them names what differs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import asked_for, make_trainer  # noqa: E402
from compiled import compile_once  # noqa: E402
from forking import Case, Found, Outcome, play  # noqa: E402
from marks import thinned  # noqa: E402
from recipes import rows, t16  # noqa: E402

from omnitrain import Callback  # noqa: E402

pytestmark = pytest.mark.distributed


class Idle(Callback):
    pass


def train(backend: str, what: str, values: list[Any] | None = None, folder: str = "") -> list[float]:
    """Train on two ranks that differ in one thing; return the weights."""
    rank = int(os.environ["RANK"])
    mine = None if values is None else values[rank]
    model, data = t16(dtype=torch.float32), rows(32, torch.float32)
    options: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 1,
        "loss_fn": F.mse_loss,
        "eval_dataset": rows(8, torch.float32),
    }
    whence = None
    if what == "length":
        data = rows(32 - 4 * rank, torch.float32)
    elif what == "evaluation set":
        options["eval_dataset"] = rows(8, torch.float32) if rank == 0 else None
    elif what == "loss_fn":
        options["loss_fn"] = F.mse_loss if rank == 0 else F.l1_loss
    elif what == "shape":
        model = nn.Linear(4, 1 + rank)
    elif what == "frozen":
        next(model.children()).requires_grad_(rank == 0)
    elif what == "optimizer":
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank))
    elif what == "resume_from":
        whence, options["save_dir"] = (None if rank == 0 else "auto"), folder
    elif what == "save_dir":
        options["save_dir"] = folder if rank == 0 else None
    elif what == "own":
        options |= {"save_dir": f"{folder}/{rank}", "callbacks": [Idle()] * rank, "num_workers": rank}
        options |= {"progress_bar": rank == 0, "timeout": 600 + rank, "trial_name": f"rank {rank}"}
    elif values is not None:
        options[what] = mine
    trainer = make_trainer(backend, model, data, **options)
    if what == "evaluate":
        trainer.evaluate(rows(8 + rank, torch.float32))
    if what == "rate":
        trainer.optimizer.param_groups[0]["lr"] = 0.1 * rank
    trainer.train(resume_from=whence)
    return [float(one.sum()) for one in trainer.model.parameters()]


DIFFERING: dict[str, tuple[Any, ...]] = {
    "batch_size": ("ddp", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "epochs": ("ddp", "`epochs` is 1 on rank 0 and 2 on rank 1", [1, 2]),
    "learning_rate": ("ddp", "`learning_rate` is 0.1 on rank 0 and 0.2 on rank 1", [0.1, 0.2]),
    "seed": ("ddp", "`seed` is 1 on rank 0 and 2 on rank 1", [1, 2]),
    "eval_steps": ("ddp", '`eval_steps` is 2 on rank 0 and "1ep" on rank 1', [2, "1ep"]),
    "max_grad_norm": ("ddp", "`max_grad_norm` is 1.0 on rank 0 and null on rank 1", [1.0, None]),
    "loss_fn": (
        "ddp",
        '`loss_fn` is "torch.nn.functional.mse_loss" on rank 0 and "torch.nn.functional.l1_loss" on',
        None,
    ),
    "evaluation set": ("ddp", '`eval_dataset` is "torch.utils.data.dataset.TensorDataset" on rank 0 and null on', None),
    "length": ("ddp", "`the training set` is 32 on rank 0 and 28 on rank 1", None),
    "evaluate": ("ddp", "`the dataset` is 8 on rank 0 and 9 on rank 1", None),
    "shape": ("ddp", '`weight` is "torch.float32 of shape (1, 4), which trains" on rank 0 and', None),
    "frozen": ("ddp", '"torch.float32 of shape (16, 4), which trains" on rank 0 and "torch.float32 of shape', None),
    "optimizer": ("ddp", '`optimizer_groups` is [{"lr": 0.1, ', None),
    "rate": ("ddp", "`learning_rates` is [0.0] on rank 0 and [0.1] on rank 1", None),
    "resume_from": ("ddp", '`resume_from` is null on rank 0 and "auto" on rank 1', None),
    "find_unused_parameters": ("ddp", "`find_unused_parameters` is false on rank 0 and true on rank 1", [False, True]),
    "save_dir": ("ddp", '`save_dir` is "a folder" on rank 0 and null on rank 1', None),
    "batch_size of HFTrainer": ("hf2", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "frozen of HFTrainer": ("hf2", '"torch.float32 of shape (16, 4), which trains" on rank 0 and', None),
    "batch_size of FSDP": ("fsdp", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "frozen of ZeRO": ("zero3", '"torch.float32 of shape (16, 4), which trains" on rank 0 and', None),
}
"""What differs: on which backend, what the error says, and the values of the ranks."""
QUICK = ("batch_size", "length", "shape", "resume_from", "batch_size of HFTrainer", "frozen of ZeRO")


def case(name: str, backend: str, values: list[Any] | None) -> Case:
    environment = {} if "zero" in backend else {"ACCELERATE_USE_CPU": "true"}
    options = {"backend": backend, "what": name.partition(" of ")[0], "values": values}
    return Case(name, "test_alike:train", options, environment=environment)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    asked = asked_for(request, "name")
    cases = [case(name, DIFFERING[name][0], DIFFERING[name][2]) for name in DIFFERING if name in asked]
    folder = tmp_path_factory.mktemp("alike")
    for one in [*cases, own := case("own", "ddp", None)]:
        one.options["folder"] = str(folder / one.name / "run")
    compile_once()
    return play([*cases, own], folder)


@pytest.mark.parametrize("name", thinned(tuple(DIFFERING), QUICK))
def test_what_differs_between_ranks_is_an_error_on_all_that_names_it(name: str, outcomes: Any) -> None:
    _, words, _ = DIFFERING[name]
    for outcome in outcomes[name]:
        assert outcome.code == 1
        assert "DistributedError" in outcome.output
        assert words in outcome.output
        assert "every rank" in outcome.output
    assert words not in outcomes[name][0].output.partition("DistributedError")[0]


def test_what_each_rank_may_have_of_its_own_is_no_error(outcomes: Any) -> None:
    for outcome in outcomes["own"]:
        assert outcome.code == 0, outcome.output
    assert outcomes["own"][0].result == outcomes["own"][1].result
