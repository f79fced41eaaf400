"""What the ranks exchange in a step, and that requests of one rank are answered on all of them at the same step."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from forking import Case, Outcome, play  # noqa: E402
from recipes import rows, t16  # noqa: E402

from omnitrain import AccelerateTrainer, Callback, Trainer  # noqa: E402

pytestmark = pytest.mark.distributed

STEPS = 12


class Asks(Callback):
    """Requests something at a row of logs, on one rank."""

    def __init__(self, rank: int, request: str, step: int) -> None:
        self.rank, self.request, self.step = rank, request, step
        self.seen: list[tuple[str, int]] = []

    def on_log(self, trainer: Any, logs: Any) -> None:
        if trainer.progress.step == self.step and trainer.rank == self.rank:
            getattr(trainer, self.request)()

    def on_save_end(self, trainer: Any) -> None:
        self.seen.append(("save", trainer.progress.step))

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self.seen.append(("evaluate", trainer.progress.step))


class Watches(Callback):
    """Watches steps and, by what it says of itself, requests nothing there."""

    def __init__(self, asks_alone: bool) -> None:
        self.asks_alone = asks_alone

    def on_step_end(self, trainer: Any) -> None:
        pass


class AsksInStep(AccelerateTrainer):
    """A trainer of the user's own, whose rank 1 ends the run in the middle of step 5."""

    def _apply_update(self) -> bool:
        if self.rank == 1 and self.progress.step + 1 == 5:
            self.stop()
        return super()._apply_update()


def make(kind: Any, folder: str, callbacks: list[Callback], **options: Any) -> Any:
    data = rows(16 * STEPS, torch.float32)
    return kind(
        t16(dtype=torch.float32), data, data, epochs=1, batch_size=16 // options.pop("ranks", 1), log_steps=1,
        eval_steps=8, save_steps=7, save_dir=folder, progress_bar=False, learning_rate=0.01, callbacks=callbacks,
        loss_fn=torch.nn.functional.mse_loss, load_best_at_end=False, **options,
    )  # fmt: skip


def ask(folder: str, rank: int, request: str, step: int) -> dict[str, Any]:
    asks = Asks(rank, request, step)
    trainer = make(AccelerateTrainer, folder, [asks], ranks=2)
    metrics = trainer.train()
    assert trainer._loop._sends_ahead
    return {"seen": asks.seen, "step": trainer.progress.step, "reason": metrics["stop_reason"]}


def exchange(asks_alone: bool | None, by_time: bool = False) -> dict[str, int]:
    """Count what a rank exchanges in the steps from the second to the last but one."""
    counts: collections.Counter[str] = collections.Counter()
    callbacks = [] if asks_alone is None else [Watches(asks_alone)]
    trainer: Any = AccelerateTrainer(
        t16(dtype=torch.float32), rows(16 * STEPS, torch.float32), epochs=1, batch_size=8, progress_bar=False,
        log_steps="1h" if by_time else STEPS, loss_fn=torch.nn.functional.mse_loss, callbacks=callbacks,
    )  # fmt: skip
    ranks, original = trainer._loop.ranks, trainer._loop.ranks._begin_exchange

    def begin(what: str, values: Any) -> Any:
        counts[what] += 1 < trainer.progress.step < STEPS - 1
        return original(what, values)

    ranks._begin_exchange = begin
    trainer.train()
    return {what: count for what, count in counts.items() if count} | {"ahead": int(trainer._loop._sends_ahead)}


