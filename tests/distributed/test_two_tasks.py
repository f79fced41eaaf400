"""Training on several tasks on two ranks, where a rank may have no sample of a task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Job, asked_for, gap, launch_all, make_trainer, sound
from marks import thinned
from recipes import StopAt
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import MultiTask, MultiTaskUnit
from omnitrain.checkpoint.tensors import whole

HERE = "test_two_tasks"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"kind": nn.Linear(4, 3), "rare": nn.Linear(4, 1)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](self.body(x).tanh())


def train(backend: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train on a task of 22 samples and one of 3: most micro-batches have none of the second."""
    torch.manual_seed(0)
    x = torch.randn(25, 4)
    sets = {"kind": TensorDataset(x[:22], x[:22].argmax(1) % 3), "rare": TensorDataset(x[22:], x[22:].sum(1, True))}
    model, tasks = Heads(), MultiTask(sets)
    unit = MultiTaskUnit(model, {"kind": F.cross_entropy, "rare": F.mse_loss}, {"rare": 2.0})
    trainer = make_trainer(
        backend, model, tasks, unit=unit, epochs=2, batch_size=4 // PROCESSES[backend], global_batch_size=8,
        learning_rate=0.05, eval_dataset=tasks.evaluation(sets, {"kind": "accuracy"}), save_dir=folder,
        save_steps=folder and 3, callbacks=[StopAt(stop)],
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    evaluated = trainer.evaluate()
    tensors = {name: whole(one) for name, one in sorted(trainer.backend.model_tensors().items())}
    return {"evaluated": evaluated, "tensors": tensors}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tasks")
    jobs = []
    for backend in sorted({"native"} | asked_for(request, "backend")):
        runs: dict[str, Any] = {"straight": {}}
        if backend in asked_for(request, "backend", test="test_resumed"):
            saved = {"folder": str(folder / backend)}
            runs |= {"cut": {**saved, "stop": 5}, "resumed": saved}
        jobs += [Job(f"{backend}-{name}", backend, f"{HERE}:train", options) for name, options in runs.items()]
    return sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero3", "hf2"], ["ddp", "fsdp", "hf2"]))
def test_tasks_on_two_ranks_match_one_process(results: Any, backend: str) -> None:
    expected, ranks = results["native-straight"][0], results[f"{backend}-straight"]
    assert gap(ranks[0]["tensors"], expected["tensors"]) < 2e-6
    for rank in ranks:
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)


@pytest.mark.parametrize("backend", thinned(["ddp", "zero3"], ["ddp"]))
def test_resumed_tasks_match_straight_run_exactly(results: Any, backend: str) -> None:
    resumed, straight = (results[f"{backend}-{name}"][0]["tensors"] for name in ("resumed", "straight"))
    assert gap(resumed, straight) == 0
