from __future__ import annotations

import io
import os
import pty
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.callbacks import progress_bar
from omnitrain.callbacks.progress_bar import ProgressBar
from omnitrain.progress import Progress


class Steps:
    """Limits of a run of `total` steps."""

    def __init__(self, total: int) -> None:
        self.total = total

    def fraction(self, progress: Progress) -> float:
        return min(progress.step / self.total, 1.0)


def make_trainer(total: int = 60, **changes: Any) -> Any:
    trainer = SimpleNamespace(
        progress=Progress(epoch_size=30), is_main_process=True, total_steps=total, limits=Steps(total)
    )
    for name, value in changes.items():
        setattr(trainer, name, value)
    return trainer


def run_steps(bar: ProgressBar, trainer: Any, steps: int, log_steps: int = 10, eval_steps: int | None = None) -> None:
    for _ in range(steps):
        bar.on_step_start(trainer)
        trainer.progress.advance(samples=3)
        bar.on_step_end(trainer)
        step = trainer.progress.step
        if step % log_steps == 0:
            bar.on_log(trainer, make_logs(trainer))
        if eval_steps and step % eval_steps == 0:
            bar.on_eval_end(trainer, {"eval_loss": 0.4, "eval_accuracy": step / 1000})
        if trainer.progress.is_epoch_consumed:
            trainer.progress.close_epoch(complete=True)


def make_logs(trainer: Any) -> dict[str, float]:
    return {
        "step": trainer.progress.step,
        "epoch": trainer.progress.epochs,
        "loss": 0.31214,
        "learning_rate": 1.25e-4,
        "grad_norm": 0.7123,
        "samples_per_second": 1234.4,
        "skipped_steps": 0,
    }


def plain(steps: int = 60, trainer: Any = None, **kwargs: Any) -> list[str]:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream)
    trainer = trainer or make_trainer()
    bar.on_train_start(trainer)
    run_steps(bar, trainer, steps, **kwargs)
    bar.on_train_end(trainer)
    return stream.getvalue().splitlines()


