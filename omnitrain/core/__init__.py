"""Errors, events, durations, progress and metrics, without torch."""
