"""A short training for the tests of launchers, which reports where it ran. Also as a module: `-m launched`."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
torch.set_num_threads(1)

from recipes import fit, rows, t16  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from omnitrain import AccelerateTrainer, Callback, Trainer  # noqa: E402

OPTIONS: dict[str, Any] = {
    "loss_fn": F.mse_loss, "epochs": 3, "learning_rate": 0.05, "progress_bar": False, "save_steps": 2,
    "save_total_limit": 2,
}  # fmt: skip


def native(folder: Path) -> Trainer:
    """Train the same on one process."""
    return fit(Trainer(t16(dtype=torch.float32), rows(31, torch.float32), batch_size=8, save_dir=folder, **OPTIONS))


class KillAt(Callback):
    """Kills the process of a rank after a step, unless it has been restarted."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, trainer: Any) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and trainer.progress.step == self.step
        killed = Path(trainer.save_dir).parent / "killed"  # an agent that has lost no process counts no restart
        if is_first and trainer.rank == self.rank and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Losses(Callback):
    """Writes the loss of each step and the number of ranks to a file, on the main rank."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "losses.jsonl"

    def on_log(self, trainer: Any, logs: Mapping[str, Any]) -> None:
        if trainer.is_main_process and "loss" in logs:
            entry = {"step": trainer.progress.step, "loss": logs["loss"], "ranks": trainer.world_size}
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


class PauseAt(Callback):
    """Waits at the end of some steps for a file, or a signal."""

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        self.folder, self.steps = folder, steps

    def on_step_end(self, trainer: Any) -> None:
        step = trainer.progress.step
        if step in self.steps:
            (self.folder / f"pauses-{step}-{os.getpid()}").touch()
            while not (self.folder / f"continue-{step}").exists() and not trainer.control.stop:
                time.sleep(0.05)


class TouchWhenTraining(Callback):
    """Leaves a file after some steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 3:
            (self.folder / f"trains-{trainer.rank}").touch()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill", type=int, metavar="STEP")
    parser.add_argument("--separate-folders", action="store_true")
    parser.add_argument("--forever", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--step", type=int, metavar="SAMPLES", help="write the losses of steps of so many samples")
    parser.add_argument("--in-parts", action="store_true", help="save shards as they are")
    parser.add_argument("--pause", type=int, nargs="+", default=(), metavar="STEP")
    args = parser.parse_args(words)
    rank = os.environ.get("RANK", "0")
    save_dir = args.out / (f"run-{rank}" if args.separate_folders else "run")
    options = OPTIONS | ({"epochs": 10**6, "log_steps": "1h"} if args.forever else {})
    callbacks: list[Callback] = [TouchWhenTraining(args.out)]
    if args.kill:
        callbacks.append(KillAt(1, args.kill))
    if args.pause:
        callbacks.append(PauseAt(args.out, args.pause))
    batch: dict[str, Any] = {"batch_size": 4}
    if args.step:
        callbacks.append(Losses(args.out))
        batch = {"batch_size": 2, "global_batch_size": args.step, "log_steps": 1}
    if args.in_parts:
        options = options | {"consolidate": False}
    model = t16(dtype=torch.float32, seed=int(rank))  # all are to start from those of rank 0
    trainer = AccelerateTrainer(
        model, rows(31, torch.float32), callbacks=callbacks, save_dir=save_dir, **options, **batch
    )
    if args.fail and trainer.rank == 1:
        raise RuntimeError("boom")
    trainer.train(resume_from="auto")
    trainer.save_model(save_dir / "model", overwrite=True)
    report = {
        "world_size": trainer.world_size,
        "model": type(trainer.model_wrapped).__name__,
        "parameter": type(next(trainer.model.parameters())).__name__,
        "step": trainer.progress.step,
        "restarts": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
        "node": os.environ.get("GROUP_RANK"),
    }
    (args.out / f"report-{trainer.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
