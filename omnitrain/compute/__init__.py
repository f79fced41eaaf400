"""Precision, random state and activation checkpointing."""
