"""Parts of a training step whose result depends on the batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from omnitrain.core.errors import DataError
from omnitrain.core.events import find_overrides
from omnitrain.data.collation import count_samples, split_batch, tensors_in
from omnitrain.data.loaders import MapLoader

# Samples that are looked at, and those of each part of them: BatchNorm needs two.
_SAMPLES, _PART = 8, 2
# Modules of one kind that are named.
_NAMED = 2
_SEED = 0
# Seeds besides it: of several draws, one at least shows how much they matter.
_OTHER_SEEDS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class BatchDependence:
    """Something by which a step depends on its split into batches.

    Attributes:
        text: What it is.
        effect: The largest relative difference of the loss that its trials have shown.
        modules: The names of the modules that have no such effect in evaluation mode; empty if it stays there.
    """

    text: str
    effect: float
    modules: list[str] = field(default_factory=list)


class BatchProbe:
    """Compares the loss of a few samples in one batch with that of the same samples in parts.

    Every cause is found by a trial: without it both are equal, with it they are not. The trainer must be of one
    process; the weights and random numbers stay unchanged, statistics of the model do not.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tolerance = 1e-5 if trainer.precision.name == "fp32" else 2e-2
        is_exact = trainer.precision.name == "fp32" and trainer.device.type == "cpu"
        self._output_tolerance = 1e-4 if is_exact else 2e-2
        whole, parts = _read_samples(trainer)
        self._parts: list[Any] | None = parts
        self._whole, self._halves = [whole], _split(whole)

    def find_reasons(self) -> list[BatchDependence]:
        """Return what makes a step depend on its split into batches; empty if nothing does."""
        backend = self._trainer.backend
        training = {name: module for name, module in backend.model.named_modules() if module.training}
        with backend.eval_mode(_SEED):
            effect = 0.0 if self._parts is None else self._difference(self._parts)
            reasons = [BatchDependence(self._describe_cause(), effect)] if effect else []
            if reasons and self._compare_draws():  # whatever module is tried
                return reasons
            if reasons:  # a model that sees the padding is equal in parts of the padded batch
                is_equal = self._halves is not None and not self._difference(self._halves)
                self._parts = self._halves if is_equal else None
            reasons += self._find_in_modules(training) + self._find_in_algorithms()
        return reasons

    def _describe_cause(self) -> str:
        """Return why the loss depends on the split although no module is in training mode."""
        if self._compare_draws():
            return "the model draws random numbers in evaluation mode too"
        if self._halves is not None and not self._difference(self._halves):
            if any(_shapes(part) != _shapes(self._whole[0]) for part in self._parts or ()):
                return (
                    "padding changes the loss: positions that only fill up a batch are not masked in the model, or "
                    "count as targets"
                )
            return f"`data_collator` ({_name(self._trainer.settings.data_collator)}) makes other rows of fewer samples"
        loss = self._trainer.settings.loss_fn or self._trainer.unit
        if self._halves is not None and self._output_gap(self._halves) == 0:
            return f"the loss ({_name(loss)}) compares the samples of a batch, or is no mean over them"
        return f"the model ({type(self._trainer.get_model()).__name__}) mixes the samples of a batch"

    def _find_in_modules(self, training: dict[str, nn.Module]) -> list[BatchDependence]:
        """Return which kinds of modules, in training mode while the others are not, make the loss depend on it."""
        kinds: dict[type, dict[str, nn.Module]] = {}
        for name, module in training.items():
            kinds.setdefault(type(module), {})[name] = module
        return [reason for modules in kinds.values() if (reason := self._try_kind(modules)) is not None]

    def _try_kind(self, modules: dict[str, nn.Module]) -> BatchDependence | None:
        with _in_training(modules.values()):
            draws = self._compare_draws()
            effect = max(draws, self._compare_parts())
        if not effect:
            return None
        names = list[str]()
        for name, module in modules.items():
            with _in_training([module]):
                if self._compare_draws() or self._compare_parts():
                    names.append(repr(name) if name else "(the model itself)")
            if len(names) == _NAMED:
                break
        names = names or list(map(repr, modules))[:_NAMED]  # of many, each may have too small an effect by itself
        kind = type(next(iter(modules.values()))).__name__
        rest = f" and others ({len(modules)} in all)" if len(names) < len(modules) and len(names) == _NAMED else ""
        plural = "" if len(names) > 1 else "s"
        action = f"draw{plural} random numbers per batch" if draws else f"see{plural} the batch"
        # with the model itself in evaluation mode, a run would put all of it back into training mode
        return BatchDependence(f"{kind} {', '.join(names)}{rest} {action}", effect, [] if "" in modules else [*modules])

    def _find_in_algorithms(self) -> list[BatchDependence]:
        """Return which algorithms, each by itself, make the loss depend on the split by transforming batches."""
        reasons = []
        for algorithm in self._trainer.algorithms:
            for transform in find_overrides([algorithm], "transform_batch"):
                if effect := self._compare_parts(transform):
                    reasons.append(BatchDependence(f"{type(algorithm).__name__} transforms whole batches", effect))
        return reasons

    def _compare_draws(self) -> float:
        """Return the largest difference that other random numbers make; 0 if they make none."""
        return max(self._compare(self._whole, self._whole, seed) for seed in _OTHER_SEEDS)

    def _compare_parts(self, transform: Callable[..., Any] | None = None) -> float:
        """Return the difference of the samples in parts, where these are equal by themselves."""
        return 0.0 if self._parts is None else self._compare(self._whole, self._parts, transform=transform)

    def _compare(
        self,
        batches: Sequence[Any],
        other_batches: Sequence[Any],
        seed: int = _SEED,
        transform: Callable[..., Any] | None = None,
    ) -> float:
        """Return the relative difference of the mean losses of two lists of batches; 0 if it is rounding."""
        expected, loss = self._run(batches, _SEED, transform)[0], self._run(other_batches, seed, transform)[0]
        if math.isclose(expected, loss, rel_tol=self._tolerance, abs_tol=self._tolerance * 1e-3):
            return 0.0
        return abs(expected - loss) / max(abs(expected), abs(loss))

    def _run(
        self, batches: Sequence[Any], seed: int = _SEED, transform: Callable[..., Any] | None = None
    ) -> tuple[float, torch.Tensor | None]:
        """Return the mean loss of batches, and their outputs; None for outputs that are no rows of floats."""
        trainer, total, weights, rows = self._trainer, 0.0, 0.0, list[Any]()
        torch.manual_seed(seed)
        for batch in batches:
            weight, batch = trainer._weigh(batch), trainer._prepare_batch(batch)
            batch = batch if transform is None else transform(trainer, batch)
            with trainer._autocast():
                output = trainer.backend.forward(trainer._forward, batch)
            rows.append(output.outputs.get("logits") if isinstance(output.outputs, dict) else output.outputs)
            if not weight:
                continue
            is_sum = output.num_targets is not None
            total += float(output.required_loss()) * (1 if is_sum else weight)
            weights += float(output.num_targets) if is_sum else weight
        loss = total / weights if weights else math.nan
        if not math.isfinite(loss):  # which equals nothing, so that it would seem to depend on everything
            raise DataError(f"The loss of the first samples is {loss}.")
        are_floats = all(isinstance(part, torch.Tensor) and part.is_floating_point() and part.ndim for part in rows)
        return loss, torch.cat(rows).float() if are_floats and len({part.shape[1:] for part in rows}) == 1 else None

    def _difference(self, batches: Sequence[Any]) -> float:
        """Return by how much the first samples differ in other batches: in their loss, or only in their outputs.

        The loss of an untrained model is almost that of guessing, whatever the outputs are.
        """
        difference = self._compare(self._whole, batches)
        return difference or (self._tolerance if self._output_gap(batches) else 0.0)

    def _output_gap(self, batches: Sequence[Any]) -> float | None:
        """Return the largest difference of outputs, relative to what tells samples apart; None if they are no rows."""
        whole, parts = self._run(self._whole)[1], self._run(batches)[1]
        if whole is None or parts is None or whole.shape != parts.shape:
            return None
        gap = float((whole - parts).abs().max())
        if gap <= self._output_tolerance * max(float(whole.abs().max()), self._output_tolerance):
            return 0.0
        return gap / max(float((whole - whole.mean(0)).abs().max()), gap)


def _read_samples(trainer: Any) -> tuple[Any, list[Any]]:
    """Return a batch of the first samples, and batches of the same samples that were collated apart."""
    loader = trainer.train_loader
    if isinstance(loader, MapLoader):
        indices = loader.sampler.samples(0, 0, _SAMPLES)
        groups = np.split(indices, range(_PART, len(indices), _PART))
        return loader.fetch(0, indices), [loader.fetch(0, group) for group in groups]
    batch = next(iter(loader.first_batch())).batch
    return batch, _split(batch) or [batch]


def _split(batch: Any) -> list[Any] | None:
    """Return the parts of a batch; None if it cannot be split."""
    try:
        return split_batch(batch, _PART) if count_samples(batch) > _PART else None
    except Exception:
        return None


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in tensors_in(batch)]


@contextlib.contextmanager
def _in_training(modules: Any) -> Iterator[None]:
    """Put modules into training mode inside, without those in them."""
    modules = list(modules)
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


def _name(part: Any) -> str:
    return getattr(part, "__qualname__", None) or type(part).__name__
