"""Checks of labels, features and samples in two sets."""

from __future__ import annotations

import collections
import contextlib
import math
import numbers
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from omnitrain.checkpoint.fingerprints import content_digest
from omnitrain.core.errors import format_list
from omnitrain.data.collation import IGNORED_LABEL, LABEL_KEYS, get_labels
from omnitrain.data.loaders import by_name, has_length, is_stream
from omnitrain.data.sampling import Samples
from omnitrain.diagnostics.findings import CheckFinding, Outcome
from omnitrain.trainer.loop import Loop

# More classes than this are not counted one by one, as those of a language model.
_MAX_CLASSES = 1000
# A class with this share of the labels, and more, is mentioned.
_DOMINANT = 0.9
# Fewer samples than this say nothing about constant features.
_LEAST_SAMPLES = 8
_MAX_FEATURES = 10_000
# Samples that are read twice, to see whether random numbers change them.
_READ_TWICE = 16
# The types of labels besides lists of integers.
_LABELS = (int, float, np.number, torch.Tensor, np.ndarray)
# Values with fewer entries do not identify a sample.
_LEAST_ENTRIES = 4


@dataclass(slots=True)
class SetSample:
    """What was read of one set.

    Attributes:
        name: The name of the set in messages.
        size: How many samples it has.
        digests: The samples that were read, by their digests: the first index of each.
        is_random: Whether a sample differs when it is read twice, as by augmentation.
        parts: The inputs of samples, and what the dataset stores of each, by their digests: the first index of each.
        read: How many samples were read.
        labels: The integer labels, and how often each occurs.
        first: The first sample of each label.
        per_sample: Whether each sample has one label.
        float_labels: The smallest and the largest label that is no integer.
        ranges: The smallest and largest values of each entry of floats: tensors of the entry's shape.
        broken: The first sample with a value that is not finite, and the name of the entry.
        problem: Why nothing was read.
    """

    name: str
    size: int = 0
    digests: dict[str, int] = field(default_factory=dict)
    is_random: bool = False
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    read: int = 0
    labels: collections.Counter[int] = field(default_factory=collections.Counter)
    first: dict[int, int] = field(default_factory=dict)
    per_sample: bool = True
    float_labels: tuple[float, float] | None = None
    ranges: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    broken: tuple[int, str] | None = None
    problem: str = ""

    def add(self, index: int, sample: Any, names: tuple[str, ...]) -> None:
        """Count a sample."""
        self.read += 1
        digest = content_digest(sample)
        if digest is not None:
            self.digests[digest] = min(index, self.digests.get(digest, index))
        labels = get_labels(sample, names) if isinstance(sample, (tuple, list, Mapping)) else None
        self._add_labels(index, labels)
        for name, entry in _inputs_of(sample, names):
            self._add_floats(index, name, entry)

    def add_parts(self, index: int, parts: Iterable[tuple[str, Any]]) -> None:
        """Add what may identify a sample, by name."""
        for name, part in parts:
            digest = content_digest(part)
            if digest is not None:
                indices = self.parts.setdefault(name, {})
                indices[digest] = min(index, indices.get(digest, index))

    def identities(self) -> dict[str, int]:
        """Return the digests of parts that differ in nearly all samples, as labels and masks do not."""
        return {
            digest: index for digests in self.parts.values() if len(digests) >= _DOMINANT * self.read
            for digest, index in digests.items()
        }  # fmt: skip

    def _add_labels(self, index: int, labels: Any) -> None:
        is_list = isinstance(labels, list) and bool(labels) and all(type(label) is int for label in labels)
        if not is_list and (isinstance(labels, bool) or not isinstance(labels, _LABELS)):
            return
        tensor = torch.as_tensor(labels, dtype=torch.float64 if isinstance(labels, float) else None)
        if tensor.is_floating_point() and tensor.numel() == 1:
            low, high = self.float_labels or (math.inf, -math.inf)
            self.float_labels = min(low, float(tensor)), max(high, float(tensor))
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
            return
        self.per_sample = self.per_sample and tensor.numel() == 1 and not is_list
        for value in tensor.unique().tolist():
            self.labels[value] += 1
            self.first[value] = min(index, self.first.get(value, index))

    def _add_floats(self, index: int, name: str, entry: Any) -> None:
        if not isinstance(entry, (torch.Tensor, np.ndarray)):
            return
        tensor = torch.as_tensor(entry)
        if not tensor.is_floating_point() or not tensor.numel():
            return
        if (self.broken is None or index < self.broken[0]) and not bool(tensor.isfinite().all()):
            self.broken = index, name
        if tensor.numel() <= _MAX_FEATURES:
            low, high = self.ranges.get(name, (tensor, tensor))
            if low.shape == tensor.shape:
                self.ranges[name] = torch.minimum(low, tensor), torch.maximum(high, tensor)
            elif low.numel():  # lengths differ: no feature has a place
                self.ranges[name] = low[:0], high[:0]


