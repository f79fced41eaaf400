"""Time limit of a job."""

from __future__ import annotations

import logging
import os
import time

import psutil

from omnitrain.arguments import parse_seconds
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Callback, TrainerLike

logger: logging.Logger = logging.getLogger("omnitrain")


class TimeLimit(Callback):
    """Ends the run, with a checkpoint, before the time of a job is over; the next job resumes it.

    Unlike `max_duration`, it counts the time of this job only, from the start of its process. The run ends at the last
    step boundary from which another step, with its evaluation and checkpoint, would come too late, judged by the
    longest one so far. `trainer.stop_reason` is then "requested".

    Args:
        limit: The time of the job, such as "2h" or a number of seconds; None reads the end of the SLURM job from
            `SLURM_JOB_END_TIME`.
        margin: The time to leave for the last checkpoint, and for what follows the run.

    >>> callbacks = [TimeLimit("2h", margin="5m")]  # Trainer(..., save_dir="run", callbacks=callbacks)
    """

    order = 0

    def __init__(self, limit: float | str | Duration | None = None, margin: float | str | Duration = "2m") -> None:
        """Find the end of the job.

        Raises:
            ConfigError: If a time is wrong, or the limit is not longer than the margin.
        """
        reserve = parse_seconds("margin", margin)
        if limit is not None:
            seconds = parse_seconds("limit", limit)
            if seconds <= reserve:
                raise ConfigError(
                    f"`limit={limit!r}` is not longer than `margin={margin!r}`, which is left for the last checkpoint. "
                    "Give a longer limit, or a shorter margin."
                )
            end = psutil.Process().create_time() + seconds
        else:
            text = os.environ.get("SLURM_JOB_END_TIME", "")
            if not text.isdigit():
                raise ConfigError(
                    f"TimeLimit() reads SLURM_JOB_END_TIME, which is {text!r}. Give the time of the job, as in "
                    "TimeLimit('2h')."
                )
            end = float(text)
        self._end = end - reserve
        self._longest = self._latest = 0.0

    def on_train_start(self, trainer: TrainerLike) -> None:
        self._longest, self._latest = 0.0, time.time()
        if trainer.save_dir is None:
            logger.warning("TimeLimit will end the run without a checkpoint, as there is no `save_dir`.")
        self._stop_if_late(trainer)

    def on_step_end(self, trainer: TrainerLike) -> None:
        previous, self._latest = self._latest, time.time()
        self._longest = max(self._longest, self._latest - previous)
        self._stop_if_late(trainer)

    def _stop_if_late(self, trainer: TrainerLike) -> None:
        if self._latest + self._longest >= self._end and not trainer.control.stop:
            logger.info("The time of this job is nearly over: the run ends after step %d.", trainer.progress.step)
            trainer.stop()
