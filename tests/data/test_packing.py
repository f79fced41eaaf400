"""Packed rows, and training on them."""

from collections import Counter
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset as Table
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import distance, trainer_on_cpu, weights
from tiny import VOCABULARY, Tokens, bert, gpt, llama
from torch import nn
from transformers import default_data_collator

from omnitrain import CheckpointError, Collator, ConfigError, CrossEntropy, DataError, MultiTask, PackedDataset, Trainer
from omnitrain.data.packing import best_fit_decreasing

Sample = dict[str, Any]


def texts(size: int, longest: int = 9) -> list[Sample]:
    return [{"input_ids": ids[: 1 + i * 7 % longest].tolist()} for i, ids in enumerate(Tokens(size).ids)]


def quiet(model: nn.Module, data: Any, **options: Any) -> Trainer:
    return trainer_on_cpu(Trainer, model, data, **{"epochs": 1, "batch_size": 4, "learning_rate": 0.05, **options})


def lists(rows: Any) -> list[dict[str, list[Any]]]:
    return [{name: value.tolist() for name, value in rows[i].items()} for i in range(len(rows))]


def flash() -> nn.Module:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


class Reader(nn.Module):
    """A small model of plain PyTorch, which predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(32, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.tokens(input_ids) + self.places(position_ids)).chunk(3, -1)
        mask = (sequence_ids[:, :, None] == sequence_ids[:, None, :]).tril()
        return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(12, 20))
def test_rows_are_those_of_best_fit_decreasing(sizes: list[int], length: int) -> None:
    rooms: list[int] = []  # the same, sequence by sequence
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append(min(fitting, default=length) - size)
    order, starts = best_fit_decreasing(np.array(sizes), length)
    filled = np.add.reduceat(np.array(sizes)[order], starts[:-1])
    assert Counter((length - filled).tolist()) == Counter(rooms)
    assert sorted(order.tolist()) == list(range(len(sizes))) and starts[-1] == len(sizes)


def test_row_has_positions_borders_labels_and_padding() -> None:
    data = [{"input_ids": [5, 6, 7], "labels": [-100, 1, 2], "token_type_ids": [1, 1, 1]}]
    data.append({"input_ids": [8, 9], "labels": [3, 4], "token_type_ids": [1, 0]})
    packed = PackedDataset(data, 7, borders=("position_ids", "sequence_ids"))
    row = {
        "input_ids": [5, 6, 7, 8, 9, 0, 0],
        "labels": [-100, 1, 2, -100, 4, -100, -100],
        "token_type_ids": [1, 1, 1, 1, 0, 0, 0],
        "position_ids": [0, 1, 2, 0, 1, 0, 1],
        "sequence_ids": [0, 0, 0, 1, 1, 2, 2],
    }
    assert lists(packed) == [row]
    assert packed.sequences(0) == [(0, 0, 3), (1, 0, 2)] and packed.padding == pytest.approx(2 / 7)
    (unshifted,) = lists(PackedDataset(data, 7, shift=False))
    assert unshifted["labels"] == [-100, 1, 2, 3, 4, -100, -100] and "sequence_ids" not in unshifted


@pytest.mark.parametrize(("overlong", "tokens"), [("truncate", 4), ("split", 10)])
def test_overlong_sequences_are_truncated_or_split(overlong: Any, tokens: int) -> None:
    packed = PackedDataset([{"input_ids": list(range(10))}], 4, overlong=overlong)
    parts = sorted(part for i in range(len(packed)) for part in packed.sequences(i))
    assert [token for _, first, stop in parts for token in range(first, stop)] == list(range(tokens))
    ids, labels = ([entry for row in lists(packed) for entry in row[name]] for name in ("input_ids", "labels"))
    assert sorted(ids) == sorted([*range(tokens), *[0] * (-tokens % 4)])
    assert sum(label != -100 for label in labels) == tokens - len(parts)


def test_table_is_measured_without_reading_its_samples(caplog: pytest.LogCaptureFixture) -> None:
    data = texts(30)
    table = Table.from_list([{**sample, "text": "?"} for sample in data]).shuffle(seed=1)
    plain = PackedDataset([data[i] for i in table._indices.column(0).to_pylist()], 16)  # type: ignore[union-attr]
    with mock.patch.object(Table, "__getitem__", autospec=True, side_effect=Table.__getitem__) as get:
        packed = PackedDataset(table, 16)
    assert len([call for call in get.call_args_list if type(call.args[1]) is int]) == 1 and "'text'" in caplog.text
    assert lists(packed) == lists(plain)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: PackedDataset(texts(3), 0), ConfigError, "`length` must be an integer of at least 1, got 0"),
    (lambda: PackedDataset(texts(9), 5), DataError, "4 of 9 samples have more than length=5 .*the longest has 9"),
    (lambda: PackedDataset(texts(3), 9, overlong=cast("Any", "cut")), ConfigError, "`overlong`.*got 'cut'"),
    (lambda: PackedDataset(texts(3), 9, borders=cast("Any", "positions")), ConfigError, "'position_ids'.*got 'pos"),
    (lambda: PackedDataset(texts(3), 9, lengths=[1, 2]), ConfigError, "`lengths` must be 3 integers"),
    (lambda: PackedDataset(texts(3), 9, lengths=[1, 2, 3]), DataError, "'input_ids' of sample 2 has the shape"),
    (lambda: PackedDataset([([1], [2])], 9), DataError, "dicts with 'input_ids', .*got tuple"),
    (lambda: PackedDataset([{"tokens": [1]}], 9), DataError, "pass the column"),
    (lambda: PackedDataset([{"input_ids": []}], 9), DataError, "All 1 samples are empty"),
    (lambda: PackedDataset([], 9), DataError, "no samples"),
    (lambda: PackedDataset((1 / 0 for _ in range(3)), 9), DataError, "must have a length"),  # before it is read
    (lambda: PackedDataset([{"input_ids": [1], "position_ids": [0]}], 9), DataError, "'position_ids' already"),
    (lambda: PackedDataset(texts(3), 9, pad_values={"mask": 0}), ConfigError, "'mask', which samples do not have"),
    (lambda: PackedDataset([{"input_ids": [1, 0], "attention_mask": [1, 0]}], 9), DataError, "Sample 0 is padded"),
    (lambda: quiet(gpt(), PackedDataset(texts(9), 9), data_collator=default_data_collator), ConfigError,
     "`data_collator` .default_data_collator. has nothing to do"),
    (lambda: quiet(gpt(), PackedDataset(texts(9), 9, borders="sequence_ids")), ConfigError,
     r"forward\(\) names no argument 'sequence_ids'"),
    (lambda: quiet(bert(), PackedDataset(texts(9), 9)), ConfigError, "bidirectional attention"),
    (lambda: quiet(flash(), PackedDataset(texts(9), 9)), ConfigError, "='flash_attention_2'.*'cu_seq_lens'"),
])  # fmt: skip
def test_data_that_cannot_be_packed_are_an_error(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        list(make())


@pytest.mark.parametrize(
    ("make", "borders"), [(gpt, "position_ids"), (llama, ("position_ids", "cu_seq_lens"))], ids=["gpt", "llama"]
)
def test_loss_and_step_equal_those_without_packing(make: Any, borders: Any) -> None:
    ids = [sample["input_ids"] for sample in texts(23)]
    unpacked = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in ids]
    losses, ends = [], []
    for rows in (PackedDataset(texts(23), 16, borders=borders), unpacked):
        options = {"batch_size": len(rows), "eval_dataset": rows, "eval_batch_size": 3}
        trainer = quiet(make(), rows, optimizer=torch.optim.SGD, **options)
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        assert trainer.progress.step == 1
        ends.append(weights(trainer.model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # transformers computes losses in fp32
    assert distance(*ends) < 1e-7 < distance(ends[0], weights(make()))


def test_sequence_ids_separate_sequences_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    data, model = texts(23), Reader().double().requires_grad_(False)
    loss = 0.0
    for sample in data:
        ids = torch.tensor([sample["input_ids"]])
        scores = model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids))[:, :-1]
        loss += float(F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    packed = PackedDataset(data, 16, borders=("position_ids", "sequence_ids"))
    trainer = quiet(model.requires_grad_(), packed, loss_fn=CrossEntropy(shift=True))
    labels = sum(len(sample["input_ids"]) - 1 for sample in data)
    assert trainer.evaluate(packed)["eval_loss"] == pytest.approx(loss / labels, rel=1e-12)


def test_cu_seq_lens_give_one_row_with_its_borders() -> None:
    packed = PackedDataset(texts(9), 12, borders=("position_ids", "sequence_ids", "cu_seq_lens"))
    trainer = quiet(gpt(), PackedDataset(texts(9), 12, borders=("position_ids", "cu_seq_lens")), batch_size=2)
    batch = next(iter(trainer.train_loader))
    assert batch["cu_seq_lens_q"].dtype == torch.int32 and batch["cu_seq_lens_q"] is batch["cu_seq_lens_k"]
    (starts,) = (batch["position_ids"][0] == 0).nonzero(as_tuple=True)
    assert [*starts.tolist(), batch["input_ids"].shape[1]] == batch["cu_seq_lens_q"].tolist()
    assert batch["max_length_q"] == int(batch["cu_seq_lens_q"].diff().max()) and batch["input_ids"].shape[0] == 1
    rows = [packed[i] for i in range(len(packed))]
    whole = packed.collate_with(Collator())(rows)
    assert whole["sequence_ids"][0].tolist() == (whole["position_ids"][0] == 0).cumsum(0).sub(1).tolist()
    task = MultiTask({"a": packed}).collate_with(Collator())([("a", packed[0]), ("a", packed[1])]).parts["a"]
    assert task["input_ids"].shape[0] == 1 and "cu_seq_lens_q" in task


def test_resume_with_other_rows_is_an_error(tmp_path: Path) -> None:
    data = texts(40)
    options: dict[str, Any] = {"save_dir": tmp_path, "save_steps": 1}
    quiet(gpt(), PackedDataset(data, 16), **options, max_steps=1, epochs=None).train()
    with pytest.raises(CheckpointError, match=r"training set has (borders=\[\]|.*sample \d+)"):
        quiet(gpt(), PackedDataset(data, 16, borders=()), **options).train(resume_from="auto")


def test_error_reports_the_row_and_its_samples() -> None:
    packed = PackedDataset(texts(9), 12)
    packed.dataset = packed.dataset[:5]
    (row,) = [i for i in range(len(packed)) if any(part[0] == 5 for part in packed.sequences(i))]
    with pytest.raises(IndexError) as caught:
        packed[row]
    (note,) = caught.value.__notes__
    assert note.startswith(f"Row {row} is packed from the samples") and "5" in note
