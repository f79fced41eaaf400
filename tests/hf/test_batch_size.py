"""`auto_find_batch_size`: micro-batches shrink when memory runs out, and the numbers stay the same."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from recipes import Starving, callback, distance, fit, rows, weights
from torch import nn
from transformers import TrainerCallback

from omnitrain import HFTrainer
from omnitrain.checkpoint.store import Store
from omnitrain.compute.precision import is_out_of_memory

DEFAULTS = {"num_train_epochs": 2, "learning_rate": 0.05, "logging_steps": 2, "seed": 3}


@pytest.fixture
def build(arguments: Any) -> Any:
    """Make a trainer of 20 rows in steps of 8, of which the last of an epoch has 4, and train it if asked to."""
    number = itertools.count()

    def make(
        model: nn.Module, batch: int = 8, accumulation: int = 1, finds: bool = True, trains: bool = True, **options: Any
    ) -> HFTrainer:
        data = options.pop("data", lambda: rows(20))()
        ours = {name: options.pop(name) for name in {"eval_dataset", "callbacks"} & options.keys()}
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        args = arguments(f"run-{next(number)}", auto_find_batch_size=finds, **sizes, **options)
        trainer = HFTrainer(model, args, data, loss_fn=F.mse_loss, progress_bar=False, **ours)
        return fit(trainer) if trains else trainer

    return make


def test_run_has_the_numbers_of_small_batches(build: Any) -> None:
    """Those of a stream, whose rows in the log of transformers count micro-batches."""

    def rows_of(trainer: Any) -> list[dict[str, Any]]:
        """Return all rows without durations, and without the epoch, which transformers counts in micro-batches."""
        rows = [*trainer.metrics["train_metrics_history"], *trainer.metrics["valid"], *trainer.state.log_history]
        ignored = ("runtime", "per_second", "epoch")
        return [{key: value for key, value in row.items() if not key.endswith(ignored)} for row in rows]

    options = {"data": lambda: Streamed(rows(20)), "eval_dataset": rows(5), "eval_steps": 2, "eval_strategy": "steps"}
    trainer = build(Starving(room=3), max_steps=9, **options)
    expected = build(Starving(), 2, 4, finds=False, max_steps=9, **options)
    assert distance(weights(trainer.get_model()), weights(expected.get_model())) <= 1e-12
    positions = [each.progress.state_dict() | {"seconds": 0, "batches_in_epoch": 0} for each in (trainer, expected)]
    assert positions[0] == positions[1] and trainer.progress.step == 9
    for row, other in zip(rows_of(trainer), rows_of(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-6)  # transformers adds losses up in float32
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (8, 1)
    sizes = trainer.get_model().sizes
    assert max(sizes[sizes.index(4) + 1 :]) <= 3


def test_checkpoint_has_both_sizes(build: Any) -> None:
    """Also a second run begins with the smaller one."""
    trainer = build(Starving(room=2), save_strategy="epoch", num_train_epochs=1)
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
    build(Starving(room=2, start=1), num_train_epochs=1, callbacks=[callback(TrainerCallback, **functions)])
    assert events == ["on_epoch_begin", *["on_step_begin"] * 3]


def test_is_out_of_memory_knows_the_errors_of_torch() -> None:
    no_memory = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes")
    for error in (torch.OutOfMemoryError("no room"), RuntimeError("CUDA out of memory."), no_memory):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes do not match"), MemoryError("CUDA out of memory.")):
        assert not is_out_of_memory(error)
