"""No step reads a value of the device: each read would make the host wait until the GPU has caught up.

On a CPU every read is the operation `_local_scalar_dense`, of `item()`, `float(tensor)` and `if tensor`, so that a mode
of PyTorch's dispatcher sees on any machine what would wait on a GPU.
"""

import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from devices import KINDS, make
from recipes import rows, t16
from torch.utils._python_dispatch import TorchDispatchMode

from omnitrain import EMA, SAM, Callback

STEPS, LOG_STEPS = 20, 5
"""Steps of an epoch, and between two rows of logs, which do read."""


class HostReads(TorchDispatchMode):
    """Counts the reads of values, by the innermost line of the package or of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.extract_stack()[:-1]
            # PyTorch's optimizers count their steps in tensors on the host, also for weights on a GPU
            if not any("/torch/optim/" in frame.filename for frame in frames):
                frame = [frame for frame in frames if "/site-packages/torch/" not in frame.filename][-1]
                self.places[f"{frame.filename}:{frame.lineno}"] += 1
        return function(*args, **(kwargs or {}))


class Watch(Callback):
    """Counts reads in the steps after which nothing is logged and no epoch ends."""

    order = 1000

    def __init__(self) -> None:
        self.reads, self.steps, self.mode = HostReads(), 0, None

    def on_step_end(self, trainer: Any) -> None:
        self.close()
        step = trainer.progress.step  # the next one is to be watched
        if step % LOG_STEPS > 0 and step % STEPS < STEPS - 1:
            self.mode = self.reads.__enter__()
            self.steps += 1

    def close(self) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "gradient_accumulation_steps": 2, "lr_scheduler": "cosine", "warmup_steps": 5, "max_grad_norm": 0.01,
        "autocast": "bf16", "weight_decay": 0.1,
    },
    "micro-batches": {"microbatch_size": 2},
    "no clipping": {"max_grad_norm": None},
    "skipped steps": {"on_nonfinite": "skip", "max_grad_norm": 1.0},
    "loss spread": {"grad_reduction": "sum"},
    "EMA": {"algorithms": EMA},
    "SAM": {"algorithms": SAM},
    **{name: {"optimizer": name} for name in ("sgd", "adam", "rmsprop", "adagrad", "nadam", "muon")},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("trainer_kind", KINDS)
def test_step_reads_no_value(trainer_kind: str, case: str) -> None:
    watch, options = Watch(), dict(CASES[case])
    if "algorithms" in options:
        options["algorithms"] = [options["algorithms"]()]
    data = rows(4 * STEPS * options.get("gradient_accumulation_steps", 1), torch.float32)
    model = t16(dropout=0.1, dtype=torch.float32)
    trainer = make(
        trainer_kind, torch.device("cpu"), model, data, epochs=2, log_steps=LOG_STEPS, callbacks=[watch], **options
    )
    try:
        trainer.train()
    finally:
        watch.close()
    assert watch.steps == 2 * (STEPS - STEPS // LOG_STEPS) - 2
    assert not watch.reads.places
