"""What of a trainer is kept in a checkpoint, and when and how it is written.

Folders and manifests are in `checkpoint/store.py`, tensors in `checkpoint/state.py`; how it all comes back is in
`resumable.py`. A backend overrides `_model_tensors` and `_optimizer_state`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint import state
from omnitrain.checkpoint.disk import check_free_space
from omnitrain.checkpoint.store import Store
from omnitrain.errors import CheckpointError, ConfigError
from omnitrain.data.loaders import MapLoader, StreamLoader
from omnitrain.reproducibility import GENERATORS
from omnitrain.trainers.loop import TrainingLoop
from omnitrain.trainers.snapshot import Snapshot, versions

__all__ = ["OPTIMIZER", "Saving", "rng_file"]

logger = logging.getLogger("omnitrain")

OPTIMIZER = "optimizer/state.safetensors"


def rng_file(rank: int) -> str:
    """Return the name of the file with a process's random number generators."""
    return f"rng/rank-{rank:05d}.safetensors"


class Saving(TrainingLoop):
    """A training loop whose whole state can be written at any step boundary."""

    store: Store | None = None
    save_required: bool = False
    _background: ThreadPoolExecutor | None = None
    _host_copies: dict[str, torch.Tensor]
    """What was written in the background the last time, whose memory the next copy takes."""
    _in_flight: tuple[Snapshot, Future[Path] | None] | None = None
    _owes_save: bool = False
    """Whether a checkpoint was due after the evaluation that a signal has cut short."""
    _credited_step: int = -1
    """The best evaluation that has a checkpoint; later checkpoints without a new evaluation are not the best."""
    _scored: tuple[int, int] = (-1, -1)
    """The latest evaluation whose score a checkpoint has, and the step of that checkpoint."""

    # --- saving

    def save_model(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the weights as safetensors into the folder `path`, and the model's config if it has one."""
        with self.ranks.calling("save_model()"):
            return state.save_weights(self.model, Path(path), overwrite, self._model_tensors(), self.ranks)

    def request_save(self) -> None:
        """Ask for a checkpoint at the next step boundary."""
        if self.store is None:
            raise ConfigError("A checkpoint was requested, but there is no place for it. Pass `save_dir`.")
        self.control.save = True

    def save_checkpoint(self) -> Path:
        """Save a full checkpoint of the present state, and return its folder.

        Raises:
            ConfigError: If there is no `save_dir`.
            CheckpointError: If it cannot be written; earlier ones are untouched.
        """
        if self.store is None:
            raise ConfigError("There is no place for a checkpoint. Pass `save_dir` to the constructor.")
        with self.ranks.calling("save_checkpoint()"):
            self._await_background()
            snapshot = self._snapshot()
            return self._committed(snapshot, self._write(self.store, snapshot))

    def _save(self, history: dict[str, Any] | None = None) -> None:
        """Save during a run; a disk that fails costs this checkpoint, not the run, unless `save_required`.

        Args:
            history: The lifecycle's state to keep instead of the present one.
        """
        if self.store is None:
            return
        self._await_background()
        self._owes_save = self._owes_evaluation and (self._owes_save or history is None)
        snapshot = self._snapshot(history)
        self.lifecycle.saved_at = self.progress.position
        if self._background is not None:
            self._in_flight = snapshot, None
            if self.ranks.is_main:
                copy = snapshot.on_host(self._host_copies)
                self._in_flight = copy, self._background.submit(self._write_here, self.store, copy, state.whole)
            return
        try:
            path = self._write(self.store, snapshot)
        except CheckpointError as error:
            self._report_failed_save(error)
        else:
            self._committed(snapshot, path)

    def _await_background(self, wait: bool = True) -> None:
        """Take note of a checkpoint that the background has finished; with `wait`, of one that is still written."""
        if self._in_flight is None:
            return
        snapshot, future = self._in_flight
        if not wait and not self.ranks.on_main("a checkpoint in the background", lambda: future and future.done()):
            return
        self._in_flight = None
        try:
            path = self.ranks.on_main("the end of a checkpoint in the background", lambda: self._written(future))
        except CheckpointError as error:
            self._report_failed_save(error)
        else:
            self._committed(snapshot, path)

    def _write_beside(self, folder: Path) -> None:
        """Write further files into a checkpoint's folder, on the main process; they get into the manifest."""

    @staticmethod
    def _written(future: Future[Path] | None) -> Path:
        assert future is not None  # on the main process
        return future.result()

    def _committed(self, snapshot: Snapshot, path: Path) -> Path:
        if snapshot.best:
            self.lifecycle.metrics["best_checkpoint"] = path.name
            self._credited_step = snapshot.evaluated_step
        if snapshot.score is not None:
            self._scored = snapshot.evaluated_step, snapshot.step
        self.lifecycle.saved(path)
        return path

    def _report_failed_save(self, error: CheckpointError) -> None:
        self.lifecycle.saved_at = None
        if self.save_required or not isinstance(error.__cause__, OSError):
            raise error
        logger.error("%s Training goes on without it (save_required=True would end it).", error)

    def _write(self, store: Store, snapshot: Snapshot) -> Path:
        """Write a checkpoint, to which all processes give their parts; only the main one touches the disk."""
        files = [snapshot.files[file] for file in snapshot.by_size]
        return state.written_by_main(self.ranks, files, lambda gather: self._write_here(store, snapshot, gather))

    def _write_here(self, store: Store, snapshot: Snapshot, gather: state.Gather) -> Path:
        digests: dict[str, Future[str]] = {}

        def write(folder: Path) -> None:
            # hashing takes longer than writing, so it begins with the largest, and before that is written
            for file in snapshot.by_size:
                tensors, path = snapshot.files[file], folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                if any(map(state.is_in_parts, tensors.values())):
                    hasher, digests[file] = hashlib.sha256(), Future()
                    state.save_tensors(tensors, path, hasher, gather)
                    digests[file].set_result(hasher.hexdigest())
                    continue
                ready = state.host_tensors(tensors)
                with contextlib.suppress(RuntimeError):  # the interpreter is closing: the file is read back
                    digests[file] = pool.submit(state.digest, ready)
                state.save_tensors(ready, path)
            state.write_config(self.model, folder)
            self._write_beside(folder)

        with ThreadPoolExecutor(2, thread_name_prefix="omnitrain-hash") as pool:
            return store.save(
                snapshot.step, write, snapshot.payload, score=snapshot.score, best=snapshot.best, digests=digests
            )

    def _snapshot(self, history: dict[str, Any] | None = None) -> Snapshot:
        """Return the present state, as references to the live tensors."""
        progress, evaluated, credited = self.progress, self.lifecycle.evaluated_step, self._credited_step
        name = f"checkpoint-{progress.step:06d}"
        best = self._has_uncredited_best or (
            # an epoch's last step is saved again after the epoch's end
            credited == evaluated >= 0 and self.lifecycle.metrics.get("best_checkpoint") == name
        )
        # one checkpoint per evaluation, or the few best would be the same one under several names
        scored = evaluated, progress.step
        score = None if evaluated == self._scored[0] and scored != self._scored else self.lifecycle.objective.latest
        is_final = history is None and not self._owes_evaluation  # else a resumed run may save this step again
        history = history or self.lifecycle.state_dict()
        if best and is_final:
            history["metrics"]["best_checkpoint"], credited = name, evaluated
        loop = {
            "loss": self.ranks.gather("the losses for a checkpoint", self._loss.state_dict()),
            "logged": list(self._logged),
            "grad_norm": self._read_grad_norm().get("grad_norm"),
        }
        files, payload = self._capture()
        payload |= {
            **history,
            "objective": state.to_json(history["objective"], "objective"),
            "callbacks": state.to_json(history["callbacks"], "callbacks"),
            "loop": state.to_json(loop, "loop"),
            "credited_step": credited,
            "scored": list(scored if score is not None and is_final else self._scored),
            "owes": {"evaluation": self._owes_evaluation or self.control.evaluate, "save": self._owes_save},
            # where it lies is no setting of the run: the folder can be moved
            "settings": {key: value for key, value in self.resolved_config().items() if key != "save_dir"},
            "world_size": self.world_size,
            "versions": versions(),
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return Snapshot(files, payload, progress.step, score, best, evaluated)

    @property
    def _has_uncredited_best(self) -> bool:
        """Whether the latest evaluation is the best so far, and no checkpoint was saved since."""
        return self.lifecycle.objective.best_step == self.lifecycle.evaluated_step != self._credited_step

    def _capture(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Return the tensors by file and name, and the rest as JSON types. What the lifecycle knows is added to it."""
        only_model = self._given["save_only_model"]
        weights = {state.WEIGHTS: self._model_tensors()}
        payload = {"only_model": only_model, "extra_state": state.extra_state(self.model)}
        if only_model:
            return weights, payload
        tensors, rest = self._optimizer_state()
        generators = self.ranks.gather("the random numbers for a checkpoint", state.rng_tensors(self.device))
        scaler = getattr(self, "scaler", None)
        payload |= {
            "optimizer": rest,
            "rng": [rest for _, rest in generators],
            "scheduler": None
            if self.lr_scheduler is None
            else state.to_json(self.lr_scheduler.state_dict(), "scheduler"),
            "scaler": state.to_json(scaler.state_dict(), "scaler") if scaler is not None else {},
            "algorithms": state.to_json([algorithm.state_dict() for algorithm in self.algorithms], "algorithms"),
            "drawn": self._drawn(),
            "stream": self._stream_mark(),
        }
        files = {rng_file(rank): tensors for rank, (tensors, _) in enumerate(generators)}
        return {**weights, OPTIMIZER: tensors, **files}, payload

    def _model_tensors(self) -> dict[str, Any]:
        """Return the weights by bare name; those in parts as they are."""
        return state.model_tensors(self.model)

    def _optimizer_state(self) -> tuple[dict[str, Any], Any]:
        """Return the optimizer's tensors by parameter and entry, and the rest as JSON types."""
        return state.optimizer_state(self.optimizer, self.model)

    def _drawn(self) -> list[int]:
        """Return which generators the training data was seen to draw from, so that a resumed run need not find out."""
        loader = self.train_loader
        own = [GENERATORS.index(g) for g in loader.fetch.drawn] if isinstance(loader, MapLoader) else []
        return sorted(set().union(*self.ranks.gather("what the data draws", own)))

    def _stream_mark(self) -> Any:
        """Return where a stream is that can be put back there, as JSON types; None for all other data."""
        if not isinstance(self.train_loader, StreamLoader):
            return None
        mark = self.train_loader.mark_at(self.progress.epoch, self.progress.samples_in_epoch)
        try:
            return None if mark is None else state.to_json(mark._asdict(), "the state of the training stream")
        except CheckpointError as error:
            logger.warning("A resumed run will read the stream again from the beginning of the epoch: %s", error)
            return None

    def _check_disk(self) -> None:
        """Find out before the first step what could not be saved, and whether there is room for the rest."""
        if self.store is None:
            return
        files, _ = self._capture()
        if not self.ranks.is_main:
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in files[state.WEIGHTS].values()]
        needed = (1 if self._given["save_only_model"] else 3) * sum(sizes)  # with the two moments of Adam
        warning = check_free_space(self.store.root, self.store.newest_size() or needed)
        if warning:
            logger.warning("%s", warning)

    @contextlib.contextmanager
    def _writing_in_background(self) -> Iterator[None]:
        """Have a thread that writes checkpoints inside, if that was asked for; on the way out it has finished."""
        if self.store is None or not self._given["async_save"]:
            yield
            return
        self._host_copies = {}
        with ThreadPoolExecutor(1, thread_name_prefix="omnitrain-save") as self._background:
            try:
                yield
            finally:
                self._background, self._host_copies = None, {}
                (_, future), self._in_flight = self._in_flight or (None, None), None  # after an error: else awaited
                if future is not None and (error := future.exception()) is not None:
                    logger.error("%s", error)
