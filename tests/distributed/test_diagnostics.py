"""Diagnostics on two processes: traces and replays have the numbers of one, checks and plans leave no trace."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import retentive
import torch
import torch.nn.functional as F
from backends import PROCESSES, Jobs, asked_for, launch_all, make_trainer, sound, tensors_of
from forking import current_rank, joined
from marks import thinned
from recipes import StopAt
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from omnitrain import Trace
from omnitrain.callbacks.trace import TRACED
from omnitrain.diagnostics.replay import StepRecorder, StepReplayed

REHEARSED = ("ddp", "hf2", "fsdp")


def trace(backend: str, folder: str, stop: int = 0) -> dict[str, Any]:
    """Train 4 steps on small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(-3, 4, (16, 8), generator=generator).double()
    model = nn.Linear(4, 4).double()
    with torch.no_grad():
        model.weight.copy_(torch.randint(-3, 4, (4, 4), generator=generator))
        model.bias.zero_()
    make_trainer(
        backend, model, TensorDataset(numbers[:, :4].clone(), numbers[:, 4:].clone()), loss_fn=F.mse_loss, epochs=2,
        batch_size=8 // PROCESSES[backend], learning_rate=0.25, optimizer="torch.optim.SGD", max_grad_norm=None,
        save_dir=folder, save_steps=1, callbacks=[Trace(), StopAt(stop)],
    ).train(resume_from="auto")  # fmt: skip
    return {}


def measure(backend: str, folder: str) -> dict[str, Any]:
    """Return the samples of the only step, of which ranks have 4 and 3, with their losses."""
    recorder = StepRecorder(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    x = torch.linspace(-1, 1, 28, dtype=torch.float64).view(7, 4)
    trainer = make_trainer(
        backend, model, TensorDataset(x, x.flip(1)), loss_fn=F.mse_loss, epochs=1, batch_size=8 // PROCESSES[backend],
        save_dir=folder, callbacks=[recorder], shuffle=False,
    )  # fmt: skip
    with contextlib.suppress(StepReplayed):
        trainer.train()
    return recorder.result


@pytest.fixture(scope="module")
def results(request: Any, folder: Path) -> Any:
    first, last = Jobs(), Jobs()
    for backend in {"native", "ddp"} | asked_for(request, "backend", test="test_trace"):
        first.add(backend, backend, trace, folder=str(folder / backend))
    first.add("stopped", "ddp", trace, folder=str(folder / "stopped"), stop=2)
    for backend, rehearses in itertools.product(REHEARSED, (False, True)):
        first.add(f"{backend}-{rehearses}", backend, run, rehearses=rehearses)
    first.add("augmented", "fsdp", check_augmented)
    for backend in {"native"} | asked_for(request, "sharded"):
        first.add(f"measured {backend}", backend, measure, folder=str(folder / f"measured {backend}"))
    last.add("resumed", "native", trace, folder=str(folder / "stopped"))
    return joined(sound(launch_all(first, folder / "a")), sound(launch_all(last, folder / "b")))


@pytest.fixture
def traces(results: Any, folder: Path) -> Any:

    def read(name: str) -> list[dict[str, Any]]:
        assert results[name] is not None
        return [json.loads(line) for line in (folder / name / "trace.jsonl").read_text().splitlines()]

    return read


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2", "zero1", "zero3", "hf_fsdp"], ["ddp", "fsdp"]))
def test_trace_is_that_of_one_process(backend: str, traces: Any) -> None:
    hidden = {"zero1": {"gradients"}, "zero3": {"gradients", "weights", "update"}}.get(backend, set())
    names = ["mean_loss", *(name for name in TRACED if name not in hidden)]
    lines, expected = ([[line.get(name) for name in names] for line in traces(on)] for on in (backend, "native"))
    assert lines == expected and len(lines) == 4 and all(None not in line for line in expected)


def test_trace_continues_on_one_process(traces: Any) -> None:
    assert traces("ddp") == traces("stopped") == traces("native")


@pytest.mark.parametrize("sharded", thinned(["fsdp", "zero3"], ["fsdp"]))
def test_replay_measures_losses_of_sharded_weights(sharded: str, results: Any) -> None:
    """Of each sample as on one process; norms of gradients are not those of samples there."""
    (expected,), parts = results["measured native"], results[f"measured {sharded}"]
    losses = dict(zip(expected["samples"], expected["losses"], strict=True))
    assert len(losses) == len(expected["grad_norms"]) == 7
    for result in parts:
        assert dict(zip(result["samples"], result["losses"], strict=True)) == pytest.approx(losses, rel=1e-6)
        assert not result["grad_norms"] and "gradients are added up over ranks" in result["notes"][0]


# --- checks and plans


def run(backend: str, rehearses: bool) -> dict[str, Any]:
    retentive.COLLATING.manual_seed(3)
    trainer = make_trainer(
        backend, retentive.Noisy(), retentive.Drawn(40), retentive.Drawn(8), batch_size=4,
        loss_fn=nn.CrossEntropyLoss(), data_collator=retentive.collate, learning_rate=1e-2, epochs=1,
        lr_scheduler="cosine",
    )  # fmt: skip
    outcome: dict[str, Any] = {}
    if rehearses:
        result, plan = trainer.check(), trainer.plan()
        outcome = {
            "findings": [(finding.check, finding.where) for finding in result.findings], "outcomes": result.outcomes,
            "plan": (plan.length, plan.counts, plan.memory["weights"], plan.memory["optimizer"]),
            "bytes": sum(tensor.nbytes for tensor in trainer.get_model().state_dict().values()),
        }  # fmt: skip
    metrics = trainer.train()
    weights = {name: tensor.tolist() for name, tensor in tensors_of(trainer).items()}
    return {**outcome, "trained": [weights, metrics["train_metrics_history"], metrics["valid"]]}


class Augmented(Dataset[dict[str, Any]]):
    """Texts of 3 to 7 words; on the second rank, each reading of one gives others."""

    def __init__(self) -> None:
        self.turns = itertools.count() if current_rank() else itertools.repeat(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": torch.full((3 + index % 5,), 1 + next(self.turns) % 7), "labels": index % 3}


class Texts(nn.Sequential):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words).sum(1)


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    words = nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True)
    return {"words": words, "labels": torch.tensor([sample["labels"] for sample in samples])}


