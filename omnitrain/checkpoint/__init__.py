"""Checkpoints: files and folders in `store.py`, tensors in `state.py`."""
