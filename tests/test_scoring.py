"""The `compute_metrics` argument: what may be passed, how it is called, what comes back."""

from __future__ import annotations

import functools
import logging
import pathlib
import pickle
import sys

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn import metrics as sk

from omnitrain.errors import ConfigError, DataError
from omnitrain.scoring import EvalPrediction, make_scorer, to_numpy

LABELS = np.array([0, 1, 2, 1, 0])
SCORES = np.eye(3, dtype=np.float32)[[0, 1, 1, 1, 2]]


def run(compute_metrics, outputs=SCORES, labels=LABELS, batch_size=2):
    """Score as the evaluation loop does: batches for what streams, arrays for functions."""
    scorer = make_scorer(compute_metrics)
    for start in range(0, len(labels), batch_size):
        rows = slice(start, start + batch_size)
        scorer.update(torch.as_tensor(outputs[rows]), torch.as_tensor(labels[rows]))
    return scorer.compute(outputs, labels) if scorer.keeps_predictions else scorer.compute()


def two(y_true, y_pred):
    return {"right": (y_true == y_pred).mean()}


# What may be passed


def test_score_none():
    scorer = make_scorer(None)
    scorer.update(torch.zeros(2), None)
    assert (scorer.compute(), scorer.names, scorer.keeps_predictions) == ({}, [], False)


def test_score_names_stream():
    assert run("accuracy") == {"accuracy": 0.6}
    scorer = make_scorer(["accuracy", "log_loss"])
    assert scorer.names == ["accuracy", "log_loss"]
    assert scorer.higher_is_better == {"accuracy": True, "log_loss": False}
    assert not scorer.keeps_predictions


def test_score_names_and_functions():
    scorer = make_scorer(["accuracy", two])
    assert scorer.keeps_predictions
    assert scorer.names is None
    assert run(["accuracy", two]) == {"accuracy": 0.6, "right": 0.6}


def test_score_functions_keep_no_batches():
    scorer = make_scorer(two)
    scorer.update(torch.zeros(2, 3), None)
    assert scorer.states() == []


@pytest.mark.parametrize("wrong", [3, {"accuracy": two}, torchmetrics.MeanMetric, {"accuracy"}, [None]])
def test_score_rejects_other_types(wrong):
    with pytest.raises(ConfigError, match="Expected the name of a metric, a function"):
        make_scorer(wrong)


@pytest.mark.parametrize(
    "function, told",
    [
        (lambda: {}, "and has 0"),
        (lambda a, b, c: {}, "and has 3"),
        (lambda *args: {}, r"\(\*args\)"),
        (lambda pred, *, threshold: {}, "threshold"),
        (torch.nn.MSELoss(), "cannot tell how to call MSELoss"),
        (dict.get, "signature|has 2|how to call"),
    ],
)
def test_score_rejects_uncallable_functions(function, told):
    if function is dict.get:
        function = type("NoSignature", (), {"__call__": lambda self, a: a, "__signature__": 5})()
    with pytest.raises(ConfigError, match=told):
        make_scorer(function)


def test_score_rejects_duplicate_names():
    with pytest.raises(ConfigError, match="named 'accuracy'"):
        make_scorer(["accuracy", "accuracy"])
    with pytest.raises(ConfigError, match="named 'MeanSquaredError'"):
        make_scorer([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()])
    with pytest.raises(DataError, match="named 'right'"):
        run([two, two])


# Functions of one argument


def test_score_function_of_eval_prediction():
    seen = []

    def compute(eval_pred):
        predictions, labels = eval_pred
        seen.append((eval_pred.predictions, eval_pred.label_ids, eval_pred[0]))
        return {"accuracy": (predictions.argmax(-1) == labels).mean()}

    assert run(compute) == {"accuracy": 0.6}
    predictions, labels, first = seen[0]
    assert predictions is SCORES
    assert labels is LABELS
    assert first is SCORES


def test_score_uses_transformers_class(monkeypatch):
    transformers = pytest.importorskip("transformers")
    seen = []
    scorer = make_scorer(lambda eval_pred: seen.append(type(eval_pred)) or {"x": 1})
    scorer.compute(SCORES, LABELS)
    monkeypatch.delitem(sys.modules, "transformers")
    scorer.compute(SCORES, LABELS)
    assert seen == [transformers.EvalPrediction, EvalPrediction]


