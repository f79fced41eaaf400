"""Optimizers and schedules from what a user may pass: instances, names, paths, classes and callables."""

import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from fake_device import FakeDevice
from recipes import fit, rows, t16
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

from omnitrain import HFTrainer
from omnitrain.arguments import ScheduleName
from omnitrain.core.errors import CheckpointError, ConfigError, MissingExtraError
from omnitrain.optim.build import build_optimizer, build_scheduler
from omnitrain.optim.schedules import NAMED, RunLength


class AnyOptions(torch.optim.AdamW):
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


def test_optimizer_defaults_to_fused_adamw(model: nn.Module) -> None:
    optimizer = build_optimizer(None, model, 3e-4, 0.1)
    assert type(optimizer) is torch.optim.AdamW
    assert [optimizer.defaults[key] for key in ("lr", "weight_decay", "fused")] == [3e-4, 0.1, True]
    with FakeDevice():  # as on a GPU
        optimizers = [build_optimizer(name, model, 1.0, 0.0) for name in ("adam", "sgd", "rprop")]
        assert [optimizer.defaults.get("fused") for optimizer in optimizers] == [True, True, None]
        assert build_optimizer("adam", model, 1.0, 0.0, {"foreach": True}).defaults["fused"] is None
        assert build_optimizer("sgd", nn.Embedding(3, 2, sparse=True), 1.0, 0.0).defaults["fused"] is None
    assert build_optimizer("sgd", model, 1.0, 0.0).defaults["fused"] is None
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])  # which has no fused kernel
    optimizer = build_optimizer(None, model, 1e-3, 0.0)
    assert not optimizer.defaults["fused"]
    model[0].abs().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("spec", ["torch.optim.adamw.AdamW", torch.optim.SGD, AnyOptions, "AdamW", "rmsprop"], ids=str)
def test_optimizer_class_gets_rate_and_decay(spec: Any, model: nn.Module) -> None:
    optimizer = build_optimizer(spec, model, 0.25, 0.5)
    name = spec if isinstance(spec, str) else spec.__name__
    assert type(optimizer).__name__.lower() == name.rpartition(".")[2].lower()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.25, 0.5)


def test_optimizer_class_gets_known_options(model: nn.Module) -> None:
    assert build_optimizer(torch.optim.Rprop, model, 0.25, 0.0).param_groups[0]["lr"] == 0.25
    assert build_optimizer(NoOptions, model, 2e-5, 0.0).param_groups[0]["lr"] == 0.7
    with pytest.raises(ConfigError, match=r"`weight_decay=0.5` has no effect: Rprop takes no argument"):
        build_optimizer(torch.optim.Rprop, model, 0.25, 0.5)
    with pytest.raises(ConfigError, match=r"`learning_rate=0.25` has no effect: NoOptions takes no argument 'lr'"):
        build_optimizer(NoOptions, model, 0.25, 0.0)


def test_optimizer_gets_trainable_parameters_or_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    for spec in (None, "torch.optim.SGD", lambda parameters: torch.optim.SGD(parameters, lr=0.9)):
        group = build_optimizer(spec, model, 1e-3, 0.0).param_groups[0]
        assert group["lr"] == (0.9 if callable(spec) else 1e-3)
        assert [id(parameter) for parameter in group["params"]] == [id(weight) for weight in model[1].parameters()]
    optimizer = optimizer_for(model[1])  # an instance is used unchanged, with a `step` that a schedule has replaced too
    StepLR(optimizer, 1)
    assert build_optimizer(optimizer, model, 1e-3, 0.0) is optimizer


