"""Batches: collation, counting of samples, and copies to the device."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Self, TypeGuard

import numpy as np
import torch

from omnitrain.compute.device_runtime import DeviceRuntime
from omnitrain.core.errors import DataError, check_choice, check_number

# The label that losses and metrics ignore, by the convention of PyTorch and transformers.
IGNORED_LABEL = -100

# The keys of the labels in a dict batch, in the order in which they are tried.
LABEL_KEYS = ("labels", "label", "label_ids", "targets", "target")


# The keys whose entries are sequences along the first dimension, of any type.
SEQUENCE_KEYS = frozenset(
    [*LABEL_KEYS, "input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask",
     "decoder_input_ids", "decoder_attention_mask", "inputs_embeds", "input_values", "input_features"]
)  # fmt: skip
_MASK = "attention_mask"
# The inputs whose padding an `attention_mask` hides from a model.
_MASKED_KEYS = ("input_ids", "inputs_embeds")


def padding_collator(processing_class: Any) -> Callable[[Any], Any] | None:
    """Return the collator of transformers that pads with its tokenizer or feature extractor; None for anything else."""
    if processing_class is None or "transformers" not in sys.modules:
        return None
    import transformers

    pads = (transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor)
    padding: Any = transformers.DataCollatorWithPadding
    return padding(processing_class) if isinstance(processing_class, pads) else None


class DictBatch(dict[str, Any]):
    """A dict batch that moves its tensors by `to`, as transformers' BatchEncoding does.

    >>> DictBatch({"x": torch.zeros(2)}).to("cpu")
    {'x': tensor([0., 0.])}
    """

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Return a copy with all tensors on `device`; everything else is unchanged."""
        target = device if isinstance(device, torch.device) else torch.device(device)
        return self.with_entries({key: move_to_device(value, target, non_blocking) for key, value in self.items()})

    def with_entries(self, entries: Mapping[str, Any]) -> Self:
        """Return a batch of this kind with other entries for the same samples."""
        return type(self)(entries)


class PaddedBatch(DictBatch):
    """A padded dict batch without a mask, which knows its number of tokens.

    >>> PaddedBatch({"input_ids": torch.tensor([[5, 6], [7, 0]])}, tokens=3).count_tokens()
    3
    """

    def __init__(self, batch: Any = (), tokens: int = 0) -> None:  # others copy dicts by type(batch)(entries)
        super().__init__(batch)
        self._tokens = tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self._tokens)  # worker processes send it

    def with_entries(self, entries: Mapping[str, Any]) -> Self:
        """Return a batch with other entries for the same samples, and the same number of tokens."""
        return type(self)(entries, self._tokens)

    def count_tokens(self) -> int:
        """Return how many tokens the samples have."""
        return self._tokens


