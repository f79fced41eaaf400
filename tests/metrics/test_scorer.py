"""The types, calls and results of `compute_metrics`."""

import functools
import logging
import pickle
import sys

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn import metrics as sk

from omnitrain.core.errors import ConfigError, DataError
from omnitrain.metrics.scorer import EvalPrediction, make_scorer, to_numpy

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


def test_score_names_and_functions():
    expected = {"accuracy": 0.6, "zero_one_loss": 0.4, "recall_macro": 0.5}
    scorer = make_scorer([*expected])
    assert scorer.names == [*expected] and not scorer.keeps_predictions
    assert scorer.higher_is_better == {"accuracy": True, "zero_one_loss": False, "recall_macro": True}
    assert run(scorer.names) == pytest.approx(expected)
    scorer = make_scorer(["accuracy", two])
    assert scorer.keeps_predictions and scorer.names is None
    scorer.update(torch.as_tensor(SCORES), torch.as_tensor(LABELS))
    assert len(scorer.states()) == 1  # functions keep no batches
    assert run(["accuracy", two]) == {"accuracy": 0.6, "right": 0.6}
    scorer = make_scorer(None)
    scorer.update(torch.zeros(2), None)
    assert (scorer.compute(), scorer.names, scorer.keeps_predictions) == ({}, [], False)


def no_signature(a):
    return a


no_signature.__signature__ = 5


def returns_none(eval_pred):
    pass


@pytest.mark.parametrize("compute_metrics, fragment", [
    *((value, "Expected the name of a metric") for value in (3, {"a": two}, {"a"}, [None], torchmetrics.MeanMetric)),
    (lambda: {}, "and has 0"),
    (lambda a, b, c: {}, "and has 3"),
    (lambda *args: {}, r"\(\*args\)"),
    (lambda pred, *, threshold: {}, "threshold"),
    (torch.nn.MSELoss(), "cannot tell how to call MSELoss"),
    (no_signature, "signature|has 2|how to call"),
    (["accuracy", "accuracy"], "named 'accuracy'"),
    ([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()], "named 'MeanSquaredError'"),
])  # fmt: skip
def test_score_rejects_other_metrics(compute_metrics, fragment):
    with pytest.raises(ConfigError, match=fragment):
        make_scorer(compute_metrics)


@pytest.mark.parametrize("compute_metrics, fragment", [
    *((lambda eval_pred, value=value: {"per_class": value}, "The metric 'per_class' must be a number, got")
      for value in ({"a": 1}, [1, 2], np.ones(2), torch.ones(2), "0.5", None, 1j)),
    (returns_none, "'returns_none' must be a number, got NoneType"),
    (lambda y_true, y_pred: 0.5, "lambda"),  # has no name for its number
    ([two, two], "named 'right'"),
    (torchmetrics.classification.MulticlassConfusionMatrix(3), "Matrix' must be a number, got Tensor of shape"),
])  # fmt: skip
def test_score_rejects_other_results(compute_metrics, fragment):
    with pytest.raises(DataError, match=fragment):
        run(compute_metrics)


def test_score_function_of_eval_prediction(monkeypatch):
    predictions = []

    def compute(eval_pred):
        outputs, labels = eval_pred
        predictions.append(eval_pred)
        return {"accuracy": (outputs.argmax(-1) == labels).mean()}

    transformers = pytest.importorskip("transformers")
    assert run(compute) == {"accuracy": 0.6}
    assert predictions[0].predictions is predictions[0][0] is SCORES and predictions[0].label_ids is LABELS
    make_scorer(lambda pred: predictions.append(pred) or {"x": 1}).compute((SCORES, LABELS), LABELS)
    assert isinstance(predictions[1].predictions, tuple) and predictions[1].predictions[1] is LABELS
    monkeypatch.delitem(sys.modules, "transformers")
    make_scorer(compute).compute(SCORES, LABELS)
    kinds = [type(prediction) for prediction in predictions]
    assert kinds == [transformers.EvalPrediction, transformers.EvalPrediction, EvalPrediction]


