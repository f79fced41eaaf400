"""What only one device and its loss scaler can show; what all trainers share is in test_parity.py."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from marks import thinned
from recipes import Sentences, Tagger, Trace, distance, rows, same, t16, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from omnitrain import (
    EMA,
    SAM,
    SWA,
    Algorithm,
    BaseTrainer,
    Callback,
    ConfigError,
    DataError,
    DistributedError,
    GradualUnfreezing,
    HookCallback,
    MixUp,
    NonFiniteError,
    Trainer,
)

OPTIONS: dict[str, Any] = {"device": "cpu", "progress_bar": False, "loss_fn": F.mse_loss}


def make(model: nn.Module, data: Any, **options: Any) -> Trainer:
    return Trainer(model, data, **{**OPTIONS, "log_steps": 1, "learning_rate": 0.05, **options})


class Custom(BaseTrainer):
    """A loop of the user's own."""

    def _setup_training_components(self) -> None:
        self.model.to(self.device)

    def _prepare_batch(self, batch: Any) -> Any:
        return tuple(tensor.to(self.device) for tensor in batch)

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        total = 0.0
        for batch in self.train_loader:
            x, y = self._prepare_batch(batch)
            loss = F.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / len(self.train_loader)


# --- several processes


@pytest.mark.parametrize("kind", [Trainer, Custom])
def test_trainer_rejects_several_processes(
    kind: type[BaseTrainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = tmp_path / "run"
    with pytest.raises(DistributedError, match=rf"^{kind.__name__} .* one of 2, .* Use AccelerateTrainer"):
        kind(t16(), rows(8), save_dir=folder, **OPTIONS)
    assert not folder.exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert kind(t16(), rows(8), **OPTIONS).world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK")  # left in the environment by hand
    assert kind(t16(), rows(8), **OPTIONS).world_size == 1


# --- precision


def test_bf16_autocast_keeps_weights_and_moments_in_fp32() -> None:
    model, dtypes = nn.Linear(4, 1), set()
    model.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    trainer = make(model, rows(8, torch.float32), autocast="bfloat16", epochs=1)
    trainer.train()
    assert dtypes == {torch.bfloat16}
    state = next(iter(trainer.optimizer.state.values()))
    assert trainer.model.weight.dtype == state["exp_avg"].dtype == torch.float32


# --- non-finite numbers


def poisoned(index: int = 5) -> TensorDataset:
    x, y = rows(20).tensors
    x, y = x.clone(), y.clone()
    y[index] = math.nan
    return TensorDataset(x, y)


def test_nan_raises_with_step_and_sample_before_the_update(tmp_path: Path) -> None:
    model = t16()
    states = [weights(model)]
    keep = HookCallback({"on_step_end": lambda trainer: states.append(weights(trainer.model))})
    trainer = make(model, poisoned(), callbacks=[keep], batch_size=2, gradient_accumulation_steps=3, save_dir=tmp_path)
    with pytest.raises(NonFiniteError, match=r"step \d+ .*samples of the training set: 5\.") as caught:
        trainer.train()
    assert same(states[-1], weights(model))
    report = json.loads((tmp_path / "nonfinite.json").read_text())
    assert report["sample_indices"] == [5] and report["step"] == trainer.progress.step + 1
    assert f"step {report['step']} " in str(caught.value)


def test_nan_with_warn_continues_like_plain_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(t16(), poisoned(), batch_size=20, epochs=1, on_nonfinite="warn")
    trainer.train()
    assert "not finite at step 1" in caplog.text
    assert not all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_micro_batch_without_labels_changes_nothing() -> None:
    data = Sentences(6)
    data.labels[4:] = -100  # the mean over no label is NaN
    with_empty, without = Tagger(), Tagger()
    options: dict[str, Any] = {"shuffle": False, "epochs": 1, "loss_fn": None, "optimizer": torch.optim.SGD}
    make(with_empty, data, batch_size=2, gradient_accumulation_steps=3, **options).train()
    make(without, torch.utils.data.Subset(data, range(4)), batch_size=4, **options).train()
    assert distance(weights(with_empty), weights(without)) <= 1e-15


# --- how losses are reduced


def sum_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, labels, reduction="sum")


def test_sum_reduction_adds_up_losses() -> None:
    split, whole = t16(), t16()
    options: dict[str, Any] = {"loss_fn": sum_loss, "optimizer": torch.optim.SGD, "learning_rate": 1e-3}
    options |= {"grad_reduction": "sum", "batch_size": 2, "gradient_accumulation_steps": 4}
    make(split, rows(7), epochs=1, max_grad_norm=None, **options).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
    sum_loss(whole(rows(7).tensors[0]), rows(7).tensors[1]).backward()
    optimizer.step()
    assert distance(weights(split), weights(whole)) <= 1e-14


def test_per_token_mean_needs_counted_tokens() -> None:
    model = t16()
    unit = lambda batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    for words, options in (("per-token-mean", {}), ("num_targets", {"loss_fn": None, "unit": unit})):
        with pytest.raises(DataError, match=words):
            make(model, rows(8), grad_reduction="per-token-mean", **options).train()


@pytest.mark.parametrize(("reduction", "batch", "accumulation"), [("mean", 3, 3), ("per-token-mean", 1, 8)])
def test_unit_of_sum_and_count_gives_the_mean_of_the_window(reduction: str, batch: int, accumulation: int) -> None:
    model, reference, steps = Tagger(), Tagger(), []

    class Unit:
        def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
            count = int((batch["labels"] != -100).sum())
            return model(**batch)["loss"] * count, count

        def set_step_nr(self, step: int) -> None:
            steps.append(step)

    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "epochs": 1, "max_grad_norm": None, "loss_fn": None}
    trace = Trace()
    make(
        model, Sentences(8), unit=Unit(), grad_reduction=reduction, batch_size=batch,
        gradient_accumulation_steps=accumulation, callbacks=[trace], **options,
    ).train()  # fmt: skip
    other = Trace()
    make(reference, Sentences(8), batch_size=8, callbacks=[other], **options).train()
    assert distance(weights(model), weights(reference)) <= 1e-15
    assert trace.logs[0]["loss"] == pytest.approx(other.logs[0]["loss"], abs=1e-14)
    assert steps == [1]


