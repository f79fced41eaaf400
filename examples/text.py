"""Classify text: rows of words, padded by the default collator and masked in the model.

    python examples/text.py

The data are lines of Python's standard library; the label is the package that a line comes from.
In plain PyTorch: about 45 lines for padding, loops, evaluation and the best weights; with the trainer 13.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from omnitrain import Trainer

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")


def load_lines(per_package: int) -> list[tuple[list[str], int]]:
    """Return lines as words and signs, each with the number of its package."""
    rows = []
    for label, package in enumerate(PACKAGES):
        files = sorted(Path(sysconfig.get_path("stdlib"), package).glob("*.py"))
        lines = {line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()}
        chosen = random.Random(0).sample(sorted(line for line in lines if len(line) > 30), per_package)
        rows += [(re.findall(r"[A-Za-z]+|[^\sA-Za-z]", line), label) for line in chosen]
    return random.Random(0).sample(rows, len(rows))


class Classifier(nn.Module):
    """The mean of the embeddings of all words, and a layer on top."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.output = nn.Sequential(nn.Dropout(0.3), nn.Linear(width, len(PACKAGES)))

    def forward(self, tokens: Tensor) -> Tensor:
        is_word = (tokens != 0).unsqueeze(2)  # rows are padded with 0 at their ends
        return self.output((self.embedding(tokens) * is_word).sum(dim=1) / is_word.sum(dim=1))


def main(epochs: int = 6, per_package: int = 1800) -> dict[str, float]:
    rows = load_lines(per_package)
    train, valid, test = rows[: -len(rows) // 4], rows[-len(rows) // 4 : -len(rows) // 8], rows[-len(rows) // 8 :]
    counts = Counter(word for words, _ in train for word in words)
    numbers = {word: number for number, (word, count) in enumerate(counts.most_common(), start=2) if count > 1}
    sets = [
        [{"tokens": [numbers.get(word, 1) for word in words], "labels": label} for words, label in part]
        for part in (train, valid, test)
    ]
    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        Classifier(vocabulary=len(numbers) + 2),
        *sets,
        loss_fn=nn.functional.cross_entropy,
        compute_metrics=["accuracy", "f1_macro"],
        epochs=epochs,
        batch_size=32,
        learning_rate=5e-3,
        lr_scheduler="linear",
        log_steps="1ep",
    )
    trainer.train()
    results = trainer.test()
    print(f"{len(rows)} lines from {len(PACKAGES)} packages, {len(numbers)} words in the vocabulary")
    print(f"test: accuracy {results['test_accuracy']:.3f}, F1 {results['test_f1_macro']:.3f}")
    return results


if __name__ == "__main__":
    main()