def test_score_methods_callables_and_partials():
    class Judge:
        def __call__(self, y_true, y_pred):
            return 0.5

        def judge(self, eval_pred):
            return {"judged": 1}

    assert run([Judge(), Judge().judge]) == {"Judge": 0.5, "judged": 1.0}
    assert run(lambda pred, threshold=0.5: {"t": threshold}) == {"t": 0.5}
    assert run(functools.partial(lambda pred, threshold: {"t": threshold}, threshold=0.25)) == {"t": 0.25}
    fbeta = functools.partial(sk.fbeta_score, beta=0.5, average="macro")
    expected = {"accuracy_score": 0.6, "fbeta_score": fbeta(LABELS, SCORES.argmax(-1))}
    assert run([sk.accuracy_score, fbeta]) == pytest.approx(expected)
    top_2, scores = functools.partial(sk.top_k_accuracy_score, k=2), np.random.random((5, 3))
    assert run(top_2, scores) == {"top_k_accuracy_score": top_2(LABELS, scores)}


def arguments_of_call(predictions, labels):
    calls = []
    make_scorer(lambda y_true, y_pred: calls.append((y_true, y_pred)) or {"x": 1}).compute(predictions, labels)
    return calls[0]


def test_score_flattens_token_labels_and_nothing_else():
    for width, size in ((1, 4), (0, 4), (3, (4, 3))):  # the last has many labels a sample
        for labels in (np.ones(size), np.ones(size, int)):
            predictions = np.ones((4, width)) if width else np.ones(4)
            y_true, y_pred = arguments_of_call(predictions, labels)
            assert y_true is labels and y_pred is predictions
    labels = np.array([[0, 1, -100], [2, -100, -100]])
    classes = np.array([[0, 2, 5], [2, 5, 5]])
    scores = np.eye(6)[classes]
    for outputs in (scores, np.moveaxis(scores, -1, 1), classes, classes.astype(float)):  # the second as torch has them
        y_true, y_pred = arguments_of_call(outputs, labels)
        assert (y_true.tolist(), y_pred.tolist()) == ([0, 1, 2], [0, 2, 2])
    assert make_scorer(two).compute((SCORES, np.zeros(5)), LABELS) == {"right": 0.6}  # the first of a tuple


def test_score_converts_numbers_and_bfloat16():
    scalars = [0.5, np.float32(0.5), np.array(0.5), np.array([0.5]), torch.tensor([[0.5]])]
    for value in (*scalars, torch.tensor(0.5, requires_grad=True)):
        scores = run(lambda eval_pred, value=value: {"x": value})
        assert scores == {"x": 0.5} and type(scores["x"]) is float
    tree = to_numpy({"a": torch.ones(2, dtype=torch.bfloat16), "b": (torch.ones(1), [torch.ones(1)]), "c": None})
    assert tree["a"].dtype == np.float32 and isinstance(tree["b"], tuple) and tree["c"] is None


@pytest.mark.parametrize("labels", [np.zeros(0, int), np.full(4, -100), np.full((2, 3), -100)])
def test_score_warns_once_without_labels(labels, caplog):
    def never(*eval_pred):
        raise AssertionError

    metric = torchmetrics.classification.MulticlassAccuracy(3, ignore_index=-100)
    outputs = np.moveaxis(np.zeros((*labels.shape, 3), np.float32), -1, 1)
    with caplog.at_level(logging.WARNING, logger="omnitrain"):
        assert run(["accuracy", metric, two, lambda eval_pred: never()], outputs, labels) == {}
    assert len(caplog.records) == 1
    assert "accuracy, MulticlassAccuracy, two, <lambda>" in caplog.text


def test_score_rejects_missing_labels():
    with pytest.raises(DataError, match="needs labels"):
        make_scorer("accuracy").update(torch.zeros(2, 2), None)
    with pytest.raises(DataError, match="needs labels for two"):
        make_scorer(two).compute(SCORES, None)


def multiclass(**options):
    return torchmetrics.classification.MulticlassAccuracy(3, average="micro", **options)


