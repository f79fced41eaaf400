from __future__ import annotations

import io
import os
import pty
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnitrain import ConfigError, EarlyStopping, MetricsDict
from omnitrain.callbacks import progress_bar
from omnitrain.callbacks.progress_bar import ProgressBar
from omnitrain.distributed import Ranks
from omnitrain.duration import Duration
from omnitrain.events import Histogram
from omnitrain.objective import Objective
from omnitrain.progress import Progress


class Steps:
    """Limits of a run of `total` steps."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.durations = [Duration(total, "ba")]

    def fraction(self, progress: Progress) -> float:
        return min(progress.step / self.total, 1.0)


def make_trainer(total: int = 60, **changes: Any) -> Any:
    config = {
        "model": "torch.nn.Linear", "autocast": "fp32", "batch_size": 3, "global_batch_size": 3, "save_steps": None,
        "gradient_accumulation_steps": 1, "samples_per_epoch": 30, "lr_scheduler": None, "optimizer": "torch.optim.SGD",
    }  # fmt: skip
    model = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(
        progress=Progress(epoch_size=30), is_main_process=True, total_steps=total, limits=Steps(total),
        settings=SimpleNamespace(
            callbacks=(), patience=None, early_stopper=None, save_only_model=False, lr_scheduler=None
        ),
        lifecycle=SimpleNamespace(
            improved=False, saved_path=None, resumed_from=None, trained_before=0, signal=0, is_closing=False
        ),
        objective=Objective("loss"), metrics=MetricsDict(), stop_reason="epochs", save_dir=None, batch_size=3,
        resolved_config=lambda: config, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        lr_scheduler=None, device=torch.device("cpu"), world_size=1, ranks=Ranks(),
    )  # fmt: skip
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
    return rows_in(stream.getvalue())


def rows_in(text: str) -> list[str]:
    """Return the lines between the first three and the last."""
    return [line for line in text.splitlines() if line.split("  ")[0] not in ("model", "train", "save", "end")]


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
    lines = plain(steps=60, log_steps=10)
    assert len(lines) == 6
    assert not re.search(r"[\r\x1b]", "\n".join(lines))
    assert [line.split("  ")[0] for line in lines] == [f"step {step}/60" for step in (10, 20, 30, 40, 50, 60)]


def test_a_plain_line_says_all_that_a_log_has():
    assert plain(steps=60, log_steps=60) == [
        "step 60/60  epoch 6.00  loss 0.3121  lr 1.25e-04  grad_norm 0.712  1234 samples/s  elapsed 0:00:00"
        "  left 0:00:00"
    ]


def test_each_evaluation_is_a_line_of_its_own_when_it_happens():
    lines = plain(steps=30, log_steps=10, eval_steps=15)
    assert [line.split("  ")[0] for line in lines] == [f"step {step}/60" for step in (10, 15, 20, 30, 30)]
    assert lines[1] == "step 15/60  epoch 1.50  eval_loss 0.4  eval_accuracy 0.015"


def test_the_best_evaluation_so_far_is_marked():
    trainer = make_trainer()
    trainer.lifecycle.improved = True
    assert plain(steps=30, log_steps=60, eval_steps=15, trainer=trainer)[0].endswith("eval_accuracy 0.015  (best)")


def test_a_line_is_printed_when_its_step_ends():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 10)
    assert rows_in(stream.getvalue())[0].startswith("step 10/60")


def test_a_line_is_printed_when_the_training_fails():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 10)
    bar.on_exception(trainer, RuntimeError())
    bar.on_train_end(trainer)
    assert stream.getvalue().count("step 10/60") == 1


def test_a_run_of_unknown_steps_shows_its_fraction():
    assert plain(steps=30, log_steps=30, trainer=make_trainer(total_steps=None))[0].startswith("step 30 (50%)")


def test_skipped_steps_and_the_loss_scale_are_shown_when_there_are_some():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    bar.on_log(trainer, {"step": 1, "skipped_steps": 2, "loss_scale": 1024.0, "tokens_per_second": 7.25})
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
    assert "step 60/100" in stream.getvalue() and "elapsed 0:20:00  left 1:20:00" in stream.getvalue()


@pytest.mark.parametrize("how", [{"patience": 3}, {"early_stopper": print}, {"callbacks": [EarlyStopping(patience=2)]}])
def test_the_time_left_is_a_bound_where_the_run_may_stop_early(clock, how):
    trainer = make_trainer(total=100)
    vars(trainer.settings).update(how)
    bar, stream = ProgressBar(stream=io.StringIO()), io.StringIO()
    bar.stream = stream
    bar.on_train_start(trainer)
    clock.now += 20 * 60.0
    run_steps(bar, trainer, 10)
    assert rows_in(stream.getvalue())[-1].endswith("left at most 3:00:00")
    run_steps(bar, trainer, 90)
    assert rows_in(stream.getvalue())[-1].endswith("left 0:00:00")


def test_the_time_left_is_unknown_before_the_first_fraction():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    bar.on_log(trainer, {"step": 0})
    bar.on_train_end(trainer)
    assert rows_in(stream.getvalue()) == ["step 0/60  elapsed 0:00:00  left -:--:--"]


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
    assert rows_in(capsys.readouterr().out)[0].startswith("step 10/60")


def test_rows_are_shown_at_an_interval_of_their_own():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream, every="25ba")
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 55)
    trainer.lifecycle.is_closing = True  # the last row is shown in any case
    bar.on_log(trainer, make_logs(trainer))
    assert [line.split("  ")[0] for line in rows_in(stream.getvalue())] == ["step 30/60", "step 50/60", "step 55/60"]


@pytest.mark.parametrize("every", ["25", 0, "fast", -3])
def test_an_interval_that_is_none_is_refused(every):
    with pytest.raises(ConfigError, match="`every` must be a positive duration"):
        ProgressBar(every=every)


def test_texts_that_a_callback_reports_are_shown_shortened_and_histograms_are_not():
    stream, trainer = io.StringIO(), make_trainer()
    bar = ProgressBar(stream=stream)
    bar.on_train_start(trainer)
    histogram = Histogram((0.0, 1.0), (1,), 0.0, 1.0, 0.5, 0.25)
    bar.on_report(trainer, {"preview/0": "Once\nupon " + "a time " * 100, "weights": histogram})
    (line,) = rows_in(stream.getvalue())
    assert line.startswith("preview/0: Once upon a time a time") and line.endswith("...") and len(line) == 311


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
    text = terminal.text()
    assert "loss 0.3121" in text and "eval_loss 0.4" in text and "elapsed 0:00:00  left 0:00:00" in text


def test_an_evaluation_is_printed_as_a_line_above_the_bar(terminal):
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 20, eval_steps=10)
    bar.on_train_end(trainer)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text()).replace("\r\n", "\n").split("\n")
    above = [line.split("\r")[-1] for line in lines if re.search(r"(^|\r)step \d+/60  epoch", line)]
    assert above == [
        "step 10/60  epoch 1.00  eval_loss 0.4  eval_accuracy 0.01",
        "step 20/60  epoch 2.00  eval_loss 0.4  eval_accuracy 0.02",
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
        assert terminal.text().startswith("end    RuntimeError at step 5, epoch 0.50, after 0:00:00; nothing is saved")


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
    assert rows_in(text)[0].startswith("step 10/60  epoch 1.0") and "\x1b" not in text


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_a_terminal_without_control_codes_gets_lines(variable, terminal, monkeypatch):
    monkeypatch.setenv(variable, {"NO_COLOR": "1", "TERM": "dumb"}[variable])
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    run_steps(bar, trainer, 10, eval_steps=10)
    bar.on_train_end(trainer)
    text = terminal.text()
    assert len(text.splitlines()) == 6 and "\x1b" not in text and "\r" not in text.replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (60, ["loss 0.3121", "left 0:50:00"], ["lr ", "samples/s", "eval_"]),
        (80, ["loss 0.3121", "epoch 1.00", "elapsed 0:10:00", "left 0:50:00"], ["samples/s", "eval_"]),
        (160, ["loss 0.3121", "epoch 1.00", "lr 1.25e-04", "eval_loss 0.4", "1234 samples/s", "left 0:50:00"], []),
    ],
)
def test_a_narrow_terminal_has_fewer_words_and_still_a_bar(width, shown, hidden, terminal, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    trainer = make_trainer()
    bar = ProgressBar(stream=terminal.stream)
    bar.on_train_start(trainer)
    clock.now += 600.0
    run_steps(bar, trainer, 10, eval_steps=10)
    terminal.text()
    bar._refresh(trainer)
    (line,) = [one for one in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text()).split("\r") if one.strip()]
    assert len(line) <= width and "step 10/60" in line and re.search("[\u2501\u2578\u257a]{8}", line)
    assert [word for word in shown if word not in line] == [] and [word for word in hidden if word in line] == []
    bar.on_train_end(trainer)


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
