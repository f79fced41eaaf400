"""Console output of a run: bar, panel or lines.

Decides what is shown when. `summary.py` has the first and last lines, `notebook.py` draws the panel, and the cadence
callback decides when to log.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from omnitrain.arguments import check_switch
from omnitrain.core.duration import Duration
from omnitrain.core.events import Callback, Event, Histogram, TrainerLike
from omnitrain.core.foreign_names import explain_call
from omnitrain.core.metric_format import format_metric, sort_for_display
from omnitrain.loggers.logger import Pace, is_test_row
from omnitrain.loggers.notebook import NotebookPanel, is_notebook
from omnitrain.loggers.summary import clock, closing, may_stop_early, opening, position

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress


REFRESH_SECONDS = 0.1  # a refresh takes about 0.5 ms of the training thread, so ten per second cost 0.5 %
LINE_SECONDS = 5.0
# Maximum characters shown of a reported text.
_MAX_TEXT_LENGTH = 300
_BAR_WIDTH = 8


class ProgressBar(Callback):
    """Shows the model, logs, evaluations, remaining time and result of a run, on the main process.

    A terminal shows a live bar, with fewer values if it is narrow; a notebook shows a panel with a curve and the table
    of metrics. Everywhere else (a file, a pipe, a batch log, a dumb terminal or one with `NO_COLOR` set) each row is a
    plain line. Each evaluation is a separate line, with "(best)" if it is the best so far. The remaining time is to
    the planned end of the run, "at most" if it may stop early.

    Args:
        enabled: None decides by the stream. True draws the bar even into a file, False prints nothing.
        stream: Where to print; None is `sys.stdout` at the start of training.
        every: The interval of shown rows, in steps or as a duration such as "100ba" or "30s". None shows every row,
            at the interval `log_steps` of the trainer; as lines, the first and the last, the last before each
            evaluation, and one every 5 seconds. The files and loggers of the run get every row.

    >>> reporters = [ProgressBar(every="100ba")]  # Trainer(..., callbacks=reporters)
    """

    order: ClassVar[int] | int = 40
    asks_alone: ClassVar[bool] | bool = False

    @explain_call
    def __init__(
        self, enabled: bool | None = None, stream: TextIO | None = None, every: int | str | Duration | None = None
    ) -> None:
        check_switch("enabled", enabled)
        self.enabled = enabled
        self.stream = stream
        self._pace = Pace(every)
        # Whether the user has set it; otherwise, when the next line may come.
        self._has_pace, self._next_line = every is not None, 0.0
        # Whether no line has the latest logs yet.
        self._has_unshown_logs = False
        self._bar: RichProgress | None = None
        self._panel: NotebookPanel | None = None
        self._latest_eval: dict[str, float] = {}
        self._latest_logs: Mapping[str, float] = {}
        self._next_refresh = self._next_log_refresh = 0.0
        self._started_at = 0.0
        self._started_from = 0.0
        self._error: BaseException | None = None
        self._is_closed = False

    def on_train_start(self, trainer: TrainerLike) -> None:
        """Print the summary, and draw the bar at the position of the run, which is not 0 after a resume."""
        self._is_closed, self._error = False, None
        self._latest_logs, self._latest_eval = {}, {}
        self._started_at, self._started_from = perf_counter(), trainer.limits.fraction(trainer.progress)
        self._pace.begin(trainer)
        self._has_unshown_logs, self._next_line = False, 0.0
        if self._is_enabled(trainer):
            lines = opening(trainer)
            if self.enabled is None and is_notebook(self.stream or sys.stdout):
                self._guard(lambda: setattr(self, "_panel", NotebookPanel(lines)))
                return
            console = _bar_console(self.enabled, self.stream)
            for line in lines:
                self._print_line([line])
            if console is not None and not self._is_closed:
                self._guard(lambda: self._start_bar(console, trainer))
        if self._bar is None:  # then steps change nothing that is shown
            trainer.lifecycle.unsubscribe(self, Event.STEP_END)

    def on_step_end(self, trainer: TrainerLike) -> None:
        """Redraw the bar, at most about ten times a second; otherwise only check the clock."""
        if (self._bar is not None or self._panel is not None) and perf_counter() >= self._next_refresh:
            self._refresh(trainer)

    def on_log(self, trainer: TrainerLike, logs: Mapping[str, float]) -> None:
        if not self._is_enabled(trainer):
            return
        if is_test_row(logs):
            self._print_line(_format_row(logs))
            return
        if self._panel is not None:
            self._panel.add_point(logs["step"], logs)
        if not self._pace.shows(trainer):
            return
        self._latest_logs = dict(logs)
        if self._bar is None and self._panel is None:
            self._has_unshown_logs = True
            if self._has_pace or perf_counter() >= self._next_line:
                self._print_logs(trainer)
        # A separate limit from STEP_END, which has just redrawn: with long steps the loss would be a step late.
        elif perf_counter() >= self._next_log_refresh:
            self._next_log_refresh = perf_counter() + REFRESH_SECONDS
            self._refresh(trainer)

    def on_report(self, trainer: TrainerLike, values: Mapping[str, str | Histogram]) -> None:
        """Show the beginning of each text; histograms are only for loggers."""
        if not self._is_enabled(trainer):
            return
        for name, value in values.items():
            if isinstance(value, str):
                text = " ".join(value.split())
                shortened = text if len(text) <= _MAX_TEXT_LENGTH else text[: _MAX_TEXT_LENGTH - 3] + "..."
                self._print_line([f"{name}: {shortened}"])

    def on_eval_end(self, trainer: TrainerLike, metrics: Mapping[str, float]) -> None:
        if not self._is_enabled(trainer):
            return
        self._print_logs(trainer)
        self._latest_eval = {name: value for name, value in metrics.items() if name not in ("step", "epoch")}
        step, fraction = trainer.progress.step, trainer.limits.fraction(trainer.progress)
        words = _format_row({"step": step, "epoch": trainer.progress.epochs}, trainer.total_steps, fraction)
        line = [*words, *_format_row(self._latest_eval), *(["(best)"] if trainer.lifecycle.improved else [])]
        if self._panel is not None:
            self._panel.add_point(step, metrics)
        self._print_line(line, is_row=True)
        self._refresh(trainer)

    def on_exception(self, trainer: TrainerLike, error: BaseException) -> None:
        """Restore the terminal, so that the traceback can be read."""
        self._error = error
        self._stop_bar(trainer)

    def on_train_end(self, trainer: TrainerLike) -> None:
        self._stop_bar(trainer)
        if self._is_enabled(trainer):
            self._print_logs(trainer)
            self._print_line([closing(trainer, self._error)])
        if self._panel is not None:
            self._refresh(trainer, is_last=True)
            self._panel = None

    def _print_logs(self, trainer: TrainerLike) -> None:
        """Print the latest logs as a line, if no line has them and nothing else shows them."""
        if not self._has_unshown_logs:
            return
        self._has_unshown_logs, self._next_line = False, perf_counter() + LINE_SECONDS
        fraction = trainer.limits.fraction(trainer.progress)
        row = _format_row(self._latest_logs, trainer.total_steps, fraction)
        self._print_line([*row, *self._format_times(trainer)])

    def _is_enabled(self, trainer: TrainerLike) -> bool:
        return self.enabled is not False and trainer.is_main_process and not self._is_closed

    def _guard(self, draw: Callable[[], Any]) -> None:
        """Draw; if the output is closed, print nothing for the rest of the run.

        A closed pipe (`python train.py | head`), notebook or terminal must not end a run of days. A broken pipe or a
        full disk raises OSError, a closed file ValueError.
        """
        try:
            draw()
        except (OSError, ValueError):
            self._is_closed, self._panel = True, None
            bar, self._bar = self._bar, None
            if bar is not None:
                with contextlib.suppress(OSError, ValueError):
                    bar.stop()  # raises again on the same stream, but restores sys.stdout first

    def _print_line(self, words: Iterable[str], is_row: bool = False) -> None:
        line = "  ".join(words)
        if self._panel is not None:
            self._panel.add_line(line, is_note=not is_row)  # the panel has rows in its table
        elif self._bar is not None:
            console = self._bar.console
            self._guard(lambda: console.print(line, markup=False, highlight=False, soft_wrap=True))
        else:
            # Flushed, because a batch log with an 8 KiB buffer may show nothing for an hour.
            self._guard(lambda: print(line, file=self.stream or sys.stdout, flush=True))

    def _start_bar(self, console: Console, trainer: TrainerLike) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        # Print the user's output above the bar, but only output for this terminal.
        is_stdout = console.file is sys.stdout
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=_BAR_WIDTH, max_width=40)),
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

    def _refresh(self, trainer: TrainerLike, is_last: bool = False) -> None:
        if self._bar is None and self._panel is None:
            return
        self._next_refresh = perf_counter() + REFRESH_SECONDS
        step, fraction = trainer.progress.step, trainer.limits.fraction(trainer.progress)
        share = fraction if trainer.total_steps is None else min(step / max(trainer.total_steps, 1), 1.0)
        place = position(step, trainer.total_steps, fraction)
        if self._panel is not None:
            panel, words = self._panel, "  ".join([place, *self._fit_words(trainer, 160)])
            self._guard(lambda: panel.refresh(share, words, trainer.metrics, is_last))
        elif self._bar is not None:
            bar = self._bar
            words = "  ".join(self._fit_words(trainer, bar.console.width - len(place) - _BAR_WIDTH - 2))
            bar.update(bar.task_ids[0], completed=share, description=place, words=words)
            self._guard(bar.refresh)

    def _fit_words(self, trainer: TrainerLike, width: int) -> list[str]:
        """Return the words next to the bar: as many as fit into a width, by priority."""
        logs = self._latest_logs
        elapsed, remaining = self._format_times(trainer)
        # The words in display order, each with its priority: high numbers are dropped first.
        ranked = [(2, format_metric("loss", logs["loss"]))] if "loss" in logs else []
        ranked.append((5, format_metric("epoch", trainer.progress.epochs)))
        ranked += [(6, format_metric(name, logs[name])) for name in logs if name == "learning_rate"]
        for name, value in sort_for_display(self._latest_eval).items():
            rank = 7 if name == f"eval_{trainer.objective.metric}" else 9
            ranked += [(rank, word) for word in _format_row({name: value})]
        rates = [name for name in sort_for_display(logs) if name.endswith("_per_second")]
        ranked += [(8 if number else 3, format_metric(name, logs[name])) for number, name in enumerate(rates)]
        ranked += [(4, elapsed), (1, remaining)]
        chosen: set[int] = set()
        for index in sorted(range(len(ranked)), key=lambda index: ranked[index][0]):
            if len("  ".join(ranked[i][1] for i in sorted({*chosen, index}))) <= width:
                chosen.add(index)
        return [ranked[index][1] for index in sorted(chosen)]

    def _stop_bar(self, trainer: TrainerLike) -> None:
        self._refresh(trainer)
        if self._bar is not None:  # None if the refresh has failed on a closed stream
            self._guard(self._bar.stop)
            self._bar = None

    def _format_times(self, trainer: TrainerLike) -> tuple[str, str]:
        """Return the elapsed time of this `train()` call, and the remaining time to the planned end.

        The rate is that since the last resume, as the run may have changed machines.
        """
        elapsed, fraction = perf_counter() - self._started_at, trainer.limits.fraction(trainer.progress)
        progress, remaining = fraction - self._started_from, "-:--:--"
        if fraction >= 1.0 or progress > 0.0:
            remaining = clock(0.0 if fraction >= 1.0 else elapsed * (1.0 - fraction) / progress)
        bound = "at most " if may_stop_early(trainer.settings) and fraction < 1.0 else ""
        return f"elapsed {clock(elapsed)}", f"left {bound}{remaining}"


def _bar_console(enabled: bool | None, stream: TextIO | None) -> Console | None:
    """Return the console to draw a bar on, or None for plain lines."""
    target = stream or sys.stdout
    # Checked before importing rich, which takes FORCE_COLOR for a terminal: most CI systems set it.
    is_terminal = hasattr(target, "isatty") and not getattr(target, "closed", False) and target.isatty()
    is_plain = bool(os.environ.get("NO_COLOR")) or not is_terminal
    if not enabled and is_plain:
        return None
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich's method ends the process

    # rich would draw into a notebook with ipywidgets, and warn without them
    console = QuietConsole(file=stream, force_terminal=True if enabled else None, force_jupyter=False)
    is_drawable = bool(enabled) or (console.is_terminal and not console.is_dumb_terminal)
    return console if is_drawable else None


# Prefixes of the values that `Distributions` logs per parameter, such as "weights_norm/head.bias".
_PER_PARAMETER = ("weights_", "gradients_", "updates_", "update_ratio/", "activations_")


def _format_row(
    values: Mapping[str, float], total_steps: int | None = None, fraction: float | None = None
) -> list[str]:
    """Format a row of values; a row of a run, with its position, has a `fraction`."""
    words = []
    for name, value in sort_for_display(values).items():
        if name.startswith(_PER_PARAMETER) and "/" in name:  # only for files and dashboards
            continue
        if name == "step" and fraction is not None:
            words.append(position(value, total_steps, fraction))
        elif name != "skipped_steps" or value:
            words.append(format_metric(name, value))
    return words
