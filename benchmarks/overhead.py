"""What a trainer costs above a loop written by hand: training steps, an evaluation pass, memory, imports, first step.

    python benchmarks/overhead.py [--quick] [--only NAME ...] [--json FILE]

How to read the figures is in README.md beside this file. Nothing here is a test of speed: it fails only if a variant
did not do the work of the others.
"""

from __future__ import annotations

import argparse
import copy
import functools
import io
import itertools
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _timing import (
    Row,
    Sample,
    clock,
    interleaved,
    limit_rounds,
    machine,
    show,
    summarize,
    timed,
    use_cpu_time,
    write_json,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from omnitrain import (
    EMA,
    SAM,
    SWA,
    Algorithm,
    Callback,
    CsvLogger,
    CutMix,
    Distributions,
    EarlyStopping,
    GarbageCollection,
    GradientCheck,
    GradientClipping,
    GradualUnfreezing,
    HookCallback,
    LabelSmoothing,
    LayerFreezing,
    MagnitudePruning,
    MemoryMonitor,
    MixUp,
    Periodic,
    Preview,
    Profiler,
    ProgressiveResizing,
    SeqLengthWarmup,
    SpikeGuard,
    StochasticDepth,
    StraightThrough,
    TensorBoardLogger,
    Throughput,
    TimeLimit,
    Trace,
    Trainer,
    TrainHook,
)
from omnitrain.data.sampling import EpochSampler
from omnitrain.loggers.progress_bar import ProgressBar

SEED = 42
LEARNING_RATE = 1e-3


# --- models and data


class WithLoss(nn.Module):
    """Takes a dict batch by keyword and returns its loss, as the models of transformers do."""

    def __init__(self, body: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.loss_fn = body, loss_fn

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.body(x)
        return {"loss": self.loss_fn(outputs, labels), "logits": outputs}


class Encoder(nn.Module):
    """A small transformer that classifies a sequence by the mean of its positions."""

    def __init__(
        self, layers: int = 4, width: int = 128, words: int = 1000, length: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x) + self.places).mean(1))


