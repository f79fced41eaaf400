"""Which samples an epoch has, and in what order, by transformers' arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset as Table
from recipes import Noisy, StopAt, distance, rows, same, t16, weights
from tiny import Tokens, bert, gpt
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments

from omnitrain import GroupByLength, HFTrainer, HFTrainingArguments, MultiTask, Trainer
from omnitrain.errors import ConfigError, DataError


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(folder: str = "run", **options: Any) -> TrainingArguments:
        defaults = {
            "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "num_train_epochs": 2,
            "per_device_train_batch_size": 4, "learning_rate": 0.05,
        }  # fmt: skip
        return TrainingArguments(str(tmp_path / folder), **{**defaults, **options})

    return make


class Numbered(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens whose numbers are noted when they are read."""

    def __init__(self, size: int) -> None:
        self.tokens, self.read = Tokens(size, "classes"), []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(int(index))
        return self.tokens[index]


# --- dataloader_drop_last


@pytest.mark.parametrize(("size", "accumulation", "steps"), [(13, 1, 6), (13, 2, 4), (12, 1, 6), (15, 3, 2)])
def test_an_epoch_without_its_last_short_batch_has_the_steps_of_a_stock_trainer(
    arguments: Any, size: int, accumulation: int, steps: int
) -> None:
    for kind in (transformers.Trainer, HFTrainer):
        data = Numbered(size)
        args = arguments(dataloader_drop_last=True, gradient_accumulation_steps=accumulation)
        trainer: Any = kind(bert(), args, train_dataset=data)
        trainer.train()
        state = trainer.state if kind is transformers.Trainer else trainer.engine.state
        assert state.global_step == state.max_steps == steps, kind
        epochs = data.read[:12], data.read[12:]
        assert [len(set(epoch)) for epoch in epochs] == [12, 12] and len(data.read) == 24
    assert trainer.progress.samples == 24 and trainer.progress.epochs == 2
    assert [row["epoch"] for row in trainer.metrics["train_metrics_history"]] == [1, 2]


def test_other_samples_are_left_out_in_each_epoch(arguments: Any) -> None:
    data = Numbered(13)
    HFTrainer(bert(), arguments(dataloader_drop_last=True, num_train_epochs=8), data).train()
    left = {min(set(range(13)) - set(data.read[at : at + 12])) for at in range(0, 96, 12)}
    assert len(left) > 2


def test_evaluations_have_all_samples_all_the_same(arguments: Any) -> None:
    trainer = HFTrainer(bert(), arguments(dataloader_drop_last=True), Numbered(13))
    assert len(trainer.predict(Tokens(13, "classes")).predictions) == 13


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_a_run_with_short_epochs_is_resumed_to_the_bit(arguments: Any, cut: int) -> None:
    def run(folder: str, *callbacks: Any, resume: Any = None) -> Any:
        args = arguments(folder, dataloader_drop_last=True, save_strategy="steps", save_steps=1, data_seed=5)
        trainer = HFTrainer(
            t16(0.2), args, Noisy(14), loss_fn=F.mse_loss, callbacks=callbacks, progress_bar=False,
        )  # fmt: skip
        trainer.train(resume_from=resume)
        return trainer

    straight = run("straight")
    run("parts", StopAt(cut))
    resumed = run("parts", resume="auto")
    assert straight.progress.step == resumed.progress.step == 6
    assert same(weights(straight.model), weights(resumed.model))
    assert straight.metrics["train_metrics_history"] == resumed.metrics["train_metrics_history"]


