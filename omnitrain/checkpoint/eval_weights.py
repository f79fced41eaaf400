"""Weights for evaluations and model files, such as averages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.state_dicts import bare_name, parameter_names, unwrap
from omnitrain.core.events import Algorithm, TrainerLike, find_overrides
from omnitrain.optim.build import has_modes


class EvalWeights:
    """The weights for evaluations: those in training, as an algorithm or the optimizer transforms them.

    A schedule-free optimizer has `train()` and `eval()`, which change the weights in place. Rounding would move those
    in training each time, so these are copied before `eval()` and copied back after `train()`.
    """

    def __init__(self, trainer: TrainerLike, backend: Backend, algorithms: list[Algorithm]) -> None:
        self._trainer = trainer
        self._backend = backend
        self._algorithms = algorithms
        self.are_loaded: bool = False
        """Whether the model has them, as after the end of a run."""

    @property
    def _transforms(self) -> list[Any]:
        return find_overrides(self._algorithms, "transform_weights")

    def transform(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights for evaluations by name; those that do not differ are the same objects as in `trained`."""
        weights = dict(trained)
        if self.are_loaded:
            return weights
        weights |= self._optimizer_eval_weights(weights)
        for transform in self._transforms:
            weights = transform(self._trainer, weights)
        return weights

    def model_tensors(self) -> dict[str, Any]:
        """Return the present weights for evaluations by name."""
        return self.transform(self._backend.model_tensors())

    def differing(self, trained: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return those that differ from the weights in training, which are the present ones, by name."""
        if self.are_loaded or not (self._transforms or self._optimizers_in_training):
            return {}
        trained = self._backend.model_tensors() if trained is None else trained
        return {name: weight for name, weight in self.transform(trained).items() if weight is not trained[name]}

    # --- optimizers with a mode for training and one for evaluations

    @property
    def _optimizers_in_training(self) -> list[Any]:
        optimizers = self._backend.built_optimizers
        return [each for each in optimizers if has_modes(each) and each.state and not _is_in_eval_mode(each)]

    def begin_training(self) -> None:
        """Set the optimizers to training mode, at the beginning of a run, before and after it is resumed."""
        optimizers: list[Any] = list(self._backend.built_optimizers)
        for optimizer in optimizers:
            # without state `train()` moves no weights, and a new optimizer may not be in either mode
            if has_modes(optimizer) and (not optimizer.state or _is_in_eval_mode(optimizer)):
                optimizer.train()

    @contextlib.contextmanager
    def _restoring_weights(self, optimizers: list[Any]) -> Iterator[None]:
        """Restore the weights of optimizers at the end, bit for bit."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        weights = [self._backend.local_shard(parameter) for group in groups for parameter in group["params"]]
        # interpolating there and back is not exact in floating point
        copies = [weight.clone() for weight in weights]
        try:
            yield
        finally:
            for weight, copied in zip(weights, copies, strict=True):
                weight.copy_(copied)

    def _optimizer_eval_weights(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the weights in the evaluation mode of optimizers."""
        optimizers = self._optimizers_in_training
        if not optimizers:
            return {}
        known = parameter_names(self._backend.model)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = {known.get(id(parameter), "") for group in groups for parameter in group["params"]}
        with torch.no_grad(), self._restoring_weights(optimizers):
            for optimizer in optimizers:
                optimizer.eval()
            eval_weights = {name: trained[name].clone() for name in names & trained.keys()}
            for optimizer in optimizers:
                optimizer.train()
        return eval_weights

    def set_loaded(self) -> None:
        """Record that the model has them after the end of a run, and set optimizers to evaluation mode."""
        if optimizers := self._optimizers_in_training:
            with torch.no_grad(), self._restoring_weights(optimizers):
                for optimizer in optimizers:
                    optimizer.eval()
        self.are_loaded = True

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap them into the model; the weights in training are restored at the end."""
        eval_weights = self.differing()
        if not eval_weights:
            yield
            return
        backend = self._backend
        model = unwrap(backend.model)
        tensors = {bare_name(name): tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        shards = [backend.local_shard(tensors[name]) for name in eval_weights]
        copies = [tensor.clone() for tensor in shards]
        try:
            for target, tensor in zip(shards, eval_weights.values(), strict=True):
                target.copy_(backend.local_shard(tensor))
            yield
        finally:
            for target, tensor in zip(shards, copies, strict=True):
                target.copy_(tensor)

    def load(self, eval_weights: Mapping[str, Any]) -> None:
        """Load those from `differing` into the model at the end of a run."""
        unchanged = self._backend.model_tensors().keys() - eval_weights.keys()
        self._backend.load_weights(eval_weights, "the weights that are evaluated", {}, unchanged)

    def restore(self, names: Mapping[str, Any]) -> None:
        """Restore the algorithms' state from the model, in which the weights `names` are those for evaluations."""
        weights = self._backend.model_tensors()
        for restore in find_overrides(self._algorithms, "restore_weights"):
            restore(self._trainer, {name: weights[name] for name in names if name in weights})


def _is_in_eval_mode(optimizer: Any) -> bool:
    """Return whether an optimizer is in evaluation mode by `train_mode`, in its groups or its attributes."""
    modes = [group.get("train_mode") for group in optimizer.param_groups]
    return any(mode is False for mode in (*modes, getattr(optimizer, "train_mode", None)))
