"""Schedules in time on two ranks: the rates of one process, over a resume too, and one clock for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from backends import DTYPES, PROCESSES, Job, asked_for, bound, dtype_of, gap, launch_all, make_trainer, sound
from marks import thinned
from recipes import Sentences, StopAt, Tagger, Trace

from omnitrain import Callback, LinearScheduler, WSDScheduler
from omnitrain.checkpoint.tensors import whole

HERE = "test_schedules_in_time"


def train(
    backend: str, dtype: str = "float32", folder: str | None = None, stop: int = 0, growing: bool = False
) -> dict[str, Any]:
    """Train over 200 tokens in steps of four sequences, or of more and more; stop after a step, or resume there."""
    trace = Trace()
    trace.asks_alone = bool(stop)  # without such a callback, the next step is read before this one is counted
    trainer = make_trainer(
        backend, Tagger(dtype=DTYPES[dtype]), Sentences(20), batch_size=4 // PROCESSES[backend], max_duration="200tok",
        global_batch_size={0: 4, "0.2dur": 8, "0.6dur": 12} if growing else None, learning_rate=0.05, save_dir=folder,
        callbacks=[trace, *([StopAt(stop)] if stop else [])],
        lr_scheduler=LinearScheduler(warmup=2, min_lr=0.01) * WSDScheduler("0.4dur"), save_steps=folder and 1,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    rates = [row["learning_rate"] for row in trace.logs]
    tensors = {name: whole(tensor) for name, tensor in sorted(trainer.backend.model_tensors().items())}
    return {"rates": rates, "step": trainer.progress.step, "tensors": tensors}


class Clock(Callback):
    """Moves the clock of this rank by hours in each step, and that of the second rank twice as fast."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_start(self, trainer: Any) -> None:
        trainer.lifecycle.progress.seconds += 1e5 * (1 + trainer.rank)

    def on_step_end(self, trainer: Any) -> None:
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


def train_by_clock(backend: str) -> dict[str, Any]:
    """Train for 10 steps by the clock of the main rank, and for 5 by the other; note the rates that steps leave."""
    clock = Clock()
    trainer = make_trainer(
        backend, Tagger(dtype=DTYPES["float32"]), Sentences(20), batch_size=2, max_duration="1000000s",
        learning_rate=0.05, lr_scheduler="linear", callbacks=[clock], max_grad_norm=None,
    )  # fmt: skip
    trainer.train()
    return {"rates": clock.rates}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("schedules")
    jobs = [Job("clock", "ddp", f"{HERE}:train_by_clock", {})]
    for backend, growing in sorted(asked_for(request, "backend", "growing")):
        name, options = f"{backend}-{growing}", {"dtype": dtype_of(backend), "growing": growing}
        saved = {**options, "folder": str(folder / name)}
        runs = {"straight": options, "cut": {**saved, "stop": 3}, "resumed": saved}
        jobs += [Job(f"{name}-{run}", backend, f"{HERE}:train", options) for run, options in runs.items()]
    return sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize(
    ("backend", "growing"),
    thinned(
        [*((backend, False) for backend in ("ddp", "fsdp", "zero3", "hf2")), ("ddp", True), ("hf2", True)],
        [("ddp", False), ("ddp", True), ("hf2", False)],
    ),
)
def test_rates_match_one_process_over_a_resume(results: Any, backend: str, growing: bool) -> None:
    expected = train("native", dtype_of(backend), growing=growing)
    assert len(set(expected["rates"])) > (3 if growing else 5)
    runs = [results[f"{backend}-{growing}-{name}"] for name in ("straight", "cut", "resumed")]
    for straight, cut, resumed in zip(*runs, strict=True):
        assert straight["rates"] == expected["rates"] == cut["rates"] + resumed["rates"]
        assert gap(straight["tensors"], expected["tensors"]) <= bound(backend)
        assert gap(resumed["tensors"], straight["tensors"]) == 0


def test_ranks_with_different_clocks_step_with_one_rate(results: Any) -> None:
    """That of the main rank's clock; the run ends when the first of the clocks is there."""
    first, second = (rank["rates"] for rank in results["clock"])
    assert first == second == pytest.approx([0.045, 0.04, 0.035, 0.03, 0.025], abs=5e-4)
