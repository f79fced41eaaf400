"""`Trace` on two processes: the digests of one process, where the numbers are the same to the bit."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Jobs, asked_for, launch_all, make_trainer, sound
from forking import joined
from marks import thinned
from recipes import StopAt
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Trace
from omnitrain.callbacks.trace import TRACED
from omnitrain.diagnostics.replay import StepRecorder, StepReplayed


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
    for backend in {"native", "ddp"} | asked_for(request, "backend"):
        first.add(backend, backend, trace, folder=str(folder / backend))
    first.add("stopped", "ddp", trace, folder=str(folder / "stopped"), stop=2)
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
