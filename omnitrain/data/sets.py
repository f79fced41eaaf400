"""The training, evaluation and test sets of a trainer, as loaders."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from omnitrain.arguments import Settings, describe, has_changing_batch_size, is_loader, samples_of_step
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.data.collation import LABEL_KEYS, Collator
from omnitrain.data.grouping import BatchByTokens, GroupByLength
from omnitrain.data.loaders import (
    Loader,
    MapLoader,
    UserLoader,
    by_name,
    check_loader,
    dataset_title,
    is_stream,
    make_loader,
)
from omnitrain.data.packing import PackedDataset
from omnitrain.data.sampling import MicrobatchLayout, ReadOptions, is_table
from omnitrain.data.shards import ShardedLoader, ShardedStream
from omnitrain.distributed.ranks import Coordinates, Ranks

logger: logging.Logger = logging.getLogger("omnitrain")


@dataclass(frozen=True, slots=True)
class EvalSet:
    """An evaluation set with its own rules, among the named sets of `eval_dataset`.

    Attributes:
        data: The dataset, or a loader.
        metrics: The `compute_metrics` of this set; "same" uses the trainer's, None computes only the loss.
        weight: The weight of the set in `eval_loss` and the other means over the sets; 0 leaves it out of them.
        every: How often to evaluate it, in steps or as "500ba" or "2ep": in the first evaluation at or after each
            multiple, and in one before the first step. None is in every evaluation; a set with an interval does not
            count in the means over the sets.
        subset: How many samples to evaluate, from the first; None is all.
        unit: The `unit` for this set, which computes loss and outputs; None uses the trainer's.

    Raises:
        ConfigError: If a value is wrong.

    >>> EvalSet([1, 2, 3], metrics="accuracy", every="2ep", subset=2).subset
    2
    """

    data: Any
    metrics: Any = "same"
    weight: float = 1.0
    every: int | str | Duration | None = None
    subset: int | None = None
    unit: Any = None

    def __post_init__(self) -> None:
        if self.data is None or isinstance(self.data, EvalSet) or is_dict_of_sets(self.data):
            raise ConfigError(f"`EvalSet` takes one dataset or loader, got {type(self.data).__name__}.")
        check_number("EvalSet.weight", self.weight, least=0)
        check_number("EvalSet.subset", 1 if self.subset is None else self.subset, least=1, is_whole=True)
        if self.unit is not None and (isinstance(self.unit, type) or not callable(self.unit)):
            raise ConfigError(f"`unit` of an `EvalSet` must be callable with a batch, got {self.unit!r:.200}.")
        if self.every is not None:
            every = Duration.parse(self.every, "ba", "every")
            if every.unit not in ("ba", "ep"):
                raise ConfigError(
                    f"`every` of an `EvalSet` counts steps or epochs ('500ba', '2ep'), got {str(self.every)!r}."
                )
            object.__setattr__(self, "every", every)

    @property
    def counts(self) -> bool:
        """Whether the set counts in the means over the sets."""
        return self.weight > 0 and self.every is None

    @property
    def has_own_metrics(self) -> bool:
        """Whether the metrics of the set are not the trainer's."""
        return not (isinstance(self.metrics, str) and self.metrics == "same")

    def is_due(self, row: Mapping[str, Any], last: Mapping[str, Any] | None) -> bool:
        """Return whether to evaluate the set at a "step" and "epoch", after the last evaluation at others."""
        if not isinstance(self.every, Duration) or not row["step"]:
            return True
        name = "step" if self.every.unit == "ba" else "epoch"
        current, previous = (int(round(position[name] / self.every.value, 6)) for position in (row, last or {name: 0}))
        return current > previous

    def to_dict(self) -> dict[str, Any]:
        """Return the rules that determine the numbers, without the data, as JSON types."""
        return {name: describe(getattr(self, name)) for name in ("metrics", "weight", "subset", "unit")}


def is_dict_of_sets(dataset: Any) -> bool:
    """Return whether this is a dict of named sets, not a dict of tensors or arrays that form one set."""
    return type(dataset) is dict and not all(
        isinstance(value, torch.Tensor | np.ndarray) or is_table(value) for value in dataset.values()
    )


