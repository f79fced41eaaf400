"""Backends: where the weights are, how the model is wrapped, and how it is updated."""
