"""Optimizers and schedules from what a user may pass: instances, names, paths, classes and callables."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from omnitrain import Trainer
from omnitrain.errors import ConfigError, MissingExtraError
from omnitrain.optimization import build_optimizer, build_scheduler, import_class
from omnitrain.schedules import NAMED
from omnitrain.settings import ScheduleName


class AnyOptions(torch.optim.AdamW):
    """Takes the options of its parent by **kwargs."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class NoOptions(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.7)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def optimizer_for(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# Optimizers


def test_optimizer_defaults_to_fused_adamw(model: nn.Module) -> None:
    optimizer = build_optimizer(None, model, 3e-4, 0.1)
    assert type(optimizer) is torch.optim.AdamW
    assert {key: optimizer.defaults[key] for key in ("lr", "weight_decay", "fused")} == {
        "lr": 3e-4,
        "weight_decay": 0.1,
        "fused": True,
    }


def test_optimizer_without_fused_kernel() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = build_optimizer(None, model, 1e-3, 0.0)
    assert not optimizer.defaults["fused"]
    (model[0].abs().sum()).backward()
    optimizer.step()


def test_optimizer_instance_is_kept(model: nn.Module) -> None:
    optimizer = optimizer_for(model)
    assert build_optimizer(optimizer, model, 1e-3, 0.0) is optimizer


@pytest.mark.parametrize(
    "spec",
    ["torch.optim.AdamW", "torch.optim.adamw.AdamW", torch.optim.AdamW, AnyOptions],
    ids=str,
)
def test_optimizer_class_gets_rate_and_decay(spec: Any, model: nn.Module) -> None:
    group = build_optimizer(spec, model, 0.25, 0.5).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)


def test_optimizer_class_gets_known_options(model: nn.Module) -> None:
    assert build_optimizer(torch.optim.Rprop, model, 0.25, 0.0).param_groups[0]["lr"] == 0.25
    assert build_optimizer(NoOptions, model, 2e-5, 0.0).param_groups[0]["lr"] == 0.7
    with pytest.raises(ConfigError, match=r"`weight_decay=0.5` has no effect: Rprop takes no argument"):
        build_optimizer(torch.optim.Rprop, model, 0.25, 0.5)
    with pytest.raises(ConfigError, match=r"`learning_rate=0.25` has no effect: NoOptions takes no argument 'lr'"):
        build_optimizer(NoOptions, model, 0.25, 0.0)


@pytest.mark.parametrize(
    "spec",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.9),
        functools.partial(torch.optim.SGD, lr=0.9),
        functools.partial(optimizer_for, lr=0.9),
    ],
)
def test_optimizer_callable_gets_parameters(spec: Any, model: nn.Module) -> None:
    if getattr(spec, "func", None) is optimizer_for:
        spec = lambda parameters: optimizer_for(model, 0.9)  # noqa: E731
    assert build_optimizer(spec, model, 0.25, 0.0).param_groups[0]["lr"] == 0.9


def test_optimizer_gets_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    for spec in (None, "torch.optim.SGD"):
        given_ = build_optimizer(spec, model, 1e-3, 0.0).param_groups[0]["params"]
        assert [id(parameter) for parameter in given_] == [id(parameter) for parameter in model[1].parameters()]


def test_optimizer_of_part_of_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    assert build_optimizer(optimizer, model, 1e-3, 0.0) is optimizer


@pytest.mark.parametrize(
    "spec, words",
    [
        ("torch.optim.AdamV", r"`optimizer='torch.optim.AdamV'` cannot be imported"),
        ("adamx", r"`optimizer` must be one of .*'adamw'.* got 'adamx'. Did you mean 'adam"),
        ("no_such_package.AdamW", "is in no package that is imported. Import 'no_such_package' before"),
        ("", "`optimizer` must be one of .* got ''"),
        (3, "`optimizer` must be an optimizer, its class.* got 3"),
        (lambda parameters: None, "must give an optimizer.* got None"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "SGD.*holds none of the model's parameters"),
    ],
)
def test_optimizer_rejects_wrong_values(spec: Any, words: str, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=words):
        build_optimizer(spec, model, 1e-3, 0.0)


