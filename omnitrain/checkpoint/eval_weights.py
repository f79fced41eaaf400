"""Weights for evaluations and model files, where an algorithm or an optimizer makes others of those in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.state_dicts import bare_name, parameter_names, unwrap
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, find_overrides
from omnitrain.optim.build import has_modes


class Holder(Protocol):
    """What is used of a trainer."""

    backend: Backend
    algorithms: list[Algorithm]


class ShownWeights:
    """The weights of a run as others see them: those in training, or what an algorithm or the optimizer makes of them.

    A schedule-free optimizer has `train()` and `eval()`, which change the weights in place. Rounding would move those
    in training each time, so these are copied before `eval()` and copied back after `train()`.

    Args:
        run: The trainer.
    """

    def __init__(self, run: Holder) -> None:
        self._run = run
        self.are_in_place: bool = False
        """Whether the model itself has them, as it does when the run has ended."""

    @property
    def _made_by(self) -> list[Any]:
        return find_overrides(self._run.algorithms, "transform_weights")

    def check(self) -> None:
        """Refuse weights whose dtype cannot hold what one step adds, before the first step."""
        backend = self._run.backend
        kinds = {one.dtype for one in backend.model.parameters() if one.requires_grad}
        kinds &= {torch.float16, torch.bfloat16}
        if self._made_by and kinds and not backend.has_master_weights:
            name = type(self._made_by[0].__self__).__name__
            raise ConfigError(
                f"`algorithms` holds {name}, and the weights are of {min(map(str, kinds))}, in which what one "
                "step adds is lost. Load the model in float32 (dtype=torch.float32), and pass autocast='bf16' to "
                "compute in 16 bits."
            )

    def of(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """Return what evaluations and model files have, by name.

        Args:
            trained: What `Backend.model_tensors` returned; entries that are no others come back as they are.
        """
        shown = dict(trained)
        if self.are_in_place:
            return shown
        shown |= self._of_optimizers(shown)
        for make in self._made_by:
            shown = make(self._run, shown)
        return shown

    def model_tensors(self) -> dict[str, Any]:
        """Return them for the present moment."""
        return self.of(self._run.backend.model_tensors())

    def _others(self) -> dict[str, Any]:
        """Return those that are others than in training."""
        if self.are_in_place or not (self._made_by or self._in_training_mode):
            return {}
        trained = self._run.backend.model_tensors()
        return {name: one for name, one in self.of(trained).items() if one is not trained[name]}

    @property
    def are_others(self) -> bool:
        """Whether they are others than in training."""
        return bool(self._others())

    # --- optimizers with a mode for training and one for evaluations

    @property
    def _with_modes(self) -> list[Any]:
        return [optimizer for optimizer in self._run.backend.built_optimizers if has_modes(optimizer)]

    @property
    def _in_training_mode(self) -> list[Any]:
        """The optimizers with modes that have stepped, and are in that of training."""
        return [optimizer for optimizer in self._with_modes if optimizer.state and not _is_in_eval_mode(optimizer)]

    def begin_training(self) -> None:
        """Put the optimizers into training mode, at the beginning of a run, before and after it is resumed."""
        for optimizer in self._with_modes:
            if not optimizer.state or _is_in_eval_mode(optimizer):
                optimizer.train()

    @contextlib.contextmanager
    def _keeping_weights(self, optimizers: list[Any]) -> Iterator[None]:
        """Leave the weights of optimizers unchanged by what is done inside, to the bit."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        weights = [self._run.backend.local_shard(parameter) for group in groups for parameter in group["params"]]
        copies = [weight.clone() for weight in weights]
        try:
            yield
        finally:
            for weight, copied in zip(weights, copies, strict=True):
                weight.copy_(copied)

    def _of_optimizers(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the weights as optimizers with modes have them in evaluations."""
        optimizers = self._in_training_mode
        if not optimizers:
            return {}
        known = parameter_names(self._run.backend.model)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = {known.get(id(parameter), "") for group in groups for parameter in group["params"]}
        with torch.no_grad(), self._keeping_weights(optimizers):
            for optimizer in optimizers:
                optimizer.eval()
            shown = {name: trained[name].clone() for name in names & trained.keys()}
            for optimizer in optimizers:
                optimizer.train()
        return shown

    def mark_in_place(self) -> None:
        """Note that the model has them, as the run has ended; optimizers with modes are in that of evaluations."""
        optimizers = self._in_training_mode
        with torch.no_grad(), self._keeping_weights(optimizers):
            for optimizer in optimizers:
                optimizer.eval()
        self.are_in_place = True

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Have them in the model inside; those in training are back afterwards, whatever was raised."""
        others = self._others()
        if not others:
            yield
            return
        backend = self._run.backend
        named = unwrap(backend.model)
        live = {bare_name(name): one for name, one in (*named.named_parameters(), *named.named_buffers())}
        own = [backend.local_shard(live[name]) for name in others]
        kept = [one.clone() for one in own]
        try:
            for target, one in zip(own, others.values(), strict=True):
                target.copy_(backend.local_shard(one))
            yield
        finally:
            for target, one in zip(own, kept, strict=True):
                target.copy_(one)

    def put_in_place(self) -> bool:
        """Have the model keep them, as the run has ended; return whether they are others than those in training."""
        others = self._others()
        if others:
            rest = self._run.backend.model_tensors().keys() - others.keys()
            self._run.backend.load_weights(others, "the weights that are evaluated", {}, rest)
        return bool(others)

    def restore(self, names: Mapping[str, Any]) -> None:
        """Give algorithms back what it made, which is in the model.

        Args:
            names: Which weights are others than in training.
        """
        weights = self._run.backend.model_tensors()
        for one in find_overrides(self._run.algorithms, "restore_weights"):
            one(self._run, {name: weights[name] for name in names})


def _is_in_eval_mode(optimizer: Any) -> bool:
    """Return whether an optimizer says that it is in the mode of evaluations, in its groups or its attributes."""
    modes = [group.get("train_mode") for group in optimizer.param_groups]
    return any(mode is False for mode in (*modes, getattr(optimizer, "train_mode", None)))
