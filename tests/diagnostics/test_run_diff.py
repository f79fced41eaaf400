"""`omnitrain diff`: the step at which two runs part, what parted first, and what differs in their records."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recipes import callback, rows, small_trainer

from omnitrain import Callback, ConfigError, Trace
from omnitrain.data.sampling import EpochSampler
from omnitrain.diagnostics.run_diff import diff_runs


def train(folder: Path, *callbacks: Callback, has_trace: bool = True, **options: Any) -> Path:
    watching = [*callbacks, *([Trace()] if has_trace else [])]
    small_trainer(save_dir=folder, log_steps=1, eval_dataset=rows(8), callbacks=watching, **options).train()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "a")


def disturb(trainer: Any) -> None:
    if trainer.progress.step == 5:
        trainer.model[0].weight.grad[0] += 0.1


def test_diff_finds_equal_runs(run: Path, tmp_path: Path) -> None:
    result = diff_runs(run, train(tmp_path / "b"))
    assert result.ok and result.equal_to == 8 and not result.record, str(result)
    assert json.loads(json.dumps(result.to_json()))["source"] == "trace.jsonl"


def test_diff_names_what_parted_first(run: Path, tmp_path: Path, command: Any) -> None:
    other = train(tmp_path / "b", callback(on_before_clip=disturb), seed=42)
    code, out, _ = command("diff", run, other)
    line = "step 6: same samples, same batch, same weights, same random state, same loss, other gradients (and update)"
    assert code == 1 and "equal to step 5" in out and line in out
    picture = tmp_path / "diff.png"
    code, out, _ = command("diff", run, other, "--json", "--picture", picture)
    assert code == 1 and picture.stat().st_size and json.loads(out)["differs"] == ["gradients", "update"]


def test_diff_names_changed_data_and_settings(run: Path, tmp_path: Path) -> None:
    data = rows(16)
    data.tensors[0][int(EpochSampler(16, 4).order(0)[9]), 0] = 3.0  # of the third step
    result = diff_runs(run, train(tmp_path / "b", data=data, weight_decay=0.0))
    assert (result.equal_to, result.step, result.differs[0], result.same) == (2, 3, "batch", ["samples"])
    assert ": they part at once\nstep 1: other samples (" in str(diff_runs(run, train(tmp_path / "c", seed=1)))
    assert set(result.values) == {"mean_loss"} and any(name.startswith("data.train") for name in result.record)


def test_diff_takes_rows_of_logs_without_trace(run: Path, tmp_path: Path) -> None:
    result = diff_runs(run, train(tmp_path / "b", has_trace=False))
    assert result.ok and result.equal_to == 8 and result.source == "metrics.jsonl"
    assert "Pass callbacks=[Trace()]" in str(result)
    result = diff_runs(run, train(tmp_path / "c", callback(on_before_clip=disturb), has_trace=False))
    assert (result.step, result.differs[0]) in [(6, "grad_norm"), (7, "loss")]


def test_diff_compares_common_steps(run: Path, tmp_path: Path) -> None:
    result = diff_runs(run, train(tmp_path / "b", epochs=3))
    assert result.ok and result.equal_to == 8 and "the last step is 8 in 'a' and 12 in 'b'" in str(result)
    short = shutil.copytree(run, tmp_path / "c")
    lines = (short / "trace.jsonl").read_text().splitlines(keepends=True)
    (short / "trace.jsonl").write_text("".join(["no row\n", lines[2], lines[3][:50]]))  # killed, and damaged
    assert diff_runs(run, short).equal_to == 3
    (short / "trace.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step in common"):
        diff_runs(run, short)


def test_diff_ignores_random_state_of_other_processes(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "b")
    content = json.loads((other / "run.json").read_text())
    content["starts"][-1]["processes"] = 2
    (other / "run.json").write_text(json.dumps(content))
    lines = [json.loads(line) | {"random": "0" * 32} for line in (other / "trace.jsonl").read_text().splitlines()]
    (other / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = diff_runs(run, other)
    assert result.ok and "1 and 2 processes" in str(result) and result.record == {"processes": (1, 2)}


def test_diff_cannot_be_tried_elsewhere(run: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty"):
        code, _, error = command("diff", run, tmp_path / place)
        assert code == 2 and "save_dir" in error
