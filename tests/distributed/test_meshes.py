"""Meshes: hybrid sharding and tensor parallelism match one process, and their checkpoints resume anywhere."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Indices, asked_for, gap
from forking import Case, Found, current_rank, joined, play
from marks import thinned
from recipes import Trace, fit
from resuming import Numbered
from safetensors.torch import load_file
from tiny import Tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from omnitrain import AccelerateTrainer, HFTrainer, Trainer
from omnitrain.checkpoint.tensor_files import TensorFile, gather_to_host
from omnitrain.loggers.summary import opening

ParallelismConfig: Any = pytest.importorskip("accelerate", "1.10").utils.ParallelismConfig
HERE = "test_meshes"
MESHES: dict[str, dict[str, Any]] = {
    "one": {}, "hf": {}, "shard2": {"dp_shard_size": 2}, "replicate2": {"dp_replicate_size": 2}, "tp2": {"tp_size": 2},
    "hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2}, "shard2-tp2": {"dp_shard_size": 2, "tp_size": 2},
}  # fmt: skip
RUNS = [
    ("tp2", "llama", False), ("tp2", "mlp", True), ("shard2", "mlp", True), ("replicate2", "mlp", False),
    ("hybrid", "llama", False), ("shard2-tp2", "llama", True), ("shard2-tp2", "mlp", False),
]  # fmt: skip
"""Mesh, model, and whether checkpoints are written in the background."""
UNEVEN = {
    "tp2": "batch 7 = up to 2 x 4 accumulated;",
    "shard2-tp2": "batch 7 = up to 2 x 2 groups of processes x 2 accumulated;",
}
PAIRS = [("tp2", "hf"), ("tp2", "replicate2")]


class Planned(nn.Module):
    """A perceptron with a plan for tensor parallelism."""

    tp_plan = {"body.0": "colwise", "body.2": "rowwise"}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.tail = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.body(x[:, :4]))


def model_of(kind: str, seed: int) -> nn.Module:
    if kind == "mlp":
        return Planned(seed).double()
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).double()  # fmt: skip


def trainer_of(mesh: str, kind: str, seed: int = 0, **options: Any) -> Any:
    """Return a trainer on 25 samples in steps of 8, 8, 8 and 1; 7 to evaluate."""
    is_mlp = kind == "mlp"
    data = (Numbered(25, False), Numbered(7, False)) if is_mlp else (Tokens(25), Tokens(7))
    options = {
        "batch_size": 2, "global_batch_size": 8, "epochs": 1, "learning_rate": 0.05, "max_grad_norm": 0.3,
        "lr_scheduler": "cosine", "warmup_steps": 2, "log_steps": 1, "progress_bar": False, "eval_steps": 3,
        "loss_fn": F.mse_loss if is_mlp else None, "algorithms": [Indices()] if is_mlp else [], "callbacks": [Trace()],
        "compute_metrics": "mae" if is_mlp else None, "load_best_at_end": False, **options,
    }  # fmt: skip
    model = model_of(kind, seed)
    if mesh == "one":
        return Trainer(model, *data, device="cpu", **options)
    if mesh == "hf":
        return HFTrainer(model, None, *data, **options)
    return AccelerateTrainer(model, *data, parallelism_config=ParallelismConfig(**MESHES[mesh]), **options)


def learn(mesh: str, kind: str, resume: str = "", **options: Any) -> dict[str, Any]:
    """Train, evaluate and predict; each process makes its model from another seed."""
    trainer = fit(trainer_of(mesh, kind, current_rank(), **options), resume_from=resume or None)
    trace = next(callback for callback in trainer.lifecycle.callbacks if isinstance(callback, Trace))
    moments, _ = trainer.backend.optimizer_state()
    tensors = {**trainer.backend.model_tensors(), **{f"moments/{name}": tensor for name, tensor in moments.items()}}
    sizes = {} if mesh == "one" else {name: trainer.ranks.part(name).world_size for name in ("dp_shard", "tp")}
    sums = trainer.ranks.part("tp").sum("ranks", trainer.ranks.rank)
    predicted = trainer.predict(Numbered(7, False) if kind == "mlp" else Tokens(7))
    return {
        "logs": [{key: row[key] for key in ("loss", "grad_norm", "learning_rate")} for row in trace.logs],
        "indices": [indices for algorithm in trainer.algorithms for *_, indices in algorithm.seen],
        "history": trainer.metrics.to_dict(),
        "opening": opening(trainer)[1], "whole": trainer.resolved_config()["global_batch_size"],
        "sizes": sizes, "sums": sums, "samples": trainer.progress.samples,
        "tensors": {name: gather_to_host(tensor).double().tolist() for name, tensor in sorted(tensors.items())},
        "evaluated": trainer.evaluate(), "predicted": predicted.predictions.tolist(), "tested": predicted.metrics,
        "mesh": [] if trainer.mesh is None else list(trainer.mesh.mesh_dim_names),
    }  # fmt: skip


def side_by_side(first: str, second: str) -> dict[str, Any]:
    """Make two trainers, and then use each; no call of one may see the other's mesh."""
    trainers = {mesh: trainer_of(mesh, "mlp") for mesh in (first, second)}
    for trainer in trainers.values():
        trainer.train()
    return {
        mesh: {
            "mesh": [] if trainer.mesh is None else list(trainer.mesh.mesh_dim_names),
            "whole": trainer.resolved_config()["global_batch_size"], "samples": trainer.progress.samples,
            "indices": trainer.ranks.gather("samples", [i for *_, batch in trainer.algorithms[0].seen for i in batch]),
            "evaluated": trainer.evaluate(), "predicted": trainer.predict(Numbered(7, False)).predictions.tolist(),
        }
        for mesh, trainer in trainers.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Found[list[dict[str, Any]]]:
    from test_meshes import learn, side_by_side  # by the name of the module that checkpoints of ranks have

    first, second, singles = list[Case](), list[Case](), dict[str, list[dict[str, Any]]]()

    def case(name: str, mesh: str, kind: str, **options: Any) -> Case:
        processes = math.prod(MESHES[mesh].values())
        return Case(name, f"{HERE}:learn", {"mesh": mesh, "kind": kind, **options}, processes=processes)

    def saves(name: str) -> dict[str, Any]:
        return {"save_dir": str(folder / name), "save_steps": 3, "keep_best": 0}

    runs = sorted(asked_for(request, "mesh", "kind", "is_async"))
    for kind in sorted({kind for _, kind, _ in runs}):
        singles[f"one-{kind}"] = [learn("one", kind, **saves(f"one-{kind}"))]
    for mesh, kind, is_async in runs:
        name = f"{mesh}-{kind}-{is_async}"
        first.append(case(name, mesh, kind, async_save=is_async, **saves(name)))
        second.append(case(f"{name} resumes one", mesh, kind, resume=str(folder / f"one-{kind}" / "checkpoint-3")))
    uneven = sorted(asked_for(request, "mesh"))
    first += [case(f"{mesh}-uneven", mesh, "mlp", global_batch_size=7) for mesh in uneven]
    if uneven:
        singles["one-uneven"] = [learn("one", "mlp", global_batch_size=7, batch_size=7)]
    for pair in sorted(asked_for(request, "first", "second")):
        options = dict(zip(("first", "second"), pair, strict=True))
        first.append(Case("-".join(pair), f"{HERE}:side_by_side", options))
        singles["one-one"] = [side_by_side("one", "one")]
    outcomes = joined(play(first, folder / "first", at_once=3), play(second, folder / "second"))
    results = Found[list[dict[str, Any]]]()
    results.broken |= outcomes.broken
    for name, ranks in outcomes.items():
        if any(rank.code for rank in ranks):
            results.broken[name] = f"{name} has failed: {[rank.output[-6000:] for rank in ranks]}"
        else:
            results[name] = [rank.result for rank in ranks]
    for mesh, kind, is_async in runs:
        name = f"{mesh}-{kind}-{is_async}"
        singles[f"one resumes {name}"] = [learn("one", kind, resume=str(folder / name / "checkpoint-3"))]
    results.update(singles)
    return results


def without_speed(value: Any) -> Any:
    return {key: number for key, number in value.items() if "second" not in key} if isinstance(value, dict) else value


def assert_same(result: dict[str, Any], reference: dict[str, Any], skipped: int = 0) -> None:
    for name in ("tensors", "evaluated", "predicted", "tested"):
        assert gap(without_speed(result[name]), without_speed(reference[name])) < 1e-9, name
    assert gap(result["logs"], reference["logs"][skipped:]) < 1e-9, (result["logs"], reference["logs"][skipped:])
    assert result["samples"] == reference["samples"] == 25


@pytest.mark.parametrize(("mesh", "kind", "is_async"), thinned(RUNS, RUNS[:1]))
def test_mesh_matches_one_process(results: Any, folder: Path, mesh: str, kind: str, is_async: bool) -> None:
    """Its checkpoints resume on one process, and those of one process on it."""
    name, (reference,) = f"{mesh}-{kind}-{is_async}", results[f"one-{kind}"]
    ranks = results[name]
    size = MESHES[mesh].get("tp_size", 1)
    for rank, result in enumerate(ranks):
        assert_same(result, reference)
        assert result["whole"] == 8
        assert result["history"].keys() == reference["history"].keys()
        assert result["sizes"]["tp"] == size
        assert result["mesh"] == [name.removesuffix("_size") for name in MESHES[mesh]]
        assert result["sums"] == [sum(range(rank - rank % size, rank - rank % size + size))]
    for result in (*results[f"{name} resumes one"], *results[f"one resumes {name}"]):
        assert_same(result, reference, skipped=3)
    if kind == "mlp":  # the ranks of a group saw the same samples, and all of them together each one once
        indices = [result["indices"] for result in ranks]
        assert all(indices[rank] == indices[rank - rank % size] for rank in range(len(ranks)))
        assert {i for rank in indices[::size] for batch in rank for i in batch} == set(range(25))
    files = sorted((folder / name / "checkpoint-3" / "optimizer").glob("*.safetensors"))
    state = TensorFile(files)
    written = sum(block.numel() for file in files for block in load_file(file).values())
    assert written == sum(math.prod(state.spec_of(name)[0]) for name in state), "no rank writes what another does"


@pytest.mark.parametrize("mesh", thinned(UNEVEN, ["tp2"]))
def test_uneven_steps_on_a_mesh_match_one_process(results: Any, mesh: str) -> None:
    """The opening counts the groups of ranks with different samples."""
    for result in results[f"{mesh}-uneven"]:
        assert_same(result, results["one-uneven"][0])
        assert UNEVEN[mesh] in result["opening"] and result["whole"] == 7


@pytest.mark.parametrize(("first", "second"), thinned(PAIRS, PAIRS[:1]))
def test_trainers_with_different_meshes_do_not_interfere(results: Any, first: str, second: str) -> None:
    reference = results["one-one"][0]["one"]
    for rank in results[f"{first}-{second}"]:
        for mesh in (first, second):
            result = rank[mesh]
            assert result["mesh"] == [name.removesuffix("_size") for name in MESHES[mesh]]
            assert (result["whole"], result["samples"]) == (8, 25)
            assert {i for indices in result["indices"] for i in indices} == set(range(25))
            assert mesh != "tp2" or result["indices"][0] == result["indices"][1]
            for name in ("evaluated", "predicted"):
                assert gap(without_speed(result[name]), without_speed(reference[name])) < 1e-9, (mesh, name)
