"""Reports of out-of-memory errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import KINDS, make
from recipes import rows
from starving import Starving, no_room
from torch import nn

from omnitrain.trainer.out_of_memory import Shortage, format_oom_report, future_optimizer_bytes, requested_bytes

GB = 10**9


def remedies(shortage: Shortage) -> dict[str, str]:
    """Return the remedies of a report and their gains."""
    lines = format_oom_report(shortage).splitlines()[2:]
    return {name.strip(): gain for name, _, gain in (line.rpartition(": ") for line in lines)}


def test_oom_report_has_remedies_and_their_gains() -> None:
    shortage = Shortage("training", 2 * GB, 2 * GB, 4 * GB, peak=14 * GB, requested=2 * GB, rows=16, world_size=4)
    assert shortage.activations == 8 * GB
    assert remedies(shortage) == {
        "microbatch_size=8 (instead of 16; the same step, in more parts)": "-4.0 GB",
        'autocast="bf16"': "up to -4.0 GB",
        "gradient_checkpointing=True (slower, the same numbers)": "most of 8.0 GB",
        "an optimizer whose state has 8 bits": "-3.0 GB",
        "FSDP or ZeRO 3 over 4 processes": "-6.0 GB",
        "ZeRO 2 over 4 processes": "-4.5 GB",
    }


def test_oom_report_omits_remedies_without_effect() -> None:
    done: dict[str, Any] = {"is_sharded": True, "is_recomputed": True, "is_full_precision": False, "rows": 1}
    assert list(remedies(Shortage("training", 2 * GB, 2 * GB, 4 * GB, peak=14 * GB, **done))) == [
        "an optimizer whose state has 8 bits"
    ]
    small = Shortage("training", 10 * GB, 0, 0, peak=10 * GB, requested=100, rows=8, world_size=2)
    assert remedies(small) == {"FSDP or ZeRO 3 over 2 processes": "-5.0 GB"}
    assert format_oom_report(Shortage("evaluation", 0, 0, 0, peak=0)).count("\n") == 0
    gains = remedies(Shortage("evaluation", GB, 0, 0, peak=4 * GB, rows=9, is_sharded=True))
    assert gains == {"eval_batch_size=4 (instead of 9)": "-1.7 GB", 'autocast="bf16"': "up to -1.5 GB"}
    assert remedies(Shortage("saving", GB, 0, 0, peak=4 * GB, rows=9, is_sharded=True)) == {}


def test_oom_report_of_the_first_step_adds_future_state() -> None:
    shortage = Shortage("training", GB, 0, 0, future_gradients=GB, future_optimizer_bytes=2 * GB, peak=None, rows=1)
    text = format_oom_report(shortage)
    words = "optimizer state 0 MB (of the first step, 1.0 GB of gradients and 2.0 GB of state were still to come)"
    assert words in text and "activations" not in text  # which nothing has counted
    assert remedies(shortage)["FSDP or ZeRO 3 over 8 processes"] == "-3.5 GB"
    error = RuntimeError("can't allocate memory: you tried to allocate 4096 bytes. Error code 12")
    assert requested_bytes(error) == 4096
    for options, size in (
        ({"betas": ()}, 20), ({"betas": (), "amsgrad": True}, 30), ({"momentum": 0.9}, 10), ({"momentum": 0}, 0)
    ):  # fmt: skip
        assert future_optimizer_bytes(options, 10) == size


def oom_note(trainer: Any, work: str = "train") -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(trainer, work)()
    notes = [note for note in caught.value.__notes__ if note.startswith("Memory ran out")]
    assert len(notes) == 1
    return notes[0]


def options_of(kind: str, tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {"loss_fn": F.mse_loss, "batch_size": 8, "save_dir": tmp_path if kind == "hf" else None, **options}


@pytest.mark.parametrize("kind", KINDS)
def test_oom_error_has_a_report_on_every_trainer(kind: str, tmp_path: Path) -> None:
    model = Starving(room=4, start=2)
    text = oom_note(make(kind, torch.device("cpu"), model, rows(32), **options_of(kind, tmp_path)))
    moments = 2 * sum(parameter.nbytes for parameter in model.parameters())
    size = moments / 2 + sum(buffer.nbytes for buffer in model.buffers())
    assert f"in training, and this is what was in it: parameters {size / 1e6:.1f} MB" in text
    assert f"optimizer state {moments / 1e6:.1f} MB" in text and "the 21.0 MB for which there was no room" in text
    assert "microbatch_size=4 (instead of 8; the same step, in more parts)" in text


def starve(module: nn.Module, inputs: Any) -> None:
    """A hook by which memory runs out in an evaluation."""
    if not module.training:
        raise no_room()


@pytest.mark.parametrize(("kind", "options"), [*((kind, {"sanity": False}) for kind in KINDS), ("native", {})])
def test_oom_error_in_an_evaluation_reports_its_batch_size(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 1).double())
    model.register_forward_pre_hook(starve)
    trainer = make(kind, torch.device("cpu"), model, rows(8), rows(8), **options_of(kind, tmp_path, **options))
    text = oom_note(trainer)
    assert "in evaluation" in text and "eval_batch_size=4 (instead of 8)" in text and "microbatch_size" not in text
    assert "in evaluation" in oom_note(trainer, "evaluate")
    other = make(kind, torch.device("cpu"), nn.Linear(3, 1).double(), rows(8), **options_of(kind, tmp_path))
    with pytest.raises(RuntimeError) as caught:
        other.train()
    assert not any(note.startswith("Memory") for note in caught.value.__notes__)
