"""Losses, weighted sums of them, and what their means are over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from omnitrain.core.errors import ConfigError, DataError, check_number, did_you_mean
from omnitrain.data.collation import IGNORED_LABEL, get_labels, move_to_device


class CrossEntropy(nn.Module):
    """Cross entropy of scores and classes, with the z-loss of PaLM; its mean is right in every split of a step.

    Scores have the classes as their last dimension: (..., classes) for labels of shape (...). They are the outputs, or
    their `logits`, or the first of a tuple. Without a z-loss the loss is that of `nn.CrossEntropyLoss`, to the bit;
    half-precision scores are taken to float32 first. With one it is a dict of "ce" and "z", which are logged.

    Args:
        weight: How much each class counts: (classes,).
        ignore_index: The label that does not count.
        label_smoothing: The share of each label's probability that goes to all classes (arXiv:1512.00567).
        z_loss: The weight of the mean of log(sum(exp(scores)))**2, which keeps scores from drifting away from 0
            (PaLM, arXiv:2204.02311, which has 1e-4); 0 leaves it out.
        shift: Whether scores are compared with the labels one place after them, as causal language models of
            transformers do.

    Raises:
        ConfigError: If an option is out of its range.

    >>> loss = CrossEntropy(z_loss=1e-4)
    >>> {name: round(float(value), 4) for name, value in loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0])).items()}
    {'ce': 0.1269, 'z': 0.0005}
    """

    __constants__: ClassVar[list[str]] = ["ignore_index", "label_smoothing", "z_loss", "shift"]
    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | Sequence[float] | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        shift: bool = False,
    ) -> None:
        super().__init__()
        check_number("label_smoothing", label_smoothing, least=0, below=1)
        check_number("z_loss", z_loss, least=0)
        weight_tensor = None if weight is None else torch.as_tensor(weight)
        if weight_tensor is not None and (weight_tensor.ndim != 1 or not bool((weight_tensor >= 0).all())):
            raise ConfigError(f"`weight` must be one number of at least 0 for each class, got {weight!r:.80}.")
        if weight_tensor is not None and label_smoothing and not bool(weight_tensor.all()):
            raise ConfigError(
                "`weight` has a class that counts 0, and `label_smoothing` gives a share of its labels to other "
                "classes, whose mean would divide by 0. Give it a small weight, or make its labels `ignore_index`."
            )
        self.register_buffer("weight", weight_tensor)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.shift = shift

    def forward(self, outputs: Any, labels: Any) -> Tensor | dict[str, Tensor]:
        """Return the mean over the labels that count, or over their class weights.

        Labels may also be probabilities of the shape of the scores; the mean is then over all rows.

        Raises:
            DataError: If scores and labels do not fit each other.
        """
        scores = _scores_of(outputs)
        if self.shift and isinstance(labels, Tensor):
            scores = scores[..., :-1, :]
            labels = labels[..., 1:, :] if labels.is_floating_point() else labels[..., 1:]
        _check_shapes(scores, labels)
        if self.weight is not None and self.weight.device != scores.device:
            self.to(scores.device)  # once: each copy waits for a device
        weight = None if self.weight is None else self.weight.to(scores.dtype)
        are_classes, scores = not labels.is_floating_point(), scores.flatten(0, -2)
        labels = labels.flatten().long() if are_classes else labels.flatten(0, -2).to(scores.dtype)
        ce = F.cross_entropy(scores, labels, weight, None, self.ignore_index, label_smoothing=self.label_smoothing)
        if not self.z_loss:
            return ce
        z = scores.logsumexp(-1).square()
        if not are_classes:
            return {"ce": ce, "z": self.z_loss * z.mean()}
        counts = (labels != self.ignore_index).to(z.dtype)
        if weight is not None:
            counts = counts * weight[labels.where(counts > 0, 0)]
        return {"ce": ce, "z": self.z_loss * (z * counts).sum() / counts.sum()}

    def mean_over(self, labels: Any) -> float | None:
        """Return what the sum over these labels is divided by: their number, or their class weights."""
        if self.shift and isinstance(labels, Tensor) and not labels.is_floating_point():
            labels = labels[..., 1:]
        return sum_of_weights(labels, self)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int = 1024,
) -> Tensor | dict[str, Tensor]:
    """Return the cross entropy of `hidden @ weight.T + bias`, of which only a chunk of rows is ever in memory.

    For large vocabularies: scores of (batch x time, classes) and their gradient are often the largest tensors of a
    step. Here those of a chunk are computed, and computed again in the backward pass, which costs a third more time in
    this layer. To be called in the `forward` of the model that has the weights, so that it works on every backend. Loss
    and gradients are those of `nn.functional.cross_entropy`, but for rounding. Without a label that counts it is 0.

    PyTorch's own `linear_cross_entropy` (2.13) takes no z-loss, makes all scores at once where labels are smoothed, and
    rounds the loss to bf16 where weights are of it.

    Args:
        hidden: The last hidden states: (..., features).
        weight: The weights of the head: (classes, features).
        labels: The class of each: (...); of a causal language model those one place later.
        bias: The bias of the head: (classes,).
        ignore_index: The label that does not count.
        label_smoothing: The share of each label's probability that goes to all classes (arXiv:1512.00567).
        z_loss: The weight of the z-loss (arXiv:2204.02311), as in `CrossEntropy`.
        chunk_size: How many rows are one chunk.

    Returns:
        The mean over the labels that count; with a z-loss a dict of "ce" and "z".

    Raises:
        ConfigError: If an option is out of its range.
        DataError: If hidden states, weights and labels do not fit each other.

    >>> hidden, head = torch.randn(2, 5, 8), nn.Linear(8, 100)
    >>> labels = torch.randint(0, 100, (2, 5))
    >>> chunked = chunked_cross_entropy(hidden, head.weight, labels, head.bias, chunk_size=3)
    >>> torch.allclose(chunked, nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()))
    True
    """
    check_number("label_smoothing", label_smoothing, least=0, below=1)
    check_number("z_loss", z_loss, least=0)
    check_number("chunk_size", chunk_size, least=1, is_whole=True)
    if labels.shape != hidden.shape[:-1] or labels.is_floating_point() or hidden.shape[-1:] != weight.shape[1:]:
        raise DataError(
            f"Hidden states of shape {tuple(hidden.shape)} need weights of (classes, {hidden.shape[-1]}) and integer "
            f"labels of {tuple(hidden.shape[:-1])}, got {tuple(weight.shape)} and {labels.dtype} of "
            f"{tuple(labels.shape)}."
        )

    def sums(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = _at_least_float32(F.linear(hidden, weight, bias))
        ce = F.cross_entropy(
            scores, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
        )
        if not z_loss:
            return ce, ce.new_zeros(())
        return ce, (scores.logsumexp(-1).square() * (labels != ignore_index)).sum()

    hidden, labels = hidden.flatten(0, -2), labels.flatten().long()
    parts = [
        checkpoint(sums, rows, weight, bias, classes, use_reentrant=False, preserve_rng_state=False)
        for rows, classes in zip(hidden.split(chunk_size), labels.split(chunk_size), strict=True)
    ]
    count = (labels != ignore_index).sum().clamp(min=1)
    ce, z = (torch.stack(sums_of).sum() / count for sums_of in zip(*parts, strict=True))
    return {"ce": ce, "z": z_loss * z} if z_loss else ce


def _scores_of(outputs: Any) -> Tensor:
    logits = outputs
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "logits"):
        logits = outputs[0] if outputs else None
    elif not isinstance(outputs, Tensor):
        logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        shape = f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise DataError(
            "CrossEntropy needs scores of shape (..., classes): as the model's output, as its `logits`, or as the "
            f"first of a tuple. It got a {type(outputs).__name__}{shape}."
        )
    return _at_least_float32(logits)


def _at_least_float32(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _check_shapes(scores: Tensor, labels: Any) -> None:
    if isinstance(labels, Tensor) and labels.shape == scores.shape[: None if labels.is_floating_point() else -1]:
        return
    received = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
    raise DataError(
        f"CrossEntropy compares scores of shape {tuple(scores.shape)}, whose last dimension are the classes, with "
        f"integer labels of shape {tuple(scores.shape[:-1])}, or probabilities of the same shape. Got {received}. For "
        "scores of shape (samples, classes, ...) use nn.CrossEntropyLoss, whose mean is right in every split, too."
    )


class WeightedLosses(nn.Module):
    """Several losses of the same outputs, added up with weights; each is logged as it is without its weight.

    Args:
        losses: The losses by name, each called as `loss(outputs, labels)`: a mean over the same samples or labels.
        weights: What they are multiplied by; those without a weight count 1.

    Raises:
        ConfigError: If a name or a weight is none.

    >>> loss = WeightedLosses({"mse": nn.MSELoss(), "l1": nn.L1Loss()}, {"l1": 0.5})
    >>> {name: float(value) for name, value in loss(torch.tensor([2.0]), torch.tensor([0.0])).items()}
    {'mse': 4.0, 'l1': 2.0, 'total': 5.0}
    """

    def __init__(
        self, losses: Mapping[str, Callable[[Any, Any], Any]], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.losses: dict[str, Callable[[Any, Any], Any]] = dict(losses)
        self.weights: dict[str, float] = {**dict.fromkeys(self.losses, 1.0), **(weights or {})}
        self._of_torch = nn.ModuleList(loss for loss in self.losses.values() if isinstance(loss, nn.Module))
        if not self.losses:
            raise ConfigError("`losses` must have at least one loss by its name, got none.")
        for name, loss in self.losses.items():
            if not isinstance(name, str) or name in ("total", "loss", "") or not callable(loss):
                raise ConfigError(
                    f"`losses` must have functions of (outputs, labels) by names other than 'total' and 'loss', got "
                    f"{name!r}: {loss!r:.80}."
                )
        for name, weight in self.weights.items():
            if name not in self.losses:
                raise ConfigError(
                    f"`weights` has {name!r}, and `losses` has {', '.join(map(repr, self.losses))}."
                    f"{did_you_mean(str(name), self.losses)}"
                )
            check_number(f"weights[{name!r}]", weight)

    def forward(self, outputs: Any, labels: Any) -> dict[str, Tensor]:
        """Return each loss, the parts of those that have some, and the sum with weights as "total"."""
        losses: dict[str, Tensor] = {}
        total: Any = 0.0
        for name, loss in self.losses.items():
            value = loss(outputs, labels)
            losses[name] = total_of(value)
            losses |= {f"{name}_{part}": entry for part, entry in value.items()} if isinstance(value, Mapping) else {}
            total = total + self.weights[name] * losses[name]
        return {**losses, "total": total}

    @property
    def shift(self) -> bool | None:
        """Whether the losses compare scores with the labels one place after them; None if none of them says so."""
        return next((shift for loss in self.losses.values() if (shift := shift_of(loss)) is not None), None)

    def mean_over(self, labels: Any) -> float | None:
        """Return what the losses divide the sum over these labels by.

        Raises:
            DataError: If that differs between them: then no weight of a batch is right for both.
        """
        divisors = {name: divisor_of(loss, labels) for name, loss in self.losses.items()}
        if all(divisor is None for divisor in divisors.values()):
            return None
        assert isinstance(labels, Tensor)
        plain = len(labels) if labels.ndim < 2 else count_of(labels, -100)
        known = {name: plain if divisor is None else divisor for name, divisor in divisors.items()}
        if len(set(known.values())) > 1:
            raise DataError(
                "The losses of WeightedLosses are means over different things, so their sum depends on how a step is "
                f"split into batches. In this batch they are over {', '.join(f'{v:g} ({k})' for k, v in known.items())}"
                ". Give them the same class weights and `ignore_index`."
            )
        return next(iter(known.values()))


# --- several losses


def total_of(losses: Any) -> Any:
    """Return the loss to minimize: of a dict "total", or else the sum; of a tuple the sum; anything else unchanged.

    >>> total_of({"ce": 1.0, "kl": 2.0}), total_of({"ce": 1.0, "kl": 2.0, "total": 1.2}), total_of((1.0, 2.0))
    (3.0, 1.2, 3.0)
    """
    if isinstance(losses, Mapping):
        if "total" in losses:
            return losses["total"]
        if "loss" in losses:
            raise DataError(
                f"A dict of losses has the keys {', '.join(map(repr, losses))}, of which 'loss' may be one of those "
                "that are added up, or their sum. Call the sum 'total', or give the part another name."
            )
        return sum(losses.values())
    return sum(losses) if isinstance(losses, (tuple, list)) else losses


def parts_of(losses: Any) -> dict[str, Any]:
    """Return the parts of a dict of losses by the names that they have in rows of logs; nothing of any other loss.

    >>> parts_of({"ce": 1.0, "loss_kl": 2.0, "total": 1.2})
    {'loss_ce': 1.0, 'loss_kl': 2.0}
    """
    if not isinstance(losses, Mapping):
        return {}
    by_name = {str(name): loss for name, loss in losses.items() if name != "total"}
    return {name if name.startswith("loss_") else f"loss_{name}": loss for name, loss in by_name.items()}


# --- what the mean of a loss is over

_OF_TORCH = (nn.CrossEntropyLoss, nn.NLLLoss)
# The losses whose class weights are known; a subclass may compute another loss.
_CROSS_ENTROPIES = (CrossEntropy, *_OF_TORCH)


@dataclass(slots=True)
class LossMean:
    """What the loss of a batch is a mean over, and which labels scores are compared with.

    Weights of micro-batches, metrics by name and algorithms read it here. It begins with what the loss, the unit or the
    model's configuration says. Where they do not, `trainer/loss_probe.py` asks the loss by means of the first batch.

    Attributes:
        loss_fn: The loss function, or a unit that has `mean_over`; None if the model computes the loss.
        shift: Whether scores are compared with the labels one place after them, and the first label of a row with none.
        ignore_index: The label that does not count.
        counts_labels: Whether the mean is over labels that are integers of more than one dimension; otherwise it is
            over rows, as it is for all other labels.
        is_sum: Whether what the model returns is a sum over rows, which `ModelUnit` divides by their number.
        is_mean: Whether it is such a mean at all, so that the losses of the parts of a batch give that of the batch.
        is_shift_known: Whether `shift` was said, or found out; otherwise it is a guess.
        is_checked: Whether the loss was asked.
        tasks: The same for the loss of each task, where a unit has several.

    >>> mean = LossMean(shift=True)
    >>> mean.divisor({"labels": torch.tensor([[1, 2, -100]])})
    1
    """

    loss_fn: Any = None
    shift: bool = False
    ignore_index: int = IGNORED_LABEL
    counts_labels: bool = True
    is_sum: bool = False
    is_mean: bool = True
    is_shift_known: bool = False
    is_checked: bool = False
    tasks: dict[str, LossMean] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Any, model: Any) -> LossMean:
        """Return what a loss function or a unit says, or the bare module if that computes the loss (None)."""
        config, shift = getattr(model, "config", None), shift_of(source)
        mean = cls(source, shifts_by_default(model) if shift is None else shift, is_shift_known=shift is not None)
        ignore_index = getattr(source, "ignore_index", None)
        if type(ignore_index) is int:
            mean.ignore_index = ignore_index
        elif source is None and type(getattr(config, "semantic_loss_ignore_index", None)) is int:
            mean.ignore_index = config.semantic_loss_ignore_index  # type: ignore[union-attr]
        if source is None and _has_ctc_loss(model):
            mean.counts_labels, mean.shift, mean.is_shift_known = False, False, True
            mean.is_sum = getattr(config, "ctc_loss_reduction", "mean") == "sum"
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out about the loss, as JSON types; nothing if it was not asked."""
        if not self.is_checked:
            return {}
        names = ("shift", "ignore_index", "counts_labels", "is_sum", "is_mean", "is_shift_known")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.tasks:
            state["tasks"] = {name: mean.state_dict() for name, mean in self.tasks.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, so that a resumed run need not ask again; a loss that says more wins."""
        for name, of_task in state.get("tasks", {}).items():
            self.tasks.setdefault(name, LossMean()).load_state_dict(of_task)
        if not self.is_shift_known:
            for name in state.keys() - {"tasks"}:
                setattr(self, name, state[name])
            self.is_checked = bool(state)

    def divisor(self, batch: Any, names: Sequence[str] = (), of_labels: bool = False) -> float | None:
        """Return what the loss divides its sum over a host batch by; None if that is the number of rows.

        With `of_labels`, labels count even if the loss function says that its mean is over something else.
        """
        if not of_labels and self.loss_fn is not None:
            divisor = divisor_of(self.loss_fn, get_labels(batch, names))
            if divisor is not None:
                return divisor
        if not self.counts_labels and not of_labels:
            return None
        return count_labels(batch, self.shift, names, self.ignore_index)

    @property
    def class_weights(self) -> Tensor | None:
        """How much each class counts in the loss function, on its device: (classes,); None where all count alike."""
        losses = self.loss_fn.losses.values() if isinstance(self.loss_fn, WeightedLosses) else (self.loss_fn,)
        weights = (loss.weight for loss in losses if type(loss) in _CROSS_ENTROPIES)
        return next((weight for weight in weights if weight is not None), None)

    @property
    def counts_unequally(self) -> bool:
        """Whether labels may count other than 1 in the mean, as with class weights or a custom `mean_over`."""
        has_mean = callable(getattr(self.loss_fn, "mean_over", None))
        is_known = type(self.loss_fn) in _CROSS_ENTROPIES
        return self.class_weights is not None or (has_mean and not is_known)

    def divisor_of_changed(self, labels: Any) -> float | None:
        """Return what the loss function divides its sum over labels on a device by, where it tells; None else.

        Probabilities of classes have rows, if it says nothing else; PyTorch's losses then need not wait for the device.
        """
        has_rows = isinstance(labels, Tensor) and labels.is_floating_point()
        if has_rows and type(self.loss_fn) in _CROSS_ENTROPIES:
            return len(labels)
        divisor = divisor_of(self.loss_fn, move_to_device(labels, torch.device("cpu")))
        return len(labels) if has_rows and divisor is None else divisor

    def compared(self, scores: Any, labels: Any, has_classes: bool = False) -> tuple[Any, Any]:
        """Return scores of (rows, places, classes) and labels of (rows, places) that are compared place by place.

        Anything else is returned unchanged; with `has_classes`, scores may also be classes of (rows, places).
        """
        if not self.shift or not isinstance(scores, Tensor) or not isinstance(labels, Tensor) or labels.ndim < 2:
            return scores, labels
        fits = scores.ndim == labels.ndim + 1 or (has_classes and scores.shape == labels.shape)
        return (scores[:, :-1], labels[:, 1:]) if fits else (scores, labels)

    def counted(self, labels: Tensor) -> Tensor:
        """Return which of the labels of a batch count, as booleans of their shape; those of no score do not."""
        counts = labels != self.ignore_index
        if self.shift:
            counts = counts.clone()
            counts[:, :1] = False
        return counts


def shift_of(source: Any) -> bool | None:
    """Return whether a loss function or a unit says that it shifts labels: by an attribute `shift`, True or False."""
    shift = getattr(source, "shift", None)
    if type(shift) is bool:
        return shift
    return False if type(source) in _OF_TORCH else None


def shifts_by_default(model: Any) -> bool:
    """Return whether a model of transformers computes the loss of causal language models, as far as its class shows.

    Many classes compute another loss than the one that transformers chooses for their name, so this is a guess.
    """
    kind, custom = getattr(model, "loss_type", None), getattr(model, "_loss_function", None)
    has_loss = hasattr(type(model), "loss_function") or hasattr(model, "loss_function")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or not has_loss:
        return False
    if custom is not None:  # assigned to `model.loss_function`
        shift = shift_of(custom)
        shift = _shifts(custom) if shift is None else shift
        if shift is not None:
            return shift
    elif kind is not None:
        return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"
    # transformers chooses the loss by the name of the class, and the causal one if that says nothing (GPT2LMHead)
    return kind in ("ForCausalLM", "ForConditionalGeneration") or (
        kind is None and callable(getattr(model, "can_generate", None)) and model.can_generate()
    )


def _has_ctc_loss(model: Any) -> bool:
    """Return whether a model of transformers computes a CTC loss; in its older versions, only the class shows it."""
    names = [base.__name__ for base in type(model).__mro__]
    return getattr(model, "loss_type", None) == "ForCTC" or any(name.endswith("ForCTC") for name in names)


def _shifts(loss_function: Callable[..., Any]) -> bool | None:
    """Return whether a loss with the arguments of transformers' ones ignores the first label; None if it is unclear."""
    scores = torch.arange(12.0).cos().reshape(1, 3, 4)
    try:
        plain, of_first, of_second = (
            float(loss_function(logits=scores, labels=torch.tensor([labels]), vocab_size=4))
            for labels in ([0, 1, 2], [3, 1, 2], [0, 3, 2])
        )
    except Exception:  # of the user's code: the class is asked instead
        return None
    return None if plain == of_second else plain == of_first


def count_labels(
    batch: Any, shift: bool = False, names: Sequence[str] = (), ignore_index: int = IGNORED_LABEL
) -> int | None:
    """Return how many labels of a host batch count, if they are integers of more than one dimension; otherwise None.

    With `shift`, each first label is left out: nothing comes before it to predict it from.
    """
    labels = get_labels(batch, names)
    # most batches are tuples, for which the check for Mapping is slow
    if not isinstance(batch, tuple) and isinstance(batch, Mapping) and "shift_labels" in batch:
        labels, shift = batch["shift_labels"], False
    if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point() or labels.is_complex():
        return None
    if shift:
        labels = labels[..., 1:]
    return count_of(labels, ignore_index)


def is_known(loss_fn: Any) -> bool:
    """Whether it is known what a loss is a mean over: it says so, or it is one of PyTorch's."""
    names = (getattr(loss_fn, "__module__", None), type(loss_fn).__module__)
    is_of_torch = "torch.nn.functional" in names or "torch._C._nn" in names or "torch.nn.modules.loss" in names
    return callable(getattr(loss_fn, "mean_over", None)) or is_of_torch


def divisor_of(loss_fn: Any, labels: Any) -> float | None:
    """Return what a loss divides the sum over these labels, on the host, by, where it tells; None else.

    The mean of `nn.CrossEntropyLoss` and `nn.NLLLoss` is over the targets that are not `ignore_index`, or over the
    class weights of these. Any other loss may have a method `mean_over(labels)`.

    >>> divisor_of(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), torch.tensor([0, 1, 1, -100]))
    7.0
    """
    mean_over = getattr(loss_fn, "mean_over", None)
    if callable(mean_over):
        return mean_over(labels)  # type: ignore[return-value]
    if type(loss_fn) not in _OF_TORCH or loss_fn.reduction != "mean":
        return None
    return sum_of_weights(labels, loss_fn)


def sum_of_weights(labels: Any, loss: Any) -> float | None:
    """Return the sum of a loss's class weights over the labels that it does not ignore; without weights, their number.

    None where labels are no integers (probabilities of classes have a mean over samples), or not of the classes.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    if loss.weight is None:
        return count_of(labels, loss.ignore_index)
    labels = labels[labels != loss.ignore_index]
    if not labels.numel():
        return 0.0
    if int(labels.min()) < 0 or int(labels.max()) >= len(loss.weight):
        return None  # for the loss to refuse
    counts = torch.bincount(labels.flatten(), minlength=len(loss.weight)).cpu()
    return float(counts.double() @ _on_host(loss))


def count_of(labels: Tensor, ignore_index: int) -> int:
    """Return how many labels are not `ignore_index`."""
    if labels.device.type == "cpu":
        return int(np.count_nonzero(labels.numpy() != ignore_index))
    return int((labels != ignore_index).sum())


_host_weights: weakref.WeakKeyDictionary[Any, tuple[int, Tensor]] = weakref.WeakKeyDictionary()


def _on_host(loss: Any) -> Tensor:
    """Return a loss's class weights on the host; copied once, as reading a device waits for it."""
    weights = loss.weight
    version, host_weights = _host_weights.get(loss, (-1, weights))
    if version != weights._version:
        host_weights = weights.detach().cpu().double()
        _host_weights[loss] = weights._version, host_weights
    return host_weights
