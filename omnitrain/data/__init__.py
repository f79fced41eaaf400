"""Data: datasets and loaders to batches, in one order on any number of ranks."""
