"""The lifecycle of a run: its events, progress and history.

A loop is anything that calls `begin_train, begin_epoch, begin_step, end_step, end_epoch, evaluated, saved,
logged, end_train` in the order shown in `Event`. Nothing here trains, evaluates or saves, or imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnitrain.callbacks.train_hook import HookCallback, TrainHook
from omnitrain.core.errors import ConfigError, DataError, DistributedError, check_choice
from omnitrain.core.events import (
    ERROR_POLICIES,
    INNER_STEP_EVENTS,
    Callback,
    Control,
    Event,
    Histogram,
    ProfilerRanges,
    TrainerLike,
    restore_with_undo,
)
from omnitrain.core.history import MetricsDict
from omnitrain.core.objective import Objective
from omnitrain.core.progress import Clock, Progress

logger: logging.Logger = logging.getLogger("omnitrain")

# Skipped steps in a row from which on an epoch without updates is an error: a loss scale may need to fall as often.
_MAX_SKIPPED_IN_EPOCH = 30
# The same without an end of an epoch, for instance on an endless stream.
_MAX_SKIPPED = 10_000
_RAISED_BY = "Raised by the callback "


def is_callback_error(error: BaseException) -> bool:
    """Return whether an error was raised by a callback, rather than by the forward pass in which it was called."""
    return any(note.startswith(_RAISED_BY) for note in getattr(error, "__notes__", ()))


@dataclass(slots=True)
class Listener:
    """A callback of a run, with the time that it took, its calls, and its failures that did not end the run."""

    callback: Callback
    name: str = field(init=False)
    """The name of its class, or of the class of its hooks."""
    seconds: float = 0.0
    calls: int = 0
    failures: int = 0
    is_disabled: bool = False

    def __post_init__(self) -> None:
        callback = self.callback
        self.name = callback.name if isinstance(callback, HookCallback) else type(callback).__name__


ListenerMethod = tuple[Listener, Callable[..., Any]]


def _to_numbers(values: Any) -> dict[str, float]:
    """Return the result of a `log_values`, with tensors of one number converted to floats."""
    try:
        return {name: value if isinstance(value, (int, float)) else float(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"log_values must return a dict of numbers by name, got {values!r:.200}") from error


class Lifecycle:
    """Sends events to callbacks in order, counts progress, and keeps the history and the best evaluation."""

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
        self.resumed_from: Path | None = None
        """The folder of the checkpoint from which the run was resumed; None for a fresh start."""
        self.trained_before: int = 0
        """Steps of an earlier `train()` that trained the weights with which this run starts from step 0."""
        self.pending_evaluation = False
        """Whether an evaluation is still due: one that a signal interrupted, or the one before the first step."""
        self.pending_save = False
        """Whether a checkpoint was due after that evaluation."""
        self.is_epoch_complete = True
        """Whether the data of the current epoch were used up."""
        self.logged_at: tuple[int, float, int, int] = (0, 0.0, 0, 0)
        """Steps, seconds, samples and tokens of the run at the latest log; later evaluations and saves are added to the
        seconds, so they are not part of the time between two logs."""
        self._is_untimed = False
        self.stop: str = ""
        """Why the run ends, once all ranks have agreed."""
        self.signal: int = 0
        """The number of the signal that ended the run; 0 without one."""
        self.is_closing = False
        """Whether the run is writing its last rows, which a longer run would not have had."""
        self.is_running: bool = False
        """Whether a call of `train()` is active."""
        # The step at which the epoch began; -1 if it began in an earlier call of `train()`.
        self._epoch_start_step = -1
        self._skipped_in_a_row = 0
        self._latest_tick = time.perf_counter()
        self.clock: Clock = Clock()
        """The seconds of the run by activity, such as data and saving."""
        self.listeners: list[Listener] = []
        """The callbacks in the order they run, with the time that each has taken."""
        self.emit_in_step: Callable[..., None] | None = None
        """Emits the events inside of a step; None without listeners."""
        self.emit_in_evaluation: Callable[..., None] | None = None
        """Emits the events of the batches of an evaluation; None without listeners."""
        self.annotators: tuple[Callable[[ProfilerRanges | None], None], ...] = ()
        """Each wraps its parts of a step in profiler ranges."""
        self._ranges_by_owner: dict[int, ProfilerRanges] = {}
        self._listeners_by_event: dict[Event, list[ListenerMethod]] = {}
        self._log_values_methods: list[ListenerMethod] = []
        # The model, the optimizer and the schedule if they have hooks, with the callback that calls these, by identity.
        self._components: dict[int, tuple[Any, Callback]] = {}
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
            check_choice(f"{type(callback).__name__}.on_error", callback.on_error, ERROR_POLICIES)
        self.callbacks = sorted(callbacks, key=lambda callback: callback.order)
        # by identity, so that times and failures survive when callbacks are registered again
        known = {id(listener.callback): listener for listener in self.listeners}
        self.listeners = [known.get(id(callback)) or Listener(callback) for callback in self.callbacks]
        self._bind()

    def register_components(self, *components: Any) -> None:
        """Register the components that are callbacks or hooks, in this order and before the user's callbacks.

        They replace those of an earlier call.
        """
        before, self._components = self._components, {}
        for component in components:
            if id(component) in before:
                self._components[id(component)] = before[id(component)]
            elif isinstance(component, TrainHook):
                self._components[id(component)] = component, HookCallback(component)
            elif isinstance(component, Callback):
                self._components[id(component)] = component, component
        if before or self._components:
            component_callbacks = [callback for _, callback in self._components.values()]
            component_ids = {id(callback) for _, callback in before.values()} | set(map(id, component_callbacks))
            self.register(component_callbacks + [c for c in self.callbacks if id(c) not in component_ids])

    def _bind(self) -> None:
        """Collect the methods of callbacks to call for each event."""
        enabled = [listener for listener in self.listeners if not listener.is_disabled]

        def overridden(name: str) -> list[ListenerMethod]:
            default = getattr(Callback, name)
            methods = [(listener, getattr(listener.callback, name)) for listener in enabled]
            return [
                # only overridden methods: an event without listeners costs one lookup in a step
                (listener, method)
                for listener, method in methods
                if getattr(method, "__func__", method) is not default
            ]

        self._log_values_methods = overridden("log_values")
        self._listeners_by_event = {event: overridden(f"on_{event}") for event in Event}
        self._update_emitters()

    def _update_emitters(self) -> None:
        listeners, in_evaluation = self._listeners_by_event, (Event.EVAL_BATCH_START, Event.EVAL_BATCH_END)
        self.emit_in_step = self.emit if any(map(listeners.get, INNER_STEP_EVENTS)) else None
        self.emit_in_evaluation = self.emit if any(map(listeners.get, in_evaluation)) else None

    def listeners_to(self, *events: Event) -> list[str]:
        """Return the names of the callbacks that listen to any of these events."""
        return list(dict.fromkeys(listener.name for event in events for listener, _ in self._listeners_by_event[event]))

    @contextlib.contextmanager
    def suppress_events(self) -> Iterator[None]:
        """Suppress the events of micro-batches and evaluated batches inside, where they do not belong to a run."""
        self.emit_in_step = self.emit_in_evaluation = None
        try:
            yield
        finally:
            self._update_emitters()

    @property
    def has_rank_local_requests(self) -> bool:
        """Whether a callback may make a request in a step on this rank only."""
        events = (Event.STEP_START, *INNER_STEP_EVENTS, Event.BEFORE_OPTIMIZER_STEP, Event.STEP_END)
        return any(listener.callback.asks_alone for event in events for listener, _ in self._listeners_by_event[event])

    def emit(self, event: Event, *details: Any) -> None:
        """Call every callback that listens to `event`; an error is handled by the callback's `on_error`."""
        listeners = self._listeners_by_event[event]
        if not listeners:
            return
        begin = time.perf_counter()
        for listener, handler in listeners:
            try:
                handler(self.trainer, *details)
            except BaseException as error:
                if not self._apply_error_policy(listener, f"on_{event}", error):
                    raise
            end = time.perf_counter()
            listener.seconds += end - begin
            listener.calls += 1
            begin = end

    def _apply_error_policy(self, listener: Listener, method: str, error: BaseException) -> bool:
        """Apply a callback's `on_error`: return whether the run continues, and log the error if so."""
        name, policy = f"{listener.name}.{method}", listener.callback.on_error
        error.add_note(f"{_RAISED_BY}{name}.")
        # after an error of a collective this rank is out of step with the others, whatever the policy says
        if policy == "raise" or not isinstance(error, Exception) or isinstance(error, DistributedError):
            return False
        listener.failures += 1
        count = listener.failures
        step = self.progress.step
        if policy == "disable":
            logger.warning(
                "%s failed after step %d, and is called no more in this run (on_error='disable').", name, step,
                exc_info=error,
            )  # fmt: skip
            listener.is_disabled = True
            self._bind()
        elif count == 1:
            logger.warning("%s failed after step %d (on_error='warn').", name, step, exc_info=error)
        elif str(count).strip("0") == "1":  # 10, 100, ...: it may fail in every step
            logger.warning(
                "%s failed after step %d, the %dth failure of this callback: %s: %s.", name, step, count,
                type(error).__name__, error,
            )  # fmt: skip
        return True

    # --- the run

    def begin_train(self) -> None:
        """Start the clock and emit TRAIN_START."""
        self.is_running = True
        self._latest_tick = time.perf_counter()
        # discards requests made before the run or left by an earlier one
        self.control, self.stop, self.signal = Control(), "", 0
        order = ", ".join(f"{type(callback).__name__} ({callback.order})" for callback in self.callbacks)
        logger.info("Callbacks in the order they run: %s.", order or "none")
        self.emit(Event.TRAIN_START)

    def failed(self, error: BaseException) -> None:
        """Emit EXCEPTION; errors of callbacks are logged, so they cannot hide `error`."""
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
            # a signal that is kept among the requests would cut short the evaluations after the run
            self.stop, self.signal = self.stop or self.control.stop, self.signal or self.control.signal
            self.control = Control()
            self._log_callback_times()

    def _log_callback_times(self) -> None:
        """Log the time that each callback took, and which ones failed."""
        times = []
        for listener in sorted(self.listeners, key=operator.attrgetter("seconds"), reverse=True):
            if listener.calls:
                times.append(f"{listener.name} {listener.seconds:.3f} s ({listener.calls} calls)")
        if times:
            logger.info("Time in callbacks: %s.", ", ".join(times))
        for listener in self.listeners:
            if listener.failures:
                ending = ", and was called no more after that" if listener.is_disabled else ""
                often = "once" if listener.failures == 1 else f"{listener.failures} times"
                logger.warning("The callback %s failed %s in this run%s.", listener.name, often, ending)

    def _emit_safely(self, event: Event, *details: Any) -> None:
        for listener, handler in self._listeners_by_event[event]:
            try:
                handler(self.trainer, *details)
            except Exception:
                logger.exception("%s.on_%s failed while the run was ending by another error.", listener.name, event)

    def tick(self) -> None:
        """Add the time since the latest tick to `progress.seconds`, unless no run is active."""
        current = time.perf_counter()
        if self.is_running:
            self.progress.seconds += current - self._latest_tick
        self._latest_tick = current

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the work inside from the time between two logs, from which rates are computed."""
        if self._is_untimed:
            yield
            return
        start, self._is_untimed = time.perf_counter(), True
        try:
            yield
        finally:
            self._is_untimed = False
            step, seconds, samples, tokens = self.logged_at
            self.logged_at = (step, seconds + time.perf_counter() - start, samples, tokens)

    def set_profiler_ranges(self, owner: object, ranges: ProfilerRanges | None) -> None:
        """Run data, forward, backward and update of each step inside of `ranges(name)`; None removes the owner's.

        The ranges of several owners are nested.
        """
        self._ranges_by_owner.pop(id(owner), None)
        if ranges is not None:
            self._ranges_by_owner[id(owner)] = ranges
        all_ranges = list(self._ranges_by_owner.values())

        def enter_all(name: str) -> contextlib.ExitStack:
            stack = contextlib.ExitStack()
            for enter_range in all_ranges:
                stack.enter_context(enter_range(name))
            return stack

        for annotate in self.annotators:
            annotate(enter_all if all_ranges else None)

    def unsubscribe(self, callback: Callback, *events: Event) -> None:
        """Unsubscribe a callback from events until the callbacks are registered again."""
        for event in events:
            # a new list, as this may be called while the old one is iterated over
            self._listeners_by_event[event] = [
                entry for entry in self._listeners_by_event[event] if entry[0].callback is not callback
            ]
        self._update_emitters()

    # --- epochs and steps

    def begin_epoch(self) -> None:
        """Emit EPOCH_START at the start of an epoch, or of the rest of one after a resume."""
        self._epoch_start_step = -1 if self.progress.samples_in_epoch else self.progress.step
        self.emit(Event.EPOCH_START)

    def begin_step(self, batches: Sequence[Any] = ()) -> None:
        """Emit DATA_FETCHED and STEP_START before a window is trained on."""
        if self.emit_in_step is not None:
            self.emit_in_step(Event.DATA_FETCHED, batches)
        if self._listeners_by_event[Event.STEP_START]:
            self.emit(Event.STEP_START)

    def end_step(self, samples: int, tokens: int = 0, skipped: bool = False, batches: int = 0) -> None:
        """Count a window that was trained on or skipped, with its numbers over all ranks, and emit STEP_END."""
        self.progress.advance(samples, tokens, skipped, batches)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= _MAX_SKIPPED:
            raise self._no_update_error()
        self.tick()
        self.emit(Event.STEP_END)

    def end_epoch(self, complete: bool, row: Mapping[str, Any]) -> None:
        """Emit EPOCH_END; the epoch counts, and gets a row in the history, only if its data were used up."""
        self.progress.close_epoch(complete)
        if (
            complete
            and self._epoch_start_step == self.progress.step
            and self._skipped_in_a_row >= _MAX_SKIPPED_IN_EPOCH
        ):
            raise self._no_update_error()
        if complete:
            self.add_epoch_row(row)
        self.tick()
        self.emit(Event.EPOCH_END)

    def check_updates(self) -> None:
        """Raise DataError at the end of a run in which every step was skipped."""
        if self._skipped_in_a_row and not self.progress.step:
            raise self._no_update_error()

    def _no_update_error(self) -> DataError:
        return DataError(
            f"The last {self._skipped_in_a_row} steps were all skipped: nothing is trained. Either no sample has a "
            "label that counts (integer labels of -100 are left out), or no loss or gradient is finite "
            "(on_nonfinite='skip', or a loss scale of fp16 that is still falling). Look at the labels, and at the loss "
            "of a batch."
        )

    def add_epoch_row(self, row: Mapping[str, Any]) -> None:
        """Add the means of an epoch, or of its part before the run ended, to the history."""
        self.metrics.add_train({"epoch": round(self.progress.epochs, 6), "step": self.progress.step, **row})

    def undo_requests(self) -> None:
        """Forget the requests and limits of steps that were undone; only a signal still ends the run."""
        if self.stop != "signal":
            self.stop = ""
        if self.control.stop != "signal":
            self.control = Control()

    # --- answers to requests

    def add_values(self, logs: dict[str, Any]) -> None:
        """Add the `log_values` of callbacks to a row of logs.

        Raises:
            ConfigError: If the row already has a value with the name of one of them.
            TypeError: If a callback returns anything but a dict of numbers.
        """
        for listener, log_values in self._log_values_methods:
            begin = time.perf_counter()
            try:
                values = _to_numbers(log_values(self.trainer))
            except BaseException as error:
                if not self._apply_error_policy(listener, "log_values", error):
                    raise
                values = {}
            listener.seconds += time.perf_counter() - begin
            listener.calls += 1
            if clashes := logs.keys() & values.keys():
                raise ConfigError(
                    f"{listener.name}.log_values returns {min(clashes)!r}, which the row of logs "
                    "has already. Rename it."
                )
            logs.update(values)

    def report(self, values: Mapping[str, str | Histogram]) -> None:
        """Emit REPORT with texts and histograms, on the ranks that call it."""
        self.emit(Event.REPORT, values)

    def evaluated(self, metrics: Mapping[str, float], counts: bool = True) -> None:
        """Add an evaluation to the history and compare it with the best; `counts=False` leaves patience unchanged."""
        self.evaluated_step = self.progress.step
        value = metrics[self.objective.key(metrics)]
        self.improved = self.objective.update(value, self.progress.step, counts)
        self.metrics.add_valid(
            {"epoch": round(self.progress.epochs, 6), "step": self.progress.step, **metrics}, best=self.improved
        )
        self.tick()
        self.emit(Event.EVAL_END, metrics)

    def saved(self, path: Path) -> None:
        """Record a complete checkpoint, and emit SAVE_END."""
        self.saved_path = path
        self.tick()
        self.emit(Event.SAVE_END)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, the objective, the length of the history, and the callbacks' states."""
        self.tick()
        states, turns = [], collections.Counter[str]()
        for callback in self.callbacks:
            if id(callback) in self._components:
                continue
            name, state = type(callback).__qualname__, callback.state_dict()
            if state:
                states.append({"callback": name, "turn": turns[name], "state": state})
            turns[name] += 1
        return {
            "progress": self.progress.state_dict(),
            "objective": self.objective.state_dict(),
            "metrics": self.metrics.to_dict(with_rows=False),
            "evaluated_step": self.evaluated_step,
            "callbacks": states,
            "clock": self.clock.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], resets_best: bool = False) -> None:
        """Restore the state from `state_dict()`, except for those of callbacks and, as an option, the best so far."""
        size = self.progress.epoch_size
        self.progress = Progress.from_state(state["progress"])
        self.progress.epoch_size = size
        self.metrics = MetricsDict.from_dict(state["metrics"])
        # the run continues, so it has no reason to stop yet
        self.metrics.pop("stop_reason", None)
        if resets_best:
            self.metrics["best_valid"] = {}
            for name in ("best_step", "best_checkpoint"):
                self.metrics.pop(name, None)
        else:
            self.objective.load_state_dict(state["objective"])
        self.evaluated_step = state["evaluated_step"]
        self.clock.load_state_dict(state["clock"])
        # so that a run that ends at once does not save the checkpoint it was resumed from again
        self.saved_at = self.progress.position

    def outcome(self) -> dict[str, Any]:
        """Return the progress, the history and the best evaluation, for a copy of the trainer."""
        names = ("progress", "metrics", "evaluated_step", "stop")
        return {name: getattr(self, name) for name in names} | {"objective": self.objective.state_dict()}

    def load_outcome(self, outcome: Mapping[str, Any]) -> None:
        """Restore the result of `outcome`."""
        self.objective.load_state_dict(outcome["objective"])
        vars(self).update({name: value for name, value in outcome.items() if name != "objective"})

    def load_callbacks(self, entries: Iterable[Mapping[str, Any]], undo: contextlib.ExitStack) -> None:
        """Restore each callback's state from that of a callback of the same class; `undo` restores the current ones."""
        unmatched = list(self.callbacks)
        for entry in entries:
            name = entry["callback"]
            # "turn" is the index among all callbacks of the class, of which those without a state have no entry
            candidates = [
                callback
                for callback in self.callbacks
                if type(callback).__qualname__ == name and id(callback) not in self._components
            ]
            match = next((callback for callback in candidates[entry.get("turn", 0) :] if callback in unmatched), None)
            if match is None:
                logger.warning("The checkpoint has the state of a callback %r, which is not among the callbacks.", name)
                continue
            unmatched.remove(match)
            restore_with_undo(match, entry["state"], undo)

    def loaded(self, folder: Path) -> None:
        """Record the folder of the restored checkpoint, and emit CHECKPOINT_LOADED."""
        self.resumed_from = folder
        self.emit(Event.CHECKPOINT_LOADED)
