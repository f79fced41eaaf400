"""Sharded tensor files, written by each rank without communication.

They are safetensors files in the format of `torch.distributed.checkpoint`: each holds at most one block (rectangle) of
each tensor, with its offsets in the metadata. `tensor_reader.py` reads them.
"""

from __future__ import annotations

import functools
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
from omnitrain.checkpoint.tensor_files import Gathered, encode_header, file_order, host_copy, is_sharded, spec_of
from omnitrain.checkpoint.tensor_reader import Spec, TensorFile, rectangles
from omnitrain.distributed.ranks import as_bytes

# The most bytes of tensors in a consolidated file, unless a single tensor has more.
LARGEST_FILE = 5 * 10**9

_PIECE = 1 << 24  # bytes to write and hash at once
_BATCH_BYTES = 1 << 24  # bytes of small tensors to read at once for consolidated files
_SMALL = 1 << 18  # bytes that are hashed faster than a thread is notified


class Block(NamedTuple):
    """A rectangle of a tensor.

    Attributes:
        offsets: The index in the full tensor at which it starts.
        tensor: Its values, contiguous or not, on any device.
        shape: The shape of the full tensor. Without it, a reader must open the files of all ranks to infer it.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None


# --- blocks of a rank


def local_blocks(tensor: Any, rank: int, mesh: Any = None) -> list[Block]:
    """Return the blocks of a tensor that this rank writes, without communication.

    For a DTensor this is its local part, unless a lower rank has the same part: in a replicated dimension of its mesh,
    or in a dimension of the ranks' mesh that its mesh does not have. For a `Gathered` it is the range `flat`, as
    rectangles. A tensor on every rank is written by the first.

    Args:
        tensor: The tensor.
        rank: This rank.
        mesh: The `DeviceMesh` of all ranks, if they have one.

    Raises:
        ValueError: If the tensor has to be gathered or reduced first, so that `can_shard` is False.
    """
    if not can_shard({"": tensor}):
        raise ValueError(f"{type(tensor).__name__} of shape {tuple(tensor.shape)} must be gathered before writing")
    shape = tuple(tensor.shape)
    origin = (0,) * len(shape)
    if isinstance(tensor, Gathered):
        assert tensor.flat is not None
        if not tensor.numel():
            return [Block(origin, torch.empty(shape, dtype=tensor.dtype), shape)] if rank == 0 else []
        begin, values = tensor.flat()
        values, blocks, position = values.detach(), [], 0
        for offsets, sizes in rectangles(shape, begin, begin + values.numel()):
            count = math.prod(sizes)
            blocks.append(Block(offsets, values[position : position + count].view(sizes), shape))
            position += count
        return blocks
    if not is_sharded(tensor):
        return [Block(origin, tensor.detach(), shape)] if rank == 0 else []
    return _blocks_of_dtensor(tensor) if _is_first_replica(tensor.device_mesh, mesh) else []


def can_shard(tensors: Mapping[str, Any] | Iterable[Any]) -> bool:
    """Return whether each rank can write its part of every tensor without communication."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return all(_is_writable_locally(tensor) for tensor in values)


def _is_writable_locally(tensor: Any) -> bool:
    if isinstance(tensor, Gathered):
        return tensor.flat is not None
    if not is_sharded(tensor):
        return True
    return hasattr(tensor, "placements") and not any(placement.is_partial() for placement in tensor.placements)


def _is_first_replica(tensor_mesh: Any, mesh: Any) -> bool:
    """Return whether this rank is the first in each dimension of the ranks' mesh that a tensor's mesh does not have."""
    if mesh is None:
        return True
    positions = torch.isin(mesh.mesh, tensor_mesh.mesh.flatten()).nonzero().T  # of the ranks in the tensor's mesh
    return all(
        not index or len(axis.unique()) > 1 for index, axis in zip(mesh.get_coordinate(), positions, strict=True)
    )


def _blocks_of_dtensor(tensor: Any) -> list[Block]:
    from torch.distributed.tensor import Replicate

    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return []
    placements = list(zip(tensor.placements, coordinate, mesh.shape, strict=True))
    if any(isinstance(placement, Replicate) and index for placement, index, _ in placements):
        return []
    local = tensor.to_local().detach()
    if not tensor.numel():
        return [Block((0,) * len(shape), torch.empty_like(local).reshape(shape), shape)] if not any(coordinate) else []
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


