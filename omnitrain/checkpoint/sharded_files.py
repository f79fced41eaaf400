"""Tensors in several files: each rank writes its blocks to files of its own, without communication.

The files are safetensors files as `torch.distributed.checkpoint` writes and reads them. Each holds blocks (rectangles)
of tensors, at most one of each, and says in its metadata where they belong. What is read of them is in `reading.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.manifest import FileEntry
from omnitrain.checkpoint.safetensors_header import SHARDING
from omnitrain.checkpoint.tensor_files import Gathered, host_copy, is_sharded
from omnitrain.checkpoint.tensor_reader import Box, Spec, TensorFile, dtype_name, rectangles
from omnitrain.distributed.ranks import as_bytes

LARGEST_FILE = 5 * 10**9
"""The most bytes of tensors in a consolidated file, unless one tensor alone has more."""

_PIECE = 1 << 24  # bytes that are written and hashed at once
_AT_ONCE = 1 << 24  # bytes of tensors that are read together when whole ones are written
_SMALL = 1 << 18  # bytes that are hashed sooner than another thread is told to


class Block(NamedTuple):
    """A rectangle of a tensor.

    Attributes:
        offsets: The index in the whole tensor at which it begins.
        tensor: Its values, contiguous or not, on any device.
        shape: The shape of the whole tensor. Without it, a reader must open the files of all ranks to know it.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None


# --- what a rank writes


def own_blocks(tensor: Any, rank: int, mesh: Any = None) -> list[Block]:
    """Return what this rank writes of a tensor, without communication.

    Of a DTensor that is its local part, unless a rank before it has the same: in a replicated dimension of its mesh, or
    in one of the ranks' mesh that its own lacks. Of a `Gathered` it is the range `flat`, as rectangles. A tensor that
    every rank has is written by the first.

    Args:
        tensor: The tensor.
        rank: This rank.
        mesh: The `DeviceMesh` of all ranks, if they have one.

    Raises:
        ValueError: If the tensor has to be gathered or reduced first; `can_shard` tells.
    """
    if not can_shard({"": tensor}):
        raise ValueError(f"{type(tensor).__name__} of shape {tuple(tensor.shape)} has no parts to write without others")
    shape = tuple(tensor.shape)
    whole: Box = (0,) * len(shape), shape
    if isinstance(tensor, Gathered):
        assert tensor.flat is not None
        if not tensor.numel():
            return [Block(whole[0], torch.empty(shape, dtype=tensor.dtype), shape)] if rank == 0 else []
        begin, values = tensor.flat()
        values, found, done = values.detach(), [], 0
        for offsets, sizes in rectangles(shape, begin, begin + values.numel()):
            count = math.prod(sizes)
            found.append(Block(offsets, values[done : done + count].view(sizes), shape))
            done += count
        return found
    if not is_sharded(tensor):
        return [Block(whole[0], tensor.detach(), shape)] if rank == 0 else []
    return _blocks_of_dtensor(tensor) if _is_first_of(tensor.device_mesh, mesh) else []


