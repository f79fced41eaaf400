"""`omnitrain parity`: a script's numbers on each backend, what differs, and why."""

from __future__ import annotations

import json
import math
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import rows, t16
from torch.nn.functional import mse_loss

from omnitrain import ConfigError, Trainer
from omnitrain.cli.main import main
from omnitrain.diagnostics import parity
from omnitrain.diagnostics.parity import Recorder, compare_backends
from omnitrain.diagnostics.script import Outcome, Script

SCRIPT = """
import sys, torch
from torch import nn
from omnitrain import Trainer

kind = sys.argv[1] if len(sys.argv) > 1 else ""
if kind != "unseeded":
    torch.manual_seed(0)
if kind == "fails":
    raise RuntimeError("no data today")
layers = [nn.BatchNorm1d(8)] if kind == "statistics" else []
model = nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 1))
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
options = {"batch_size": 8, "loss_fn": nn.functional.mse_loss, "device": "cpu", "progress_bar": False}
if kind != "plain":
    Trainer(model, (x, x.sum(1, keepdim=True)), **options).train()
    raise SystemExit("what comes after the steps is not run")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


# --- with records that no process has written


STATISTICS = {"text": "BatchNorm1d 'bn' sees the batch", "effect": 0.02, "modules": ["bn"]}
COMPARES = {"text": "the loss (rank_loss) compares the samples of a batch", "effect": 0.02, "modules": []}


def record(losses: list[float], weight: float = 1.0, **content: Any) -> parity._Record:
    steps = [{"loss": loss, "grad_norm": 1.0, "samples": 16} for loss in losses]
    content = {
        "trainer": "Trainer", "precision": "fp32", "batch_size": 16, "processes": 1, "device": "cpu", "rows": steps,
        "reasons": [], "problem": "", **content,
    }  # fmt: skip
    return parity._Record(content, {"weight": torch.tensor([weight])})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, script: str) -> Any:
    """Compare a script whose runs have these records by title; the others have that of the script as it is."""

    def compare(records: dict[str, Any], ignores_changes: bool = False, **options: Any) -> parity.Parity:
        asked: dict[str, Any] = {}

        def find(self: Any, way: Any, probes: bool = False, frozen: Any = ()) -> Any:
            title, overrides = way.title, way.overrides
            asked[title] = overrides, (way.processes, way.options), frozen
            output = Path(script).with_name("output.log")
            output.write_text("Traceback\nomnitrain.core.errors.DataError: It cannot be split.\nWhere: step 1\n")
            run, base = records.get(title, records["as it is"]), records["as it is"]
            if run is not None and not ignores_changes:
                content = {"trainer": overrides.get("trainer", base.content["trainer"]), "processes": way.processes}
                content["batch_size"] = overrides.get("arguments", {}).get("batch_size", base.content["batch_size"])
                run = parity._Record({**run.content, **content}, run.weights)
            return run, Outcome(1, 0.0, output)

        monkeypatch.setattr(parity._Comparison, "_record", find)
        result = compare_backends(Script(script), **options)
        monkeypatch.setattr(parity, "asked", asked, raising=False)
        return result

    return compare


def test_equal_numbers_are_bits(fake: Any) -> None:
    result = fake({"as it is": record([3.0, 2.0])}, backends=["native", "hf", "ddp"])
    assert [(run.name, run.size) for run in result.runs] == [("again", "bits"), ("hf", "bits"), ("ddp x 2", "bits")]
    assert result.ok


def test_class_that_is_not_replaced_is_not_compared(fake: Any) -> None:
    """As a subclass in the script: it would be equal to itself."""
    base = record([3.0], trainer="Custom")
    with pytest.raises(ConfigError, match="hf: it ran with trainer 'Custom', not 'HFTrainer'"):
        fake({"as it is": base}, ignores_changes=True, backends=["hf"])
    with pytest.raises(ConfigError, match="ddp x 2: it ran with processes 1, not 2, batch_size 16, not 8"):
        fake({"as it is": base}, ignores_changes=True, backends=["ddp"])


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_different(fake: Any, weight: float) -> None:
    result = fake({"as it is": record([3.0]), "hf": record([3.0], weight)}, backends=["hf"])
    assert not result.ok and result.runs[1].size == "different"


def test_small_differences_are_rounding(fake: Any) -> None:
    result = fake({"as it is": record([3.0, 2.0]), "hf": record([3.0, 2.0001])}, backends=["hf"])
    (_, run) = result.runs
    assert run.size == "rounding" and run.losses == [0.0, pytest.approx(5e-5, rel=1e-3)] and result.ok


def test_difference_without_a_reason_is_unexpected(fake: Any) -> None:
    result = fake({"as it is": record([3.0, 2.0]), "ddp x 2": record([3.1, 2.0])}, backends=["ddp"])
    assert not result.ok and "UNEXPECTED" in str(result)
    assert str(result).endswith("No reason was found for the unexpected differences.")


def test_difference_with_a_reason_is_expected(fake: Any) -> None:
    base = record([3.0], reasons=[STATISTICS])
    result = fake({"as it is": base, "ddp x 2": record([3.1]), "ddp x 2 without": base}, backends=["ddp"])
    assert result.code == 0 and "Depends on the split of a step: BatchNorm1d 'bn' sees the batch." in str(result)
    assert result.runs[1].reason == "BatchNorm1d 'bn' sees the batch" and "Without that: ddp x 2 bits." in str(result)
    frozen = {title: entry[2] for title, entry in parity.asked.items()}  # type: ignore[attr-defined]
    assert frozen["ddp x 2 without"] == frozen["reference"] == ["bn"] and not frozen["ddp x 2"]


def test_difference_that_stays_without_its_reason_is_unexpected(fake: Any) -> None:
    """A backend that loses a part of the gradients is not excused by a BatchNorm."""
    records = {"as it is": record([3.0], reasons=[STATISTICS]), "ddp x 2": record([3.1])}
    result = fake(records | {"ddp x 2 without": record([3.05])}, backends=["ddp"])
    assert result.code == 1 and result.runs[1].remaining == "different" and "UNEXPECTED" in str(result)
    assert "ddp x 2: without its reasons losses or gradients still differ by 2e-02 of themselves" in str(result)


def test_difference_larger_than_its_reason_is_unexpected(fake: Any) -> None:
    records = {"as it is": record([3.0], reasons=[STATISTICS]), "ddp x 2": record([4.0])}
    result = fake(records, backends=["ddp"])
    assert result.code == 1 and "ddp x 2 without" not in parity.asked  # type: ignore[attr-defined]
    assert "ddp x 2: the first loss differs by 2e-01 of itself, and in trials of the reasons by 2e-02" in str(result)


def test_deterministic_kernels_are_supplied_on_a_gpu(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Two runs of the script differ without them."""
    losses = iter([3.0, 3.1, 3.0, 3.0, 3.0])

    def find(self: Any, way: Any, probes: bool = False, frozen: Any = ()) -> Any:
        trainer = way.overrides.get("trainer", "Trainer")
        return record([next(losses)], device="cuda:0", trainer=trainer), Outcome(0, 0.0, Path(script))

    monkeypatch.setattr(parity._Comparison, "_record", find)
    result = compare_backends(Script(script), backends=["accelerate"])
    assert result.code == 0 and result.is_deterministic_supplied and "deterministic=True" in str(result)


