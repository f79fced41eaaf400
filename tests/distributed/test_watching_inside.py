"""Watching where each rank has a part of the weights: whole tensors are measured, and all ranks generate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import Job, launch_all, make_trainer, sound  # noqa: E402
from recipes import rows, t16  # noqa: E402
from tiny import Tokens, llama  # noqa: E402

from omnitrain import Callback, ConfigError, Distributions, Periodic, Preview  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_watching_inside"


class Seen(Callback):
    """Keeps the last row, reports and errors."""

    def __init__(self) -> None:
        self.row: dict[str, float] = {}
        self.reports: dict[str, Any] = {}

    def on_log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        self.row |= logs

    def on_report(self, trainer: Any, values: Mapping[str, Any]) -> None:
        self.reports |= {name: one if isinstance(one, str) else list(one.counts) for name, one in values.items()}


def measure(backend: str) -> dict[str, Any]:
    """Measure a model whose weights stay as they are, on the same samples in the same step on any number of ranks."""
    seen = Seen()
    everything = ("weights", "gradients", "updates", "activations")
    make_trainer(
        backend, t16(), rows(16), batch_size=4 if backend == "fsdp" else 8, epochs=1, loss_fn=F.mse_loss,
        learning_rate=1e-30, weight_decay=0.0,
        callbacks=[seen, Distributions(of=everything, every=2, bins=8, modules=r"^\d$")],
    ).train()  # fmt: skip
    return {"row": {name: one for name, one in seen.row.items() if "/" in name}, "reports": seen.reports}


def generate(backend: str) -> dict[str, Any]:
    """Generate with sharded weights, beside work that fails on one rank alone."""
    seen = Seen()

    def fails(trainer: Any) -> None:
        if trainer.rank == 1:  # one that the others are told of
            raise ValueError("on the second rank alone")

    refused = ""
    previews = [Preview([[5, 6], [7, 8, 9]], 2, 4, do_sample=False, on_error="raise"), Periodic(fails, 1)]
    options: dict[str, Any] = {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-30, "weight_decay": 0.0}
    if backend == "zero3":
        try:
            make_trainer(backend, llama().float(), Tokens(16), callbacks=[Distributions()], **options).train()
        except ConfigError as error:
            refused = str(error)
    trainer = make_trainer(backend, llama().float(), Tokens(16), callbacks=[seen, *previews], **options)
    trainer.train()
    return {"step": trainer.progress.step, "reports": seen.reports, "refused": refused}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    jobs = [Job("measure", "fsdp", f"{HERE}:measure"), Job("generate", "fsdp", f"{HERE}:generate")]
    return sound(launch_all(jobs, tmp_path_factory.mktemp("watching")))


def test_sharded_tensors_are_measured_as_on_one_process(results: Any) -> None:
    expected = measure("native")
    for found in results["measure"]:
        assert {name: one for name, one in found["reports"].items() if not name.startswith("updates")} == {
            name: one for name, one in expected["reports"].items() if not name.startswith("updates")
        }
        assert found["row"].keys() == expected["row"].keys()
        for name, value in found["row"].items():
            assert value == pytest.approx(expected["row"][name], rel=1e-9, abs=1e-12), name


def test_texts_of_sharded_weights_are_those_of_one_process(results: Any) -> None:
    expected = generate("native")["reports"]
    assert [(found["step"], found["reports"]) for found in results["generate"]] == [(2, expected)] * 2


@pytest.mark.slow
def test_texts_of_zero_3_are_those_of_one_process(tmp_path: Path) -> None:
    found = sound(launch_all([Job("generate", "zero3", f"{HERE}:generate")], tmp_path))["generate"]
    expected = generate("native")["reports"]
    assert [(one["step"], one["reports"]) for one in found] == [(2, expected)] * 2
    assert "`of` holds 'weights', which cannot be seen here: ZeRO 3" in found[0]["refused"]
