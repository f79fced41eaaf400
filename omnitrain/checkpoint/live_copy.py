"""A copy of the full state of a run in host memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.checkpointer import HostWeights
from omnitrain.checkpoint.contents import CheckpointedTrainer, Contents
from omnitrain.checkpoint.eval_weights import EvalWeights
from omnitrain.checkpoint.tensor_files import host_copy
from omnitrain.core.progress import Progress
from omnitrain.data.stateful import stateful_parts
from omnitrain.data.streams import StreamPosition

_Moments = dict[torch.Tensor, dict[str, Any]]


@dataclass(slots=True)
class LiveCopy:
    """The state of a run at a step boundary, for restoring it in the same process.

    On each rank it has this rank's shards. A later copy is written into the memory of the earlier one.
    """

    weights: HostWeights = field(default_factory=HostWeights)
    _eval_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    _position: StreamPosition | None = None
    _moments: list[_Moments] = field(default_factory=list)
    _states: dict[str, Any] = field(default_factory=dict)
    _parts: dict[str, Any] = field(default_factory=dict)
    _algorithms: list[Any] = field(default_factory=list)
    _scaler: dict[str, Any] = field(default_factory=dict)

    @property
    def progress(self) -> Progress | None:
        """The position of the copy; None before the first one."""
        return self.weights.progress

    def update(self, trainer: CheckpointedTrainer, contents: Contents, eval_weights: EvalWeights) -> None:
        """Copy the present state; called on all ranks."""
        backend, trained = trainer.backend, trainer.backend.model_tensors()
        self._states, self._position = contents.capture_live_state(), copy.deepcopy(contents.data_position())
        optimizers = backend.built_optimizers
        moments = self._moments or [{} for _ in optimizers]
        self._moments = [
            _copy_moments(optimizer, backend, earlier) for optimizer, earlier in zip(optimizers, moments, strict=True)
        ]
        parts = stateful_parts(trainer.settings, backend.model)
        self._parts = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        self._algorithms = [copy.deepcopy(algorithm.state_dict()) for algorithm in trainer.algorithms]
        self._scaler = backend.scaler.state_dict()
        self.weights.update(backend, trained, trainer.progress)
        differing = eval_weights.differing(trained)
        self._eval_weights = {name: self._eval_weights[name] for name in self._eval_weights.keys() & differing.keys()}
        backend.snapshot_weights(self._eval_weights, differing)

    def restore(self, trainer: CheckpointedTrainer, contents: Contents, eval_weights: EvalWeights) -> None:
        """Restore the state, with its random numbers."""
        backend = trainer.backend
        for algorithm, state in zip(trainer.algorithms, self._algorithms, strict=True):
            algorithm.load_state_dict(copy.deepcopy(state))
        parts = stateful_parts(trainer.settings, backend.model)
        for name, state in self._parts.items():
            parts[name].load_state_dict(copy.deepcopy(state))
        # as in a checkpoint, the algorithms copy weights for evaluations, such as averages, from the model
        if self._eval_weights:
            backend.restore_snapshot({**self.weights.tensors, **self._eval_weights}, {})
        eval_weights.restore(self._eval_weights)
        backend.restore_snapshot(self.weights.tensors, self.weights.extra)
        for optimizer, moments in zip(backend.built_optimizers, self._moments, strict=True):
            _restore_moments(optimizer, backend, moments)
        contents.restore_live_state(copy.deepcopy({**self._states, "rng": None}))
        contents.resume_data(copy.deepcopy(self._position))
        if backend.scaler.is_enabled():
            backend.scaler.load_state_dict(self._scaler)
        generators, rest = self._states["rng"]
        state_dicts.restore_rng_tensors(generators, rest, trainer.device)


def _copy_moments(optimizer: torch.optim.Optimizer, backend: Backend, earlier: _Moments) -> _Moments:
    copies: _Moments = {}
    for parameter, state in optimizer.state.items():
        buffers, copies[parameter] = earlier.get(parameter, {}), {}
        for name, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            shard = backend.local_shard(value) if is_tensor else value
            copies[parameter][name] = host_copy(shard, buffers.get(name)) if is_tensor else copy.deepcopy(value)
    return copies


@torch.no_grad()
def _restore_moments(optimizer: torch.optim.Optimizer, backend: Backend, moments: _Moments) -> None:
    for parameter in [parameter for parameter in optimizer.state if parameter not in moments]:
        del optimizer.state[parameter]  # it had no update yet
    for parameter, saved in moments.items():
        state = optimizer.state[parameter]
        for name, value in saved.items():
            if isinstance(value, torch.Tensor):
                backend.local_shard(state[name]).copy_(value)
            else:
                state[name] = copy.deepcopy(value)
