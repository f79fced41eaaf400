"""Units: the computation on one batch, which returns a loss and outputs.

`ModelUnit` is the default and handles the usual kinds of models; a user's own `TrainUnit` replaces it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.data.collation import LABEL_KEYS, count_samples, get_labels, missing_labels_hint, tensors_in
from omnitrain.model.losses import CrossEntropy, LossMean, count_labels, parts_of, shifts_by_default, total_of

logger: logging.Logger = logging.getLogger("omnitrain")

LossFunction = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
Batch = TypeVar("Batch", contravariant=True)


@dataclass(frozen=True, slots=True)
class Sum:
    """A training metric whose values add up over micro-batches and ranks.

    Args:
        value: The sum over the batch.
        running: Whether to add up over the whole run, instead of since the last log and since the epoch began.

    >>> StepOutput(torch.tensor(0.5), metrics={"words": Sum(torch.tensor(12))}).metrics
    {'words': Sum(value=tensor(12), running=False)}
    """

    value: Any
    running: bool = False


@dataclass(frozen=True, slots=True)
class Max:
    """A training metric of which the largest value counts; `Max(-x)` finds the smallest one.

    Args:
        value: The maximum over the batch.

    >>> StepOutput(torch.tensor(0.5), metrics={"longest": Max(17)}).metrics
    {'longest': Max(value=17)}
    """

    value: Any


@dataclass(slots=True)
class StepOutput:
    """The result of one micro-batch.

    Attributes:
        loss: A scalar: the mean over the batch, or the sum over `num_targets` targets if that is given.
            None if no loss is needed and the batch has no labels.
        outputs: What metrics are computed from, usually logits of shape (samples, ..., classes).
        labels: What the outputs are compared with.
        num_targets: The number of targets summed in `loss`, or the sum of what they count.
        extra: Further inputs of a metric function written for transformers, by name there; arrays like the outputs.
        metrics: Means over the batch by name, as scalars on the device or numbers, or pairs of a mean and its weight.
            The logs show them, averaged by their own weights or by those of the losses. They are detached. A `Sum`, a
            `Max` or an object of torchmetrics, updated with this batch, is added up in its own way.

    >>> StepOutput(torch.tensor(0.5), metrics={"accuracy": torch.tensor(0.75)}).metrics
    {'accuracy': tensor(0.7500)}
    """

    loss: Tensor | None
    outputs: Any = None
    labels: Any = None
    num_targets: float | Tensor | None = None
    extra: dict[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    # All that the model returned, of which `outputs` may be a part; None if nothing needs it.
    _returned: Any = field(default=None, repr=False, compare=False)
    # What this loss is a mean over, where a unit has several losses.
    _loss_mean: LossMean | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Cut the metrics off from the graph, which DDP would else look for gradients in.

        Raises:
            DataError: If the loss is no scalar tensor, or `metrics` no dict.
        """
        if self.loss is not None and (not isinstance(self.loss, Tensor) or self.loss.numel() != 1):
            raise DataError(
                f"`loss` of a StepOutput must be a scalar tensor, got {_describe(self.loss)}. Reduce or add up the "
                "losses, and give what is to be logged to `metrics`; a unit may also return a dict of losses by itself."
            )
        if self.metrics is not None:
            if not isinstance(self.metrics, Mapping):
                raise DataError(f"`metrics` must be a dict of scalars by name, got {_describe(self.metrics)}.")
            self.metrics = {name: _detached(value) for name, value in self.metrics.items()}

    def required_loss(self) -> Tensor:
        """Return the loss, or raise DataError if there is none."""
        if self.loss is None:
            raise DataError("Training needs a loss, but the unit, or `_forward`, returned none for this batch.")
        return self.loss


