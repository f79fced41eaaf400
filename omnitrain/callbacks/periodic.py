"""Custom work at intervals of a run, such as a benchmark."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, cast

from omnitrain.core.duration import (
    AnyInterval,
    Duration,
    Every,
    Interval,
    IntervalRule,
    make_interval,
    parse_interval,
)
from omnitrain.core.errors import ConfigError, check_choice
from omnitrain.core.events import ERROR_POLICIES, Callback, TrainerLike
from omnitrain.core.progress import Progress

logger: logging.Logger = logging.getLogger("omnitrain")

OnError = Literal["raise", "warn", "disable"]


class Periodic(Callback):
    """Calls your function at an interval, and adds the values that it returns to the logs.

    It runs at the end of a step, before the step's evaluation and checkpoint. The model is in evaluation mode, without
    gradients, in autocast, with the weights used in evaluations (such as an EMA's). Modes, weights and random
    numbers are restored, and the time is excluded from rates. The values are in a row of logs of the same step. A
    resumed run repeats and skips nothing.

    Args:
        function: `function(trainer)` returns values by name, or None. A generator that yields them can be ended
            between its parts.
        every: The interval: steps, or a string such as "1ep", "500ba after 2ep" or "0.1dur"; a function of the
            progress, the same on all ranks; or a list of these.
        timeout: The longest duration, such as "30s"; None is no limit. A generator is ended there, and the values
            it has yielded are logged. Another function cannot be interrupted: taking longer is an error.
        on_error: What an error does: "raise" ends the run, "warn" logs it, and "disable" logs it and ends this
            callback for the rest of the run. An error on one rank counts on all of them.
        main_only: Whether only the main rank calls the function, while the others wait. An error with sharded
            weights.

    Raises:
        ConfigError: If an argument is wrong.

    >>> def benchmark(trainer):
    ...     return {"bench_weights": float(sum(weight.sum() for weight in trainer.model.parameters()))}
    >>> callbacks = [Periodic(benchmark, every="1ep")]  # Trainer(..., callbacks=callbacks)
    """

    order: ClassVar[int] | int = 10
    asks_alone: ClassVar[bool] | bool = False

    def __init__(
        self,
        function: Callable[..., Any] | None,
        every: Interval,
        timeout: int | float | str | Duration | None = None,
        on_error: OnError = "warn",
        main_only: bool = False,
    ) -> None:
        self.every: Interval = every
        self._rules: list[IntervalRule] = parse_interval(every, "every")
        limit = None if timeout is None else Duration.parse(timeout, "s", "timeout")
        if limit is not None and limit.unit != "s":
            raise ConfigError(f"`timeout` must be a time such as '30s' or '5m', got {str(limit)!r}.")
        self.timeout: float = math.inf if limit is None else float(limit.value)
        check_choice("on_error", on_error, ERROR_POLICIES)
        if function is not None and not callable(function):
            raise ConfigError(f"`function` must be a function of the trainer, got {function!r}.")
        self.function: Callable[..., Any] | None = function
        self.policy: OnError = on_error
        """The argument `on_error`. `Callback.on_error` stays "raise", as the ranks agree on errors here."""
        self.main_only = main_only
        self.is_disabled: bool = False
        """Whether an error disabled it for the rest of the run."""
        self._schedule: Every | AnyInterval | None = None
        # Values for the next row of logs.
        self._values: dict[str, float] = {}
        # The step that they are of; -1 for those of a checkpoint.
        self._step = -1
        # When the current work must end, by `time.monotonic`.
        self._deadline = math.inf

    @property
    def name(self) -> str:
        """The name in messages."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"{type(self).__name__}({name})"

    def check(self, trainer: Any) -> None:
        """Check the arguments against the trainer, before the first step.

        Raises:
            ConfigError: If an argument does not work with this trainer.
        """
        if any(rule.has_time for rule in self._rules) and trainer.world_size > 1:
            every = ", ".join(map(str, self._rules))
            raise ConfigError(
                f"`every={every!r}` of {self.name} is a time, and the clocks of {trainer.world_size} processes differ. "
                "Give steps, samples, tokens or epochs."
            )
        if self.main_only and trainer.backend.forward_is_collective:
            raise ConfigError(
                f"`main_only=True` of {self.name} does not work with sharded weights: the model runs on all "
                "processes or on none. Leave it out."
            )

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Check the arguments, and start the interval at the position of the run."""
        self.check(trainer)
        self.is_disabled = False
        self._schedule = make_interval(self._rules, trainer.limits)
        self._schedule.restart(_close_epoch(trainer.progress))

    def on_checkpoint_loaded(self, trainer: TrainerLike) -> None:
        """Start the interval at a state to which the run goes back, without values of later steps."""
        if self._schedule is not None:
            self._schedule.restart(_close_epoch(trainer.progress))
        if self._step > trainer.progress.step:
            self._values = {}

    def on_step_end(self, trainer: Any) -> None:
        if self._schedule is None or not self._schedule.due(_close_epoch(trainer.progress)) or self.is_disabled:
            return
        with trainer.lifecycle.untimed(), trainer._evaluation.apart(), trainer.ranks.in_phase(type(self).__name__):
            values, error, is_complete = self._work_until_timeout(trainer)
        if error is not None:
            self._apply_error_policy(trainer, error)
        elif not is_complete:
            logger.warning(
                "%s was ended at step %d by `timeout=%g` seconds.", self.name, trainer.progress.step, self.timeout
            )
        self._values |= values
        self._step = trainer.progress.step
        if values:
            trainer.control.schedule("log")

    on_epoch_end = on_step_end

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Report values that came after the last row, such as at the end of a stream of unknown length."""
        if self._values and trainer.is_main_process:
            logger.warning("%s came after the last row of logs: %s.", self.name, self._values)
        self._values = {}

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values} if self._values else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values, self._step = dict(state.get("values", {})), -1

    def log_values(self, trainer: TrainerLike) -> Mapping[str, float]:
        values, self._values = self._values, {}
        return values

    def runs_on_main_only(self, trainer: TrainerLike) -> bool:
        """Return whether the other ranks wait while the main one works."""
        return self.main_only

    def work(self, trainer: TrainerLike) -> Iterator[Mapping[str, float] | None]:
        """Do the work, and yield the values of each part; all ranks must yield the same number of parts."""
        assert self.function is not None
        result: Any = self.function(trainer)
        if inspect.isgenerator(result):
            yield from cast(Iterator[Any], result)
        elif time.monotonic() > self._deadline:
            raise TimeoutError(f"it took longer than `timeout={self.timeout:g}` seconds")
        else:
            yield result

    def _work_until_timeout(self, trainer: Any) -> tuple[dict[str, float], Exception | None, bool]:
        """Return the values, the error of any rank, and whether all parts were done before the timeout."""
        ranks, values = trainer.ranks, dict[str, float]()
        self._deadline = time.monotonic() + self.timeout
        main_only = self.runs_on_main_only(trainer)
        parts = self.work(trainer) if ranks.is_main or not main_only else iter(())
        with contextlib.ExitStack() as stack:
            if inspect.isgenerator(parts):
                stack.callback(parts.close)
            while True:
                error, new_values, has_ended = None, dict[str, float](), False
                try:
                    part = next(parts)
                    part = {} if part is None else part
                    if not isinstance(part, Mapping):
                        raise TypeError(f"{self.name} must return a dict of numbers or None, got {part!r:.200}")
                    new_values = {str(key): float(value) for key, value in part.items()}
                except StopIteration:
                    has_ended = True
                except Exception as raised:
                    error, has_ended = raised, True
                is_late = time.monotonic() > self._deadline
                # other ranks get the error as text: it may not be picklable
                message = None if error is None else f"{type(error).__name__}: {error}"
                states = ranks.gather(f"a part of {self.name}", (new_values, has_ended, is_late, message))
                values |= states[0][0]  # those of the main rank, as all ranks show one row
                if failures := [(rank, state[3]) for rank, state in enumerate(states) if state[3] is not None]:
                    rank, message = failures[0]
                    return {}, error or RuntimeError(f"on rank {rank}: {message}"), True
                workers = states[:1] if main_only else states
                if any(state[1] for state in workers):
                    if not all(state[1] for state in workers):
                        return {}, RuntimeError("the ranks yield different numbers of parts"), True
                    return values, None, True
                if any(state[2] for state in workers):
                    return values, None, False

    def _apply_error_policy(self, trainer: TrainerLike, error: Exception) -> None:
        step = trainer.progress.step
        if self.policy == "raise":
            error.add_note(f"Raised by {self.name} at step {step}; on_error='warn' continues without it.")
            raise error
        suffix = " It is disabled for the rest of the run." if self.policy == "disable" else ""
        self.is_disabled = self.policy == "disable"
        if trainer.is_main_process:
            logger.warning(
                "%s failed at step %d, and the run continues: %s: %s.%s", self.name, step, type(error).__name__, error,
                suffix, exc_info=error if error.__traceback__ else None,
            )  # fmt: skip


def _close_epoch(progress: Progress) -> Progress:
    """Return the position after the epoch for one after its last step, so that the values are in the epoch's row."""
    if not progress.is_epoch_consumed:
        return progress
    progress = copy.copy(progress)
    progress.close_epoch(True)
    return progress
