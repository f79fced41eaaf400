"""Parameters and layers that only some ranks use in a step: the numbers of one process, or an error before it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Job, asked_for, launch_all, make_trainer, tensors_of
from compiled import compile_once
from forking import ON_CPU, Case, play
from marks import thinned
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import HookCallback

HERE = Path(__file__).stem


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
SPLIT = [(backend, "one rank") for backend in ("ddp", "hf2", "fsdp", "zero1", "zero2", "zero2 offload")]
SPLIT += [
    (backend, "one micro-batch") for backend in ("ddp", "fsdp", "zero2", "zero3", "zero2 offload", "zero3 offload")
]
QUICK_SPLIT = [("ddp", "one rank"), ("fsdp", "one rank"), ("zero1", "one rank"), ("zero2", "one rank")]
QUICK_SPLIT += [("zero3", "one micro-batch"), ("zero3 offload", "one micro-batch")]


def train_routed(backend: str, routes: str, offloads: bool = False, **options: Any) -> Any:
    """Return a trainer of experts that has trained on rows with these routes."""
    generator, numbers = torch.Generator().manual_seed(7), ROUTES[routes]
    data = torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)
    data[0][:, 3] = torch.tensor(numbers)
    if (backend, routes) == ("ddp", "one micro-batch"):  # in one step no rank uses an expert
        options["find_unused_parameters"] = True
    options |= {"batch_size": 4} if backend == "native" else {"batch_size": 1, "global_batch_size": 4}
    trainer_options = {
        "loss_fn": F.mse_loss, "epochs": 1, "learning_rate": 0.05, "optimizer": "sgd", "shuffle": False, **options
    }  # fmt: skip
    if offloads:
        from omnitrain import AccelerateTrainer

        zero = {"stage": int(backend[-1]), "offload_optimizer": {"device": "cpu"}}
        trainer_options["deepspeed_config"] = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
        trainer: Any = AccelerateTrainer(Routed(), TensorDataset(*data), progress_bar=False, **trainer_options)
    else:
        trainer = make_trainer(backend, Routed(), TensorDataset(*data), **trainer_options)
    trainer.train()
    return trainer


def routed_weights(backend: str, routes: str, offloads: bool = False) -> dict[str, Any]:
    return {"tensors": tensors_of(train_routed(backend, routes, offloads))}


def routed_error(backend: str, routes: str) -> dict[str, Any]:
    """Train with each linear layer as a unit of FSDP, with ZeRO 3 or a static graph; return the error."""
    options: dict[str, Any] = {}
    if backend == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
        )
    elif backend == "ddp":
        options["accelerator"] = {"static_graph": True}
    updates: list[int] = []
    options["callbacks"] = [HookCallback({"on_step_end": lambda trainer: updates.append(trainer.progress.step)})]
    try:
        train_routed(backend, routes, **options)
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error), "steps": updates}
    return {"raised": "", "message": "", "steps": updates}


@pytest.fixture(scope="module")
def weights(folder: Path, request: pytest.FixtureRequest) -> Any:
    """The weights of each case, and of one process, in few launches."""
    cases = sorted(asked_for(request, "backend", "routes"))
    cases += [("native", routes) for routes in {routes for _, routes in cases}]
    jobs = [
        Job(f"{backend} {routes}", backend.split()[0], f"{HERE}:routed_weights",
            {"routes": routes, "offloads": "offload" in backend})
        for backend, routes in cases
    ]  # fmt: skip
    return launch_all(jobs, folder / "routed")


@pytest.mark.parametrize(("backend", "routes"), thinned(SPLIT, QUICK_SPLIT))
def test_unused_parameters_on_some_ranks_train_as_on_one(weights: Any, backend: str, routes: str) -> None:
    """A rank or a micro-batch without a gradient counts as zeros: DeepSpeed and FSDP would mix up gradients."""
    expected = weights[f"native {routes}"][0]["tensors"]
    for rank in weights[f"{backend} {routes}"]:
        assert "tensors" in rank, rank
        for name, tensor in rank["tensors"].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def errors(folder: Path, request: pytest.FixtureRequest) -> Any:
    """The error of each case, on processes of its own."""
    compile_once()
    cases = [
        Case(f"{sharding} {routes}", f"{HERE}:routed_error", {"backend": sharding, "routes": routes},
             environment={} if sharding == "zero3" else ON_CPU)
        for sharding, routes in sorted(asked_for(request, "sharding", "routes"))
    ]  # fmt: skip
    return play(cases, folder / "errors")


OTHER_LAYERS = [
    (sharding, routes) for sharding in ("fsdp", "zero3") for routes in ("one rank", "third step", "fourth step")
]


@pytest.mark.parametrize(
    ("sharding", "routes"),
    thinned(OTHER_LAYERS, [("fsdp", "third step"), ("fsdp", "fourth step"), ("zero3", "third step")]),
)
def test_layers_called_on_some_ranks_raise(errors: Any, sharding: str, routes: str) -> None:
    """Ranks would gather parts of different weights: an error before the update names the layers."""
    for outcome in errors[f"{sharding} {routes}"]:
        result = outcome.result
        assert result is not None, outcome.output[-2000:]
        steps = {"one rank": 0, "third step": 2, "fourth step": 3}[routes]
        assert result["raised"] in ("DistributedError", "RuntimeError")  # DeepSpeed's comes first on one rank
        assert result["steps"] == [*range(1, steps + 1)]
        difference = "'experts.1' not on rank 0; 'experts.0' not on rank 1"
        expected = {"one rank": "rank 0 'experts.0', rank 1 'head'", "fourth step": difference}
        assert expected.get(routes, "rank 0 'experts.0', rank 1 'experts.1'") in result["message"]
        assert "on every rank in each forward pass" in result["message"]


@pytest.mark.parametrize(("sharding", "routes"), [("ddp", "third step")])
def test_static_graph_with_microbatches_is_rejected(errors: Any, sharding: str, routes: str) -> None:
    """PyTorch has an internal assertion for it."""
    for outcome in errors[f"{sharding} {routes}"]:
        assert outcome.result is not None and outcome.result["raised"] == "ConfigError", outcome
        assert "static_graph=True of DDP" in outcome.result["message"] and not outcome.result["steps"]
