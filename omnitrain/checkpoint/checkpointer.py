"""Saving and loading of checkpoints during a run, with failing disks.

`contents.py` has the contents of a checkpoint, `writing.py` writes it, `store.py` has folders and manifests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.contents import (
    Checkpoint,
    CheckpointedTrainer,
    Contents,
    Snapshot,
    Use,
    group_options,
    resets_best,
)
from omnitrain.checkpoint.eval_weights import EvalWeights
from omnitrain.checkpoint.fingerprints import IDENTITIES
from omnitrain.checkpoint.manifest import find_with_shared_hashing
from omnitrain.checkpoint.model_files import FROZEN
from omnitrain.checkpoint.setting_changes import DECIDING, changed_options, changed_settings
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_files import total_bytes
from omnitrain.checkpoint.writing import BackgroundSave, Writer
from omnitrain.core.errors import CheckpointError, ConfigError, Tolerance, is_disk_error
from omnitrain.core.events import Event
from omnitrain.core.files import check_free_space, check_writable
from omnitrain.core.history import HistoryEncoder
from omnitrain.core.paths import is_address, local_path
from omnitrain.core.progress import Progress
from omnitrain.distributed.ranks import Ranks
from omnitrain.optim.build import optimizers_among

logger: logging.Logger = logging.getLogger("omnitrain")

_UPLOADS = "the end of the uploads"


@contextlib.contextmanager
def locked(store: Store | None, ranks: Ranks, exit_stack: contextlib.ExitStack) -> Iterator[None]:
    """Lock `save_dir`, if there is one, against other runs, and wait at the end until everything is uploaded.

    The main rank waits and releases the lock by `exit_stack`: outside of the call, so that all ranks know of an error
    before the uploads end.

    Raises:
        CheckpointError: If another run uses it; raised on all ranks.
        ConfigError: If nothing can be written there.
    """
    if store is None:
        yield
        return

    def acquire() -> None:
        check_writable(store.root)
        store.acquire()

    def release() -> None:
        try:
            store.finish(ranks.count_progress)  # after an error of the run, which it does not replace
        except CheckpointError as error:
            logger.error("%s", error)
        finally:
            store.lock.release()

    ranks.on_main("the lock of `save_dir`", acquire)
    if ranks.is_main:
        exit_stack.callback(release)
    yield
    ranks.on_main(_UPLOADS, functools.partial(store.finish, ranks.count_progress))


@dataclass(slots=True)
class HostWeights:
    """Weights on the host: this rank's shard of each, the extra state of modules, and their position in the run."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    progress: Progress | None = None

    def update(self, backend: Backend, tensors: Mapping[str, Any], progress: Progress) -> None:
        """Copy weights to the host, into the memory of an earlier copy."""
        backend.snapshot_weights(self.tensors, tensors)
        self.extra, self.progress = state_dicts.extra_state(backend.model), replace(progress)


@dataclass(slots=True)
class FinishedRun:
    """The end of a run, which a longer one can continue in this process.

    Attributes:
        parts: Model, optimizer and schedule; if one is replaced, the run cannot be continued.
        groups: The options of the optimizer's groups.
        folder: The checkpoint of the last step; None without a `save_dir`.
        live_state: The state from `Contents.capture_live_state`; None with a `save_dir`.
        weights: The weights in training, if the model has others.
    """

    parts: tuple[Any, ...]
    groups: list[dict[str, Any]]
    folder: Path | None = None
    live_state: dict[str, Any] | None = None
    weights: HostWeights = field(default_factory=HostWeights)


