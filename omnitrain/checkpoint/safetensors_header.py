"""The header of a safetensors file: its tensors and their places. `reading.py` reads the tensors. No torch here."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from omnitrain.checkpoint.manifest_schema import unique_keys
from omnitrain.core.errors import CheckpointError

SHARDING = "DCP_SHARDING_INFO"
"""The key under which torch.distributed.checkpoint says, in a file's metadata, of which tensors it holds blocks."""

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
"""Bytes of one entry of a tensor, by the name of its type in safetensors files."""

_LARGEST_HEADER = 100_000_000  # the limit of the safetensors package
_LARGEST_DIMENSION = 1 << 48


@dataclass(frozen=True, slots=True)
class Entry:
    """A header's entry for one tensor, or one block of it, and where in the file it begins.

    Attributes:
        dtype: The name of its type in safetensors files.
        shape: The shape of what the file holds.
        offset: The byte at which it begins.
        begins: The index in the whole tensor at which the block begins; () if the file holds all of it.
        whole: The shape of the whole tensor; None if the file does not say it.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    begins: tuple[int, ...] = ()
    whole: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The size in the file in bytes."""
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def corner(self) -> tuple[int, ...]:
        """The index in the whole tensor at which this begins."""
        return self.begins or (0,) * len(self.shape)


class Header(NamedTuple):
    """The entries of a file by name, its size in bytes, and a digest of its header."""

    entries: dict[str, Entry]
    size: int
    digest: str


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading: opening a pipe could block forever, and a device may do anything.

    Raises:
        OSError: If it is missing, cannot be read, or is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # replaced in the meantime
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_header(path: Path) -> dict[str, Entry]:
    """Return the entries of a safetensors file, after checking that all tensors lie within it.

    Raises:
        CheckpointError: If it is missing or not a safetensors file.
    """
    return read_marked_header(path).entries


def read_marked_header(path: Path) -> Header:
    """Return the entries of a safetensors file, and what shows whether another process sees the same file.

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
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Take another checkpoint.") from error
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
    """Return what a file says of which parts of tensors it holds; nothing if it holds whole ones."""
    text = metadata.get(SHARDING) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        return {}
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its {SHARDING} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise _damaged(path, f"its {SHARDING} is not a JSON object")
    return found


def _entry(path: Path, name: str, content: Any, start: int, blocks: dict[str, Any]) -> tuple[Entry, int]:
    dtype, shape, offsets = (
        (content.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(content, dict) else [None] * 3
    )
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise _damaged(path, f"the tensor {name!r} is of type {dtype!r}, which is not known here")
    if shape is None or offsets is None or not (_are_counts(shape) and _are_counts(offsets)) or len(offsets) != 2:
        raise _damaged(path, f"the tensor {name!r} has the shape {shape!r} and the offsets {offsets!r}")
    begins, whole = _place(path, name, shape, blocks[name]) if name in blocks else ((), tuple(shape))
    entry = Entry(dtype, tuple(shape), start + offsets[0], begins, whole)
    if entry.size != offsets[1] - offsets[0]:
        raise _damaged(path, f"the tensor {name!r} of shape {shape!r} has {offsets[1] - offsets[0]} bytes")
    return entry, start + offsets[1]


def _place(path: Path, name: str, shape: list[int], block: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return where a block begins in its tensor, and the shape of that, if the file says it."""
    found = block if isinstance(block, dict) else {}
    begins: Any = found.get("saved_offsets")
    whole: Any = found.get("shape")
    lies_within = _are_counts(begins) and len(begins) == len(shape)
    if whole is not None and lies_within:
        lies_within = _are_counts(whole) and len(whole) == len(shape)
        lies_within = lies_within and all(a + b <= c for a, b, c in zip(begins, shape, whole, strict=True))
    if not lies_within:
        raise _damaged(path, f"the block of {name!r} of shape {shape!r} begins at {begins!r} of a tensor {whole!r}")
    return tuple(begins), None if whole is None else tuple(whole)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and 0 <= one < _LARGEST_DIMENSION for one in values)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} is damaged: {what}. Take another checkpoint.")
