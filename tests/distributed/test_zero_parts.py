"""Ranks' parts of ZeRO's and FSDP's tensors: written without communication, read by slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer, sound
from marks import thinned
from recipes import rows
from torch import nn

from omnitrain import AccelerateTrainer
from omnitrain.checkpoint.reading import TensorFile
from omnitrain.checkpoint.tensors import Gathered, Spec, whole

HERE = "test_zero_parts"
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "zero2": {"autocast": "bf16"},
    "zero3": {"zero": {"stage3_param_persistence_threshold": 0}},
    "zero3-bf16": {"zero": {"stage3_param_persistence_threshold": 0}, "autocast": "bf16"},
    "zero3-persistent": {"autocast": "bf16"},
    "zero2-offloaded": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "zero3-offloaded": {"zero": {
        "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }},
    "fsdp": {},
}  # fmt: skip
QUICK = ("zero2", "zero3", "fsdp")


class OnEachDisk(TensorFile):
    """Tensors of which every rank reads slices by itself, with a count of the values that were read."""

    is_local = True

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self.asked = tensors, dict[str, int]()

    def part(self, name: str, begin: int, end: int) -> torch.Tensor:
        self.asked[name] = self.asked.get(name, 0) + end - begin
        return self._tensors[name].flatten()[begin:end].clone()

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        self.asked[name] = self.asked.get(name, 0) + math.prod(sizes)
        cut = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        return self._tensors[name][cut].clone()

    def __getitem__(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read in full, which takes all ranks")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def spec_of(self, name: str) -> Spec:
        return tuple(self._tensors[name].shape), self._tensors[name].dtype


class Odd(nn.Module):
    """Layers of odd sizes, a buffer, and a parameter of one number, fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.frozen(x)))) * self.scale


def make(backend: str, kind: str) -> AccelerateTrainer:
    options = dict(KINDS[kind])
    zero = options.pop("zero", {})
    if backend == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    else:
        options["deepspeed_config"] = {
            "zero_optimization": {"stage": int(backend[-1]), **zero},
            "zero_force_ds_cpu_optimizer": False,
        }
    return AccelerateTrainer(
        Odd(), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=1, learning_rate=0.01,
        optimizer="adamw", freeze=[r"^frozen\."], param_groups=[{"match": "bias", "weight_decay": 0.0}],
        progress_bar=False, **options,
    )  # fmt: skip


def parts(backend: str, kind: str) -> dict[str, Any]:
    """Train two steps, and return this rank's ranges, and the full tensors."""
    trainer = make(backend, kind)
    trainer.train()
    tensors: dict[str, torch.Tensor] = {}
    starts: dict[str, int] = {}
    moments, _ = trainer.backend.optimizer_state()
    for name, one in {**trainer.backend.model_tensors(), **moments}.items():
        if isinstance(one, Gathered):
            assert one.flat is not None
            starts[name], part = one.flat()
            assert part.dim() == 1 and part.dtype == one.dtype
            tensors |= {f"part/{name}": part.detach().clone(), f"whole/{name}": whole(one)}
    return {"starts": starts, "tensors": tensors}


