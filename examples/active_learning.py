"""Active learning: train, predict the samples without labels, have the most uncertain ones labelled, train on.

    python examples/active_learning.py

It begins with 40 handwritten digits. In each round 40 more get a label: those for whose two best classes the network's
probabilities are closest, or, to compare, any 40. `train(more=...)` continues the run with the longer dataset.
In plain PyTorch: about 30 lines for loops and predictions; with the trainer 14.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from omnitrain import Trainer


def main(rounds: int = 6, per_round: int = 40, epochs: int = 15) -> dict[str, list[float]]:
    digits, classes = load_digits(return_X_y=True)
    images = (digits / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    pool, test = order[:1200], order[1200:]

    def train(name: str) -> list[float]:
        random, labelled = np.random.default_rng(1), [*pool[:per_round]]
        samples: list[Any] = [(images[i], classes[i]) for i in labelled]  # the trainer reads its length in each epoch
        torch.manual_seed(0)  # the weights that the model starts from
        trainer = Trainer(
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)),
            samples,
            loss_fn=nn.functional.cross_entropy,
            epochs=epochs,
            batch_size=20,
            eval_batch_size=1200,
            learning_rate=3e-3,
            progress_bar=False,
        )
        trainer.train()
        accuracies = []
        for _ in range(rounds):
            rest = np.setdiff1d(pool, labelled)
            if name == "uncertain":
                probabilities = torch.from_numpy(trainer.predict(images[rest]).predictions).softmax(1)
                best, second = probabilities.topk(2).values.unbind(1)
                new = rest[(best - second).argsort()[:per_round].numpy()]
            else:
                new = random.choice(rest, per_round, replace=False)
            labelled += [*new]
            samples += [(images[i], classes[i]) for i in new]  # here a person would look at the images
            trainer.train(more=epochs)
            predicted = trainer.predict(images[test]).predictions.argmax(1)
            accuracies.append(float((predicted == classes[test]).mean()))
        print(f"{name + ':':10}", *(f"{accuracy:.3f}" for accuracy in accuracies))
        return accuracies

    counts = [str(per_round * (number + 2)) for number in range(rounds)]
    print("labels:   ", *(f"{count:>5}" for count in counts))
    return {name: train(name) for name in ("random", "uncertain")}


if __name__ == "__main__":
    main()