def order() -> list[str]:
    """Return what happens in the fourth step, in its order: exchanges begun and awaited, forward and backward."""
    seen: list[str] = []
    model = t16(dtype=torch.float32)
    model.register_forward_pre_hook(lambda *_: seen.append("forward"))
    next(model.parameters()).register_hook(lambda _: seen.append("backward"))
    trainer: Any = AccelerateTrainer(
        model, rows(16 * STEPS, torch.float32), epochs=1, batch_size=8, progress_bar=False, log_steps=STEPS,
        loss_fn=torch.nn.functional.mse_loss,
    )  # fmt: skip
    ranks = trainer._loop.ranks
    begin, wait, steps = ranks._begin_exchange, ranks._wait, list[list[str]]()

    def begun(what: str, values: Any) -> Any:
        if what == "the end of a step":
            steps.append(seen.copy())
            seen[:] = ["sent"]
        return begin(what, values)

    def waited(work: Any, what: str, *rest: Any) -> None:
        seen.append(f"read {what}")
        wait(work, what, *rest)

    ranks._begin_exchange, ranks._wait = begun, waited
    trainer.train()
    return steps[4]


def stop_in_step() -> dict[str, Any]:
    data = rows(16 * STEPS, torch.float32)
    trainer = AsksInStep(
        t16(dtype=torch.float32), data, epochs=1, batch_size=8, progress_bar=False,
        loss_fn=torch.nn.functional.mse_loss,
    )  # fmt: skip
    metrics = trainer.train()
    return {"step": trainer.progress.step, "reason": metrics["stop_reason"]}


REQUESTS = [(rank, request) for rank in (0, 1) for request in ("request_save", "request_evaluate", "stop")]
CASES = [
    *(Case(f"{request} {rank}", "test_exchanges:ask", {"rank": rank, "request": request, "step": 3})
      for rank, request in REQUESTS),
    Case("plain", "test_exchanges:exchange", {"asks_alone": None}),
    Case("watches", "test_exchanges:exchange", {"asks_alone": False}),
    Case("may ask", "test_exchanges:exchange", {"asks_alone": True}),
    Case("by time", "test_exchanges:exchange", {"asks_alone": None, "by_time": True}),
    Case("order", "test_exchanges:order"),
    Case("in step", "test_exchanges:stop_in_step"),
]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    folder = tmp_path_factory.mktemp("exchanges")
    for case in CASES:
        if case.function.endswith(":ask"):
            case.options["folder"] = str(folder / case.name)
    return play(CASES, folder / "cases")


def results(outcomes: dict[str, list[Outcome]], name: str) -> Any:
    assert [outcome.code for outcome in outcomes[name]] == [0, 0], [outcome.output for outcome in outcomes[name]]
    first, second = [outcome.result for outcome in outcomes[name]]
    assert first == second
    return first


@pytest.mark.parametrize("rank, request_", REQUESTS)
def test_a_request_of_one_rank_is_answered_at_the_step_at_which_one_process_answers_it(
    rank: int, request_: str, outcomes: dict[str, list[Outcome]], tmp_path: Path
) -> None:
    asks = Asks(0, request_, 3)
    alone = make(Trainer, str(tmp_path), [asks], device="cpu")
    metrics = alone.train()
    found = results(outcomes, f"{request_} {rank}")
    assert found["seen"] == [list(one) for one in asks.seen]
    assert (found["step"], found["reason"]) == (alone.progress.step, metrics["stop_reason"])


@pytest.mark.parametrize("name", ["plain", "watches"])
def test_a_step_has_one_exchange_which_begins_before_it(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert results(outcomes, name) == {"the end of a step": STEPS - 3, "ahead": 1}


def test_the_exchange_of_a_step_is_sent_before_it_and_read_after_its_backward(
    outcomes: dict[str, list[Outcome]],
) -> None:
    assert results(outcomes, "order") == ["sent", "forward", "backward", "read the end of a step"]


@pytest.mark.parametrize("name", ["may ask", "by time"])
def test_what_one_rank_may_ask_for_alone_is_exchanged_after_the_step(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    assert results(outcomes, name) == {"the end of a step": STEPS - 3, "ahead": 0}


def test_a_trainer_of_ones_own_may_end_the_run_in_the_middle_of_a_step(outcomes: dict[str, list[Outcome]]) -> None:
    assert results(outcomes, "in step") == {"step": 5, "reason": "requested"}
