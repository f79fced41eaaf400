"""The progress bar: plain lines, and a bar on a terminal."""

import contextlib
import dataclasses
import io
import os
import pty
import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from recipes import rows, small_trainer

from omnitrain import EarlyStopping
from omnitrain.core.events import Histogram
from omnitrain.core.progress import Progress
from omnitrain.loggers import progress_bar
from omnitrain.loggers.progress_bar import ProgressBar

ESCAPES = r"\x1b\[[0-9;?]*[a-zA-Z]"


def make_trainer(total: int = 60, step: int = 0, **changes: Any) -> Any:
    """Return what the bar reads of a trainer whose epochs have 10 steps of 3 samples."""
    trainer = small_trainer(data=rows(30), batch_size=3, max_steps=total, epochs=None)
    trainer.lifecycle.progress = Progress(epoch_size=30, step=step)
    names = "progress lifecycle limits settings objective metrics save_dir batch_size resolved_config model optimizer "
    names += "lr_scheduler device world_size ranks is_main_process"
    parts = {name: getattr(trainer, name) for name in names.split()}
    return SimpleNamespace(**{**parts, "total_steps": total, "stop_reason": "epochs", **changes})


def start(trainer: Any, stream: Any = None, enabled: bool | None = None, **options: Any) -> ProgressBar:
    bar = ProgressBar(enabled, stream, **options)
    bar.on_train_start(trainer)
    return bar


def run_steps(bar: ProgressBar, trainer: Any, steps: int, log_steps: int = 10, eval_steps: int | None = None) -> None:
    progress = trainer.progress
    for _ in range(steps):
        bar.on_step_start(trainer)
        progress.advance(samples=3)
        bar.on_step_end(trainer)
        if progress.step % log_steps == 0:
            bar.on_log(trainer, {
                "step": progress.step, "epoch": progress.epochs, "loss": 0.31214, "learning_rate": 1.25e-4,
                "grad_norm": 0.7123, "samples_per_second": 1234.4, "skipped_steps": 0,
            })  # fmt: skip
        if eval_steps and progress.step % eval_steps == 0:
            bar.on_eval_end(trainer, {"eval_loss": 0.4, "eval_accuracy": progress.step / 1000})
        if progress.is_epoch_consumed:
            progress.close_epoch(complete=True)


def run(stream: Any, steps: int = 0, trainer: Any = None, logs: Any = (), enabled: Any = None, **options: Any) -> None:
    trainer = trainer or make_trainer()
    bar = start(trainer, stream, enabled)
    run_steps(bar, trainer, steps, **options)
    for row in logs:
        bar.on_log(trainer, row)
    bar.on_train_end(trainer)


def rows_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.split("  ")[0] not in ("model", "train", "save", "end")]