class Columns:
    """Drops the columns that a model does not accept, and logs which."""

    def __init__(self, used: Collection[str] | None, model: nn.Module | None = None) -> None:
        self._taken = used
        self._model = model
        self._reported: list[set[str]] = []

    def __call__(self, dataset: Any) -> Any:
        """Return a Hugging Face dataset without unused columns; one with a transform, or other data, unchanged."""
        if isinstance(dataset, (BatchByTokens, GroupByLength)):
            return dataset.with_dataset(self(dataset.dataset))
        if isinstance(dataset, PackedDataset):
            if self._taken is not None and self._model is not None:
                dataset.check_model(self._model, self._taken)
            return dataset
        columns = getattr(dataset, "column_names", None)
        if self._taken is None or not columns or not hasattr(dataset, "remove_columns"):
            return dataset
        if (getattr(dataset, "format", None) or {}).get("type") == "custom":
            return dataset  # its `set_transform` may turn any column into what the model takes
        unused = {name for name in columns if name not in self._taken}
        if not unused or set(columns) - unused <= {*LABEL_KEYS}:
            return dataset  # no column would be left: the model's own error is clearer
        if unused not in self._reported:
            self._reported.append(unused)
            names = ", ".join(map(repr, sorted(unused)))
            logger.warning("Columns that the model's forward() does not accept are dropped: %s.", names)
        return dataset.remove_columns(sorted(unused))


def is_user_defined(value: Any) -> bool:
    """Return whether a function or object is user code, which may use any column."""
    module = getattr(value, "__module__", None) or ""
    return value is not None and module.partition(".")[0] not in ("omnitrain", "transformers")


# Stands for the rules of a dataset that is no `EvalSet`.
_NO_RULES = EvalSet(())


