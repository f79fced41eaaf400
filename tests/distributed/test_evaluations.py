"""Evaluations on two processes: errors, and memory."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from backends import Job, asked_for, launch_all, make_trainer, sound
from marks import thinned
from recipes import CountsPasses, rows, t16
from test_peak_memory import growth
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Callback
from omnitrain.core.errors import NonFiniteError

HERE = "test_evaluations"
SAMPLES, WIDTH = 64, 1 << 18
OUTPUTS = SAMPLES * WIDTH * 4 / 2**20
"""MiB of the outputs for all samples: 64."""
BACKENDS = ("ddp", "fsdp", "hf2")
KINDS = {
    "crash": "no such thing",
    "nan": "The loss of the evaluation set is nan at step 2. It comes from these samples of it: 13.",
}

# --- what runs on every process


class Steps(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_step_start(self, trainer: Any) -> None:
        self.count += 1


def crashing(y_true: Any, y_pred: Any) -> dict[str, float]:
    raise KeyError("no such thing")


def fail(backend: str, kind: str) -> dict[str, Any]:
    """Train with an evaluation that cannot work, and return what was raised after how many steps."""
    steps, (x, y) = Steps(), rows(20).tensors
    if kind == "nan":
        y[13] = float("nan")
    trainer = make_trainer(
        backend, t16(), rows(8), TensorDataset(x, y), loss_fn=F.mse_loss, callbacks=[steps], batch_size=2,
        compute_metrics=crashing if kind == "crash" else None, eval_batch_size=2, learning_rate=0.01, epochs=1,
    )  # fmt: skip
    with pytest.raises((KeyError, NonFiniteError)) as info:
        trainer.train()
    return {"raised": str(info.value), "steps": steps.count}


def learn(backend: str, sanity: bool) -> dict[str, Any]:
    """Train with an evaluation after each epoch, rehearsed or not."""
    trainer = make_trainer(
        backend, nn.Sequential(CountsPasses(), t16(dropout=0.3)), rows(21), rows(7), loss_fn=F.mse_loss,
        batch_size=2, epochs=2, learning_rate=0.05, sanity=sanity, compute_metrics="mse", load_best_at_end=False,
    )  # fmt: skip
    metrics = trainer.train()
    return {"valid": metrics["valid"], "logged": metrics["train_metrics_history"]}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).expand(-1, WIDTH)


def mean_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0].mean() + labels.sum() * 0


def mean_of(y_true: Any, y_pred: Any) -> dict[str, float]:
    return {"mean": float(y_pred[:, 0].mean())}


class Keeps(torchmetrics.Metric):
    """A metric that keeps all outputs, as one of a ranking does."""

    higher_is_better = True
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx="cat")

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.kept.append(outputs.contiguous())

    def compute(self) -> torch.Tensor:
        parts = [self.kept] if isinstance(self.kept, torch.Tensor) else self.kept  # once they have been reduced
        return sum(one[:, 0].sum() for one in parts) / sum(map(len, parts))


def hold(backend: str, call: str, by_states: bool = False) -> dict[str, Any]:
    """Return by how many MiB a process grows in an evaluation, or prediction, that needs all outputs."""
    metric = Keeps() if by_states else mean_of
    trainer = make_trainer(backend, Wide(), rows(4), loss_fn=mean_loss, compute_metrics=metric, eval_batch_size=1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 1), torch.randn(SAMPLES, 1))
    getattr(trainer, call)(TensorDataset(*(one[:2] for one in data.tensors)))
    gc.collect()
    return {"grew": growth(lambda: getattr(trainer, call)(data))}


# --- what came of it


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    sanity = sorted(asked_for(request, "backend"))
    failing = sorted(asked_for(request, "backend", "kind"))
    jobs = [Job(f"{one}-{kind}", one, f"{HERE}:fail", {"kind": kind}) for one, kind in failing]
    jobs += [Job(f"{one}-{on}", one, f"{HERE}:learn", {"sanity": on}) for one in sanity for on in (False, True)]
    jobs += [Job(f"hold-{call}", "ddp", f"{HERE}:hold", {"call": call}) for call in ("evaluate", "predict")]
    jobs.append(Job("hold-states", "ddp", f"{HERE}:hold", {"call": "evaluate", "by_states": True}))
    return sound(launch_all(jobs, tmp_path_factory.mktemp("evaluations")))


@pytest.mark.parametrize(
    ("backend", "kind"),
    thinned(itertools.product(BACKENDS, KINDS), [("ddp", "crash"), ("hf2", "nan")]),
)
def test_evaluation_error_is_raised_on_all_ranks(results: Any, backend: str, kind: str) -> None:
    for rank in results[f"{backend}-{kind}"]:
        assert KINDS[kind] in rank["raised"]
        assert rank["steps"] == (0 if kind == "crash" else 2)  # sample 13 is in no first batch


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["hf2"]))
def test_sanity_evaluation_leaves_no_trace(results: Any, backend: str) -> None:
    assert results[f"{backend}-True"] == results[f"{backend}-False"]


@pytest.mark.parametrize(
    ("name", "most", "most_elsewhere"),
    [
        # the main rank has what the ranks sent, and one array of it; half is rank 1's, and 16 MiB are on the way
        ("evaluate", 2.8, 1.3),
        ("states", None, 1.8),  # half is rank 1's, which it packs and sends
        ("predict", 2.8, 1.8),
    ],
)
def test_outputs_are_gathered_once(results: Any, name: str, most: float | None, most_elsewhere: float) -> None:
    """For a function they reach the main rank, for a metric with states its states do, for predictions each rank."""
    main, other = (rank["grew"] / OUTPUTS for rank in results[f"hold-{name}"])
    assert most is None or main < most
    assert other < most_elsewhere
