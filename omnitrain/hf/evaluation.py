"""Evaluations of HFTrainer.

Generated answers, label names, extra inputs of metrics, half-precision weights. `trainer/evaluation.py` has the loop.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import speed_metrics

from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.data.collation import IGNORED_LABEL, LABEL_KEYS, count_samples, get_labels
from omnitrain.data.loaders import Loader
from omnitrain.metrics.text import TEXT_METRICS
from omnitrain.model.units import StepOutput, generated
from omnitrain.trainer.evaluation import Evaluation, Inconclusive, Predictions

# The default `max_length` of a generation.
_DEFAULT_LENGTH = 20


class Generation:
    """Generates the tokens for metrics, of the same width as `Seq2SeqTrainer`.

    All answers of a set are padded with one token, and their labels with -100, so the split into batches has no effect.
    The padding token is that of `processing_class`, or else of the model's config.
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
        """Return the tokens that the bare module generates for a batch, and its labels, both padded.

        With `synced`, no process may finish before the others, because each has a part of the weights.
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
    """Set the model's generation config from transformers' arguments; return a Generation if they request it."""
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
    by_position = [metric for metric in metrics if isinstance(metric, str) and metric not in TEXT_METRICS]
    if by_position:
        raise ConfigError(
            f"`compute_metrics={by_position[0]!r}` compares tokens by position, which is meaningless for generated "
            f"ones (`predict_with_generate=True`). Pass a function that decodes them, or {', '.join(TEXT_METRICS)}."
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
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            inputs.pop(name, None)
    return inputs


# Suffixes of the timings that transformers adds to metrics, which differ in every run.
_TIMING_SUFFIXES = ("_runtime", "_samples_per_second", "_steps_per_second")


def replace_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics of a prediction with another prefix than `test_`."""
    return {f"{prefix}_{name.removeprefix('test_')}": value for name, value in metrics.items()}


class _Interrupted(BaseException):
    """A signal has interrupted an evaluation."""


