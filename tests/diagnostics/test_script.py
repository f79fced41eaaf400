"""Scripts in processes of their own: overrides, output, time limits and the end of everything that they start."""

import json
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from forking import ON_CPU, Case, play
from programs import LIMIT, fork
from recipes import fit, rows, same, small_trainer, weights
from torch import nn
from transformers import TrainingArguments

import omnitrain
from omnitrain import Callback, ConfigError, JsonlLogger, Trainer
from omnitrain.config import overrides
from omnitrain.diagnostics import script as script_module
from omnitrain.diagnostics.drill import drill
from omnitrain.diagnostics.script import Outcome, Script


class Noted(Callback):
    """An extra callback by its class path."""

    steps: ClassVar[list[int]] = []

    def __init__(self, start: int) -> None:
        self.start = start

    def on_step_end(self, trainer: Any) -> None:
        self.steps.append(self.start + trainer.progress.step)


@pytest.fixture
def override(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set the overrides of this process, and count its runs from 1."""

    def set_variable(**values: Any) -> Path:
        monkeypatch.setattr(overrides, "_folders", {})
        monkeypatch.setattr(overrides, "_count", 0)
        values = {"save_dir": str(tmp_path / "drill"), "resume": True} | values
        monkeypatch.setenv(overrides.VARIABLE, json.dumps(values))
        return Path(values["save_dir"])

    return set_variable


def build(**options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    return small_trainer(model=model, data=rows(16), **{"epochs": 1, "learning_rate": 1e-3, **options})


def arguments(folder: Path, **options: Any) -> Any:
    return TrainingArguments(str(folder / "own"), use_cpu=True, report_to=[], disable_tqdm=True, **options)


def build_hf(args: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return omnitrain.HFTrainer(nn.Linear(4, 1, dtype=dtype), args, rows(16, dtype), loss_fn=nn.functional.mse_loss)


def test_overrides_redirect_each_run(override: Any, tmp_path: Path) -> None:
    """A trainer without a folder gets one; a second one with the same folder stays in it, unless it overwrites."""
    root, folder = override(), tmp_path / "own"
    trainers = [build(), build(save_dir=folder), build(save_dir=folder)]
    for trainer in trainers[:2]:
        trainer.train()
        trainer.save_model(folder / "model")
    trainers[0].save_model(tmp_path / "elsewhere")
    trainers.append(build(save_dir=folder, overwrite=True))
    assert [trainer.save_dir for trainer in trainers] == [root / f"run-{number}" for number in (1, 2, 2, 4)]
    assert not folder.exists() and not (tmp_path / "elsewhere").exists()
    assert (root / "run-2" / "model" / "model.safetensors").is_file()
    assert len(list((root / "models").iterdir())) == 1


@pytest.mark.parametrize("place", ["callbacks", "loggers"])
def test_overrides_redirect_row_files(override: Any, tmp_path: Path, place: str) -> None:
    """A log whose path is absolute keeps the rows that it has."""
    root, path = override(), tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    build(**{place: [JsonlLogger(str(path))]}).train()
    assert path.read_text() == "{}\n" and (root / "run-1" / "rows.jsonl").stat().st_size


def test_overrides_resume_and_change_arguments(override: Any) -> None:
    Noted.steps.clear()
    callbacks = [{"class_path": f"{Noted.__module__}.Noted", "init_args": {"start": 100}}]
    for _ in range(2):  # the second time, nothing is left to do
        override(arguments={"max_steps": 3, "save_steps": 2}, callbacks=callbacks)
        build(epochs=None).train()
        assert Noted.steps == [101, 102, 103]


def test_overrides_separate_calls_of_train(override: Any) -> None:
    ends = []
    for _ in range(2):
        root = override()
        trainer = build(learning_rate=0.1)
        trainer.train()
        trainer.train()
        trainer.train(more=1)
        assert trainer.progress.step == 8
        ends.append(weights(trainer.model))
        assert sorted(path.name for path in root.iterdir()) == ["run-1", "run-1.2", "run-1.3"]
    assert same(*ends)


def test_overrides_keep_a_checkpoint_by_path(override: Any, tmp_path: Path) -> None:
    override()
    fit(build(save_dir=tmp_path / "own", save_steps=1))
    other = fit(build(save_dir=tmp_path / "own", save_steps=1), resume_from=tmp_path / "own" / "checkpoint-2")
    assert other.lifecycle.resumed_from.name == "checkpoint-2"


def test_overrides_replace_the_class(override: Any, tmp_path: Path) -> None:
    """A script of `HFTrainer` with transformers' arguments has the same bits when another trainer runs it."""
    override(trainer="AccelerateTrainer")
    assert type(build()) is omnitrain.AccelerateTrainer
    args = arguments(
        tmp_path, learning_rate=0.1, lr_scheduler_type="cosine", warmup_steps=0.5, adam_beta1=0.8, weight_decay=0.1,
        per_device_train_batch_size=4, max_steps=6,
    )  # fmt: skip
    ends = []
    for name in ("HFTrainer", "Trainer", "AccelerateTrainer"):
        override(trainer=name, save_dir=str(tmp_path / name))
        trainer = build_hf(args, torch.float32)
        trainer.train(resume_from_checkpoint=None)
        assert type(trainer).__name__ == name and trainer.progress.step == 6
        ends.append(weights(trainer.model))
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])


