"""Evaluation and prediction, once for all trainers: exact means, bounded memory, and no trace left in the training."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_convert

from omnitrain.data.collation import IGNORED_LABEL
from omnitrain.errors import DataError
from omnitrain.data.loaders import Loader
from omnitrain.reproducibility import isolated_rng
from omnitrain.data.sampling import StandIn
from omnitrain.scoring import Scorer
from omnitrain.units import StepOutput

if TYPE_CHECKING:
    from omnitrain.trainers.base import BaseTrainer

__all__ = ["Predictions", "evaluate", "evaluating", "is_named_sets", "predict"]


class Predictions(NamedTuple):
    """What `predict` returns.

    Attributes:
        predictions: Array (or tuple of arrays) of shape (samples, ...), in the dataset's order; ragged dimensions are
            padded with -100.
        labels: The same for the labels, or None where the dataset has none.
        metrics: `test_loss` and the metrics where there are labels, else empty.
    """

    predictions: Any
    labels: Any
    metrics: dict[str, float]


def is_named_sets(dataset: Any) -> bool:
    """Return whether this is a dict of named sets, not a dict of tensors that are one set."""
    return type(dataset) is dict and not all(isinstance(value, torch.Tensor) for value in dataset.values())


@contextlib.contextmanager
def evaluating(trainer: BaseTrainer | Any) -> Iterator[None]:
    """Put the model into evaluation mode without gradients; modes and random numbers are as before afterwards.

    Random numbers inside start from the seed every time, so that an evaluation done again gives the same.
    """
    training = [module for module in trainer.model.modules() if module.training]
    trainer.model.eval()
    try:
        # no_grad, not inference_mode: what a model caches inside must be usable in training afterwards
        with isolated_rng(trainer.device, seed=trainer.seed), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        trainer._leave_evaluation()


def evaluate(trainer: BaseTrainer | Any, loader: Any, prefix: str) -> dict[str, float] | None:
    """Return `<prefix>_loss` and the metrics of a loader, or of a dict of them; None if a signal cut it short.

    Named sets give `<prefix>_<name>_loss` and so on, and `<prefix>_loss` is the mean of their losses.
    """
    if not isinstance(loader, Mapping):
        result = _run(trainer, loader, trainer.scorer, keeps=trainer.scorer.keeps_predictions)
        return None if result is None else {f"{prefix}_{key}": value for key, value in result.metrics.items()}
    named: dict[str, float] = {}
    for name, one in loader.items():
        metrics = evaluate(trainer, one, f"{prefix}_{name}")
        if metrics is None:
            return None
        named |= metrics
    losses = [named[f"{prefix}_{name}_loss"] for name in loader]
    return {f"{prefix}_loss": sum(losses) / len(losses), **named}


def predict(trainer: BaseTrainer | Any, loader: Loader) -> Predictions:
    """Return the predictions for every sample of a loader, in its order."""
    result = _run(trainer, loader, trainer.scorer, keeps=True, needs_loss=False)
    if result is None:
        raise KeyboardInterrupt("The prediction was cut short by a signal.")
    metrics = {f"test_{key}": value for key, value in result.metrics.items()}
    return Predictions(result.predictions, result.labels, metrics)


def _run(trainer: Any, loader: Loader, scorer: Scorer, keeps: bool, needs_loss: bool = True) -> Predictions | None:
    """Run the model over a loader. Losses and streaming metrics are summed on the device; arrays are kept on demand."""
    scorer.reset()
    ranks = trainer.ranks
    total = torch.zeros(
        (), dtype=torch.float32 if trainer.device.type == "mps" else torch.float64, device=trainer.device
    )
    weights, has_labels = 0.0, False
    kept: list[tuple[Any, ...]] = []
    with evaluating(trainer):
        for number, batch in enumerate(trainer._in_step(loader)):
            if trainer._is_interrupted(number):
                return None
            counts = type(batch) is not StandIn
            batch = batch if counts else batch.batch
            weight = trainer._weigh(batch)
            batch = trainer._prepare_batch(batch)
            with trainer._autocast():
                output = trainer._forward(trainer.model, batch)
            if counts:
                weights += _add_loss(total, output, weight, needs_loss)
            seen = _seen(trainer, output) if counts else None
            if scorer.takes_whole_batches and ranks.world_size > 1:
                seen = _whole(trainer, loader, seen)
            if seen is not None:
                has_labels = True
                scorer.update(*seen)
            if keeps and counts:
                kept.append(tuple(map(_to_numpy, (output.outputs, output.labels, output.extra))))
        if trainer._is_interrupted(0):
            return None
        # inside, since a metric may draw random numbers too
        states = scorer.states() if ranks.world_size > 1 else []
        sums = ranks.gather("the end of an evaluation", (total.item(), weights, has_labels, states))
        if ranks.world_size > 1:
            scorer.reset()
            for *_, states in sums:
                scorer.merge(states)
            if keeps:
                kept = [row for batch in kept for row in _rows(batch)] if loader.deals_samples else kept
                kept = _in_order(ranks.gather("the predictions of an evaluation", kept))
        predictions = _join([one for one, *_ in kept], lambda: trainer._filler) if keeps else None
        labels, extra = (_join([one[i] for one in kept]) if keeps else None for i in (1, 2))
        loss, weights = (math.fsum(one[i] for one in sums) for i in (0, 1))
        metrics = {"loss": loss / weights} if weights else {"loss": math.nan} if needs_loss else {}
        if any(one[2] for one in sums):
            metrics |= ranks.on_main("the metrics of an evaluation", lambda: scorer.compute(predictions, labels, extra))
    return Predictions(predictions, labels, metrics)


def _add_loss(total: torch.Tensor, output: StepOutput, weight: float, needs_loss: bool) -> float:
    """Add a batch's loss to `total`, on the device, and return how much it weighs there."""
    if output.loss is None:
        if needs_loss:
            raise DataError(
                "The evaluation batch gives no loss: neither the model's output nor `loss_fn` with its labels. "
                "Give the dataset labels, or use `predict`."
            )
        return 0.0
    if output.num_targets is not None:
        total.add_(output.loss)
        return int(output.num_targets)
    if weight:
        total.add_(output.loss, alpha=weight)
    return weight


