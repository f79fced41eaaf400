"""Grouping of samples by length, against padding."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from omnitrain.compute.random_state import derive_seed, isolated_rng
from omnitrain.core.errors import ConfigError, DataError, check_number
from omnitrain.data.loaders import count_rows, is_stream
from omnitrain.data.sampling import Collate, adapt_collate, tensor_columns

logger: logging.Logger = logging.getLogger("omnitrain")

Lengths = Sequence[int] | np.ndarray | Callable[[Any], int] | None
"""The length of each sample, or a function that returns it, or None to find it."""
_SLICE = 10_000
_SLOW_S = 10.0


class GroupByLength(Dataset[Any]):
    """A dataset whose samples are shuffled in groups of similar length.

    In each epoch the samples are shuffled, each `pool` of groups is sorted by length, and the groups are shuffled. The
    first group has the longest sample, so that a run that needs too much memory fails at once. The order depends only
    on the seed, the epoch and the lengths: a run can resume in mid-epoch, and the samples of a step are the same for
    every split and number of processes.

    Args:
        dataset: The dataset, with a length and items.
        group_size: Samples in a group. Padding is least if it is the samples of an optimizer step, or a multiple of the
            micro-batch on all processes.
        lengths: The length of each sample, such as a column of the dataset, or a function of a sample that returns it.
            None takes that of "input_ids", or else of the first sequence in a sample; unless they are those of a
            dataset of Hugging Face, each sample is read once for it.
        pool: Groups that are sorted together: the more, the less padding, and the less random the groups.

    Raises:
        ConfigError: If an argument is wrong.
        DataError: If the dataset is a stream, or samples have no length.

    >>> words = GroupByLength([{"input_ids": [0] * size} for size in (5, 1, 4, 2, 3, 6)], group_size=2)
    >>> [len(words[i]["input_ids"]) for i in words.epoch_order(epoch=0, seed=0)]
    [6, 5, 2, 1, 4, 3]
    """

    def __init__(self, dataset: Any, group_size: int = 64, lengths: Lengths = None, pool: int = 50) -> None:
        check_number("group_size", group_size, least=1, is_whole=True)
        check_number("pool", pool, least=1, is_whole=True)
        self.dataset = dataset
        self.group_size: int = int(group_size)  # np.int64(8) cannot be saved
        self.pool: int = int(pool)
        self.lengths: np.ndarray = sample_lengths(dataset, lengths)
        self.epoch_size: int = len(self.lengths)
        if callable(getattr(dataset, "__getitems__", None)):
            self.__getitems__: Callable[[list[int]], Any] = dataset.__getitems__

    def with_dataset(self, dataset: Any) -> GroupByLength:
        """Return the same grouping of another dataset whose samples have the same lengths."""
        return GroupByLength(dataset, self.group_size, self.lengths, self.pool)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.epoch_size

    def __getitem__(self, index: int) -> Any:
        """Return a sample of the dataset, unchanged."""
        return self.dataset[index]

    def epoch_order(self, epoch: int, seed: int) -> np.ndarray:
        """Return the samples of an epoch in their order, as int64 of shape (epoch_size,)."""
        generator, size = np.random.default_rng(derive_seed(seed, epoch)), self.group_size
        order = generator.permutation(self.epoch_size)
        pools = np.arange(self.epoch_size) // (size * self.pool)
        order = order[np.lexsort((-self.lengths[order], pools))]
        full = self.epoch_size // size  # a short group stays at the end
        if not full:
            return order
        groups = generator.permutation(full)
        longest = np.argmax(self.lengths[order[::size]][groups])
        groups[[0, longest]] = groups[[longest, 0]]
        return np.concatenate([order[: full * size].reshape(full, size)[groups].reshape(-1), order[full * size :]])

    def order_options(self) -> dict[str, Any]:
        """Return what determines the order besides the samples, as JSON types."""
        return {"group_size": self.group_size, "pool": self.pool, "lengths": _digest(self.lengths)}

    def collate_with(self, collate: Collate) -> Collate:
        """Return the collator that the wrapped dataset defines, if any, or this one."""
        return adapt_collate(self.dataset, collate)


class BatchByTokens(Dataset[list[Any]]):
    """A dataset whose items are batches: samples of similar length that fit into a number of tokens when padded.

    Pass it with `batch_size=1`, since each item is a batch of its own: of many short samples, or of a few long ones.
    `gradient_accumulation_steps` and `global_batch_size` then count these batches, and so do all numbers of samples.

    Batches are made once, from the lengths, and each epoch shuffles them, so that a run can resume in mid-epoch, and
    each split and number of processes has the same batches in a step. The loss of a step is the mean over its samples
    or labels, as always.

    Args:
        dataset: The dataset, with a length and items.
        max_tokens: The most tokens in a batch, with padding: its samples times the length of the longest.
        lengths: The length of each sample, as for `GroupByLength`.
        max_samples: The most samples in a batch; None is as many as fit.

    Attributes:
        batches: The samples of each batch.
        padding: The share of all tokens that is padding.

    Raises:
        ConfigError: If an argument is wrong, or a sample is longer than `max_tokens`.
        DataError: If the dataset is a stream, or samples have no length.

    >>> words = BatchByTokens([{"input_ids": [0] * size} for size in (5, 1, 4, 2, 3, 6)], max_tokens=10)
    >>> [[len(sample["input_ids"]) for sample in batch] for batch in words]
    [[1, 2, 3], [4, 5], [6]]
    """

    def __init__(self, dataset: Any, max_tokens: int, lengths: Lengths = None, max_samples: int | None = None) -> None:
        check_number("max_tokens", max_tokens, least=1, is_whole=True)
        check_number("max_samples", 1 if max_samples is None else max_samples, least=1, is_whole=True)
        self.dataset = dataset
        self.max_tokens: int = int(max_tokens)  # np.int64(8) cannot be saved
        self.max_samples: int | None = None if max_samples is None else int(max_samples)
        self.lengths: np.ndarray = sample_lengths(dataset, lengths)
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > max_tokens:
            raise ConfigError(
                f"`max_tokens={max_tokens}` is less than the {self.lengths[longest]} tokens of sample {longest}. Pass "
                "more, or cut long samples."
            )
        # samples of one length meet others than their neighbours in the dataset
        order = np.random.default_rng(_SEED).permutation(len(self.lengths))
        order = order[np.argsort(self.lengths[order], kind="stable")]
        starts = [0]
        for place, length in enumerate(self.lengths[order].tolist()):
            size = place + 1 - starts[-1]
            if size * length > self.max_tokens or (self.max_samples is not None and size > self.max_samples):
                starts.append(place)
        self.batches: list[np.ndarray] = np.split(order, starts[1:])
        tokens = sum(len(batch) * int(self.lengths[batch[-1]]) for batch in self.batches)
        self.padding: float = 1 - int(self.lengths.sum()) / max(tokens, 1)

    def with_dataset(self, dataset: Any) -> BatchByTokens:
        """Return the same batches of another dataset whose samples have the same lengths."""
        return BatchByTokens(dataset, self.max_tokens, self.lengths, self.max_samples)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Any]:
        """Return the samples of a batch."""
        indices = self.batches[index].tolist()
        try:
            fetch: Any = getattr(self.dataset, "__getitems__", None)
            return [*fetch(indices)] if fetch is not None else [self.dataset[sample] for sample in indices]
        except Exception as error:
            error.add_note(f"Batch {index} has the samples {', '.join(map(str, indices))}.")
            raise

    def collate_with(self, collate: Collate) -> Collate:
        """Return a collator of batches, which collates their samples."""
        return _CollateBatches(adapt_collate(self.dataset, collate))

    def order_options(self) -> dict[str, Any]:
        """Return what determines the batches besides the samples, as JSON types."""
        options = {"max_tokens": self.max_tokens, "max_samples": self.max_samples}
        return {**options, "lengths": _digest(self.lengths)}


# Of the order of samples of one length.
_SEED = 0


class _CollateBatches:
    """Collates the samples of batches together; workers can import it."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, batches: Sequence[Sequence[Any]]) -> Any:
        return self.collate([sample for batch in batches for sample in batch])