@dataclass(slots=True)
class Collator:
    """Stacks samples into a batch; sequences of unequal length are truncated and padded.

    Samples are dicts, tuples, tensors, arrays, numbers or lists of numbers. An entry is a sequence if it has one
    dimension and integers, if its name is known for sequences (labels, and inputs of transformers' models such as
    `input_ids` and `input_values`), or if its key is in `pad_values`. All other entries must have the same shape in
    each sample: a model would mistake zeros added to an image or a measurement for data.

    Labels are padded with -100 (as int64 if their type has no negative numbers), everything else with `pad_value`.
    Text and other objects stay lists. A batch of tuples is a tuple, a batch of dicts a dict, with a method
    `to(device)`; a list that contains tensors, arrays or dicts counts as a tuple.

    In a trainer whose model takes an `attention_mask`, a batch whose `input_ids` or `inputs_embeds` are padded gets
    one, if the samples have none: int64 of shape (samples, length), 1 for what is in a sample and 0 for padding.

    Args:
        max_length: Truncate longer sequences to this length; None keeps them.
        truncation_side: "right" cuts off the end, "left" the beginning.
        padding_side: The side on which padding is added.
        pad_value: The padding for every key without an entry in `pad_values`.
        pad_values: Padding by key, for example `{"input_ids": tokenizer.pad_token_id}`; such a key is a sequence.
        label_names: Keys of labels in addition to the usual ones.

    >>> Collator()([{"ids": [1, 2, 3], "labels": [1]}, {"ids": [4], "labels": [2, 3]}])
    {'ids': tensor([[1, 2, 3],
            [4, 0, 0]]), 'labels': tensor([[   1, -100],
            [   2,    3]])}
    """

    max_length: int | None = None
    truncation_side: str = "right"
    padding_side: str = "right"
    pad_value: float = 0
    pad_values: Mapping[str, float] = field(default_factory=dict)
    label_names: Sequence[str] = ()
    _adds_mask: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("truncation_side", "padding_side"):
            check_choice(name, getattr(self, name), ("left", "right"))
        if self.max_length is not None:
            check_number("max_length", self.max_length, least=1, is_whole=True)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of `samples`."""
        first = samples[0]
        if isinstance(first, Mapping):
            for place, sample in enumerate(samples):
                if sample.keys() != first.keys():
                    lacking = first.keys() - sample.keys()
                    keys = ", ".join(map(repr, sorted(lacking or sample.keys() - first.keys(), key=str)))
                    without, other = (place, 0) if lacking else (0, place)
                    raise DataError(
                        f"The samples of one batch have different keys: {keys} is missing in entry {without} of the "
                        f"batch, and entry {other} has it. Give every sample the same keys, or pass `data_collator`."
                    )
            batch = DictBatch({key: self._stack([sample[key] for sample in samples], key) for key in first})
            return batch if _MASK in batch else self._add_mask(batch, samples)
        if isinstance(first, tuple) or (isinstance(first, list) and _is_record(first)):
            columns = _columns(samples)
            last = len(first) - 1
            # By convention the last entry of a tuple is the labels: a sequence of labels is padded with -100.
            return tuple(self._stack(column, "labels" if 0 < i == last else "") for i, column in enumerate(columns))
        return self._stack(samples, "")

    def with_attention_mask(self) -> Collator:
        """Return a copy that gives padded batches an `attention_mask`."""
        collator = copy.copy(self)
        collator._adds_mask = True
        return collator

    def _add_mask(self, batch: DictBatch, samples: Sequence[Mapping[str, Any]]) -> DictBatch:
        """Return a batch whose inputs were padded with a mask of them, or with its number of tokens."""
        key = next((key for key in _MASKED_KEYS if isinstance(batch.get(key), torch.Tensor)), None)
        if key is None or batch[key].ndim < 2:
            return batch
        longest = batch[key].shape[1]
        lengths = [min(len(sample[key]), longest) for sample in samples]
        if min(lengths) == longest:
            return batch
        if not self._adds_mask:
            return PaddedBatch(batch, sum(lengths))
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        batch[_MASK] = mask if self.padding_side == "right" else mask.flip(1)
        return batch

    def _stack(self, values: Sequence[Any], key: str) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            if self.max_length is None:
                with contextlib.suppress(RuntimeError):  # unequal shapes, which are padded below
                    return torch.stack(values)  # type: ignore[arg-type]
            tensors = values
        elif isinstance(first, np.ndarray):
            if first.dtype.kind not in "biufc":
                return list(values)
            if all(value.shape == first.shape for value in values) and self.max_length is None:
                return torch.from_numpy(_as_native(np.stack(values)))
            tensors = [torch.from_numpy(_as_native(value)) for value in values]
        elif isinstance(first, _NUMBERS):
            if isinstance(first, np.bool_):  # which older NumPy does not let PyTorch read
                values = [bool(value) if isinstance(value, np.bool_) else value for value in values]
            try:
                return torch.tensor(values)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                odd = [place for place, value in enumerate(values) if not isinstance(value, _NUMBERS)]
                where = f" (entry {odd[0]} of the batch is {str(values[odd[0]])[:40]!r})" if odd else ""
                raise DataError(
                    f"Cannot make a tensor of {_key_prefix(key)}{str(list(values))[:80]}{where}: {error}. "
                    "Give every sample a number there, or pass `data_collator`."
                ) from error
        elif isinstance(first, tuple) and _is_record(first):
            return tuple(self._stack(column, "") for column in _columns(values))
        elif isinstance(first, Sequence) and not isinstance(first, (str, bytes)):
            try:
                tensors = [torch.as_tensor(value) for value in values]
            except (TypeError, ValueError):
                return list(values)
        elif isinstance(first, Mapping):
            return self(values)
        elif hasattr(first, "num_nodes"):
            name = type(first).__name__
            raise DataError(
                f"{_key_prefix(key)}{name} is a graph, and graphs are joined by their own library. Pass data_collator="
                "torch_geometric.data.Batch.from_data_list, or dgl.batch: the model, or the unit, then gets the batch "
                "as a whole. For a `loss_fn`, name the attribute of the labels, as in label_names=['y']."
            )
        else:
            return list(values)
        shape = tensors[0].shape
        if self.max_length is None and all(tensor.shape == shape for tensor in tensors):
            return torch.stack(tensors)  # type: ignore[arg-type]
        return self._pad(list(tensors), key)

    def _are_sequences(self, tensors: list[torch.Tensor], key: str) -> bool:
        """Whether these may be truncated and padded in their first dimension."""
        if not all(tensor.ndim for tensor in tensors):
            return False
        if key in SEQUENCE_KEYS or key in self.pad_values or key in self.label_names:
            return True
        # an empty list has no type; torch makes it float
        integers = [not (tensor.is_floating_point() or tensor.is_complex()) or not len(tensor) for tensor in tensors]
        return all(integers) and all(tensor.ndim == 1 for tensor in tensors)

    def _pad(self, tensors: list[torch.Tensor], key: str) -> torch.Tensor:
        first, is_sequence = tensors[0], self._are_sequences(tensors, key)
        for place, tensor in enumerate(tensors):
            if tensor.ndim != first.ndim or tensor.shape[is_sequence:] != first.shape[is_sequence:]:
                padded = f"`Collator(pad_values={{{key!r}: 0}})`" if key else "dicts with `Collator(pad_values={...})`"
                raise DataError(
                    f"Cannot put {_key_prefix(key)}entry {place} of the batch, of shape {tuple(tensor.shape)}, and "
                    f"entry 0, of shape {tuple(first.shape)}, into one batch. Make them equal in the dataset, or pass "
                    "`data_collator`. Only sequences of integers, and entries of known names such as 'input_ids', are "
                    f"padded, and only in their first dimension; {padded} pads others."
                )
        if not is_sequence:
            return torch.stack(tensors)
        if self.max_length is not None:
            cut = slice(self.max_length) if self.truncation_side == "right" else slice(-self.max_length, None)
            tensors = [tensor[cut] for tensor in tensors]
        value = self.pad_values.get(key, IGNORED_LABEL if key in (*LABEL_KEYS, *self.label_names) else self.pad_value)
        dtypes = [tensor.dtype for tensor in tensors if len(tensor)] or [tensors[0].dtype]
        dtype = functools.reduce(torch.promote_types, dtypes)
        if value < 0 and not dtype.is_signed:
            dtype = torch.int64  # as bool or uint8, -100 would be a label like any other
        shape = (len(tensors), max(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
        padded = tensors[0].new_full(shape, value, dtype=dtype)
        for row, tensor in zip(padded, tensors, strict=True):
            length = len(tensor)
            row[slice(length) if self.padding_side == "right" else slice(len(row) - length, None)] = tensor
        return padded


_NUMBERS = (bool, int, float, np.number, np.bool_)


def _is_record(value: Sequence[Any]) -> bool:
    """Whether the parts of a tuple or list are batched one by one; otherwise it is a sequence of numbers."""
    return any(isinstance(entry, (torch.Tensor, np.ndarray, Mapping)) for entry in value)


def _columns(samples: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    if len({len(sample) for sample in samples}) > 1:
        raise DataError(
            f"The samples of one batch are tuples of unequal lengths: {', '.join(map(str, map(len, samples)))}. "
            "Give every sample the same number of entries, or pass `data_collator`."
        )
    return list(zip(*samples, strict=True))


def _as_native(array: np.ndarray) -> np.ndarray:
    """Return an array that torch accepts: it rejects negative strides and foreign byte order, warns if read-only."""
    is_native = array.dtype.isnative and array.flags.writeable and min(array.strides, default=0) >= 0
    return array if is_native else array.astype(array.dtype.newbyteorder("="), order="C", copy=True)


def _key_prefix(key: str) -> str:
    return f"{key!r}: " if key else ""


def is_image(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether this is a batch of images: floats of shape (samples, channels, height, width)."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 4


def get_labels(batch: Any, names: Sequence[str] = ()) -> Any:
    """Return the labels of a batch: the last entry of a tuple, what a dict or an object has by such a name, or None.

    Args:
        batch: The batch.
        names: The names of its labels, if it has all of them; for several, a tuple is returned.
    """
    if isinstance(batch, (tuple, list)):
        return batch[-1] if len(batch) > 1 else None
    if isinstance(batch, torch.Tensor):
        return None
    if not isinstance(batch, (dict, Mapping)):
        values: list[Any] = [getattr(batch, name, None) for name in names or LABEL_KEYS]
        if names and len(values) > 1:
            return None if any(value is None for value in values) else tuple(values)
        return next((value for value in values if value is not None), None)
    keys = _label_keys_of(batch, names)
    return None if not keys else batch[keys[0]] if len(keys) == 1 else tuple(batch[key] for key in keys)


def _label_keys_of(batch: Any, names: Sequence[str]) -> Sequence[str]:
    if not isinstance(batch, Mapping):
        return ()
    if names and all(name in batch for name in names):
        return names
    return [key for key in LABEL_KEYS if key in batch][:1]


def required_labels(batch: Any, names: Sequence[str], who: str) -> torch.Tensor:
    """Return the labels of a batch, for an algorithm that changes them.

    Raises:
        DataError: If labels are missing, under several keys, or not a tensor.
    """
    labels = get_labels(batch, names)
    if isinstance(labels, torch.Tensor):
        return labels
    if isinstance(labels, tuple):
        raise DataError(f"{who} changes labels under one key, and `label_names={list(names)!r}` has several of them.")
    kind = "none" if labels is None else f"a {type(labels).__name__} in their place"
    raise DataError(f"{who} needs labels, and found {kind} in the batch. {missing_labels_hint(batch)}")


def missing_labels_hint(batch: Any, names: Sequence[str] = ()) -> str:
    """Return the remedy for a batch whose labels were not found; `names` is the `label_names` of the user."""
    places = f"labels are looked for under {', '.join(dict.fromkeys([*names, *LABEL_KEYS]))}"
    if isinstance(batch, Mapping):
        return (
            f"It has the keys {', '.join(map(repr, batch))}, and {places}: name others by `label_names=`, for instance "
            f"label_names={[str(key) for key in batch][-1:]!r}."
        )
    if not isinstance(batch, (tuple, list, torch.Tensor)):
        return (
            f"It is a {type(batch).__name__}, and {places}, as attributes: name others by `label_names=`, for instance "
            "label_names=['y']."
        )
    return "Labels are the last entry of a tuple: let the dataset, or the `data_collator`, return (inputs, labels)."


def as_probabilities(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return integer labels as probabilities, with one more dimension.

    Raises:
        DataError: If a label is not one of the classes, as far as the device reports it.
    """
    try:
        return torch.nn.functional.one_hot(labels.long(), num_classes).to(torch.get_default_dtype())
    except RuntimeError as error:
        raise DataError(
            f"`num_classes={num_classes}` is for labels from 0 to {num_classes - 1}, and a batch has others: {error} "
            "Not even -100, which losses leave out, has a probability. Correct the labels or `num_classes`."
        ) from error