def stage_blocks(
    tensors: Mapping[str, Any], rank: int, buffers: dict[str, torch.Tensor], mesh: Any = None
) -> dict[str, list[Block]]:
    """Return the blocks of this rank, copied to the host, so that training can continue while they are written.

    Args:
        tensors: The tensors by name.
        rank: This rank.
        buffers: The memory of earlier copies, reused where it fits; updated.
        mesh: The `DeviceMesh` of all ranks, if they have one.
    """
    blocks: dict[str, list[Block]] = {}
    for name, tensor in tensors.items():
        copies = []
        for number, block in enumerate(local_blocks(tensor, rank, mesh)):
            # a tensor may have several blocks
            key = f"{name}:{number}"
            buffers[key] = host_copy(block.tensor, buffers.get(key))
            copies.append(block._replace(tensor=buffers[key]))
        blocks[name] = copies
    return blocks


# --- writing shards


def write_shards(blocks: Mapping[str, list[Block]], folder: Path, rank: int, fs: FileSystem) -> dict[str, FileEntry]:
    """Write this rank's blocks, one at a time, and return size and sha256 of its files by name.

    Args:
        blocks: The blocks by the names of their tensors. If a tensor has several, they go to as many files.
        folder: An existing folder for the files of all ranks.
        rank: This rank, whose number is in the names of its files.
        fs: The operations on the disk.

    Raises:
        CheckpointError: If safetensors files cannot hold a dtype.
        OSError: If a file cannot be written.
    """
    entries: dict[str, FileEntry] = {}
    for number in range(max(map(len, blocks.values()), default=0)):
        tensors = {name: parts[number] for name, parts in blocks.items() if len(parts) > number}
        path = folder / (f"rank-{rank:05}.safetensors" if not number else f"rank-{rank:05}.{number}.safetensors")
        shardings = {name: _sharding(block) for name, block in tensors.items()}
        metadata = {SHARDING: json.dumps(shardings, separators=(",", ":"), ensure_ascii=False), "DCP_VERSION": "1.0"}
        specs = {name: (tuple(block.tensor.shape), block.tensor.dtype) for name, block in tensors.items()}
        pieces = functools.partial(_host_pieces, tensors)
        entries[path.name] = _write(path, specs, metadata, pieces, fs)
    return entries


def _sharding(block: Block) -> dict[str, list[int]]:
    offsets: dict[str, list[int]] = {"saved_offsets": list(block.offsets)}
    return offsets if block.shape is None else {**offsets, "shape": list(block.shape)}


