"""Collators that make other rows than samples, on two ranks: samples are counted, not rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from backends import PROCESSES, Job, asked_for, gap, launch_all, make_trainer, sound
from counting import BATCH_SIZE, SIZE, Resumable, ResumableShare, made
from forking import joined
from marks import thinned
from recipes import StopAt
from torch.utils.data import DataLoader, DistributedSampler

HERE = "test_other_rows"
KINDS = [
    ("ddp", "filtered", "data"), ("ddp", "filtered", "shared loader"), ("ddp", "bins", "own loader"),
    ("hf2", "packed", "data"), ("hf2", "views", "stream"), ("ddp", "views", "resumable loader"),
    ("hf2", "bins", "resumable shared loader"), ("hf2", "filtered", "shards"),
]  # fmt: skip
QUICK = [
    ("ddp", "filtered", "shared loader"), ("hf2", "views", "stream"), ("ddp", "views", "resumable loader"),
    ("hf2", "filtered", "shards"),
]  # fmt: skip
MOVED = [("packed", "data"), ("filtered", "shards")]


def train(backend: str, collator: str, source: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train two epochs of 22 samples in steps of 8, 8 and 6, stopped after a step, or resumed from there."""
    model, options = made(collator, source)
    ranks, Resumable.made = PROCESSES[backend], 0
    if "shared loader" in source:
        data, collate = options.pop("train_dataset"), options.pop("data_collator")
        sampler = DistributedSampler(data, ranks, int(os.environ["RANK"]))
        loader = DataLoader if source == "shared loader" else ResumableShare
        options["train_loader"] = loader(data, BATCH_SIZE, collate_fn=collate, sampler=sampler)
    if "batch_size" in options:
        options |= {"batch_size": BATCH_SIZE // ranks, "global_batch_size": 8}
    else:
        options["gradient_accumulation_steps"] = 2 // ranks
    trainer = make_trainer(
        backend, model, epochs=2, learning_rate=0.05, save_dir=folder, save_steps=folder and 2,
        callbacks=[StopAt(stop)], **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    progress = trainer.progress
    counts = [progress.step + progress.skipped_steps, progress.samples, progress.tokens]
    return {"counts": counts, "made": Resumable.made, "tensors": trainer.backend.model_tensors()}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each kind straight, cut and resumed on the same ranks; and some cut on two ranks and resumed on one."""
    first, second = [], []
    for backend, collator, source in sorted(asked_for(request, "backend", "collator", "source")):
        options, name = {"collator": collator, "source": source}, f"{collator}-{source}"
        saved = {**options, "folder": str(folder / name)}
        runs = {"straight": options, "cut": {**saved, "stop": 2}, "resumed": saved}
        first += [Job(f"{name}-{run}", backend, f"{HERE}:train", options) for run, options in runs.items()]
    for collator, source in sorted(asked_for(request, "collator", "source")):
        options, name = {"collator": collator, "source": source}, f"moved-{collator}-{source}"
        saved = {**options, "folder": str(folder / name)}
        first.append(Job(f"{name}-cut", "ddp", f"{HERE}:train", {**saved, "stop": 2}))
        second += [Job(f"{name}-{run}", "native", f"{HERE}:train", options)
                   for run, options in {"straight": options, "resumed": saved}.items()]  # fmt: skip
    return joined(sound(launch_all(first, folder / "first")), sound(launch_all(second, folder / "second")))


@pytest.mark.parametrize(("backend", "collator", "source"), thinned(KINDS, QUICK))
def test_resumed_rows_match_straight_run_exactly(results: Any, backend: str, collator: str, source: str) -> None:
    pairs = zip(*(results[f"{collator}-{source}-{run}"] for run in ("straight", "resumed")), strict=True)
    for straight, resumed in pairs:
        assert straight["counts"][0] == (12 if source == "shards" else 6)
        assert source in ("own loader", "resumable loader") or straight["counts"][1] == 2 * SIZE
        assert resumed["counts"] == straight["counts"]
        assert gap(resumed["tensors"], straight["tensors"]) == 0
        if source == "resumable loader":  # 12 batches, of which 4 were trained on before
            assert (straight["made"], resumed["made"]) in ((12, 8), (12, 9))


@pytest.mark.parametrize(("collator", "source"), thinned(MOVED, MOVED[1:]))
def test_run_of_two_ranks_resumes_on_one(results: Any, collator: str, source: str) -> None:
    (resumed,), (straight,) = (results[f"moved-{collator}-{source}-{run}"] for run in ("resumed", "straight"))
    assert resumed["counts"] == straight["counts"]
    # transformers computes its loss in float32
    assert gap(resumed["tensors"], straight["tensors"]) <= (1e-6 if collator == "packed" else 1e-12)
