"""Tensors read from safetensors files: whole on all ranks, or in parts by each rank from its own disk."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from omnitrain.checkpoint.safetensors_header import Entry, Header, open_regular, read_marked_header
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangle of a tensor: the index at which it begins, and its shape."""

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
"""The names of dtypes in safetensors files: those that its oldest supported version reads."""
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

_BUFFER = 1 << 26
"""The most bytes that are read beyond what was asked for."""
_RUN = 1 << 16
"""Bytes from which on a contiguous run is read alone, not with what lies between it and the next."""
_KEPT = 1 << 16
"""How many entries of headers are kept from the first reading of all files."""


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
    """Return the message about a tensor whose dtype safetensors files cannot hold."""
    remedy = "Convert it to another dtype"
    if dtype.is_complex:
        remedy = "Make it complex64, or keep torch.view_as_real(...) of it, and use torch.view_as_complex of that"
    return f"{name!r} is of {dtype}, which the safetensors files of checkpoints cannot hold. {remedy}."


class Place(NamedTuple):
    """Dtype and whole shape of a tensor, the first and the last file with it, and the axis that it is cut along."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int
    axis: int

    def likely(self, box: Box) -> tuple[int, int]:
        """Return the first and the last file that a box lies in if all files have as much of the tensor."""
        (begins, sizes), shape = box, self.shape
        if self.axis:
            begin, end, whole = begins[self.axis], begins[self.axis] + sizes[self.axis], shape[self.axis]
        else:
            begin, end, whole = 0, 0, math.prod(shape)
            for first, size, length in zip(begins, sizes, shape, strict=True):
                begin, end = begin * length + first, end * length + first + size - 1
            end += 1
        count = self.last - self.first + 1
        low, high = (self.first + at * count // max(1, whole) for at in (begin, end - 1))
        return low, min(high, self.last)


class Catalogue(NamedTuple):
    """What the main rank finds in all files: the place of each tensor, and size and digest of each file."""

    places: dict[str, Place]
    marks: list[tuple[int, str]]


class TensorFile(Mapping[str, torch.Tensor]):
    """Tensors in a safetensors file, or in several, with one in memory at a time.

    All ranks must make it together, and look up a tensor together: the main process reads it, and sends it, or the
    error, to the others. `part` and `block` are read by each rank alone. No file is mapped: it may be deleted or
    truncated while a tensor is in use.

    Args:
        path: The file, or all files; a tensor may lie in several of them, in blocks.
        ranks: The ranks that read it.
        catalogue: What is in the files, if the main rank has found it before.

    Attributes:
        is_local: Whether every rank can read the files by itself, with `part` and `block`.
        catalogue: What is in the files.
    """

    def __init__(
        self, path: Path | Sequence[Path], ranks: Ranks | None = None, catalogue: Catalogue | None = None
    ) -> None:
        self._paths: list[Path] = [path] if isinstance(path, Path) else list(path)
        self._ranks = ranks or Ranks()
        self._headers: dict[int, Header] = {}
        name = self._paths[0].name if len(self._paths) == 1 else f"{len(self._paths)} files"
        self.catalogue: Catalogue = self._ranks.on_main(f"opening {name}", lambda: catalogue or self._catalogue())
        self._places, self._marks = self.catalogue
        self.is_local: bool = self._is_local()

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, dtype = self.spec_of(name)
        tensor = torch.empty(shape, dtype=dtype)
        failed, error = torch.zeros(1, dtype=torch.uint8), None
        if self._ranks.is_main:
            try:
                self._fill(name, ((0,) * len(shape), shape), tensor)
            except Exception as raised:
                error = raised
                failed += 1
        if self._ranks.broadcast(failed):
            self._ranks.on_main("the reading of a tensor", lambda: _raise(error))
        return self._ranks.broadcast(tensor)

    def part(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return the values [begin, end) of a flattened tensor, read by this rank alone."""
        shape, dtype = self.spec_of(name)
        if not 0 <= begin <= end <= math.prod(shape):
            raise ValueError(f"{name!r} has {math.prod(shape)} values: {begin} to {end} are not in it")
        values, done = torch.empty(end - begin, dtype=dtype), 0
        for offsets, sizes in rectangles(shape, begin, end):
            count = math.prod(sizes)
            self._fill(name, (offsets, sizes), values[done : done + count].view(sizes))
            done += count
        return values

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a rectangle of a tensor, from the index `offsets` on, read by this rank alone."""
        shape, dtype = self.spec_of(name)
        box = tuple(offsets), tuple(sizes)
        if not len(shape) == len(box[0]) == len(box[1]) or any(
            begin < 0 or size < 0 or begin + size > whole for begin, size, whole in zip(*box, shape, strict=True)
        ):
            raise ValueError(f"{name!r} has the shape {shape}: a block of {box[1]} at {box[0]} is not in it")
        tensor = torch.empty(box[1], dtype=dtype)
        self._fill(name, box, tensor)
        return tensor

    def whole(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return whole tensors, read by this rank alone, with each file opened once for all of them."""
        found = {name: torch.empty(self.spec_of(name)[0], dtype=self.spec_of(name)[1]) for name in names}
        left: dict[str, list[Box]] = {
            name: [((0,) * one.dim(), tuple(one.shape))] if one.numel() else [] for name, one in found.items()
        }
        places = [self._places[name] for name, boxes in left.items() if boxes]
        for number in range(min((one.first for one in places), default=0), len(self._paths)):
            if not any(left.values()):
                break
            self._read_from(number, found, left)
        for name, boxes in left.items():
            if boxes:
                raise self._missing(name, boxes[0])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def spec_of(self, name: str) -> Spec:
        """Return shape and dtype of a whole tensor without reading it."""
        place = self._places[name]
        return place.shape, _BY_NAME[place.dtype]

    def only(self, names: Collection[str]) -> TensorFile:
        """Return some of the tensors, none of which is read."""
        found = copy.copy(self)
        found._places = {name: place for name, place in self._places.items() if name in names}
        return found

    # --- what is in the files

    def _catalogue(self) -> Catalogue:
        found: dict[str, list[tuple[int, Entry]]] = {}
        marks, kept = [], 0
        for number in range(len(self._paths)):
            header = self._headers.get(number) or read_marked_header(self._paths[number])
            for name, entry in header.entries.items():
                found.setdefault(name, []).append((number, entry))
            marks.append((header.size, header.digest))
            kept += len(header.entries)
            if kept <= _KEPT or not number:
                self._headers[number] = header
        return Catalogue({name: self._place_of(name, entries) for name, entries in found.items()}, marks)

    def _place_of(self, name: str, numbered: list[tuple[int, Entry]]) -> Place:
        entries = [entry for _, entry in numbered]
        first = entries[0]
        ends = [tuple(map(sum, zip(one.corner, one.shape, strict=True))) for one in entries]
        if len({len(end) for end in ends}) > 1 or len({(one.dtype, one.whole) for one in entries}) > 1:
            raise CheckpointError(f"{self._place()} is damaged: its blocks of {name!r} differ in dtype or whole shape.")
        shape = first.whole if first.whole is not None else tuple(map(max, zip(*ends, strict=True)))
        held = sum(math.prod(sizes) for _, sizes in {(one.corner, one.shape) for one in entries})
        if held < math.prod(shape):
            raise self._incomplete(name, f"{math.prod(shape) - held} of its {math.prod(shape)} values")
        axes = (axis for axis, length in enumerate(shape) if any(one.shape[axis] < length for one in entries))
        return Place(first.dtype, shape, numbered[0][0], numbered[-1][0], next(axes, 0))

    def _header(self, number: int) -> Header:
        if number not in self._headers:
            self._headers[number] = read_marked_header(self._paths[number])
        return self._headers[number]

    def _outwards(self, name: str, box: Box) -> Iterator[int]:
        """Yield the numbers of the files that may have some of a box, the most likely ones first.

        These are the one that a rank of as many as wrote them has written itself, and those at the place of the box in
        the tensor. A rank that looked through all files would look at as many as there are ranks.
        """
        place, count = self._places[name], len(self._paths)
        own = self._ranks.rank * count // self._ranks.world_size
        low, high = place.likely(box)
        if place.first <= own <= place.last:
            yield own
        yield from range(low, high + 1)
        for distance in range(1, place.last - place.first + 1):
            yield from (one for one in (low - distance, high + distance) if place.first <= one <= place.last)

    def _is_local(self) -> bool:
        if self._ranks.world_size == 1:
            return True
        sees = True
        try:
            for number in {0, self._ranks.rank * len(self._paths) // self._ranks.world_size} if self._paths else ():
                sees = sees and self._header(number)[1:] == self._marks[number]
        except CheckpointError:
            sees = False
        return self._ranks.sum("which ranks see the files", float(sees)) == [self._ranks.world_size]

    # --- reading

    def _fill(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read a box of a tensor into `target`, of the box's shape."""
        left = {name: [box] if math.prod(box[1]) else []}
        if not left[name]:
            return
        for number in self._outwards(name, box):
            self._read_from(number, {name: target}, left, box[0])
            if not left[name]:
                return
        raise self._missing(name, left[name][0])

    def _read_from(
        self,
        number: int,
        targets: Mapping[str, torch.Tensor],
        left: dict[str, list[Box]],
        corner: Sequence[int] | None = None,
    ) -> None:
        """Read what a file has of the boxes that are left, and take it out of them.

        Args:
            number: The number of the file.
            targets: The tensors to fill by name.
            left: What is to be read of each; changed.
            corner: Where the target begins in the whole tensor, if it is not all of it.
        """
        entries = self._checked_header(number)
        found = [
            (name, entry, one, common)
            for name, boxes in left.items()
            if boxes and (entry := entries.get(name)) is not None
            for one in boxes
            if (common := _common(one, (entry.corner, entry.shape)))
        ]
        if not found:
            return
        try:
            with open_regular(self._paths[number]) as file:
                for name, entry, one, common in found:
                    _read(file, entry, common, _cut(targets[name], corner or (0,) * len(one[0]), common))
                    left[name].remove(one)
                    left[name] += _without(one, common)
        except OSError as error:
            raise CheckpointError(
                f"{str(self._paths[number])!r} cannot be read: {error}. Take another checkpoint."
            ) from error

    def _checked_header(self, number: int) -> dict[str, Entry]:
        """Return the entries of a file, which must be the one that the main process sees."""
        header = self._header(number)
        if header[1:] != self._marks[number]:
            raise CheckpointError(
                f"{str(self._paths[number])!r} is another file on rank {self._ranks.rank} than on the main one. "
                "Copy the checkpoint again, or put it where all ranks see it."
            )
        return header.entries

    def _missing(self, name: str, box: Box) -> CheckpointError:
        return self._incomplete(name, f"the block of {box[1]} at {box[0]}")

    def _incomplete(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._place()} is incomplete: none of its {len(self._paths)} files has {what} of {name!r}. "
            "Take another checkpoint."
        )

    def _place(self) -> str:
        return repr(str(self._paths[0] if len(self._paths) == 1 else self._paths[0].parent))


# --- rectangles


def rectangles(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the values [begin, end) of a flattened tensor as rectangles of it, in order: 1 to 2n - 1 in n dimensions.

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
    found: list[Box] = []
    if skipped:
        found += _in_row(first, rectangles(shape[1:], skipped, inner))
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + _in_row(last, rectangles(shape[1:], 0, rest))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes]


def _common(one: Box, other: Box) -> Box | None:
    """Return the box that lies in both, None if that is empty."""
    begins = tuple(map(max, zip(one[0], other[0], strict=True)))
    ends = [min(a + b, c + d) for a, b, c, d in zip(*one, *other, strict=True)]
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, sizes) if all(size > 0 for size in sizes) else None


