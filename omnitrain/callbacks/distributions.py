"""How weights, gradients, updates and activations are spread: numbers and histograms at intervals of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omnitrain.checkpoint.state_dicts import bare_name, unwrap
from omnitrain.core.duration import Duration, Every
from omnitrain.core.errors import ConfigError, did_you_mean
from omnitrain.core.events import Callback, Histogram, TrainerLike

Watched = Literal["weights", "gradients", "updates", "activations"]
_KINDS = ("weights", "gradients", "updates", "activations")
_STATISTICS = ("norm", "mean", "std", "min", "max")
_SMALLEST, _LARGEST = -15.0, 16.0
"""The exponents of 2 between which bins of activations lie."""


@dataclass(slots=True)
class _Sums:
    """What is summed of a tensor, or of this rank's part of it."""

    count: Tensor
    total: Tensor
    squares: Tensor
    low: Tensor
    high: Tensor
    counts: Tensor
    edges: Tensor
    alive: Tensor | None = None
    """Of activations: by unit, whether one was not zero."""


class Distributions(Callback):
    """Shows how weights, gradients, updates and activations are spread, at an interval.

    A row of logs gets `weights_norm/<name>`, `_mean`, `_std`, `_min` and `_max`, the same of the others,
    `update_ratio/<name>` (the norm of the update over that of the weight before it) and `activations_dead/<module>`
    (the share of units that are zero in the whole batch). Loggers that show histograms get them as "weights/<name>".
    Gradients are those that the optimizer gets: averaged, unscaled and clipped. An update is the weight after the
    step less the one before it. Activations are the outputs of modules in all micro-batches of the step, on all ranks;
    a unit is an entry of the last dimension, or of the second one where there are four or more; their bins are powers
    of 2 of both signs, from 2^-15 to 2^16, those of the others lie evenly between the smallest and the largest value.

    A step is measured on the device and read once, at its end; other steps are not touched. Sharded tensors of FSDP 2
    are measured as whole ones, so the histogram is the same on any number of processes.

    Args:
        match: A regex, or several, of which one is found in the name of each parameter to measure.
        of: What to measure: "weights", "gradients", "updates", "activations".
        every: The interval: steps, or a string such as "500ba" or "1ep"; None is the trainer's `log_steps`. An
            interval that is not counted in steps measures the first step after it has passed.
        bins: Bins of a histogram, an even number.
        modules: A regex, or several, for the modules whose activations are measured; None is all without children.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if a pattern matches nothing, or what it asks for
            cannot be seen: gradients under DeepSpeed, weights and updates under ZeRO 3, activations in a compiled
            model.

    >>> callbacks = [Distributions(r"weight$", of=("weights", "updates"), every="100ba")]
    """

    order: ClassVar[int] | int = 10
    asks_alone: ClassVar[bool] | bool = False

    def __init__(
        self,
        match: str | Sequence[str] = ".*",
        of: Watched | Sequence[Watched] = ("weights", "gradients", "updates"),
        every: int | str | Duration | None = None,
        bins: int = 64,
        modules: str | Sequence[str] | None = None,
    ) -> None:
        self.of: tuple[str, ...] = (of,) if isinstance(of, str) else tuple(of)
        wrong = [one for one in self.of if one not in _KINDS]
        if wrong or not self.of:
            raise ConfigError(
                f"`of` must hold some of {', '.join(map(repr, _KINDS))}, got {of!r}."
                f"{did_you_mean(str(wrong[0]), _KINDS) if wrong else ''}"
            )
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2 or bins % 2:
            raise ConfigError(f"`bins` must be an even number, at least 2, got {bins!r}.")
        if modules is not None and "activations" not in self.of:
            raise ConfigError("`modules` says whose activations are measured, and `of` has no 'activations'. Add them.")
        self.match: list[re.Pattern[str]] = _patterns(match, "match")
        self.modules: list[re.Pattern[str]] | None = None if modules is None else _patterns(modules, "modules")
        self.every: Duration | None = None if every is None else Duration.parse(every, "ba", "every")
        self.bins = bins
        self._schedule: Every | None = None
        self._steps = 0
        """The interval, if it is one of steps."""
        self._is_due = self._measures = False
        self._step = 0
        self._parameters: dict[str, nn.Parameter] = {}
        self._modules: dict[str, nn.Module] = {}
        self._hooks: list[Any] = []
        self._before: dict[str, Tensor] = {}
        self._sums: dict[str, _Sums] = {}
        self._ratios: dict[str, tuple[str, str]] = {}
        self._values: dict[str, float] = {}
        self._part_of: Callable[[Tensor], tuple[Tensor, list[Any]]] = lambda tensor: (tensor, [])

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Find what is measured, and refuse what cannot be."""
        run: Any = trainer
        every = self.every or Duration.parse(trainer.settings.log_steps, "ba", "log_steps")
        if every.unit == "s" and trainer.world_size > 1:
            raise ConfigError(
                f"`every={str(every)!r}` of Distributions is a time, and the clocks of {trainer.world_size} processes "
                "differ. Give steps, samples, tokens or epochs."
            )
        self._steps = int(every.value) if every.unit == "ba" else 0
        self._schedule = Every(every, trainer.limits)
        self._schedule.restart(trainer.progress)
        self._is_due = self._measures = False
        self._forget()
        model = unwrap(trainer.model)
        named = {bare_name(name): one for name, one in model.named_parameters()}
        self._parameters = _matching(named, self.match, "match") if set(self.of) - {"activations"} else {}
        self._modules = {}
        if "activations" in self.of:
            parts = {bare_name(name): one for name, one in model.named_modules() if name}
            plain = {name: one for name, one in parts.items() if not any(True for _ in one.children())}
            self._modules = plain if self.modules is None else _matching(parts, self.modules, "modules")
            if not self._modules:
                raise ConfigError(
                    "`of` holds 'activations', and the model is a single module without parts. Leave them out."
                )
        self._part_of = run.backend.shard_and_groups
        self._refuse_unseen(run)

    def _refuse_unseen(self, run: Any) -> None:
        """Raise ConfigError for what this backend does not show."""
        unseen = run.backend.unsupported_monitoring()
        if hidden := [one for one in self.of if one in unseen]:
            raise ConfigError(
                f"`of` holds {hidden[0]!r}, which cannot be seen here: {unseen[hidden[0]]}. Leave it out, or train "
                "with FSDP or DDP."
            )
        compiled = any(
            type(one).__name__ == "OptimizedModule" or getattr(one, "_compiled_call_impl", None) is not None
            for one in (*run.backend.wrapped.modules(), *run.backend.model.modules())
        )
        if compiled and self._modules:
            raise ConfigError(
                "`of` holds 'activations', and a compiled model does not call the hooks that see them. Leave them out, "
                "or train without `compile`."
            )

    def on_step_start(self, trainer: TrainerLike) -> None:
        """Decide whether this step is measured."""
        step = trainer.progress.step
        self._measures = not (step + 1) % self._steps if self._steps else self._is_due
        if self._measures:
            self._forget()
            self._step = step
            for name, module in self._modules.items():
                self._hooks.append(module.register_forward_hook(self._hook(name)))

    def on_before_optimizer_step(self, trainer: TrainerLike) -> None:
        """Measure the gradients, and keep the weights for the updates."""
        if not self._measures:
            return
        self._remove_hooks()
        with torch.no_grad():
            if "gradients" in self.of:
                found = {f"gradients/{name}": one.grad for name, one in self._parameters.items()}
                self._add({name: one.to_dense() for name, one in found.items() if one is not None})
            if "updates" in self.of:
                self._before = {name: one.detach().clone() for name, one in self._parameters.items()}

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Measure weights and updates, read everything from the device, and request a row of logs."""
        if not self._steps and self._schedule is not None and self._schedule.due(trainer.progress):
            self._is_due = True
        if not self._measures:
            return
        self._measures = False
        self._remove_hooks()
        if trainer.progress.step == self._step:  # skipped
            self._forget()
            return
        self._is_due = False
        run: Any = trainer
        with torch.no_grad(), run.lifecycle.untimed():
            self._measure_weights()
            if self._modules:
                self._reduce_activations(trainer)
            self._read(trainer)
        trainer.control.schedule("log")

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Take the hooks off."""
        self._remove_hooks()
        self._forget()

    def log_values(self, trainer: TrainerLike) -> Mapping[str, float]:
        """Return the numbers of the latest measurement, once."""
        values, self._values = self._values, {}
        return values

    # --- measuring

    def _forget(self) -> None:
        self._before, self._sums, self._ratios = {}, {}, {}

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _measure_weights(self) -> None:
        if "weights" in self.of:
            self._add({f"weights/{name}": one.detach() for name, one in self._parameters.items()})
        if "updates" in self.of:
            for name, before in self._before.items():
                update = self._parameters[name].detach() - before
                self._add({f"updates/{name}": update, f" {name}": before})

    def _add(self, tensors: Mapping[str, Tensor]) -> None:
        """Measure whole tensors, of which this rank may have a part."""
        for name, one in tensors.items():
            if one.is_floating_point() and one.numel():
                self._sums[name] = _measured(*self._part_of(one), self.bins, has_bins=not name.startswith(" "))

    def _hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            # a recomputed forward pass, in a backward pass, shows the same activations again
            recomputes = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
            found = None if recomputes or not torch.is_grad_enabled() else _first_tensor(output)
            if found is not None and found.numel():
                with torch.no_grad():
                    self._add_activations(f"activations/{name}", found.detach())

        return note

    def _add_activations(self, name: str, found: Tensor) -> None:
        found, _ = self._part_of(found)
        sums = _summed(found)
        edges = _edges_of_activations(self.bins, found.device)
        sums.edges, sums.counts = edges, _counted(found, edges)
        dim = 1 if found.ndim >= 4 else found.ndim - 1
        if found.ndim > 1:
            sums.alive = (found != 0).transpose(0, dim).flatten(1).any(1)
        before = self._sums.get(name)
        self._sums[name] = sums if before is None else _together(before, sums)

    def _reduce_activations(self, trainer: TrainerLike) -> None:
        """Add up over the ranks, of which each has seen other samples."""
        if trainer.world_size == 1:
            return
        for name in self._modules:
            one = self._sums.get(f"activations/{name}")
            seen = [None] * trainer.world_size
            dist.all_gather_object(seen, None if one is None or one.alive is None else len(one.alive))
            if one is None or len(set(seen)) > 1:  # a module that not all ranks have run
                self._sums.pop(f"activations/{name}", None)
                continue
            _reduce(one, dist.group.WORLD)
            if one.alive is not None:
                alive = one.alive.to(torch.int32)
                dist.all_reduce(alive, dist.ReduceOp.MAX)
                one.alive = alive.bool()

    def _read(self, trainer: TrainerLike) -> None:
        """Read what was measured from the device at once, and keep the numbers and report the histograms."""
        if not self._sums:
            return
        parts, sizes = list[Tensor](), list[int]()
        for one in self._sums.values():
            dead = one.count.new_full((), -1.0) if one.alive is None else 1 - one.alive.to(one.count.dtype).mean()
            row = torch.stack([one.count, one.total, one.squares, one.low, one.high, dead])
            row = torch.cat([row, one.counts.to(row.dtype), one.edges.to(row.dtype)])
            parts.append(row)
            sizes.append(len(row))
        rows = torch.cat(parts).cpu().split(sizes)
        histograms, norms = dict[str, str | Histogram](), dict[str, float]()
        for name, row in zip(self._sums, rows, strict=True):
            numbers = row.tolist()
            count, total, squares, low, high, dead = numbers[:6]
            norms[name] = squares**0.5
            if name.startswith(" "):
                continue
            kind, _, rest = name.partition("/")
            mean = total / count
            spread = max(squares / count - mean * mean, 0.0) ** 0.5
            for statistic, value in zip(_STATISTICS, (norms[name], mean, spread, low, high), strict=True):
                self._values[f"{kind}_{statistic}/{rest}"] = value
            if kind == "activations" and dead >= 0:
                self._values[f"activations_dead/{rest}"] = dead
            bins = (len(numbers) - 7) // 2
            counts, edges = numbers[6 : 6 + bins], numbers[6 + bins :]
            histograms[name] = Histogram(edges, [int(value) for value in counts], low, high, total, squares)
        for name in self._before:
            if before := norms.get(f" {name}"):
                self._values[f"update_ratio/{name}"] = norms[f"updates/{name}"] / before
        self._forget()
        trainer.lifecycle.report(histograms)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _summed(own: Tensor) -> _Sums:
    """Return what is summed of a tensor, without bins."""
    wide = _wide(own.device)
    low, high = torch.aminmax(torch.nan_to_num(own, 0.0, torch.finfo(own.dtype).max, torch.finfo(own.dtype).min))
    return _Sums(
        torch.full((), own.numel(), dtype=wide, device=own.device),
        own.sum(dtype=wide),
        torch.linalg.vector_norm(own, dtype=wide).square(),
        low.to(wide),
        high.to(wide),
        own.new_zeros(0, dtype=torch.int64),
        own.new_zeros(0, dtype=wide),
    )


def _measured(tensor: Tensor, groups: Sequence[Any], bins: int, has_bins: bool) -> _Sums:
    """Return the sums of a whole tensor and its counts in bins of equal width, with those of other ranks' parts."""
    wide, device = _wide(tensor.device), tensor.device
    if tensor.numel():
        sums = _summed(tensor)
    else:  # there are fewer rows than ranks
        zero, end = torch.zeros((), dtype=wide, device=device), torch.full((), float("inf"), dtype=wide, device=device)
        empty = torch.zeros(0, dtype=wide, device=device)
        sums = _Sums(zero, zero.clone(), zero.clone(), end, -end, empty.to(torch.int64), empty)
    for group in groups:
        _reduce(sums, group)
    if has_bins:
        steps = torch.arange(bins + 1, dtype=wide, device=device) / bins
        sums.edges = sums.low + (sums.high - sums.low) * steps
        sums.edges[-1] = sums.high
        sums.counts = _counted(tensor, sums.edges)
        for group in groups:
            dist.all_reduce(sums.counts, group=group)
    return sums


