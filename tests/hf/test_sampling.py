"""The samples of an epoch and their order, by TrainingArguments."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from counting import Streamed
from datasets import Dataset as Table
from marks import thinned
from recipes import Noisy, StopAt, distance, fit, rows, t16, trainer_on_cpu, weights
from tiny import Tokens, bert, gpt
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from omnitrain import GroupByLength, HFTrainer, HFTrainingArguments, MultiTask, Trainer
from omnitrain.core.errors import ConfigError, DataError

DEFAULTS = {"disable_tqdm": True, "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05}


class Numbered(Tokens):
    """Tokens that record which of them are read."""

    def __init__(self, size: int) -> None:
        super().__init__(size, "classes")
        self.indices: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.indices.append(int(index))
        return super().__getitem__(index)


def test_drop_last_has_the_steps_of_a_stock_trainer(arguments: Any) -> None:
    args = arguments(dataloader_drop_last=True, gradient_accumulation_steps=2)
    for kind in (transformers.Trainer, HFTrainer):
        data = Numbered(13)
        trainer: Any = fit(kind(bert(), args, train_dataset=data))
        assert trainer.state.global_step == trainer.state.max_steps == 4, kind
        epochs = data.indices[:12], data.indices[12:]
        assert [len(set(epoch)) for epoch in epochs] == [12, 12] and len(data.indices) == 24
    assert set(epochs[0]) != set(epochs[1])  # other samples are dropped in each epoch
    assert trainer.progress.samples == 24 and trainer.progress.epochs == 2
    assert [row["epoch"] for row in trainer.metrics["train_metrics_history"]] == [1, 2]
    assert len(trainer.predict(Numbered(13)).predictions) == 13  # evaluations have all
    with pytest.raises(DataError, match=r"has 3 samples, fewer than the 4 of a step"):
        HFTrainer(bert(), arguments(dataloader_drop_last=True), Numbered(3))


def test_resume_with_other_samples_is_rejected(arguments: Any) -> None:
    fields, options = {"save_strategy": "steps", "save_steps": 1, "data_seed": 7}, {"loss_fn": F.mse_loss}
    HFTrainer(t16(), arguments(**fields), rows(9), callbacks=[StopAt(1)], **options).train()
    for changes, message in (
        ({"dataloader_drop_last": True}, r"samples_per_epoch.*9.*8"), ({"data_seed": None}, r"order_seed.*7.*None")
    ):  # fmt: skip
        trainer = HFTrainer(t16(), arguments(**{**fields, **changes}), rows(9), **options)
        with pytest.raises(RuntimeError, match=message):
            trainer.train(resume_from="auto")


def test_sampling_fields_are_rejected_for_streams(arguments: Any) -> None:
    stream, loader = {"train_dataset": Streamed(Tokens(6))}, {"train_loader": DataLoader(Tokens(6), 2)}
    tasks = {"train_dataset": MultiTask({"a": ragged()})}
    for fields, message, sources in (
        ({"dataloader_drop_last": True}, "drop_last.*no effect on a stream", (stream, loader)),
        ({"data_seed": 7}, "seed.*no effect on a stream", (stream, loader)),
        ({"group_by_length": True}, "group_by_length.*needs a dataset with a length", (stream, loader, tasks)),
    ):
        args = arguments(kind=HFTrainingArguments, max_steps=2, **fields)
        for data in sources:
            with pytest.raises(ConfigError, match=message):
                HFTrainer(gpt(), args, **data)


def test_data_seed_sets_the_order_and_seed_the_rest(arguments: Any) -> None:
    indices, noise = {}, {}
    for name, fields in {"both": {"seed": 1, "data_seed": 7}, "seven": {"seed": 7}, "one": {"seed": 1}}.items():
        data = Numbered(13)
        HFTrainer(bert(), arguments(**fields), data).train()
        indices[name] = data.indices
        args = arguments(max_steps=1, per_device_train_batch_size=10, **fields)  # a single step of all samples
        noise[name] = weights(fit(HFTrainer(t16(), args, Noisy(10), loss_fn=F.mse_loss, progress_bar=False)).model)
    assert indices["both"] == indices["seven"] != indices["one"]
    assert distance(noise["both"], noise["one"]) <= 1e-12 < distance(noise["both"], noise["seven"])


def ragged() -> list[dict[str, list[int]]]:
    return [{"input_ids": [3 + i] * (1 + i * 7 % 9), "labels": [3 + i] * (1 + i * 7 % 9)} for i in range(30)]


def order_of(trainer: Any) -> list[int]:
    return trainer.train_loader.sampler.order(0).tolist()


@pytest.mark.parametrize("kind", thinned([TrainingArguments, HFTrainingArguments], [HFTrainingArguments]))
def test_group_by_length_batches_samples_of_similar_length(arguments: Any, kind: Any) -> None:
    strategy: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    if kind is HFTrainingArguments or "train_sampling_strategy" not in TrainingArguments.__dataclass_fields__:
        strategy = {"group_by_length": True}
    fields = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    data = ragged()
    args = arguments(kind=kind, save_strategy="steps", save_steps=2, **fields, **strategy)
    trainer = HFTrainer(gpt(), args, train_dataset=data)
    assert trainer.train_dataset is data
    assert order_of(trainer) == GroupByLength(data, 6).epoch_order(0, args.seed).tolist()
    assert fit(trainer).state.global_step == 5
    options = {"batch_size": 6, "epochs": 1, "learning_rate": args.learning_rate, "lr_scheduler": "linear"}
    native = fit(trainer_on_cpu(Trainer, gpt(), GroupByLength(data, 6), **options))
    assert distance(weights(trainer.model), weights(native.model)) < 1e-6


def test_length_column_is_used_and_need_not_be_an_input(arguments: Any) -> None:
    table = Table.from_list([{**row, "n": 30 - i} for i, row in enumerate(ragged())])
    args = arguments(kind=HFTrainingArguments, group_by_length=True, length_column_name="n")
    trainer = HFTrainer(gpt(), args, train_dataset=table)
    assert order_of(trainer) == GroupByLength(table, 4, [30 - i for i in range(30)]).epoch_order(0, 42).tolist()
    assert set(next(iter(trainer.train_loader))) == {"input_ids", "attention_mask", "labels"}


def test_global_batch_size_need_not_be_a_multiple(arguments: Any) -> None:
    options = {"loss_fn": F.mse_loss, "learning_rate": 0.05, "epochs": 2, "batch_size": 3, "global_batch_size": 7}
    native, trainer = (
        fit(trainer_on_cpu(kind, t16(), rows(25), log_steps=1, **options)) for kind in (Trainer, HFTrainer)
    )
    losses = [[row["train_loss"] for row in each.metrics["train_metrics_history"]] for each in (native, trainer)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert (trainer.steps_per_epoch, trainer.progress.step, trainer.progress.samples) == (4, 8, 50)
    assert trainer.gradient_accumulation_steps == 3
    assert trainer.get_total_train_batch_size(trainer.engine.args) == 7
    args = arguments(dataloader_drop_last=True)
    trainer = fit(HFTrainer(t16(), args, rows(25), loss_fn=F.mse_loss, global_batch_size=7))  # drops the last step
    assert (trainer.progress.step, trainer.progress.samples) == (6, 42)


def test_global_batch_size_of_a_custom_loader_is_a_multiple() -> None:
    members = {"get_train_dataloader": lambda self: DataLoader(self.train_dataset, batch_size=3)}
    kind = type("CustomLoader", (HFTrainer,), members)
    trainer = kind(t16(), None, rows(25), loss_fn=F.mse_loss, batch_size=3, global_batch_size=7)
    with pytest.raises(ConfigError, match=r"`global_batch_size=7` must be a multiple of .* 3 x 1 with a custom loader"):
        trainer.train()
