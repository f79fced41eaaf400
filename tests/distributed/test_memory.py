"""`microbatch_size` on two processes: the same parts on any backend, and memory that runs out on one of them alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, bound, dtype_of, launch_all, make_trainer, named, sound
from marks import thinned
from recipes import Sentences, Tagger, distance, rows, same
from starving import Starving, StarvingAdamW

from omnitrain.checkpoint.tensors import whole

HERE = Path(__file__).stem
BACKENDS = ("native", "ddp", "fsdp", "hf2", "zero1", "zero2", "zero3", "hf_fsdp", "hf_zero2", "hf_zero3")
SHARDED = ("fsdp", "zero2")
PLACES = ("forward", "backward", "update", "both")


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: whole(one).clone() for name, one in sorted(trainer.backend.model_tensors().items())}


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
    """Train where memory runs out on the second process alone, and as with small micro-batches from the start."""
    found: dict[str, Any] = {"tensors": {}}
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
        found[name] = {"size": trainer._feed.microbatch_size, "sizes": model.sizes}
        found[name] |= {"history": trainer.metrics["train_metrics_history"], "count": trainer.optimizer.count}
        found["tensors"] |= {f"{name}/{key}": one for key, one in tensors_of(trainer).items()}
    return found


def give_up(backend: str) -> dict[str, Any]:
    """Train where one process has no room at all."""
    model = Starving(0 if os.environ["RANK"] == "1" else 1000)
    model.norm.eval()
    make_trainer(backend, model, rows(16), loss_fn=F.mse_loss, batch_size=4, microbatch_size="auto").train()
    return {}


def refuse(backend: str) -> dict[str, Any]:
    make_trainer(
        backend, Starving().float(), rows(16, torch.float32), loss_fn=F.mse_loss, microbatch_size="auto"
    )  # fmt: skip
    return {}


def synchronize(backend: str) -> dict[str, Any]:
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Starving())
    make_trainer(backend, model, rows(16), loss_fn=F.mse_loss, microbatch_size="auto").train()
    return {}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("memory")
    jobs = [
        Job(f"split-{backend}-{size}-{dtype}", backend, f"{HERE}:split", {"dtype": dtype, "size": size})
        for backend in sorted({"native"} | set(asked_for(request, "backend", test="test_split")))
        for dtype in (("float32", "float64") if backend == "native" else (dtype_of(backend),))
        for size in ((None,) if backend == "native" else (3,))
    ]
    for backend, place in sorted(asked_for(request, "backend", "place", test="test_memory_that")):
        name = f"starve-{backend}-{place}"
        options = {"place": place, "folder": str(folder / name)}
        jobs.append(Job(name, backend, f"{HERE}:starve", options))
    jobs += [Job(f"refuse-{one}", one, f"{HERE}:refuse") for one in sorted(asked_for(request, "sharded"))]
    jobs += [Job("synchronize-ddp", "ddp", f"{HERE}:synchronize")]
    refused = [f"refuse-{backend}" for backend in SHARDED] + ["synchronize-ddp", "give_up-ddp"]
    found = launch_all([*jobs, Job("give_up-ddp", "ddp", f"{HERE}:give_up")], folder)  # the last, as it ends a run
    errors = {name: found.pop(name) for name in refused if name in found}
    sound(found).update(errors)
    return found


@pytest.mark.parametrize("backend", thinned(BACKENDS[1:], ("ddp", "fsdp", "hf2")))
def test_split_batches_give_the_numbers_of_one_process_on_every_backend(results: Any, backend: str) -> None:
    (reference,) = results[f"split-native-None-{dtype_of(backend)}"]
    for found in results[f"split-{backend}-3-{dtype_of(backend)}"]:
        assert distance(found["tensors"].values(), reference["tensors"].values()) <= bound(backend)
        assert found["counts"] == reference["counts"]
        for one, expected in zip(found["history"], reference["history"], strict=True):
            assert one == pytest.approx(expected, rel=1e-4 if dtype_of(backend) == "float32" else 1e-9)


@pytest.mark.parametrize(
    ("backend", "place"),
    thinned(
        [(backend, place) for backend in ("ddp", "hf2") for place in PLACES],
        [("ddp", "forward"), ("ddp", "backward"), ("ddp", "update"), ("hf2", "backward")],
    ),
)
def test_memory_that_runs_out_on_one_process_halves_micro_batches_on_all(
    results: Any, backend: str, place: str
) -> None:
    ranks = results[f"starve-{backend}-{place}"]
    for rank, found in enumerate(ranks):
        poor, size = found["poor"], 3 if place == "update" else 2
        assert (poor["size"], found["resumed"]["size"]) == (size, size)
        assert max(found["resumed"]["sizes"]) == size
        if place == "update":  # the third step agrees on it; the update that had no room was made again
            assert poor["sizes"] == [8, 8, 6] and poor["count"] == (4 if rank else 3)
        else:
            tried = [8, 4] if rank or place == "both" else [8, 4, 4]  # the other one comes through
            assert poor["sizes"] == [*tried, *[2] * 11]
        resumed, rich = named(found, "resumed/"), named(found, "rich/")
        assert distance(resumed.values(), rich.values()) <= (1e-12 if place == "update" else 0)
        for one, expected in zip(found["resumed"]["history"], found["rich"]["history"], strict=True):
            assert one == pytest.approx(expected, rel=1e-12)
    weights = ("resumed/first", "resumed/norm.weight", "resumed/last")  # statistics are those of each process
    assert all(same(*(named(found, name).values() for found in ranks)) for name in weights)


@pytest.mark.parametrize("sharded", thinned(SHARDED, ["fsdp"]))
def test_where_a_forward_pass_gathers_weights_a_number_is_asked_for(results: Any, sharded: str) -> None:
    for found in results[f"refuse-{sharded}"]:
        assert found["error"] == "ConfigError"
        assert "'auto'` cannot be used where the weights are sharded" in found["message"]


def test_normalization_over_all_ranks_is_refused_before_the_first_step(results: Any) -> None:
    for found in results["synchronize-ddp"]:
        assert found["error"] == "ConfigError" and "SyncBatchNorm" in found["message"]


def test_a_row_that_does_not_fit_on_one_process_ends_both_with_its_error(results: Any) -> None:
    first, second = results["give_up-ddp"]
    assert second["error"] == "OutOfMemoryError"
    assert first["error"] == "DistributedError" and "CUDA out of memory" in first["message"]
    assert "one row at a time" in first["message"]
