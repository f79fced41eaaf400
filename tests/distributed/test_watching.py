"""Watching a run of two ranks: it changes no bit, measures whole tensors, and reports the memory of each rank."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer, sound
from marks import thinned
from recipes import rows, t16
from starving import Starving
from tiny import Tokens, llama
from watchers import TRACES, outcome, run

from omnitrain import Callback, ConfigError, Distributions, Periodic, Preview
from omnitrain.trainer.out_of_memory import shortage_of

# --- jobs


def train(backend: str, folder: str | None = None) -> dict[str, Any]:
    """Train, with all watchers if there is a folder; return the outcome, and the steps that collect garbage."""
    trainers, collected = [], list[int]()

    def make(*args: Any, **options: Any) -> Any:
        trainers.append(make_trainer(backend, *args, **options))
        return trainers[-1]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and trainers:
            collected.append(trainers[-1].progress.step)

    gc.callbacks.append(note)
    trainer = run(make, folder if folder is None else Path(folder))
    gc.callbacks.remove(note)
    return {**outcome(trainer), "collected": collected}


def run_out_of_memory(backend: str) -> dict[str, Any]:
    """Train until memory runs out in the third step, on both ranks."""
    dtype = torch.float32 if backend == "fsdp" else torch.float64
    model = Starving(room=2, start=2).to(dtype)
    trainer = make_trainer(backend, model, rows(64, dtype), loss_fn=F.mse_loss, batch_size=4)
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        shortage = shortage_of(trainer, "training")
        return {"notes": "\n".join(error.__notes__), **dataclasses.asdict(shortage)}
    raise AssertionError("there was room")


class Reports(Callback):
    """Keeps the last row of logs and the reports."""

    def __init__(self) -> None:
        self.row: dict[str, float] = {}
        self.reports: dict[str, Any] = {}

    def on_log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        self.row |= {name: value for name, value in logs.items() if "/" in name}

    def on_report(self, trainer: Any, values: Mapping[str, Any]) -> None:
        self.reports |= {
            name: value if isinstance(value, str) else list(value.counts) for name, value in values.items()
        }


def measure(backend: str) -> dict[str, Any]:
    """Measure a model whose weights stay equal, on the same samples in the same step on any number of ranks."""
    reports = Reports()
    everything = ("weights", "gradients", "updates", "activations")
    make_trainer(
        backend, t16(), rows(16), batch_size=4 if backend == "fsdp" else 8, epochs=1, loss_fn=F.mse_loss,
        learning_rate=1e-30, weight_decay=0.0,
        callbacks=[reports, Distributions(of=everything, every=2, bins=8, modules=r"^\d$")],
    ).train()  # fmt: skip
    unrounded = {name: value for name, value in reports.reports.items() if not name.startswith("updates")}
    return {"row": reports.row, "reports": unrounded}


def generate(backend: str) -> dict[str, Any]:
    """Generate with sharded weights, next to a function that fails on one rank only."""
    reports, error = Reports(), ""

    def fail(trainer: Any) -> None:
        if trainer.rank == 1:
            raise ValueError("only on the second rank")

    previews = [Preview([[5, 6], [7, 8, 9]], 2, 4, do_sample=False, on_error="raise"), Periodic(fail, 1)]
    options: dict[str, Any] = {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-30, "weight_decay": 0.0}
    if backend == "zero3":
        try:
            make_trainer(backend, llama().float(), Tokens(16), callbacks=[Distributions()], **options).train()
        except ConfigError as raised:
            error = str(raised)
    trainer = make_trainer(backend, llama().float(), Tokens(16), callbacks=[reports, *previews], **options)
    trainer.train()
    return {"step": trainer.progress.step, "reports": reports.reports, "weights error": error}


# --- tests


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    jobs = []
    for backend in sorted(asked_for(request, "backend", test="test_watchers")):
        jobs.append(Job(f"{backend} bare", backend, "test_watching:train"))
        jobs.append(Job(f"{backend} watched", backend, "test_watching:train", {"folder": str(folder / backend)}))
    for test, function in (("memory", "run_out_of_memory"), ("distributions", "measure"), ("preview", "generate")):
        for backend in sorted(asked_for(request, "backend", test=f"test_{test}")):
            jobs.append(Job(f"{backend} {test}", backend, f"test_watching:{function}"))
    return sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2"], ["fsdp"]))
def test_watchers_change_no_bit_on_two_ranks(results: Any, folder: Path, backend: str) -> None:
    for watched, bare in zip(results[f"{backend} watched"], results[f"{backend} bare"], strict=True):
        assert watched["history"] == bare["history"] and watched["tensors"].keys() == bare["tensors"].keys()
        for name, tensor in bare["tensors"].items():
            assert torch.equal(watched["tensors"][name], tensor), name
        assert [step for step in watched["collected"] if 0 < step < 4] == [2]  # on both ranks
    for trace in TRACES:
        assert list((folder / backend).glob(trace)), trace
    traces = sorted(path.name.partition("-")[0] for path in (folder / backend / "profile").iterdir())
    assert traces == ["rank0", "rank1"]
    (start,) = json.loads((folder / backend / "run" / "run.json").read_text())["starts"]
    assert start["processes"] == 2 and sum(sum(host.values()) for host in start["hosts"].values()) == 2


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2"], ["ddp", "fsdp"]))
def test_memory_error_counts_the_part_of_its_rank(results: Any, backend: str) -> None:
    is_sharded = backend == "fsdp"
    trained = sum(parameter.numel() for parameter in Starving().parameters()) * (4 if is_sharded else 8)
    shortages = results[f"{backend} memory"]
    total = sum(shortage["state"] for shortage in shortages)
    assert total == pytest.approx(2 * trained * (1 if is_sharded else 2), rel=0.1)
    for shortage in shortages:
        assert "Memory ran out in training" in shortage["notes"]
        assert "microbatch_size=2 (instead of 4" in shortage["notes"]
        assert (shortage["world_size"], shortage["is_sharded"]) == (2, is_sharded)


@pytest.mark.parametrize("backend", ["fsdp"])
def test_distributions_of_shards_equal_those_of_one_process(results: Any, backend: str) -> None:
    expected = measure("native")
    for result in results[f"{backend} distributions"]:
        assert result["reports"] == expected["reports"] and result["row"].keys() == expected["row"].keys()
        for name, value in result["row"].items():
            assert value == pytest.approx(expected["row"][name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("backend", thinned(["fsdp", "zero3"], ["fsdp"]))
def test_preview_of_shards_equals_that_of_one_process(results: Any, backend: str) -> None:
    expected = generate("native")["reports"]
    for result in results[f"{backend} preview"]:
        assert (result["step"], result["reports"]) == (2, expected)
        is_unseen = "`of` holds 'weights', which cannot be seen here: ZeRO 3" in result["weights error"]
        assert is_unseen == (backend == "zero3")