def _digest(lengths: np.ndarray) -> str:
    return hashlib.blake2b(lengths.tobytes(), digest_size=8).hexdigest()


def sample_lengths(dataset: Any, lengths: Lengths = None, column: str = "input_ids") -> np.ndarray:
    """Return the length of each sample, as int64 of shape (samples,).

    Raises:
        ConfigError: If `lengths` are none.
        DataError: If the dataset is a stream or empty, or a sample has no length.
    """
    if is_stream(dataset) or tensor_columns(dataset)[0] is not None:
        raise DataError(
            "The dataset must have a length, and items of different lengths, got "
            f"{type(dataset).__name__}. Read a stream into a list, or into a dataset of Hugging Face; tensors have one "
            "length."
        )
    size = count_rows(dataset)
    if not size:
        raise DataError("The dataset has no samples. Give it at least one.")
    if lengths is None:
        sizes = _of_table(dataset, column)
        if sizes is None:
            sizes = _of_samples(dataset, lambda sample: _length(sample, column), size)
    elif callable(lengths):
        sizes = _of_samples(dataset, lengths, size)
    else:
        sizes = np.asarray(lengths[:])
    if sizes.shape != (size,) or sizes.dtype.kind not in "iu" or sizes.min() < 0:
        raise ConfigError(
            f"`lengths` must be {size} integers of 0 or more, one for each sample, got {sizes.dtype} of shape "
            f"{sizes.shape}" + (f" with {sizes.min()}." if sizes.size and sizes.dtype.kind in "iu" else ".")
        )
    return sizes.astype(np.int64)


