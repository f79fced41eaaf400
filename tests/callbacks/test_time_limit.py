"""The time limit of a job."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from recipes import same, small_trainer, weights

from omnitrain import ConfigError, TimeLimit
from omnitrain.callbacks import time_limit

MADE_AT = psutil.Process().create_time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that begins with the process, and on which each step takes 10 seconds."""
    clock = SimpleNamespace(now=MADE_AT - 10.0)

    def read() -> float:
        clock.now += 10.0
        return clock.now

    monkeypatch.setattr(time_limit, "time", SimpleNamespace(time=read))
    return clock


def test_time_limit_ends_each_job_and_not_the_run(trainer_class: Any, tmp_path: Path, clock: SimpleNamespace) -> None:
    """Of 8 steps, a job of a minute makes those that end 20 seconds before; each resumes the former one."""

    def job(**options: Any) -> Any:
        clock.now = MADE_AT - 10.0  # the next job has its own process
        trainer = small_trainer(kind=trainer_class, max_duration="2h", **options)
        trainer.train(resume_from="auto" if "save_dir" in options else None)
        return trainer

    for last in (3, 6, 8):
        trainer = job(save_dir=tmp_path, save_steps=100, callbacks=[TimeLimit("1m", margin=20)], max_steps=8)
        assert trainer.progress.step == last
        assert trainer.stop_reason == ("max_steps" if last == 8 else "requested")
        assert (tmp_path / f"checkpoint-{last}" / "omnitrain.json").exists()
    assert same(weights(trainer.model), weights(job(max_steps=8).model))


def test_time_limit_leaves_time_for_the_longest_step(clock: SimpleNamespace) -> None:
    """A step with its evaluation that took a minute may come again."""
    trainer = SimpleNamespace(
        save_dir="run", control=SimpleNamespace(stop=""), progress=SimpleNamespace(step=1), stop=lambda: stops.append(1)
    )
    stops, limit = list[int](), TimeLimit(200, margin="10s")
    limit.on_train_start(trainer)
    clock.now += 50
    limit.on_step_end(trainer)  # at 60, after a minute
    clock.now += 40
    limit.on_step_end(trainer)  # at 110, and 110 + 60 < 190
    assert not stops
    clock.now += 10
    limit.on_step_end(trainer)  # at 130
    assert stops == [1]


def test_time_limit_reads_the_end_of_the_slurm_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigError, match="reads SLURM_JOB_END_TIME, which is ''"):
        TimeLimit()
    for left, steps in ((60, 0), (36000, 8)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + left:.0f}")
        trainer = small_trainer(callbacks=[TimeLimit()], save_dir=tmp_path, overwrite=True)
        trainer.train()
        assert trainer.progress.step == steps


@pytest.mark.parametrize(("options", "message"), [
    ({"limit": "3ep"}, "`limit` must be a time"), ({"limit": 0}, "`limit`"), ({"limit": "1h", "margin": "x"}, "margin"),
    ({"limit": "2m"}, "`limit='2m'` is not longer than `margin='2m'`"),
])  # fmt: skip
def test_time_limit_rejects_wrong_times(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TimeLimit(**options)


def test_time_limit_without_a_folder_warns(caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(callbacks=[TimeLimit("1000h")], epochs=1).train()
    assert "TimeLimit will end the run without a checkpoint" in caplog.text