def _reduce(sums: _Sums, group: Any) -> None:
    """Add up the sums of the ranks of a group, in place."""
    added = torch.stack([sums.count, sums.total, sums.squares])
    ends = torch.stack([-sums.low, sums.high])
    dist.all_reduce(added, group=group)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    if sums.counts.numel():
        dist.all_reduce(sums.counts, group=group)
    sums.count, sums.total, sums.squares = added.unbind()
    sums.low, sums.high = -ends[0], ends[1]


def _counted(own: Tensor, edges: Tensor) -> Tensor:
    """Return how many finite values lie between neighbouring edges; those outside are in the first and the last bin."""
    own = own.flatten()
    place = torch.bucketize(own.to(edges.dtype), edges, right=True) - 1
    place = place.clamp(0, len(edges) - 2)
    counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=own.device)
    return counts.scatter_add_(0, place, torch.isfinite(own).to(torch.int64))


def _edges_of_activations(bins: int, device: torch.device) -> Tensor:
    wide = _wide(device)
    half = bins // 2
    powers = torch.exp2(torch.linspace(_SMALLEST, _LARGEST, half, dtype=wide, device=device))
    return torch.cat([-powers.flip(0), powers.new_zeros(1), powers])


def _together(one: _Sums, other: _Sums) -> _Sums:
    alive = None
    if one.alive is not None and other.alive is not None and one.alive.shape == other.alive.shape:
        alive = one.alive | other.alive
    return _Sums(
        one.count + other.count, one.total + other.total, one.squares + other.squares,
        torch.minimum(one.low, other.low), torch.maximum(one.high, other.high), one.counts + other.counts, one.edges,
        alive,
    )  # fmt: skip


def _first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of numbers in a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts: Iterable[Any] = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    )
    return next((found for one in parts if (found := _first_tensor(one)) is not None), None)


def _patterns(given: str | Sequence[str], name: str) -> list[re.Pattern[str]]:
    patterns = [given] if isinstance(given, str) else list(given)
    try:
        return [re.compile(one) for one in patterns]
    except (re.error, TypeError) as error:
        raise ConfigError(f"`{name}` must be a regular expression, or several, got {given!r}: {error}.") from error


def _matching(named: Mapping[str, Any], patterns: Sequence[re.Pattern[str]], argument: str) -> dict[str, Any]:
    """Return the entries in whose names a pattern is found.

    Raises:
        ConfigError: If a pattern is found in none.
    """
    for one in patterns:
        if not any(one.search(name) for name in named):
            raise ConfigError(
                f"`{argument}={one.pattern!r}` of Distributions is found in no name. The names are such as "
                f"{', '.join(map(repr, list(named)[:5]))}."
            )
    return {name: one for name, one in named.items() if any(pattern.search(name) for pattern in patterns)}
