"""Watching changes no bit: runs with every watcher, and the same without, on all trainers. Two ranks: distributed/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from watchers import TRACES, outcome, run, watchers

from omnitrain import AccelerateTrainer, Event, HFTrainer, Trainer

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
NOT_IN_A_RUN = {Event.EXCEPTION, Event.CHECKPOINT_LOADED, Event.PREDICT_START, Event.PREDICT_END}


@pytest.mark.parametrize("trainer_class", TRAINERS.values(), ids=TRAINERS)
def test_a_run_that_everything_watches_has_the_bits_of_one_that_nothing_does(
    trainer_class: Any, tmp_path: Path
) -> None:
    def make(*args: Any, **options: Any) -> Any:
        return trainer_class(*args, **options, **({"device": "cpu"} if trainer_class is Trainer else {}))

    bare, watched = run(make, None), run(make, tmp_path)
    found, expected = outcome(watched), outcome(bare)
    assert found["history"] == expected["history"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name
    names = {type(one).__name__ for one in watched._callbacks}
    assert {type(one).__name__ for one in watchers(tmp_path / "other").values()} <= names
    listener = next(one for one in watched._callbacks if type(one).__name__ == "Listener")
    assert {one.value for one in Event} - listener.heard <= {one.value for one in NOT_IN_A_RUN}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    values = {name for row in rows for name in row}
    assert {"listened", "memory_process"} <= values
    for trace in TRACES:
        assert list(tmp_path.glob(trace)), trace
