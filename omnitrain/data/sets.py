"""The training, evaluation and test set of a trainer, as loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from omnitrain.data.collation import Collator
from omnitrain.data.loaders import GivenLoader, Loader, end_workers, is_stream, make_loader, name_of_set
from omnitrain.distributed import Ranks
from omnitrain.errors import ConfigError
from omnitrain.settings import Settings, resolve_accumulation

__all__ = ["Sets", "is_named_sets"]


def is_named_sets(dataset: Any) -> bool:
    """Return whether this is a dict of named sets, not a dict of tensors or arrays that are one set."""
    return type(dataset) is dict and not all(isinstance(one, torch.Tensor | np.ndarray) for one in dataset.values())


class Sets:
    """The loaders of a trainer.

    Args:
        settings: The arguments of the trainer.
        device: Where batches go; only for a device other than the CPU are they put into page-locked memory.
        ranks: The ranks of the run, which share the samples out.
        transform: Changes each dataset before it is loaded.
        sampling: Further options of the order of training samples; see `make_loader`.

    Attributes:
        train: The loader of the training set, or None.
        eval: That of the evaluation set; a dict of them for named sets.
        test: That of the test set.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        ranks: Ranks,
        transform: Callable[[Any], Any] = lambda dataset: dataset,
        **sampling: Any,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._transform = transform
        self._sampling = sampling
        if settings.drop_last:
            accumulation = resolve_accumulation(settings, ranks.world_size)
            self._sampling["whole"] = settings.batch_size * ranks.world_size * accumulation
        pin_memory = device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
        self._loading = {
            "collate": settings.data_collator or Collator(label_names=settings.label_names or ()),
            "seed": settings.seed,
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "num_workers": settings.num_workers,
            "pin_memory": pin_memory and device.type != "cpu",
            "prefetch_factor": settings.prefetch_factor,
        }
        self.train: Any = None
        if settings.train_loader is not None:
            self.train = self._given(settings.train_loader, "train_loader")
        elif settings.train_dataset is not None:
            self.train = self.train_loader_of(settings.batch_size)
        self.eval: Any = self._evaluation_loader(settings.eval_dataset, settings.eval_loader, "eval_dataset")
        self.test: Any = self._evaluation_loader(settings.test_dataset, settings.test_loader, "test_dataset")
        self.check_sizes(self.train, self.eval, self.test)

    def train_loader_of(self, batch_size: int) -> Loader:
        """Return a loader of the training set with micro-batches of this size."""
        settings = self._settings
        self._refuse_split(settings.train_dataset, "train_dataset")
        if settings.drop_last and is_stream(settings.train_dataset):
            raise ConfigError(
                "`drop_last=True` needs data with a length, so that the number of steps is known; "
                "`train_dataset` is a stream. Leave it out, or end the stream after whole steps."
            )
        return make_loader(
            self._transform(settings.train_dataset), batch_size, name="train_dataset", shuffle=settings.shuffle,
            marks=settings.save_dir is not None, **self._sampling, **self._loading,
        )  # fmt: skip

    def _refuse_split(self, dataset: Any, name: str) -> None:
        """Raise ConfigError for a Hugging Face stream of which each rank has a share already."""
        if self._ranks.world_size > 1 and getattr(dataset, "_distributed", None) is not None and is_stream(dataset):
            raise ConfigError(
                f"`{name}` was split by split_dataset_by_node. Each rank takes its share of a stream here, and of a "
                "share it would take a part and lose the rest. Pass the stream as it was before."
            )

    def loader_for(self, dataset: Any) -> Any:
        """Return the loader of a set to evaluate; the trainer's own sets keep theirs, so workers start only once."""
        settings = self._settings
        for own, loader in ((settings.eval_dataset, self.eval), (settings.test_dataset, self.test)):
            if dataset is own:
                return loader
        return self._evaluation_loader(dataset, None, "dataset")

    def check_sizes(self, *loaders: Any) -> None:
        """Compare the lengths of data on all ranks; of a loader of the user's own, each rank may have another.

        Raises:
            DistributedError: On all ranks, if they differ.
        """
        each = [one for loader in loaders for one in (loader.values() if isinstance(loader, dict) else [loader])]
        sizes = {one.name: one.size for one in each if one is not None and not isinstance(one, GivenLoader)}
        self._ranks.check_alike(
            "The numbers of samples on the ranks", sizes,
            "Give every rank the same data, and each takes its share; or a loader of its own, `train_loader` for "
            "instance, whose batches are used as they are.",
        )  # fmt: skip

    def _evaluation_loader(self, dataset: Any, loader: Any, name: str) -> Any:
        given = dataset if loader is None else loader
        if is_named_sets(given):
            odd = next((key for key in given if not isinstance(key, str)), None)
            if odd is not None:
                raise ConfigError(
                    f"`{name}` names its sets by text, as the names of metrics begin with it, got {odd!r}. Pass "
                    f"{{{str(odd)!r}: ...}}."
                )
            parts = {key: (None, value) if dataset is None else (value, None) for key, value in given.items()}
            return {key: self._evaluation_loader(*part, f"{name}[{key!r}]") for key, part in parts.items()}
        if loader is not None:
            return self._given(loader, name)
        if dataset is None:
            return None
        self._refuse_split(dataset, name)
        size = self._settings.eval_batch_size or self._settings.batch_size
        return make_loader(self._transform(dataset), size, name=name, marks=False, **self._loading)

    def _given(self, loader: Any, name: str) -> GivenLoader:
        return GivenLoader(loader, self._settings.seed, self._ranks.rank, self._ranks.world_size, name_of_set(name))

    def take_train(self, loader: Any) -> None:
        """Train on a user's own loader from now on."""
        self.train = self._given(loader, "train_loader")

    def take_eval(self, loader: Any) -> None:
        """Evaluate a user's own loader from now on, or several by name."""
        self.eval = self._evaluation_loader(None, loader, "eval_dataset")

    def end_workers(self) -> None:
        """End the worker processes of the training and the evaluation set."""
        end_workers(self.train, self.eval)
