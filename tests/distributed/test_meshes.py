"""Meshes: hybrid sharding and tensor parallelism take the steps of one process, and their checkpoints are like any."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import gap  # noqa: E402
from forking import Case, play  # noqa: E402
from recipes import Trace  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_hf_two_processes import Tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from omnitrain import AccelerateTrainer, Algorithm, HFTrainer, Trainer  # noqa: E402
from omnitrain.callbacks.summary import opening  # noqa: E402
from omnitrain.checkpoint.tensors import TensorFile, whole  # noqa: E402

pytestmark = pytest.mark.distributed

MESHES: dict[str, dict[str, Any]] = {
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "tp2": {"tp_size": 2},
    "hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "shard2-tp2": {"dp_shard_size": 2, "tp_size": 2},
}
PROCESSES = {"one": 1, "shard2": 2, "replicate2": 2, "tp2": 2, "hybrid": 4, "shard2-tp2": 4}
SHARES = {"one": 1, "shard2": 2, "replicate2": 2, "tp2": 1, "hybrid": 4, "shard2-tp2": 2}
"""How many ranks have samples of their own."""
KINDS = ("mlp", "llama")
HERE = [pytest.param(one, marks=[pytest.mark.slow] if PROCESSES[one] > 2 else []) for one in MESHES]


class Planned(nn.Module):
    """A perceptron that says how it is cut up; its last dropout is of what all ranks of a group have alike."""

    tp_plan = {"body.0": "colwise", "body.2": "rowwise"}  # noqa: RUF012

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.tail = nn.Sequential(nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.body(x[:, :4]))


class Indices(Algorithm):
    """Writes down the indices of the batches of this process."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        if isinstance(batch, (tuple, list)):
            self.seen.append(batch[0][:, -1].int().tolist())
        return batch


def numbered(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(size)
    x = torch.cat([torch.randn(size, 4, generator=generator), torch.arange(size)[:, None].float()], 1).double()
    return TensorDataset(x, x[:, :2].sum(1, keepdim=True))


def model_of(kind: str, seed: int, dropout: float = 0.0) -> nn.Module:
    if kind == "mlp":
        return Planned(seed, dropout).double()
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).double()  # fmt: skip


