"""Micro-batches that become smaller where memory runs out, and the numbers, which stay the same."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import thinned
from recipes import Noisy, Sentences, StopAt, Tagger, distance, rows, same, weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainingArguments

from omnitrain import Algorithm, Callback, HFTrainer
from omnitrain.errors import ConfigError
from omnitrain.precision import is_out_of_memory


class Greedy(nn.Module):
    """The small regression model on a device on which no more than so many rows have room, from a step on."""

    def __init__(self, room: int = 1000, start: int = 0, dropout: float = 0.0, error: type = torch.OutOfMemoryError):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)).double()
        self.room, self.start, self.error = room, start, error
        self.sizes: list[int] = []
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.body(x)  # which draws, before there is no room
        if self.training:
            self.sizes.append(len(x))
        if self.training and len(x) > self.room and self.steps >= self.start:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return output


class CountsSteps(Callback):
    """Tells the model which step it is."""

    def on_step_end(self, trainer: Any) -> None:
        trainer.get_model().steps = trainer.progress.step


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*rows(21).tensors, strict=True)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Makes a trainer of 21 rows in steps of 8: the last of an epoch has 5."""
    number = iter(range(100))

    def make(
        model: nn.Module, batch: int = 8, accumulation: int = 1, data: Any = None, finds: bool = True,
        eval_dataset: Any = None, callbacks: Any = (), **options: Any,
    ) -> HFTrainer:  # fmt: skip
        own = {
            name: options.pop(name)
            for name in ("algorithms", "on_nonfinite", "train_loader", "microbatch_size")
            if name in options
        }
        defaults = {
            "output_dir": str(tmp_path / f"run-{next(number)}"), "num_train_epochs": 3, "learning_rate": 0.05,
            "save_strategy": "no", "logging_steps": 2, "use_cpu": True, "report_to": "none", "seed": 3,
        }  # fmt: skip
        args = TrainingArguments(
            **{**defaults, **options}, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
            auto_find_batch_size=finds,
        )  # fmt: skip
        data = None if "train_loader" in own else rows(21) if data is None else data
        own |= {} if isinstance(model, Tagger) else {"loss_fn": F.mse_loss}
        return HFTrainer(
            model, args, data, eval_dataset, progress_bar=False, callbacks=[CountsSteps(), *callbacks], **own
        )

    return make


def history(trainer: Any) -> list[Any]:
    """What transformers has logged, but for how long it took, and the epoch, which it counts in micro-batches."""
    return [
        {key: value for key, value in row.items() if not key.endswith(("runtime", "per_second", "epoch"))}
        for row in trainer.engine.state.log_history
    ]


def close(one: Any, other: Any) -> bool:
    """Whether two runs agree in weights, history and logs."""
    assert distance(weights(one.get_model()), weights(other.get_model())) <= 1e-12
    aside = {"seconds": 0, "batches_in_epoch": 0}  # where it is, is counted in samples
    assert one.progress.state_dict() | aside == other.progress.state_dict() | aside
    for a, b in zip(
        [*one.metrics["train_metrics_history"], *one.metrics["valid"]],
        [*other.metrics["train_metrics_history"], *other.metrics["valid"]], strict=True,
    ):  # fmt: skip
        assert a == pytest.approx(b, rel=1e-12, abs=1e-12)
    for a, b in zip(history(one), history(other), strict=True):
        assert a == pytest.approx(b, rel=1e-6)  # transformers adds losses up in float32
    return True


KINDS: dict[str, Any] = {"rows": lambda: rows(21), "noise": lambda: Noisy(21), "stream": Stream}


@pytest.mark.parametrize(
    ("data", "start"),
    thinned(itertools.product(KINDS, [0, 1, 4, 8]), [("rows", 0), ("rows", 8), ("noise", 1), ("stream", 4)]),
)
def test_a_run_that_meets_the_end_of_memory_has_the_numbers_of_one_with_small_batches(
    run: Any, data: str, start: int
) -> None:
    options = {"max_steps": 9, "num_train_epochs": 1} if data == "stream" else {}
    found = run(Greedy(room=3, start=start), data=KINDS[data](), eval_dataset=rows(5), eval_steps=2,
                eval_strategy="steps", **options)  # fmt: skip
    found.train()
    small = run(Greedy(), 2, 4, data=KINDS[data](), eval_dataset=rows(5), eval_steps=2, eval_strategy="steps",
                finds=False, **options)  # fmt: skip
    small.train()
    assert close(found, small)
    assert found._feed.microbatch_size == (3 if start == 8 else 2)  # the ninth step is of 5 rows
    assert (found.batch_size, found.gradient_accumulation_steps) == (8, 1)
    sizes = found.get_model().sizes
    assert max(sizes[sizes.index(4) + 1 :] if 4 in sizes else sizes[-2:]) <= 3