def can_shard(tensors: Mapping[str, Any] | Iterable[Any]) -> bool:
    """Return whether every tensor can be written in parts without communication."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return all(_has_own_part(tensor) for tensor in values)


def _has_own_part(tensor: Any) -> bool:
    if isinstance(tensor, Gathered):
        return tensor.flat is not None
    if not is_sharded(tensor):
        return True
    return hasattr(tensor, "placements") and not any(one.is_partial() for one in tensor.placements)


def _is_first_of(own: Any, mesh: Any) -> bool:
    """Return whether this rank is the first in each dimension of the ranks' mesh that a tensor's own mesh lacks."""
    if mesh is None:
        return True
    places = torch.isin(mesh.mesh, own.mesh.flatten()).nonzero().T  # of the ranks that the tensor is divided over
    return all(not here or len(axis.unique()) > 1 for here, axis in zip(mesh.get_coordinate(), places, strict=True))


def _blocks_of_dtensor(tensor: Any) -> list[Block]:
    from torch.distributed.tensor import Replicate

    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:  # this rank is not in the mesh
        return []
    placements = list(zip(tensor.placements, here, mesh.shape, strict=True))
    if any(isinstance(placement, Replicate) and index for placement, index, _ in placements):
        return []
    local = tensor.to_local().detach()
    if not tensor.numel():
        return [Block((0,) * len(shape), torch.empty_like(local).reshape(shape), shape)] if not any(here) else []
    cuts = [_pieces_of_axis(axis, size, placements) for axis, size in enumerate(shape)]
    found = [Block((), local, shape)]
    for axis, pieces in enumerate(cuts):  # more than one piece only where a dimension is sharded with strides
        found = [
            Block((*block.offsets, begin), block.tensor.narrow(axis, first, length), shape)
            for block in found
            for begin, first, length in pieces
        ]
    return found


def _pieces_of_axis(axis: int, size: int, placements: Sequence[tuple[Any, int, int]]) -> list[tuple[int, int, int]]:
    """Return the runs of a dimension that this rank has: where in the whole, where in the local tensor, how long."""
    indices: Any = range(size)
    for placement, index, parts in placements:  # as distribute_tensor cuts, from the first dimension of the mesh on
        if getattr(placement, "dim", None) != axis:
            continue
        if hasattr(placement, "split_factor"):  # with strides: of each of several parts, a part
            cut = type(placement)(0, split_factor=placement.split_factor)
            indices = cut._split_tensor(torch.tensor(indices), parts, with_padding=False)[0][index].tolist()
        else:
            most = -(-len(indices) // parts)
            indices = indices[most * index : most * (index + 1)]
    if isinstance(indices, range):
        return [(indices.start, 0, len(indices))] if indices else []
    firsts = [at for at, one in enumerate(indices) if not at or one != indices[at - 1] + 1]
    ends = [*firsts[1:], len(indices)]
    return [(indices[first], first, end - first) for first, end in zip(firsts, ends, strict=False)]


def staged(
    tensors: Mapping[str, Any], rank: int, kept: dict[str, torch.Tensor], mesh: Any = None
) -> dict[str, list[Block]]:
    """Return the blocks of this rank, copied to the host: what is written while training goes on.

    Args:
        tensors: The tensors by name.
        rank: This rank.
        kept: The memory of an earlier copy, used again where it fits. Holds that of this one afterwards.
        mesh: The `DeviceMesh` of all ranks, if they have one.
    """
    found: dict[str, list[Block]] = {}
    for name, tensor in tensors.items():
        copies = []
        for number, block in enumerate(own_blocks(tensor, rank, mesh)):
            key = f"{name}:{number}"
            kept[key] = host_copy(block.tensor, kept.get(key))
            copies.append(block._replace(tensor=kept[key]))
        found[name] = copies
    return found


# --- writing shards


def write_shards(blocks: Mapping[str, list[Block]], folder: Path, rank: int, fs: FileSystem) -> dict[str, FileEntry]:
    """Write this rank's blocks, one at a time, and return size and sha256 of its files by name.

    Args:
        blocks: The blocks by the names of their tensors. If a tensor has several, they go to as many files.
        folder: An existing folder, for the files of all ranks.
        rank: This rank; its files are named by it.
        fs: Changes the disk.

    Raises:
        CheckpointError: If safetensors files have no name for a dtype.
        OSError: If it cannot be written.
    """
    entries: dict[str, FileEntry] = {}
    for number in range(max(map(len, blocks.values()), default=0)):
        own = {name: parts[number] for name, parts in blocks.items() if len(parts) > number}
        path = folder / (f"rank-{rank:05}.safetensors" if not number else f"rank-{rank:05}.{number}.safetensors")
        places = {name: _sharding(block) for name, block in own.items()}
        metadata = {SHARDING: json.dumps(places, separators=(",", ":"), ensure_ascii=False), "DCP_VERSION": "1.0"}
        specs = {name: (tuple(block.tensor.shape), block.tensor.dtype) for name, block in own.items()}
        entries[path.name] = _write(path, specs, metadata, lambda name, own=own: _host_pieces(own[name].tensor), fs)
    return entries


def _sharding(block: Block) -> dict[str, list[int]]:
    offsets: dict[str, list[int]] = {"saved_offsets": list(block.offsets)}
    return offsets if block.shape is None else {**offsets, "shape": list(block.shape)}


def _host_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor in flat pieces in host memory, copying at most one at a time."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_cpu and tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, _PIECE // tensor.element_size()))
        return
    if not tensor.dim():
        yield tensor.cpu().reshape(1)
        return
    for rows in tensor.split(_rows_at_once(tuple(tensor.shape), tensor.dtype)):
        yield rows.cpu().contiguous().view(-1)


def _rows_at_once(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return max(1, _PIECE // max(1, math.prod(shape[1:]) * dtype.itemsize))


def _write(
    path: Path,
    specs: Mapping[str, Spec],
    metadata: Mapping[str, str],
    pieces: Callable[[str], Iterator[torch.Tensor]],
    fs: FileSystem,
) -> FileEntry:
    """Write a safetensors file and wait until it is on the disk; hashed in another thread while it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}  # transformers requires the format
    order, end = _in_order(specs), 0
    for name in order:
        shape, dtype = specs[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    hasher = _Hasher()

    def content() -> Iterator[bytes | memoryview]:
        yield hasher.seen(len(text).to_bytes(8, "little") + text)
        for name in order:
            for piece in pieces(name):
                yield hasher.seen(as_bytes(piece).numpy().data)

    try:
        fs.create(path, content())
        digest = hasher.digest()
    finally:
        hasher.close()
    fs.sync(path)
    return {"size": 8 + len(text) + end, "sha256": digest}


def _in_order(specs: Mapping[str, Spec]) -> list[str]:
    # the widest types first, so that each tensor starts at a multiple of its type's size
    return sorted(specs, key=lambda name: (-specs[name][1].itemsize, name))


class _Hasher:
    """Hashes pieces in another thread, at most two behind, while they are written."""

    def __init__(self) -> None:
        self._found = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="omnitrain-hash")
        self._waiting: deque[Future[None]] = deque()

    def seen(self, piece: bytes | memoryview) -> bytes | memoryview:
        """Return a piece, which is hashed after those before it."""
        if self._waiting and (len(self._waiting) > 1 or len(piece) < _SMALL):
            self._wait(0 if len(piece) < _SMALL else 1)
        if len(piece) >= _SMALL:
            try:
                self._waiting.append(self._pool.submit(self._found.update, piece))
                return piece
            except RuntimeError:  # at interpreter exit no threads can start: an asynchronous save ends here
                self._wait(0)
        self._found.update(piece)
        return piece

    def digest(self) -> str:
        """Return the sha256 of all pieces."""
        self._wait(0)
        return self._found.hexdigest()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _wait(self, left: int) -> None:
        while len(self._waiting) > left:
            self._waiting.popleft().result()