def test_reason_that_stays_is_tried_by_the_same_split(fake: Any) -> None:
    """A loss that compares samples has the same batches on one process in the same split."""
    records = {"as it is": record([3.0], reasons=[COMPARES]), "ddp x 2": record([3.1])}
    result = fake(records | {"reference 8": record([3.1])}, backends=["ddp"])
    assert result.code == 0 and result.runs[1].remaining == "bits"
    assert parity.asked["reference 8"][0]["arguments"]["batch_size"] == 8  # type: ignore[attr-defined]
    result = fake(records | {"reference 8": record([3.0])}, backends=["ddp"])
    assert result.code == 1 and result.runs[1].remaining == "different"
    result = fake({"as it is": records["as it is"], "8 x 2": record([3.1])}, backends=["split"])
    assert result.code == 0 and result.runs[2].remaining == "not run"


def test_reason_that_cannot_be_tried_proves_nothing(fake: Any) -> None:
    base = record([3.0], reasons=[STATISTICS])
    for title in ("ddp x 2 without", "reference"):
        result = fake({"as it is": base, "ddp x 2": record([3.1]), title: None}, backends=None if title else ["ddp"])
        assert result.ok and result.code == 2 and "Could not be tried: ddp x 2" in str(result)


def test_reason_of_splits_excuses_no_backend(fake: Any) -> None:
    """What depends on the split of a step is the same where the split is the same."""
    base = record([3.0], reasons=[STATISTICS])
    result = fake({"as it is": base, "hf": record([3.1]), "1 x 16": record([3.1])}, backends=["hf", "split"])
    assert [run.ok for run in result.runs] == [True, False, False, True]


def test_splits_are_of_one_step(fake: Any) -> None:
    fake({"as it is": record([3.0], batch_size=4)}, backends=["split", "fsdp", "zero3"])
    arguments = {title: overrides.get("arguments", {}) for title, (overrides, *_) in parity.asked.items()}  # type: ignore[attr-defined]
    assert arguments["1 x 16"]["batch_size"] == 16 and arguments["8 x 2"]["batch_size"] == 2
    assert {entry.get("global_batch_size") for entry in arguments.values()} == {None, 16}
    launches = {title: launch for title, (_, launch, _) in parity.asked.items()}  # type: ignore[attr-defined]
    assert launches["fsdp x 2"] == (2, ["--cpu", "--fsdp"]) and launches["zero3 x 2"] == (2, ["--cpu", "--zero", "3"])


