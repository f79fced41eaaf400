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

from recipes import callback, fit, rows, t16  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from omnitrain import AccelerateTrainer, Trainer  # noqa: E402

OPTIONS: dict[str, Any] = {
    "loss_fn": F.mse_loss, "epochs": 3, "learning_rate": 0.05, "progress_bar": False, "save_steps": 2,
    "save_total_limit": 2,
}  # fmt: skip


def native(folder: Path) -> Trainer:
    """Train the same on one process."""
    return fit(Trainer(t16(dtype=torch.float32), rows(31, torch.float32), batch_size=8, save_dir=folder, **OPTIONS))


def kill(trainer: Any) -> None:
    """Kill the process of rank 1, unless it has been restarted."""
    killed = Path(trainer.save_dir).parent / "killed"  # an agent that has lost no process counts no restart
    if trainer.rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def pause(trainer: Any, folder: Path) -> None:
    """Wait for a file, or a signal."""
    step = trainer.progress.step
    (folder / f"pauses-{step}-{os.getpid()}").touch()
    while not (folder / f"continue-{step}").exists() and not trainer.control.stop:
        time.sleep(0.05)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill", type=int, metavar="STEP")
    parser.add_argument("--separate-folders", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--step", type=int, metavar="SAMPLES", help="write the losses of steps of so many samples")
    parser.add_argument("--in-parts", action="store_true", help="save shards as they are")
    parser.add_argument("--pause", type=int, nargs="+", default=(), metavar="STEP")
    args = parser.parse_args(words)
    rank = os.environ.get("RANK", "0")
    save_dir = args.out / (f"run-{rank}" if args.separate_folders else "run")

    def on_step_end(trainer: Any) -> None:
        if trainer.progress.step == args.kill:
            kill(trainer)
        if trainer.progress.step in args.pause:
            pause(trainer, args.out)

    def on_log(trainer: Any, logs: Mapping[str, Any]) -> None:
        if args.step and trainer.is_main_process and "loss" in logs:
            entry = {"step": trainer.progress.step, "loss": logs["loss"], "ranks": trainer.world_size}
            with (args.out / "losses.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")

    steps = {"batch_size": 2, "global_batch_size": args.step, "log_steps": 1} if args.step else {"batch_size": 4}
    trainer = AccelerateTrainer(
        t16(dtype=torch.float32, seed=int(rank)),  # all are to start from those of rank 0
        rows(31, torch.float32), callbacks=[callback(on_step_end=on_step_end, on_log=on_log)], save_dir=save_dir,
        consolidate=False if args.in_parts else None, **OPTIONS, **steps,
    )  # fmt: skip
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
