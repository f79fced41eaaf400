"""Probes of a loss before the first step.

They find whether it shifts labels and what it is a mean over. `losses.py` reads what needs no probe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.compute.precision import matmul_precision
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.data.collation import count_samples, get_labels, move_to_device, split_batch, with_labels
from omnitrain.data.stateful import preserve_state, stateful_parts
from omnitrain.metrics.accumulated import reset_objects
from omnitrain.model.losses import LossMean, is_known
from omnitrain.model.multitask import MultiTaskUnit, TaskBatch
from omnitrain.model.units import ModelUnit, StepOutput
from omnitrain.trainer.buffers import unchanged_buffers
from omnitrain.trainer.hooks import Hooks

logger: logging.Logger = logging.getLogger("omnitrain")

# Rows of a batch that are run: few, as they are run up to eight times.
_ROWS = 4


def ask_loss(trainer: Hooks, batches: Sequence[Any], is_final: bool = True) -> None:
    """Probe the loss with a batch; once in a run, on all ranks.

    The passes are those of an evaluation: modes, random numbers and weights stay unchanged. A loss that cannot be
    probed, since it fails, draws random numbers or gets labels of one class only, is taken to be what it seems. Unless
    `is_final`, it is probed again later if the batch has few rows.
    """
    trainer.loss_mean.is_checked = True
    batch = _first_of(batches)
    parts = stateful_parts(trainer.settings, trainer.backend.model)
    forwards = {name: parts[name] for name in ("unit", "loss_fn") if name in parts}
    is_compiled = "torch._dynamo" in sys.modules  # which takes seconds to import
    # nothing is compiled for these few rows
    stance = torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
    with unchanged_buffers(trainer.backend.model), preserve_state(forwards), stance:
        if isinstance(trainer.unit, MultiTaskUnit):
            for name, part in batch.parts.items() if isinstance(batch, TaskBatch) else ():
                forward = functools.partial(lambda name, model, batch: trainer.unit.run_task(name, batch), name)
                _ask(_Probe(trainer, part, forward, trainer.unit.mean_of(name)))
        else:
            _ask(_Probe(trainer, batch, trainer._forward, trainer.loss_mean), is_final)


def _first_of(batches: Sequence[Any]) -> Any:
    """Return the first batch; with those after it while it has too few rows to show what the loss is a mean over."""
    if not batches:
        return None
    joined = list(batches[:_ROWS])
    with contextlib.suppress(DataError, AttributeError, KeyError, IndexError, TypeError):
        rows = _ROWS if isinstance(joined[0], TaskBatch) else count_samples(joined[0])
        while 0 < rows < _ROWS and len(joined) > 1:
            pairs = [join_batches(*pair, rows) for pair in zip(joined[::2], joined[1::2], strict=False)]
            if pairs[0] is None:
                break
            joined, rows = list(itertools.takewhile(lambda pair: pair is not None, pairs)), 2 * rows
    return joined[0]


def _ask(probe: _Probe, is_final: bool = True) -> None:
    mean, ranks = probe.mean, probe.trainer.ranks
    flags = probe.can_shift, probe.can_split, is_final or probe.rows == _ROWS
    counts = ranks.sum("what the loss can be asked", *map(float, flags))
    can_shift, can_split, mean.is_checked = (count == ranks.world_size for count in counts)
    if can_shift:
        shifts = [shift for shift in ranks.gather("whether labels are shifted", probe.shifts()) if shift is not None]
        if shifts:
            mean.shift, mean.is_shift_known = shifts[0], True
    if can_split:
        _take_rule(mean, ranks.gather("what the loss is a mean over", probe.rules_that_hold()), probe)


def _take_rule(mean: LossMean, answers: list[list[int] | None], probe: _Probe) -> None:
    """Have the loss be the mean that is right on all ranks; warn about one that none is right for."""
    if probe.has_router and probe.trainer.ranks.is_main:
        logger.info(
            "The loss has a part that balances experts over the tokens of a micro-batch on one rank, so it depends "
            "slightly on how a step is split into them."
        )
    known = [set(answer) for answer in answers if answer is not None]
    if not known:
        return
    right = set.intersection(*known)
    if right:
        rule = probe.rules[min(right)]
        mean.ignore_index, mean.counts_labels, mean.is_sum = rule.ignore_index, rule.counts_labels, rule.is_sum
        return
    kinds = probe.trainer.ranks.gather("what the loss depends on", probe.kind_of_dependence())
    mean.is_mean = not all(kind == "means" for kind in kinds)
    mean.is_checked = True
    if not probe.trainer.ranks.is_main:
        return
    loss_fn, model = probe.trainer.settings.loss_fn, probe.trainer.backend.model
    if not mean.is_mean:
        logger.warning(
            "%s: its value in evaluations depends on `eval_batch_size`. %s.",
            _no_mean(loss_fn, model), _remedy(loss_fn),
        )  # fmt: skip
    elif "samples" in kinds:
        logger.warning(
            "%s compares the samples of a batch with each other, so it depends on the size of the batch: on "
            "`batch_size`, `gradient_accumulation_steps` and processes, and in evaluations on `eval_batch_size`.",
            _name_of_loss(loss_fn, model),
        )  # fmt: skip


def _name_of_loss(loss_fn: Any, model: nn.Module) -> str:
    if loss_fn is None:
        return f"The loss of {type(unwrap(model)).__name__}"
    return f"`loss_fn` ({getattr(loss_fn, '__name__', type(loss_fn).__name__)})"


def _no_mean(loss_fn: Any, model: nn.Module) -> str:
    what = "is no mean over the labels or the rows of a batch, but over something else, or a sum of several means"
    return f"{_name_of_loss(loss_fn, model)} {what}"


def _remedy(loss_fn: Any) -> str:
    unit = "a `unit` that returns (sum of losses, number of targets)"
    if loss_fn is None:
        return f"Pass {unit}"
    return (
        "Give it a method `mean_over(labels)` that returns what its sum over these labels is divided by, as "
        f"omnitrain.CrossEntropy(weight=...) has, or pass {unit}"
    )


def split_error(loss_fn: Any, model: nn.Module) -> ConfigError:
    """Return the error of a loss that is no mean in a run whose steps have several micro-batches or ranks."""
    return ConfigError(
        f"{_no_mean(loss_fn, model)}: no weights of micro-batches make a step the same in every split. "
        f"{_remedy(loss_fn)}; a unit that returns the mean has micro-batches weighed by their rows. Or take steps "
        "of a single batch, with gradient_accumulation_steps=1 on one process."
    )


class _Probe:
    """Runs the first rows of a batch with changed labels, and in two parts."""

    def __init__(self, trainer: Hooks, batch: Any, forward: Callable[[Any, Any], StepOutput], mean: LossMean) -> None:
        self.trainer = trainer
        self.forward = forward
        self.mean = mean
        self.names = trainer.settings.label_names or ()
        self.is_plain = type(trainer)._forward.__module__.startswith("omnitrain.") and not (
            {"compute_loss", "prediction_step"} & trainer._overridden
        )
        self.has_router = False
        """Whether the loss has a part that balances experts."""
        self.parts: list[Any] = []
        self.batch, self.rows = batch, 0
        with contextlib.suppress(DataError):
            self.batch = batch if batch is None else split_batch(batch, _ROWS)[0]
            self.rows = 0 if batch is None else count_samples(self.batch)
            self.parts = split_batch(self.batch, -(-self.rows // 2)) if self.rows > 1 else []
        self.labels: Any = None if batch is None else get_labels(self.batch, self.names)
        self._has_token_labels: bool = (
            isinstance(self.labels, torch.Tensor)
            and self.labels.ndim > 1
            and not (self.labels.is_floating_point() or self.labels.is_complex() or self.labels.dtype == torch.bool)
        )

    # --- are labels shifted

    @property
    def can_shift(self) -> bool:
        """Whether two different labels show whether the first of a row counts; of codebooks, that of each place."""
        if self.mean.is_shift_known or not self._has_token_labels:
            return False
        return "shift_labels" not in self.batch if isinstance(self.batch, Mapping) else True

    def shifts(self) -> bool | None:
        """Return whether the loss ignores the first label of each row, but not the others; None if that is unclear."""
        labels = self.labels
        classes = labels[(labels != self.mean.ignore_index) & (labels >= 0)].unique()[:2]
        other = torch.where(labels == classes[0], classes[-1], classes[0]) if len(classes) else labels
        # two changes: of the first label of each row, and of all others; a shifted loss ignores the first change
        first, rest = labels.clone(), labels.clone()
        if len(classes):  # one label for all: rows that begin alike, and exchange their labels, have the same loss
            first[..., 0] = classes[0] if (labels[..., 0] != classes[0]).any() else classes[-1]
        later = labels[..., 1:] != self.mean.ignore_index
        rest[..., 1:] = torch.where(later, other[..., 1:], labels[..., 1:])
        losses = [self._loss(with_labels(self.batch, variant, self.names)) for variant in (labels, first, rest)]
        plain, of_first, of_rest = (math.nan if loss is None else loss for loss in losses)
        if len(classes) < 2 or not math.isfinite(plain + of_first + of_rest) or plain == of_first == of_rest:
            return None  # the last: labels have no effect on the loss
        return abs(of_first - plain) <= 1e-3 * abs(of_rest - plain) and math.isclose(of_first, plain, rel_tol=1e-6)

    # --- what is it a mean over

    @property
    def can_split(self) -> bool:
        """Whether it is not known what the loss is a mean over, and rows can be separated.

        It is known for PyTorch's losses, those with `mean_over`, and models of transformers with one label for a row.
        """
        unit = self.trainer.unit
        if not isinstance(unit, ModelUnit) or len(self.parts) != 2 or not self.is_plain:
            return False
        if unit.loss_fn is not None:
            return not is_known(unit.loss_fn) and self.trainer.settings.grad_reduction != "sum"
        is_of_transformers = hasattr(getattr(unwrap(self.trainer.backend.model), "config", None), "model_type")
        if self._has_token_labels or not is_of_transformers:
            return True
        label_keys = [key for key in self.batch if "label" in str(key)] if isinstance(self.batch, Mapping) else []
        return not isinstance(self.labels, torch.Tensor) or len(label_keys) > 1

    @property
    def rules(self) -> list[LossMean]:
        """What the loss may be a mean over: first what it seems to be."""
        mean, config = self.mean, getattr(unwrap(self.trainer.backend.model), "config", None)
        ignored = [getattr(config, name, None) for name in ("pad_token_id", "semantic_loss_ignore_index")]
        changes: list[dict[str, Any]] = [{}, {"counts_labels": True, "is_sum": False}]
        changes += [{**changes[1], "ignore_index": index} for index in ignored if type(index) is int]
        changes += [{"counts_labels": False, "is_sum": False}]
        if mean.loss_fn is None:  # the sum of a loss function means what it says
            changes += [{"counts_labels": False, "is_sum": True}]
        return [dataclasses.replace(mean, **change) for change in changes]

    def rules_that_hold(self) -> list[int] | None:
        """Return which of `rules` give the loss of the rows from those of two parts; None if that is unclear."""
        whole, *parts = (self._raw_loss(part) for part in (self.batch, *self.parts))
        if whole is None or None in parts or not math.isfinite(whole):
            return None
        return [number for number, rule in enumerate(self.rules) if self._holds(rule, whole, parts)]

    def _holds(self, rule: LossMean, whole: float, parts: list[Any]) -> bool:
        if rule.is_sum:
            return self._is_close(sum(parts), whole)
        weights = list[float]()
        for part in self.parts:
            divisor = rule.divisor(move_to_device(part, torch.device("cpu")), self.names)
            weights.append(count_samples(part) if divisor is None else divisor)
        terms = [weight * loss for weight, loss in zip(weights, parts, strict=True) if weight]
        # a part without any label that counts has a NaN for its mean, and is left out above
        return bool(terms) and self._is_close(sum(terms) / sum(weights), whole)

    def _is_close(self, loss: float, other: float) -> bool:
        return math.isclose(loss, other, rel_tol=self._tolerance, abs_tol=1e-7)

    @property
    def _tolerance(self) -> float:
        """How much losses of the same rows differ by rounding: kernels depend on the size of the batch."""
        trainer = self.trainer
        dtypes = {parameter.dtype for parameter in trainer.backend.model.parameters()}
        if {torch.float16, torch.bfloat16} & dtypes or trainer.precision.name in ("bf16", "fp16", "fp8"):
            return 2e-2
        # other settings let oneDNN compute in bf16 on CPUs that have it
        is_exact = trainer.device.type == "cpu" and matmul_precision() == "highest"
        return 1e-5 if is_exact else 1e-3  # accelerators take convolutions in TF32 by default

    def kind_of_dependence(self) -> str:
        """Return "samples" if they are compared with each other, "means" if not, "chance" if numbers are random."""
        with self.trainer.backend.eval_mode(self.trainer.settings.seed):
            first, second = (self._raw_loss(self.batch, restarts=False) for _ in range(2))
        doubled = self._raw_loss(join_batches(self.batch, self.batch, count_samples(self.batch)))
        if first is None or first != second:
            return "chance"
        return "means" if doubled is not None and self._is_close(doubled, first) else "samples"

    # --- passes

    def _raw_loss(self, batch: Any, restarts: bool = True) -> float | None:
        """Return the loss of a batch as the model gives it, without the part that balances experts."""
        loss = self._loss(batch, self._without_router, restarts)
        return loss * count_samples(batch) if self.mean.is_sum and loss is not None else loss

    def _without_router(self, model: Any, batch: Any) -> Any:
        loss, outputs, metrics = self.trainer.unit.run(model, batch)
        reset_objects(metrics)
        config = getattr(unwrap(self.trainer.backend.model), "config", None)
        share = getattr(config, "router_aux_loss_coef", None)
        balance = outputs.get("aux_loss") if isinstance(outputs, Mapping) else getattr(outputs, "aux_loss", None)
        if isinstance(balance, torch.Tensor) and isinstance(share, float):
            loss = loss - share * balance.to(loss.device)
            self.has_router = True
        return loss

    def _loss_of_unit(self, model: Any, batch: Any) -> Any:
        output = self.forward(model, batch)
        reset_objects(output.metrics)
        return output.loss

    def _loss(self, batch: Any, run: Any = None, restarts: bool = True) -> float | None:
        """Return the loss of a batch, or None if there is none; random numbers begin with the seed if it restarts."""
        trainer, run = self.trainer, run or self._loss_of_unit
        try:
            with (
                trainer.backend.eval_mode(trainer.settings.seed) if restarts else contextlib.nullcontext(),
                trainer._autocast(),
            ):
                loss = trainer.backend.forward(run, trainer._prepare_batch(batch))
            return None if loss is None else float(loss)
        except Exception as error:  # the first step, or the evaluation, raises it for the user
            logger.debug("The loss could not be probed: %r.", error)
            return None


def join_batches(first: Any, second: Any, rows: int) -> Any:
    """Return the rows of two batches of so many rows as one batch; None if their shapes differ."""
    if isinstance(first, torch.Tensor):
        if not first.ndim or len(first) != rows:
            return first
        return torch.cat([first, second]) if first.shape == second.shape else None
    if isinstance(first, (Mapping, tuple)):
        keys = list(first.keys()) if isinstance(first, Mapping) else range(len(first))
        entries = [join_batches(first[key], second[key], rows) for key in keys]
        if any(entry is None and first[key] is not None for key, entry in zip(keys, entries, strict=True)):
            return None
        return dict(zip(keys, entries, strict=True)) if isinstance(first, Mapping) else tuple(entries)
    if isinstance(first, list):
        return [*first, *second] if len(first) == rows else first
    return first
