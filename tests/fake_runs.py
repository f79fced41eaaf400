"""Runs of a logger without a trainer: the events of steps and evaluations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omnitrain import Histogram
from omnitrain.core.duration import Limits
from omnitrain.core.progress import Progress

WEIGHTS = Histogram(edges=[0, 2, 4], counts=[1, 1], low=1.0, high=3.0, total=4.0, squares=10.0)


def fake_trainer(save_dir: Path | None = None, step: int = 0, is_main_process: bool = True) -> Any:
    """Return what loggers read of a trainer whose epochs have 10 steps of 3 samples."""
    return SimpleNamespace(
        progress=Progress(epoch_size=30, step=step), is_main_process=is_main_process, save_dir=save_dir,
        trial_name="trial-7", limits=Limits(max_steps=99), resolved_config=lambda: {"batch_size": 8},
        lifecycle=SimpleNamespace(is_closing=False, saved_at=None, evaluated_step=-1),
    )  # fmt: skip


def start(logger: Any, trainer: Any, last: int = 0, **intervals: int) -> Any:
    """Begin a run, train to step `last`, and return the logger."""
    logger.on_train_start(trainer)
    run_to(logger, trainer, last, **intervals)
    return logger


def run_to(logger: Any, trainer: Any, last: int, log_steps: int = 1, eval_steps: int = 2) -> None:
    """Train to step `last`."""
    progress = trainer.progress
    while progress.step < last:
        progress.advance(samples=3)
        if progress.step % log_steps == 0:
            logger.on_log(trainer, {"step": progress.step, "epoch": progress.epochs, "loss": 1 / progress.step})
        if progress.is_epoch_consumed:
            progress.close_epoch(complete=True)
        if progress.step % eval_steps == 0:
            logger.on_eval_end(trainer, {"eval_loss": 2 / progress.step, "eval_f1": 0.5})


def train(logger: Any, trainer: Any, last: int = 0, **intervals: int) -> Any:
    """Train to step `last`, end the run, and return the logger."""
    start(logger, trainer, last, **intervals).on_train_end(trainer)
    return logger
