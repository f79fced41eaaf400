"""`predict_with_generate`: generated answers in evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from omnitrain.core.errors import ConfigError, DataError
from omnitrain.data.collation import IGNORED_LABEL, LABEL_KEYS, count_samples
from omnitrain.model.units import generated

# The default `max_length` of a generation.
_DEFAULT_LENGTH = 20


class Generation:
    """Generates the tokens for metrics, of the same width as `Seq2SeqTrainer`.

    All answers of a set are padded with one token, and their labels with -100, so the split into batches has no effect.

    Args:
        args: The user's Seq2SeqTrainingArguments.
        processing_class: Has the padding token; without it, the model's config does.
    """

    def __init__(self, args: transformers.Seq2SeqTrainingArguments, processing_class: Any) -> None:
        self.processing_class = processing_class
        limits = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
        self.generate_kwargs: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}

    @contextlib.contextmanager
    def with_options(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Use these arguments of `model.generate` inside, and those of the training arguments otherwise."""
        previous = self.generate_kwargs
        overrides = {name: value for name, value in options.items() if value is not None}
        retained = previous if "max_new_tokens" not in overrides else previous.keys() - {"max_length"}
        self.generate_kwargs = {name: previous[name] for name in retained} | overrides
        try:
            yield
        finally:
            self.generate_kwargs = previous

    def generate(self, model: Any, batch: Any, labels: Any, synced: bool) -> tuple[torch.Tensor, Any]:
        """Return the tokens that the model generates for a batch, and its labels, both padded.

        Args:
            model: The bare module.
            batch: On the device; the model does not get its labels.
            labels: The labels of the batch, or None.
            synced: Whether no process may finish before the others, because each has a part of the weights.
        """
        tokens = generated(model, _generation_inputs(batch), synced, self.generate_kwargs)
        if len(tokens) != count_samples(batch):
            raise DataError(
                f"The model generated {len(tokens)} sequences for {count_samples(batch)} samples. Set "
                "`num_return_sequences=1` in its generation config."
            )
        width = _width(model.generation_config, tokens)
        if tokens.shape[-1] < width:
            tokens = nn.functional.pad(tokens, (0, width - tokens.shape[-1]), value=self.pad_token_id(model))
        if isinstance(labels, torch.Tensor) and labels.ndim == 2:
            width = _width(model.generation_config, labels)
            labels = nn.functional.pad(labels, (0, width - labels.shape[-1]), value=IGNORED_LABEL)
        return tokens, labels

    def pad_token_id(self, model: Any) -> int:
        """Return the token that pads short answers."""
        for source, name in (
            (self.processing_class, "pad_token_id"),
            (self.processing_class, "eos_token_id"),
            (model.config, "pad_token_id"),
            (model.generation_config, "pad_token_id"),
        ):
            if getattr(source, name, None) is not None:
                return int(getattr(source, name))
        raise DataError(
            "Generated tokens have different lengths, and there is no padding token. Set `pad_token` of the tokenizer "
            "and pass it as `processing_class`, or set `pad_token_id` in the model's config."
        )


def make_generation(args: Any, model: Any, metrics: Any, processing_class: Any) -> Generation | None:
    """Set the model's generation config from transformers' arguments, and return a Generation if they request it.

    Args:
        args: The user's TrainingArguments, or None.
        model: The bare module.
        metrics: The user's `compute_metrics`.
        processing_class: The tokenizer or processor, or None.

    Raises:
        ConfigError: If the model cannot generate, or a metric by name would get generated tokens.
    """
    if getattr(args, "generation_config", None) is not None:
        model.generation_config = transformers.Seq2SeqTrainer.load_generation_config(args.generation_config)
    if not getattr(args, "predict_with_generate", False) or args.prediction_loss_only:
        return None
    if not callable(getattr(model, "generate", None)):
        raise ConfigError(
            f"`training_args.predict_with_generate=True` needs a model with a method `generate`, which "
            f"{type(model).__name__} does not have. Leave it out."
        )
    metrics = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    if metric_names := [metric for metric in metrics if isinstance(metric, str)]:
        raise ConfigError(
            f"`compute_metrics={metric_names[0]!r}` compares tokens by position, which is meaningless for generated "
            "ones (`predict_with_generate=True`). Pass a function that decodes them."
        )
    return Generation(args, processing_class)


def _width(config: Any, tokens: torch.Tensor) -> int:
    """Return the width to which `Seq2SeqTrainer` pads these tokens or labels."""
    size, longest = tokens.shape[-1], config.max_length or _DEFAULT_LENGTH
    if size >= longest and config.max_new_tokens is not None:
        longest = config.max_new_tokens + 1
    return max(size, longest)


def _generation_inputs(batch: Any) -> dict[str, Any]:
    """Return the inputs for generation: without labels, and without decoder tokens derived from labels."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"`predict_with_generate=True` needs batches that are dicts, got a {type(batch).__name__}: the entries "
            "are passed to model.generate by name."
        )
    inputs = {key: value for key, value in batch.items() if key not in LABEL_KEYS}
    labels, decoder_inputs = batch.get("labels"), batch.get("decoder_input_ids")
    if labels is not None and decoder_inputs is not None and labels.shape == decoder_inputs.shape:
        inputs = {key: value for key, value in inputs.items() if key not in _LABEL_DERIVED}
    return inputs


_LABEL_DERIVED = ("decoder_input_ids", "decoder_attention_mask")