# --- data of every kind


def test_user_loader_is_used_unchanged() -> None:
    epochs: list[int] = []

    class Sampler(torch.utils.data.Sampler[int]):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

        def __iter__(self) -> Any:
            return iter(range(9, -1, -1))

        def __len__(self) -> int:
            return 10

    ours, theirs = t16(), t16()
    loader = DataLoader(rows(10), 4, sampler=Sampler())
    make(ours, None, train_loader=loader, epochs=2).train()
    backwards = TensorDataset(*(tensor.flip(0) for tensor in rows(10).tensors))
    make(theirs, backwards, batch_size=4, epochs=2, shuffle=False).train()
    assert epochs == [0, 1] and same(weights(ours), weights(theirs))


def test_test_set_never_selects_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make(t16(), rows(8), eval_dataset=rows(4), test_dataset=rows(6), epochs=1)
    best = dict(trainer.train()["best_valid"])
    result = trainer.test()
    assert set(result) == {"test_loss"} and trainer.metrics["test"][0]["loss"] == result["test_loss"]
    assert dict(trainer.metrics["best_valid"]) == best
    assert list(tmp_path.iterdir()) == []  # nothing is written without a `save_dir`


# --- algorithms


def test_batch_transforms_run_in_order_loss_ones_in_reverse() -> None:
    calls: list[str] = []

    class Named(Algorithm):
        def __init__(self, name: str) -> None:
            self.name = name

        def transform_batch(self, trainer: Any, batch: Any) -> Any:
            calls.append(f"batch {self.name}")
            return batch

        def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
            calls.append(f"loss {self.name}")
            return loss * 1

        def transform_metrics(self, trainer: Any, metrics: dict[str, float]) -> dict[str, float]:
            return {**metrics, f"eval_{self.name}": 1.0}

    trainer = make(t16(), rows(4), eval_dataset=rows(4), epochs=1, algorithms=[Named("a"), Named("b")])
    assert {"eval_a", "eval_b"} <= set(trainer.train()["valid"][0])
    assert calls == ["batch a", "batch b", "loss b", "loss a"]


