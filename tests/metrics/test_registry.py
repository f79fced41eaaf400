"""Named metrics against scikit-learn, for every split into batches and processes."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, pearsonr, spearmanr
from sklearn import metrics as sk
from torch import nn

from omnitrain.core.errors import ConfigError, DataError
from omnitrain.metrics.registry import NamedMetrics
from omnitrain.metrics.scorer import scores_for

pytestmark = pytest.mark.filterwarnings("ignore")  # scikit-learn's own, on classes without samples

CLASSES = 4


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


HITS = {
    "accuracy": sk.accuracy_score, "hamming_loss": sk.hamming_loss, "zero_one_loss": sk.zero_one_loss,
    **{
        f"{stem}_{average}": partial(getattr(sk, f"{stem}_score"), average=average, zero_division=0)
        for stem in ("f1", "precision", "recall", "jaccard")
        for average in ("macro", "micro", "weighted")
    },
    "f2_macro": partial(sk.fbeta_score, beta=2, average="macro", zero_division=0),
}  # fmt: skip
"""Of labels and predictions: classes, or several labels a sample."""
CLASS_HITS = HITS | {
    "balanced_accuracy_score": sk.balanced_accuracy_score, "matthews_corrcoef": sk.matthews_corrcoef,
    "cohen_kappa": sk.cohen_kappa_score, "neg_zero_one_loss": lambda t, p: -sk.zero_one_loss(t, p),
}  # fmt: skip
CLASS_SCORES = {
    "top2_accuracy": lambda t, s: sk.top_k_accuracy_score(t, s, k=2, labels=range(s.shape[-1])),
    "top3_accuracy": lambda t, s: sk.top_k_accuracy_score(t, s, k=3, labels=range(s.shape[-1])),
    "log_loss": lambda t, s: sk.log_loss(t, softmax(s), labels=range(s.shape[-1])),
    "perplexity": lambda t, s: math.exp(sk.log_loss(t, softmax(s), labels=range(s.shape[-1]))),
    "brier": lambda t, s: np.square(softmax(s) - np.eye(s.shape[-1])[t]).sum(1).mean(),
    "roc_auc": lambda t, s: sk.roc_auc_score(t, softmax(s), multi_class="ovr", labels=range(s.shape[-1])),
    "average_precision": lambda t, s: sk.average_precision_score(np.eye(s.shape[-1])[t], softmax(s)),
}
BY_CLASS = {
    **{name: lambda t, s, function=function: function(t, s.argmax(-1)) for name, function in CLASS_HITS.items()},
    **CLASS_SCORES,
}


def mean_over_columns(function):
    def mean(t, p):
        return np.mean([function(a, b)[0] for a, b in zip(np.atleast_2d(t.T), np.atleast_2d(p.T), strict=True)])

    return mean


BY_VALUE = {
    "mse": sk.mean_squared_error, "neg_mean_squared_error": lambda t, p: -sk.mean_squared_error(t, p),
    "rmse": sk.root_mean_squared_error, "mean_absolute_error": sk.mean_absolute_error,
    "mape": sk.mean_absolute_percentage_error, "r2": sk.r2_score, "explained_variance": sk.explained_variance_score,
    "max_error": lambda t, p: np.abs(t - p).max(), "pearson": mean_over_columns(pearsonr),
}  # fmt: skip


def updated(names, *batches, how=None):
    scorer = NamedMetrics(names, how)
    for outputs, labels in batches:
        scorer.update(outputs, labels)
    return scorer


def score(names, outputs, labels, batch_size=3, processes=1, how=None):
    """Score as a run does: batch by batch on each process, then everything merged into a fresh scorer."""
    if not (isinstance(labels, list) and isinstance(labels[0], str)):
        outputs, labels = torch.as_tensor(outputs), torch.as_tensor(labels)
    parts = [slice(start, start + batch_size) for start in range(0, len(labels), batch_size)]
    batches = [(outputs[part], labels[part]) for part in parts]
    scorers = [updated(names, *batches[rank::processes], how=how) for rank in range(processes)]
    if processes == 1:
        return scorers[0].compute()
    merged = NamedMetrics(names, how)
    for scorer in scorers:
        merged.merge(scorer.state())
    return merged.compute()


def expect(reference, *arrays):
    return {name: float(function(*arrays)) for name, function in reference.items()}


class Drawn:
    """Data of a random size, and how they are cut into batches and processes."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.cut = int(self.random.integers(1, 8)), int(self.random.integers(1, 4))

    def size(self, smallest: int, largest: int = 40) -> int:
        return int(self.random.integers(smallest, largest + 1))

    def normal(self, *size: int) -> np.ndarray:
        return self.random.normal(size=size)


