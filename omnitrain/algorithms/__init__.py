"""Algorithms: objects that change the training itself, one per file."""
