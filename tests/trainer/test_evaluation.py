"""Evaluation and prediction: exact, bounded in memory, and without effect on training."""

import copy
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from marks import TRAINERS
from recipes import CountsPasses, FailsAt, Sentences, Tagger, Trace, fit, rows, same, t16, trainer_on_cpu
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from omnitrain import ConfigError, DataError, EvalSet, NonFiniteError, ObjectiveError, Predictions, StepOutput, Trainer


@pytest.fixture(params=["native", "hf"])
def trainer_class(request: pytest.FixtureRequest) -> Any:
    """The two trainers whose evaluations differ most."""
    return TRAINERS[request.param]


def build(trainer_class: Any, model: nn.Module, data: Any, valid: Any, **options: Any) -> Any:
    return trainer_on_cpu(trainer_class, model, data, eval_dataset=valid, **{"epochs": 2, **options})


def train(*args: Any, **options: Any) -> Any:
    return fit(build(*args, **options))


def evaluator(model: nn.Module, **options: Any) -> Trainer:
    return trainer_on_cpu(Trainer, model, **options)


class Ragged(list[dict[str, torch.Tensor]]):
    def __init__(self, labels: str) -> None:
        super().__init__({"ids": torch.arange(size), labels: torch.arange(size) % 5} for size in range(1, 6))


def test_evaluate_takes_datasets_loaders_and_tensors() -> None:
    sets = {"a": DataLoader(rows(5), 2), "b": DataLoader(rows(10), 4)}
    trainer, data = evaluator(t16(), loss_fn=F.mse_loss, eval_loader=sets), rows(10)
    expected = trainer.evaluate(data)
    for source in (DataLoader(data, 10), data.tensors, [data[i] for i in range(10)]):
        assert trainer.evaluate(source) == pytest.approx(expected)
    assert trainer.evaluate(data, prefix="dev") == pytest.approx({"dev_loss": expected["eval_loss"]})
    row = trainer.evaluate()
    assert row == pytest.approx(trainer.evaluate({"a": rows(5), "b": data}))
    assert row["eval_b_loss"] == pytest.approx(expected["eval_loss"]) and len(row) == 3
    with pytest.raises(ValueError, match="one dataset, got the sets a, b"):
        trainer.predict(sets)


def test_test_uses_the_test_loader_or_dataset(trainer_class: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    data, options = rows(10), {"loss_fn": F.mse_loss, "batch_size": 4}
    expected = build(trainer_class, t16(), rows(8), None, **options).test(data)
    assert expected.keys() == {"test_loss"}
    for source in ({"test_loader": DataLoader(data, 5)}, {"test_dataset": data}):
        assert build(trainer_class, t16(), rows(8), None, **options, **source).test() == pytest.approx(expected)
    trainer = train(trainer_class, t16(), rows(8), rows(4), test_dataset=data, **options)
    best = dict(trainer.metrics["best_valid"])
    result = trainer.test()
    assert trainer.metrics["test"][0]["loss"] == result["test_loss"] and dict(trainer.metrics["best_valid"]) == best
    if trainer_class is Trainer:
        assert not list(tmp_path.iterdir())
        path = trainer.save_metrics("test", result)
        assert path.name == "test_results.json" and json.loads(path.read_text()) == result


def test_evaluate_leaves_modes_and_generators_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    model[1].eval()  # a frozen batch norm stays frozen
    modes = [module.training for module in model.modules()]
    state, means = (torch.get_rng_state(), np.random.get_state()[1].copy()), model[1].running_mean.clone()
    trainer = evaluator(model, loss_fn=F.mse_loss)
    assert trainer.evaluate(rows(9)) == trainer.evaluate(rows(9))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(state[0], torch.get_rng_state()) and np.array_equal(state[1], np.random.get_state()[1])
    assert torch.equal(means, model[1].running_mean)
    model.append(FailsAt(1, nn.Identity()))
    with pytest.raises(RuntimeError, match="boom"):
        trainer.evaluate(rows(9))
    assert [module.training for module in model.modules()] == [*modes, True, True]


class Tags(Tagger):
    def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids, tags)


