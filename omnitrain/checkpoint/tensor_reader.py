"""Tensors in safetensors files, read on one or all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from omnitrain.checkpoint.safetensors_header import Entry, Header, open_regular, read_header_with_digest
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangle of a tensor: the index at which it starts, and its shape."""

# The names of dtypes in safetensors files, as far as the oldest supported version of the package reads them.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

# The most bytes to read at once in order to use a part of them.
_BUFFER = 1 << 26
# The least bytes of a contiguous run that is read separately, without the gap to the next one.
_MIN_RUN = 1 << 16
# How many entries of headers are cached when all files are opened first.
_MAX_CACHED_ENTRIES = 1 << 16


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the name of a tensor's dtype in safetensors files.

    Args:
        name: The name of the tensor.
        dtype: Its dtype.

    Raises:
        CheckpointError: If there is none.
    """
    if dtype not in DTYPES:
        raise CheckpointError(unsaved_dtype(name, dtype))
    return DTYPES[dtype]


def unsaved_dtype(name: str, dtype: torch.dtype) -> str:
    """Return the error message for a tensor whose dtype safetensors files cannot hold."""
    remedy = "Convert it to another dtype"
    if dtype.is_complex:
        remedy = "Make it complex64, or keep torch.view_as_real(...) of it, and use torch.view_as_complex of that"
    return f"{name!r} has dtype {dtype}, which the safetensors files of checkpoints cannot hold. {remedy}."


class TensorLocation(NamedTuple):
    """Dtype and full shape of a tensor, the first and the last file with blocks of it, and the sharded axis."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int
    axis: int

    def likely_files(self, box: Box) -> tuple[int, int]:
        """Return the first and the last file that a box lies in if all files hold equal shares of the tensor."""
        (begins, sizes), shape = box, self.shape
        if self.axis:
            begin, end, length = begins[self.axis], begins[self.axis] + sizes[self.axis], shape[self.axis]
        else:
            begin, end, length = 0, 0, math.prod(shape)
            for first, size, count in zip(begins, sizes, shape, strict=True):
                begin, end = begin * count + first, end * count + first + size - 1
            end += 1
        files = self.last - self.first + 1
        low, high = (self.first + index * files // max(1, length) for index in (begin, end - 1))
        return low, min(high, self.last)


class Catalogue(NamedTuple):
    """The location of each tensor, and size and digest of each file, as read by the main rank."""

    locations: dict[str, TensorLocation]
    signatures: list[tuple[int, str]]


class TensorFile(Mapping[str, torch.Tensor]):
    """A lazy mapping of the tensors in one or more safetensors files.

    Creating it and looking up a tensor are collective calls: the main process reads, and broadcasts the tensor or the
    error. `part` and `block` read on the calling rank only. Files are not memory-mapped, as they may be deleted or
    truncated while a tensor is in use.

    Args:
        path: The file, or all files; a tensor may have blocks in several of them.
        ranks: The ranks that read.
        catalogue: The contents of the files, if the main rank has read them before.

    Attributes:
        is_local: Whether every rank can read the files itself, with `part` and `block`.
        catalogue: The contents of the files.
    """

    def __init__(
        self, path: Path | Sequence[Path], ranks: Ranks | None = None, catalogue: Catalogue | None = None
    ) -> None:
        self._paths: list[Path] = [path] if isinstance(path, Path) else list(path)
        self._ranks = ranks or Ranks()
        self._headers: dict[int, Header] = {}
        name = self._paths[0].name if len(self._paths) == 1 else f"{len(self._paths)} files"
        self.catalogue: Catalogue = self._ranks.on_main(f"opening {name}", lambda: catalogue or self._catalogue())
        self._locations, self._signatures = self.catalogue
        self.is_local: bool = self._is_local()

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, dtype = self.spec_of(name)
        tensor = torch.empty(shape, dtype=dtype)
        # all ranks learn of an error before the broadcast of the tensor, in which they would wait for ever
        has_failed, error = torch.zeros(1, dtype=torch.uint8), None
        if self._ranks.is_main:
            try:
                self._fill(name, ((0,) * len(shape), shape), tensor)
            except Exception as failure:
                error = failure
                has_failed += 1
        if self._ranks.broadcast(has_failed):
            self._ranks.on_main("the reading of a tensor", lambda: _raise(error))
        return self._ranks.broadcast(tensor)

    def part(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return the values [begin, end) of a flattened tensor, read on this rank only."""
        shape, dtype = self.spec_of(name)
        if not 0 <= begin <= end <= math.prod(shape):
            raise ValueError(f"{name!r} has {math.prod(shape)} values: {begin} to {end} are not in it")
        values, position = torch.empty(end - begin, dtype=dtype), 0
        for offsets, sizes in rectangles(shape, begin, end):
            count = math.prod(sizes)
            self._fill(name, (offsets, sizes), values[position : position + count].view(sizes))
            position += count
        return values

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return the rectangle of a tensor that starts at the index `offsets`, read on this rank only."""
        shape, dtype = self.spec_of(name)
        box = tuple(offsets), tuple(sizes)
        if not len(shape) == len(box[0]) == len(box[1]) or any(
            begin < 0 or size < 0 or begin + size > length for begin, size, length in zip(*box, shape, strict=True)
        ):
            raise ValueError(f"{name!r} has the shape {shape}: a block of {box[1]} at {box[0]} is not in it")
        tensor = torch.empty(box[1], dtype=dtype)
        self._fill(name, box, tensor)
        return tensor

    def read_tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return full tensors, read on this rank only, opening each file once."""
        tensors: dict[str, torch.Tensor] = {}
        missing: dict[str, list[Box]] = {}
        for name in names:
            shape, dtype = self.spec_of(name)
            tensors[name] = torch.empty(shape, dtype=dtype)
            missing[name] = [((0,) * len(shape), shape)] if math.prod(shape) else []
        locations = [self._locations[name] for name, boxes in missing.items() if boxes]
        # the files before the first one that has any of the tensors are not opened
        for number in range(min((location.first for location in locations), default=0), len(self._paths)):
            if not any(missing.values()):
                break
            self._read_from(number, tensors, missing)
        for name, boxes in missing.items():
            if boxes:
                raise self._missing(name, boxes[0])
        return tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, name: object) -> bool:
        return name in self._locations

    def spec_of(self, name: str) -> Spec:
        """Return shape and dtype of a full tensor without reading it."""
        location = self._locations[name]
        return location.shape, _BY_NAME[location.dtype]

    def subset(self, names: Collection[str]) -> TensorFile:
        """Return the mapping of some of the tensors, without reading them."""
        subset = copy.copy(self)
        subset._locations = {name: location for name, location in self._locations.items() if name in names}
        return subset

    # --- headers

    def _catalogue(self) -> Catalogue:
        blocks: dict[str, list[tuple[int, Entry]]] = {}
        signatures, entry_count = [], 0
        for number in range(len(self._paths)):
            header = self._headers.get(number) or read_header_with_digest(self._paths[number])
            for name, entry in header.entries.items():
                blocks.setdefault(name, []).append((number, entry))
            signatures.append((header.size, header.digest))
            entry_count += len(header.entries)
            # the headers of thousands of files would not fit into memory; they are read again where needed
            if entry_count <= _MAX_CACHED_ENTRIES or not number:
                self._headers[number] = header
        return Catalogue({name: self._locate(name, entries) for name, entries in blocks.items()}, signatures)

    def _locate(self, name: str, numbered: list[tuple[int, Entry]]) -> TensorLocation:
        entries = [entry for _, entry in numbered]
        first = entries[0]
        ends = [tuple(map(sum, zip(entry.corner, entry.shape, strict=True))) for entry in entries]
        if len({len(end) for end in ends}) > 1 or len({(entry.dtype, entry.full_shape) for entry in entries}) > 1:
            raise CheckpointError(f"{self._display_path()} is damaged: blocks of {name!r} differ in dtype or shape.")
        shape = first.full_shape if first.full_shape is not None else tuple(map(max, zip(*ends, strict=True)))
        # a set: replicas of a block in several files count once
        stored = sum(math.prod(sizes) for _, sizes in {(entry.corner, entry.shape) for entry in entries})
        if stored < math.prod(shape):
            raise self._incomplete(name, f"{math.prod(shape) - stored} of its {math.prod(shape)} values")
        axes = (axis for axis, length in enumerate(shape) if any(entry.shape[axis] < length for entry in entries))
        return TensorLocation(first.dtype, shape, numbered[0][0], numbered[-1][0], next(axes, 0))

    def _header(self, number: int) -> Header:
        if number not in self._headers:
            self._headers[number] = read_header_with_digest(self._paths[number])
        return self._headers[number]

    def _search_order(self, name: str, box: Box) -> Iterator[int]:
        """Yield the numbers of the files that may overlap a box, the most likely ones first.

        These are the file of this rank, if as many ranks read as wrote, and those at the position of the box in the
        tensor. Without an order, each rank would open the files of all ranks.
        """
        location, count = self._locations[name], len(self._paths)
        own_file = self._ranks.rank * count // self._ranks.world_size
        low, high = location.likely_files(box)
        if location.first <= own_file <= location.last:
            yield own_file
        yield from range(low, high + 1)
        for distance in range(1, location.last - location.first + 1):
            for number in (low - distance, high + distance):
                if location.first <= number <= location.last:
                    yield number

    def _is_local(self) -> bool:
        if self._ranks.world_size == 1:
            return True
        sees_files = True
        try:
            for number in {0, self._ranks.rank * len(self._paths) // self._ranks.world_size} if self._paths else ():
                sees_files = sees_files and self._header(number)[1:] == self._signatures[number]
        except CheckpointError:
            sees_files = False
        return self._ranks.sum("which ranks see the files", float(sees_files)) == [self._ranks.world_size]

    # --- reading

    def _fill(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read a box of a tensor into `target`, which has its shape."""
        missing = {name: [box] if math.prod(box[1]) else []}
        if not missing[name]:
            return
        for number in self._search_order(name, box):
            self._read_from(number, {name: target}, missing, box[0])
            if not missing[name]:
                return
        raise self._missing(name, missing[name][0])

    def _read_from(
        self,
        number: int,
        targets: Mapping[str, torch.Tensor],
        missing: dict[str, list[Box]],
        corner: Sequence[int] | None = None,
    ) -> None:
        """Read the parts of missing boxes that a file holds, and subtract them.

        Args:
            number: The number of the file.
            targets: The tensors to fill by name.
            missing: The boxes to read of each tensor; changed.
            corner: The index in the full tensor at which the target starts; None for the first.
        """
        entries = self._checked_header(number)
        overlaps = [
            (name, entry, box, overlap)
            for name, boxes in missing.items()
            if boxes and (entry := entries.get(name)) is not None
            for box in boxes
            if (overlap := _intersection(box, (entry.corner, entry.shape)))
        ]
        if not overlaps:
            return
        try:
            with open_regular(self._paths[number]) as file:
                for name, entry, box, overlap in overlaps:
                    _read(file, entry, overlap, _narrow(targets[name], corner or (0,) * len(box[0]), overlap))
                    # what this file did not have of the box is looked for in the next
                    missing[name].remove(box)
                    missing[name] += _subtract(box, overlap)
        except OSError as error:
            raise CheckpointError(
                f"{str(self._paths[number])!r} cannot be read: {error}. Use another checkpoint."
            ) from error

    def _checked_header(self, number: int) -> dict[str, Entry]:
        """Return the entries of a file, after checking that the main process sees the same file."""
        header = self._header(number)
        # a stale cache of a network file system may show an earlier file of the same name
        if header[1:] != self._signatures[number]:
            raise CheckpointError(
                f"{str(self._paths[number])!r} on rank {self._ranks.rank} differs from that on the main rank. Copy the "
                "checkpoint again, or put it on a file system that all ranks share."
            )
        return header.entries

    def _missing(self, name: str, box: Box) -> CheckpointError:
        return self._incomplete(name, f"the block of {box[1]} at {box[0]}")

    def _incomplete(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._display_path()} is incomplete: none of its {len(self._paths)} files has {what} of {name!r}. "
            "Use another checkpoint."
        )

    def _display_path(self) -> str:
        return repr(str(self._paths[0] if len(self._paths) == 1 else self._paths[0].parent))


# --- rectangles


def rectangles(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the values [begin, end) of a flattened tensor as rectangles, in order: 1 to 2n - 1 in n dimensions.

    >>> rectangles((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    shape = tuple(shape)
    if begin >= end:
        return []
    if len(shape) < 2:
        return [((begin,), (end - begin,)) if shape else ((), ())]
    inner = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        return _in_row(first, rectangles(shape[1:], skipped, rest))
    boxes: list[Box] = []
    if skipped:
        boxes += _in_row(first, rectangles(shape[1:], skipped, inner))
        first += 1
    if first < last:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + _in_row(last, rectangles(shape[1:], 0, rest))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes]


def _intersection(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    begins = tuple(map(max, zip(box[0], other[0], strict=True)))
    ends = [min(a + b, c + d) for a, b, c, d in zip(*box, *other, strict=True)]
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, sizes) if all(size > 0 for size in sizes) else None


def _subtract(box: Box, hole: Box) -> list[Box]:
    """Return the difference of a box and a box within it, as boxes."""
    rest: list[Box] = []
    begins, sizes = list(box[0]), list(box[1])
    for axis, (begin, size) in enumerate(zip(*hole, strict=True)):
        end = begins[axis] + sizes[axis]
        for first, last in ((begins[axis], begin), (begin + size, end)):
            if first < last:
                rest.append(
                    ((*begins[:axis], first, *begins[axis + 1 :]), (*sizes[:axis], last - first, *sizes[axis + 1 :]))
                )
        begins[axis], sizes[axis] = begin, size
    return rest


def _narrow(tensor: torch.Tensor, corner: Sequence[int], box: Box) -> torch.Tensor:
    """Return a box, in indices of the full tensor, of a part that starts at `corner`."""
    for axis, (origin, begin, size) in enumerate(zip(corner, *box, strict=True)):
        tensor = tensor.narrow(axis, begin - origin, size)
    return tensor


# --- bytes


def _read(file: BinaryIO, entry: Entry, box: Box, target: torch.Tensor) -> None:
    """Read a box, in indices of the full tensor, from the block in a file."""
    offsets = [begin - corner for begin, corner in zip(box[0], entry.corner, strict=True)]
    _read_box(file, entry.offset, entry.shape, offsets, target)


def _read_box(file: BinaryIO, start: int, shape: Sequence[int], offsets: Sequence[int], target: torch.Tensor) -> None:
    """Read a box of the shape of `target` from a row-major array at the byte `start`."""
    item = target.element_size()
    if not shape:
        _read_into(file, start, target)
        return
    row = math.prod(shape[1:]) * item
    is_run = tuple(target.shape[1:]) == tuple(shape[1:])
    if is_run and target.is_contiguous():
        _read_into(file, start + offsets[0] * row, target)
        return
    axis = next(i for i in reversed(range(len(shape))) if i == 0 or target.shape[i] < shape[i])
    run = math.prod(target.shape[axis:]) * item
    # large or long runs are read in place, piece by piece; short ones row by row through a buffer, as each read is a
    # system call
    if len(shape) > 1 and (row > _BUFFER or (not is_run and run >= _MIN_RUN)):
        for index in range(target.shape[0]):
            _read_box(file, start + (offsets[0] + index) * row, shape[1:], offsets[1:], target[index])
        return
    count = max(1, _BUFFER // max(1, row))
    buffer = torch.empty((min(count, target.shape[0]), *shape[1:]), dtype=target.dtype)
    for first in range(0, target.shape[0], count):
        rows = min(count, target.shape[0] - first)
        _read_into(file, start + (offsets[0] + first) * row, buffer[:rows])
        inner: Any = (slice(None), *(slice(b, b + s) for b, s in zip(offsets[1:], target.shape[1:], strict=True)))
        target[first : first + rows].copy_(buffer[:rows][inner])


def _read_into(file: BinaryIO, start: int, tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor with the bytes of a file at `start`."""
    target: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    file.seek(start)
    while target:
        size = file.readinto(target)  # type: ignore[attr-defined]
        if not size:
            raise OSError("the file is shorter than its header says")
        target = target[size:]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
