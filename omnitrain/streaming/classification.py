"""Streaming classification metrics: counts, sums, and for rankings the scores.

The names that users ask by are in `names.py`; how a batch is read, in `reading.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from omnitrain.errors import DataError
from omnitrain.streaming.reading import IGNORED, Batch, differ_by_last_one, is_integer, on_wide_device, quote

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
}


class PairCounts:
    """Counts (true, predicted) pairs; scikit-learn gets each pair once, with its count as the sample weight.

    Up to `DENSE` classes the counts are a matrix on the outputs' device, and no update waits for the device. With
    more classes (a vocabulary), or integer predictions, the distinct pairs are kept, at most one per sample.
    """

    DENSE = 1024

    def __init__(self, asked: Mapping[str, str]) -> None:
        self._names = list(asked)
        self._binary = [name for name, kind in asked.items() if COUNTED[kind][1].get("average") == "binary"]
        self._classes: int | None = None
        self._dense: torch.Tensor | None = None
        self._codes, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_size = 0

    def update(self, batch: Batch) -> None:
        """Take in one batch."""
        read = batch.classes(self._names)
        if read.has_scores:
            self._classes = read.layout.classes
            if self._binary and self._classes != 2:
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
                raise DataError(f"{quote(self._names)} needs classes within 32 bits. Number them from 0 on.")
            codes, counts = torch.unique((labels << 32) | (predicted & 0xFFFFFFFF), return_counts=True)
            self._add_codes(codes.cpu().numpy(), counts.cpu().numpy())

    def _add_codes(self, codes: np.ndarray, counts: np.ndarray) -> None:
        self._pending.append((codes, counts))
        self._pending_size += len(codes)
        if self._pending_size > max(65536, len(self._codes)):  # doubling: the sorting stays linear in the samples
            self._settle()

    def _settle(self) -> None:
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
        """Return what another process needs to merge."""
        self._settle()
        return {"codes": self._codes, "counts": self._counts, "classes": self._classes}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""
        self._classes = self._classes or state["classes"]
        self._add_codes(state["codes"], state["counts"])

    def compute(self, kind: str) -> float | None:
        """Return the result, or None if there was nothing to score."""
        from sklearn import metrics

        self._settle()
        if not len(self._codes):
            return None
        function, options = COUNTED[kind]
        true, predicted = self._codes >> 32, self._codes.astype(np.uint32).view(np.int32).astype(np.int64)
        if options.get("average") == "binary" and self._classes is None:
            found = np.union1d(true, predicted)
            if not (np.isin(found, (0, 1)).all() or np.isin(found, (-1, 1)).all()):
                raise self._not_binary(f"the classes {found[:5].tolist()}{' and more' if len(found) > 5 else ''}")
        return float(getattr(metrics, function)(true, predicted, sample_weight=self._counts, **options))

    def _not_binary(self, found: str) -> DataError:
        name = self._binary[0]
        stem = name.removesuffix("_score")
        return DataError(
            f"{name!r} is for the two classes 0 and 1, but there are {found}. "
            f"Use '{stem}_macro', '{stem}_micro' or '{stem}_weighted'."
        )


class _Sums:
    """A small vector of running sums on the device; its last entry is the number of labels."""

    def __init__(self, asked: Mapping[str, str]) -> None:
        self._names, self._kinds = list(asked), list(dict.fromkeys(asked.values()))
        self._sums: torch.Tensor | None = None

    def _add(self, sums: torch.Tensor) -> None:
        self._sums = sums if self._sums is None else self._sums + sums.to(self._sums.device)

    def state(self) -> dict[str, Any]:
        """Return what another process needs to merge."""
        return {} if self._sums is None else {"sums": self._sums.cpu().numpy()}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""
        if "sums" in state:
            self._add(torch.from_numpy(state["sums"]))

    def _means(self) -> list[float] | None:
        totals = [] if self._sums is None else self._sums.tolist()
        return [total / totals[-1] for total in totals] if totals and totals[-1] else None


class TopHits(_Sums):
    """Counts labels among the k highest scores; of equal scores, the lower class comes first, as in an argmax.

    With k classes or fewer every label is a hit, as scikit-learn has it.
    """

    def update(self, batch: Batch) -> None:
        """Take in one batch."""
        read = batch.classes(self._names)
        scores, dim = read.scores(self._names), read.layout.dim
        assert dim is not None
        labels = read.labels.unsqueeze(dim)
        own = scores.gather(dim, labels)
        shape = [1] * scores.ndim
        shape[dim] = -1
        earlier = torch.arange(scores.shape[dim], device=scores.device).view(shape) < labels
        # "not <=" and not ">": a score of NaN beats every label, so that it cannot make a hit.
        rank = (~(scores <= own) | ((scores == own) & earlier)).sum(dim)
        hits = [((rank < int(kind)) & read.valid).sum() for kind in self._kinds]
        self._add(torch.stack([*hits, read.valid.sum()]))

    def compute(self, kind: str) -> float | None:
        """Return the result, or None if there was nothing to score."""
        means = self._means()
        return None if means is None else means[self._kinds.index(kind)]


class CrossEntropy(_Sums):
    """Sums the cross-entropy of class scores read as logits: log_loss is its mean, perplexity the mean's exp.

    Unlike scikit-learn's, a probability of less than 2e-16 is not clipped. Scores of 16 bits are read as float32.
    """

    CHUNK = 2**24
    """Scores handled at a time: a batch of a language model is too large to copy as float32."""

    def update(self, batch: Batch) -> None:
        """Take in one batch."""
        read = batch.classes(self._names)
        scores, dim = read.scores(self._names), read.layout.dim
        assert dim is not None
        rows = max(1, self.CHUNK // max(1, scores[0].numel()))
        chunks = zip(scores.split(rows), read.labels.split(rows), read.valid.split(rows), strict=True)
        for chunk, labels, valid in chunks:
            exact = chunk if chunk.dtype == torch.float64 else chunk.float()
            losses = exact.logsumexp(dim) - exact.gather(dim, labels.unsqueeze(dim)).squeeze(dim)
            losses = on_wide_device(losses.where(valid, 0)).double()
            self._add(torch.stack([losses.sum(), valid.sum().to(losses)]))

    def compute(self, kind: str) -> float | None:
        """Return the result, or None if there was nothing to score."""
        means = self._means()
        if means is None:
            return None
        if kind == "log_loss":
            return means[0]
        with np.errstate(over="ignore"):
            return float(np.exp(means[0]))


class RankedScores:
    """Keeps what a ranking needs: one score and one label a sample for two classes, all N x C scores for more."""

    def __init__(self, asked: Mapping[str, str]) -> None:
        self._names = list(asked)
        self._scores: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []

    def update(self, batch: Batch) -> None:
        """Take in one batch."""
        labels, outputs = batch.labels, batch.outputs
        single = labels.shape == outputs.shape or differ_by_last_one(labels.shape, outputs.shape)
        if single and not is_integer(outputs) and labels.numel() == len(labels):
            kept = labels.flatten() != IGNORED
            scores, labels = outputs.flatten()[kept], labels.flatten()[kept]
            if bool(((labels != 0) & (labels != 1)).any()):
                raise batch.misfit(self._names, "labels of 0 and 1 only where there is one score a sample")
        else:
            read = batch.classes(self._names)
            scores, labels = read.scores(self._names), read.labels[read.valid]
            assert read.layout.dim is not None
            scores = scores.movedim(read.layout.dim, -1)[read.valid]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if scores.ndim == 2 and scores.shape[1] == 2:
            # The difference ranks like the probability, but does not round to 1 where the model is sure.
            scores = scores[:, 1] - scores[:, 0]
        self._scores.append(scores.cpu().numpy())
        self._labels.append(labels.cpu().numpy().astype(np.int8 if scores.ndim == 1 else np.int32))

    def state(self) -> dict[str, Any]:
        """Return what another process needs to merge."""
        return {"scores": list(self._scores), "labels": list(self._labels)}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""
        self._scores += state["scores"]
        self._labels += state["labels"]

    def compute(self, kind: str) -> float | None:
        """Return the result, or None if there was nothing to score."""
        from sklearn import metrics

        if not sum(map(len, self._labels)):
            return None
        scores, labels = np.concatenate(self._scores), np.concatenate(self._labels)
        if scores.ndim == 2:
            scores = torch.from_numpy(scores).double().softmax(-1).numpy()
            labels = np.eye(scores.shape[1], dtype=np.int8)[labels]  # one against the rest, averaged over classes
        if not np.isfinite(scores).all():
            return float("nan")  # scikit-learn would raise and so end the run; a NaN just never is the best
        return float(getattr(metrics, f"{kind}_score")(labels, scores))
