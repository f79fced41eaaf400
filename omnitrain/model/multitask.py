"""Training on several tasks at once: mixed samples and a joint loss."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.compute.random_state import derive_seed
from omnitrain.core.errors import ConfigError, DataError, check_choice, check_number, did_you_mean
from omnitrain.data.collation import count_samples, get_labels, move_to_device, split_batch, split_by_sizes
from omnitrain.data.loaders import count_rows, is_stream
from omnitrain.data.sampling import Samples, adapt_collate
from omnitrain.data.sets import EvalSet
from omnitrain.model.losses import LossMean
from omnitrain.model.units import ModelUnit, StepOutput, check_untrained_loss, count_tokens, without_effect

Mixing = Literal["proportional", "uniform", "round_robin"]
_MIXINGS = ("proportional", "uniform", "round_robin")


class HostLabels:
    """The rows and labels of a task; of no type whose tensors move to a device together with their batch."""

    def __init__(self, rows: int, labels: dict[str, Any]) -> None:
        self.rows = rows
        self.labels = labels

    def count(self, mean: LossMean) -> float:
        """Return what the loss of the task divides its sum by: labels that count, their class weights, or rows."""
        divisor = mean.divisor(self.labels)
        return self.rows if divisor is None else divisor


class TaskBatch(NamedTuple):
    """The samples of a micro-batch, collated for each task by itself.

    Attributes:
        parts: The batch of each task.
        labels: The labels of each, on the host.
        idle: The tasks that have no sample here, and whose batch is one that does not count.
    """

    parts: dict[str, Any]
    labels: dict[str, HostLabels]
    idle: set[str]

    def count_samples(self) -> int:
        """Return the samples of all tasks."""
        return sum(self.labels[name].rows for name in self.parts if name not in self.idle)

    def count_tokens(self) -> int:
        """Return the tokens of the tasks that have samples here."""
        return sum(count_tokens(part) for name, part in self.parts.items() if name not in self.idle)


class MultiTask(Dataset[tuple[str, Any]]):
    """The training sets of several tasks as one, mixed again in each epoch.

    The mix of an epoch depends only on the seed and the epoch, so a run resumes in mid-epoch as any other does, and
    the samples of a step are the same for every split and number of processes. Over the epochs all samples of a task
    are used equally often. A sample that is used twice in an epoch is augmented alike both times.

    Args:
        tasks: The dataset of each task by its name, with a length and items, or tensors.
        mixing: The share of each task in an epoch: "proportional" to its samples; "uniform", the same for all, in
            random order; "round_robin", the same for all, in turns; or the shares, as a dict of positive numbers.
        temperature: Flattens proportional shares, which become n ** (1 / temperature): 1 leaves them as they are, and
            the larger it is, the more equal they become.
        epoch_size: Samples in an epoch; None is as many as the tasks have.

    Raises:
        ConfigError: If an argument is wrong.
        DataError: If a task has no samples, or is a stream.

    >>> tasks = MultiTask({"a": [1, 2, 3], "b": [4]}, mixing="round_robin")
    >>> [tasks[i] for i in tasks.epoch_order(epoch=0, seed=0)][1::2]
    [('b', 4), ('b', 4)]
    """

    def __init__(
        self,
        tasks: Mapping[str, Any],
        mixing: Mixing | Mapping[str, float] = "proportional",
        temperature: float = 1.0,
        epoch_size: int | None = None,
    ) -> None:
        if not isinstance(tasks, Mapping) or not tasks or not all(isinstance(name, str) and name for name in tasks):
            raise ConfigError(f"`tasks` must be a dict of datasets by the name of their task, got {tasks!r:.200}.")
        for name, data in tasks.items():
            if is_stream(data):
                raise DataError(
                    f"The task {name!r} must have a length and items, so that it can be mixed, got "
                    f"{type(data).__name__}. Read the stream into a list, or mix streams with "
                    "datasets.interleave_datasets."
                )
            if not count_rows(data):
                raise DataError(f"The task {name!r} has no samples. Give it at least one, or leave it out.")
            if hasattr(data, "epoch_order"):
                raise DataError(
                    f"The task {name!r} is a {type(data).__name__} with an order of its own, which a mix of tasks has "
                    "too. Pass the dataset in it."
                )
        self.tasks: dict[str, Any] = dict(tasks)
        self.mixing = mixing
        self.temperature = temperature
        self._names = list(tasks)
        self._items = [Samples(data) for data in tasks.values()]
        self._sizes = np.array([*map(len, self._items)])
        self._firsts = np.concatenate([[0], np.cumsum(self._sizes)])
        if epoch_size is not None:
            check_number("epoch_size", epoch_size, least=1, is_whole=True)
        self.epoch_size: int = int(self._sizes.sum()) if epoch_size is None else int(epoch_size)
        self._counts = _apportioned(self.epoch_size, self._shares())

    def _shares(self) -> np.ndarray:
        mixing, temperature = self.mixing, self.temperature
        check_number("temperature", temperature, above=0)
        if temperature != 1 and mixing != "proportional":
            raise ConfigError(f"`temperature={temperature}` has an effect on mixing='proportional' only. Leave it out.")
        if isinstance(mixing, Mapping):
            _check_names("mixing", mixing, self.tasks)
            for name in self.tasks:
                check_number(f"mixing[{name!r}]", mixing.get(name), above=0)
            shares = np.array([float(mixing[name]) for name in self.tasks])
        elif mixing == "proportional":
            shares = self._sizes ** (1 / temperature)
        else:
            check_choice("mixing", mixing, _MIXINGS, " or a dict of shares")
            shares = np.ones(len(self.tasks))
        return shares / shares.sum()

    def __len__(self) -> int:
        """Return the samples of all tasks."""
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> tuple[str, Any]:
        """Return the name of a task and a sample of it; the tasks lie one after the other."""
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._names[number], self._items[number][index - int(self._firsts[number])]

    def epoch_order(self, epoch: int, seed: int) -> np.ndarray:
        """Return the samples of an epoch in their order, as int64 of shape (epoch_size,)."""
        generator = np.random.default_rng(derive_seed(seed, epoch))
        task_of = np.repeat(np.arange(len(self.tasks)), self._counts)
        if self.mixing == "round_robin":
            turns = np.concatenate([np.arange(count) for count in self._counts])
            task_of = task_of[np.lexsort((task_of, turns))]
        else:
            generator.shuffle(task_of)
        order = np.empty(self.epoch_size, dtype=np.int64)
        for task, count in enumerate(self._counts):
            order[task_of == task] = self._firsts[task] + self._drawn(task, epoch * count, count, seed)
        return order

    def _drawn(self, task: int, first: int, count: int, seed: int) -> np.ndarray:
        """Return `count` samples of a task, from the one on that is its `first` over all epochs."""
        size = int(self._sizes[task])
        cycles = range(first // size, (first + count - 1) // size + 1) if count else ()
        orders = [np.random.default_rng(derive_seed(seed, task, cycle)).permutation(size) for cycle in cycles]
        return np.concatenate([*orders, np.empty(0, dtype=np.int64)])[first % size :][:count].astype(np.int64)

    def order_options(self) -> dict[str, Any]:
        """Return what decides the order besides the data, as JSON types."""
        mixing = dict(self.mixing) if isinstance(self.mixing, Mapping) else self.mixing
        return {"mixing": mixing, "temperature": self.temperature, "epoch_size": self.epoch_size}

    def collate_with(self, collate: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], TaskBatch]:
        """Return the collator of the tasks' samples; `collate` makes a batch of samples of one task."""
        pairs = [(items, adapt_collate(items.dataset, collate)) for items in self._items]
        return _ByTask(dict(zip(self._names, pairs, strict=True)))

    def evaluation(self, sets: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> dict[str, EvalSet]:
        """Return evaluation sets by the name of their task, for `eval_dataset`.

        Args:
            sets: The evaluation set of each task, or of some.
            metrics: What `compute_metrics` is for each; a task that is not in it has only its loss.

        Raises:
            ConfigError: If a name is no task.
        """
        _check_names("sets", sets, self.tasks)
        _check_names("metrics", metrics or {}, sets)
        return {name: EvalSet(MultiTask({name: data}), (metrics or {}).get(name)) for name, data in sets.items()}


class _ByTask:
    """Collates the samples of each task by themselves.

    A task without a sample in a batch is there with its first one, without weight. So all ranks go through the same
    layers, as sharded weights and DDP need, and in each step all layers have gradients, on one process as on several.
    """

    def __init__(self, tasks: Mapping[str, tuple[Any, Callable[[Sequence[Any]], Any]]]) -> None:
        self.tasks = tasks

    def __call__(self, samples: Sequence[tuple[str, Any]]) -> TaskBatch:
        parts, labels, idle = {}, {}, set()
        for name, (data, collate) in self.tasks.items():
            task_samples = [sample for task, sample in samples if task == name]
            if not task_samples:
                task_samples = [data[0]]
                idle.add(name)
            parts[name] = collate(task_samples)
            labels[name] = HostLabels(len(task_samples), _labels_by_name(parts[name]))
        return TaskBatch(parts, labels, idle)

    def split_batch(self, batch: TaskBatch, size: int) -> list[TaskBatch]:
        """Return a batch in parts of at most `size` samples, each of one task, while the others are idle.

        Raises:
            DataError: If something in the batch of a task cannot be cut.
        """
        if batch.count_samples() <= size:
            return [batch]
        idle = {name: self._split_task(name, batch, 1)[0] for name in batch.parts}
        split = list[TaskBatch]()
        for task in [name for name in batch.parts if name not in batch.idle]:
            for piece in self._split_task(task, batch, size):
                pieces = {**idle, task: piece}
                parts, labels = ({name: pair[i] for name, pair in pieces.items()} for i in (0, 1))
                split.append(TaskBatch(parts, labels, set(parts) - {task}))
        return split

    def _split_task(self, name: str, batch: TaskBatch, size: int) -> list[tuple[Any, HostLabels]]:
        """Return the batch of a task in parts of at most `size` rows, each with its labels."""
        part, host = batch.parts[name], batch.labels[name]
        custom = getattr(self.tasks[name][1], "split_batch", None)
        parts = split_batch(part, size) if custom is None else custom(part, size)
        if len(parts) == 1:
            return [(parts[0], host)]
        sizes = [count_samples(rows_of_part) for rows_of_part in parts]
        if custom is None:  # cut on the host, as reading them from a GPU would wait for it
            of_parts = split_by_sizes(host.labels, sizes)
        else:
            of_parts = [move_to_device(_labels_by_name(rows_of_part), torch.device("cpu")) for rows_of_part in parts]
        return list(zip(parts, map(HostLabels, sizes, of_parts), strict=True))


class MultiTaskUnit:
    """The loss of several tasks: the mean over all targets of a step, those of each task times its weight.

    The model's `forward` gets the task: `model(inputs, task="name")` for batches that are tuples, and
    `model(**batch, task="name")` for dicts. It is called once for each task in every micro-batch; for a task that has
    no sample there, with one that does not count.

    Args:
        model: The model.
        losses: The loss of each task, called as `f(outputs, labels)`, a mean; a task without one needs a model that
            returns its loss.
        weights: The weight of each task's loss; 1 where nothing is said.

    Raises:
        ConfigError: If `forward` takes no `task`, a weight is no number of at least 0, or a loss has weights to train.

    >>> class Heads(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.heads = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 1)})
    ...
    ...     def forward(self, x, task):
    ...         return self.heads[task](x)
    >>> unit = MultiTaskUnit(Heads(), {"a": nn.functional.cross_entropy, "b": nn.functional.mse_loss}, {"b": 0.5})
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Mapping[str, Callable[[Any, Any], torch.Tensor]] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        parameters = inspect.signature(unwrap(model).forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if "task" not in parameters and not takes_any:
            raise ConfigError(
                f"`model.forward` ({type(unwrap(model)).__name__}) must take the name of the task as `task`, and takes "
                f"{', '.join(parameters) or 'nothing'}."
            )
        for name, weight in (weights or {}).items():
            check_number(f"weights[{name!r}]", weight, least=0)
        for name, loss in (losses or {}).items():
            if not callable(loss) or isinstance(loss, type):
                raise ConfigError(f"The loss of the task {name!r} must be callable, got {loss!r:.200}.")
            check_untrained_loss(f"The loss of the task {name!r}", loss, model)
        self.model = model
        self.losses: dict[str, Callable[[Any, Any], torch.Tensor]] = dict(losses or {})
        self.weights: dict[str, float] = dict(weights or {})
        self._units: dict[str, ModelUnit] = {}
        self.loss_mean: LossMean = LossMean(is_shift_known=True)
        """What the loss of each task is a mean over, in its `tasks`."""

    def evaluate(self, batch: TaskBatch) -> StepOutput:
        """Return the same; for a batch of one task, its loss without the weight, its outputs and its labels."""
        return self(batch)

    def __call__(self, batch: TaskBatch) -> StepOutput:
        """Return the sum of the losses of all targets, each times the weight of its task; logs show each task's."""
        if not isinstance(batch, TaskBatch):
            raise DataError(
                f"MultiTaskUnit needs the batches of a MultiTask dataset, got {type(batch).__name__}. Pass evaluation "
                "sets through `MultiTask.evaluation({'task': dataset})`."
            )
        total: Any = 0.0
        targets, output, metrics = 0.0, StepOutput(None), dict[str, Any]()
        for name, part in batch.parts.items():
            output = self.run_task(name, part)
            divisor = batch.labels[name].count(self.loss_mean.tasks[name])
            count = 0 if name in batch.idle else divisor
            loss = output.required_loss()
            has_weight = len(batch.parts) > 1 or torch.is_grad_enabled()
            weight = self.weights.get(name, 1.0) if has_weight else 1.0
            weighted = loss * (count * weight) if divisor else without_effect(output, loss)
            total = total + weighted
            targets += count
            metrics[f"loss_{name}"] = (loss.detach(), count)
            for key, value in (output.metrics or {}).items():
                is_mean = isinstance(value, (torch.Tensor, numbers.Real))
                metrics[f"{name}_{key}"] = (value, count) if is_mean or not count else value
        is_one = len(batch.parts) == 1
        outputs, labels = (output.outputs, output.labels) if is_one else (None, None)
        mean = self.loss_mean.tasks[name] if is_one else None
        return StepOutput(total, outputs, labels, targets, metrics=None if is_one else metrics, _loss_mean=mean)

    def mean_of(self, name: str) -> LossMean:
        """Return what the loss of a task is a mean over."""
        return self._unit(name).loss_mean

    def run_task(self, name: str, batch: Any) -> StepOutput:
        """Return the mean loss of a batch of one task, with its outputs and labels."""
        return self._unit(name)(lambda *args, **kwargs: self.model(*args, task=name, **kwargs), batch)

    def _unit(self, name: str) -> ModelUnit:
        if name not in self._units:
            self._units[name] = unit = ModelUnit(self.model, self.losses.get(name))
            if name in self.loss_mean.tasks:  # of a checkpoint
                unit.loss_mean.load_state_dict(self.loss_mean.tasks[name].state_dict())
            self.loss_mean.tasks[name] = unit.loss_mean
        return self._units[name]


def _labels_by_name(batch: Any) -> dict[str, Any]:
    """Return what the loss of a batch is counted by."""
    labels = {"labels": get_labels(batch)}
    if isinstance(batch, Mapping) and "shift_labels" in batch:
        labels["shift_labels"] = batch["shift_labels"]
    return labels


def _apportioned(whole: int, shares: np.ndarray) -> list[int]:
    """Return whole numbers that add up to `whole`, in these shares as nearly as can be."""
    exact = shares * whole
    counts = np.floor(exact + 1e-9).astype(np.int64)
    rest = np.argsort(counts - exact, kind="stable")[: whole - int(counts.sum())]
    counts[rest] += 1
    return counts.tolist()


def _check_names(argument: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    odd = [name for name in values if name not in known]
    if odd:
        raise ConfigError(
            f"`{argument}` names {odd[0]!r}, which is no task. The tasks are {', '.join(map(repr, known))}."
            f"{did_you_mean(str(odd[0]), known)}"
        )