def with_labels(batch: Any, labels: Any, names: Sequence[str]) -> Any:
    """Return a batch with these labels instead of the ones that `required_labels` returned."""
    if isinstance(batch, Mapping):
        return _like_batch(batch, {**batch, _label_keys_of(batch, names)[0]: labels})
    return (*batch[:-1], labels)


def _like_batch(batch: Mapping[str, Any], entries: dict[str, Any]) -> Mapping[str, Any]:
    """Return the entries as a batch that has `to`, if `batch` has it."""
    return batch.with_entries(entries) if isinstance(batch, DictBatch) else entries


def count_samples(batch: Any) -> int:
    """Return how many samples a batch holds: the length of its first tensor or array, or otherwise of its first list.

    Of any other object it is `num_graphs`, or `batch_size`, or its length. `num_graphs` comes first in a dataclass:
    tensors of graphs that were joined are as long as all their nodes or edges. A batch that has a method
    `count_samples`, such as that of several tasks, returns it.

    Raises:
        DataError: If nothing in the batch has a length.
    """
    if isinstance(batch, tuple) and hasattr(batch, "count_samples"):
        return batch.count_samples()  # type: ignore[attr-defined]
    is_plain = isinstance(batch, (tuple, list, dict, torch.Tensor))
    count = None if is_plain or _fields_of(batch) is batch else getattr(batch, "num_graphs", None)
    if type(count) is not int:
        count = _count(batch)
    if count is not None:
        return count
    sizes = [getattr(batch, name, None) for name in ("num_graphs", "batch_size")]
    count = next((size for size in sizes if type(size) is int), None)
    known = (torch.Tensor, np.ndarray, str, bytes, tuple, list, Mapping)
    if count is None and hasattr(type(batch), "__len__") and not isinstance(batch, known):
        count = len(batch)
    if count is None:
        raise DataError(
            f"Cannot tell how many samples are in a batch of type {type(batch).__name__}. "
            "Expected a tensor, or a dict, tuple or dataclass whose tensors have the samples as their first dimension, "
            "or an object with a length: give its class __len__(), or override `_weigh(batch)`."
        )
    return count