def _without(box: Box, hole: Box) -> list[Box]:
    """Return what is left of a box without a box within it, as boxes."""
    found: list[Box] = []
    begins, sizes = list(box[0]), list(box[1])
    for axis, (begin, size) in enumerate(zip(*hole, strict=True)):
        end = begins[axis] + sizes[axis]
        for first, last in ((begins[axis], begin), (begin + size, end)):
            if first < last:
                found.append(
                    ((*begins[:axis], first, *begins[axis + 1 :]), (*sizes[:axis], last - first, *sizes[axis + 1 :]))
                )
        begins[axis], sizes[axis] = begin, size
    return found


def _cut(tensor: torch.Tensor, corner: Sequence[int], box: Box) -> torch.Tensor:
    """Return a box, in indices of the whole, of a tensor that begins at `corner` of it."""
    for axis, (origin, begin, size) in enumerate(zip(corner, *box, strict=True)):
        tensor = tensor.narrow(axis, begin - origin, size)
    return tensor


# --- bytes


def _read(file: BinaryIO, entry: Entry, box: Box, target: torch.Tensor) -> None:
    """Read a box, in indices of the whole tensor, from a file's block of it."""
    offsets = [begin - corner for begin, corner in zip(box[0], entry.corner, strict=True)]
    _read_box(file, entry.offset, entry.shape, offsets, target)


def _read_box(file: BinaryIO, start: int, shape: Sequence[int], offsets: Sequence[int], target: torch.Tensor) -> None:
    """Read a box of the shape of `target` from a row-major array that begins at the byte `start`."""
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
    if len(shape) > 1 and (row > _BUFFER or (not is_run and run >= _RUN)):
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
    """Fill a contiguous tensor with the bytes of a file from `start` on."""
    target: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    file.seek(start)
    while target:
        size = file.readinto(target)  # type: ignore[attr-defined]
        if not size:
            raise OSError("it is shorter than its header says")
        target = target[size:]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
