"""Statistics and histograms of weights, gradients, updates and activations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omnitrain.checkpoint.state_dicts import bare_name, unwrap
from omnitrain.core.duration import AnyInterval, Duration, Every, make_interval, parse_interval
from omnitrain.core.errors import ConfigError, did_you_mean
from omnitrain.core.events import Callback, Histogram, TrainerLike
from omnitrain.data.collation import tensors_in
from omnitrain.optim.param_groups import find_matches

Watched = Literal["weights", "gradients", "updates", "activations"]
_KINDS = ("weights", "gradients", "updates", "activations")
_STATISTICS = ("norm", "mean", "std", "min", "max")
# Exponents of 2 of the innermost and the outermost edge of the bins of activations.
_SMALLEST, _LARGEST = -15.0, 16.0


@dataclass(slots=True)
class _TensorSums:
    """Sums over a tensor, or over this rank's shard of it."""

    added: Tensor
    """The number of values, their sum and the sum of their squares."""
    ends: Tensor
    """The negated smallest value, and the largest."""
    counts: Tensor
    edges: Tensor
    alive: Tensor | None = None
    """Of activations: which units were nonzero at least once."""


class Distributions(Callback):
    """Logs the distributions of weights, gradients, updates and activations at an interval.

    A row of logs gets `weights_norm/<name>`, `_mean`, `_std`, `_min` and `_max`, the same for the others,
    `update_ratio/<name>` (the norm of the update over that of the weight before it) and `activations_dead/<module>`
    (the share of units that are zero in the full batch). Loggers that show histograms get them as "weights/<name>".
    Gradients are those that the optimizer gets: averaged, unscaled and clipped. An update is the weight after the step
    minus the weight before it. Activations are the outputs of modules in all micro-batches of the step, on all ranks; a
    unit is an entry of the last dimension, or of the second one in tensors of four or more dimensions. Bins of
    activations are powers of 2 of both signs, from 2^-15 to 2^16; other bins are evenly spaced between the smallest and
    the largest value.

    A step is measured on the device and read once, at its end; other steps cost nothing. Sharded tensors of FSDP 2
    are measured as full tensors, so the histogram is the same on any number of processes.

    Args:
        match: A regex, or several, searched in the names of the parameters to measure.
        of: What to measure: "weights", "gradients", "updates", "activations".
        every: The interval: steps, or a string such as "500ba" or "1ep"; None is the trainer's `log_steps`. An
            interval in other units than steps measures the first step after it has passed.
        bins: Number of bins of a histogram, even.
        modules: A regex, or several, for the modules whose activations are measured; None is all without children.

    Raises:
        ConfigError: If an argument is wrong; before the first step, if a pattern matches nothing, or if the backend
            hides the tensors: gradients under DeepSpeed, weights and updates under ZeRO 3, activations in a
            compiled model.

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
        unknown = [kind for kind in self.of if kind not in _KINDS]
        if unknown or not self.of:
            raise ConfigError(
                f"`of` must hold some of {', '.join(map(repr, _KINDS))}, got {of!r}."
                f"{did_you_mean(str(unknown[0]), _KINDS) if unknown else ''}"
            )
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2 or bins % 2:
            raise ConfigError(f"`bins` must be an even number, at least 2, got {bins!r}.")
        if modules is not None and "activations" not in self.of:
            raise ConfigError("`modules` says whose activations are measured, and `of` has no 'activations'. Add them.")
        self.match: list[str] = _check_patterns(match, "match")
        self.modules: list[str] | None = None if modules is None else _check_patterns(modules, "modules")
        self.every: Duration | None = None if every is None else Duration.parse(every, "ba", "every")
        self.bins = bins
        self._schedule: Every | AnyInterval | None = None
        # The interval, if it is one of steps.
        self._steps = 0
        self._is_due = self._is_measuring = False
        self._step = 0
        self._parameters: dict[str, nn.Parameter] = {}
        self._modules: dict[str, nn.Module] = {}
        self._hooks: list[Any] = []
        self._previous_weights: dict[str, Tensor] = {}
        self._sums: dict[str, _TensorSums] = {}
        self._values: dict[str, float] = {}
        self._local_shard: Callable[[Tensor], tuple[Tensor, list[Any]]] = lambda tensor: (tensor, [])

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Select the tensors to measure, and check that the backend shows them."""
        rules = parse_interval(trainer.settings.log_steps if self.every is None else self.every, "every")
        if any(rule.has_time for rule in rules) and trainer.world_size > 1:
            raise ConfigError(
                f"`every={', '.join(map(str, rules))!r}` of Distributions is a time, and the clocks of "
                f"{trainer.world_size} processes differ. Give steps, samples, tokens or epochs."
            )
        schedule = self._schedule = make_interval(rules, trainer.limits)
        self._steps = schedule.steps if isinstance(schedule, Every) else 0
        schedule.restart(trainer.progress)
        self._is_due = self._is_measuring = False
        self._reset()
        model = unwrap(trainer.model)
        self._parameters, self._modules = {}, {}
        if set(self.of) - {"activations"}:
            parameters = [(bare_name(name), parameter) for name, parameter in model.named_parameters()]
            self._parameters = find_matches("`match` of Distributions", self.match, parameters)
        if "activations" in self.of:
            modules = {bare_name(name): module for name, module in model.named_modules() if name}
            if self.modules is None:
                self._modules = {name: module for name, module in modules.items() if not [*module.children()]}
            else:
                self._modules = find_matches("`modules` of Distributions", self.modules, modules.items())
            if not self._modules:
                raise ConfigError(
                    "`of` holds 'activations', and the model is a single module without children. Leave them out."
                )
        backend: Any = trainer.backend  # type: ignore[attr-defined]
        self._local_shard, reasons = backend.shard_and_groups, backend.unsupported
        if hidden := [kind for kind in self.of if kind in reasons]:
            raise ConfigError(
                f"`of` holds {hidden[0]!r}, which cannot be seen here: {reasons[hidden[0]]}. Leave it out, or train "
                "with FSDP or DDP."
            )
        is_compiled = any(
            type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
            for module in (*backend.wrapped.modules(), *backend.model.modules())
        )
        if is_compiled and self._modules:
            raise ConfigError(
                "`of` holds 'activations', and a compiled model does not call the hooks that see them. Leave them out, "
                "or train without `compile`."
            )

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        """Start the interval at a state to which the run goes back, without values of later steps."""
        self._is_due, self._values = False, {}
        if self._schedule is not None:
            self._schedule.restart(trainer.progress)

    def on_step_start(self, trainer: TrainerLike) -> None:
        step = trainer.progress.step
        self._is_measuring = not (step + 1) % self._steps if self._steps else self._is_due
        if self._is_measuring:
            self._reset()
            self._step = step
            for name, module in self._modules.items():
                self._hooks.append(module.register_forward_hook(self._hook(name)))

    def on_before_optimizer_step(self, trainer: TrainerLike) -> None:
        """Measure the gradients, and copy the weights to compute the updates."""
        if not self._is_measuring:
            return
        self._remove_hooks()
        with torch.no_grad():
            if "gradients" in self.of:
                gradients = {name: weight.grad for name, weight in self._parameters.items() if weight.grad is not None}
                self._measure_tensors({f"gradients/{name}": grad.to_dense() for name, grad in gradients.items()})
            if "updates" in self.of:
                self._previous_weights = {name: weight.detach().clone() for name, weight in self._parameters.items()}

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Measure weights and updates, read everything from the device, and request a row of logs."""
        if not self._steps and self._schedule is not None and self._schedule.due(trainer.progress):
            self._is_due = True
        if not self._is_measuring:
            return
        self._is_measuring = False
        self._remove_hooks()
        if trainer.progress.step == self._step:  # skipped
            self._reset()
            return
        self._is_due = False
        with torch.no_grad(), trainer.lifecycle.untimed():
            if "weights" in self.of:
                self._measure_tensors({f"weights/{name}": weight.detach() for name, weight in self._parameters.items()})
            for name, previous in self._previous_weights.items():
                update = self._parameters[name].detach() - previous
                self._measure_tensors({f"updates/{name}": update, f" {name}": previous})
            if self._modules:
                self._reduce_activations(trainer)
            self._collect_results(trainer)
        trainer.control.schedule("log")

    def on_train_end(self, trainer: TrainerLike) -> None:
        self._remove_hooks()
        self._reset()

    def log_values(self, trainer: TrainerLike) -> Mapping[str, float]:
        values, self._values = self._values, {}
        return values

    # --- measuring

    def _reset(self) -> None:
        self._previous_weights, self._sums = {}, {}

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _measure_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Measure full tensors, of which this rank may hold a shard."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel():
                self._sums[name] = _measure(*self._local_shard(tensor), self.bins, has_bins=not name.startswith(" "))

    def _hook(self, name: str) -> Callable[..., None]:
        def measure(module: nn.Module, inputs: Any, output: Any) -> None:
            # a forward pass recomputed during backward shows the same activations again
            recomputes = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
            if recomputes or not torch.is_grad_enabled():
                return
            activations = next(filter(Tensor.is_floating_point, tensors_in(output)), None)
            if activations is not None and activations.numel():
                with torch.no_grad():
                    self._add_activations(f"activations/{name}", activations.detach())

        return measure

    def _add_activations(self, name: str, activations: Tensor) -> None:
        activations, _ = self._local_shard(activations)
        sums, alive = _sum_tensor(activations), None
        exponents = torch.linspace(_SMALLEST, _LARGEST, self.bins // 2, dtype=sums.ends.dtype, device=sums.ends.device)
        powers = torch.exp2(exponents)
        sums.edges = torch.cat([-powers.flip(0), powers.new_zeros(1), powers])
        sums.counts = _count_bins(activations, sums.edges)
        if activations.ndim > 1:
            dim = 1 if activations.ndim >= 4 else activations.ndim - 1
            alive = (activations != 0).transpose(0, dim).flatten(1).any(1)
        if (before := self._sums.get(name)) is not None:
            sums.added, sums.counts = before.added + sums.added, before.counts + sums.counts
            sums.ends = torch.maximum(before.ends, sums.ends)
            fits = before.alive is not None and alive is not None and before.alive.shape == alive.shape
            alive = before.alive | alive if fits else None  # type: ignore[operator]
        sums.alive, self._sums[name] = alive, sums

    def _reduce_activations(self, trainer: TrainerLike) -> None:
        """Add up over the ranks, each of which has other samples."""
        if trainer.world_size == 1:
            return
        for name in self._modules:
            sums = self._sums.get(f"activations/{name}")
            units = [None] * trainer.world_size
            dist.all_gather_object(units, None if sums is None or sums.alive is None else len(sums.alive))
            if sums is None or len(set(units)) > 1:  # a module that not all ranks have run
                self._sums.pop(f"activations/{name}", None)
                continue
            _reduce(sums, dist.group.WORLD)
            if sums.alive is not None:
                alive = sums.alive.to(torch.int32)
                dist.all_reduce(alive, dist.ReduceOp.MAX)
                sums.alive = alive.bool()

    def _collect_results(self, trainer: TrainerLike) -> None:
        """Copy all sums from the device at once, store the statistics and report the histograms."""
        if not self._sums:
            return
        parts, sizes = list[Tensor](), list[int]()
        for sums in self._sums.values():
            dead = sums.ends.new_full((1,), -1.0)
            if sums.alive is not None:
                dead = 1 - sums.alive.to(dead.dtype).mean(0, True)
            row = torch.cat([sums.added, sums.ends, dead, sums.counts.to(dead.dtype), sums.edges.to(dead.dtype)])
            parts.append(row)
            sizes.append(len(row))
        rows = torch.cat(parts).cpu().split(sizes)
        histograms, norms = dict[str, str | Histogram](), dict[str, float]()
        for name, row in zip(self._sums, rows, strict=True):
            numbers = row.tolist()
            count, total, squares, negated_low, high, dead = numbers[:6]
            low = -negated_low
            norms[name] = squares**0.5
            if name.startswith(" "):
                continue
            kind, _, rest = name.partition("/")
            mean = total / count
            std = max(squares / count - mean * mean, 0.0) ** 0.5
            for statistic, value in zip(_STATISTICS, (norms[name], mean, std, low, high), strict=True):
                self._values[f"{kind}_{statistic}/{rest}"] = value
            if kind == "activations" and dead >= 0:
                self._values[f"activations_dead/{rest}"] = dead
            bins = (len(numbers) - 7) // 2
            counts, edges = numbers[6 : 6 + bins], numbers[6 + bins :]
            histograms[name] = Histogram(edges, [int(value) for value in counts], low, high, total, squares)
        for name in self._previous_weights:
            if weight_norm := norms.get(f" {name}"):
                self._values[f"update_ratio/{name}"] = norms[f"updates/{name}"] / weight_norm
        self._reset()
        trainer.lifecycle.report(histograms)


def _sum_tensor(tensor: Tensor) -> _TensorSums:
    """Return the sums over a tensor, without bins."""
    dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
    limits = torch.finfo(tensor.dtype)
    if tensor.numel():
        low, high = torch.aminmax(torch.nan_to_num(tensor, 0.0, limits.max, limits.min))
        count = torch.full((), tensor.numel(), dtype=dtype, device=tensor.device)
        squares = torch.linalg.vector_norm(tensor, dtype=dtype).square()
        added = torch.stack([count, tensor.sum(dtype=dtype), squares])
        ends = torch.stack([-low, high]).to(dtype)
    else:  # an empty shard: fewer rows than ranks
        added, ends = tensor.new_zeros(3, dtype=dtype), tensor.new_full((2,), -float("inf"), dtype=dtype)
    return _TensorSums(added, ends, tensor.new_zeros(0, dtype=torch.int64), tensor.new_zeros(0, dtype=dtype))


def _measure(tensor: Tensor, groups: Sequence[Any], bins: int, has_bins: bool) -> _TensorSums:
    """Return the sums and bin counts of a full tensor, reduced over the ranks that hold its shards."""
    sums = _sum_tensor(tensor)
    for group in groups:
        _reduce(sums, group)
    if has_bins:
        low, high = -sums.ends[0], sums.ends[1]
        fractions = torch.arange(bins + 1, dtype=sums.ends.dtype, device=tensor.device) / bins
        sums.edges = low + (high - low) * fractions
        sums.edges[-1] = high
        sums.counts = _count_bins(tensor, sums.edges)
        for group in groups:
            dist.all_reduce(sums.counts, group=group)
    return sums


def _reduce(sums: _TensorSums, group: Any) -> None:
    """Add up the sums of the ranks of a group, in place."""
    dist.all_reduce(sums.added, group=group)
    dist.all_reduce(sums.ends, dist.ReduceOp.MAX, group=group)
    if sums.counts.numel():
        dist.all_reduce(sums.counts, group=group)


def _count_bins(tensor: Tensor, edges: Tensor) -> Tensor:
    """Return the number of finite values per bin; values outside of the edges count in the first or last bin."""
    tensor = tensor.flatten()
    bins = torch.bucketize(tensor.to(edges.dtype), edges, right=True) - 1
    bins = bins.clamp(0, len(edges) - 2)
    counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=tensor.device)
    return counts.scatter_add_(0, bins, torch.isfinite(tensor).to(torch.int64))


def _check_patterns(patterns: str | Sequence[str], argument: str) -> list[str]:
    try:
        return [
            re.compile(pattern).pattern for pattern in ([patterns] if isinstance(patterns, str) else list(patterns))
        ]
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"`{argument}` must be a regular expression, or several, got {patterns!r}: {error}."
        ) from error
