"""Headers of safetensors files, without torch."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
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
