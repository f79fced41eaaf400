"""Datasets, loaders and batches."""