def _seen(trainer: Any, output: StepOutput) -> tuple[Any, Any] | None:
    """Return the outputs and labels of a batch as metrics that stream are to see them, if it has both."""
    if output.labels is None or output.outputs is None:
        return None
    if trainer.scorer.takes_whole_batches:  # a function of transformers' kind, which shifts for itself
        return output.outputs, output.labels
    return _aligned(output, trainer._shifts_labels)


def _whole(trainer: Any, loader: Loader, seen: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
    """Return the batch of all processes on the main one, in the order of the data and on the host; None on others."""
    own = [] if seen is None else [_to_numpy(seen)]
    if loader.deals_samples:
        own = [row for batch in own for row in _rows(batch)]
    parts = _in_order(trainer.ranks.gather("a batch of an evaluation", own))
    if not trainer.ranks.is_main or not parts:
        return None
    predictions, labels = _join([one for one, _ in parts], lambda: trainer._filler), _join([one for _, one in parts])
    return default_convert(predictions), default_convert(labels)


def _rows(batch: Any) -> list[Any]:
    """Return the samples of a batch of arrays, each as a batch of one."""
    if isinstance(batch, Mapping):
        return [dict(zip(batch, row, strict=True)) for row in _rows(tuple(batch.values()))]
    if isinstance(batch, tuple):
        columns = [None if one is None else _rows(one) for one in batch]
        size = max(len(column) for column in columns if column is not None)
        return list(zip(*([None] * size if column is None else column for column in columns), strict=True))
    return [batch[i : i + 1] for i in range(len(batch))]


def _in_order(shares: list[list[Any]]) -> list[Any]:
    """Return what the processes have in the order of the data, which was dealt out to them in turns."""
    dealt = itertools.zip_longest(*shares, fillvalue=None)
    return [batch for turn in dealt for batch in turn if batch is not None]


def _aligned(output: StepOutput, shifted: bool) -> tuple[Any, Any]:
    """Return scores and the labels they predict; a causal language model predicts each label one place before it."""
    scores, labels = output.outputs, output.labels
    if shifted and isinstance(scores, torch.Tensor) and scores.ndim == labels.ndim + 1:
        return scores[:, :-1], labels[:, 1:]
    return scores, labels


def _to_numpy(value: Any) -> Any:
    """Return tensors as arrays, bfloat16 (which numpy lacks) as float32; containers keep their shape."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _to_numpy(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_to_numpy(entry) for entry in value)
    return value


def _join(parts: list[Any], filler: Callable[[], int] = lambda: IGNORED_LABEL) -> Any:
    """Concatenate the batches' arrays along the first dimension, filling the others up to a common shape."""
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
