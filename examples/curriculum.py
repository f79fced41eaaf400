"""A curriculum: short sequences first, and longer ones from epoch to epoch.

    python examples/curriculum.py

The network reads zeros and ones, and says whether the ones are odd in number. From sequences of 20 it learns nothing;
of those that grow from 2 to 20 it learns the rule, in as many steps. The stream's `set_epoch` gets the number of each
epoch; a resumed run goes on with the length where it was.
In plain PyTorch: about 25 lines for each of the two; with the trainer 12.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from omnitrain import Trainer

LENGTH, Sample = 20, tuple[Tensor, Tensor]


def draw(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    bits = torch.randint(2, (count, length), generator=torch.Generator().manual_seed(seed))
    return bits, bits.sum(1) % 2


class Growing(IterableDataset[Sample]):
    """A stream of new sequences in each epoch, of the length that `lengths` has for it."""

    def __init__(self, lengths: list[int], size: int = 1600) -> None:
        self.lengths, self.size, self.epoch = lengths, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        yield from zip(*draw(self.size, self.lengths[self.epoch], seed=self.epoch), strict=True)


class Reader(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.memory = nn.Embedding(2, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, bits: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(bits))[0][:, -1])


def main(epochs: int = 19) -> dict[str, float]:
    results = {}
    growing = [2 + (LENGTH - 2) * epoch // (epochs - 1) for epoch in range(epochs)]
    for name, lengths in {"all at once": [LENGTH] * epochs, "curriculum": growing}.items():
        torch.manual_seed(0)  # the weights that the model starts from
        trainer = Trainer(
            Reader(),
            Growing(lengths),
            draw(1000, LENGTH, seed=10_000),
            loss_fn=nn.functional.cross_entropy,
            compute_metrics="accuracy",
            epochs=epochs,
            batch_size=32,
            eval_batch_size=500,
            learning_rate=1e-2,
            progress_bar=False,
        )
        trainer.train()
        results[name] = trainer.metrics["valid"][-1]["eval_accuracy"]
        print(f"{name}: accuracy {results[name]:.3f} at length {LENGTH}, after {trainer.progress.step} steps")
    return results


if __name__ == "__main__":
    main()
