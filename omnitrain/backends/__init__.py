"""Backends: where the weights are, how they are wrapped, and how they are updated."""
