"""Work of the user's own at intervals of a run, such as a benchmark; `Preview` shares its schedule and its limits."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, cast

from omnitrain.core.duration import Duration, Every
from omnitrain.core.errors import ConfigError, did_you_mean
from omnitrain.core.events import Callback, TrainerLike
from omnitrain.core.progress import Progress

logger: logging.Logger = logging.getLogger("omnitrain")

OnError = Literal["raise", "warn", "disable"]
_POLICIES = ("raise", "warn", "disable")


class Periodic(Callback):
    """Calls a function of yours at an interval, and adds the values that it returns to the logs.

    It runs at the end of a step, before its evaluation and its checkpoint. The model is
    in evaluation mode, without gradients, in autocast, with the weights that evaluations show (those of an EMA, if
    there is one). Modes, weights and random numbers are restored, and the time is in no rate. The values are in a row
    of logs of that very step. After a resume nothing is done twice, and nothing is left out.

    Args:
        function: `function(trainer)` returns values by name, or None. One that yields them, part by part, can be
            ended between its parts.
        every: The interval: steps, or a string such as "1ep", "500ba" or "0.1dur".
        timeout: How long it may take, such as "30s"; None is no limit. One that yields is ended there, and what it
            has yielded counts. One that does not cannot be interrupted: taking longer is an error.
        on_error: What an error does: "raise" ends the run, "warn" logs it, and "disable" logs it and ends this
            callback for the rest of the run. An error on one rank counts on all of them.
        main_only: Whether only the main rank calls the function, while the others wait. Refused where the weights
            are sharded.

    Raises:
        ConfigError: If an argument is wrong.

    >>> def benchmark(trainer):
    ...     return {"bench_weights": float(sum(one.sum() for one in trainer.model.parameters()))}
    >>> callbacks = [Periodic(benchmark, every="1ep")]  # Trainer(..., callbacks=callbacks)
    """

    order: ClassVar[int] | int = 10
    asks_alone: ClassVar[bool] | bool = False

    def __init__(
        self,
        function: Callable[..., Any] | None,
        every: int | str | Duration,
        timeout: int | float | str | Duration | None = None,
        on_error: OnError = "warn",
        main_only: bool = False,
    ) -> None:
        self.every: Duration = Duration.parse(every, "ba", "every")
        self.timeout: float = math.inf if timeout is None else _seconds(timeout)
        if on_error not in _POLICIES:
            raise ConfigError(
                f"`on_error` must be 'raise', 'warn' or 'disable', got {on_error!r}."
                f"{did_you_mean(str(on_error), _POLICIES)}"
            )
        if function is not None and not callable(function):
            raise ConfigError(f"`function` must be a function of the trainer, got {function!r}.")
        self.function: Callable[..., Any] | None = function
        self.policy: OnError = on_error
        """What an error in the work does. `Callback.on_error` stays "raise": the ranks agree on errors here."""
        self.main_only = main_only
        self.is_disabled: bool = False
        """Whether an error has ended it for the rest of the run."""
        self._schedule: Every | None = None
        self._values: dict[str, float] = {}
        """What the next row of logs shows."""
        self._until = math.inf
        """When the work that is being done has to end, by `time.monotonic`."""

    @property
    def name(self) -> str:
        """What messages call it."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"{type(self).__name__}({name})"

    def check(self, trainer: TrainerLike) -> None:
        """Refuse what cannot work, before the first step.

        Raises:
            ConfigError: Naming the argument.
        """
        if self.every.unit == "s" and trainer.world_size > 1:
            raise ConfigError(
                f"`every={str(self.every)!r}` of {self.name} is a time, and the clocks of {trainer.world_size} "
                "processes differ. Give steps, samples, tokens or epochs."
            )
        if self.main_only and _run(trainer).backend.forward_is_collective:
            raise ConfigError(
                f"`main_only=True` of {self.name} does not work with sharded weights: the model runs on all "
                "processes or on none. Leave it out."
            )

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Check the arguments, and start the interval at the position of the run."""
        self.check(trainer)
        self.is_disabled = False
        self._schedule = Every(self.every, trainer.limits)
        self._schedule.restart(_closed(trainer.progress))

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Do the work, if it is due."""
        self._look(trainer)

    def on_epoch_end(self, trainer: TrainerLike) -> None:
        """Do the work, if it is due."""
        self._look(trainer)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Tell of values that came after the last row, as they do at the end of a stream of unknown length."""
        if self._values and trainer.is_main_process:
            logger.warning("%s came after the last row of logs: %s.", self.name, self._values)
        self._values = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the values that wait for the next row of logs."""
        return {"values": self._values} if self._values else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore values that no row of logs had when the checkpoint was written."""
        self._values = dict(state.get("values", {}))

    def log_values(self, trainer: TrainerLike) -> Mapping[str, float]:
        """Return the latest values, once."""
        values, self._values = self._values, {}
        return values

    def runs_on_main_only(self, trainer: TrainerLike) -> bool:
        """Return whether the other ranks wait while the main one works."""
        return self.main_only

    def work(self, trainer: TrainerLike) -> Iterator[Mapping[str, float] | None]:
        """Do the work, and yield the values of each part of it; on several ranks, equally many parts on each."""
        assert self.function is not None
        found: Any = self.function(trainer)
        if inspect.isgenerator(found):
            yield from cast(Iterator[Any], found)
        elif time.monotonic() > self._until:
            raise TimeoutError(f"it took longer than `timeout={self.timeout:g}` seconds")
        else:
            yield found

    def _look(self, trainer: TrainerLike) -> None:
        if self._schedule is None or not self._schedule.due(_closed(trainer.progress)) or self.is_disabled:
            return
        run = _run(trainer)
        with run.lifecycle.untimed(), run._evaluation.apart(), run.ranks.in_phase(type(self).__name__):
            values, error, is_complete = self._done(trainer)
        if error is not None:
            self._failed(trainer, error)
        elif not is_complete:
            logger.warning(
                "%s was ended at step %d by `timeout=%g` seconds.", self.name, trainer.progress.step, self.timeout
            )
        self._values |= values
        if values:
            trainer.control.schedule("log")

    def _done(self, trainer: TrainerLike) -> tuple[dict[str, float], Exception | None, bool]:
        """Return the values, the error of any rank, and whether all parts were done before the limit."""
        ranks, values = _run(trainer).ranks, dict[str, float]()
        self._until = time.monotonic() + self.timeout
        is_alone = self.runs_on_main_only(trainer)
        parts = self.work(trainer) if ranks.is_main or not is_alone else iter(())
        with contextlib.ExitStack() as stack:
            if inspect.isgenerator(parts):
                stack.callback(parts.close)
            while True:
                error, found, has_ended = None, dict[str, float](), False
                try:
                    found = _checked(next(parts), self.name)
                except StopIteration:
                    has_ended = True
                except Exception as raised:
                    error, has_ended = raised, True
                is_late = time.monotonic() > self._until
                # other ranks get the words of an error: it may not be one that can be sent
                told = None if error is None else f"{type(error).__name__}: {error}"
                alike = ranks.gather(f"a part of {self.name}", (found, has_ended, is_late, told))
                values |= alike[0][0]  # those of the main rank, as all ranks show one row
                if failed := [(rank, one[3]) for rank, one in enumerate(alike) if one[3] is not None]:
                    rank, words = failed[0]
                    return {}, error or RuntimeError(f"on rank {rank}: {words}"), True
                asked = alike[:1] if is_alone else alike
                if any(one[1] for one in asked):
                    if not all(one[1] for one in asked):
                        return {}, RuntimeError("the ranks yield different numbers of parts"), True
                    return values, None, True
                if any(one[2] for one in asked):
                    return values, None, False

    def _failed(self, trainer: TrainerLike, error: Exception) -> None:
        """Do what `on_error` says."""
        step = trainer.progress.step
        if self.policy == "raise":
            error.add_note(f"Raised by {self.name} at step {step}; on_error='warn' goes on without it.")
            raise error
        rest = " It is disabled for the rest of the run." if self.policy == "disable" else ""
        self.is_disabled = self.policy == "disable"
        if trainer.is_main_process:
            logger.warning(
                "%s failed at step %d, and the run goes on: %s: %s.%s", self.name, step, type(error).__name__, error,
                rest, exc_info=error if error.__traceback__ else None,
            )  # fmt: skip


def _closed(progress: Progress) -> Progress:
    """Return a position after the last step of an epoch as one after the epoch, so that the values are in its row."""
    if not progress.is_epoch_consumed:
        return progress
    progress = copy.copy(progress)
    progress.close_epoch(True)
    return progress


def _run(trainer: TrainerLike) -> Any:
    """Return the trainer with its parts, which callbacks of ours may use and `TrainerLike` does not promise."""
    return trainer


def _checked(values: Any, name: str) -> dict[str, float]:
    """Return the values that a function has returned, as floats.

    Raises:
        TypeError: If they are no numbers by name.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must return a dict of numbers or None, got {values!r:.200}")
    return {str(key): float(value) for key, value in values.items()}


def _seconds(timeout: int | float | str | Duration) -> float:
    duration = Duration.parse(timeout, "s", "timeout")
    if duration.unit != "s":
        raise ConfigError(f"`timeout` must be a time such as '30s' or '5m', got {str(duration)!r}.")
    return float(duration.value)
