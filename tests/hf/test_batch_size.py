"""`auto_find_batch_size`: micro-batches shrink when memory runs out, and the numbers stay the same."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import thinned
from recipes import Noisy, Sentences, StopAt, Tagger, distance, rows, same, weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from omnitrain import Algorithm, Callback, HFTrainer
from omnitrain.checkpoint.store import Store
from omnitrain.errors import ConfigError
from omnitrain.precision import is_out_of_memory

DEFAULTS = {"num_train_epochs": 2, "learning_rate": 0.05, "logging_steps": 2, "seed": 3}


class Greedy(nn.Module):
    """The small regression model on a device without memory for more than `room` rows, from a step on."""

    def __init__(self, room: int = 1000, start: int = 0, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)).double()
        self.room, self.start = room, start
        self.sizes: list[int] = []
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.body(x)  # which draws, before memory runs out
        if self.training:
            self.sizes.append(len(x))
        if self.training and len(x) > self.room and self.steps >= self.start:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return output


class StepNumbers(Callback):
    """Sets the step in the model."""

    def on_step_end(self, trainer: Any) -> None:
        trainer.get_model().steps = trainer.progress.step


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*rows(21).tensors, strict=True)


DATA: dict[str, Any] = {"rows": lambda: rows(21), "noise": lambda: Noisy(21), "stream": Stream}
OURS = {"algorithms", "on_nonfinite", "train_loader", "microbatch_size", "eval_dataset", "callbacks"}


@pytest.fixture
def build(arguments: Any) -> Any:
    """Make a trainer of 21 rows in steps of 8: the last of an epoch has 5."""
    number = itertools.count()

    def make(
        model: nn.Module, batch: int = 8, accumulation: int = 1, data: Any = None, finds: bool = True, **options: Any
    ) -> HFTrainer:
        ours = {"loss_fn": F.mse_loss, "callbacks": [], **{name: options.pop(name) for name in OURS & options.keys()}}
        if isinstance(model, Tagger):
            del ours["loss_fn"]
        ours["callbacks"] = [StepNumbers(), *ours["callbacks"]]
        args = arguments(
            options.pop("folder", f"run-{next(number)}"), per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation, auto_find_batch_size=finds, **options,
        )  # fmt: skip
        data = None if "train_loader" in ours else rows(21) if data is None else data
        return HFTrainer(model, args, data, progress_bar=False, **ours)

    return make


@pytest.fixture
def run(build: Any) -> Any:
    """Make such a trainer, and train it."""

    def run(*args: Any, **options: Any) -> HFTrainer:
        trainer = build(*args, **options)
        trainer.train()
        return trainer

    return run


def logs_of(trainer: Any) -> list[Any]:
    """The rows of transformers without durations, and without the epoch, which it counts in micro-batches."""
    return [
        {key: value for key, value in row.items() if not key.endswith(("runtime", "per_second", "epoch"))}
        for row in trainer.state.log_history
    ]


def check_equal(trainer: Any, expected: Any) -> None:
    """Two runs have the same weights, history and logs."""
    assert distance(weights(trainer.get_model()), weights(expected.get_model())) <= 1e-12
    ignored = {"seconds": 0, "batches_in_epoch": 0}  # the position is counted in samples
    assert trainer.progress.state_dict() | ignored == expected.progress.state_dict() | ignored
    for name in ("train_metrics_history", "valid"):
        for row, other in zip(trainer.metrics[name], expected.metrics[name], strict=True):
            assert row == pytest.approx(other, rel=1e-12, abs=1e-12)
    for row, other in zip(logs_of(trainer), logs_of(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-6)  # transformers adds losses up in float32


@pytest.mark.parametrize(
    ("data", "start"),
    thinned(itertools.product(DATA, [0, 1, 4, 8]), [("rows", 0), ("rows", 8), ("noise", 1), ("stream", 4)]),
)
def test_run_has_the_numbers_of_small_batches(run: Any, data: str, start: int) -> None:
    options = {"eval_dataset": rows(5), "eval_steps": 2, "eval_strategy": "steps", "num_train_epochs": 3}
    if data == "stream":
        options |= {"max_steps": 9, "num_train_epochs": 1}
    trainer = run(Greedy(room=3, start=start), data=DATA[data](), **options)
    check_equal(trainer, run(Greedy(), 2, 4, data=DATA[data](), finds=False, **options))
    assert trainer._feed.microbatch_size == (3 if start == 8 else 2)  # the ninth step is of 5 rows
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (8, 1)
    sizes = trainer.get_model().sizes
    assert max(sizes[sizes.index(4) + 1 :] if 4 in sizes else sizes[-2:]) <= 3


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if len(grads[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return grads[0]


class Backward(Greedy):
    """Runs out of memory in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[3](InBackward.apply(self.body[:3](x)))