def _of_samples(dataset: Any, length: Callable[[Any], Any], size: int) -> np.ndarray:
    start, has_warned, lengths = time.monotonic(), False, []
    with isolated_rng():
        for index in range(size):
            try:
                lengths.append(length(dataset[index]))
            except Exception as error:
                error.add_note(f"Raised for the length of sample {index}.")
                raise
            if not has_warned and time.monotonic() - start > _SLOW_S:
                has_warned = True
                logger.warning("Reading %d samples for their lengths, which is slow. Pass `lengths=` instead.", size)
    return np.asarray(lengths)


def _of_table(dataset: Any, column: str) -> np.ndarray | None:
    """Return the lengths of a column of a Hugging Face dataset, of which no sample is read; None for other data."""
    if column not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "with_format"):
        return None
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return None  # its `set_transform` decides
    table, lengths = dataset.select_columns([column]).with_format("arrow"), []
    for first in range(0, len(dataset), _SLICE):
        values = table[first : first + _SLICE][column]
        try:
            lengths.append(values.combine_chunks().value_lengths().to_numpy(zero_copy_only=False))
        except AttributeError:
            return None  # no lists
    return np.concatenate(lengths)


def _length(sample: Any, column: str) -> int:
    """Return the length of a column of a sample, or else of its first sequence."""
    if isinstance(sample, Mapping):
        values = [sample[column]] if column in sample else list(sample.values())
    else:
        values = list(sample) if isinstance(sample, tuple) else [sample]
    for value in values:
        if hasattr(value, "__len__") and getattr(value, "ndim", 1):
            return len(value)
    raise DataError(
        f"A sample has no length: it is a {type(sample).__name__}"
        + (f" with the keys {', '.join(map(repr, sample))}" if isinstance(sample, Mapping) else "")
        + ". Pass `lengths=`, a list with the length of each sample or a function of a sample."
    )
