"""Writing a checkpoint: by the main rank alone, or by every rank its part; at once, or behind training.

A save is a sequence of phases. In each, every rank does something by itself, without communication, so that a thread
can do it while training goes on. After a phase all ranks agree that it is done, or on the error of one of them.
`shards.py` has the files of parts, `store.py` folders and manifests, and `checkpointer.py` decides when to save.
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
from omnitrain.checkpoint.adapters import write_model_files
from omnitrain.checkpoint.contents import CheckpointedTrainer, Snapshot
from omnitrain.checkpoint.history import HISTORY
from omnitrain.checkpoint.manifest import FileEntry
from omnitrain.checkpoint.sharded_files import (
    LARGEST_FILE,
    Block,
    can_shard,
    files_of,
    own_blocks,
    part_of,
    staged,
    whole_files,
    write_shards,
    write_whole,
)
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_reader import TensorFile
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks

Blocks = Mapping[str, Mapping[str, list[Block]]]
"""What this rank writes of tensors in parts, by file and name."""
Entries = dict[str, FileEntry]
Phases = Generator[Callable[[], Any], list[Any], Path]
"""Yields what this rank is to do, and is sent what came of it on all ranks, on the main one; returns the folder."""


class _GivenUp(Exception):
    """Ends a save of which nothing is wanted any more."""


class Save:
    """A save whose phases run in a thread.

    Args:
        snapshot: What is saved.
        phases: What is to be done.
        ranks: The ranks that do it.
        thread: Where this rank does it.
    """

    def __init__(self, snapshot: Snapshot, phases: Phases, ranks: Ranks, thread: ThreadPoolExecutor) -> None:
        self.snapshot: Snapshot = snapshot
        self._phases, self._ranks, self._thread = phases, ranks, thread
        self._work: Future[Any] = thread.submit(next(phases))

    def is_ready(self) -> bool:
        """Return whether all ranks are done with the present phase; all of them call it."""
        (done,) = self._ranks.sum("a checkpoint in the background", float(self._work.done()))
        return done == self._ranks.world_size

    def advance(self) -> Path | None:
        """Wait for the end of the present phase and begin the next; return the folder after the last.

        Raises:
            CheckpointError: If the checkpoint could not be written; on all ranks.
        """
        following = _agreed(self._ranks, self._phases, self._work.result)
        if isinstance(following, Path):
            return following
        self._work = self._thread.submit(following)
        return None

    def give_up(self) -> BaseException | None:
        """Wait until this rank writes no more, and return the error that it met."""
        error = self._work.exception()
        with contextlib.suppress(_GivenUp):
            self._phases.throw(_GivenUp())  # which removes what was written so far
        return error


def _agreed(ranks: Ranks, phases: Phases, work: Callable[[], Any]) -> Callable[[], Any] | Path:
    """Finish a phase on all ranks, and return the next one; after the last the folder."""
    try:
        results = ranks.gather_results("the writing of a checkpoint", work)
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
        run: The trainer.
        write_beside: Writes further files to a checkpoint's folder, on the main rank; the manifest includes them.
    """

    def __init__(self, run: CheckpointedTrainer, write_beside: Callable[[Path], None]) -> None:
        self._run = run
        self._write_beside = write_beside
        self._thread: ThreadPoolExecutor | None = None
        self._sees_folder: bool | None = None
        """Whether every rank sees the folder of the run; None until the first save in parts."""
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        """The copies last written in the background, by file, whose memory the next ones reuse."""

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Have `begin` write in a thread inside."""
        with ThreadPoolExecutor(1, thread_name_prefix="omnitrain-save") as self._thread:
            try:
                yield
            finally:
                self._thread, self._kept = None, {}

    @property
    def is_in_background(self) -> bool:
        """Whether saves are written in a thread now."""
        return self._thread is not None

    def write(self, store: Store, snapshot: Snapshot) -> Path:
        """Write a checkpoint, and return its folder.

        Raises:
            CheckpointError: If it could not be written; on all ranks.
        """
        phases = self._phases(store, snapshot, stages=False) if _in_parts(snapshot) else None
        if phases is None:
            gathered = [snapshot.files[file] for file in snapshot.by_size]
            write = functools.partial(self._write_alone, store, snapshot)
            return state_dicts.write_on_main(self._run.ranks, gathered, write)
        following: Callable[[], Any] | Path = next(phases)
        while not isinstance(following, Path):
            following = _agreed(self._run.ranks, phases, following)
        return following

    def begin(self, store: Store, snapshot: Snapshot) -> Save:
        """Copy a snapshot to host memory, and begin to write it in the background.

        Raises:
            CheckpointError: If the folder cannot be made, or not every rank sees it; on all ranks.
        """
        assert self._thread is not None
        phases = self._phases(store, snapshot, stages=True)
        if phases is None:
            raise CheckpointError(_unseen("async_save=True", store))
        return Save(snapshot, phases, self._run.ranks, self._thread)

    # --- phases

    def _phases(self, store: Store, snapshot: Snapshot, stages: bool) -> Phases | None:
        """Return what the ranks do to write a snapshot; None if the main rank has to gather what is in parts.

        Args:
            store: Where to.
            snapshot: What to write.
            stages: Whether to copy it to host memory first, as training goes on.
        """
        ranks, files, held = self._run.ranks, _in_parts(snapshot), contextlib.ExitStack()
        if files and self._sees_folder is not False and not all(can_shard(snapshot.files[file]) for file in files):
            self._sees_folder = False
        if files and self._sees_folder is False:
            return self._gathering(store)
        folder = store.root / ranks.on_main("the folder of a checkpoint", lambda: self._begin(store, snapshot, held))
        try:
            if files and self._sees_folder is None:
                (blind,) = ranks.sum("a look at the folder of a checkpoint", float(not folder.is_dir()))
                self._sees_folder = not blind
            if files and not self._sees_folder:
                _close(store, snapshot.step, held)
                return self._gathering(store)
            if stages:
                write = functools.partial(_within, store.reporting, snapshot.step, lambda: self._write_beside(folder))
                ranks.on_main("the files beside a checkpoint", write)
            blocks, rest = self._taken(snapshot, files, stages)
        except BaseException:
            _close(store, snapshot.step, held)
            raise
        wholes = 0
        if state_dicts.WEIGHTS in files and self._consolidates(snapshot):
            wholes = whole_files(snapshot.files[state_dicts.WEIGHTS])
        return self._together(store, folder, held, (blocks, rest), wholes, stages)

    def _begin(self, store: Store, snapshot: Snapshot, held: contextlib.ExitStack) -> str:
        """Make the folder of a checkpoint, locked until `held` is closed, and return its name."""
        folder = held.enter_context(store.saving(snapshot.step))
        try:
            with store.reporting(snapshot.step):
                for file in _in_parts(snapshot):
                    store.fs.mkdir(folder / part_of(file))
        except BaseException:
            _close(store, snapshot.step, held)
            raise
        return folder.name

    def _gathering(self, store: Store) -> None:
        """Refuse to gather parts if that was not wanted."""
        if self._run.settings.consolidate is False:
            raise CheckpointError(_unseen("consolidate=False", store))

    def _taken(self, snapshot: Snapshot, files: Sequence[str], stages: bool) -> tuple[Blocks, Snapshot]:
        """Return what this rank writes: its blocks of the files in parts, and the other files, on the main rank."""
        rank, mesh = self._run.ranks.rank, self._run.ranks.mesh
        rest = [file for file in snapshot.files if file not in files]
        if stages:
            blocks = {file: staged(snapshot.files[file], rank, self._kept.setdefault(file, {}), mesh) for file in files}
            return blocks, snapshot.on_host(self._kept, rest if rank == 0 else [])
        parts = {file: snapshot.files[file].items() for file in files}
        return {file: {name: own_blocks(one, rank, mesh) for name, one in held} for file, held in parts.items()}, (
            snapshot.only(rest)
        )

    def _together(
        self,
        store: Store,
        folder: Path,
        held: contextlib.ExitStack,
        taken: tuple[Blocks, Snapshot],
        wholes: int,
        has_beside: bool,
    ) -> Phases:
        """Have every rank write its part, and its share of the files of whole weights, of which there are `wholes`."""
        ranks, (blocks, rest), mine = self._run.ranks, taken, Entries()

        def safely(work: Callable[[], Any]) -> Callable[[], Any]:
            return functools.partial(_within, store.reporting, rest.step, work)

        with held:
            entries = Entries()
            if blocks:
                for found in (yield safely(lambda: self._write_parts(store, folder, blocks, mine))):
                    entries |= found
            if wholes:
                parts = [name for name in entries if name.startswith(f"{part_of(state_dicts.WEIGHTS)}/")]
                parts = ranks.on_main("the parts of a checkpoint", lambda: parts)
                share = self._write_whole if ranks.rank < wholes else _nothing  # which opens the parts of all ranks
                for found in (yield safely(lambda: share(store, folder, parts))):
                    entries |= found
                yield safely(lambda: [store.fs.unlink(folder / name) for name in mine if name in parts])
                entries = {name: entry for name, entry in entries.items() if name not in parts}
            yield lambda: self._commit(store, rest, folder, entries, has_beside) if ranks.is_main else None
        return store.path(rest.step)

    # --- what a rank does in a phase

    def _write_parts(self, store: Store, folder: Path, blocks: Blocks, mine: Entries) -> Entries:
        """Write this rank's parts of all files, and return their entries for the manifest, which `mine` gets too."""
        for file, own in blocks.items():
            part = part_of(file)
            written = write_shards(own, folder / part, self._run.ranks.rank, store.fs)
            mine |= {f"{part}/{name}": entry for name, entry in written.items()}
        return mine

    def _write_whole(self, store: Store, folder: Path, parts: Sequence[str]) -> Entries:
        """Write this rank's share of the files of whole weights, from the parts that all ranks have written."""
        ranks, source = self._run.ranks, TensorFile([folder / name for name in parts])
        return write_whole(source, folder, ranks.rank, ranks.world_size, store.fs)

    def _commit(self, store: Store, snapshot: Snapshot, folder: Path, written: Entries, has_beside: bool) -> Path:
        """Write what the main rank alone has, and make the folder a checkpoint."""
        weights = files_of(folder, {**written, **dict.fromkeys(snapshot.files)}, part_of(state_dicts.WEIGHTS))
        with ThreadPoolExecutor(2, thread_name_prefix="omnitrain-hash") as pool:
            with store.reporting(snapshot.step):
                emptied = folder / part_of(state_dicts.WEIGHTS)
                if emptied.is_dir() and not any(emptied.iterdir()):  # its parts are whole files by now
                    store.fs.rmdir(emptied)
                digests = self._write_files(store, snapshot, folder, pool, tensor_files.gather_to_host, weights)
                if not has_beside:
                    self._write_beside(folder)
            return store.commit(
                snapshot.step, snapshot.payload, score=snapshot.score, best=snapshot.best, digests=digests,
                written=written,
            )  # fmt: skip

    def _write_alone(self, store: Store, snapshot: Snapshot, gather: state_dicts.Gather) -> Path:
        """Write the whole checkpoint from this rank."""
        digests: dict[str, Future[str]] = {}

        def write(folder: Path) -> None:
            digests.update(self._write_files(store, snapshot, folder, pool, gather, [folder / state_dicts.WEIGHTS]))
            self._write_beside(folder)

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
        gather: state_dicts.Gather,
        weights: Sequence[Path],
    ) -> dict[str, Future[str]]:
        """Write a snapshot's files and those of the model beside them, and return the sha256 of its own.

        Args:
            store: Where to.
            snapshot: What to write.
            folder: The folder of the checkpoint.
            pool: Where to hash.
            gather: Gathers a tensor.
            weights: The files that have the weights of the model once the snapshot's are written.
        """
        digests: dict[str, Future[str]] = {}
        # hashing takes longer than writing, so it starts with the largest file, before that is written
        for file in snapshot.by_size:
            tensors, path = snapshot.files[file], folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if any(map(tensor_files.is_sharded, tensors.values())):
                hasher, digests[file] = hashlib.sha256(), Future()
                state_dicts.save_tensors(tensors, path, hasher, gather)
                digests[file].set_result(hasher.hexdigest())
                continue
            ready = tensor_files.host_tensors(tensors)
            with contextlib.suppress(RuntimeError):  # at interpreter exit: the file is read back and hashed
                digests[file] = pool.submit(tensor_files.digest, ready)
            state_dicts.save_tensors(ready, path)
        text, digest = snapshot.rows
        store.fs.write(folder / HISTORY, text)
        digests[HISTORY] = Future()
        digests[HISTORY].set_result(digest)
        write_model_files(self._run.backend.model, folder, not snapshot.payload["frozen"], weights)
        return digests

    def _consolidates(self, snapshot: Snapshot) -> bool:
        """Return whether the weights are put together, in files that any program opens."""
        wanted = self._run.settings.consolidate
        if wanted is not None:
            return wanted
        return (
            sum(one.numel() * one.element_size() for one in snapshot.files[state_dicts.WEIGHTS].values())
            <= LARGEST_FILE
        )


def _in_parts(snapshot: Snapshot) -> list[str]:
    """Return the files with tensors of which each rank has a part."""
    return [file for file in snapshot.by_size if any(map(tensor_files.is_sharded, snapshot.files[file].values()))]


def _nothing(store: Store, folder: Path, parts: Sequence[str]) -> Entries:
    return {}


def _close(store: Store, step: int, held: contextlib.ExitStack) -> None:
    """Undo the beginning of a save, on the main rank."""
    store.abandon(step)
    held.close()


def _within(reporting: Callable[[int], Any], step: int, work: Callable[[], Any]) -> Any:
    with reporting(step):
        return work()


def _unseen(argument: str, store: Store) -> str:
    return (
        f"With `{argument}` every rank writes its own part of the weights, and not all of them see "
        f"{str(store.root)!r}, the folder of the main rank, or a tensor cannot be written in parts. Put `save_dir` on "
        "a file system that all machines share, or leave the argument out."
    )