def _detached(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(_detached(entry) for entry in value)
    if isinstance(value, (Sum, Max)):
        return replace(value, value=_detached(value.value))
    return value.detach() if isinstance(value, Tensor) else value


@runtime_checkable
class TrainUnit(Protocol[Batch]):
    """A user's own forward pass: `unit(batch)` returns a mean loss, or (sum of losses, number of targets).

    A unit with two required arguments is called as `unit(model, batch)`, and so is its `evaluate`.

    The loss can be a dict of losses, as for `loss_fn`. A unit can also return a `StepOutput`, with training metrics.

    If it has a method `set_step_nr(step)`, that is called before each step, counted from 1.
    """

    def __call__(
        self, batch: Batch
    ) -> Tensor | Mapping[str, Tensor] | tuple[Tensor | Mapping[str, Tensor], int | Tensor | None] | StepOutput:
        """Return the loss of `batch`, which is on the device."""
        ...


@runtime_checkable
class EvalUnit(Protocol[Batch]):
    """A unit that also returns the outputs and labels for metrics."""

    def evaluate(self, batch: Batch) -> StepOutput:
        """Return the loss, outputs and labels of an evaluation batch; called without gradients."""
        ...


class ModelUnit:
    """The default unit: calls the model and finds the loss in what it returns.

    A dict batch is passed by keyword, without the keys that `forward` does not take; labels under another usual name
    ("label", "targets") reach a `forward` that takes `labels`. The last entry of a tuple batch is the labels, and the
    others are passed as `model(*inputs)`. The loss is `loss_fn(outputs, labels)` if there is a `loss_fn`. For models
    written for Composer (`forward` takes one argument, the whole batch) it is `model.loss(outputs, batch)`. Otherwise
    it is the output's `loss`, the "loss" (or "total") of a dict, the first entry of a tuple, or an output without
    dimensions itself. If that is a dict of losses, the loss is its "total", or else the sum, and the logs show each
    part as "loss_<part>"; the same holds for a model that returns nothing but losses by name. The logs also show the
    scalars that an output has in a dict "metrics". Without a `loss_fn`, a `forward` that calls its argument at the
    place of a tuple's labels by such a name ("targets") gets them: torchvision's detectors, for example.

    Args:
        model: The bare module, used only for its signature; the model to run is an argument of the call.
        loss_fn: The user's loss.
        label_names: The keys of the labels in a dict batch, if they are not the usual ones.

    >>> unit = ModelUnit(nn.Linear(2, 1), nn.MSELoss())
    >>> unit(nn.Linear(2, 1), (torch.ones(3, 2), torch.ones(3, 1))).outputs.shape
    torch.Size([3, 1])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None = None, label_names: Sequence[str] = ()) -> None:
        self.loss_fn = loss_fn
        _check_shift(loss_fn, model)
        check_untrained_loss("`loss_fn`", loss_fn, model)
        self._loss_modules = own_modules(loss_fn, model)
        self._has_checked_buffers = False
        self.label_names = label_names
        self._label_keys = (*label_names, *LABEL_KEYS)
        self.model_loss: Callable[..., Any] | None = None
        model = unwrap(model)
        self.loss_mean: LossMean = LossMean.of(loss_fn, model)
        parameters = inspect.signature(model.forward).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._positional = [parameter.name for parameter in parameters if parameter.kind is by_keyword[0]]
        self._label_places = [[name] for name in self._label_keys]
        self._names = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
        self._takes = None if takes_any else self._names
        self._needs = {p.name for p in parameters if p.kind in by_keyword and p.default is p.empty}
        # If forward takes more than the batch, a method `loss` may be for the model's own use.
        has_loss = isinstance(inspect.getattr_static(type(model), "loss", None), FunctionType)
        if loss_fn is None and has_loss and len(self._names) == 1:
            self.model_loss = cast(Callable[..., Any], model.loss)
        self._warned_keys: set[str] = set()
        # A cache for generation costs memory, and with it transformers' models ignore the borders between the
        # sequences of a packed row; transformers' Trainer turns it off too.
        base = _base_of(model)
        self._named = forward_names(model)
        self._main_input = getattr(base, "main_input_name", "input_ids")
        caches = getattr(getattr(base, "config", None), "use_cache", False)
        takes = caches and "use_cache" in inspect.signature(base.forward).parameters
        self._always = {"use_cache": False} if takes else {}

    @property
    def columns(self) -> frozenset[str] | None:
        """The keys of a dict batch that are used, labels and arguments of `forward`; None if it may take any.

        A `forward` that names its main input, as in transformers, names the others too, with or without `**kwargs`.
        """
        if self.model_loss is not None or (self._takes is None and self._main_input not in self._named):
            return None
        return frozenset(self._named).union(self._label_keys)

    def __call__(self, model: Any, batch: Any) -> StepOutput:
        """Return loss and outputs of `batch`. Without gradients, a batch without labels may have no loss.

        Raises:
            DataError: If a loss is needed and cannot be found, or is no scalar.
        """
        loss, outputs, metrics = self.run(model, batch)
        scores, labels = scores_in(outputs, loss), get_labels(batch, self.label_names)
        returned = outputs if loss is None or torch.is_grad_enabled() else None
        return StepOutput(loss, scores, labels, None, None, metrics, returned)

    def run(self, model: Any, batch: Any) -> tuple[Tensor | None, Any, Mapping[str, Any] | None]:
        """Return the loss of `batch`, what the model returned for it, and what is to be logged of it besides."""
        labels = get_labels(batch, self.label_names)
        needs_loss = torch.is_grad_enabled()
        if self.model_loss is not None:
            outputs = model(batch)
            loss = self.model_loss(outputs, batch) if needs_loss or labels is not None else None
        else:
            outputs = self._call(model, batch)
            if self.loss_fn is None:
                loss = _loss_in(outputs)
            else:
                loss = self._loss_of(outputs, labels, batch) if needs_loss or labels is not None else None
        metrics = metrics_in(outputs)
        has_parts = not isinstance(loss, Tensor) and isinstance(loss, Mapping)
        if has_parts:
            metrics = {**parts_of(loss), **(metrics or {})}
        loss = total_of(loss) if has_parts or self.model_loss is not None else loss
        if needs_loss or loss is not None:
            if self.loss_fn is not None and not isinstance(loss, Tensor):
                raise DataError(
                    f"`loss_fn` returned {_describe(loss)}. Return the loss as a scalar tensor that gradients can be "
                    "taken of, or a dict of such losses."
                )
            if not isinstance(loss, Tensor):
                raise self.missing_loss(outputs, batch)
            if loss.numel() != 1:
                raise DataError(
                    f"The loss must be a scalar, got a tensor of shape {tuple(loss.shape)}. "
                    "Reduce it in the model or in `loss_fn`, for example with reduction='mean'."
                )
            loss = loss.reshape(()) if loss.ndim else loss
            if self.loss_mean.is_sum:
                loss = loss / count_samples(batch)
        return loss, outputs, metrics

    def missing_loss(self, outputs: Any, batch: Any) -> DataError:
        """Return the error for a batch that gives no loss, which says why; `outputs` is what the model returned."""
        computes_loss = self.model_loss is not None or "labels" in self._names
        if (self.loss_fn is not None or computes_loss) and get_labels(batch, self.label_names) is None:
            who = "`loss_fn`" if self.loss_fn is not None else "The loss of the model"
            return DataError(
                f"{who} needs labels, and none were found in the batch. {missing_labels_hint(batch, self.label_names)} "
                "Data without labels are for `predict`."
            )
        similar = [name for name in outputs if "loss" in str(name)] if isinstance(outputs, Mapping) else []
        rename = f" If {similar[0]!r} is the loss, call it 'loss'." if similar else ""
        return DataError(
            f"No loss found: the model returned {_describe(outputs)}. Pass `loss_fn=` (called as loss_fn(outputs, "
            "labels)), or return the loss from the model: an output with `.loss`, a dict with 'loss' or a tuple that "
            f"starts with it.{rename}"
        )

    def _loss_of(self, outputs: Any, labels: Any, batch: Any) -> Any:
        assert self.loss_fn is not None
        if not self._has_checked_buffers and torch.is_grad_enabled():
            self._has_checked_buffers = True
            with _unchanged_buffers(self.loss_fn, self._loss_modules):
                return self._loss_of(outputs, labels, batch)
        try:
            return self.loss_fn(outputs, labels)
        except Exception as error:
            if labels is not None:
                if _differ_in_classes(outputs, labels):
                    raise DataError(
                        f"`loss_fn` got outputs of shape {tuple(outputs.shape)} and probabilities of shape "
                        f"{tuple(labels.shape)}: the last number, the classes, must be the same. Correct the "
                        "`num_classes` of LabelSmoothing, MixUp or CutMix, or the model."
                    ) from error
                if not isinstance(outputs, Tensor):
                    error.add_note(f"`loss_fn` got what the model returned as a whole: {_describe(outputs)}.")
                raise
            missing = self.missing_loss(outputs, batch)
            missing.add_note(f"loss_fn(outputs, None) failed: {error}")
            raise missing from error

    def _call(self, model: Any, batch: Any) -> Any:
        if isinstance(batch, (tuple, list)):
            size = len(batch)
            # a `forward` that computes the loss calls the last entry labels
            takes_all = self.loss_fn is None and self._positional[size - 1 : size] in self._label_places
            return model(*batch) if size == 1 or takes_all else model(*batch[:-1])
        if not isinstance(batch, Mapping):
            return model(batch)
        try:
            return model(**{**self._always, **self._keywords(batch)})
        except TypeError as error:
            missing = sorted(self._needs - batch.keys() - {"labels"})
            if not missing:
                raise
            raise DataError(
                f"The model's forward() needs {', '.join(map(repr, missing))}, and the batch has the keys "
                f"{', '.join(map(repr, batch))}. Name the keys of the samples like its arguments, or make them tuples "
                "(inputs, labels), of which the inputs are passed by position."
            ) from error

    def _keywords(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a batch with which the model is called."""
        if self.loss_fn is None:
            if "labels" in self._names and "labels" not in batch:  # labels of another name get this one
                label_keys = LABEL_KEYS if len(self.label_names) > 1 else self._label_keys
                label_key = next((key for key in label_keys if key in batch and key not in self._names), None)
                batch = {"labels" if key == label_key else key: value for key, value in batch.items()}
            if self._takes is None or batch.keys() <= self._takes:
                return batch
        fitting = {}
        for key, value in batch.items():
            is_label = self.loss_fn is not None and key in self._label_keys
            if (not is_label or key in self._needs) and (self._takes is None or key in self._takes):
                fitting[key] = value
            elif not is_label and key not in self._warned_keys:
                self._warned_keys.add(key)
                logger.warning("The batch's %r is not passed to the model: its forward() takes no such argument.", key)
        return fitting


class WholeBatchUnit(ModelUnit):
    """For models whose `forward` takes the whole batch as one argument, and returns the loss, or it first.

    Models for nnScaler are of this kind.

    >>> class Mean(nn.Module):
    ...     def forward(self, batch):
    ...         return batch["x"].mean(), batch["x"]
    >>> WholeBatchUnit()(Mean(), {"x": torch.ones(3)}).loss
    tensor(1.)
    """

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def _call(self, model: Any, batch: Any) -> Any:
        return model(batch)


def forward_names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's `forward`; with adapters of PEFT, those of the base model too."""
    model = unwrap(model)
    forwards = (model.forward, _base_of(model).forward)
    return {name for forward in forwards for name in inspect.signature(forward).parameters}


def _base_of(model: Any) -> Any:
    """Return the model inside of adapters of PEFT, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def run_unit(unit: Any, model: Any, batch: Any) -> StepOutput:
    """Run the default unit or the user's on `batch`, and return the result in one form."""
    if isinstance(unit, ModelUnit):
        return unit(model, batch)
    if not torch.is_grad_enabled() and hasattr(unit, "evaluate"):
        return unit.evaluate(model, batch) if _takes_model(unit.evaluate) else unit.evaluate(batch)
    result = unit(model, batch) if _takes_model(unit) else unit(batch)
    if isinstance(result, StepOutput):
        return result
    output, num_targets = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    loss, metrics = output, None
    if isinstance(output, Mapping):
        loss, metrics = total_of(output), parts_of(output)
        if num_targets is not None:  # then all of them are sums
            metrics = {name: part / num_targets if num_targets else part for name, part in metrics.items()}
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise DataError(
            "`unit` must return a scalar loss or a dict of losses, (sum of losses, number of targets), or a StepOutput,"
            f" got {_describe(result)}."
        )
    loss = loss.reshape(()) if loss.ndim else loss
    return StepOutput(loss, labels=get_labels(batch), num_targets=num_targets, metrics=metrics)


def _takes_model(unit: Any) -> bool:
    """Return whether a unit, or a method of it, has two required positional arguments, the model and the batch."""
    is_function = inspect.isfunction(unit)
    call: Any = unit if is_function else getattr(unit, "__func__", None)
    if call is None:
        call = getattr(type(unit), "forward" if isinstance(unit, nn.Module) else "__call__", None)
    code = getattr(call, "__code__", None)  # a signature would cost microseconds in each step
    return code is not None and code.co_argcount - len(call.__defaults__ or ()) == (2 if is_function else 3)


def count_as_sum(output: StepOutput, weight: float) -> None:
    """Take a loss without a number of targets for the sum over `weight` of them, and so each part of it."""
    if output.num_targets is not None:
        return
    output.num_targets = count = math.ceil(weight)
    if output.metrics is not None and count:
        output.metrics = {
            name: value / count if name.startswith("loss_") and type(value) is not tuple else value
            for name, value in output.metrics.items()
        }


def without_effect(output: StepOutput, loss: Tensor) -> Tensor:
    """Return a loss whose backward pass runs like that of `loss`, but gives gradients of zero.

    The other ranks wait for the gradients of each layer that their losses pass through. So it is the loss itself,
    unless that is the mean of no label, which is NaN, and 0 x NaN is NaN: then it is computed from the outputs that
    the loss was computed from. To ask which it is waits for the device, but only micro-batches that count nothing
    come here.
    """
    if not loss.requires_grad:  # in an evaluation
        return torch.zeros_like(loss)
    if loss.isfinite():
        return loss * 0
    used = _computed_from(loss)
    outputs = output.outputs if output._returned is None else output._returned
    nothing = [
        tensor.float().sum() * 0 for tensor in tensors_in(outputs) if tensor is not loss and tensor.grad_fn in used
    ]
    return torch.stack(nothing).sum() if nothing else loss * 0


def _computed_from(loss: Tensor) -> set[Any]:
    """Return the nodes of the graph that a backward pass of `loss` runs through."""
    visited: set[Any] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in visited:
            visited.add(node)
            ahead += [parent for parent, _ in node.next_functions]
    return visited


def _differ_in_classes(outputs: Any, labels: Any) -> bool:
    """Whether labels are probabilities of another number of classes than there are scores."""
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or not outputs.ndim == labels.ndim == 2:
        return False
    if not labels.is_floating_point() or labels.shape[1] in (1, outputs.shape[1]):
        return False
    sums = labels.sum(1)
    return bool((labels >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)


def _loss_in(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs if _is_losses(outputs) else outputs.get("loss", outputs.get("total"))
    if isinstance(outputs, (tuple, list)) and outputs and not hasattr(outputs, "loss"):
        outputs = outputs[0]
    if isinstance(outputs, Tensor):
        return outputs if outputs.ndim == 0 else None  # one score of one sample has dimensions
    return getattr(outputs, "loss", None)


def _is_losses(outputs: Any) -> bool:
    """Whether a model returned nothing but losses by name, as torchvision's detectors do in training."""
    if not isinstance(outputs, Mapping) or not outputs or not outputs.keys().isdisjoint(("loss", "total")):
        return False
    has_graph = torch.is_grad_enabled()  # where a metric among them has none, and is not to be added up
    return all(
        isinstance(value, Tensor) and not value.ndim and value.is_floating_point() and value.requires_grad >= has_graph
        for value in outputs.values()
    )


def metrics_in(outputs: Any) -> Mapping[str, Any] | None:
    """Return what a model wants logged, if its output has such a dict."""
    if isinstance(outputs, Tensor):
        return None
    is_named = isinstance(outputs, (dict, Mapping))  # a dict is seen at once
    metrics = outputs.get("metrics") if is_named else getattr(outputs, "metrics", None)
    return None if metrics is None or not isinstance(metrics, Mapping) else metrics


def scores_in(outputs: Any, loss: Any, ignored: Collection[str] = ()) -> Any:
    """Return the outputs for metrics: `logits` if there is such a key, otherwise everything but the loss."""
    if isinstance(outputs, Tensor):
        return None if outputs is loss else outputs
    if _is_losses(outputs):
        return None
    if isinstance(outputs, Mapping):
        left_out = ["loss", "total", *ignored]
        if "metrics" in outputs and metrics_in(outputs) is not None:
            left_out.append("metrics")
        rest = {key: value for key, value in outputs.items() if key not in left_out and value is not None}
        for key in ("logits", "predictions"):
            if key in rest:
                return rest[key]
        values = tuple(rest.values())
    elif isinstance(outputs, list) and outputs and all(isinstance(value, Mapping) for value in outputs):
        return outputs  # an object for each sample
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "logits"):
        values = tuple(value for value in outputs if value is not loss)
    else:
        return getattr(outputs, "logits", None)
    return values[0] if len(values) == 1 else (values or None)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(_describe(entry) for entry in value[:4])}"
    return f"{type(value).__name__} {value!r}"[:80]


def _check_shift(loss_fn: Any, model: Any) -> None:
    """Reject a loss that compares each score with its own token where the model predicts the next one."""
    modules, bare = loss_fn.modules() if isinstance(loss_fn, nn.Module) else (), unwrap(model)
    if any(isinstance(module, CrossEntropy) and not module.shift for module in modules) and shifts_by_default(bare):
        raise ConfigError(
            f"`loss_fn` compares scores with the labels at the same position, and {type(bare).__name__} predicts each "
            "label one place before it. Pass CrossEntropy(shift=True)."
        )


def own_modules(loss: Any, model: Any) -> dict[str, nn.Module]:
    """Return the modules of a loss that are not modules of the model, by name.

    The loss may be a module, a method of one, or a partial of either; anything else has no modules.
    """
    if isinstance(loss, functools.partial):
        parts = [own_modules(part, model) for part in (loss.func, *loss.args, *loss.keywords.values())]
        return {name: module for modules in parts for name, module in modules.items()}
    loss = getattr(loss, "__self__", loss)
    if not isinstance(loss, nn.Module):
        return {}
    in_model = set(unwrap(model).modules())
    return {name: module for name, module in loss.named_modules() if module not in in_model}


def check_untrained_loss(name: str, loss: Any, model: Any) -> None:
    """Reject a loss with parameters that require a gradient and are not the model's, which nothing would train.

    Raises:
        ConfigError: If there are such parameters; `name` is what it calls the loss.
    """
    trained = {id(parameter) for parameter in unwrap(model).parameters()}
    untrained = list[str]()
    for prefix, module in own_modules(loss, model).items():
        parameters = module.named_parameters(prefix, recurse=False)
        untrained += [key for key, parameter in parameters if parameter.requires_grad and id(parameter) not in trained]
    if untrained:
        raise ConfigError(
            f"{name} ({_class_name(loss)}) has parameters that are not the model's, and only those of the model are "
            f"trained and saved: {', '.join(untrained[:3])}{', ...' if len(untrained) > 3 else ''}. Pass a model that "
            "has the loss as a submodule and returns it, as in {'loss': loss, 'logits': scores}; or freeze them with "
            "requires_grad_(False)."
        )


def move_loss(loss: Any, model: Any, device: torch.device) -> None:
    """Move what a loss has of its own, such as class weights, to a device; what it shares with the model stays."""
    of_model = set(unwrap(model).parameters())
    for module in own_modules(loss, model).values():
        if of_model.isdisjoint(module.parameters()):
            module.to(device)


def move_unit(unit: Any, model: Any, device: torch.device) -> None:
    """Move the tensors and modules that a unit has as attributes, or in lists and dicts, as `move_loss` does."""
    move_loss(unit, model, device)
    if inspect.isroutine(unit) or inspect.isclass(unit) or not hasattr(unit, "__dict__"):
        return
    bare, attributes = unwrap(model), vars(unit)
    of_model = {id(tensor) for tensor in (*bare.parameters(), *bare.buffers())}
    for place in (attributes, *(value for value in attributes.values() if isinstance(value, (dict, list)))):
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if isinstance(value, nn.Module):
                move_loss(value, model, device)
            elif isinstance(value, Tensor) and id(value) not in of_model and value.device != device:
                new = value.detach().to(device).requires_grad_(value.requires_grad)
                place[key] = nn.Parameter(new, value.requires_grad) if isinstance(value, nn.Parameter) else new


@contextlib.contextmanager
def _unchanged_buffers(loss: Any, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Raise ConfigError if the persistent buffers of a loss change inside: no checkpoint would have them."""
    before = _buffers_of(modules)
    yield
    for name, (buffer, _version) in _buffers_of(modules).items():
        former, version = before.get(name, (None, 0))
        same = former is buffer and version == _version
        if not same and (former is None or former is buffer or not torch.equal(former.to(buffer.device), buffer)):
            raise ConfigError(
                f"`loss_fn` ({_class_name(loss)}) changes its buffer {name!r} when it is called, and only the buffers "
                "of the model are saved and shared by processes. Pass a model that has the loss as a submodule and "
                "returns it, as in {'loss': loss, 'logits': scores}; a part that is not to change needs eval()."
            )


def _buffers_of(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, int]]:
    """Return the persistent buffers of modules by name, each with its version."""
    return {
        name: (buffer, buffer._version)
        for prefix, module in modules.items()
        for name, buffer in module.named_buffers(prefix, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }


def _class_name(loss: Any) -> str:
    loss = loss.func if isinstance(loss, functools.partial) else loss
    return type(getattr(loss, "__self__", loss)).__name__


def no_token_counts() -> DataError:
    """Return the error for `grad_reduction="per-token-mean"` where tokens are not counted."""
    return DataError(
        "`grad_reduction='per-token-mean'` needs token counts: labels that are integers of more than one "
        "dimension, or a `unit` that returns (loss, num_targets). Use grad_reduction='mean' otherwise."
    )


def count_tokens(batch: Any) -> int:
    """Return the tokens of a host batch: the unmasked ones, or all `input_ids`, or the labels that count, or 0.

    A batch that has a method `count_tokens` is asked.
    """
    if hasattr(batch, "count_tokens"):
        return batch.count_tokens()
    if not isinstance(batch, tuple) and isinstance(batch, Mapping):
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.device.type == "cpu":
            return int(np.count_nonzero(mask.numpy()))
        if isinstance(ids, Tensor):
            return ids.numel()
    return count_labels(batch) or 0


def generated(model: Any, inputs: Mapping[str, Any], synced: bool, options: Mapping[str, Any]) -> Tensor:
    """Return the tokens that a bare module of transformers generates, of shape (sequences, length).

    With `synced`, no process may finish before the others, because each has a part of the weights. `options` are other
    arguments of `model.generate`.
    """
    tokens = model.generate(**inputs, **{"synced_gpus": synced, **options})
    return getattr(tokens, "sequences", tokens)