def test_a_resume_that_leaves_out_other_samples_is_told(arguments: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    HFTrainer(bert(), arguments(**options), Numbered(13), callbacks=[StopAt(1)]).train()
    trainer = HFTrainer(bert(), arguments(dataloader_drop_last=True, **options), Numbered(13))
    with pytest.raises(RuntimeError, match=r"samples_per_epoch.*13.*12"):
        trainer.train(resume_from="auto")


def test_a_set_of_less_than_a_batch_is_an_error_before_the_first_step(arguments: Any) -> None:
    with pytest.raises(DataError, match=r"has 3 samples.*incomplete batch of 4 nothing is left"):
        HFTrainer(bert(), arguments(dataloader_drop_last=True), Numbered(3))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from Tokens(6, "classes")


@pytest.mark.parametrize(("said", "words"), [({"dataloader_drop_last": True}, "drop_last"), ({"data_seed": 7}, "seed")])
def test_what_has_no_effect_on_a_stream_is_refused(arguments: Any, said: dict[str, Any], words: str) -> None:
    for options in ({"train_dataset": Stream()}, {"train_loader": DataLoader(Tokens(6, "classes"), 2)}):
        with pytest.raises(ConfigError, match=rf"{words}.*no effect on a stream"):
            HFTrainer(bert(), arguments(max_steps=2, **said), **options)


# --- data_seed


def test_the_order_goes_by_data_seed_and_everything_else_by_seed(arguments: Any) -> None:
    read, found = {}, {}
    for name, said in {"both": {"seed": 1, "data_seed": 7}, "other": {"seed": 7}, "one": {"seed": 1}}.items():
        data = Numbered(13)
        HFTrainer(bert(), arguments(**said), data).train()
        read[name] = data.read
    assert read["both"] == read["other"] != read["one"]
    for name, said in {"both": {"seed": 1, "data_seed": 7}, "one": {"seed": 1}}.items():  # a single step of all
        args = arguments(max_steps=1, per_device_train_batch_size=10, **said)
        model = t16(0.0)
        HFTrainer(model, args, Noisy(10), loss_fn=F.mse_loss, progress_bar=False).train()
        found[name] = weights(model)
    assert distance(found["both"], found["one"]) <= 1e-12  # with the noise that each sample has by `seed`


def test_a_resume_with_another_order_is_told(arguments: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    trainer = HFTrainer(t16(), arguments(data_seed=7, **options), rows(9), loss_fn=F.mse_loss, callbacks=[StopAt(1)])
    trainer.train()
    other = HFTrainer(t16(), arguments(**options), rows(9), loss_fn=F.mse_loss)
    with pytest.raises(RuntimeError, match=r"order_seed.*7.*None"):
        other.train(resume_from="auto")


# --- group_by_length


def ragged() -> list[dict[str, list[int]]]:
    return [{"input_ids": [3 + i] * (1 + i * 7 % 9), "labels": [3 + i] * (1 + i * 7 % 9)} for i in range(30)]


def order_of(trainer: Any) -> list[int]:
    return trainer.train_loader.sampler.order(0).tolist()


@pytest.mark.parametrize("kind", [TrainingArguments, HFTrainingArguments])
def test_samples_of_alike_length_come_together_if_the_arguments_say_so(kind: Any, tmp_path: Path) -> None:
    has_strategy = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
    says = {"train_sampling_strategy": "group_by_length"}
    if kind is HFTrainingArguments or not has_strategy:
        says = {"group_by_length": True}  # type: ignore[dict-item]
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "num_train_epochs": 1}
    data = ragged()
    args = kind(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=3, save_steps=2, **options, **says
    )
    trainer = HFTrainer(gpt(), args, train_dataset=data)
    assert trainer.train_dataset is data
    assert order_of(trainer) == GroupByLength(data, 6).epoch_order(0, args.seed).tolist()
    trainer.train()
    assert trainer.state.global_step == 5
    ours = Trainer(
        gpt(), GroupByLength(data, 6), batch_size=6, epochs=1, learning_rate=args.learning_rate, device="cpu",
        lr_scheduler="linear", progress_bar=False,
    )  # fmt: skip
    ours.train()
    assert distance(weights(trainer.model), weights(ours.model)) < 1e-6


def test_a_column_of_lengths_is_used_and_need_not_be_an_input(arguments: Any) -> None:
    table = Table.from_list([{**one, "n": 30 - i} for i, one in enumerate(ragged())])
    args = arguments(length_column_name="n")
    args.train_sampling_strategy = "group_by_length"
    trainer = HFTrainer(gpt(), args, train_dataset=table)
    assert order_of(trainer) == GroupByLength(table, 4, [30 - i for i in range(30)]).epoch_order(0, 42).tolist()
    assert set(next(iter(trainer.train_loader))) == {"input_ids", "labels"}


@pytest.mark.parametrize("given", ["stream", "loader", "mix"])
def test_grouping_is_refused_where_there_is_nothing_to_group(arguments: Any, given: str) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ragged())

    args = arguments(max_steps=2)
    args.train_sampling_strategy = "group_by_length"
    data: dict[str, Any] = {
        "stream": {"train_dataset": Stream()}, "loader": {"train_loader": DataLoader(Tokens(8))},
        "mix": {"train_dataset": MultiTask({"a": ragged()})},
    }[given]  # fmt: skip
    with pytest.raises(ConfigError, match=r"group_by_length.*needs a dataset with a length"):
        HFTrainer(gpt(), args, **data)


# --- steps that batch_size does not divide


def test_transformers_is_told_the_samples_of_a_step_that_its_batches_do_not_divide(caplog: Any) -> None:
    data = rows(25)
    losses = []
    for kind, options in ((Trainer, {"device": "cpu"}), (HFTrainer, {})):
        trainer: Any = kind(
            t16(), train_dataset=data, loss_fn=F.mse_loss, learning_rate=0.05, epochs=2, batch_size=3, log_steps=1,
            global_batch_size=7, progress_bar=False, **options,
        )  # fmt: skip
        losses.append([row["train_loss"] for row in trainer.train()["train_metrics_history"]])
        assert (trainer.steps_per_epoch, trainer.progress.step, trainer.progress.samples) == (4, 8, 50)
        assert trainer.gradient_accumulation_steps == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert trainer.get_total_train_batch_size(trainer.engine.args) == 7


def test_dropping_the_last_batch_drops_the_last_step_where_batches_do_not_divide_it(arguments: Any) -> None:
    args = arguments(dataloader_drop_last=True)
    trainer = HFTrainer(t16(), args, rows(25), loss_fn=F.mse_loss, global_batch_size=7)
    trainer.train()
    assert (trainer.progress.step, trainer.progress.samples) == (6, 42)


class OwnLoader(HFTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=3)


def test_a_loader_of_ones_own_cannot_make_steps_that_its_batches_do_not_divide() -> None:
    trainer = OwnLoader(t16(), None, rows(25), loss_fn=F.mse_loss, batch_size=3, global_batch_size=7)
    with pytest.raises(
        ConfigError, match=r"`global_batch_size=7` must be a multiple of .* 3 x 1 with a loader of your"
    ):
        trainer.train()