# --- loops of the user's own


def test_custom_loop_of_three_overrides_has_all_features() -> None:
    options: dict[str, Any] = {**OPTIONS, "batch_size": 4, "epochs": 3, "learning_rate": 0.05}
    trace, custom, native = Trace(), t16(), t16()
    trainer = Custom(custom, rows(20), rows(6), patience=5, callbacks=[trace], **options)
    metrics = trainer.train()
    make(native, rows(20), max_grad_norm=None, **options).train()
    assert same(weights(custom), weights(native))  # the same order of samples, epoch by epoch
    assert trainer.progress.step == 15 and len(metrics["valid"]) == 3
    assert [row["step"] for row in metrics["train_metrics_history"]] == [5, 10, 15]
    assert trace.events.count("epoch_end") == 3


ALGORITHMS: dict[str, Any] = {
    "ema": lambda: EMA(0.5), "swa of steps": lambda: SWA("0.2dur", every=2), "swa": SWA, "freezing": GradualUnfreezing,
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(ALGORITHMS, ["ema", "freezing"]))
def test_custom_loop_supports_averages_and_freezing(name: str, tmp_path: Path) -> None:
    results: list[Any] = []
    for kind, clip in ((Custom, 1.0), (Trainer, None)):
        options = {**OPTIONS, "batch_size": 4, "epochs": 2, "learning_rate": 0.05, "max_grad_norm": clip}
        options |= {"algorithms": [ALGORITHMS[name]()], "save_dir": tmp_path / kind.__name__}
        trainer = kind(t16(), rows(20), rows(6), **options)
        metrics = trainer.train()
        results.append((weights(trainer.get_model()), metrics["valid"]))
    assert same(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_custom_loop_rejects_algorithms_that_it_never_calls() -> None:
    class Halve(Algorithm):
        def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss / 2

    class Through(Trainer):
        def _train_epoch(self, epoch: int) -> float:
            return super()._train_epoch(epoch)

    options: dict[str, Any] = {**OPTIONS, "batch_size": 4}
    for algorithm, place in ((Halve(), "transform_loss"), (SAM(), "before_second_pass"), (MixUp(), "transform_batch")):
        model = t16()
        with pytest.raises(ConfigError, match=rf"{type(algorithm).__name__}, whose {place}\(\) nothing calls"):
            Custom(model, rows(20), algorithms=[algorithm], **options).train()
        assert same(weights(model), weights(t16()))
    halved = [kind(t16(), rows(20), algorithms=[Halve(), EMA()], **options) for kind in (Through, Trainer)]
    for trainer in halved:
        trainer.train()
    assert same(*(weights(trainer.get_model()) for trainer in halved))


def test_custom_loop_needs_no_training_set() -> None:
    class MultiTask(Trainer):
        def __init__(self, model: nn.Module, task_datasets: dict[str, Any], **options: Any) -> None:
            self.task_datasets = task_datasets
            super().__init__(model, **options)

        def _train_epoch(self, epoch: int) -> float:
            losses = []
            for data in self.task_datasets.values():
                x, y = data.tensors
                loss = F.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
            return sum(losses) / len(losses)

    trainer = MultiTask(t16(), {"a": rows(8), "b": rows(9)}, eval_dataset=rows(4), epochs=2, **OPTIONS)
    metrics = trainer.train()
    assert trainer.progress.step == 4 and len(metrics["valid"]) == 2


def test_custom_loop_that_returns_nothing_is_an_error() -> None:
    class Forgetful(Custom):
        def _train_epoch(self, epoch: int) -> Any:
            super()._train_epoch(epoch)

    with pytest.raises(ValueError, match="_train_epoch must return"):
        Forgetful(t16(), rows(8), **OPTIONS).train()


def test_custom_loop_steps_the_schedule_by_step_or_epoch() -> None:
    class Stepping(Custom):
        def _train_epoch(self, epoch: int) -> float:
            handle = self.optimizer.register_step_post_hook(lambda *_: self.lr_scheduler.step())
            try:
                return super()._train_epoch(epoch)
            finally:
                handle.remove()

    for kind, options in ((Stepping, {}), (Custom, {"scheduler_interval": "epoch"})):
        trainer = kind(t16(), rows(20), **OPTIONS, epochs=2, lr_scheduler="cosine", **options)
        trainer.train()
        assert trainer.lr_scheduler.last_epoch > 0
    for options in ({"warmup_steps": 2}, {"lr_scheduler": "cosine"}):
        with pytest.raises(ConfigError, match=r"not stepped in an epoch .*scheduler_interval='epoch'"):
            Custom(t16(), rows(20), **OPTIONS, epochs=2, **options).train()


# --- the run as a whole


def test_no_number_is_read_from_the_device_between_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, per_step = {"now": 0}, list[int]()
    for name in ("item", "cpu", "tolist", "__bool__", "__float__", "__int__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            counts["now"] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    count = HookCallback({"on_step_end": lambda trainer: per_step.append(counts["now"])})
    make(t16(), rows(80), batch_size=4, epochs=1, log_steps=10, callbacks=[count]).train()
    between = [b - a for i, (a, b) in enumerate(itertools.pairwise(per_step), start=1) if i % 10]
    assert between and not any(between)


def test_objects_do_not_accumulate_over_steps() -> None:
    counts = []

    class Watch(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step in (50, 150):
                gc.collect()
                counts.append(len(gc.get_objects()))

    make(t16(), rows(40), batch_size=8, epochs=30, log_steps=50, callbacks=[Watch()]).train()
    assert counts[1] - counts[0] < 300  # a row of metrics per epoch, and less than one object per step


@pytest.mark.slow
def test_memory_does_not_grow_over_steps() -> None:
    process, sizes = psutil.Process(), []

    class Watch(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step in (500, 2500):
                sizes.append(process.memory_info().rss)

    make(t16(), rows(40), batch_size=8, epochs=500, log_steps=50, callbacks=[Watch()]).train()
    assert sizes[1] - sizes[0] <= 2000 * 1024


def test_save_model_writes_weights_and_replaces_none(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = make(torch.compile(t16(), backend="eager"), rows(8), epochs=1)
    trainer.save_model(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert set(tensors) == set(t16().state_dict())
    with pytest.raises(ValueError, match="overwrite=True"):
        trainer.save_model(tmp_path / "model")
    trainer.save_model(tmp_path / "model", overwrite=True)


def test_save_metrics_writes_json(tmp_path: Path) -> None:
    trainer = make(t16(), rows(8), save_dir=tmp_path)
    path = trainer.save_metrics("test", trainer.evaluate(rows(4), prefix="test"))
    assert set(json.loads(path.read_text())) == {"test_loss"}


# --- signals


class Kill(Callback):
    """Sends a signal to the process before step 4, or in an evaluation, and notes how the run ended."""

    def __init__(self, number: signal.Signals, where: str) -> None:
        self.number, self.where, self.end = number, where, ()

    def on_step_start(self, trainer: Any) -> None:
        if self.where == "step" and trainer.progress.step == 3:
            os.kill(os.getpid(), self.number)

    def on_eval_start(self, trainer: Any) -> None:
        if self.where == "eval":
            os.kill(os.getpid(), self.number)

    def on_train_end(self, trainer: Any) -> None:
        self.end = trainer.progress.step, trainer.metrics["stop_reason"], len(trainer.metrics["valid"])


@pytest.mark.parametrize(
    ("number", "where", "step"), [(signal.SIGTERM, "step", 4), (signal.SIGINT, "eval", 10)], ids=["SIGTERM", "SIGINT"]
)
def test_signal_finishes_the_step_and_ends_the_run(number: signal.Signals, where: str, step: int) -> None:
    kill, before = Kill(number, where), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt) as caught:
        make(t16(), rows(80), eval_dataset=rows(80), epochs=2, callbacks=[kill]).train()
    assert kill.end == (step, "signal", 0)
    assert number == signal.SIGINT or caught.value.code == 143
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_dtypes_of_reductions_need_several_devices() -> None:
    with pytest.raises(ConfigError, match=r"'reductions'.*Trainer has only one.*AccelerateTrainer"):
        make(t16(), rows(8), dtypes={"reductions": "bf16"}).train()
