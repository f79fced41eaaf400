"""Manifest of a checkpoint (omnitrain.json).

It holds "format_version", "sha256" (of its own text, with zeros in place of these 64 digits), "step", "sequence",
"score", "best", the caller's payload, and "files": size and sha256 of every other file by its path in the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from omnitrain.checkpoint import manifest_schema as schema
from omnitrain.checkpoint.disk import hashing
from omnitrain.checkpoint.safetensors_header import open_regular
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import is_inside

FORMAT_VERSION = 1
MANIFEST = "omnitrain.json"
# The most bytes of omnitrain.json that are read.
LARGEST_MANIFEST = 1 << 28

_OWN_KEYS = ("format_version", "sha256", "step", "sequence", "score", "best", "files")
_ZEROS = "0" * 64


class FileEntry(TypedDict):
    """The entry in omnitrain.json for one other file of the checkpoint."""

    size: int
    sha256: str


Check = Callable[[Path, Mapping[str, FileEntry]], None]
"""Raises a CheckpointError if the content of a file in a folder has changed."""


def check_payload(payload: Mapping[str, Any]) -> None:
    """Reject a payload that JSON cannot hold, or would not return unchanged."""
    reserved = [key for key in _OWN_KEYS if key in payload]
    if reserved:
        raise CheckpointError(f"The payload of a checkpoint may not have the keys {reserved}: the store writes them.")
    for key, value in payload.items():
        _check_json(value, str(key))


def _check_json(value: object, where: str) -> None:

    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"`{where}` has the key {key!r}; JSON would make it a string. Use str keys.")
            _check_json(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_json(inner, f"{where}[{index}]")
    elif not (value is None or isinstance(value, str | int | float)):
        raise CheckpointError(
            f"`{where}` is a {type(value).__name__}, which JSON cannot hold. "
            "Keep numbers, strings, None, lists and dicts in a state, or convert it in `state_dict`."
        )


def encode(content: Mapping[str, Any]) -> bytes:
    """Return the text of omnitrain.json."""
    text = json.dumps({"format_version": FORMAT_VERSION, "sha256": _ZEROS, **content}, indent=2) + "\n"
    return text.replace(_ZEROS, hashlib.sha256(text.encode()).hexdigest(), 1).encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of omnitrain.json, after checking its hash."""
    name = repr(str(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{name} does not exist.")
    try:
        with open_regular(folder / MANIFEST) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_MANIFEST:
                raise CheckpointError(
                    f"{name} is rejected: {MANIFEST!r} has {size} bytes, and at most {LARGEST_MANIFEST} are read."
                )
            data = file.read(size + 1)  # allocates so many bytes at once, hence the limit
    except FileNotFoundError:
        raise CheckpointError(f"{name} is incomplete: {MANIFEST!r} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {MANIFEST!r}: {error}.") from error
    return parse_manifest(data, name)


def parse_manifest(data: bytes, name: str) -> dict[str, Any]:
    """Return the content of an omnitrain.json; `name` is that of the checkpoint in errors."""
    version = re.search(rb'"format_version":\s*([0-9]{1,9})\b', data)
    if version and int(version[1]) > FORMAT_VERSION:
        raise CheckpointError(
            f"{name} has format_version {int(version[1])} in {MANIFEST!r}, and this omnitrain reads up to "
            f"{FORMAT_VERSION}. Upgrade omnitrain."
        )
    digest = re.search(rb'"sha256":\s*"([0-9a-f]{64})"', data)
    if not digest or hashlib.sha256(data.replace(digest[1], _ZEROS.encode(), 1)).hexdigest() != digest[1].decode():
        raise CheckpointError(f"{name} is damaged: {MANIFEST!r} does not match its own sha256; it was changed.")
    try:
        content = json.loads(data.decode(), object_pairs_hook=schema.unique_keys)
        schema.check_limits(content)
        _check_own(content, "")
    except RecursionError:
        raise CheckpointError(f"{name} is rejected: {MANIFEST!r} is nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{name} is damaged: {MANIFEST!r} has {error}. Use another checkpoint.") from None
    for file in content["files"]:
        if not is_inside(file):
            raise CheckpointError(f"{name} is rejected: {MANIFEST!r} lists {file!r}, which is outside of the folder.")
    return content


def _check_digest(value: Any, where: str) -> None:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{where} = {reprlib.repr(value)}, where 64 hexadecimal digits were expected")


_check_own = schema.record(
    {
        "format_version": schema.integer(1, FORMAT_VERSION),
        "sha256": _check_digest,
        "step": schema.integer(),
        "sequence": schema.integer(),
        "score": schema.nullable(schema.number()),
        "best": schema.boolean,
        "files": schema.dict_of(schema.record({"size": schema.integer(), "sha256": _check_digest})),
    }
)


def check_hashes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise a CheckpointError for the first file whose content has changed."""
    try:
        size = sum(entry["size"] for entry in files.values())
        with hashing((folder / name for name in files), size) as digests:
            for (name, entry), digest in zip(files.items(), digests, strict=True):
                if digest != entry["sha256"]:
                    raise CheckpointError(
                        f"{str(folder)!r} is damaged: the content of {name!r} does not match its sha256."
                    )
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {error}.") from error


def check_sizes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise a CheckpointError for the first file that is missing, not a regular file, or of another size."""
    for name, entry in files.items():
        try:
            status = (folder / name).stat()
        except (OSError, ValueError):  # ValueError: a name that no file can have
            raise CheckpointError(f"{str(folder)!r} is incomplete: {name!r} is missing.") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{str(folder)!r} is damaged: {name!r} is not a regular file.")
        if status.st_size != entry["size"]:
            raise CheckpointError(
                f"{str(folder)!r} is incomplete: {name!r} has {status.st_size} bytes, and {entry['size']} were written."
            )


def inspect(folder: Path, hashes: bool, check: Check = check_hashes) -> dict[str, Any]:
    """Return the content of omnitrain.json, after checking that all files in it exist unchanged.

    Args:
        folder: The folder of a checkpoint.
        hashes: Whether to read and hash all files, instead of only comparing sizes.
        check: Hashes the files.
    """
    content = read_manifest(folder)
    check_sizes(folder, content["files"])
    if hashes:
        check(folder, content["files"])
    return content
