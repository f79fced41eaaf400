"""Hooks under nnScaler's names."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import fit, rows, same, small_trainer, t16, weights

from omnitrain import ConfigError, HookCallback, Trainer, TrainHook
from omnitrain.core.events import Callback

NAMES = [name for name in vars(TrainHook) if not name.startswith("_")]
STEP = ["before_zero_grad", "after_zero_grad", "on_step_end"]
CALLS = [
    "after_setup", "on_train_start", "on_epoch_start", "on_step_start", "on_train_step_start", "on_train_step_end",
    "after_sync_grad", "before_gnorm_clip", "after_gnorm_clip", "before_optimizer_step", "after_optimizer_step", *STEP,
    "before_log_train_metrics", "on_val_start", *["on_val_step_start", "on_val_step_end"] * 2,
    "before_log_val_metrics", "on_val_end", "on_save_checkpoint", "on_epoch_end",
]  # fmt: skip


def trainer_with(*callbacks: Callback, **options: Any) -> Trainer:
    options = {"epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.05, **options}
    return small_trainer(data=rows(4), callbacks=callbacks, **options)


def writing(calls: list[tuple[Any, ...]]) -> dict[str, Any]:
    return {name: lambda trainer, *details, name=name: calls.append((name, *details)) for name in NAMES}


def test_hooks_are_called_in_the_order_of_nnscaler(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    options = {"eval_dataset": rows(4), "eval_steps": 1, "save_steps": 1, "log_steps": 1, "max_grad_norm": 1.0}
    trainer = fit(trainer_with(HookCallback(writing(calls)), save_dir=tmp_path, **options))
    names, metrics = [call[0] for call in calls], trainer.metrics
    begin = names.index("after_setup")
    assert names[begin : begin + len(CALLS)] == CALLS
    assert names[-2:] == ["on_train_end", "on_finalize"]
    of = {name: details for name, *details in calls}
    batches, idx = of["on_train_step_start"]
    assert [len(batch[0]) for batch in batches] == [2, 2] and idx == 0
    outputs, same_batches, _ = of["on_train_step_end"]
    assert [output.loss.item() > 0 for output in outputs] == [True, True] and same_batches is batches
    assert of["on_epoch_end"] == [0] and of["on_step_end"] == [0, 0] and of["on_val_step_end"][2] == 1
    assert of["on_val_end"] == [metrics["valid"][0]["eval_loss"]]
    assert float(of["after_gnorm_clip"][0]) == pytest.approx(metrics["train_metrics_history"][0]["grad_norm"])
    trainer.evaluate()
    assert len(calls) == len(names)  # no validation of the run


def test_hooks_may_take_fewer_arguments() -> None:
    calls: list[Any] = []
    hooks = {
        "on_train_step_end": lambda trainer, outputs: calls.append(len(outputs)),
        "on_train_step_start": lambda trainer, idx: calls.append(idx),
        "on_epoch_start": lambda trainer, number: calls.append(number),
        "on_epoch_end": lambda *everything: calls.append(everything[1:]),
    }
    trainer_with(HookCallback(hooks)).train()
    assert calls == [0, 0, 2, (0,)]
    assert trainer_with(HookCallback({"on_epoch_end": print})).lifecycle.emit_in_step is None


def test_hooks_change_no_weights_and_keep_no_outputs() -> None:
    outputs: list[Any] = []

    def refer(trainer: Any, details: Any) -> None:
        outputs.extend(weakref.ref(output.loss) for output in details)

    callback = HookCallback(dict.fromkeys(NAMES, lambda trainer: None) | {"on_train_step_end": refer})
    trainer = fit(trainer_with(callback, model=t16(dropout=0.3), epochs=3))
    plain = fit(trainer_with(model=t16(dropout=0.3), epochs=3))
    assert same(weights(trainer.model), weights(plain.model))
    gc.collect()
    assert len(outputs) == 6 and not any(output() is not None for output in outputs)


def test_hook_state_is_saved_and_restored(tmp_path: Path) -> None:
    class Counts(TrainHook):
        def __init__(self) -> None:
            self.state = {"steps": 0, "totals": torch.zeros(2)}

        def after_optimizer_step(self, trainer: Any) -> None:
            self.state = {name: value + 1 for name, value in self.state.items()}

        def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint |= self.state

        def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            assert trainer.progress.step == checkpoint["steps"]
            self.state = {name: checkpoint[name] for name in self.state}

    trainer_with(HookCallback(Counts()), save_dir=tmp_path, epochs=2).train()
    hook = Counts()
    trainer_with(HookCallback(hook), save_dir=tmp_path, epochs=3).train(resume_from="auto")
    assert hook.state["steps"] == 3 and hook.state["totals"].tolist() == [3.0, 3.0]


def test_failing_hooks_and_callbacks_are_reported_by_class() -> None:
    def fail(self: Any, trainer: Any, *details: Any) -> None:
        raise RuntimeError("boom")

    hook = HookCallback(type("Bad", (TrainHook,), {"before_gnorm_clip": fail})())
    callback = type("Bad", (Callback,), {"on_after_forward": fail})()
    for part, event in ((hook, "on_before_clip"), (callback, "on_after_forward")):
        with pytest.raises(RuntimeError, match="boom") as caught:
            trainer_with(part).train()
        assert caught.value.__notes__[0] == f"Raised by the callback Bad.{event}."
        assert not any("sample" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("name", "reason"), [
    ("on_epochs_start", r"no hook has that name. Did you mean 'on_epoch_start'\?"),
    ("before_sync_grad", "gradients are averaged over the ranks during the last backward pass"),
    ("after_aggregate_train_step_outputs", ".*added up over the ranks only for logs"),
    ("after_aggregate_val_step_outputs", ".*added up over the ranks only at its end"),
])  # fmt: skip
def test_hooks_that_are_never_called_are_rejected(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"Mine.{name} would never be called: .*{reason}"):
        type("Mine", (TrainHook,), {name: lambda self, trainer: None})
    with pytest.raises(ConfigError, match=f"would never be called.*{reason}"):
        HookCallback({name: print})
    with pytest.raises(ConfigError, match="derived from TrainHook and from Callback"):
        type("Both", (TrainHook, Callback), {})