def test_score_keeps_tuple_outputs():
    seen = []
    scorer = make_scorer(lambda eval_pred: seen.append(eval_pred.predictions) or {"x": 1})
    scorer.compute((SCORES, LABELS), LABELS)
    assert isinstance(seen[0], tuple)
    assert seen[0][1] is LABELS


def test_score_ignores_optional_argument():
    assert run(lambda pred, threshold=0.5: {"t": threshold}) == {"t": 0.5}
    assert run(functools.partial(lambda pred, threshold: {"t": threshold}, threshold=0.25)) == {"t": 0.25}


def test_score_methods_and_callables():
    class Judge:
        def __call__(self, y_true, y_pred):
            return 0.5

        def judge(self, eval_pred):
            return {"judged": 1}

    assert run([Judge(), Judge().judge]) == {"Judge": 0.5, "judged": 1.0}


# Functions of two arguments


def test_score_function_of_labels_and_predictions():
    seen = []
    run(lambda y_true, y_pred: seen.append((y_true, y_pred)) or {"x": 1})
    assert seen[0][0] is LABELS
    assert seen[0][1].tolist() == [0, 1, 1, 1, 2]


def test_score_scikit_learn_functions():
    fbeta = functools.partial(sk.fbeta_score, beta=0.5, average="macro")
    predicted = SCORES.argmax(-1)
    assert run([sk.accuracy_score, fbeta]) == {
        "accuracy_score": 0.6,
        "fbeta_score": pytest.approx(sk.fbeta_score(LABELS, predicted, beta=0.5, average="macro")),
    }


def test_score_function_of_scores():
    scores = np.random.default_rng(0).random((5, 3))
    found = run(functools.partial(sk.top_k_accuracy_score, k=2), scores)
    assert found == {"top_k_accuracy_score": sk.top_k_accuracy_score(LABELS, scores, k=2)}


@pytest.mark.parametrize(
    "predictions, labels",
    [
        (np.ones((4, 1)), np.ones(4)),
        (np.ones((4, 3)), np.ones((4, 3), int)),  # many labels a sample
        (np.ones((4, 1)), np.ones(4, int)),
        (np.ones((4, 3)), np.ones((4, 3))),
        (np.ones(4), np.ones(4, int)),
    ],
)
def test_score_passes_other_outputs(predictions, labels):
    seen = []
    make_scorer(lambda t, p: seen.append((t, p)) or {"x": 1}).compute(predictions, labels)
    assert seen[0][0] is labels
    assert seen[0][1] is predictions


@pytest.mark.parametrize("kind", ["scores", "torch scores", "classes", "floats"])
def test_score_flattens_token_labels(kind):
    labels = np.array([[0, 1, -100], [2, -100, -100]])
    classes = np.array([[0, 2, 5], [2, 5, 5]])
    outputs = {
        "scores": np.eye(6)[classes],
        "torch scores": np.moveaxis(np.eye(6)[classes], -1, 1),
        "classes": classes,
        "floats": classes.astype(float),
    }[kind]
    seen = []
    make_scorer(lambda t, p: seen.append((t, p)) or {"x": 1}).compute(outputs, labels)
    assert seen[0][0].tolist() == [0, 1, 2]
    assert seen[0][1].tolist() == [0, 2, 2]


def test_score_takes_first_of_tuple():
    found = make_scorer(two).compute((SCORES, np.zeros(5)), LABELS)
    assert found == {"right": 0.6}


# What comes back


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), np.array(0.5), np.array([0.5]), torch.tensor(0.5), torch.tensor([[0.5]])]
)
def test_score_converts_numbers(value):
    found = run(lambda eval_pred: {"x": value})
    assert found == {"x": 0.5}
    assert type(found["x"]) is float


def test_score_keeps_no_graph():
    loss = torch.ones(2, requires_grad=True).sum()
    assert type(run(lambda eval_pred: {"x": loss})["x"]) is float


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], np.ones(2), torch.ones(2), "0.5", None, 1j])
def test_score_rejects_non_numbers(value):
    with pytest.raises(DataError, match="The metric 'per_class' is no number but"):
        run(lambda eval_pred: {"per_class": value})


def test_score_rejects_none_result():
    def forgot(eval_pred):
        pass

    with pytest.raises(DataError, match="'forgot' is no number but NoneType"):
        run(forgot)


def test_score_rejects_unnamed_number():
    with pytest.raises(DataError, match="lambda"):
        run(lambda y_true, y_pred: 0.5)


# Nothing to score


