"""Evaluation and prediction: exact, bounded in memory, and without a trace in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipes import Sentences, Tagger, rows, t16
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from omnitrain import AccelerateTrainer, DataError, HFTrainer, NonFiniteError, StepOutput, Trainer

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


@pytest.fixture(params=TRAINERS)
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return TRAINERS[request.param]


def train(trainer_class: Any, model: nn.Module, data: Any, valid: Any, **options: Any) -> Any:
    placed = {"device": "cpu"} if trainer_class is Trainer else {}
    subject = trainer_class(
        model, train_dataset=data, eval_dataset=valid, **{"progress_bar": False, "epochs": 2, **placed, **options}
    )
    subject.train()
    return subject


def trainer(model: nn.Module, **options: Any) -> Trainer:
    return Trainer(model, **{"device": "cpu", "progress_bar": False, **options})


@pytest.mark.parametrize("batch", [1, 3, 4, 17])
def test_the_loss_is_the_mean_over_labels_that_count_whatever_the_batch(batch: int) -> None:
    model, data = Tagger(), Sentences(17)
    result = trainer(model, eval_batch_size=batch).evaluate(data)
    expected = model(data.ids, data.labels)["loss"].item()
    assert result == {"eval_loss": pytest.approx(expected, abs=1e-13)}


def test_a_data_set_a_loader_and_tensors_give_the_same() -> None:
    subject = trainer(t16(), loss_fn=F.mse_loss)
    data = rows(10)
    expected = subject.evaluate(data)
    assert subject.evaluate(DataLoader(data, 10)) == pytest.approx(expected)
    assert subject.evaluate(data.tensors) == pytest.approx(expected)
    assert subject.evaluate([data[i] for i in range(10)]) == pytest.approx(expected)
    assert subject.evaluate({"a": data, "b": data}) == pytest.approx(
        {"eval_loss": expected["eval_loss"], "eval_a_loss": expected["eval_loss"], "eval_b_loss": expected["eval_loss"]}
    )
    assert subject.evaluate(data, prefix="dev") == pytest.approx({"dev_loss": expected["eval_loss"]})


def test_loaders_may_be_named_sets_too() -> None:
    sets = {"a": DataLoader(rows(5), 2), "b": DataLoader(rows(9), 4)}
    subject = trainer(t16(), eval_loader=sets, loss_fn=F.mse_loss)
    assert subject.evaluate() == pytest.approx(subject.evaluate({"a": rows(5), "b": rows(9)}))
    with pytest.raises(ValueError, match="one dataset, got the sets a, b"):
        subject.predict(sets)


def test_modes_and_random_numbers_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    model.train()
    model[1].eval()  # a frozen batch norm stays frozen
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    means = model[1].running_mean.clone()
    subject = trainer(model, loss_fn=F.mse_loss)
    assert subject.evaluate(rows(9)) == subject.evaluate(rows(9))
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert torch.equal(state[0], torch.get_rng_state()) and np.array_equal(state[1], np.random.get_state()[1])
    assert torch.equal(means, model[1].running_mean)


def test_modes_come_back_after_an_error_too() -> None:
    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("boom")

    model = Bad(4, 1)
    with pytest.raises(RuntimeError, match="boom"):
        trainer(model, loss_fn=F.mse_loss).evaluate(rows(4, torch.float32))
    assert model.training


def test_ragged_predictions_are_padded_with_minus_100() -> None:
    class Ragged(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.arange(index + 1)
            return {"ids": ids, "labels": ids % 5}

    result = trainer(Tagger(), eval_batch_size=2).predict(Ragged())
    assert result.predictions.shape == (5, 5, 5) and result.labels.shape == (5, 5)
    assert (result.predictions[0, 2:] == -100).all() and (result.labels[0, 1:] == -100).all()


def test_a_set_without_labels_can_be_predicted_but_not_evaluated() -> None:
    subject = trainer(t16(), loss_fn=F.mse_loss)
    x = rows(6).tensors[0]
    result = subject.predict(x)
    assert result.predictions.shape == (6, 1) and result.labels is None and result.metrics == {}
    with pytest.raises(DataError, match="gives no loss"):
        subject.evaluate(x)


def test_a_function_gets_all_arrays_once_and_names_keep_none() -> None:
    calls: list[tuple[Any, ...]] = []

    def metric(pair: Any) -> dict[str, float]:
        predictions, labels = pair
        calls.append((predictions.shape, labels.shape))
        return {"accuracy": float((predictions.argmax(-1) == labels).mean())}

    data = TensorDataset(torch.randn(11, 4), torch.randint(0, 3, (11,)))
    model = nn.Linear(4, 3)
    by_function = trainer(model, loss_fn=F.cross_entropy, compute_metrics=metric).evaluate(data)
    by_name = trainer(model, loss_fn=F.cross_entropy, compute_metrics="accuracy").evaluate(data)
    assert calls == [((11, 3), (11,))] and by_function == pytest.approx(by_name)


def test_memory_stays_bounded_however_many_batches_there_are() -> None:
    import psutil

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.expand(-1, 32_768) + self.layer(x)  # 8 samples are a megabyte of logits

    data = TensorDataset(torch.randn(8 * 200, 1), torch.randint(0, 32_768, (8 * 200,)))
    subject = trainer(Wide(), loss_fn=F.cross_entropy, compute_metrics="accuracy")
    subject.evaluate(data)  # what the allocator keeps for itself is not ours to count
    before = psutil.Process().memory_info().rss
    subject.evaluate(data)
    assert psutil.Process().memory_info().rss - before <= 50e6


def test_a_unit_says_by_itself_what_metrics_look_at() -> None:
    model = nn.Linear(4, 3)

    class Unit:
        def __call__(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        def evaluate(self, batch: Any) -> StepOutput:
            outputs = model(batch[0])
            return StepOutput(F.cross_entropy(outputs, batch[1]), outputs, batch[1])

    data = TensorDataset(torch.randn(7, 4), torch.randint(0, 3, (7,)))
    ours = trainer(model, unit=Unit(), compute_metrics="accuracy").evaluate(data)
    assert ours == pytest.approx(trainer(model, loss_fn=F.cross_entropy, compute_metrics="accuracy").evaluate(data))


def test_a_causal_language_model_is_scored_on_what_comes_next() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=13, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 13, (6, 9))
    data = [{"input_ids": row, "labels": row} for row in ids]
    subject = trainer(model, compute_metrics=["accuracy", "perplexity"], eval_batch_size=4)
    result = subject.evaluate(data)
    with torch.no_grad():
        out = model.eval()(input_ids=ids, labels=ids)
    hits = (out.logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean().item()
    assert result["eval_loss"] == pytest.approx(out.loss.item(), abs=1e-6)
    assert result["eval_accuracy"] == pytest.approx(hits)
    assert result["eval_perplexity"] == pytest.approx(out.loss.exp().item(), rel=1e-5)


def test_worker_processes_end_with_what_they_were_for() -> None:
    import multiprocessing

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return rows(12)[index]

    before = len(multiprocessing.active_children())
    subject = trainer(
        t16(), train_dataset=Rows(), eval_dataset=Rows(), loss_fn=F.mse_loss, num_workers=2, epochs=2, batch_size=4
    )
    subject.train()
    assert len(multiprocessing.active_children()) == before
    subject.evaluate()
    subject.predict(Rows())
    assert len(multiprocessing.active_children()) == before


# Evaluations that say nothing


def rows_with_nan(size: int, index: int) -> TensorDataset:
    x, y = rows(size).tensors
    y = y.clone()
    y[index] = float("nan")
    return TensorDataset(x, y)


class Streamed(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self.data)))


@pytest.mark.parametrize("named", [False, True])
def test_a_nan_in_an_evaluation_ends_the_run_with_set_and_sample_named(
    trainer_class: Any, named: bool, tmp_path: Path
) -> None:
    bad = rows_with_nan(20, index=13)
    valid: Any = {"fine": rows(8), "web": bad} if named else bad
    with pytest.raises(NonFiniteError) as caught:
        train(trainer_class, t16(), rows(8), valid, loss_fn=F.mse_loss, patience=1, save_dir=tmp_path / "run")
    name = "the evaluation set 'web'" if named else "the evaluation set"
    assert f"The loss of {name} is nan at step 1. It comes from these samples of it: 13." in str(caught.value)
    assert json.loads((tmp_path / "run" / "nonfinite.json").read_text())["sample_indices"] == [13]


def test_of_a_stream_the_batch_with_a_nan_is_named() -> None:
    with pytest.raises(NonFiniteError, match="It comes from batch 4 of it"):
        train(Trainer, t16(), rows(8), Streamed(rows_with_nan(20, index=13)), loss_fn=F.mse_loss, eval_batch_size=4)


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_a_nan_in_evaluations_is_told_and_uses_up_no_patience(
    trainer_class: Any, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = train(
        trainer_class, t16(), rows(8), rows_with_nan(8, 3), loss_fn=F.mse_loss, patience=1, epochs=3,
        on_nonfinite=policy,
    )  # fmt: skip
    assert (subject.metrics["stop_reason"], subject.progress.step) == ("epochs", 3)
    assert subject.metrics["best_valid"] == {}
    assert "Not finite in the evaluation at step 2: eval_loss=nan. `eval_loss` is what" in caplog.text


def test_a_metric_without_a_value_is_told_and_uses_up_no_patience(caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))  # one class has no ranking
    subject = train(
        Trainer, nn.Linear(4, 2), data, data, loss_fn=F.cross_entropy, patience=1, epochs=3, compute_metrics="roc_auc",
        optimization_metric="roc_auc",
    )  # fmt: skip
    assert subject.metrics["stop_reason"] == "epochs"
    assert "Not finite in the evaluation at step 1: eval_roc_auc=nan." in caplog.text


def test_a_schedule_that_follows_evaluations_does_not_follow_a_nan() -> None:
    seen: list[float] = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(metrics)

    train(
        Trainer, t16(), rows(8), rows_with_nan(8, 3), loss_fn=F.mse_loss, on_nonfinite="skip", lr_scheduler=Plateau
    )  # fmt: skip
    assert seen == []


@pytest.mark.parametrize("kind", ["stream", "loader", "named"])
def test_an_evaluation_set_without_samples_is_refused_by_name(trainer_class: Any, kind: str) -> None:
    empty: Any = {"stream": Streamed([]), "loader": DataLoader([], 2), "named": {"a": rows(4), "b": Streamed([])}}[kind]
    name = "set 'b'" if kind == "named" else "set"
    with pytest.raises(DataError, match=f"The evaluation {name} has no samples. Give it at least one"):
        train(trainer_class, t16(), rows(8), empty, loss_fn=F.mse_loss)


def test_an_evaluation_set_without_a_label_that_counts_is_refused() -> None:
    data = Sentences(4)
    data.labels[:] = -100
    with pytest.raises(DataError, match="nothing to evaluate in the evaluation set: none of its labels counts"):
        train(Trainer, Tagger(), Sentences(8), data)
