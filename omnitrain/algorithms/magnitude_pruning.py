"""MagnitudePruning: the smallest weights become zero."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from omnitrain.algorithms.weights import full_tensor, local_part, matching, parameters_by_name, patterns_of
from omnitrain.checkpoint.tensor_files import shard_like
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError, check_choice, check_number
from omnitrain.core.events import Algorithm, TrainerLike, share_of_run
from omnitrain.optim.sparse_gradients import stored_rows, stored_values

logger: logging.Logger = logging.getLogger("omnitrain")


class MagnitudePruning(Algorithm):
    """Sets a growing share of the smallest weights to zero, and keeps them there (arXiv:1710.01878).

    At a share `t` of the way from `start` to `end`, `sparsity + (initial - sparsity) * (1 - t)**3` of the weights are
    zero. Their gradients are zero as well. The norm that is logged is that of all gradients; it is clipped without
    those. The model itself is unchanged: masks of the pruned weights are saved next to it in checkpoints.

    Args:
        sparsity: The final share of zeros, above 0 and below 1.
        start: When pruning starts: updates, or a duration such as "0.1dur" or "2ep"; None starts at once.
        end: When pruning ends, in the same way.
        every: Updates between two prunings; there is always one at `end`.
        initial: The share that is pruned at `start`.
        match: Regular expressions; parameters whose names contain a match are pruned. None is every parameter
            that trains and has two dimensions or more.
        scope: "layer" prunes the same share of each parameter, "global" the smallest weights of all.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if the run ends before `end`, no parameter matches,
            or under DeepSpeed.

    >>> pruning = MagnitudePruning(sparsity=0.8)
    >>> [round(pruning.sparsity_at(share), 3) for share in (0, 0.25, 0.5, 1)]
    [0.0, 0.463, 0.7, 0.8]
    """

    asks_alone = False
    conflicts: ClassVar[Collection[str]] = ("EMA", "SWA")

    def __init__(
        self,
        sparsity: float = 0.5,
        start: int | str | Duration | None = None,
        end: int | str | Duration = "0.5dur",
        every: int = 100,
        initial: float = 0.0,
        match: Sequence[str] | None = None,
        scope: Literal["layer", "global"] = "layer",
    ) -> None:
        check_number("sparsity", sparsity, above=0, below=1)
        check_number("initial", initial, least=0, most=sparsity)
        check_number("every", every, least=1, is_whole=True)
        check_choice("scope", scope, ("layer", "global"))
        self.sparsity: float = sparsity
        self.start: Duration | None = None if start is None else Duration.parse(start, "ba", "start")
        self.end: Duration = Duration.parse(end, "ba", "end")
        for name, value in (("start", self.start), ("end", self.end)):
            if value is not None and value.unit not in ("ba", "ep", "dur"):
                raise ConfigError(f"`{name}` must be in updates, epochs or a share of the run, got {str(value)!r}.")
        self.every: int = every
        self.initial: float = initial
        self.match: tuple[str, ...] | None = patterns_of("match", match)
        self.scope: Literal["layer", "global"] = scope
        self.reached: float = 0.0
        """The current share of pruned weights."""
        # False for pruned weights, by the parameter's name; sharded like the parameter.
        self._masks: dict[str, torch.Tensor] = {}
        self._pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._first, self._last = 0, 0

    def sparsity_at(self, done: float) -> float:
        """Return the share of the weights that is zero at this share of the way from `start` to `end`."""
        return self.sparsity + (self.initial - self.sparsity) * (1 - min(max(done, 0.0), 1.0)) ** 3

    def set_up(self, trainer: TrainerLike) -> None:
        self.reached, self._masks, self._pairs = 0.0, {}, []
        self._first = 1 if self.start is None else max(1, self._update_of(self.start, trainer))
        self._last, total = self._update_of(self.end, trainer), trainer.total_steps
        if self._last <= self._first:
            raise ConfigError(
                f"MagnitudePruning would begin at update {self._first} and end at update {self._last}. Give an `end` "
                f"that comes after `start`, which is {str(self.start) if self.start else 'the first update'!r}."
            )
        if total is not None and self._last > total:
            raise ConfigError(
                f"MagnitudePruning would end at update {self._last} ('{self.end}'), and the run has {total}. Give an "
                "earlier `end`, or a share of the run such as '0.5dur'."
            )
        matching(trainer.model, self.match, "MagnitudePruning")
        if trainer.settings.load_best_at_end is not False and trainer.eval_loader is not None and trainer.rank == 0:
            logger.warning(
                "MagnitudePruning: the run ends with its best weights, which may be those of a time when fewer were "
                "pruned. Pass load_best_at_end=False to end with the last ones."
            )

    def _update_of(self, length: Duration, trainer: TrainerLike) -> int:
        """Return the update at which a duration has passed."""
        if length.unit == "ba":
            return int(length.value)
        per = trainer.steps_per_epoch if length.unit == "ep" else trainer.total_steps
        if per is None:
            share_of_run(trainer, "MagnitudePruning", 0)
            raise ConfigError(f"MagnitudePruning: '{length}' is unknown for data without length. Pass updates.")
        return math.ceil(round(length.value * per, 6))

    def begin_epoch(self, trainer: TrainerLike) -> None:
        self._pair(trainer.model)

    def _pair(self, model: nn.Module) -> None:
        live = parameters_by_name(model)
        self._masks = {name: shard_like(mask.to(live[name].device), live[name]) for name, mask in self._masks.items()}
        self._pairs = [(live[name], local_part(mask)) for name, mask in self._masks.items()]

    @torch.no_grad()
    def before_update(self, trainer: TrainerLike) -> None:
        for parameter, mask in self._pairs:
            if parameter.grad is not None:
                stored_values(local_part(parameter.grad)).mul_(stored_rows(mask, parameter.grad))

    @torch.no_grad()
    def after_update(self, trainer: TrainerLike) -> None:
        step = trainer.progress.step + 1
        is_due = self._first <= step < self._last and (step - self._first) % self.every == 0
        if is_due or (step >= self._last and self.reached < self.sparsity):
            self._prune(trainer.model, self.sparsity_at((step - self._first) / (self._last - self._first)))
        # momentum has moved pruned weights
        for parameter, mask in self._pairs:
            local_part(parameter).mul_(mask)

    def _prune(self, model: nn.Module, sparsity: float) -> None:
        """Choose the weights to prune; pruned ones stay pruned."""
        self.reached = max(self.reached, sparsity)
        live, sizes = parameters_by_name(model), dict[str, torch.Tensor]()
        for name in matching(model, self.match, "MagnitudePruning", self._masks):
            sizes[name] = full_tensor(live[name]).abs()
            if name in self._masks:
                sizes[name].masked_fill_(~full_tensor(self._masks[name]), -1.0)
        for names in [list(sizes)] if self.scope == "global" else [[name] for name in sizes]:
            masks = _largest([sizes[name] for name in names], self.reached)
            self._masks |= zip(names, masks, strict=True)
        self._pair(model)

    def end_run(self, trainer: TrainerLike) -> None:
        reason, progress = trainer.stop_reason, trainer.progress
        if self.reached >= self.sparsity or reason in ("", "signal") or trainer.rank:  # after a signal it is resumed
            return
        logger.warning(
            "MagnitudePruning has pruned %.4g of the weights and not `sparsity=%s`: the run ended (%s) after %d "
            "updates and %d skipped steps, and `end` is update %d. Give an earlier `end`, or train longer.",
            self.reached, self.sparsity, reason, progress.step, progress.skipped_steps, self._last,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self.reached, "masks": dict(self._masks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reached, self._masks, self._pairs = float(state["reached"]), dict(state["masks"]), []


def _largest(sizes: list[torch.Tensor], sparsity: float) -> list[torch.Tensor]:
    """Return masks that are False for the smallest share of the numbers of all tensors."""
    flat = torch.cat([size.flatten() for size in sizes])
    mask = torch.ones_like(flat, dtype=torch.bool)
    mask[flat.argsort(stable=True)[: round(sparsity * flat.numel())]] = False
    parts = mask.split([size.numel() for size in sizes])
    return [part.view_as(size) for part, size in zip(parts, sizes, strict=True)]
