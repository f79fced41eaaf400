"""The lifecycle of a run: emits its events, and keeps progress, requests, history and the best evaluation.

A loop is anything that calls `begin_train, begin_epoch, begin_step, end_step, end_epoch, evaluated, begin_save, saved,
logged, end_train` in the order shown in `Event`. Nothing here trains, evaluates or saves, or imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omnitrain.errors import ConfigError, DataError
from omnitrain.events import Callback, Control, Event, Histogram, Ranges, TrainerLike, give_back
from omnitrain.metrics import MetricsDict
from omnitrain.objective import Objective
from omnitrain.progress import Progress

__all__ = ["Lifecycle"]

logger: logging.Logger = logging.getLogger("omnitrain")

_MANY_SKIPPED = 30
"""The limit of skipped steps in a row in an epoch without updates: a loss scale may need to fall that often."""
_MOST_SKIPPED = 10_000
"""The same if no epoch ends."""


class Lifecycle:
    """Sends events to callbacks in order, counts progress, and keeps the history and the best evaluation.

    Args:
        trainer: Passed to every callback.
        callbacks: Sorted by their `order`; those of equal order stay as given.
        objective: Decides which evaluation is best.
        evaluates: Whether the run evaluates.
    """

    def __init__(
        self, trainer: TrainerLike, callbacks: Iterable[Callback], objective: Objective, evaluates: bool = False
    ) -> None:
        self.trainer = trainer
        self.evaluates = evaluates
        self.objective = objective
        self.progress: Progress = Progress()
        self.control: Control = Control()
        self.metrics: MetricsDict = MetricsDict()
        self.callbacks: list[Callback] = []
        self.improved: bool = False
        """Whether the latest evaluation was the best so far."""
        self.evaluated_step: int = -1
        """The step of the run's latest evaluation; -1 before the first."""
        self.saved_at: tuple[int, int, int] | None = None
        """The position of the run's latest checkpoint; None before the first."""
        self.saved_path: Path | None = None
        """The folder of the latest checkpoint of the run."""
        self.owes_evaluation = False
        """Whether an evaluation is still due: one that a signal interrupted, or the one before the first step."""
        self.owes_save = False
        """Whether a checkpoint was due after that evaluation."""
        self.is_epoch_complete = True
        """Whether the data of the current epoch were used up."""
        self.logged_at: tuple[int, float, int, int] = (0, 0.0, 0, 0)
        """Steps, seconds, samples and tokens of the run at the latest log; later evaluations and saves are added to the
        seconds, so they are not part of the time between two logs."""
        self._is_aside = False
        self.stop: str = ""
        """Why the run ends, once all ranks have agreed."""
        self.signal: int = 0
        """The number of the signal that ended it."""
        self.is_closing = False
        """Whether the run is writing its last rows, which a longer run would not have had."""
        self.is_running: bool = False
        """Whether `train()` is at work."""
        self._epoch_from = -1
        """The number of updates when the epoch began, if it began in this call of `train()`."""
        self._skipped_in_a_row = 0
        self._clock = time.perf_counter()
        self._listeners: dict[Event, list[tuple[Callback, Callable[..., None]]]] = {}
        self._with_values: list[Callback] = []
        self._parts: tuple[Callable[[Ranges | None], None], ...] = ()
        self.register(callbacks)

    def register(self, callbacks: Iterable[Callback]) -> None:
        """Register the callbacks of the run, sorted by their `order`."""
        callbacks = list(callbacks)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"`callbacks` must hold omnitrain.Callback instances, got {callback!r}. "
                    "Make it a subclass of omnitrain.Callback (and pass an instance, not the class)."
                )
        self.callbacks = sorted(callbacks, key=lambda callback: callback.order)
        # Only overridden methods are called: an event without listeners costs one dict look-up.
        self._with_values = [one for one in self.callbacks if type(one).log_values is not Callback.log_values]
        self._listeners = {event: [] for event in Event}
        for event in Event:
            name = f"on_{event}"
            for callback in self.callbacks:
                handler = getattr(callback, name)
                if getattr(handler, "__func__", handler) is not getattr(Callback, name):
                    self._listeners[event].append((callback, handler))

    @property
    def asks_alone(self) -> bool:
        """Whether a callback may request something in a step that other ranks do not."""
        events = (Event.STEP_START, Event.BEFORE_OPTIMIZER_STEP, Event.STEP_END)
        return any(callback.asks_alone for event in events for callback, _ in self._listeners[event])

    def emit(self, event: Event, *details: Any) -> None:
        """Call every callback that listens to `event`; an error in a callback propagates, with the callback named."""
        for callback, handler in self._listeners[event]:
            try:
                handler(self.trainer, *details)
            except BaseException as error:
                error.add_note(f"Raised by the callback {type(callback).__name__}.on_{event}.")
                raise

    # --- the run

    def begin_train(self) -> None:
        """Start the clock and emit TRAIN_START."""
        self.is_running = True
        self._clock = time.perf_counter()
        self.control, self.stop, self.signal = Control(), "", 0
        order = ", ".join(f"{type(callback).__name__} ({callback.order})" for callback in self.callbacks)
        logger.info("Callbacks in the order they run: %s.", order or "none")
        self.emit(Event.TRAIN_START)

    def failed(self, error: BaseException) -> None:
        """Tell the callbacks that `error` ends the run; their own errors cannot hide it."""
        self.tick()
        self._emit_safely(Event.EXCEPTION, error)

    def end_train(self, failed: bool) -> None:
        """Close the run: TRAIN_END is always emitted, and errors in it cannot hide an earlier failure."""
        self.tick()
        if self.stop:
            self.metrics["stop_reason"] = self.stop
        try:
            if failed:
                self._emit_safely(Event.TRAIN_END)
            else:
                self.emit(Event.TRAIN_END)
        finally:
            self.is_running = False

    def _emit_safely(self, event: Event, *details: Any) -> None:
        for callback, handler in self._listeners[event]:
            try:
                handler(self.trainer, *details)
            except Exception:
                logger.exception(
                    "%s.on_%s failed while the run was ending by another error.", type(callback).__name__, event
                )

    def tick(self) -> None:
        """Update `progress.seconds` to now."""
        now = time.perf_counter()
        self.progress.seconds += now - self._clock
        self._clock = now

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the work inside from the time between two logs, from which rates are computed."""
        if self._is_aside:
            yield
            return
        start, self._is_aside = time.perf_counter(), True
        try:
            yield
        finally:
            self._is_aside = False
            step, seconds, samples, tokens = self.logged_at
            self.logged_at = (step, seconds + time.perf_counter() - start, samples, tokens)

    def take_parts(self, *parts: Callable[[Ranges | None], None]) -> None:
        """Take what names parts of a step, for `mark_parts`."""
        self._parts = parts

    def mark_parts(self, ranges: Ranges | None) -> None:
        """Run data, forward, backward and update of each step inside of `ranges(name)`; None runs them as they are."""
        for mark in self._parts:
            mark(ranges)

    # --- epochs and steps

    def begin_epoch(self) -> None:
        """An epoch, or the rest of one after a resume, starts."""
        self._epoch_from = -1 if self.progress.samples_in_epoch else self.progress.step
        self.emit(Event.EPOCH_START)

    def begin_step(self) -> None:
        """A window is about to be trained on."""
        if self._listeners[Event.STEP_START]:
            self.emit(Event.STEP_START)

    def before_optimizer_step(self) -> None:
        """Gradients are final."""
        if self._listeners[Event.BEFORE_OPTIMIZER_STEP]:
            self.emit(Event.BEFORE_OPTIMIZER_STEP)

    def end_step(self, samples: int, tokens: int = 0, skipped: bool = False, batches: int = 0) -> None:
        """A window was trained on or skipped; it had this many samples, tokens and micro-batches over all ranks."""
        self.progress.advance(samples, tokens, skipped, batches)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= _MOST_SKIPPED:  # for instance on a stream without an end
            raise self._without_update()
        self.tick()
        self.emit(Event.STEP_END)

    def end_epoch(self, complete: bool, row: Mapping[str, Any]) -> None:
        """An epoch is over; it counts, and gets a row in the history, only if its data were used up."""
        self.progress.close_epoch(complete)
        if complete and self._epoch_from == self.progress.step and self._skipped_in_a_row >= _MANY_SKIPPED:
            raise self._without_update()
        if complete:
            self.add_epoch_row(row)
        self.tick()
        self.emit(Event.EPOCH_END)

    def check_updates(self) -> None:
        """Raise DataError at the end of a run in which every step was skipped."""
        if self._skipped_in_a_row and not self.progress.step:
            raise self._without_update()

    def _without_update(self) -> DataError:
        return DataError(
            f"The last {self._skipped_in_a_row} steps were all skipped: nothing is trained. Either no sample has a "
            "label that counts (integer labels of -100 are left out), or no loss or gradient is finite "
            "(on_nonfinite='skip', or a loss scale of fp16 that is still falling). Look at the labels, and at the loss "
            "of a batch."
        )

    def add_epoch_row(self, row: Mapping[str, Any]) -> None:
        """Add the means of an epoch, or of the part before the run ended, to the history."""
        self.metrics.add_train({"epoch": round(self.progress.epochs, 6), "step": self.progress.step, **row})

    # --- answers to requests

    def logged(self, logs: Mapping[str, float]) -> None:
        """A row of logs is ready."""
        self.emit(Event.LOG, logs)

    def add_values(self, logs: dict[str, Any]) -> None:
        """Add to a row of logs what callbacks show in it.

        Raises:
            ConfigError: If the row has a value of that name already.
        """
        for callback in self._with_values:
            values = callback.log_values(self.trainer)
            if twice := logs.keys() & values.keys():
                raise ConfigError(
                    f"{type(callback).__name__}.log_values returns {min(twice)!r}, which the row of logs has already. "
                    "Rename it."
                )
            logs.update(values)

    def report(self, values: Mapping[str, str | Histogram]) -> None:
        """Send texts and histograms to every callback that shows them, on the ranks that call it."""
        self.emit(Event.REPORT, values)

    def begin_evaluation(self) -> None:
        """An evaluation that belongs to the run starts."""
        self.emit(Event.EVAL_START)

    def evaluated(self, metrics: Mapping[str, float], counts: bool = True) -> None:
        """Add an evaluation to the history and compare it with the best; `counts=False` leaves patience alone."""
        self.evaluated_step = self.progress.step
        value = metrics[self.objective.key(metrics)]
        self.improved = self.objective.update(value, self.progress.step, counts)
        self.metrics.add_valid(
            {"epoch": round(self.progress.epochs, 6), "step": self.progress.step, **metrics}, best=self.improved
        )
        self.tick()
        self.emit(Event.EVAL_END, metrics)

    def begin_save(self) -> None:
        """A checkpoint is about to be put together."""
        self.emit(Event.SAVE_START)

    def saved(self, path: Path) -> None:
        """A checkpoint at `path` is complete."""
        self.saved_path = path
        self.tick()
        self.emit(Event.SAVE_END)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, the objective, the length of the history, and the callbacks' states."""
        self.tick()
        names = [type(callback).__qualname__ for callback in self.callbacks]
        states = [
            {"callback": name, "turn": names[:number].count(name), "state": callback.state_dict()}
            for number, (name, callback) in enumerate(zip(names, self.callbacks, strict=True))
        ]
        return {
            "progress": self.progress.state_dict(),
            "objective": self.objective.state_dict(),
            "metrics": self.metrics.to_dict(with_rows=False),
            "evaluated_step": self.evaluated_step,
            "callbacks": [entry for entry in states if entry["state"]],
        }

    def load_state_dict(self, state: Mapping[str, Any], resets_best: bool = False) -> None:
        """Restore the state from `state_dict()`, except for the callbacks' states.

        Args:
            state: The state.
            resets_best: Whether the objective is a different one now, so the earlier best means nothing.
        """
        size = self.progress.epoch_size
        self.progress = Progress.from_state(state["progress"])
        self.progress.epoch_size = size
        self.metrics = MetricsDict.from_dict(state["metrics"])
        self.metrics.pop("stop_reason", None)
        if resets_best:
            self.metrics["best_valid"] = {}
            for name in ("best_step", "best_checkpoint"):
                self.metrics.pop(name, None)
        else:
            self.objective.load_state_dict(state["objective"])
        self.evaluated_step = state["evaluated_step"]
        self.saved_at = self.progress.position

    def load_callbacks(self, entries: Iterable[Mapping[str, Any]], undo: contextlib.ExitStack) -> None:
        """Restore each callback's state from what a callback of its class has saved.

        Args:
            entries: The class name and the state of each callback that has a state.
            undo: Gets functions that restore the present states.

        Raises:
            CheckpointError: If one of them refuses its state.
        """
        waiting = list(self.callbacks)
        for entry in entries:
            name = entry["callback"]
            # callbacks without a state have no entry, and are not counted among those of their class
            alike = [callback for callback in self.callbacks if type(callback).__qualname__ == name]
            heir = next((one for one in alike[entry.get("turn", 0) :] if one in waiting), None)
            if heir is None:
                logger.warning("The checkpoint has the state of a callback %r, which is not among the callbacks.", name)
                continue
            waiting.remove(heir)
            give_back(heir, entry["state"], undo)

    def loaded(self) -> None:
        """A checkpoint was restored."""
        self.emit(Event.CHECKPOINT_LOADED)
