"""Imports of cases, for the process that they are forked from, which this changes."""

import contextlib
import gc
import importlib
import os

import programs
import torch
from compiled import load_operators

MODULES = (
    "accelerate.utils", "deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer", "forking", "optuna", "peft", "pytest", "sklearn.metrics",
    "torch._dynamo", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "torch.distributed.fsdp",
    "torch.profiler", "torch.utils.serialization", "torchmetrics", "transformers.trainer",
    "omnitrain.trainer.accelerated", "omnitrain.hf.trainer",
)  # fmt: skip

for module in MODULES:
    with contextlib.suppress(ModuleNotFoundError):  # of a newer release of its package
        importlib.import_module(module)
torch.set_num_threads(1)
programs.answer_git()
load_operators()
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is cut here, and a busy disk takes long
gc.freeze()  # else the collector of each process makes a copy of every page