def test_overrides_change_training_args(override: Any, tmp_path: Path) -> None:
    override(arguments={"global_batch_size": 8, "batch_size": 2, "gradient_accumulation_steps": 1})
    trainer = build_hf(arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2))
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (2, 4)


def test_overrides_redirect_training_args(override: Any, tmp_path: Path) -> None:
    """In place, as scripts read them afterwards; no tracker and no hub."""
    folder, args = override() / "run-1", arguments(tmp_path, save_strategy="no", num_train_epochs=1)
    trainer = fit(build_hf(args))
    assert args.output_dir == str(folder) and trainer.save_dir == folder
    assert list(folder.glob("checkpoint-*")) and not (tmp_path / "own").exists()


def run_script(folder: Path, code: str, **options: Any) -> Any:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(code))
    return Script(str(path)).run(folder / "out", {}, **options)


@pytest.mark.processes
def test_script_output_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "MAX_OUTPUT_BYTES", 1 << 16)
    outcome = run_script(tmp_path, "for number in range(100_000): print(number)\nraise SystemExit(3)")
    assert outcome.code == 3 and not outcome.timed_out
    assert outcome.last_lines(2) == "99998\n99999"
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 1 << 18


def is_gone(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_script_ends_with_all_its_processes(tmp_path: Path) -> None:
    """Killed, with a child in a session of its own that holds the pipe open; or with the process that runs it."""
    file = tmp_path / "pid"
    code = f"""
        import os, pathlib, time
        if not os.fork():
            os.setsid()
            pathlib.Path({str(file)!r}).write_text(f"{{os.getpid()}} ")
        time.sleep(600)
    """

    def is_running() -> bool:
        return file.exists() and file.read_text().endswith(" ")

    def run() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return run_script(tmp_path, code).code

    outcome = run_script(tmp_path, code, is_stuck=is_running)
    assert outcome.code == 137 and not outcome.timed_out and is_gone(file.read_text().strip())
    file.unlink()
    parent, end = fork(run), time.monotonic() + LIMIT
    while not is_running() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(parent, signal.SIGTERM)
    os.waitpid(parent, 0)
    assert is_gone(file.read_text().strip())


@pytest.mark.slow
@pytest.mark.processes
def test_script_on_two_processes_is_drilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def run_forked(script: Script, folder: Path, values: Any, *, name: str = "output", **_: Any) -> Outcome:
        options = dict(zip(("fault", "folder"), script.arguments, strict=True))
        environment = {**ON_CPU, overrides.VARIABLE: script.complete(values)}
        case = Case(name, "diagnostics.planted:main", options, environment=environment)
        ranks = play([case], folder / "cases")[name]
        output = folder / f"{name}.log"
        output.write_text("".join(rank.output for rank in ranks))
        return Outcome(max(abs(rank.code or 0) for rank in ranks), 1.0, output)

    monkeypatch.setattr(Script, "run", run_forked)
    path = Path(__file__).with_name("planted.py")
    result = drill(Script(str(path), ["two processes", str(tmp_path)], 2), 2, ["kill"], seed=1)
    assert result.ok, str(result)
    assert [start.interruption["ranks"] for start in result.starts if start.interruption].count(None) == 1
    assert all(start.resumed_at is not None for start in result.starts[:-1])


def test_script_failure_is_one_line_if_it_is_ours(tmp_path: Path) -> None:
    """An error of omnitrain says all; one of the script's own needs its traceback."""
    with pytest.raises(ConfigError, match="There is no script"):
        Script(str(tmp_path)).check()
    path = tmp_path / "output.log"
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3\n'
    ours = "omnitrain.core.errors.ConfigError: `epochs` must be positive."
    for text, reason in ((f"{trace}{ours}\n", f"\n{ours}"), (f"{trace}KeyError: 'x'\n", f"\n{trace}KeyError: 'x'")):
        path.write_text(text)
        assert Outcome(1, 1.0, path).reason() == reason
