"""Logs and evaluations in Weights & Biases.

Decides which W&B run the values go to, and when it begins and ends.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from omnitrain.core.duration import Duration
from omnitrain.core.errors import MissingExtraError, Tolerance
from omnitrain.core.events import Callback, Histogram, TrainerLike
from omnitrain.loggers.rows import Pace, row_kind
from omnitrain.loggers.tensorboard import dashboard_names

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


class WandbLogger(Callback):
    """Sends logs, evaluations and the run's settings to Weights & Biases, from the main process.

    Values are named `train/loss`, `eval/accuracy`, ...; test results go to the run's summary. Checkpoints keep the id
    of the W&B run, so a resumed training continues it. A run that you opened with `wandb.init()` is used
    unchanged and left open. Requires the extra `wandb`.

    Args:
        project: The W&B project; None is W&B's default.
        every: The interval of the rows of training, such as "100ba"; None sends each.
        **init_kwargs: Passed on to `wandb.init()`; they override everything set here.

    >>> reporter = WandbLogger(project="digits", tags=["baseline"])
    >>> callbacks = [reporter]  # Trainer(..., callbacks=callbacks)
    """

    order: ClassVar[int] | int = 40

    def __init__(
        self, project: str | None = None, every: int | str | Duration | None = None, **init_kwargs: Any
    ) -> None:
        self._pace = Pace(every)
        self.project = project
        self.init_kwargs = init_kwargs
        self._run: Run | None = None
        self._run_id: str | None = None
        self._opened_run = False
        self._first_step = 0
        self._has_failed = False
        self._is_training = False
        self._tolerance = Tolerance("The folder of W&B", "The rows of the time in between are lost.")

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Open a run, continue the one of the checkpoint, or use the one that is open."""
        self._has_failed = False
        self._pace.begin(trainer)
        if trainer.progress.step == 0:
            self._run_id = None  # a second, fresh training is another run
        self._is_training = trainer.is_main_process
        if trainer.is_main_process:
            with self._tolerance:
                self._open(trainer)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Send a row of training, or put the result of a test into the run's summary."""
        if not trainer.is_main_process:
            return
        if row_kind(logs) == "train":
            if self._pace.shows(trainer):
                self._send(trainer, "train", logs)
            return
        # Not into the history: a test comes after the last step, and W&B accepts no step twice in a continued run.
        with self._tolerance:
            run = self._run or self._open(trainer)
            run.summary.update(dashboard_names(logs, "test"))
        if not self._is_training:
            self._close()

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Send an evaluation."""
        self._send(trainer, "eval", metrics)

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        """Send texts and histograms."""
        if self._is_training:
            self._log(trainer, {name: _media(value) for name, value in values.items()}, trainer.progress.step)

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        """Note that the run failed."""
        self._has_failed = True

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Finish the run, with exit code 1 if the training failed."""
        self._is_training = False
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the W&B run, and the state of the interval."""
        return {"run_id": self._run_id, **self._pace.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the id of the W&B run that a resumed training continues."""
        self._run_id = state.get("run_id")
        self._pace.load_state_dict(state)

    def _open(self, trainer: TrainerLike) -> Run:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("WandbLogger", "wandb", "wandb") from error
        self._run = wandb.run
        self._opened_run = self._run is None
        if self._run is None:
            settings: dict[str, Any] = {
                "project": self.project,
                "name": trainer.trial_name,
                "config": trainer.resolved_config(),
            }
            if self._run_id is not None:
                settings |= {"id": self._run_id, "resume": "allow"}
            self._run = wandb.init(**(settings | self.init_kwargs))
        self._run_id = self._run.id
        self._first_step = self._run.step  # read once: each read asks W&B's service process
        return self._run

    def _send(self, trainer: TrainerLike, kind: str, values: Mapping[str, float]) -> None:
        if not self._is_training:
            return
        self._log(trainer, dashboard_names(values, kind), int(values.get("step", trainer.progress.step)))

    def _log(self, trainer: TrainerLike, values: dict[str, Any], step: int) -> None:
        with self._tolerance:
            run = self._run or self._open(trainer)
            if not self._opened_run:
                # The user's rows advance W&B's step, and W&B drops a row whose step goes backwards.
                run.log({**values, "step": step})
            elif step >= self._first_step:
                run.log(values, step=step)
            # Otherwise a killed process has sent this step: W&B has the values and would warn about each.

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._opened_run:
            with self._tolerance:
                run.finish(exit_code=1 if self._has_failed else 0)


def _media(value: str | Histogram) -> Any:
    import numpy as np
    import wandb

    if isinstance(value, str):
        return wandb.Html(f"<pre>{html.escape(value)}</pre>")
    return wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(value.edges)))
