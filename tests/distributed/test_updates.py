"""Updates on two processes: optimizers by name, sparse gradients, parameters that ranks use in part; or errors."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import FullyShardedDataParallelPlugin
from backends import DTYPES, Jobs, asked_for, dtype_of, gap, launch_all, make_trainer, tensors_of
from compiled import compile_once
from forking import Case, play
from marks import thinned
from recipes import Bags, Trace, bags, callback, fit, rows, t16
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import GradientCheck
from omnitrain.callbacks.gradient_check import _find_differences

HERE = Path(__file__).stem


# --- every optimizer where weights are sharded


NAMES = sorted(
    name.lower() for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)  # fmt: skip
UNSUPPORTED = {
    ("lbfgs", "fsdp"): "which cannot work here", ("lbfgs", "zero"): "which DeepSpeed does not give it",
    ("adafactor", "fsdp"): r"\(Adafactor\) cannot update weights that FSDP shards: .* Use another one, such as 'adamw'",
    ("adafactor", "zero"): "where Adafactor needs whole matrices. Use DDP",
    ("rprop", "fsdp"): r"\(Rprop\) cannot update weights that FSDP shards: ",
    ("muon", "zero"): "where Muon needs whole matrices. Use FSDP or DDP",
    ("sparseadam", "fsdp"): "takes sparse gradients only", ("sparseadam", "zero"): "takes sparse gradients only",
}  # fmt: skip
CASES = [(name, backend) for name in NAMES for backend in ("fsdp", "zero2")] + [("adamw", "zero1"), ("adamw", "zero3")]
QUICK = [("adafactor", "fsdp"), ("rprop", "fsdp"), ("adamw", "fsdp"), ("adafactor", "zero2"), ("adagrad", "fsdp"),
         ("adagrad", "zero2"), ("lbfgs", "fsdp"), ("lbfgs", "zero2"), ("muon", "zero2")]  # fmt: skip


def train(backend: str, optimizer: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer = fit(make_trainer(
        backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, epochs=1, batch_size=2, global_batch_size=4,
        optimizer=optimizer, learning_rate=0.01, save_dir=folder,
    ))  # fmt: skip
    if backend == "fsdp":
        trainer.optimizer.state_dict()  # has no state of the weights before they were sharded
    return {"tensors": tensors_of(trainer)}


# --- sparse gradients that cannot be trained; those that can are in test_kinds_of_training.py


class Table(nn.Module):
    """An embedding whose weight is that of a linear layer too, or a table that no layer holds."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        embedding = nn.Embedding(20, 4, sparse=True)
        self.table = embedding if is_tied else embedding.weight
        self.head = nn.Linear(4, 20, bias=False) if is_tied else nn.Identity()
        if is_tied:
            self.head.weight = embedding.weight

    def forward(self, indices: Any) -> Any:
        is_tied = isinstance(self.table, nn.Module)
        rows = self.table(indices) if is_tied else F.embedding(indices, self.table, sparse=True)
        return self.head(rows).mean((1, 2))


def reject(backend: str, case: str, folder: str) -> dict[str, Any]:
    dtype = DTYPES[dtype_of(backend)]
    model = Bags(True, dtype=dtype) if case == "bags" else Table(case == "tied")
    make_trainer(
        backend, model, bags(8, dtype), loss_fn=F.mse_loss, epochs=1,
        optimizer="adamw" if case == "tied" else "sgd", save_dir=folder,
    ).train()  # fmt: skip
    return {"error": "", "message": ""}


REJECTED = [
    ("fsdp", "bags"), ("zero3", "bags"), ("ddp", "tied"), ("ddp", "functional"), ("zero1", "bags"), ("hf_fsdp", "bags"),
    ("hf_zero2", "bags"),
]  # fmt: skip
MESSAGES = {
    "bags": "'table.weight' are sparse, which cannot be trained here: .* sparse=False",
    "tied": "'table.weight' belongs to an embedding with sparse=True and to another layer",
    "functional": "A gradient is sparse of which DDP did not know",
}


# --- parameters that a step does not use under DDP


UNUSED = [("ddp", "later"), ("ddp", "at the end"), ("ddp", "found"), ("hf2", "never")]


class Experts(nn.Module):
    """Has layers of which steps do not use all; "later": from the third on; "at the end": in the fourth alone."""

    def __init__(self, when: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.first, self.second, self.third = (nn.Linear(4, 1) for _ in range(4))
        self.when, self.passes = when, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.base(x)
        if self.training:
            self.passes += 1
        if self.passes <= {"later": 4, "at the end": 6}.get(self.when, 0):  # two passes in a step
            output = output + self.first(x) + self.second(x) + self.third(x)
        return output


def train_partly(backend: str, when: str) -> dict[str, Any]:
    """Train for 4 steps of two micro-batches; return the error, and the steps before it."""
    return end_of(make_trainer(
        backend, Experts(when), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=1, global_batch_size=4,
        epochs=1, learning_rate=0.01, **({"find_unused_parameters": True} if when == "found" else {}),
    ))  # fmt: skip


def end_of(trainer: Any) -> dict[str, Any]:
    error = ""
    try:
        trainer.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "step": trainer.progress.step}