def check_data(loop: Loop, samples: int, seconds: float, classes: int | None) -> dict[str, Outcome]:
    """Return the outcome and the findings of each check of the data.

    Args:
        loop: The loop of the run.
        samples: How many samples of each set are read, at most.
        seconds: For how long each set is read, at most.
        classes: How many classes the model scores; None if that is unknown.
    """
    names = tuple(loop.settings.label_names or ())
    train = _read_set(loop.sets.train, samples, seconds, names)
    evaluations = [
        _read_set(loader, samples, seconds, names, train.is_random) for loader in by_name(loop.sets.eval).values()
    ]
    ignored = (IGNORED_LABEL, loop.trainer.loss_mean.ignore_index)
    return {
        "labels": _check_labels(train, evaluations, classes, ignored),
        "features": _check_features(train),
        "overlap": _check_overlap(train, evaluations),
    }


def _read_set(loader: Any, samples: int, seconds: float, names: tuple[str, ...], has_parts: bool = False) -> SetSample:
    """Read samples of a set; their parts too if it is random, or `has_parts`."""
    result = SetSample(getattr(loader, "name", "the training set"))
    dataset: Any = getattr(loader if hasattr(loader, "dataset") else getattr(loader, "loader", None), "dataset", None)
    if is_stream(dataset):
        result.problem = "samples have no index"
        return result
    items = Samples(dataset)
    result.size = len(items)
    # in random order: sets are often sorted by class or task, and time may end before all samples are read
    indices = np.random.default_rng(0).choice(result.size, min(result.size, samples), replace=False)
    with contextlib.suppress(Exception):  # which is reported below
        reads = ([content_digest(items[index]) for _ in range(2)] for index in indices[:_READ_TWICE].tolist())
        result.is_random = items.columns is None and any(first != second for first, second in reads)
    end, failing = time.perf_counter() + seconds, result.size
    for index in indices.tolist():
        try:
            sample = items[index]
            result.add(index, sample, names)
            if has_parts or result.is_random:
                result.add_parts(index, [*_parts_of("", sample, names), *_stored_parts(dataset, index, names)])
        except Exception as error:
            if index < failing:
                failing, result.problem = index, f"sample {index} raises {type(error).__name__}: {error}"[:200]
        if time.perf_counter() > end:
            break
    return result