class Middle(Greedy):
    """Runs out of memory at the second micro-batch of the fourth step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.room = 3 if len(self.sizes) == 7 else 1000
        return super().forward(x)


@pytest.mark.parametrize(
    ("models", "options", "small"),
    [
        ((Backward(), Greedy()), {}, (2, 4)),
        ((Greedy(room=3, start=1), Greedy()), {"data_seed": 11}, (2, 4)),
        ((Greedy(room=3), Greedy()), {"dataloader_drop_last": True}, (8, 1)),
    ],
    ids=["backward", "data_seed", "drop_last"],
)
def test_run_has_the_numbers_of_its_options(run: Any, models: Any, options: dict[str, Any], small: Any) -> None:
    trainer = run(models[0], **options)
    check_equal(trainer, run(models[1], *small, finds=False, **options))
    assert trainer.progress.step == (4 if options == {"dataloader_drop_last": True} else 6)


def test_step_is_undone_when_memory_ends_in_its_middle(run: Any) -> None:
    trainer = run(Middle(), 4, 2)
    check_equal(trainer, run(Greedy(), 4, 2, finds=False))
    assert trainer._feed.microbatch_size == 2
    assert trainer.get_model().sizes[:12] == [4, 4, 4, 4, 4, 1, 4, 4, 2, 2, 2, 2]


def test_dropout_draws_as_with_small_batches(run: Any) -> None:
    trainer, expected = run(Greedy(room=2, dropout=0.3)), run(Greedy(dropout=0.3), 2, 4, finds=False)
    assert same(weights(trainer.get_model()), weights(expected.get_model()))


def test_user_loader_is_split(run: Any) -> None:
    def loader() -> Any:
        return DataLoader(rows(21), batch_size=8)

    trainer, expected = run(Greedy(room=3), train_loader=loader()), run(Greedy(), train_loader=loader(), finds=False)
    check_equal(trainer, expected)


@pytest.mark.processes
def test_worker_processes_continue_with_small_batches(run: Any) -> None:
    trainer = run(Greedy(room=2, start=4), data=Noisy(21), dataloader_num_workers=2)
    check_equal(trainer, run(Greedy(), 2, 4, data=Noisy(21), finds=False))


class GreedyTagger(Tagger):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training and len(ids) > 3:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(ids, labels)


def test_masked_labels_have_the_same_weight(run: Any) -> None:
    options = {"data": Sentences(14), "remove_unused_columns": False}
    trainer, expected = run(GreedyTagger(), 6, **options), run(Tagger(), 6, finds=False, **options)
    assert trainer._feed.microbatch_size == 3
    assert distance(weights(trainer.get_model()), weights(expected.get_model())) <= 1e-12
    rows = [each.metrics["train_metrics_history"][-1] for each in (trainer, expected)]
    assert rows[0] == pytest.approx(rows[1])


class Spoils(Algorithm):
    """The loss of the second step is no number."""

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan") if trainer.progress.step + trainer.progress.skipped_steps == 1 else loss


@pytest.mark.parametrize("on_nonfinite", ["skip", "warn"])
def test_repeated_step_may_be_skipped(run: Any, on_nonfinite: str) -> None:
    options = {"algorithms": [Spoils()], "on_nonfinite": on_nonfinite}
    trainer, expected = run(Greedy(room=2, start=1), **options), run(Greedy(), 2, 4, finds=False, **options)
    losses = [each.metrics["train_metrics_history"][0]["train_loss"] for each in (trainer, expected)]
    assert losses[0] == pytest.approx(losses[1], nan_ok=True)
    assert trainer.progress.skipped_steps == expected.progress.skipped_steps == (on_nonfinite == "skip")


def test_warning_has_both_sizes(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "omnitrain"):
        run(Greedy(room=4, start=1))
    assert [text for text in caplog.messages if "memory" in text] == [
        "Step 2 has run out of memory with micro-batches of 8 rows. From here on they are of 4 at most, and a step has "
        "as many more of them. Pass microbatch_size=4 to begin with that."
    ]


def test_run_with_memory_is_the_run_without_the_argument(run: Any) -> None:
    trainer, expected = run(Greedy(dropout=0.2), 4, 2), run(Greedy(dropout=0.2), 4, 2, finds=False)
    assert trainer.metrics == expected.metrics
    assert same(weights(trainer.get_model()), weights(expected.get_model()))
    for row, other in zip(logs_of(trainer), logs_of(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    ("data", "cut"), thinned(itertools.product(DATA, [1, 3, 5]), [("rows", 3), ("noise", 1), ("stream", 5)])
)
def test_resume_continues_with_small_batches(build: Any, run: Any, data: str, cut: int) -> None:
    options = {"folder": "cut", "save_strategy": "steps", "save_steps": 50, "max_steps": 8}
    run(Greedy(room=2, start=2), data=DATA[data](), callbacks=[StopAt(cut)], **options)
    trainer = build(Greedy(room=2, start=2), data=DATA[data](), **options)
    trainer.get_model().steps = cut
    trainer.train(resume_from="auto")
    expected = run(Greedy(), 2, 4, data=DATA[data](), finds=False, max_steps=8)
    assert distance(weights(trainer.get_model()), weights(expected.get_model())) <= 1e-12
    assert trainer.progress.step == 8 and trainer.progress.samples == expected.progress.samples


def test_checkpoint_has_both_sizes(run: Any) -> None:
    trainer = run(Greedy(room=2), save_strategy="epoch", num_train_epochs=1)
    checkpoint = Store(trainer.save_dir).resolve("last")
    assert checkpoint is not None
    names = ("batch_size", "gradient_accumulation_steps", "global_batch_size", "microbatch_size")
    assert [checkpoint[1]["settings"][name] for name in names] == [8, 1, 8, "auto"]
    assert checkpoint[1]["loop"]["microbatch_size"] == 2


def test_second_train_begins_with_the_size_of_the_first(run: Any) -> None:
    trainer = run(Greedy(room=2), num_train_epochs=1)
    trainer.get_model().sizes.clear()
    trainer.train()
    assert max(trainer.get_model().sizes) == 2 and trainer.progress.step == 3


def test_callbacks_get_each_event_once(run: Any) -> None:
    events: list[str] = []

    class Stock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            events.append("train")

        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            events.append("epoch")

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            events.append("step")

    class Ours(Callback):
        def on_step_start(self, trainer: Any) -> None:
            events.append("ours")

    run(Greedy(room=1, start=1), num_train_epochs=1, callbacks=[Stock(), Ours()])
    assert {name: events.count(name) for name in events} == {"train": 1, "epoch": 1, "step": 3, "ours": 3}


# --- errors


class Fails(Greedy):
    """Raises an error in training or in evaluations."""

    def __init__(self, error: Exception, in_training: bool = True) -> None:
        super().__init__()
        self.error, self.in_training = error, in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training == self.in_training:
            raise self.error
        return super().forward(x)


def test_sample_without_memory_is_an_error(build: Any) -> None:
    trainer = build(Greedy(room=0))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as error:
        trainer.train()
    assert "at one row at a time" in "".join(error.value.__notes__)
    assert trainer.get_model().sizes == [8, 4, 2, 1]
    with pytest.raises(torch.OutOfMemoryError):
        build(Greedy(room=4), finds=False).train()


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_other_errors_are_raised_unchanged(build: Any, kind: type[Exception]) -> None:
    trainer = build(Fails(kind("boom")))
    with pytest.raises(kind, match="boom"):
        trainer.train()
    assert trainer.batch_size == 8


def test_evaluation_without_memory_has_a_remedy(build: Any) -> None:
    model = Fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), in_training=False)
    trainer = build(model, eval_dataset=rows(5), eval_strategy="epoch")
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    assert "eval_batch_size=4 (instead of 8)" in "".join(error.value.__notes__)
    assert trainer.batch_size == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen=.*no effect on whole steps"),
        ({"microbatch_size": 4}, "`microbatch_size=4` contradicts `auto_find_batch_size=True`"),
    ],
    ids=["tokens", "size"],
)
def test_contradicting_options_are_rejected(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Greedy(), **options)


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