def check_augmented(backend: str) -> dict[str, Any]:
    options = {"batch_size": 4, "loss_fn": nn.CrossEntropyLoss(), "data_collator": pad, "epochs": 1, "timeout": 60}
    trainer = make_trainer(backend, Texts(nn.Embedding(8, 4), nn.Linear(4, 3)), Augmented(), **options)
    return {"padding": trainer.check().outcomes["padding"]}


@pytest.mark.parametrize("backend", REHEARSED)
def test_rehearsals_leave_no_trace_on_two_ranks(results: Any, backend: str) -> None:
    plain, rehearsed = (results[f"{backend}-{flag}"] for flag in (False, True))
    assert [rank["trained"] for rank in plain] == [rank["trained"] for rank in rehearsed]
    first, second = rehearsed
    assert {**first, "bytes": 0} == {**second, "bytes": 0}
    length, counts, weight_bytes, optimizer_bytes = first["plan"]
    assert counts == {"evaluations": 1, "saves": 0} and ["mixing", "BatchNorm1d 'body.1'"] in first["findings"]
    assert (length["steps"], length["samples"], length["samples_per_step"]) == (5, 40, 8)
    if backend == "fsdp":  # each rank has about half of the parameters
        assert weight_bytes < 0.75 * first["bytes"] and optimizer_bytes < 1.5 * first["bytes"]
        tried = [name for name, outcome in first["outcomes"].items() if "gradients of sharded weights" not in outcome]
        assert tried == ["loss", "shapes", "mixing", "padding", "labels", "features", "overlap"]
    else:
        assert weight_bytes == first["bytes"] and optimizer_bytes > first["bytes"]


def test_check_of_padding_agrees_on_random_samples(results: Any) -> None:
    """No rank runs a pass for which the others do not come."""
    assert results["augmented"] == [{"padding": "not tried: another rank reads other samples"}] * 2
