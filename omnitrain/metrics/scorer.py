"""Conversion of `compute_metrics` into a streaming `Scorer`."""

from __future__ import annotations

import contextlib
import inspect
import logging
import numbers
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from omnitrain.core.errors import ConfigError, DataError
from omnitrain.core.metric_format import MetricDescriptor, describe_metric
from omnitrain.data.collation import IGNORED_LABEL, tensors_in
from omnitrain.metrics.accumulated import is_torchmetrics, parts_of_metric
from omnitrain.metrics.inputs import Scores, class_dimension, main_output
from omnitrain.metrics.registry import NamedMetrics
from omnitrain.metrics.text import TEXT_METRICS, TextMetrics

logger: logging.Logger = logging.getLogger("omnitrain")

_EXPECTED = (
    "Expected the name of a metric, a function f(eval_pred) or f(y_true, y_pred), a torchmetrics metric, "
    "or a list of these."
)


class EvalPrediction(NamedTuple):
    """The input of a function of one argument if transformers is not imported; unpacks as (predictions, labels).

    >>> predictions, labels = EvalPrediction(np.zeros((2, 3)), np.array([0, 1]))
    >>> predictions.argmax(-1).tolist()
    [0, 0]
    """

    predictions: Any
    """The model's outputs as an array, or a tuple of arrays."""
    label_ids: Any
    """The labels as an array, or a tuple of arrays."""


class Scorer:
    """Scores the evaluation passes of a run, one at a time: `reset()`, `update()` per batch, `compute()`.

    With several processes, each updates its own scorer; then the main one merges the `states()` of the others, in the
    order of ranks, and computes the results for all.

    >>> scorer = make_scorer(["accuracy", "log_loss"])
    >>> scorer.update(torch.tensor([[0.0, 0.0], [2.0, 2.0]]), torch.tensor([0, 1]))
    >>> {name: round(value, 4) for name, value in scorer.compute().items()}
    {'accuracy': 0.5, 'log_loss': 0.6931}
    """

    def __init__(
        self, parts: Sequence[NamedMetrics | TextMetrics | ByBatch | _Torchmetrics], functions: Sequence[_Function]
    ) -> None:
        self._parts, self._functions = list(parts), list(functions)
        self.keeps_predictions: bool = bool(functions)
        """Whether `compute()` needs all predictions and labels, because a plain function is called only once."""
        self.is_empty: bool = not parts and not functions
        """Whether there are no metrics."""
        self.higher_is_better: dict[str, bool] = {}
        """The known directions, by metric name."""
        for part in parts:
            self.higher_is_better.update(part.higher_is_better)
        known = [part.names for part in parts]
        self.names: list[str] | None = None
        """The names of all results; None if unknown until the first evaluation."""
        self.requires_global_batches: bool = any(isinstance(part, ByBatch) for part in parts)
        """Whether to call `update()` with the batches of all processes, on the main process."""
        if not functions and None not in known:
            self.names = [name for names in known for name in names or ()]

    def reset(self) -> None:
        """Begin a new pass."""
        for part in self._parts:
            part.reset()

    def update(self, outputs: Any, labels: Any) -> None:
        """Add one batch, as tensors on any device. Plain functions do not use it."""
        if not self._parts:
            return
        if labels is None:
            raise DataError("`compute_metrics` needs labels, and this batch has none. Evaluate without metrics.")
        is_one = isinstance(labels, (tuple, list)) and len(labels) == 1 and not isinstance(labels, SampleList)
        if is_one and not isinstance(labels[0], str):
            labels = labels[0]
        # Normal tensors even in inference mode: otherwise the states could not be updated outside it.
        with torch.inference_mode(False), torch.no_grad():
            for part in self._parts:
                _annotate_errors(part, part.update, outputs, labels)

    def states(self) -> list[dict[str, Any]]:
        """Return the states for `merge()` on the main process; picklable, and small unless a metric keeps scores."""
        return [part.state() for part in self._parts]

    def merge(self, states_of_other_process: Sequence[Mapping[str, Any]]) -> None:
        """Add the result of `states()` from another process."""
        for part, state in zip(self._parts, states_of_other_process, strict=True):
            part.merge(state)

    def compute(self, predictions: Any = None, labels: Any = None, extra: Any = None) -> dict[str, float]:
        """Return the results of this pass as floats; a metric that had nothing to score is left out, with a warning.

        Args:
            predictions: If `keeps_predictions`: all outputs as arrays, a tuple of arrays for a tuple of outputs.
            labels: All labels, likewise.
            extra: Further fields for an `EvalPrediction`, as arrays by name.

        Raises:
            DataError: A metric is not a number, or two metrics have the same name.
        """
        results: dict[str, float] = {}
        left_out: list[str] = []
        arrays = to_numpy(predictions), to_numpy(labels), extra or {}
        outputs = [_annotate_errors(part, part.compute) for part in self._parts]
        outputs += [_annotate_errors(function, function.compute, *arrays) for function in self._functions]
        for output in outputs:
            for name, value in output.items():
                if name in results:
                    raise DataError(f"Two metrics are named {name!r}. Return them from a function under other names.")
                if value is None:
                    left_out.append(name)
                else:
                    results[name] = value
        if left_out:
            logger.warning(
                "Nothing to score: the set is empty, or all labels are %d. Left out: %s.",
                IGNORED_LABEL,
                ", ".join(left_out),
            )
        return results


