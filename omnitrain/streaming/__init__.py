"""Streaming metrics: they read one batch at a time and keep no predictions.

`names.py` holds the names, `reading.py` how a batch is read, `classification.py` and `regression.py` what is
remembered of the batches. Functions, torchmetrics and the `compute_metrics` argument itself are in `scoring.py`.
"""

from omnitrain.streaming.names import NamedMetrics
from omnitrain.streaming.reading import IGNORED, Scores, class_dimension, main_output

__all__ = ["IGNORED", "NamedMetrics", "Scores", "class_dimension", "main_output"]
