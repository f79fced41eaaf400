"""What is told of DeepSpeed before it begins."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from omnitrain.backends.deepspeed import tell_of_locks


@pytest.mark.parametrize("folder", ["op", "py311_cpu/op"])
def test_lock_that_a_killed_program_has_left_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / folder / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    tell_of_locks()
    assert not caplog.records  # another program compiles
    os.utime(lock, (time.time() - 7200,) * 2)
    tell_of_locks()
    assert [record.getMessage().partition(" has been there for 120 minutes")[0] for record in caplog.records] == [
        str(lock)
    ]
