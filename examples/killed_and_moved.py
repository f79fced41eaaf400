"""One run, killed five times and resumed each time somewhere else, beside the same run left alone.

    python examples/killed_and_moved.py                    # prints how far the two are from each other
    python examples/killed_and_moved.py --picture run.svg  # and draws both

`Trainer` begins the run. It is killed, and `AccelerateTrainer` goes on, on two processes with DDP, then with FSDP 2,
then with DeepSpeed ZeRO 2. `HFTrainer` takes the next part, and `Trainer` finishes. Each kill is a SIGKILL between two
checkpoints, in the middle of an epoch: no handler runs, and the steps since the last checkpoint are trained again.
Needs the extra `metrics`. Without `hf` and `deepspeed`, their parts are left out, and the others take the run on.
`--picture` needs `plot`. Takes about a minute, most of it to start Python.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import omnitrain
from omnitrain import Callback

STEPS = 282  # six epochs of 47
LEGS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "Trainer": ("Trainer", (), 43),
    "DDP, 2 processes": ("AccelerateTrainer", ("-n", "2"), 92),
    "FSDP 2, 2 processes": ("AccelerateTrainer", ("-n", "2", "--fsdp"), 137),
    "ZeRO 2, 2 processes": ("AccelerateTrainer", ("-n", "2", "--zero", "2"), 184),
    "HFTrainer": ("HFTrainer", (), 232),
    "Trainer again": ("Trainer", (), 0),
}
"""For each part of the run: the trainer, what `omnitrain launch` is given, and the step after which it is killed."""
EXTRAS = {"ZeRO 2, 2 processes": "deepspeed", "HFTrainer": "transformers"}
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that SIGKILL has ended, and of its launcher."""


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits; those to train on are shifted and made brighter or darker, anew each time."""

    def __init__(self, part: slice, is_augmented: bool = False) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels[part], dtype=torch.float32).view(-1, 8, 8) / 16
        self.labels = torch.tensor(labels[part])
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.is_augmented:
            image = image.roll(int(torch.randint(-1, 2, ())), dims=-1) * torch.empty(()).uniform_(0.7, 1.3)
        return image, self.labels[index]


class KillAfter(Callback):
    """Kills its process after a step, if there is one."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(trainer_class: str, folder: Path, kill_after: int) -> None:
    """Train, or go on with what is in the folder. All that the parts of the run differ in is the class."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for the weights that the model starts from
    trainer = getattr(omnitrain, trainer_class)(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        train_dataset=Digits(slice(0, 1500), is_augmented=True),
        eval_dataset=Digits(slice(1500, None)),
        loss_fn=F.cross_entropy,
        compute_metrics="accuracy",
        max_steps=STEPS,
        batch_size=16,
        global_batch_size=32,  # in a step, on all processes
        learning_rate=3e-3,
        lr_scheduler="cosine",
        warmup_steps=20,
        save_dir=folder,
        save_steps=10,
        save_total_limit=2,
        log_steps=1,
        progress_bar=False,
        callbacks=[KillAfter(kill_after)],
    )
    trainer.train(resume_from="auto")


def start(folder: Path, name: str, kill_after: int = 0) -> dict[int, float]:
    """Run one part in a program of its own, and return the loss of each step so far."""
    trainer_class, how, _ = LEGS[name]
    begin = [sys.executable, "-m", "omnitrain", "launch", *how] if how else [sys.executable]
    command = [*begin, str(Path(__file__).resolve()), "--part", trainer_class, str(folder), str(kill_after)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode not in (KILLED if kill_after else (0,)):
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


DARK = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#cfd0d0")
DARK |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#131416")


def draw(alone: dict[int, float], parts: dict[str, dict[int, float]], path: Path, *, is_dark: bool = False) -> None:
    """Draw the run that was left alone as a wide line, and the parts of the other over it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "omnitrain", "font.size": 10} | (DARK if is_dark else {})):
        figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
        axes.plot(
            list(alone),
            list(alone.values()),
            color="#4b5058" if is_dark else "#c8ccd2",
            linewidth=6,
            label="left alone",
        )
        for name, part in parts.items():
            axes.plot(list(part), list(part.values()), linewidth=1.2, label=name)
            if (end := LEGS[name][2]) > 0:
                axes.axvline(end, color="#9a9ca5" if is_dark else "#444", linewidth=0.8, linestyle=":")
                axes.annotate("kill -9", (end, 1), xycoords=("data", "axes fraction"), xytext=(-3, -4),
                              textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8)  # fmt: skip
        axes.set(xlabel="step", ylabel="training loss", xlim=(0, STEPS))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, ncols=2, framealpha=1, edgecolor="none")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def main(picture: Path | None = None) -> float:
    """Return the largest difference between the two runs' losses, over all steps."""
    parts: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        alone = start(Path(place) / "alone", "Trainer")
        begin = 0
        for name, (_, _, end) in LEGS.items():
            if name in EXTRAS and find_spec(EXTRAS[name]) is None:
                print(f"{name:<20} is left out: {EXTRAS[name]} is not installed", flush=True)
                continue
            losses = start(Path(place) / "moved", name, end)
            parts[name] = {step: loss for step, loss in losses.items() if step >= begin}
            begin = max(losses)
            print(f"{name:<20} took it to step {begin}" + (", and was killed" if end else ""), flush=True)
    moved = {step: loss for part in parts.values() for step, loss in part.items()}
    if moved.keys() != alone.keys():
        raise RuntimeError(f"Steps that only one run has: {sorted(moved.keys() ^ alone.keys())}.")
    apart = max(abs(moved[step] - alone[step]) for step in alone)
    print(f"largest difference of a step's loss from the run that was left alone: {apart:.1e}")
    if picture is not None:
        draw(alone, parts, picture)
        draw(alone, parts, picture.with_stem(f"{picture.stem}-dark"), is_dark=True)
    return apart


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--picture", type=Path, help="where to draw both runs, as .svg or .png; next to it, for dark pages, as ...-dark"
    )
    parser.add_argument("--part", nargs=3, metavar=("CLASS", "FOLDER", "KILL_AFTER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        train(args.part[0], Path(args.part[1]), int(args.part[2]))
    else:
        sys.exit(main(args.picture) > 1e-5)
