"""Collation, counting of samples, and copies to a device."""

import collections
import contextlib
import copy
import dataclasses
import functools
import pickle
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import assert_equal
from transformers import BatchEncoding

from omnitrain.core.errors import ConfigError, DataError
from omnitrain.data.collation import (
    Collator,
    DictBatch,
    PaddedBatch,
    cast_inputs,
    count_samples,
    get_labels,
    move_to_device,
    pin_batch,
    split_batch,
    with_labels,
)
from omnitrain.data.loaders import make_loader

collate = Collator()


@pytest.mark.parametrize(("values", "expected", "dtype"), [
    ([1, 2], [1, 2], torch.int64),
    ([True, False], [True, False], torch.bool),
    ([1, 2.5], [1.0, 2.5], torch.float32),
    ([np.int32(1), np.int32(2)], [1, 2], torch.int32),
    ([np.float16(1), np.float16(2)], [1.0, 2.0], torch.float16),
    ([torch.tensor(1), torch.tensor(2)], [1, 2], torch.int64),
    ([np.array(1.0), np.array(2.0)], [1.0, 2.0], torch.float64),
    ([np.ones(2, np.uint16)] * 2, [[1, 1]] * 2, torch.uint16),
    ([np.ones((2, 3)), np.zeros((2, 3))], [[[1.0] * 3] * 2, [[0.0] * 3] * 2], torch.float64),
    ([[[1], [2]], [[3], [4]]], [[[1], [2]], [[3], [4]]], torch.int64),
    ([[1, 2], [0.5, 1]], [[1.0, 2.0], [0.5, 1.0]], torch.float32),
    ([[], []], [[], []], torch.float32),
], ids=str)  # fmt: skip
def test_collator_stacks_equal_shapes_and_keeps_types(values: list[Any], expected: list[Any], dtype: Any) -> None:
    for batch in (collate(values), collate([{"x": value} for value in values])["x"]):
        assert batch.dtype is dtype and batch.tolist() == expected


def test_collator_gives_floats_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert collate([1.5]).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("values", [
    ["a", "b"], [b"a", b"b"], [None, None], [np.str_("a"), np.str_("b")], [np.datetime64("2020-01-01")] * 2,
    [["a"], ["b", "c"]], [("a", "b"), ("c", "d")], [np.array(["a"]), np.array(["b"])],
    [np.array([None, "a"], dtype=object)] * 2, [[[1, 2], [3]], [[4], [5]]], [{1}, {2}],
], ids=str)  # fmt: skip
def test_collator_keeps_text_and_objects_as_lists(values: list[Any]) -> None:
    batch = collate([{"x": value} for value in values])["x"]
    assert type(batch) is list and all(entry is value for entry, value in zip(batch, values, strict=True))


ARRAYS = {
    "reversed": np.arange(6)[::-1], "strided": np.arange(12)[::2], "big endian": np.arange(6, dtype=">i4"),
    "big endian reversed": np.arange(6, dtype=">f8")[::-1], "broadcast": np.broadcast_to(np.arange(2), (6, 2)),
    "flipped": np.asfortranarray(np.arange(12).reshape(6, 2))[:, ::-1],
}  # fmt: skip


