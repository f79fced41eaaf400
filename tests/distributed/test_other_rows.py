"""Collators that make other rows than samples, on two ranks: the samples are counted, and not the rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import PROCESSES, Job, gap, launch_all, make_trainer, sound  # noqa: E402
from counting import BATCH_SIZE, SIZE, Resumable, ResumableShare, made  # noqa: E402
from recipes import StopAt  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_other_rows"
KINDS = [
    ("ddp", "filtered", "data"), ("ddp", "filtered", "shared loader"), ("ddp", "bins", "own loader"),
    ("hf2", "packed", "data"), ("hf2", "views", "stream"), ("ddp", "views", "resumable loader"),
    ("hf2", "bins", "resumable shared loader"), ("hf2", "filtered", "shards"),
]  # fmt: skip
MOVED = [("packed", "data"), ("filtered", "shards")]


def train(backend: str, collator: str, source: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train two epochs of 22 samples in steps of 8, 8 and 6, stopped after a step, or resumed from there."""
    model, given = made(collator, source)
    ranks, Resumable.made = PROCESSES[backend], 0
    if "shared loader" in source:
        data, collate = given.pop("train_dataset"), given.pop("data_collator")
        kind = DataLoader if source == "shared loader" else ResumableShare
        given["train_loader"] = kind(data, BATCH_SIZE, sampler=DistributedSampler(data), collate_fn=collate)
    if "batch_size" in given:
        given |= {"batch_size": BATCH_SIZE // ranks, "global_batch_size": 8}
    else:
        given["gradient_accumulation_steps"] = 2 // ranks
    trainer = make_trainer(
        backend, model, epochs=2, learning_rate=0.05, save_dir=folder, save_steps=folder and 2,
        callbacks=[StopAt(stop)], **given,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    progress = trainer.progress
    counts = [progress.step + progress.skipped_steps, progress.samples, progress.tokens]
    return {"counts": counts, "made": Resumable.made, "tensors": trainer.backend.model_tensors()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Each kind straight, cut and resumed on the same ranks; and one that is cut on two ranks and resumed on one."""
    folder = tmp_path_factory.mktemp("rows")
    jobs = []
    for backend, collator, source in KINDS:
        given, name = {"collator": collator, "source": source}, f"{collator}-{source}"
        cut = {**given, "folder": str(folder / name)}
        jobs += [
            Job(f"{name}-straight", backend, f"{HERE}:train", given),
            Job(f"{name}-cut", backend, f"{HERE}:train", {**cut, "stop": 2}),
            Job(f"{name}-resumed", backend, f"{HERE}:train", cut),
        ]
    moved = {source: {"collator": one, "source": source, "folder": str(folder / one)} for one, source in MOVED}
    jobs += [Job(f"{source} cut", "ddp", f"{HERE}:train", {**moved[source], "stop": 2}) for source in moved]
    split = {"is_split": True, "noise": True, "loader": False}
    jobs.append(Job("split", "ddp", "test_user_module:read_apart", split))  # the last, as its error ends the others
    found = launch_all(jobs, folder / "launch")
    refused = found.pop("split")
    found = sound(found)
    found["split"] = refused
    jobs = [Job(f"{source} resumed", "native", f"{HERE}:train", options) for source, options in moved.items()]
    rest = [
        Job(f"{source} whole", "native", f"{HERE}:train", {**options, "folder": None})
        for source, options in moved.items()
    ]
    found |= sound(launch_all([*jobs, *rest], folder / "one"))
    return found


@pytest.mark.parametrize(("backend", "collator", "source"), KINDS)
def test_a_run_on_two_ranks_is_resumed_bit_for_bit(results: Any, backend: str, collator: str, source: str) -> None:
    pairs = zip(results[f"{collator}-{source}-straight"], results[f"{collator}-{source}-resumed"], strict=True)
    for straight, resumed in pairs:
        assert straight["counts"][0] == (12 if source == "shards" else 6)
        assert source in ("own loader", "resumable loader") or straight["counts"][1] == 2 * SIZE
        assert resumed["counts"] == straight["counts"]
        assert gap(resumed["tensors"], straight["tensors"]) == 0
        if source == "resumable loader":  # 12 batches, of which 4 were trained on before
            assert (straight["made"], resumed["made"]) in ((12, 8), (12, 9))


def test_a_stream_that_is_split_already_is_noticed_in_its_first_sample(results: Any) -> None:
    for found in results["split"]:
        assert found["error"] == "DistributedError"
        assert "The first sample of the training set is another one on each rank" in found["message"]


@pytest.mark.parametrize("source", [source for _, source in MOVED])
def test_a_run_of_two_ranks_goes_on_on_one(results: Any, source: str) -> None:
    resumed, expected = results[f"{source} resumed"][0], results[f"{source} whole"][0]
    assert resumed["counts"] == expected["counts"]
    bound = 1e-6 if source == "data" else 1e-12
    assert gap(resumed["tensors"], expected["tensors"]) <= bound  # transformers takes the loss in float32
