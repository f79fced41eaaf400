"""The example of the README in full: read handwritten digits with `Trainer`.

    python examples/native_digits.py

scikit-learn ships the 1,797 images, so nothing is downloaded. It takes some seconds, and leaves checkpoints, the
weights, and one row per log and evaluation in runs/native_digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from omnitrain import MetricsDict, Trainer


class DigitReader(nn.Module):
    """Any `nn.Module` will do. A dict batch is passed by keyword, less its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.strokes = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        features = F.relu(self.strokes(F.relu(self.edges(pixels))))
        return self.classifier(F.max_pool2d(features, kernel_size=2))


def load_samples() -> tuple[Any, Any, Any]:
    """Return lists of samples: to train on, to evaluate on during training, and to test on afterwards."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    samples = [{"pixels": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)]
    train, rest = train_test_split(samples, test_size=600, random_state=0)
    valid, test = train_test_split(rest, test_size=300, random_state=0)
    return train, valid, test


def load_part(part: Literal["train", "valid", "test"]) -> Any:
    """Return one of the three, as native_digits.yaml names it."""
    return dict(zip(("train", "valid", "test"), load_samples(), strict=True))[part]


def main(epochs: int = 20, out: Path = Path("runs/native_digits")) -> MetricsDict:
    train, valid, test = load_samples()

    torch.manual_seed(0)  # for the weights that the model starts from; Trainer(seed=...) covers all that follows
    trainer = Trainer(
        DigitReader(),
        train,
        valid,
        loss_fn=F.cross_entropy,
        compute_metrics="accuracy",
        optimization_metric="accuracy",
        epochs=epochs,
        patience=5,
        batch_size=32,
        learning_rate=3e-3,
        weight_decay=0.01,
        lr_scheduler="cosine",
        warmup_steps=20,
        log_steps=50,
        save_dir=out,
        save_total_limit=1,  # the newest checkpoint and the best one stay
        overwrite=True,  # this example may be run again; without it, an old run's checkpoints are an error
    )
    metrics = trainer.train()  # at its end the model has the weights of the best evaluation

    print(metrics)
    print(f"stopped by {metrics['stop_reason']}; best accuracy {metrics['best_valid']['eval_accuracy']:.4f}")
    print(f"loss of the last epoch {metrics['train_metrics_history'][-1]['train_loss']:.4f}")

    print("test:", trainer.evaluate(test, prefix="test"))

    predictions, labels, _ = trainer.predict(test)  # arrays, in the order of `test`
    read = predictions.argmax(axis=-1)
    wrong = [f"image {i}: a {labels[i]} read as {read[i]}" for i in (read != labels).nonzero()[0]]
    print(f"{len(wrong)} of {len(test)} misread:", "; ".join(wrong))

    print("weights in", trainer.save_model(out / "model", overwrite=True))
    return metrics


if __name__ == "__main__":
    main()