class Sets:
    """The loaders of a trainer: one for each set, a dict of them for named sets, or None."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        ranks: Ranks,
        transform: Callable[[Any], Any] = lambda dataset: dataset,
        adds_mask: bool = False,
        **sampling: Any,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self.share: Coordinates = ranks.data
        self._transform = transform
        self._sampling = sampling
        if settings.drop_last and has_changing_batch_size(settings):
            raise ConfigError(
                "`drop_last=True` leaves out a step that is shorter than the others, and `global_batch_size` has steps "
                "of several sizes. Leave one of them out."
            )
        if settings.drop_last:
            self._sampling["multiple_of"] = samples_of_step(settings, self.share.size)
        pin_memory = device_runtime(device).pins_memory if settings.pin_memory is None else settings.pin_memory
        collate = settings.data_collator or Collator(label_names=settings.label_names or ())
        self._loading: dict[str, Any] = {
            "collate": collate.with_attention_mask() if adds_mask and isinstance(collate, Collator) else collate,
            "seed": settings.seed, "rank": self.share.rank, "world_size": self.share.size,
            "num_workers": settings.num_workers, "pin_memory": pin_memory and device.type != "cpu",
            "prefetch_factor": settings.prefetch_factor,
        }  # fmt: skip
        _check_labels(settings.train_dataset, settings.eval_dataset)
        self.train: Any = None
        if settings.train_loader is not None:
            self.train = self._wrap_loader(settings.train_loader, "train_loader")
        elif settings.train_dataset is not None:
            self.train = self._train_loader()
        self.train_size: int | None = None if self.train is None else self.train.size
        self.eval: Any = self._evaluation_set("eval")
        self.test: Any = self._evaluation_set("test")
        if ranks.world_size > 1:
            self.check_sizes(self.train, self.eval, self.test)

    @property
    def _keeps_states(self) -> bool:
        """Whether something may restore the positions in the training data."""
        settings = self._settings
        return settings.save_dir is not None or any("rewinding" in algorithm.needs for algorithm in settings.algorithms)

    def _train_loader(self) -> Loader:
        settings = self._settings
        self._reject_split_stream(settings.train_dataset, "train_dataset")
        if not settings.shuffle and hasattr(settings.train_dataset, "epoch_order"):
            raise ConfigError(
                f"`shuffle=False` contradicts `train_dataset`, a {type(settings.train_dataset).__name__}, which has "
                "its own order. Leave it out."
            )
        if settings.drop_last and is_stream(settings.train_dataset):
            raise ConfigError(
                "`drop_last=True` needs data with a length, so that the number of steps is known; "
                "`train_dataset` is a stream. Leave it out, or end the stream after whole steps."
            )
        _check_batch_size(settings.train_dataset, "batch_size", settings.batch_size)
        rounds = self._layout()
        if isinstance(settings.train_dataset, ShardedStream):
            if rounds is not None:
                raise self._indivisible(rounds, "a ShardedStream, of which each rank reads other parts")
            return ShardedLoader(
                settings.train_dataset, settings.batch_size, ReadOptions(**self._loading),
                self._keeps_states, dataset_title("train_dataset"),
            )  # fmt: skip
        if rounds is not None and self._ranks.is_main:
            logger.info(
                "The %d samples of a step are no multiple of batch_size x processes = %d x %d: a process takes up to "
                "%d of them at a time, %d times a step.", rounds.step, settings.batch_size, self.share.size,
                math.ceil(max(rounds.sizes) / self.share.size), len(rounds.sizes),
            )  # fmt: skip
        return make_loader(
            self._transform(settings.train_dataset), settings.batch_size, name="train_dataset", rounds=rounds,
            shuffle=settings.shuffle, keep_states=self._keeps_states, **self._sampling, **self._loading,
        )  # fmt: skip

    def _indivisible(self, rounds: MicrobatchLayout, data: str) -> ConfigError:
        return ConfigError(
            f"`global_batch_size={rounds.step}` must be a multiple of batch_size x processes = "
            f"{self._settings.batch_size} x {self.share.size} with {data}. Change one of the three, or pass a "
            "dataset that all ranks read."
        )

    def _layout(self) -> MicrobatchLayout | None:
        """Return the layout of a step whose samples cannot be split evenly; None for even ones."""
        step, size = self._settings.global_batch_size, self._settings.batch_size
        if not isinstance(step, int) or not step % (size * self.share.size):
            return None
        return MicrobatchLayout.of(step, size, self.share.size)

    def _reject_split_stream(self, dataset: Any, name: str) -> None:
        """Raise ConfigError for a Hugging Face stream that is already split over the ranks."""
        if self._ranks.world_size > 1 and getattr(dataset, "_distributed", None) is not None and is_stream(dataset):
            raise ConfigError(
                f"`{name}` was split by split_dataset_by_node, and would be split over the ranks once more, so samples "
                "would be lost. Pass the stream from before the split, or ShardedStream(stream) to read only the share."
            )

    def loader_for(self, dataset: Any) -> Any:
        """Return the loader of a set to evaluate; the trainer's sets keep theirs, so their workers start once."""
        if dataset is self._settings.eval_dataset:
            return self.eval
        return self.test if dataset is self._settings.test_dataset else self._evaluation_loader(dataset, "dataset")

    def check_sizes(self, *loaders: Any) -> None:
        """Compare the lengths and orders of data on all ranks; for a custom loader they may differ.

        Raises:
            DistributedError: On all ranks, if they differ.
        """
        sizes: dict[str, Any] = {}
        for loader in itertools.chain.from_iterable(by_name(entry).values() for entry in loaders):
            options = getattr(loader.dataset, "order_options", None) if isinstance(loader, MapLoader) else None
            order = f"{loader.size}, in the order of {options()}" if callable(options) else loader.size
            sizes |= {} if isinstance(loader, UserLoader) else {loader.name: order}
        self._ranks.check_equal(
            "The numbers of samples on the ranks", sizes,
            "Give every rank the same data, and each takes its share; or pass a DataLoader with a "
            "DistributedSampler, as `train_loader` for instance.",
        )  # fmt: skip

    def _evaluation_set(self, kind: str) -> Any:
        dataset, loader = (getattr(self._settings, f"{kind}_{source}") for source in ("dataset", "loader"))
        return self._evaluation_loader(dataset if loader is None else loader, f"{kind}_dataset", loader is not None)

    def _evaluation_loader(self, source: Any, name: str, as_loader: bool = False) -> Any:
        """Return the loader of a set, with the rules of an `EvalSet`, or those of a dict of sets."""
        if source is None:
            return None
        if is_dict_of_sets(source):
            odd = next((key for key in source if not isinstance(key, str)), None)
            if odd is not None:
                raise ConfigError(
                    f"`{name}` names its sets by text, as the names of metrics begin with it, got {odd!r}. Pass "
                    f"{{{str(odd)!r}: ...}}."
                )
            if source and not any(not isinstance(entry, EvalSet) or entry.counts for entry in source.values()):
                raise ConfigError(
                    f"No set of `{name}` counts in the loss of an evaluation: each has `weight=0` or its own interval "
                    "(`every`). Leave both out for one of them."
                )
            return {key: self._evaluation_loader(value, f"{name}[{key!r}]", as_loader) for key, value in source.items()}
        rules = source if isinstance(source, EvalSet) else _NO_RULES
        data = rules.data if rules is source else source
        if rules.every is not None and "[" not in name:
            raise ConfigError(
                f"`every={str(rules.every)!r}` needs a named set, next to others. Pass {{'name': EvalSet(...), ...}} "
                f"as `{name}`."
            )
        if as_loader or isinstance(data, Loader) or is_loader(data):
            if rules.subset is not None:
                raise ConfigError(
                    f"`subset={rules.subset}` has no effect on a loader. Pass its dataset to the `EvalSet` in `{name}`."
                )
            loader = data if isinstance(data, Loader) else self._wrap_loader(data, name)
        else:
            data = self._transform(data) if rules.unit is None else data  # a custom unit may use any column
            self._reject_split_stream(data, name)
            size = self._settings.eval_batch_size or self._settings.batch_size
            _check_batch_size(data, "eval_batch_size", size)
            loader = make_loader(data, size, name=name, keep_states=False, subset=rules.subset, **self._loading)
        if rules is source:
            loader.rules = rules
        return loader

    def _wrap_loader(self, loader: Any, name: str) -> UserLoader:
        """Return the loader around that of the user; its state is invalid if evaluations read it too."""
        check_loader(loader, name.replace("_dataset", "_loader"))
        settings, share = self._settings, self.share
        sources = (settings.eval_dataset, settings.eval_loader, settings.test_dataset, settings.test_loader)
        is_shared = any(source is settings.train_loader for source in sources) and settings.train_loader is not None
        keep_states = name == "train_loader" and self._keeps_states and not is_shared
        return UserLoader(loader, settings.seed, share.rank, share.size, dataset_title(name), keep_states)

    def set_train_loader(self, loader: Any) -> None:
        """Replace the training loader by the user's."""
        if (rounds := self._layout()) is not None:
            raise self._indivisible(rounds, "a custom loader, which makes the batches")
        self.train = self._wrap_loader(loader, "train_loader")
        self.train_size = self.train.size

    def set_eval_loader(self, loader: Any) -> None:
        """Replace the evaluation loader by the user's, or by several by name."""
        self.eval = self._evaluation_loader(loader, "eval_dataset", as_loader=True)


def _check_batch_size(dataset: Any, name: str, size: int) -> None:
    if isinstance(dataset, BatchByTokens) and size != 1:
        raise ConfigError(
            f"`{name}={size}` would put {size} batches of a BatchByTokens together, with {size} times its `max_tokens`."
            f" Pass `{name}=1`; `gradient_accumulation_steps` makes a step of several."
        )


def _check_labels(inputs: Any, labels: Any) -> None:
    """Raise ConfigError if the labels of the training set are in the place of the evaluation set.

    These are as many numbers as there are inputs, which have another shape.
    """
    if not all(isinstance(array, torch.Tensor | np.ndarray) or is_table(array) for array in (inputs, labels)):
        return
    shapes = [tuple(array.shape) for array in (inputs, labels)]
    if shapes[0][:1] == shapes[1][:1] and shapes[1][1:] in ((), (1,)) and shapes[0][1:] != shapes[1][1:]:
        raise ConfigError(
            f"`eval_dataset` has the shape {shapes[1]} and `train_dataset` {shapes[0]}, so it looks like its labels. "
            "Pass both as one dataset: train_dataset=(X, y)."
        )
