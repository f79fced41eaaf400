"""`omnitrain verify`: damaged files, and data, code, packages and settings that are not those of the run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forging import spoil
from recipes import rows, small_trainer
from torch.utils.data import Dataset

from omnitrain.diagnostics.verify import RunVerification, describe_trainer, verify_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    make_trainer(folder).train()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of two checkpoints, at steps 4 and 8, that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "a")


def make_trainer(save_dir: Path | None = None, **options: Any) -> Any:
    return small_trainer(**{"save_dir": save_dir, "eval_dataset": rows(8), **options})


def verify_run(run: Path, make: Callable[[], Any] | None = None) -> RunVerification:
    return verify_folder(run, None if make is None else describe_trainer(make()))


def differing(result: RunVerification) -> dict[str, str]:
    return {f"{finding.kind} {finding.name}": finding.state for finding in result.findings if finding.state != "same"}


def change_record(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((run / "run.json").read_text())
    change(content["starts"][-1])
    (run / "run.json").write_text(json.dumps(content))


def test_verify_finds_nothing_changed(run: Path) -> None:
    result = verify_run(run, make_trainer)
    assert result.ok and not differing(result), str(result)
    assert str(verify_run(run)).endswith("Nothing that was compared has changed.")
    kinds = {finding.kind for finding in result.findings}
    assert kinds >= {"package", "data", "code", "setting"}
    assert json.loads(json.dumps(result.to_json()))["checkpoints"][1]["files"] == 5


def test_verify_names_every_damaged_file(run: Path, command: Any) -> None:
    weights, state = run / "checkpoint-4" / "model.safetensors", run / "checkpoint-8" / "optimizer/state.safetensors"
    spoil(weights, "flip", weights.stat().st_size - 1)
    state.write_bytes(state.read_bytes() + b"\0")
    (run / "checkpoint-8" / "rng/state.safetensors").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, _ = command("verify", run)
    assert code == 1 and "2 checkpoints, 10 files" in out and "2 damaged" in out
    assert "damaged  checkpoint-4: the content of 'model.safetensors' does not match" in out
    assert "damaged  checkpoint-8: 'optimizer/state.safetensors' has" in out
    assert "damaged  checkpoint-8: 'rng/state.safetensors' is missing" in out
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_verify_compares_recorded_packages(run: Path) -> None:
    change_record(run, lambda start: start["packages"].update(torch="1.0", long_gone="2"))
    result = verify_run(run)
    assert not result.ok and differing(result) == {"package torch": "changed", "package long_gone": "gone"}
    assert "was '1.0', is" in str(result) and any("data, code" in reason for reason in result.uncompared)
    (run / "run.json").write_text("{")
    result = verify_run(run, make_trainer)
    assert not result.ok and differing(result) == {"record run.json": "changed"}


def test_verify_compares_script(run: Path, tmp_path: Path) -> None:
    script, digest = tmp_path / "train.py", {"name": "train.py", "sha256": "0" * 64}
    script.write_text("1")
    change_record(run, lambda start: start.update(script=digest, command=["python", str(script)]))
    assert differing(verify_run(run)) == {f"script {script}": "changed"}
    script.unlink()
    assert differing(verify_run(run)) == {f"script {script}": "gone"}
    change_record(run, lambda start: start.update(command=["python", "train.py"]))  # in a folder that is not this one
    result = verify_run(run)
    assert result.ok and any("'train.py'" in reason for reason in result.uncompared)


@pytest.mark.parametrize(("options", "expected"), [
    ({"data": rows(15)}, {"data train_dataset": "changed", "setting samples_per_epoch": "changed"}),
    ({"eval_dataset": rows(9)}, {"data eval_dataset": "changed"}),
    ({"loss_fn": F.l1_loss}, {"code loss_fn": "changed", "setting loss_fn": "changed"}),
    ({"learning_rate": 0.2}, {"setting learning_rate": "changed"}),
    ({"epochs": 3}, {"setting epochs": "changed", "setting total_steps": "changed"}),
], ids=["data", "evaluation", "loss", "rate", "epochs"])  # fmt: skip
def test_verify_reports_what_makes_other_numbers(
    trained: Path, options: dict[str, Any], expected: dict[str, str]
) -> None:
    result = verify_run(trained, lambda: make_trainer(**options))
    changed = differing(result)
    assert not result.ok and changed.items() >= expected.items(), str(result)
    assert "train_dataset" in str(result) and changed.keys() <= expected.keys() | {"setting total_steps"}


def test_verify_compares_samples_and_missing_sets(trained: Path) -> None:
    data = rows(16)
    data.tensors[0][:, 2] += 1
    result = verify_run(trained, lambda: make_trainer(data=data, eval_dataset=None))
    assert differing(result).items() >= {"data train_dataset": "changed", "data eval_dataset": "gone"}.items()
    assert " of it is not the one that the run was trained with (its entry 0)" in str(result)


def test_verify_of_a_large_set_is_partial(tmp_path: Path) -> None:
    small_trainer(data=rows(200), save_dir=tmp_path).train()
    result = verify_run(tmp_path, lambda: small_trainer(data=rows(200)))
    assert result.ok and " of 200 samples compared)" in str(result)
    unchanged = RunVerification("run", [], [finding for finding in result.findings if finding.kind == "data"], [])
    assert str(unchanged).endswith("Nothing that was compared has changed.")


class Augmented(Dataset[Any]):
    """Rows that differ in each read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        noise = torch.from_numpy(np.random.default_rng().standard_normal(4))
        return noise, noise[:1]


def test_verify_reports_added_sets_and_unread_samples(tmp_path: Path) -> None:
    """Data that has nothing to compare is unknown, not the same."""
    small_trainer(data=Augmented(), save_dir=tmp_path).train()
    result = verify_run(tmp_path, lambda: small_trainer(data=Augmented(), eval_dataset=rows(8)))
    assert any(reason.startswith("train_dataset") for reason in result.uncompared), str(result)
    assert [name for name in differing(result) if name.startswith("data ")] == ["data eval_dataset"]


def test_verify_compares_run_without_checkpoints(run: Path) -> None:
    for folder in run.glob("checkpoint-*"):
        shutil.rmtree(folder)
    assert verify_run(run, make_trainer).ok
    assert differing(verify_run(run, lambda: make_trainer(data=rows(15))))["data train_dataset"] == "changed"


def test_verify_reads_remote_store(run: Path, command: Any) -> None:
    fs, file = fsspec.filesystem("memory"), "/verified/run/checkpoint-4/model.safetensors"
    fs.put(str(run), "/verified/run", recursive=True)
    try:
        code, out, _ = command("verify", "memory://verified/run")
        assert code == 0 and out.startswith("memory://verified/run: 2 checkpoints, 10 files")
        fs.pipe(file, b"0" * fs.size(file))
        code, out, _ = command("verify", "memory://verified/run/checkpoint-4", "--json")
        assert code == 1 and json.loads(out)["ok"] is False
    finally:
        fs.rm("/verified", recursive=True)


def test_verify_cannot_be_tried_elsewhere(tmp_path: Path, command: Any) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "nowhere", tmp_path / "file", tmp_path, "memory://nowhere"):
        code, _, error = command("verify", place)
        assert code == 2 and "save_dir" in error
