"""Small models, datasets, loops and random draws that several test files share."""

import functools
import math
import pickle
import random
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import omnitrain
from omnitrain import Callback, Event
from omnitrain.core.events import INNER_STEP_EVENTS

assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
"""Assert that tensors, or lists and dicts of them, are equal to the bit."""


def t16(dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The small regression model: 4 -> 16 -> 1."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)).to(dtype)


def rows(size: int = 60, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Fixed rows of 4 numbers and a target of 1."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(size, 4, generator=generator, dtype=dtype), torch.randn(size, 1, generator=generator, dtype=dtype)
    )


def small_trainer(*algorithms: Any, kind: Any = None, model: Any = None, data: Any = None, **options: Any) -> Any:
    """A silent trainer of the small regression model: by default `Trainer`, for 2 epochs of 16 rows in batches of 4."""
    loss = {} if "unit" in options else {"loss_fn": F.mse_loss}
    options = {"batch_size": 4, "epochs": 2, "learning_rate": 0.1, "algorithms": algorithms, **loss, **options}
    return trainer_on_cpu(kind or omnitrain.Trainer, model or t16(), data or rows(16), **options)


def trainer_on_cpu(kind: Any, model: nn.Module, data: Any = None, **options: Any) -> Any:
    """A silent trainer; those of accelerate and transformers choose the device themselves."""
    device = {"device": "cpu"} if issubclass(kind, omnitrain.Trainer) else {}
    return kind(model, train_dataset=data, **{"progress_bar": False, **device, **options})


def fit(trainer: Any, *args: Any, **options: Any) -> Any:
    """Train, and return the trainer."""
    trainer.train(*args, **options)
    return trainer


class Composed(nn.Module):
    """Layers by name, and the function of the model and its input that is the forward pass."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class FailsAt(nn.Module):
    """A model, by default the small regression model, whose pass of this number fails."""

    def __init__(self, number: int, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.number, self.passes = body or t16(), number, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.number:
            raise RuntimeError("boom")
        return self.body(x)


class CountsPasses(nn.Module):
    """Adds to its input how often it was called, in training and in evaluations, as buffers in and out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.replaced = self.replaced + 1
        return x + 0.01 * self.passes + 0.01 * self.replaced


class Tagger(nn.Module):
    """Predicts a class per token; its loss is the plain mean over labels that are not -100."""

    def __init__(self, classes: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8, dtype=dtype)
        self.out = nn.Linear(8, classes, dtype=dtype)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.embed(ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 6 tokens of which 1 to 6 have a label."""

    def __init__(self, size: int = 8) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 11, (size, 6), generator=generator)
        self.labels = torch.randint(0, 5, (size, 6), generator=generator)
        for i in range(size):
            self.labels[i, 1 + i % 6 :] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index], "labels": self.labels[index]}


class Keyed(Dataset[dict[str, torch.Tensor]]):
    """Rows by name, as transformers wants them."""

    def __init__(self, size: int = 20) -> None:
        self.x, self.y = rows(size, torch.float32).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class KeyedModel(nn.Module):
    """The small regression model as transformers wants it, for `Keyed`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = t16(dropout, torch.float32)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output = self.body(x)
        return {"logits": output} if labels is None else {"loss": F.mse_loss(output, labels), "logits": output}


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (arXiv:2405.15682), written as the package `schedulefree` writes it."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def train(self) -> None:
        self._move(True)

    def _move(self, trains: bool) -> None:
        for group in self.param_groups:
            share = 1 - group["momentum"] if trains else 1 - 1 / group["momentum"]
            for parameter in group["params"] if group["train_mode"] is not trains else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], share)
            group["train_mode"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Call optimizer.train() first.")
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["momentum"] * (1 - 1 / group["k"]) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Fixed rows with an augmentation that draws from all three global generators."""

    def __init__(self, size: int = 60) -> None:
        self.x, self.y = rows(size).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(4, dtype=torch.float64) + 0.01 * random.random() + 0.01 * np.random.rand()
        return self.x[index] + noise, self.y[index]


class Pages(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream of rows with noise whose state is its place; `read` has the numbers of all rows that it yielded."""

    def __init__(self, *bounds: int) -> None:
        self.places, self.at, self.read = range(*bounds), 0, list[int]()

    def __iter__(self) -> Any:
        data = rows(30)
        while self.at < len(self.places):
            self.at += 1
            self.read.append(self.places[self.at - 1])
            x, y = data[self.read[-1]]
            yield x + 0.1 * torch.randn(4, dtype=x.dtype), y
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Blank(Sentences):
    """Sentences of which some have no label at all."""

    def __init__(self, size: int, blank: Iterable[int]) -> None:
        super().__init__(size)
        self.labels[[*blank]] = -100


class Overflowing(nn.Module):
    """Gives infinite gradients in chosen forward passes, as fp16 does; the loss stays finite."""

    def __init__(self, at: Container[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.at, self.count = nn.Linear(4, 1), at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        out = self.layer(x)
        if self.count in self.at and out.requires_grad:
            out.register_hook(lambda gradient: gradient * math.inf)
        return out


class Holding:
    """A unit that holds its model, as fairseq2 writes them: a sum of losses, and how many targets it is of."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps: list[int] = []

    def set_step_nr(self, step_nr: int) -> None:
        self.steps.append(step_nr)

    def __call__(self, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.mse_loss(self.model(x), y, reduction="sum"), len(y)


class Trace(Callback):
    """Writes down every event outside of steps and batches, every row of logs, and reports with their steps."""

    order = 99

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, Any]] = []
        self.reports: list[tuple[int, dict[str, Any]]] = []
        self.learning_rates: list[float] = []

    def on_log(self, trainer: Any, logs: Any) -> None:
        self.events.append("log")
        self.logs.append(dict(logs))

    def _note(self, event: Event, trainer: Any, *details: Any) -> None:
        self.events.append(str(event))
        if event is Event.REPORT:
            self.reports.append((trainer.progress.step, dict(details[0])))
        if event is Event.STEP_END:
            self.learning_rates.append(trainer.optimizer.param_groups[0]["lr"])


class Everything(Callback):
    """Writes down every event, and for tensors what they are."""

    order = 98

    def __init__(self) -> None:
        self.events: list[str] = []
        self.numbers: list[int] = []
        self.norms: list[float] = []

    def _note(self, event: Event, trainer: Any, *details: Any) -> None:
        self.events.append(str(event))
        if event is Event.BATCH_START:
            self.numbers.append(details[1])
        elif event is Event.AFTER_CLIP:
            self.norms.append(float(details[0]))


def callback(base: type = Callback, **members: Any) -> Any:
    """Return a callback of functions by the names of their events, such as `callback(on_step_end=print)`."""
    functions = {name: staticmethod(member) if callable(member) else member for name, member in members.items()}
    return type("Functions", (base,), functions)()


def setting(base: type, event: str, flag: str, value: bool = True, step: int = 2) -> Any:
    """Return a callback of transformers that sets one flag at one event of one step."""

    def on_event(args: Any, state: Any, control: Any, **details: Any) -> Any:
        if state.global_step == step:
            setattr(control, flag, value)
        return control

    return callback(base, **{event: on_event})


class StopAt(Callback):
    """Asks for the end of the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.step:
            trainer.stop()


def subscribe(callback_class: type[Callback], handle: Callable[..., None], events: Iterable[Event]) -> None:
    """Have a class of callbacks handle these events by one function, which takes the event after `self`."""
    for event in events:
        setattr(callback_class, f"on_{event}", functools.partialmethod(handle, event))


INNER = {Event.LOG, Event.EVAL_BATCH_START, Event.EVAL_BATCH_END, Event.SAVE_START, *INNER_STEP_EVENTS}
subscribe(Trace, Trace._note, set(Event) - INNER)
subscribe(Everything, Everything._note, Event)


def weights(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def distance(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> float:
    """The largest absolute difference between two lists of tensors."""
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


def same(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal to the bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Graphs:
    """A compiler that leaves graphs as they are, and counts them."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph


# --- draws from the three global generators, and the states of these


def draw() -> float:
    """Draw from all three generators."""
    return torch.rand(1).item() + 10 * float(np.random.rand()) + 100 * random.random()


def disturb() -> None:
    """Bring the generators into a state as training leaves them: numpy's with a normal number in store."""
    torch.rand(3), random.gauss(0, 1), np.random.rand(2), np.random.randn()


def states() -> list[Any]:
    """The full state of each generator."""
    return [torch.get_rng_state().numpy().tobytes(), pickle.dumps(np.random.get_state(legacy=False)), random.getstate()]


# --- memory that runs out, where and when a test says so


def no_room() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def raise_no_room(gradient: torch.Tensor) -> None:
    raise no_room()


class Starving(nn.Module):
    """A regression model with statistics and dropout, whose passes have room for few rows after the first ones."""

    def __init__(self, room: int = 1000, where: str = "forward", start: int = 0, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.dropout = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.last = nn.Linear(16, 1)
        self.double()
        self.room, self.where, self.start = room, where, start
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.first(x)))  # which draws and counts before there is no room
        if not self.training:
            return self.last(hidden)
        self.sizes.append(len(x))
        room = self.room if len(self.sizes) > self.start else 1000
        if self.where == "forward" and len(x) > room:
            raise no_room()
        if self.where == "backward" and len(x) > room:
            hidden.register_hook(raise_no_room)
        return self.last(hidden)


# --- a model whose embedding can have sparse gradients, and bags of indices for it


class Bags(nn.Module):
    """Sums rows of a table, and maps the sum to a number, by weights or by their mean."""

    def __init__(self, sparse: bool, has_head: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse, dtype=dtype)
        self.head = nn.Linear(4, 1, dtype=dtype) if has_head else None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        sums = self.table(indices)
        return sums.mean(1) if self.head is None else self.head(sums).squeeze(1)


def bags(size: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Bags of three indices below 20, of which some come twice, each with a number."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, 20, (size, 3), generator=generator)
    return TensorDataset(indices, torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))
