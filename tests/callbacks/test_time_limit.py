"""The time limit of a job."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from recipes import fit, same, small_trainer, weights

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
    options = {"kind": trainer_class, "max_duration": "2h", "max_steps": 8}
    for last in (3, 6, 8):
        clock.now = MADE_AT - 10.0  # each job has its own process
        trainer = small_trainer(save_dir=tmp_path, callbacks=[TimeLimit("1m", margin=20)], save_steps=100, **options)
        trainer.train(resume_from="auto")
        assert trainer.progress.step == last
        assert trainer.stop_reason == ("max_steps" if last == 8 else "requested")
        assert (tmp_path / f"checkpoint-{last}" / "omnitrain.json").exists()
    assert same(weights(trainer.model), weights(fit(small_trainer(**options)).model))


def test_time_limit_leaves_time_for_the_longest_step(clock: SimpleNamespace) -> None:
    """A step with its evaluation that took a minute may come again."""
    stops, limit = list[int](), TimeLimit(200, margin="10s")
    parts = {"control": SimpleNamespace(stop=""), "progress": SimpleNamespace(step=1)}
    trainer: Any = SimpleNamespace(save_dir="run", stop=lambda: stops.append(1), **parts)
    limit.on_train_start(trainer)
    # after a minute; at 110, and 110 + 60 < 190; at 130
    for seconds, expected in ((50, []), (40, []), (10, [1])):
        clock.now += seconds
        limit.on_step_end(trainer)
        assert stops == expected


def test_time_limit_reads_the_end_of_the_slurm_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigError, match="reads SLURM_JOB_END_TIME, which is ''"):
        TimeLimit()
    for left, steps in ((60, 0), (36000, 8)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + left:.0f}")
        trainer = fit(small_trainer(callbacks=[TimeLimit()], save_dir=tmp_path, overwrite=True))
        assert trainer.progress.step == steps


def test_time_limit_without_a_folder_warns(caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(callbacks=[TimeLimit("1000h")], epochs=1).train()
    assert "TimeLimit will end the run without a checkpoint" in caplog.text
