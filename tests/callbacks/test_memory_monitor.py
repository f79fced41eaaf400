"""Memory in rows of logs, by phase, and snapshots."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import KINDS, make
from marks import thinned
from recipes import Trace, callback, no_room, rows, t16

from omnitrain import ConfigError, MemoryMonitor
from omnitrain.callbacks.memory_monitor import GIB, resident_memory
from omnitrain.compute.device_runtime import RUNTIMES, DeviceRuntime

CPU = torch.device("cpu")


def memory_in(trace: Trace, of_process: bool = False) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name.startswith("memory") and ("process" in name) == of_process}
        for row in trace.logs
    ]


class FakeDevice:
    """A device that counts peaks: of 1 GiB in a step, 2 in an evaluation, 3 in a save."""

    peak = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        members = {"has_memory_stats": True, "read_peaks": lambda runtime: self.read()}
        monkeypatch.setitem(RUNTIMES, "cpu", type("Runtime", (DeviceRuntime,), members))
        sizes = {"on_train_start": 9, "on_step_start": 1, "on_eval_start": 2, "on_save_start": 3}
        functions = {event: lambda trainer, size=size: self.allocate(size) for event, size in sizes.items()}
        self.callback = callback(order=50, **functions)  # at the start by the rehearsal, which is no part of a phase

    def read(self) -> tuple[int, int]:
        peak, self.peak = self.peak, 0
        return peak, 2 * peak

    def allocate(self, size: int) -> None:
        self.peak = max(self.peak, size * GIB)


@pytest.mark.parametrize("kind", thinned(KINDS, ["native", "hf"]))
def test_peaks_are_logged_by_phase(kind: str, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    device, trace = FakeDevice(monkeypatch), Trace()
    caplog.set_level(logging.INFO, "omnitrain")
    options = {"save_dir": tmp_path, "log_steps": 2, "eval_steps": 2, "save_steps": 4}
    callbacks = [MemoryMonitor(), trace, device.callback]
    make(kind, CPU, t16(), rows(24), rows(8), callbacks=callbacks, **options).train()
    first, second, third = memory_in(trace)
    assert first == {"memory_allocated": 9.0, "memory_reserved": 18.0, "memory_train": 1.0}
    # the best of the first evaluation is saved as well
    saved = {"memory_allocated": 3.0, "memory_reserved": 6.0, "memory_eval": 2.0, "memory_save": 3.0}
    assert third == second == {"memory_train": 1.0, **saved}
    assert "Peak memory on rank 0, in GiB: train 1.00, eval 2.00, save 3.00, process" in caplog.text


def test_memory_on_a_cpu_is_that_of_the_process(tmp_path: Path) -> None:
    trace = Trace()
    make("native", CPU, t16(), rows(24), callbacks=[MemoryMonitor(), trace], log_steps=1).train()
    assert memory_in(trace) == [{}] * 6
    process = memory_in(trace, of_process=True)[-1]
    assert 0.05 < process["memory_process"] <= process["memory_process_peak"] + 0.01
    before, _ = resident_memory()
    tensor = torch.ones(32 * 2**20 // 4)
    size, peak = resident_memory()
    assert size - before > 28 * 2**20 and peak >= size - 2**20 and len(tensor)
    with pytest.raises(ConfigError, match="`snapshot=True` records the allocations of a CUDA device"):
        make("native", CPU, t16(), rows(8), save_dir=tmp_path, callbacks=[MemoryMonitor(snapshot=True)]).train()


def test_peaks_of_async_saves_are_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, trace = FakeDevice(monkeypatch), Trace()
    options = {"save_dir": tmp_path, "log_steps": 2, "save_steps": 2, "async_save": True}
    make("native", CPU, t16(), rows(24), callbacks=[MemoryMonitor(), trace, device.callback], **options).train()
    assert [sorted(row) for row in memory_in(trace)] == [["memory_allocated", "memory_reserved", "memory_train"]] * 3
    assert memory_in(trace)[1]["memory_train"] == 3.0


@pytest.mark.parametrize("error", [no_room(), RuntimeError("another")], ids=["memory", "other"])
def test_snapshot_is_written_when_memory_runs_out(error: Exception, tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[Any] = []

    def end(trainer: Any) -> None:
        if trainer.progress.step == 2:
            raise error

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path).touch() or "dump"))
    callbacks = [MemoryMonitor(snapshot=True), callback(on_step_end=end)]
    trainer = make("native", CPU, t16(), rows(24), save_dir=tmp_path, callbacks=callbacks)
    monkeypatch.setitem(RUNTIMES, "cpu", type("Runtime", (DeviceRuntime,), {"can_record_memory": True}))
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    path, is_written = tmp_path / "memory" / "rank0-step2.pickle", isinstance(error, torch.OutOfMemoryError)
    assert calls == (["all", "dump", None] if is_written else ["all", None]) and path.exists() is is_written
    assert any(str(path) in note for note in caught.value.__notes__) is is_written
