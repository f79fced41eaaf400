"""States on two ranks, over a resume: buffers, which are those of the main one, states of each, positions in data."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Jobs, asked_for, bound, gap, launch_all, make_trainer, named, sound, tensors_of
from counting import BATCH_SIZE, SIZE, Resumable, ResumableShare, made
from forking import current_rank, joined
from marks import thinned
from recipes import StopAt, callback, fit, rows
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, default_collate


class Drifting(nn.Module):
    """Normalizes by BatchNorm, and by a running mean that its forward passes in training use, as a codebook's are.

    It scales by a buffer whose elements share memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scale", torch.full((1,), 1.5).expand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(x))
        if self.training:
            with torch.no_grad():
                self.get_buffer("center").lerp_(hidden.square().mean(0), 0.5)
        return self.head((hidden - self.get_buffer("center")).tanh() * self.scale)


def drift(backend: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train for 6 steps; with a folder, evaluate and save on the way, stop after a step, or resume from there."""
    options, tensors = dict[str, Any](), dict[str, torch.Tensor]()

    def keep_buffers(trainer: Any, metrics: Any) -> None:
        buffers = trainer.get_model().named_buffers()
        tensors.update({f"evaluation {trainer.progress.step}/{name}": buffer.clone() for name, buffer in buffers})

    if folder:
        options = {"eval_dataset": rows(8, torch.float32), "eval_steps": 2, "save_dir": folder, "save_steps": 2}
        options["load_best_at_end"] = False
    trainer = make_trainer(
        backend, Drifting(), rows(24, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=2, learning_rate=0.05,
        optimizer="torch.optim.AdamW", callbacks=[callback(on_eval_end=keep_buffers), StopAt(stop)], **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    tensors |= {f"weights/{name}": tensor for name, tensor in tensors_of(trainer).items()}
    if folder:
        trainer.load_checkpoint("best")
    return {
        "best": trainer.metrics["best_valid"].get("eval_loss"), "tensors": {**tensors},
        "again": [trainer.evaluate()["eval_loss"] for _ in range(2)] if folder else [],
    }  # fmt: skip


class Replacing(nn.Module):
    """Replaces a buffer, which the next forward pass uses, by one whose elements share memory, or by a copy of that."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.copies = nn.Linear(4, 1), copies
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.head(x - self.center)
        if self.training:
            center = x.detach().mean().expand(4)
            self.center = center.clone() if self.copies else center
        return output


def replace(backend: str, copies: bool) -> dict[str, Any]:
    data = rows(24, torch.float32)
    trainer = fit(make_trainer(
        backend, Replacing(copies), data, loss_fn=F.mse_loss, batch_size=2, global_batch_size=8, epochs=1,
        learning_rate=0.05, eval_dataset=data[:8], eval_steps=1,
    ))  # fmt: skip
    return {"tensors": tensors_of(trainer), "losses": [row["eval_loss"] for row in trainer.metrics["valid"]]}


class Sums:
    """A collator whose state is the sum of the labels that this rank has seen."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        self.total += y.sum()
        return x * (1 + self.total / 10), y

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"].clone()


def collate(backend: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    sums, options = Sums(), {"save_dir": folder, "save_steps": 100} if folder else {}
    trainer = fit(make_trainer(
        backend, nn.Linear(4, 1), rows(24, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=2,
        learning_rate=0.05, data_collator=sums, callbacks=[StopAt(stop)], **options,
    ), resume_from=folder and "auto")  # fmt: skip
    return {"tensors": {**tensors_of(trainer), "total": sums.total}}


def count(backend: str, collator: str, source: str, folder: str | None = None, stop: int = 0) -> dict[str, Any]:
    """Train two epochs of 22 samples, of which a collator makes other rows; stop after a step, or resume from there."""
    model, options = made(collator, source)
    ranks, Resumable.created = PROCESSES[backend], 0
    if "shared loader" in source:
        data, collate = options.pop("train_dataset"), options.pop("data_collator")
        sampler = DistributedSampler(data, ranks, current_rank())
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
    return {"counts": counts, "created": Resumable.created, "tensors": trainer.backend.model_tensors()}


BACKENDS = ("ddp", "fsdp", "zero2", "hf2", "zero3", "hf_fsdp", "hf_zero2")
DATA = [
    ("ddp", "filtered", "shared loader"), ("hf2", "views", "stream"), ("ddp", "views", "resumable loader"),
    ("hf2", "filtered", "shards"), ("ddp", "bins", "own loader"), ("hf2", "packed", "data"),
    ("hf2", "bins", "resumable shared loader"),
]  # fmt: skip
"""Backend, collator, and where the data come from."""


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    first, second = Jobs(), Jobs()

    def add(name: str, backend: str, function: Any, stop: int, target: str = "", **options: Any) -> None:
        """Add a straight run, one that is cut short, and one that resumes it."""
        place = str(folder / name)
        first.add(f"{name}-straight", target or backend, function, **options)
        first.add(f"{name}-cut", backend, function, folder=place, stop=stop, **options)
        second.add(f"{name}-resumed", target or backend, function, folder=place, **options)

    for backend in sorted({"ddp", *asked_for(request, "backend")}):
        add(backend, backend, drift, 4)
    for backend, copies in itertools.product(sorted(asked_for(request, "replaced_on")), (True, False)):
        first.add(f"replace-{backend}-{copies}", backend, replace, copies=copies)
    add("collate", "ddp", collate, 4)
    for backend, collator, source in sorted(asked_for(request, "backend", "collator", "source")):
        add(f"{collator}-{source}", backend, count, 2, collator=collator, source=source)
    add("moved", "ddp", count, 2, target="native", collator="filtered", source="shards")
    return joined(sound(launch_all(first, folder / "first")), sound(launch_all(second, folder / "second")))


@pytest.mark.parametrize("backend", thinned(BACKENDS, BACKENDS[:3]))
def test_buffers_are_alike_and_survive_a_resume(results: Any, backend: str) -> None:
    """On all ranks, in evaluations and at the end; the best evaluation is that of what was saved."""
    for name in ("straight", "cut", "resumed"):
        first, second = (rank["tensors"] for rank in results[f"{backend}-{name}"])
        assert gap(first, second) == 0
    assert sum(name.endswith("/center") for name in first) == 2
    for rank in results[f"{backend}-cut"]:
        assert rank["again"] == [rank["best"]] * 2
    runs = (results[name] for name in (f"{backend}-straight", f"{backend}-resumed", "ddp-straight"))
    for straight, resumed, reference in zip(*runs, strict=True):
        assert gap(named(resumed, "weights"), named(straight, "weights")) == 0, "unlike one without save or evaluation"
        assert gap(straight["tensors"], reference["tensors"]) <= bound("zero2")


def test_states_of_each_rank_survive_a_resume(results: Any) -> None:
    straight, resumed = results["collate-straight"], results["collate-resumed"]
    assert gap(straight, resumed) == 0
    assert straight[0]["tensors"]["total"] != straight[1]["tensors"]["total"]


@pytest.mark.parametrize("replaced_on", thinned(BACKENDS, BACKENDS[:3]))
def test_buffers_may_be_replaced_by_expanded_ones(results: Any, replaced_on: str) -> None:
    """DDP broadcasts into them what the main rank has, and nothing can be written to a tensor made by `expand`."""
    assert gap(*(results[f"replace-{replaced_on}-{copies}"] for copies in (True, False))) == 0


@pytest.mark.parametrize(("backend", "collator", "source"), thinned(DATA, DATA[:4]))
def test_resumed_rows_match_straight_run_exactly(results: Any, backend: str, collator: str, source: str) -> None:
    pairs = zip(*(results[f"{collator}-{source}-{run}"] for run in ("straight", "resumed")), strict=True)
    for straight, resumed in pairs:
        assert straight["counts"][0] == (12 if source == "shards" else 6)
        assert source in ("own loader", "resumable loader") or straight["counts"][1] == 2 * SIZE
        assert resumed["counts"] == straight["counts"]
        assert gap(resumed["tensors"], straight["tensors"]) == 0
        if source == "resumable loader":  # 12 batches, of which 4 were trained on before
            assert (straight["created"], resumed["created"]) in ((12, 8), (12, 9))


def test_rows_of_two_ranks_resume_on_one(results: Any) -> None:
    (resumed,), (straight,) = results["moved-resumed"], results["moved-straight"]
    assert resumed["counts"] == straight["counts"]
    assert gap(resumed["tensors"], straight["tensors"]) <= 1e-12