class Terminal:
    """A pseudo-terminal, and what was written to it."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        os.set_blocking(self.master, False)

    def text(self) -> str:
        self.stream.flush()
        chunks = []
        with contextlib.suppress(OSError):
            while True:
                chunks.append(os.read(self.master, 65536))
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


def test_plain_lines_are_one_per_log_and_evaluation(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # CI systems set it; rich would take the file for a terminal
    trainer = make_trainer()
    trainer.lifecycle.improved = True
    run(None, 30, trainer, eval_steps=15)
    lines = rows_in(capsys.readouterr().out)
    assert not re.search(r"[\r\x1b]", "\n".join(lines))
    assert [line.split("  ")[0] for line in lines] == [f"step {step}/60" for step in (10, 15, 30, 30)]
    assert lines[:2] == [
        "step 10/60  epoch 1.00  loss 0.3121  lr 1.25e-04  grad_norm 0.712  1234 samples/s  elapsed 0:00:00"
        "  left 0:00:00",
        "step 15/60  epoch 1.50  eval_loss 0.4  eval_accuracy 0.015  (best)",
    ]


@pytest.mark.parametrize(("every", "steps"), [(None, [10, 60, 110, 160, 170]), ("10ba", [*range(10, 180, 10)])])
def test_plain_lines_come_by_the_clock(every, steps, clock):
    """Unless `every` is passed: the first, one every 5 seconds, and the last."""
    stream, trainer = io.StringIO(), make_trainer(total=170)
    bar = start(trainer, stream, every=every)
    for _ in range(17):
        clock.now += 1.0
        run_steps(bar, trainer, 10)
    bar.on_train_end(trainer)
    assert [line.split("  ")[0] for line in rows_in(stream.getvalue())] == [f"step {step}/170" for step in steps]


def test_plain_lines_are_written_when_a_step_ends():
    stream, trainer = io.StringIO(), make_trainer()
    bar = start(trainer, stream)
    run_steps(bar, trainer, 10)
    assert rows_in(stream.getvalue())[0].startswith("step 10/60")
    bar.on_exception(trainer, RuntimeError())
    bar.on_train_end(trainer)
    assert stream.getvalue().count("step 10/60") == 1


@pytest.mark.parametrize(("logs", "shown"), [
    ({"skipped_steps": 2, "loss_scale": 1024.0, "tokens_per_second": 7.25}, "s 2  loss_scale 1024  7.25 tokens/s"),
    ({"loss": float("nan"), "samples_per_second": float("inf")}, "loss nan  inf samples/s"),
    ({"step": 0}, "step 0/60  elapsed 0:00:00  left -:--:--"),
], ids=["skipped steps", "not finite", "no time left yet"])  # fmt: skip
def test_plain_lines_show_values(logs, shown):
    stream = io.StringIO()
    run(stream, logs=[{"step": 1, **logs}])
    (line,) = rows_in(stream.getvalue())
    assert shown in line


@pytest.mark.parametrize("settings", [
    {}, {"patience": 3}, {"early_stopper": print}, {"callbacks": [EarlyStopping(patience=2)]},
])  # fmt: skip
def test_time_left_is_by_the_pace_since_the_resume(clock, settings):
    stream, trainer = io.StringIO(), make_trainer(total=100, step=50)
    trainer.settings = dataclasses.replace(trainer.settings, **settings)
    bar = start(trainer, stream, every=10)
    clock.now += 20 * 60.0
    run_steps(bar, trainer, 10)
    expected = f"elapsed 0:20:00  left {'at most ' if settings else ''}1:20:00"
    assert rows_in(stream.getvalue())[-1].startswith("step 60/100") and expected in stream.getvalue()
    run_steps(bar, trainer, 40)
    assert rows_in(stream.getvalue())[-1].endswith("left 0:00:00")


def test_reported_texts_are_shortened_and_histograms_omitted():
    """And metrics outside of a run are a line."""
    stream, trainer = io.StringIO(), make_trainer()
    ProgressBar(stream=stream).on_log(trainer, {"test_loss": 0.25, "test_accuracy": 0.875})
    assert stream.getvalue() == "test_loss 0.25  test_accuracy 0.875\n"
    histogram = Histogram((0.0, 1.0), (1,), 0.0, 1.0, 0.5, 0.25)
    start(trainer, stream).on_report(trainer, {"preview/0": "Once\nupon " + "a time " * 100, "weights": histogram})
    _, line = rows_in(stream.getvalue())
    assert line.startswith("preview/0: Once upon a time a time") and line.endswith("...") and len(line) == 311


@pytest.mark.parametrize("enabled", [None, True, False])
def test_other_ranks_and_disabled_bars_print_nothing(enabled, capsys):
    stream = None if enabled is False else io.StringIO()
    trainer = make_trainer(is_main_process=enabled is False)
    run(stream, 20, trainer, [{"test_loss": 1.0}], eval_steps=10, enabled=enabled)
    assert not (stream and stream.getvalue()) and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("enabled", [None, True], ids=["lines", "bar"])
def test_closed_output_does_not_end_the_run(enabled, clock):
    """After the error of a broken pipe nothing more is written."""
    reader, writer = os.pipe()
    os.close(reader)
    pipe, writes = os.fdopen(writer, "w"), []
    write = pipe.write
    pipe.write = lambda text: writes.append(text) or write(text)
    closed = io.StringIO()
    for stream in (pipe, closed):
        trainer = make_trainer()
        bar = start(trainer, stream, enabled)
        count = len(writes)
        if stream is closed:
            closed.close()
        run_steps(bar, trainer, 30)
        bar.on_log(trainer, {"test_loss": 1.0})
        bar.on_train_end(trainer)
        assert len(writes) == count > 0
    with pytest.raises(BrokenPipeError):
        pipe.close()


def test_bar_shows_the_run_and_has_evaluations_as_lines_above(terminal):
    run(terminal.stream, 20, make_trainer(20), eval_steps=10)
    text = terminal.text()
    assert "loss 0.3121" in text and "eval_loss 0.4" in text and "elapsed 0:00:00  left 0:00:00" in text
    lines = re.sub(ESCAPES, "", text).replace("\r\n", "\n").split("\n")
    above = [line.split("\r")[-1] for line in lines if re.search(r"(^|\r)step \d+/20  epoch", line)]
    assert above == [
        "step 10/20  epoch 1.00  eval_loss 0.4  eval_accuracy 0.01",
        "step 20/20  epoch 2.00  eval_loss 0.4  eval_accuracy 0.02",
    ]
    trainer = make_trainer(total=600, step=117)
    bar = start(trainer, terminal.stream)
    assert "step 117/600" in terminal.text()  # the absolute position
    bar.on_eval_end(trainer, {"eval_f1[/b][red]": 0.5})
    assert terminal.text().count("eval_f1[/b][red] 0.5") >= 2  # above the bar, and in it
    run_steps(bar, trainer, 5)
    bar.on_train_end(trainer)
    assert re.search(r"\r.*step 122/600", terminal.text().replace("\r\n", "\n"))


def test_bar_is_drawn_at_most_ten_times_a_second(clock):
    stream, trainer = io.StringIO(), make_trainer(total=10_000)
    bar = start(trainer, stream, True)

    def draws(steps: int, log_steps: int, seconds: float) -> int:
        stream.truncate(stream.seek(0))
        for _ in range(steps):
            clock.now += seconds
            run_steps(bar, trainer, 1, log_steps)
        return stream.getvalue().count("/10000")

    assert 90 <= draws(1000, 10_000, 0.01) <= 100  # ten seconds of steps of 10 ms
    assert draws(1000, 1, 0.0) <= 1
    assert draws(1, 1, 60.0) and "loss 0.3121" in stream.getvalue()  # of a slow step at once


@pytest.mark.parametrize("hangs_up", [False, True], ids=["exception", "hangup"])
def test_bar_restores_the_terminal_after_an_error(hangs_up, terminal, clock, monkeypatch):
    trainer = make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        bar = start(trainer)
        assert sys.stdout is not terminal.stream  # rich has replaced it
        if hangs_up:
            patch.setattr(terminal.stream, "write", mock.Mock(side_effect=OSError("hung up")))
            clock.now += 1
        run_steps(bar, trainer, 5, log_steps=5)
        if hangs_up:
            assert sys.stdout is terminal.stream
            return
        bar.on_exception(trainer, RuntimeError())
        assert sys.stdout is terminal.stream
        assert terminal.text().endswith("\x1b[?25h")  # the cursor is visible again
        bar.on_train_end(trainer)
        assert terminal.text().startswith("end    RuntimeError at step 5, epoch 0.50, after 0:00:00; nothing is saved")


def test_bar_leaves_prints_of_the_user_above_it(terminal, monkeypatch, capsys):
    trainer = make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        bar = start(trainer)
        terminal.text()
        print("hello")
        assert re.match(r"\r\x1b\[2Khello\r\n", terminal.text())  # the bar is wiped first
        bar.on_train_end(trainer)
    bar = start(trainer, terminal.stream)  # which is not stdout
    print("hello")
    bar.on_train_end(trainer)
    assert capsys.readouterr().out == "hello\n" and "hello" not in terminal.text()


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_terminal_without_control_codes_gets_lines(variable, value, terminal, monkeypatch):
    monkeypatch.setenv(variable, value)
    run(terminal.stream, 10, eval_steps=10)
    text = terminal.text()
    assert len(text.splitlines()) == 6 and "\x1b" not in text and "\r" not in text.replace("\r\n", "\n")
    assert rows_in(text)[0].startswith("step 10/60  epoch 1.0")


@pytest.mark.parametrize(("width", "shown", "hidden"), [
    (60, ["loss 0.3121", "left 0:50:00"], ["lr ", "samples/s", "eval_"]),
    (80, ["loss 0.3121", "1234 samples/s", "elapsed 0:10:00", "left 0:50:00"], ["epoch", "eval_"]),
    (160, ["loss 0.3121", "epoch 1.00", "lr 1.25e-04", "eval_loss 0.4", "1234 samples/s", "left 0:50:00"], []),
], ids=["60", "80", "160"])  # fmt: skip
def test_bar_fits_the_width_of_the_terminal(width, shown, hidden, terminal, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    trainer = make_trainer()
    bar = start(trainer, terminal.stream)
    clock.now += 600.0
    run_steps(bar, trainer, 10, eval_steps=10)
    terminal.text()
    bar.on_exception(trainer, RuntimeError())  # which draws it a last time
    *_, line = [text for text in re.sub(ESCAPES, "", terminal.text()).split("\r") if text.strip()]
    assert len(line) <= width and "step 10/60" in line and re.search("[\u2501\u2578\u257a]{8}", line)
    assert [word for word in shown if word not in line] == [] and [word for word in hidden if word in line] == []


def test_bar_is_drawn_into_a_file_if_enabled():
    stream = io.StringIO()
    run(stream, 30, make_trainer(total_steps=None), enabled=True)
    assert "\r" in stream.getvalue() and "step 30 (50%)" in stream.getvalue()
