"""No step reads a value of the device: each read would make the host wait until the GPU has caught up.

The runs are on the meta device, which has no values and mixes with no other device. Reads are answered with a number,
and counted by the function of the package that asks.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

import accelerate
import pytest
import torch
from devices import KINDS, trainer_class
from fake_device import FakeDevice
from recipes import rows, t16
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments

import omnitrain.optim.muon
import omnitrain.trainer.hooks
from omnitrain import EMA, SAM, SWA, Callback, GradientClipping
from omnitrain.compute.precision import Precision

STEPS = 4
"""Steps of an epoch, and between two rows of logs, which do read."""
META, CPU = torch.device("meta"), torch.device("cpu")
GUARD = {"step.py:should_update"}
"""The read of an optimizer that cannot skip an update on the device, or of a step that may be left out."""


class HostReads(TorchDispatchMode):
    """Answers reads of the meta device, and counts them by the innermost function of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self.counts = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if function is aten._local_scalar_dense.default and args[0].is_meta:
            return self._count(0.5 if args[0].is_floating_point() else 1)
        if function is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == CPU:
            return self._count(torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype))
        if function is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return self._count(args[0])
        return function(*args, **kwargs)

    def _count(self, answer: Any) -> Any:
        if self.counts:
            names = [frame for frame in traceback.extract_stack() if "/omnitrain/" in frame.filename]
            self.places[f"{names[-1].filename.rpartition('/')[2]}:{names[-1].name}"] += 1
        return answer


class Watch(Callback):
    order = 1000

    def __init__(self, reads: HostReads) -> None:
        self.reads, self.steps = reads, 0

    def on_step_end(self, trainer: Any) -> None:
        step = trainer.progress.step  # the next one is to be watched
        self.reads.counts = 0 < step % STEPS < STEPS - 1
        self.steps += self.reads.counts


@pytest.fixture
def _meta_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all trainers choose the meta device, and PyTorch's fused optimizers accept it."""
    parse = Precision.parse
    monkeypatch.setattr(omnitrain.trainer.hooks, "choose_device", lambda device: META)
    monkeypatch.setattr(Precision, "parse", lambda autocast, device, *more: parse(autocast, CPU, *more))
    monkeypatch.setattr(accelerate.Accelerator, "device", META)
    monkeypatch.setattr(TrainingArguments, "device", META)
    monkeypatch.setattr(omnitrain.optim.muon, "_FUSED_DEVICES", ("meta",))
    optimizers = import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    with FakeDevice("meta"):
        yield


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "gradient_accumulation_steps": 2, "lr_scheduler": "cosine", "warmup_steps": 5, "max_grad_norm": 0.01,
        "autocast": "bf16", "weight_decay": 0.1,
    },
    "micro-batches": {"microbatch_size": 2},
    "no clipping": {"max_grad_norm": None},
    "loss spread": {"grad_reduction": "sum"},
    **{kind.__name__: {"algorithms": kind} for kind in (EMA, SWA, SAM)},
    "clipping by value": {"algorithms": lambda: GradientClipping("value", 0.1), "max_grad_norm": None},
    "skipped steps": {"on_nonfinite": "skip", "may_read": GUARD},
    **{name: {"optimizer": name} for name in ("adamw", "adam")},
    **{name: {"optimizer": name, "may_read": GUARD} for name in ("rmsprop", "adagrad", "nadam", "muon")},
}  # fmt: skip


@pytest.mark.usefixtures("_meta_device")
@pytest.mark.parametrize(("kind", "case"), [*product(KINDS[:1], CASES), *product(KINDS[1:], ("everything", "SAM"))])
def test_step_reads_no_value(kind: str, case: str) -> None:
    options = {"log_steps": STEPS, "batch_size": 4, "loss_fn": nn.functional.mse_loss, **CASES[case]}
    may_read = options.pop("may_read", set())
    if "algorithms" in options:
        options["algorithms"] = [options["algorithms"]()]
    data = rows(4 * STEPS * options.get("gradient_accumulation_steps", 1), torch.float32)
    with HostReads() as reads:
        watch, model = Watch(reads), t16(dropout=0.1, dtype=torch.float32)
        trainer = trainer_class(kind)(model, data, epochs=2, callbacks=[watch], progress_bar=False, **options)
        assert trainer.device == META
        trainer.train()
    assert watch.steps == 4
    assert reads.places.keys() <= may_read, reads.places
