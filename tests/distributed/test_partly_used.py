"""Parameters and layers that only some ranks use in a step: the numbers of one process, or an error before it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import FullyShardedDataParallelPlugin
from backends import Jobs, asked_for, launch_all, make_trainer, tensors_of
from compiled import compile_once
from forking import Case, play
from marks import thinned
from recipes import Trace, fit, rows
from torch import nn
from torch.utils.data import TensorDataset


class Routed(nn.Module):
    """Sends each row through the expert that its last number names, if any; calls no expert without rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.base(x))
        for number, expert in enumerate(self.experts):
            chosen = x[:, 3] == number
            if chosen.any():
                hidden = hidden + chosen[:, None] * expert(hidden)
        return self.head(hidden)


ROUTES = {
    "one rank": [0, 2, 1, 2, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1],  # the first and the last step, and one in between
    "one micro-batch": [0, 0, 1, 1, 0, 0, 2, 2, 0, 0, 1, 1, 2, 2, 1, 1],
    "third step": [0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1],
    "fourth step": [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1],
}
"""The expert of each row, in steps of 4; ranks take turns, and have two micro-batches of one row in each step."""
QUICK_SPLIT = [
    ("ddp", "one rank"), ("fsdp", "one rank"), ("zero1", "one rank"), ("zero2", "one rank"),
    ("zero3", "one micro-batch"), ("zero3 offload", "one micro-batch"),
]  # fmt: skip
SPLIT = [
    *QUICK_SPLIT, ("hf2", "one rank"), ("zero2 offload", "one rank"),
    *((backend, "one micro-batch") for backend in ("ddp", "fsdp", "zero2", "zero2 offload")),
]  # fmt: skip


def train_routed(backend: str, routes: str, offloads: bool = False, **options: Any) -> Any:
    """Return a trainer of experts that has trained on rows with these routes."""
    x, y = rows(16, torch.float32).tensors
    x[:, 3] = torch.tensor(ROUTES[routes])
    if (backend, routes) == ("ddp", "one micro-batch"):  # in one step no rank uses an expert
        options["find_unused_parameters"] = True
    if offloads:
        zero = {"stage": int(backend[-1]), "offload_optimizer": {"device": "cpu"}}
        options["deepspeed_config"] = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    options |= {"batch_size": 4} if backend == "native" else {"batch_size": 1, "global_batch_size": 4}
    return fit(make_trainer(
        backend, Routed(), TensorDataset(x, y), loss_fn=F.mse_loss, epochs=1, learning_rate=0.05, optimizer="sgd",
        shuffle=False, **options,
    ))  # fmt: skip


def routed_weights(backend: str, routes: str, offloads: bool = False) -> dict[str, Any]:
    return {"tensors": tensors_of(train_routed(backend, routes, offloads))}


def routed_error(backend: str, routes: str) -> dict[str, Any]:
    """Train with each linear layer as a unit of FSDP, with ZeRO 3 or a static graph; return the error."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    options: dict[str, Any] = {"fsdp": {"fsdp_plugin": plugin}, "ddp": {"accelerator": {"static_graph": True}}}
    trace = Trace()
    with pytest.raises(Exception) as caught:
        train_routed(backend, routes, callbacks=[trace], **options.get(backend, {}))
    return {"raised": caught.typename, "message": str(caught.value), "steps": len(trace.learning_rates)}


@pytest.fixture(scope="module")
def weights(folder: Path, request: pytest.FixtureRequest) -> Any:
    """The weights of each case, and of one process, in few launches."""
    cases = sorted(asked_for(request, "backend", "routes"))
    cases += [("native", routes) for routes in {routes for _, routes in cases}]
    jobs = Jobs()
    for backend, routes in cases:
        offloads = "offload" in backend
        jobs.add(f"{backend} {routes}", backend.split()[0], routed_weights, routes=routes, offloads=offloads)
    return launch_all(jobs, folder / "routed")


@pytest.mark.parametrize(("backend", "routes"), thinned(SPLIT, QUICK_SPLIT))
def test_unused_parameters_on_some_ranks_train_as_on_one(weights: Any, backend: str, routes: str) -> None:
    """A rank or a micro-batch without a gradient counts as zeros: DeepSpeed and FSDP would mix up gradients."""
    for rank in weights[f"{backend} {routes}"]:
        assert "tensors" in rank, rank
        torch.testing.assert_close(rank["tensors"], weights[f"native {routes}"][0]["tensors"], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def errors(folder: Path, request: pytest.FixtureRequest) -> Any:
    """The error of each case, on processes of its own."""
    compile_once()
    cases = [
        Case(f"{sharding} {routes}", "test_partly_used:routed_error", {"backend": sharding, "routes": routes})
        for sharding, routes in sorted(asked_for(request, "sharding", "routes"))
    ]
    return play(cases, folder / "errors")


OTHER_LAYERS = {
    "one rank": (0, "rank 0 'experts.0', rank 1 'head'"), "third step": (2, "rank 0 'experts.0', rank 1 'experts.1'"),
    "fourth step": (3, "'experts.1' not on rank 0; 'experts.0' not on rank 1"),
}  # fmt: skip
"""How many steps are taken before the error, and what it says."""
SHARDED = list(itertools.product(("fsdp", "zero3"), OTHER_LAYERS))


@pytest.mark.parametrize(("sharding", "routes"), thinned(SHARDED, [*SHARDED[1:3], SHARDED[4]]))
def test_layers_called_on_some_ranks_raise(errors: Any, sharding: str, routes: str) -> None:
    """Ranks would gather parts of different weights: an error before the update names the layers."""
    steps, words = OTHER_LAYERS[routes]
    for outcome in errors[f"{sharding} {routes}"]:
        result = outcome.result
        assert result is not None, outcome.output[-2000:]
        assert result["raised"] in ("DistributedError", "RuntimeError")  # DeepSpeed's comes first on one rank
        assert result["steps"] == steps
        assert words in result["message"] and "on every rank in each forward pass" in result["message"]


@pytest.mark.parametrize(("sharding", "routes"), [("ddp", "third step")])
def test_static_graph_with_microbatches_is_rejected(errors: Any, sharding: str, routes: str) -> None:
    """PyTorch has an internal assertion for it."""
    for outcome in errors[f"{sharding} {routes}"]:
        assert outcome.result is not None and outcome.result["raised"] == "ConfigError", outcome
        assert "static_graph=True of DDP" in outcome.result["message"] and outcome.result["steps"] == 0
