"""`omnitrain parity`: a script's numbers on each backend, what differs, and why."""

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from recipes import small_trainer
from resuming import Killed

from omnitrain import ConfigError
from omnitrain.diagnostics import parity
from omnitrain.diagnostics.parity import Recorder, compare_backends
from omnitrain.diagnostics.script import Outcome, Script

PLANTED = str(Path(__file__).with_name("planted.py"))
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
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Compare a script whose runs have these records by title; the others have that of the script as it is."""

    def compare(records: dict[str, Any], ignores_changes: bool = False, **options: Any) -> parity.Parity:
        compare.calls = calls = dict[str, Any]()

        def find(self: Any, way: Any, probes: bool = False, frozen: Any = ()) -> Any:
            title, overrides = way.title, way.overrides
            calls[title] = overrides, (way.processes, way.options), frozen
            output = tmp_path / "output.log"
            output.write_text("Traceback\nomnitrain.core.errors.DataError: It cannot be split.\nWhere: step 1\n")
            run, base = records.get(title, records["as it is"]), records["as it is"]
            if run is not None and not ignores_changes:
                content = {"trainer": overrides.get("trainer", base.content["trainer"]), "processes": way.processes}
                content["batch_size"] = overrides.get("arguments", {}).get("batch_size", base.content["batch_size"])
                run = parity._Record({**run.content, **content}, run.weights)
            return run, Outcome(1, 0.0, output)

        monkeypatch.setattr(parity._Comparison, "_record", find)
        return compare_backends(Script(PLANTED), **options)

    return compare


def test_equal_numbers_are_bits(fake: Any) -> None:
    result = fake({"as it is": record([3.0, 2.0])}, backends=["native", "hf", "ddp"])
    assert [(run.name, run.size) for run in result.runs] == [("again", "bits"), ("hf", "bits"), ("ddp x 2", "bits")]
    assert result.ok
    result = fake({"as it is": record([3.0, 2.0]), "hf": record([3.0, 2.0001])}, backends=["hf"])
    assert (result.ok, result.runs[1].size) == (True, "rounding")
    assert result.runs[1].losses == [0.0, pytest.approx(5e-5, rel=1e-3)]


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_different(fake: Any, weight: float) -> None:
    result = fake({"as it is": record([3.0]), "hf": record([3.0], weight)}, backends=["hf"])
    assert not result.ok and result.runs[1].size == "different"


def test_difference_with_a_reason_is_expected(fake: Any) -> None:
    base = record([3.0], reasons=[STATISTICS])
    result = fake({"as it is": base, "ddp x 2": record([3.1]), "ddp x 2 without": base}, backends=["ddp"])
    assert result.code == 0 and "Depends on the split of a step: BatchNorm1d 'bn' sees the batch." in str(result)
    assert result.runs[1].reason == "BatchNorm1d 'bn' sees the batch" and "Without that: ddp x 2 bits." in str(result)
    frozen = {title: entry[2] for title, entry in fake.calls.items()}
    assert frozen["ddp x 2 without"] == frozen["reference"] == ["bn"] and not frozen["ddp x 2"]


@pytest.mark.parametrize(("reasons", "losses", "remaining", "message"), [
    ([], [3.1], "not run", "No reason was found for the unexpected differences."),
    # a backend that loses a part of the gradients is not excused by a BatchNorm
    ([STATISTICS], [3.1, 3.05], "different", "ddp x 2: without its reasons losses or gradients still differ by 2e-02 "),
    ([STATISTICS], [4.0], "not run", "ddp x 2: the first loss differs by 2e-01 of itself, and in trials of "),
], ids=["none", "stays", "larger"])  # fmt: skip
def test_difference_beyond_its_reason_is_unexpected(
    reasons: list[Any], losses: list[float], remaining: str, message: str, fake: Any
) -> None:
    names = ("ddp x 2", "ddp x 2 without")
    records = {name: record([loss]) for name, loss in zip(names, losses, strict=False)}
    result = fake({"as it is": record([3.0], reasons=reasons), **records}, backends=["ddp"])
    assert result.code == 1 and "UNEXPECTED" in str(result) and message in str(result)
    assert result.runs[1].remaining == remaining and ("ddp x 2 without" in fake.calls) == (remaining != "not run")


def test_deterministic_kernels_are_supplied_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 3.1, 3.0, 3.0, 3.0])

    def find(self: Any, way: Any, probes: bool = False, frozen: Any = ()) -> Any:
        trainer = way.overrides.get("trainer", "Trainer")
        return record([next(losses)], device="cuda:0", trainer=trainer), Outcome(0, 0.0, Path(PLANTED))

    monkeypatch.setattr(parity._Comparison, "_record", find)
    result = compare_backends(Script(PLANTED), backends=["accelerate"])
    assert result.code == 0 and result.is_deterministic_supplied and "deterministic=True" in str(result)


def test_operation_without_a_deterministic_kernel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses, output = iter([3.0, 3.1]), tmp_path / "output"
    output.write_text("RuntimeError: nll_loss2d has no deterministic kernel\nWhere: step 1 (epoch 1), rank 0.\n")

    def find(self: Any, way: Any, **_: Any) -> Any:
        rows = None if self._script.supplied else record([next(losses)], device="cuda:0")
        return rows, Outcome(1, 0.0, output)

    monkeypatch.setattr(parity._Comparison, "_record", find)
    with pytest.raises(ConfigError, match=r"part at step 1\. With deterministic=True it failed: .* nll_loss2d has no"):
        compare_backends(Script(PLANTED))


def test_reason_that_stays_is_tried_by_the_same_split(fake: Any) -> None:
    base = record([3.0], reasons=[COMPARES])
    for reference, code, remaining in ((3.1, 0, "bits"), (3.0, 1, "different")):
        records = {"as it is": base, "ddp x 2": record([3.1]), "reference 8": record([reference])}
        result = fake(records, backends=["ddp"])
        assert (result.code, result.runs[1].remaining) == (code, remaining)
        assert fake.calls["reference 8"][0]["arguments"]["batch_size"] == 8
    result = fake({"as it is": base, "8 x 2": record([3.1])}, backends=["split"])
    assert result.code == 0 and result.runs[2].remaining == "not run"


def test_reason_that_cannot_be_tried_proves_nothing(fake: Any) -> None:
    base = record([3.0], reasons=[STATISTICS])
    for title in ("ddp x 2 without", "reference"):
        result = fake({"as it is": base, "ddp x 2": record([3.1]), title: None}, backends=None if title else ["ddp"])
        assert result.ok and result.code == 2 and "Could not be tried: ddp x 2" in str(result)


def test_reason_of_splits_excuses_no_backend(fake: Any) -> None:
    base = record([3.0], reasons=[STATISTICS])
    result = fake({"as it is": base, "hf": record([3.1]), "1 x 16": record([3.1])}, backends=["hf", "split"])
    assert [run.ok for run in result.runs] == [True, False, False, True]


def test_splits_are_of_one_step(fake: Any) -> None:
    fake({"as it is": record([3.0], batch_size=4)}, backends=["split", "fsdp", "zero3"])
    arguments = {title: overrides.get("arguments", {}) for title, (overrides, *_) in fake.calls.items()}
    assert arguments["1 x 16"]["batch_size"] == 16 and arguments["8 x 2"]["batch_size"] == 2
    assert {entry.get("global_batch_size") for entry in arguments.values()} == {None, 16}
    assert fake.calls["fsdp x 2"][1] == (2, ["--cpu", "--fsdp"])
    assert fake.calls["zero3 x 2"][1] == (2, ["--cpu", "--zero", "3"])


def test_run_that_fails_says_why(fake: Any) -> None:
    """One of those that are tried without a name need not run; one that the user has named has to."""
    records = {"as it is": record([3.0]), "hf": None}
    result = fake(records)
    assert result.code == 0 and "hf: omnitrain.core.errors.DataError: It cannot be split." in str(result)
    result = fake(records, backends=["hf", "ddp"])
    assert result.ok and result.code == result.to_json()["code"] == 2
    assert str(result).endswith("Could not be tried: hf.")
    assert fake(records | {"ddp x 2": record([3.1])}, backends=["hf", "ddp"]).code == 1
    result = fake({"as it is": record([3.0, 2.0]), "hf": record([3.0])}, backends=["hf", "split"])
    message = "hf: its steps have other samples: [16] instead of [16, 16]"
    assert result.runs[1].size == "not run" and message in str(result)


def test_probe_that_fails_excuses_nothing(fake: Any) -> None:
    base = record([3.0], problem="KeyError: 'x'")
    result = fake({"as it is": base, "as it is, again": base, "1 x 16": record([3.1])}, backends=["split"])
    assert not result.ok and "could not be tried: KeyError: 'x'" in str(result)


@pytest.mark.parametrize(("records", "options", "message"), [
    ({"hf": None}, {}, "Nothing could be compared: hf: "),
    ({"as it is, again": record([3.1])}, {}, "not deterministic: run twice unchanged, its losses part at step 1"),
    ({"as it is": record([math.nan, math.nan])}, {}, "has no finite loss in its first steps"),
    # a class that is not replaced, as a subclass in the script, would be equal to itself
    ({}, {"ignores_changes": True}, "hf: it ran with trainer 'Custom', not 'HFTrainer'"),
    ({}, {"ignores_changes": True, "backends": ["ddp"]}, "ddp x 2: .* processes 1, not 2, batch_size 16, not 8"),
], ids=["fails", "random", "NaN", "class", "processes"])  # fmt: skip
def test_runs_that_cannot_be_compared(records: Any, options: Any, message: str, fake: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        fake({"as it is": record([3.0], trainer="Custom")} | records, **{"backends": ["hf"], **options})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_result_is_strict_json_and_a_figure(fake: Any, value: float, tmp_path: Path) -> None:
    result = fake({"as it is": record([3.0]), "hf": record([value])}, backends=["hf"])
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["ok"] is False and content["runs"][1]["loss"] == "inf"
    assert result.plot(tmp_path / "parity.png").stat().st_size


@pytest.mark.parametrize(("options", "message"), [
    ({"steps": 0}, "`--steps 0` must be"), ({"backends": ["tpu"]}, "`--on` must be one of 'native', "),
])  # fmt: skip
def test_wrong_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare_backends(Script(PLANTED), **options)


def test_recorder_ends_the_process_after_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=Killed))
    recorder = Recorder(str(tmp_path / "record"), steps=3, probes=True)
    trainer = small_trainer(gradient_accumulation_steps=2, epochs=4, callbacks=[recorder])
    with pytest.raises(Killed):
        trainer.train()
    content = json.loads((tmp_path / "record/record.json").read_text())
    assert [row["samples"] for row in content["rows"]] == [8, 8, 8] and content["reasons"] == []
    assert content["rows"][2]["loss"] == pytest.approx(trainer._step.loss.mean())
    assert (tmp_path / "record/weights.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.processes
def test_parity_holds_on_every_backend(command: Any, tmp_path: Path) -> None:
    picture = tmp_path / "parity.png"
    words = f"parity --steps 4 --timeout 300 --picture {picture}"
    code, out, _ = command(*words.split(), PLANTED, "stateless", tmp_path)
    assert code == 0 and "different" not in out and "not run" not in out and list(tmp_path.iterdir()) == [picture]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("fault", "message"), [
    ("unseeded", "is not deterministic: run twice unchanged"),
    ("raises", "failed with exit code 1 by itself: RuntimeError: broken by itself"),
    ("trains nothing", "ended without a step of a trainer of omnitrain"),
])  # fmt: skip
def test_script_that_cannot_be_tried(fault: str, message: str, command: Any, tmp_path: Path) -> None:
    code, _, error = command("parity", "--steps", "2", "--on", "split", PLANTED, fault, tmp_path)
    assert code == 2 and message in error