def _count(batch: Any) -> int | None:
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, (tuple, list)):
        for entry in batch:
            count = None if isinstance(entry, (tuple, list)) else _count(entry)
            if count is not None:
                return count
        if not batch:
            return None
        # No tensors: columns of objects, such as images of different sizes, or the samples themselves, such as text
        return len(batch[0]) if isinstance(batch[0], (tuple, list)) else len(batch)
    if not isinstance(batch, dict):  # which most are
        batch = _fields_of(batch)
    if isinstance(batch, (dict, Mapping)) or hasattr(batch, "values"):
        for value in batch.values():
            # A list in a dict has one entry for each sample, whatever the entries are.
            count = len(value) if isinstance(value, (list, tuple)) else _count(value)
            if count is not None:
                return count
    return None


def first_row(batch: Any) -> Any:
    """Return the first row of a batch: the first entry of each tensor, array or list in it."""
    if isinstance(batch, Mapping):
        return {key: first_row(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return [first_row(value) for value in batch]
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[0] if batch.ndim and len(batch) else batch
    return batch[0] if isinstance(batch, list) and batch else batch


def _fields_of(value: Any) -> Any:
    """Return the fields of an instance of a dataclass as a dict, and anything else unchanged."""
    if not is_dataclass(value) or isinstance(value, (type, Mapping)):
        return value
    return {attribute.name: getattr(value, attribute.name) for attribute in fields(value)}


def map_entries(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch of the same kind with its entries changed, and what has no entries unchanged."""
    if isinstance(batch, Mapping):
        return _like_batch(batch, {key: change(value) for key, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        return _like_sequence(batch, map(change, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        return _with_fields(batch, {name: change(value) for name, value in _fields_of(batch).items()})
    return batch


def _like_sequence(batch: Any, entries: Iterable[Any]) -> Any:
    """Return the entries as a tuple, a named tuple or a list, as the batch is."""
    return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)


def _with_fields(batch: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of an instance of a dataclass, which may be frozen, with other values in its fields."""
    clone = copy.copy(batch)
    for name, value in values.items():
        object.__setattr__(clone, name, value)
    return clone


def split_batch(batch: Any, size: int) -> list[Any]:
    """Return a batch in as few parts as have at most `size` rows: equal ones, the first larger by one.

    Tensors, arrays and lists with an entry for each row are cut. What holds for all rows goes along with each part:
    numbers, text, None, tensors without dimensions, and those whose first dimension is 1.

    Raises:
        DataError: If something in the batch is none of these.

    >>> split_batch({"x": torch.arange(3), "names": ["a", "b", "c"], "scale": 2.0}, 2)
    [{'x': tensor([0, 1]), 'names': ['a', 'b'], 'scale': 2.0}, {'x': tensor([2]), 'names': ['c'], 'scale': 2.0}]
    """
    try:
        rows = count_samples(batch)
    except DataError:
        raise _unsplittable(batch, "") from None
    if rows <= size:
        return [batch]
    smaller, larger = divmod(rows, -(-rows // size))
    return split_by_sizes(batch, [smaller + (number < larger) for number in range(-(-rows // size))])


def split_by_sizes(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a batch in parts of these numbers of rows, which add up to its own; it is cut as by `split_batch`.

    Raises:
        DataError: If something in the batch cannot be cut.
    """
    rows = sum(sizes)
    cuts = [_Cut(stop - size, stop, rows) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)]
    if isinstance(batch, (tuple, list)) and not _has_columns(batch):
        return [batch[cut.start : cut.stop] for cut in cuts]
    return [cut.of_columns(batch) if isinstance(batch, (tuple, list)) else cut.of(batch, "") for cut in cuts]


def _has_columns(batch: Sequence[Any]) -> bool:
    """Whether the entries of a batch are its columns, as `count_samples` sees it, and not its samples."""
    if isinstance(batch, list) and all(isinstance(entry, Mapping) for entry in batch):
        raise _unsplittable(batch, " of dicts")  # samples, or columns: their rows do not tell
    entries = [entry for entry in batch if not isinstance(entry, (tuple, list))]
    return isinstance(batch[0], (tuple, list)) or any(_count(entry) is not None for entry in entries)


@dataclass(slots=True, frozen=True)
class _Cut:
    """A range of the rows of a batch."""

    start: int
    stop: int
    rows: int

    def of(self, value: Any, name: str) -> Any:
        """Return these rows of a batch, or of what it has under a name."""
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if value.ndim and value.shape[0] == self.rows:
                return value[self.start : self.stop]
            if not value.ndim or value.shape[0] == 1:
                return value
            raise _unsplittable(value, f" of shape {tuple(value.shape)}{name} in a batch of {self.rows} rows")
        if value is None or isinstance(value, (str, bytes, bool, int, float, complex, np.generic)):
            return value
        if isinstance(value, (dict, UserDict)):
            entries = {key: self.of(entry, f" under {key!r}") for key, entry in value.items()}
            if isinstance(value, DictBatch):
                return DictBatch(entries)  # of a PaddedBatch too: how many of its tokens are in these rows is unknown
            # a UserDict is transformers' BatchEncoding, whose further attributes are of all rows
            if type(value) is dict or isinstance(value, UserDict):
                return type(value)(entries)
            part = copy.copy(value)
            part.update(entries)
            return part
        if isinstance(value, (tuple, list)):
            is_record = isinstance(value, tuple) and all(map(self._is_column, value))
            if is_record and (hasattr(value, "_fields") or len(value) != self.rows):
                return self.of_columns(value)
            if not is_record and len(value) == self.rows:
                return value[self.start : self.stop]
            raise _unsplittable(value, f" of {len(value)} entries{name} in a batch of {self.rows} rows")
        if is_dataclass(value):
            entries = {key: self.of(entry, f" under {key!r}") for key, entry in _fields_of(value).items()}
            if entries.get("num_graphs") == self.rows:
                entries["num_graphs"] = self.stop - self.start
            return _with_fields(value, entries)
        raise _unsplittable(value, name)

    def of_columns(self, value: Any) -> Any:
        """Return these rows of each of several columns."""
        return _like_sequence(value, (self.of(entry, f" at {place}") for place, entry in enumerate(value)))

    def _is_column(self, value: Any) -> bool:
        if isinstance(value, tuple):
            return all(map(self._is_column, value))
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == self.rows


def _unsplittable(value: Any, where: str) -> DataError:
    return DataError(
        f"`microbatch_size` cannot split a {type(value).__name__}{where} into rows. Give the `data_collator` (or a "
        "loader) a method split_batch(batch, size) that returns a list of batches of at most `size` rows."
    )


def move_to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return the batch with all its tensors on `device`; everything else is unchanged."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=non_blocking)
    if type(batch) is tuple:
        return tuple([move_to_device(value, device, non_blocking) for value in batch])
    if isinstance(batch, dict):
        return {key: move_to_device(value, device, non_blocking) for key, value in batch.items()}
    if callable(getattr(batch, "to", None)) and not isinstance(batch, torch.nn.Module):
        return batch.to(device)  # transformers' BatchEncoding, torch's PackedSequence and the like
    return map_entries(batch, lambda value: move_to_device(value, device, non_blocking))


def cast_inputs(batch: Any, dtype: torch.dtype, label_names: Sequence[str]) -> Any:
    """Return a batch whose floating-point tensors, except labels, are of this dtype.

    Raises:
        DataError: If it is of a type whose tensors are unknown.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        return map_entries(value, cast)

    if isinstance(batch, torch.Tensor):
        return cast(batch)
    if isinstance(batch, Mapping):
        labels = {*label_names, *LABEL_KEYS}
        return _like_batch(batch, {key: value if key in labels else cast(value) for key, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        cut = len(batch) - 1 if len(batch) > 1 else 1  # the last of several are the labels
        return _like_sequence(batch, [*map(cast, batch[:cut]), *batch[cut:]])
    if is_dataclass(batch) and not isinstance(batch, type):
        return _with_fields(batch, cast_inputs(_fields_of(batch), dtype, label_names))
    raise DataError(
        f"`dtypes` sets the inputs, and a batch is of {type(batch).__name__}, whose tensors are unknown. Leave it out, "
        "and cast them in the `data_collator`."
    )


def pin_batch(batch: Any) -> Any:
    """Return the batch in page-locked memory, from which copies to a GPU do not block."""
    is_known = isinstance(batch, (Mapping, tuple))
    if not is_known and callable(getattr(batch, "pin_memory", None)):
        return batch.pin_memory()
    return batch if isinstance(batch, list) else map_entries(batch, pin_batch)


def copy_to_device(batches: Iterable[Any], runtime: DeviceRuntime) -> Iterator[tuple[Any, Any]]:
    """Yield (batch on the host, batch on the device), copied on a separate stream, beside the computation.

    The next batch is drawn when this one has been used on the host and copied: it may be in the same memory.
    """
    stream = runtime.new_stream()
    for batch in batches:
        if _hides_tensors(batch):  # whose memory would be reused while it is in use
            yield batch, move_to_device(batch, runtime.device)
            continue
        with runtime.use_stream(stream):
            ready = move_to_device(batch, runtime.device, non_blocking=True)
        copied, computation = stream.record_event(), runtime.current_stream()
        computation.wait_event(copied)
        for tensor in tensors_in(ready):
            tensor.record_stream(computation)  # or its memory could be reused too early
        yield batch, ready
        copied.synchronize()  # a step was launched meanwhile, so that there is nothing to wait for


def _hides_tensors(batch: Any) -> bool:
    """Whether an object in a batch moves its tensors itself, so that `tensors_in` does not know them."""
    if isinstance(batch, (torch.Tensor, str, int, float, np.ndarray, type(None))):
        return False
    if isinstance(batch, Mapping):
        return any(map(_hides_tensors, batch.values()))
    if isinstance(batch, (tuple, list)):
        return hasattr(batch, "to") or any(map(_hides_tensors, batch))
    if is_dataclass(batch) and not hasattr(batch, "to"):
        return any(map(_hides_tensors, _fields_of(batch).values()))
    return callable(getattr(batch, "to", None))


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a batch."""
    batch = _fields_of(batch)
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)
