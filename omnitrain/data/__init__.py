"""Data: from datasets and loaders to batches, in the same order on any number of ranks."""
