"""What only one device and its loss scaler can show; what all trainers share is in test_parity.py."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Sentences, Tagger, Trace, distance, fit, rows, same, t16, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import omnitrain
from omnitrain import EMA, SAM, Algorithm, BaseTrainer, ConfigError, DataError, HookCallback, MixUp, Trainer

OPTIONS: dict[str, Any] = {"device": "cpu", "progress_bar": False, "loss_fn": F.mse_loss}


def make(model: nn.Module, data: Any, **options: Any) -> Trainer:
    return Trainer(model, data, **{**OPTIONS, "log_steps": 1, "learning_rate": 0.05, **options})


class Custom(BaseTrainer):
    def _setup_training_components(self) -> None:
        self.model.to(self.device)

    def _prepare_batch(self, batch: Any) -> Any:
        return tuple(tensor.to(self.device) for tensor in batch)

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        losses = []
        for batch in self.train_loader:
            x, y = self._prepare_batch(batch)
            loss = F.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", [Trainer, Custom])
def test_trainer_rejects_several_processes(kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(omnitrain.DistributedError, match=rf"^{kind.__name__} .* one of 2, .* Use AccelerateTrainer"):
        kind(t16(), rows(8), save_dir=tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()
    monkeypatch.delenv("RANK")  # the other is left in the environment by hand
    assert kind(t16(), rows(8), **OPTIONS).world_size == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert kind(t16(), rows(8), **OPTIONS).world_size == 1


def test_small_models_clip_to_the_bit_of_a_plain_loop() -> None:
    ours, by_hand, data = nn.Linear(300, 7), nn.Linear(300, 7), TensorDataset(torch.randn(40, 300), torch.randn(40, 7))
    by_hand.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, by_hand)]
    loader = DataLoader(data, 4)
    Trainer(ours, train_loader=loader, optimizer=optimizers[0], max_grad_norm=0.1, epochs=1, **OPTIONS).train()
    for inputs, labels in loader:
        F.mse_loss(by_hand(inputs), labels).backward()
        assert nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1) > 0.2
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert same(weights(ours), weights(by_hand))


def test_micro_batch_without_labels_changes_nothing() -> None:
    data = Sentences(6)
    data.labels[4:] = -100  # the mean over no label is NaN
    with_empty, without = Tagger(), Tagger()
    options: dict[str, Any] = {"shuffle": False, "epochs": 1, "loss_fn": None, "optimizer": torch.optim.SGD}
    make(with_empty, data, batch_size=2, gradient_accumulation_steps=3, **options).train()
    make(without, torch.utils.data.Subset(data, range(4)), batch_size=4, **options).train()
    assert distance(weights(with_empty), weights(without)) <= 1e-15


def test_sum_reduction_adds_up_losses() -> None:
    split, reference, loss = t16(), t16(), nn.MSELoss(reduction="sum")
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "learning_rate": 1e-3, "epochs": 1, "max_grad_norm": None}
    options |= {"loss_fn": loss, "grad_reduction": "sum", "batch_size": 2, "gradient_accumulation_steps": 4}
    make(split, rows(7), **options).train()
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    loss(reference(rows(7).tensors[0]), rows(7).tensors[1]).backward()
    optimizer.step()
    assert distance(weights(split), weights(reference)) <= 1e-14


@pytest.mark.parametrize(("reduction", "batch", "accumulation"), [("mean", 3, 3), ("per-token-mean", 1, 8)])
def test_unit_of_sum_and_count_gives_the_mean_of_the_window(reduction: str, batch: int, accumulation: int) -> None:
    def unit(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        count = int((batch["labels"] != -100).sum())
        return model(**batch)["loss"] * count, count

    model, reference, trace, other = Tagger(), Tagger(), Trace(), Trace()
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "epochs": 1, "max_grad_norm": None, "loss_fn": None}
    split = {"batch_size": batch, "gradient_accumulation_steps": accumulation, "grad_reduction": reduction}
    make(model, Sentences(8), unit=unit, callbacks=[trace], **split, **options).train()
    make(reference, Sentences(8), batch_size=8, callbacks=[other], **options).train()
    assert distance(weights(model), weights(reference)) <= 1e-15
    assert trace.logs[0]["loss"] == pytest.approx(other.logs[0]["loss"], abs=1e-14)


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


@pytest.mark.parametrize("name", ["EMA", "GradualUnfreezing"])
def test_custom_loop_supports_averages_and_freezing(name: str, tmp_path: Path) -> None:
    results: list[Any] = []
    for kind, clip in ((Custom, 1.0), (Trainer, None)):
        options = {**OPTIONS, "batch_size": 4, "epochs": 2, "learning_rate": 0.05, "max_grad_norm": clip}
        options |= {"algorithms": [getattr(omnitrain, name)()], "save_dir": tmp_path / kind.__name__}
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
    halved = [fit(kind(t16(), rows(20), algorithms=[Halve(), EMA()], **options)) for kind in (Through, Trainer)]
    assert same(*(weights(trainer.get_model()) for trainer in halved))


def test_custom_loop_needs_no_training_set() -> None:
    class Tasks(Trainer):
        def _train_epoch(self, epoch: int) -> float:
            for data in (rows(8), rows(9)):
                x, y = data.tensors
                self.optimizer.zero_grad()
                F.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            return 0.0

    trainer = fit(Tasks(t16(), eval_dataset=rows(4), epochs=2, **OPTIONS))
    assert trainer.progress.step == 4 and len(trainer.metrics["valid"]) == 2


def test_custom_loop_steps_the_schedule_by_step_or_epoch() -> None:
    class Stepping(Custom):
        def _train_epoch(self, epoch: int) -> float:
            handle = self.optimizer.register_step_post_hook(lambda *_: self.lr_scheduler.step())
            loss = super()._train_epoch(epoch)
            handle.remove()
            return loss

    for kind, options in ((Stepping, {}), (Custom, {"scheduler_interval": "epoch"})):
        trainer = fit(kind(t16(), rows(20), **OPTIONS, epochs=2, lr_scheduler="cosine", **options))
        assert trainer.lr_scheduler.last_epoch > 0


FORGETFUL: Any = type("Forgetful", (Custom,), {"_train_epoch": lambda self, epoch: self.optimizer.step()})
NOT_STEPPED = r"not stepped in an epoch .*scheduler_interval='epoch'"


@pytest.mark.parametrize(("kind", "options", "error", "words"), [
    (FORGETFUL, {}, ValueError, "_train_epoch must return"),
    (Custom, {"epochs": 2, "warmup_steps": 2}, ConfigError, NOT_STEPPED),
    (Custom, {"epochs": 2, "lr_scheduler": "cosine"}, ConfigError, NOT_STEPPED),
    (Trainer, {"grad_reduction": "per-token-mean"}, DataError, "per-token-mean"),
    (Trainer, {"grad_reduction": "per-token-mean", "loss_fn": None, "unit": lambda batch: t16()(batch[0]).sum()},
     DataError, "num_targets"),
    (Trainer, {"dtypes": {"reductions": "bf16"}}, ConfigError, r"'reductions'.*Trainer has only one.*Accelerate"),
])  # fmt: skip
def test_trainer_rejects_wrong_loops_and_options(kind: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kind(t16(), rows(20), **{**OPTIONS, **options}).train()


def test_objects_do_not_accumulate_over_steps() -> None:
    counts = []

    def count(trainer: Any) -> None:
        if trainer.progress.step in (50, 150):
            gc.collect()
            counts.append(len(gc.get_objects()))

    watch = HookCallback({"on_step_end": count})
    make(t16(), rows(40), batch_size=8, epochs=30, log_steps=50, callbacks=[watch]).train()
    assert counts[1] - counts[0] < 300  # a row of metrics per epoch, and less than one object per step