# --- which files there are


def part_of(file: str) -> str:
    """Return the folder for the parts of a file of a checkpoint.

    >>> part_of("model.safetensors"), part_of("optimizer/state.safetensors")
    ('model', 'optimizer')
    """
    return file.removesuffix(".safetensors").removesuffix("/state")


def files_of(folder: Path, manifest_files: Iterable[str], part: str) -> list[Path]:
    """Return the files of a checkpoint that hold its weights or the state of its optimizer: whole ones, or shards.

    Args:
        folder: The folder of the checkpoint.
        manifest_files: The names under "files" of its omnitrain.json.
        part: "model", "optimizer" or another folder of parts, as `part_of` returns it.

    Returns:
        The files in order; none if the checkpoint has no such part.
    """
    whole, names = f"{part}.safetensors", sorted(manifest_files)
    for name in (whole, f"{part}/state.safetensors"):
        if name in names:
            return [folder / name]
    if f"{whole}.index.json" in names:
        pattern = re.compile(re.escape(whole.removesuffix(".safetensors")) + r"-\d{5,}-of-\d{5,}\.safetensors")
    else:
        pattern = re.compile(re.escape(part) + r"/rank-\d{5,}(\.\d+)?\.safetensors")
    return [folder / name for name in names if pattern.fullmatch(name)]


