"""Writing of checkpoints, in the foreground or in the background.

A save is a sequence of phases. In each, every rank works without communication, so that a thread can do it while
training continues. After a phase all ranks agree that it is done, or on the error of one of them. `sharded_files.py`
writes the shards, `store.py` folders and manifests, and `checkpointer.py` decides when to save.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.contents import CheckpointedTrainer, Files, Snapshot
from omnitrain.checkpoint.manifest import HISTORY
from omnitrain.checkpoint.model_files import write_model_files
from omnitrain.checkpoint.safetensors_header import shard_folder
from omnitrain.checkpoint.sharded_files import (
    LARGEST_FILE,
    Block,
    can_shard,
    count_full_files,
    local_blocks,
    write_full_files,
    write_shards,
)
from omnitrain.checkpoint.state_dicts import WEIGHTS
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_files import (
    Gather,
    TensorFile,
    file_content,
    gather_to_host,
    host_copy,
    is_sharded,
    total_bytes,
    write_on_main,
)
from omnitrain.core.errors import CheckpointError
from omnitrain.core.files import FileEntry
from omnitrain.distributed.ranks import Ranks

_MIN_THREADED_BYTES = 1 << 24  # starting threads costs about a millisecond

Blocks = Mapping[str, Mapping[str, list[Block]]]
"""The blocks of sharded tensors that this rank writes, by file and name."""
Entries = dict[str, FileEntry]
Phases = Generator[Callable[[], object], None, Path]
"""Yields the work of this rank, and continues when all ranks have done theirs; returns the folder."""


class _Cancelled(Exception):
    """Ends a save before it is complete."""


class BackgroundSave:
    """A save whose phases run in a thread.

    Args:
        snapshot: The state to save.
        phases: The work of this rank.
        report: Wraps that work so that it reports errors of the disk.
        ranks: The ranks that save.
        thread: The thread of this rank.
    """

    def __init__(
        self, snapshot: Snapshot, phases: Phases, report: Any, ranks: Ranks, thread: ThreadPoolExecutor
    ) -> None:
        self.snapshot: Snapshot = snapshot
        self._phases, self._report, self._ranks, self._thread = phases, report, ranks, thread
        self._work: Future[Any] = thread.submit(report(next(phases)))

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
        self._work = self._thread.submit(self._report(next_phase))
        return None

    def cancel(self) -> BaseException | None:
        """Wait for pending writes, and remove the files; return the error, if any."""
        error = self._work.exception()
        with contextlib.suppress(_Cancelled):
            self._phases.throw(_Cancelled())
        return error


def _finish_phase(ranks: Ranks, phases: Phases, work: Callable[[], object]) -> Callable[[], object] | Path:
    """Finish a phase on all ranks, and return the next one; after the last the folder."""
    try:
        ranks.run_on_all("the writing of a checkpoint", work)
    except Exception as error:
        phases.throw(error)  # cleans up, and raises it again
        raise
    try:
        return next(phases)
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
        # Whether every rank sees the run folder; None until the first sharded save.
        self._is_shared: bool | None = None
        # The copies of the latest background save; the next save reuses their memory.
        self._buffers: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Let `begin` write in a thread inside the block."""
        # one thread: two saves at once would share the host buffers, and the order of their commits would be open
        with ThreadPoolExecutor(1, thread_name_prefix="omnitrain-save") as self._thread:
            try:
                yield
            finally:
                self._thread, self._buffers = None, {}

    def write(self, store: Store, snapshot: Snapshot) -> Path:
        """Write a checkpoint, and return its folder.

        Raises:
            CheckpointError: If it could not be written; on all ranks.
        """
        ranks, report = self._trainer.ranks, store.reporting_errors(snapshot.step)
        files, sharded = _arrange(snapshot.files)

        def write_full() -> None:
            with store.saving(snapshot.step) as folder:
                self._commit(store, snapshot, folder, files, {})

        if not sharded:  # only the main rank needs the folder, so one exchange is enough
            ranks.on_main("the writing of a checkpoint", report(write_full))
            return store.path(snapshot.step)
        with contextlib.closing(self._phases(store, snapshot, stages=False)) as phases:
            phase: Callable[[], object] | Path = next(phases)
            while not isinstance(phase, Path):
                phase = _finish_phase(ranks, phases, report(phase))
        return phase

    def begin(self, store: Store, snapshot: Snapshot) -> BackgroundSave:
        """Copy a snapshot to host memory, and start to write it in the background.

        Raises:
            CheckpointError: If the folder cannot be created, or not every rank sees it; on all ranks.
        """
        assert self._thread is not None
        phases, report = self._phases(store, snapshot, stages=True), store.reporting_errors(snapshot.step)
        return BackgroundSave(snapshot, phases, report, self._trainer.ranks, self._thread)

    # --- phases

    def _phases(self, store: Store, snapshot: Snapshot, stages: bool) -> Phases:
        """Yield the work of this rank that writes a snapshot, of which it `stages` a copy if training continues."""
        ranks, (files, sharded) = self._trainer.ranks, _arrange(snapshot.files)

        def begin() -> Path:
            folder = stack.enter_context(store.saving(snapshot.step))
            if stages:  # at once, as training may change what they hold
                self._write_extra_files(folder)
            return folder

        with contextlib.ExitStack() as stack:
            report = store.reporting_errors(snapshot.step)
            folder = store.root / ranks.on_main("the folder of a checkpoint", report(lambda: begin().name))
            shards = sharded if self._can_write_shards(snapshot, sharded, folder) else []
            argument = "async_save=True" if stages else "consolidate=False"
            if sharded and not shards and (stages or self._trainer.settings.consolidate is False):
                raise CheckpointError(
                    f"With `{argument}` every rank writes its shard of the weights, but not all of them see "
                    f"{str(store.root)!r}, the folder of the main rank, or a tensor cannot be written in shards. Put "
                    "`save_dir` on a file system shared by all machines, or leave the argument out."
                )
            blocks = {file: self._local_blocks(file, files[file], stages) for file in shards}
            rest = {file: tensors for file, tensors in files.items() if file not in shards}
            if stages:
                rest = {file: self._staged(file, tensors) for file, tensors in rest.items()} if ranks.is_main else {}
            entries: Entries = {}
            if shards:
                yield lambda: entries.update(self._write_shards(store, folder, blocks))
                entries = self._gather(entries)
            if WEIGHTS in shards and self._consolidates(files[WEIGHTS]):
                yield from self._consolidate(store, folder, entries, count_full_files(files[WEIGHTS]))
            commit = functools.partial(self._commit, store, snapshot, folder, rest, entries, stages)
            if shards == sharded:
                yield lambda: commit() if ranks.is_main else None
            else:
                yield lambda: write_on_main(ranks, list(files.values()), commit)
        return store.path(snapshot.step)

    def _can_write_shards(self, snapshot: Snapshot, sharded: list[str], folder: Path) -> bool:
        """Return whether each rank can write its parts of these files."""
        if sharded and self._is_shared is None:
            # on machines without a shared file system other ranks do not see the folder of the main one
            (blind,) = self._trainer.ranks.sum("a look at the folder of a checkpoint", float(not folder.is_dir()))
            self._is_shared = not blind
        return bool(self._is_shared) and all(all(map(can_shard, snapshot.files[file].values())) for file in sharded)

    def _local_blocks(self, file: str, tensors: Mapping[str, Any], stages: bool) -> dict[str, list[Block]]:
        """Return this rank's blocks of a sharded file, copied to host memory if training continues."""
        ranks = self._trainer.ranks
        blocks = {name: local_blocks(tensor, ranks.rank, ranks.mesh) for name, tensor in tensors.items()}
        if stages:
            for name, parts in blocks.items():
                copies = self._staged(file, {f"{name}:{number}": part.tensor for number, part in enumerate(parts)})
                blocks[name] = [part._replace(tensor=copy) for part, copy in zip(parts, copies.values(), strict=True)]
        return blocks

    def _staged(self, file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in host memory, which further training cannot change."""
        copies = {name: host_copy(tensor, self._buffers.get(f"{file}:{name}")) for name, tensor in tensors.items()}
        self._buffers |= {f"{file}:{name}": copy for name, copy in copies.items()}
        return copies

    def _consolidate(
        self, store: Store, folder: Path, entries: Entries, count: int
    ) -> Generator[Callable[[], object], None, None]:
        """Yield the work that replaces shards of the weights by `count` full files, and update the entries."""
        ranks, prefix = self._trainer.ranks, f"{shard_folder(WEIGHTS)}/rank-"
        parts = ranks.on_main(
            "the parts of a checkpoint", lambda: [name for name in entries if name.startswith(prefix)]
        )

        def write() -> None:
            if ranks.rank < count:  # a rank that writes opens the shards of all ranks
                source = TensorFile([folder / name for name in parts])
                written.update(write_full_files(source, folder, ranks.rank, ranks.world_size, store.fs))

        def remove() -> None:
            for name in parts:
                if name.startswith(f"{prefix}{ranks.rank:05}."):
                    store.fs.remove(folder / name)
            with contextlib.suppress(OSError):  # the last rank finds it empty
                (folder / shard_folder(WEIGHTS)).rmdir()

        written: Entries = {}
        yield write
        entries |= self._gather(written)
        yield remove
        for name in parts:
            entries.pop(name, None)

    def _gather(self, entries: Entries) -> Entries:
        """Return the entries of all ranks on the main one, nothing on the others."""
        gathered = self._trainer.ranks.gather_on_main("the writing of a checkpoint", [entries])
        return {name: entry for (written,) in gathered for name, entry in written.items()}

    # --- what a rank does in a phase

    def _write_shards(self, store: Store, folder: Path, blocks: Blocks) -> Entries:
        """Write this rank's shards of all files, and return their manifest entries."""
        entries: Entries = {}
        for file, tensors in blocks.items():
            part = shard_folder(file)
            (folder / part).mkdir(exist_ok=True)
            written = write_shards(tensors, folder / part, self._trainer.ranks.rank, store.fs)
            entries |= {f"{part}/{name}": entry for name, entry in written.items()}
        return entries

    def _commit(
        self,
        store: Store,
        snapshot: Snapshot,
        folder: Path,
        files: Mapping[str, Mapping[str, Any]],
        entries: Entries,
        has_extras: bool = False,
        gather: Gather = gather_to_host,
    ) -> None:
        """Write the tensors of `files`, besides shards with these entries, and commit the checkpoint."""

        def write(file: str) -> FileEntry:
            (folder / file).parent.mkdir(exist_ok=True)
            return store.fs.write(folder / file, file_content(files[file], gather))

        with ThreadPoolExecutor(2, thread_name_prefix="omnitrain-write") as pool:
            written: Iterator[FileEntry] = map(write, files)
            if gather is gather_to_host and sum(map(total_bytes, files.values())) >= _MIN_THREADED_BYTES:
                with contextlib.suppress(RuntimeError):  # at interpreter exit, where an asynchronous save may end
                    # two at once, as hashing one file takes longer than writing it
                    written = pool.map(write, files)
            entries |= zip(files, written, strict=True)
        entries[HISTORY] = store.fs.write(folder / HISTORY, snapshot.rows)
        write_model_files(self._trainer.backend.model, folder, not snapshot.payload["frozen"], entries)
        if not has_extras:
            self._write_extra_files(folder)  # transformers' files are made from those of the tensors
        store.commit(snapshot.step, folder, snapshot.payload, snapshot.score, snapshot.best, entries)

    def _consolidates(self, weights: Mapping[str, Any]) -> bool:
        """Return whether sharded weights are consolidated into files that any program can open."""
        if self._trainer.settings.consolidate is not None:
            return self._trainer.settings.consolidate
        return total_bytes(weights) <= LARGEST_FILE


def _arrange(files: Files) -> tuple[Files, list[str]]:
    """Return the files, the largest first as two are written at once, and the names of those with sharded tensors."""
    ordered, sharded = dict(sorted(files.items(), key=lambda item: (-total_bytes(item[1]), item[0]))), list[str]()
    for file, tensors in ordered.items():
        if any(map(is_sharded, tensors.values())):
            sharded.append(file)
    return ordered, sharded