# --- parameters and layers that only some ranks use in a step


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


OTHER_LAYERS = {
    "one rank": (0, "rank 0 'experts.0', rank 1 'head'"), "third step": (2, "rank 0 'experts.0', rank 1 'experts.1'"),
    "fourth step": (3, "'experts.1' not on rank 0; 'experts.0' not on rank 1"),
}  # fmt: skip
"""How many steps are taken before the error, and what it says."""
SHARDED = list(itertools.product(("fsdp", "zero3"), OTHER_LAYERS))


# --- options of DDP


DDP_OPTIONS = [
    {"static_graph": True, "bucket_cap_mb": 7, "gradient_as_bucket_view": True},
    {"sync_each_batch": True, "find_unused_parameters": True}, {},
]  # fmt: skip


def train_with_options(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train for 4 steps, of two micro-batches each unless the graph is static."""
    trainer = fit(make_trainer(
        backend, t16(), rows(16), loss_fn=F.mse_loss, batch_size=2 if "static_graph" in options else 1,
        global_batch_size=4, epochs=1, learning_rate=0.01, accelerator=options,
    ))  # fmt: skip
    ddp = trainer.model_wrapped
    shown = {"static_graph": ddp.static_graph, "bucket_cap_mb": ddp.bucket_bytes_cap >> 20}
    shown |= {name: getattr(ddp, name) for name in ("gradient_as_bucket_view", "find_unused_parameters")}
    shown["sync_each_batch"] = trainer.backend._syncs_each_batch
    return {"tensors": tensors_of(trainer), "options": shown}


# --- gradients that a callback changes on one rank


DIFFERENCE = r"DistributedError: .*gradient of '3\.weight' differs between ranks at step 3: its norm is "
CHECKED = {
    ("ddp", True): (2, DIFFERENCE), ("ddp", False): (4, "^$"), ("fsdp", False): (4, "^$"),
    ("hf2", True): (2, DIFFERENCE),
    ("zero2", False): (0, "ConfigError: .*DeepSpeed keeps them in its own buffers"),
}  # fmt: skip
"""Backend, whether a gradient differs, the steps that are taken, and the error."""


def change_on_rank_1(trainer: Any) -> None:
    if trainer.rank == 1 and trainer.progress.step == 2:
        trainer.model[3].weight.grad[0, 5] *= 1.5


def check_gradients(backend: str, changes: bool) -> dict[str, Any]:
    changing = [callback(on_before_clip=change_on_rank_1)] if changes else []
    return end_of(make_trainer(
        backend, t16(dtype=torch.float32), rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=2, max_steps=4,
        max_grad_norm=None, callbacks=[GradientCheck(2), *changing],
    ))  # fmt: skip


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Any:
    jobs = Jobs()
    optimizers = asked_for(request, "name", "backend")
    trained = {(name, "native") for name, backend in optimizers if (name, backend.rstrip("123")) not in UNSUPPORTED}
    for name, backend in sorted({*optimizers, *trained}):
        jobs.add(f"{name}-{backend}", backend, train, optimizer=name, folder=str(folder / f"{name}-{backend}"))
    for backend, case in sorted(asked_for(request, "backend", "case"), key=REJECTED.index):
        jobs.add(f"reject-{backend}-{case}", backend, reject, case=case, folder=str(folder / f"{case}-{backend}"))
    for number, options in enumerate(DDP_OPTIONS):
        jobs.add(f"ddp-options-{number}", "ddp", train_with_options, options=options)
    split = asked_for(request, "backend", "routes")
    for backend, routes in sorted(split | {("native", routes) for _, routes in split}):
        offloads = "offload" in backend
        jobs.add(f"{backend} {routes}", backend.split()[0], routed_weights, routes=routes, offloads=offloads)
    return launch_all(jobs, folder / "launches")


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Any:
    """Each case of unused parameters on separate processes, which an error ends."""
    functions = {
        ("backend", "when"): "train_partly", ("backend", "changes"): "check_gradients",
        ("sharding", "routes"): "routed_error",
    }  # fmt: skip
    compile_once()
    return play([
        Case(f"{backend}-{value}", f"{HERE}:{function}", {"backend": backend, names[1]: value})
        for names, function in functions.items() for backend, value in sorted(asked_for(request, *names))
    ], folder / "unused")  # fmt: skip


@pytest.mark.parametrize(("name", "backend"), thinned(CASES, QUICK))
def test_optimizers_train_sharded_weights(results: Any, folder: Path, name: str, backend: str) -> None:
    ranks = results[f"{name}-{backend}"]
    message = UNSUPPORTED.get((name, backend.rstrip("123")))
    if message is not None:
        for rank in ranks:
            assert rank["error"] == "ConfigError" and re.search(message, rank["message"])
        assert not list((folder / f"{name}-{backend}").glob("*"))
        return
    (expected,) = results[f"{name}-native"]
    limit = 1e-3 if name == "muon" else 1e-5  # Muon computes in bfloat16
    assert all(gap(rank["tensors"], expected["tensors"]) < limit for rank in ranks)


@pytest.mark.parametrize(("backend", "case"), thinned(REJECTED, REJECTED[:4]))
def test_sparse_gradients_that_cannot_be_trained_raise(results: Any, folder: Path, backend: str, case: str) -> None:
    for rank in results[f"reject-{backend}-{case}"]:
        assert rank["error"] == "ConfigError" and re.search(MESSAGES[case], rank["message"])
    assert not list((folder / f"{case}-{backend}").glob("checkpoint*"))


@pytest.mark.parametrize(("backend", "when"), UNUSED)
def test_unused_parameters_raise_before_the_update(outcomes: Any, backend: str, when: str) -> None:
    expected = "6 parameters on any rank: first.weight, first.bias, second.weight, second.bias, third.weight, ..."
    for outcome in outcomes[f"{backend}-{when}"]:
        error = outcome.result["error"]
        assert outcome.result["step"] == {"never": 0, "later": 2, "at the end": 3, "found": 4}[when]
        if when == "found":
            assert not error
        else:
            assert error.startswith("DistributedError: ") and "find_unused_parameters=True" in error
            assert expected in error


@pytest.mark.parametrize(("backend", "routes"), thinned(SPLIT, QUICK_SPLIT))
def test_unused_parameters_on_some_ranks_train_as_on_one(results: Any, backend: str, routes: str) -> None:
    """A rank or a micro-batch without a gradient counts as zeros: DeepSpeed and FSDP would mix up gradients."""
    for rank in results[f"{backend} {routes}"]:
        assert "tensors" in rank, rank
        torch.testing.assert_close(rank["tensors"], results[f"native {routes}"][0]["tensors"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sharding", "routes"), thinned(SHARDED, [*SHARDED[1:3], SHARDED[4]]))
def test_layers_called_on_some_ranks_raise(outcomes: Any, sharding: str, routes: str) -> None:
    """Ranks would gather parts of different weights: an error before the update names the layers."""
    steps, words = OTHER_LAYERS[routes]
    for outcome in outcomes[f"{sharding}-{routes}"]:
        result = outcome.result
        assert result is not None, outcome.output[-2000:]
        assert result["raised"] in ("DistributedError", "RuntimeError")  # DeepSpeed's comes first on one rank
        assert result["steps"] == steps
        assert words in result["message"] and "on every rank in each forward pass" in result["message"]


@pytest.mark.parametrize(("sharding", "routes"), [("ddp", "third step")])
def test_static_graph_with_microbatches_is_rejected(outcomes: Any, sharding: str, routes: str) -> None:
    """PyTorch has an internal assertion for it."""
    for outcome in outcomes[f"{sharding}-{routes}"]:
        assert outcome.result is not None and outcome.result["raised"] == "ConfigError", outcome
        assert "static_graph=True of DDP" in outcome.result["message"] and outcome.result["steps"] == 0


@pytest.mark.parametrize(("backend", "changes"), thinned(CHECKED, [*CHECKED][:3]))
def test_gradients_that_differ_raise_on_all_ranks(outcomes: Any, backend: str, changes: bool) -> None:
    """In the first step that is checked, before its update; under FSDP no two ranks have the same part of one."""
    steps, words = CHECKED[backend, changes]
    for number, outcome in enumerate(outcomes[f"{backend}-{changes}"]):
        assert outcome.result["step"] == steps and re.search(words, outcome.result["error"])
        assert outcome.output.count("compares nothing") == int(backend == "fsdp" and number == 0)


def test_options_of_ddp_reach_it_and_change_no_number(results: Any) -> None:
    for number, options in enumerate(DDP_OPTIONS):
        for rank, plain in zip(results[f"ddp-options-{number}"], results["ddp-options-2"], strict=True):
            assert rank["options"] == {**plain["options"], **options}
            assert gap(rank["tensors"], plain["tensors"]) < 1e-12


def test_gradient_check_compares_shards_by_place() -> None:
    """Of a hybrid mesh of two replicas of two shards; and what a rank lacks."""
    ranks: list[Any] = [{("a", (0,)): 1}, {("a", (1,)): 2}, {("a", (0,)): 1}, {("a", (1,)): 2}]
    assert _find_differences(ranks) == []
    assert _find_differences([*ranks[:3], {("a", (1,)): 3}]) == [("a", (1,))]
    assert _find_differences([*ranks[:3], {}]) == [("a", (1,))]
    assert _find_differences(ranks[:2]) is None
    assert _find_differences([{("b", ()): 1, ("c", ()): 1}, {("b", ()): 1}]) == [("c", ())]
