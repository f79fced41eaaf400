"""Label-smoothed loss for `label_smoothing_factor` of HFTrainer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from omnitrain.core.errors import ConfigError, DataError
from omnitrain.data.collation import IGNORED_LABEL
from omnitrain.model.losses import shifts_by_default

logger: logging.Logger = logging.getLogger("omnitrain")

# Names by which the code of a forward pass refers to a cross entropy.
_CROSS_ENTROPIES = {"CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss", "AdaptiveLogSoftmaxWithLoss"}


class SmoothedLoss:
    """Cross entropy with label smoothing, averaged over all labels except -100.

    This is the formula of transformers' LabelSmoother, which sums over the classes in float32 whatever the dtype. With
    `shift`, scores are compared with the labels one position later, as in causal language models.

    >>> round(float(SmoothedLoss(0.1)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))), 4)
    0.2269
    """

    def __init__(self, factor: float, shift: bool = False) -> None:
        self.factor = factor
        self.shift = shift
        self.__qualname__ = f"{type(self).__name__}({factor:g})"  # a resume compares it, so another factor is reported

    def __call__(self, outputs: Any, labels: Any) -> torch.Tensor:
        """Return the loss of a batch from its labels and the model's output, which was computed without them."""
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            actual = "none" if labels is None else getattr(labels, "dtype", type(labels).__name__)
            raise DataError(
                f"`label_smoothing_factor={self.factor}` needs integer class labels under 'labels', and this batch has "
                f"{actual}. Leave it out for this model."
            )
        scores = outputs["logits"] if isinstance(outputs, Mapping) else outputs
        scores = scores[0] if isinstance(scores, (tuple, list)) else scores
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()  # as transformers' models do for their own loss
        if self.shift:
            scores, labels = scores[..., :-1, :], labels[..., 1:]
        return F.cross_entropy(
            scores.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, label_smoothing=self.factor
        )


def set_smoothed_loss(args: Any, model: Any, kwargs: dict[str, Any]) -> None:
    """Set `kwargs["loss_fn"]` to the smoothed loss if transformers' arguments request it.

    A custom loss, which transformers would silently leave unsmoothed, is an error.
    """
    factor = getattr(args, "label_smoothing_factor", 0)
    if not factor:
        return
    if not 0 < factor <= 1:
        raise ConfigError(f"`training_args.label_smoothing_factor` must be between 0 and 1, got {factor!r}.")
    for argument, shown in (("loss_fn", "`loss_fn` (or `compute_loss_func`)"), ("unit", "`unit`")):
        if kwargs.get(argument) is not None:
            raise ConfigError(
                f"`training_args.label_smoothing_factor={factor!r}` has no effect on {shown}, which is a custom loss. "
                "Smooth in it, or leave it out."
            )
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        logger.warning("`label_smoothing_factor=%s` has no effect: a sample may have several of the labels.", factor)
        return
    shift = shifts_by_default(model)
    if shift and (name := _class_with_builtin_loss(model)):
        raise ConfigError(
            f"`training_args.label_smoothing_factor={factor!r}` cannot be used with {name}, which computes its loss "
            "itself, not by `model.loss_function`: whether it shifts labels is unknown. Leave it out, and pass "
            f"loss_fn=CrossEntropy(label_smoothing={factor!r}, shift=False), or shift=True if the model shifts labels."
        )
    kwargs["loss_fn"] = SmoothedLoss(factor, shift)


def _class_with_builtin_loss(model: Any) -> str:
    """Return the class name of a model whose forward pass computes a cross entropy itself; "" for other models.

    Such classes ignore `model.loss_function`, and their names say nothing: BartForCausalLM does not shift labels.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps the model
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    names = set() if code is None else set(code.co_names)
    return type(base).__name__ if names & _CROSS_ENTROPIES and "loss_function" not in names else ""
