"""Verifying a checkpoint on several ranks: the main one decides, and all that see the files hash a share of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from omnitrain.checkpoint.manifest import MANIFEST, Check, FileEntry, check_hashes
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

T = TypeVar("T")

_WORTH_IT = 1 << 28
"""The bytes from which on files are hashed by several ranks."""
_REQUEST = "the files of a checkpoint to hash"


def hashed_by_all(ranks: Ranks, find: Callable[[Check], T]) -> T:
    """Return the result of `find` on the main rank; all ranks call this, and raise its error.

    Args:
        ranks: The ranks.
        find: Gets what hashes the files of a checkpoint, which it may call for several.
    """
    if not ranks.is_main:
        while request := cast(Any, ranks.on_main(_REQUEST, _nothing)):
            _hash_share(ranks, *request)
        return cast(T, ranks.on_main("the choice of a checkpoint", _nothing))

    def check(folder: Path, files: Mapping[str, FileEntry]) -> None:
        manifest, size = _read(folder / MANIFEST), sum(entry["size"] for entry in files.values())
        if ranks.world_size == 1 or size < _WORTH_IT or manifest is None:
            check_hashes(folder, files)
            return
        mark = hashlib.sha256(manifest).digest()
        ranks.on_main(_REQUEST, lambda: (folder, dict(files), mark))
        _hash_share(ranks, folder, files, mark)

    failed: Exception | None = None
    found: T | None = None
    try:
        found = find(check)
    except Exception as error:
        failed = error
    ranks.on_main(_REQUEST, _nothing)

    def result() -> T:
        if failed is not None:
            raise failed
        return found  # type: ignore[return-value]

    return ranks.on_main("the choice of a checkpoint", result)


def _hash_share(ranks: Ranks, folder: Path, files: Mapping[str, FileEntry], mark: bytes) -> None:
    """Hash this rank's share of the files; on the main rank raise the error of any rank."""
    has_it = ranks.is_main or hashlib.sha256(_read(folder / MANIFEST) or b"").digest() == mark
    sees = ranks.gather("a look at a checkpoint", has_it)
    shares = [rank for rank, one in enumerate(sees) if one]
    loads = dict.fromkeys(shares, 0)
    own: dict[str, FileEntry] = {}
    for name, entry in sorted(files.items(), key=lambda one: (-one[1]["size"], one[0])):
        rank = min(shares, key=loads.__getitem__)
        loads[rank] += entry["size"]
        if rank == ranks.rank:
            own[name] = entry
    failed = ""
    try:
        check_hashes(folder, own)
    except CheckpointError as error:
        failed = str(error)
    reasons = [one for one in ranks.gather("the hashes of a checkpoint", failed) if one]
    if reasons and ranks.is_main:
        raise CheckpointError(reasons[0])


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _nothing() -> None:
    return None
