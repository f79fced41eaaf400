"""Garbage that is collected at step boundaries, and nowhere else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import KINDS, make
from recipes import rows, same, t16, weights

from omnitrain import Callback, ConfigError, GarbageCollection

CPU = torch.device("cpu")


class Watches(Callback):
    """Notes in each step whether the automatic collection is on, and what is collected after which step."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.states: list[bool] = []
        self.collected: list[tuple[int, int]] = []
        self.step = 0

    def on_step_start(self, trainer: Any) -> None:
        self.states.append(gc.isenabled())
        self.step = trainer.progress.step + 1
        if self.fails and self.step == 3:
            raise RuntimeError("no more")

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collected.append((self.step, info["generation"]))


@pytest.fixture
def watches() -> Iterator[Watches]:
    found = Watches()
    gc.callbacks.append(found.note)
    yield found
    gc.callbacks.remove(found.note)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_collected_at_the_interval_and_no_number_changes(kind: str, watches: Watches, tmp_path: Path) -> None:
    plain = make(kind, CPU, t16(0.2), rows(32), save_dir=tmp_path / "a")
    plain.train()
    watches.collected.clear()
    trainer = make(
        kind, CPU, t16(0.2), rows(32), save_dir=tmp_path / "b", callbacks=[GarbageCollection("3ba", 1), watches]
    )
    assert gc.isenabled()
    trainer.train()
    assert gc.isenabled() and watches.states == [False] * 8
    assert [one for one in watches.collected if 0 < one[0] < 8] == [(3, 1), (6, 1)]
    assert same(weights(plain.get_model()), weights(trainer.get_model()))


def test_the_automatic_collection_is_as_it_was_after_an_error_and_after_a_run_without_it() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        make("native", CPU, t16(), rows(32), callbacks=[Watches(fails=True), GarbageCollection()]).train()
    assert gc.isenabled()
    gc.disable()
    try:
        make("native", CPU, t16(), rows(32), callbacks=[GarbageCollection()]).train()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_resumed_run_collects_after_the_same_steps(watches: Watches, tmp_path: Path) -> None:
    for steps in (4, 8):
        watches.collected.clear()
        trainer = make(
            "native", CPU, t16(), rows(32), save_dir=tmp_path, max_steps=steps, epochs=None, save_steps=2,
            callbacks=[GarbageCollection(3, 0), watches],
        )  # fmt: skip
        trainer.train(resume_from="auto")
    assert [one for one in watches.collected if one[0] > 4] == [(6, 0)]


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": "1h"}, {"every": "0.1dur"}, {"generation": 3}, {"generation": True}]
)
def test_an_interval_that_ranks_do_not_share_or_a_generation_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        GarbageCollection(**options)
