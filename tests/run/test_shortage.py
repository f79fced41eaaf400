"""What an error says of the memory that ran out: the report of given sizes, and those of a run on every trainer."""

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

from omnitrain.run.shortage import Shortage, state_to_come, wanted_in, worded_shortage

GB = 10**9


def remedies(found: Shortage) -> dict[str, str]:
    """What the report names, and how much it says that gives."""
    lines = worded_shortage(found).splitlines()[2:]
    return {name.strip(): gain for name, _, gain in (line.rpartition(": ") for line in lines)}


def test_each_remedy_gives_what_the_sizes_say_by_hand() -> None:
    found = Shortage("training", 2 * GB, 2 * GB, 4 * GB, peak=14 * GB, wanted=2 * GB, rows=16, world_size=4)
    assert found.activations == 8 * GB
    assert remedies(found) == {
        "microbatch_size=8 (instead of 16; the same step, in more parts)": "-4.0 GB",
        'autocast="bf16"': "up to -4.0 GB",
        "gradient_checkpointing=True (slower, the same numbers)": "most of 8.0 GB",
        "an optimizer whose state has 8 bits": "-3.0 GB",
        "FSDP or ZeRO 3 over 4 processes": "-6.0 GB",
        "ZeRO 2 over 4 processes": "-4.5 GB",
    }


def test_what_is_done_already_or_gives_next_to_nothing_is_not_named() -> None:
    done: dict[str, Any] = {"is_sharded": True, "is_recomputed": True, "is_full_precision": False, "rows": 1}
    assert list(remedies(Shortage("training", 2 * GB, 2 * GB, 4 * GB, peak=14 * GB, **done))) == [
        "an optimizer whose state has 8 bits"
    ]
    small = Shortage("training", 10 * GB, 0, 0, peak=10 * GB, wanted=100, rows=8, world_size=2)
    assert remedies(small) == {"FSDP or ZeRO 3 over 2 processes": "-5.0 GB"}
    assert worded_shortage(Shortage("evaluation", 0, 0, 0, peak=0)).count("\n") == 0


def test_an_evaluation_and_a_save_are_told_of_what_they_use() -> None:
    found = remedies(Shortage("evaluation", GB, 0, 0, peak=4 * GB, rows=9, is_sharded=True))
    assert found == {"eval_batch_size=4 (instead of 9)": "-1.7 GB", 'autocast="bf16"': "up to -1.5 GB"}
    assert remedies(Shortage("saving", GB, 0, 0, peak=4 * GB, rows=9, is_sharded=True)) == {}


def test_the_first_step_is_told_of_gradients_and_state_that_were_to_come() -> None:
    found = Shortage("training", GB, 0, 0, gradients_to_come=GB, state_to_come=2 * GB, peak=None, rows=1)
    said = worded_shortage(found)
    assert (
        "optimizer state 0 MB (of the first step, 1.0 GB of gradients and 2.0 GB of state were still to come)" in said
    )
    assert remedies(found)["FSDP or ZeRO 3 over 8 processes"] == "-3.5 GB"
    assert "activations" not in said  # which nothing has counted
    assert [state_to_come(one, 10) for one in ({"betas": ()}, {"betas": (), "amsgrad": True}, {"momentum": 0.9})] == [
        20, 30, 10,
    ]  # fmt: skip
    assert state_to_come({"momentum": 0}, 10) == 0


def test_the_size_of_the_failed_request_is_read_from_the_error() -> None:
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
    assert [wanted_in(RuntimeError(said)), wanted_in(no_room())] == [4096, 20 * 2**20]


# --- in a run


def run_out(trainer: Any, work: str = "train") -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(trainer, work)()
    notes = [note for note in caught.value.__notes__ if note.startswith("Memory ran out")]
    assert len(notes) == 1
    return notes[0]


def place(kind: str, tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {"loss_fn": F.mse_loss, "batch_size": 8, "save_dir": tmp_path if kind == "hf" else None, **options}


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_says_what_was_in_memory_and_what_would_take_less(kind: str, tmp_path: Path) -> None:
    model = Starving(room=4, start=2)
    (said,) = [run_out(make(kind, torch.device("cpu"), model, rows(32), **place(kind, tmp_path)))]
    held = sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()])
    moments = 2 * sum(one.numel() * one.element_size() for one in model.parameters())
    assert f"in training, and this is what was in it: parameters {held / 1e6:.1f} MB" in said
    assert f"optimizer state {moments / 1e6:.1f} MB" in said and "the 21.0 MB for which there was no room" in said
    assert "microbatch_size=4 (instead of 8; the same step, in more parts)" in said


class Blind(nn.Sequential):
    """Has no room in an evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise no_room()
        return super().forward(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"sanity": False}, {}], ids=["in the run", "rehearsed"])
def test_an_evaluation_names_its_own_batch_size(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = Blind(nn.Linear(4, 1).double())
    trainer = make(kind, torch.device("cpu"), model, rows(8), rows(8), **place(kind, tmp_path, **options))
    said = run_out(trainer)
    assert "in evaluation" in said and "eval_batch_size=4 (instead of 8)" in said and "microbatch_size" not in said
    assert "in evaluation" in run_out(trainer, "evaluate")


def test_errors_of_other_kinds_have_no_such_note() -> None:
    trainer = make("native", torch.device("cpu"), nn.Linear(3, 1).double(), rows(8), loss_fn=F.mse_loss)
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert not any(note.startswith("Memory") for note in caught.value.__notes__)
