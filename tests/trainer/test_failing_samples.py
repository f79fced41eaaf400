"""Errors report the samples, batches and callbacks that raised them."""

import re
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from marks import TRAINERS, make_small
from recipes import StopAt, callback, rows
from torch import nn
from torch.utils.data import DataLoader, Dataset

from omnitrain import Trainer
from omnitrain.data.sampling import EpochSampler


@pytest.fixture(params=["native", "hf"])
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return TRAINERS[request.param]


class Classes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, size: int = 24, bad: int = -1, how: str = "") -> None:
        self.x, self.y = torch.randn(size, 4, generator=torch.Generator().manual_seed(0)), torch.arange(size) % 3
        self.bad, self.how = bad, how
        if how == "label":
            self.y[bad] = 7

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.bad and self.how == "getitem":
            raise KeyError("no such file")
        return torch.zeros(3, 3) if index == self.bad and self.how == "shape" else self.x[index], self.y[index]


def message_of(trainer_class: Any, data: Any, kind: type[Exception], act: str = "train", **options: Any) -> str:
    options = {"loss_fn": F.cross_entropy, "epochs": 1, **options}
    trainer = make_small(trainer_class, nn.Linear(4, 3), data, **options)
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


class Flaky(Classes):
    failures = 0

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not self.failures:
            self.failures += 1
            raise OSError("the network")
        return super().__getitem__(index)


def test_sample_that_fails_at_once_or_only_once_is_reported() -> None:
    assert "Raised for sample 9 of the training set." in message_of(Trainer, Flaky(), OSError)
    at_once = type("AtOnce", (Classes,), {"__getitems__": lambda self, indices: [self[index] for index in indices]})
    text = message_of(Trainer, at_once(bad=17, how="getitem"), KeyError)
    assert "Raised for sample 17 of the training set, which fails individually." in text


def test_label_out_of_range_is_found_in_its_batch(trainer_class: Any) -> None:
    for accumulation, microbatch_size in ((3, None), (2, 3)):
        options = {"gradient_accumulation_steps": accumulation, "microbatch_size": microbatch_size}
        text = message_of(trainer_class, Classes(bad=17, how="label"), IndexError, **options)
        assert "Raised for sample 17 of the training set, which fails individually." in text
        assert f"Where: step {(step_of(17) - 1) // accumulation + 1} (epoch 1), rank 0." in text


@pytest.mark.parametrize("event", ["loss_fn", "on_epoch_end"])
def test_error_of_a_device_says_how_to_find_its_cause(trainer_class: Any, event: str) -> None:
    def fail(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    options = {"loss_fn": fail} if event == "loss_fn" else {"callbacks": [callback(**{event: fail})]}
    text = message_of(trainer_class, Classes(), torch.AcceleratorError, **options)
    assert text.count("A device reports its errors late") == 1 and "CUDA_LAUNCH_BLOCKING=1" in text
    assert (", or before." in text) is (event == "loss_fn")


def test_search_for_samples_leaves_generators_unchanged() -> None:
    states: list[torch.Tensor] = []

    def note(*_: Any) -> None:
        if torch.is_grad_enabled():  # not in the search
            states.append(torch.get_rng_state())

    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    model.register_forward_hook(note)
    options = {"loss_fn": F.cross_entropy, "callbacks": [callback(on_exception=note)]}
    with pytest.raises(IndexError, match="7"):
        make_small(Trainer, model, Classes(bad=17, how="label"), **options).train()
    assert model.training and torch.equal(*states[-2:])


def test_sample_of_another_shape_or_the_full_batch_is_reported(trainer_class: Any) -> None:
    data = Classes(bad=17, how="shape")
    text = message_of(trainer_class, data, RuntimeError, data_collator=torch.utils.data.default_collate)
    assert "by the collator for sample 17 of the training set, which differs from the others of the" in text
    assert f"Where: the data of step {step_of(17)} (epoch 1), rank 0." in text
    data = rows(8, torch.float32)  # which all fail
    text = message_of(trainer_class, data, RuntimeError, loss_fn=lambda outputs, labels: outputs @ labels)
    assert re.search(r"Raised for samples \d, \d, \d, \d of the training set", text)
    assert "Where: step 1 (epoch 1), rank 0." in text


@pytest.mark.parametrize("how", ["getitem", "label"])
def test_error_of_a_stream_or_loader_reports_the_number(trainer_class: Any, how: str) -> None:
    data = Classes(bad=17, how=how)
    error, samples = (KeyError, "sample 17") if how == "getitem" else (IndexError, "samples 16, 17, 18, 19")
    text = message_of(trainer_class, Streamed(data), error, max_steps=9)
    assert f"{samples} of the training set" in text and "step 5 (epoch 1), rank 0." in text
    if how == "getitem":
        loader = DataLoader(data, batch_size=4)
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
    class Fails(StopAt):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == self.step:
                raise ValueError("boom")

    def loss_fn(outputs: Any, labels: Any) -> Any:
        outputs.register_hook(lambda gradient: 1 / 0)
        return F.cross_entropy(outputs, labels)

    def exact(y_true: Any, y_pred: Any) -> float:
        raise ZeroDivisionError("no rows")

    text = message_of(trainer_class, Classes(), ValueError, callbacks=[Fails(2), StopAt(5)])
    assert "Raised by the callback Fails.on_step_end." in text
    assert "Where: after step 2 (epoch 1), rank 0." in text
    text = message_of(trainer_class, Classes(), ZeroDivisionError, loss_fn=loss_fn)
    assert "Where: after step 0 (epoch 1), rank 0." in text
    options = {"eval_dataset": {"web": Classes(8)}, "compute_metrics": ["accuracy", exact], "sanity": False}
    text = message_of(trainer_class, Classes(), ZeroDivisionError, **options)
    assert "Raised by the metric exact in `compute_metrics`.\nIt was to score the evaluation set 'web'." in text
    assert re.search(r"Where: the evaluation after step 6 \(epoch [12]\), rank 0\.", text)
