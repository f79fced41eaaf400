"""States on two ranks: buffers that forward passes update, which are those of the main one, and states of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, bound, gap, launch_all, make_trainer, named, sound, tensors_of
from forking import joined
from marks import thinned
from recipes import StopAt, rows
from torch import nn
from torch.utils.data import default_collate

from omnitrain import Callback

HERE = "test_states"


# --- what runs on every process


class Drifting(nn.Module):
    """Normalizes by BatchNorm, and by a running mean that its forward passes in training use, as a codebook's are.

    It scales by a buffer whose elements share memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scale", torch.full((1,), 1.5).expand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(x))
        if self.training:
            with torch.no_grad():
                self.get_buffer("center").lerp_(hidden.square().mean(0), 0.5)
        return self.head((hidden - self.get_buffer("center")).tanh() * self.scale)


class Buffers(Callback):
    """Notes the buffers of this rank at each evaluation of the run."""

    def __init__(self) -> None:
        self.noted: list[dict[str, torch.Tensor]] = []

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self.noted.append(of(trainer.get_model()))


def of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def drift(backend: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train for 6 steps; with a folder, evaluate and save on the way, stop after a step, or resume from there."""
    data, buffers, options = rows(24, torch.float32), Buffers(), dict[str, Any]()
    if folder:
        options = {"eval_dataset": rows(8, torch.float32), "eval_steps": 2, "save_dir": folder, "save_steps": 2}
        options["load_best_at_end"] = False
    trainer = make_trainer(
        backend, Drifting(), data, loss_fn=F.mse_loss, batch_size=4, epochs=2, learning_rate=0.05,
        optimizer="torch.optim.AdamW", callbacks=[buffers, *([StopAt(stop)] if stop else [])], **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    tensors = {f"weights/{name}": tensor for name, tensor in tensors_of(trainer).items()}
    for number, noted in enumerate(buffers.noted):
        tensors |= {f"evaluation {number}/{name}": one for name, one in noted.items()}
    if folder:
        trainer.load_checkpoint("best")
    return {
        "best": trainer.metrics["best_valid"].get("eval_loss"),
        "again": [trainer.evaluate()["eval_loss"] for _ in range(2)] if folder else [],
        "tensors": tensors,
    }


class Replacing(nn.Module):
    """Replaces a buffer, which the next forward pass uses, by one whose elements share memory, or by a copy of that."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.copies = nn.Linear(4, 1), copies
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.head(x - self.center)
        if self.training:
            center = x.detach().mean().expand(4)
            self.center = center.clone() if self.copies else center
        return output


def replace(backend: str, copies: bool) -> dict[str, Any]:
    """Train for 3 steps of two micro-batches, with an evaluation after each."""
    data = rows(24, torch.float32)
    trainer = make_trainer(
        backend, Replacing(copies), data, loss_fn=F.mse_loss, batch_size=2, global_batch_size=8, epochs=1,
        learning_rate=0.05, eval_dataset=data[:8], eval_steps=1,
    )  # fmt: skip
    trainer.train()
    return {"tensors": tensors_of(trainer), "losses": [row["eval_loss"] for row in trainer.metrics["valid"]]}


class Sums:
    """A collator whose state is the sum of the labels that this rank has seen."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        self.total += y.sum()
        return x * (1 + self.total / 10), y

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"].clone()


def collate(backend: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train for 6 steps; with a folder, stop after a step or resume from there."""
    torch.manual_seed(0)
    sums, options = Sums(), {"save_dir": folder, "save_steps": 100} if folder else {}
    trainer = make_trainer(
        backend, nn.Linear(4, 1), rows(24, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=2,
        learning_rate=0.05, data_collator=sums, callbacks=[StopAt(stop)] if stop else [], **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    weights = tensors_of(trainer)
    return {"tensors": {**weights, "total": sums.total}}


# --- tests

BACKENDS = ("ddp", "fsdp", "hf2", "zero1", "zero2", "zero3", "hf_fsdp", "hf_zero2", "hf_zero3")
QUICK = ("ddp", "fsdp", "zero2")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    first, second = [], []
    for backend in sorted({"ddp", *asked_for(request, "backend")}):
        saved = {"folder": str(folder / backend)}
        first.append(Job(f"straight-{backend}", backend, f"{HERE}:drift"))
        first.append(Job(f"cut-{backend}", backend, f"{HERE}:drift", {**saved, "stop": 4}))
        second.append(Job(f"resumed-{backend}", backend, f"{HERE}:drift", saved))
    for backend in sorted(asked_for(request, "replaced_on")):
        for copies in (True, False):
            first.append(Job(f"replace-{backend}-{copies}", backend, f"{HERE}:replace", {"copies": copies}))
    saved = {"folder": str(folder / "collate")}
    first.append(Job("collate-straight", "ddp", f"{HERE}:collate"))
    first.append(Job("collate-cut", "ddp", f"{HERE}:collate", {**saved, "stop": 4}))
    second.append(Job("collate-resumed", "ddp", f"{HERE}:collate", saved))
    return joined(sound(launch_all(first, folder / "first")), sound(launch_all(second, folder / "second")))


@pytest.mark.parametrize("backend", thinned(BACKENDS, QUICK))
def test_buffers_of_ranks_are_alike(results: Any, backend: str) -> None:
    """In evaluations and at the end; the best evaluation is that of the weights and buffers that were saved."""
    for name in ("straight", "cut", "resumed"):
        first, second = (rank["tensors"] for rank in results[f"{name}-{backend}"])
        assert first.keys() == second.keys() and all(torch.equal(one, second[name]) for name, one in first.items())
    assert sum(name.endswith("/center") for name in first) == 2
    for rank in results[f"cut-{backend}"]:
        assert rank["again"] == [rank["best"]] * 2


@pytest.mark.parametrize("backend", thinned(BACKENDS, QUICK))
def test_buffers_survive_a_resume(results: Any, backend: str) -> None:
    """To the bit, those of a run without a save or an evaluation."""
    for straight, resumed in zip(results[f"straight-{backend}"], results[f"resumed-{backend}"], strict=True):
        for name, one in named(straight, "weights").items():
            assert torch.equal(resumed["tensors"][name], one), name


@pytest.mark.parametrize("backend", thinned(BACKENDS[1:], QUICK[1:]))
def test_buffers_are_those_of_ddp(results: Any, backend: str) -> None:
    for rank, reference in zip(results[f"straight-{backend}"], results["straight-ddp"], strict=True):
        assert gap(rank["tensors"], reference["tensors"]) <= bound("zero2")


def test_states_of_each_rank_survive_a_resume(results: Any) -> None:
    straight, resumed = results["collate-straight"], results["collate-resumed"]
    assert [gap(one["tensors"], other["tensors"]) for one, other in zip(straight, resumed, strict=True)] == [0, 0]
    first, second = (rank["tensors"]["total"] for rank in straight)
    assert first != second


@pytest.mark.parametrize("replaced_on", thinned(BACKENDS, QUICK))
def test_buffers_may_be_replaced_by_expanded_ones(results: Any, replaced_on: str) -> None:
    """DDP broadcasts into them what the main rank has, and nothing can be written to a tensor made by `expand`."""
    for number in range(2):
        copied, expanded = (results[f"replace-{replaced_on}-{copies}"][number] for copies in (True, False))
        assert expanded["losses"] == copied["losses"]
        assert gap(expanded["tensors"], copied["tensors"]) == 0
