"""Memory on two processes: micro-batches that fit, and what saves, starts and evaluations hold at most."""

import ctypes
import functools
import gc
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from backends import Jobs, asked_for, gap, launch_all, make_trainer, named, tensors_of
from forking import current_rank
from marks import thinned
from recipes import Starving, fit, no_room, rows, same
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain.checkpoint.store import Store

PLACES = [("hf2", "backward"), ("ddp", "forward"), ("ddp", "both")]
"""Backend, and where memory runs out."""
SHARDED = "'auto'` cannot be used where the weights are sharded"
TOGETHER = [("fsdp", SHARDED), ("zero2", SHARDED), ("ddp", "SyncBatchNorm")]
LAYERS = {8: 6, 1024: 6, 1536: 6, 3072: 8}
"""How many matrices a model has, by their width; those of width 8 show only that all works."""
PARTS = {"fsdp": 1, "zero3": 3}
"""How often each rank has its part before the first step: DeepSpeed takes that of a copy and of the gradients too."""
needs_rss = pytest.mark.skipif(
    not Path("/proc/self/status").exists() or "RssAnon" not in Path("/proc/self/status").read_text(),
    reason="this system does not say how much memory a process holds",
)
SAMPLES, OUTPUT_WIDTH = 64, 1 << 18
OUTPUTS = SAMPLES * OUTPUT_WIDTH * 4 / 2**20
"""MiB of the outputs for all samples: 64."""


# --- micro-batches that fit


def starve(backend: str, place: str, folder: str) -> dict[str, Any]:
    """Train where memory runs out on the second process only, and with small micro-batches from the start."""
    runs: dict[str, Any] = {"tensors": {}}
    for name in ("poor", "resumed", "rich"):
        is_poor = name == "poor" and (current_rank() == 1 or place == "both")
        model = Starving(3 if is_poor else 1000, "backward" if place == "backward" else "forward")
        saves: dict[str, Any] = {} if name == "rich" else {"save_dir": folder, "save_steps": "1ep"}
        trainer = make_trainer(
            backend, model, rows(44), loss_fn=F.mse_loss, batch_size=8, epochs=1 if name == "poor" else 3,
            learning_rate=0.05, microbatch_size=2 if name == "rich" else "auto", **saves,
        )  # fmt: skip
        trainer.train("last" if name == "resumed" else None)
        runs[name] = {"sizes": model.sizes, "history": trainer.metrics["train_metrics_history"]}
        runs["tensors"] |= {f"{name}/{key}": tensor for key, tensor in tensors_of(trainer).items()}
    return runs


def give_up(backend: str) -> dict[str, Any]:
    """Train where one process has no room at all."""
    model = Starving(0 if current_rank() == 1 else 1000)
    model.norm.eval()
    make_trainer(backend, model, rows(16), loss_fn=F.mse_loss, batch_size=4, microbatch_size="auto").train()
    return {}


def choose(backend: str, synchronized: bool) -> dict[str, Any]:
    """Leave the size to the trainer, also of a model whose ranks have statistics in common."""
    model = Starving().float()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronized else model
    make_trainer(backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, microbatch_size="auto").train()
    return {}


class ShortInEvaluation(nn.Module):
    """A model that has room for few rows in the evaluations of the second process."""

    def __init__(self, room: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.room = nn.Linear(4, 1).double(), room

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > self.room and current_rank() == 1:
            raise no_room()
        return self.layer(x)


def first_and_last(y_true: Any, y_pred: Any) -> dict[str, float]:
    return {"first": float(y_pred[0, 0]), "last": float(y_pred[-1, 0])}


def evaluate_in_parts(backend: str) -> dict[str, Any]:
    """Evaluate with room for all rows, and where the second process has room for two only."""
    results: dict[str, Any] = {}
    for room in (1000, 2):
        trainer = make_trainer(
            backend, ShortInEvaluation(room), None, eval_dataset=rows(15), loss_fn=F.mse_loss, eval_batch_size=5,
            compute_metrics=["mae", first_and_last], microbatch_size="auto",
        )  # fmt: skip
        results[str(room)] = [trainer.evaluate(), trainer.predict(rows(15)).predictions.tolist()]
    return results


# --- what a process holds at most


def tensor_size(width: int) -> float:
    """Return the MiB of the largest tensor."""
    return width * width * 4 / 2**20


def anonymous() -> float:
    """Return the MiB of memory that this process holds, without the pages of files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def growth(work: Callable[[], Any]) -> float:
    """Return by how many MiB this process's memory grew at most while `work` ran."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: give large blocks back as soon as they are free
    gc.collect()
    sizes, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            sizes.append(anonymous())

    with ThreadPoolExecutor() as pool:
        pool.submit(watch)
        try:
            work()
        finally:
            done.set()
    return max(sizes) - sizes[0]


def deep(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS[width])))


