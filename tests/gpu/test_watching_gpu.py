"""Peaks of memory, traces of kernels and snapshots on a GPU; on a CPU, that nothing of it fails there."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import make
from recipes import Trace, fit, rows, same, t16, weights
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Callback, MemoryMonitor, Profiler
from omnitrain.callbacks.memory_monitor import GIB
from omnitrain.compute.precision import is_out_of_memory

FP32 = torch.float32


def test_peaks_are_those_of_each_phase(device: torch.device, kind: str, tmp_path: Path) -> None:
    width = 2048 if device.type == "cuda" else 16
    data, trace = TensorDataset(torch.randn(16, width), torch.randn(16, width)), Trace()
    make(
        kind, device, nn.Sequential(nn.Linear(width, width)), data, data, save_dir=tmp_path, log_steps=2, eval_steps=2,
        save_steps=2, callbacks=[MemoryMonitor(), trace],
    ).train()  # fmt: skip
    last = trace.logs[-1]
    assert last["memory_process"] > 0
    if device.type == "cuda":
        parameters = width * (width + 1) * 4 / GIB  # the parameters; gradients are as many, moments twice as many
        assert last["memory_reserved"] >= last["memory_allocated"] >= last["memory_train"] >= 4 * parameters
        assert 3 * parameters <= last["memory_eval"] < last["memory_train"] and last["memory_save"] >= 3 * parameters


def test_traces_include_device_and_change_nothing(device: torch.device, kind: str, tmp_path: Path) -> None:
    ends = []
    for name in ("watched", "plain"):
        watched = [Profiler(skip=2, active=2)] if name == "watched" else []
        trainer = fit(make(kind, device, t16(dtype=FP32), rows(32, FP32), save_dir=tmp_path / name, callbacks=watched))
        ends.append([parameter.cpu() for parameter in weights(trainer.get_model())])
    assert same(*ends)
    (trace,) = (tmp_path / "watched" / "profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events) == (device.type == "cuda")


@pytest.mark.gpu
def test_out_of_memory_leaves_snapshot_and_sizes(kind: str, tmp_path: Path) -> None:
    class Asks(Callback):
        def on_before_optimizer_step(self, trainer: Any) -> None:
            torch.empty(1 << 50, device=trainer.device)

    trainer = make(
        kind, torch.device("cuda"), t16(dtype=FP32), rows(32, FP32), save_dir=tmp_path,
        callbacks=[MemoryMonitor(snapshot=True), Asks()],
    )  # fmt: skip
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert is_out_of_memory(caught.value)
    notes = "\n".join(caught.value.__notes__)
    assert "Memory ran out in training" in notes and "The device has" in notes
    assert (tmp_path / "memory" / "rank0-step0.pickle").stat().st_size > 1000