@pytest.mark.parametrize(("spec", "words"), [
    ("torch.optim.AdamV", r"`optimizer='torch.optim.AdamV'` cannot be imported"),
    ("adamx", r"`optimizer` must be one of .*'adamw'.* got 'adamx'. Did you mean 'adam"),
    ("no_such_package.AdamW", "is in no package that is imported. Import 'no_such_package' before"),
    ("", "`optimizer` must be one of .* got ''"),
    (3, "`optimizer` must be an optimizer, its class.* got 3"),
    (lambda parameters: None, "must return an optimizer.* got None"),
    (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "SGD.*holds none of the model's parameters"),
    *((path, "not a subclass of") for path in ("os.system", "os.path.join", "subprocess.Popen")),
])  # fmt: skip
def test_optimizer_rejects_wrong_values(spec: Any, words: str, model: nn.Module) -> None:
    for nothing_to_train in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ConfigError, match="nothing to train"):
            build_optimizer(None, nothing_to_train, 1e-3, 0.0)
    with pytest.raises(ConfigError, match=words):
        build_optimizer(spec, model, 1e-3, 0.0)


def test_schedule_of_groups_and_endless_runs(model: nn.Module) -> None:
    groups = [{"params": [parameter], "lr": lr} for parameter, lr in zip(model.parameters(), (1.0, 0.5), strict=True)]
    optimizer, rates = torch.optim.SGD(groups), []
    scheduler = build_scheduler(None, optimizer, warmup_steps=4, run_length=RunLength())
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert rates == [[rate, rate / 2] for rate in (0.0, 0.25, 0.5, 0.75, 1.0, 1.0)]
    assert build_scheduler(None, optimizer, warmup_steps=0, run_length=RunLength(end=10)) is None
    for endless in ("constant", "constant_with_warmup", "inverse_sqrt"):
        assert build_scheduler(endless, optimizer, warmup_steps=1, run_length=RunLength()) is not None


@pytest.mark.parametrize("make", [
    LinearLR,
    lambda optimizer: ReduceLROnPlateau(optimizer),
    lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ConstantLR(optimizer)], [2]),
    lambda optimizer: ChainedScheduler([LinearLR(optimizer), ConstantLR(optimizer)]),
])  # fmt: skip
def test_schedule_instance_or_callable(make: Any, model: nn.Module) -> None:
    optimizer = optimizer_for(model)
    instance = make(optimizer)
    assert build_scheduler(instance, optimizer, warmup_steps=0, run_length=RunLength()) is instance
    built = build_scheduler(make, optimizer, warmup_steps=0, run_length=RunLength())
    assert type(built) is type(instance) and built.optimizer is optimizer


@pytest.mark.parametrize(("spec", "warmup", "total", "words"), [
    (StepLR(optimizer_for(nn.Linear(1, 1)), 2), 0, 10, "belongs to another optimizer"),
    ("cosin", 0, 10, r"`lr_scheduler` must be one of 'constant'.* got 'cosin'. Did you mean 'cosine'\?"),
    (5, 0, 10, "`lr_scheduler` must be a scheduler, a name or a callable of the optimizer, got 5"),
    (lambda optimizer: StepLR(optimizer, 2), 3, 10, "`warmup_steps=3` has no effect"),
    ("linear", 10, 10, "`warmup_steps=10` leaves nothing of the run's 10 steps"),
    *((name, 0, None, f"`lr_scheduler='{name}'` needs the number of steps.*Set `max_steps`")
      for name in ("linear", "cosine", "polynomial", "cosine_with_restarts")),
])  # fmt: skip
def test_schedule_rejects_wrong_values(spec: Any, warmup: int, total: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_scheduler(spec, optimizer_for(nn.Linear(1, 1)), warmup_steps=warmup, run_length=RunLength(end=total))


def test_schedule_names_without_transformers(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in NAMED.keys() - {"cosine_with_min_lr", "step", "multistep", "exponential"}:
        assert build_scheduler(name, optimizer_for(model), warmup_steps=0, run_length=RunLength(end=10)) is not None
    with pytest.raises(MissingExtraError, match=r"lr_scheduler='warmup_stable_decay' needs transformers.*-e .*\[hf\]"):
        build_scheduler("warmup_stable_decay", optimizer_for(model), warmup_steps=0, run_length=RunLength(end=10))


def test_schedule_literals_are_known_and_documented() -> None:
    names = set(get_args(ScheduleName))
    assert NAMED.keys() <= names <= NAMED.keys() | {kind.value for kind in transformers.SchedulerType}
    page = (Path(__file__).parents[2] / "docs" / "arguments.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `lr_scheduler` |"))
    assert set(re.findall(r'`"(\w+)"`', row)) == names


RUN: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "epochs": 1, "progress_bar": False}


