"""Saving and loading during a run: when and where to save, resume, and what to do if the disk fails.

`contents.py` has the contents of a checkpoint, `tensors.py` writes tensors, `store.py` has folders and manifests.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.contents import Contents, Lifecycle, Run, Snapshot, group_options
from omnitrain.checkpoint.disk import check_free_space, check_writable
from omnitrain.checkpoint.eval_weights import ShownWeights
from omnitrain.checkpoint.fingerprints import IDENTITIES
from omnitrain.checkpoint.frozen_weights import FROZEN
from omnitrain.checkpoint.history import Lines, read_history
from omnitrain.checkpoint.mirrored_store import resolved
from omnitrain.checkpoint.run_record import CONFIG_FILE, RUN_FILE, append_start, write_config
from omnitrain.checkpoint.setting_changes import DECIDING, changed_options, changed_settings
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.verifying import hashed_by_all
from omnitrain.checkpoint.writing import Save, Writer
from omnitrain.core.errors import CheckpointError, ConfigError, Tolerance, is_disk_error
from omnitrain.core.paths import is_address, local_path
from omnitrain.core.progress import Progress
from omnitrain.distributed.ranks import Ranks
from omnitrain.optim.build import optimizers_among

logger: logging.Logger = logging.getLogger("omnitrain")

_GIT_S = 0.03
"""How long the start of a run waits for git; afterwards what it says is written with the first checkpoint."""


@contextlib.contextmanager
def locked(
    store: Store | None, ranks: Ranks, at_end: Callable[[], None], after: contextlib.ExitStack
) -> Iterator[None]:
    """Lock `save_dir` against other runs inside, and wait at the end until all is uploaded.

    Args:
        store: The checkpoints of the run; None locks nothing.
        ranks: The ranks of the run.
        at_end: Called on the main rank before the lock is released.
        after: What releases the lock at last, outside of the call: then all ranks know of an error before its uploads.

    Raises:
        CheckpointError: If another run uses it; raised on all ranks.
        ConfigError: If nothing can be written there.
    """
    if store is None:
        yield
        return

    def take() -> None:
        check_writable(store.root)
        store.take()

    def release() -> None:
        try:
            at_end()
            _finish(store, ranks)  # after an error of the run, which it does not replace
        except CheckpointError as error:
            logger.error("%s", error)
        finally:
            store.lock.release()

    ranks.on_main("the lock of `save_dir`", take)
    if ranks.is_main:
        after.callback(release)
    yield
    finish_uploads(store, ranks)


def finish_uploads(store: Store, ranks: Ranks) -> None:
    """Wait until the main rank has uploaded all; raises its error on all ranks."""
    ranks.on_main("the end of the uploads", lambda: _finish(store, ranks))


def _finish(store: Store, ranks: Ranks) -> None:
    """Wait on the main rank for what is uploaded, which counts as progress as long as there is any."""

    def tick() -> None:
        ranks.moves += 1

    store.finish(tick)


@dataclass(slots=True)
class Ended:
    """The end of a run, from which a longer one can go on in this process.

    Attributes:
        parts: Model, optimizer and schedule: assigned ones would begin another run.
        groups: The options of the optimizer's groups.
        folder: The checkpoint of the last step; None without a `save_dir`.
        rest: What `Contents.capture_live_state` returned; None with a `save_dir`.
        weights: This rank's part of the weights in training, if the model has others now.
        extra: The state of modules besides tensors.
    """

    parts: tuple[Any, ...]
    groups: list[dict[str, Any]]
    folder: Path | None = None
    rest: dict[str, Any] | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Saves the state of a run at any step boundary, and restores it.

    Args:
        run: The trainer.
        lifecycle: The lifecycle of the run.
        contents: Captures and restores what a checkpoint holds.
        shown: The weights that are evaluated.
        store: The checkpoints of the run; None saves nothing.
        write_beside: Writes further files to a checkpoint's folder, on the main rank; the manifest includes them.

    Attributes:
        shown: The weights that are evaluated.
        weights_from: The position in the run of the present weights, if they are not those of the last step.
        resumed: The folder and omnitrain.json of the checkpoint from which the run resumed; None for a fresh start.
        ended: What `train(more=...)` goes on from once the run has ended; or why it cannot.
        continued: What a run that goes on in this process, without a `save_dir`, has of the one before.
    """

    def __init__(
        self,
        run: Run,
        lifecycle: Lifecycle,
        contents: Contents,
        shown: ShownWeights,
        store: Store | None,
        write_beside: Callable[[Path], None],
    ) -> None:
        self.store = store
        self.weights_from: Progress | None = None
        self.resumed: tuple[Path, Mapping[str, Any]] | None = None
        self.ended: Ended | str = "it has not trained yet"
        self.continued: Mapping[str, Any] | None = None
        self._run = run
        self._lifecycle = lifecycle
        self._contents = contents
        self.shown = shown
        self._writer = Writer(run, write_beside)
        self._credited_step = -1
        """The step of the best evaluation that has a checkpoint; later saves without a new evaluation are not best."""
        self._scored = (-1, -1)
        """(evaluation step, checkpoint step) of the latest evaluation whose score is in a checkpoint."""
        self._asked_step = -1
        """The step of the latest checkpoint saved for another reason than being the best."""
        self._has_failed = False
        """Whether the disk failed at the latest checkpoint."""
        self._best: dict[str, torch.Tensor] = {}
        """This rank's part of the weights of the best evaluation, on the host; used only without a `save_dir`."""
        self._best_extra: dict[str, Any] = {}
        self._best_progress: Progress | None = None
        """The position of those weights in the run, or None."""
        self._closing_progress: Progress | None = None
        """The position of the last evaluation of a run that is closed, if it is the best; a longer run lacks it."""
        self._is_noted = True
        """Whether all of what runs is in `run.json`."""
        self._noting = Tolerance(RUN_FILE, "The next save tries again; what ran is in the checkpoints, too.")
        self._replaced: str | None = None
        """The starts in `run.json` that this one takes the place of: "all", or itself, the "last"; None adds it."""
        self._lines = Lines()
        self._in_flight: Save | None = None
        """The checkpoint that is being written in the background."""

    # --- saving

    def note_start(self) -> None:
        """Note what is still to be noted of the start of a run that ends, on the main rank."""
        self._note_rest()
        self._contents.forget_start()

    def save(self, history: dict[str, Any] | None = None, for_best: bool = False) -> None:
        """Save during a run; a failing disk costs this checkpoint, not the run, unless `save_required`.

        Args:
            history: The lifecycle's state to save instead of the present one.
            for_best: Whether a new best is the only reason.
        """
        if self.store is not None:
            with self._run.ranks.at("save"):
                self._save(self.store, history, for_best)

    def _save(self, store: Store, history: dict[str, Any] | None, for_best: bool) -> None:
        self.await_background()
        lifecycle = self._lifecycle
        lifecycle.begin_save()
        lifecycle.owes_save = lifecycle.owes_evaluation and (lifecycle.owes_save or history is None)
        snapshot = self._snapshot(history)
        snapshot.payload["for_best"] = for_best and snapshot.step != self._asked_step  # may replace one of this step
        if not for_best:
            self._asked_step = snapshot.step
        lifecycle.saved_at = lifecycle.progress.position
        try:
            if self._writer.is_in_background:
                self._in_flight = self._writer.begin(store, snapshot)
                return
            path = self._writer.write(store, snapshot)
        except CheckpointError as error:
            self._report_failed_save(error)
        else:
            self._committed(snapshot, path)

    def save_now(self) -> Path:
        """Save the current state, and return the folder of the checkpoint.

        Raises:
            ConfigError: If there is no `save_dir`.
            CheckpointError: If it cannot be written; earlier checkpoints are untouched.
        """
        if self.store is None:
            raise ConfigError("There is no place for a checkpoint. Pass `save_dir` to the constructor.")
        self.await_background()
        self._lifecycle.begin_save()
        snapshot = self._snapshot()
        snapshot.payload["for_best"] = False
        path = self._committed(snapshot, self._writer.write(self.store, snapshot))
        if not self._lifecycle.is_running:
            finish_uploads(self.store, self._run.ranks)
        return path

    @property
    def has_unsaved_best(self) -> bool:
        """Whether the latest evaluation is the best so far, and no checkpoint was saved since."""
        return self._lifecycle.objective.best_step == self._lifecycle.evaluated_step != self._credited_step

    @property
    def owes_best(self) -> bool:
        """Whether this step has a new best that must be saved and is not yet."""
        if self.store is None or not self._run.settings.keep_best or not self.has_unsaved_best:
            return False
        evaluated = self._lifecycle.evaluated_step
        on_its_way = self._in_flight.snapshot if self._in_flight is not None else None
        is_saved_soon = on_its_way is not None and on_its_way.best and on_its_way.evaluated_step == evaluated
        return evaluated == self._lifecycle.progress.step and not is_saved_soon

    def check_save_dir(self) -> None:
        """Refuse a fresh start among the checkpoints of another run.

        Raises:
            ConfigError: If `save_dir` has checkpoints, and `overwrite` is False.
        """
        if self.store is None:
            return
        there = self._run.ranks.on_main("a look at `save_dir`", self._list)
        if there and not self._run.settings.overwrite:
            raise ConfigError(
                f"`save_dir={str(self._run.settings.save_dir)!r}` already holds checkpoints, the newest being "
                f"{there[-1].name!r}. Pass resume_from='auto' to train() to go on with that run, overwrite=True to "
                "replace it, or another `save_dir`."
            )

    def _list(self) -> list[Path]:
        assert self.store is not None
        try:
            return self.store.checkpoints()
        except OSError as error:
            raise CheckpointError(
                f"`save_dir={str(self._run.settings.save_dir)!r}` cannot be read, so that checkpoints of another run "
                f"there would not be seen: {error}. Fix that, or choose another folder."
            ) from error

    def check_optimizers(self, attributes: Mapping[str, Any], resumes: bool) -> None:
        """Warn about optimizers among a trainer's attributes that no checkpoint holds, and refuse to resume then.

        Args:
            attributes: The attributes of the trainer.
            resumes: Whether a checkpoint is about to be restored.

        Raises:
            CheckpointError: If there are such optimizers, and a checkpoint is about to be restored.
        """
        backend = self._run.backend
        held = [id(backend.optimizer), *map(id, backend.optimizers.values())]
        loose = [name for name, one in optimizers_among(attributes).items() if id(one) not in held]
        if not loose or (self.store is None and not resumes):
            return
        named, remedy = ", ".join(loose), "Put them into `self.optimizers`, a dict by name, which checkpoints hold."
        if resumes:
            raise CheckpointError(
                f"The trainer has optimizers of its own, whose state is in no checkpoint: {named}. A resumed run would "
                f"start them anew. {remedy}"
            )
        logger.warning("The trainer has optimizers whose state is in no checkpoint: %s. %s", named, remedy)

    def identify(self) -> None:
        """Compute the fingerprints of data and code for the checkpoints of the run, and note what runs."""
        if self.store is None:
            return
        self._contents.identify(None if self.resumed is None else self.resumed[0].name)
        if self._contents.start is not None:
            self._replaced = "all" if self._run.settings.overwrite and not self.goes_on else None
            self._note(self.store, self._contents.what_runs(_GIT_S))
            write_config(self.store.fs, self.store.root / CONFIG_FILE, self._run.config.text())
            self._is_noted = self._contents.start.is_complete and not self._noting.has_failed

    def _note_rest(self) -> None:
        """Note what git has said of the code, where it took longer than the start of the run, and what failed then."""
        start = self._contents.start
        if self._is_noted or self.store is None or start is None:
            return
        what = self._contents.what_runs(0)
        if start.is_complete or self._noting.has_failed:
            self._note(self.store, what)
            self._is_noted = start.is_complete and not self._noting.has_failed

    def _note(self, store: Store, what: Mapping[str, Any]) -> None:
        """Write into `run.json` what runs."""
        with self._noting:
            append_start(store.fs, store.root / RUN_FILE, what, self._replaced)
            self._replaced = "last"

    def check_disk(self) -> None:
        """Check before the first step that everything can be saved, and that the disk has room for it."""
        if self.store is None:
            return
        files, _ = self._contents.capture_tensors()
        self._contents.check_states()
        if not self._run.ranks.is_main:
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in files[state_dicts.WEIGHTS].values()]
        needed = (1 if self._run.settings.save_only_model else 3) * sum(sizes)  # with Adam's two moments
        with Tolerance("The free space of the disk", "It is not known whether there is room for checkpoints."):
            warning = check_free_space(self.store.root, self.store.newest_size() or needed)
            if warning:
                logger.warning("%s", warning)

    def _snapshot(self, history: dict[str, Any] | None = None) -> Snapshot:
        """Return the current state, as references to the live tensors."""
        lifecycle = self._lifecycle
        step, evaluated, credited = lifecycle.progress.step, lifecycle.evaluated_step, self._credited_step
        name = f"checkpoint-{step}"
        best = self.has_unsaved_best or (
            # the last step of an epoch is saved again after the epoch ends
            credited == evaluated >= 0 and _step_of(lifecycle.metrics.get("best_checkpoint")) == step
        )
        # one checkpoint per evaluation, or the few best would be the same weights under several names
        scored = evaluated, step
        score = None if evaluated == self._scored[0] and scored != self._scored else lifecycle.objective.latest
        is_final = history is None and not lifecycle.owes_evaluation  # otherwise a resume may save this step again
        history = history or lifecycle.state_dict()
        if best and is_final:
            history["metrics"]["best_checkpoint"], credited = name, evaluated
        files, payload = self._contents.capture(history)
        self._note_rest()
        payload |= {
            "credited_step": credited,
            "scored": list(scored if score is not None and is_final else self._scored),
        }
        rows = (
            self._lines.up_to(history["metrics"]["rows"], lifecycle.metrics) if self._run.ranks.is_main else (b"", "")
        )
        return Snapshot(files, payload, step, score, best, evaluated, rows)

    def _committed(self, snapshot: Snapshot, path: Path) -> Path:
        if snapshot.best:
            self._lifecycle.metrics["best_checkpoint"] = path.name
            self._credited_step = snapshot.evaluated_step
        if self._has_failed:
            logger.warning("%s is complete: saving works again.", path.name)
        self._has_failed = False
        if snapshot.score is not None:
            self._scored = snapshot.evaluated_step, snapshot.step
        self._lifecycle.saved(path)
        return path

    def _report_failed_save(self, error: CheckpointError) -> None:
        self._lifecycle.saved_at = None
        if self._run.settings.save_required or not is_disk_error(error.__cause__):
            raise error
        self._has_failed = True
        logger.error("%s Training goes on without it (save_required=True would end it).", error)

    # --- saving in the background

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """Write checkpoints in a thread inside, if `async_save` is set; wait for it at the end."""
        if self.store is None or not self._run.settings.async_save:
            yield
            return
        with self._writer.in_background():
            try:
                yield
            finally:
                left, self._in_flight = self._in_flight, None  # there is one only after an error
                if left is not None and (error := left.give_up()) is not None:
                    logger.error("%s", error)

    def await_background(self, wait: bool = True) -> None:
        """Handle a checkpoint that was written in the background; with `wait`, wait for an unfinished one.

        Without, what all ranks are done with is followed by what comes next, which takes a few saves of a step.
        """
        path = None
        while self._in_flight is not None and path is None:
            if not wait and not self._in_flight.is_ready():
                return
            save = self._in_flight
            try:
                path = save.advance()
            except CheckpointError as error:
                self._in_flight = None
                self._report_failed_save(error)
                return
            if path is None and not wait:
                return
            if path is not None:
                self._in_flight = None
                self._committed(save.snapshot, path)

    # --- loading

    def find(self, which: str | Path, weights_suffice: bool = False) -> tuple[Path, dict[str, Any]] | None:
        """Return the folder and omnitrain.json of a verified checkpoint; None if "auto" finds none at all.

        Args:
            which: A path, "last", "best" or "auto".
            weights_suffice: Whether to accept a checkpoint saved with `save_only_model`.

        Raises:
            ConfigError: If the search needs a `save_dir`, and none was given.
            CheckpointError: If it is missing or damaged, or holds only weights.
        """
        if self.store is None and str(which) in ("auto", "last", "best"):
            raise ConfigError(
                f"`resume_from={str(which)!r}` looks into `save_dir`, which is not given. Pass it, or a path."
            )
        if which not in ("auto", "last", "best"):
            if which is True:
                raise ConfigError(
                    "`resume_from=True`: pass 'auto' (a fresh start where there is no checkpoint) or 'last'."
                )
            which = which if is_address(which) else local_path(which, "resume_from")
        store, ranks = self.store, self._run.ranks

        def accept(folder: Path, content: dict[str, Any]) -> None:
            self._contents.check(folder, content)
            content["metrics"] = read_history(folder, content)

        with ranks.at("load"):
            found = hashed_by_all(ranks, lambda check: resolved(store, which, accept, check))
        if not weights_suffice and found is not None and found[1].get("only_model"):
            raise CheckpointError(
                f"{str(found[0])!r} was saved with save_only_model=True: it holds weights, and nothing else that a run "
                f"could continue from. Load its {state_dicts.WEIGHTS!r} into the model (safetensors.torch.load_model) "
                "and start in another `save_dir`, or name a checkpoint that was saved in full."
            )
        return found

    def resume(self, folder: Path, content: Mapping[str, Any], allow_change: Collection[str]) -> None:
        """Restore a checkpoint for a run that resumes from it; its random numbers are restored separately.

        Args:
            folder: The folder of the checkpoint.
            content: Its omnitrain.json.
            allow_change: Names of arguments (settings, data, functions) that may differ.

        Raises:
            CheckpointError: If a setting, the data or a function differs, or it is from another model or optimizer.
        """
        settings = self._run.resolved_config()
        changed = changed_settings(content["settings"], settings)
        refused = {name: pair for name, pair in changed.items() if name not in allow_change}
        others = [
            one for one in self._contents.differences(content)
            if one.name not in allow_change and one.name not in changed
        ]  # fmt: skip
        if refused or others:
            told = [f"{name}: {old!r} -> {new!r}" for name, (old, new) in refused.items()]
            listed = "; ".join([*told, *(f"{one.name}: {one.words}" for one in others)])
            kinds = ["settings"] * bool(refused) + sorted({one.kind for one in others}, reverse=True)
            kept = ""
            if "global_batch_size" in refused:
                kept = f"global_batch_size={refused['global_batch_size'][0]} keeps it on any number of processes. "
            raise CheckpointError(
                f"{str(folder)!r} was saved under other {' and '.join(kinds)}, which would change the run: {listed}. "
                f"{kept}Set them back, or allow them by name: train(resume_from=..., "
                f"allow_change={ {*refused, *(one.name for one in others)}!r})."
            )
        self.restore(folder, content, {*changed, *({FROZEN} & set(allow_change))})
        self.resumed = folder, content
        self._lifecycle.loaded(folder)
        if self._run.settings.init_from is not None:
            logger.info("The weights are those of the checkpoint, and no longer those of `init_from`.")
        before, after = changed_options(content["settings"], settings, "callback_options")
        if before:
            logger.info("Callbacks have other options than in the checkpoint: %s -> %s.", before, after)
        logger.info("Resumed from %s at step %d.", folder.name, self._lifecycle.progress.step)

    def restore(self, folder: Path, content: Mapping[str, Any], changed: Collection[str] = ()) -> None:
        """Restore a checkpoint, except for its random numbers."""
        with self._run.ranks.at("load"):
            self._contents.restore(folder, content, changed)
        self._run.backend.mark_weights_loaded(content.get("frozen") or {})
        self.weights_from = None
        resets_best = not {"optimization_metric", "optimization_direction"}.isdisjoint(changed)
        self._credited_step = -1 if resets_best else content["credited_step"]
        self._asked_step = -1 if content.get("for_best") else content["step"]
        # missing in the first checkpoints of format 1: each of them has the score of the evaluation before it
        evaluated, step = content.get("scored") or (content["evaluated_step"], content["step"])
        self._scored = evaluated, step

    def restore_random_numbers(self, folder: Path, content: Mapping[str, Any]) -> None:
        """Restore the random number generators of training from a checkpoint."""
        self._contents.restore_random_numbers(folder, content)

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on from a checkpoint, or from one that has ended in this process."""
        return self.resumed is not None or self.continued is not None

    def recall_random_numbers(self) -> None:
        """Restore the random number generators of the run that goes on."""
        if self.continued is not None:
            tensors, rest = self.continued["rng"]
            state_dicts.restore_rng_tensors(tensors, rest, self._run.device)
        elif self.resumed is not None:
            self.restore_random_numbers(*self.resumed)

    # --- going on in this process

    def note_end(self) -> None:
        """Note what is lost when the run is closed, and what a longer run would have; before the last evaluation."""
        run = self._run
        self.ended = Ended((run.backend.model, run.backend.optimizer, run.lr_scheduler), [])
        self.ended.groups = group_options(run.backend.groups)
        if self.store is not None:
            return
        try:
            self.ended.rest = self._contents.capture_live_state()
        except Exception as error:  # not raised: the run has ended well, and may be all that is wanted
            logger.debug("The run cannot go on.", exc_info=True)
            self.ended = f"what it was at its end could not be kept ({type(error).__name__}: {error})"

    def note_last_save(self) -> None:
        """Note the checkpoint of the last step, from which the run can go on."""
        if self.store is None or isinstance(self.ended, str):
            return
        lifecycle, settings = self._lifecycle, self._run.settings
        if settings.save_only_model:
            self.ended = "save_only_model=True keeps weights alone, from which no run goes on"
        elif lifecycle.saved_at != lifecycle.progress.position:
            self.ended = "its last checkpoint could not be saved"
        else:
            self.ended.folder = lifecycle.saved_path

    def _keep_last(self) -> None:
        """Keep the weights in training on the host, which the model is about to lose, if no checkpoint has them."""
        if self.store is None and isinstance(self.ended, Ended):
            backend = self._run.backend
            backend.snapshot_weights(self.ended.weights, backend.model_tensors())
            self.ended.extra = state_dicts.extra_state(backend.model)

    def required_end(self) -> Ended:
        """Return the end of the run from which a longer one is to go on.

        Raises:
            ConfigError: If there is none, or something was assigned since that begins another run.
        """
        ended, run = self.ended, self._run
        if isinstance(ended, str):
            raise ConfigError(
                f"`more` goes on with a run that this trainer has ended, and it cannot: {ended}. Call train() "
                "first, or train(resume_from=...) on a trainer with a larger `epochs`, `max_steps` or `max_duration`."
            )
        names, present = (
            ("model", "optimizer", "lr_scheduler"),
            (run.backend.model, run.backend.optimizer, run.lr_scheduler),
        )
        other = [name for name, one, now in zip(names, ended.parts, present, strict=True) if one is not now]
        if other:
            raise ConfigError(
                f"`more` goes on with the run that has ended, and `trainer.{other[0]}` was assigned since. Call "
                "train() for a new run with it."
            )
        return ended

    def go_on(self, ended: Ended, former: Checkpointer, changed: list[dict[str, Any]]) -> None:
        """Go on from the end of a run in this process.

        Args:
            ended: The end of the run.
            former: The checkpointer of that run.
            changed: What was changed since in the groups of the optimizer.
        """
        backend = self._run.backend
        if ended.rest is not None:
            self.continued, self.resumed = ended.rest, former.resumed
            self._contents.restore_live_state(ended.rest)
            self._best, self._best_extra, self._best_progress = former._best, former._best_extra, former._best_progress
            if ended.weights:
                if self._best_progress is not None and not self._best:  # the model has them
                    backend.snapshot_weights(self._best, backend.model_tensors())
                    self._best_extra = state_dicts.extra_state(backend.model)
                backend.restore_snapshot(ended.weights, ended.extra)
        for group, options in zip(backend.groups, changed, strict=True):
            group |= options

    @property
    def loads_best(self) -> bool:
        """Whether the model gets the best weights at the end of the run."""
        wanted = self._run.settings.load_best_at_end
        return self._lifecycle.evaluates and wanted is not False

    def keep_best(self) -> None:
        """Keep the weights of the best evaluation so far on the host, if there is no folder for checkpoints."""
        if self.store is None and self.loads_best and self._lifecycle.is_closing:
            self._closing_progress = Progress.from_state(self._lifecycle.progress.state_dict())
        elif self.store is None and self.loads_best:
            self._run.backend.snapshot_weights(self._best, self.shown.model_tensors())
            self._best_extra = state_dicts.extra_state(self._run.backend.model)
            self._best_progress = Progress.from_state(self._lifecycle.progress.state_dict())

    def load_best(self) -> None:
        """Load the best weights into the model, if there are any; nothing else changes.

        They are on the host, or in the checkpoint that was saved as the best.
        """
        lifecycle, ranks = self._lifecycle, self._run.ranks
        if self._closing_progress is not None:  # the model has them, or what it is evaluated with
            self._put_shown_in_place()
            self.weights_from = self._closing_progress
        elif self._best_progress is not None:
            self._keep_last()
            self._run.backend.restore_snapshot(self._best, self._best_extra)
            self._mark_in_place()
            self.weights_from, self._best = self._best_progress, {}
        if self.weights_from is not None:
            logger.info("The model has the best weights now, those of step %d.", self.weights_from.step)
            return
        name = lifecycle.metrics.get("best_checkpoint")
        if name is None:
            self.tell_last("no weights of a better evaluation were kept")
            return
        if lifecycle.objective.best_step != self._credited_step:
            logger.warning(
                "The best evaluation, that of step %s, has no checkpoint: %r is the best of those that have one. "
                "`keep_best=1` saves each new best.", lifecycle.objective.best_step, name,
            )  # fmt: skip
        # by name first: the link `best` may stand for an evaluation that closed a shorter run;
        # the folder from which the run resumed may be another than `save_dir`
        roots = [] if self.store is None else [self.store.root]
        roots += [] if self.resumed is None else [self.resumed[0].parent]
        places = [*(root / name for root in roots), *(root / "best" for root in roots)]

        def look() -> Path | None:
            if self.store is not None and not any(os.path.lexists(root / name) for root in roots):
                self.store.bring(name)
            return next((one for one in places if os.path.lexists(one)), None)

        found = ranks.on_main("a look for the best", look)
        if found is None:
            logger.warning("The best checkpoint, %r, is gone: the model keeps the weights of the last step.", name)
            return
        try:
            place = self.find(found, weights_suffice=True)
            if place is None:
                return
            folder, content = place
            with ranks.at("load"):
                self._contents.restore_weights(folder, content)
        except (CheckpointError, OSError) as error:  # not raised: the run itself has ended well
            logger.warning("The best weights cannot be loaded: %s The model keeps those of the last step.", error)
            return
        self._mark_in_place()
        self.weights_from = Progress.from_state(content["progress"])
        logger.info("The model has the best weights now, those of %s.", folder.name)

    def put_shown_in_place(self) -> None:
        """Have the model end with the weights that were evaluated last, unless it has those of a better evaluation."""
        if not self.shown.are_in_place and self._put_shown_in_place():
            logger.info("The model has the averaged weights now, those of step %d.", self._lifecycle.progress.step)

    def _put_shown_in_place(self) -> bool:
        if self.shown.are_others:
            self._keep_last()
        are_others = self.shown.put_in_place()
        self._mark_in_place()
        return are_others

    def _mark_in_place(self) -> None:
        self.shown.mark_in_place()
        if isinstance(self.ended, Ended):
            self.ended.groups = group_options(self._run.backend.groups)  # the mode of an optimizer may be in them

    def tell_last(self, reason: str) -> None:
        """Log that the model ends with its last weights although there were evaluations."""
        step = self._lifecycle.progress.step
        logger.info("The model keeps its last weights, those of step %d: %s.", step, reason)


def check_allowed(names: Collection[str]) -> None:
    """Raise ConfigError for a name in `allow_change` that does not determine the numbers of a run."""
    known = (*DECIDING, *IDENTITIES, FROZEN)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"`allow_change` knows no setting {unknown[0]!r}, only {', '.join(known)}.")


def _step_of(name: str | None) -> int:
    """Return the step in the name of a checkpoint's folder; -1 for None."""
    return -1 if name is None else int(name.rpartition("-")[2])