class Checkpointer:
    """Saves the state of a run at any step boundary, and restores it.

    Args:
        trainer: The trainer.
        lifecycle: The run's `Lifecycle`.
        contents: Captures and restores the state of the run.
        eval_weights: The weights for evaluations.
        store: The checkpoints of the run; None saves nothing.
        write_extra_files: Writes further files to a checkpoint's folder on the main rank; the manifest includes them.

    Attributes:
        contents: The state of the run.
        eval_weights: The weights for evaluations.
        weights_from: The position in the run of the present weights, if they are not those of the last step.
        resumed: The checkpoint from which the run resumed; None for a fresh start.
        finished_run: The finished run that `train(more=...)` continues, or the reason why it cannot.
        continued_state: The state of the run that this one continues in this process without a `save_dir`.
    """

    def __init__(
        self,
        trainer: CheckpointedTrainer,
        lifecycle: Any,
        contents: Contents,
        eval_weights: EvalWeights,
        store: Store | None,
        write_extra_files: Callable[[Path], None],
    ) -> None:
        self.store = store
        self.weights_from: Progress | None = None
        self.resumed: Checkpoint | None = None
        self.finished_run: FinishedRun | str = "it has not trained yet"
        self.continued_state: Mapping[str, Any] | None = None
        self._trainer = trainer
        self._lifecycle = lifecycle
        self.contents = contents
        self.eval_weights = eval_weights
        self._writer = Writer(trainer, write_extra_files)
        # The step of the best evaluation that has a checkpoint.
        self._best_saved_step = -1
        # (evaluation step, checkpoint step) of the latest evaluation whose score is in a checkpoint.
        self._scored_steps = (-1, -1)
        # The step of the latest checkpoint saved for another reason than being the best.
        self._requested_step = -1
        # Whether the disk failed at the latest checkpoint.
        self._has_failed = False
        # The weights of the best evaluation; used only without a `save_dir`.
        self._best = HostWeights()
        # The position of the closing evaluation of a run, if it is the best; a longer run does not have it.
        self._closing_progress: Progress | None = None
        self._history_encoder = HistoryEncoder()
        self.in_flight: BackgroundSave | None = None
        """The checkpoint that is being written in the background."""

    # --- saving

    def end_record(self) -> None:
        """Complete the record of this start at the end of a run, on the main rank."""
        if self.contents.record is not None:
            self.contents.record.complete()
            self.contents.record.close()

    def save(self, history: dict[str, Any] | None = None, for_best: bool = False) -> None:
        """Save during a run; a failing disk costs this checkpoint, not the run, unless `save_required`.

        A lifecycle's state `history` replaces the present one; `for_best` says that a new best is the only reason.
        """
        if self.store is None:
            return
        with self._trainer.ranks.in_phase("save"):
            self.await_background()
            lifecycle = self._lifecycle
            lifecycle.emit(Event.SAVE_START)
            # a resumed run evaluates first, and then saves again with the score
            lifecycle.pending_save = lifecycle.pending_evaluation and (lifecycle.pending_save or history is None)
            snapshot = self._snapshot(history)
            # one that replaces a requested checkpoint of this step is not only for the best
            snapshot.payload["for_best"] = for_best and snapshot.step != self._requested_step
            if not for_best:
                self._requested_step = snapshot.step
            lifecycle.saved_at = lifecycle.progress.position
            try:
                # the error of a background save appears in `await_background`, at a later step
                if self._trainer.settings.async_save:
                    self.in_flight = self._writer.begin(self.store, snapshot)
                    return
                path = self._writer.write(self.store, snapshot)
            except CheckpointError as error:
                self._report_failed_save(error)
            else:
                self._commit(snapshot, path)

    def save_now(self) -> Path:
        """Save the current state, and return the folder of the checkpoint."""
        if self.store is None:
            raise ConfigError("A checkpoint needs `save_dir`, which is not given. Pass it to the constructor.")
        self.await_background()
        self._lifecycle.emit(Event.SAVE_START)
        snapshot = self._snapshot()
        snapshot.payload["for_best"] = False
        path = self._commit(snapshot, self._writer.write(self.store, snapshot))
        if not self._lifecycle.is_running:
            ranks = self._trainer.ranks
            ranks.on_main(_UPLOADS, functools.partial(self.store.finish, ranks.count_progress))
        return path

    @property
    def has_unsaved_best(self) -> bool:
        """Whether the latest evaluation is the best so far, and no checkpoint was saved since."""
        return self._lifecycle.objective.best_step == self._lifecycle.evaluated_step != self._best_saved_step

    @property
    def requires_best_save(self) -> bool:
        """Whether this step has a new best that must be saved and is not saved yet."""
        if self.store is None or not self._trainer.settings.keep_best or not self.has_unsaved_best:
            return False
        evaluated = self._lifecycle.evaluated_step
        snapshot = self.in_flight.snapshot if self.in_flight is not None else None
        # one that is still being written counts, or each step until its end would save again
        is_in_flight = snapshot is not None and snapshot.best and snapshot.evaluated_step == evaluated
        return evaluated == self._lifecycle.progress.step and not is_in_flight

    def check_save_dir(self) -> None:
        """Reject a fresh start in a `save_dir` with checkpoints of another run, unless `overwrite` is set."""
        store, save_dir = self.store, str(self._trainer.settings.save_dir)
        if store is None:
            return

        def list_checkpoints() -> list[Path]:
            try:
                return store.checkpoints()
            except OSError as error:
                raise CheckpointError(
                    f"`save_dir={save_dir!r}` cannot be read, so it cannot be checked for checkpoints of another run: "
                    f"{error}. Fix that, or choose another folder."
                ) from error

        checkpoints = self._trainer.ranks.on_main("the check of `save_dir`", list_checkpoints)
        if checkpoints and not self._trainer.settings.overwrite:
            raise ConfigError(
                f"`save_dir={save_dir!r}` already holds checkpoints, the newest being {checkpoints[-1].name!r}. Pass "
                "resume_from='auto' to train() to continue that run, overwrite=True to replace it, or another "
                "`save_dir`."
            )

    def check_optimizers(self, attributes: Mapping[str, Any], is_resuming: bool) -> None:
        """Warn about optimizers among a trainer's attributes that no checkpoint includes; in a resume, reject them."""
        backend = self._trainer.backend
        # by identity: `__eq__` of an optimizer may be anything
        registered = [id(backend.optimizer), *map(id, backend.optimizers.values())]
        unregistered = [name for name, opt in optimizers_among(attributes).items() if id(opt) not in registered]
        if not unregistered or (self.store is None and not is_resuming):
            return
        names = ", ".join(unregistered)
        remedy = "Put them into `self.optimizers`, a dict by name, which checkpoints include."
        if is_resuming:
            raise CheckpointError(
                f"The trainer has optimizers whose state is in no checkpoint: {names}. A resumed run would start them "
                f"without it. {remedy}"
            )
        logger.warning("The trainer has optimizers whose state is in no checkpoint: %s. %s", names, remedy)

    def record_start(self) -> None:
        """Compute the fingerprints of data and code for the checkpoints of the run, and record this start."""
        if self.store is None:
            return
        replaces_all = self._trainer.settings.overwrite and not self.is_resuming
        resumed = None if self.resumed is None else self.resumed.folder.name
        self.contents.record_start(resumed, self.store.root, replaces_all)

    def check_disk(self) -> None:
        """Check before the first step that everything can be saved, and that the disk has enough space."""
        if self.store is None:
            return
        files, _ = self.contents.capture_tensors()
        self.contents.check_states()
        if not self._trainer.ranks.is_main:
            return
        copies = 1 if self._trainer.settings.save_only_model is True else 3  # with Adam's two moments
        needed = copies * total_bytes(files[state_dicts.WEIGHTS])
        with Tolerance("The free space of the disk", "It is not known whether checkpoints fit."):
            warning = check_free_space(self.store.root, self.store.newest_size() or needed)
            if warning:
                logger.warning("%s", warning)

    def tensor_bytes(self, only_model: bool) -> tuple[int, int]:
        """Return the bytes of the tensors that a checkpoint, or its weights, would have now, and how many there are."""
        files, _ = self.contents.capture_tensors()
        contents = [files[state_dicts.WEIGHTS]] if only_model else files.values()
        tensors = [tensor for by_name in contents for tensor in by_name.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors), len(tensors)

    def _snapshot(self, history: dict[str, Any] | None = None) -> Snapshot:
        """Return the current state, as references to the live tensors."""
        lifecycle = self._lifecycle
        step, evaluated, best_saved = lifecycle.progress.step, lifecycle.evaluated_step, self._best_saved_step
        best = self.has_unsaved_best or (
            # the last step of an epoch is saved again after the epoch ends
            best_saved == evaluated >= 0 and lifecycle.metrics.get("best_checkpoint") == f"checkpoint-{step}"
        )
        # one checkpoint per evaluation, or the few best would be the same weights under several names
        scored = evaluated, step
        has_checkpoint = evaluated == self._scored_steps[0] and scored != self._scored_steps
        score = None if has_checkpoint else lifecycle.objective.latest
        is_final = history is None and not lifecycle.pending_evaluation  # otherwise a resume may save this step again
        state: dict[str, Any] = history or lifecycle.state_dict()
        if best and is_final:
            state["metrics"]["best_checkpoint"], best_saved = f"checkpoint-{step}", evaluated
        files, payload = self.contents.capture(state)
        payload |= {
            "credited_step": best_saved,
            "scored": list(scored if score is not None and is_final else self._scored_steps),
        }
        rows = b""
        if self._trainer.ranks.is_main:
            rows = self._history_encoder.encode(state["metrics"]["rows"], lifecycle.metrics)
        return Snapshot(files, payload, step, score, best, evaluated, rows)

    def _commit(self, snapshot: Snapshot, path: Path) -> Path:
        if snapshot.best:
            self._lifecycle.metrics["best_checkpoint"] = path.name
            self._best_saved_step = snapshot.evaluated_step
        if self._has_failed:
            logger.warning("%s is complete: saving works again.", path.name)
        self._has_failed = False
        if snapshot.score is not None:
            self._scored_steps = snapshot.evaluated_step, snapshot.step
        self._lifecycle.saved(path)
        return path

    def _report_failed_save(self, error: CheckpointError) -> None:
        self._lifecycle.saved_at = None
        if self._trainer.settings.save_required or not is_disk_error(error.__cause__):
            raise error
        self._has_failed = True
        logger.error("%s Training continues without it (save_required=True would end it).", error)

    # --- saving in the background

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """Write checkpoints in a thread, if `async_save` is set; wait for it at the end."""
        if self.store is None or not self._trainer.settings.async_save:
            yield
            return
        with self._writer.in_background():
            try:
                yield
            finally:
                save, self.in_flight = self.in_flight, None  # not None only after an error
                if save is not None and (error := save.cancel()) is not None:
                    logger.error("%s", error)

    def await_background(self, wait: bool = True) -> None:
        """Finish a checkpoint written in the background; without `wait`, advance by a phase if all ranks are ready."""
        while self.in_flight is not None:
            save = self.in_flight
            if not wait and not save.is_ready():
                return
            try:
                path = save.advance()
            except CheckpointError as error:
                self.in_flight = None
                self._report_failed_save(error)
                return
            if path is not None:
                self.in_flight = None
                self._commit(save.snapshot, path)
            elif not wait:
                return

    # --- loading

    def find(self, which: str | Path, use: Use = "resume") -> Checkpoint | None:
        """Return a verified checkpoint: a path, "last", "best", or "auto" if there is any.

        Raises:
            ConfigError: If the search needs a `save_dir`, and none was given.
            CheckpointError: If it is missing or damaged, or holds only weights and more are used.
        """
        if self.store is None and str(which) in ("auto", "last", "best"):
            raise ConfigError(
                f"`resume_from={str(which)!r}` searches `save_dir`, which is not given. Pass it, or a path."
            )
        if which not in ("auto", "last", "best"):
            if which is True:
                raise ConfigError("`resume_from=True`: pass 'auto' (a fresh start if no checkpoint exists) or 'last'.")
            which = which if is_address(which) else local_path(which, "resume_from")
        store, ranks = self.store or Store(Path(which).parent), self._trainer.ranks
        resolve = functools.partial(store.resolve, which, functools.partial(self.contents.open, use=use))
        with ranks.in_phase("load"):
            _, checkpoint = find_with_shared_hashing(ranks, resolve) or (None, None)
        if use != "weights" and checkpoint is not None and checkpoint.content["only_model"]:
            raise CheckpointError(
                f"{checkpoint.where} has only weights, by `save_only_model`: no run can continue from it. "
                f"Load its {state_dicts.WEIGHTS!r} into the model (safetensors.torch.load_model) "
                "and start in another `save_dir`, or pass a full checkpoint."
            )
        return checkpoint

    def resume(self, checkpoint: Checkpoint, allow_change: Collection[str]) -> None:
        """Restore a checkpoint for a resumed run; its random numbers are restored separately.

        Settings, data and functions whose names are in `allow_change` may differ.

        Raises:
            CheckpointError: If a setting, the data or a function differs, or it is from another model or optimizer.
        """
        content, settings = checkpoint.content, self._trainer.resolved_config()
        changed = changed_settings(content["settings"], settings)
        rejected = {name: pair for name, pair in changed.items() if name not in allow_change}
        accepted = {*allow_change, *changed}
        if "samples_per_epoch" in changed:
            accepted.add("train_dataset")  # which that shows
        differences = [
            difference for difference in self.contents.differences(content) if difference.name not in accepted
        ]
        if rejected or differences:
            descriptions = [f"{name}: {old!r} -> {new!r}" for name, (old, new) in rejected.items()]
            descriptions += [f"{difference.name}: {difference.text}" for difference in differences]
            changes = "; ".join(descriptions)
            kinds = sorted({difference.kind for difference in differences}, reverse=True)
            kinds = [*(["settings"] if rejected else []), *kinds]
            hint = ""
            if "global_batch_size" in rejected:
                hint = f"global_batch_size={rejected['global_batch_size'][0]} keeps it on any number of processes. "
            raise CheckpointError(
                f"{checkpoint.where} was saved under other {' and '.join(kinds)}, which would change the run: "
                f"{changes}. {hint}Set them back, or allow them by name: train(resume_from=..., "
                f"allow_change={ {*rejected, *(difference.name for difference in differences)}!r})."
            )
        # not a setting, but it is allowed by name as they are
        self.restore(checkpoint, {*changed, *({FROZEN} & set(allow_change))})
        self.resumed = checkpoint
        self._lifecycle.loaded(checkpoint.folder)
        if self._trainer.settings.init_from is not None:
            logger.info("The weights of the checkpoint replace those of `init_from`.")
        before, after = changed_options(content["settings"], settings, "callback_options")
        if before:
            logger.info("Options of callbacks differ from the checkpoint: %s -> %s.", before, after)
        logger.info("Resumed from %s at step %d.", checkpoint.folder.name, self._lifecycle.progress.step)

    def restore(self, checkpoint: Checkpoint, changed: Collection[str] = ()) -> None:
        """Restore a checkpoint, except for its random numbers."""
        content = checkpoint.content
        with self._trainer.ranks.in_phase("load"):
            self.contents.restore(checkpoint, changed)
        self._trainer.backend.mark_weights_loaded(content["frozen"])
        self.weights_from = None
        self._best_saved_step = -1 if resets_best(changed) else content["credited_step"]
        self._requested_step = -1 if content["for_best"] else content["step"]
        evaluated, step = content["scored"]
        self._scored_steps = evaluated, step

    def load(self, which: str | Path) -> Path:
        """Find and restore a checkpoint outside of a run, and return its folder."""
        checkpoint = self.find(which, "load")
        if checkpoint is None:
            raise CheckpointError(f"{str(which)!r} holds no checkpoint.")
        self.restore(checkpoint)
        self.finished_run = "load_checkpoint() has restored another state since"
        self._lifecycle.loaded(checkpoint.folder)
        self.contents.restore_random_numbers(checkpoint)
        return checkpoint.folder

    def restore_in_run(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint of this run, with its random numbers, while the run continues."""
        self.restore(checkpoint)
        self.contents.restore_random_numbers(checkpoint)

    @property
    def is_resuming(self) -> bool:
        """Whether the run resumes from a checkpoint, or continues a run that has ended in this process."""
        return self.resumed is not None or self.continued_state is not None

    def resume_random_numbers(self) -> None:
        """Restore the random number generators of the resumed or continued run."""
        if self.continued_state is not None:
            tensors, rest = self.continued_state["rng"]
            state_dicts.restore_rng_tensors(tensors, rest, self._trainer.device)
        elif self.resumed is not None:
            self.contents.restore_random_numbers(self.resumed)

    # --- continuing a finished run in this process

    def record_end(self) -> None:
        """Capture the state that a longer run needs, before the closing evaluation changes it."""
        trainer = self._trainer
        self.finished_run = FinishedRun((trainer.backend.model, trainer.backend.optimizer, trainer.lr_scheduler), [])
        # a caller may lower the rate before `train(more=...)`; the options tell whether
        self.finished_run.groups = group_options(trainer.backend.groups)
        if self.store is not None:
            return
        try:
            self.contents.check_live_position()
            self.finished_run.live_state = self.contents.capture_live_state()
        except Exception as error:  # not raised: the run has ended well, and may never be continued
            logger.debug("The run cannot be continued.", exc_info=True)
            self.finished_run = f"its final state could not be captured ({type(error).__name__}: {error})"

    def record_last_save(self) -> None:
        """Record the checkpoint of the last step, from which the run can continue."""
        if self.store is None or isinstance(self.finished_run, str):
            return
        lifecycle, settings = self._lifecycle, self._trainer.settings
        if settings.save_only_model is True:
            self.finished_run = "save_only_model=True keeps only weights, from which no run can continue"
        elif lifecycle.saved_at != lifecycle.progress.position:
            self.finished_run = "its last checkpoint could not be saved"
        else:
            resumed = None if self.resumed is None else self.resumed.folder  # a run resumed at its end saves nothing
            self.finished_run.folder = lifecycle.saved_path or resumed

    def _snapshot_final_weights(self) -> None:
        """Copy the weights in training to the host before others replace them, if no checkpoint has them."""
        if self.store is None and isinstance(self.finished_run, FinishedRun):
            backend = self._trainer.backend
            self.finished_run.weights.update(backend, backend.model_tensors(), self._lifecycle.progress)

    def require_finished_run(self) -> FinishedRun:
        """Return the finished run that a longer one continues; its model, optimizer and schedule must be the same."""
        finished_run, trainer = self.finished_run, self._trainer
        if isinstance(finished_run, str):
            raise ConfigError(
                f"`more` continues a run that this trainer has ended, and it cannot: {finished_run}. Call train() "
                "first, or train(resume_from=...) on a trainer with a larger `epochs`, `max_steps` or `max_duration`."
            )
        backend = trainer.backend
        present = {"model": backend.model, "optimizer": backend.optimizer, "lr_scheduler": trainer.lr_scheduler}
        for (name, part), former in zip(present.items(), finished_run.parts, strict=True):
            if part is not former:
                raise ConfigError(
                    f"`more` continues the run that has ended, and `trainer.{name}` was assigned since. Call train() "
                    "for a new run with it."
                )
        return finished_run

    def continue_run(self, finished_run: FinishedRun, previous: Checkpointer, changed: list[dict[str, Any]]) -> None:
        """Continue a run that has ended in this process, with options of the optimizer's groups changed since."""
        backend = self._trainer.backend
        if finished_run.live_state is not None:
            self.continued_state, self.resumed = finished_run.live_state, previous.resumed
            self.contents.restore_live_state(finished_run.live_state)
            self._best = previous._best
            if finished_run.weights.tensors:
                if self._best.progress is not None and not self._best.tensors:  # the model has them
                    self._best.update(backend, backend.model_tensors(), self._best.progress)
                backend.restore_snapshot(finished_run.weights.tensors, finished_run.weights.extra)
        for group, options in zip(backend.groups, changed, strict=True):
            group |= options

    @property
    def should_load_best(self) -> bool:
        """Whether the model gets the best weights at the end of the run."""
        choice = self._trainer.settings.load_best_at_end
        return self._lifecycle.evaluates and choice is not False

    def keep_best(self) -> None:
        """Copy the weights of the best evaluation to the host, if the run has no `save_dir`."""
        if self.store is not None or not self.should_load_best:
            return
        if self._lifecycle.is_closing:
            self._closing_progress = replace(self._lifecycle.progress)
        else:
            self._best.update(self._trainer.backend, self.eval_weights.model_tensors(), self._lifecycle.progress)

    def load_best(self) -> None:
        """Load the best weights into the model, from the host or from the checkpoint saved as the best."""
        lifecycle, ranks = self._lifecycle, self._trainer.ranks
        if self._closing_progress is not None:  # the model has them, except for `eval_weights`
            self._load_eval_weights()
            self.weights_from = self._closing_progress
        elif self._best.progress is not None:
            self._snapshot_final_weights()
            self._trainer.backend.restore_snapshot(self._best.tensors, self._best.extra)
            self._set_loaded()
            self.weights_from, self._best.tensors = self._best.progress, {}
        if self.weights_from is not None:
            logger.info("The model has the best weights now, those of step %d.", self.weights_from.step)
            return
        name = lifecycle.metrics.get("best_checkpoint")
        if name is None:
            self.log_final_weights("no weights of a better evaluation were kept")
            return
        if lifecycle.objective.best_step != self._best_saved_step:
            logger.warning(
                "The best evaluation, that of step %s, has no checkpoint: %r is the best of those that have one. "
                "`keep_best=1` saves each new best.", lifecycle.objective.best_step, name,
            )  # fmt: skip
        # by name first: the link `best` may stand for an evaluation that closed a shorter run;
        # the folder from which the run resumed may be another than `save_dir`
        roots = [] if self.store is None else [self.store.root]
        roots += [] if self.resumed is None else [self.resumed.folder.parent]

        def find_best() -> Path | None:
            paths = [root / name for root in roots]
            if self.store is not None and not any(map(os.path.lexists, paths)):
                self.store.download(name)
            paths += [root / "best" for root in roots]
            return next(filter(os.path.lexists, paths), None)

        candidate = ranks.on_main("the search for the best checkpoint", find_best)
        if candidate is None:
            logger.warning("The best checkpoint, %r, is gone: the model keeps the weights of the last step.", name)
            return
        try:
            checkpoint = self.find(candidate, "weights")
            if checkpoint is None:
                return
            with ranks.in_phase("load"):
                self.contents.restore_weights(checkpoint)
        except (CheckpointError, OSError) as error:  # not raised: the run itself has ended well
            logger.warning("The best weights cannot be loaded: %s The model keeps those of the last step.", error)
            return
        self._set_loaded()
        self.weights_from = Progress.from_state(checkpoint.content["progress"])
        logger.info("The model has the best weights now, those of %s.", checkpoint.folder.name)

    def load_eval_weights(self) -> None:
        """Load the weights for evaluations at the end of a run, unless the model has those of a better one."""
        if not self.eval_weights.are_loaded and self._load_eval_weights():
            logger.info("The model has the averaged weights now, those of step %d.", self._lifecycle.progress.step)

    def _load_eval_weights(self) -> bool:
        eval_weights = self.eval_weights.differing()
        if eval_weights:
            self._snapshot_final_weights()
            self.eval_weights.load(eval_weights)
        self._set_loaded()
        return bool(eval_weights)

    def _set_loaded(self) -> None:
        self.eval_weights.set_loaded()
        if isinstance(self.finished_run, FinishedRun):
            # the mode of an optimizer may be among its options
            self.finished_run.groups = group_options(self._trainer.backend.groups)

    def log_final_weights(self, reason: str) -> None:
        """Log that the model ends with its last weights although there were evaluations."""
        step = self._lifecycle.progress.step
        logger.info("The model keeps its last weights, those of step %d: %s.", step, reason)


def check_allowed(names: Collection[str]) -> None:
    """Raise ConfigError for a name in `allow_change` that is no deciding setting."""
    known = (*DECIDING, *IDENTITIES, FROZEN)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"`allow_change` has no setting {unknown[0]!r}, only {', '.join(known)}.")
