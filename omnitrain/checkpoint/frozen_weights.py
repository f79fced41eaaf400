"""Weights that are not trained: which of them a checkpoint leaves out, and how a resume recognizes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from omnitrain.arguments import Settings
from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.adapters import adapter_names, has_adapters
from omnitrain.checkpoint.state_dicts import bare_name, unwrap
from omnitrain.checkpoint.tensor_files import change_marker, fingerprints
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

FROZEN = "frozen_weights"
"""Their name in `allow_change`."""


class Holder(Protocol):
    """The part of a trainer that is used here."""

    settings: Settings
    backend: Backend
    ranks: Ranks


class Frozen:
    """The frozen weights of a run: fingerprints are computed once, and again for weights that were written to.

    Args:
        run: The trainer.
    """

    def __init__(self, run: Holder) -> None:
        self._run = run
        self._known: dict[str, tuple[Any, str]] = {}
        """Mark and fingerprint of each weight, by name."""
        self._left_out: dict[str, str] | None = None

    def left_out(self) -> dict[str, str]:
        """Return the fingerprints, by name, of the weights that a checkpoint leaves out now.

        They have not changed since the first call and were not trained at any checkpoint since, so they are there
        again when the model of the run is built anew. All ranks call it.
        """
        run = self._run
        model = run.backend.model
        wanted = run.settings.save_frozen
        if not (has_adapters(model) if wanted is None else not wanted):
            return {}
        tensors = run.backend.model_tensors()
        if self._left_out is None:
            self._left_out = self.fingerprints(_frozen(model, tensors), tensors)
        trained = _trained(model)
        kept = {name: one for name, one in self._left_out.items() if name in tensors and name not in trained}
        now = self.fingerprints(kept, tensors)
        self._left_out = {name: one for name, one in kept.items() if now[name] == one}
        return self._left_out

    def fingerprints(self, names: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, str]:
        """Return the fingerprints of weights as they are now; all ranks call it.

        Args:
            names: The names of these weights.
            tensors: All weights by name.
        """
        names = list(names)
        if not names:
            return {}
        marks = {name: change_marker(tensors[name]) for name in names}
        stale = [name for name in names if self._known.get(name, (None,))[0] != marks[name]]
        stale = self._run.ranks.combine(
            "the frozen weights that were written to", stale, lambda each: set().union(*each)
        )
        if stale:
            taken = fingerprints({name: tensors[name] for name in stale}, self._run.ranks)
            self._known |= {name: (change_marker(tensors[name]), taken[name]) for name in stale}
        return {name: self._known[name][1] for name in names}

    def check(self, then: Mapping[str, str], where: str) -> None:
        """Refuse a checkpoint that left out other weights than the present ones; all ranks call it.

        Args:
            then: The fingerprints in it.
            where: The name of the checkpoint in errors.

        Raises:
            CheckpointError: It names the first weight that differs.
        """
        check_fingerprints(
            then,
            self.fingerprints(then, self._run.backend.model_tensors()),
            where,
            "Build the model on the weights of that run (those that are made at random need its seed), or go on with "
            f"these: train(resume_from=..., allow_change={ {FROZEN}!r}). `save_frozen=True` saves them from now on.",
        )


def check_fingerprints(then: Mapping[str, str], now: Mapping[str, str], where: str, remedy: str) -> None:
    """Raise CheckpointError if weights that a checkpoint left out differ now, and name the first.

    Args:
        then: The fingerprints in the checkpoint.
        now: The fingerprints of the present weights.
        where: The name of the checkpoint in the error.
        remedy: What to do about it.
    """
    others = [name for name in then if now[name] != then[name]]
    if others:
        raise CheckpointError(
            f"{where} was saved without the weights that did not train, and {len(others)} of the {len(then)} are "
            f"others in this model, the first of them {others[0]!r}. {remedy}"
        )


def _frozen(model: Any, tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights that are not trained; without buffers, which may change anyway."""
    kept = _trained(model) | {bare_name(name) for name, _ in unwrap(model).named_buffers(remove_duplicate=False)}
    if has_adapters(model):
        kept |= adapter_names(model, tensors)
    return [name for name in tensors if name not in kept]


def _trained(model: Any) -> set[str]:
    named = unwrap(model).named_parameters(remove_duplicate=False)
    return {bare_name(name) for name, one in named if one.requires_grad}