def _host_pieces(blocks: Mapping[str, Block], name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor in flat pieces in host memory, copying at most one at a time."""
    tensor = blocks[name].tensor.resolve_conj().resolve_neg()
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
    """Write a safetensors file and wait until it is on the disk; another thread hashes it."""
    # the header has the offsets of all tensors, so it can be written before any of them is copied to the host
    header = encode_header(specs, metadata)
    hasher = _Hasher()

    def content() -> Iterator[bytes | memoryview]:
        yield hasher.update(header)
        for name in file_order(specs):
            for piece in pieces(name):
                yield hasher.update(as_bytes(piece).numpy().data)

    try:
        fs.create(path, content())
        digest = hasher.digest()
    finally:
        hasher.close()
    fs.sync(path)
    size = len(header) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())
    return {"size": size, "sha256": digest}


class _Hasher:
    """Hashes pieces in another thread while they are written, with at most two pending."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="omnitrain-hash")
        self._waiting: deque[Future[None]] = deque()

    def update(self, piece: bytes | memoryview) -> bytes | memoryview:
        """Hash a piece after the earlier ones, and return it."""
        # at most two pieces wait, which bounds the memory that hashing holds
        if self._waiting and (len(self._waiting) > 1 or len(piece) < _SMALL):
            self._wait(0 if len(piece) < _SMALL else 1)
        if len(piece) >= _SMALL:
            try:
                self._waiting.append(self._pool.submit(self._hash.update, piece))
                return piece
            except RuntimeError:  # at interpreter exit no threads can start: an asynchronous save ends here
                self._wait(0)
        self._hash.update(piece)
        return piece

    def digest(self) -> str:
        """Return the sha256 of all pieces."""
        self._wait(0)
        return self._hash.hexdigest()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _wait(self, pending: int) -> None:
        while len(self._waiting) > pending:
            self._waiting.popleft().result()


# --- names of files


def shard_folder(file: str) -> str:
    """Return the folder for the shards of a file of a checkpoint.

    >>> shard_folder("model.safetensors"), shard_folder("optimizer/state.safetensors")
    ('model', 'optimizer')
    """
    return file.removesuffix(".safetensors").removesuffix("/state")


def find_tensor_files(folder: Path, manifest_files: Iterable[str], part: str) -> list[Path]:
    """Return the files of a checkpoint with its weights or the state of its optimizer, sharded or not.

    Args:
        folder: The folder of the checkpoint.
        manifest_files: The names under "files" in its omnitrain.json.
        part: "model", "optimizer" or another result of `shard_folder`.

    Returns:
        The files in order; none if the checkpoint has no such part.
    """
    names = sorted(manifest_files)
    for name in (f"{part}.safetensors", f"{part}/state.safetensors"):
        if name in names:
            return [folder / name]
    if f"{part}.safetensors.index.json" in names:
        pattern = re.compile(re.escape(part) + r"-\d{5,}-of-\d{5,}\.safetensors")
    else:
        pattern = re.compile(re.escape(part) + r"/rank-\d{5,}(\.\d+)?\.safetensors")
    return [folder / name for name in names if pattern.fullmatch(name)]


# --- consolidating


def count_full_files(tensors: Mapping[str, Any], limit: int = LARGEST_FILE) -> int:
    """Return how many files `write_full_files` writes; ranks from this number on write none."""
    return len(_plan({name: spec_of(tensors, name) for name in tensors}, limit))


def write_full_files(
    source: TensorFile,
    folder: Path,
    rank: int,
    world_size: int,
    fs: FileSystem,
    limit: int = LARGEST_FILE,
) -> dict[str, FileEntry]:
    """Write this rank's share of the files with full tensors, named as by transformers, without communication.

    Args:
        source: The tensors, which this rank reads from its disk, a few megabytes at a time.
        folder: An existing folder for model.safetensors, or model-00001-of-00003.safetensors and so on.
        rank: This rank. The first also writes model.safetensors.index.json if there are several files.
        world_size: The number of ranks that call this.
        fs: The operations on the disk.
        limit: The most bytes of tensors in a file.

    Returns:
        Size and sha256 of the files that this rank wrote, by name.
    """
    specs = {name: source.spec_of(name) for name in source}
    plan = _plan(specs, limit)
    entries: dict[str, FileEntry] = {}

    ready: dict[str, torch.Tensor] = {}

    def pieces(name: str, names: list[str]) -> Iterator[torch.Tensor]:
        shape, dtype = specs[name]
        if name not in ready:  # small tensors together, as each read opens the files of all ranks
            ready.update(source.read_tensors(_next_small_tensors(specs, names[names.index(name) :])))
        if name in ready:
            yield ready.pop(name).view(-1)
            return
        step, rest = _rows_at_once(shape, dtype), (0,) * (len(shape) - 1)
        for first in range(0, shape[0], step):
            yield source.block(name, (first, *rest), (min(step, shape[0] - first), *shape[1:])).view(-1)

    for number, (file, names) in enumerate(plan.items()):
        if number % world_size == rank:
            file_specs = {name: specs[name] for name in names}
            entries[file] = _write(folder / file, file_specs, {}, lambda name, names=names: pieces(name, names), fs)
    if rank == 0 and len(plan) > 1:
        entries["model.safetensors.index.json"] = _write_index(folder, plan, specs, fs)
    return entries


def _next_small_tensors(specs: Mapping[str, Spec], names: Sequence[str]) -> list[str]:
    """Return the first names whose tensors fit into a batch; none if the first is too large."""
    selected, size = [], 0
    for name in names:
        shape, dtype = specs[name]
        size += math.prod(shape) * dtype.itemsize
        if size > _BATCH_BYTES:
            break
        selected.append(name)
    return selected


def _plan(specs: Mapping[str, Spec], limit: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, by its name."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in file_order(specs):
        tensor_size = math.prod(specs[name][0]) * specs[name][1].itemsize
        if groups[-1] and size + tensor_size > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor_size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{number:05}-of-{count:05}.safetensors": names for number, names in enumerate(groups, start=1)}


def _write_index(folder: Path, plan: Mapping[str, list[str]], specs: Mapping[str, Spec], fs: FileSystem) -> FileEntry:
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())
    weight_map = {name: file for file, names in plan.items() for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = (json.dumps(content, indent=2) + "\n").encode()
    path = folder / "model.safetensors.index.json"
    fs.write(path, text)
    fs.sync(path)
    return {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
