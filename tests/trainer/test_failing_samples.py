"""Errors report the samples, batches and callbacks that raised them."""

import re
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from marks import TRAINERS
from recipes import StopAt, rows, trainer_on_cpu
from torch import nn
from torch.utils.data import DataLoader, Dataset

from omnitrain import Callback, StepOutput, Trainer
from omnitrain.data.sampling import EpochSampler


@pytest.fixture(params=["native", "hf"])
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return TRAINERS[request.param]


class Classes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of three classes, of which one may be a bad sample."""

    def __init__(self, size: int = 24, bad: int = -1, how: str = "") -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(size, 4, generator=generator), torch.arange(size) % 3
        self.bad, self.how = bad, how
        if how == "label":
            self.y[bad] = 7

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.bad and self.how == "getitem":
            raise KeyError("no such file")
        if index == self.bad and self.how == "shape":
            return torch.zeros(3, 3), self.y[index]
        return self.x[index], self.y[index]


def message_of(trainer_class: Any, data: Any, kind: type[Exception], act: str = "train", **options: Any) -> str:
    """Return the printed error with its notes."""
    defaults = {"loss_fn": F.cross_entropy, "batch_size": 4, "epochs": 1}
    trainer = trainer_on_cpu(trainer_class, nn.Linear(4, 3), data, **defaults | options)
    with pytest.raises(kind) as caught:
        getattr(trainer, act)()
    assert type(caught.value) is kind
    return "".join(traceback.format_exception(caught.value))


def step_of(sample: int, size: int = 24, batch: int = 4) -> int:
    return EpochSampler(size, batch).order(0).tolist().index(sample) // batch + 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_unreadable_sample_is_reported_with_its_step(trainer_class: Any, workers: int) -> None:
    text = message_of(trainer_class, Classes(bad=17, how="getitem"), KeyError, num_workers=workers)
    assert "Raised for sample 17 of the training set." in text
    assert f"Where: the data of step {step_of(17)} (epoch 1), rank 0." in text


def test_sample_that_fails_at_once_or_only_once_is_reported() -> None:
    class Flaky(Classes):
        failures = 0

        def __getitem__(self, index: int) -> Any:
            if index == 9 and not self.failures:
                self.failures += 1
                raise OSError("the network")
            return super().__getitem__(index)

    class AtOnce(Classes):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    assert "Raised for sample 9 of the training set." in message_of(Trainer, Flaky(), OSError)
    text = message_of(Trainer, AtOnce(bad=17, how="getitem"), KeyError)
    assert "Raised for sample 17 of the training set, which fails individually." in text


def test_label_out_of_range_is_found_in_its_batch(trainer_class: Any) -> None:
    for accumulation, microbatch_size in ((3, None), (2, 3)):
        options = {"gradient_accumulation_steps": accumulation, "microbatch_size": microbatch_size}
        text = message_of(trainer_class, Classes(bad=17, how="label"), IndexError, **options)
        assert "Raised for sample 17 of the training set, which fails individually." in text
        assert f"Where: step {(step_of(17) - 1) // accumulation + 1} (epoch 1), rank 0." in text


def test_search_for_samples_leaves_generators_unchanged() -> None:
    states: dict[str, torch.Tensor] = {}

    class After(Callback):
        def on_exception(self, trainer: Any, error: BaseException) -> None:
            assert trainer.model.training
            states["after"] = torch.get_rng_state()

    class Noting(Trainer):
        def _forward(self, model: nn.Module, batch: Any) -> Any:
            if not torch.is_grad_enabled():  # the search
                return super()._forward(model, batch)
            outputs = model(batch[0])
            states["before"] = torch.get_rng_state()
            return StepOutput(F.cross_entropy(outputs, batch[1]))

    trainer = Noting(
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), train_dataset=Classes(bad=17, how="label"),
        loss_fn=F.cross_entropy, batch_size=4, device="cpu", progress_bar=False, callbacks=[After()],
    )  # fmt: skip
    with pytest.raises(IndexError, match="7"):
        trainer.train()
    assert torch.equal(states["after"], states["before"])


def test_sample_of_another_shape_or_the_full_batch_is_reported(trainer_class: Any) -> None:
    def collate(samples: Any) -> Any:
        return tuple(map(torch.stack, zip(*samples, strict=True)))

    text = message_of(trainer_class, Classes(bad=17, how="shape"), RuntimeError, data_collator=collate)
    assert "by the collator for sample 17 of the training set, which differs from the others of the" in text
    assert f"Where: the data of step {step_of(17)} (epoch 1), rank 0." in text
    data = rows(8, torch.float32)  # which all fail
    text = message_of(trainer_class, data, RuntimeError, loss_fn=lambda outputs, labels: outputs @ labels)
    assert re.search(r"Raised for samples \d, \d, \d, \d of the training set", text)
    assert "Where: step 1 (epoch 1), rank 0." in text


@pytest.mark.parametrize("how", ["getitem", "label"])
def test_error_of_a_stream_or_loader_reports_the_number(trainer_class: Any, how: str) -> None:
    data = Streamed(Classes(bad=17, how=how))
    error, samples = (KeyError, "sample 17") if how == "getitem" else (IndexError, "samples 16, 17, 18, 19")
    text = message_of(trainer_class, data, error, max_steps=9)
    assert f"{samples} of the training set" in text
    assert "step 5 (epoch 1), rank 0." in text
    if how == "getitem":
        loader = DataLoader(Classes(bad=17, how=how), batch_size=4)
        text = message_of(trainer_class, None, KeyError, train_loader=loader, batch_size=8)
        assert "Raised by the loader of the training set for batch 4 of its epoch" in text
        assert "Where: the data of step 5 (epoch 1), rank 0." in text


def test_error_of_an_evaluation_reports_set_and_sample(trainer_class: Any) -> None:
    sets = {"dev": Classes(8), "web": Classes(8, bad=5, how="label")}
    text = message_of(trainer_class, Classes(), IndexError, eval_dataset=sets, eval_steps=2)
    assert "Raised for sample 5 of the evaluation set 'web', which fails individually." in text
    assert "Where: the evaluation after step 2 (epoch 1), rank 0." in text
    text = message_of(trainer_class, None, IndexError, "evaluate", eval_dataset=sets)
    assert "sample 5 of the evaluation set 'web'" in text


def test_error_of_a_callback_backward_pass_or_metric_is_placed(trainer_class: Any) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 2:
                raise ValueError("boom")

    def loss_fn(outputs: Any, labels: Any) -> Any:
        outputs.register_hook(lambda gradient: 1 / 0)
        return F.cross_entropy(outputs, labels)

    def exact(y_true: Any, y_pred: Any) -> float:
        raise ZeroDivisionError("no rows")

    text = message_of(trainer_class, Classes(), ValueError, callbacks=[Fails(), StopAt(5)])
    assert "Raised by the callback Fails.on_step_end." in text
    assert "Where: after step 2 (epoch 1), rank 0." in text
    text = message_of(trainer_class, Classes(), ZeroDivisionError, loss_fn=loss_fn)
    assert "Where: after step 0 (epoch 1), rank 0." in text
    options = {"eval_dataset": {"web": Classes(8)}, "compute_metrics": ["accuracy", exact], "sanity": False}
    text = message_of(trainer_class, Classes(), ZeroDivisionError, **options)
    assert "Raised by the metric exact in `compute_metrics`." in text
    assert "It was to score the evaluation set 'web'." in text
    assert re.search(r"Where: the evaluation after step 6 \(epoch [12]\), rank 0\.", text)