@pytest.mark.parametrize("labels", [np.zeros(0, int), np.full(4, -100), np.full((2, 3), -100)])
def test_score_warns_once_without_labels(labels, caplog):
    def never(y_true, y_pred):
        raise AssertionError

    def nor_this(eval_pred):
        raise AssertionError

    metric = torchmetrics.classification.MulticlassAccuracy(3, ignore_index=-100)
    outputs = np.zeros((*labels.shape, 3), np.float32)
    outputs = outputs if labels.ndim == 1 else np.moveaxis(outputs, -1, 1)
    with caplog.at_level(logging.WARNING, logger="omnitrain"):
        assert run(["accuracy", metric, never, nor_this], outputs, labels) == {}
    assert len(caplog.records) == 1
    assert "accuracy, MulticlassAccuracy, never, nor_this" in caplog.text


def test_score_unpacks_single_label():
    scorer = make_scorer(["accuracy", multiclass()])
    scorer.update((torch.eye(3),), (torch.arange(3),))
    assert scorer.compute() == {"accuracy": 1.0, "MulticlassAccuracy": 1.0}


def test_score_rejects_missing_labels():
    with pytest.raises(DataError, match="needs labels"):
        make_scorer("accuracy").update(torch.zeros(2, 2), None)
    with pytest.raises(DataError, match="needs labels for two"):
        make_scorer(two).compute(SCORES, None)


# torchmetrics


def multiclass(**options):
    return torchmetrics.classification.MulticlassAccuracy(3, average="micro", **options)


def test_score_torchmetrics_stream():
    scorer = make_scorer(multiclass())
    assert not scorer.keeps_predictions
    assert (scorer.names, scorer.higher_is_better) == (["MulticlassAccuracy"], {"MulticlassAccuracy": True})
    found = run(multiclass())
    assert found == {"MulticlassAccuracy": pytest.approx(0.6)}
    assert type(found["MulticlassAccuracy"]) is float


def test_score_metric_collection():
    collection = torchmetrics.MetricCollection(
        {"acc": multiclass(), "f1": torchmetrics.classification.MulticlassF1Score(3)}
    )
    scorer = make_scorer(["accuracy", collection])
    assert scorer.names == ["accuracy", "acc", "f1"]
    assert run(["accuracy", collection]) == {
        "accuracy": 0.6,
        "acc": pytest.approx(0.6),
        "f1": pytest.approx(sk.f1_score(LABELS, SCORES.argmax(-1), average="macro")),
    }


def test_score_vector_has_number_per_entry():
    metric = torchmetrics.classification.MulticlassRecall(3, average=None)
    names = [f"MulticlassRecall_{i}" for i in range(3)]
    assert make_scorer(metric).names == names
    assert run(metric) == pytest.approx(
        {"MulticlassRecall_0": 0.5, "MulticlassRecall_1": 1.0, "MulticlassRecall_2": 0.0}
    )


def test_score_rejects_matrix():
    with pytest.raises(DataError, match="'MulticlassConfusionMatrix' is no number but Tensor of shape"):
        run(torchmetrics.classification.MulticlassConfusionMatrix(3))


def test_score_names_known_after_data():
    assert make_scorer(torchmetrics.ExplainedVariance(multioutput="raw_values")).names is None
    assert make_scorer(torchmetrics.SpearmanCorrCoef()).names is None


def test_score_leaves_user_metric_unchanged():
    metric = multiclass()
    one, other = make_scorer(metric), make_scorer(metric)
    one.update(torch.as_tensor(SCORES), torch.as_tensor(LABELS))
    assert other.compute() == {}
    assert metric.update_count == 0


class Largest(torchmetrics.Metric):
    """A user's own metric, with a maximum as its state."""

    def __init__(self):
        super().__init__()
        self.add_state("largest", torch.tensor(float("-inf")), dist_reduce_fx="max")

    def update(self, outputs, labels):
        self.largest = torch.maximum(self.largest, (outputs - labels).abs().max())

    def compute(self):
        return self.largest


