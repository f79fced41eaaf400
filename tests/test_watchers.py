"""Watching changes no bit of a run, on each trainer. Two ranks: distributed/test_events.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import TRAINERS, thinned
from watchers import TRACES, outcome, run, watchers

from omnitrain import Event

NOT_IN_A_RUN = {Event.EXCEPTION, Event.CHECKPOINT_LOADED, Event.PREDICT_START, Event.PREDICT_END}


@pytest.mark.parametrize("kind", thinned(TRAINERS, ["native", "hf"]))
def test_watchers_change_no_bit(kind: str, tmp_path: Path) -> None:
    def make(*args: Any, **options: Any) -> Any:
        return TRAINERS[kind](*args, **options, **({"device": "cpu"} if kind == "native" else {}))

    unwatched, watched = run(make, None), run(make, tmp_path)
    results, expected = outcome(watched), outcome(unwatched)
    assert results["history"] == expected["history"]
    torch.testing.assert_close(results["tensors"], expected["tensors"], rtol=0, atol=0)
    callbacks = {type(callback).__name__: callback for callback in watched.lifecycle.callbacks}
    assert {type(watcher).__name__ for watcher in watchers(tmp_path / "other").values()} <= {*callbacks}
    assert {*Event} - {Event(name) for name in callbacks["Listener"].heard} <= NOT_IN_A_RUN
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"listened", "memory_process"} <= {name for row in rows for name in row}
    for trace in TRACES:
        assert list(tmp_path.glob(trace)), trace