def test_optimizer_rejects_frozen_model(model: nn.Module) -> None:
    for frozen in (model.requires_grad_(False), nn.ReLU()):
        with pytest.raises(ConfigError, match="nothing to train"):
            build_optimizer(None, frozen, 1e-3, 0.0)


def test_optimizer_path_to_any_object() -> None:
    assert import_class("torch.nn.Linear", nn.Module, "model") is nn.Linear


# Schedules


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The learning rate of every step, and of one after the end."""
    seen = []
    for _ in range(steps + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def ours_and_theirs(name: str, warmup: int, total: int) -> tuple[list[float], list[float]]:
    transformers = pytest.importorskip("transformers")
    result = []
    for build in (
        lambda one: build_scheduler(name, one, warmup_steps=warmup, total_steps=total),
        lambda one: transformers.get_scheduler(name, one, num_warmup_steps=warmup, num_training_steps=total),
    ):
        optimizer = optimizer_for(nn.Linear(1, 1), lr=0.1)
        result.append(rates(build(optimizer), optimizer, total))
    return result[0], result[1]


@settings(max_examples=40)
@given(st.sampled_from(["constant_with_warmup", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 40))
def test_schedule_names_equal_transformers(name: str, warmup: int, more: int) -> None:
    ours, theirs = ours_and_theirs(name, warmup, warmup + more)
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", ["cosine_with_restarts", "inverse_sqrt", "polynomial"])
def test_schedule_rare_names_equal_transformers(name: str) -> None:
    ours, theirs = ours_and_theirs(name, 2, 10)
    assert ours == theirs
    assert len(set(ours)) > 5


def test_schedule_constant_with_warmup() -> None:
    ours, theirs = ours_and_theirs("constant", 0, 10)
    assert ours == theirs == [0.1] * 11
    optimizer = optimizer_for(nn.Linear(1, 1))
    scheduler = build_scheduler("constant", optimizer, warmup_steps=2, total_steps=None)
    assert rates(scheduler, optimizer, 3) == [0.0, 0.5, 1.0, 1.0]


def test_schedule_of_warmup_only(model: nn.Module) -> None:
    optimizer = optimizer_for(model)
    assert build_scheduler(None, optimizer, warmup_steps=0, total_steps=10) is None
    scheduler = build_scheduler(None, optimizer, warmup_steps=4, total_steps=None)
    assert rates(scheduler, optimizer, 5) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_schedule_stays_after_end(name: str, model: nn.Module) -> None:
    optimizer = optimizer_for(model)
    scheduler = build_scheduler(name, optimizer, warmup_steps=0, total_steps=3)
    assert rates(scheduler, optimizer, 8)[3:] == [0.0] * 6


def test_schedule_scales_every_group(model: nn.Module) -> None:
    groups = [{"params": [parameter], "lr": lr} for parameter, lr in zip(model.parameters(), (1.0, 0.5), strict=True)]
    optimizer = torch.optim.SGD(groups)
    scheduler = build_scheduler("linear", optimizer, warmup_steps=0, total_steps=2)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


INSTANCES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: StepLR(optimizer, 2),
    lambda optimizer: CosineAnnealingLR(optimizer, 10),
    lambda optimizer: ReduceLROnPlateau(optimizer),
    lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ConstantLR(optimizer)], [2]),
    lambda optimizer: ChainedScheduler([LinearLR(optimizer), ConstantLR(optimizer)]),
]


@pytest.mark.parametrize("make", INSTANCES)
def test_schedule_instance_or_callable(make: Any, model: nn.Module) -> None:
    optimizer = optimizer_for(model)
    instance = make(optimizer)
    assert build_scheduler(instance, optimizer, warmup_steps=0, total_steps=None) is instance
    built = build_scheduler(make, optimizer, warmup_steps=0, total_steps=None)
    assert type(built) is type(instance) and built.optimizer is optimizer


def test_schedule_class(model: nn.Module) -> None:
    optimizer = optimizer_for(model)
    assert isinstance(build_scheduler(LinearLR, optimizer, warmup_steps=0, total_steps=None), LinearLR)


def refuse(spec: Any, words: str, *, warmup: int = 0, total: int | None = 10) -> None:
    with pytest.raises(ConfigError, match=words):
        build_scheduler(spec, optimizer_for(nn.Linear(1, 1)), warmup_steps=warmup, total_steps=total)


def test_schedule_rejects_other_optimizer() -> None:
    refuse(StepLR(optimizer_for(nn.Linear(1, 1)), 2), "belongs to another optimizer")


def test_schedule_unknown_name_suggests_nearest() -> None:
    refuse("cosin", r"`lr_scheduler` must be one of 'constant'.* got 'cosin'. Did you mean 'cosine'\?")


def test_schedule_rejects_wrong_values() -> None:
    refuse(5, "`lr_scheduler` must be a scheduler, a name or a callable of the optimizer, got 5")


def test_schedule_rejects_warmup_without_room() -> None:
    refuse(lambda optimizer: StepLR(optimizer, 2), "`warmup_steps=3` has no effect", warmup=3)
    refuse("linear", "`warmup_steps=10` leaves nothing of the run's 10 steps", warmup=10)
    refuse("cosine", "`warmup_steps=11` leaves nothing", warmup=11)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "cosine_with_restarts"])
def test_schedule_needs_length(name: str) -> None:
    refuse(name, f"`lr_scheduler='{name}'` needs the number of steps.*Set `max_steps`", total=None)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "inverse_sqrt"])
def test_schedule_without_end(name: str, model: nn.Module) -> None:
    assert build_scheduler(name, optimizer_for(model), warmup_steps=1, total_steps=None) is not None


def test_schedule_rare_name_without_transformers(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"lr_scheduler='warmup_stable_decay' needs transformers.*-e .*\[hf\]"):
        build_scheduler("warmup_stable_decay", optimizer_for(model), warmup_steps=0, total_steps=10)


def test_schedule_common_names_without_transformers(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in NAMED.keys() - {"cosine_with_min_lr", "step", "multistep", "exponential"}:
        assert build_scheduler(name, optimizer_for(model), warmup_steps=0, total_steps=10) is not None


def test_optimizer_signature_after_step(model: nn.Module) -> None:
    optimizer = optimizer_for(model)
    StepLR(optimizer, 1)  # replaces optimizer.step
    assert "closure" in inspect.signature(optimizer.step).parameters
    assert build_optimizer(optimizer, model, 1e-3, 0.0) is optimizer


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", "AdamW"), ("AdamW", "AdamW"), ("sgd", "SGD"), ("rmsprop", "RMSprop"), ("adagrad", "Adagrad")],
)
def test_optimizer_short_names(model: nn.Module, name: str, kind: str) -> None:
    optimizer = build_optimizer(name, model, 0.25, 0.5)
    assert type(optimizer) is getattr(torch.optim, kind)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.25, 0.5)


def test_optimizer_path_is_not_called(model: nn.Module) -> None:
    for path in ("os.system", "os.path.join", "subprocess.Popen", "builtins.eval"):
        with pytest.raises(ConfigError, match="not a subclass of"):
            build_optimizer(path, model, 0.25, 0.0)


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_schedule_literals_are_accepted(name: str) -> None:
    options: dict[str, Any] = {
        "cosine_with_min_lr": {"min_lr": 1e-6}, "cosine_warmup_with_min_lr": {"min_lr": 1e-6},
        "warmup_stable_decay": {"num_decay_steps": 2}, "step": {"step_size": "2ba"}, "exponential": {"gamma": 0.5},
        "multistep": {"milestones": ["0.5dur"]},
    }  # fmt: skip
    data = torch.rand(8, 4), torch.rand(8, 1)
    trainer = Trainer(
        torch.nn.Linear(4, 1), data, data, loss_fn=torch.nn.MSELoss(), lr_scheduler=name, max_steps=4, warmup_steps=0,
        lr_scheduler_kwargs=options.get(name), device="cpu",
    )  # fmt: skip
    trainer.train()
    page = (Path(__file__).parents[1] / "docs" / "arguments.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `lr_scheduler` |"))
    assert set(re.findall(r'`"(\w+)"`', row)) == set(get_args(ScheduleName))
