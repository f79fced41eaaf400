"""Garbage collection at step boundaries only."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import KINDS, make
from marks import thinned
from recipes import FailsAt, rows, t16

from omnitrain import Callback, GarbageCollection

CPU = torch.device("cpu")


class Watches(Callback):
    def __init__(self) -> None:
        self.states: list[bool] = []
        self.collected: list[tuple[int, int]] = []
        self.step = 0

    def on_step_start(self, trainer: Any) -> None:
        self.states.append(gc.isenabled())
        self.step = trainer.progress.step + 1

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collected.append((self.step, info["generation"]))


@pytest.fixture
def watches() -> Iterator[Watches]:
    watches = Watches()
    gc.callbacks.append(watches.note)
    yield watches
    gc.callbacks.remove(watches.note)


@pytest.mark.parametrize("kind", thinned(KINDS, ["native", "hf"]))
def test_garbage_is_collected_at_the_interval(kind: str, watches: Watches, tmp_path: Path) -> None:
    callbacks = [GarbageCollection("3ba", 1), watches]
    trainer = make(kind, CPU, t16(), rows(32), save_dir=tmp_path, callbacks=callbacks)
    assert gc.isenabled()
    trainer.train()
    assert gc.isenabled() and watches.states == [False] * 8
    assert [(step, generation) for step, generation in watches.collected if 0 < step < 8] == [(3, 1), (6, 1)]


def test_automatic_collection_is_restored_after_a_run() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        make("native", CPU, FailsAt(3), rows(32), callbacks=[GarbageCollection()], loss_fn=F.mse_loss).train()
    assert gc.isenabled()
    gc.disable()
    try:
        make("native", CPU, t16(), rows(32), callbacks=[GarbageCollection()]).train()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_resumed_run_collects_after_the_same_steps(watches: Watches, tmp_path: Path) -> None:
    for steps in (4, 8):
        watches.collected.clear()
        options = {"save_dir": tmp_path, "max_steps": steps, "epochs": None, "save_steps": 2}
        trainer = make("native", CPU, t16(), rows(32), callbacks=[GarbageCollection(3, 0), watches], **options)
        trainer.train(resume_from="auto")
    assert [(step, generation) for step, generation in watches.collected if step > 4] == [(6, 0)]
