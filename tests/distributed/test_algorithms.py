"""Algorithms on every backend: the numbers of one process, averages included, and checkpoints that go either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, PROCESSES, Job, bound, dtype_of, launch_all, make_trainer, saved
from recipes import Sentences, StopAt, Tagger, Trace, rows
from torch import nn

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
from omnitrain.checkpoint.tensors import whole

KINDS: dict[str, Any] = {
    "ema": lambda: EMA(0.8),
    "swa": lambda: SWA("0.3dur"),
    "freezing": lambda: LayerFreezing(0.0),
    "unfreezing": lambda: GradualUnfreezing(0.5),
    "value": lambda: GradientClipping("value", 0.01),
    "agc": lambda: GradientClipping("adaptive", 0.05),
    "mixup": lambda: MixUp(alpha=1.0),
    "smoothing": lambda: LabelSmoothing(5, 0.2),
    "lengths": lambda: SeqLengthWarmup(6, 2, 0.9, 1),
    "sam": lambda: SAM(0.5),
    "depth": lambda: StochasticDepth(["[13]"], 0.5),
    "rounding": lambda: StraightThrough(lambda weight: (weight * 8 / weight.max()).round() * weight.max() / 8),
    "pruning": lambda: MagnitudePruning(0.7, end=5, every=2, scope="global"),
}
OPTIMIZERS: dict[str, Any] = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
}
"""Optimizers that take loss and gradients several times in a step."""
OF_TOKENS = ("smoothing", "lengths")
ALL = (*KINDS, *OPTIMIZERS)
BACKENDS = ("ddp", "fsdp", "zero2")
REFUSED = {
    "zero2": ("freezing", "unfreezing", "value", "agc", "sam", "pruning", "rounding", "lbfgs"),
    "fsdp": ("lbfgs",),
}
MOVED = ("ema", "unfreezing", "lbfgs", "pruning", "rounding")
"""Those whose checkpoints are taken from one backend to another."""
CUT = 4


def deep(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def train(
    backend: str,
    dtype: str,
    kind: str,
    folder: str,
    cut: int = 0,
    resume: str | None = None,
    saves: bool = True,
    more: bool = False,
) -> dict[str, Any]:
    """Train for 2 epochs of 3 steps, evaluated every 2 steps; stop after step `cut`, or go on after the fifth."""
    number = DTYPES[dtype]
    trace = Trace()
    data: Any = (rows(24, number), rows(7, number))
    model, options = deep(number), {"loss_fn": F.mse_loss, "learning_rate": 0.05}
    if kind in OPTIMIZERS:
        options = {"loss_fn": F.mse_loss, "optimizer": OPTIMIZERS[kind]}
    if kind in OF_TOKENS:
        data, model, options = (Sentences(24), Sentences(7)), Tagger(dtype=number), {"learning_rate": 0.05}
    trainer = make_trainer(
        backend, model, *data, algorithms=[KINDS[kind]()] if kind in KINDS else [],
        callbacks=[trace, *([StopAt(cut)] if cut else [])],
        batch_size=8 // PROCESSES[backend], epochs=None if more else 2, max_steps=5 if more else None, eval_steps=2,
        load_best_at_end=not saves, max_grad_norm=None,
        **({"save_steps": 100, "save_dir": folder, "keep_best": 0} if saves else {}), **options,
    )  # fmt: skip
    trainer.train(resume_from=resume)
    if more:
        trainer.train(more="1ba")
    return {
        "losses": [row["loss"] for row in trace.logs],
        "norms": [row["grad_norm"] for row in trace.logs],
        "evaluations": [[row["step"], row["eval_loss"]] for row in trainer.metrics["valid"]],
        "afterwards": trainer.evaluate()["eval_loss"],
        "tensors": {name: whole(one) for name, one in trainer.backend.model_tensors().items()},
    }


def native(dtype: str, kind: str, folder: Path, **options: Any) -> dict[str, Any]:
    return train("native", dtype, kind, str(folder), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    jobs = []
    for kind in ALL:
        for backend in BACKENDS:
            dtype, place = dtype_of(backend), folder / f"{backend}-{kind}"
            parts: dict[str, Any] = {"straight": {}}
            if kind in MOVED and kind not in REFUSED.get(backend, ()):
                native(dtype, kind, folder / f"native-{backend}-{kind}", cut=CUT)
                cut = folder / f"native-{backend}-{kind}" / f"checkpoint-{CUT}"
                parts |= {"cut": {"cut": CUT}, "taken": {"resume": str(cut)}}
            if kind == "ema":
                parts |= {"long": {"saves": False}, "parts": {"saves": False, "more": True}}
            for name, part in parts.items():
                options = {"dtype": dtype, "kind": kind, "folder": str(place / name), **part}
                jobs.append(Job(f"{backend}-{kind}-{name}", backend, "test_algorithms:train", options))
    return launch_all(jobs, folder / "launches")


def close(found: dict[str, Any], expected: dict[str, Any], within: float, since: int = 0) -> None:
    """Compare two runs, of which the first may have begun after step `since`."""
    for key in ("losses", "norms"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key][since:]), rtol=0, atol=within)
    torch.testing.assert_close(
        torch.tensor(found["evaluations"]), torch.tensor(expected["evaluations"]), rtol=0, atol=within
    )
    assert abs(found["afterwards"] - expected["afterwards"]) <= within
    for name, one in expected["tensors"].items():
        torch.testing.assert_close(found["tensors"][name], one, rtol=0, atol=within)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_is_that_of_one_process_or_refused_by_name(results: Any, tmp_path: Path, backend: str, kind: str) -> None:
    found = results[f"{backend}-{kind}-straight"]
    if kind in REFUSED.get(backend, ()):
        words = f"{type(KINDS[kind]()).__name__}, which cannot work here" if kind in KINDS else "(LBFGS) takes loss and"
        assert all(one["error"] == "ConfigError" and words in one["message"] for one in found)
        return
    assert "error" not in found[0], found[0]
    assert all(torch.equal(one, found[1]["tensors"][name]) for name, one in found[0]["tensors"].items())
    close(found[0], native(dtype_of(backend), kind, tmp_path), bound(backend))


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_goes_from_one_process_to_two_and_back(
    results: Any, folder: Path, tmp_path: Path, backend: str, kind: str
) -> None:
    if kind in REFUSED.get(backend, ()):
        pytest.skip("refused there")
    dtype, within = dtype_of(backend), bound(backend)
    expected = native(dtype, kind, tmp_path / "straight")
    for part in ("cut", "taken"):
        assert "error" not in results[f"{backend}-{kind}-{part}"][0], results[f"{backend}-{kind}-{part}"][0]
    close(results[f"{backend}-{kind}-taken"][0], expected, within, since=CUT)
    cut = folder / f"{backend}-{kind}" / "cut" / f"checkpoint-{CUT}"
    close(native(dtype, kind, tmp_path / "resumed", resume=str(cut)), expected, within, since=CUT)
    if kind == "ema":
        averaged, trained = (saved(cut, file) for file in ("model.safetensors", "trained.safetensors"))
        assert averaged.keys() == trained.keys() and not torch.equal(averaged["0.weight"], trained["0.weight"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_without_checkpoints_goes_on_bit_for_bit(results: Any, backend: str) -> None:
    whole, parts = (results[f"{backend}-ema-{part}"] for part in ("long", "parts"))
    assert "error" not in parts[0], parts[0]
    assert parts[0]["evaluations"] == whole[0]["evaluations"] and len(whole[0]["evaluations"]) == 3
    assert parts[0]["losses"] == whole[0]["losses"]
    assert all(torch.equal(one, parts[0]["tensors"][name]) for name, one in whole[0]["tensors"].items())
