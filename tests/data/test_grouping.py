"""Grouping by length: order, padding and errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as Table
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import trainer_on_cpu
from tiny import gpt
from torch.utils.data import TensorDataset

from omnitrain import CheckpointError, ConfigError, DataError, GroupByLength, MultiTask, PackedDataset, Trainer


def texts(sizes: Any) -> list[dict[str, list[int]]]:
    return [{"input_ids": [3 + i % 30] * size, "labels": [3 + i % 30] * size} for i, size in enumerate(sizes)]


def quiet(data: Any, **options: Any) -> Trainer:
    return trainer_on_cpu(Trainer, gpt(), data, **{"epochs": 1, "batch_size": 4, **options})


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=80), group=st.integers(1, 12), pool=st.integers(1, 5),
    seed=st.integers(0, 2**63), epoch=st.integers(0, 3),
)  # fmt: skip
def test_groups_are_sorted_and_have_each_sample_once(
    sizes: list[int], group: int, pool: int, seed: int, epoch: int
) -> None:
    data = GroupByLength(texts(sizes), group, pool=pool)
    order = data.epoch_order(epoch, seed)
    assert sorted(order.tolist()) == list(range(len(sizes))) and np.array_equal(order, data.epoch_order(epoch, seed))
    lengths = np.array(sizes)[order]
    for first in range(0, len(order), group):
        assert (np.diff(lengths[first : first + group]) <= 0).all()
    if len(order) % group == 0:
        assert lengths[0] == max(sizes)


def test_sizes_of_numpy_can_be_saved() -> None:
    groups = GroupByLength(texts([3, 2, 4]), np.int64(2), pool=np.int64(3))
    assert {type(groups.order_options()[name]) for name in ("group_size", "pool")} == {int}
    assert type(PackedDataset(texts([3, 2, 4]), np.int64(4)).length) is int


def test_groups_save_padding_and_differ_from_epoch_to_epoch() -> None:
    sizes = np.random.default_rng(0).lognormal(3, 1, 4000).astype(int) + 1
    data = GroupByLength(texts(sizes), 32)

    def padding(order: np.ndarray) -> float:
        rows = sizes[order].reshape(-1, 8)
        return 1 - rows.sum() / (rows.max(1) * 8).sum()

    orders = [data.epoch_order(epoch, 42) for epoch in range(2)]
    assert padding(np.arange(4000)) > 0.5 and max(map(padding, orders)) < 0.06
    groups = [{frozenset(order[i : i + 32].tolist()) for i in range(0, 4000, 32)} for order in orders]
    assert not groups[0] & groups[1]
    steps = sizes[orders[0]].reshape(-1, 32).mean(1)
    assert abs(np.corrcoef(steps[1:-1], steps[2:])[0, 1]) < 0.2  # steps of alike length do not follow each other


def test_lengths_are_found_passed_or_computed() -> None:
    data = texts([3, 1, 2])
    table = Table.from_list([{**sample, "n": 7 - i} for i, sample in enumerate(data)]).select([2, 0, 1])
    assert GroupByLength(data).lengths.tolist() == [3, 1, 2]
    assert GroupByLength(table).lengths.tolist() == [2, 3, 1]
    assert GroupByLength(table, lengths=table["n"]).lengths.tolist() == [5, 7, 6]
    assert GroupByLength(data, lengths=lambda sample: len(sample["labels"]) + 1).lengths.tolist() == [4, 2, 3]
    assert GroupByLength([(torch.ones(2), 1), (torch.ones(5), 0)]).lengths.tolist() == [2, 5]
    transformed = table.with_transform(lambda rows: {"input_ids": [ids * 2 for ids in rows["input_ids"]]})
    assert GroupByLength(transformed).lengths.tolist() == [4, 6, 2]


def test_groups_of_tables_and_of_packed_rows_are_trained_on() -> None:
    table = Table.from_list([{**sample, "text": "?"} for sample in texts([3, 1, 2, 5])])
    trainer = quiet(GroupByLength(table))
    assert set(next(iter(trainer.train_loader))) == {"input_ids", "attention_mask", "labels"}
    trainer.train()
    packed = PackedDataset(texts(range(1, 9)), 9, borders=("position_ids", "cu_seq_lens"))
    assert "cu_seq_lens_q" in next(iter(quiet(GroupByLength(packed, 2), batch_size=2).train_loader))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GroupByLength(texts([1]), 0), ConfigError, "`group_size` must be an integer of at least 1, got 0"),
        (lambda: GroupByLength(texts([1]), pool=0), ConfigError, "`pool` must be an integer of at least 1"),
        (lambda: GroupByLength(texts([1]), lengths=[1.5]), ConfigError, "must be 1 integers .* got float64"),
        (lambda: GroupByLength(texts([1]), lengths=[-1]), ConfigError, "must be 1 integers .* with -1"),
        (lambda: GroupByLength([1, 2]), DataError, "no length: it is a int.*Pass `lengths=`"),
        (lambda: GroupByLength([{"x": 1}]), DataError, "with the keys 'x'"),
        (lambda: GroupByLength(TensorDataset(torch.ones(4, 2))), DataError, "tensors have one length"),
        (lambda: GroupByLength(x for x in [[1]]), DataError, "must have a length"),
        (lambda: MultiTask({"a": GroupByLength(texts([1]))}), DataError, "'a' is a GroupByLength with an order"),
        (lambda: quiet(GroupByLength(texts([1])), shuffle=False), ConfigError, "`shuffle=False` contradicts"),
    ],
)
def test_data_that_cannot_be_grouped_are_an_error(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_resume_in_another_order_is_an_error(tmp_path: Path) -> None:
    data = texts(range(1, 21))
    options: dict[str, Any] = {"save_dir": tmp_path, "save_steps": 1}
    quiet(GroupByLength(data, 4), **options, max_steps=1, epochs=None).train()
    for other, message in (
        (data, "order=None now, and had 'GroupByLength'"), (GroupByLength(data, 8), "group_size=8 now, and had 4"),
        (GroupByLength(data, 4, lengths=[1] * 20), "has lengths="),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=rf"training set has {message}|{message}"):
            quiet(other, **options).train(resume_from="auto")