def test_predict_needs_no_labels_and_pads_ragged_outputs() -> None:
    trainer, x = evaluator(t16(), loss_fn=F.mse_loss), rows(6).tensors[0]
    result = trainer.predict(x)
    assert result.predictions.shape == (6, 1) and result.labels is None and result.metrics == {}
    with pytest.raises(ConfigError, match="There is nothing to predict: pass a dataset"):
        trainer.predict(None)
    with pytest.raises(DataError, match="`loss_fn` needs labels"):
        trainer.evaluate(x)
    result = evaluator(Tagger(), eval_batch_size=2).predict(Ragged("labels"))
    assert result.predictions.shape == (5, 5, 5) and result.labels.shape == (5, 5)
    assert (result.predictions[0, 2:] == -100).all() and (result.labels[0, 1:] == -100).all()
    options = {"label_names": ["tags"], "compute_metrics": "accuracy"}
    padded, single = (evaluator(Tags(), eval_batch_size=size, **options).evaluate(Ragged("tags")) for size in (4, 1))
    assert padded == pytest.approx(single)


def test_metrics_of_functions_names_and_units_agree() -> None:
    model, calls = nn.Linear(4, 3), list[tuple[Any, ...]]()

    def metric(pair: Any) -> dict[str, float]:
        calls.append((pair[0].shape, pair[1].shape))
        return {"accuracy": float((pair[0].argmax(-1) == pair[1]).mean())}

    class Unit:
        def __call__(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        def evaluate(self, batch: Any) -> StepOutput:
            return StepOutput(self(batch), model(batch[0]), batch[1], extra={"inputs": batch[0]})

    def largest_input(prediction: Any) -> dict[str, float]:
        return {"largest": float(prediction.inputs.max())}

    data, by_loss = TensorDataset(torch.randn(11, 4), torch.randint(0, 3, (11,))), {"loss_fn": F.cross_entropy}
    expected = evaluator(model, compute_metrics="accuracy", **by_loss).evaluate(data)
    for options in ({"compute_metrics": metric, **by_loss}, {"compute_metrics": "accuracy", "unit": Unit()}):
        assert evaluator(model, **options).evaluate(data) == pytest.approx(expected)
    assert calls == [((11, 3), (11,))]
    row = evaluator(model, unit=Unit(), compute_metrics=largest_input, eval_batch_size=4).evaluate(data)
    assert row["eval_largest"] == data.tensors[0].max().item()
    with pytest.raises(DataError, match=r"a batch gives only a loss.*evaluate\(batch\)"):
        evaluator(model, unit=Unit().__call__, compute_metrics="accuracy").evaluate(data)


class Wide(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # 8 samples are a megabyte of logits
        return x.expand(-1, 32_768) + super().forward(x)


def test_evaluate_has_bounded_memory() -> None:
    data = TensorDataset(torch.randn(8 * 60, 1), torch.randint(0, 32_768, (8 * 60,)))
    trainer = evaluator(Wide(1, 1), loss_fn=F.cross_entropy, compute_metrics="accuracy")
    trainer.evaluate(TensorDataset(*data[:80]))  # what the allocator keeps for itself does not count
    before = psutil.Process().memory_info().rss
    trainer.evaluate(data)
    assert psutil.Process().memory_info().rss - before <= 20e6


def rows_with_nan(size: int, index: int) -> TensorDataset:
    data = rows(size)
    data.tensors[1][index] = torch.nan
    return data


@pytest.mark.parametrize("kind", ["named", "stream"])
def test_nan_ends_the_run_and_reports_set_and_sample(trainer_class: Any, kind: str, tmp_path: Path) -> None:
    bad = rows_with_nan(20, index=13)
    valid, name, place = {
        "named": ({"fine": rows(8), "web": bad}, "the evaluation set 'web'", "from these samples of it: 13."),
        "stream": (Streamed(bad), "the evaluation set", "from batch 4 of it"),
    }[kind]
    options = {"loss_fn": F.mse_loss, "patience": 1, "save_dir": tmp_path, "eval_batch_size": 4}
    with pytest.raises(NonFiniteError, match=f"The loss of {name} is nan at step 1. It comes {place}"):
        train(trainer_class, t16(), rows(8), valid, **options)
    if kind == "named":
        assert json.loads((tmp_path / "nonfinite.json").read_text())["sample_indices"] == [13]


@pytest.mark.parametrize(("kind", "policy"), [("native", "skip"), ("hf", "warn")])
def test_nan_is_logged_and_uses_no_patience(kind: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    values: list[float] = []
    step: Any = lambda self, metrics, epoch=None: values.append(metrics)  # noqa: E731
    plateau = type("Plateau", (torch.optim.lr_scheduler.ReduceLROnPlateau,), {"step": step})
    options: dict[str, Any] = {"patience": 1, "epochs": 3, "on_nonfinite": policy, "lr_scheduler": plateau}
    trainer = train(TRAINERS[kind], t16(), rows(8), rows_with_nan(8, 3), loss_fn=F.mse_loss, **options)
    assert (trainer.metrics["stop_reason"], trainer.progress.step) == ("epochs", 3)
    assert trainer.metrics["best_valid"] == {} and values == []
    assert "Not finite in the evaluation at step 2: eval_loss=nan. `eval_loss` is what" in caplog.text
    if kind == "native":  # a metric without a value: one class has no ranking
        data = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
        metric = {"compute_metrics": "roc_auc", "optimization_metric": "roc_auc", "loss_fn": F.cross_entropy}
        assert train(Trainer, nn.Linear(4, 2), data, data, **options, **metric).metrics["stop_reason"] == "epochs"
        assert "Not finite in the evaluation at step 1: eval_roc_auc=nan." in caplog.text and values == []
        train(Trainer, t16(), rows(8), rows(8), loss_fn=F.mse_loss, **options)
        assert len(values) == 3


def test_empty_set_is_an_error(trainer_class: Any) -> None:
    named, unlabelled = {"a": rows(4), "b": Streamed([])}, Sentences(4)
    for empty, name in ((Streamed([]), "set"), (DataLoader([], 2), "set"), (named, "set 'b'")):
        with pytest.raises(DataError, match=f"The evaluation {name} has no samples. Give it at least one"):
            train(trainer_class, t16(), rows(8), empty, loss_fn=F.mse_loss)
    unlabelled.labels[:] = -100
    with pytest.raises(DataError, match="The evaluation set has nothing to evaluate: none of its labels counts"):
        train(trainer_class, Tagger(), Sentences(8), unlabelled)


def classes(size: int = 16, dtype: torch.dtype = torch.long) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(size, 4, generator=generator), (torch.arange(size) % 3).to(dtype))


def labelled(labels: torch.Tensor, features: int = 4) -> TensorDataset:
    return TensorDataset(torch.randn(len(labels), features), labels)


def crashing(y_true: Any, y_pred: Any) -> dict[str, float]:
    raise KeyError("no such thing")


NAN, OF_ACCURACY = torch.full((8, 4), torch.nan), {"optimization_metric": "accuracy"}
OUTPUTS_ONLY = {"loss_fn": lambda outputs, labels: outputs.sum() * 0, "compute_metrics": "accuracy"}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "metric crashes": ({"compute_metrics": crashing}, KeyError, "no such thing"),
    "metric no number": ({"compute_metrics": lambda p: {"m": "high"}}, DataError, "The metric 'm' must be a number"),
    "metric called loss": ({"compute_metrics": lambda p: {"loss": 0.0}}, ConfigError, "A metric is called 'loss'"),
    "eval_loss": ({"compute_metrics": lambda p: {"eval_loss": 0.0}}, ConfigError, "A metric is called 'loss'"),
    "other objective": ({"compute_metrics": lambda p: {"hits": 1.0}, **OF_ACCURACY}, ObjectiveError, "'hits'"),
    "label range": ({"eval_dataset": labelled(torch.full((8,), 7)), **OUTPUTS_ONLY}, DataError, "8 labels are outside"),
    "label shape": ({"eval_dataset": labelled(torch.zeros(8, 2).long()), **OUTPUTS_ONLY}, DataError, "cannot score"),
    "NaN": ({"eval_dataset": TensorDataset(NAN, torch.zeros(8).long())}, NonFiniteError, "0, 1"),
    "named set": ({"eval_dataset": {"dev": classes(), "web": labelled(torch.zeros(8), 5)}}, RuntimeError, "shapes"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "case"), [*(("native", case) for case in WRONG), ("accelerate", "NaN"), ("hf", "NaN"), ("hf", "eval_loss")]
)
def test_rehearsal_raises_errors_before_the_first_step(kind: str, case: str) -> None:
    options, error, message = WRONG[case]
    options = {"loss_fn": F.cross_entropy, "eval_dataset": classes(), **options}
    valid = options.pop("eval_dataset")
    for sanity in (True, False):
        trainer = build(TRAINERS[kind], nn.Linear(4, 3), classes(), valid, sanity=sanity, **options)
        with pytest.raises(error, match=message) as caught:
            trainer.train()
        assert trainer.progress.step == (0 if sanity else 2)
        notes = getattr(caught.value, "__notes__", [])
        assert any("rehearsal of evaluations before the first step" in note for note in notes) == sanity


class Graph:  # a batch of its own type, whose labels are its attribute `y`
    x, y = torch.ones(3, 4), torch.zeros(3, dtype=torch.long)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


score = nn.Linear.forward


def losses_and_scores(self: nn.Linear, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"losses": score(self, x).sum(), "logits": score(self, x)}


NO_LOSS: dict[str, tuple[Callable[..., Any], str | None, bool, str]] = {
    "no loss_fn": (score, None, False, "No loss found: the model returned a tensor .* Pass `loss_fn=`"),
    "label column": (
        lambda self, x, labels=None: {"logits": score(self, x)}, "topic", False,
        "The loss of the model needs labels, .* label_names=..topic..",
    ),
    "label column of loss_fn": (losses_and_scores, "topic", True, "`loss_fn` needs labels, .* label_names=..topic.."),
    "graph": (
        lambda self, graph: score(self, graph.x), "graph", True,
        "`loss_fn` needs labels, .* It is a Graph, .* as attributes: .* label_names=",
    ),
    "other key": (losses_and_scores, "labels", False, "No loss found: .* If 'losses' is the loss, call it 'loss'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINERS)
def test_missing_loss_is_explained_as_in_training(kind: str) -> None:
    for forward, key, has_loss_fn, message in NO_LOSS.values():
        model = type("Model", (nn.Linear,), {"forward": forward})
        options: dict[str, Any] = {"batch_size": 1, "loss_fn": F.cross_entropy if has_loss_fn else None}
        data: Any = classes(4) if key is None else [{"x": x, key: y} for x, y in classes(4)]
        if key == "graph":
            data, options["data_collator"] = [Graph() for _ in range(4)], lambda samples: samples[0]
        raised = set()
        for valid in (data, None):
            with pytest.raises(DataError, match=message) as caught:
                train(TRAINERS[kind], model(4, 3), data, valid, **options)
            raised.add(str(caught.value))
        assert len(raised) == 1


def test_rehearsal_uses_the_full_set_for_a_metric_that_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    sizes = []

    def needs_all(y_true: Any, y_pred: Any) -> dict[str, float]:
        sizes.append(len(y_true))
        if len(set(y_true)) < 3:
            raise ValueError("a class is missing")
        return {"agreement": float((y_true == y_pred).mean())}

    x, y = classes(12).tensors
    options = {"optimization_metric": "agreement", "optimization_direction": "max", "eval_batch_size": 4, "epochs": 1}
    options |= {"compute_metrics": needs_all, "loss_fn": F.cross_entropy}
    trainer = train(Trainer, nn.Linear(4, 3), classes(), TensorDataset(x, y.sort().values), **options)
    assert sizes == [4, 12, 12] and len(trainer.metrics["valid"]) == 1
    assert "(ValueError: a class is missing)" in caplog.text


class Counted(Dataset[Any]):
    def __init__(self, size: int, file: Path | None = None) -> None:
        self.data, self.file = rows(size), file
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        if self.file is not None:
            with open(self.file, "a") as file:
                file.write(f"{index}\n")
            return self.data[index]
        x, y = self.data[index]
        return x + 0.1 * torch.randn(4, dtype=torch.float64), y


def test_rehearsal_has_no_effect_on_the_run(trainer_class: Any) -> None:
    def history(sanity: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
        trace, valid = Trace(), Counted(10)
        options = {"patience": 1, "log_steps": 1, "batch_size": 4, "epochs": 3, "learning_rate": 0.05}
        options |= {"compute_metrics": ["mse"], "load_best_at_end": False, "loss_fn": F.mse_loss, "sanity": sanity}
        trainer = train(trainer_class, model, Counted(12), valid, callbacks=[trace], **options)
        logs = [{key: value for key, value in row.items() if "per_second" not in key} for row in trace.logs]
        return valid.read, list(model.state_dict().values()), trace.events, logs, trainer.metrics.to_dict()

    (read, tensors, *rest), (read_plain, tensors_plain, *rest_plain) = history(True), history(False)
    assert same(tensors, tensors_plain) and rest == rest_plain
    # the first of four is read twice, since it was then noticed that it draws random numbers
    assert len(read) == len(read_plain) + 4 and read[:4] == [0, 1, 2, 3]
    valid = Counted(8)
    options = {"loss_fn": F.mse_loss, "epochs": 1, "eval_on_start": True, "eval_batch_size": 8}  # needs no rehearsal
    train(trainer_class, t16(), rows(8), valid, **options)
    assert valid.read == list(range(8)) * 3  # once more, since it was noticed that it draws


def test_rehearsal_of_a_resumed_run_has_no_effect(trainer_class: Any, tmp_path: Path) -> None:
    """Neither on random numbers, nor on buffers that count forward passes, evaluations included."""

    def trained(folder: str, epochs: int, resume: Any = None, **options: Any) -> Any:
        model = nn.Sequential(CountsPasses(), t16(dropout=0.3))
        options |= {"loss_fn": F.mse_loss, "learning_rate": 0.05, "load_best_at_end": False}
        trainer = build(trainer_class, model, rows(24), rows(10), epochs=epochs, save_dir=tmp_path / folder, **options)
        trainer.train(resume)
        return list(model.state_dict().values())

    straight = trained("a", 3, sanity=False)
    trained("b", 1)
    with pytest.raises(KeyError):
        trained("b", 3, "auto", compute_metrics=crashing)
    assert same(trained("b", 3, "auto"), straight)


@pytest.mark.processes
def test_workers_end_after_each_call_and_rehearse_one_batch(tmp_path: Path) -> None:
    data, before = Counted(20, tmp_path / "read"), len(multiprocessing.active_children())
    options = {"loss_fn": F.mse_loss, "epochs": 1, "num_workers": 2, "eval_batch_size": 4}
    trainer = train(Trainer, t16(), rows(8), data, **options)
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert sorted(read) == sorted([0, 1, 2, 3, *range(20)])
    for call in (lambda: None, trainer.evaluate, lambda: trainer.predict(data)):
        call()
        assert len(multiprocessing.active_children()) == before


class Endless(IterableDataset[Any]):
    def __init__(self, end: Callable[[int], bool]) -> None:
        self.end = end

    def __iter__(self) -> Iterator[Any]:
        return (rows(1)[0] for _ in itertools.takewhile(lambda number: not self.end(number), itertools.count()))


def test_evaluation_without_end_warns_within_seconds(monkeypatch: Any, caplog: Any) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("omnitrain.trainer.evaluation.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    data = Endless(lambda number: bool(caplog.messages) or number == 30)
    trainer = evaluator(t16(), loss_fn=F.mse_loss, eval_dataset=data, batch_size=1)
    trainer.evaluate()
    (warning,) = caplog.messages
    assert "has taken 6 batches and 6 seconds, and its length is unknown" in warning
    assert "EvalSet(data, subset=1000)" in warning
    caplog.clear()
    trainer.evaluate()
    trainer.evaluate(EvalSet(Endless(lambda number: number == 30), subset=3))
    assert not caplog.messages


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Topic(Plain):
    def forward(self, x: torch.Tensor, topic: torch.Tensor, **rest: torch.Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, topic), "logits": logits}


def topics(*keys: str) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, **dict.fromkeys(keys, y)} for x, y in classes(12)]


def test_label_names_choose_the_labels(trainer_class: Any) -> None:
    words = r"keys 'x', 'topic', and labels are looked for under 'labels',(?s:.*)label_names=\['topic'\]"
    for metrics in ("accuracy", crashing):
        with pytest.raises(DataError, match=words):
            train(trainer_class, Topic(), topics("topic"), topics("topic"), compute_metrics=metrics)
    model, results = Plain(), []
    for key, names in (("labels", None), ("topic", ["topic"])):
        options = {"compute_metrics": "accuracy", "loss_fn": F.cross_entropy, "label_names": names, "epochs": 1}
        trainer = train(trainer_class, copy.deepcopy(model), topics(key), topics(key), **options)
        results.append(trainer.metrics["valid"][0])
    assert results[0] == results[1] and "eval_accuracy" in results[0]
    with pytest.raises(ConfigError, match="must be a list of the keys of labels"):
        evaluator(Topic(), label_names="topic")


def test_several_labels_are_a_tuple(trainer_class: Any) -> None:
    def compute(eval_pred: Any) -> dict[str, float]:
        first, second = eval_pred.label_ids
        return {"agreement": float((first == second).mean()), "hits": float((eval_pred[0].argmax(-1) == first).mean())}

    def loss(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, labels[0]) + F.cross_entropy(outputs, labels[1])

    data, model = topics("topic", "second"), Plain()
    options: dict[str, Any] = {"compute_metrics": compute, "label_names": ["topic", "second"], "epochs": 1}
    trainer = train(trainer_class, Topic(), data, data, **options)
    assert trainer.metrics["valid"][0]["eval_agreement"] == 1.0
    assert [labels.shape for labels in trainer.predict(data).labels] == [(12,), (12,)]
    trainer = train(trainer_class, model, data, data, loss_fn=loss, **options)
    x, y = classes(12).tensors
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(2 * F.cross_entropy(model(x), y).item(), rel=1e-6)


def test_predictions_are_html_in_notebooks() -> None:
    scores, labels = np.linspace(0, 1, 36, dtype=np.float32).reshape(12, 3), np.arange(12)
    html = Predictions(scores, labels, {"test_loss": 0.25})._repr_html_()
    assert html.count("<tr>") == 11 and "predictions: float32 (12, 3)" in html and "test_loss 0.25" in html
    assert "<td>0</td><td>[0. , 0.0286, 0.0571]</td><td>0</td>" in html
    boxes = [{"label": "<b>"}, {"label": "c"}]
    html = Predictions(({"a": scores}, scores[:, 0]), boxes, {})._repr_html_()
    assert "&lt;b&gt;" in html and html.count("<tr>") == 3 and "predictions[0][&#x27;a&#x27;]" in html
    assert Predictions(None, None, {})._repr_html_() == ""
