"""Groups, frozen parts, Muon and weights to begin with on two ranks: names are those of the user's module."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import PROCESSES, Job, gap, launch_all, make_trainer, sound  # noqa: E402
from recipes import StopAt, rows  # noqa: E402

from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_groups"
KINDS = ("native", "ddp", "fsdp", "zero2", "zero3", "hf2")
GIVEN = {
    "optimizer": "adamw",
    "freeze": [r"^0\."],
    "param_groups": [{"match": r"^1\.1\..*weight", "lr_scale": 0.5}, {"match": "bias", "weight_decay": 0.0}],
}


def deep(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*blocks), nn.Linear(4, 1))


class Seeded(nn.Sequential):
    """Keeps its seed beside its tensors."""

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
    ranks = PROCESSES[backend]
    trainer = make_trainer(
        backend, model, rows(20, torch.float32), loss_fn=F.mse_loss, epochs=2, learning_rate=0.05, weight_decay=0.1,
        lr_scheduler="cosine", save_dir=folder, save_steps=folder and 2, callbacks=[StopAt(stop)],
        batch_size=8 // ranks, **options,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    rates = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    return {
        "groups": trainer.backend.names_by_group(), "rates": rates, "steps": trainer.progress.step,
        "seed": getattr(trainer.get_model(), "seed", None),
        "tensors": {name: whole(one) for name, one in trainer.backend.model_tensors().items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Each kind with groups; some with Muon; and runs that are cut on one kind, and go on on another."""
    folder = tmp_path_factory.mktemp("groups")
    torch.save(Seeded(*deep()).state_dict(), folder / "weights.pt")
    jobs, moved = [], []
    for what, given, kinds, moves in (
        ("groups", GIVEN, KINDS, {"fsdp": "native", "zero2": "ddp"}),
        ("begin", {"init_from": str(folder / "weights.pt")}, ("native", "ddp", "fsdp", "zero3", "hf2"), {}),
        ("muon", {"optimizer": "muon"}, ("native", "ddp", "fsdp", "hf2", "zero2"), {"ddp": "fsdp"}),
    ):
        jobs += [Job(f"{what}-{kind}", kind, f"{HERE}:train", given) for kind in kinds]
        for kind, other in moves.items():
            cut = {**given, "folder": str(folder / f"{what}-{kind}")}
            jobs.append(Job(f"{what}-cut-{kind}", kind, f"{HERE}:train", {**cut, "stop": 2}))
            moved.append(Job(f"{what}-from-{kind}", other, f"{HERE}:train", cut))
    found = launch_all(jobs, folder / "launch")
    return found | sound(launch_all(moved, folder / "moved"))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_frozen_parts_are_the_same_on_every_backend(results: Any, kind: str) -> None:
    native = results["groups-native"][0]
    assert native["groups"] == [["1.1.0.weight"], ["1.0.0.bias", "1.1.0.bias", "2.bias"], ["1.0.0.weight", "2.weight"]]
    for one in results[f"groups-{kind}"]:
        assert (one["groups"], one["rates"], one["steps"]) == (native["groups"], [0.025, 0.05, 0.05], 6)
        assert gap(one["tensors"], native["tensors"]) <= 1e-5
        assert all(torch.equal(one["tensors"][f"0.{name}"], getattr(deep()[0], name)) for name in ("weight", "bias"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hf2"])
def test_muon_is_the_same_on_every_backend(results: Any, kind: str) -> None:
    native = results["muon-native"][0]
    for one in results[f"muon-{kind}"]:
        assert one["groups"] == native["groups"]
        assert gap(one["tensors"], native["tensors"]) <= 1e-5


@pytest.mark.parametrize(("what", "kind"), [("groups", "fsdp"), ("groups", "zero2"), ("muon", "ddp")])
def test_a_run_goes_on_on_another_backend(results: Any, what: str, kind: str) -> None:
    assert gap(results[f"{what}-from-{kind}"][0]["tensors"], results[f"{what}-native"][0]["tensors"]) <= 1e-5


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero3", "hf2"])
def test_every_rank_begins_with_the_weights_that_are_given(results: Any, kind: str) -> None:
    native = results["begin-native"][0]["tensors"]
    for one in results[f"begin-{kind}"]:
        assert one["seed"] == 0
        assert gap(one["tensors"], native) <= 1e-5


def test_muon_is_refused_with_zero(results: Any) -> None:
    for one in results["muon-zero2"]:
        assert one["error"] == "ConfigError" and "`optimizer='muon'` does not work with DeepSpeed" in one["message"]
