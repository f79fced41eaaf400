"""MagnitudePruning: more and more of the smallest weights become zero (Zhu and Gupta, 2017, arXiv:1710.01878)."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from omnitrain.algorithms.weights import local_part, matching, parameters_by_name, patterns_of, whole_tensor
from omnitrain.checkpoint.tensor_files import shard_like
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Algorithm, TrainerLike, share_of_run
from omnitrain.optim.sparse_gradients import stored_rows, stored_values

logger: logging.Logger = logging.getLogger("omnitrain")


class MagnitudePruning(Algorithm):
    """Sets the smallest weights to zero, more of them from time to time, and keeps them there (arXiv:1710.01878).

    At a share `t` of the way from `start` to `end`, `sparsity + (initial - sparsity) * (1 - t)**3` of the weights are
    zero. Their gradients are zero as well. The norm that is logged is that of all gradients; it is clipped without
    those. The model is an ordinary one: which weights are pruned is kept in checkpoints beside it.

    Args:
        sparsity: The share of the weights that is zero in the end, above 0 and below 1.
        start: When the first are pruned: updates, or a duration such as "0.1dur" or "2ep"; None begins at once.
        end: When the last are, in the same way.
        every: How many updates are between two prunings; there is always one at `end`.
        initial: The share that is pruned at `start`.
        match: Regular expressions; parameters in whose names one of them is found are pruned. None is every parameter
            that trains and has two dimensions or more.
        scope: "layer" prunes the same share of each parameter, "global" the smallest of all of them together.

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
        if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 < sparsity < 1:
            raise ConfigError(f"`sparsity` must be a number between 0 and 1, got {sparsity!r}.")
        if isinstance(initial, bool) or not isinstance(initial, (int, float)) or not 0 <= initial <= sparsity:
            raise ConfigError(f"`initial` must be a number from 0 to `sparsity={sparsity}`, got {initial!r}.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"`every` must be a positive number of updates, got {every!r}.")
        if scope not in ("layer", "global"):
            raise ConfigError(f"`scope` must be 'layer' or 'global', got {scope!r}.")
        self.sparsity: float = sparsity
        self.start: Duration | None = None if start is None else Duration.parse(start, "ba", "start")
        self.end: Duration = Duration.parse(end, "ba", "end")
        for name, value in (("start", self.start), ("end", self.end)):
            if value is not None and value.unit not in ("ba", "ep", "dur"):
                raise ConfigError(f"`{name}` must be in updates, epochs or a share of the run, got {str(value)!r}.")
        self.every: int = every
        self.initial: float = initial
        self.match: tuple[str, ...] | None = patterns_of(match)
        self.scope: Literal["layer", "global"] = scope
        self.reached: float = 0.0
        """The share of the weights that is pruned now."""
        self._masks: dict[str, torch.Tensor] = {}
        """False for what is pruned, by the parameter's name; laid out as the parameter is."""
        self._pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._first, self._last = 0, 0

    def sparsity_at(self, done: float) -> float:
        """Return the share of the weights that is zero at this share of the way from `start` to `end`."""
        return self.sparsity + (self.initial - self.sparsity) * (1 - min(max(done, 0.0), 1.0)) ** 3

    def set_up(self, trainer: TrainerLike) -> None:
        """Forget the masks of an earlier run, and find out which updates prune.

        Raises:
            ConfigError: If it is not known when, the run ends before, or no parameter matches.
        """
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
        """Return the number of the update at which a length of the run is over."""
        if length.unit == "ba":
            return int(length.value)
        per = trainer.steps_per_epoch if length.unit == "ep" else trainer.total_steps
        if per is None:
            share_of_run(trainer, "MagnitudePruning", 0)
            raise ConfigError(f"MagnitudePruning: '{length}' is not known in data without length. Give updates.")
        return math.ceil(round(length.value * per, 6))

    def begin_epoch(self, trainer: TrainerLike) -> None:
        """Lay the masks of a checkpoint out as the parameters are."""
        self._pair(trainer.model)

    def _pair(self, model: nn.Module) -> None:
        live = parameters_by_name(model)
        self._masks = {name: shard_like(mask.to(live[name].device), live[name]) for name, mask in self._masks.items()}
        self._pairs = [(live[name], local_part(mask)) for name, mask in self._masks.items()]

    @torch.no_grad()
    def before_update(self, trainer: TrainerLike) -> None:
        """Set the gradients of pruned weights to zero."""
        for one, mask in self._pairs:
            if one.grad is not None:
                stored_values(local_part(one.grad)).mul_(stored_rows(mask, one.grad))

    @torch.no_grad()
    def after_update(self, trainer: TrainerLike) -> None:
        """Prune more weights if it is time, and set all that are pruned to zero again, which momentum has moved."""
        step = trainer.progress.step + 1
        is_due = self._first <= step < self._last and (step - self._first) % self.every == 0
        if is_due or (step >= self._last and self.reached < self.sparsity):
            self._prune(trainer.model, self.sparsity_at((step - self._first) / (self._last - self._first)))
        for one, mask in self._pairs:
            local_part(one).mul_(mask)

    def _prune(self, model: nn.Module, sparsity: float) -> None:
        """Choose the weights that are zero from now on; what was pruned stays so."""
        self.reached = max(self.reached, sparsity)
        live, sizes = parameters_by_name(model), dict[str, torch.Tensor]()
        for name in matching(model, self.match, "MagnitudePruning", self._masks):
            sizes[name] = whole_tensor(live[name]).abs()
            if name in self._masks:
                sizes[name].masked_fill_(~whole_tensor(self._masks[name]), -1.0)
        for names in [list(sizes)] if self.scope == "global" else [[name] for name in sizes]:
            kept = _kept([sizes[name] for name in names], self.reached)
            self._masks |= zip(names, kept, strict=True)
        self._pair(model)

    def end_run(self, trainer: TrainerLike) -> None:
        """Warn if the run has ended before `end`, as it does if steps were skipped or it was stopped early."""
        reason, progress = trainer.stop_reason, trainer.progress
        if self.reached >= self.sparsity or reason in ("", "signal") or trainer.rank:  # after a signal it is resumed
            return
        logger.warning(
            "MagnitudePruning has pruned %.4g of the weights and not `sparsity=%s`: the run ended (%s) after %d "
            "updates and %d skipped steps, and `end` is update %d. Give an earlier `end`, or train longer.",
            self.reached, self.sparsity, reason, progress.step, progress.skipped_steps, self._last,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the share that is pruned, and the masks: bool tensors of the shape of their parameters."""
        return {"reached": self.reached, "masks": dict(self._masks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.reached, self._masks, self._pairs = float(state["reached"]), dict(state["masks"]), []


def _kept(sizes: list[torch.Tensor], sparsity: float) -> list[torch.Tensor]:
    """Return True for all but this share of the numbers, the smallest of all tensors together."""
    flat = torch.cat([one.flatten() for one in sizes])
    kept = torch.ones_like(flat, dtype=torch.bool)
    kept[flat.argsort(stable=True)[: round(sparsity * flat.numel())]] = False
    return [part.view_as(one) for part, one in zip(kept.split([one.numel() for one in sizes]), sizes, strict=True)]
