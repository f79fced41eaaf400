"""Schedules in time on two ranks: the rates of one process, over a resume too, and one clock for all ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import DTYPES, PROCESSES, Job, bound, dtype_of, gap, launch_all, make_trainer, sound  # noqa: E402
from recipes import Sentences, StopAt, Tagger, Trace  # noqa: E402

from omnitrain import Callback, LinearScheduler, WSDScheduler  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_schedules_in_time"
KINDS = ("ddp", "fsdp", "zero3", "hf2")
GROWING = ("ddp", "hf2")


def train(
    backend: str, dtype: str = "float32", folder: str | None = None, stop: int = 0, grows: bool = False
) -> dict[str, Any]:
    """Train over 200 tokens in steps of four sequences, or of more and more; stop after a step, or resume there."""
    trace = Trace()
    trace.asks_alone = bool(stop)  # if nobody does, the next step is read before this one is counted
    sizes: Any = {0: 4, "0.2dur": 8, "0.6dur": 12} if grows else None
    trainer = make_trainer(
        backend, Tagger(dtype=DTYPES[dtype]), Sentences(20), batch_size=4 // PROCESSES[backend], max_duration="200tok",
        global_batch_size=sizes, learning_rate=0.05, save_dir=folder,
        callbacks=[trace, *([StopAt(stop)] if stop else [])],
        lr_scheduler=LinearScheduler(warmup=2, min_lr=0.01) * WSDScheduler("0.4dur"), save_steps=folder and 1,
    )  # fmt: skip
    trainer.train(resume_from=folder and "auto")
    rates = [row["learning_rate"] for row in trace.logs]
    tensors = {name: whole(one) for name, one in sorted(trainer.backend.model_tensors().items())}
    return {"rates": rates, "step": trainer.progress.step, "tensors": tensors}


class Late(Callback):
    """Makes one rank slower than the other, whose clock would then be another."""

    def on_train_start(self, trainer: Any) -> None:
        time.sleep(0.3 * trainer.rank)
        trainer.lifecycle.progress.seconds += 0.2 * trainer.rank


def by_clock(backend: str) -> dict[str, Any]:
    """Train over a second, and note the rates that this rank steps with."""
    seen: list[float] = []

    class Look(Callback):
        def on_step_end(self, trainer: Any) -> None:
            seen.append(trainer.optimizer.param_groups[0]["lr"])

    trainer = make_trainer(
        backend, Tagger(dtype=DTYPES["float32"]), Sentences(20), batch_size=2, max_duration="2s", learning_rate=0.05,
        lr_scheduler="linear", callbacks=[Late(), Look()], max_grad_norm=None,
    )  # fmt: skip
    trainer.train()
    return {"rates": seen, "left": trainer.optimizer.param_groups[0]["lr"]}


RUNS = [*((backend, False) for backend in KINDS), *((backend, True) for backend in GROWING)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("schedules")
    jobs = [Job("clock", "ddp", f"{HERE}:by_clock", {})]
    for backend, grows in RUNS:
        given = {"dtype": dtype_of(backend), "grows": grows}
        cut, name = {**given, "folder": str(folder / f"{backend}-{grows}")}, f"{backend}-{grows}"
        jobs += [
            Job(f"{name}-straight", backend, f"{HERE}:train", given),
            Job(f"{name}-cut", backend, f"{HERE}:train", {**cut, "stop": 3}),
            Job(f"{name}-resumed", backend, f"{HERE}:train", cut),
        ]
    return sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize(("backend", "grows"), RUNS)
def test_every_backend_has_the_rates_of_one_process_over_a_resume_too(results: Any, backend: str, grows: bool) -> None:
    expected = train("native", dtype_of(backend), grows=grows)
    assert len(set(expected["rates"])) > (3 if grows else 5)
    named = [results[f"{backend}-{grows}-{name}"] for name in ("straight", "cut", "resumed")]
    for straight, cut, resumed in zip(*named, strict=True):
        assert straight["rates"] == expected["rates"] == cut["rates"] + resumed["rates"]
        assert gap(straight["tensors"], expected["tensors"]) <= bound(backend)
        assert gap(resumed["tensors"], straight["tensors"]) == 0


def test_ranks_with_other_clocks_step_with_one_rate(results: Any) -> None:
    first, second = results["clock"]
    assert first["rates"] == second["rates"] and len(first["rates"]) > 1
    assert (
        first["rates"] == sorted(first["rates"], reverse=True) and first["left"] < 0.02
    )  # the first clock ends the run