class Samples(Dataset[dict[str, Tensor]]):
    """Gives one dict per sample, as most datasets do."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def mlp(classes: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, classes))


def points(rows: int, classes: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(rows, 16, generator=generator), torch.randint(0, classes, (rows,), generator=generator)


# --- training: the same steps by hand and by the trainer


@dataclass(slots=True)
class Training:
    """What to train, so that every variant starts from the same weights and sees the same samples in the same order."""

    model: nn.Module
    dataset: Dataset[Any]
    batch_size: int
    epochs: int
    log_every: int
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None  # None: dict batches, whose model returns its loss
    stretch: int = 20
    stamps: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.epochs * math.ceil(len(self.dataset) / self.batch_size)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.loss_fn is None:
            return model(**batch)["loss"]
        x, labels = batch
        return self.loss_fn(model(x), labels)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return the schedule, which also notes the time: every variant steps it once in every step."""
        self.stamps.clear()
        steps = self.steps

        def factor(step: int) -> float:
            if step % self.stretch == 0 and step:
                self.stamps.append(clock())
            return 1.0 - 0.9 * step / steps

        return LambdaLR(optimizer, factor)

    def note_times(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Note the time as `schedule` does, in the steps of an optimizer without one."""
        self.stamps.clear()
        steps = itertools.count(1)

        def note(*_: Any) -> None:
            if next(steps) % self.stretch == 0:
                self.stamps.append(clock())

        optimizer.register_step_post_hook(note)
        return optimizer

    def stretches(self) -> list[float]:
        """Return what the latest run would have taken at the pace of each stretch of it."""
        return [(after - before) * self.steps / self.stretch for before, after in itertools.pairwise(self.stamps)]


class SameOrder(Sampler[int]):
    """The trainer's order of samples for a DataLoader, at the price of torch's RandomSampler: a randperm an epoch."""

    def __init__(self, size: int) -> None:
        self.sampler, self.epoch = EpochSampler(size, 1, seed=SEED), -1

    def __len__(self) -> int:
        return self.sampler.size

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.sampler.order(self.epoch).tolist())


class Indexed:
    """Whole batches of a TensorDataset, each tensor indexed once: about the least that fetching can cost."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        self.tensors, self.batch_size, self.order = dataset.tensors, batch_size, SameOrder(len(dataset))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for rows in torch.tensor(list(self.order)).split(self.batch_size):
            yield tuple(tensor[rows] for tensor in self.tensors)


Outcome = tuple[nn.Module, list[float]]
"""The trained model and the losses that were logged."""


def by_hand(work: Training, *, naive: bool = False, indexed: bool = False) -> Callable[[], Outcome]:
    """Prepare the loop that one writes with care; `naive` as most write it: default AdamW, the loss read every step."""
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=None if naive else True)
    scheduler = work.schedule(optimizer)
    read = Tensor.item if naive else Tensor.detach
    batches: Iterable[Any]
    if indexed:
        assert isinstance(work.dataset, TensorDataset)
        batches = Indexed(work.dataset, work.batch_size)
    else:
        # Without a generator of its own the DataLoader would draw from the one that dropout draws from.
        order = SameOrder(len(work.dataset))  # type: ignore[arg-type]
        batches = DataLoader(work.dataset, work.batch_size, sampler=order, generator=torch.Generator())

    def run() -> Outcome:
        torch.manual_seed(SEED)
        model.train()
        step, total, logged = 0, 0.0, []
        for _ in range(work.epochs):
            for batch in batches:
                loss = work.loss(model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                total += read(loss)
                step += 1
                if step % work.log_every == 0:
                    logged.append(float(total) / work.log_every)
                    total = 0.0
        return model, logged

    return run


class Losses(Callback):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.logged: list[float] = []

    def on_log(self, trainer: Any, logs: dict[str, Any]) -> None:
        self.logged.append(logs["loss"])


def by_trainer(work: Training) -> Callable[[], Outcome]:
    """Prepare the trainer for the same work."""
    losses = Losses()
    trainer = Trainer(
        copy.deepcopy(work.model),
        work.dataset,
        loss_fn=work.loss_fn,
        epochs=work.epochs,
        batch_size=work.batch_size,
        learning_rate=LEARNING_RATE,
        lr_scheduler=work.schedule,
        max_grad_norm=1.0,
        log_steps=work.log_every,
        device="cpu",
        seed=SEED,
        callbacks=[losses],
        progress_bar=False,
    )

    def run() -> Outcome:
        trainer.train()
        return trainer.get_model(), losses.logged

    return run


class SameWork:
    """Raises unless every outcome has the logged losses and final weights of the first one."""

    def __init__(self) -> None:
        self.first: Outcome | None = None

    def __call__(self, outcome: Outcome, tolerance: float = 1e-6) -> None:
        self.first = self.first or outcome
        (model, logged), (expected, expected_losses) = outcome, self.first
        close = functools.partial(torch.testing.assert_close, rtol=10 * tolerance, atol=tolerance)
        close(torch.tensor(logged), torch.tensor(expected_losses))
        close(model.state_dict(), expected.state_dict())

    def roughly(self, outcome: Outcome) -> None:
        """Allow for the rounding of another AdamW, which grows over the steps."""
        self(outcome, 1e-3)


def training(name: str, work: Training, rounds: int, *, naive: bool = True, indexed: bool = False) -> list[Row]:
    """Measure a training run; times are per step."""
    same = SameWork()
    variants = {
        "good loop": timed(lambda: by_hand(work), same, work.stretches),
        "good loop again (A/A)": timed(lambda: by_hand(work), same, work.stretches),
        "omnitrain.Trainer": timed(lambda: by_trainer(work), same, work.stretches),
    }
    if naive:
        variants["naive loop"] = timed(lambda: by_hand(work, naive=True), same.roughly, work.stretches)
    if indexed:
        variants["good loop, batches indexed"] = timed(lambda: by_hand(work, indexed=True), same, work.stretches)
    return summarize(name, interleaved(variants, rounds), "us/step", 1e6 / work.steps)


def tensors(quick: bool) -> list[Row]:
    data = TensorDataset(*points(400 if quick else 8000))
    work = Training(mlp(), data, batch_size=8, epochs=3, log_every=10 if quick else 100, loss_fn=cross_entropy)
    return training("tensors", work, 1 if quick else 7, indexed=True)


def plain_by_hand(work: Training) -> Callable[[], Outcome]:
    """Prepare the shortest loop there is: a DataLoader, forward, backward and the optimizer's step."""
    assert work.loss_fn is not None
    loss_fn, model = work.loss_fn, copy.deepcopy(work.model)
    optimizer = work.note_times(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0))
    batches = DataLoader(work.dataset, work.batch_size, sampler=SameOrder(len(work.dataset)))  # type: ignore[arg-type]

    def run() -> Outcome:
        for _ in range(work.epochs):
            for x, labels in batches:
                loss_fn(model(x), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model, []

    return run


def plain_by_trainer(work: Training, *, same_optimizer: bool, clip: bool, kind: Any = Trainer) -> Callable[[], Outcome]:
    """Prepare a trainer, with the loop's own optimizer or with what it takes by default."""
    model = copy.deepcopy(work.model)
    options: dict[str, Any] = {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    if same_optimizer:
        options = {"optimizer": torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)}
    if kind is Trainer:  # the others take the CPU where there is no GPU
        options["device"] = "cpu"
    trainer = kind(
        model, work.dataset, loss_fn=work.loss_fn, epochs=work.epochs, batch_size=work.batch_size,
        max_grad_norm=1e6 if clip else None, log_steps=work.log_every, seed=SEED, progress_bar=False, **options,
    )  # fmt: skip
    work.note_times(trainer.optimizer)

    def run() -> Outcome:
        trainer.train()
        return trainer.get_model(), []

    return run


def plain(quick: bool) -> list[Row]:
    """Measure against the plainest loop, whose optimizer the trainer gets too."""
    data = TensorDataset(*points(400 if quick else 8000))
    work = Training(mlp(), data, batch_size=8, epochs=3, log_every=10 if quick else 100, loss_fn=cross_entropy)
    same, variants = SameWork(), {}
    for name, prepare, check in (
        ("plain loop", lambda: plain_by_hand(work), same),
        ("plain loop again (A/A)", lambda: plain_by_hand(work), same),
        ("omnitrain.Trainer, same AdamW", lambda: plain_by_trainer(work, same_optimizer=True, clip=True), same),
        ("the same without clipping", lambda: plain_by_trainer(work, same_optimizer=True, clip=False), same),
        (
            "omnitrain.Trainer, default AdamW",
            lambda: plain_by_trainer(work, same_optimizer=False, clip=True),
            same.roughly,
        ),
    ):
        variants[name] = timed(prepare, check, work.stretches)
    return summarize("plain", interleaved(variants, 1 if quick else 9), "us/step", 1e6 / work.steps)


def dicts(quick: bool) -> list[Row]:
    data = Samples(*points(400 if quick else 8000))
    work = Training(WithLoss(mlp(), cross_entropy), data, batch_size=8, epochs=3, log_every=10 if quick else 100)
    return training("dicts", work, 1 if quick else 7)


def short_epochs(quick: bool) -> list[Row]:
    x = points(60)[0][:, :4]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    data = Samples(x, x.sum(1, keepdim=True))
    epochs = 10 if quick else 1340  # of 15 steps: 20,100
    work = Training(WithLoss(model, mse_loss), data, batch_size=4, epochs=epochs, log_every=10 if quick else 100)
    return training("short-epochs", work, 1 if quick else 7, naive=False)


def encoding(quick: bool, dropout: float) -> Training:
    generator = torch.Generator().manual_seed(SEED)
    rows = 3 * 16 if quick else 60 * 16
    words, labels = torch.randint(0, 1000, (rows, 64), generator=generator), points(rows)[1]
    model = WithLoss(Encoder(1 if quick else 4, dropout=dropout), cross_entropy)
    return Training(model, Samples(words, labels), batch_size=16, epochs=1, log_every=3 if quick else 20, stretch=1)


def transformer(quick: bool) -> list[Row]:
    return training("transformer", encoding(quick, dropout=0.1), 1 if quick else 9, naive=False)


# --- the same with transformers' loop: without dropout, as its DataLoader draws from the generator of the training


def by_transformers(work: Training, *, ours: bool) -> Callable[[], nn.Module]:
    """Prepare `transformers.Trainer`, or HFTrainer with the same arguments; only the order of samples is set."""
    import transformers

    model = copy.deepcopy(work.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    optimizers = (optimizer, work.schedule(optimizer))
    arguments = transformers.TrainingArguments(
        str(Path(tempfile.gettempdir(), "unused")),  # nothing is written
        per_device_train_batch_size=work.batch_size,
        num_train_epochs=work.epochs,
        logging_steps=work.log_every,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
        dataloader_pin_memory=False,
    )
    if ours:
        from omnitrain import HFTrainer

        mine = HFTrainer(model, arguments, work.dataset, optimizers=optimizers)

        def run_ours() -> nn.Module:
            mine.train()
            return mine.get_model()

        return run_ours

    class Stock(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> SameOrder:
            return SameOrder(len(work.dataset))  # type: ignore[arg-type]

    stock = Stock(model, arguments, train_dataset=work.dataset, optimizers=optimizers)
    stock.remove_callback(transformers.PrinterCallback)

    def run() -> nn.Module:
        stock.train()
        return model

    return run


def with_transformers(name: str, work: Training, rounds: int) -> list[Row]:
    same = SameWork()
    ways = {"transformers.Trainer": False, "transformers.Trainer again (A/A)": False, "omnitrain.HFTrainer": True}
    variants = {
        label: timed(
            functools.partial(by_transformers, work, ours=ours), lambda model: same((model, []), 1e-5), work.stretches
        )
        for label, ours in ways.items()
    }
    return summarize(name, interleaved(variants, rounds), "us/step", 1e6 / work.steps)


def hf(quick: bool) -> list[Row]:
    data = Samples(*points(400 if quick else 8000))
    work = Training(WithLoss(mlp(), cross_entropy), data, batch_size=8, epochs=1, log_every=10 if quick else 100)
    return with_transformers("hf", work, 1 if quick else 7)


def hf_transformer(quick: bool) -> list[Row]:
    work = encoding(quick, dropout=0.0)
    return with_transformers("hf-transformer", work, 1 if quick else 9)


# --- what watches a run


class Hearing(Callback):
    """Listens to every event inside of a step."""

    def on_batch_start(self, trainer: Any, *_: Any) -> None:
        pass

    on_after_forward = on_after_loss = on_after_backward = on_batch_end = on_batch_start
    on_before_clip = on_after_clip = on_after_optimizer_step = on_batch_start


class Hook(TrainHook):
    """Hears the end of each step."""

    def on_step_end(self, trainer: Any, epoch: int, idx: int) -> None:
        pass


Watched = Callable[[Path], dict[str, Any]]
"""Gets an empty folder, and returns the arguments of a trainer that is watched by one thing."""


def callback(make: Callable[..., Callback], *args: Any, **options: Any) -> Watched:
    """Return what passes one callback that needs no folder."""
    return lambda folder: {"callbacks": [make(*args, **options)]}


def saving(*callbacks: Callable[[], Callback]) -> Watched:
    """Return what passes a `save_dir`, into which rows are written, and a checkpoint at the end."""
    return lambda folder: {"save_dir": folder, "save_steps": 10**9, "callbacks": [make() for make in callbacks]}


WATCHERS: dict[str, Watched] = {
    "nothing": lambda folder: {},
    "nothing again (A/A)": lambda folder: {},
    "ProgressBar": lambda folder: {"progress_bar": None, "callbacks": [ProgressBar(True, stream=io.StringIO())]},
    "save_dir, JsonlLogger": saving(),
    "CsvLogger, with these": saving(CsvLogger),
    "TensorBoardLogger": lambda folder: {"callbacks": [TensorBoardLogger(folder)]},
    "MemoryMonitor": callback(MemoryMonitor),
    "Throughput": callback(Throughput),
    "Trace, with a save_dir": saving(Trace),
    "Distributions, between its steps": callback(Distributions, every=10**9),
    "Preview, between its steps": callback(Preview, [0.0], every=10**9, function=lambda model, prompt: ""),
    "Periodic, between its steps": callback(Periodic, lambda trainer: {}, every=10**9),
    "GarbageCollection": callback(GarbageCollection),
    "Profiler, its turn over": lambda folder: {"callbacks": [Profiler(0, warmup=0, active=1, folder=folder)]},
    "TimeLimit": callback(TimeLimit, "1h"),
    "EarlyStopping": callback(EarlyStopping, 3),
    "GradientCheck": callback(GradientCheck),
    "TrainHook": callback(lambda: HookCallback(Hook())),
    "a Callback without events": callback(Callback),
    "a Callback with all events in steps": callback(Hearing),
}
"""What may watch a run, each with all others off; a new one is a line here."""


def by_watched(work: Training, watched: Watched) -> Callable[[], Outcome]:
    """Prepare the trainer for the work, watched by one thing."""
    folder = Path(tempfile.mkdtemp())
    trainer = Trainer(
        copy.deepcopy(work.model), work.dataset, loss_fn=work.loss_fn, epochs=work.epochs, batch_size=work.batch_size,
        learning_rate=LEARNING_RATE, lr_scheduler=work.schedule, log_steps=work.log_every, device="cpu", seed=SEED,
        **{"progress_bar": False, **watched(folder)},
    )  # fmt: skip

    def run() -> Outcome:
        trainer.train()
        shutil.rmtree(folder)
        return trainer.get_model(), [row["train_loss"] for row in trainer.metrics["train_metrics_history"]]

    return run


def watchers(quick: bool) -> list[Row]:
    """Measure runs that one thing watches against one that nothing does; weights and losses are the same to the bit."""
    data = TensorDataset(*points(400 if quick else 8000))
    every = 10 if quick else 100
    work = Training(mlp(), data, batch_size=8, epochs=1, log_every=every, loss_fn=cross_entropy, stretch=every)
    return compare_watched("watchers", work, WATCHERS, 1 if quick else 7)


def traced(quick: bool) -> list[Row]:
    """Measure what `Trace` adds to the steps of the small transformer; weights and losses are the same to the bit."""
    compared = {name: saving() for name in ("nothing", "nothing again (A/A)")} | {"trace": saving(Trace)}
    return compare_watched("traced-transformer", encoding(quick, dropout=0.1), compared, 1 if quick else 9)


def compare_watched(
    case: str, work: Training, watchers: dict[str, Watched], rounds: int, are_same: bool = True
) -> list[Row]:
    """Measure the work with the arguments of one entry at a time; by default all end with the same bits."""
    same = SameWork()

    def check(outcome: Outcome) -> None:
        if are_same:
            same(outcome, 0.0)

    variants = {
        name: timed(functools.partial(by_watched, work, watched), check, work.stretches)
        for name, watched in watchers.items()
    }
    return summarize(case, interleaved(variants, rounds), "us/step", 1e6 / work.steps)


# --- algorithms


class Residual(nn.Module):
    """A convolution whose output is added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Tagger(nn.Module):
    """Returns the loss of a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Sequences(Samples):
    """Gives one dict of tokens and their labels per sample."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.x[index], "labels": self.labels[index]}


def algorithm(make: Callable[..., Algorithm], *args: Any, **options: Any) -> Watched:
    """Return what passes one algorithm, and options of the trainer."""
    return lambda folder: {"algorithms": [make(*args)], **options}


NO_ALGORITHM: dict[str, Watched] = {"no algorithm": lambda folder: {}, "no algorithm again (A/A)": lambda folder: {}}
ALGORITHMS: dict[str, Watched] = {
    "EMA": algorithm(EMA, 0.99),
    "SWA": algorithm(SWA),
    "LayerFreezing": algorithm(LayerFreezing),
    "GradualUnfreezing": algorithm(GradualUnfreezing),
    "GradientClipping": algorithm(GradientClipping, "adaptive", 0.1, max_grad_norm=None),
    "LabelSmoothing": algorithm(LabelSmoothing, 2),
    "MixUp": algorithm(MixUp, 2),
    "CutMix": algorithm(CutMix, 2),
    "ProgressiveResizing": algorithm(ProgressiveResizing, 0.5, 0.5, 0.2, 2),
    "MagnitudePruning": algorithm(MagnitudePruning),
    "StochasticDepth": algorithm(StochasticDepth, [Residual]),
    "StraightThrough": algorithm(StraightThrough, lambda weight: (weight * 8).round() / 8),
    "SpikeGuard": algorithm(SpikeGuard, 8.0, 100, "rewind", 100),
    "SAM": algorithm(SAM),
}
"""What may change the steps of images, each with all others off; a new one is a line here."""


def algorithms(quick: bool) -> list[Row]:
    """Measure a small network for images with one algorithm at a time, and one for sequences."""
    rows, every, rounds = (100, 10, 1) if quick else (2000, 100, 7)
    generator = torch.Generator().manual_seed(SEED)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    images = TensorDataset(torch.randn(rows, 1, 8, 8, generator=generator), points(rows)[1])
    options = {"batch_size": 8, "epochs": 4, "log_every": every, "stretch": every}
    work = Training(model, images, loss_fn=cross_entropy, **options)
    table = compare_watched("algorithms", work, NO_ALGORITHM | ALGORITHMS, rounds, are_same=False)
    tokens = torch.randint(0, 100, (rows, 32), generator=generator)
    work = Training(Tagger(), Sequences(tokens, tokens % 4), **options)
    warmup = {"SeqLengthWarmup": algorithm(SeqLengthWarmup, 32)}
    return table + compare_watched("algorithms, sequences", work, NO_ALGORITHM | warmup, rounds, are_same=False)


# --- evaluation


def naive_pass(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Return loss and accuracy as most compute them: small batches, all logits collected."""
    logits, labels = [], []
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=8):
            logits.append(model(x))
            labels.append(y)
    scores, truth = torch.cat(logits), torch.cat(labels)
    return cross_entropy(scores, truth).item(), (scores.argmax(1) == truth).float().mean().item()


def good_pass(model: nn.Module, data: TensorDataset, batch_size: int) -> tuple[float, float]:
    """Return loss and accuracy from running sums over whole batches."""
    loss, hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        for x, y in zip(*(tensor.split(batch_size) for tensor in data.tensors), strict=True):
            scores = model(x)
            loss.add_(cross_entropy(scores, y), alpha=len(y))
            hits += (scores.argmax(1) == y).sum()
    return loss.item() / len(data), hits.item() / len(data)


def trainer_pass(model: nn.Module, data: TensorDataset, batch_size: int) -> Callable[[], tuple[float, float]]:
    """Prepare a trainer's evaluation of the same."""
    trainer = Trainer(
        model,
        eval_dataset=data,
        eval_batch_size=batch_size,
        loss_fn=cross_entropy,
        compute_metrics="accuracy",
        device="cpu",
        progress_bar=False,
    )

    def run() -> tuple[float, float]:
        metrics = trainer.evaluate()
        return metrics["eval_loss"], metrics["eval_accuracy"]

    return run


def passes(classes: int, rows: int) -> dict[str, Callable[[], Callable[[], tuple[float, float]]]]:
    """Return all ways to evaluate the same model on the same data, each to be prepared and then run."""
    torch.manual_seed(SEED)
    model, data = mlp(classes), TensorDataset(*points(rows, classes))
    return {
        "naive pass, batch 8": lambda: lambda: naive_pass(model, data),
        "naive pass again (A/A)": lambda: lambda: naive_pass(model, data),
        "good pass, batch 8": lambda: lambda: good_pass(model, data, 8),
        "omnitrain.Trainer, batch 8": lambda: trainer_pass(model, data, 8),
        "good pass, batch 512": lambda: lambda: good_pass(model, data, 512),
        "omnitrain.Trainer, batch 512": lambda: trainer_pass(model, data, 512),
    }


class SameMetrics:
    """Raises unless every outcome is the first one."""

    def __init__(self) -> None:
        self.first: Any = None

    def __call__(self, outcome: tuple[float, float]) -> None:
        self.first = self.first or outcome
        torch.testing.assert_close(torch.tensor(outcome), torch.tensor(self.first), rtol=1e-4, atol=1e-5)


def evaluation(quick: bool) -> list[Row]:
    rows, same = 400 if quick else 10_000, SameMetrics()
    variants = {name: timed(prepare, same) for name, prepare in passes(2, rows).items()}
    return summarize("evaluation", interleaved(variants, 1 if quick else 11), "ms/pass", 1e3)


def peak_megabytes() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where the peak that getrusage gives starts at that of the parent process
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def growth(name: str, rows: int) -> float:
    """Return by how many MB one evaluation raises this process's peak, after a short one that loads what it needs."""
    torch.set_num_threads(1)
    passes(1000, 512)[name]()()
    run = passes(1000, rows)[name]()
    before = peak_megabytes()
    run()
    return peak_megabytes() - before


def memory(quick: bool) -> list[Row]:
    rows = 1000 if quick else 10_000

    def measure(name: str) -> Callable[[], Sample]:
        def sample() -> Sample:
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                megabytes = fresh.submit(growth, name, rows).result()
            return Sample(megabytes, [megabytes])

        return sample

    variants = {name: measure(name) for name in passes(1000, 8) if "A/A" not in name}
    return summarize("eval-memory", interleaved(variants, 1 if quick else 3, warm_up=0), "MB", 1)


# --- starting


FIRST_STEP_BY_HAND = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
data = TensorDataset(torch.randn(800, 16), torch.randint(0, 2, (800,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
for x, y in DataLoader(data, batch_size=8, shuffle=True):
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    break
import time
print(time.time())
"""

FIRST_STEP_BY_TRAINER = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from omnitrain import Callback, Trainer

class Stamp(Callback):
    def on_step_end(self, trainer):
        print(time.time())

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
data = TensorDataset(torch.randn(800, 16), torch.randint(0, 2, (800,)))
Trainer(
    model, data, loss_fn=nn.functional.cross_entropy, learning_rate=1e-3, max_steps=1, device="cpu",
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    callbacks=[Stamp()], progress_bar=False,
).train()
"""


def seconds_until(script: str) -> Callable[[], Sample]:
    """Measure from the start of a process to the time that it prints."""

    def sample() -> Sample:
        start = time.time()
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
        seconds = float(child.stdout.split()[-1]) - start
        return Sample(seconds, [seconds])

    return sample


def construction(quick: bool) -> list[Row]:
    """Measure what a trainer takes to be made, after another one."""
    data = TensorDataset(*points(80))

    def by_hand() -> Any:
        model = mlp()
        return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True), DataLoader(data, 8)

    def by_trainer() -> Any:
        return Trainer(mlp(), data, loss_fn=cross_entropy, batch_size=8, device="cpu", progress_bar=False)

    ways = {"by hand": by_hand, "by hand again (A/A)": by_hand, "omnitrain.Trainer": by_trainer}
    variants = {name: timed(lambda make=make: make, lambda made: None) for name, make in ways.items()}
    return summarize("construction", interleaved(variants, 1 if quick else 50), "ms", 1e3)


def imports(quick: bool) -> list[Row]:
    def importing(statement: str) -> Callable[[], Sample]:
        return seconds_until(f"{statement}\nimport time\nprint(time.time())")

    variants = {
        "import torch": importing("import torch"),
        "import torch again (A/A)": importing("import torch"),
        "from omnitrain import Trainer": importing("from omnitrain import Trainer"),
        "import omnitrain (loads on first use)": importing("import omnitrain"),
    }
    return summarize("imports", interleaved(variants, 1 if quick else 7, warm_up=not quick), "ms", 1e3)


def first_step(quick: bool) -> list[Row]:
    variants = {
        "script by hand": seconds_until(FIRST_STEP_BY_HAND),
        "script by hand again (A/A)": seconds_until(FIRST_STEP_BY_HAND),
        "script with omnitrain.Trainer": seconds_until(FIRST_STEP_BY_TRAINER),
    }
    return summarize("first-step", interleaved(variants, 1 if quick else 7, warm_up=not quick), "ms", 1e3)


CASES: dict[str, Callable[[bool], list[Row]]] = {
    "tensors": tensors,
    "plain": plain,
    "dicts": dicts,
    "short-epochs": short_epochs,
    "transformer": transformer,
    "hf": hf,
    "hf-transformer": hf_transformer,
    "watchers": watchers,
    "algorithms": algorithms,
    "traced-transformer": traced,
    "evaluation": evaluation,
    "eval-memory": memory,
    "construction": construction,
    "imports": imports,
    "first-step": first_step,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, help="how many at most; by default each case has its own number")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time: on a machine that others use too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cpu_time:
        use_cpu_time()
    if options.rounds is not None:
        limit_rounds(options.rounds)
    about = {**machine(), "quick": options.quick, "clock": "CPU" if options.cpu_time else "wall"}
    rows: list[Row] = []
    for name in options.only:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        torch.manual_seed(SEED)
        rows += CASES[name](options.quick)
    print(", ".join(f"{key} {value}" for key, value in about.items()), "\n", sep="\n")
    print(show(rows))
    if options.json is not None:
        write_json(options.json, rows, about)


if __name__ == "__main__":
    main()
