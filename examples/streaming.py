"""Train on a stream: samples come one by one from a file, and are not held in memory.

    python examples/streaming.py

Its `state_dict()` says where it is, and a resumed run goes on there; without it, what came before is read again.
In plain PyTorch: about 38 lines, 14 of them to save and to resume; with the trainer 13.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from omnitrain import Trainer

IMAGES, LABELS = (torch.tensor(values) for values in load_digits(return_X_y=True))


class Lines(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, file: Path) -> None:
        self.file, self.offset = file, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            with self.file.open("rb") as lines:
                lines.seek(self.offset)
                for line in iter(lines.readline, b""):
                    self.offset, (pixels, label) = lines.tell(), json.loads(line)
                    yield torch.tensor(pixels) / 16, torch.tensor(label)
            self.offset = 0

    def state_dict(self) -> dict[str, int]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.offset = state["offset"]


def train(file: Path, folder: Path, steps: int) -> Trainer:
    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        Lines(file),
        (IMAGES[1400:].float() / 16, LABELS[1400:]),
        loss_fn=nn.functional.cross_entropy,
        compute_metrics="accuracy",
        max_steps=steps,
        batch_size=32,
        learning_rate=3e-3,
        save_dir=folder,
        progress_bar=False,
    )
    trainer.train(resume_from="auto")
    return trainer


def main(steps: int = 400) -> tuple[float, float]:
    with TemporaryDirectory() as folder:
        file = Path(folder, "digits.jsonl")
        file.write_text("".join(map("[{}, {}]\n".format, IMAGES[:1400].tolist(), LABELS[:1400].tolist())))
        whole = train(file, Path(folder, "whole"), steps)
        train(file, Path(folder, "in two"), steps // 2)
        resumed = train(file, Path(folder, "in two"), steps)
    a, b = (nn.utils.parameters_to_vector(trainer.model.parameters()).detach() for trainer in (whole, resumed))
    accuracy, difference = resumed.metrics["best_valid"]["accuracy"], float((a - b).abs().max())
    print(f"accuracy {accuracy:.3f} after {resumed.progress.samples} samples, in two parts")
    print(f"largest difference to the weights of a run without a stop: {difference}")
    return accuracy, difference


if __name__ == "__main__":
    main()
