"""Collators that make other rows than samples, and data in every form that a trainer takes them from."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from recipes import rows, t16
from tiny import Short, gpt
from torch.utils.data import DataLoader, IterableDataset, Subset
from transformers import DataCollatorWithFlattening

from omnitrain import Collator, ShardedStream

SIZE = 22
BATCH_SIZE = 4


def filtered(samples: Sequence[Any]) -> Any:
    """The samples whose first number is positive: of a few batches none is left."""
    x, y = Collator()(samples)
    return x[x[:, 0] > 0.3], y[x[:, 0] > 0.3]


def views(samples: Sequence[Any]) -> Any:
    """Each sample twice, once with noise."""
    x, y = Collator()(samples)
    return torch.cat([x, x + 0.1 * torch.randn_like(x)]), torch.cat([y, y])


def bins(samples: Sequence[Any]) -> Any:
    """Three samples to a row."""
    parts = [Collator()(samples[first : first + 3]) for first in range(0, len(samples), 3)]
    return tuple(torch.stack([part[column].sum(0) for part in parts]) for column in (0, 1))


COLLATORS: dict[str, Any] = {"filtered": filtered, "views": views, "bins": bins, "packed": DataCollatorWithFlattening()}


class Streamed(IterableDataset[Any]):
    """A dataset as a stream that does not say how long it is."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class Batched:
    """A loader of the user's own, of no class that is known."""

    def __init__(self, data: Any, collate: Any) -> None:
        self.data, self.collate = data, collate

    def __len__(self) -> int:
        return -(-len(self.data) // BATCH_SIZE)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data)).tolist()
        for first in range(0, len(order), BATCH_SIZE):
            yield self.collate([self.data[index] for index in order[first : first + BATCH_SIZE]])


class Resumable(Batched):
    """The same with a state, and a count of the batches that it has made in this process."""

    created = 0

    def __init__(self, data: Any, collate: Any) -> None:
        super().__init__(data, collate)
        self.order, self.at = torch.empty(0, dtype=torch.int64), 0

    def __iter__(self) -> Iterator[Any]:
        if not self.at:
            self.order = torch.randperm(len(self.data))
        while self.at < len(self):
            self.at += 1
            Resumable.created += 1
            chosen = self.order[(self.at - 1) * BATCH_SIZE : self.at * BATCH_SIZE].tolist()
            yield self.collate([self.data[index] for index in chosen])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


class ResumableShare(DataLoader[Any]):
    """A loader of one rank's share with a state, as torchdata's is with a DistributedSampler."""

    at = 0

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.at:
                self.at = number + 1
                yield batch
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rank": self.sampler.rank}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.sampler.rank  # type: ignore[attr-defined]
        self.at = state["at"]


SOURCES = ("data", "workers", "stream", "stream of a worker", "loader", "own loader", "resumable loader")


def made(collator: str, source: str) -> tuple[Any, dict[str, Any]]:
    """A model, and the arguments for data from this source that this collator makes batches of."""
    model, data = (gpt(), Short(SIZE)) if collator == "packed" else (t16(), rows(SIZE))
    collate: Any = COLLATORS[collator]
    options: dict[str, Any] = {"data_collator": collate}
    if source == "loader":
        options = {"train_loader": DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)}
    elif source in ("own loader", "resumable loader"):
        options = {"train_loader": (Batched if source == "own loader" else Resumable)(data, collate)}
    elif source == "shards":
        parts = (range(12), range(12, 12), range(12, 14), range(14, SIZE))
        options["train_dataset"] = ShardedStream([Streamed(Subset(data, part)) for part in parts])
    elif "stream" in source:
        options["train_dataset"] = Streamed(data)
    else:
        options["train_dataset"] = data
    if "worker" in source:
        options["num_workers"] = 1
    if "loader" not in source:
        options["batch_size"] = BATCH_SIZE
    return model, options if collator == "packed" else {**options, "loss_fn": F.mse_loss}
