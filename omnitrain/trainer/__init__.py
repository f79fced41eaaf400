"""Trainers and the parts of a run."""
