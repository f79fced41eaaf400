"""Loaders for transformers' loop and its callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from omnitrain.arguments import Settings, is_loader
from omnitrain.core.errors import ConfigError
from omnitrain.data.grouping import GroupByLength, sample_lengths
from omnitrain.data.loaders import MapLoader, StreamLoader, UserLoader, identity_collate, is_stream
from omnitrain.data.sampling import windows
from omnitrain.hf.arguments import enum_value
from omnitrain.trainer.base import BaseTrainer


class _MicroBatchSampler(Sampler[Any]):
    """The micro-batches of the current epoch as (epoch, indices); skipping some of them reads nothing."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.trainer.train_loader)

    def __iter__(self) -> Iterator[list[Any]]:
        epoch = self.trainer.progress.epoch
        for indices in self.trainer.train_loader.sampler.batches(epoch):
            yield [(epoch, indices)]


class _FetchDataset(Dataset[Any]):
    def __init__(self, fetch: Any, size: int) -> None:
        self.fetch = fetch
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, request: Any) -> Any:
        return self.fetch(*request)


class _WindowDataset(IterableDataset[Any]):
    """The rest of the current epoch of data without indices, as lists of a window's micro-batches."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[list[Any]]:
        trainer, progress = self.trainer, self.trainer.progress
        position = progress.epoch, progress.samples_in_epoch, progress.batches_in_epoch
        rest = trainer.train_loader.counted_batches(*position)
        return windows((batch for batch, _ in rest), trainer.gradient_accumulation_steps)


def _first(batches: list[Any]) -> Any:
    return batches[0]


def counting_loader(trainer: BaseTrainer, by_window: bool) -> DataLoader[Any]:
    """Return a loader by which transformers' loop counts micro-batches, or windows.

    It reads nothing unless it is iterated: the loop's own batches come from the trainer's feed.
    """
    loader = trainer.train_loader
    generator = torch.Generator().manual_seed(trainer.seed)  # otherwise it draws from the generator of training
    if by_window or not isinstance(loader, MapLoader):
        return DataLoader(_WindowDataset(trainer), batch_size=None, collate_fn=identity_collate, generator=generator)
    return DataLoader(
        _FetchDataset(loader.fetch, loader.sampler.size),
        batch_sampler=_MicroBatchSampler(trainer),
        collate_fn=_first,
        pin_memory=loader.pin_memory,
        generator=generator,
    )


def apply_length_grouping(settings: Settings, args: Any, group_size: int) -> Settings:
    """Return the settings with the training set grouped by length, if the training arguments request it.

    Args:
        settings: The arguments of the trainer.
        args: The user's TrainingArguments, or None.
        group_size: The samples of an optimizer step.

    Raises:
        ConfigError: If the data are no dataset with a length, or have a custom order.
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
        collate = loader.collate
        return DataLoader(loader.dataset, batch_size=batch_size, collate_fn=collate, generator=generator)
    return loader


# The arguments of a loader, besides its dataset and order.
_LOADER_OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


def undo_prepare(loader: Any) -> Any:
    """Return the loader as it was before `accelerator.prepare`, which splits the data as the trainer does itself.

    Raises:
        ConfigError: If it is a loader of a stream, for which the split cannot be undone.
    """
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
