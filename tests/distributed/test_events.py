"""Events inside of a step on two ranks: their order, and callbacks that fail or ask on one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import DTYPES, Job, dtype_of, gap, launch_all, make_trainer, sound  # noqa: E402
from recipes import Everything, rows, t16  # noqa: E402
from torch import nn  # noqa: E402

from omnitrain import Callback  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

QUICK = ["ddp", "fsdp", "hf2"]
BATCH = ["batch_start", "after_forward", "after_loss", "after_backward", "batch_end"]
UPDATED = ["before_optimizer_step", "after_optimizer_step", "before_zero_grad", "after_zero_grad", "step_end"]


class FailsOnOneRank(Callback):
    """Fails in each micro-batch of the second rank, which there only warns."""

    on_error = "warn"
    asks_alone = False

    def on_batch_start(self, trainer: Any, batch: Any, number: int) -> None:
        if trainer.rank == 1:
            raise RuntimeError("boom")


class AsksOnOneRank(Callback):
    """Asks for the end on the second rank, within the third step."""

    def on_after_loss(self, trainer: Any, loss: Any) -> None:
        if trainer.rank == 1 and trainer.progress.step == 2:
            trainer.stop()


def train(backend: str, watched: bool) -> dict[str, Any]:
    everything, dtype = Everything(), DTYPES[dtype_of(backend)]
    options: dict[str, Any] = {"max_steps": 3}
    if watched:
        options = {"max_steps": 9, "callbacks": [everything, FailsOnOneRank(), AsksOnOneRank()]}
    trainer = make_trainer(
        backend, t16(dtype=dtype), rows(40, dtype), batch_size=2, gradient_accumulation_steps=2, learning_rate=0.05,
        loss_fn=nn.functional.mse_loss, log_steps=100, **options,
    )  # fmt: skip
    trainer.train()
    failures = {one.name: one.failures for one in trainer.lifecycle.listeners}
    return {
        "events": everything.events, "failures": failures.get("FailsOnOneRank"), "step": trainer.progress.step,
        "tensors": {name: whole(one) for name, one in trainer.backend.model_tensors().items()},
    }  # fmt: skip


def results_of(backends: list[str], folder: Path) -> Any:
    jobs = [
        Job(f"{one} {how}", one, "test_events:train", {"watched": how}) for one in backends for how in (True, False)
    ]
    return sound(launch_all(jobs, folder))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results_of(QUICK, tmp_path_factory.mktemp("events"))


def check(results: Any, backend: str, clipped: list[str]) -> None:
    step = ["data_fetched", "step_start", *BATCH * 2, *clipped, *UPDATED]
    for watched, plain in zip(results[f"{backend} True"], results[f"{backend} False"], strict=True):
        assert watched["step"] == plain["step"] == 3
        assert watched["events"] == ["train_start", "epoch_start", *step * 3, "epoch_end", "log", "train_end"]
        assert gap(watched["tensors"], plain["tensors"]) == 0
    assert [one["failures"] for one in results[f"{backend} True"]] == [0, 6]


@pytest.mark.parametrize("backend", QUICK)
def test_events_inside_of_a_step_come_alike_on_all_ranks_and_change_nothing(quick: Any, backend: str) -> None:
    check(quick, backend, ["before_clip", "after_clip"])


@pytest.mark.slow
def test_under_deepspeed_all_come_but_those_of_clipping(tmp_path: Path) -> None:
    results = results_of(["zero2"], tmp_path)
    check(results, "zero2", [])
