"""Console output of a run: a live bar on a terminal, one plain line per log in a file or a pipe.

Only wording and drawing belong here. The cadence callback decides when to log, the trainer what is in a log, and
`duration.Limits` how far the run has come.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from omnitrain.events import Callback, TrainerLike

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress


__all__ = ["ProgressBar"]

REFRESH_SECONDS = 0.1  # one drawing takes about 0.5 ms of the training thread, so ten a second cost it 0.5 %


class ProgressBar(Callback):
    """Shows step, loss, the latest evaluation and the time left, on the main process.

    On a terminal this is a live bar, and each evaluation leaves a line above it. Everywhere else (a file, a pipe, a
    batch log) it is one plain line per log, printed once its step is over, so that an evaluation at the same step is
    in the same line; an evaluation between two logs is in the next line. Notebooks show the bar if `ipywidgets` is
    installed, and the lines otherwise.

    Args:
        enabled: None chooses the bar or the lines by the stream. True draws the bar even into a file, False prints
            nothing.
        stream: Where to print; None is `sys.stdout` at the start of training.

    >>> reporters = [ProgressBar()]  # Trainer(..., callbacks=reporters)
    """

    order: ClassVar[int] | int = 40
    asks_alone: ClassVar[bool] | bool = False

    def __init__(self, enabled: bool | None = None, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self.stream = stream
        self._bar: RichProgress | None = None
        self._held_logs: Mapping[str, float] | None = None
        self._latest_eval: dict[str, float] = {}
        self._latest_logs: Mapping[str, float] = {}
        self._next_refresh = self._next_log_refresh = 0.0
        self._started_at = 0.0
        self._started_from = 0.0
        self._is_gone = False

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Draw the bar at the position of the run, which is not 0 after a resume."""
        self._is_gone = False
        self._held_logs, self._latest_logs, self._latest_eval = None, {}, {}
        self._started_at, self._started_from = perf_counter(), trainer.limits.fraction(trainer.progress)
        if not self._prints(trainer):
            return
        console = _bar_console(self.enabled, self.stream)
        if console is not None:
            self._guard(lambda: self._start_bar(console, trainer))
        if trainer.progress.step:
            fraction = trainer.limits.fraction(trainer.progress)
            self._print_line([_position(trainer.progress.step, trainer.total_steps, fraction), "resumed"])

    def on_epoch_start(self, trainer: TrainerLike) -> None:
        """Print the line of the last log (a trainer with its own loop may start no steps)."""
        self._release_line(trainer)

    def on_step_start(self, trainer: TrainerLike) -> None:
        """Print the line of the last log, whose step is over."""
        if self._held_logs is not None:
            self._release_line(trainer)

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Redraw the bar, at most about ten times a second; otherwise only check the clock."""
        if self._bar is not None and perf_counter() >= self._next_refresh:
            self._refresh(trainer)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        """Show a row of training, or the result of a test."""
        if not self._prints(trainer):
            return
        if any(name.startswith("test_") for name in logs):
            self._print_line(_words(logs))
        elif self._bar is not None:
            self._latest_logs = dict(logs)
            # Not limited by the clock of STEP_END, which has just drawn: with long steps the loss would be a step late.
            if perf_counter() >= self._next_log_refresh:
                self._next_log_refresh = perf_counter() + REFRESH_SECONDS
                self._refresh(trainer)
        else:
            self._release_line(trainer)
            self._held_logs = dict(logs)

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        """Show the result of an evaluation above the bar, or in the line of its step."""
        if not self._prints(trainer):
            return
        self._latest_eval = {name: value for name, value in metrics.items() if name not in ("step", "epoch")}
        if self._bar is not None:
            position = {"step": trainer.progress.step, "epoch": trainer.progress.epochs}
            self._print_line(_words(position | self._latest_eval))
            self._refresh(trainer)

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        """Restore the terminal, so that the traceback can be read."""
        self._close(trainer)

    def on_train_end(self, trainer: TrainerLike) -> None:
        """Draw the bar a last time and restore the terminal, or print the last line."""
        self._close(trainer)

    def _prints(self, trainer: TrainerLike) -> bool:
        return self.enabled is not False and trainer.is_main_process and not self._is_gone

    def _guard(self, draw: Callable[[], Any]) -> None:
        """Draw; if the output is closed, print nothing for the rest of the run.

        A closed pipe (`python train.py | head`), a closed notebook or a terminal that hung up must not end a run of
        days. A broken pipe or a full disk raises OSError, a closed file ValueError.
        """
        try:
            draw()
        except (OSError, ValueError):
            self._is_gone = True
            self._held_logs = None
            bar, self._bar = self._bar, None
            if bar is not None:
                with contextlib.suppress(OSError, ValueError):
                    bar.stop()  # fails again on the same stream, but restores sys.stdout first

    def _print_line(self, words: Iterable[str]) -> None:
        line = "  ".join(words)
        if self._bar is not None:
            console = self._bar.console
            self._guard(lambda: console.print(line, markup=False, highlight=False, soft_wrap=True))
        else:
            # Flushed, because a batch log that is buffered by 8 KiB can show nothing for an hour.
            self._guard(lambda: print(line, file=self.stream or sys.stdout, flush=True))

    def _release_line(self, trainer: TrainerLike) -> None:
        logs, self._held_logs = self._held_logs, None
        if logs is None:
            return
        evaluation, self._latest_eval = self._latest_eval, {}
        words = _words({**logs, **evaluation}, trainer.total_steps, trainer.limits.fraction(trainer.progress))
        self._print_line([*words, f"ETA {self._eta(trainer)}"])

    def _start_bar(self, console: Console, trainer: TrainerLike) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        # The user's prints go above the bar, but only those meant for this terminal.
        is_stdout = console.file is sys.stdout
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8, max_width=40)),
            TextColumn("{task.fields[words]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            auto_refresh=False,  # its thread would draw while the training thread needs the interpreter
            redirect_stdout=is_stdout,
            redirect_stderr=is_stdout and sys.stderr is not None and sys.stderr.isatty(),
            expand=True,
        )
        self._bar.add_task("", total=1.0, words="")
        self._bar.start()
        self._refresh(trainer)

    def _refresh(self, trainer: TrainerLike) -> None:
        if self._bar is None:
            return
        self._next_refresh = perf_counter() + REFRESH_SECONDS
        step, fraction = trainer.progress.step, trainer.limits.fraction(trainer.progress)
        loss = {name: value for name, value in self._latest_logs.items() if name == "loss"}
        words = [f"ETA {self._eta(trainer)}", *_words(loss | self._latest_eval)]
        self._bar.update(
            self._bar.task_ids[0],
            completed=fraction if trainer.total_steps is None else min(step / max(trainer.total_steps, 1), 1.0),
            description=_position(step, trainer.total_steps, fraction),
            words="  ".join(words),
        )
        self._guard(self._bar.refresh)

    def _close(self, trainer: TrainerLike) -> None:
        self._release_line(trainer)
        self._refresh(trainer)
        if self._bar is not None:  # the refresh may have found the stream closed
            self._guard(self._bar.stop)
            self._bar = None

    def _eta(self, trainer: TrainerLike) -> str:
        """The time left at the pace since the last resume: before it the run may have been on another machine."""
        fraction = trainer.limits.fraction(trainer.progress)
        if fraction >= 1.0:
            return _clock(0.0)
        done = fraction - self._started_from
        if done <= 0.0:
            return "-:--:--"
        return _clock((perf_counter() - self._started_at) * (1.0 - fraction) / done)


def _bar_console(enabled: bool | None, stream: TextIO | None) -> Console | None:
    """Return the console to draw a bar on, or None for plain lines."""
    target = stream or sys.stdout
    # Checked before rich is: rich takes FORCE_COLOR, which most CI systems set, for a terminal.
    is_terminal = hasattr(target, "isatty") and not getattr(target, "closed", False) and target.isatty()
    if not (enabled or is_terminal or "ipykernel" in sys.modules):
        return None
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich's own ends the process

    console = QuietConsole(file=stream, force_terminal=True if enabled else None)
    if console.is_jupyter:  # rich draws a notebook's bar with ipywidgets, and warns without them
        is_drawable = bool((enabled or stream is None) and find_spec("ipywidgets"))
    else:
        is_drawable = bool(enabled) or (is_terminal and console.is_terminal and not console.is_dumb_terminal)
    return console if is_drawable else None


def _position(step: float, total_steps: int | None, fraction: float) -> str:
    return f"step {step:.0f} ({fraction:.0%})" if total_steps is None else f"step {step:.0f}/{total_steps}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _words(values: Mapping[str, float], total_steps: int | None = None, fraction: float | None = None) -> list[str]:
    """Format a row of values for people; a `fraction` means that the row is a log, with its place in the run."""
    words = []
    for name, value in values.items():
        if name == "step":
            words.append(f"step {value:.0f}" if fraction is None else _position(value, total_steps, fraction))
        elif name == "epoch":
            words.append(f"epoch {round(float(value), 2)}")
        elif name == "learning_rate":
            words.append(f"lr {value:.2e}")
        elif name.endswith("_per_second"):
            words.append(f"{value:.{0 if value >= 10 else 2}f} {name.removesuffix('_per_second')}/s")
        elif name == "grad_norm":
            words.append(f"grad_norm {value:.3g}")
        elif name != "skipped_steps" or value:
            words.append(f"{name} {value:.4g}")
    return words
