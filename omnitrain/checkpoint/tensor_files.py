"""Tensors in safetensors files, written and read on one or all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import math
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard, TypeVar

import torch

from omnitrain.checkpoint.safetensors_header import Entry, Header, read_header
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import create_file, open_regular
from omnitrain.distributed.ranks import Ranks, as_bytes

T = TypeVar("T")
Gather = Callable[[Any], torch.Tensor]
"""Returns a tensor in host memory, in one piece."""
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangle of a tensor: the index at which it starts, and its shape."""

# The names of dtypes in safetensors files, as far as the oldest supported version of the package reads them.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

_HASHERS = 4
# How many bytes of tensors are copied, written and hashed at once.
_PIECE = 1 << 24
# The most bytes to read at once in order to use a part of them.
_BUFFER = 1 << 26
# The least bytes of a contiguous run that is read separately, without the gap to the next one.
_MIN_RUN = 1 << 16
# How many entries of headers are cached when all files are opened first.
_MAX_CACHED_ENTRIES = 1 << 16


def unsaved_dtype(name: str, dtype: torch.dtype) -> str:
    """Return the error message for a tensor whose dtype safetensors files cannot hold."""
    remedy = "Convert it to another dtype"
    if dtype.is_complex:
        remedy = "Make it complex64, or keep torch.view_as_real(...) of it, and use torch.view_as_complex of that"
    return f"{name!r} has dtype {dtype}, which the safetensors files of checkpoints cannot hold. {remedy}."


def size_of(spec: Spec) -> int:
    """Return the bytes of a tensor."""
    return math.prod(spec[0]) * spec[1].itemsize


