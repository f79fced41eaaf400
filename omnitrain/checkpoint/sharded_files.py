"""Sharded tensor files, written by each rank without communication.

They are safetensors files in the format of `torch.distributed.checkpoint`: each holds at most one block (rectangle) of
each tensor, with its offsets in the metadata. `tensor_files.py` reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.safetensors_header import SHARDING
from omnitrain.checkpoint.tensor_files import (
    Block,
    Gathered,
    TensorFile,
    dtensor_blocks,
    file_content,
    file_order,
    is_sharded,
    rectangles,
    size_of,
    spec_of,
)
from omnitrain.core.files import FileEntry, FileSystem

# The most bytes of tensors in a consolidated file, unless a single tensor has more.
LARGEST_FILE = 5 * 10**9


# --- blocks of a rank


def local_blocks(tensor: Any, rank: int, mesh: Any = None) -> list[Block]:
    """Return the blocks of a tensor that this rank writes, without communication.

    For a DTensor this is its local part, unless a lower rank has the same part: in a replicated dimension of its mesh,
    or in a dimension of `mesh`, the `DeviceMesh` of all ranks, that its mesh does not have. For a `Gathered` it is the
    range `flat`, as rectangles. A tensor on every rank is written by the first.

    Raises:
        ValueError: If the tensor has to be gathered or reduced first, so that `can_shard` is False.
    """
    if not can_shard(tensor):
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
    from torch.distributed.tensor import Replicate

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not _is_first_replica(tensor.device_mesh, mesh):  # None: this rank is not in the mesh
        return []
    if any(
        index and isinstance(placement, Replicate)
        for placement, index in zip(tensor.placements, coordinate, strict=True)
    ):
        return []
    local = tensor.to_local().detach()
    if not tensor.numel():
        return [] if any(coordinate) else [Block(origin, torch.empty_like(local).reshape(shape), shape)]
    return dtensor_blocks(tensor, local)


def can_shard(tensor: Any) -> bool:
    """Return whether each rank can write its part of a tensor without communication."""
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


# --- writing shards


def write_shards(blocks: Mapping[str, list[Block]], folder: Path, rank: int, fs: FileSystem) -> dict[str, FileEntry]:
    """Write this rank's blocks of each tensor to a folder, and return size and sha256 of its files by name.

    If a tensor has several blocks, they go to as many files. Errors are those of `file_content`.
    """
    entries: dict[str, FileEntry] = {}
    for number in range(max(map(len, blocks.values()), default=0)):
        parts = {name: blocks[name][number] for name in blocks if len(blocks[name]) > number}
        shardings = {name: {"saved_offsets": block.offsets, "shape": block.shape} for name, block in parts.items()}
        metadata = {SHARDING: json.dumps(shardings, separators=(",", ":"), ensure_ascii=False), "DCP_VERSION": "1.0"}
        path = folder / (f"rank-{rank:05}.safetensors" if not number else f"rank-{rank:05}.{number}.safetensors")
        tensors = {name: block.tensor for name, block in parts.items()}
        entries[path.name] = fs.write(path, file_content(tensors, metadata=metadata))
    return entries


# --- consolidating


def count_full_files(tensors: Mapping[str, Any], limit: int = LARGEST_FILE) -> int:
    """Return how many files `write_full_files` writes; ranks from this number on write none."""
    return len(_split(tensors, limit).filename_to_tensors)


def write_full_files(
    source: TensorFile,
    folder: Path,
    rank: int,
    world_size: int,
    fs: FileSystem,
    limit: int = LARGEST_FILE,
) -> dict[str, FileEntry]:
    """Write this rank's share of the files with full tensors, and return size and sha256 of them by name.

    They are named as by transformers: model.safetensors, or model-00001-of-00003.safetensors and so on, with an index
    from the first rank, if there are more than `limit` bytes of tensors. This rank reads the tensors that it writes
    from its disk, a few megabytes at a time, without communication.
    """
    split = _split(source, limit)
    entries = {
        file: fs.write(folder / file, file_content(source.subset(names)))
        for file, names in list(split.filename_to_tensors.items())[rank::world_size]
    }
    if rank == 0 and split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        path = folder / "model.safetensors.index.json"
        entries[path.name] = fs.write(path, (json.dumps(content, indent=2) + "\n").encode())
    return entries


def _split(tensors: Mapping[str, Any], limit: int) -> Any:
    """Return which tensors are in which of the files with full tensors."""
    from huggingface_hub import split_state_dict_into_shards_factory

    specs = {name: spec_of(tensors, name) for name in file_order(tensors)}
    return split_state_dict_into_shards_factory(
        specs, get_storage_size=size_of, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
