"""Loaders for transformers' loop and its callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset, Sampler

from omnitrain.arguments import Settings, is_loader
from omnitrain.core.errors import ConfigError
from omnitrain.data.grouping import GroupByLength, sample_lengths
from omnitrain.data.loaders import MapLoader, StreamLoader, UserLoader, is_stream
from omnitrain.hf.arguments import enum_value


def apply_length_grouping(settings: Settings, args: Any, group_size: int) -> Settings:
    """Return the settings with the training set grouped by length, if the training arguments request it.

    A group is `group_size` samples, those of an optimizer step.
    """
    strategy = enum_value(getattr(args, "train_sampling_strategy", ""))
    dataset: Any = settings.train_dataset if settings.train_loader is None else settings.train_loader
    if dataset is None or (strategy != "group_by_length" and getattr(args, "group_by_length", None) is not True):
        return settings
    if dataset is settings.train_loader or hasattr(dataset, "epoch_order") or is_loader(dataset) or is_stream(dataset):
        raise ConfigError(
            "`training_args.train_sampling_strategy='group_by_length'` needs a dataset with a length and items, and "
            f"without a custom order, got {type(dataset).__name__}. Leave it out."
        )
    if args.length_column_name in (getattr(dataset, "column_names", None) or ()):
        lengths = dataset[args.length_column_name]
    else:
        column = next(iter(getattr(settings.processing_class, "model_input_names", ())), "input_ids")
        lengths = sample_lengths(dataset, column=column)
    return replace(settings, train_dataset=GroupByLength(dataset, group_size, lengths))


class _BatchSampler(Sampler[Any]):
    """The indices of the micro-batches of the first epoch on this rank, as lists."""

    def __init__(self, loader: MapLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.loader.sampler.batches(0))


def loader_for_callbacks(loader: Any, batch_size: int) -> Any:
    """Return a loader for transformers' callbacks: the user's, or a DataLoader with the user's dataset.

    It reads nothing unless it is iterated, and does not disturb a run that uses our loader meanwhile.
    """
    if isinstance(loader, UserLoader):
        return loader.loader
    generator = torch.Generator().manual_seed(0)  # otherwise it draws from the generator of training
    if isinstance(loader, MapLoader):
        batches, collate = _BatchSampler(loader), loader.fetch.collate
        return DataLoader(loader.dataset, batch_sampler=batches, collate_fn=collate, generator=generator)
    if isinstance(loader, StreamLoader) and isinstance(loader.dataset, IterableDataset):
        collate = loader.options.collate
        return DataLoader(loader.dataset, batch_size=batch_size, collate_fn=collate, generator=generator)
    return loader


# The arguments of a loader, besides its dataset and order.
_LOADER_OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


def undo_prepare(loader: Any) -> Any:
    """Return the loader as it was before `accelerator.prepare`, which splits the data as the trainer does itself."""
    if not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        return loader
    prepared: Any = loader.base_dataloader
    sampler = prepared.batch_sampler
    while isinstance(sampler, BatchSamplerShard):
        sampler = sampler.batch_sampler
    if sampler is not prepared.batch_sampler:
        return DataLoader(
            prepared.dataset, batch_sampler=sampler, **{name: getattr(prepared, name) for name in _LOADER_OPTIONS}
        )
    if sampler is None and isinstance(loader, DataLoaderShard) and PartialState().num_processes > 1:
        raise ConfigError(
            "A loader of a stream was prepared by accelerate, so it yields a share of the data, which the trainer "
            "would split again. Return the loader before `accelerator.prepare`."
        )
    return prepared
