"""Events inside of a step on two ranks: their order, and callbacks that fail or stop on one of them."""

from __future__ import annotations

from typing import Any

import pytest
from backends import DTYPES, Job, asked_for, dtype_of, gap, launch_all, make_trainer, sound
from marks import thinned
from recipes import Everything, rows, t16
from torch import nn

from omnitrain import Callback
from omnitrain.checkpoint.tensors import whole

BATCH = ["batch_start", "after_forward", "after_loss", "after_backward", "batch_end"]
UPDATE = ["before_optimizer_step", "after_optimizer_step", "before_zero_grad", "after_zero_grad", "step_end"]


class FailsOnRankOne(Callback):
    """Fails in each micro-batch of the second rank, which only warns there."""

    on_error = "warn"
    asks_alone = False

    def on_batch_start(self, trainer: Any, batch: Any, number: int) -> None:
        if trainer.rank == 1:
            raise RuntimeError("boom")


class StopsOnRankOne(Callback):
    """Stops on the second rank, within the third step."""

    def on_after_loss(self, trainer: Any, loss: Any) -> None:
        if trainer.rank == 1 and trainer.progress.step == 2:
            trainer.stop()


def train(backend: str, watched: bool) -> dict[str, Any]:
    everything, dtype = Everything(), DTYPES[dtype_of(backend)]
    options: dict[str, Any] = {"max_steps": 3}
    if watched:
        options = {"max_steps": 9, "callbacks": [everything, FailsOnRankOne(), StopsOnRankOne()]}
    trainer = make_trainer(
        backend, t16(dtype=dtype), rows(40, dtype), batch_size=2, gradient_accumulation_steps=2, learning_rate=0.05,
        loss_fn=nn.functional.mse_loss, log_steps=100, **options,
    )  # fmt: skip
    trainer.train()
    failures = {listener.name: listener.failures for listener in trainer.lifecycle.listeners}
    return {
        "events": everything.events, "failures": failures.get("FailsOnRankOne"), "step": trainer.progress.step,
        "tensors": {name: whole(tensor) for name, tensor in trainer.backend.model_tensors().items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    jobs = [
        Job(f"{backend}-{watched}", backend, "test_events:train", {"watched": watched})
        for backend in sorted(asked_for(request, "backend"))
        for watched in (True, False)
    ]
    return sound(launch_all(jobs, tmp_path_factory.mktemp("events")))


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2", "zero2"], ["ddp", "fsdp", "hf2"]))
def test_events_in_steps_match_on_all_ranks(results: Any, backend: str) -> None:
    """A stop on one rank ends all of them, and no callback changes the weights; DeepSpeed has no events of clipping."""
    clipping = [] if backend == "zero2" else ["before_clip", "after_clip"]
    step = ["data_fetched", "step_start", *BATCH * 2, *clipping, *UPDATE]
    for watched, plain in zip(results[f"{backend}-True"], results[f"{backend}-False"], strict=True):
        assert watched["step"] == plain["step"] == 3
        assert watched["events"] == ["train_start", "epoch_start", *step * 3, "epoch_end", "log", "train_end"]
        assert gap(watched["tensors"], plain["tensors"]) == 0
    assert [rank["failures"] for rank in results[f"{backend}-True"]] == [0, 6]