def scores_for(loss_fn: Any, model: Any = None) -> Scores:
    """Return what is known about the scores from PyTorch's loss, or from a model of transformers.

    >>> scores_for(torch.nn.BCEWithLogitsLoss())
    Scores(are_probabilities=False, are_of_classes=False)
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if loss_fn is not None:
        scores, ignore_index = _SCORES_OF.get(name, Scores()), getattr(loss_fn, "ignore_index", None)
        return replace(scores, ignore_index=ignore_index) if type(ignore_index) is int else scores
    config = getattr(model, "config", None)
    if config is None or not type(model).__module__.startswith("transformers."):
        return Scores()
    return Scores(
        are_probabilities=False, are_of_classes=getattr(config, "problem_type", None) != "multi_label_classification"
    )


_SCORES_OF = {
    **dict.fromkeys(["BCEWithLogitsLoss", "binary_cross_entropy_with_logits"], Scores(False, False)),
    **dict.fromkeys(["MultiLabelSoftMarginLoss", "multilabel_soft_margin_loss"], Scores(False, False)),
    **dict.fromkeys(["BCELoss", "binary_cross_entropy"], Scores(True, False)),
    **dict.fromkeys(["CrossEntropy", "CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss"], Scores(False, True)),
}


def make_scorer(compute_metrics: Any, scores: Scores | None = None, processing_class: Any = None) -> Scorer:
    """Return the scorer for the user's `compute_metrics`.

    * None: no metrics.
    * A name, such as "accuracy" or "f1_macro": streams, keeps no predictions.
    * A torchmetrics metric or collection: streams. It gets the outputs (the first of a tuple, the "logits" of a
      mapping) and labels as they are. It is copied, so your object does not change. Its results are named after its
      class or as in the collection; a vector gives `name_0`, `name_1`, ...
    * A function of one required argument: gets an `EvalPrediction` of the raw outputs and labels, as in
      transformers, and returns a dict of numbers.
    * A function of two required arguments, `f(y_true, y_pred)`: returns a dict of numbers, or a number that is named
      after the function. If outputs are class scores for integer labels, `y_pred` is their argmax, unless the
      argument is named `y_score`, `y_prob` or `y_proba`. Token labels (integers of more than one dimension) are
      flattened to the positions whose label is not -100, and `y_pred` likewise. Everything else is passed unchanged.
    * A list of these.

    An attribute `descriptor` of one of these, a `MetricDescriptor` or a dict of them by name, says how its results are
    shown, and may say their direction.

    `scores` says how named metrics should read the scores, if that is known, and `processing_class` decodes tokens for
    metrics of text.

    Raises:
        ConfigError: An object is none of these, a name is unknown, or two metrics have the same name.
    """
    entries = compute_metrics if isinstance(compute_metrics, (list, tuple)) else [compute_metrics]
    entries = [] if compute_metrics is None else list(entries)
    names = [metric for metric in entries if isinstance(metric, str)]
    metrics = [_Torchmetrics(metric) for metric in entries if is_torchmetrics(metric)]
    by_batch = [metric for metric in entries if isinstance(metric, ByBatch)]
    rest = [metric for metric in entries if not isinstance(metric, (str, ByBatch)) and not is_torchmetrics(metric)]
    functions = [_Function.of(metric) for metric in rest]
    known = names + [name for metric in metrics for name in metric.names or ()]
    for name in known:
        if known.count(name) > 1:
            raise ConfigError(
                f"Two metrics in `compute_metrics` are named {name!r}. Pass it once; torchmetrics can be renamed "
                "with MetricCollection({'name': metric})."
            )
    text_names = [name for name in names if name in TEXT_METRICS]
    parts: list[Any] = [TextMetrics(text_names, processing_class)] if text_names else []
    if plain_names := [name for name in names if name not in TEXT_METRICS]:
        parts.append(NamedMetrics(plain_names, scores))
    for metric in rest + [metric for metric in entries if is_torchmetrics(metric)]:
        descriptors = getattr(metric, "descriptor", None)
        if isinstance(descriptors, MetricDescriptor):
            descriptors = {getattr(metric, "__name__", type(metric).__name__): descriptors}
        for name, descriptor in descriptors.items() if isinstance(descriptors, Mapping) else ():
            describe_metric(name, descriptor)
    return Scorer([*parts, *metrics, *by_batch], functions)


class SampleList(list[Any]):
    """A list with an object for each sample, such as the boxes in an image; not one of columns."""


def per_sample(values: Any, samples: int | None) -> Any:
    """Return outputs or labels of a batch as a SampleList if they have an object for each sample.

    These are dicts, or tensors of which not every one has the samples as its first dimension. A tuple of tensors is
    one of columns.

    Args:
        values: The outputs or labels.
        samples: How many samples the batch has, if that is known.

    >>> type(per_sample(({"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(0, 4)}), 2)).__name__
    'SampleList'
    """
    if not isinstance(values, (list, tuple)) or len(values) != samples or hasattr(values, "_fields"):
        return values
    if all(isinstance(value, Mapping) for value in values):
        return SampleList(values)
    has_rows = all(isinstance(value, torch.Tensor) and value.shape[:1] == (samples,) for value in values)
    is_list = isinstance(values, list) and all(isinstance(value, torch.Tensor) for value in values)
    return SampleList(values) if is_list and not has_rows else values


def to_numpy(values: Any) -> Any:
    """Return tensors, including those in tuples, lists and dicts, as arrays on the CPU; bfloat16 becomes float32."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if isinstance(values, Mapping):
        return {key: to_numpy(value) for key, value in values.items()}
    if isinstance(values, SampleList):
        return SampleList(map(to_numpy, values))
    if isinstance(values, (tuple, list)) and any(not isinstance(value, numbers.Number) for value in values):
        return tuple(to_numpy(value) for value in values)
    return values


def _as_float(name: str, value: Any) -> float:
    """Return a result as a float, so that a history keeps no graph or tensor alive."""
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and size == 1:
        value = value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    kind = type(value).__name__ + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")
    raise DataError(
        f"The metric {name!r} must be a number, got {kind}: {str(value)[:80]}. Return a number, "
        "or a dict of numbers such as {'accuracy': 0.9}."
    )


@dataclass(slots=True, frozen=True)
class _Function:
    """A user's function, called once with all predictions and labels."""

    call: Callable[..., Any]
    name: str
    takes_pair: bool
    """Whether it is f(y_true, y_pred); otherwise f(eval_pred)."""
    takes_scores: bool
    """Whether class scores are passed on as they are, without an argmax."""

    @classmethod
    def of(cls, function: Any) -> _Function:
        """Determine from its signature how to call the function."""
        target = getattr(function, "func", function)  # functools.partial
        name = getattr(target, "__name__", type(target).__name__)
        if not callable(function) or inspect.isclass(function):
            what = f"the class {name}; pass an instance or a function" if inspect.isclass(function) else repr(function)
            raise ConfigError(f"`compute_metrics` cannot use {what}. {_EXPECTED}")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise ConfigError(f"`compute_metrics` cannot read the signature of {name}. {_EXPECTED}") from None
        required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len(required) not in (1, 2) or any(p.kind is p.KEYWORD_ONLY for p in required):
            signature = ", ".join(map(str, parameters))
            raise ConfigError(
                f"`compute_metrics` cannot tell how to call {name}({signature}): it needs one or two required "
                f"positional arguments, and has {len(required)}. {_EXPECTED}"
            )
        scores = required[-1].name in ("y_score", "y_prob", "y_proba")
        return cls(function, name, takes_pair=len(required) == 2, takes_scores=scores)

    def compute(self, predictions: Any, labels: Any, extra: Mapping[str, Any]) -> Mapping[str, float | None]:
        """Return the function's results; None under its own name if there is nothing to score."""
        if predictions is not None and labels is None:
            raise DataError(f"`compute_metrics` needs labels for {self.name}, and the set has none.")
        if predictions is None or _nothing_to_score(labels):
            return {self.name: None}
        if self.takes_pair:
            result = self.call(*_true_and_predicted(predictions, labels, argmax=not self.takes_scores))
        else:
            result = self.call(_eval_prediction_class()(predictions=predictions, label_ids=labels, **extra))
        if isinstance(result, Mapping):
            return {str(name): _as_float(str(name), value) for name, value in result.items()}
        if self.name == "<lambda>":
            raise DataError("A lambda in `compute_metrics` has no name for its result. Return {'name': result}.")
        return {self.name: _as_float(self.name, result)}


def _annotate_errors(metric: Any, work: Callable[..., Any], *args: Any) -> Any:
    """Return `work(*args)`; an error in it gets the name of the metric."""
    try:
        return work(*args)
    except Exception as error:
        names = getattr(metric, "name", None) or ", ".join(getattr(metric, "names", None) or ())
        error.add_note(f"Raised by the metric {names} in `compute_metrics`.")
        raise


class ByBatch:
    """A function f(eval_pred, compute_result) as in transformers: it gets one batch after another, as tensors.

    The last call has `compute_result=True`, so each batch is held back until the next one arrives.

    Args:
        function: Keeps its own state between calls, and returns a dict of numbers if `compute_result` is True.
    """

    names: list[str] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.higher_is_better: dict[str, bool] = {}
        self._held: tuple[Any, Any] | None = None

    def reset(self) -> None:
        """Begin a new pass."""
        self._held = None

    def update(self, outputs: Any, labels: Any) -> None:
        """Add one batch, and pass the one before it to the function."""
        if self._held is not None:
            self._call(compute_result=False)
        self._held = (outputs, labels)

    def state(self) -> dict[str, Any]:
        """Return the batch held back."""
        return {"held": self._held}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state()`."""
        self._held = self._held or state["held"]

    def compute(self) -> Mapping[str, float | None]:
        """Return the function's result for the last batch; nothing if there was no batch."""
        if self._held is None:
            return {}
        result, self._held = self._call(compute_result=True), None
        if not isinstance(result, Mapping):
            raise DataError(
                f"`compute_metrics` must return a dict of numbers when called with compute_result=True, got {result!r}."
            )
        return {str(name): _as_float(str(name), value) for name, value in result.items()}

    def _call(self, compute_result: bool) -> Any:
        predictions, labels = self._held or (None, None)
        prediction = _eval_prediction_class()(predictions=predictions, label_ids=labels)
        return self.function(prediction, compute_result=compute_result)


def _eval_prediction_class() -> type:
    """Return transformers' class if transformers is imported: a user's function may check for it."""
    return getattr(sys.modules.get("transformers"), "EvalPrediction", EvalPrediction)


def _nothing_to_score(labels: Any) -> bool:
    if isinstance(labels, (tuple, Mapping)):
        return all(map(_nothing_to_score, labels.values() if isinstance(labels, Mapping) else labels))
    labels = np.asarray(labels)
    return labels.size == 0 or (labels.dtype.kind in "iu" and bool((labels == IGNORED_LABEL).all()))


def _true_and_predicted(predictions: Any, labels: Any, argmax: bool) -> tuple[Any, Any]:
    """Return y_true and y_pred as described in `make_scorer`."""
    true, predicted = labels, main_output(predictions)
    if not isinstance(true, np.ndarray) or not isinstance(predicted, np.ndarray) or true.dtype.kind not in "iub":
        return true, predicted
    is_class = predicted.dtype.kind in "iub"
    dim = None if is_class else class_dimension(predicted.shape, true.shape)
    if dim is not None:
        predicted = predicted.argmax(dim) if argmax else np.moveaxis(predicted, dim, -1)
    same = predicted.shape == true.shape
    # Floats of the labels' shape may be scores for several labels per sample: only -100 shows that they are tokens.
    if true.ndim > 1 and (dim is not None or (same and (is_class or bool((true == IGNORED_LABEL).any())))):
        mask = true != IGNORED_LABEL
        return true[mask], predicted[mask]
    return true, predicted


class _Torchmetrics:
    """A copy of a torchmetrics metric or collection. We exchange its states between processes, not torchmetrics."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric.clone()
        self.name: str = type(metric).__name__
        self._device: torch.device | None = None
        for leaf in parts_of_metric(self._metric):
            leaf.distributed_available_fn = lambda: False
        self.reset()
        self.names = self._result_names()
        if isinstance(self._metric, sys.modules["torchmetrics"].MetricCollection):
            directions = {str(name): leaf.higher_is_better for name, leaf in self._metric.items()}
        else:
            directions = {self.name: self._metric.higher_is_better}
        self.higher_is_better = {name: up for name, up in directions.items() if up is not None}

    def _result_names(self) -> list[str] | None:
        """Return the names of the results of a metric without data, if it gives any."""
        if any(getattr(leaf, "multioutput", None) == "raw_values" for leaf in parts_of_metric(self._metric)):
            return None  # one value for each output column, of a number not known yet
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # many cannot compute without data
            warnings.simplefilter("ignore")
            return list(self._flatten(self._metric.clone().compute())) or None

    def _flatten(self, result: Any) -> dict[str, float]:
        flat: dict[str, float] = {}
        for name, value in (result if isinstance(result, Mapping) else {self.name: result}).items():
            if isinstance(value, torch.Tensor) and value.ndim == 1 and len(value) != 1:
                flat.update({f"{name}_{i}": number for i, number in enumerate(value.tolist())})
            else:
                flat[str(name)] = _as_float(str(name), value)
        return flat

    def reset(self) -> None:
        self._metric.reset()
        self._others: list[Mapping[str, Any]] = []
        self._scored: int | torch.Tensor = 0

    def update(self, outputs: Any, labels: Any) -> None:
        outputs = outputs if isinstance(outputs, SampleList) else main_output(outputs)
        if isinstance(outputs, torch.Tensor):
            outputs = outputs.detach()
            labels = labels.to(outputs.device) if isinstance(labels, torch.Tensor) else labels
        first = next(tensors_in(outputs), None)
        if first is not None and first.device != self._device:
            self._device = first.device
            self._metric.to(self._device)
        self._metric.update(outputs, labels)
        has_ignored = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
        self._scored = self._scored + ((labels != IGNORED_LABEL).sum() if has_ignored else 1)

    def state(self) -> dict[str, Any]:
        leaves = parts_of_metric(self._metric)
        states = [{name: _on_cpu(getattr(leaf, name)) for name in leaf._reductions} for leaf in leaves]
        return {"states": states, "counts": [leaf.update_count for leaf in leaves], "scored": int(self._scored)}

    def merge(self, state: Mapping[str, Any]) -> None:
        self._others.append(state)

    def compute(self) -> Mapping[str, float | None]:
        if not int(self._scored) and not any(other["scored"] for other in self._others):
            return dict.fromkeys(self.names or [self.name])
        return self._flatten((self._merged() if self._others else self._metric).compute())

    def _merged(self) -> Any:
        """Return a copy with the states of all processes, reduced as torchmetrics does over ranks."""
        joined = self._metric.clone().cpu()
        everyone = [self.state(), *self._others]
        for i, leaf in enumerate(parts_of_metric(joined)):
            # Leave out a process without data: its zeros would change a mean or a minimum.
            states = [each["states"][i] for each in everyone if each["counts"][i]]
            if not states:
                continue
            for name, reduce in leaf._reductions.items():
                values = [state[name] for state in states]
                value = [x for xs in values for x in xs] if isinstance(values[0], list) else torch.stack(values)
                setattr(leaf, name, reduce(value) if reduce is not None and len(value) else value)
            leaf._computed, leaf._update_count = None, sum(each["counts"][i] for each in everyone)
        return joined


def _on_cpu(state: Any) -> Any:
    return [x.detach().cpu() for x in state] if isinstance(state, list) else state.detach().cpu()