def trainer_of(mesh: str, kind: str, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a trainer on 25 samples in steps of 8, 8, 8 and 1; 7 to evaluate."""
    data = (numbered(25), numbered(7)) if kind == "mlp" else (Tokens(25), Tokens(7))
    options = {
        "batch_size": 2, "global_batch_size": 8, "epochs": 2, "learning_rate": 0.05, "max_grad_norm": 0.3,
        "lr_scheduler": "cosine", "warmup_steps": 2, "log_steps": 1, "progress_bar": False, "eval_steps": 3,
        "loss_fn": F.mse_loss if kind == "mlp" else None, "algorithms": [Indices()], "callbacks": [Trace()],
        "compute_metrics": "mae" if kind == "mlp" else None, "load_best_at_end": False, **options,
    }  # fmt: skip
    if mesh == "one":
        return Trainer(model_of(kind, seed, dropout), *data, device="cpu", **options)
    if mesh == "hf":
        return HFTrainer(model_of(kind, seed, dropout), None, *data, **options)
    from accelerate.utils import ParallelismConfig

    return AccelerateTrainer(
        model_of(kind, seed, dropout), *data, parallelism_config=ParallelismConfig(**MESHES[mesh]), **options
    )


def learn(mesh: str, kind: str, resume: str = "", dropout: float = 0.0, **options: Any) -> dict[str, Any]:
    """Train, evaluate and predict; each process makes its model from another seed."""
    import os

    rank = int(os.environ.get("RANK", "0"))
    trainer = trainer_of(mesh, kind, dropout, seed=rank, **options)
    trainer.train(resume_from=resume or None)
    noted = next(one for one in trainer.lifecycle.callbacks if isinstance(one, Trace))
    moments, _ = trainer.backend.optimizer_state()
    tensors = {**trainer.backend.model_tensors(), **{f"moments/{name}": one for name, one in moments.items()}}
    sizes = {} if mesh == "one" else {name: trainer.ranks.part(name).world_size for name in ("dp_shard", "tp")}
    sums = trainer.ranks.part("tp").sum("ranks", trainer.ranks.rank)
    predicted = trainer.predict(numbered(7) if kind == "mlp" else Tokens(7))
    return {
        "logs": [{key: row[key] for key in ("loss", "grad_norm", "learning_rate")} for row in noted.logs],
        "indices": trainer.algorithms[0].seen,
        "history": trainer.metrics.to_dict(),
        "opening": opening(trainer)[1], "whole": trainer.resolved_config()["global_batch_size"],
        "sizes": sizes, "sums": sums, "samples": trainer.progress.samples,
        "tensors": {name: whole(one).double().tolist() for name, one in sorted(tensors.items())},
        "evaluated": trainer.evaluate(), "predicted": predicted.predictions.tolist(), "tested": predicted.metrics,
        "mesh": [] if trainer.mesh is None else list(trainer.mesh.mesh_dim_names),
    }  # fmt: skip


def runs(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[Any]]:
    made = [Case(name, "test_meshes:learn", one, processes=PROCESSES[one["mesh"]]) for name, one in cases.items()]
    found = play(made, folder, at_once=2)
    for name in cases:
        for one in found[name]:
            assert one.code == 0, one.output[-6000:]
    return {name: [one.result for one in found[name]] for name in cases}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    cases = {
        kind: {"mesh": "one", "kind": kind, "save_dir": str(folder / kind), "save_steps": 3, "keep_best": 0}
        for kind in KINDS
    }
    found = runs(cases, folder / "runs")
    return {**{kind: found[kind][0] for kind in KINDS}, "folder": folder}


def assert_same(found: dict[str, Any], reference: dict[str, Any], logs: int | None = None) -> None:
    for name in ("tensors", "evaluated", "predicted", "tested"):
        assert gap(without_speed(found[name]), without_speed(reference[name])) < 1e-9, name
    logs = logs or len(reference["logs"])
    assert gap(found["logs"], reference["logs"][-logs:]) < 1e-9, (found["logs"], reference["logs"][-logs:])
    assert found["samples"] == reference["samples"] == 50


def without_speed(value: Any) -> Any:
    return {key: one for key, one in value.items() if "second" not in key} if isinstance(value, dict) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", HERE)
def test_a_mesh_trains_as_one_process_does_and_checkpoints_go_both_ways(
    mesh: str, kind: str, references: dict[str, Any], tmp_path: Path
) -> None:
    one = references[kind]
    saved = references["folder"] / kind / "checkpoint-3"
    found = runs(
        {
            "straight": {
                "mesh": mesh,
                "kind": kind,
                "save_dir": str(tmp_path / "straight"),
                "save_steps": 3,
                "keep_best": 0,
            },
            "taken over": {"mesh": mesh, "kind": kind, "resume": str(saved)},
        },
        tmp_path / "first",
    )
    back = {"mesh": "one", "kind": kind, "resume": str(tmp_path / "straight" / "checkpoint-3")}
    found |= runs({"back": back}, tmp_path / "second")
    for result in found["straight"]:
        assert_same(result, one)
        assert result["whole"] == 8
        assert result["history"].keys() == one["history"].keys()
    for result in (*found["taken over"], *found["back"]):
        assert_same(result, one, logs=len(one["logs"]) - 3)
    if kind == "mlp":  # the ranks of a group saw the same samples, and all of them together each one once
        straight = [result["indices"] for result in found["straight"]]
        copies = PROCESSES[mesh] // SHARES[mesh]
        assert all(straight[rank] == straight[rank - rank % copies] for rank in range(len(straight)))
        assert {i for rank in straight[::copies] for batch in rank for i in batch} == set(range(25))
    files = sorted((tmp_path / "straight" / "checkpoint-3" / "optimizer").glob("*.safetensors"))
    state = TensorFile(files)
    written = sum(block.numel() for file in files for block in load_file(file).values())
    assert written == sum(math.prod(state.spec_of(name)[0]) for name in state), "no rank writes what another does"
    ranks = found["straight"]
    assert all(result["sizes"]["tp"] == MESHES[mesh].get("tp_size", 1) for result in ranks)
    assert all(result["mesh"] == [name.removesuffix("_size") for name in MESHES[mesh]] for result in ranks)
    size = MESHES[mesh].get("tp_size", 1)
    assert [result["sums"] for result in ranks] == [
        [sum(range(rank - rank % size, rank - rank % size + size))] for rank in range(len(ranks))
    ]


@pytest.mark.parametrize(
    ("mesh", "shown"),
    [
        pytest.param("tp2", "batch 7 = up to 2 x 4 accumulated;", id="tp2"),
        pytest.param(
            "shard2-tp2", "batch 7 = up to 2 x 2 groups of processes x 2 accumulated;", marks=pytest.mark.slow,
            id="shard2-tp2",
        ),
    ],
)  # fmt: skip
def test_a_mesh_takes_steps_that_do_not_divide_and_counts_the_ranks_that_have_samples_of_their_own(
    mesh: str, shown: str, tmp_path: Path
) -> None:
    case = {"kind": "mlp", "global_batch_size": 7}
    found = runs({"one": {"mesh": "one", **case, "batch_size": 7}, "mesh": {"mesh": mesh, **case}}, tmp_path)
    for result in found["mesh"]:
        assert_same(result, found["one"][0])
        assert shown in result["opening"] and result["whole"] == 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", ["tp2", pytest.param("shard2-tp2", marks=pytest.mark.slow)])
def test_a_checkpoint_of_a_mesh_written_in_the_background_is_the_same(
    mesh: str, kind: str, references: dict[str, Any], tmp_path: Path
) -> None:
    case = {"mesh": mesh, "kind": kind, "save_dir": str(tmp_path / "run"), "save_steps": 3, "keep_best": 0}
    runs({"behind": {**case, "async_save": True}}, tmp_path / "first")
    found = runs({"back": {"mesh": "one", "kind": kind, "resume": str(tmp_path / "run" / "checkpoint-3")}}, tmp_path)
    assert_same(found["back"][0], references[kind], logs=len(references[kind]["logs"]) - 3)


def side_by_side(first: str, second: str) -> dict[str, Any]:
    """Make two trainers, and then use each; no call of one may see the other's mesh."""
    trainers = {mesh: trainer_of(mesh, "mlp", epochs=1) for mesh in (first, second)}
    for trainer in trainers.values():
        trainer.train()
    found = {}
    for mesh, trainer in trainers.items():
        seen = [i for batch in trainer.algorithms[0].seen for i in batch]
        seen = trainer.ranks.gather("the samples", seen)
        found[mesh] = {
            "mesh": [] if trainer.mesh is None else list(trainer.mesh.mesh_dim_names),
            "whole": trainer.resolved_config()["global_batch_size"], "samples": trainer.progress.samples, "seen": seen,
            "evaluated": trainer.evaluate(), "predicted": trainer.predict(numbered(7)).predictions.tolist(),
        }  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("first", "second"), [("tp2", "replicate2"), ("shard2", "tp2"), ("tp2", "hf")], ids=lambda mesh: str(mesh)
)
def test_trainers_with_different_meshes_can_be_used_side_by_side(first: str, second: str, tmp_path: Path) -> None:
    cases = [Case("both", "test_meshes:side_by_side", {"first": first, "second": second}, processes=2)]
    cases += [Case("one", "test_meshes:side_by_side", {"first": "one", "second": "one"})]
    found = play(cases, tmp_path, at_once=2)
    for one in (*found["both"], *found["one"]):
        assert one.code == 0, one.output[-6000:]
    alone = found["one"][0].result["one"]
    for result in found["both"]:
        for mesh in (first, second):
            here = result.result[mesh]
            assert here["mesh"] == [name.removesuffix("_size") for name in MESHES.get(mesh, {})]
            assert (here["whole"], here["samples"]) == (8, 25)
            ranks = here["seen"][:1] if SHARES.get(mesh, 2) == 1 else here["seen"]
            assert {i for rank in ranks for i in rank} == set(range(25))
            assert mesh != "tp2" or here["seen"][0] == here["seen"][1]
            for name in ("evaluated", "predicted"):
                assert gap(without_speed(here[name]), without_speed(alone[name])) < 1e-9, (mesh, name)