@pytest.fixture(params=range(2))
def drawn(request: pytest.FixtureRequest) -> Drawn:
    return Drawn(request.param)


def test_metrics_of_classes_equal_scikit_learn(drawn):
    samples = drawn.size(8)
    labels, outputs = drawn.random.integers(0, CLASSES, samples), drawn.normal(samples, CLASSES) * 3
    labels[:CLASSES] = range(CLASSES)
    scores = score(list(BY_CLASS), outputs, labels, *drawn.cut)
    assert scores == pytest.approx(expect(BY_CLASS, labels, outputs), rel=1e-12, nan_ok=True)


def test_metrics_of_values_equal_scikit_learn_and_scipy(drawn):
    size = drawn.size(3), drawn.size(1, 3)
    labels = drawn.normal(*size) * 3 + 1
    outputs = labels + drawn.normal(*size)
    scores = score(list(BY_VALUE), outputs, labels, *drawn.cut)
    assert scores == pytest.approx(expect(BY_VALUE, labels, outputs), rel=1e-9)
    labels = drawn.random.exponential(size=size)  # for logarithms, medians and rankings
    outputs = labels * drawn.random.uniform(0.5, 2, size=size)
    scores = score(list(BY_PAIRS), outputs, labels, *drawn.cut)
    assert scores == pytest.approx(expect(BY_PAIRS, labels, outputs), rel=1e-9)


def test_references_cover_every_name():
    with pytest.raises(ConfigError) as caught:
        NamedMetrics(["nosuch"])
    kinds = set(str(caught.value).split("The names are ")[1].split(", top<k>")[0].split(", "))
    tested = {*BY_CLASS, *BY_VALUE, *TWO_CLASSES, *TWO_CLASS_SCORES, *BY_PAIRS}
    assert len(kinds) > 30 and kinds - tested == {"mae", "medae"}  # of which the long names are tested


def test_values_with_large_means_lose_no_digits():
    labels = np.random.normal(size=200) + 1e8
    outputs = labels + np.random.normal(size=200)
    reference = {name: BY_VALUE[name] for name in ("r2", "explained_variance", "pearson")}
    assert score(list(reference), outputs, labels, 7, 3) == pytest.approx(expect(reference, labels, outputs), rel=1e-6)


