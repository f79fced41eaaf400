"""`microbatch_size` on two processes: the same parts on any backend, and memory that runs out on one of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, bound, dtype_of, launch_all, make_trainer, named, tensors_of
from marks import thinned
from recipes import Sentences, Tagger, distance, rows, same
from starving import Starving, StarvingAdamW

HERE = Path(__file__).stem
BACKENDS = ("native", "ddp", "fsdp", "hf2", "zero1", "zero2", "zero3", "hf_fsdp", "hf_zero2", "hf_zero3")


def split(backend: str, dtype: str, size: int | None) -> dict[str, Any]:
    """Train on sentences in steps of 8, whose last one of an epoch has 3: one process has more parts than the other."""
    model = Tagger().to(getattr(torch, dtype))
    trainer = make_trainer(
        backend, model, Sentences(19), batch_size=8 if backend == "native" else 4, epochs=2, learning_rate=0.05,
        **({} if size is None else {"microbatch_size": size}),
    )  # fmt: skip
    trainer.train()
    return {
        "history": trainer.metrics["train_metrics_history"],
        "counts": [trainer.progress.samples, trainer.progress.tokens, trainer.progress.step],
        "tensors": tensors_of(trainer),
    }


def starve(backend: str, place: str, folder: str) -> dict[str, Any]:
    """Train where memory runs out on the second process only, and with small micro-batches from the start."""
    runs: dict[str, Any] = {"tensors": {}}
    for name in ("poor", "resumed", "rich"):
        is_poor = name == "poor" and (os.environ["RANK"] == "1" or place == "both")
        room = 3 if is_poor and place != "update" else 1000
        model = Starving(room, "backward" if place == "backward" else "forward", dropout=0.2 * (place != "update"))
        if place == "update":
            model.norm.eval()  # so that the split changes no number
        optimizer = StarvingAdamW(model.parameters(), (2,) if is_poor and place == "update" else (), lr=0.05)
        saves: dict[str, Any] = {} if name == "rich" else {"save_dir": folder, "save_steps": "1ep"}
        trainer = make_trainer(
            backend, model, rows(44), loss_fn=F.mse_loss, batch_size=8, epochs=1 if name == "poor" else 3,
            optimizer=optimizer, microbatch_size=2 if name == "rich" else "auto", **saves,
        )  # fmt: skip
        trainer.train("last" if name == "resumed" else None)
        runs[name] = {"sizes": model.sizes}
        runs[name] |= {"history": trainer.metrics["train_metrics_history"], "count": trainer.optimizer.count}
        runs["tensors"] |= {f"{name}/{key}": one for key, one in tensors_of(trainer).items()}
    return runs


def give_up(backend: str) -> dict[str, Any]:
    """Train where one process has no room at all."""
    model = Starving(0 if os.environ["RANK"] == "1" else 1000)
    model.norm.eval()
    make_trainer(backend, model, rows(16), loss_fn=F.mse_loss, batch_size=4, microbatch_size="auto").train()
    return {}


def choose(backend: str) -> dict[str, Any]:
    """Leave the size to the trainer."""
    data = rows(16, torch.float32)
    make_trainer(backend, Starving().float(), data, loss_fn=F.mse_loss, microbatch_size="auto")
    return {}


def synchronize(backend: str) -> dict[str, Any]:
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Starving())
    make_trainer(backend, model, rows(16), loss_fn=F.mse_loss, microbatch_size="auto").train()
    return {}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = []
    for backend in sorted({"native"} | asked_for(request, "backend", test="test_split")):
        size = None if backend == "native" else 3
        for dtype in ("float32", "float64") if backend == "native" else (dtype_of(backend),):
            options = {"dtype": dtype, "size": size}
            jobs.append(Job(f"split-{backend}-{dtype}", backend, f"{HERE}:split", options))
    for backend, place in sorted(asked_for(request, "backend", "place")):
        name = f"starve-{backend}-{place}"
        jobs.append(Job(name, backend, f"{HERE}:starve", {"place": place, "folder": str(folder / name)}))
    for function, backend, _ in sorted(asked_for(request, "function", "backend", "words")):
        jobs.append(Job(f"{function}-{backend}", backend, f"{HERE}:{function}"))
    return launch_all([*jobs, Job("give_up-ddp", "ddp", f"{HERE}:give_up")], folder)  # the last, as it ends the run


@pytest.mark.parametrize("backend", thinned(BACKENDS[1:], ("fsdp", "hf2")))
def test_split_batches_match_one_process(results: Any, backend: str) -> None:
    (reference,) = results[f"split-native-{dtype_of(backend)}"]
    for rank in results[f"split-{backend}-{dtype_of(backend)}"]:
        assert distance(rank["tensors"].values(), reference["tensors"].values()) <= bound(backend)
        assert rank["counts"] == reference["counts"]
        for row, expected in zip(rank["history"], reference["history"], strict=True):
            assert row == pytest.approx(expected, rel=1e-4 if dtype_of(backend) == "float32" else 1e-9)


@pytest.mark.parametrize(
    ("backend", "place"),
    thinned(
        [(backend, place) for backend in ("ddp", "hf2") for place in ("forward", "backward", "update", "both")],
        [("ddp", "update"), ("hf2", "backward")],
    ),
)
def test_oom_on_one_rank_halves_micro_batches_on_all(results: Any, backend: str, place: str) -> None:
    ranks = results[f"starve-{backend}-{place}"]
    for number, rank in enumerate(ranks):
        assert "error" not in rank, rank
        poor, size = rank["poor"], 3 if place == "update" else 2
        assert max(rank["resumed"]["sizes"]) == size
        if place == "update":  # the third step agrees on it; the update that had no room was repeated
            assert poor["sizes"] == [8, 8, 6] and poor["count"] == (4 if number else 3)
        else:
            tried = [8, 4] if number or place == "both" else [8, 4, 4]  # the other one succeeds
            assert poor["sizes"] == [*tried, *[2] * 11]
        resumed, rich = named(rank, "resumed/"), named(rank, "rich/")
        assert distance(resumed.values(), rich.values()) <= (1e-12 if place == "update" else 0)
        for row, expected in zip(rank["resumed"]["history"], rank["rich"]["history"], strict=True):
            assert row == pytest.approx(expected, rel=1e-12)
    weights = ("resumed/first", "resumed/norm.weight", "resumed/last")  # statistics are those of each process
    assert all(same(*(named(rank, name).values() for rank in ranks)) for name in weights)


@pytest.mark.parametrize(
    ("function", "backend", "words"),
    [
        ("choose", "fsdp", "'auto'` cannot be used where the weights are sharded"),
        pytest.param("choose", "zero2", "'auto'` cannot be used where the weights are sharded", marks=pytest.mark.slow),
        ("synchronize", "ddp", "SyncBatchNorm"),
    ],
)
def test_auto_size_is_an_error_where_ranks_forward_together(
    results: Any, function: str, backend: str, words: str
) -> None:  # fmt: skip
    for rank in results[f"{function}-{backend}"]:
        assert rank["error"] == "ConfigError" and words in rank["message"]


def test_row_that_does_not_fit_on_one_rank_ends_both(results: Any) -> None:
    first, second = results["give_up-ddp"]
    assert second["error"] == "OutOfMemoryError"
    assert first["error"] == "DistributedError" and "CUDA out of memory" in first["message"]
    assert "one row at a time" in first["message"]