class HFEvaluation(Evaluation):
    """The evaluations of HFTrainer."""

    trainer: Any
    generation: Generation | None = None
    """Generates the answers for metrics, if the training arguments request that."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._training_args = self.trainer.training_args
        self.is_predicting: bool = False
        """Whether this is a prediction, for which there may be no labels."""
        self._is_outside_run = False
        self.speeds: dict[str, float] = {}
        """The timings of the latest evaluation or prediction, as transformers adds them to the metrics."""
        self.ignored: frozenset[str] = frozenset()
        """Keys of the model's output to leave out of the predictions."""
        self.run_evaluation: tuple[Any, str] | None = None
        """The arguments of the evaluation of the run for which the user's `evaluate` was called."""
        self.is_reported_by_user: bool = False
        """Whether the user's `evaluate` ran the latest evaluation of the run, wrote its log and called callbacks."""

    @contextlib.contextmanager
    def with_options(
        self, ignored: Collection[str] | None, call: str = "train", options: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Leave these keys of the model's output out of predictions, and use options of `model.generate`."""
        if options and not isinstance(self._training_args, transformers.Seq2SeqTrainingArguments):
            raise TypeError(
                f"{call}() got an unexpected keyword argument {next(iter(options))!r}. Arguments of `model.generate` "
                "need Seq2SeqTrainingArguments, with predict_with_generate=True."
            )
        previous, self.ignored = self.ignored, frozenset(ignored or ()) or self.ignored
        try:
            with contextlib.nullcontext() if self.generation is None else self.generation.with_options(options or {}):
                yield
        finally:
            self.ignored = previous

    def evaluate(self, loader: Any, prefix: str, only_first: bool = False) -> dict[str, float] | None:
        """Evaluate as every trainer does; as part of the run, by the user's own `evaluate` if there is one."""
        trainer = self.trainer
        is_of_run = loader is trainer.eval_loader and trainer._loop.is_evaluating and not only_first
        if not is_of_run or self.run_evaluation is not None or "evaluate" not in trainer._overridden:
            return self._evaluate_timed(loader, prefix, only_first)
        self.run_evaluation, self.is_reported_by_user = (loader, prefix), True
        try:
            metrics = dict(trainer.evaluate())
        except _Interrupted:
            return None
        finally:
            self.run_evaluation = None
        return {name: value for name, value in metrics.items() if not name.endswith(_TIMING_SUFFIXES)}

    def evaluate_for_run(self) -> dict[str, float]:
        """Run the evaluation of the run for which the user's `evaluate` was called."""
        assert self.run_evaluation is not None
        self.is_reported_by_user = False
        if (metrics := self._evaluate_timed(*self.run_evaluation)) is None:
            raise _Interrupted
        return metrics

    def evaluate_loader(self, loader: Loader, prefix: str, predicts: bool) -> Predictions:
        """Evaluate another loader within that evaluation, for predictions or only for metrics."""
        if (predictions := self.evaluate_or_predict(loader, prefix, predicts)) is None:
            raise _Interrupted
        return predictions

    def evaluate_or_predict(self, loader: Loader, prefix: str, predicts: bool) -> Predictions | None:
        """Return predictions and metrics of a loader, or only metrics; None if a signal interrupted it."""
        if not predicts:
            metrics = super().evaluate(loader, prefix)
            return None if metrics is None else Predictions(None, None, metrics)
        result = self.predict(loader)
        if result is None:
            return None
        return Predictions(result.predictions, result.labels, replace_prefix(result.metrics, prefix))

    def run_first_batches(self, loader: Any) -> None:
        """Run the first batch of each set, and ignore the result."""
        for eval_loader in loader.values() if isinstance(loader, Mapping) else [loader]:
            with contextlib.suppress(Inconclusive):
                self._run(eval_loader, needs_loss=False, only_first=True)

    def _evaluate_timed(self, loader: Any, prefix: str, only_first: bool = False) -> dict[str, float] | None:
        """Return the result of `Evaluation.evaluate`, and record how long it took."""
        start = time.time()
        metrics = super().evaluate(loader, prefix, only_first)
        self._record_speeds(loader, prefix, start)
        return metrics

    def _record_speeds(self, loader: Any, prefix: str, start: float) -> None:
        loaders = [loader]
        if isinstance(loader, Mapping):
            loaders = [eval_loader for name, eval_loader in loader.items() if name not in self.left_out]
        sizes = [eval_loader.size for eval_loader in loaders]
        if None in sizes:
            self.speeds = {f"{prefix}_runtime": round(time.time() - start, 4)}
        else:
            step = self.trainer.eval_batch_size * self.trainer.ranks.world_size
            steps = sum(math.ceil(size / step) for size in sizes)
            self.speeds = speed_metrics(prefix, start, sum(sizes), steps)

    def _run_batch(self, batch: Any, loader: Loader, number: int) -> StepOutput:
        output = super()._run_batch(batch, loader, number)
        if self._is_outside_run or self.trainer.engine.is_in_train:  # not before the run has begun for callbacks
            self.trainer.engine.report_batch(loader)
        return output

    def forward(self, batch: Any) -> StepOutput:
        backend, generation = self.trainer.backend, self._active_generation
        # without labels an encoder-decoder model cannot run forward, but it can generate
        needs_forward = generation is None or get_labels(batch) is not None
        output = super().forward(batch) if needs_forward else StepOutput(None)
        names = self._label_names
        if isinstance(batch, Mapping) and names and all(name in batch for name in names):
            output.labels = get_labels(batch, names)
        if generation is not None:
            model, synced = unwrap(backend.model), backend.forward_is_collective
            output.outputs, output.labels = generation.generate(model, batch, output.labels, synced)
        output.extra = self._metric_extras(batch, output)
        return output

    def _metric_extras(self, batch: Any, output: StepOutput) -> dict[str, Any] | None:
        """Return the extras from `include_for_metrics`: the model's main input, and its loss for each sample."""
        requested = (self._training_args and self._training_args.include_for_metrics) or ()
        extras: dict[str, Any] = {}
        if "inputs" in requested:
            name = getattr(unwrap(self.trainer.backend.model), "main_input_name", "input_ids")
            if not isinstance(batch, Mapping) or name not in batch:
                actual = f"holds {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else "is no dict"
                raise DataError(
                    f"`include_for_metrics` requests the inputs, the model's {name!r}, but the batch {actual}."
                )
            extras["inputs"] = batch[name]
        if "loss" in requested and output.loss is not None:
            targets = 1 if output.num_targets is None else output.num_targets
            extras["losses"] = (output.loss / targets).expand(count_samples(batch))
        return extras or None

    @property
    def _label_names(self) -> Sequence[str]:
        """The keys of labels if they differ from ours: the user's, or several that transformers detects.

        For question answering, these are the start and end positions.
        """
        names = self.trainer.engine.label_names
        return self.trainer.settings.label_names or (names if len(names) > 1 else ())

    @property
    def _active_generation(self) -> Generation | None:
        """The Generation, if its predictions are used."""
        return self.generation if self.is_predicting or self.trainer.settings.compute_metrics is not None else None

    @property
    def filler(self) -> int:  # type: ignore[override]
        """The value that pads predictions of different lengths to one array."""
        generation = self._active_generation
        return IGNORED_LABEL if generation is None else generation.pad_token_id(unwrap(self.trainer.backend.model))

    def predict(self, loader: Any) -> Predictions | None:
        """Return the predictions for every sample; with `predict_with_generate`, the generated tokens."""
        self.is_predicting, start = True, time.time()
        try:
            predictions = super().predict(loader)
            self._record_speeds(loader, "test", start)
            return predictions
        finally:
            self.is_predicting = False

    @contextlib.contextmanager
    def outside_run(self) -> Iterator[None]:
        """Convert the weights to the precision of `bf16_full_eval` or `fp16_full_eval`, unless a run is active.

        The original weights are restored.
        """
        args, model, dtype = self._training_args, self.trainer.backend.model, None
        if args is not None and (args.bf16_full_eval or args.fp16_full_eval):
            dtype = torch.bfloat16 if args.bf16_full_eval else torch.float16
        originals: list[tuple[torch.Tensor, torch.Tensor]] = []
        was_outside, self._is_outside_run = self._is_outside_run, True
        try:
            if dtype is not None and not self.trainer.engine.is_in_train:
                for tensor in (*model.parameters(), *model.buffers()):
                    if tensor.is_floating_point():
                        originals.append((tensor, tensor.data))
                        tensor.data = tensor.data.to(dtype)
            yield
        finally:
            self._is_outside_run = was_outside
            for tensor, data in originals:
                tensor.data = data