@pytest.mark.parametrize("layout", ARRAYS)
def test_collator_takes_arrays_of_any_memory_layout(layout: str) -> None:
    """And shares no memory with them."""
    array, before = ARRAYS[layout], ARRAYS[layout].tolist()
    array.setflags(write=False)
    for other in (array, array[:4]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batch = collate([{"input_values": value} for value in (array, other)])["input_values"]
        assert batch[0].tolist() == before and batch[1, :4].tolist() == before[:4]
        for options in ({}, {"max_length": 3}):
            Collator(**options)([array]).zero_()
    assert array.tolist() == before


def plain(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


@pytest.mark.parametrize(("samples", "expected"), [
    ([{"x": {"a": 1, "b": [1]}, "y": 0}, {"y": 1, "x": {"a": 2, "b": [2, 3]}}],
     {"x": {"a": [1, 2], "b": [[1, 0], [2, 3]]}, "y": [0, 1]}),
    ([((torch.ones(1), np.ones(1, int)), 1), ((torch.ones(1), np.ones(3, int)), 0)],
     (([[1.0], [1.0]], [[1, 0, 0], [1, 1, 1]]), [1, 0])),
    ([[torch.ones(2), 1], [torch.ones(2), 0]], ([[1.0, 1.0], [1.0, 1.0]], [1, 0])),  # a list of parts, and of tokens
    ([[1, 2], [3]], [[1, 2], [3, 0]]),
    *(([{"x": [1, 2], key: [1]}, {"x": [3], key: [1, 2]}], {"x": [[1, 2], [3, 0]], key: [[1, -100], [1, 2]]})
      for key in ("labels", "label", "label_ids", "targets", "target")),
    ([([1], [1]), ([1, 2], [1, 2])], ([[1, 0], [1, 2]], [[1, -100], [1, 2]])),  # the last entry of a tuple is the label
    ([([1],), ([1, 2],)], ([[1, 0], [1, 2]],)),
])  # fmt: skip
def test_collator_merges_and_pads_parts(samples: list[Any], expected: Any) -> None:
    """By 0, and labels by -100."""
    assert plain(collate(samples)) == expected


def test_padding_may_differ_by_key() -> None:
    collator = Collator(pad_value=7, pad_values={"ids": 9, "labels": -1, "audio": -1.0})
    batch = collator([dict.fromkeys(("ids", "x", "labels"), row) for row in ([1], [1, 2])])
    assert [batch[key][0, 1].item() for key in ("ids", "x", "labels")] == [9, 7, -1]
    audio = collator([{"audio": [0.5]}, {"audio": [0.5, 0.25]}])["audio"]  # a sequence, as it has a pad value
    assert audio.tolist() == [[0.5, -1.0], [0.5, 0.25]]
    batch = collate([{"input_features": torch.ones(2, 3)}, {"input_features": torch.ones(1, 3)}])  # one by its name
    assert batch["input_features"].sum(-1).tolist() == [[3, 3], [3, 0]]


@pytest.mark.parametrize(("key", "values", "expected", "dtype"), [
    ("labels", np.ones((2, 2), bool), [[1, 1], [1, -100]], torch.int64),
    ("labels", np.ones((2, 2), np.uint8), [[1, 1], [1, -100]], torch.int64),
    ("labels", np.ones((2, 2), np.int8), [[1, 1], [1, -100]], torch.int8),
    ("mask", [[True, True], [True]], [[True, True], [True, False]], torch.bool),
    ("input_ids", [[], [1, 2]], [[0, 0], [1, 2]], torch.int64),
    ("input_ids", [[1, 2], []], [[1, 2], [0, 0]], torch.int64),
    ("input_values", [[1, 2], [1.5]], [[1.0, 2.0], [1.5, 0.0]], torch.float32),
    ("input_values", [[1.5], [1, 2]], [[1.5, 0.0], [1.0, 2.0]], torch.float32),
])  # fmt: skip
def test_padding_has_the_type_of_values_and_padding(key: str, values: Any, expected: list[Any], dtype: Any) -> None:
    values = [values[0], values[1, :1]] if isinstance(values, np.ndarray) else values
    batch = collate([{key: value} for value in values])[key]
    assert batch.tolist() == expected and batch.dtype is dtype


@pytest.mark.parametrize(("values", "key"), [
    ([torch.ones(3, 4, 4), torch.ones(1, 4, 4)], "pixels"),
    ([np.ones((3, 4, 4), np.uint8), np.ones((1, 4, 4), np.uint8)], "pixels"),
    ([[1.5, 2.5], [1.5]], "x"), ([[1.5, 2.5], []], "x"), ([torch.ones(5), torch.ones(4)], ""),
    ([np.ones((2, 3), int), np.ones((1, 3), int)], "x"),
])  # fmt: skip
def test_padding_and_truncation_need_a_sequence(values: list[Any], key: str) -> None:
    shapes = [tuple(torch.as_tensor(value).shape) for value in (values[1], values[0])]
    place = f"{key!r}: " if key else ""
    words = f"{place}entry 1 of the batch, of shape {shapes[0]}, and entry 0, of shape {shapes[1]}"
    for max_length in (None, 8):
        with pytest.raises(DataError, match=re.escape(words)):
            Collator(max_length=max_length)([{key: value} for value in values] if key else values)


@pytest.mark.parametrize("side", ["right", "left"])
def test_collator_with_mask_hides_padding(side: str) -> None:
    """Only where padding is, and not where the samples have a mask."""
    masking = Collator(padding_side=side, max_length=3, pad_value=7).with_attention_mask()
    ragged = [{"input_ids": [4, 5, 6, 6], "labels": 1}, {"input_ids": [4], "labels": 0}]
    batch = masking(ragged)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0] if side == "right" else [0, 0, 1]]
    assert batch["attention_mask"].dtype is torch.int64
    assert "attention_mask" not in masking(ragged[:1] * 2) and "attention_mask" not in Collator()(ragged)
    assert "attention_mask" not in masking([{"x": [1]}, {"x": [1, 2]}])
    masked = [{**sample, "attention_mask": [1] * len(sample["input_ids"])} for sample in ragged]
    assert torch.equal(masking(masked)["attention_mask"] == 1, batch["attention_mask"] == 1)
    embeds = masking([{"inputs_embeds": torch.ones(2, 5)}, {"inputs_embeds": torch.ones(1, 5)}])
    assert embeds["attention_mask"].sum() == 3


