"""Callbacks that a trainer adds by default, and loggers, one per file."""