def test_run_that_fails_says_why(fake: Any) -> None:
    result = fake({"as it is": record([3.0]), "hf": None})
    assert result.code == 0 and "hf: omnitrain.core.errors.DataError: It cannot be split." in str(result)
    with pytest.raises(ConfigError, match="Nothing could be compared: hf: "):
        fake({"as it is": record([3.0]), "hf": None}, backends=["hf"])


def test_named_backend_that_fails_proves_nothing(fake: Any) -> None:
    """One of those that are tried without a name need not run; one that the user has named has to."""
    result = fake({"as it is": record([3.0]), "hf": None}, backends=["hf", "ddp"])
    assert result.ok and result.code == result.to_json()["code"] == 2
    assert str(result).endswith("Could not be tried: hf.")
    result = fake({"as it is": record([3.0]), "hf": None, "ddp x 2": record([3.1])}, backends=["hf", "ddp"])
    assert result.code == 1


def test_run_of_other_steps_is_not_compared(fake: Any) -> None:
    result = fake({"as it is": record([3.0, 2.0]), "hf": record([3.0])}, backends=["hf", "split"])
    assert result.runs[1].size == "not run" and "hf: its steps have other samples: [16] instead of [16, 16]" in str(
        result
    )


def test_probe_that_fails_excuses_nothing(fake: Any) -> None:
    base = record([3.0], problem="KeyError: 'x'")
    result = fake({"as it is": base, "as it is, again": base, "1 x 16": record([3.1])}, backends=["split"])
    assert not result.ok and "could not be tried: KeyError: 'x'" in str(result)


def test_script_that_differs_by_itself_is_not_tried(fake: Any) -> None:
    with pytest.raises(ConfigError, match="not deterministic: run twice unchanged, its losses part at step 2"):
        fake({"as it is": record([3.0, 2.0]), "as it is, again": record([3.0, 2.1])})


def test_losses_that_are_never_finite_are_not_compared(fake: Any) -> None:
    with pytest.raises(ConfigError, match="has no finite loss in its first steps"):
        fake({"as it is": record([math.nan, math.nan])}, backends=["hf"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_result_is_strict_json_and_a_figure(fake: Any, value: float, tmp_path: Path) -> None:
    result = fake({"as it is": record([3.0]), "hf": record([value])}, backends=["hf"])
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["ok"] is False and content["runs"][1]["loss"] == "inf"
    assert result.plot(tmp_path / "parity.png").stat().st_size


def test_wrong_arguments_are_rejected(script: str, tmp_path: Path) -> None:
    for arguments, message in [
        ((Script(str(tmp_path / "none.py")),), "There is no script"),
        ((Script(script), 0), "`--steps 0` must be"),
        ((Script(script), 5, ["tpu"]), "`--on` must be one of 'native', "),
    ]:
        with pytest.raises(ConfigError, match=message):
            compare_backends(*arguments)


# --- the recorder


def test_recorder_ends_the_process_after_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    recorder = Recorder(str(tmp_path / "record"), steps=3, probes=True)
    options: dict[str, Any] = {"batch_size": 4, "gradient_accumulation_steps": 2, "epochs": 4, "progress_bar": False}
    trainer = Trainer(t16(), rows(16), loss_fn=mse_loss, device="cpu", callbacks=[recorder], **options)
    with pytest.raises(Ended):
        trainer.train()
    content = json.loads((tmp_path / "record/record.json").read_text())
    assert [row["samples"] for row in content["rows"]] == [8, 8, 8] and content["reasons"] == []
    assert content["rows"][2]["loss"] == pytest.approx(trainer._step.loss.mean())
    assert (tmp_path / "record/weights.safetensors").stat().st_size


# --- real processes


@pytest.mark.slow
@pytest.mark.processes
def test_parity_names_the_module_that_differs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sample has no statistics, so that one of the splits cannot run."""
    assert main(["parity", "--steps", "4", "--on", "hf,ddp,split", "--json", script, "statistics"]) == 2
    result = json.loads(capsys.readouterr().out)
    sizes = {run["name"]: run["size"] for run in result["runs"]}
    assert sizes == {"again": "bits", "hf": "bits", "ddp x 2": "different", "1 x 8": "bits", "8 x 1": "not run"}
    assert result["reasons"] == ["BatchNorm1d '1' sees the batch"] and result["ok"]
    assert {run["name"]: run["remaining"] for run in result["runs"]}["ddp x 2"] in ("bits", "rounding")


@pytest.mark.slow
@pytest.mark.processes
def test_parity_holds_on_every_backend(script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "parity.png"
    arguments = ["parity", "--steps", "4", "--timeout", "300", "--picture", str(picture), script]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "different" not in output and "not run" not in output and picture.exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unseeded", "is not deterministic: run twice unchanged"),
        ("fails", "failed with exit code 1 by itself: RuntimeError: no data today"),
        ("plain", "ended without a step of a trainer of omnitrain"),
    ],
)
def test_script_that_cannot_be_tried(kind: str, message: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--steps", "2", "--on", "split", script, kind]) == 2
    assert message in capsys.readouterr().err