def rows_at_once(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return how many rows of a tensor fit into a piece; at least one."""
    return max(1, _PIECE // max(1, math.prod(shape[1:]) * dtype.itemsize))


# --- reading


class TensorLocation(NamedTuple):
    """Dtype and full shape of a tensor, the first and the last file with blocks of it, and the sharded axis."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int
    axis: int


class Catalogue(NamedTuple):
    """The location of each tensor, and size and digest of each file, as read by the main rank."""

    locations: dict[str, TensorLocation]
    signatures: list[tuple[int, str]]


class _Request(NamedTuple):
    """A box of a tensor to read: the tensor to fill, its corner in the full one, and the boxes that are missing."""

    target: torch.Tensor
    corner: tuple[int, ...]
    missing: list[Box]


class TensorFile(Mapping[str, torch.Tensor]):
    """A lazy mapping of the tensors in one or more safetensors files.

    Creating it and looking up a tensor are collective calls: the main process reads, and broadcasts the tensor or the
    error. All other methods read on the calling rank only. Files are not memory-mapped, as they may be
    deleted or truncated while a tensor is in use, and reading is faster on network file systems.

    Args:
        path: The file, or all files; a tensor may have blocks in several of them.
        ranks: The ranks that read.
        catalogue: The contents of the files, if all ranks have them already.

    Attributes:
        is_local: Whether every rank can read the files itself.
        catalogue: The contents of the files.
    """

    def __init__(
        self, path: Path | Sequence[Path], ranks: Ranks | None = None, catalogue: Catalogue | None = None
    ) -> None:
        self._paths: list[Path] = [path] if isinstance(path, Path) else list(path)
        self._ranks = ranks or Ranks()
        self._headers: dict[int, Header] = {}
        self.catalogue: Catalogue = catalogue or Catalogue({}, [])
        if catalogue is None and self._paths:  # without files there is nothing to exchange
            name = self._paths[0].name if len(self._paths) == 1 else f"{len(self._paths)} files"
            self.catalogue = self._ranks.on_main(f"opening {name}", self._read_catalogue)
        self._locations, self._signatures = self.catalogue
        self.is_local: bool = self._ranks.world_size == 1 or not self._paths or self._is_local()

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, dtype = self.spec_of(name)
        tensor = torch.empty(shape, dtype=dtype)
        self._ranks.on_main(
            "the reading of a tensor", functools.partial(self.read_into, name, (0,) * len(shape), tensor)
        )
        return self._ranks.broadcast(tensor)

    def part(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return the values [begin, end) of a flattened tensor."""
        shape, dtype = self.spec_of(name)
        values, position = torch.empty(end - begin, dtype=dtype), 0
        for corner, sizes in rectangles(shape, begin, end):
            count = math.prod(sizes)
            self.read_into(name, corner, values[position : position + count].view(sizes))
            position += count
        return values

    def block(self, name: str, corner: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return the rectangle of a tensor that starts at the index `corner`."""
        target = torch.empty(tuple(sizes), dtype=self.spec_of(name)[1])
        self.read_into(name, corner, target)
        return target

    def read_into(self, name: str, corner: Sequence[int], target: torch.Tensor) -> None:
        """Fill `target` with the rectangle of its shape that starts at the index `corner`."""
        box = tuple(corner), tuple(target.shape)
        if target.numel():
            self._read(self._search_order(name, box), {name: _Request(target, box[0], [box])})

    def read_tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return full tensors, opening each file once."""
        tensors, requests, first = dict[str, torch.Tensor](), dict[str, _Request](), len(self._paths)
        for name in names:
            location = self._locations[name]
            tensors[name] = torch.empty(location.shape, dtype=location.dtype)
            if tensors[name].numel():
                corner = (0,) * len(location.shape)
                requests[name] = _Request(tensors[name], corner, [(corner, location.shape)])
                first = min(first, location.first)  # the files before are not opened
        self._read(range(first, len(self._paths)), requests)
        return tensors

    def pieces(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yield tensors in order, in pieces of a few megabytes."""
        batches, room = list[list[str]](), -1
        for name in names:  # small tensors together, as each read opens the files of all ranks
            size = size_of(self.spec_of(name))
            if size > room:
                batches.append([])
                room = _PIECE
            batches[-1].append(name)
            room -= size
        for batch in batches:
            shape, dtype = self.spec_of(batch[0])
            if len(batch) > 1 or not shape:
                yield from self.read_tensors(batch).values()
                continue
            rows, rest = rows_at_once(shape, dtype), (0,) * (len(shape) - 1)
            for first in range(0, shape[0], rows):
                yield self.block(batch[0], (first, *rest), (min(rows, shape[0] - first), *shape[1:]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, name: object) -> bool:
        return name in self._locations

    def spec_of(self, name: str) -> Spec:
        """Return shape and dtype of a full tensor without reading it."""
        return self._locations[name].shape, self._locations[name].dtype

    def subset(self, names: Collection[str]) -> TensorFile:
        """Return the mapping of some of the tensors, without reading them."""
        subset, names = copy.copy(self), set(names)
        subset._locations = {name: location for name, location in self._locations.items() if name in names}
        return subset

    # --- headers

    def _read_catalogue(self) -> Catalogue:
        blocks: dict[str, list[tuple[int, Entry]]] = {}
        signatures, entry_count = [], 0
        for number in range(len(self._paths)):
            header = self._headers.get(number) or read_header(self._paths[number])
            for name, entry in header.entries.items():
                blocks.setdefault(name, []).append((number, entry))
            signatures.append(header[1:])
            entry_count += len(header.entries)
            # the headers of thousands of files would not fit into memory; they are read again where needed
            if entry_count <= _MAX_CACHED_ENTRIES or not number:
                self._headers[number] = header
        return Catalogue({name: self._locate(name, entries) for name, entries in blocks.items()}, signatures)

    def _locate(self, name: str, numbered: list[tuple[int, Entry]]) -> TensorLocation:
        first, blocks = numbered[0][1], set[Box]()  # a set: replicas of a block in several files count once
        ends, smallest, missing = [0] * len(first.shape), first.shape, 0
        for _, entry in numbered:
            if (len(entry.shape), entry.dtype, entry.full_shape) != (len(ends), first.dtype, first.full_shape):
                raise CheckpointError(
                    f"{self._display_path()} is damaged: blocks of {name!r} differ in dtype or shape."
                )
            if (box := (entry.corner, entry.shape)) not in blocks:
                blocks.add(box)
                missing -= math.prod(entry.shape)
            ends = list(map(max, ends, map(operator.add, entry.corner, entry.shape)))
            smallest = tuple(map(min, smallest, entry.shape))
        if first.dtype not in _BY_NAME:
            raise CheckpointError(
                f"{self._display_path()} has {name!r} as {first.dtype}, and only {', '.join(_BY_NAME)} can be read."
            )
        shape = tuple(ends) if first.full_shape is None else first.full_shape
        missing += math.prod(shape)
        if missing > 0:
            raise self._incomplete(name, f"{missing} of its {math.prod(shape)} values")
        is_split = list(map(operator.lt, smallest, shape))
        axis = is_split.index(True) if True in is_split else 0
        return TensorLocation(_BY_NAME[first.dtype], shape, numbered[0][0], numbered[-1][0], axis)

    def _header(self, number: int) -> Header:
        if number not in self._headers:
            self._headers[number] = read_header(self._paths[number])
        return self._headers[number]

    def _is_local(self) -> bool:
        """Return whether all ranks see the files of the main rank, going by the first and this rank's own."""
        numbers = {0, self._ranks.rank * len(self._paths) // self._ranks.world_size}
        try:
            sees_files = all(self._header(number)[1:] == self._signatures[number] for number in numbers)
        except CheckpointError:
            sees_files = False
        return self._ranks.sum("which ranks see the files", float(sees_files)) == [self._ranks.world_size]

    # --- boxes

    def _search_order(self, name: str, box: Box) -> Iterator[int]:
        """Yield the numbers of the files that may overlap a box, the most likely ones first.

        These are the file of this rank, if as many ranks read as wrote, and those at the position of the box in the
        tensor. Without an order, each rank would open the files of all ranks.
        """
        _, shape, first, last, axis = self._locations[name]
        rank_file = self._ranks.rank * len(self._paths) // self._ranks.world_size
        if first <= rank_file <= last:
            yield rank_file
        low = high = 0  # the range of the box, if all files hold equal shares of the tensor
        for begin, size, length in list(zip(*box, shape, strict=True))[axis:]:
            low, high = low * length + begin, high * length + begin + size - 1
        files, values = last - first + 1, max(1, math.prod(shape[axis:]))
        low, high = first + low * files // values, first + high * files // values
        yield from range(low, high + 1)
        for distance in range(1, files):
            for number in (low - distance, high + distance):
                if first <= number <= last:
                    yield number

    def _read(self, numbers: Iterable[int], requests: dict[str, _Request]) -> None:
        """Read requests, by name, from files, in the order of their numbers, until nothing is missing."""
        for number in numbers:
            if not requests:
                return
            path, header = self._paths[number], self._header(number)
            # a stale cache of a network file system may show an earlier file of the same name
            if header[1:] != self._signatures[number]:
                raise CheckpointError(
                    f"{str(path)!r} on rank {self._ranks.rank} differs from that on the main rank. Copy the "
                    "checkpoint again, or put it on a file system that all ranks share."
                )
            try:
                with contextlib.ExitStack() as closing:
                    file: BinaryIO | None = None
                    for name, request in list(requests.items()):
                        if (entry := header.entries.get(name)) is None:
                            continue
                        for box in list(request.missing):
                            overlap = _intersection(box, (entry.corner, entry.shape))
                            if overlap is None:
                                continue
                            file = file or closing.enter_context(open_regular(path))
                            offsets = tuple(map(operator.sub, overlap[0], entry.corner))
                            part = _cut(request.target, request.corner, overlap)
                            _read_box(file, entry.offset, entry.shape, offsets, part)
                            # what this file does not have of the box is looked for in the next
                            request.missing.remove(box)
                            if overlap != box:
                                request.missing.extend(_subtract(box, overlap))
                        if not request.missing:
                            del requests[name]
            except OSError as error:
                raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Use another checkpoint.") from error
        for name, request in requests.items():
            corner, sizes = request.missing[0]
            raise self._incomplete(name, f"the block of {sizes} at {corner}")

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
    # the values of a row of each axis: of all axes behind it
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    boxes: list[Box] = [] if shape or begin >= end else [((), ())]
    while shape and begin < end:
        # the outermost axis at a row of which the range begins, if all of that row is in it
        axis = next(axis for axis, row in enumerate(rows) if begin % row == 0 and end - begin >= row)
        corner = [begin // row % size for row, size in zip(rows, shape, strict=True)]
        count = min((end - begin) // rows[axis], shape[axis] - corner[axis])
        boxes.append((tuple(corner), (*(1 for _ in range(axis)), count, *shape[axis + 1 :])))
        begin += count * rows[axis]
    return boxes


def _intersection(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    begins = tuple(map(max, box[0], other[0]))
    ends = map(min, map(operator.add, *box), map(operator.add, *other))
    sizes = tuple(map(operator.sub, ends, begins))
    return (begins, sizes) if min(sizes, default=1) > 0 else None


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


def _cut(tensor: torch.Tensor, corner: Sequence[int], box: Box) -> torch.Tensor:
    """Return a box, in indices of the full tensor, of a part that starts at `corner`."""
    begins = tuple(map(operator.sub, box[0], corner))
    return tensor[tuple(map(slice, begins, map(operator.add, begins, box[1])))]


# --- bytes


def _read_box(file: BinaryIO, start: int, shape: Sequence[int], offsets: Sequence[int], target: torch.Tensor) -> None:
    """Read a box of the shape of `target` from a row-major array at the byte `start`."""
    row = math.prod(shape[1:]) * target.element_size()
    start += offsets[0] * row if shape else 0
    is_run = tuple(target.shape[1:]) == tuple(shape[1:])
    if is_run and target.is_contiguous():
        _read_into(file, start, target)
        return
    axis = next(i for i in reversed(range(len(shape))) if i == 0 or target.shape[i] < shape[i])
    run = math.prod(target.shape[axis:]) * target.element_size()
    # large or long runs are read in place, piece by piece; short ones row by row through a buffer, as each read is a
    # system call
    if len(shape) > 1 and (row > _BUFFER or (not is_run and run >= _MIN_RUN)):
        for index in range(target.shape[0]):
            _read_box(file, start + index * row, shape[1:], offsets[1:], target[index])
        return
    buffer = torch.empty((min(max(1, _BUFFER // max(1, row)), target.shape[0]), *shape[1:]), dtype=target.dtype)
    for number, part in enumerate(target.split(len(buffer))):
        _read_into(file, start + number * len(buffer) * row, buffer[: len(part)])
        part.copy_(_cut(buffer, (0,) * len(shape), ((0, *offsets[1:]), tuple(part.shape))))


def _read_into(file: BinaryIO, start: int, tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor with the bytes of a file at `start`."""
    target: memoryview = as_bytes(tensor).numpy().data
    file.seek(start)
    while target:
        size = file.readinto(target)  # type: ignore[attr-defined]
        if not size:
            raise OSError("the file is shorter than its header says")
        target = target[size:]


# --- sharded tensors


@dataclass(slots=True)
class Gathered:
    """A sharded tensor that is gathered only when it is read, by a collective call.

    Attributes:
        shape: The shape of the full tensor.
        dtype: The dtype of the full tensor.
        read: Returns the full tensor in host memory; a collective call.
        local: Returns this rank's part, if possible.
        flat: Returns, without communication, the contiguous range of the flattened tensor that this rank writes: its
            first index, and its values, 1-D, on any device (empty if there are none). The ranges of all ranks are
            disjoint and cover the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    local: Callable[[], torch.Tensor] | None = None
    flat: Callable[[], tuple[int, torch.Tensor]] | None = None

    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return size_of((self.shape, self.dtype))


class Block(NamedTuple):
    """A rectangle of a tensor.

    Attributes:
        offsets: The index in the full tensor at which it starts.
        tensor: Its values, contiguous or not, on any device.
        shape: The shape of the full tensor.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...]


def is_sharded(tensor: Any) -> bool:
    """Return whether gathering this tensor is a collective call."""
    return isinstance(tensor, Gathered) or hasattr(tensor, "full_tensor")


def total_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors, the full ones of those that are sharded."""
    return sum(map(operator.attrgetter("nbytes"), tensors.values()))


def gather_to_host(tensor: Any) -> torch.Tensor:
    """Return the full tensor in host memory; for a sharded one, a collective call."""
    if isinstance(tensor, Gathered):
        return tensor.read().contiguous()
    tensor = tensor.detach()
    full = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full.cpu().resolve_conj().resolve_neg().contiguous()


def change_marker(tensor: Any) -> tuple[int, bytes]:
    """Return a marker that changes when this rank's part of a tensor is written to, without reading all of it.

    PyTorch counts in-place writes, but not those through `.data`, which code for averaged weights often uses. Such code
    changes all values, so the marker includes a few of them.
    """
    if isinstance(tensor, Gathered):
        if tensor.local is None:
            return 0, b""
        tensor = tensor.local()
    part = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
    sample = part.reshape(-1)[:: max(1, part.numel() // 16)]
    return part._version, as_bytes(sample.cpu().resolve_conj().resolve_neg().contiguous()).numpy().tobytes()


def shard_like(tensor: torch.Tensor, present: Any) -> torch.Tensor:
    """Return this rank's part of a full tensor, sharded like `present`; all of it if that is not sharded."""
    if not hasattr(present, "full_tensor") or hasattr(tensor, "full_tensor") or tensor.shape != present.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    device = present.to_local().device
    part = distribute_tensor(tensor.to(device), present.device_mesh, present.placements, src_data_rank=None)
    return part.clone()  # a view would keep the full tensor in memory


def is_local(tensors: Any) -> TypeGuard[TensorFile]:
    """Return whether every rank can read parts of these tensors without communication."""
    return isinstance(tensors, TensorFile) and tensors.is_local


def read_part(tensors: Mapping[str, torch.Tensor], name: str, present: Any = None) -> torch.Tensor:
    """Return this rank's part of a saved tensor, sharded like `present`; all of it if that is not sharded.

    If every rank can read the files, only that part is read, without communication.
    """
    if not is_local(tensors):
        return shard_like(tensors[name], present)
    shape, dtype = tensors.spec_of(name)
    if not hasattr(present, "full_tensor") or shape != tuple(present.shape):
        return tensors.read_tensors([name])[name]
    from torch.distributed.tensor import DTensor

    local = torch.empty(present.to_local().shape, dtype=dtype)
    for block in dtensor_blocks(present, local):
        tensors.read_into(name, block.offsets, block.tensor)
    local, stride = local.to(present.to_local().device), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, present.device_mesh, present.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def dtensor_blocks(tensor: Any, local: torch.Tensor) -> list[Block]:
    """Return the blocks of a DTensor on this rank, as parts of `local`, which has the shape of its local part."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    placements = list(zip(tensor.placements, mesh.get_coordinate() or (), mesh.shape, strict=False))
    blocks = [Block((), local, shape)]
    for axis, size in enumerate(shape):  # more than one run only if a dimension is sharded with strides
        blocks = [
            Block((*block.offsets, begin), block.tensor.narrow(axis, first, length), shape)
            for block in blocks
            for begin, first, length in _local_runs(axis, size, placements)
        ]
    return blocks


def _local_runs(axis: int, size: int, placements: Sequence[tuple[Any, int, int]]) -> list[tuple[int, int, int]]:
    """Return the runs of a dimension on this rank: index in the full tensor, index in the local one, length."""
    indices: Any = range(size)
    for placement, index, parts in placements:  # `distribute_tensor` splits by the first dimension of the mesh first
        if getattr(placement, "dim", None) != axis:
            continue
        if hasattr(placement, "split_factor"):  # a strided shard: a part of each of several parts
            shard = type(placement)(0, split_factor=placement.split_factor)
            indices = shard._split_tensor(torch.tensor(indices), parts, with_padding=False)[0][index].tolist()
        else:
            # as torch.chunk: the first ranks get the larger parts, the last ones possibly none
            most = -(-len(indices) // parts)
            indices = indices[most * index : most * (index + 1)]
    if isinstance(indices, range):
        return [(indices.start, 0, len(indices))] if indices else []
    firsts = [position for position, index in enumerate(indices) if not position or index != indices[position - 1] + 1]
    ends = [*firsts[1:], len(indices)]
    return [(indices[first], first, end - first) for first, end in zip(firsts, ends, strict=False)]


def write_on_main(ranks: Ranks, files: Sequence[Mapping[str, Any]], write: Callable[[Gather], T]) -> T:
    """Return the result of `write` on the main process, while the others contribute their parts of the tensors.

    Args:
        ranks: The ranks that have the tensors.
        files: All tensors that `write` gathers with the function it gets, in the order of the files.
        write: Writes them. Its error is raised on all ranks.
    """
    parts = iter([tensors[name] for tensors in files for name in file_order(tensors) if is_sharded(tensors[name])])
    is_gathering = False

    def gather(tensor: Any) -> torch.Tensor:
        nonlocal is_gathering
        if not is_sharded(tensor):
            return gather_to_host(tensor)
        next(parts)
        is_gathering = True
        full = gather_to_host(tensor)
        is_gathering = False
        return full

    outcome: Future[T] = Future()
    if ranks.is_main:
        try:
            outcome.set_result(write(gather))
        except Exception as error:
            if is_gathering:
                raise  # the other ranks are inside a collective call, and cannot be notified
            outcome.set_exception(error)
    for tensor in parts:
        gather_to_host(tensor)
    return ranks.on_main("the writing of a checkpoint or model", outcome.result)


# --- writing


def host_copy(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """Return a copy in host memory, written into `buffer`, an earlier copy, if it fits.

    With newly allocated memory, most of the time is spent on clearing each page at its first write.
    """
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return buffer.copy_(tensor.detach())


def save_tensors(tensors: Mapping[str, Any], path: Path, gather: Gather = gather_to_host) -> None:
    """Write tensors to one safetensors file; views of the same memory become separate tensors.

    Sharded tensors are gathered one at a time; those in files are read a piece at a time.
    """
    with create_file(path) as file:
        file.writelines(file_content(tensors, gather))


def file_content(
    tensors: Mapping[str, Any], gather: Gather = gather_to_host, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: its header, and the memory of each tensor.

    Raises:
        CheckpointError: If safetensors files cannot hold a dtype.
    """
    # the writer of the safetensors package needs all tensors at once, and returns no hash
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # transformers requires the format
    names, end = file_order(tensors), 0
    for name in names:
        shape, dtype = spec_of(tensors, name)
        if dtype not in DTYPES:
            raise CheckpointError(unsaved_dtype(name, dtype))
        begin, end = end, end + size_of((shape, dtype))
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in tensors.pieces(names) if isinstance(tensors, TensorFile) else _host_pieces(tensors, names, gather):
        yield as_bytes(piece).numpy().data


def _host_pieces(tensors: Mapping[str, Any], names: Sequence[str], gather: Gather) -> Iterator[torch.Tensor]:
    """Yield tensors in pieces in host memory; of one that is elsewhere, one piece at a time is copied."""
    for name in names:
        tensor = gather(tensors[name]) if is_sharded(tensors[name]) else tensors[name].detach()
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_cpu and tensor.is_contiguous():
            tensor = tensor.as_strided((tensor.numel(),), (1,))
        for piece in tensor.split(rows_at_once(tensor.shape, tensor.dtype)) if tensor.dim() else (tensor,):
            yield piece.cpu().contiguous()


def file_order(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors in the order of a file."""
    # the widest dtypes first, so that each tensor starts at a multiple of its element size
    return sorted(tensors, key=lambda name: (-spec_of(tensors, name)[1].itemsize, name))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file into host memory, not memory-mapped: the file may be changed."""
    tensors = TensorFile(path)
    return tensors.read_tensors(list(tensors))


def spec_of(tensors: Mapping[str, Any], name: str) -> Spec:
    """Return shape and dtype of a tensor, without reading it if it is in a file."""
    if isinstance(tensors, TensorFile):
        return tensors.spec_of(name)
    return tuple(tensors[name].shape), tensors[name].dtype


# --- fingerprints


def fingerprints(tensors: Mapping[str, Any], ranks: Ranks) -> dict[str, str]:
    """Return a digest of each tensor's values and shape, on all ranks; only the main one hashes.

    16-bit floats are converted to 32 bits, as some backends store them so. Sharded tensors are gathered one at a time.
    """

    def take(gather: Gather) -> dict[str, str]:
        digests: dict[str, Future[str]] = {}
        waiting: deque[Future[str]] = deque()
        with ThreadPoolExecutor(_HASHERS, thread_name_prefix="omnitrain-hash") as pool:
            for name in file_order(tensors):
                if len(waiting) > _HASHERS:  # limits how many are copied to the host at once
                    waiting.popleft().result()
                digests[name] = pool.submit(_fingerprint, gather(tensors[name]))
                waiting.append(digests[name])
        return {name: digest.result() for name, digest in sorted(digests.items())}

    return write_on_main(ranks, [tensors], take)


def _fingerprint(tensor: torch.Tensor) -> str:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    hasher = hashlib.sha256(f"{DTYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}".encode())
    hasher.update(as_bytes(tensor).numpy().data)
    return hasher.hexdigest()[:16]
