"""Training on several tasks on two ranks: one of them may have no sample of a task, and all go through its layers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import PROCESSES, Job, gap, launch_all, make_trainer, sound  # noqa: E402
from recipes import StopAt  # noqa: E402

from omnitrain import MultiTask, MultiTaskUnit  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_two_tasks"
BACKENDS = ["ddp", "fsdp", "zero3", "hf2"]


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
    model, ranks = Heads(), PROCESSES[backend]
    tasks = MultiTask(sets)
    unit = MultiTaskUnit(model, {"kind": F.cross_entropy, "rare": F.mse_loss}, {"rare": 2.0})
    trainer = make_trainer(
        backend, model, tasks, unit=unit, epochs=2, batch_size=4 // ranks, global_batch_size=8, learning_rate=0.05,
        eval_dataset=tasks.evaluation(sets, {"kind": "accuracy"}), save_dir=folder, save_steps=folder and 3,
        callbacks=[StopAt(stop)],
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    evaluated = trainer.evaluate()
    tensors = {name: whole(one) for name, one in sorted(trainer.backend.model_tensors().items())}
    return {"evaluated": evaluated, "tensors": tensors}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("tasks")
    jobs = [Job(backend, backend, f"{HERE}:train", {}) for backend in BACKENDS]
    for backend in ("ddp", "zero3"):
        kept = {"folder": str(folder / backend)}
        jobs.append(Job(f"{backend}-cut", backend, f"{HERE}:train", {**kept, "stop": 5}))
        jobs.append(Job(f"{backend}-resumed", backend, f"{HERE}:train", kept))
    found = sound(launch_all(jobs, folder / "launch"))
    return found | sound(launch_all([Job("native", "native", f"{HERE}:train", {})], folder / "native"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_give_the_numbers_of_one_process(results: Any, backend: str) -> None:
    one, two = results["native"][0], results[backend]
    assert gap(two[0]["tensors"], one["tensors"]) < 2e-6
    for each in two:
        assert each["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5)


@pytest.mark.parametrize("backend", ["ddp", "zero3"])
def test_a_run_on_two_ranks_is_resumed_bit_for_bit_in_mid_epoch(results: Any, backend: str) -> None:
    assert gap(results[f"{backend}-resumed"][0]["tensors"], results[backend][0]["tensors"]) == 0
