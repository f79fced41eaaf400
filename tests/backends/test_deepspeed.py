"""What is told of DeepSpeed before it begins."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from omnitrain import ConfigError
from omnitrain.backends.deepspeed import adopt_config, tell_of_locks


@pytest.mark.parametrize("folder", ["op", "py311_cpu/op"])
def test_lock_that_a_killed_program_has_left_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    importlib.import_module("torch.utils.cpp_extension")  # which logs that there is no CUDA

    caplog.clear()
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


def test_a_misspelt_entry_of_the_configuration_is_refused_with_the_right_one() -> None:
    pytest.importorskip("deepspeed")
    plugin = SimpleNamespace(deepspeed_config={"zero_optimisation": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"'zero_optimisation', which it ignores. Did you mean 'zero_optimization'"):
        adopt_config(plugin, {})


def test_entries_that_deepspeed_has_are_taken() -> None:
    pytest.importorskip("deepspeed")
    known = ["zero_optimization", "train_batch_size", "wall_clock_breakdown", "flops_profiler", "bf16", "my_own_notes"]
    adopt_config(SimpleNamespace(deepspeed_config={name: {} for name in known if name != "train_batch_size"}), {})
