"""Algorithms on every backend: the numbers of one process, averages included, and checkpoints that move."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import (
    DTYPES,
    PROCESSES,
    Job,
    asked_for,
    bound,
    dtype_of,
    gap,
    launch_all,
    make_trainer,
    saved,
    tensors_of,
)
from marks import thinned
from recipes import Sentences, StopAt, Tagger, Trace, rows
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import (
    EMA,
    SAM,
    SWA,
    GradientClipping,
    GradualUnfreezing,
    LabelSmoothing,
    LayerFreezing,
    MagnitudePruning,
    MixUp,
    SeqLengthWarmup,
    StochasticDepth,
    StraightThrough,
)

KINDS: dict[str, Any] = {
    "ema": lambda: EMA(0.8),
    "swa": lambda: SWA("0.3dur"),
    "freezing": lambda: LayerFreezing(0.0),
    "unfreezing": lambda: GradualUnfreezing(0.5),
    "value": lambda: GradientClipping("value", 0.01),
    "agc": lambda: GradientClipping("adaptive", 0.05),
    "mixup": lambda: MixUp(alpha=1.0),
    "classes": lambda: MixUp(3, alpha=1.0),
    "smoothing": lambda: LabelSmoothing(5, 0.2),
    "lengths": lambda: SeqLengthWarmup(6, 2, 0.9, 1),
    "sam": lambda: SAM(0.5),
    "depth": lambda: StochasticDepth(["[13]"], 0.5),
    "rounding": lambda: StraightThrough(lambda weight: (weight * 8 / weight.max()).round() * weight.max() / 8),
    "pruning": lambda: MagnitudePruning(0.7, end=5, every=2, scope="global"),
}
OPTIMIZERS: dict[str, Any] = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
}
"""Optimizers that take loss and gradients several times in a step."""
OF_TOKENS = ("smoothing", "lengths")
ALL = (*KINDS, *OPTIMIZERS)
BACKENDS = ("ddp", "fsdp", "zero2")
QUICK = [*(("ddp", kind) for kind in ALL if kind not in ("swa", "freezing", "value", "agc"))]
QUICK += [("fsdp", "ema"), ("fsdp", "lbfgs"), ("zero2", "ema"), ("zero2", "sam")]
UNSUPPORTED = {
    "zero2": ("freezing", "unfreezing", "value", "agc", "sam", "pruning", "rounding", "lbfgs"),
    "fsdp": ("lbfgs",),
}
MOVES = [
    (backend, kind) for backend in BACKENDS for kind in ("ema", "unfreezing", "lbfgs", "pruning", "rounding")
    if kind not in UNSUPPORTED.get(backend, ())
]  # fmt: skip
"""Backends and algorithms whose checkpoints move from one process to two, and back."""
CUT = 4
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.3])


def deep(dtype: torch.dtype, classes: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, classes)).to(dtype)


def train(backend: str, dtype: str, kind: str, folder: str, cut: int = 0, resume: str | None = None) -> dict[str, Any]:
    """Train for 2 epochs of 3 steps, evaluated every 2 steps; stop after step `cut`."""
    number = DTYPES[dtype]
    trace = Trace()
    data: Any = (rows(24, number), rows(7, number))
    model, options = deep(number), {"loss_fn": F.mse_loss, "learning_rate": 0.05}
    if kind in OPTIMIZERS:
        options = {"loss_fn": F.mse_loss, "optimizer": OPTIMIZERS[kind]}
    if kind in OF_TOKENS:
        data, model, options = (Sentences(24), Sentences(7)), Tagger(dtype=number), {"learning_rate": 0.05}
    if kind == "classes":
        data = [TensorDataset(one.tensors[0], one.tensors[0].argmax(1) % 3) for one in data]
        loss = nn.CrossEntropyLoss(CLASS_WEIGHTS.to(number))
        model, options = deep(number, classes=3), {"loss_fn": loss, "learning_rate": 0.05}
    trainer = make_trainer(
        backend, model, *data, algorithms=[KINDS[kind]()] if kind in KINDS else [],
        callbacks=[trace, *([StopAt(cut)] if cut else [])],
        batch_size=8 // PROCESSES[backend], epochs=2, eval_steps=2,
        load_best_at_end=False, max_grad_norm=None, save_steps=100, save_dir=folder, keep_best=0, **options,
    )  # fmt: skip
    trainer.train(resume_from=resume)
    return {
        "losses": [row["loss"] for row in trace.logs],
        "norms": [row["grad_norm"] for row in trace.logs],
        "evaluations": [[row["step"], row["eval_loss"]] for row in trainer.metrics["valid"]],
        "afterwards": trainer.evaluate()["eval_loss"],
        "tensors": tensors_of(trainer),
    }


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for pair in asked_for(request, "backend", "kind"):
        runs[pair] = {"straight": {}}
    for backend, kind in asked_for(request, "backend", "kind", test="test_checkpoints"):
        place = folder / f"native-{backend}-{kind}"
        train("native", dtype_of(backend), kind, str(place), cut=CUT)
        runs[backend, kind] |= {"cut": {"cut": CUT}, "resumed": {"resume": str(place / f"checkpoint-{CUT}")}}
    jobs = []
    for (backend, kind), options in sorted(runs.items()):
        common = {"dtype": dtype_of(backend), "kind": kind}
        for name, more in options.items():
            more = {**common, "folder": str(folder / f"{backend}-{kind}" / name), **more}
            jobs.append(Job(f"{backend}-{kind}-{name}", backend, "test_algorithms:train", more))
    return launch_all(jobs, folder / "launches")


@functools.cache
def train_on_one_process(dtype: str, kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return train("native", dtype, kind, folder)


def assert_close(found: dict[str, Any], backend: str, kind: str, since: int = 0) -> None:
    """Compare with a run on one process; the first may have begun after step `since`."""
    assert "error" not in found, found
    expected = dict(train_on_one_process(dtype_of(backend), kind))
    for key in ("losses", "norms"):
        expected[key] = expected[key][since:]
    for result in (found, expected):
        result["tensors"] = {name: tensor.tolist() for name, tensor in result["tensors"].items()}
    assert gap(found, expected) <= bound(backend)


@pytest.mark.parametrize(("backend", "kind"), thinned(itertools.product(BACKENDS, ALL), QUICK))
def test_algorithms_match_one_process_or_are_errors(results: Any, backend: str, kind: str) -> None:
    ranks = results[f"{backend}-{kind}-straight"]
    if kind in UNSUPPORTED.get(backend, ()):
        words = f"{type(KINDS[kind]()).__name__}, which cannot work here" if kind in KINDS else "(LBFGS) takes loss and"
        assert all(rank["error"] == "ConfigError" and words in rank["message"] for rank in ranks)
        return
    assert gap(*(rank.get("tensors") for rank in ranks)) == 0
    assert_close(ranks[0], backend, kind)


@pytest.mark.parametrize(("backend", "kind"), thinned(MOVES, [("ddp", "lbfgs"), ("ddp", "pruning"), ("fsdp", "ema")]))
def test_checkpoints_move_from_one_process_to_two_and_back(
    results: Any, folder: Path, tmp_path: Path, backend: str, kind: str
) -> None:
    assert_close(results[f"{backend}-{kind}-resumed"][0], backend, kind, since=CUT)
    assert "error" not in results[f"{backend}-{kind}-cut"][0]
    cut = folder / f"{backend}-{kind}" / "cut" / f"checkpoint-{CUT}"
    resumed = train("native", dtype_of(backend), kind, str(tmp_path / "resumed"), resume=str(cut))
    assert_close(resumed, backend, kind, since=CUT)
    if kind == "ema":
        averaged, trained = (saved(cut, file) for file in ("model.safetensors", "trained.safetensors"))
        assert averaged.keys() == trained.keys() and not torch.equal(averaged["0.weight"], trained["0.weight"])
