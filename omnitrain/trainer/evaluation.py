"""Evaluation and prediction with exact means and bounded memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import default_convert

from omnitrain.checkpoint.eval_weights import EvalWeights
from omnitrain.compute.precision import free_memory, is_out_of_memory
from omnitrain.core.display import Table
from omnitrain.core.errors import ConfigError, DataError, ObjectiveError, OmnitrainError
from omnitrain.core.events import Event
from omnitrain.core.metric_format import format_metric
from omnitrain.core.objective import Objective
from omnitrain.data.collation import IGNORED_LABEL, LABEL_KEYS, count_samples, tensors_in
from omnitrain.data.loaders import Loader, by_name
from omnitrain.data.stateful import preserve_state
from omnitrain.distributed.ranks import Ranks
from omnitrain.metrics.scorer import SampleList, Scorer, make_scorer, per_sample, scores_for, to_numpy
from omnitrain.model.losses import LossMean
from omnitrain.model.multitask import MultiTaskUnit
from omnitrain.model.units import ModelUnit, StepOutput, count_as_sum, run_unit
from omnitrain.trainer.failing_samples import add_device_remedy, add_dtype_remedy, describe_failing_samples
from omnitrain.trainer.feed import Feed
from omnitrain.trainer.hooks import Hooks
from omnitrain.trainer.lifecycle import Lifecycle, is_callback_error
from omnitrain.trainer.loss_probe import ask_loss
from omnitrain.trainer.meters import Meters, means_of

logger: logging.Logger = logging.getLogger("omnitrain")

# Seconds after which the first evaluation of data of unknown length is warned of, and again after twice as many.
_LONG_S = 5.0


class Inconclusive(Exception):
    """A metric failed on the first batch of a set but may work on all of it, such as a ranking of one class."""


Scores = TypeVar("Scores")


class Predictions(NamedTuple):
    """The result of `predict`.

    Attributes:
        predictions: Array (or tuple of arrays) of shape (samples, ...), in the dataset's order; ragged dimensions are
            padded with -100.
        labels: The labels in the same form, or None if the dataset has none.
        metrics: `test_loss` and the metrics; empty without labels.
    """

    predictions: Any
    labels: Any
    metrics: dict[str, float]

    @property
    def label_ids(self) -> Any:
        """The labels, by their name in transformers."""
        return self.labels

    def _repr_html_(self) -> str:
        """Show shapes, metrics and the first samples in notebooks."""
        columns = _columns("predictions", self.predictions) | _columns("labels", self.labels)
        above = [f"{name}: {column.dtype} {column.shape}" for name, column in columns.items()]
        size = min([_SHOWN_ROWS, *map(len, columns.values())]) if columns else 0
        rows = [[str(row), *(_format_entry(column[row]) for column in columns.values())] for row in range(size)]
        below = [format_metric(name, value) for name, value in self.metrics.items()]
        return Table(["sample", *columns], rows, above=above, below=below).to_html()


_SHOWN_ROWS = 10


def _columns(name: str, values: Any) -> dict[str, np.ndarray]:
    """Return the arrays of outputs or labels by name."""
    if isinstance(values, (tuple, Mapping)):
        entries = values.items() if isinstance(values, Mapping) else enumerate(values)
        return {
            key: column for entry, value in entries for key, column in _columns(f"{name}[{entry!r}]", value).items()
        }
    if isinstance(values, list):  # an object for each sample
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return {name: column}
    return {name: values} if getattr(values, "ndim", 0) else {}


def _format_entry(entry: Any) -> str:
    if isinstance(entry, np.ndarray):
        entry = np.array2string(entry, precision=4, threshold=8, separator=", ", max_line_width=1000)
    return " ".join(str(entry).split())[:80]


def metric_direction(metric: str, scorer: Scorer, loaders: Any) -> bool | None:
    """Return whether higher is better according to the metric object itself; None if it does not say.

    If evaluation sets have names, that of the metric begins with one of them.
    """
    bare = metric.removeprefix("eval_")
    for name, loader in by_name(loaders).items():
        prefix = f"{name}_" if isinstance(loaders, Mapping) else ""
        rules = loader.rules
        set_scorer = scorer if rules is None or not rules.has_own_metrics else make_scorer(rules.metrics)
        if bare.startswith(prefix) and bare.removeprefix(prefix) in set_scorer.higher_is_better:
            return set_scorer.higher_is_better[bare.removeprefix(prefix)]
    return scorer.higher_is_better.get(bare)


class Evaluation:
    """Runs the model over a dataset, for losses, metrics and predictions."""

    filler: int = IGNORED_LABEL
    """The value that pads predictions of different lengths to one array."""

    def __init__(
        self, trainer: Hooks, feed: Feed, scorer: Scorer, eval_weights: EvalWeights, lifecycle: Lifecycle
    ) -> None:
        self.trainer = trainer
        self.feed = feed
        self.eval_weights = eval_weights
        self.lifecycle = lifecycle
        self.scorer: Scorer = scorer
        self.left_out: frozenset[str] = frozenset()
        """The named sets that this evaluation leaves out."""
        self.weight: float | None = None
        """The weight of the batch that is run, which was counted on the host; None if it is unknown."""
        self.is_interrupted: Callable[[int], bool] = lambda number: False
        """Called before each batch, with its number; True ends the evaluation."""
        # The scorers of sets with their own metrics, by the `id` of their rules.
        self._scorers: dict[int, Scorer] = {}
        self._has_checked_perplexity = False
        # The most rows to run at a time, once memory has run out under `microbatch_size="auto"`.
        self._max_rows: int | None = None
        # The unit of the set being evaluated, if it has its own.
        self._unit: Any = None

    def scorer_of(self, loader: Loader) -> Scorer:
        """Return the scorer for a loader, with the trainer's metrics or those of an `EvalSet`."""
        rules, settings, model = loader.rules, self.trainer.settings, self.trainer.backend.model
        if rules is None or not rules.has_own_metrics:
            return self.scorer
        if id(rules) not in self._scorers:
            scores = scores_for(settings.loss_fn, model)
            self._scorers[id(rules)] = make_scorer(rules.metrics, scores, settings.processing_class)
        return self._scorers[id(rules)]

    def check(self, objective: Objective, loaders: Any) -> None:
        """Raise ObjectiveError if the metric to optimize will be missing from some evaluations, or from all."""
        metric = objective.metric.removeprefix("eval_")
        for name, loader in by_name(loaders).items():
            if loader.rules is not None and loader.rules.every is not None and metric.startswith(f"{name}_"):
                raise ObjectiveError(
                    f"`optimization_metric={objective.metric!r}` is of the set {name!r}, which is evaluated at "
                    f"its own intervals (every={str(loader.rules.every)!r}). Leave `every` out, or choose another "
                    "set."
                )
        names = self.names_of(loaders)
        if names is not None:
            objective.check(names)

    def names_of(self, loader: Any) -> list[str] | None:
        """Return the names of all results of a loader, or of a dict of them, without a prefix; None if unknown."""
        if not isinstance(loader, Mapping):
            names = self.scorer_of(loader).names
            return None if names is None else ["loss", *names]
        prefixed, counted = list[str](), list[list[str]]()
        for name, set_loader in loader.items():
            names = self.names_of(set_loader)
            if names is None:
                return None
            prefixed += [f"{name}_{metric}" for metric in names]
            counted += [names] if _counts(set_loader) else []
        return [*(metric for metric in counted[0] if all(metric in metrics for metrics in counted)), *prefixed]

    def evaluate(self, loader: Any, prefix: str, only_first: bool = False) -> dict[str, float] | None:
        """Return `<prefix>_loss` and the metrics of a loader or a dict of loaders; None if a signal interrupted it.

        Named sets give `<prefix>_<name>_loss` and so on; `<prefix>_loss`, and what else all of them have, is the mean
        over the sets. The loss of a task has its weight only in `<prefix>_loss`. Values that the forward pass
        returns, such as the parts of a loss, are averaged as the loss is, unless a metric has the same name.

        Args:
            loader: The loader, or loaders by name.
            prefix: The prefix of the names of the results.
            only_first: Whether to evaluate only the first batch of each set.

        Raises:
            Inconclusive: The first batch cannot be scored, but perhaps the full set can.
        """
        has_names, named_metrics = isinstance(loader, Mapping), dict[str, float]()
        counted: list[tuple[float, dict[str, float]]] = []
        for name, set_loader in by_name(loader).items():
            if name in self.left_out:
                continue
            result = self._run(set_loader, only_first=only_first)
            if result is None:
                return None
            if has_names:
                named_metrics |= {f"{prefix}_{name}_{key}": value for key, value in result.metrics.items()}
            if not has_names or _counts(set_loader):
                metrics = self._as_trained(result.metrics, set_loader)
                counted.append((1.0 if set_loader.rules is None else set_loader.rules.weight, metrics))
        means = _means(counted) if has_names else counted[0][1]
        # the means over sets come first in each row, since most readers look for `eval_loss`
        return {**{f"{prefix}_{name}": value for name, value in means.items()}, **named_metrics}

    def _as_trained(self, metrics: Mapping[str, float], loader: Loader) -> dict[str, float]:
        """Return the metrics of a set with its loss as it is trained on: that of a task times its weight."""
        unit = getattr(loader.rules, "unit", None) or self.trainer.unit
        tasks = getattr(getattr(loader, "dataset", None), "tasks", None)
        if "loss" not in metrics or not isinstance(unit, MultiTaskUnit) or not isinstance(tasks, dict):
            return dict(metrics)
        (weight, *other_weights) = (unit.weights.get(name, 1.0) for name in tasks)
        return {**metrics, "loss": metrics["loss"] * (1.0 if other_weights else weight)}

    def rehearse_batches(self, loader: Loader) -> list[Any]:
        """Run the first batch of a loader, and the last one if it can be reached at once; return both."""
        rehearsed = list[Any]()
        with self._evaluating(loader), loader.preserve_state():
            for batches in (self.feed.lockstep_batches(loader, only_first=True), loader.last_batch()):
                for number, (batch, _) in enumerate(batches):
                    rehearsed.append(batch)
                    if self._may_halve:
                        list(self._run_in_parts(batch, batch, loader, number))
                    else:
                        self._run_batch(batch, loader, number)
        return rehearsed

    @contextlib.contextmanager
    def _evaluating(self, loader: Loader) -> Iterator[None]:
        """Enter the state in which a set is evaluated, by its own metrics and unit; it is restored afterwards."""
        trainer, before = self.trainer, (self.scorer, self._unit)
        trainer.backend.sync_buffers()
        self.scorer, self._unit = self.scorer_of(loader), getattr(loader.rules, "unit", None)
        try:
            with (
                self.eval_weights.swapped_in(),
                trainer.backend.eval_mode(trainer.settings.seed),
                trainer.ranks.in_phase("evaluation"),
                preserve_state(self.feed.stateful_data),
            ):
                yield
        finally:
            (self.scorer, self._unit), self.weight = before, None

    def predict(self, loader: Loader) -> Predictions | None:
        """Return the predictions for every sample of a loader, in its order; None if a signal interrupted it."""
        result = self._run(loader, keeps_all=True, needs_loss=False)
        if result is None:
            return None
        metrics = {f"test_{key}": value for key, value in self._as_trained(result.metrics, loader).items()}
        arrays = self.trainer.ranks.on_main("the predictions of all samples", lambda: result[:2])
        return Predictions(*arrays, metrics)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Enter the state of an evaluation for other work: its weights and modes, in autocast.

        Weights, modes and random numbers are restored afterwards.
        """
        with (
            self.eval_weights.swapped_in(),
            self.trainer.backend.eval_mode(self.trainer.settings.seed),
            self.trainer._autocast(),
        ):
            yield

    def outside_run(self) -> AbstractContextManager[Any]:
        """Return the context for an evaluation outside the run."""
        return contextlib.nullcontext()

    def output_of(self, batch: Any) -> StepOutput:
        """Return the model's output for a batch on the device, in the form for metrics."""
        output, preprocess = self.forward(batch), self.trainer.settings.preprocess_logits_for_metrics
        if preprocess is not None:
            output.outputs = preprocess(output.outputs, output.labels)
        return output

    def forward(self, batch: Any) -> StepOutput:
        """Return the model's output for a batch on the device."""
        run = self.trainer._forward if self._unit is None else functools.partial(run_unit, self._unit)
        return self.trainer.backend.forward(run, batch)

    def _run(
        self, loader: Loader, keeps_all: bool = False, needs_loss: bool = True, only_first: bool = False
    ) -> Predictions | None:
        """Run the model over a loader, by the rules of its set. Losses and streaming metrics are summed on the device.

        With `keeps_all`, outputs and labels are kept as arrays even if no metric needs them. With `needs_loss`, a loss
        is required, and something to score if metrics are asked for.
        """
        trainer, ranks, device = self.trainer, self.trainer.ranks, self.trainer.device
        # on the device, read once at the end; Apple's devices have no float64
        total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        weights, has_labels, lacks_loss, number, batch, output = 0.0, False, False, -1, None, StepOutput(None)
        meters, arrays = Meters(device), list[tuple[Any, ...]]()
        batches = self.feed.lockstep_batches(loader, only_first)
        # only data of unknown length can be without end
        batches = batches if loader.size is not None or only_first else _warned_if_long(batches, loader, ranks.is_main)
        with self._evaluating(loader):
            scorer, keeps_arrays = self.scorer, keeps_all
            if not scorer.is_empty:
                scorer.reset()
                keeps_arrays |= scorer.keeps_predictions
            weigh = trainer._weigh if self._unit is None else self.feed.rows_of
            may_halve = self._may_halve
            for number, ((batch, samples), (ready, _)) in enumerate(self.feed.copied(batches)):
                ranks.progress_count += 1
                if self.is_interrupted(number):
                    return None
                if needs_loss and not number and self._unit is None and not trainer.loss_mean.is_checked:
                    ask_loss(trainer, [batch], is_final=False)
                counts = samples > 0  # otherwise it is a dummy batch
                # 0 stands for a dummy batch here, and None for an unknown number
                self.feed.samples = samples or None
                parts = list[tuple[Any, ...]]()
                if may_halve:
                    runs = self._run_in_parts(batch, ready, loader, number, weigh)
                else:
                    self.weight = weight = weigh(batch)
                    runs = [(batch, weight, self._run_batch(ready, loader, number))]
                for part, weight, output in runs:
                    counted = 0.0
                    if trainer.settings.grad_reduction == "sum":
                        count_as_sum(output, weight)
                    if counts:
                        counted = self._add_loss(total, output, weight, part if needs_loss else None)
                        lacks_loss |= output.loss is None
                        weights += counted
                        if not needs_loss and loader.counts_samples:
                            _check_rows(output.outputs, samples if part is batch else self.feed.rows_of(part))
                    if output.metrics is not None:
                        meters.add(output.metrics, counted)
                    pair = self._scored_pair(output) if counts and not scorer.is_empty else None
                    if scorer.requires_global_batches and ranks.world_size > 1:
                        # a collective, which ranks without a batch of their own call as well
                        pair = self._gather_batches(loader, pair)
                    if pair is not None:
                        has_labels = True
                        _scored(loader, scorer.update, *pair)
                    if keeps_arrays and counts:
                        parts.append(tuple(map(to_numpy, (output.outputs, output.labels, output.extra))))
                if parts:  # one entry for each batch, which the ranks have in turns
                    arrays.append(parts[0] if len(parts) == 1 else self._join_parts(parts))
            if self.is_interrupted(0):
                return None
            # inside the context, since a metric may draw random numbers too
            local_sums = total.item(), weights, has_labels, lacks_loss, number >= 0, meters.sums()
            loss, weights, has_labels, lacks_loss, has_batches, means = ranks.combine(
                "the end of an evaluation", local_sums, functools.partial(_totals, ranks)
            )
            has_states = ranks.world_size > 1 and not scorer.is_empty  # they may hold all predictions
            gathered = ranks.gather_on_main("the states of metrics", [scorer.states()]) if has_states else []
            predictions, labels, extra = self._arrays(loader, arrays) if keeps_arrays else (None, None, None)
            if needs_loss:
                if bool(weights) == lacks_loss:  # not all of the batches have a loss, or none of the labels counts
                    error = _mean_error(loader.name, weights, has_batches)
                    if only_first and has_batches:
                        raise Inconclusive from error
                    raise error
                if not has_labels and not scorer.is_empty:
                    raise self._nothing_to_score(loader.name, batch, output)
            scores = dict(means) if weights else {}
            if has_labels:
                scores |= self._compute(
                    loader, list(ranks.one_per_share(gathered))[1:], (predictions, labels, extra), only_first
                )
            metrics = _with_loss(scores, loss / weights) if weights else scores
        if not only_first and metrics.keys() >= {"loss", "perplexity"}:
            self._check_perplexity(metrics["perplexity"], metrics["loss"])
        return Predictions(predictions, labels, metrics)

    def _check_perplexity(self, perplexity: float, loss: float) -> None:
        """Warn once about a perplexity that is not the exponential of the loss."""
        is_known = perplexity and math.isfinite(perplexity + loss)
        if self._has_checked_perplexity or not self.trainer.ranks.is_main or not is_known:
            return
        self._has_checked_perplexity = True
        if not math.isclose(math.log(perplexity), loss, rel_tol=1e-2, abs_tol=1e-2):
            logger.warning(
                "The perplexity is %.5g, and exp(loss) is %.5g. Either the loss has other parts than the cross entropy "
                "(smoothed labels, a router), or the metric compares other scores and labels than the loss: a loss or "
                "a unit that shifts labels says so by an attribute `shift = True`.",
                perplexity, math.exp(min(loss, 700.0)),
            )  # fmt: skip

    def _run_in_parts(
        self,
        batch: Any,
        ready: Any,
        loader: Loader,
        number: int,
        weigh: Callable[[Any], float] = lambda batch: 0.0,
    ) -> Iterator[tuple[Any, float, StepOutput]]:
        """Yield the parts of a batch with their weights and outputs.

        It is one part, unless memory has run out under `microbatch_size="auto"`.

        The rows that fit once are kept for the batches after it. `ready` is the batch, perhaps on the device already.
        """
        split = self.feed.splitter_of(loader)
        parts = [batch] if self._max_rows is None else split(batch, self._max_rows)
        while parts:
            part = parts.pop(0)
            if part is not batch:
                self.feed.samples = self.feed.samples and count_samples(part)
            try:
                weight = weigh(part)  # before the model can change it
                output = self._run_batch(ready if part is batch else part, loader, number)
            except RuntimeError as error:
                if not is_out_of_memory(error) or count_samples(part) == 1:
                    raise
                rows = count_samples(part)
            else:
                yield part, weight, output
                continue
            # out here the error is gone, and with it what it kept alive
            free_memory()
            self._max_rows = (rows + 1) // 2
            logger.warning(
                "An evaluation has run out of memory with %d rows. From here on evaluations take %d at most at a time. "
                "Pass eval_batch_size=%d to begin with that.", rows, self._max_rows, self._max_rows,
            )  # fmt: skip
            parts = [piece for rest in (part, *parts) for piece in split(rest, self._max_rows)]

    @property
    def _may_halve(self) -> bool:
        """Whether a batch without memory is run again in parts; it must not be a turn of other ranks, too."""
        if self.trainer.settings.microbatch_size != "auto":
            return False
        is_collective = self.trainer.backend.forward_is_collective or self.scorer.requires_global_batches
        return self.trainer.ranks.world_size == 1 or not is_collective

    def _join_parts(self, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the outputs, labels and extra inputs of the parts of a batch as those of the batch."""
        outputs, labels, extra = zip(*parts, strict=True)
        return _join(outputs, lambda: self.filler), _join(labels), _join(extra)

    def _run_batch(self, batch: Any, loader: Loader, number: int) -> StepOutput:
        """Return the loss and outputs of a batch; an error names its samples."""
        emit = self.lifecycle.emit_in_evaluation
        try:
            batch = self.trainer._prepare_batch(batch)
            if emit is not None:
                emit(Event.EVAL_BATCH_START, batch)
            with self.trainer._autocast():
                output = self.output_of(batch)
            if isinstance(output.outputs, list):  # a tuple is one of several outputs
                output.outputs = per_sample(output.outputs, self.feed.samples)
            if isinstance(output.labels, (list, tuple)):
                output.labels = per_sample(output.labels, self.feed.samples)
            if emit is not None:
                emit(Event.EVAL_BATCH_END, batch, output)
            return output
        except Exception as error:
            self.weight = None  # its samples are run one by one
            if is_callback_error(error):
                raise
            add_dtype_remedy(error, self.trainer.backend.model, batch)
            samples = describe_failing_samples(error, self.trainer, loader, (0, 0, number), self.output_of)
            error.add_note(f"Raised for {samples or f'batch {number} of {loader.name}, from 0 on'}.")
            add_device_remedy(error)
            raise

    def _arrays(self, loader: Loader, batches: list[Any]) -> tuple[Any, Any, Any]:
        """Return outputs, labels and extra inputs of all samples as arrays, on the main rank; `kept` is emptied."""
        if self.trainer.ranks.world_size > 1:
            batches += self._gather_in_order("the predictions of an evaluation", loader, batches)
        predictions = _join([batch for batch, *_ in batches], lambda: self.filler)
        labels, extra = (_join([batch[i] for batch in batches]) for i in (1, 2))
        batches.clear()
        return predictions, labels, extra

    def _compute(
        self, loader: Loader, states: list[Any], arrays: tuple[Any, Any, Any], only_first: bool
    ) -> dict[str, float]:
        """Return the metrics, computed on the main rank, which has the states of the others."""
        ranks, scorer = self.trainer.ranks, self.scorer

        def compute(*arrays: Any) -> dict[str, float]:
            for (of_rank,) in states:
                scorer.merge(of_rank)
            states.clear()
            return scorer.compute(*arrays)

        try:
            with ranks.in_phase("metrics"):
                return ranks.on_main("the metrics of an evaluation", lambda: _scored(loader, compute, *arrays))
        except OmnitrainError:  # our own errors do not depend on the number of batches
            raise
        except Exception as error:
            if only_first:
                raise Inconclusive from error
            raise

    def _add_loss(self, total: torch.Tensor, output: StepOutput, weight: float, batch: Any) -> float:
        """Add the loss of a batch to `total`, on the device, and return its weight there; `batch` must have a loss."""
        if output.loss is None:
            if batch is not None and not self._is_scored(output):
                raise self._missing_loss(output, batch)
            return 0.0
        if output.num_targets is not None:
            total.add_(output.loss)
            return float(output.num_targets)
        if weight:
            total.add_(output.loss, alpha=weight)
        return weight

    def _is_scored(self, output: StepOutput) -> bool:
        """Return whether a batch without a loss has what metrics need, where that is no oversight.

        That is so for a unit that gives no loss, and for objects for each sample, such as boxes.
        """
        unit = self.trainer.unit if self._unit is None else self._unit
        is_meant = isinstance(output.outputs, SampleList) or not isinstance(unit, ModelUnit)
        has_both = output.outputs is not None and output.labels is not None
        return is_meant and has_both and not self.scorer.is_empty

    def _missing_loss(self, output: StepOutput, batch: Any) -> DataError:
        """Return the error for a batch without a loss; the default unit gives the one that training would raise."""
        unit = self.trainer.unit if self._unit is None else self._unit
        if isinstance(unit, ModelUnit) and output._returned is not None:
            return unit.missing_loss(output._returned, batch)
        return DataError(
            "The evaluation needs a loss, and a batch has none: return it from the unit's evaluate(), from "
            "`compute_loss` or from `_forward`. Data without labels are for `predict`."
        )

    def _nothing_to_score(self, set_name: str, batch: Any, output: StepOutput) -> DataError:
        """Return the error for a set whose batches had nothing for the metrics; `batch` is the last."""
        begin = f"`compute_metrics` has nothing to score in {set_name}: "
        if output.outputs is None and output.loss is not None:
            return DataError(
                f"{begin}a batch gives only a loss. Return outputs with the loss from the model, or give the unit "
                "a method evaluate(batch) that returns StepOutput(loss, outputs, labels)."
            )
        keys = list(batch) if isinstance(batch, Mapping) else []
        reason = f"its batches have the keys {', '.join(map(repr, keys))}" if keys else "its batches have no labels"
        usual = ", ".join(map(repr, self.trainer.settings.label_names or LABEL_KEYS))
        return DataError(
            f"{begin}{reason}, and labels are looked for under {usual}. Name the keys of the labels, as in "
            f"label_names={keys[-1:]!r}, or evaluate without metrics."
        )

    def _scored_pair(self, output: StepOutput) -> tuple[Any, Any] | None:
        """Return the outputs and labels of a batch for streaming metrics, if it has both."""
        if output.labels is None or output.outputs is None:
            return None
        if self.scorer.requires_global_batches:  # a metric function for transformers, which shifts labels itself
            return output.outputs, output.labels
        has_classes = self.trainer.settings.preprocess_logits_for_metrics is not None
        mean = output._loss_mean
        if mean is None:
            mean = self.trainer.loss_mean if self._unit is None else LossMean.of(self._unit, self.trainer.backend.model)
        return mean.compared(output.outputs, output.labels, has_classes)

    def _gather_batches(self, loader: Loader, pair: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
        """Return the batches of all ranks on the main one, in the order of the data, on the host; None on others."""
        batches = [] if pair is None else [to_numpy(pair)]
        parts = self._gather_in_order("a batch of an evaluation", loader, batches)
        if not parts:
            return None
        predictions, labels = zip(*parts, strict=True)
        return default_convert(_join(predictions, lambda: self.filler)), default_convert(_join(labels))

    def _gather_in_order(self, what: str, loader: Loader, batches: list[Any]) -> list[Any]:
        """Return the batches of all ranks, or their rows, on the main rank in the order of the data; empties `batches`.

        They were dealt to the ranks in turns.
        """
        ranks = self.trainer.ranks
        local = [row for batch in batches for row in _rows(batch)] if loader.shards_samples else list(batches)
        batches.clear()
        shares = ranks.gather_on_main(what, local if ranks.data.counts else [])
        return [batch for turn in itertools.zip_longest(*shares) for batch in turn if batch is not None]


def _totals(
    ranks: Ranks, of_ranks: list[tuple[float, float, bool, bool, bool, Any]]
) -> tuple[float, float, bool, bool, bool, dict[str, float]]:
    """Return what the ranks have together: loss, weight, whether there were labels, no losses, batches; the means."""
    # ranks of one tensor-parallel group have the same samples: one of them counts
    losses, weights, labels, lacking, batches, sums = zip(*ranks.one_per_share(of_ranks), strict=True)
    # exact, so that the sum does not depend on the order, and so on the number, of ranks
    return math.fsum(losses), math.fsum(weights), any(labels), any(lacking), any(batches), means_of(sums)


def _counts(loader: Loader) -> bool:
    """Return whether a named set counts in the means over the sets."""
    return loader.rules is None or loader.rules.counts


def _means(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted mean of each metric that all sets have, given as (weight, metrics)."""
    total = sum(weight for weight, _ in parts)
    common = [name for name in parts[0][1] if all(name in metrics for _, metrics in parts)]
    return {name: sum(weight * metrics[name] for weight, metrics in parts) / total for name in common}


def _warned_if_long(batches: Iterable[Any], loader: Loader, is_main: bool) -> Iterator[Any]:
    """Yield the batches of data of unknown length; warn if they may have no end, until they have had one once."""
    begin, limit = time.monotonic(), _LONG_S
    for number, batch in enumerate(batches, 1):
        yield batch
        if is_main and not loader.has_ended and (passed := time.monotonic() - begin) > limit:
            limit = 2 * passed
            logger.warning(
                "The evaluation of %s has taken %d batches and %d seconds, and its length is unknown. If it has no "
                "end, neither has the evaluation: pass EvalSet(data, subset=1000), which takes the first 1000 samples.",
                loader.name, number, passed,
            )  # fmt: skip
    loader.has_ended = True


def _mean_error(name: str, weights: float, has_batches: bool) -> DataError:
    """Return the error of a set without a mean loss."""
    title = f"{name[0].upper()}{name[1:]}"
    if weights:
        return DataError(f"Some batches of {name} have a loss, and others none. Give all of them one.")
    if not has_batches:
        return DataError(f"{title} has no samples. Give it at least one.")
    return DataError(
        f"{title} has nothing to evaluate: none of its labels counts (integer labels of {IGNORED_LABEL} are left out). "
        "Give it at least one label."
    )


def _scored(loader: Loader, score: Callable[..., Scores], *arrays: Any) -> Scores:
    """Return the scores of the data of a loader; an error names the loader."""
    try:
        return score(*arrays)
    except Exception as error:
        error.add_note(f"It was to score {loader.name}.")
        raise


def _with_loss(scores: Mapping[str, float], loss: float) -> dict[str, float]:
    if not {"loss", "eval_loss"}.isdisjoint(scores):
        raise ConfigError(
            "A metric is called 'loss', as is the loss of the evaluation, by which the best checkpoint is chosen. Give "
            "it another name in what `compute_metrics`, or the unit's StepOutput(metrics=...), returns."
        )
    return {"loss": loss, **scores}


def _check_rows(outputs: Any, samples: int) -> None:
    if isinstance(outputs, SampleList):
        return
    rows = [len(tensor) for tensor in tensors_in(outputs) if tensor.ndim]
    if rows and samples not in rows:
        raise DataError(
            f"`predict` returns one row a sample, but the model returned {rows[0]} rows for {samples} samples. Use a "
            "`data_collator` that makes one row of each sample, and a model that keeps them; `evaluate` takes any."
        )


def _rows(batch: Any) -> list[Any]:
    """Return the samples of a batch of arrays, each as a batch of one."""
    if isinstance(batch, Mapping):
        return [dict(zip(batch, row, strict=True)) for row in _rows(tuple(batch.values()))]
    if isinstance(batch, tuple):
        columns = [None if array is None else _rows(array) for array in batch]
        size = max(len(column) for column in columns if column is not None)
        return list(zip(*([None] * size if column is None else column for column in columns), strict=True))
    return [batch[i : i + 1] for i in range(len(batch))]


def _join(parts: Sequence[Any], filler: Callable[[], int] = lambda: IGNORED_LABEL) -> Any:
    """Concatenate the batches' arrays along the first dimension, padding the others to a common shape."""
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple(_join(list(column), filler) for column in zip(*parts, strict=True))
    if isinstance(first, dict):
        return {key: _join([part[key] for part in parts], filler) for key in first}
    if not isinstance(first, np.ndarray):
        return [entry for part in parts for entry in (part if isinstance(part, list) else [part])]
    if first.ndim == 0:
        raise DataError("Predictions must have the samples as their first dimension, got a scalar per batch.")
    shape = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    if all(part.shape[1:] == shape for part in parts):
        return np.concatenate(parts)
    joined = np.full((sum(len(part) for part in parts), *shape), filler(), dtype=first.dtype)
    row = 0
    for part in parts:
        joined[(slice(row, row + len(part)), *(slice(size) for size in part.shape[1:]))] = part
        row += len(part)
    return joined