def test_padded_batch_keeps_its_tokens() -> None:
    batch = collate([{"input_ids": [4, 5]}, {"input_ids": [0]}])
    for clone in (batch, copy.copy(batch), pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert isinstance(clone, PaddedBatch) and clone.count_tokens() == 3
        assert clone["input_ids"].tolist() == [[4, 5], [0, 0]]
    assert batch.to("cpu") is not batch
    assert not hasattr(split_batch(batch, 1)[0], "count_tokens")  # of the part, they are unknown
    assert not hasattr(collate([{"input_ids": [4, 5]}, {"input_ids": [0, 1]}]), "count_tokens")


def test_dict_batch_moves_as_a_batch_encoding() -> None:
    """Scripts call `batch.to(device)`; entries that are no tensors stay."""
    batch = Collator()([{"x": torch.ones(2), "at": {"y": number}, "name": "a"} for number in range(2)])
    for device in ("meta", torch.device("meta")):
        moved = batch.to(device, non_blocking=True)
        assert moved["x"].device.type == moved["at"]["y"].device.type == "meta" and moved["name"] == ["a", "a"]
        assert isinstance(batch, dict) and hasattr(moved, "to") and batch["x"].device.type == "cpu"


def test_dict_batch_keeps_to_where_it_is_changed() -> None:
    samples = [{"input_ids": [4, 5], "labels": 0}, {"input_ids": [0, 1], "labels": 1}]
    whole, padded = collate(samples), collate([samples[0], {"input_ids": [3], "labels": 1}])
    columns = {"x": torch.ones(2, 3), "labels": torch.arange(2)}
    batches = [next(make_loader(data, 2, name="train_dataset").batches(0)) for data in (columns, samples)]
    batches += [collate.with_attention_mask()([samples[0], {"input_ids": [3], "labels": 1}])]
    for batch in (whole, padded):
        batches += [with_labels(batch, batch["labels"] + 1, ()), cast_inputs(batch, torch.float64, ())]
        batches += split_batch(batch, 1)
    batches += [pin_batch(DictBatch(name=["a", "b"])), copy.copy(whole), pickle.loads(pickle.dumps(whole))]
    assert [hasattr(batch, "to") for batch in batches] == [True] * len(batches)
    assert with_labels(padded, padded["labels"], ()).count_tokens() == 3


def test_collator_reports_the_row_of_a_missing_field() -> None:
    for other in ({"x": [1.0, 2.0]}, {"x": [1.0, 2.0], "age": None}):
        samples = [{"x": [1.0, 2.0], "age": 3} for _ in range(4)] + [other]
        with pytest.raises(DataError, match=r"'age'.*entry 4 of the batch") as caught:
            next(make_loader(samples, 6, name="train_dataset").batches(0))
        assert "sample 4" in "".join(caught.value.__notes__)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(-1000, 1000), max_size=6), min_size=1, max_size=5), st.none() | st.integers(1, 7),
    st.sampled_from(["left", "right"]), st.sampled_from(["left", "right"]),
    st.sampled_from([list, functools.partial(torch.tensor, dtype=torch.int64), functools.partial(np.array, dtype=int)]),
    st.sampled_from(["ids", "labels"]),
)  # fmt: skip
def test_padding_equals_padding_by_hand(
    values: list[list[int]], max_length: int | None, cut: str, pad: str, make: Any, key: str
) -> None:
    collator = Collator(max_length=max_length, truncation_side=cut, padding_side=pad, pad_value=7)
    batch = collator([{key: make(value)} for value in values])[key]
    rest = values
    if max_length is not None:
        rest = [value[:max_length] if cut == "right" else value[-max_length:] for value in values]
    longest, fill = max(map(len, rest)), [-100 if key == "labels" else 7]
    gaps = [(longest - len(value)) * fill for value in rest]
    expected = [value + gap if pad == "right" else gap + value for value, gap in zip(rest, gaps, strict=True)]
    assert batch.tolist() == expected
    assert batch.dtype is torch.int64 or not any(values)


