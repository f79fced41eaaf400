"""Hooks under nnScaler's names: when each is called, with what, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import rows, same, t16, weights
from torch import nn

from omnitrain import ConfigError, HookCallback, Trainer, TrainHook
from omnitrain.callbacks.hooks import _DETAILS
from omnitrain.events import Callback, Event

STEP = ["before_zero_grad", "after_zero_grad", "on_step_end"]
CALLS = [
    "after_setup", "on_train_start", "on_epoch_start", "on_step_start", "on_train_step_start", "on_train_step_end",
    "after_sync_grad", "before_gnorm_clip", "after_gnorm_clip", "before_optimizer_step", "after_optimizer_step", *STEP,
    "before_log_train_metrics", "on_val_start", *["on_val_step_start", "on_val_step_end"] * 2,
    "before_log_val_metrics", "on_val_end", "on_save_checkpoint", "on_epoch_end",
]  # fmt: skip


def trainer_with(*callbacks: Callback, model: nn.Module | None = None, **options: Any) -> Trainer:
    options = {"epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 2, **options}
    return Trainer(
        model or t16(), rows(4), callbacks=callbacks, loss_fn=F.mse_loss, device="cpu", progress_bar=False,
        learning_rate=0.05, **options,
    )  # fmt: skip


def writing(calls: list[tuple[Any, ...]], *names: str) -> dict[str, Any]:
    def hook(name: str) -> Any:
        return lambda trainer, *details: calls.append((name, *details))

    return {name: hook(name) for name in names or _DETAILS}


def test_hooks_come_in_nnscalers_order_with_what_it_gives_them(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    callback = HookCallback(writing(calls))
    trainer = trainer_with(
        callback, eval_dataset=rows(4), eval_steps=1, save_dir=tmp_path, save_steps=1, log_steps=1, max_grad_norm=1.0
    )
    metrics = trainer.train()
    begin = next(number for number, call in enumerate(calls) if call[0] == "after_setup")
    names = [call[0] for call in calls]
    assert names[begin : begin + len(CALLS)] == CALLS
    assert names[-2:] == ["on_train_end", "on_finalize"]
    of = {name: details for name, *details in calls}
    batches, idx = of["on_train_step_start"]
    assert [len(batch[0]) for batch in batches] == [2, 2] and idx == 0
    outputs, same_batches, _ = of["on_train_step_end"]
    assert [one.loss.item() > 0 for one in outputs] == [True, True] and same_batches is batches
    assert of["on_epoch_end"] == [0] and of["on_step_end"] == [0, 0] and of["on_val_step_end"][2] == 1
    assert of["on_val_end"] == [metrics["valid"][0]["eval_loss"]]
    assert float(of["after_gnorm_clip"][0]) == pytest.approx(metrics["train_metrics_history"][0]["grad_norm"])
    trainer.evaluate()
    assert [call[0] for call in calls[len(names) :]] == []  # no validation of the run


def test_a_hook_may_take_fewer_details_by_name_or_by_place() -> None:
    calls: list[Any] = []

    class Brief(TrainHook):
        def on_train_step_end(self, trainer: Any, outputs: Any) -> None:  # type: ignore[override]
            calls.append(len(outputs))

        def on_train_step_start(self, trainer: Any, idx: int) -> None:  # type: ignore[override]
            calls.append(idx)

        def on_epoch_start(self, trainer: Any, number: int) -> None:  # type: ignore[override]
            calls.append(number)

        def on_epoch_end(self, *everything: Any) -> None:  # type: ignore[override]
            calls.append(everything[1:])

    trainer_with(HookCallback(Brief())).train()
    assert calls == [0, 0, 2, (0,)]


def test_hooks_listen_to_the_events_that_they_need_and_to_no_others() -> None:
    idle = HookCallback({"on_epoch_end": print})
    heard = {event for event in Event if getattr(idle, f"on_{event}").__func__ is not vars(Callback)[f"on_{event}"]}
    assert heard == {Event.EPOCH_START, Event.EPOCH_END}
    assert trainer_with(idle).lifecycle.inside_of_step is None


def test_watching_by_hooks_changes_no_bit_and_keeps_no_output() -> None:
    models = [t16(dropout=0.3), t16(dropout=0.3)]
    watched = HookCallback(writing([], *(name for name in _DETAILS if "checkpoint" not in name)))
    trainer_with(watched, model=models[0], epochs=3).train()
    trainer_with(model=models[1], epochs=3).train()
    assert same(weights(models[0]), weights(models[1]))
    assert not watched._outputs and not watched._batches


def test_the_state_of_a_hook_is_in_checkpoints_and_comes_back_with_the_trainer_restored(tmp_path: Path) -> None:
    class Counts(TrainHook):
        def __init__(self) -> None:
            self.steps, self.seen = 0, torch.zeros(2)

        def after_optimizer_step(self, trainer: Any) -> None:
            self.steps, self.seen = self.steps + 1, self.seen + 1

        def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint |= {"steps": self.steps, "seen": self.seen}

        def on_load_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            assert trainer.progress.step == checkpoint["steps"]
            self.steps, self.seen = checkpoint["steps"], checkpoint["seen"]

    trainer_with(HookCallback(Counts()), save_dir=tmp_path, epochs=2).train()
    hook = Counts()
    trainer_with(HookCallback(hook), save_dir=tmp_path, epochs=3).train(resume_from="auto")
    assert hook.steps == 3 and hook.seen.tolist() == [3.0, 3.0]


def test_a_failing_hook_is_named_by_its_class() -> None:
    class Bad(TrainHook):
        def before_gnorm_clip(self, trainer: Any) -> None:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom") as caught:
        trainer_with(HookCallback(Bad())).train()
    assert "Raised by the callback Bad.on_before_clip." in caught.value.__notes__


def test_an_error_of_a_callback_around_the_forward_pass_is_not_blamed_on_samples() -> None:
    class Bad(Callback):
        def on_after_forward(self, trainer: Any, batch: Any, output: Any) -> None:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        trainer_with(Bad()).train()
    assert caught.value.__notes__[0] == "Raised by the callback Bad.on_after_forward."
    assert not any("sample" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("on_epochs_start", "no hook has that name. Did you mean 'on_epoch_start'?"),
        ("before_sync_grad", "gradients are averaged over the ranks while the last backward pass makes them"),
        ("after_aggregate_train_step_outputs", "added up over the ranks for a row of logs alone"),
        ("after_aggregate_val_step_outputs", "added up over the ranks at its end alone"),
    ],
)
def test_a_hook_that_would_never_be_called_is_refused_when_it_is_defined(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="would never be called") as caught:
        type("Mine", (TrainHook,), {name: lambda self, trainer: None})
    assert f"Mine.{name} would never be called: " in str(caught.value) and reason in str(caught.value)
    with pytest.raises(ConfigError, match="would never be called") as caught:
        HookCallback({name: print})
    assert reason in str(caught.value)


def test_what_cannot_be_called_so_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The hook on_epoch_end is called with trainer, epoch, got .*\(a, b, c\)"):
        HookCallback({"on_epoch_end": lambda a, b, c: None})
    with pytest.raises(ConfigError, match=r"The hook 'on_epoch_end' must be a function of the trainer, got 3"):
        HookCallback({"on_epoch_end": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"Pass an instance, such as HookCallback\(MyHook\(\)\)"):
        HookCallback(TrainHook)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="derived from TrainHook and from Callback"):
        type("Both", (TrainHook, Callback), {})
