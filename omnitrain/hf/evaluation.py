"""What HFTrainer's evaluations have beside those of every trainer: what users of transformers know of theirs.

The evaluation loop itself is in `omnitrain/evaluation.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnitrain.checkpoint.state import unwrap
from omnitrain.data.collation import IGNORED_LABEL, count_samples, labels_of
from omnitrain.errors import DataError
from omnitrain.evaluation import Predictions
from omnitrain.hf.generation import Generation
from omnitrain.trainers.sharding import Sharding
from omnitrain.units import StepOutput

if TYPE_CHECKING:
    from omnitrain.hf.engine import Engine

__all__ = ["HFEvaluation"]


def full_evaluation(args: Any) -> torch.dtype | None:
    """Return the precision that transformers' arguments ask evaluations for; None is that of the weights."""
    if args is None or not (args.bf16_full_eval or args.fp16_full_eval):
        return None
    return torch.bfloat16 if args.bf16_full_eval else torch.float16


class HFEvaluation(Sharding):
    """The evaluations of HFTrainer."""

    engine: Engine
    training_args: Any
    compute_metrics: Any
    _preprocess: Any
    _generation: Generation | None = None
    _is_predicting = False

    def _forward(self, model: nn.Module, batch: Any) -> StepOutput:
        if torch.is_grad_enabled():
            return super()._forward(model, batch)
        generation = self._generation_in_use
        # without labels a model of pairs cannot run forward, but it can generate
        needs_forward = generation is None or labels_of(batch) is not None
        output = super()._forward(model, batch) if needs_forward else StepOutput(None)
        names = self.engine.label_names
        if isinstance(batch, Mapping) and self._says_labels and all(name in batch for name in names):
            labels = tuple(batch[name] for name in names)  # as of answers: where they begin, where they end
            output.labels = labels if len(labels) != 1 else next(iter(labels))
        if generation is not None:
            synced = self._sharded_by is not None
            output.outputs, output.labels = generation.answers(unwrap(self.model), batch, output.labels, synced)
        if self._preprocess is not None:
            output.outputs = self._preprocess(output.outputs, output.labels)
        output.extra = self._extra(batch, output)
        return output

    def _extra(self, batch: Any, output: StepOutput) -> dict[str, Any] | None:
        """Return what `include_for_metrics` asks for: the model's main input, and its loss for each sample."""
        wanted = (self.training_args and self.training_args.include_for_metrics) or ()
        found: dict[str, Any] = {}
        if "inputs" in wanted:
            name = getattr(unwrap(self.model), "main_input_name", "input_ids")
            if not isinstance(batch, Mapping) or name not in batch:
                has = f"holds {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else "is no dict"
                raise DataError(
                    f"`include_for_metrics` asks for the inputs, which are the model's {name!r}, but the batch {has}."
                )
            found["inputs"] = batch[name]
        if "loss" in wanted and output.loss is not None:
            targets = 1 if output.num_targets is None else output.num_targets
            found["losses"] = (output.loss / targets).expand(count_samples(batch))
        return found or None

    @property
    def _says_labels(self) -> bool:
        """Whether the names of the labels say more than ours: there are several, or the user gave them."""
        said = self.training_args is not None and self.training_args.label_names
        return bool(said) or len(self.engine.label_names) > 1

    @property
    def _generation_in_use(self) -> Generation | None:
        """What generates, where somebody looks at its answers."""
        return self._generation if self._is_predicting or self.compute_metrics is not None else None

    @property
    def _filler(self) -> int:  # type: ignore[override]
        generation = self._generation_in_use
        return IGNORED_LABEL if generation is None else generation.filler(unwrap(self.model))

    def predict(self, dataset: Any) -> Predictions:
        """Return predictions and labels as arrays in the dataset's order, one row a sample, and the metrics if any.

        With `predict_with_generate` in the training arguments, the predictions are the tokens that the model generates.
        """
        self._is_predicting = True
        try:
            with self._weights_for_evaluation():
                return super().predict(dataset)
        finally:
            self._is_predicting = False

    def _evaluated(self, loader: Any, prefix: str) -> dict[str, float]:
        with self._weights_for_evaluation():
            return super()._evaluated(loader, prefix)

    @contextlib.contextmanager
    def _weights_for_evaluation(self) -> Iterator[None]:
        """Hold the weights in the precision of `bf16_full_eval` or `fp16_full_eval`, unless a run is under way.

        The weights themselves are kept beside their copies, and put back.
        """
        dtype = full_evaluation(self.training_args)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            if dtype is not None and not self.engine.is_in_train:
                for tensor in (*self.model.parameters(), *self.model.buffers()):
                    if tensor.is_floating_point():
                        kept.append((tensor, tensor.data))
                        tensor.data = tensor.data.to(dtype)
            yield
        finally:
            for tensor, data in kept:
                tensor.data = data
