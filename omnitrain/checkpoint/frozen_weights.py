"""Frozen weights that checkpoints exclude, and their fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.adapters import adapter_names, has_adapters
from omnitrain.checkpoint.state_dicts import bare_name, unwrap
from omnitrain.checkpoint.tensor_files import change_marker, fingerprints
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

# Their name in `allow_change`.
FROZEN = "frozen_weights"


class FrozenWeights:
    """The frozen weights of a run: fingerprints are computed once, and again for weights that were written to.

    Args:
        backend: Has the weights.
        ranks: The ranks of the run.
        save_frozen: Whether checkpoints have them; None leaves them out if there are adapters.
    """

    def __init__(self, backend: Backend, ranks: Ranks, save_frozen: bool | None) -> None:
        self._backend = backend
        self._ranks = ranks
        self._save_frozen = save_frozen
        # Version and fingerprint of each weight, by name.
        self._known: dict[str, tuple[Any, str]] = {}
        self._excluded: dict[str, str] | None = None

    def excluded(self) -> dict[str, str]:
        """Return the fingerprints, by name, of the weights that a checkpoint excludes.

        They have not changed since the first call and were not trained at any checkpoint since, so building the model
        of the run again restores them. A collective call.
        """
        model = self._backend.model
        if not (has_adapters(model) if self._save_frozen is None else not self._save_frozen):
            return {}
        tensors = self._backend.model_tensors()
        if self._excluded is None:
            self._excluded = self.fingerprints(_frozen_names(model, tensors), tensors)
        trained = _trained_names(model)
        saved = {name: digest for name, digest in self._excluded.items() if name in tensors and name not in trained}
        current = self.fingerprints(saved, tensors)
        self._excluded = {name: digest for name, digest in saved.items() if current[name] == digest}
        return self._excluded

    def fingerprints(self, names: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, str]:
        """Return the fingerprints of the present weights; a collective call.

        Args:
            names: The names of these weights.
            tensors: All weights by name.
        """
        names = list(names)
        if not names:
            return {}
        # hashing all frozen weights of a large model at each save would take minutes
        versions = {name: change_marker(tensors[name]) for name in names}
        stale = [name for name in names if self._known.get(name, (None,))[0] != versions[name]]
        # computing them is collective, so all ranks must agree on the names
        stale = self._ranks.combine("the frozen weights that were written to", stale, lambda each: set().union(*each))
        if stale:
            computed = fingerprints({name: tensors[name] for name in stale}, self._ranks)
            self._known |= {name: (change_marker(tensors[name]), computed[name]) for name in stale}
        return {name: self._known[name][1] for name in names}

    def check(self, saved: Mapping[str, str], where: str) -> None:
        """Reject a checkpoint that excludes different weights than this run; a collective call.

        Args:
            saved: The fingerprints in it.
            where: The name of the checkpoint in errors.

        Raises:
            CheckpointError: With the name of the first weight that differs.
        """
        check_fingerprints(
            saved,
            self.fingerprints(saved, self._backend.model_tensors()),
            where,
            "Build the model on the weights of that run (random ones need its seed), or continue with "
            f"these: train(resume_from=..., allow_change={ {FROZEN}!r}). `save_frozen=True` saves them from now on.",
        )


def check_fingerprints(saved: Mapping[str, str], current: Mapping[str, str], where: str, remedy: str) -> None:
    """Raise CheckpointError if weights that a checkpoint excludes have changed.

    Args:
        saved: The fingerprints in the checkpoint.
        current: The fingerprints of the present weights.
        where: The name of the checkpoint in the error.
        remedy: The last sentences of the error.
    """
    changed = [name for name in saved if current[name] != saved[name]]
    if changed:
        raise CheckpointError(
            f"{where} was saved without the weights that did not train, and {len(changed)} of the {len(saved)} differ "
            f"in this model, the first of them {changed[0]!r}. {remedy}"
        )


def _frozen_names(model: Any, tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights that are not trained; without buffers, which may change anyway."""
    buffers = unwrap(model).named_buffers(remove_duplicate=False)
    changing = _trained_names(model) | {bare_name(name) for name, _ in buffers}
    if has_adapters(model):
        changing |= adapter_names(model, tensors)
    return [name for name in tensors if name not in changing]


def _trained_names(model: Any) -> set[str]:
    parameters = unwrap(model).named_parameters(remove_duplicate=False)
    return {bare_name(name) for name, parameter in parameters if parameter.requires_grad}
