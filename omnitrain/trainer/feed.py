"""The feed of windows: the micro-batches of one optimizer step each.

Batches come from `data/loaders.py`; windows go to `step.py`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from omnitrain.checkpoint.fingerprints import content_digest
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.duration import Stages
from omnitrain.core.errors import DataError, DistributedError, add_location
from omnitrain.core.events import ProfilerRanges, find_overrides, wrap_in_range
from omnitrain.core.progress import Progress
from omnitrain.data.collation import copy_to_device, count_samples, move_to_device, split_batch, tensors_in
from omnitrain.data.loaders import Loader, MapLoader, UserLoader
from omnitrain.data.sampling import CountedBatch, Window
from omnitrain.data.stateful import data_parts
from omnitrain.model.units import ModelUnit, StepOutput, count_tokens, no_token_counts
from omnitrain.trainer.hooks import Hooks
from omnitrain.trainer.lifecycle import Lifecycle
from omnitrain.trainer.loss_probe import ask_loss, split_error

logger: logging.Logger = logging.getLogger("omnitrain")

Weighed = tuple[Any, float, int, int, int]
"""A micro-batch, its weight in the loss, its samples and tokens, and the batches that end with it: 1, or 0 within one.

Samples and tokens of a batch that is split are counted at its end.
"""
_batches_of = operator.itemgetter(4)


# The most windows that are read ahead, whose steps then share one exchange between the ranks.
_MAX_AHEAD = 8
# They are if a window has at most so many bytes, which take memory, ...
_SMALL_WINDOW = 1 << 16
# ... and a step takes at most so many seconds: a signal on one rank is heard in the next exchange.
_SHORT_STEP = 0.01


@dataclass(slots=True)
class WindowAhead:
    """A window that is read before its step.

    Attributes:
        group: Its micro-batches on this rank, or the error from reading them.
        totals: Its `_window_sums`, summed over all ranks; empty until they are known.
    """

    group: list[Weighed] | Exception
    totals: Sequence[float] = ()


def _window_sums(group: list[Weighed] | Exception) -> tuple[float, ...]:
    """Return the numbers of a window to sum over ranks: those of `Weighed`, micro-batches, and their square."""
    if isinstance(group, Exception):
        return (0,) * _SUMS
    weight = samples = tokens = batches = 0
    for entry in group:
        weight, samples, tokens, batches = weight + entry[1], samples + entry[2], tokens + entry[3], batches + entry[4]
    return weight, samples, tokens, batches, len(group), len(group) ** 2


_SUMS = len(_window_sums([]))


class Feed:
    """Yields the windows of an epoch."""

    def __init__(self, trainer: Hooks, lifecycle: Lifecycle, accumulation: int, stages: Stages | None = None) -> None:
        ranks, settings = trainer.ranks, trainer.settings
        self.accumulation: int = accumulation
        """Batches on each rank of the latest window that was read."""
        # What `accumulation` is in the course of the run, where it changes.
        self._stages = stages
        # The latest window, and how many samples the run had consumed before it.
        self._latest: tuple[int, Window] | None = None
        microbatch_size = settings.microbatch_size
        self.microbatch_size: int | None = None if microbatch_size == "auto" else microbatch_size
        """The most rows of a micro-batch; None splits no batch."""
        self.samples: int | None = None
        """The samples of the batch that is weighed, if they are known."""
        self._may_split = microbatch_size is not None
        self._split: Callable[[Any, int], list[Any]] = split_batch
        self._trainer = trainer
        self._runtime = device_runtime(trainer.device)
        self._lifecycle = lifecycle
        self._ranks = ranks
        self._reduction = settings.grad_reduction
        self._label_names = settings.label_names or ()
        self._collate = settings.data_collator
        self.stateful_data: dict[str, Any] = data_parts(settings)
        """The parts of the data with a state, which is then that after the last batch of a step, as it is saved."""
        self.is_left_out: Callable[[int, int, int], bool] | None = None
        """Whether a window is left out, by its epoch and its first and last position there; None leaves out none."""
        # Whether the ranks know that they read the same data, if each takes its share of them.
        self._has_compared: bool = ranks.world_size == 1
        # The source of the next window, if it may be read ahead.
        self._groups: Iterator[list[Weighed]] | None = None
        # The next windows.
        self._ahead: deque[WindowAhead] = deque()
        # Those of them whose totals are being exchanged.
        self._exchanged: Sequence[WindowAhead] = ()
        # Whether several windows can be read at once, and whether the ranks have agreed on it.
        self._can_share, self._shares = False, False
        # When windows were read ahead, and how many have been yielded since.
        self._read_at, self._yielded = 0.0, 0
        # Returns the weight of a training batch on the host.
        self._weight_of: Callable[[Any], float] = trainer._weigh
        # Reads a window; named, if the parts of steps are.
        self._next: Callable[..., Any] = next

    # --- training

    def windows(self, loader: Loader, epoch: int, progress: Progress) -> Iterator[Window]:
        """Yield the windows of an epoch from the position of the run on, with weights computed on the host.

        Raises:
            DataError: If the data end with fewer or more samples than an epoch has.
        """
        done, size = progress.samples_in_epoch, self._size_of(loader)
        self._split = self.splitter_of(loader)
        counts_rows = self._trainer.algorithms and self._counts_changed_labels()
        self._weight_of = self._weigh_rows if counts_rows else self._trainer._weigh
        batches = loader.counted_batches(epoch, done, progress.batches_in_epoch)
        last, self._latest = None, None
        groups = self._group_by_step(self.weighed(batches))
        # only indexed data may be read early: there each sample has its own random numbers
        reads_ahead = self._ranks.world_size > 1 and isinstance(loader, MapLoader) and not self.stateful_data
        self._groups = groups if reads_ahead else None
        # neither what depends on the steps before, nor what workers read while a step runs, comes in advance
        self._can_share = not (self._stages or self._trainer.settings.num_workers or self._may_split)
        self._ahead.clear()
        self._exchanged, self._shares, self._yielded = (), False, 0
        ranks, progress = self._ranks, self._lifecycle.progress
        while True:
            # what other ranks report if this one stalls here
            ranks.phase, ranks.step = "data", progress.step + progress.skipped_steps + 1
            began = time.perf_counter()
            try:
                ahead = self._ahead.popleft() if self._ahead else WindowAhead(self._next(groups, []))
                group = ahead.group
                if isinstance(group, Exception):
                    raise group
            except Exception as error:
                place = f"the data of step {progress.step + 1} (epoch {progress.epoch + 1}), rank {ranks.rank}"
                add_location(error, place)
                raise
            self._lifecycle.clock.add("data", time.perf_counter() - began)
            last = group[-1] if group else last
            # only after the first batch was read, so that no sample is read twice
            if not self._has_compared:
                self._compare_first(loader)
            if not self._trainer.loss_mean.is_checked:
                group = self._ask_loss(group)
            if not self._trainer.loss_mean.is_mean and (
                self.accumulation > 1 or self._may_split or ranks.data.size > 1 or self._stages is not None
            ):
                raise split_error(self._trainer.settings.loss_fn, self._trainer.backend.model)
            window = self.window_of(group, last, ahead.totals)
            ranks.phase = "step"
            # None on all ranks at once: the totals say whether any rank has a batch left
            if window is None:
                self._groups = None
                if size not in (None, done):
                    raise _wrong_length(done, size)
                return
            loader.turn += sum(map(_batches_of, group))
            if window.samples:  # otherwise all ranks have only dummy batches
                done += window.samples
                if self.is_left_out is not None and self.is_left_out(epoch, done - window.samples, done):
                    progress.leave_out(window.samples, window.micro_batches)
                    continue
                self._latest = progress.samples, window
                self._yielded += 1
                yield window

    def _ask_loss(self, group: list[Weighed]) -> list[Weighed]:
        """Probe what the loss is a mean over, and return the first micro-batches with their weights."""
        mean, weighed = self._trainer.loss_mean, list[Weighed]()
        before = mean.shift, mean.ignore_index, mean.counts_labels, mean.is_sum
        with self._lifecycle.clock.during("setup"):
            ask_loss(self._trainer, [batch for batch, *_ in group])
        if (mean.shift, mean.ignore_index, mean.counts_labels, mean.is_sum) == before:
            return group
        for batch, weight, samples, tokens, ends in group:
            if weight or samples or not ends:  # otherwise it is a dummy batch
                self.samples = samples or None
                weight = self._weight_of(move_to_device(batch, torch.device("cpu")))
            weighed.append((batch, weight, samples, tokens, ends))
        return weighed

    def _group_by_step(self, parts: Iterable[Weighed]) -> Iterator[list[Weighed]]:
        """Group the micro-batches of the batches of a step on this rank, whose number may change; the last is short."""
        group, remaining = list[Weighed](), 0
        for micro_batch in parts:
            if not remaining and self._stages is not None:
                progress = self._lifecycle.progress
                # a step is read during the one before, which is not counted yet
                if self._latest is not None and progress.samples == self._latest[0]:
                    window, progress = self._latest[1], copy.copy(progress)
                    progress.advance(window.samples, window.tokens)
                self.accumulation = self._stages.at(progress)
            remaining = remaining or self.accumulation
            group.append(micro_batch)
            remaining -= micro_batch[4]
            if not remaining:
                yield group
                group = []
        if group:
            yield group

    def _compare_first(self, loader: Loader) -> None:
        """Compare the first sample on all ranks, once in a run, where each reads all data and takes its share."""
        self._has_compared = True
        if isinstance(loader, MapLoader) or loader.is_split:
            return
        first, loader.first = loader.first, None
        fingerprint = None if first is None else (content_digest(_lasting(first)), content_digest(first))
        gathered = self._ranks.gather("the first sample of the ranks", fingerprint)
        fingerprints = {entry for entry in gathered if entry is not None}
        if len({lasting for lasting, _ in fingerprints}) > 1:
            raise DistributedError(
                f"The first sample of {loader.name} is another one on each rank. Every rank takes its share of what it "
                "reads here, and of data that are split already the rest would never be used. Give every rank the same "
                "data in the same order; or, so that each reads only its part, pass ShardedStream(parts) as "
                "`train_dataset`, or a DataLoader with a DistributedSampler."
            )
        if len(fingerprints) > 1 and self._ranks.is_main:
            logger.warning(
                "The first sample of %s has other numbers on each rank. If it draws random numbers by a generator of "
                "its own, seed that alike on all ranks. If the data are split already, the rest of each part is never "
                "used: give every rank the same data, or pass ShardedStream(parts) as `train_dataset`.", loader.name,
            )  # fmt: skip

    def _size_of(self, loader: Loader) -> int | None:
        """Return the samples that an epoch must have over all ranks; None if each rank has the user's own loader."""
        return None if isinstance(loader, UserLoader) and self._ranks.data.size > 1 else loader.size

    @property
    def is_ahead(self) -> bool:
        """Whether the ranks know the next window already."""
        return bool(self._ahead and self._ahead[0].totals)

    def read_ahead(self, may_share: bool = False) -> Sequence[float]:
        """Read the next window, and return what the other ranks need to know about it.

        If `may_share`, several short steps share an exchange: then their windows are read at once.
        """
        if self._groups is None:
            return ()
        self._ranks.phase, began = "data", time.perf_counter()
        windows = list[WindowAhead]()
        while len(self._ahead) < (_MAX_AHEAD if self._shares else 1):
            try:
                windows.append(WindowAhead(self._next(self._groups, [])))
            except Exception as error:  # it belongs to its step: the requests of those before come first
                windows.append(WindowAhead(error))
            self._ahead.append(windows[-1])
        seconds, steps, self._read_at, self._yielded = began - self._read_at, self._yielded, began, 0
        is_short = (
            may_share and self._can_share and 0 < seconds <= _SHORT_STEP * steps and _is_small(self._ahead[-1].group)
        )
        self._lifecycle.clock.add("data", time.perf_counter() - began)
        self._ranks.phase, self._exchanged = "step", windows
        sums = itertools.chain.from_iterable(self._ranks.count_once(_window_sums(window.group)) for window in windows)
        return is_short, *sums

    def annotate(self, ranges: ProfilerRanges | None) -> None:
        """Read data inside of `ranges("data")`; None removes the ranges."""
        self._next = next if ranges is None else wrap_in_range(ranges, "data", next)

    def set_totals(self, totals: Sequence[float]) -> None:
        """Take the results of `read_ahead`, summed over all ranks."""
        if totals:
            self._shares = totals[0] == self._ranks.world_size
            for number, window in enumerate(self._exchanged):
                window.totals = totals[1 + number * _SUMS : 1 + (number + 1) * _SUMS]
            self._exchanged = ()

    def shrink(self, size: int) -> None:
        """Split batches into parts of at most `size` rows from here on; called in a step, on all ranks alike."""
        self.microbatch_size, self._exchanged = size, ()
        for window in self._ahead:  # the other ranks know of it, or are about to
            if isinstance(window.group, list):
                window.group, window.totals = self._in_parts(window.group), ()

    def split_again(self, window: Window) -> Window:
        """Return a window of the same samples in the micro-batches that are now in force; called on all ranks."""
        origins = window.origins or []
        parts = zip(window.batches, window.weights, origins, [*origins[1:], None], strict=True)
        group = self._in_parts([(batch, weight, 0, 0, origin != after) for batch, weight, origin, after in parts])
        smaller = self.window_of(group, group[-1])
        assert smaller is not None
        # the run has counted the window in its first form, and counts it once
        smaller.micro_batches, smaller.samples, smaller.tokens = window.micro_batches, window.samples, window.tokens
        return smaller

    def _in_parts(self, group: list[Weighed]) -> list[Weighed]:
        """Split micro-batches once more; those without weight are cut down, not multiplied."""
        micro_batches = list[Weighed]()
        for batch, weight, samples, tokens, end in group:
            parts = self._split(batch, self.microbatch_size or 1)
            if not weight or len(parts) == 1:
                micro_batches.append((parts[0], weight, samples, tokens, end))
                continue
            weights = [self._weight_of(move_to_device(part, torch.device("cpu"))) for part in parts]
            micro_batches += [(part, weight, 0, 0, 0) for part, weight in zip(parts, weights, strict=True)]
            micro_batches[-1] = (parts[-1], weights[-1], samples, tokens, end)
        return micro_batches

    def window_of(self, group: list[Weighed], last: Weighed | None, totals: Sequence[float] = ()) -> Window | None:
        """Return the window of these micro-batches and those of the other ranks; None if no rank has any.

        `last` is repeated without weight if other ranks have more. The totals are summed over all ranks, if given.
        """
        size = len(group)
        totals = totals or self._ranks.sum_shares("the beginning of a step", *_window_sums(group))
        weight, samples, tokens, batch_count, sizes, squares = totals
        if not sizes:
            return None
        if squares * self._ranks.data.size != sizes * sizes:  # true if and only if the sizes differ
            # dummies fill the window up to the size of the largest: all ranks must run forward
            all_sizes = self._ranks.gather("the micro-batches of a step", None if last is None else size)
            _reject_empty(all_sizes)
            if last is not None:
                group = group + [(last[0], 0, 0, 0, 0)] * (max(count or 0 for count in all_sizes) - size)
        batches, weights, *_ = map(list, zip(*group, strict=True))
        origins = _origins(group) if self._may_split else None
        # of this rank's weighted losses, whose gradients are averaged over the ranks later
        divisor = (1.0 if self._reduction == "sum" else weight) / self._ranks.data.size or 1.0
        return Window(batches, weights, weight, int(batch_count), int(samples), int(tokens), divisor, origins)

    # --- weights

    def weighed(self, batches: Iterable[CountedBatch]) -> Iterator[Weighed]:
        """Yield each batch with its weight, samples and tokens."""
        for (batch, samples), (ready, _) in self.copied(batches):
            self._ranks.progress_count += 1
            if self.microbatch_size is not None:
                yield from self._parts(batch, ready, samples, self.microbatch_size)
            elif samples:
                self.samples = samples
                yield ready, self._weight_of(batch), samples, count_tokens(batch), 1
            else:
                yield ready, 0, 0, 0, 1

    def copied(self, batches: Iterable[CountedBatch]) -> Iterator[tuple[CountedBatch, CountedBatch]]:
        """Yield each batch, and the same to be computed with: copied beside the computation where that is possible."""
        if self._runtime.has_streams and type(self._trainer)._prepare_batch is Hooks._prepare_batch:
            yield from copy_to_device(batches, self._runtime)
        else:
            for batch in batches:
                yield batch, batch

    def _parts(self, batch: Any, ready: Any, samples: int, size: int) -> Iterator[Weighed]:
        """Yield the parts of a batch, weighed; of a dummy batch only the first one. `ready` is on the device."""
        self.samples = None  # of a part they are not known
        parts = self._split(batch, size)
        if not isinstance(parts, list) or not parts:
            raise DataError(
                f"split_batch(batch, size) returned {parts!r:.80}. Return a list of batches of at most `size` rows."
            )
        device_parts = parts if ready is batch else self._split(ready, size)
        if not samples:
            yield device_parts[0], 0, 0, 0, 1
            return
        ends = [(0, 0, 0)] * (len(parts) - 1) + [(samples, count_tokens(batch), 1)]
        for part, device_part, end in zip(parts, device_parts, ends, strict=True):
            yield device_part, self._weight_of(part), *end

    def weigh(self, batch: Any) -> float:
        """Return the weight of a micro-batch (on the host) in its window: its labels that count, or its rows.

        The loss is a mean over these, or, with `grad_reduction="sum"`, a sum. There are as many rows as samples, unless
        a collator makes other rows.
        """
        if isinstance(self._trainer.unit, ModelUnit):  # the user's own unit counts targets, or averages over samples
            mean, names = self._trainer.loss_mean, self._label_names
            if self._reduction == "per-token-mean" and mean.divisor(batch, names, of_labels=True) is None:
                raise no_token_counts()
            divisor = mean.divisor(batch, names)
            if divisor is not None:
                return divisor
        return self.rows_of(batch)

    def _counts_changed_labels(self) -> bool:
        """Return whether `count_classes` counts the targets of batches, as algorithms may have changed their labels."""
        trainer = self._trainer
        return (
            bool(find_overrides(trainer.algorithms, "transform_batch"))
            and trainer.loss_mean.counts_unequally
            and self._reduction != "sum"
            and isinstance(trainer.unit, ModelUnit)
            and "compute_loss" not in trainer._overridden  # which is given the weight
        )

    def _weigh_rows(self, batch: Any) -> float:
        """Return the rows of a batch, which weigh it where `count_classes` counts the targets."""
        self._trainer._weigh(batch)  # raises an error for data without tokens, where these are to be counted
        return self.rows_of(batch)

    def count_classes(self, output: StepOutput, weight: float) -> None:
        """Have a mean over class weights count its targets, since algorithms may have changed the labels.

        The mean over probabilities is one over rows. Which of them it is can change from step to step.
        """
        mean, labels = self._trainer.loss_mean, output.labels
        if output.num_targets is not None or not isinstance(self._trainer.unit, ModelUnit) or not mean.counts_unequally:
            return
        divisor = mean.divisor_of_changed(labels) if weight else None  # without weight it is a dummy batch
        output.num_targets = weight if divisor is None else divisor
        output.loss = output.required_loss() * output.num_targets

    def rows_of(self, batch: Any) -> int:
        """Return the rows of a batch; of an object that has no length, the samples that it was made of."""
        try:
            return count_samples(batch)
        except DataError:
            if self.samples is None:
                raise
            return self.samples

    # --- evaluations

    def splitter_of(self, loader: Loader) -> Callable[[Any, int], list[Any]]:
        """Return what splits the batches of a loader: that of the user's own, or of what puts its batches together."""
        user_loader, fetch = getattr(loader, "loader", None), getattr(loader, "fetch", None)
        collators = getattr(user_loader, "collate_fn", None), getattr(fetch, "collate", None), self._collate
        for part in (user_loader, *collators):
            split = getattr(part, "split_batch", None)
            if callable(split):
                return cast("Callable[[Any, int], list[Any]]", split)
        return split_batch

    def lockstep_batches(self, loader: Loader, only_first: bool = False) -> Iterator[CountedBatch]:
        """Return the batches of an evaluation, equally many on all ranks: dummies follow data that end earlier."""
        batches = self.until_signal(loader.first_batch() if only_first else loader.counted_batches(0))
        if isinstance(loader, MapLoader):  # which has equally many batches on all ranks anyway
            return batches
        return self._in_lockstep(batches, None if only_first else self._size_of(loader))

    def _in_lockstep(self, batches: Iterator[CountedBatch], size: int | None) -> Iterator[CountedBatch]:
        """Yield batches, and dummies while other ranks have more; `size` is how many samples all of them must have."""
        ranks, last, done = self._ranks, None, 0
        while True:
            counted = next(batches, None)
            last = last if counted is None else counted
            (local_samples,) = ranks.count_once([0 if counted is None else counted.samples])
            count, empty, samples = ranks.sum("the turn of a batch", counted is not None, last is None, local_samples)
            done += int(samples)
            if not count:
                if size not in (None, done) and self._lifecycle.control.stop != "signal":
                    raise _wrong_length(done, size)
                return
            if empty:
                _reject_empty(ranks.gather("data that yield nothing", None if last is None else 0))
            if counted is not None:
                yield counted
            elif last is not None:
                yield CountedBatch(last.batch, 0)

    def until_signal(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield batches or windows; after a signal has ended the run, an error of their loader just ends them.

        A signal often goes to all processes of a run, and kills the workers of a custom loader. Several ranks would
        have to agree on that in the middle of a step; with them it is an error. (For training, wrap the windows, not
        their batches: an incomplete window would count as the short last one of an epoch.)
        """
        try:
            yield from items
        except Exception as error:
            if self._ranks.world_size > 1 or self._lifecycle.control.stop != "signal":
                raise
            logger.warning("The data end here, since their loader failed after the signal: %s", error)


def _is_small(group: list[Weighed] | Exception) -> bool:
    """Return whether the tensors of a window are known and take little memory."""
    sizes = [tensor.nbytes for batch, *_ in group for tensor in tensors_in(batch)] if isinstance(group, list) else []
    return 0 < sum(sizes) <= _SMALL_WINDOW


def _lasting(value: Any) -> Any:
    """Return what augmentation leaves of a sample: text, integers, rows of integers, and the kinds of the rest."""
    if isinstance(value, Mapping):
        return {key: _lasting(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lasting(entry) for entry in value]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        is_whole = not value.is_floating_point() if isinstance(value, torch.Tensor) else value.dtype.kind in "biu"
        return value if is_whole and value.ndim < 2 else str(value.dtype)
    return value if isinstance(value, (bool, int, str, bytes, type(None))) else type(value).__name__


def _origins(group: list[Weighed]) -> list[int]:
    """Return which batch of its window each micro-batch is a part of."""
    return list(itertools.accumulate([micro_batch[4] for micro_batch in group[:-1]], initial=0))


def _wrong_length(count: int, size: int) -> DataError:
    return DataError(
        f"The data ended after {count} samples, but their length is {size}. Correct the `__len__` of the dataset, or "
        "what ends it early."
    )


def _reject_empty(counts: list[Any]) -> None:
    empty = [str(rank) for rank, count in enumerate(counts) if count is None]
    if empty:
        raise DataError(
            f"The training data are empty on rank {', '.join(empty)}, but not on others. Give every process a part "
            "of them, or the same data, of which each takes its share."
        )
