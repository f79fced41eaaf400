"""Streaming classification metrics: counts, sums, and scores for rankings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from omnitrain.core.errors import DataError
from omnitrain.core.history import quote_names
from omnitrain.metrics.inputs import Batch, Classes, Indicators, Layout, Statistic, StoredRows, on_wide_device

_AVERAGED = {
    stem if average == "binary" else f"{stem}_{average}": (f"{stem}_score", {"average": average})
    for stem in ("f1", "precision", "recall", "jaccard")
    for average in ("binary", "macro", "micro", "weighted")
}
COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy": ("accuracy_score", {}),
    "balanced_accuracy": ("balanced_accuracy_score", {}),
    **_AVERAGED,
    "matthews_corrcoef": ("matthews_corrcoef", {}),
    "cohen_kappa": ("cohen_kappa_score", {}),
    "hamming_loss": ("hamming_loss", {}),
    "zero_one_loss": ("zero_one_loss", {}),
    "specificity": ("recall_score", {"pos_label": 0, "average": "binary"}),
}
# The metrics that need only the number of hits: scikit-learn's values, to the bit, without scikit-learn.
FROM_HITS: dict[str, Callable[[int, int], float]] = {
    "accuracy": lambda hits, samples: hits / samples,
    "zero_one_loss": lambda hits, samples: 1 - hits / samples,
    "hamming_loss": lambda hits, samples: (samples - hits) / samples,
}
_FBETA = re.compile(r"f(?:beta_)?(\d+(?:\.\d+)?)(?:_(macro|micro|weighted))?")


def sklearn_function(kind: str) -> tuple[str, dict[str, Any]]:
    """Return scikit-learn's function and its options for a metric of counts; an empty name for another one.

    >>> sklearn_function("f0.5_macro")
    ('fbeta_score', {'beta': 0.5, 'average': 'macro'})
    """
    match = _FBETA.fullmatch(kind)
    if kind in COUNTED or match is None:
        return COUNTED.get(kind, ("", {}))
    return "fbeta_score", {"beta": float(match[1]), "average": match[2] or "binary"}


def _score(kind: str, true: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> float:
    """Return a metric from the distinct pairs of classes and how often each was seen."""
    if kind in FROM_HITS:
        return FROM_HITS[kind](int(counts[true == predicted].sum()), int(counts.sum()))
    from sklearn import metrics

    function, options = sklearn_function(kind)
    return float(getattr(metrics, function)(true, predicted, sample_weight=counts, **options))


# How much hits, false alarms and misses count in the denominator.
_SHARES = {"precision": (1, 1, 0), "recall": (1, 0, 1), "jaccard": (1, 1, 1)}


def _multilabel_score(kind: str, counts: np.ndarray) -> float | None:
    """Return a metric of several labels a sample from (tn, fp, fn, tp) of each; None if it has none for them."""
    if kind == "hamming_loss":
        return float(counts[:, 1:3].sum() / counts.sum())
    function, options = sklearn_function(kind)
    stem, average = function.removesuffix("_score"), options.get("average")
    if average not in ("macro", "micro", "weighted"):
        return None
    beta = options.get("beta", 1.0) ** 2
    hit, alarm, miss = _SHARES.get(stem, (1 + beta, 1, beta))
    table = counts.sum(0, keepdims=True) if average == "micro" else counts
    _, fp, fn, tp = table.astype(np.float64).T
    hits, total = (tp if stem in _SHARES else tp * hit), tp * hit + fp * alarm + fn * miss
    values = np.divide(hits, total, out=np.zeros_like(total), where=total > 0)
    support = tp + fn
    if average == "weighted":
        return float((values * support).sum() / support.sum()) if support.any() else 0.0
    return float(values.mean())


class _RunningSums(Statistic):
    """A small vector of running sums on the device; its last entry is the number of labels."""

    def __init__(self, kind_by_name: Mapping[str, str]) -> None:
        super().__init__(kind_by_name)
        self._name_by_kind = {kind: name for name, kind in kind_by_name.items()}
        self._kinds = list(self._name_by_kind)
        self._sums: torch.Tensor | None = None

    def _add(self, sums: torch.Tensor) -> None:
        self._sums = sums if self._sums is None else self._sums + sums.to(self._sums.device)

    def state(self) -> dict[str, Any]:
        return {} if self._sums is None else {"sums": self._sums.cpu().numpy()}

    def merge(self, state: Mapping[str, Any]) -> None:
        if "sums" in state:
            self._add(torch.from_numpy(state["sums"]))

    def _means(self) -> list[float] | None:
        totals = [] if self._sums is None else self._sums.tolist()
        return [total / totals[-1] for total in totals] if totals and totals[-1] else None


class _Confusions(_RunningSums):
    """Counts hits and misses of labels of 0 and 1, once for scores that are logits and once for probabilities.

    The sums are tn, fp, fn and tp of each label for both; the samples of which all labels are met for both; and the
    number of samples.
    """

    def update(self, batch: Batch) -> None:
        read = batch.indicators
        assert read is not None
        scores, labels, valid = (on_wide_device(tensor) for tensor in (read.scores, read.labels, read.valid))
        columns = torch.arange(labels.shape[1], device=labels.device)
        counts, exact = [], []
        any_valid = valid.any(1)
        for threshold in (0.0, 0.5):
            predicted = (scores > threshold).long()
            cells = (columns * 4 + labels * 2 + predicted).where(valid, 4 * len(columns)).flatten()
            cell_counts = torch.zeros(4 * len(columns) + 1, dtype=torch.int64, device=labels.device)
            counts.append(cell_counts.scatter_add_(0, cells, torch.ones_like(cells))[:-1])
            exact.append((((predicted == labels) | ~valid).all(1) & any_valid).sum())
        self._add(torch.cat([*counts, torch.stack([*exact, any_valid.sum()])]))

    def compute(self, kind: str, layout: Layout) -> float | None:
        sums = self.state().get("sums")
        if sums is None or not sums[-1]:
            return None
        which = int(layout.are_probabilities)
        counts, exact, rows = sums[:-3].reshape(2, -1, 4)[which], int(sums[-3 + which]), int(sums[-1])
        if layout.columns == 1:
            (cells,) = counts[0].nonzero()
            return _score(kind, cells // 2, cells % 2, counts[0][cells])
        if kind in ("accuracy", "zero_one_loss"):
            return FROM_HITS[kind](exact, rows)
        value = _multilabel_score(kind, counts)
        if value is None:
            name, (_, options) = self._name_by_kind[kind], sklearn_function(kind)
            also = f" Use '{name}_macro', '{name}_micro' or '{name}_weighted'." if "average" in options else ""
            raise DataError(f"{name!r} has no value for the {layout.columns} labels that each sample has.{also}")
        return value


class PairCounts(Statistic):
    """Counts (true, predicted) pairs; scikit-learn gets each pair once, with its count as the sample weight.

    Up to `DENSE` classes the counts are a matrix on the outputs' device, and no update waits for the device. With
    more classes (a vocabulary), or integer predictions, the distinct pairs are kept, at most one per sample.
    """

    DENSE = 1024

    def __init__(self, kind_by_name: Mapping[str, str]) -> None:
        super().__init__(kind_by_name)
        options = {name: sklearn_function(kind)[1] for name, kind in kind_by_name.items()}
        self._binary = [name for name in kind_by_name if options[name].get("average") == "binary"]
        self._confusions = _Confusions(kind_by_name)
        self._classes: int | None = None
        self._dense: torch.Tensor | None = None
        self._codes, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_size = 0

    def update(self, batch: Batch) -> None:
        indicators = batch.indicators
        if indicators is not None:
            self._confusions.update(batch)
            if indicators.labels.shape[1] == 1:
                return
        read = batch.classes
        if read.has_scores:
            self._classes = read.layout.classes
            if self._binary and self._classes != 2 and indicators is None:
                raise self._not_binary(f"{self._classes} classes")
        predicted, labels, valid = (on_wide_device(x).flatten() for x in (read.predicted(), read.labels, read.valid))
        if read.has_scores and self._classes is not None and self._classes <= self.DENSE:
            size = self._classes**2
            if self._dense is None:
                self._dense = torch.zeros(size + 1, dtype=torch.int64, device=labels.device)
            # The last cell takes what is not counted: selecting by a mask would wait for the device.
            cells = (labels * self._classes + predicted).where(valid, size)
            self._dense.scatter_add_(0, cells, torch.ones_like(cells))
        else:
            labels, predicted = labels[valid], predicted[valid]
            if not read.has_scores and bool((torch.stack([labels, predicted]).abs() >= 2**31).any()):
                raise DataError(f"{quote_names(self.names)} needs classes within 32 bits. Number them from 0 on.")
            codes, counts = torch.unique((labels << 32) | (predicted & 0xFFFFFFFF), return_counts=True)
            self._add_codes(codes.cpu().numpy(), counts.cpu().numpy())

    def _add_codes(self, codes: np.ndarray, counts: np.ndarray) -> None:
        self._pending.append((codes, counts))
        self._pending_size += len(codes)
        if self._pending_size > max(65536, len(self._codes)):  # doubling: the sorting stays linear in the samples
            self._flush()

    def _flush(self) -> None:
        """Bring all that was counted into sorted, distinct codes."""
        if self._dense is None and not self._pending:
            return
        if self._dense is not None:
            dense = self._dense[:-1].cpu().numpy()
            cells = dense.nonzero()[0]
            assert self._classes is not None
            self._pending.append(((cells // self._classes << 32) | cells % self._classes, dense[cells]))
            self._dense = None
        codes, counts = (
            np.concatenate(arrays) for arrays in zip((self._codes, self._counts), *self._pending, strict=True)
        )
        self._codes, inverse = np.unique(codes, return_inverse=True)
        self._counts = np.zeros(len(self._codes), np.int64)
        np.add.at(self._counts, inverse, counts)
        self._pending, self._pending_size = [], 0

    def state(self) -> dict[str, Any]:
        self._flush()
        return {
            "codes": self._codes, "counts": self._counts, "classes": self._classes,
            "confusions": self._confusions.state(),
        }  # fmt: skip

    def merge(self, state: Mapping[str, Any]) -> None:
        self._classes = self._classes or state["classes"]
        self._add_codes(state["codes"], state["counts"])
        self._confusions.merge(state["confusions"])

    def compute(self, kind: str, layout: Layout) -> float | None:
        if layout.columns == 1 or layout.is_multi_label:
            return self._confusions.compute(kind, layout)
        if layout.is_one_hot and self._binary and layout.columns != 2:
            raise self._not_binary(f"{layout.columns} classes")
        self._flush()
        if not len(self._codes):
            return None
        _, options = sklearn_function(kind)
        true, predicted = self._codes >> 32, self._codes.astype(np.uint32).view(np.int32).astype(np.int64)
        if options.get("average") == "binary" and self._classes is None:
            classes = np.union1d(true, predicted)
            if not (np.isin(classes, (0, 1)).all() or np.isin(classes, (-1, 1)).all()):
                raise self._not_binary(f"the classes {classes[:5].tolist()}{' and more' if len(classes) > 5 else ''}")
        return _score(kind, true, predicted, self._counts)

    def _not_binary(self, classes: str) -> DataError:
        name = self._binary[0]
        stem = name.removesuffix("_score")
        if stem == "specificity":
            return DataError(f"{name!r} is for the two classes 0 and 1, but there are {classes}. Leave it out.")
        return DataError(
            f"{name!r} is for the two classes 0 and 1, but there are {classes}. "
            f"Use '{stem}_macro', '{stem}_micro' or '{stem}_weighted'."
        )


class TopHits(_RunningSums):
    """Counts labels among the k highest scores; of equal scores, the lower class comes first, as in an argmax.

    With k classes or fewer every label is a hit, as scikit-learn has it.
    """

    def update(self, batch: Batch) -> None:
        read = batch.classes
        scores, dim = read.scores(self.names)
        read.layout.add(nan=(scores.amax(dim).isnan() & read.valid).sum())
        labels = read.labels.unsqueeze(dim)
        label_scores = scores.gather(dim, labels)
        shape = [1] * scores.ndim
        shape[dim] = -1
        earlier = torch.arange(scores.shape[dim], device=scores.device).view(shape) < labels
        # "not <=" and not ">": a score of NaN beats every label, so that it cannot make a hit.
        rank = (~(scores <= label_scores) | ((scores == label_scores) & earlier)).sum(dim)
        hits = [((rank < int(kind)) & read.valid).sum() for kind in self._kinds]
        self._add(torch.stack([*hits, read.valid.sum()]))

    def compute(self, kind: str, layout: Layout) -> float | None:
        _reject_multilabel(self.names, layout)
        means = self._means()
        return None if means is None else means[self._kinds.index(kind)]


class CrossEntropySums(_RunningSums):
    """Sums of log_loss, perplexity (its exp) and Brier's score, of scores as logits and as probabilities.

    Rows that all sum to one within 0 and 1 are probabilities, unless the loss says that they are logits. Unlike
    scikit-learn's, the loss of logits clips no probability. Scores of 16 bits are read as float32.
    """

    CHUNK = 2**24
    """Scores handled at a time: a batch of a language model is too large to copy as float32."""

    def __init__(self, kind_by_name: Mapping[str, str]) -> None:
        super().__init__(kind_by_name)
        self._asks_brier = "brier" in self._kinds

    def update(self, batch: Batch) -> None:
        indicators = batch.indicators
        if indicators is not None and indicators.labels.shape[1] == 1:
            self._add_binary(indicators)
            return
        read = batch.classes
        scores, dim = read.scores(self.names)
        rows = max(1, self.CHUNK // max(1, scores[0].numel()))
        chunks = zip(scores.split(rows), read.labels.split(rows), read.valid.split(rows), strict=True)
        for chunk, labels, valid in chunks:
            self._add_classes(read, chunk if chunk.dtype == torch.float64 else chunk.float(), labels, valid, dim)

    def _add_binary(self, read: Indicators) -> None:
        scores = read.scores if read.scores.dtype == torch.float64 else read.scores.float()
        labels = read.labels.to(scores)
        margins = torch.where(read.labels == 1, scores, -scores)
        share = torch.where(read.labels == 1, scores, 1 - scores)
        eps = torch.finfo(scores.dtype).eps
        terms = [
            torch.nn.functional.softplus(-margins), -share.clamp(eps, 1 - eps).log(),
            (scores.sigmoid() - labels).square(), (scores - labels).square(),
        ]  # fmt: skip
        self._add_terms(terms, read.valid)

    def _add_classes(
        self, read: Classes, scores: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, dim: int
    ) -> None:
        zero = torch.zeros((), device=scores.device)
        label_scores = scores.gather(dim, labels.unsqueeze(dim)).squeeze(dim)
        total = scores.logsumexp(dim)
        terms = [(total - label_scores), zero, zero, zero]
        known = read.layout.scores.are_probabilities
        if known is None:
            close = 2e-2 if read.outputs.dtype in (torch.float16, torch.bfloat16) else 1e-4
            off = ~(((scores.sum(dim) - 1).abs() <= close) & (scores.amin(dim) >= 0))  # so is a NaN
            read.layout.add(unbounded=(off & valid).sum())
        if known is not False:
            eps = torch.finfo(scores.dtype).eps
            terms[1] = -label_scores.clamp(eps, 1 - eps).log()
        if self._asks_brier:
            half = 0.5 if read.layout.classes == 2 else 1.0
            for place, probabilities in ((2, scores.softmax(dim)), (3, scores)):
                chosen = probabilities.gather(dim, labels.unsqueeze(dim)).squeeze(dim)
                terms[place] = (probabilities.square().sum(dim) - 2 * chosen + 1) * half
        self._add_terms(terms, valid)

    def _add_terms(self, terms: list[torch.Tensor], valid: torch.Tensor) -> None:
        sums = [on_wide_device(term.expand_as(valid).where(valid, 0)).double().sum() for term in terms]
        self._add(torch.stack([*sums, on_wide_device(valid).sum().to(sums[0])]))

    def compute(self, kind: str, layout: Layout) -> float | None:
        _reject_multilabel(self.names, layout)
        means = self._means()
        if means is None:
            return None
        value = means[(2 if kind == "brier" else 0) + layout.are_probabilities]
        if kind != "perplexity":
            return value
        with np.errstate(over="ignore"):
            return float(np.exp(value))


def _reject_multilabel(names: list[str], layout: Layout) -> None:
    if layout.is_multi_label:
        raise DataError(
            f"{quote_names(names)} has no value for the {layout.columns} labels that each sample has. Use 'roc_auc' or "
            "'average_precision', or pass a function f(y_true, y_score) as `compute_metrics`."
        )


class RankedScores(StoredRows):
    """Keeps what a ranking needs: one score and one label a sample for two classes, all N x C scores for more."""

    def update(self, batch: Batch) -> None:
        indicators = batch.indicators
        if indicators is not None:
            scores, labels = indicators.scores, indicators.labels.where(indicators.valid, -1)
            if labels.shape[1] == 1:
                scores, labels = scores[indicators.valid], labels[indicators.valid]
        else:
            read = batch.classes
            scores, dim = read.scores(self.names)
            scores, labels = scores.movedim(dim, -1)[read.valid], read.labels[read.valid]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if indicators is None and scores.ndim == 2 and scores.shape[1] == 2:
            # The difference ranks like the probability, but does not round to 1 where the model is sure.
            scores = scores[:, 1] - scores[:, 0]
        self._scores.append(scores.cpu().numpy())
        small = indicators is not None or scores.ndim == 1
        self._labels.append(labels.cpu().numpy().astype(np.int8 if small else np.int32))

    def compute(self, kind: str, layout: Layout) -> float | None:
        from sklearn import metrics

        if not sum(map(len, self._labels)):
            return None
        scores, labels = np.concatenate(self._scores), np.concatenate(self._labels)
        if not np.isfinite(scores).all():
            return float("nan")  # scikit-learn would raise and so end the run; a NaN just never is the best
        function = getattr(metrics, f"{kind}_score")
        if layout.is_one_hot or (scores.ndim == 2 and labels.ndim == 1):
            are_probabilities = layout.scores.are_probabilities
            if are_probabilities is None:
                are_probabilities = bool((np.abs(scores.sum(1) - 1) < 1e-4).all() and (scores >= 0).all())
            if not are_probabilities:
                scores = torch.from_numpy(scores).double().softmax(-1).numpy()
            if labels.ndim == 1:  # one against the rest, averaged over classes
                labels = np.eye(scores.shape[1], dtype=np.int8)[labels]
        if labels.ndim == 2 and (labels < 0).any():  # labels that are ignored, each in its column
            masks = [labels[:, i] >= 0 for i in range(labels.shape[1])]
            columns = [function(labels[mask, i], scores[mask, i]) for i, mask in enumerate(masks) if mask.any()]
            return float(np.mean(columns)) if columns else None
        return float(function(labels, scores))


def score_texts(name: str, kind: str, pairs: Mapping[tuple[str, str], int]) -> float:
    """Return a metric of labels and predictions that are texts, from the number of each pair."""
    function, options = sklearn_function(kind)
    if not function or options.get("average") == "binary":
        also = f" Use '{name}_macro', '{name}_micro' or '{name}_weighted'." if function else ""
        raise DataError(f"{name!r} has no value for labels that are text.{also}")
    distinct = sorted(pairs)
    true, predicted = map(np.array, zip(*distinct, strict=True))
    return _score(kind, true, predicted, np.array([pairs[pair] for pair in distinct]))
