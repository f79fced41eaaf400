"""Exchanges of the ranks in a step, and requests of one rank, which take effect on all of them at the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forking import Case, Found, Outcome, play
from recipes import rows, t16

from omnitrain import AccelerateTrainer, Callback, Trainer

STEPS = 12
REQUESTS = [(rank, request) for rank in (0, 1) for request in ("request_save", "request_evaluate", "stop")]


class Asks(Callback):
    """Makes a request when step 3 is logged, on one rank."""

    def __init__(self, rank: int, request: str) -> None:
        self.rank, self.request = rank, request
        self.events: list[tuple[str, int]] = []

    def on_log(self, trainer: Any, logs: Any) -> None:
        if trainer.progress.step == 3 and trainer.rank == self.rank:
            getattr(trainer, self.request)()

    def on_save_end(self, trainer: Any) -> None:
        self.events.append(("save", trainer.progress.step))

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self.events.append(("evaluate", trainer.progress.step))


class Watches(Callback):
    """Has an event of every step, in which it requests something or, by its attribute, nothing."""

    def __init__(self, asks_alone: bool) -> None:
        self.asks_alone = asks_alone

    def on_step_end(self, trainer: Any) -> None:
        pass


class StopsInStep(AccelerateTrainer):
    """A custom trainer, whose rank 1 ends the run in the middle of step 5."""

    def _apply_update(self) -> bool:
        if self.rank == 1 and self.progress.step + 1 == 5:
            self.stop()
        return super()._apply_update()


class Work:
    """A collective call whose first wait is recorded."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events, self.is_read = work, events, False

    def wait(self, *args: Any) -> Any:
        self.events += [] if self.is_read else ["r"]
        self.is_read = True
        return self.work.wait(*args)


@contextlib.contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets "s" when an exchange is sent, "r" when it is read, "f" and "b" in forward and backward."""
    events: list[str] = []
    all_gather = dist.all_gather
    model.register_forward_pre_hook(lambda *_: events.append("f"))
    next(model.parameters()).register_hook(lambda _: events.append("b"))

    def gather(*args: Any, **kwargs: Any) -> Any:
        events.append("s")
        return Work(all_gather(*args, **kwargs), events)

    with mock.patch.object(dist, "all_gather", gather):
        yield events


# --- cases


def request(trainer_class: Any, folder: str, rank: int, name: str, batch_size: int, **options: Any) -> dict[str, Any]:
    """Train with a request of one rank; return when what happened, and how the run ended."""
    data, asks, model = rows(16 * STEPS, torch.float32), Asks(rank, name), t16(dtype=torch.float32)
    trainer = trainer_class(
        model, data, data, epochs=1, batch_size=batch_size, log_steps=1, eval_steps=8, save_steps=7, save_dir=folder,
        progress_bar=False, learning_rate=0.01, callbacks=[asks], loss_fn=F.mse_loss, load_best_at_end=False, **options,
    )  # fmt: skip
    with recorded(model) as events:
        metrics = trainer.train()
    return {
        "events": [list(event) for event in asks.events], "step": trainer.progress.step,
        "reason": metrics["stop_reason"], "ahead": "sf" in "".join(events),
    }  # fmt: skip


def request_all(folder: str) -> dict[str, Any]:
    return {
        f"{name} {rank}": request(AccelerateTrainer, f"{folder}/{name}-{rank}", rank, name, 8)
        for rank, name in REQUESTS
    }


def exchange(callback: bool | None, log_steps: Any = STEPS) -> str:
    """Return the events of a run in their order; a callback may or may not request something in a step."""
    model = t16(dtype=torch.float32)
    callbacks = [] if callback is None else [Watches(callback)]
    trainer = AccelerateTrainer(
        model, rows(16 * STEPS, torch.float32), epochs=1, batch_size=8, progress_bar=False, log_steps=log_steps,
        loss_fn=F.mse_loss, callbacks=callbacks,
    )  # fmt: skip
    with recorded(model) as events:
        trainer.train()
    return "".join(events)


def exchange_all() -> dict[str, Any]:
    kinds = {"plain": exchange(None), "quiet": exchange(False), "asking": exchange(True), "timed": exchange(None, "1h")}
    trainer = StopsInStep(
        t16(dtype=torch.float32), rows(16 * STEPS, torch.float32), epochs=1, batch_size=8, progress_bar=False,
        loss_fn=F.mse_loss,
    )  # fmt: skip
    metrics = trainer.train()
    return {**kinds, "stop": [trainer.progress.step, metrics["stop_reason"]]}


# --- tests


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    folder = tmp_path_factory.mktemp("exchanges")
    requests = Case("requests", "test_exchanges:request_all", {"folder": str(folder)})
    return play([requests, Case("exchanges", "test_exchanges:exchange_all")], folder / "cases")


def result_of(outcomes: list[Outcome]) -> Any:
    assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.output for outcome in outcomes]
    first, second = [outcome.result for outcome in outcomes]
    assert first == second
    return first


@pytest.mark.parametrize(("rank", "name"), REQUESTS)
def test_request_of_one_rank_takes_effect_as_on_one_process(
    rank: int, name: str, outcomes: dict[str, list[Outcome]], tmp_path: Path
) -> None:
    expected = request(Trainer, str(tmp_path), 0, name, 16, device="cpu")
    assert result_of(outcomes["requests"])[f"{name} {rank}"] == {**expected, "ahead": True}


@pytest.mark.parametrize("kind", ["plain", "quiet"])
def test_exchange_of_a_step_overlaps_with_it(kind: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert "sfbr" * (STEPS - 3) in result_of(outcomes["exchanges"])[kind]


@pytest.mark.parametrize("kind", ["asking", "timed"])
def test_exchange_follows_a_step_with_requests(kind: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert "fbsr" * (STEPS - 3) in result_of(outcomes["exchanges"])[kind]


def test_custom_trainer_may_stop_in_the_middle_of_a_step(outcomes: dict[str, list[Outcome]]) -> None:
    assert result_of(outcomes["exchanges"])["stop"] == [5, "requested"]