def make(backend: str, width: int, empty: bool = False, **options: Any) -> Any:
    with torch.device("meta" if empty else "cpu"):
        model = deep(width)
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    return make_trainer(backend, model, TensorDataset(x, x), loss_fn=F.mse_loss, batch_size=4, epochs=1, **options)


def optimizers_with_state() -> int:
    gc.collect()
    return sum(type(instance) is torch.optim.AdamW and len(instance.state) > 0 for instance in gc.get_objects())


def measure(backend: str, folder: str, widths: list[int]) -> dict[str, Any]:
    """Train a step, save and load; first with a small model, which loads the code."""
    result: dict[str, Any] = {}
    for width in widths:
        trainer = fit(make(backend, width, save_dir=f"{folder}/{width}", save_steps=1000))
        before = optimizers_with_state()
        trainer.train(more="1ba")
        result["optimizers"] = optimizers_with_state() - before
        result["save"] = growth(trainer.save_checkpoint)
        result["load"] = growth(functools.partial(trainer.load_checkpoint, "last"))
        result["save_model"] = growth(functools.partial(trainer.save_model, f"{folder}/{width}-model"))
    return result


def start(backend: str, folder: str, widths: list[int]) -> dict[str, Any]:
    """Make models that only the main rank has, or that a file has, or nobody; first small ones."""
    result: dict[str, Any] = {}
    for width in widths:
        for source, empty in {"main": [1], "file": [0, 1], "initializers": [0, 1]}.items():
            options = {"init_from": f"{folder}/{width}.safetensors"} if source == "file" else {}
            is_empty, trainers = current_rank() in empty, list[Any]()
            result[source] = growth(lambda: trainers.append(make(backend, width, is_empty, **options)))  # noqa: B023
            trainers.pop().backend.release()
            gc.collect()
    return result


class Wide(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).expand(-1, OUTPUT_WIDTH)


def mean_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0].mean() + labels.sum() * 0


def mean_of(y_true: Any, y_pred: Any) -> dict[str, float]:
    return {"mean": float(y_pred[:, 0].mean())}


class Keeps(torchmetrics.Metric):
    """A metric that keeps all outputs, as one of a ranking does."""

    higher_is_better = True
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx="cat")

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.kept.append(outputs.contiguous())

    def compute(self) -> torch.Tensor:
        parts = [self.kept] if isinstance(self.kept, torch.Tensor) else self.kept  # once they have been reduced
        return sum(part[:, 0].sum() for part in parts) / sum(map(len, parts))


def hold(backend: str, call: str, by_states: bool = False) -> dict[str, Any]:
    """Return by how many MiB a process grows in an evaluation, or prediction, that needs all outputs."""
    metric = Keeps() if by_states else mean_of
    trainer = make_trainer(backend, Wide(1, 1), rows(4), loss_fn=mean_loss, compute_metrics=metric, eval_batch_size=1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 1), torch.randn(SAMPLES, 1))
    getattr(trainer, call)(TensorDataset(*(tensor[:2] for tensor in data.tensors)))
    gc.collect()
    return {"grew": growth(lambda: getattr(trainer, call)(data))}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = Jobs()
    for backend, place in sorted(asked_for(request, "backend", "place")):
        jobs.add(f"starve-{backend}-{place}", backend, starve, place=place, folder=str(folder / f"{backend}-{place}"))
    for backend, width in sorted(asked_for(request, "backend", "width")):
        name = f"measure-{backend}-{width}"
        jobs.add(name, backend, measure, folder=str(folder / name), widths=[8, width])
    for backend in sorted(asked_for(request, "backend", test="test_start")):
        for width in (8, 3072):
            save_file(deep(width).state_dict(), folder / f"{width}.safetensors")
        jobs.add(f"start-{backend}", backend, start, folder=str(folder), widths=[8, 3072])
    for name, call in {"evaluate": "evaluate", "states": "evaluate", "predict": "predict"}.items():
        jobs.add(f"hold-{name}", "ddp", hold, call=call, by_states=name == "states")
    for backend, _ in sorted(asked_for(request, "backend", "words")):
        jobs.add(f"choose-{backend}", backend, choose, synchronized=backend == "ddp")
    jobs.add("evaluate_in_parts-ddp", "ddp", evaluate_in_parts)
    jobs.add("give_up-ddp", "ddp", give_up)  # the last, as it ends the launch
    return launch_all(jobs, folder)


