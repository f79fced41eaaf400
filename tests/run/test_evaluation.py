"""Evaluation and prediction: exact, bounded in memory, and without a trace in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipes import Sentences, Tagger, Trace, rows, same, t16
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from omnitrain import (
    AccelerateTrainer,
    Callback,
    ConfigError,
    DataError,
    HFTrainer,
    NonFiniteError,
    ObjectiveError,
    StepOutput,
    Trainer,
)

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


# The rehearsal before the first step


class Watch(Callback):
    """Writes down the step and the event of everything that callbacks are told."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_start(self, trainer: Any) -> None:
        self.steps += 1


def classes(size: int = 16, dtype: torch.dtype = torch.long) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(size, 4, generator=generator), (torch.arange(size) % 3).to(dtype))


def crashing(y_true: Any, y_pred: Any) -> dict[str, float]:
    raise KeyError("no such thing")


class Nameless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, topic: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, topic), "logits": logits}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a metric that crashes": ({"compute_metrics": crashing}, KeyError, "no such thing"),
    "a metric that is no number": ({"compute_metrics": lambda p: {"m": "high"}}, DataError, "'m' is no number"),
    "another metric to go by": (
        {"compute_metrics": lambda p: {"hits": 1.0}, "optimization_metric": "accuracy"}, ObjectiveError, "'hits'"
    ),
    "labels out of range": (
        {"eval_dataset": TensorDataset(torch.randn(8, 4), torch.full((8,), 7)), "compute_metrics": "accuracy",
         "loss_fn": lambda outputs, labels: F.cross_entropy(outputs, labels.clamp(max=2))},
        DataError, "8 labels are outside 0..2",
    ),
    "labels of another shape": (
        {"eval_dataset": TensorDataset(torch.randn(8, 4), torch.zeros(8, 2).long()), "compute_metrics": "accuracy",
         "loss_fn": lambda outputs, labels: outputs.sum() * 0}, DataError, "cannot score",
    ),
    "a NaN": (
        {"eval_dataset": TensorDataset(torch.full((8, 4), float("nan")), torch.zeros(8).long())}, NonFiniteError, "0, 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_an_evaluation_would_raise_is_raised_before_the_first_step(trainer_class: Any, case: str) -> None:
    options, error, told = WRONG[case]
    watch = Watch()
    options = {"loss_fn": F.cross_entropy, "callbacks": [watch], "eval_dataset": classes(), **options}
    with pytest.raises(error, match=told) as caught:
        train(trainer_class, nn.Linear(4, 3), classes(), options.pop("eval_dataset"), **options)
    assert watch.steps == 0
    assert any("rehearsal of evaluations before the first step" in note for note in caught.value.__notes__)
    with pytest.raises(error, match=told):
        train(trainer_class, nn.Linear(4, 3), classes(), WRONG[case][0].get("eval_dataset", classes()),
              **{name: value for name, value in options.items() if name != "eval_dataset"}, sanity=False)  # fmt: skip
    assert watch.steps == 2


def test_every_named_set_is_rehearsed(trainer_class: Any) -> None:
    watch, bad = Watch(), TensorDataset(torch.randn(8, 5), torch.zeros(8).long())
    with pytest.raises(RuntimeError, match="shapes"):
        train(
            trainer_class, nn.Linear(4, 3), classes(), {"dev": classes(), "web": bad}, loss_fn=F.cross_entropy,
            callbacks=[watch],
        )  # fmt: skip
    assert watch.steps == 0


def test_a_metric_that_needs_more_than_a_batch_is_asked_for_the_whole_set(caplog: pytest.LogCaptureFixture) -> None:
    sizes = []

    def needs_all(y_true: Any, y_pred: Any) -> dict[str, float]:
        sizes.append(len(y_true))
        if len(set(y_true)) < 3:
            raise ValueError("a class is missing")
        return {"agreement": float((y_true == y_pred).mean())}

    x, y = classes(12).tensors
    subject = train(
        Trainer, nn.Linear(4, 3), classes(), TensorDataset(x, y.sort().values), loss_fn=F.cross_entropy, epochs=1,
        compute_metrics=needs_all, optimization_metric="agreement", optimization_direction="max", eval_batch_size=4,
    )  # fmt: skip
    assert sizes == [4, 12, 12] and len(subject.metrics["valid"]) == 1
    assert "(ValueError: a class is missing)" in caplog.text


class Counted(Dataset[Any]):
    """Rows that write down which of them were read, and draw random numbers on the way."""

    def __init__(self, size: int) -> None:
        self.data, self.read = rows(size), []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        x, y = self.data[index]
        return x + 0.1 * torch.randn(4, dtype=torch.float64), y


def test_the_rehearsal_leaves_no_trace(trainer_class: Any) -> None:
    def history(sanity: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
        trace, valid = Trace(), Counted(10)
        subject = train(
            trainer_class, model, Counted(12), valid, loss_fn=F.mse_loss, callbacks=[trace], patience=1, log_steps=1,
            batch_size=4, epochs=3, learning_rate=0.05, sanity=sanity, compute_metrics=["mse"], load_best_at_end=False,
        )  # fmt: skip
        logs = [{key: value for key, value in row.items() if "per_second" not in key} for row in trace.logs]
        return list(model.state_dict().values()), trace.events, logs, subject.metrics.to_dict(), valid.read

    with_it, without = history(True), history(False)
    assert same(with_it[0], without[0])
    assert with_it[1:4] == without[1:4]
    # the first of four is read twice, since it was then noticed that it draws random numbers
    assert len(with_it[4]) == len(without[4]) + 4 and with_it[4][:4] == [0, 1, 2, 3]


def test_a_resumed_run_is_rehearsed_too_and_goes_on_with_the_same_bits(trainer_class: Any, tmp_path: Path) -> None:
    def trained(folder: Path, epochs: int, resume: Any = None, **options: Any) -> Any:
        torch.manual_seed(0)
        model = t16(dropout=0.3)
        placed = {"device": "cpu"} if trainer_class is Trainer else {}
        subject = trainer_class(
            model, train_dataset=rows(24), eval_dataset=rows(10), loss_fn=F.mse_loss, epochs=epochs, progress_bar=False,
            save_dir=folder, learning_rate=0.05, load_best_at_end=False, **placed, **options,
        )  # fmt: skip
        subject.train(resume)
        return list(model.state_dict().values())

    straight = trained(tmp_path / "a", 3, sanity=False)
    trained(tmp_path / "b", 1)
    with pytest.raises(KeyError):
        trained(tmp_path / "b", 3, "auto", compute_metrics=crashing)
    assert same(trained(tmp_path / "b", 3, "auto"), straight)


def test_one_batch_is_read_also_by_workers(trainer_class: Any, tmp_path: Path) -> None:
    class Noted(Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            with open(tmp_path / "read", "a") as file:
                file.write(f"{index}\n")
            return rows(40)[index]

    train(
        trainer_class, t16(), rows(8), Noted(), loss_fn=F.mse_loss, epochs=1, num_workers=2, eval_batch_size=4
    )  # fmt: skip
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert sorted(read) == sorted([0, 1, 2, 3, *range(40)])


def test_eval_on_start_needs_no_rehearsal() -> None:
    valid = Counted(8)
    train(Trainer, t16(), rows(8), valid, loss_fn=F.mse_loss, epochs=1, eval_on_start=True, eval_batch_size=8)
    assert valid.read == list(range(8)) * 3  # once more, since it was noticed that it draws


def test_an_evaluation_whose_end_is_unknown_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("omnitrain.run.evaluation._LONG_S", 0.0)
    trainer(t16(), loss_fn=F.mse_loss).evaluate(Streamed(rows(8)))
    assert "The dataset goes on after 1 batches and 0 seconds, and its length is unknown" in caplog.text


# Labels under other keys


class Topics(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, *keys: str) -> None:
        self.data, self.keys = classes(12), keys

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = self.data[index]
        return {"x": x, **dict.fromkeys(self.keys, y)}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class TwoTopics(Nameless):
    def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x, first)


def test_metrics_without_a_known_label_key_are_refused_with_the_keys_that_there_are(trainer_class: Any) -> None:
    for metrics in ("accuracy", crashing):
        with pytest.raises(DataError) as caught:
            train(trainer_class, Nameless(), Topics("topic"), Topics("topic"), compute_metrics=metrics)
        assert "its batches have the keys 'x', 'topic', and labels are looked for under 'labels'," in str(caught.value)
        assert "label_names=['topic']" in str(caught.value)


def test_labels_are_found_under_the_names_that_are_given(trainer_class: Any) -> None:
    found = []
    for key in ("labels", "topic"):
        subject = train(
            trainer_class, Plain(), Topics(key), Topics(key), compute_metrics="accuracy", loss_fn=F.cross_entropy,
            label_names=None if key == "labels" else ["topic"], epochs=1,
        )  # fmt: skip
        found.append(subject.metrics["valid"][0])
    assert found[0] == found[1] and "eval_accuracy" in found[0]


def test_several_labels_are_a_tuple(trainer_class: Any) -> None:
    def compute(eval_pred: Any) -> dict[str, float]:
        first, second = eval_pred.label_ids
        return {"agreement": float((first == second).mean()), "hits": float((eval_pred[0].argmax(-1) == first).mean())}

    names = ["first", "second"]
    subject = train(
        trainer_class, TwoTopics(), Topics(*names), Topics(*names), compute_metrics=compute, label_names=names, epochs=1
    )
    assert subject.metrics["valid"][0]["eval_agreement"] == 1.0
    labels = subject.predict(Topics(*names)).labels
    assert [one.shape for one in labels] == [(12,), (12,)]


def test_a_loss_function_gets_several_labels_as_a_tuple() -> None:
    def loss(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, labels[0]) + F.cross_entropy(outputs, labels[1])

    names = ["first", "second"]
    subject = train(Trainer, Plain(), Topics(*names), Topics(*names), loss_fn=loss, label_names=names, epochs=1)
    one, two = (subject.evaluate(Topics(*names))["eval_loss"] for _ in range(2))
    assert one == two > 0


def test_a_unit_that_gives_no_outputs_is_refused_where_metrics_are_asked_for() -> None:
    model = nn.Linear(4, 3)

    def unit(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(DataError, match=r"only a loss comes of a batch.*evaluate\(batch\)"):
        train(Trainer, model, classes(), classes(), unit=unit, compute_metrics="accuracy")


def test_label_names_of_the_training_arguments_agree_with_ours(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(str(tmp_path), label_names=["topic"], use_cpu=True, report_to="none")
    assert HFTrainer(Nameless(), args, Topics("topic")).settings.label_names == ["topic"]
    with pytest.raises(ConfigError, match="label_names"):
        HFTrainer(Nameless(), args, Topics("topic"), label_names=["other"])
    with pytest.raises(ConfigError, match="must be a list of the keys of labels"):
        Trainer(Nameless(), Topics("topic"), label_names="topic")


def test_sequences_of_labels_of_any_name_are_padded_as_labels() -> None:
    class Ragged(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"ids": torch.arange(index + 1), "tags": torch.arange(index + 1)}

    class Tags(Tagger):
        def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> Any:
            return super().forward(ids, tags)

    subject = trainer(Tags(), label_names=["tags"], eval_batch_size=4, compute_metrics="accuracy")
    whole = subject.evaluate(Ragged())
    assert whole == pytest.approx(trainer(Tags(), label_names=["tags"], eval_batch_size=1,
                                          compute_metrics="accuracy").evaluate(Ragged()))  # fmt: skip


# Metrics by name where there is one score for each label


@pytest.mark.parametrize("columns", [1, 3])
def test_metrics_by_name_of_one_score_for_each_label(trainer_class: Any, columns: int) -> None:
    from sklearn.metrics import f1_score, roc_auc_score

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(30, 4, generator=generator)
    y = (x[:, :columns] + 0.5 * torch.randn(30, columns, generator=generator) > 0).float()
    model = nn.Linear(4, columns)
    nn.init.eye_(model.weight)
    average = "binary" if columns == 1 else "macro"
    name = "f1" if columns == 1 else "f1_macro"
    subject = train(
        trainer_class, model, TensorDataset(x, y), TensorDataset(x, y), loss_fn=nn.BCEWithLogitsLoss(), epochs=1,
        compute_metrics=["accuracy", name, "auc"], optimization_metric=name, eval_batch_size=7,
    )  # fmt: skip
    row, scores = subject.metrics["valid"][0], subject.predict(TensorDataset(x, y)).predictions
    y = y.numpy()
    assert row["eval_accuracy"] == pytest.approx(((scores > 0) == y).all(1).mean())
    assert row[f"eval_{name}"] == pytest.approx(f1_score(y, scores > 0, average=average))
    assert row["eval_auc"] == pytest.approx(roc_auc_score(y, scores))