NAN = float("nan")
EDGES = {
    "a label of -100 is a number": (["mae"], [-90.0, 1.0], [-100.0, 1.0], {"mae": 5.0}),
    "constant labels": (["r2"], [2.0] * 5, [2.0] * 5, {"r2": 1.0}),
    "constant labels, other values": (["r2"], [3.0] * 5, [2.0] * 5, {"r2": 0.0}),
    "a column of outputs": (["mse"], [[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0], {"mse": 0.0}),
    "a column of labels": (["mse"], [1.0, 2.0, 3.0], [[1.0], [2.0], [3.0]], {"mse": 0.0}),
    "dimensions are columns": (["rmse"], [[[1.0, 0.0]], [[3.0, 0.0]]], [[[0.0, 4.0]], [[0.0, 4.0]]],
                               {"rmse": (5**0.5 + 4) / 2}),
    "NaN": (["mse", "max_error"], [1.0, NAN, 2.0], [1.0, 1.0, 1.0], {"mse": NAN, "max_error": NAN}),
    "no label": (["mse", "r2"], [1.0, 1.0], [NAN, NAN], {"mse": None, "r2": None}),
    "bools are classes": (["accuracy"], [[1.0, 0.0], [0.0, 1.0]], [False, False], {"accuracy": 0.5}),
    "equal scores rank like argmax": (["accuracy", "top1_accuracy", "top2_accuracy"], [[0.0] * 3] * 3, [0, 1, 2],
                                      {"accuracy": 1 / 3, "top1_accuracy": 1 / 3, "top2_accuracy": 2 / 3}),
    "confident scores": (["roc_auc"], [[0.0, 100.0], [0.0, 101.0], [0.0, 102.0]], [0, 0, 1], {"roc_auc": 1.0}),
    "labels of -100 of many": (["hamming_loss", "accuracy"], [[1.0, -1.0], [9.0, 1.0], [1.0, 9.0]],
                               [[1, 0], [-100, 1], [0, -100]], {"hamming_loss": 0.25, "accuracy": 2 / 3}),
    "integer predictions": (["accuracy", "f1_macro"], [-1, 1, -1, -1, 3, 5], [-1, 1, 1, -1, 7, -100],
                            {"accuracy": 0.6, "f1_macro": (4 / 5 + 2 / 3) / 4}),
    "integer predictions of two classes": (["f1"], [-1, 1, -1, -1], [-1, 1, 1, -1], {"f1": 2 / 3}),
    "a NaN score": (["accuracy"], [NAN, 1.0], [0, 1], {"accuracy": NAN}),
    "NaN scores of ignored labels": (["accuracy"], [[NAN] * 3] * 2, [-100, -100], {"accuracy": None}),
    "labels of -100 of two classes": (["accuracy"], [1.0, 9.0, 1.0], [1, -100, 0], {"accuracy": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize(("names", "outputs", "labels", "expected"), EDGES.values(), ids=EDGES)
def test_metrics_at_the_edges(names, outputs, labels, expected):
    for processes in (1, 2):
        assert score(names, outputs, labels, 2, processes) == pytest.approx(expected, nan_ok=True)


def test_nan_labels_are_ignored_by_column():
    labels = np.array([[1.0, 2.0, np.nan], [np.nan, 4.0, np.nan], [3.0, 8.0, np.nan], [5.0, np.nan, np.nan]])
    outputs = labels + np.array([1.0, 2.0, 3.0])
    outputs[np.isnan(labels)] = 1e6
    scores = score(["rmse", "mae", "max_error", "r2"], outputs, labels, 2)
    r2 = [sk.r2_score(labels[~np.isnan(labels[:, i]), i], outputs[~np.isnan(labels[:, i]), i]) for i in (0, 1)]
    assert scores == pytest.approx({"rmse": 1.5, "mae": 1.5, "max_error": 2.0, "r2": np.mean(r2)})


@pytest.mark.parametrize("classes_at", [1, -1])
def test_token_labels_of_minus_100_are_ignored(classes_at):
    random = np.random.default_rng(3)
    labels, outputs = random.integers(0, CLASSES, (9, 5)), random.normal(size=(9, 5, CLASSES))
    labels[random.random((9, 5)) < 0.4] = -100
    labelled = labels != -100
    reference = {name: BY_CLASS[name] for name in ("accuracy", "f1_macro", "log_loss", "top2_accuracy", "roc_auc")}
    scores = score(list(reference), np.moveaxis(outputs, -1, classes_at).copy(), labels, 2)
    assert scores == pytest.approx(expect(reference, labels[labelled], outputs[labelled]), rel=1e-12)


def test_class_dimension_is_that_of_earlier_batches():
    scores = torch.zeros(2, 3, 3)
    scores[:, 1, :] = 1.0  # torch's (N, C, L): class 1 everywhere
    before = nn.functional.one_hot(torch.ones(2, 5).long(), 3).mT.float(), torch.ones(2, 5).long()
    for batches, accuracy in (([], 0.0), ([before], 1.0)):
        assert updated(["accuracy"], *batches, (scores, torch.ones(2, 3).long())).compute() == {"accuracy": accuracy}
    three, four = (updated(["accuracy"], (torch.zeros(2, count), torch.zeros(2).long())) for count in (3, 4))
    with pytest.raises(DataError, match="3 classes in dimension -1, as in the batches before"):
        three.update(torch.zeros(2, 4), torch.zeros(2).long())
    with pytest.raises(DataError, match="3 in dimension -1, and 4 in dimension -1"):
        three.merge(four.state())


def test_many_classes_and_pairs_need_little_memory():
    classes, samples = 60_000, 50
    labels, outputs = torch.randint(classes, (samples,)), torch.rand(samples, classes)
    outputs[torch.arange(0, samples, 2), labels[::2]] = 2.0
    scorer = updated(["accuracy", "f1_macro"], *zip(outputs.split(7), labels.split(7), strict=True))
    true, guess = labels.numpy(), outputs.argmax(-1).numpy()
    expected = {"accuracy": sk.accuracy_score(true, guess), "f1_macro": sk.f1_score(true, guess, average="macro")}
    assert scorer.compute() == pytest.approx(expected, rel=1e-12)
    arrays = [value for value in scorer.state()["statistics"][0].values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 16 * 2 * samples
    labels, predicted = np.random.randint(0, 5000, (2, 300_000))
    predicted[::3] = labels[::3]
    assert score(["accuracy"], predicted, labels, 30_000)["accuracy"] == sk.accuracy_score(labels, predicted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_of_any_float_type_are_read_in_chunks(dtype, monkeypatch):
    outputs, labels = torch.randn(30, CLASSES).to(dtype), torch.arange(30) % CLASSES
    reference = {name: BY_CLASS[name] for name in ("accuracy", "log_loss", "roc_auc")}
    expected = expect(reference, labels.numpy(), outputs.double().numpy())
    assert score([*reference], outputs, labels, 4) == pytest.approx(expected, rel=1e-6)
    monkeypatch.setattr("omnitrain.metrics.classification.CrossEntropySums.CHUNK", 50)
    assert score([*reference], outputs, labels, 30) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("labels", [torch.zeros(0).long(), torch.full((3,), -100)])
def test_metrics_of_nothing_are_none_and_change_nothing(labels):
    scores = score([*BY_CLASS], torch.rand(len(labels), CLASSES), labels, 2, 2)
    assert scores == dict.fromkeys(BY_CLASS)
    outputs, labels = torch.eye(3)[[0, 1, 1]], torch.tensor([0, 1, 2])
    for name in ("accuracy", "log_loss", "roc_auc", "top2_accuracy"):
        assert score([name], outputs, labels, 3, 2) == score([name], outputs, labels, 3, 1)  # one process has none


def test_state_is_independent_of_later_updates():
    scorer = updated(["accuracy", "roc_auc", "log_loss"], (torch.eye(2), torch.tensor([0, 1])))
    fresh, state = NamedMetrics(scorer.names), scorer.state()
    scorer.update(torch.eye(2), torch.tensor([1, 0]))
    scorer.merge(state)
    fresh.merge(state)
    assert fresh.compute()["accuracy"] == fresh.compute()["roc_auc"] == 1.0


def test_update_never_waits_for_the_device():
    """Tensors on "meta" have no values: whoever looks at one gets an error."""
    scores, classes, values = torch.empty(4, CLASSES), torch.empty(4).long(), torch.empty(4)
    updated(["accuracy", "f1_macro", "top2_accuracy", "log_loss"], *[(scores.to("meta"), classes.to("meta"))] * 2)
    updated(["rmse", "r2"], *[(values.to("meta"), values.to("meta"))] * 2)


UNSCORABLE = [
    ("accuracy", torch.zeros(8, 3), torch.zeros(8, 2).long(), r"class scores \(N, C\)(.|\n)*pass a function"),
    ("accuracy", torch.zeros(8, 3), torch.zeros(8), r"labels that are float32 of shape \(8,\)\. Expected integer"),
    ("accuracy", torch.zeros(8, 2).long(), torch.zeros(8).long(), "integer predictions of the labels' shape"),
    ("accuracy", torch.zeros(8, 3), torch.tensor(0), r"dimension of samples(.|\n)*pass a function"),
    ("mse", torch.zeros(8, 2), torch.zeros(8), "'mse' cannot score outputs that are float32 of shape"),
    *((name, torch.tensor([1, 0]), torch.tensor([1, 0]), "needs class scores")
      for name in ("log_loss", "top2_accuracy", "roc_auc")),
    ("f1", torch.zeros(2, 3), torch.zeros(2).long(), r"3 classes\. Use 'f1_macro', 'f1_micro' or 'f1_weighted'"),
    ("recall_score", torch.arange(3), torch.arange(3), r"the classes \[0, 1, 2\]. Use 'recall_macro'"),
    ("accuracy", {"a": torch.eye(2), "b": torch.zeros(2, 7)}, torch.arange(2), r"\['a', 'b'\] is to be scored"),
    ("accuracy", torch.zeros(4, 3), ["cat", "dog", "cat", "eel"], "Give labels as numbers"),
    ("f1", torch.randn(6, 3), torch.ones(6, 3), "for the 3 labels that each sample has. Use 'f1_macro'"),
    ("mcc", torch.randn(6, 3), torch.ones(6, 3), "'mcc' has no value for the 3 labels"),
    ("log_loss", torch.randn(6, 3), torch.ones(6, 3), "Use 'roc_auc' or 'average_precision'"),
    ("accuracy", torch.randn(6), torch.arange(6), "4 labels are outside 0 and 1, though the model gives one score"),
    ("specificity", torch.randn(6, 3), torch.arange(6) % 3, "for the two classes 0 and 1"),
    ("f1", ["cat", "cat"], ["cat", "dog"], "Use 'f1_macro'"),
    ("log_loss", ["cat", "cat"], ["cat", "dog"], "no value for labels that are text"),
]  # fmt: skip


@pytest.mark.parametrize("name, outputs, labels, words", UNSCORABLE, ids=[row[0] for row in UNSCORABLE])
def test_metric_without_a_value_is_an_error_with_the_remedy(name, outputs, labels, words):
    with pytest.raises(DataError, match=words):
        updated([name], (outputs, labels)).compute()


def test_labels_outside_the_classes_are_an_error():
    scorer, merged = (NamedMetrics(["accuracy"]) for _ in range(2))
    scorer.update(torch.zeros(4, 3), torch.tensor([0, 3, -1, -100]))
    merged.merge(scorer.state())
    for metrics in (scorer, merged):
        with pytest.raises(DataError, match=r"2 labels are outside 0\.\.2"):
            metrics.compute()
    scorer.reset()  # which forgets them, and the number of classes
    scorer.update(torch.eye(2), torch.tensor([0, 1]))
    assert scorer.compute() == {"accuracy": 1.0}


@pytest.mark.parametrize("name", ["acuracy", "fbeta", "neg_accuracy", "top0_accuracy", "neg_r2", ""])
def test_unknown_name_is_an_error_with_all_names(name):
    messages = {"acuracy": "Did you mean 'accuracy'.(.|\n)*jaccard_weighted", "fbeta": "Say which, such as 'f2' or"}
    with pytest.raises(ConfigError, match=messages.get(name, "")):
        NamedMetrics([name])


def test_names_have_directions():
    higher = dict.fromkeys(["accuracy", "neg_mse", "top5_accuracy", "neg_log_loss", "r2"], True)
    lower = dict.fromkeys(["mse", "perplexity", "hamming_loss"], False)
    assert NamedMetrics([*higher, *lower]).higher_is_better == higher | lower


def test_outputs_are_taken_from_tuples_and_mappings():
    labels, logits, other = torch.tensor([0, 1]), torch.eye(2), torch.zeros(2, 7)
    for outputs in ((logits, other), [logits], {"hidden": other, "logits": logits}, {"scores": logits}):
        assert updated(["accuracy"], (outputs, labels)).compute() == {"accuracy": 1.0}


TWO_CLASSES = HITS | {
    **{name: getattr(sk, f"{name}_score") for name in ("f1", "precision", "recall", "jaccard")},
    "balanced_accuracy": sk.balanced_accuracy_score, "f2": partial(sk.fbeta_score, beta=2),
    "fbeta_0.5_macro": partial(sk.fbeta_score, beta=0.5, average="macro"), "mcc": sk.matthews_corrcoef,
    "specificity": partial(sk.recall_score, pos_label=0), "cohen_kappa": sk.cohen_kappa_score,
    "acc": sk.accuracy_score, "iou": sk.jaccard_score, "miou": partial(sk.jaccard_score, average="macro"),
    "dice": sk.f1_score, "sensitivity": sk.recall_score,
}  # fmt: skip
TWO_CLASS_SCORES = {
    "auc": sk.roc_auc_score, "auroc": sk.roc_auc_score, "average_precision": sk.average_precision_score,
    "log_loss": sk.log_loss, "brier_score": sk.brier_score_loss,
}  # fmt: skip
BY_PAIRS = {
    "msle": sk.mean_squared_log_error, "rmsle": sk.root_mean_squared_log_error,
    "median_absolute_error": sk.median_absolute_error, "spearman": mean_over_columns(spearmanr),
    "kendall": mean_over_columns(kendalltau),
}  # fmt: skip


@pytest.mark.parametrize("as_probabilities", [False, True], ids=["logits", "probabilities"])
def test_metrics_of_one_score_equal_scikit_learn(drawn, as_probabilities):
    samples = drawn.size(8)
    labels, logits = drawn.random.integers(0, 2, samples), drawn.normal(samples) * 3
    labels[:2], logits[:2] = (0, 1), (-3, 4)
    probabilities = 1 / (1 + np.exp(-logits))
    outputs = probabilities if as_probabilities else logits
    reference = TWO_CLASSES | TWO_CLASS_SCORES
    expected = expect(TWO_CLASSES, labels, (logits > 0).astype(int)) | expect(TWO_CLASS_SCORES, labels, probabilities)
    shapes = [(outputs, labels), (outputs[:, None], labels), (outputs[:, None], labels[:, None].astype(float))]
    both = np.stack([1 - outputs, outputs] if as_probabilities else [np.zeros(samples), outputs], axis=1)
    for shaped in [*shapes, (outputs, labels.astype(bool)), (both, labels)]:
        assert score(list(reference), *shaped, *drawn.cut) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("as_probabilities", [False, True], ids=["logits", "probabilities"])
def test_metrics_of_many_labels_equal_scikit_learn(drawn, as_probabilities):
    samples, columns = drawn.size(6, 30), drawn.size(2, 5)
    labels, logits = drawn.random.integers(0, 2, (samples, columns)), drawn.normal(samples, columns) * 2
    labels[0], labels[1], logits[0] = 1, 0, 3.0
    probabilities = 1 / (1 + np.exp(-logits))
    outputs = probabilities if as_probabilities else logits
    ranked = {name: TWO_CLASS_SCORES[name] for name in ("auc", "average_precision")}
    expected = expect(HITS, labels, (logits > 0).astype(int)) | expect(ranked, labels, probabilities)
    assert score([*HITS, *ranked], outputs, labels, *drawn.cut) == pytest.approx(expected, rel=1e-9)


def test_one_hot_labels_score_like_classes():
    labels, outputs = torch.randint(CLASSES, (30,)), torch.randn(30, CLASSES)
    names = ["accuracy", "f1_macro", "log_loss", "roc_auc", "top2_accuracy", "cohen_kappa", "brier"]
    expected = score(names, outputs, labels, 7)
    for processes, dtype in itertools.product((1, 2), (torch.long, torch.float)):
        assert score(names, outputs, torch.eye(CLASSES, dtype=dtype)[labels], 7, processes) == pytest.approx(expected)


def test_loss_decides_whether_single_labels_are_one_hot():
    labels, outputs = torch.eye(3), torch.tensor([[2.0, 1.0, -1.0], [-1.0, 2.0, -1.0], [-1.0, -1.0, 2.0]])
    for loss, expected in ((torch.nn.BCEWithLogitsLoss(), 2 / 3), (torch.nn.CrossEntropyLoss(), 1.0), (None, 1.0)):
        assert score(["accuracy"], outputs, labels, how=scores_for(loss)) == pytest.approx({"accuracy": expected})


@pytest.mark.parametrize("dtype", [torch.long, torch.uint8])
def test_loss_decides_which_label_is_ignored(dtype):
    labels = torch.tensor([[0, 255, 0], [1, 1, 255]], dtype=dtype)
    first = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    outputs = torch.stack([first, torch.full((2, 3), 0.5)], dim=1)  # class 0 but for one pixel
    for predictions in (outputs, outputs.argmax(1)):
        scores = score(["accuracy", "miou"], predictions, labels, how=scores_for(nn.CrossEntropyLoss(ignore_index=255)))
        assert scores == pytest.approx({"accuracy": 3 / 4, "miou": (2 / 3 + 1 / 2) / 2})
    with pytest.raises(DataError, match=r"2 labels are outside 0\.\.1.*`ignore_index`"):
        score(["accuracy"], outputs, labels, how=scores_for(nn.CrossEntropyLoss()))


def test_loss_decides_whether_scores_are_logits(caplog):
    outputs, labels = torch.tensor([0.2, 0.3, 0.9]), torch.tensor([1, 0, 1])
    for loss in (nn.functional.binary_cross_entropy_with_logits, nn.BCELoss(), None):
        metrics = NamedMetrics(["accuracy"], scores_for(loss))
        for _ in range(2):
            metrics.reset()
            metrics.update(outputs, labels)
            assert metrics.compute() == pytest.approx({"accuracy": 2 / 3})
    assert score(["recall"], outputs, labels) == {"recall": 0.5}
    assert score(["recall"], outputs, labels, how=scores_for(nn.BCEWithLogitsLoss())) == {"recall": 1.0}
    assert sum("take them for probabilities" in record.message for record in caplog.records) == 2  # once each


def test_class_probabilities_are_read_as_such(caplog):
    random = np.random.default_rng(0)
    labels, outputs = random.integers(0, CLASSES, 40), softmax(random.normal(size=(40, CLASSES)) * 2)
    names = {
        "log_loss": sk.log_loss,
        "brier": lambda t, s: np.square(s - np.eye(CLASSES)[t]).sum(1).mean(),
        "roc_auc": lambda t, s: sk.roc_auc_score(t, s, multi_class="ovr"),
    }
    expected = expect(names, labels, outputs)
    for processes in (1, 2):
        assert score(list(names), outputs, labels, 7, processes) == pytest.approx(expected, rel=1e-12)
        single = score(list(names), outputs.astype(np.float32), labels, 7, processes)
        assert single == pytest.approx(expected, rel=1e-5)
    assert "within 0 and 1 and sum to one, so metrics take them for probabilities" in caplog.text
    known = score(["log_loss"], outputs, labels, how=scores_for(nn.CrossEntropyLoss()))
    assert known == pytest.approx({"log_loss": sk.log_loss(labels, softmax(outputs))})


def test_nan_scores_give_nan_and_warn_once(caplog):
    outputs, metrics = torch.eye(CLASSES)[:3], NamedMetrics(["accuracy", "f1_macro", "top2_accuracy", "log_loss"])
    for value in (NAN, NAN, 0.0):
        outputs[1, 2] = value
        metrics.reset()
        metrics.update(outputs, torch.arange(3))
        assert [math.isnan(value)] * 4 == [math.isnan(score) for score in metrics.compute().values()]
    assert caplog.text.count("Some scores are NaN") == 1


def test_text_labels_are_compared_with_text():
    labels, predicted = ["cat", "dog", "cat", "eel"], ["cat", "cat", "cat", "eel"]
    reference = {name: CLASS_HITS[name] for name in ("accuracy", "f1_macro", "cohen_kappa", "hamming_loss")}
    assert score([*reference], predicted, labels, 1, 2) == pytest.approx(expect(reference, labels, predicted))