# --- consolidating


def whole_files(tensors: Mapping[str, Any], limit: int = LARGEST_FILE) -> int:
    """Return how many files of whole tensors `write_whole` writes; ranks beyond that number write none."""
    return len(_plan({name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}, limit))


def write_whole(
    source: TensorFile,
    folder: Path,
    rank: int,
    world_size: int,
    fs: FileSystem,
    limit: int = LARGEST_FILE,
) -> dict[str, FileEntry]:
    """Write whole tensors as transformers names their files, shared out to the ranks, without communication.

    Args:
        source: The tensors, which this rank reads from its disk, a few megabytes at a time.
        folder: An existing folder for model.safetensors, or model-00001-of-00003.safetensors and so on.
        rank: This rank. The first also writes model.safetensors.index.json, if there are several files.
        world_size: The number of ranks that call this.
        fs: Changes the disk.
        limit: The most bytes of tensors in a file.

    Returns:
        Size and sha256, by name, of the files that this rank wrote.
    """
    specs = {name: source.spec_of(name) for name in source}
    plan = _plan(specs, limit)
    entries: dict[str, FileEntry] = {}

    ready: dict[str, torch.Tensor] = {}

    def pieces(name: str, names: list[str]) -> Iterator[torch.Tensor]:
        shape, dtype = specs[name]
        if name not in ready:  # small ones together, or each of them would open the files of all ranks
            ready.update(source.whole(_next_few(specs, names[names.index(name) :])))
        if name in ready:
            yield ready.pop(name).view(-1)
            return
        step, rest = _rows_at_once(shape, dtype), (0,) * (len(shape) - 1)
        for first in range(0, shape[0], step):
            yield source.block(name, (first, *rest), (min(step, shape[0] - first), *shape[1:])).view(-1)

    for number, (file, names) in enumerate(plan.items()):
        if number % world_size == rank:
            held = {name: specs[name] for name in names}
            entries[file] = _write(folder / file, held, {}, lambda name, names=names: pieces(name, names), fs)
    if rank == 0 and len(plan) > 1:
        entries["model.safetensors.index.json"] = _write_index(folder, plan, specs, fs)
    return entries


def _next_few(specs: Mapping[str, Spec], names: Sequence[str]) -> list[str]:
    """Return the first names whose tensors are small enough to be read together; none if the first is too large."""
    found, held = [], 0
    for name in names:
        shape, dtype = specs[name]
        held += math.prod(shape) * dtype.itemsize
        if held > _AT_ONCE:
            break
        found.append(name)
    return found


def _plan(specs: Mapping[str, Spec], limit: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, by its name."""
    groups: list[list[str]] = [[]]
    held = 0
    for name in _in_order(specs):
        size = math.prod(specs[name][0]) * specs[name][1].itemsize
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{number:05}-of-{count:05}.safetensors": names for number, names in enumerate(groups, start=1)}


def _write_index(folder: Path, plan: Mapping[str, list[str]], specs: Mapping[str, Spec], fs: FileSystem) -> FileEntry:
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())
    places = {name: file for file, names in plan.items() for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    text = (json.dumps(content, indent=2) + "\n").encode()
    path = folder / "model.safetensors.index.json"
    fs.write(path, text)
    fs.sync(path)
    return {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
