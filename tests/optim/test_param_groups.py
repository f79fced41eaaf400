"""`param_groups`, `freeze` and layer-wise decay: which parameters train, and with what options."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import StopAt, distance, fit, rows, small_trainer, t16, weights
from tiny import bert
from torch import nn
from transformers import TrainingArguments

from omnitrain import Callback, CheckpointError, ConfigError, HFTrainer, LinearScheduler, Trainer, layerwise_decay
from omnitrain.checkpoint.state_dicts import named_parameters
from omnitrain.optim.param_groups import group_parameters

GROUPS = [{"match": "bias", "weight_decay": 0.0}, {"match": r"^3\.", "lr_scale": 0.5}]


def make(kind: Any = Trainer, **options: Any) -> Any:
    defaults = {"batch_size": 8, "learning_rate": 0.05, "weight_decay": 0.1, "lr_scheduler": "cosine", "log_steps": 1}
    return small_trainer(kind=kind, data=rows(20), **{**defaults, **options})


def run(kind: Any = Trainer, resume: str | None = None, allow: Any = (), **options: Any) -> Any:
    return fit(make(kind, **options), resume_from=resume, allow_change=allow)


def groups_of(trainer: Any) -> list[tuple[list[str], float, float]]:
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return [
        ([names[id(weight)] for weight in group["params"]], group.get("initial_lr", group["lr"]), group["weight_decay"])
        for group in trainer.optimizer.param_groups
    ]


def test_param_groups_equal_groups_by_hand_and_resume(trainer_class: Any, tmp_path: Path) -> None:
    def by_hand(parameters: Any) -> torch.optim.Optimizer:
        first, *_, last, bias = model.parameters()
        groups = [{"params": [bias], "weight_decay": 0.0}, {"params": [last], "lr": 0.025}, {"params": [first]}]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)

    model = t16()
    model[0].bias.requires_grad_(False)
    plain = {"learning_rate": 2e-5, "weight_decay": 0.0}  # those of an optimizer that is made by hand
    expected = run(model=model, optimizer=by_hand, **plain)
    options = {"optimizer": "adamw", "param_groups": GROUPS, "freeze": [r"^0\.bias"]}
    split = {"batch_size": 2, "gradient_accumulation_steps": 4}
    run(trainer_class, **options, save_dir=tmp_path, callbacks=[StopAt(2)])
    for changes, bound in (({"save_dir": tmp_path, "resume": "auto"}, 0), (split, 1e-12)):
        trainer = run(trainer_class, **options, **changes)
        assert groups_of(trainer) == [(["3.bias"], 0.05, 0.0), (["3.weight"], 0.025, 0.1), (["0.weight"], 0.05, 0.1)]
        assert distance(weights(trainer.model), weights(expected.model)) <= bound
        assert torch.equal(trainer.model[0].bias, t16()[0].bias)  # type: ignore[index]


def test_param_groups_for_every_optimizer(tmp_path: Path) -> None:
    options = {"optim": "adafactor", "report_to": "none", "use_cpu": True}
    args = TrainingArguments(str(tmp_path), learning_rate=0.05, weight_decay=0.1, **options)
    groups = [{"match": r"layer\.1\.", "lr": 0.5}]
    trainer = HFTrainer(bert(num_hidden_layers=2), args, rows(4), param_groups=groups, progress_bar=False)
    assert type(trainer.optimizer).__name__ == "Adafactor"
    named = groups_of(trainer)
    assert [(rate, decay) for _, rate, decay in named] == [(0.5, 0.1), (0.05, 0.1), (0.5, 0.0), (0.05, 0.0)]
    assert all(("layer.1." in name) is (rate == 0.5) for names, rate, _ in named for name in names)
    assert all("bias" in name or "LayerNorm" in name for names, _, decay in named for name in names if not decay)
    options = {"learning_rate": 2e-5, "weight_decay": 0.0, "param_groups": [{"match": "weight", "momentum": 0.5}]}
    by_function = make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9), **options)
    assert [group["momentum"] for group in by_function.optimizer.param_groups] == [0.5, 0.9]


def test_param_groups_of_tied_and_compiled_models() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    model[2].weight = model[0].weight  # type: ignore[union-attr]
    trainer = make(model=model.double(), param_groups=[{"match": r"2\.weight", "lr": 0.5}])
    assert groups_of(trainer)[0] == (["0.weight"], 0.5, 0.1)
    compiled = torch.compile(t16(), backend="eager")
    trainer = make(model=compiled, param_groups=[{"match": r"^3\.", "lr": 0.5}], freeze=["^0.bias$"])
    assert groups_of(trainer)[0][1] == 0.5 and not trainer.get_model()[0].bias.requires_grad


LISTS = "must be a list of"


@pytest.mark.parametrize(("name", "value", "words"), [
    ("param_groups", [{"match": r"^9\.", "lr": 1.0}], r"\[0\]`: '\^9.*' is found in no name.* 0.weight"),
    ("param_groups", [{"match": ".", "lr": 1.0}, {"match": "bias", "lr": 0.1}], "'bias' is left without a parameter"),
    ("param_groups", [{"match": "bias", "weigth_decay": 0.0}], r"no option of AdamW .*'weight_decay'\?"),
    ("param_groups", [{"match": "bias", "betas": (0.9, 1.5)}], "AdamW rejects it: Invalid beta .* at index 1: 1.5"),
    ("param_groups", [{"match": "bias", "lr": -1.0}], "'lr' must be a finite number of at least 0, got -1.0"),
    ("param_groups", [{"match": "bias", "lr": 1.0, "lr_scale": 0.1}], "has both 'lr' and 'lr_scale'"),
    ("param_groups", [{"match": "bias"}], "must have options next to 'match'"),
    ("param_groups", [{"match": "(", "lr": 1.0}], r"must have a regular expression .* as 'match', got '\('"),
    *(("param_groups", value, f"`param_groups` {LISTS} dicts") for value in ({"match": "bias", "lr": 1.0}, [])),
    ("freeze", ["body"], "'body' is found in no name. The names are 0.weight, 0.bias"),
    ("freeze", ["weight", "bias"], r"`freeze=\['weight', 'bias'\]` leaves no parameter that trains"),
    *(("freeze", value, f"`freeze` {LISTS} regular expressions") for value in ("weight", ["["], [])),
])  # fmt: skip
def test_param_groups_and_freeze_reject_wrong_values(name: str, value: Any, words: str) -> None:
    model = t16()
    with pytest.raises(ConfigError, match=words):
        make(model=model, optimizer="adamw", **{name: value})
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_param_groups_reject_built_optimizer() -> None:
    model = t16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="`param_groups` has no effect with an `optimizer` instance"):
        make(model=model, optimizer=optimizer, param_groups=GROUPS, learning_rate=2e-5, weight_decay=0.0)
    with pytest.raises(ConfigError, match="`param_groups` would have no effect on an optimizer that is assigned"):
        make(param_groups=GROUPS).optimizer = optimizer


def test_freeze_keeps_parameters(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omnitrain")
    trainer = run(freeze=["bias"], param_groups=[{"match": "bias", "lr": 1.0}, {"match": r"^0\.", "lr": 0.5}])
    assert [parameter.requires_grad for parameter in trainer.model.parameters()] == [True, False, True, False]
    assert "bias: frozen" in caplog.text and "the rest: 1 tensors, 16 values, lr 0.05" in caplog.text


def test_param_groups_reject_changes_on_resume(trainer_class: Any, tmp_path: Path) -> None:
    options = {"kind": trainer_class, "save_dir": tmp_path, "lr_scheduler": "linear"}
    run(**options, callbacks=[StopAt(3)], freeze=[r"^0\."])
    with pytest.raises(CheckpointError, match=r"freeze: \['\^0.*'\] -> None"):
        run(**options, resume="auto")
    options["param_groups"] = [{"match": "bias", "lr_scale": 0.1}]
    with pytest.raises(CheckpointError, match=r"param_groups: None -> \[\{'match': 'bias', 'lr_scale': 0.1"):
        run(**options, freeze=[r"^0\."], resume="auto")
    look = Look()
    trainer = run(**options, callbacks=[look], resume="auto", allow={"freeze", "param_groups"})
    # step 3 of 6 of a linear schedule; what trained before has its moments, what did not has none
    assert look.rates == pytest.approx([0.0025, 0.025])
    assert look.steps == {"0.weight": None, "0.bias": None, "3.weight": 3.0, "3.bias": 3.0}
    assert all(group["weight_decay"] == 0.1 for group in trainer.optimizer.param_groups)
    assert trainer.progress.step == 6


class Look(Callback):
    def on_train_start(self, trainer: Any) -> None:
        self.rates = [group["lr"] for group in trainer.optimizer.param_groups]
        states = {name: trainer.optimizer.state.get(weight, {}) for name, weight in trainer.model.named_parameters()}
        self.steps = {name: float(state["step"]) if "step" in state else None for name, state in states.items()}


def test_param_groups_change_under_a_schedule_in_time_only(tmp_path: Path) -> None:
    look = Look()
    change = {"param_groups": GROUPS, "resume": "auto", "allow": {"param_groups", "freeze"}, "callbacks": [look]}
    options = {"save_dir": tmp_path / "steps", "lr_scheduler": lambda it: torch.optim.lr_scheduler.StepLR(it, 2)}
    run(**options, callbacks=[StopAt(3)])
    with pytest.raises(CheckpointError, match="another number of parameter groups, and `lr_scheduler` is a sched"):
        run(**options, **change)
    options = {"save_dir": tmp_path / "time", "lr_scheduler": LinearScheduler()}
    run(**options, callbacks=[StopAt(3)])
    trainer = run(**options, **change, freeze=["^0.bias"])
    assert look.rates == pytest.approx([0.025, 0.0125, 0.025])
    assert look.steps["0.bias"] is None and look.steps["0.weight"] == 3 and len(trainer.optimizer.state) == 3


def test_param_groups_are_kept_as_text() -> None:
    groups = [{"match": "bias", "betas": (0.8, 0.9)}, {"match": "0.weight", "lr": 1.0}]
    config = make(param_groups=groups, freeze=["3.bias"]).resolved_config()
    assert config["param_groups"] == [{"match": "bias", "betas": [0.8, 0.9]}, {"match": "0.weight", "lr": 1.0}]
    assert config["freeze"] == ["3.bias"]
    assert [group["lr"] for group in config["optimizer_groups"]] == [0.05, 1.0, 0.05]


def test_layer_wise_decay_lowers_rates() -> None:
    model = bert(num_hidden_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    group_parameters(optimizer, named_parameters(model), layerwise_decay(model, 0.5))
    rate_of = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        block = 2 if "layer.1." in name else 1 if "layer.0." in name else 0 if "embeddings" in name else 3
        assert rate_of[id(parameter)] == 0.5 ** (3 - block), name
    with pytest.raises(ConfigError, match=r"layerwise_decay\(\) finds no blocks in Sequential"):
        layerwise_decay(t16())
    with pytest.raises(ConfigError, match="`decay` must be a finite number above 0 and of at most 1, got 1"):
        layerwise_decay(model, 1.5)