def test_truncation_leaves_other_shapes_unchanged() -> None:
    assert Collator(max_length=2)([torch.ones(4), torch.ones(4)]).shape == (2, 4)
    assert Collator(max_length=2)([{"x": torch.ones(3, 4)}])["x"].shape == (1, 3, 4)
    assert Collator(max_length=1)([{"label": 3}, {"label": 4}])["label"].tolist() == [3, 4]


class Data:
    """A graph as of PyTorch Geometric, as far as a collator can see."""

    num_nodes = 3


GRAPH = r"Data is a graph, .*Batch.from_data_list.*label_names=\['y'\]"
MISFITS: list[tuple[list[Any], str]] = [
    ([{"a": 1, "b": 2}, {"a": 1}], "different keys: 'b'"),
    ([{"x": {"a": 1}}, {"x": {"b": 1}}], "different keys"),
    ([(1, 2), (1,)], "unequal lengths: 2, 1"),
    ([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], r"'x': entry 1 of the batch, of shape \(2, 4\)"),
    ([torch.ones(2), torch.tensor(1.0)], r"entry 1 of the batch, of shape \(\), and entry 0, of shape \(2,\)"),
    ([{"y": 1}, {"y": None}], r"'y': \[1, None\]"),
    ([{"y": 1}, {"y": "a"}], r"'y': \[1, 'a'\]"),
    ([2**70, 1], str(2**70)),
    *((graphs, GRAPH) for graphs in ([Data()] * 2, [(Data(), 1), (Data(), 2)], [{"graph": Data(), "y": 1}] * 2)),
]


