"""What each rank has of ZeRO's and FSDP's tensors: written without communication, and read by slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, launch, make_trainer, sound
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
    "zero3-offloaded": {
        "zero": {
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    },
    "fsdp": {},
}


class OnEachDisk(TensorFile):
    """Tensors of which every rank reads slices by itself, and which count the values that were asked for."""

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
        raise AssertionError(f"{name} was asked for whole, which takes all ranks")

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
    """Train two steps, and return this rank's ranges, and the whole tensors."""
    trainer = make(backend, kind)
    trainer.train()
    found: dict[str, torch.Tensor] = {}
    starts: dict[str, int] = {}
    moments, _ = trainer.backend.optimizer_state()
    for name, one in {**trainer.backend.model_tensors(), **moments}.items():
        if isinstance(one, Gathered):
            assert one.flat is not None
            starts[name], own = one.flat()
            assert own.dim() == 1 and own.dtype == one.dtype
            found["own/" + name] = own.detach().clone()
            found["whole/" + name] = whole(one)
    return {"starts": starts, "tensors": found}


def loaded(backend: str, kind: str) -> dict[str, Any]:
    """Load other values by slices, then again whole, and return all that the model computes with after each."""
    trainer = make(backend, kind)
    trainer.train()
    held = trainer.backend
    moments, saved = held.optimizer_state()
    weights = {name: whole(one) for name, one in held.model_tensors().items()}
    state = {name: whole(one) for name, one in moments.items()}

    def moved(tensors: Mapping[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
        return {name: one * 1.37 + by for name, one in tensors.items()}

    def load(wanted: Any, entries: Any) -> dict[str, torch.Tensor]:
        held.load_weights(wanted, "here", {})
        held.load_optimizer(entries, saved, "here")
        seen = {f"weights/{name}": whole(one) for name, one in held.model_tensors().items()}
        seen |= {f"state/{name}": whole(one) for name, one in held.optimizer_state()[0].items()}
        if backend != "fsdp":
            for name, one in trainer.model.named_parameters():
                with held._gathered(one):  # type: ignore[attr-defined]
                    seen[f"low/{name}"] = one.detach().clone()
        return seen

    sources = OnEachDisk(moved(weights, 0.1)), OnEachDisk(moved(state, 0.2))
    then = load(*sources)  # first, while stage 3 still has its small weights whole
    load(moved(weights, 0.5), moved(state, 0.6))
    first = load(moved(weights, 0.1), moved(state, 0.2))
    tensors = {f"whole/{name}": one for name, one in first.items()}
    tensors |= {f"slices/{name}": one for name, one in then.items()}
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
    found: dict[str, torch.Tensor] = {}
    for name, epochs, resume in (("straight", 2, None), ("resumed", 1, None), ("resumed", 2, "last")):
        trainer = make_trainer(
            backend, Unusual(kind), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=4, epochs=epochs,
            learning_rate=0.01, optimizer="adamw", save_dir=f"{folder}/{name}", consolidate=False,
        )  # fmt: skip
        trainer.train(resume_from=resume)
        found |= {f"{name}/{key}": whole(one) for key, one in trainer.backend.model_tensors().items()}
    return {"tensors": found}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs = []
    for kind in KINDS:
        backend = kind.partition("-")[0]
        if backend != "fsdp":
            jobs.append(Job(f"{kind}-parts", backend, f"{HERE}:parts", {"kind": kind}))
        jobs.append(Job(f"{kind}-loaded", backend, f"{HERE}:loaded", {"kind": kind}))
    return sound(launch(jobs, tmp_path_factory.mktemp("parts")))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fsdp"])
def test_the_ranges_of_all_ranks_are_the_whole_tensor_to_the_bit(results: Any, kind: str) -> None:
    ranks = results[f"{kind}-parts"]
    names = ranks[0]["starts"].keys()
    assert {"frozen.weight", "first.weight", "scale", "first.weight/exp_avg", "scale/exp_avg_sq"} <= names
    for name in names:
        expected, end = ranks[0]["tensors"]["whole/" + name].flatten(), 0
        owned = [(one["starts"][name], one["tensors"]["own/" + name]) for one in ranks]
        for start, own in sorted((one for one in owned if one[1].numel()), key=lambda one: one[0]):
            assert start == end, f"{name}: the ranges leave a gap or overlap"
            end += own.numel()
            assert torch.equal(own, expected[start:end]), name
        assert end == expected.numel(), f"{name} is not covered"


@pytest.mark.parametrize("kind", KINDS)
def test_slices_load_to_the_same_bits_as_whole_tensors(results: Any, kind: str) -> None:
    for rank in results[f"{kind}-loaded"]:
        tensors = rank["tensors"]
        names = [name.removeprefix("whole/") for name in tensors if name.startswith("whole/")]
        assert any(name.startswith("state/") for name in names)
        for name in names:
            assert torch.equal(tensors["whole/" + name], tensors["slices/" + name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_reads_its_slices_alone(results: Any, kind: str) -> None:
    ranks = results[f"{kind}-loaded"]
    for name, size in {"first.weight": 35, "last.weight": 7, "scale": 1}.items():
        if not kind.startswith(("zero1", "zero2")) and kind != "zero3-persistent":
            assert sum(one["asked"][0].get(name, 0) for one in ranks) == size
        else:  # every rank has the whole weight in its low precision
            assert [one["asked"][0][name] for one in ranks] == [size, size]
        for entry in ("exp_avg", "exp_avg_sq"):
            assert sum(one["asked"][1].get(f"{name}/{entry}", 0) for one in ranks) == size


@pytest.mark.parametrize(("backend", "kind"), [("zero1", "empty"), ("zero3", "number")])
def test_a_parameter_of_one_number_or_of_none_resumes(backend: str, kind: str, tmp_path: Path) -> None:
    job = Job("one", backend, f"{HERE}:resumed", {"kind": kind, "folder": str(tmp_path / "runs")})
    for rank in sound(launch([job], tmp_path / "jobs"))["one"]:
        found = rank["tensors"]
        assert found["straight/rest.last"].shape == (() if kind == "number" else (0, 4))
        for name in ("layer.weight", "layer.bias", "rest.last"):
            assert torch.equal(found[f"resumed/{name}"], found[f"straight/{name}"]), name