def test_dropout_draws_what_it_would_have_drawn_with_small_batches_from_the_start(run: Any) -> None:
    found, small = run(Greedy(room=2, dropout=0.3)), run(Greedy(dropout=0.3), 2, 4, finds=False)
    found.train()
    small.train()
    assert same(weights(found.get_model()), weights(small.get_model()))


def test_memory_that_ends_in_the_middle_of_a_step_undoes_what_there_was_of_it(run: Any) -> None:
    class Ends(Greedy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.room = 3 if len(self.sizes) == 7 else 1000  # at the second micro-batch of the fourth step
            return super().forward(x)

    found, plain = run(Ends(), 4, 2), run(Greedy(), 4, 2, finds=False)
    found.train()
    plain.train()
    assert close(found, plain)
    assert found._feed.microbatch_size == 2 and found.get_model().sizes[:12] == [4, 4, 4, 4, 4, 1, 4, 4, 2, 2, 2, 2]


def test_memory_that_ends_in_a_backward_pass_is_the_same(run: Any) -> None:
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if len(grads[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return grads[0]

    class Backward(Greedy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body[3](Ends.apply(self.body[:3](x)))

    found, small = run(Backward()), run(Greedy(), 2, 4, finds=False)
    found.train()
    small.train()
    assert close(found, small)


def test_masked_labels_count_as_they_did(run: Any) -> None:
    class GreedyTagger(Tagger):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.training and len(ids) > 3:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(ids, labels)

    found = run(GreedyTagger(), 6, data=Sentences(14), remove_unused_columns=False)
    plain = run(Tagger(), 6, data=Sentences(14), finds=False, remove_unused_columns=False)
    found.train()
    plain.train()
    assert found._feed.microbatch_size == 3
    assert distance(weights(found.get_model()), weights(plain.get_model())) <= 1e-12
    assert found.metrics["train_metrics_history"][-1] == pytest.approx(plain.metrics["train_metrics_history"][-1])


@pytest.mark.parametrize("on_nonfinite", ["skip", "warn"])
def test_a_step_taken_anew_can_still_be_skipped(run: Any, on_nonfinite: str) -> None:
    class Spoils(Algorithm):
        def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss * float("nan") if trainer.progress.step + trainer.progress.skipped_steps == 1 else loss

    found = run(Greedy(room=2, start=1), algorithms=[Spoils()], on_nonfinite=on_nonfinite)
    small = run(Greedy(), 2, 4, finds=False, algorithms=[Spoils()], on_nonfinite=on_nonfinite)
    assert found.train()["train_metrics_history"][0]["train_loss"] == pytest.approx(
        small.train()["train_metrics_history"][0]["train_loss"], nan_ok=True
    )
    assert found.progress.skipped_steps == small.progress.skipped_steps


def test_worker_processes_go_on_with_the_smaller_batches(run: Any) -> None:
    found = run(Greedy(room=2, start=4), data=Noisy(21), dataloader_num_workers=2)
    small = run(Greedy(), 2, 4, data=Noisy(21), finds=False)
    found.train()
    small.train()
    assert close(found, small)


def test_it_is_told_once_with_both_numbers(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "omnitrain"):
        run(Greedy(room=4, start=1)).train()
    told = [text for text in caplog.messages if "memory" in text]
    assert told == [
        "Step 2 has run out of memory with micro-batches of 8 rows. From here on they are of 4 at most, and a step has "
        "as many more of them. Pass microbatch_size=4 to begin with that."
    ]


def test_a_run_that_has_memory_is_the_run_without_the_argument(run: Any) -> None:
    found, plain = run(Greedy(dropout=0.2), 4, 2), run(Greedy(dropout=0.2), 4, 2, finds=False)
    assert found.train() == plain.train()
    assert same(weights(found.get_model()), weights(plain.get_model()))
    for one, other in zip(history(found), history(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    ("data", "cut"), thinned(itertools.product(KINDS, [1, 3, 5]), [("rows", 3), ("noise", 1), ("stream", 5)])
)
def test_a_run_that_has_shrunk_is_resumed_in_the_middle(run: Any, data: str, cut: int, tmp_path: Path) -> None:
    options = {
        "save_strategy": "steps", "save_steps": 50, "output_dir": str(tmp_path / "cut"), "max_steps": 8,
        "load_best_model_at_end": False,
    }  # fmt: skip
    first = run(Greedy(room=2, start=2), data=KINDS[data](), callbacks=[StopAt(cut)], **options)
    first.train()
    second = run(Greedy(room=2, start=2), data=KINDS[data](), **options)
    second.get_model().steps = cut
    second.train(resume_from="auto")
    straight = run(Greedy(), 2, 4, data=KINDS[data](), finds=False, max_steps=8)
    straight.train()
    assert distance(weights(second.get_model()), weights(straight.get_model())) <= 1e-12
    assert second.progress.step == 8 and second.progress.samples == straight.progress.samples


def test_a_checkpoint_keeps_what_was_found_beside_the_batch_that_was_asked_for(run: Any) -> None:
    from omnitrain.checkpoint.store import Store

    trainer = run(Greedy(room=2), save_strategy="epoch", load_best_model_at_end=False)
    trainer.train()
    found = Store(trainer.save_dir).resolve("last")
    assert found is not None
    settings = found[1]["settings"]
    names = ("batch_size", "gradient_accumulation_steps", "global_batch_size", "microbatch_size")
    assert [settings[name] for name in names] == [8, 1, 8, "auto"]
    assert found[1]["loop"]["microbatch_size"] == 2


def test_a_second_run_begins_with_what_was_found(run: Any) -> None:
    trainer = run(Greedy(room=2))
    trainer.train()
    trainer.get_model().sizes.clear()
    trainer.train()
    assert max(trainer.get_model().sizes) == 2
    assert trainer.progress.step == 9


def test_callbacks_hear_of_one_run_and_of_each_step_once(run: Any) -> None:
    heard: list[str] = []

    class Theirs(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            heard.append("train")

        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            heard.append("epoch")

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            heard.append("step")

    class Ours(Callback):
        def on_step_start(self, trainer: Any) -> None:
            heard.append("ours")

    run(Greedy(room=1, start=1), num_train_epochs=1, callbacks=[Theirs(), Ours()]).train()
    assert heard.count("train") == heard.count("epoch") == 1
    assert heard.count("step") == heard.count("ours") == 3


def test_a_sample_that_does_not_fit_is_the_error_that_it_was(run: Any) -> None:
    trainer = run(Greedy(room=0))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        trainer.train()
    assert "at one row at a time" in "".join(caught.value.__notes__)
    assert trainer.get_model().sizes == [8, 4, 2, 1]


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_another_error_is_none_of_this(run: Any, error: type) -> None:
    class Fails(Greedy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error("boom")

    trainer = run(Fails())
    with pytest.raises(error, match="boom"):
        trainer.train()
    assert trainer.batch_size == 8


def test_memory_that_ends_in_an_evaluation_is_an_error_that_names_the_remedy(run: Any) -> None:
    class Fails(Greedy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().forward(x)

    trainer = run(Fails(), eval_dataset=rows(5), eval_strategy="epoch")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert "eval_batch_size=4 (instead of 8)" in "".join(caught.value.__notes__)
    assert trainer.batch_size == 8


def test_without_the_argument_memory_that_ends_is_an_error(run: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        run(Greedy(room=4), finds=False).train()


def test_the_order_keeps_its_own_seed(run: Any) -> None:
    found, small = run(Greedy(room=3, start=1), data_seed=11), run(Greedy(), 2, 4, data_seed=11, finds=False)
    found.train()
    small.train()
    assert close(found, small)


def test_tokens_that_transformers_would_not_count_are_refused(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"include_num_input_tokens_seen=.*no effect on whole steps"):
        run(Greedy(), include_num_input_tokens_seen="all")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("no room"), True), (RuntimeError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes"), True),
        (RuntimeError("shapes do not match"), False), (MemoryError("CUDA out of memory."), False),
    ],
)  # fmt: skip
def test_what_says_that_memory_has_run_out_is_known(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_what_is_left_out_of_an_epoch_stays_the_same(run: Any) -> None:
    found, small = run(Greedy(room=3), dataloader_drop_last=True), run(Greedy(), 8, dataloader_drop_last=True)
    found.train()
    small.train()
    assert close(found, small) and found.progress.step == 6


def test_the_batches_of_a_loader_of_the_users_own_are_split(run: Any) -> None:
    found = run(Greedy(room=3), train_loader=DataLoader(rows(21), batch_size=8))
    plain = run(Greedy(), train_loader=DataLoader(rows(21), batch_size=8), finds=False)
    found.train()
    plain.train()
    assert close(found, plain)


def test_a_number_beside_it_is_a_contradiction(run: Any) -> None:
    with pytest.raises(ConfigError, match="`microbatch_size=4` contradicts `auto_find_batch_size=True`"):
        run(Greedy(), microbatch_size=4)
