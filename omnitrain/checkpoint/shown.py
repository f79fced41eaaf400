"""The weights that evaluations and model files have, where an algorithm makes others of those in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.state import bare_name, unwrap
from omnitrain.errors import ConfigError
from omnitrain.events import Algorithm, overriding

__all__ = ["ShownWeights"]


class Holder(Protocol):
    """What is used of a trainer."""

    backend: Backend
    algorithms: list[Algorithm]


class ShownWeights:
    """The weights of a run as others see them: those in training, or what an algorithm makes of them.

    Args:
        run: The trainer.
    """

    def __init__(self, run: Holder) -> None:
        self._run = run
        self.are_in_place: bool = False
        """Whether the model itself has them, as it does when the run has ended."""

    @property
    def _made_by(self) -> list[Any]:
        return overriding(self._run.algorithms, "transform_weights")

    def check(self) -> None:
        """Refuse weights whose dtype cannot hold what one step adds, before the first step."""
        backend = self._run.backend
        kinds = {one.dtype for one in backend.model.parameters() if one.requires_grad}
        kinds &= {torch.float16, torch.bfloat16}
        if self._made_by and kinds and not backend.keeps_masters:
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
        for make in [] if self.are_in_place else self._made_by:
            shown = make(self._run, shown)
        return shown

    def model_tensors(self) -> dict[str, Any]:
        """Return them for the present moment."""
        return self.of(self._run.backend.model_tensors())

    def _others(self) -> dict[str, Any]:
        """Return those that are others than in training."""
        if self.are_in_place or not self._made_by:
            return {}
        trained = self._run.backend.model_tensors()
        return {name: one for name, one in self.of(trained).items() if one is not trained[name]}

    @property
    def are_others(self) -> bool:
        """Whether they are others than in training."""
        return bool(self._others())

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
        own = [backend.own_part(live[name]) for name in others]
        kept = [one.clone() for one in own]
        try:
            for target, one in zip(own, others.values(), strict=True):
                target.copy_(backend.own_part(one))
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
        self.are_in_place = True
        return bool(others)

    def restore(self, names: Mapping[str, Any]) -> None:
        """Give the algorithm back what it made, which is in the model.

        Args:
            names: Which weights are others than in training.
        """
        weights = self._run.backend.model_tensors()
        for one in overriding(self._run.algorithms, "restore_weights"):
            one(self._run, {name: weights[name] for name in names})