@pytest.mark.parametrize(("backend", "place"), thinned(PLACES, PLACES[:2]))
def test_oom_on_one_rank_halves_micro_batches_on_all(results: Any, backend: str, place: str) -> None:
    ranks = results[f"starve-{backend}-{place}"]
    for number, rank in enumerate(ranks):
        assert "error" not in rank, rank
        assert max(rank["resumed"]["sizes"]) == 2
        tried = [8, 4] if number or place == "both" else [8, 4, 4]  # the other one succeeds
        assert rank["poor"]["sizes"] == [*tried, *[2] * 11]
        assert same(named(rank, "resumed/").values(), named(rank, "rich/").values())
        assert gap(rank["resumed"]["history"], rank["rich"]["history"]) < 1e-12
    weights = ("resumed/first", "resumed/norm.weight", "resumed/last")  # statistics are those of each process
    assert all(same(*(named(rank, name).values() for rank in ranks)) for name in weights)


@pytest.mark.parametrize(("backend", "words"), thinned(TOGETHER, [TOGETHER[0], TOGETHER[2]]))
def test_auto_size_is_an_error_where_ranks_forward_together(results: Any, backend: str, words: str) -> None:
    for rank in results[f"choose-{backend}"]:
        assert rank["error"] == "ConfigError" and words in rank["message"]


def test_oom_of_an_evaluation_on_one_rank_halves_its_batches(results: Any) -> None:
    for rank in results["evaluate_in_parts-ddp"]:
        assert "error" not in rank, rank
        assert gap(rank["2"], rank["1000"]) < 1e-12


def test_row_that_does_not_fit_on_one_rank_ends_both(results: Any) -> None:
    first, second = results["give_up-ddp"]
    assert second["error"] == "OutOfMemoryError"
    assert first["error"] == "DistributedError" and "CUDA out of memory" in first["message"]
    assert "one row at a time" in first["message"]


@needs_rss
@pytest.mark.parametrize(("backend", "width"), thinned([("fsdp", 1024), ("zero3", 1536)], [("fsdp", 1024)]))
def test_checkpoints_hold_few_tensors_at_a_time(results: Any, folder: Path, backend: str, width: int) -> None:
    """And a continued run holds its moments once."""
    everything = 3 * LAYERS[width] * tensor_size(width)
    for rank, result in enumerate(results[f"measure-{backend}-{width}"]):
        assert result["optimizers"] == 0
        for what in ("save", "load", "save_model"):
            assert result[what] < 5 * tensor_size(width) < everything / 3, f"{what}: {result[what]:.0f} on rank {rank}"
    content = Store(folder / f"measure-{backend}-{width}" / f"{width}").resolve("last")[1]
    size = sum(entry["size"] for name, entry in content["files"].items() if not name.startswith("rng"))
    assert size > everything * 2**20


@needs_rss
@pytest.mark.slow
@pytest.mark.parametrize("backend", PARTS)
def test_start_holds_full_model_only_where_it_was_made(results: Any, backend: str) -> None:
    matrix = tensor_size(3072)
    everything = LAYERS[3072] * matrix
    for rank, result in enumerate(results[f"start-{backend}"]):
        for source, grown in result.items():
            most = PARTS[backend] * everything / 2 + (3 if backend == "fsdp" else 5) * matrix
            if source != "file" and rank == 0:
                assert grown < most + everything
            else:
                assert grown < most < PARTS[backend] * everything / 2 + everything, f"{source}: {grown:.0f} MiB, {rank}"


# the main rank has what the ranks sent, and one array of it; half is rank 1's, which it packs and sends
@pytest.mark.parametrize(
    ("name", "most", "most_elsewhere"), [("evaluate", 2.8, 1.3), ("states", math.inf, 1.8), ("predict", 2.8, 1.8)]
)
def test_outputs_are_gathered_once(results: Any, name: str, most: float, most_elsewhere: float) -> None:
    """For a function they reach the main rank, for a metric with states its states do, for predictions each rank."""
    main, other = (rank["grew"] / OUTPUTS for rank in results[f"hold-{name}"])
    assert main < most and other < most_elsewhere
