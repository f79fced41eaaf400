"""`auto_find_batch_size`: micro-batches shrink when memory runs out, and the numbers stay the same."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from recipes import callback, distance, fit, no_room, rows, t16, weights
from torch import nn
from transformers import TrainerCallback

from omnitrain import HFTrainer
from omnitrain.checkpoint.store import Store
from omnitrain.compute.precision import is_out_of_memory

DEFAULTS = {"num_train_epochs": 2, "learning_rate": 0.05, "logging_steps": 2, "seed": 3}


class Greedy(nn.Module):
    """A regression model that has memory for more than `room` rows in its first `start` passes only."""

    def __init__(self, room: int = 1000, start: int = 0) -> None:
        super().__init__()
        self.body, self.room, self.start = t16(), room, start
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.sizes.append(len(x))
            if len(x) > self.room and len(self.sizes) > self.start:
                raise no_room()
        return self.body(x)


OURS = {"eval_dataset", "callbacks"}
STREAM = {"data": lambda: Streamed(rows(21)), "max_steps": 9, "num_train_epochs": 1}


@pytest.fixture
def build(arguments: Any) -> Any:
    """Make a trainer of 21 rows in steps of 8, of which the last of an epoch has 5, and train it if asked to."""
    number = itertools.count()

    def make(
        model: nn.Module, batch: int = 8, accumulation: int = 1, finds: bool = True, trains: bool = True, **options: Any
    ) -> HFTrainer:
        data = options.pop("data", lambda: rows(21))()
        ours = {"loss_fn": F.mse_loss, **{name: options.pop(name) for name in OURS & options.keys()}}
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        args = arguments(f"run-{next(number)}", auto_find_batch_size=finds, **sizes, **options)
        trainer = HFTrainer(model, args, data, progress_bar=False, **ours)
        return fit(trainer) if trains else trainer

    return make


def position_of(trainer: Any) -> dict[str, Any]:
    """Return what is counted in samples or steps."""
    return {**trainer.progress.state_dict(), "seconds": 0, "batches_in_epoch": 0}


def rows_of(trainer: Any) -> list[dict[str, Any]]:
    """Return all rows without durations, and without the epoch, which transformers counts in micro-batches."""
    rows = [*trainer.metrics["train_metrics_history"], *trainer.metrics["valid"], *trainer.state.log_history]
    ignored = ("runtime", "per_second", "epoch")
    return [{key: value for key, value in row.items() if not key.endswith(ignored)} for row in rows]


@pytest.mark.parametrize(
    ("start", "options", "small"), [(4, STREAM, (2, 4)), (0, {"dataloader_drop_last": True}, (8, 1))],
    ids=["stream", "drop_last"],
)  # fmt: skip
def test_run_has_the_numbers_of_small_batches(build: Any, start: int, options: Any, small: Any) -> None:
    options = {"eval_dataset": rows(5), "eval_steps": 2, "eval_strategy": "steps", "num_train_epochs": 3, **options}
    trainer = build(Greedy(room=3, start=start), **options)
    expected = build(Greedy(), *small, finds=False, **options)
    assert distance(weights(trainer.get_model()), weights(expected.get_model())) <= 1e-12
    assert position_of(trainer) == position_of(expected)
    for row, other in zip(rows_of(trainer), rows_of(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-6)  # transformers adds losses up in float32
    assert trainer.progress.step == (6 if "dataloader_drop_last" in options else 9)
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (8, 1)
    sizes = trainer.get_model().sizes
    assert max(sizes[sizes.index(4) + 1 :] if 4 in sizes else sizes[-2:]) <= 3


def test_checkpoint_has_both_sizes(build: Any) -> None:
    """Also a second run begins with the smaller one."""
    trainer = build(Greedy(room=2), save_strategy="epoch", num_train_epochs=1)
    checkpoint = Store(trainer.save_dir).resolve("last")
    assert checkpoint is not None
    names = ("batch_size", "gradient_accumulation_steps", "global_batch_size", "microbatch_size")
    assert [checkpoint[1]["settings"][name] for name in names] == [8, 1, 8, "auto"]
    assert checkpoint[1]["loop"]["microbatch_size"] == 2
    trainer.get_model().sizes.clear()
    trainer.train()
    assert max(trainer.get_model().sizes) == 2 and trainer.progress.step == 3


def test_callbacks_get_each_event_once(build: Any) -> None:
    events: list[str] = []
    functions = {name: lambda *_, name=name, **__: events.append(name) for name in ("on_epoch_begin", "on_step_begin")}
    build(Greedy(room=1, start=1), num_train_epochs=1, callbacks=[callback(TrainerCallback, **functions)])
    assert events == ["on_epoch_begin", *["on_step_begin"] * 3]


def test_error_is_raised_where_no_batch_is_small_enough(build: Any) -> None:
    for room, finds, sizes in ((0, True, [8, 4, 2, 1]), (4, False, [8])):
        trainer = build(Greedy(room=room), finds=finds, trains=False)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            trainer.train()
        assert trainer.get_model().sizes == sizes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("no room"), True), (RuntimeError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes"), True),
        (RuntimeError("shapes do not match"), False), (MemoryError("CUDA out of memory."), False),
    ],
)  # fmt: skip
def test_is_out_of_memory_knows_the_errors_of_torch(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
