"""Methods that subclasses of trainers may and may not override."""

import re
from typing import Any

import pytest
import torch
from marks import TRAINERS
from recipes import rows, t16, trainer_on_cpu
from torch import nn
from torch.nn.functional import mse_loss

from omnitrain import BaseTrainer, Callback, ConfigError, HFTrainer, Trainer
from omnitrain.core.events import Algorithm, Event
from omnitrain.hf.calls import OVERRIDABLE
from omnitrain.trainer.hooks import EVENTS_OF_TRAINERS, METHODS_OF_MODELS, NEVER_CALLED, members_of_user

HOOKS = ["_prepare_batch", "_forward", "_weigh", "_backward", "_clip_gradients", "_gradient_norm", "_apply_update"]


def nothing(self: Any, *args: Any) -> None: ...


def test_method_that_is_never_called_cannot_be_overridden(trainer_class: type) -> None:
    for name in NEVER_CALLED:
        if trainer_class is not HFTrainer or name not in OVERRIDABLE:
            with pytest.raises(TypeError, match=f"^Mine overrides {name}[ ,].*(Use .* instead|`engine_class`)\\.$"):
                type("Mine", (trainer_class,), {name: nothing})
    for event in Event:
        with pytest.raises(TypeError, match=f"overrides on_{event}, which is never called. Use a callback"):
            type("Mine", (trainer_class,), {f"on_{event}": nothing})
    with pytest.raises(TypeError, match="Mine overrides configure_optimizers"):
        type("Mine", (type("Mixin", (), {"configure_optimizers": nothing}), trainer_class), {})
    with pytest.raises(TypeError, match="Grandchild overrides validation_step"):
        type("Grandchild", (type("Child", (trainer_class,), {}),), {"validation_step": nothing})


def test_custom_methods_and_attributes_are_allowed(trainer_class: type) -> None:
    mixin = type("Mixin", (), {"my_own": nothing})
    subclass = type("Mine", (mixin, trainer_class), {"on": 3, "online": True, "_helper": nothing})
    assert {"my_own", "on", "online", "_helper"} <= members_of_user(subclass).keys()
    assert not {name for name in members_of_user(trainer_class) if not name.startswith("_")}


def test_hooks_are_called_on_every_trainer(trainer_class: type[BaseTrainer]) -> None:
    calls: list[str] = []

    def hook(name: str) -> Any:
        return lambda self, *args: calls.append(name) or getattr(trainer_class, name)(self, *args)

    mine: Any = type("Mine", (trainer_class,), {name: hook(name) for name in HOOKS})
    mine(t16(), rows(8), loss_fn=mse_loss, batch_size=4, epochs=1, progress_bar=False).train()
    assert {name: calls.count(name) for name in HOOKS} == dict.fromkeys(HOOKS, 2)


def build(kind: Any, model: nn.Module | None = None, **options: Any) -> Any:
    return trainer_on_cpu(kind, model or t16(), rows(8), **{"loss_fn": mse_loss, **options})


@pytest.mark.parametrize(("kind", "name", "event"), [
    *((kind, "on_step_end", "on_step_end") for kind in TRAINERS.values()),
    (Trainer, "on_train_epoch_start", "on_epoch_start"), (Trainer, "on_train_batch_end", "on_batch_end"),
    (Trainer, "on_epoch_begin", "on_epoch_start"), (Trainer, "on_validation_epoch_end", "on_eval_end"),
    (Trainer, "on_save_checkpoint", "on_<event>"),
])  # fmt: skip
def test_event_methods_of_models_and_optimizers_are_rejected(kind: Any, name: str, event: str) -> None:
    methods = {name: nothing}
    unit = type("U", (), {**methods, "__call__": nothing})()
    for part, options in {
        "model": {"model": model_with(name)},
        "optimizer": {"optimizer": type("Own", (torch.optim.SGD,), methods)},
        "algorithms": {"algorithms": [type("Mine", (Algorithm,), methods)()]},
        "unit": {"unit": unit, "loss_fn": None},
    }.items():
        with pytest.raises(ConfigError, match=rf"`{part}` \(\w+\) has a method {name}\(\).*Callback with {event}\("):
            build(kind, **options)


def model_with(name: str, base: type = nn.Sequential) -> nn.Module:
    return type("Net", (base,), {name: nothing})(nn.Linear(4, 1, dtype=torch.float64))


def test_uncalled_methods_of_models_are_rejected(trainer_class: Any) -> None:
    for name, (instead, _) in METHODS_OF_MODELS.items():
        message = rf"`model` \(Net\) has a method {name}\(\), which nothing calls. Use {re.escape(instead)}"
        with pytest.raises(ConfigError, match=message):
            build(trainer_class, model_with(name))


def test_methods_of_models_that_users_call_are_allowed(trainer_class: Any) -> None:
    model = model_with("configure_optimizers")
    build(trainer_class, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # as nanoGPT does
    build(trainer_class, model_with("training_step"), unit=lambda batch: 0, loss_fn=None)
    build(trainer_class, model_with("val_dataloader"), eval_dataset=rows(8))
    build(trainer_class, model_with("get_metrics"), eval_dataset=rows(8), compute_metrics="mae")
    mine = type("Mine", (trainer_class,), {"_forward": lambda self, model, batch: model.training_step(batch)})
    build(mine, model_with("training_step"))
    members = {"training_step": nothing, "optimizer_step": nothing, "__module__": "lightning.pytorch.core.module"}
    build(trainer_class, model_with("helper", type("LightningModule", (nn.Sequential,), members)))


def test_event_methods_of_library_base_classes_are_allowed() -> None:
    everything = dict.fromkeys(EVENTS_OF_TRAINERS, nothing)
    base = type("LightningModule", (nn.Sequential,), {**everything, "__module__": "lightning.pytorch.core.module"})
    members = {"on_device": nothing, "on": nothing, "on_step_end_of_mine": nothing, "on_save": False}
    build(Trainer, model=model_with("helper", type("Net", (base,), members)))
    both = type("Both", (Algorithm, Callback), {"on_step_end": nothing})()
    build(Trainer, algorithms=[both], callbacks=[both])
    with pytest.raises(ConfigError, match=r"on_train_epoch_end\(\), which nothing calls"):
        build(Trainer, model=model_with("on_train_epoch_end", base))
