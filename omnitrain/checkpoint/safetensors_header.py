"""Names and headers of safetensors files, without torch."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import open_regular

# The key in a file's metadata under which torch.distributed.checkpoint lists the blocks of tensors in the file.
SHARDING = "DCP_SHARDING_INFO"


class Entry(NamedTuple):
    """The entry of a header for a tensor, or for a block of one.

    Attributes:
        dtype: The name of its dtype in safetensors files.
        shape: The shape of the tensor or block.
        offset: The byte in the file at which it starts.
        corner: The index in the full tensor at which it starts.
        full_shape: The shape of the full tensor; None if the file does not have it.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    corner: tuple[int, ...]
    full_shape: tuple[int, ...] | None


class Header(NamedTuple):
    """The entries of a file by name, its size in bytes, and a digest of its header."""

    entries: dict[str, Entry]
    size: int
    digest: str


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file. Two processes compare their files by its size and digest.

    Raises:
        CheckpointError: If the file is missing or not a safetensors file.
    """
    try:
        # opened first, as `safe_open` would wait for a pipe; it checks the header, and that the tensors fill the file
        with open_regular(path) as file, safe_open(path, framework="np"):
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Use another checkpoint.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}. Use another checkpoint.") from None
    header, entries = json.loads(text), dict[str, Entry]()
    try:
        sharding = json.loads((header.pop("__metadata__", None) or {}).get(SHARDING, "{}"))
        for name, content in header.items():
            shape = tuple(content["shape"])
            block = sharding.get(name, {"saved_offsets": (0,) * len(shape), "shape": shape})
            corner = tuple(map(operator.index, block["saved_offsets"]))
            full_shape = None if block.get("shape") is None else tuple(map(operator.index, block["shape"]))
            ends = full_shape or (math.inf,) * len(shape)
            fits = len(shape) == len(corner) == len(ends) and min(corner, default=0) >= 0
            if not fits or any(map(operator.gt, map(operator.add, corner, shape), ends)):
                raise ValueError(f"the block of {name!r} of shape {shape} begins at {corner} of a tensor {full_shape}")
            offset = 8 + length + content["data_offsets"][0]
            entries[name] = Entry(content["dtype"], shape, offset, corner, full_shape)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged: its {SHARDING} is not as PyTorch writes it ({type(error).__name__}: {error}). "
            "Use another checkpoint."
        ) from None
    return Header(entries, size, hashlib.sha256(text).hexdigest()[:16])


def shard_folder(file: str) -> str:
    """Return the folder for the shards of a file of a checkpoint.

    >>> shard_folder("model.safetensors"), shard_folder("optimizer/state.safetensors")
    ('model', 'optimizer')
    """
    return file.removesuffix(".safetensors").removesuffix("/state")


def find_tensor_files(folder: Path, manifest_files: Iterable[str], file: str) -> list[Path]:
    """Return the files of a checkpoint that have the tensors of one file, sharded or not.

    Args:
        folder: The folder of the checkpoint.
        manifest_files: The names under "files" in its omnitrain.json.
        file: The name that it has if it is not sharded, such as "model.safetensors".

    Returns:
        The files in order; none if the checkpoint has no such part.
    """
    names, part = sorted(manifest_files), shard_folder(file)
    if file in names:
        return [folder / file]
    if f"{part}.safetensors.index.json" in names:
        pattern = re.compile(re.escape(part) + r"-\d{5,}-of-\d{5,}\.safetensors")
    else:
        pattern = re.compile(re.escape(part) + r"/rank-\d{5,}(\.\d+)?\.safetensors")
    return [folder / name for name in names if pattern.fullmatch(name)]
