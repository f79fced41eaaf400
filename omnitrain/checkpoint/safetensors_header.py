"""Headers of safetensors files, without torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import unique_keys

# The key in a file's metadata under which torch.distributed.checkpoint lists the blocks of tensors in the file.
SHARDING = "DCP_SHARDING_INFO"

# Bytes per element, by the name of the dtype in safetensors files.
SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}

_LARGEST_HEADER = 100_000_000  # the limit of the safetensors package
_LARGEST_DIMENSION = 1 << 48


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of a header for a tensor, or for a block of one.

    Attributes:
        dtype: The name of its dtype in safetensors files.
        shape: The shape of the tensor or block.
        offset: The byte in the file at which it starts.
        begins: The index in the full tensor at which the block starts; () for a full tensor.
        full_shape: The shape of the full tensor; None if the file does not have it.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    begins: tuple[int, ...] = ()
    full_shape: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The bytes in the file."""
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def corner(self) -> tuple[int, ...]:
        """The index in the full tensor at which this starts."""
        return self.begins or (0,) * len(self.shape)


class Header(NamedTuple):
    """The entries of a file by name, its size in bytes, and a digest of its header."""

    entries: dict[str, Entry]
    size: int
    digest: str


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe could block forever, and a device may do anything.

    Raises:
        OSError: If it is missing, cannot be read, or is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("the path is not a regular file")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # replaced in the meantime
        os.close(descriptor)
        raise OSError("the path is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_header(path: Path) -> dict[str, Entry]:
    """Return the entries of a safetensors file, after checking that its tensors fill it without gaps.

    Raises:
        CheckpointError: If it is missing or not a safetensors file.
    """
    return read_header_with_digest(path).entries


def read_header_with_digest(path: Path) -> Header:
    """Return the entries of a safetensors file, and its digest, by which two processes compare their files.

    Raises:
        CheckpointError: If it is missing or not a safetensors file.
    """
    try:
        with open_regular(path) as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, total - 8):
                raise ValueError(f"its header has {length} bytes, and the file {total}")
            text = file.read(length)
            header = json.loads(text.decode(), object_pairs_hook=unique_keys)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Use another checkpoint.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    blocks = _blocks(path, header.pop("__metadata__", None))
    entries, ends = {}, []
    for name, content in header.items():
        entry, end = _entry(path, name, content, 8 + length, blocks)
        entries[name] = entry
        ends.append((entry.offset, end))
    position = 8 + length
    for begin, end in sorted(ends):
        if begin != position:
            raise _damaged(path, f"a tensor begins at byte {begin}, and the one before it ends at {position}")
        position = end
    if position != total:
        raise _damaged(path, f"its tensors end at byte {position}, and the file has {total}")
    return Header(entries, total, hashlib.sha256(text).hexdigest()[:16])


def _blocks(path: Path, metadata: Any) -> dict[str, Any]:
    """Return the blocks in the metadata of a file by tensor; empty if it holds full tensors."""
    text = metadata.get(SHARDING) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        return {}
    try:
        blocks = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its {SHARDING} is not JSON: {error}") from None
    if not isinstance(blocks, dict):
        raise _damaged(path, f"its {SHARDING} is not a JSON object")
    return blocks


def _entry(path: Path, name: str, content: Any, start: int, blocks: dict[str, Any]) -> tuple[Entry, int]:
    dtype, shape, offsets = (
        (content.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(content, dict) else [None] * 3
    )
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise _damaged(path, f"the tensor {name!r} has the unknown dtype {dtype!r}")
    if shape is None or offsets is None or not (_are_counts(shape) and _are_counts(offsets)) or len(offsets) != 2:
        raise _damaged(path, f"the tensor {name!r} has the shape {shape!r} and the offsets {offsets!r}")
    begins, full_shape = _locate_block(path, name, shape, blocks[name]) if name in blocks else ((), tuple(shape))
    entry = Entry(dtype, tuple(shape), start + offsets[0], begins, full_shape)
    if entry.size != offsets[1] - offsets[0]:
        raise _damaged(path, f"the tensor {name!r} of shape {shape!r} has {offsets[1] - offsets[0]} bytes")
    return entry, start + offsets[1]


def _locate_block(
    path: Path, name: str, shape: list[int], block: Any
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the index at which a block starts in its tensor, and the shape of that, if the file has it."""
    fields = block if isinstance(block, dict) else {}
    begins: Any = fields.get("saved_offsets")
    full: Any = fields.get("shape")
    is_within = _are_counts(begins) and len(begins) == len(shape)
    if full is not None and is_within:
        is_within = _are_counts(full) and len(full) == len(shape)
        is_within = is_within and all(a + b <= c for a, b, c in zip(begins, shape, full, strict=True))
    if not is_within:
        raise _damaged(path, f"the block of {name!r} of shape {shape!r} begins at {begins!r} of a tensor {full!r}")
    return tuple(begins), None if full is None else tuple(full)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(count) is int and 0 <= count < _LARGEST_DIMENSION for count in values)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} is damaged: {what}. Use another checkpoint.")
