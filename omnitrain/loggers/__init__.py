"""Callbacks that log metrics to files, trackers and the terminal."""