def loaded(backend: str, kind: str) -> dict[str, Any]:
    """Load other values by slices, then again in full, and return all that the model computes with after each."""
    trainer = make(backend, kind)
    trainer.train()
    placed = trainer.backend
    moments, saved = placed.optimizer_state()
    weights = {name: whole(one) for name, one in placed.model_tensors().items()}
    state = {name: whole(one) for name, one in moments.items()}

    def moved(tensors: Mapping[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
        return {name: one * 1.37 + by for name, one in tensors.items()}

    def load(tensors: Any, entries: Any) -> dict[str, torch.Tensor]:
        placed.load_weights(tensors, "here", {})
        placed.load_optimizer(entries, saved, "here")
        values = {f"weights/{name}": whole(one) for name, one in placed.model_tensors().items()}
        values |= {f"state/{name}": whole(one) for name, one in placed.optimizer_state()[0].items()}
        if backend != "fsdp":
            for name, one in trainer.model.named_parameters():
                with placed._gathered(one):  # type: ignore[attr-defined]
                    values[f"low/{name}"] = one.detach().clone()
        return values

    sources = OnEachDisk(moved(weights, 0.1)), OnEachDisk(moved(state, 0.2))
    by_slices = load(*sources)  # first, while stage 3 still has its small weights in full
    load(moved(weights, 0.5), moved(state, 0.6))
    in_full = load(moved(weights, 0.1), moved(state, 0.2))
    tensors = {f"whole/{name}": one for name, one in in_full.items()}
    tensors |= {f"slices/{name}": one for name, one in by_slices.items()}
    return {"asked": [one.asked for one in sources], "tensors": tensors}


class Unusual(nn.Module):
    """A layer, and a last parameter of one number without dimensions, or of none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.rest = nn.ParameterDict({"last": torch.tensor(1.5) if kind == "number" else torch.zeros(0, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (self.rest["last"] if self.rest["last"].numel() else 1)


def resumed(backend: str, kind: str, folder: str) -> dict[str, Any]:
    """Train two epochs at once, and with a resume in between."""
    tensors: dict[str, torch.Tensor] = {}
    for name, epochs, resume in (("straight", 2, None), ("resumed", 1, None), ("resumed", 2, "last")):
        trainer = make_trainer(
            backend, Unusual(kind), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=epochs,
            learning_rate=0.01, optimizer="adamw", save_dir=f"{folder}/{name}", consolidate=False,
        )  # fmt: skip
        trainer.train(resume_from=resume)
        tensors |= {f"{name}/{key}": whole(one) for key, one in trainer.backend.model_tensors().items()}
    return {"tensors": tensors}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    folder, jobs = tmp_path_factory.mktemp("parts"), []
    for function, test in (("parts", "test_ranges"), ("loaded", "test_slices")):
        for kind in sorted(asked_for(request, "kind", test=test)):
            jobs.append(Job(f"{kind}-{function}", kind.partition("-")[0], f"{HERE}:{function}", {"kind": kind}))
    for backend, kind in sorted(asked_for(request, "backend", "kind")):
        options = {"kind": kind, "folder": str(folder / f"{backend}-{kind}")}
        jobs.append(Job(f"{backend}-{kind}", backend, f"{HERE}:resumed", options))
    return sound(launch_all(jobs, folder / "jobs"))


@pytest.mark.parametrize("kind", thinned([kind for kind in KINDS if kind != "fsdp"], QUICK[:-1]))
def test_ranges_of_all_ranks_are_the_full_tensor(results: Any, kind: str) -> None:
    ranks = results[f"{kind}-parts"]
    names = ranks[0]["starts"].keys()
    assert {"frozen.weight", "first.weight", "scale", "first.weight/exp_avg", "scale/exp_avg_sq"} <= names
    for name in names:
        expected, end = ranks[0]["tensors"]["whole/" + name].flatten(), 0
        parts = [(rank["starts"][name], rank["tensors"]["part/" + name]) for rank in ranks]
        for start, part in sorted((pair for pair in parts if pair[1].numel()), key=lambda pair: pair[0]):
            assert start == end, f"{name}: the ranges leave a gap or overlap"
            end += part.numel()
            assert torch.equal(part, expected[start:end]), name
        assert end == expected.numel(), f"{name} is not covered"


@pytest.mark.parametrize("kind", thinned(KINDS, QUICK))
def test_slices_load_the_bits_of_full_tensors(results: Any, kind: str) -> None:
    """Each rank reads only its slices, or with ZeRO 1 and 2 the full weight in its low precision."""
    ranks = results[f"{kind}-loaded"]
    for rank in ranks:
        tensors = rank["tensors"]
        names = [name.removeprefix("whole/") for name in tensors if name.startswith("whole/")]
        assert any(name.startswith("state/") for name in names)
        for name in names:
            assert torch.equal(tensors["whole/" + name], tensors["slices/" + name]), name
    for name, size in {"first.weight": 35, "last.weight": 7, "scale": 1}.items():
        if not kind.startswith(("zero1", "zero2")) and kind != "zero3-persistent":
            assert sum(rank["asked"][0].get(name, 0) for rank in ranks) == size
        else:
            assert [rank["asked"][0][name] for rank in ranks] == [size, size]
        for entry in ("exp_avg", "exp_avg_sq"):
            assert sum(rank["asked"][1].get(f"{name}/{entry}", 0) for rank in ranks) == size


@pytest.mark.parametrize(("backend", "kind"), thinned([("zero1", "empty"), ("zero3", "number")], [("zero3", "number")]))
def test_parameter_of_one_number_or_none_resumes(results: Any, backend: str, kind: str) -> None:
    for rank in results[f"{backend}-{kind}"]:
        tensors = rank["tensors"]
        assert tensors["straight/rest.last"].shape == (() if kind == "number" else (0, 4))
        for name in ("layer.weight", "layer.bias", "rest.last"):
            assert torch.equal(tensors[f"resumed/{name}"], tensors[f"straight/{name}"]), name
