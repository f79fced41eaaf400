"""Evaluation features of HFTrainer.

Generation, label names, extra inputs of metrics, half-precision weights. `trainer/evaluation.py` has the loop itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments
from transformers.trainer_utils import speed_metrics

from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.core.errors import DataError
from omnitrain.data.collation import IGNORED_LABEL, count_samples, get_labels
from omnitrain.data.loaders import Loader
from omnitrain.hf.engine import Engine
from omnitrain.hf.generation import Generation
from omnitrain.model.units import StepOutput
from omnitrain.trainer.evaluation import Evaluation, Inconclusive, Predictions

# Suffixes of the timings that transformers adds to metrics, which differ in every run.
_TIMING_SUFFIXES = ("_runtime", "_samples_per_second", "_steps_per_second")


def replace_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics of a prediction with another prefix than `test_`."""
    return {f"{prefix}_{name.removeprefix('test_')}": value for name, value in metrics.items()}


class _Interrupted(BaseException):
    """A signal has interrupted an evaluation."""


class HFEvaluation(Evaluation):
    """The evaluations of HFTrainer.

    Args:
        engine: Returns the engine, which is created later.
        training_args: The user's TrainingArguments, or None.
        parts: The arguments of `Evaluation`.
    """

    generation: Generation | None = None
    """Generates the answers for metrics, if the training arguments request that."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        training_args: Any,
        *parts: Any,
    ) -> None:
        super().__init__(*parts)
        self._engine = engine
        self._training_args = training_args
        self.is_predicting: bool = False
        """Whether this is a prediction, for which there may be no labels."""
        self.reports_batches: bool = True
        """Whether transformers' callbacks are called for each batch."""
        self.speeds: dict[str, float] = {}
        """The timings of the latest evaluation or prediction, as transformers adds them to the metrics."""
        self.ignored: frozenset[str] = frozenset()
        """Keys of the model's output to leave out of the predictions."""
        # The evaluation of the run for which the user's `evaluate` was called.
        self._run_evaluation: Callable[[], dict[str, float] | None] | None = None
        # Whether to end that evaluation.
        self._is_interrupted: Callable[[int], bool] = lambda number: False
        self.is_reported_by_user: bool = False
        """Whether the user's `evaluate` ran the latest evaluation of the run, wrote its log and called callbacks."""

    @contextlib.contextmanager
    def ignore_output_keys(self, keys: Collection[str]) -> Iterator[None]:
        """Leave these keys of the model's output out of the predictions inside."""
        previous = self.ignored
        self.ignored = frozenset(keys) or previous
        try:
            yield
        finally:
            self.ignored = previous

    @contextlib.contextmanager
    def generation_options(self, call: str, options: Mapping[str, Any]) -> Iterator[None]:
        """Use these arguments of `model.generate` inside, if anything is generated.

        Args:
            call: The method to which they were passed.
            options: The arguments; None means not passed.

        Raises:
            TypeError: If the training arguments do not support generation.
        """
        if options and not isinstance(self._training_args, Seq2SeqTrainingArguments):
            raise TypeError(
                f"{call}() got an unexpected keyword argument {next(iter(options))!r}. Arguments of `model.generate` "
                "need Seq2SeqTrainingArguments, with predict_with_generate=True."
            )
        with contextlib.nullcontext() if self.generation is None else self.generation.with_options(options):
            yield

    def evaluate(
        self, loader: Any, prefix: str, is_interrupted: Callable[[int], bool], only_first: bool = False
    ) -> dict[str, float] | None:
        """Evaluate as every trainer does; as part of the run, by the user's own `evaluate` if there is one."""
        trainer, evaluate = self._engine().trainer, self._evaluate_timed
        is_run_evaluation = loader is trainer.eval_loader and trainer._loop.is_evaluating and not only_first
        if not is_run_evaluation or self._run_evaluation is not None or "evaluate" not in trainer._overridden:
            return evaluate(loader, prefix, is_interrupted, only_first)
        self._run_evaluation, self._is_interrupted = lambda: evaluate(loader, prefix, is_interrupted), is_interrupted
        self.is_reported_by_user = True
        try:
            metrics = dict(trainer.evaluate())
        except _Interrupted:
            return None
        finally:
            self._run_evaluation = None
        return {name: value for name, value in metrics.items() if not name.endswith(_TIMING_SUFFIXES)}

    @property
    def is_run_evaluation(self) -> bool:
        """Whether the user's `evaluate` was called for an evaluation of the run."""
        return self._run_evaluation is not None

    def evaluate_for_run(self) -> dict[str, float]:
        """Run the evaluation of the run for which the user's `evaluate` was called."""
        assert self._run_evaluation is not None
        self.is_reported_by_user = False
        metrics = self._run_evaluation()
        if metrics is None:
            raise _Interrupted
        return metrics

    def evaluate_loader(self, loader: Loader, prefix: str, predicts: bool) -> Predictions:
        """Evaluate another loader within that evaluation, for predictions or only for metrics."""
        predictions = self.evaluate_or_predict(loader, prefix, predicts, self._is_interrupted)
        if predictions is None:
            raise _Interrupted
        return predictions

    def evaluate_or_predict(
        self, loader: Loader, prefix: str, predicts: bool, is_interrupted: Callable[[int], bool]
    ) -> Predictions | None:
        """Return predictions and metrics of a loader, or only metrics; None if a signal interrupted it."""
        if not predicts:
            metrics = super().evaluate(loader, prefix, is_interrupted)
            return None if metrics is None else Predictions(None, None, metrics)
        result = self.predict(loader, is_interrupted)
        if result is None:
            return None
        return Predictions(result.predictions, result.labels, replace_prefix(result.metrics, prefix))

    def run_first_batches(self, loader: Any, is_interrupted: Callable[[int], bool]) -> None:
        """Run the first batch of each set, and ignore the result."""
        for eval_loader in loader.values() if isinstance(loader, Mapping) else [loader]:
            with contextlib.suppress(Inconclusive):
                self._run(eval_loader, is_interrupted, needs_loss=False, only_first=True)

    def rehearse_batches(self, loader: Loader) -> list[Any]:
        """Run the first and the last batch of a loader, without calling transformers' callbacks."""
        self.reports_batches = False
        try:
            return super().rehearse_batches(loader)
        finally:
            self.reports_batches = True

    def _evaluate_timed(
        self, loader: Any, prefix: str, is_interrupted: Callable[[int], bool], only_first: bool = False
    ) -> dict[str, float] | None:
        """Return the result of `Evaluation.evaluate`, and record how long it took."""
        start = time.time()
        metrics = super().evaluate(loader, prefix, is_interrupted, only_first)
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
            steps = sum(math.ceil(size / self._samples_per_batch) for size in sizes)
            self.speeds = speed_metrics(prefix, start, sum(sizes), steps)

    @property
    def _samples_per_batch(self) -> int:
        return self._engine().trainer.eval_batch_size * self.trainer.ranks.world_size

    def _run_batch(self, batch: Any, loader: Loader, number: int) -> StepOutput:
        output = super()._run_batch(batch, loader, number)
        if self.reports_batches:
            self._engine().report_batch(loader)
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
        names = self._engine().label_names
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

    def predict(self, loader: Any, is_interrupted: Callable[[int], bool]) -> Predictions | None:
        """Return the predictions for every sample; with `predict_with_generate`, the generated tokens."""
        self.is_predicting, start = True, time.time()
        try:
            predictions = super().predict(loader, is_interrupted)
            self._record_speeds(loader, "test", start)
            return predictions
        finally:
            self.is_predicting = False

    @contextlib.contextmanager
    def outside_run(self) -> Iterator[None]:
        """Convert the weights to the precision of `bf16_full_eval` or `fp16_full_eval`, unless a run is active.

        The original weights are restored.
        """
        dtype, model = _full_eval_dtype(self._training_args), self.trainer.backend.model
        originals: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            if dtype is not None and not self._engine().is_in_train:
                for tensor in (*model.parameters(), *model.buffers()):
                    if tensor.is_floating_point():
                        originals.append((tensor, tensor.data))
                        tensor.data = tensor.data.to(dtype)
            yield
        finally:
            for tensor, data in originals:
                tensor.data = data


def _full_eval_dtype(args: Any) -> torch.dtype | None:
    """Return the precision of evaluations in transformers' arguments; None is that of the weights."""
    if args is None or not (args.bf16_full_eval or args.fp16_full_eval):
        return None
    return torch.bfloat16 if args.bf16_full_eval else torch.float16