def _stored_parts(dataset: Any, index: int, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield what a dataset stores of a sample: rows of attributes that have as many as it has samples."""
    if isinstance(dataset, Subset):
        yield from _stored_parts(dataset.dataset, dataset.indices[index], names)
        return
    for name, value in getattr(dataset, "__dict__", {}).items():
        rows: Any = value if isinstance(value, (torch.Tensor, np.ndarray, list, tuple, Dataset)) else None
        if has_length(rows) and len(rows) == len(dataset):
            yield from _parts_of(name, rows[index], names)
            if isinstance(value, Dataset):
                yield from _stored_parts(value, index, names)


def _parts_of(name: str, sample: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the inputs of a sample together, unless they are a number or a few."""
    inputs = [value for _, value in _inputs_of(sample, names)]
    part = inputs[0] if len(inputs) == 1 else inputs
    if isinstance(part, str):  # names of files that are not in this folder may be those of others in another one
        is_identifying = " " in part or os.path.isfile(part)
    elif isinstance(part, (torch.Tensor, np.ndarray)):
        is_identifying = torch.as_tensor(part).numel() >= _LEAST_ENTRIES
    else:
        is_identifying = len(inputs) > 1 or not isinstance(part, numbers.Number)
    if is_identifying:
        yield name, part


def _inputs_of(sample: Any, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the entries of a sample that are no labels, by name."""
    if isinstance(sample, Mapping):
        return [(str(key), value) for key, value in sample.items() if key not in (*names, *LABEL_KEYS)]
    if isinstance(sample, (tuple, list)):
        inputs = sample[:-1] if len(sample) > 1 else sample
        return [(f"entry {place} of a sample", value) for place, value in enumerate(inputs)]
    return [("a sample", sample)]


def _check_labels(
    train: SetSample, evaluations: Sequence[SetSample], classes: int | None, ignored: Collection[int]
) -> Outcome:
    findings = list[CheckFinding]()
    if train.problem and not train.read:
        return f"not tried: {train.problem}", []
    if train.problem:
        findings.append(
            CheckFinding("error", "labels", train.name, train.problem, "Correct the sample, or leave it out.")
        )
    for part in (train, *evaluations):
        odd = [label for label in part.labels if not 0 <= label < (classes or label + 1) and label not in ignored]
        if odd and classes is not None:
            label = min(odd, key=lambda label: part.first[label])
            findings.append(CheckFinding(
                "error", "labels", f"sample {part.first[label]} of {part.name}",
                f"its label is {label}, and the model scores the classes 0 to {classes - 1}",
                f"Give the model {max(part.labels) + 1} classes, or number the labels from 0."
                if label > 0 else "Number the labels from 0; -100 is the label that losses leave out.",
            ))  # fmt: skip
    if train.float_labels is not None and not train.labels:
        low, high = train.float_labels
        if low == high and train.read >= _LEAST_SAMPLES:
            what = f"all {train.read} labels that were read are {low:g}"
            findings.append(CheckFinding("warning", "labels", train.name, what, "Look at how labels are read."))
        return f"from {low:.4g} to {high:.4g} in {train.read:,} samples", findings
    counted = {label: count for label, count in train.labels.items() if label not in ignored}
    if not counted:
        return "none that are numbers of classes", findings
    if not train.per_sample or len(counted) > _MAX_CLASSES:
        return f"{len(counted)} different ones, from {min(counted)} to {max(counted)}", findings
    total, common = sum(counted.values()), max(counted, key=lambda label: counted[label])
    share, scored = counted[common] / total, "" if classes is None else f"; the model scores {classes}"
    text = f"{len(counted)} classes in {total:,} samples, {share:.1%} of them {common}{scored}"
    if len(counted) == 1 and total >= _LEAST_SAMPLES:
        what = f"all {total} labels that were read are {common}"
        findings.append(
            CheckFinding("warning", "labels", train.name, what, "Look at how labels are read, and at their order.")
        )
    elif share >= _DOMINANT and total >= _LEAST_SAMPLES:
        findings.append(CheckFinding(
            "note", "labels", train.name, f"class {common} has {share:.1%} of the samples, the accuracy of always "
            "answering so", "Look at a metric such as f1_macro, and at class weights or a weighted sampler.",
        ))  # fmt: skip
    if classes is not None and 1 < len(counted) < classes <= _MAX_CLASSES and train.read == train.size:
        absent = [str(label) for label in range(classes) if label not in counted]
        findings.append(CheckFinding(
            "note", "labels", train.name, f"{len(absent)} of {classes} classes have no sample: {format_list(absent)}",
            "Give the model fewer classes, if they never occur.",
        ))  # fmt: skip
    return text, findings


def _check_features(train: SetSample) -> Outcome:
    findings = list[CheckFinding]()
    if not train.read:
        return f"not tried: {train.problem or 'nothing was read'}", []
    if train.broken is not None:
        index, name = train.broken
        findings.append(CheckFinding(
            "error", "features", f"sample {index} of {train.name}", f"{name} has a value that is not finite",
            "Replace NaN and infinity in the dataset, or leave the sample out.",
        ))  # fmt: skip
    if len(train.digests) == 1 and train.read >= _LEAST_SAMPLES:
        what = f"all {train.read} samples that were read are the same"
        findings.append(CheckFinding("warning", "features", train.name, what, "Look at `__getitem__` of the dataset."))
        return "all samples are the same", findings
    texts = list[str]()
    for name, (low, high) in train.ranges.items():
        if train.read < _LEAST_SAMPLES or not low.numel():
            continue
        constant = (low == high).flatten()
        count = int(constant.sum())
        texts.append(f"{count} of {constant.numel()} values of {name} are constant")
        if count == constant.numel():
            what = f"{name} is the same in all {train.read} samples that were read"
            findings.append(
                CheckFinding("warning", "features", name, what, "Look at how it is read; it tells the model nothing.")
            )
        elif count and low.ndim == 1:
            places = format_list([str(place) for place in constant.nonzero().flatten().tolist()])
            what = f"{count} of {constant.numel()} features are constant: {places}"
            findings.append(
                CheckFinding("note", "features", name, what, "They tell the model nothing, and can be left out.")
            )
    return "; ".join(texts) or "no entry of floats of one shape", findings


def _check_overlap(train: SetSample, evaluations: Sequence[SetSample]) -> Outcome:
    findings = list[CheckFinding]()
    if not evaluations:
        return "no evaluation set", []
    known = train.identities() if train.is_random else train.digests
    if not known:
        problem = train.problem or "samples have no stable content"
        if train.is_random:
            problem = "training samples differ when they are read twice, and the dataset stores no rows of them"
        return f"not tried: {problem}", []
    duplicates = 1 - len(train.digests) / train.read
    counted = 0
    for part in evaluations:
        digests = part.identities() if train.is_random else part.digests
        shared = sorted({index: known[digest] for digest, index in digests.items() if digest in known}.items())
        counted += part.read
        if not shared:
            continue
        evaluation, training = shared[0]
        is_natural = len(shared) <= 3 * duplicates * len(part.digests) + (duplicates > 0)  # alike by chance
        reason = f"; {duplicates:.0%} of the training samples occur twice anyway" if is_natural else ""
        findings.append(CheckFinding(
            "note" if is_natural else "warning", "overlap", part.name,
            f"{len(shared)} of {len(part.digests)} different samples are in {train.name} too, such as sample "
            f"{evaluation}, which is sample {training} there{reason}",
            "Split the data before anything else; an evaluation on training samples measures memory.",
        ))  # fmt: skip
    text = f"{counted:,} evaluation samples against {train.read:,} of {train.size:,} for training"
    return text + ", by what their datasets store, as augmentation changes samples" * train.is_random, findings
