"""Writing of checkpoints, in the foreground or in the background.

A save is a sequence of phases. In each, every rank works without communication, so that a thread can do it while
training continues. After a phase all ranks agree that it is done, or on the error of one of them. `sharded_files.py`
writes the shards, `store.py` folders and manifests, and `checkpointer.py` decides when to save.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint import state_dicts, tensor_files
from omnitrain.checkpoint.contents import CheckpointedTrainer, Snapshot
from omnitrain.checkpoint.history import HISTORY
from omnitrain.checkpoint.manifest import FileEntry
from omnitrain.checkpoint.model_files import write_model_files
from omnitrain.checkpoint.sharded_files import (
    LARGEST_FILE,
    Block,
    can_shard,
    count_full_files,
    find_tensor_files,
    local_blocks,
    shard_folder,
    stage_blocks,
    write_full_files,
    write_shards,
)
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_reader import TensorFile
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

Blocks = Mapping[str, Mapping[str, list[Block]]]
"""The blocks of sharded tensors that this rank writes, by file and name."""
Entries = dict[str, FileEntry]
Phases = Generator[Callable[[], Any], list[Any], Path]
"""Yields the work of this rank, and is sent the results of all ranks on the main one; returns the folder."""


class _Cancelled(Exception):
    """Ends a save before it is complete."""


class BackgroundSave:
    """A save whose phases run in a thread.

    Args:
        snapshot: The state to save.
        phases: The work of this rank.
        ranks: The ranks that save.
        thread: The thread of this rank.
    """

    def __init__(self, snapshot: Snapshot, phases: Phases, ranks: Ranks, thread: ThreadPoolExecutor) -> None:
        self.snapshot: Snapshot = snapshot
        self._phases, self._ranks, self._thread = phases, ranks, thread
        self._work: Future[Any] = thread.submit(next(phases))

    def is_ready(self) -> bool:
        """Return whether all ranks have finished the current phase; a collective call."""
        # all ranks must call the next collective in the same step, so none goes ahead of the others
        (finished,) = self._ranks.sum("a checkpoint in the background", float(self._work.done()))
        return finished == self._ranks.world_size

    def advance(self) -> Path | None:
        """Wait for the end of the current phase and start the next; return the folder after the last.

        Raises:
            CheckpointError: If the checkpoint could not be written; on all ranks.
        """
        next_phase = _finish_phase(self._ranks, self._phases, self._work.result)
        if isinstance(next_phase, Path):
            return next_phase
        self._work = self._thread.submit(next_phase)
        return None

    def cancel(self) -> BaseException | None:
        """Wait for pending writes, and remove the files; return the error, if any."""
        error = self._work.exception()
        with contextlib.suppress(_Cancelled):
            self._phases.throw(_Cancelled())
        return error


def _finish_phase(ranks: Ranks, phases: Phases, work: Callable[[], Any]) -> Callable[[], Any] | Path:
    """Finish a phase on all ranks, and return the next one; after the last the folder."""
    try:
        result = ranks.run_on_all("the writing of a checkpoint", work)
        results = [entry for (entry,) in ranks.gather_on_main("the writing of a checkpoint", [result])]
    except Exception as error:
        phases.throw(error)  # cleans up, and raises it again
        raise
    try:
        return phases.send(results)
    except StopIteration as end:
        return end.value


class Writer:
    """Writes the snapshots of a run.

    Args:
        trainer: The trainer.
        write_extra_files: Writes more files to the folder of a checkpoint, on the main rank.
    """

    def __init__(self, trainer: CheckpointedTrainer, write_extra_files: Callable[[Path], None]) -> None:
        self._trainer = trainer
        self._write_extra_files = write_extra_files
        self._thread: ThreadPoolExecutor | None = None
        # Whether every rank sees the run folder and can write its shards; None until the first sharded save.
        self._can_write_shards: bool | None = None
        # The copies of the latest background save, by file; the next save reuses their memory.
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Let `begin` write in a thread inside the block."""
        # one thread: two saves at once would share the host buffers, and the order of their commits would be open
        with ThreadPoolExecutor(1, thread_name_prefix="omnitrain-save") as self._thread:
            try:
                yield
            finally:
                self._thread, self._buffers = None, {}

    @property
    def is_in_background(self) -> bool:
        """Whether saves are written in a thread."""
        return self._thread is not None

    def write(self, store: Store, snapshot: Snapshot) -> Path:
        """Write a checkpoint, and return its folder.

        Raises:
            CheckpointError: If it could not be written; on all ranks.
        """
        phases = self._phases(store, snapshot, stages=False) if _sharded_files(snapshot) else None
        if phases is None:
            gathered = [snapshot.files[file] for file in snapshot.by_size]
            write = functools.partial(self._write_on_main, store, snapshot)
            return tensor_files.write_on_main(self._trainer.ranks, gathered, write)
        phase: Callable[[], Any] | Path = next(phases)
        while not isinstance(phase, Path):
            phase = _finish_phase(self._trainer.ranks, phases, phase)
        return phase

    def begin(self, store: Store, snapshot: Snapshot) -> BackgroundSave:
        """Copy a snapshot to host memory, and start to write it in the background.

        Raises:
            CheckpointError: If the folder cannot be created, or not every rank sees it; on all ranks.
        """
        assert self._thread is not None
        phases = self._phases(store, snapshot, stages=True)
        if phases is None:
            raise CheckpointError(_unshared_folder_message("async_save=True", store))
        return BackgroundSave(snapshot, phases, self._trainer.ranks, self._thread)

    # --- phases

    def _phases(self, store: Store, snapshot: Snapshot, stages: bool) -> Phases | None:
        """Return the phases that write a snapshot; None if the main rank has to gather sharded tensors.

        Args:
            store: The store.
            snapshot: The state to save.
            stages: Whether to copy it to host memory first, because training continues.
        """
        ranks, files, stack = self._trainer.ranks, _sharded_files(snapshot), contextlib.ExitStack()
        if files and self._can_write_shards is not False and not all(can_shard(snapshot.files[file]) for file in files):
            self._can_write_shards = False
        if files and self._can_write_shards is False:
            return self._check_can_gather(store)
        folder = store.root / ranks.on_main("the folder of a checkpoint", lambda: self._begin(store, snapshot, stack))
        try:
            if files and self._can_write_shards is None:
                # on machines without a shared file system other ranks do not see the folder of the main one
                (blind,) = ranks.sum("a look at the folder of a checkpoint", float(not folder.is_dir()))
                self._can_write_shards = not blind
            if files and not self._can_write_shards:
                _abort(store, snapshot.step, stack)
                return self._check_can_gather(store)
            if stages:
                write = functools.partial(
                    _run_within, store.reporting_errors, snapshot.step, lambda: self._write_extra_files(folder)
                )
                ranks.on_main("further files of a checkpoint", write)
            blocks, rest = self._local_share(snapshot, files, stages)
        except BaseException:
            _abort(store, snapshot.step, stack)
            raise
        full_files = 0
        if state_dicts.WEIGHTS in files and self._consolidates(snapshot):
            full_files = count_full_files(snapshot.files[state_dicts.WEIGHTS])
        return self._write_in_phases(store, folder, stack, (blocks, rest), full_files, stages)

    def _begin(self, store: Store, snapshot: Snapshot, stack: contextlib.ExitStack) -> str:
        """Create the folder of a checkpoint, locked until `stack` is closed, and return its name."""
        folder = stack.enter_context(store.saving(snapshot.step))
        try:
            with store.reporting_errors(snapshot.step):
                for file in _sharded_files(snapshot):
                    store.fs.mkdir(folder / shard_folder(file))
        except BaseException:
            _abort(store, snapshot.step, stack)
            raise
        return folder.name

    def _check_can_gather(self, store: Store) -> None:
        """Reject a save that has to gather sharded tensors against the settings."""
        if self._trainer.settings.consolidate is False:
            raise CheckpointError(_unshared_folder_message("consolidate=False", store))

    def _local_share(self, snapshot: Snapshot, files: Sequence[str], stages: bool) -> tuple[Blocks, Snapshot]:
        """Return this rank's blocks of sharded files, and the snapshot of the others, which the main rank writes."""
        rank, mesh = self._trainer.ranks.rank, self._trainer.ranks.mesh
        rest = [file for file in snapshot.files if file not in files]
        if stages:
            blocks = {
                file: stage_blocks(snapshot.files[file], rank, self._buffers.setdefault(file, {}), mesh)
                for file in files
            }
            return blocks, snapshot.on_host(self._buffers, rest if rank == 0 else [])
        blocks = {
            file: {name: local_blocks(tensor, rank, mesh) for name, tensor in snapshot.files[file].items()}
            for file in files
        }
        return blocks, snapshot.only(rest)

    def _write_in_phases(
        self,
        store: Store,
        folder: Path,
        stack: contextlib.ExitStack,
        share: tuple[Blocks, Snapshot],
        full_files: int,
        has_extras: bool,
    ) -> Phases:
        """Have every rank write its shards, and its share of the `full_files` files with full weights."""
        ranks, (blocks, rest), own_entries = self._trainer.ranks, share, Entries()

        def safely(work: Callable[[], Any]) -> Callable[[], Any]:
            return functools.partial(_run_within, store.reporting_errors, rest.step, work)

        with stack:
            entries = Entries()
            if blocks:
                for rank_entries in (yield safely(lambda: self._write_shards(store, folder, blocks, own_entries))):
                    entries |= rank_entries
            if full_files:
                parts = [name for name in entries if name.startswith(f"{shard_folder(state_dicts.WEIGHTS)}/")]
                parts = ranks.on_main("the parts of a checkpoint", lambda: parts)
                # a rank that writes opens the shards of all ranks
                write = self._write_full_files if ranks.rank < full_files else _nothing
                for rank_entries in (yield safely(lambda: write(store, folder, parts))):
                    entries |= rank_entries
                yield safely(lambda: [store.fs.unlink(folder / name) for name in own_entries if name in parts])
                entries = {name: entry for name, entry in entries.items() if name not in parts}
            yield lambda: self._commit(store, rest, folder, entries, has_extras) if ranks.is_main else None
        return store.path(rest.step)

    # --- what a rank does in a phase

    def _write_shards(self, store: Store, folder: Path, blocks: Blocks, own_entries: Entries) -> Entries:
        """Write this rank's shards of all files, and return their manifest entries, also added to `own_entries`."""
        for file, tensors in blocks.items():
            part = shard_folder(file)
            written = write_shards(tensors, folder / part, self._trainer.ranks.rank, store.fs)
            own_entries |= {f"{part}/{name}": entry for name, entry in written.items()}
        return own_entries

    def _write_full_files(self, store: Store, folder: Path, parts: Sequence[str]) -> Entries:
        """Write this rank's share of the files with full weights, from the shards of all ranks."""
        ranks, source = self._trainer.ranks, TensorFile([folder / name for name in parts])
        return write_full_files(source, folder, ranks.rank, ranks.world_size, store.fs)

    def _commit(self, store: Store, snapshot: Snapshot, folder: Path, written: Entries, has_extras: bool) -> Path:
        """Write the files of the main rank, and commit the checkpoint."""
        weights = find_tensor_files(
            folder, {**written, **dict.fromkeys(snapshot.files)}, shard_folder(state_dicts.WEIGHTS)
        )
        with ThreadPoolExecutor(2, thread_name_prefix="omnitrain-hash") as pool:
            with store.reporting_errors(snapshot.step):
                shards = folder / shard_folder(state_dicts.WEIGHTS)
                if shards.is_dir() and not any(shards.iterdir()):  # they were consolidated
                    store.fs.rmdir(shards)
                digests = self._write_files(store, snapshot, folder, pool, tensor_files.gather_to_host, weights)
                if not has_extras:
                    self._write_extra_files(folder)
            return store.commit(
                snapshot.step, snapshot.payload, score=snapshot.score, best=snapshot.best, digests=digests,
                written=written,
            )  # fmt: skip

    def _write_on_main(self, store: Store, snapshot: Snapshot, gather: tensor_files.Gather) -> Path:
        """Write and commit a checkpoint on the main rank, to which sharded tensors are gathered."""
        digests: dict[str, Future[str]] = {}

        def write(folder: Path) -> None:
            digests.update(self._write_files(store, snapshot, folder, pool, gather, [folder / state_dicts.WEIGHTS]))
            self._write_extra_files(folder)

        with ThreadPoolExecutor(2, thread_name_prefix="omnitrain-hash") as pool:
            return store.save(
                snapshot.step, write, snapshot.payload, score=snapshot.score, best=snapshot.best, digests=digests
            )

    def _write_files(
        self,
        store: Store,
        snapshot: Snapshot,
        folder: Path,
        pool: ThreadPoolExecutor,
        gather: tensor_files.Gather,
        weights: Sequence[Path],
    ) -> dict[str, Future[str]]:
        """Write the files of a snapshot and of the model, and return the sha256 of the former.

        Args:
            store: The store.
            snapshot: The state to save.
            folder: The folder of the checkpoint.
            pool: The threads that hash.
            gather: Gathers a tensor.
            weights: The files with the weights of the model, once those of the snapshot are written.
        """
        digests: dict[str, Future[str]] = {}
        # hashing takes longer than writing, so it starts with the largest file, before that is written
        for file in snapshot.by_size:
            tensors, path = snapshot.files[file], folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if any(map(tensor_files.is_sharded, tensors.values())):
                hasher, digests[file] = hashlib.sha256(), Future()
                tensor_files.save_tensors(tensors, path, hasher, gather)
                digests[file].set_result(hasher.hexdigest())
                continue
            ready = tensor_files.host_tensors(tensors)
            with contextlib.suppress(RuntimeError):  # at interpreter exit: the file is read back and hashed
                digests[file] = pool.submit(tensor_files.digest, ready)
            tensor_files.save_tensors(ready, path)
        text, digest = snapshot.rows
        store.fs.write(folder / HISTORY, text)
        digests[HISTORY] = Future()
        digests[HISTORY].set_result(digest)
        write_model_files(self._trainer.backend.model, folder, not snapshot.payload["frozen"], weights)
        return digests

    def _consolidates(self, snapshot: Snapshot) -> bool:
        """Return whether sharded weights are consolidated into files that any program can open."""
        consolidate = self._trainer.settings.consolidate
        if consolidate is not None:
            return consolidate
        return (
            sum(tensor.numel() * tensor.element_size() for tensor in snapshot.files[state_dicts.WEIGHTS].values())
            <= LARGEST_FILE
        )


def _sharded_files(snapshot: Snapshot) -> list[str]:
    return [file for file in snapshot.by_size if any(map(tensor_files.is_sharded, snapshot.files[file].values()))]


def _nothing(store: Store, folder: Path, parts: Sequence[str]) -> Entries:
    return {}


def _abort(store: Store, step: int, stack: contextlib.ExitStack) -> None:
    """Undo `Writer._begin`, on the main rank."""
    store.discard(step)
    stack.close()


def _run_within(reporting: Callable[[int], Any], step: int, work: Callable[[], Any]) -> Any:
    with reporting(step):
        return work()


def _unshared_folder_message(argument: str, store: Store) -> str:
    return (
        f"With `{argument}` every rank writes its shard of the weights, but not all of them see {str(store.root)!r}, "
        "the folder of the main rank, or a tensor cannot be written in shards. Put `save_dir` on a file system shared "
        "by all machines, or leave the argument out."
    )