@pytest.mark.parametrize(("samples", "words"), MISFITS)
def test_collator_rejects_samples_that_do_not_fit_together(samples: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        collate(samples)


@pytest.mark.parametrize(
    ("name", "value"), [("truncation_side", "middle"), ("padding_side", "Right"), ("max_length", 0)]
)
def test_collator_rejects_impossible_options(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` must be .*{value!r}"):
        Collator(**{name: value})


class UserMapping(collections.UserDict):  # type: ignore[type-arg]
    """A mapping that is no dict, as transformers' BatchEncoding."""


@pytest.mark.parametrize(("batch", "labels"), [
    ({"labels": 1, "label": 2}, 1), ({"x": 0, "label": 2}, 2), ({"target": 4, "targets": 3}, 3), ({"label_ids": 5}, 5),
    (UserMapping(labels=6), 6), ({"x": 0}, None), ((0, 1), 1), ([0, 1, 2], 2), ((0,), None), (torch.ones(3), None),
])  # fmt: skip
def test_labels_of_a_batch_are_found_by_name_or_position(batch: Any, labels: Any) -> None:
    assert get_labels(batch) == labels


@pytest.mark.parametrize(("batch", "count"), [
    (torch.ones(3, 2), 3),
    ({"x": torch.ones(5, 2), "y": torch.ones(9)}, 5),
    ({"name": "a", "x": torch.ones(5)}, 5),
    ({"text": ["a", "b"], "n": 3}, 2),
    ({"boxes": [torch.ones(7, 4), torch.ones(1, 4), torch.ones(2, 4)]}, 3),
    ({"nested": {"x": np.ones(6)}}, 6),
    (UserMapping(x=torch.ones(3)), 3),
    ((torch.ones(3, 2), torch.ones(3)), 3),
    (((torch.ones(3, 2), torch.ones(3, 5)), torch.ones(3)), 3),
    (({"x": torch.ones(4)}, torch.ones(4)), 4),
    (((torch.ones(2, 8, 8), torch.ones(2, 9, 9), torch.ones(2, 7, 7)), ({}, {}, {})), 3),
    ({"empty": {}, "x": torch.ones(2)}, 2),
    *((batch, None) for batch in (torch.tensor(1.0), {}, {"x": 1}, (), 3, "text", None, np.array(1))),
])  # fmt: skip
def test_count_samples_of_any_batch(batch: Any, count: int | None) -> None:
    with pytest.raises(DataError, match=type(batch).__name__) if count is None else contextlib.nullcontext():
        assert count_samples(batch) == count


@dataclasses.dataclass
class JoinedGraphs:
    nodes: torch.Tensor
    labels: torch.Tensor
    num_graphs: int


def test_count_samples_prefers_num_graphs_of_dataclass() -> None:
    """The nodes of all graphs come first, and are not its samples; parts of a split have their own number."""
    batch = JoinedGraphs(torch.ones(7, 2), torch.ones(3, 1), 3)
    assert count_samples(batch) == 3
    with pytest.raises(DataError, match="split_batch"):
        split_batch(batch, 2)
    parts = split_batch(JoinedGraphs(torch.ones(3, 5, 2), torch.ones(3, 1), 3), 2)
    assert [(part.num_graphs, len(part.nodes)) for part in parts] == [(2, 2), (1, 1)]


Pair = collections.namedtuple("Pair", "first second")
META = torch.device("meta")


def test_move_to_device_moves_tensors_only() -> None:
    tensor = torch.ones(1)
    batch = {
        "x": tensor, "list": [tensor, 2], "pair": Pair(tensor, ("b", tensor)), "text": ["a"],
        "other": UserMapping(x=tensor), "array": np.ones(1),
    }  # fmt: skip
    moved = move_to_device(batch, META)
    assert moved["x"].device == moved["list"][0].device == moved["other"]["x"].device == META
    assert type(moved["list"]) is list and type(moved["pair"]) is Pair
    assert moved["pair"].first.device == moved["pair"].second[1].device == META
    assert moved["text"] == ["a"] and isinstance(moved["array"], np.ndarray)
    assert batch["x"].device.type == "cpu" and move_to_device(batch, torch.device("cpu"))["x"] is batch["x"]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])  # which has a method for it
    (copy,) = move_to_device((packed,), META)
    assert (copy.data.device, copy.batch_sizes.device.type) == (META, "cpu")  # as torch demands


ROWS = torch.arange(5)
BOXES = [torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3, 3)]


@pytest.mark.parametrize(("batch", "first", "last"), [
    (ROWS, [0, 1], [4]),
    (ROWS.numpy(), [0, 1], [4]),
    ({"x": ROWS, "scale": 2.0, "none": None, "of": "all"},
     {"x": [0, 1], "scale": 2.0, "none": None, "of": "all"}, {"x": [4], "scale": 2.0, "none": None, "of": "all"}),
    ((ROWS, torch.tensor(7), ROWS[None]), ([0, 1], 7, [[0, 1, 2, 3, 4]]), ([4], 7, [[0, 1, 2, 3, 4]])),
    ([ROWS, list("abcde")], [[0, 1], ["a", "b"]], [[4], ["e"]]),
    (list("abcde"), ["a", "b"], ["e"]),
    ({"x": ROWS, "inner": {"y": ROWS, "names": tuple("abcde")}},
     {"x": [0, 1], "inner": {"y": [0, 1], "names": ("a", "b")}}, {"x": [4], "inner": {"y": [4], "names": ("e",)}}),
    ({"x": ROWS, "cache": ((ROWS, ROWS),)}, {"x": [0, 1], "cache": (([0, 1], [0, 1]),)},
     {"x": [4], "cache": (([4], [4]),)}),
    ((BOXES, [{"box": 1}] * 5), (plain(BOXES[:2]), [{"box": 1}] * 2), (plain(BOXES[4:]), [{"box": 1}])),
])  # fmt: skip
def test_split_batch_by_rows_keeps_common_values(batch: Any, first: Any, last: Any) -> None:
    parts = split_batch(batch, 2)
    assert [plain(parts[0]), plain(parts[-1])] == [first, last]
    assert len(parts) == 3 and all(type(part) is type(batch) for part in parts)
    assert split_batch(batch, 5)[0] is batch


def test_split_batch_gives_equal_parts_of_the_type() -> None:
    assert [len(part) for part in split_batch(torch.arange(9), 4)] == [3, 3, 3]
    assert [len(part) for part in split_batch(torch.arange(4), 3)] == [2, 2]
    encoding = BatchEncoding({"input_ids": torch.ones(3, 2), "n": 1})
    first, second = split_batch(encoding, 2)
    assert type(first) is BatchEncoding and first["n"] == 1
    assert (first["input_ids"].shape, second["input_ids"].shape) == ((2, 2), (1, 2))
    assert split_batch(Pair(ROWS, {"z": ROWS}), 3)[1].second["z"].tolist() == [3, 4]
    ordered = collections.OrderedDict(b=ROWS, a=ROWS)
    assert [type(part) for part in split_batch(ordered, 3)] == [collections.OrderedDict] * 2
    assert ordered["a"] is ROWS


@pytest.mark.parametrize(("batch", "words"), [
    (object(), "a object into rows"),
    ({"x": ROWS, "odd": object()}, "a object under 'odd' into rows"),
    ({"x": ROWS, "lengths": torch.arange(6)}, "a Tensor of shape (6,) under 'lengths' in a batch of 5 rows"),
    ((ROWS, ROWS[:4]), "a Tensor of shape (4,) at 1 in a batch of 5 rows"),
    ({"x": ROWS, "names": ["a", "b"]}, "a list of 2 entries under 'names' in a batch of 5 rows"),
    ({"x": torch.ones(3, 2), "images": (torch.ones(3, 4, 4),) * 3}, "a tuple of 3 entries under 'images'"),
    ([{"x": torch.ones(3, 4, 4)}] * 5, "a list of dicts into rows"),
    (torch.tensor(1.0), "a Tensor into rows"),
])  # fmt: skip
def test_split_batch_rejects_what_is_ambiguous(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"`microbatch_size` cannot split {re.escape(words)}.*split_batch"):
        split_batch(batch, 2)


def test_cast_inputs_leaves_labels_and_integers_unchanged() -> None:
    half, values, whole = torch.bfloat16, torch.ones(2), torch.ones(2, dtype=torch.int64)
    cast = values.to(half)
    batch = {"pixels": values, "rest": [values, {"ids": whole}], "labels": values, "score": values, "n": whole}
    expected = {"pixels": cast, "rest": [cast, {"ids": whole}], "labels": values, "score": values, "n": whole}
    assert_equal(cast_inputs(batch, half, ["score"]), DictBatch(expected))
    pair = cast_inputs(Pair(values, values), half, ())  # whose last entry are the labels
    assert isinstance(pair, Pair)
    assert_equal(pair, Pair(cast, values))
    assert_equal(cast_inputs((values,), half, ()), (cast,))
    assert_equal(cast_inputs(values, half, ()), cast)
    with pytest.raises(DataError, match="a batch is of object, whose tensors are unknown"):
        cast_inputs(object(), half, ())
