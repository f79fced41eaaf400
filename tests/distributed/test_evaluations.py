"""Evaluations on two processes: what they refuse, what they keep in memory, and the loss of a user's own epochs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from backends import Job, launch_all, make_trainer
from recipes import rows, t16
from test_peak_memory import growth
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import AccelerateTrainer, Callback

HERE = "test_evaluations"
SAMPLES, WIDTH = 64, 1 << 18
WHOLE = SAMPLES * WIDTH * 4 / 2**20
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


def refuse(backend: str, kind: str) -> dict[str, Any]:
    """Train with an evaluation that cannot work, and return what was raised after how many steps."""
    steps, (x, y) = Steps(), rows(20).tensors
    if kind == "nan":
        y[13] = float("nan")
    trainer = make_trainer(
        backend, t16(), rows(8), TensorDataset(x, y), loss_fn=F.mse_loss, callbacks=[steps], batch_size=2,
        compute_metrics=crashing if kind == "crash" else None, eval_batch_size=2, learning_rate=0.01, epochs=1,
    )  # fmt: skip
    try:
        trainer.train()
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}", "steps": steps.count}
    return {"raised": "", "steps": steps.count}


def learn(backend: str, sanity: bool) -> dict[str, Any]:
    """Train with an evaluation after each epoch, rehearsed or not."""
    model = t16(dropout=0.3)
    trainer = make_trainer(
        backend, model, rows(21), rows(7), loss_fn=F.mse_loss, batch_size=2, epochs=2, learning_rate=0.05,
        sanity=sanity, compute_metrics="mse", load_best_at_end=False,
    )  # fmt: skip
    metrics = trainer.train()
    return {"valid": metrics["valid"], "logged": metrics["train_metrics_history"]}


class OwnEpoch(AccelerateTrainer):
    def _train_epoch(self, epoch: int) -> float:
        total, samples = 0.0, 0
        for batch in self.train_loader:
            x, y = self._prepare_batch(batch)
            loss = self.loss_fn(self.model_wrapped(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total, samples = total + loss.item() * len(x), samples + len(x)
        self.own = [total, samples]
        return total / samples


def own_epoch(backend: str) -> dict[str, Any]:
    """Train an epoch by a loop of the user's own, of which the ranks see 6 and 5 samples."""
    trainer = OwnEpoch(t16(), rows(11), loss_fn=F.mse_loss, batch_size=3, epochs=1, progress_bar=False, shuffle=False)
    metrics = trainer.train()
    return {"own": trainer.own, "row": metrics["train_metrics_history"][0]["train_loss"]}


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
    data = TensorDataset(torch.randn(SAMPLES, 1), torch.randn(SAMPLES, 1))
    getattr(trainer, call)(TensorDataset(*(one[:2] for one in data.tensors)))
    gc.collect()
    return {"grew": growth(lambda: getattr(trainer, call)(data))}


# --- what came of it


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs = [Job(f"{one}-{kind}", one, f"{HERE}:refuse", {"kind": kind}) for one in BACKENDS for kind in KINDS]
    for one in BACKENDS:
        jobs += [Job(f"{one}-{sanity}", one, f"{HERE}:learn", {"sanity": sanity}) for sanity in (False, True)]
    jobs += [Job(f"hold-{call}", "ddp", f"{HERE}:hold", {"call": call}) for call in ("evaluate", "predict")]
    jobs.append(Job("hold-states", "ddp", f"{HERE}:hold", {"call": "evaluate", "by_states": True}))
    return launch_all([*jobs, Job("own", "ddp", f"{HERE}:own_epoch")], tmp_path_factory.mktemp("evaluations"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_evaluation_refuses_is_raised_on_all_ranks(found: Any, backend: str, kind: str) -> None:
    for rank in found[f"{backend}-{kind}"]:
        assert KINDS[kind] in rank["raised"]
        assert rank["steps"] == (0 if kind == "crash" else 2)  # sample 13 is in no first batch


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rehearsal_leaves_no_trace_on_any_rank(found: Any, backend: str) -> None:
    assert "error" not in found[f"{backend}-True"][0]
    assert found[f"{backend}-True"] == found[f"{backend}-False"]


def test_the_loss_of_a_users_own_epoch_is_the_mean_over_the_samples_of_all_ranks(found: Any) -> None:
    ranks = found["own"]
    (first, one), (second, other) = (rank["own"] for rank in ranks)
    assert (one, other) == (6, 5)
    assert [rank["row"] for rank in ranks] == [pytest.approx((first + second) / 11, rel=1e-12)] * 2


def test_outputs_for_a_function_are_gathered_on_the_main_rank_once(found: Any) -> None:
    main, other = (rank["grew"] for rank in found["hold-evaluate"])
    assert main < 2.8 * WHOLE  # what the ranks sent, and one array of it
    assert other < 1.3 * WHOLE  # half of it is its own, and parts of 16 MiB are on the way


def test_the_states_of_a_metric_reach_the_main_rank_alone(found: Any) -> None:
    assert "grew" in found["hold-states"][0], found["hold-states"]
    main, other = (rank["grew"] for rank in found["hold-states"])
    print(main / WHOLE, other / WHOLE)
    assert other < 1.8 * WHOLE  # half of it is its own, which it packs and sends


def test_predictions_reach_each_rank_once(found: Any) -> None:
    main, other = (rank["grew"] for rank in found["hold-predict"])
    assert main < 2.8 * WHOLE and other < 1.8 * WHOLE
