"""Console output of full runs: on every trainer, in a pipe, after signals."""

import contextlib
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from marks import TRAINERS, thinned
from recipes import Keyed, KeyedModel, callback, fit, rows, t16, trainer_on_cpu

from omnitrain import ConfigError, ProgressBar, Trainer
from omnitrain.optim.schedules import ConstantScheduler

DIGITS = re.compile(r"\d:\d\d:\d\d|(?<=loss )\S+|(?<=grad_norm )\S+|\S+(?= samples/s)")


def lines_of(text: str) -> list[str]:
    """Return printed lines, with N for values that differ between runs."""
    return [DIGITS.sub("N", line) for line in text.splitlines() if not line.startswith("[")]


def make(kind: str = "native", **options: Any) -> Any:
    model, train, test = (KeyedModel(), Keyed(20), Keyed(8)) if kind == "hf" else (t16(), rows(20), rows(8))
    loss_fn = None if kind == "hf" else F.mse_loss
    defaults = {"loss_fn": loss_fn, "eval_dataset": test, "batch_size": 2, "gradient_accumulation_steps": 2}
    options = {**defaults, "epochs": 2, "log_steps": 5, "progress_bar": None, **options}
    return trainer_on_cpu(TRAINERS[kind], model, train, **options)


def last_line(capsys: Any, error: Any = None, act: Any = None, **options: Any) -> str:

    def act_at_3(trainer: Any) -> None:
        if trainer.progress.step == 3 and act:
            act(trainer)

    trainer = make(callbacks=[callback(on_step_end=act_at_3)], **options)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        trainer.train()
    return lines_of(capsys.readouterr().out)[-1]


@pytest.mark.parametrize("kind", TRAINERS)
def test_summary_of_a_run_and_its_resume(kind: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    make(kind, save_dir="run", lr_scheduler="cosine").train()
    model = "KeyedModel" if kind == "hf" else "Sequential"
    row = "loss N  lr {}  grad_norm N  N samples/s  elapsed N  left N"
    start = [
        f"model  {model}, 97 parameters, all trained; cpu, fp32",
        "train  20 samples, 10 steps in 2 epochs; batch 4 = 2 x 2 accumulated; AdamW, lr 2.00e-05, cosine",
    ]
    *shown, last = lines_of(capsys.readouterr().out)
    assert [re.sub(r"(?<=10  epoch 2.00  eval_loss N)  \(best\)$", "", line) for line in shown] == [
        *start,
        "save   run, after each epoch",
        f"step 5/10  epoch 1.00  {row.format('1.31e-05')}",
        "step 5/10  epoch 1.00  eval_loss N  (best)",
        f"step 10/10  epoch 2.00  {row.format('4.89e-07')}",
        "step 10/10  epoch 2.00  eval_loss N",
    ]
    assert re.fullmatch(
        r"end    all epochs are done at step 10, epoch 2\.00, after N; best: eval_loss N at step (5, checkpoint-5|10, "
        r"checkpoint-10); saved in run/checkpoint-10; continue: trainer\.train\(more=1\)",
        last,
    )
    make(kind, save_dir="run", lr_scheduler="cosine").train(resume_from="run/checkpoint-5")
    shown = lines_of(capsys.readouterr().out)
    assert shown[:3] == [*start, "save   run, after each epoch; resumed from checkpoint-5 at step 5"]
    assert [line.split("  ")[0] for line in shown[3:]] == ["step 10/10", "step 10/10", "end"]


def test_summary_shows_frozen_parameters_streams_and_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    make(epochs=None, max_duration="30sp", freeze=["^0"], eval_steps=100, save_steps=None).train()
    shown = lines_of(capsys.readouterr().out)
    assert shown[0] == "model  Sequential, 97 parameters, 17 trained, 80 frozen; cpu, fp32"
    assert shown[1].startswith("train  20 samples, 8 steps in 30sp; batch 4 = 2 x 2 accumulated; AdamW, lr 2.00e-05,")
    assert shown[2] == "save   nothing, as there is no save_dir"
    assert shown[-1].startswith("end    max_duration is reached at step 8, epoch 1.")
    model = t16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "batch_size": 2, "max_duration": "16sp", "device": "cpu"}
    Trainer(model, Streamed(rows(8)), optimizer=optimizer, **options).train()
    second = capsys.readouterr().out.splitlines()[1]
    assert second == "train  samples as they come, 16sp; batch 2; SGD, lr 5.00e-01, constant"
    make(epochs=1, lr_scheduler=ConstantScheduler()).train()
    assert capsys.readouterr().out.splitlines()[1].endswith(", ConstantScheduler")


