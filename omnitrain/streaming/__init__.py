"""Streaming metrics: they read one batch at a time and keep no predictions.

`names.py` has the names, `reading.py` reads a batch, `classification.py` and `regression.py` keep the statistics.
`scoring.py` has functions, torchmetrics and the `compute_metrics` argument itself.
"""

from omnitrain.streaming.names import NamedMetrics
from omnitrain.streaming.reading import IGNORED, Scores, class_dimension, main_output

__all__ = ["IGNORED", "NamedMetrics", "Scores", "class_dimension", "main_output"]
