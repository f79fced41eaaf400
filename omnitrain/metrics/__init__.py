"""Metrics by name, by functions and by torchmetrics objects."""
