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
from marks import thinned
from recipes import Keyed, KeyedModel, callback, fit, rows, t16

from omnitrain import AccelerateTrainer, ConfigError, HFTrainer, ProgressBar, Trainer
from omnitrain.optim.schedules import ConstantScheduler

TRAINERS = [Trainer, AccelerateTrainer, HFTrainer]
DIGITS = re.compile(r"\d:\d\d:\d\d|(?<=loss )\S+|(?<=grad_norm )\S+|\S+(?= samples/s)")


def lines_of(text: str) -> list[str]:
    """Return printed lines, with N for values that differ between runs."""
    return [DIGITS.sub("N", line) for line in text.splitlines() if not line.startswith("[")]


def make(trainer_class: type = Trainer, **options: Any) -> Any:
    model, train, test = t16(), rows(20), rows(8)
    settings: dict[str, Any] = {"loss_fn": F.mse_loss, "batch_size": 2, "epochs": 2, "log_steps": 5}
    if trainer_class is HFTrainer:
        model, train, test = KeyedModel(), Keyed(20), Keyed(8)
        del settings["loss_fn"]
    if trainer_class is Trainer:
        settings["device"] = "cpu"
    return trainer_class(model, train, test, **settings | {"gradient_accumulation_steps": 2} | options)


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_summary_of_a_run_and_its_resume(trainer_class: type, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    make(trainer_class, save_dir="run", lr_scheduler="cosine").train()
    model = "KeyedModel" if trainer_class is HFTrainer else "Sequential"
    row = "loss N  lr {}  grad_norm N  N samples/s  elapsed N  left N"
    start = [
        f"model  {model}, 97 parameters, all trained; cpu, fp32",
        "train  20 samples, 10 steps in 2 epochs; batch 4 = 2 x 2 accumulated; AdamW, lr 2.00e-05, cosine",
    ]
    shown = lines_of(capsys.readouterr().out)
    best = re.sub(r"  \(best\)$", "", shown[6])
    assert [*shown[:6], best] == [
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
        shown[7],
    )
    make(trainer_class, save_dir="run", lr_scheduler="cosine").train(resume_from="run/checkpoint-5")
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


def test_summary_shows_the_stop_reason_and_how_to_resume(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def interrupt(trainer: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def fail(trainer: Any) -> None:
        raise RuntimeError("no")

    def last(act: Any = None, error: type[BaseException] | None = None, **options: Any) -> str:
        def act_at_3(trainer: Any) -> None:
            if trainer.progress.step == 3 and act:
                act(trainer)

        trainer = make(callbacks=[callback(on_step_end=act_at_3)], **options)
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            trainer.train()
        return lines_of(capsys.readouterr().out)[-1]

    monkeypatch.chdir(tmp_path)
    at, resume = "at step 3, epoch 0.60, after N", 'continue: trainer.train(resume_from="auto")'
    stopped = last(lambda trainer: trainer.stop(), save_dir="a")
    assert stopped == f"end    a stop was requested {at}; saved in a/checkpoint-3; {resume}"
    interrupted = last(interrupt, KeyboardInterrupt, save_dir="b")
    assert interrupted == f"end    SIGINT {at}; saved in b/checkpoint-3; {resume}"
    assert last(interrupt, KeyboardInterrupt) == f"end    SIGINT {at}; nothing is saved without save_dir"
    assert (
        last(lambda trainer: trainer.stop()) == f'end    a stop was requested {at}; continue: trainer.train(more="7ba")'
    )
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # a prompt, which outlives the run
    assert last(interrupt, KeyboardInterrupt).endswith('without save_dir; continue: trainer.train(more="7ba")')
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert last(fail, RuntimeError, save_dir="c") == f"end    RuntimeError {at}; nothing is saved"
    failed = last(fail, RuntimeError, save_dir="d", save_steps=2)
    assert failed == f"end    RuntimeError {at}; saved in d/checkpoint-2; {resume}"
    assert last(save_dir="e", save_only_model=True, max_steps=2).endswith("saved in e/checkpoint-2")
    assert last(patience=1, learning_rate=0.0, epochs=9).startswith("end    early stopping at step 10, epoch 2.00")
    assert last(max_steps=2).startswith("end    max_steps is reached at step 2,")


def test_summary_of_further_runs_of_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(make(epochs=1))
    trainer.train(more=1)
    assert trainer.progress.step == 10
    trainer.train()
    saved = [line for line in capsys.readouterr().out.splitlines() if line.startswith("save ")]
    first = "save   nothing, as there is no save_dir"
    again = "starts again from the weights of 10 steps; train(more=...) continues instead"
    assert saved == [first, f"{first}; continues at step 5", f"{first}; {again}"]


@pytest.mark.parametrize("trainer_class", thinned(TRAINERS, [Trainer, HFTrainer]))
def test_progress_bar_in_callbacks_replaces_the_default_one(trainer_class: type, capsys: Any) -> None:
    make(trainer_class, callbacks=[ProgressBar(every="4ba")], log_steps=1).train()
    shown = lines_of(capsys.readouterr().out)
    rows_of_training = [line.split("  ")[0] for line in shown if "lr" in line and line.startswith("step")]
    assert rows_of_training[:2] == ["step 4/10", "step 8/10"] and set(rows_of_training[2:]) <= {"step 10/10"}
    assert len([line for line in shown if line.startswith("end ")]) == 1
    with pytest.raises(ConfigError, match="has no effect with the ProgressBar in `callbacks`"):
        make(trainer_class, callbacks=[ProgressBar()], progress_bar=True)