INTERRUPTS: list[Any] = [KeyboardInterrupt, lambda trainer: signal.raise_signal(signal.SIGINT)]
STOPS: list[Any] = [None, lambda trainer: trainer.stop()]
FAILS: list[Any] = [ZeroDivisionError, lambda trainer: 1 / 0]
AT, RESUME = "at step 3, epoch 0.60, after N", 'continue: trainer.train(resume_from="auto")'


@pytest.mark.parametrize(("end", "options", "expected"), [
    (STOPS, {"save_dir": "a"}, f"end    a stop was requested {AT}; saved in a/checkpoint-3; {RESUME}"),
    (STOPS, {}, f'end    a stop was requested {AT}; continue: trainer.train(more="7ba")'),
    (INTERRUPTS, {"save_dir": "b"}, f"end    SIGINT {AT}; saved in b/checkpoint-3; {RESUME}"),
    (INTERRUPTS, {}, f"end    SIGINT {AT}; nothing is saved without save_dir"),
    (FAILS, {"save_dir": "c"}, f"end    ZeroDivisionError {AT}; nothing is saved"),
    (FAILS, {"save_dir": "d", "save_steps": 2}, f"end    ZeroDivisionError {AT}; saved in d/checkpoint-2; {RESUME}"),
    ([], {"save_dir": "e", "save_only_model": True, "max_steps": 2}, "saved in e/checkpoint-2"),
    ([], {"patience": 1, "learning_rate": 0.0, "epochs": 9}, "end    early stopping at step 10, epoch 2.00"),
    ([], {"max_steps": 2}, "end    max_steps is reached at step 2,"),
])  # fmt: skip
def test_summary_shows_the_stop_reason_and_how_to_resume(
    end: list[Any], options: dict[str, Any], expected: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(sys, "ps1", raising=False)  # of a prompt, which another test may have started
    shown = last_line(capsys, *end, **options)
    assert shown == expected if end else expected in shown
    if end is INTERRUPTS and not options:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # a prompt, which outlives the run
        assert last_line(capsys, *end).endswith('without save_dir; continue: trainer.train(more="7ba")')


def test_summary_of_further_runs_of_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(make(epochs=1))
    trainer.train(more=1)
    assert trainer.progress.step == 10
    trainer.train()
    saved = [line for line in capsys.readouterr().out.splitlines() if line.startswith("save ")]
    first = "save   nothing, as there is no save_dir"
    again = "starts again from the weights of 10 steps; train(more=...) continues instead"
    assert saved == [first, f"{first}; continues at step 5", f"{first}; {again}"]


@pytest.mark.parametrize("kind", thinned(TRAINERS, ["native", "hf"]))
def test_progress_bar_in_callbacks_replaces_the_default_one(kind: str, capsys: Any) -> None:
    make(kind, callbacks=[ProgressBar(every="4ba")], log_steps=1).train()
    shown = lines_of(capsys.readouterr().out)
    steps = [line.split("  ")[0] for line in shown if "lr" in line and line.startswith("step")]
    assert steps[:2] == ["step 4/10", "step 8/10"] and set(steps[2:]) <= {"step 10/10"}
    assert len([line for line in shown if line.startswith("end ")]) == 1
    with pytest.raises(ConfigError, match="has no effect with the ProgressBar in `callbacks`"):
        make(kind, callbacks=[ProgressBar()], progress_bar=True)