def test_score_torchmetrics_stream():
    f1 = torchmetrics.classification.MulticlassF1Score(3)
    metrics = ["accuracy", multiclass(), torchmetrics.MetricCollection({"acc": multiclass(), "f1": f1})]
    expected = {"f1": sk.f1_score(LABELS, [0, 1, 1, 1, 2], average="macro")}
    expected = {"accuracy": 0.6, "MulticlassAccuracy": 0.6, "acc": 0.6, **expected}
    scorer, scores = make_scorer(metrics), run(metrics)
    assert scorer.names == [*expected] and not scorer.keeps_predictions
    assert scorer.higher_is_better["MulticlassAccuracy"]
    assert scores == pytest.approx(expected) and {type(score) for score in scores.values()} == {float}
    metric = torchmetrics.classification.MulticlassRecall(3, average=None)
    recalls = {"MulticlassRecall_0": 0.5, "MulticlassRecall_1": 1.0, "MulticlassRecall_2": 0.0}
    assert make_scorer(torchmetrics.SpearmanCorrCoef()).names is None  # known after data
    assert make_scorer(metric).names == [*recalls] and run(metric) == pytest.approx(recalls)


def test_score_leaves_user_metric_unchanged_and_gathers_nothing():
    def ask():
        raise AssertionError("it asked whether there are other processes")

    metric = multiclass(distributed_available_fn=ask)
    scorers = [make_scorer(metric) for _ in range(2)]
    scorers[0].update(torch.as_tensor(SCORES), torch.as_tensor(LABELS))
    assert scorers[1].compute() == {} and metric.update_count == 0
    assert scorers[0].compute() == {"MulticlassAccuracy": pytest.approx(0.6)}


class Largest(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("largest", torch.tensor(float("-inf")), dist_reduce_fx="max")

    def update(self, outputs, labels):
        self.largest = torch.maximum(self.largest, (outputs - labels).abs().max())

    def compute(self):
        return self.largest


METRICS = {
    "sum": multiclass, "cat": lambda: torchmetrics.classification.MulticlassAUROC(3),
    "none": torchmetrics.PearsonCorrCoef, "max": Largest, "list": torchmetrics.SpearmanCorrCoef,
    "composed": lambda: multiclass() + multiclass(),
    "collection": lambda: torchmetrics.MetricCollection([
        torchmetrics.wrappers.ClasswiseWrapper(torchmetrics.classification.MulticlassRecall(3, average=None)),
        torchmetrics.classification.MulticlassF1Score(3, average="micro"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("kind", METRICS)
def test_score_torchmetrics_merge(kind):
    labels, outputs = torch.randint(3, (20,)), torch.rand(20, 3).softmax(-1)
    if kind in ("none", "list", "max"):
        outputs, labels = outputs[:, 0], outputs[:, 1]
    alone = make_scorer(METRICS[kind]())
    scorers = [make_scorer(METRICS[kind]()) for _ in range(4)]  # the last one sees nothing
    for i, rows in enumerate(torch.arange(20).split(3)):
        alone.update(outputs[rows], labels[rows])
        scorers[i % 3].update(outputs[rows], labels[rows])
    states = pickle.loads(pickle.dumps([scorer.states() for scorer in scorers]))
    assert len(scorers[0].compute()) > 0  # which is computed anew after a merge
    scorers[0].reset()
    for state in states:
        scorers[0].merge(state)
    assert scorers[1].compute() != alone.compute()
    for state in (states[0], *states[2:]):
        scorers[1].merge(state)
    for scorer in (scorers[0], scorers[1], scorers[1]):  # computing changes nothing
        assert scorer.compute() == pytest.approx(alone.compute(), rel=1e-5)


def test_score_merge_with_empty_process():
    metric = Largest()
    metric.add_state("largest", torch.tensor(0.0), dist_reduce_fx="mean")
    scorer = make_scorer(metric)
    scorer.update(torch.full((2,), 3.0), torch.zeros(2))
    scorer.merge(make_scorer(metric).states())
    assert scorer.compute() == {"Largest": 3.0}


def test_score_reset():
    """A first pass in inference mode leaves no tensors behind that the next one could not use."""
    scorer = make_scorer(["accuracy", multiclass()])
    with torch.inference_mode():
        scorer.update((torch.eye(3),), (torch.arange(3),))
    scorer.compute()
    scorer.update(torch.eye(3, requires_grad=True), torch.arange(3))
    assert scorer.compute() == {"accuracy": 1.0, "MulticlassAccuracy": 1.0}
    scorer.reset()
    scorer.update(torch.eye(3), torch.arange(3).roll(1))
    assert scorer.compute() == {"accuracy": 0.0, "MulticlassAccuracy": 0.0}
