"""Packing of sequences into rows of equal length, instead of padding."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from omnitrain.core.errors import ConfigError, DataError, check_choice, check_number
from omnitrain.data.collation import IGNORED_LABEL, LABEL_KEYS, SEQUENCE_KEYS, Collator
from omnitrain.data.grouping import Lengths, sample_lengths

logger: logging.Logger = logging.getLogger("omnitrain")

Border = Literal["position_ids", "sequence_ids", "cu_seq_lens"]
_SIZES = "sizes"
_SEED = 0


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a dataset, packed into rows of `length` tokens; a row is a training sample.

    Rows are filled by best fit decreasing: the longest sequences first, each into the row whose room it fills best.
    This is done once, from the lengths. Rows are then ordinary samples: `batch_size` counts rows, each epoch shuffles
    them, a run resumes in mid-epoch, and each split and number of processes has the same rows in a step.

    A row has the columns of the sequences; what is left of it is filled with zeros, and with -100 in labels. Samples
    without labels get their tokens as labels. So the loss of a packed epoch is the mean over the same labels as without
    packing, if the model keeps the sequences apart by `borders`.

    Args:
        dataset: The dataset, with a length and items that are dicts of sequences of the same length, such as
            "input_ids" and "labels". Columns that are not sequences of tokens are dropped, and logged.
        length: Tokens in a row.
        lengths: The tokens of each sample, such as a column of the dataset, or a function of a sample that returns
            them. None takes the lengths of `tokens`; unless the dataset is one of Hugging Face, each sample is read
            once for it.
        overlong: What happens to sequences of more than `length` tokens: "error", "truncate" cuts off their ends,
            "split" makes several sequences of them.
        shift: Whether each label is predicted one place before it, as in causal language models: then the first label
            of each sequence is -100, as nothing comes before it.
        borders: What tells the model where sequences begin, one or several: "position_ids" begin at 0 in each sequence;
            "sequence_ids" number the sequences of a row; "cu_seq_lens" makes a micro-batch one row without padding,
            with the places between sequences as `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`,
            for attention of variable length. () says nothing, and sequences see those before them.
        tokens: The column of the tokens.
        pad_values: Further columns that are sequences, each with the value that fills a row; -100 marks labels.

    Attributes:
        padding: The share of all places in rows that is filled up.

    Raises:
        ConfigError: If an argument is wrong.
        DataError: If the dataset is a stream, or samples cannot be packed.

    >>> rows = PackedDataset([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}], length=4)
    >>> rows[0]["input_ids"], rows[0]["labels"], rows[0]["position_ids"]
    (tensor([1, 2, 3, 6]), tensor([-100,    2,    3, -100]), tensor([0, 1, 2, 0]))
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        lengths: Lengths = None,
        overlong: Literal["error", "truncate", "split"] = "error",
        shift: bool = True,
        borders: Border | Sequence[Border] = "position_ids",
        tokens: str = "input_ids",
        pad_values: Mapping[str, float] | None = None,
    ) -> None:
        check_number("length", length, least=1, is_whole=True)
        check_choice("overlong", overlong, ("error", "truncate", "split"))
        self.borders: tuple[str, ...] = (borders,) if isinstance(borders, str) else tuple(borders)
        for border in self.borders:
            check_choice("borders", border, ("position_ids", "sequence_ids", "cu_seq_lens"), ", or ()")
        self.dataset = dataset
        length = int(length)  # np.int64(8) cannot be saved
        self.length: int = length
        self.overlong = overlong
        self.shift = shift
        self.tokens = tokens
        self.pad_values: dict[str, float] = dict(pad_values or {})
        sizes = sample_lengths(dataset, lengths, tokens)
        self._columns = self._columns_of(dataset[int(np.argmax(sizes))])
        self._lengths = sizes
        self._pieces = self._cut(sizes)
        order, starts = best_fit_decreasing(self._pieces[:, 2], length)
        self._pieces, self._starts = self._pieces[order], starts
        self.padding: float = 1 - int(self._pieces[:, 2].sum()) / (len(self) * length)

    def _columns_of(self, sample: Any) -> dict[str, float]:
        """Return the columns of a row, each with the value that it is filled with."""
        if not isinstance(sample, Mapping) or self.tokens not in sample:
            what = f"the keys {', '.join(map(repr, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
            raise DataError(
                f"Samples must be dicts with {self.tokens!r}, to be packed, got {what}. Return such dicts from the "
                "dataset, or pass the column of the tokens as `tokens=`."
            )
        odd = next((name for name in self.borders if name in sample), None)
        if odd is not None:
            raise DataError(f"Samples have {odd!r} already, which `borders` adds. Remove the column from the dataset.")
        columns = {self.tokens: 0.0}
        known = SEQUENCE_KEYS - {"attention_mask", *LABEL_KEYS}
        columns |= {name: 0.0 for name in sample if name in known}
        columns |= {name: float(IGNORED_LABEL) for name in sample if name in LABEL_KEYS}
        absent = next((name for name in self.pad_values if name not in sample), None)
        if absent is not None:
            raise ConfigError(
                f"`pad_values` names {absent!r}, which samples do not have: {', '.join(map(repr, sample))}."
            )
        columns |= self.pad_values
        unused = sorted(set(sample) - columns.keys() - {"attention_mask"})
        if unused:
            logger.warning(
                "Columns that are not known sequences are not in packed rows: %s. List sequences in `pad_values`.",
                ", ".join(map(repr, unused)),
            )
        return columns

    def _cut(self, sizes: np.ndarray) -> np.ndarray:
        """Return the sequences as (sample, first token, tokens), of shape (sequences, 3)."""
        over = np.flatnonzero(sizes > self.length)
        if len(over) and self.overlong == "error":
            raise DataError(
                f"{len(over)} of {len(sizes)} samples have more than length={self.length} tokens: the first is sample "
                f"{over[0]}, and the longest has {sizes.max()}. Raise `length`, or pass overlong='truncate' or 'split'."
            )
        if self.overlong == "truncate":
            sizes = np.minimum(sizes, self.length)
        counts = -(-sizes // self.length)
        empty = int((counts == 0).sum())
        if empty == len(sizes):
            raise DataError(f"All {empty} samples are empty. Give the dataset at least one token.")
        if empty:
            logger.warning("%d of %d samples are empty, and in no packed row.", empty, len(sizes))
        samples = np.repeat(np.arange(len(sizes)), counts)
        numbers = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = numbers * self.length
        return np.stack([samples, first, np.minimum(sizes[samples] - first, self.length)], axis=1)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts) - 1

    def sequences(self, index: int) -> list[tuple[int, int, int]]:
        """Return the sequences of a row: the sample of each, its first token there, and the token after the last."""
        parts = self._pieces[self._starts[index] : self._starts[index + 1]].tolist()
        return [(sample, first, first + size) for sample, first, size in parts]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a row: a dict of tensors of shape (length,), or of the length of its sequences for "cu_seq_lens"."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"There are {len(self)} rows, got {index}.")
        parts = self.sequences(index % len(self))
        indices = [sample for sample, _, _ in parts]
        try:
            fetch: Any = getattr(self.dataset, "__getitems__", None)
            samples: Any = fetch(indices) if callable(fetch) else [self.dataset[sample] for sample in indices]
            pieces = [self._piece(sample, *part) for sample, part in zip(samples, parts, strict=True)]
        except Exception as error:
            error.add_note(f"Row {index} is packed from the samples {', '.join(map(str, dict.fromkeys(indices)))}.")
            raise
        columns = {name: [piece[name] for piece in pieces] for name in pieces[0]}
        sizes, is_flat = [stop - first for _, first, stop in parts], "cu_seq_lens" in self.borders
        rest = 0 if is_flat else self.length - sum(sizes)
        pad_values = {name: self._columns.get(name, IGNORED_LABEL) for name in columns}
        row = {name: _concatenate(values, rest, pad_values[name]) for name, values in columns.items()}
        filled = [*sizes, rest] if rest else sizes  # the padding is a sequence of its own to the model
        if "position_ids" in self.borders:
            row["position_ids"] = torch.cat([torch.arange(size) for size in filled])
        if "sequence_ids" in self.borders:
            row["sequence_ids"] = torch.repeat_interleave(torch.tensor(filled))
        if is_flat:
            row[_SIZES] = torch.tensor(sizes)
        return row

    def _piece(self, sample: Any, number: int, first: int, stop: int) -> dict[str, np.ndarray]:
        """Return a part of a sample by column, with labels as a packed row has them."""
        size, columns = int(self._lengths[number]), {}
        for name in self._columns:
            values = np.asarray(sample[name])
            if values.ndim < 1 or len(values) != size:
                raise DataError(
                    f"{name!r} of sample {number} has the shape {values.shape}, and the sample {size} tokens. Packed "
                    "columns have an entry for each token, the same each time the sample is read."
                )
            columns[name] = values[first:stop]
        if "attention_mask" in sample and not np.all(np.asarray(sample["attention_mask"])):
            raise DataError(f"Sample {number} is padded: its 'attention_mask' has zeros. Tokenize without padding.")
        labels = [name for name, value in self._columns.items() if value == IGNORED_LABEL]
        if not labels:
            labels, columns["labels"] = ["labels"], columns[self.tokens]
        if self.shift:
            for name in labels:
                values = columns[name] = columns[name].astype(np.int64)  # a copy
                values[0] = IGNORED_LABEL
        return columns

    def collate_with(self, collate: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
        """Return the collator of rows.

        Raises:
            ConfigError: If `collate` is custom, or truncates.
        """
        module, name = type(collate).__module__, getattr(collate, "__name__", type(collate).__name__)
        pads = module.partition(".")[0] == "transformers" and name == "DataCollatorWithPadding"
        if not pads and not (isinstance(collate, Collator) and collate.max_length is None):
            raise ConfigError(
                f"`data_collator` ({name}) has nothing to do for a PackedDataset, whose rows have equal length, and "
                "might change their labels. Leave it out, and change samples in the dataset."
            )
        collate_rows: Any = _flattened if "cu_seq_lens" in self.borders else default_collate
        return collate_rows

    def check_model(self, model: nn.Module, parameters: Collection[str]) -> None:
        """Check that a model separates the sequences of a row, as far as can be seen.

        Raises:
            ConfigError: If it does not.
        """
        missing = [border for border in self.borders if border != "cu_seq_lens" and border not in parameters]
        if missing:
            raise ConfigError(
                f"The model's forward() names no argument {missing[0]!r}, in which a PackedDataset passes the starts "
                "of sequences, so they would attend to each other. Add that argument, choose other `borders`, or let "
                "sequences attend to those before them by borders=()."
            )
        config: Any = getattr(model, "config", None)
        if self.borders != ("position_ids",) or not hasattr(config, "_attn_implementation"):
            return  # only transformers makes its masks from the positions
        if "flash" in str(config._attn_implementation):
            raise ConfigError(
                f"attn_implementation={config._attn_implementation!r} of the model sees where sequences begin by "
                "position_ids in a single row only. Pass borders=('position_ids', 'cu_seq_lens')."
            )
        if any(getattr(module, "is_causal", None) is False for module in model.modules()):
            raise ConfigError(
                f"{type(model).__name__} has bidirectional attention, in which transformers does not separate packed "
                "sequences. Use GroupByLength or a causal model, or borders=() if sequences may attend to each other."
            )

    def order_options(self) -> dict[str, Any]:
        """Return what determines the rows besides the samples, as JSON types."""
        names = ("length", "overlong", "shift")
        return {name: getattr(self, name) for name in names} | {"borders": list(self.borders)}


def _concatenate(values: Sequence[np.ndarray], rest: int, pad_value: float) -> torch.Tensor:
    row = np.concatenate(values)
    if rest:
        if pad_value < 0 and row.dtype.kind in "bu":
            row = row.astype(np.int64)
        row = np.concatenate([row, np.full((rest, *row.shape[1:]), pad_value, dtype=row.dtype)])
    return torch.from_numpy(row)


def _flattened(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Return rows as one row, with the borders of its sequences in the form that flash attention expects."""
    batch: dict[str, Any] = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0] if name != _SIZES}
    if "sequence_ids" in batch:  # which are numbers within each row
        batch["sequence_ids"] = torch.repeat_interleave(torch.cat([row[_SIZES] for row in rows]))[None]
    sizes = torch.cat([row[_SIZES] for row in rows])
    places = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    longest = int(sizes.max())
    return batch | {
        "cu_seq_lens_q": places, "cu_seq_lens_k": places, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def best_fit_decreasing(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the packing: the order of sequences, row by row, and the index in it at which each row begins.

    Rows with the same sizes are counted, not listed, so the time depends on the number of different sizes. Sequences
    of one size are assigned at random, with a constant seed.

    >>> [part.tolist() for part in best_fit_decreasing(np.array([2, 3, 1, 4]), 5)]
    [[1, 0, 3, 2], [0, 2, 4]]
    """
    kinds: dict[int, list[tuple[tuple[tuple[int, int], ...], int]]] = {}  # by room: what is in rows, and how many
    rooms: list[int] = []

    def keep(content: tuple[tuple[int, int], ...], rows: int, room: int) -> None:
        if rows and room not in kinds:
            bisect.insort(rooms, room)
            kinds[room] = []
        if rows:
            kinds[room].append((content, rows))

    for size, count in zip(*(part[::-1].tolist() for part in np.unique(sizes, return_counts=True)), strict=True):
        while count:
            place = bisect.bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                content, rows = kinds[room].pop()
                if not kinds[room]:
                    del kinds[room], rooms[place]
            else:
                room, content, rows = length, (), -(-count // (length // size))
            each = room // size  # once a sequence is in a row, that row is the one that the next fits best
            full = min(rows, count // each)
            rest = count % each if full < rows else 0
            keep((*content, (size, each)), full, room - each * size)
            keep((*content, (size, rest)), int(rest > 0), room - rest * size)
            keep(content, rows - full - (rest > 0), room)
            count -= full * each + rest
    return _listed(sizes, [kind for room in rooms for kind in kinds[room]])


def _listed(
    sizes: np.ndarray, kinds: Sequence[tuple[tuple[tuple[int, int], ...], int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences of rows, which are described by their sizes and counts."""
    shuffled = np.random.default_rng(_SEED).permutation(len(sizes))
    by_size = shuffled[np.argsort(sizes[shuffled], kind="stable")]
    known, first = np.unique(sizes[by_size], return_index=True)
    places = dict(zip(known.tolist(), first.tolist(), strict=True))
    order, counts = [], []
    for content, rows in kinds:
        parts = []
        for size, each in content:
            place = places[size]
            places[size] = place + rows * each
            parts.append(by_size[place : places[size]].reshape(rows, each))
        order.append(np.concatenate(parts, axis=1).reshape(-1))
        counts.append(np.full(rows, sum(each for _, each in content)))
    return np.concatenate(order), np.concatenate([[0], np.cumsum(np.concatenate(counts))])
