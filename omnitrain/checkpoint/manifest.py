"""The manifest of a checkpoint, omnitrain.json: writing it, and verifying a folder against it.

It holds "format_version", "sha256" (of its own text, with zeros in place of these 64 digits), "step", "sequence",
"score", "best", the caller's payload, and "files": size and sha256 of every other file by its path in the folder.
Nothing here changes the disk, and nothing knows where checkpoints lie or how many there are: that is `store.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from omnitrain.checkpoint.disk import hashing
from omnitrain.errors import CheckpointError

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "FileEntry",
    "check_payload",
    "check_sizes",
    "encode",
    "inspect",
    "read_manifest",
]

FORMAT_VERSION = 1
MANIFEST = "omnitrain.json"

_OWN_KEYS = ("format_version", "sha256", "step", "sequence", "score", "best", "files")
_ZEROS = "0" * 64


class FileEntry(TypedDict):
    """What omnitrain.json says about one other file of the checkpoint."""

    size: int
    sha256: str


def check_payload(payload: Mapping[str, Any]) -> None:
    """Refuse a payload that omnitrain.json could not hold, or would give back as something else."""
    taken = [key for key in _OWN_KEYS if key in payload]
    if taken:
        raise CheckpointError(f"The payload of a checkpoint may not have the keys {taken}: the store writes them.")
    for key, value in payload.items():
        _check_json(value, str(key))


def _check_json(value: object, where: str) -> None:
    """Refuse what JSON would turn down, or would give back as something else: keys that are not strings."""
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
    """Return the text of omnitrain.json; its "sha256" is of this text with zeros in place of these 64 digits."""
    text = json.dumps({"format_version": FORMAT_VERSION, "sha256": _ZEROS, **content}, indent=2) + "\n"
    return text.replace(_ZEROS, hashlib.sha256(text.encode()).hexdigest(), 1).encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of omnitrain.json if it is as it was written."""
    if not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} does not exist.")
    name = repr(str(folder))
    try:
        data = (folder / MANIFEST).read_bytes()
        content = json.loads(data.decode())
    except FileNotFoundError:
        raise CheckpointError(f"{name} is incomplete: {MANIFEST!r} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{name} is damaged: {MANIFEST!r} is not JSON ({error}).") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{name} has format_version {version} in {MANIFEST!r}, and this omnitrain reads up to {FORMAT_VERSION}. "
            "Upgrade omnitrain."
        )
    digest = str(content.get("sha256")) if version == FORMAT_VERSION else ""
    if not digest or hashlib.sha256(data.replace(digest.encode(), _ZEROS.encode(), 1)).hexdigest() != digest:
        raise CheckpointError(f"{name} is damaged: {MANIFEST!r} does not match its own sha256; it was changed.")
    lacking = [key for key in _OWN_KEYS if key not in content]
    if lacking:
        raise CheckpointError(f"{name} is damaged: {MANIFEST!r} lacks {lacking}.")
    for file in content["files"]:
        if "\\" in file or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise CheckpointError(f"{name} is refused: {MANIFEST!r} lists {file!r}, which lies outside of the folder.")
    return content


def inspect(folder: Path, hashes: bool) -> dict[str, Any]:
    """Return the content of omnitrain.json if all that it lists is there and as it was written."""
    content = read_manifest(folder)
    files: dict[str, FileEntry] = content["files"]
    check_sizes(folder, files)
    if hashes:
        try:
            with hashing(folder / name for name in files) as digests:
                for (name, entry), digest in zip(files.items(), digests, strict=True):
                    if digest != entry["sha256"]:
                        raise CheckpointError(
                            f"{str(folder)!r} is damaged: the content of {name!r} does not match its sha256."
                        )
        except OSError as error:
            raise CheckpointError(f"{str(folder)!r} cannot be read: {error}.") from error
    return content


def check_sizes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise a CheckpointError that names the first file that is missing or has another size."""
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{str(folder)!r} is incomplete: {name!r} is missing.") from None
        if size != entry["size"]:
            raise CheckpointError(
                f"{str(folder)!r} is incomplete: {name!r} has {size} bytes, and {entry['size']} were written."
            )
