"""What HFTrainer's evaluations have beside those of every trainer: what users of transformers know of theirs.

The evaluation loop itself is in `omnitrain/evaluation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnitrain.checkpoint.state import unwrap
from omnitrain.collation import IGNORED_LABEL, labels_of
from omnitrain.evaluation import Predictions
from omnitrain.trainers.generating import Generation
from omnitrain.trainers.scaling import LossScaling
from omnitrain.units import StepOutput

if TYPE_CHECKING:
    from omnitrain.trainers.engine import Engine

__all__ = ["HFEvaluation"]


class HFEvaluation(LossScaling):
    """The evaluations of HFTrainer."""

    engine: Engine
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
        if isinstance(batch, Mapping) and len(names) > 1 and all(name in batch for name in names):
            output.labels = tuple(batch[name] for name in names)  # as of answers: where they begin, where they end
        if generation is not None:
            synced = self.engine.is_fsdp_enabled or self.engine.is_deepspeed_enabled
            output.outputs, output.labels = generation.answers(unwrap(self.model), batch, output.labels, synced)
        if self._preprocess is not None:
            output.outputs = self._preprocess(output.outputs, output.labels)
        return output

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
            return super().predict(dataset)
        finally:
            self._is_predicting = False
