"""Metrics of generated or recognized text, by torchmetrics."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omnitrain.core.errors import ConfigError, DataError, MissingExtraError
from omnitrain.core.history import quote_names
from omnitrain.data.collation import IGNORED_LABEL
from omnitrain.metrics.inputs import is_integer, is_text, main_output

# The metrics by name: the function of torchmetrics, its options, and whether a higher value is better.
TEXT_METRICS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "wer": ("word_error_rate", {}, False),
    "cer": ("char_error_rate", {}, False),
    "bleu": ("sacre_bleu_score", {}, True),
    "chrf": ("chrf_score", {"n_word_order": 0}, True),
}
_REFERENCE_LISTS = ("bleu", "chrf")  # which take several references of each text


class TextMetrics:
    """Scores batches of texts, or of tokens that a tokenizer decodes, over the full set, from 0 to 1 (1 and more: wer).

    The texts are kept until `compute()`.

    Args:
        names: Names in `TEXT_METRICS`.
        processing_class: The tokenizer or processor; None if outputs and labels are texts.

    Raises:
        MissingExtraError: torchmetrics is not installed.
        ConfigError: `processing_class` cannot decode.

    >>> metrics = TextMetrics(["wer"])
    >>> metrics.update(["a cat sat", "yes"], ["the cat sat", "yes"])
    >>> metrics.compute()
    {'wer': 0.25}
    """

    def __init__(self, names: Sequence[str], processing_class: Any = None) -> None:
        if importlib.util.find_spec("torchmetrics") is None:
            raise MissingExtraError(f"The metric {names[0]!r}", "torchmetrics", "torchmetrics")
        if processing_class is not None and not callable(getattr(processing_class, "batch_decode", None)):
            raise ConfigError(
                f"`compute_metrics={names[0]!r}` decodes tokens by `processing_class`, and "
                f"{type(processing_class).__name__} has no method `batch_decode`. Pass the tokenizer."
            )
        self.names: list[str] = list(names)
        self.higher_is_better: dict[str, bool] = {name: TEXT_METRICS[name][2] for name in names}
        self._processing_class = processing_class
        # Tokenizers of CTC merge repeated tokens of outputs, of which there are more than labels.
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self._is_ctc = hasattr(tokenizer, "word_delimiter_token")
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._texts: list[tuple[str, str]] = []

    def update(self, outputs: Any, labels: Any) -> None:
        """Take in one batch: lists of texts, tensors of tokens, or scores of tokens, whose argmax is decoded."""
        outputs = outputs if is_text(outputs) else main_output(outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(labels, torch.Tensor) and not is_integer(outputs):
            outputs = outputs.argmax(-1)
            if outputs.shape == labels.shape and not self._is_ctc:  # scored place by place
                outputs = outputs.masked_fill(labels.to(outputs.device) == IGNORED_LABEL, IGNORED_LABEL)
        predictions = self._decode(outputs, "outputs")
        references = self._decode(labels, "labels", **({"group_tokens": False} if self._is_ctc else {}))
        self._texts += zip(predictions, references, strict=True)

    def _decode(self, values: Any, what: str, **options: Any) -> list[str]:
        if is_text(values):
            return list(values)
        is_tokens = isinstance(values, torch.Tensor) and is_integer(values) and values.ndim == 2
        if not is_tokens or self._processing_class is None:
            kind = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values)
            raise DataError(
                f"{quote_names(self.names)} needs texts or tokens, and the {what} are {kind}. Return a list of texts "
                "from the unit, or pass the tokenizer as `processing_class=` and tokens of shape (samples, length)."
            )
        rows = [[token for token in row if token != IGNORED_LABEL] for row in values.tolist()]
        return self._processing_class.batch_decode(rows, skip_special_tokens=True, **options)

    def state(self) -> dict[str, Any]:
        """Return what another process needs to merge."""
        return {"texts": self._texts}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another process."""
        self._texts += state["texts"]

    def compute(self) -> dict[str, float | None]:
        """Return the results; None if there is no text to compare with."""
        import torchmetrics.functional.text as functions

        if not any(reference.strip() for _, reference in self._texts):
            return dict.fromkeys(self.names)
        predictions, references = map(list, zip(*self._texts, strict=True))
        results: dict[str, float | None] = {}
        for name in self.names:
            function_name, options, _ = TEXT_METRICS[name]
            function: Callable[..., Any] = getattr(functions, function_name)
            targets = [[reference] for reference in references] if name in _REFERENCE_LISTS else references
            results[name] = float(function(predictions, targets, **options))
        return results
