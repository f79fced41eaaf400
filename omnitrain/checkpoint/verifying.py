"""Verification of checkpoints, shared by several ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

from omnitrain.checkpoint.disk import FileEntry, read_or_none
from omnitrain.checkpoint.manifest import MANIFEST, Check, check_hashes
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

T = TypeVar("T")

# The least bytes of files that are hashed by several ranks.
_MIN_SHARED_BYTES = 1 << 28
_REQUEST = "the files of a checkpoint to hash"


def find_with_shared_hashing(ranks: Ranks, find: Callable[[Check], T]) -> T:
    """Return the result of `find`, which runs on the main rank while all ranks hash; all of them raise its error.

    Args:
        ranks: The ranks; all of them call this.
        find: Gets a function that hashes the files of a checkpoint, and may call it for several checkpoints.
    """
    if ranks.world_size == 1:
        return find(check_hashes)

    def check(folder: Path, files: Mapping[str, FileEntry]) -> None:
        manifest, size = read_or_none(folder / MANIFEST), sum(entry["size"] for entry in files.values())
        if size < _MIN_SHARED_BYTES or manifest is None:
            check_hashes(folder, files)
            return
        digest = hashlib.sha256(manifest).digest()
        ranks.on_main(_REQUEST, lambda: (folder, dict(files), digest))
        _hash_share(ranks, folder, files, digest)

    outcome: Future[T] = Future()
    if ranks.is_main:
        try:
            outcome.set_result(find(check))
        except Exception as error:
            outcome.set_exception(error)
        ranks.on_main(_REQUEST, lambda: None)
    else:
        while request := cast(Any, ranks.on_main(_REQUEST, lambda: None)):
            _hash_share(ranks, *request)
    return ranks.on_main("the choice of a checkpoint", outcome.result)


def _hash_share(ranks: Ranks, folder: Path, files: Mapping[str, FileEntry], manifest_digest: bytes) -> None:
    """Hash this rank's share of the files; on the main rank raise the error of any rank."""
    # a folder of this name on another machine may hold a different checkpoint
    has_files = ranks.is_main or hashlib.sha256(read_or_none(folder / MANIFEST) or b"").digest() == manifest_digest
    flags = ranks.gather("a look at a checkpoint", has_files)
    loads = {rank: 0 for rank, flag in enumerate(flags) if flag}
    share: dict[str, FileEntry] = {}
    for name, entry in sorted(files.items(), key=lambda file: (-file[1]["size"], file[0])):
        rank = min(loads, key=loads.__getitem__)
        loads[rank] += entry["size"]
        if rank == ranks.rank:
            share[name] = entry
    message = ""
    try:
        check_hashes(folder, share)
    except CheckpointError as error:
        message = str(error)
    messages = list(filter(None, ranks.gather("the hashes of a checkpoint", message)))
    if messages and ranks.is_main:
        raise CheckpointError(messages[0])
