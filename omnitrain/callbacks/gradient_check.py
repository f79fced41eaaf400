"""Comparison of gradients between ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from omnitrain.compute.tensor_digests import digest_tensors
from omnitrain.core.duration import Duration, Every
from omnitrain.core.errors import ConfigError, DistributedError
from omnitrain.core.events import Callback, TrainerLike

logger: logging.Logger = logging.getLogger("omnitrain")

# A gradient, or this rank's shard of it: the name of the parameter, and the place of the shard.
_Key = tuple[str, tuple[int, ...]]


class GradientCheck(Callback):
    """Compares the gradients of all ranks, which must be equal to the bit before an update.

    A hook, a layer or a communication that changes them on some ranks only lets the weights of the ranks drift apart,
    and no loss shows it. They are compared in the first step, and in one step of each interval: one pass over the
    gradients on the device, and one exchange. Under FSDP and tensor parallelism, what several ranks hold is compared.

    Args:
        every: The interval: an int counts steps; or a duration of steps, epochs, samples or tokens.

    >>> callbacks = [GradientCheck("100ba")]  # AccelerateTrainer(..., callbacks=callbacks)
    """

    order = 40  # after the callbacks that may change gradients
    asks_alone = False

    def __init__(self, every: int | str | Duration = "100ba") -> None:
        """Check the interval.

        Raises:
            ConfigError: If it is a time or a share of the run.
        """
        duration = Duration.parse(every, "ba", "every")
        if duration.unit in ("s", "dur"):
            raise ConfigError(
                f"`every={every!r}` may be due in different steps on the ranks, and all of them must compare the same "
                "one. Give it in steps ('100ba'), epochs, samples or tokens."
            )
        self._every = Every(duration)
        self._is_due = True
        self._has_warned = False

    def on_train_start(self, trainer: Any) -> None:
        """Reject a backend without gradients between backward pass and update.

        Raises:
            ConfigError: If there are none.
        """
        if reason := trainer.backend.unsupported.get("gradients"):
            raise ConfigError(f"GradientCheck has no gradients to compare: {reason}. Leave it out.")
        self._every.restart(trainer.progress)
        self._is_due, self._has_warned = trainer.world_size > 1, False

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        self._every.restart(trainer.progress)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        if self._is_due:
            self._is_due = False
            self._compare(trainer)

    def on_step_end(self, trainer: TrainerLike) -> None:
        if self._every.due(trainer.progress):
            self._is_due = trainer.world_size > 1

    on_epoch_end = on_step_end

    def _compare(self, trainer: Any) -> None:
        """Compare the gradients of this step.

        Raises:
            DistributedError: On all ranks, if one differs; it names the parameter, the step and the norm on each rank.
        """
        shards = dict(_local_gradients(trainer.model.named_parameters()))
        bits = dict(zip(shards, map(tuple, _digests(shards.values())), strict=True))
        different = trainer.ranks.combine("the gradients of a step", bits, _find_differences)
        if different is None:
            if not self._has_warned and trainer.is_main_process:
                logger.warning("GradientCheck compares nothing: no two ranks hold the same part of a gradient.")
            self._has_warned = True
        elif different:
            key = different[0]
            norm = None if key not in shards else float(torch.linalg.vector_norm(_dense_values(shards[key]).float()))
            norms = trainer.ranks.gather("the norms of a gradient", norm)
            listed = ", ".join(f"{norm:.9g} on rank {rank}" for rank, norm in enumerate(norms) if norm is not None)
            more = f" So do {len(different) - 1} others." if len(different) > 1 else ""
            raise DistributedError(
                f"The gradient of {key[0]!r} differs between ranks at step {trainer.progress.step + 1}: its norm is "
                f"{listed}.{more} The weights would drift apart: change gradients on every rank, by an Algorithm with "
                "`before_update`, and run every layer inside the model's `forward`."
            )


def _local_gradients(parameters: Iterable[tuple[str, Any]]) -> Iterator[tuple[_Key, torch.Tensor]]:
    """Yield this rank's part of each gradient, with the coordinates of that part along the dimensions that shard it."""
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not hasattr(gradient, "placements"):
            yield (name, ()), gradient
            continue
        coordinates = gradient.device_mesh.get_coordinate()
        shard = tuple(
            place for place, kind in zip(coordinates, gradient.placements, strict=True) if not kind.is_replicate()
        )
        yield (name, shard), gradient.to_local()


def _dense_values(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _digests(gradients: Iterable[torch.Tensor]) -> list[Any]:
    """Return for each gradient a digest of its bits, read from the device in one copy."""
    digests = list[Any]()
    for gradient in gradients:
        indices = [gradient.coalesce().indices()] if gradient.is_sparse else []
        digests.append(digest_tensors([_dense_values(gradient.detach()), *indices]))
    return torch.stack(digests).tolist() if digests else []


def _find_differences(bits_by_rank: Sequence[dict[_Key, tuple[int, int]]]) -> list[_Key] | None:
    """Return the gradients that differ, or that some ranks lack; None if no two ranks have the same one."""
    ranks_with = dict[_Key, list[tuple[int, int]]]()
    for key, bits in itertools.chain.from_iterable(entries.items() for entries in bits_by_rank):
        ranks_with.setdefault(key, []).append(bits)
    if max(map(len, ranks_with.values()), default=0) < 2:
        return None
    most: dict[str, int] = {}  # ranks with the same part of a sharded gradient
    for (name, shard), values in ranks_with.items():
        most[name] = max(most.get(name, 0), len(values) if shard else len(bits_by_rank))
    return [key for key, values in ranks_with.items() if len(set(values)) > 1 or len(values) < most[key[0]]]