class Terminal:
    """A pseudo-terminal, and what was written to it."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")

    def text(self) -> str:
        self.stream.flush()
        os.set_blocking(self.master, False)
        chunks = []
        while True:
            try:
                chunks.append(os.read(self.master, 65536))
            except OSError:
                return b"".join(chunks).decode()


@pytest.fixture
def terminal(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    yield terminal
    terminal.stream.close()
    os.close(terminal.master)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress_bar, "perf_counter", lambda: clock.now)
    return clock


# --- plain lines


def test_a_file_gets_exactly_one_plain_line_per_log(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # CI systems set it; rich would take the file for a terminal
    lines = plain(steps=60, log_steps=10, eval_steps=7)
    assert len(lines) == 6
    assert not re.search(r"[\r\x1b]", "\n".join(lines))
    assert [line.split("  ")[0] for line in lines] == [f"step {step}/60" for step in (10, 20, 30, 40, 50, 60)]


def test_a_plain_line_says_all_that_a_log_has():
    assert plain(steps=60, log_steps=60) == [
        "step 60/60  epoch 6.0  loss 0.3121  lr 1.25e-04  grad_norm 0.712  1234 samples/s  ETA 0:00:00"
    ]


def test_an_evaluation_of_the_logged_step_stands_in_the_line_of_that_step():
    lines = plain(steps=30, log_steps=10, eval_steps=20)
    assert [("eval_loss 0.4  eval_accuracy 0.02" in line) for line in lines] == [False, True, False]


def test_an_evaluation_between_two_logs_stands_in_the_next_line():
    lines = plain(steps=30, log_steps=10, eval_steps=15)
    assert "eval_accuracy 0.015" in lines[1] and "step 20/60" in lines[1]


def test_a_line_is_printed_when_the_next_step_begins():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 10)
    assert stream.getvalue() == ""
    bar.on_step_start(trainer)
    assert stream.getvalue().startswith("step 10/60")


def test_a_line_is_printed_when_the_training_fails():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 10)
    bar.on_exception(trainer, RuntimeError())
    bar.on_train_end(trainer)
    assert stream.getvalue().count("step 10/60") == 1


def test_a_loop_that_starts_no_steps_gets_its_line_at_the_next_epoch():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    bar.on_log(trainer, {"step": 0, "epoch": 1, "loss": 0.5})
    bar.on_epoch_start(trainer)
    assert "loss 0.5" in stream.getvalue()


def test_a_run_of_unknown_steps_shows_its_fraction():
    assert plain(steps=30, log_steps=30, trainer=make_trainer(total_steps=None))[0].startswith("step 30 (50%)")


def test_skipped_steps_and_the_loss_scale_are_shown_when_there_are_some():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    bar.on_log(trainer, {"step": 1, "skipped_steps": 2, "loss_scale": 1024.0, "tokens_per_second": 7.25})
    bar.on_train_end(trainer)
    assert "skipped_steps 2  loss_scale 1024  7.25 tokens/s" in stream.getvalue()


def test_a_non_finite_loss_is_shown_as_it_is():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    bar.on_log(trainer, {"step": 1, "loss": float("nan"), "samples_per_second": float("inf")})
    bar.on_train_end(trainer)
    assert "loss nan  inf samples/s" in stream.getvalue()


def test_the_time_left_comes_from_the_pace_of_this_part_of_a_resumed_run(clock):
    stream, trainer = io.StringIO(), make_trainer(total=100)
    trainer.progress.step = 50
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    clock.now += 20 * 60.0
    run_steps(bar, trainer, 10)
    bar.on_train_end(trainer)
    assert "step 60/100" in stream.getvalue() and "ETA 1:20:00" in stream.getvalue()


def test_a_resumed_run_says_where_it_goes_on():
    stream, trainer = io.StringIO(), make_trainer(total=100)
    ProgressBar(stream=stream).on_train_start(trainer)
    assert not stream.getvalue()
    trainer.progress.step = 50
    ProgressBar(stream=stream).on_train_start(trainer)
    assert stream.getvalue() == "step 50/100  resumed\n"


def test_the_time_left_is_unknown_before_the_first_fraction():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    bar.on_log(trainer, {"step": 0})
    bar.on_train_end(trainer)
    assert stream.getvalue() == "step 0/60  ETA -:--:--\n"


def test_a_test_outside_the_training_is_a_line_of_its_own():
    stream, trainer = io.StringIO(), make_trainer()
    ProgressBar(stream=stream).on_log(trainer, {"test_loss": 0.25, "test_accuracy": 0.875})
    assert stream.getvalue() == "test_loss 0.25  test_accuracy 0.875\n"


@pytest.mark.parametrize("enabled", [None, True])
def test_other_ranks_print_nothing(enabled):
    stream, trainer = io.StringIO(), make_trainer(is_main_process=False)
    bar = ProgressBar(enabled, stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 20, eval_steps=10)
    bar.on_log(trainer, {"test_loss": 1.0})
    bar.on_train_end(trainer)
    assert stream.getvalue() == ""


def test_a_disabled_bar_prints_nothing(capsys):
    trainer = make_trainer()
    bar = ProgressBar(enabled=False)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 20, eval_steps=10)
    bar.on_log(trainer, {"test_loss": 1.0})
    bar.on_train_end(trainer)
    assert capsys.readouterr() == ("", "")


def test_stdout_is_looked_up_when_the_training_starts(capsys):
    bar, trainer = ProgressBar(), make_trainer()
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 10)
    bar.on_train_end(trainer)
    assert capsys.readouterr().out.startswith("step 10/60")


def test_a_notebook_without_ipywidgets_gets_lines(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setattr(progress_bar, "find_spec", lambda name: None)
    assert progress_bar._bar_console(None, None) is None
    assert progress_bar._bar_console(True, None) is None
    monkeypatch.setattr(progress_bar, "find_spec", lambda name: object())
    assert progress_bar._bar_console(None, None) is not None


# --- a reader that is gone


def test_a_closed_stream_does_not_end_the_training():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    stream.close()
    run_steps(bar, trainer, 30)
    bar.on_train_end(trainer)


@pytest.mark.parametrize("enabled", [None, True], ids=["lines", "bar"])
def test_a_broken_pipe_does_not_end_the_training(enabled, clock):
    reader, writer = os.pipe()
    os.close(reader)
    stream, trainer = os.fdopen(writer, "w"), make_trainer()
    bar = ProgressBar(enabled, stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 30)
    bar.on_log(trainer, {"test_loss": 1.0})
    bar.on_train_end(trainer)
    assert bar._is_gone
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_terminal_that_hangs_up_gives_stdout_back(terminal, clock, monkeypatch):
    bar, trainer = ProgressBar(), make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        bar.on_train_start(trainer)
        assert sys.stdout is not terminal.stream  # rich has taken it
        patch.setattr(bar._bar.console, "_write_buffer", lambda: (_ for _ in ()).throw(OSError("hung up")))
        clock.now += 1
        run_steps(bar, trainer, 10)
        assert bar._is_gone
        assert sys.stdout is terminal.stream


# --- the bar


def test_a_terminal_gets_a_bar_at_the_absolute_position(terminal):
    trainer = make_trainer(total=600)
    trainer.progress.step = 117
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    assert "step 117/600" in terminal.text()
    run_steps(bar, trainer, 5)
    bar.on_train_end(trainer)
    text = terminal.text()
    assert "\r" in text and "step 122/600" in text.splitlines()[-2] + text.splitlines()[-1]


def test_the_bar_shows_loss_evaluation_and_time_left(terminal):
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 60, eval_steps=30)
    bar.on_train_end(trainer)
    assert "ETA 0:00:00  loss 0.3121  eval_loss 0.4  eval_accuracy 0.06" in terminal.text()


def test_an_evaluation_is_printed_as_a_line_above_the_bar(terminal):
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 20, eval_steps=10)
    bar.on_train_end(trainer)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text()).replace("\r\n", "\n").split("\n")
    above = [line.split("\r")[-1] for line in lines if re.search(r"(^|\r)step \d+  epoch", line)]
    assert above == [
        "step 10  epoch 1.0  eval_loss 0.4  eval_accuracy 0.01",
        "step 20  epoch 2.0  eval_loss 0.4  eval_accuracy 0.02",
    ]


def test_a_metric_name_is_no_markup(terminal):
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    bar.on_eval_end(trainer, {"eval_f1[/b][red]": 0.5})
    bar.on_train_end(trainer)
    assert terminal.text().count("eval_f1[/b][red] 0.5") >= 2  # above the bar, and in it


def test_the_bar_is_drawn_at_most_ten_times_a_second(terminal, clock, monkeypatch):
    trainer = make_trainer(total=10_000)
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    draws = []
    monkeypatch.setattr(bar._bar, "refresh", lambda: draws.append(clock.now))
    for _ in range(1000):  # ten seconds of steps of 10 ms
        clock.now += 0.01
        run_steps(bar, trainer, 1, log_steps=10_000)
    assert 90 <= len(draws) <= 100
    draws.clear()
    run_steps(bar, trainer, 1000, log_steps=1)  # the clock stands still
    assert len(draws) <= 1


def test_a_slow_step_shows_its_own_loss(terminal, clock):
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    clock.now += 60.0
    run_steps(bar, trainer, 1, log_steps=1)
    assert "loss 0.3121" in terminal.text()


def test_an_exception_gives_the_terminal_back(terminal, monkeypatch):
    bar, trainer = ProgressBar(), make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        bar.on_train_start(trainer)
        run_steps(bar, trainer, 5)
        bar.on_exception(trainer, RuntimeError())
        assert sys.stdout is terminal.stream
        assert terminal.text().endswith("\x1b[?25h")  # the cursor is visible again
        bar.on_train_end(trainer)
        assert terminal.text() == ""


def test_what_the_user_prints_goes_above_the_bar(terminal, monkeypatch):
    bar, trainer = ProgressBar(), make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        bar.on_train_start(trainer)
        terminal.text()
        print("hello")
        assert re.match(r"\r\x1b\[2Khello\r\n", terminal.text())  # the bar is wiped first
        bar.on_train_end(trainer)


def test_a_bar_on_another_stream_leaves_stdout_alone(terminal, capsys):
    bar, trainer = ProgressBar(stream=terminal.stream), make_trainer()
    bar.on_train_start(trainer)
    print("hello")
    bar.on_train_end(trainer)
    assert capsys.readouterr().out == "hello\n"
    assert "hello" not in terminal.text()


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 10)
    bar.on_train_end(trainer)
    text = terminal.text()
    assert text.startswith("step 10/60  epoch 1.0") and "\x1b" not in text


def test_enabled_true_draws_the_bar_into_a_file():
    stream, trainer = io.StringIO(), make_trainer(total_steps=None)
    bar = ProgressBar(True, stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 30)
    bar.on_train_end(trainer)
    assert "\r" in stream.getvalue() and "step 30 (50%)" in stream.getvalue()


def test_a_second_training_with_the_same_reporter_starts_over(terminal):
    bar = ProgressBar(stream=terminal.stream)
    for _ in range(2):
        trainer = make_trainer()
        bar.on_train_start(trainer)
        run_steps(bar, trainer, 60, eval_steps=60)
        bar.on_train_end(trainer)
        text = terminal.text()
        assert "step 0/60" in text and "step 60/60" in text
        assert "eval_loss" not in text.split("step 60")[0]