METRICS = {
    "sum": multiclass,
    "cat": lambda: torchmetrics.classification.MulticlassAUROC(3),
    "none": lambda: torchmetrics.PearsonCorrCoef(),
    "max": lambda: Largest(),
    "list": lambda: torchmetrics.SpearmanCorrCoef(),
    "composed": lambda: multiclass() + multiclass(),
    "wrapped": lambda: torchmetrics.wrappers.ClasswiseWrapper(
        torchmetrics.classification.MulticlassRecall(3, average=None)
    ),
    "collection": lambda: torchmetrics.MetricCollection(
        [multiclass(), torchmetrics.classification.MulticlassF1Score(3, average="micro")]
    ),
}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("processes", [2, 3])
def test_score_torchmetrics_merge(kind, processes):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (20,), generator=generator)
    outputs = torch.rand(20, 3, generator=generator).softmax(-1)
    if kind in ("none", "list", "max"):
        outputs, labels = outputs[:, 0], outputs[:, 1]
    alone = make_scorer(METRICS[kind]())
    scorers = [make_scorer(METRICS[kind]()) for _ in range(processes + 1)]  # the last one sees nothing
    for i, rows in enumerate(torch.arange(20).split(3)):
        alone.update(outputs[rows], labels[rows])
        scorers[i % processes].update(outputs[rows], labels[rows])
    states = pickle.loads(pickle.dumps([scorer.states() for scorer in scorers]))
    scorers[0].reset()
    for state in states:
        scorers[0].merge(state)
    for state in states[1:]:
        scorers[1].merge(states[0] if state is states[1] else state)
    assert scorers[0].compute() == pytest.approx(alone.compute(), rel=1e-5)
    assert scorers[1].compute() == pytest.approx(alone.compute(), rel=1e-5)
    assert scorers[1].compute() == scorers[1].compute()


def test_score_recomputes_after_merge():
    one, other = make_scorer(multiclass()), make_scorer(multiclass())
    one.update(torch.eye(3), torch.arange(3))
    other.update(torch.eye(3), torch.arange(3).roll(1))
    assert one.compute() == {"MulticlassAccuracy": 1.0}
    one.merge(other.states())
    assert one.compute() == {"MulticlassAccuracy": 0.5}


def test_score_merge_with_empty_process():
    class Level(Largest):
        def __init__(self):
            super().__init__()
            self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, outputs, labels):
            self.level = outputs.mean()

        def compute(self):
            return self.level

    one, other = make_scorer(Level()), make_scorer(Level())
    one.update(torch.full((2,), 3.0), torch.zeros(2))
    one.merge(other.states())
    assert one.compute() == {"Level": 3.0}


def test_score_torchmetrics_does_not_gather():
    def ask():
        raise AssertionError("it asked whether there are other processes")

    assert run(multiclass(distributed_available_fn=ask)) == {"MulticlassAccuracy": pytest.approx(0.6)}


# A pass, and the next


def test_score_reset():
    scorer = make_scorer(["accuracy", multiclass()])
    outputs, labels = torch.eye(3), torch.arange(3)
    scorer.update(outputs, labels)
    scorer.reset()
    scorer.update(outputs, labels.roll(1))
    assert scorer.compute() == {"accuracy": 0.0, "MulticlassAccuracy": 0.0}


def test_score_metrics_share_no_results():
    outputs, labels = torch.eye(3)[[0, 1, 1, 1]], torch.tensor([0, 1, 2, 1])
    scorer = make_scorer(["accuracy", "zero_one_loss", "recall_macro"])
    scorer.update(outputs, labels)
    assert scorer.compute() == pytest.approx({"accuracy": 0.75, "zero_one_loss": 0.25, "recall_macro": 2 / 3})


def test_score_leaves_inference_mode():
    scorer = make_scorer(["accuracy", multiclass()])
    with torch.inference_mode():
        scorer.update(torch.eye(3), torch.arange(3))
    scorer.update(torch.eye(3, requires_grad=True), torch.arange(3))
    assert scorer.compute() == {"accuracy": 1.0, "MulticlassAccuracy": 1.0}


@pytest.mark.slow
def test_score_streams_large_batches():
    statm = pathlib.Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("reads the memory in use from /proc")
    scorer = make_scorer(["accuracy", "log_loss"])
    base, labels = torch.rand(1024, 256), torch.arange(1024) % 256
    scorer.update(base.clone(), labels)
    before = int(statm.read_text().split()[1])
    for _ in range(2000):
        scorer.update(base.clone(), labels)
    grown = (int(statm.read_text().split()[1]) - before) * 4096
    assert grown < 50e6


def test_score_converts_bfloat16():
    tree = to_numpy({"a": torch.ones(2, dtype=torch.bfloat16), "b": (torch.ones(1), [torch.ones(1)]), "c": None})
    assert tree["a"].dtype == np.float32
    assert isinstance(tree["b"], tuple)
    assert tree["c"] is None
