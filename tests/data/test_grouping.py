"""Grouping by length: order, padding and errors."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as Table
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import fit, same, trainer_on_cpu, weights
from tiny import gpt
from torch.utils.data import TensorDataset

from omnitrain import (
    BatchByTokens,
    CheckpointError,
    ConfigError,
    DataError,
    GroupByLength,
    MultiTask,
    PackedDataset,
    Trainer,
)


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
    transformed = table.with_transform(lambda rows: {"input_ids": [ids * 2 for ids in rows["input_ids"]]})
    for source, lengths, expected in (
        (data, None, [3, 1, 2]), (table, None, [2, 3, 1]), (table, table["n"], [5, 7, 6]),
        (data, lambda sample: len(sample["labels"]) + 1, [4, 2, 3]), (transformed, None, [4, 6, 2]),
        ([(torch.ones(2), 1), (torch.ones(5), 0)], None, [2, 5]),
    ):  # fmt: skip
        assert GroupByLength(source, lengths=lengths).lengths.tolist() == expected


def test_groups_of_tables_and_of_packed_rows_are_trained_on() -> None:
    table = Table.from_list([{**sample, "text": "?"} for sample in texts([3, 1, 2, 5])])
    trainer = fit(quiet(GroupByLength(table)))
    assert set(next(iter(trainer.train_loader))) == {"input_ids", "attention_mask", "labels"}
    packed = PackedDataset(texts(range(1, 9)), 9, borders=("position_ids", "cu_seq_lens"))
    assert "cu_seq_lens_q" in next(iter(quiet(GroupByLength(packed, 2), batch_size=2).train_loader))


@pytest.mark.parametrize(("make", "error", "message"), [
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
    (lambda: BatchByTokens(texts([3, 9, 1]), 8), ConfigError, "`max_tokens=8` is less than the 9 tokens of sample 1"),
    (lambda: BatchByTokens(texts([3]), 8, max_samples=0), ConfigError, "`max_samples` must be an integer of at least"),
    (lambda: quiet(BatchByTokens(texts([3]), 8)), ConfigError, "`batch_size=4` would put 4 batches of a BatchByTokens"),
    (lambda: quiet(None, eval_dataset=BatchByTokens(texts([3]), 8), batch_size=1, eval_batch_size=2), ConfigError,
     "eval_batch_si"),
])  # fmt: skip
def test_data_that_cannot_be_grouped_are_an_error(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_resume_in_another_order_is_an_error(tmp_path: Path) -> None:
    data = texts(range(1, 21))
    options: dict[str, Any] = {"save_dir": tmp_path, "save_steps": 1}
    fit(quiet(GroupByLength(data, 4), **options, max_steps=1, epochs=None))
    for other, message in (
        (data, "order=None now, and had 'GroupByLength'"), (GroupByLength(data, 8), "group_size=8 now, and had 4"),
        (GroupByLength(data, 4, lengths=[1] * 20), "has lengths="),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=rf"training set has {message}|{message}"):
            quiet(other, **options).train(resume_from="auto")


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=80), budget=st.integers(50, 200),
    most=st.none() | st.integers(1, 5),
)  # fmt: skip
def test_token_batches_have_each_sample_once(sizes: list[int], budget: int, most: int | None) -> None:
    data = BatchByTokens(texts(sizes), budget, max_samples=most)
    lengths = [[len(sample["input_ids"]) for sample in data[i]] for i in range(len(data))]
    assert sorted(itertools.chain(*lengths)) == sorted(sizes)
    assert len({sample for batch in data.batches for sample in batch}) == len(sizes)
    for batch, following in zip(lengths, [*lengths[1:], None], strict=True):
        assert len(batch) * max(batch) <= budget and len(batch) <= (most or 80)
        if following:  # which would not have fitted
            assert (len(batch) + 1) * following[0] > budget or len(batch) == most


def test_token_batches_are_trained_on_in_any_split(trainer_class: Any, tmp_path: Path) -> None:
    """And a run that resumes within an epoch is the undisturbed one."""
    sizes = np.random.default_rng(0).integers(2, 25, 24)

    def run(resume: str | None = None, most: int | None = None, **options: Any) -> Any:
        data = BatchByTokens(texts(sizes), 64, max_samples=most)
        defaults = {"batch_size": 1, "max_grad_norm": None, "learning_rate": 1e-2, "epochs": 2, "eval_dataset": data}
        return fit(trainer_on_cpu(trainer_class, gpt(), data, **{**defaults, **options}), resume_from=resume)

    straight = run(global_batch_size=4)
    shapes = [batch["input_ids"].shape for batch in straight.train_loader]
    assert all(rows * width <= 64 for rows, width in shapes) and len({*shapes}) > 4
    assert straight.progress.samples == 2 * len(shapes) and straight.progress.tokens == 2 * sizes.sum()
    split = run(gradient_accumulation_steps=4, microbatch_size=2)
    torch.testing.assert_close(weights(split.model), weights(straight.model), rtol=1e-4, atol=1e-5)
    run(global_batch_size=4, max_steps=3, epochs=None, save_dir=tmp_path)
    assert same(weights(run("last", global_batch_size=4, save_dir=tmp_path).model), weights(straight.model))
    with pytest.raises(CheckpointError, match="max_samples=24 now, and had None"):
        run("last", most=24, global_batch_size=4, save_dir=tmp_path)


def test_token_batches_name_the_samples_of_an_error() -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise ZeroDivisionError if index == 1 else IndexError

    with pytest.raises(ZeroDivisionError) as caught:
        _ = BatchByTokens(Broken([[1], [1, 2], [1]]), 2, lengths=[1, 2, 1])[1]
    assert caught.value.__notes__ == ["Batch 1 has the samples 1."]