def test_optimizer_has_its_own_rate_unless_one_is_given(trainer_class: Any) -> None:
    for options, expected in (
        ({"optimizer": "sgd"}, 1e-3), ({"optimizer": "adadelta"}, 1.0), ({"optimizer": torch.optim.LBFGS}, 1.0),
        ({"optimizer": "sgd", "learning_rate": 2e-5}, 2e-5), ({"optimizer": "adamw"}, 2e-5), ({}, 2e-5),
        ({"optimizer": torch.optim.Adam}, 1e-3),
    ):  # fmt: skip
        trainer = trainer_class(t16(), rows(4), **RUN, **options)
        assert trainer.learning_rate == expected
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {expected}


@pytest.mark.parametrize("spec", [None, "adamw", torch.optim.AdamW, AnyOptions], ids=str)
def test_optimizer_kwargs_reach_the_optimizer(spec: Any, model: nn.Module) -> None:
    optimizer = build_optimizer(spec, model, 0.25, 0.5, {"betas": [0.8, 0.9], "eps": 1e-6})
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], list(group["betas"]), group["eps"]) == (0.25, 0.5, [0.8, 0.9], 1e-6)


@pytest.mark.parametrize(("spec", "options", "message"), [
    (None, {"beta": (0.9, 0.95)}, "'beta', which is no option of AdamW.*mean 'betas'"),
    ("sgd", {"lr": 0.1}, "has 'lr'. Pass `learning_rate=0.1`"),
    ("sgd", {"params": []}, "'params', which is no option of SGD"),
    ("adamw", {"betas": (2.0, 0.9)}, "AdamW raises ValueError: Invalid beta"),
    ("adamw", {"betas": (0.9,)}, "AdamW raises IndexError"),
    ("sgd", {"foreach": True, "fused": True}, "SGD raises RuntimeError.*cannot be `True` together"),
    ("sgd", {"momentum": float("nan")}, r"`optimizer_kwargs\['momentum'\]` must be a finite number, got nan"),
    ("adamw", {"amsgrad": "no"}, r"`optimizer_kwargs\['amsgrad'\]` must be True or False, got 'no'"),
    ("muon", {"fused": 1}, r"`optimizer_kwargs\['fused'\]` must be True or False, got 1"),
    (None, {"capturable": True}, "capturable=True, which is for CUDA graphs, and the model is on a CPU. Leave it out"),
    ("sgd", {"differentiable": True}, "differentiable=True, for gradients through the update itself"),
    ("muon", {"momentun": 1}, "no option of Muon and AdamW.*mean 'momentum'"),
    (optimizer_for, {"momentum": 0.9}, "has no effect on an `optimizer` that is neither name nor class"),
])  # fmt: skip
def test_optimizer_kwargs_are_rejected(spec: Any, options: Any, message: str) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_optimizer(spec, layers, 0.1, 0.0, options)


def test_optimizer_kwargs_are_arguments_of_trainers(trainer_class: Any, tmp_path: Path) -> None:
    def make(options: Any) -> Any:
        return trainer_class(t16(), rows(8), optimizer_kwargs=options, optimizer="sgd", save_dir=tmp_path, **RUN)

    trainer = fit(make({"momentum": 0.5}))
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5
    with pytest.raises(ConfigError, match="`optimizer_kwargs` would have no effect"):
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer_groups"):
        make({"momentum": 0.9}).train(resume_from="last")
    with pytest.raises(ConfigError, match=r"`optimizer_kwargs` must be a dict of what `optimizer` takes.*got 3"):
        make(3)
    if trainer_class is HFTrainer:
        args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
        with pytest.raises(ConfigError, match="Set its fields instead, such as adam_beta2"):
            HFTrainer(t16(), args, rows(8), optimizer_kwargs={"betas": (0.8, 0.9)})
