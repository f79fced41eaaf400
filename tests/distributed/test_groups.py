"""Parameter groups, frozen parts, Muon and initial weights on two ranks, by the names of the user's module."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Job, asked_for, gap, launch_all, make_trainer, sound
from forking import joined
from marks import thinned
from recipes import StopAt, rows
from torch import nn

from omnitrain.checkpoint.tensors import whole

HERE = "test_groups"
OPTIONS: dict[str, dict[str, Any]] = {
    "groups": {
        "optimizer": "adamw",
        "freeze": [r"^0\."],
        "param_groups": [{"match": r"^1\.1\..*weight", "lr_scale": 0.5}, {"match": "bias", "weight_decay": 0.0}],
    },
    "muon": {"optimizer": "muon"},
    "begin": {"init_from": "weights.pt"},
}


def deep(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*blocks), nn.Linear(4, 1))


class Seeded(nn.Sequential):
    """Has its seed in its state."""

    seed = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]


def train(backend: str, folder: str | None = None, stop: int = 0, **options: Any) -> dict[str, Any]:
    """Train two epochs of 20 rows in steps of 8, 8 and 4, stopped after a step, or resumed from there."""
    model: Any = deep()
    if "init_from" in options:
        seed = int(os.environ.get("RANK", "0")) + 7
        model = Seeded(*deep(seed))
        model.seed = seed
    trainer = make_trainer(
        backend, model, rows(20, torch.float32), loss_fn=F.mse_loss, epochs=2, learning_rate=0.05, weight_decay=0.1,
        lr_scheduler="cosine", save_dir=folder, save_steps=folder and 2, callbacks=[StopAt(stop)],
        batch_size=8 // PROCESSES[backend], **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    rates = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    return {
        "groups": trainer.backend.names_by_group(), "rates": rates, "steps": trainer.progress.step,
        "seed": getattr(trainer.get_model(), "seed", None),
        "tensors": {name: whole(tensor) for name, tensor in trainer.backend.model_tensors().items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Straight runs, and runs that are cut on one backend and resumed on another."""
    folder = tmp_path_factory.mktemp("groups")
    torch.save(Seeded(*deep()).state_dict(), folder / "weights.pt")
    runs = {what: {**options} for what, options in OPTIONS.items()}
    runs["begin"]["init_from"] = str(folder / "weights.pt")
    straight = {
        (what, backend)
        for what, test in {"groups": "test_groups", "muon": "test_muon", "begin": "test_initial"}.items()
        for backend in asked_for(request, "backend", test=test)
    }
    moves = sorted(asked_for(request, "what", "source", "target"))
    straight |= {("muon", "zero2")} | {(what, "native") for what in [*dict(straight), *(move[0] for move in moves)]}
    jobs = [Job(f"{what}-{backend}", backend, f"{HERE}:train", runs[what]) for what, backend in sorted(straight)]
    resumed = []
    for what, source, target in moves:
        options = {**runs[what], "folder": str(folder / f"{what}-{source}")}
        jobs.append(Job(f"{what}-cut-{source}", source, f"{HERE}:train", {**options, "stop": 2}))
        resumed.append(Job(f"{what}-from-{source}", target, f"{HERE}:train", options))
    return joined(launch_all(jobs, folder / "straight"), sound(launch_all(resumed, folder / "resumed")))


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero2", "zero3", "hf2"], ["ddp", "fsdp", "zero2"]))
def test_groups_and_frozen_parts_match_native(results: Any, backend: str) -> None:
    (native,) = results["groups-native"]
    assert native["groups"] == [["1.1.0.weight"], ["1.0.0.bias", "1.1.0.bias", "2.bias"], ["1.0.0.weight", "2.weight"]]
    for rank in (native, *results[f"groups-{backend}"]):
        assert (rank["groups"], rank["rates"], rank["steps"]) == (native["groups"], [0.025, 0.05, 0.05], 6)
        assert gap(rank["tensors"], native["tensors"]) <= 1e-5
        assert all(torch.equal(rank["tensors"][f"0.{name}"], getattr(deep()[0], name)) for name in ("weight", "bias"))


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2"], ["ddp", "fsdp"]))
def test_muon_matches_native(results: Any, backend: str) -> None:
    (native,) = results["muon-native"]
    for rank in results[f"muon-{backend}"]:
        assert rank["groups"] == native["groups"]
        assert gap(rank["tensors"], native["tensors"]) <= 1e-5


@pytest.mark.parametrize(
    ("what", "source", "target"),
    thinned(
        [("groups", "fsdp", "native"), ("groups", "zero2", "ddp"), ("muon", "ddp", "fsdp")],
        [("groups", "fsdp", "native"), ("muon", "ddp", "fsdp")],
    ),
)
def test_groups_resume_on_another_backend(results: Any, what: str, source: str, target: str) -> None:
    assert gap(results[f"{what}-from-{source}"][0]["tensors"], results[f"{what}-native"][0]["tensors"]) <= 1e-5


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero3", "hf2"], ["ddp", "fsdp"]))
def test_initial_weights_reach_every_rank(results: Any, backend: str) -> None:
    for rank in results[f"begin-{backend}"]:
        assert rank["seed"] == 0
        assert gap(rank["tensors"], results["begin-native"][0]["tensors"]) <= 1e-5


def test_muon_is_an_error_with_zero(results: Any) -> None:
    for rank in results["muon-zero2"]:
        assert rank["error"] == "ConfigError" and "`optimizer='muon'` does not work with DeepSpeed" in rank["message"]
