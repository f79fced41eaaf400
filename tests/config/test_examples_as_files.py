"""The configuration files of `examples/` start the runs of the scripts beside them."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from recipes import fit

from omnitrain.cli.main import main
from omnitrain.config.configuration import Config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be where the files are to be started, with no other folder `examples` in Python's path."""
    monkeypatch.chdir(ROOT)
    foreign = [path for path in sys.path if Path(path).resolve() != ROOT and (Path(path) / "examples").is_dir()]
    monkeypatch.setattr(sys, "path", [str(ROOT), *(path for path in sys.path if path not in foreign)])
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]


def run_of(name: str, **overrides: Any) -> Any:
    """Return a trainer that has run what a file describes, with some of the trainer's arguments changed."""
    changes = {f"trainer.{key}": value for key, value in overrides.items()}
    config = Config.read(f"examples/{name}.yaml", overrides=changes)
    return fit(config.make_trainer(), **config.tree.values.get("train", {}))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "examples").glob("*.yaml")))
def test_each_file_passes_check_and_has_a_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "examples" / f"{name}.py").is_file()
    lines = Path(f"examples/{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# .*omnitrain .*train examples/{name}\.yaml", lines[0])
    option = re.search(r" --(trainer|vars)[\w.]* .*", lines[1])
    assert lines[1].startswith("# ") and option is not None
    words = option[0].split()
    for options in ([], words):
        assert main(["config", "check", f"examples/{name}.yaml", *options]) == 0
        assert "Nothing is wrong." in capsys.readouterr().out


def test_native_digits_equals_script(tmp_path: Path) -> None:
    metrics = run_of("native_digits", epochs=1, save_dir=str(tmp_path / "file")).metrics
    expected = importlib.import_module("examples.native_digits").main(epochs=1, out=tmp_path / "script")
    assert metrics["valid"] == expected["valid"] and len(metrics["valid"]) == 1
    losses = [[row["loss"] for row in history["train_metrics_history"]] for history in (metrics, expected)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["AccelerateTrainer", "HFTrainer"])
def test_three_trainers_equal_script(name: str) -> None:
    pytest.importorskip("transformers")
    example = importlib.import_module("examples.three_trainers")
    config = Config.read("examples/three_trainers.yaml", overrides=[("trainer", name), ("trainer.epochs", "1")])
    trainer = fit(config.make_trainer())
    assert type(trainer).__name__ == name
    assert example.distance(trainer, example.train(type(trainer), 1)) == 0


@pytest.mark.slow
@pytest.mark.processes
def test_multi_gpu_trains_on_two_processes(tmp_path: Path) -> None:
    words = ["--trainer.epochs", "1", "--trainer.save_dir", str(tmp_path / "run"), "--trust"]
    done = programs.run(
        sys.executable, "-m", "omnitrain", "launch", "-n", "2", "--cpu", "train", "examples/multi_gpu.yaml", *words,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = run_of("multi_gpu", epochs=1, save_dir=str(tmp_path / "run"))  # one process: the run has ended already
    alone = run_of("multi_gpu", epochs=1, save_dir=str(tmp_path / "alone"))
    assert again.progress.step == alone.progress.step == 19
    torch.testing.assert_close(dict(again.get_model().state_dict()), dict(alone.get_model().state_dict()))
