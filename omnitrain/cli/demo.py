"""The command `omnitrain demo`, a small training on real data.

It uses public names only, and is meant to be read after the quickstart. Reading the command line belongs in `main.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

from omnitrain import BaseTrainer, ConfigError, MissingExtraError, __version__

SEED = 0
_MARK = "demo.json"
_FILES = ("metrics.json", "metrics.jsonl", "curves.png", "model/model.safetensors")


def digits(trainer_class: type[BaseTrainer], out: Path, **changes: Any) -> BaseTrainer:
    """Train a small convolutional network on scikit-learn's 1,797 handwritten digits, and test it.

    `changes` are arguments of the trainer that replace the demo's own.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("`omnitrain demo`", "scikit-learn", "metrics") from error

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    samples = TensorDataset(images, torch.tensor(labels))
    train, valid, test = random_split(samples, [1200, 297, 300], torch.Generator().manual_seed(SEED))

    torch.manual_seed(SEED)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    arguments: dict[str, Any] = {
        "loss_fn": F.cross_entropy,
        "compute_metrics": "accuracy",
        "epochs": 30,
        "patience": 5,
        "batch_size": 32,
        "eval_batch_size": 300,
        "learning_rate": 2e-3,
        "log_steps": "1ep",
        "save_dir": out,
        "save_total_limit": 1,
        "overwrite": True,
        "seed": SEED,
    }
    trainer = trainer_class(model, train, valid, test, **(arguments | changes))
    if trainer.is_main_process:
        _prepare_folder(out, type(trainer).__name__)
    trainer.train()
    results = trainer.test()
    trainer.save_model(out / "model", overwrite=True)
    if trainer.is_main_process:
        trainer.metrics.to_json(out / "metrics.json")
        try:
            trainer.metrics.plot(out / "curves.png")
        except MissingExtraError as error:
            print(f"No curves: {error}")
        print(f"\n{trainer.metrics}\n\nin {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
        print(f"test accuracy on {len(test)} images that it never saw: {results['test_accuracy']:.4f}")
    return trainer


def _prepare_folder(out: Path, trainer_name: str) -> None:
    """Make the demo's folder, or clear the results of an earlier demo from it; nothing else is touched.

    Checkpoints of an earlier demo go when the trainer has one to put in their place (`overwrite=True`).
    """
    mark = out / _MARK
    try:
        if out.is_dir() and any(out.iterdir()) and not mark.exists():
            raise ConfigError(
                f"{str(out)!r} is not empty and was not made by the demo. Give a new folder with --out, or empty it."
            )
        out.mkdir(parents=True, exist_ok=True)
        for name in (_MARK, *_FILES):
            (out / name).unlink(missing_ok=True)
        with mark.open("x", encoding="utf-8") as file:  # not through a link that somebody may have put there
            file.write(json.dumps({"made_by": f"omnitrain {__version__} demo", "trainer": trainer_name}, indent=2))
    except OSError as error:
        raise ConfigError(f"Cannot write to {str(out)!r}: {error}. Give another folder with --out.") from error
