"""Proof of a run's promises: checks before it, drills, comparisons and replays."""
