"""Weights, moments and generators come back to the bit, under the names of the bare module."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from omnitrain.checkpoint import state, tensors
from omnitrain.checkpoint.tensors import TensorFile
from omnitrain.errors import CheckpointError, ConfigError


class Tied(nn.Module):
    """Embedding and head are one tensor; buffers are views of one; one is not persistent; one is empty."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0) + seed)
        self.register_buffer("whole_table", self.table)
        self.register_buffer("first_half", self.table[:3])
        self.register_buffer("bits", self.table.view(torch.int32))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("also_empty", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- models


def test_tensor_of_several_names_is_kept_once_under_the_first() -> None:
    assert list(state.model_tensors(Tied())) == ["table", "first_half", "bits", "empty", "also_empty", "embed.weight"]


def test_tied_and_view_shared_tensors_come_back_tied_and_in_place(tmp_path: Path) -> None:
    source, target = Tied(), Tied(seed=1)
    places = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    state.save_tensors(state.model_tensors(source), tmp_path / "file")
    state.load_weights(target, state.load_tensors(tmp_path / "file"), "there")
    assert same(dict(target.state_dict()), dict(source.state_dict()))
    assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == places
    assert target.head.weight is target.embed.weight


def test_file_holds_no_more_than_the_tensors_even_of_views_into_large_ones(tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    tensors = {"head": large[:10], "overlapping": large[5:15], "transposed": torch.arange(6.0).reshape(2, 3).T}
    state.save_tensors(tensors, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 1000
    assert same(state.load_tensors(tmp_path / "file"), tensors)


@pytest.mark.parametrize("dtype", tensors.DTYPES)
def test_every_dtype_comes_back_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([[0.0, 1.0], [2.0, -0.0]]).to(dtype), "scalar": torch.tensor(1.0).to(dtype)}
    state.save_tensors(tensors, tmp_path / "file")
    found = state.load_tensors(tmp_path / "file")
    for name, tensor in tensors.items():
        assert found[name].dtype is dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128))


def test_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`a/b` is of torch\.complex128"):
        state.save_tensors({"a/b": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "file")


def test_file_is_as_the_safetensors_package_would_write_it(tmp_path: Path) -> None:
    def header_and_data(path: Path) -> tuple[Any, bytes]:
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        assert begin % 8 == 0
        return json.loads(content[8:begin]), content[begin:]

    tensors = {
        "flag": torch.tensor([True]), "b": torch.randn(3), "wide": torch.randn(2, 2, dtype=torch.float64),
        "a": torch.tensor(1.0), "none": torch.zeros(0, 3), "h\u00e4lfte": torch.randn(5).half(),
    }  # fmt: skip
    state.save_tensors(tensors, tmp_path / "ours")
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert header_and_data(tmp_path / "ours") == header_and_data(tmp_path / "theirs")


def test_digest_is_that_of_the_file(tmp_path: Path) -> None:
    tensors = {**Tied().state_dict(), "transposed": torch.arange(6.0).reshape(2, 3).T}
    state.save_tensors(tensors, tmp_path / "file")
    assert state.digest(tensors) == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_what_lies_in_host_memory_in_one_piece_is_not_copied() -> None:
    whole, transposed = torch.randn(3, 2, requires_grad=True), torch.arange(6.0).reshape(2, 3).T
    found = state.host_tensors({"whole": whole, "transposed": transposed})
    assert found["whole"].data_ptr() == whole.data_ptr() and not found["whole"].requires_grad
    assert found["transposed"].is_contiguous() and torch.equal(found["transposed"], transposed)


def test_names_are_those_of_the_bare_module_however_it_is_wrapped() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    names = list(make().state_dict())
    half = make()
    half[0] = torch.compile(half[0], backend="eager")  # type: ignore[assignment]
    for model in (torch.compile(make(), backend="eager"), half, nn.DataParallel(make())):
        assert list(state.model_tensors(model)) == names  # type: ignore[arg-type]
        tensors = {name: torch.full_like(tensor, 0.5) for name, tensor in make().state_dict().items()}
        state.load_weights(model, tensors, "there")  # type: ignore[arg-type]
        assert all((parameter == 0.5).all() for parameter in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("0.weight"), r"there does not fit the model: missing \['0.weight'\]"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), r"not in the model \['more'\]"),
        (lambda tensors: tensors.update({"0.bias": torch.zeros(3)}), r"'0.bias' has shape \(3,\) there and \(2,\) in"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_any_is_copied(change: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        state.load_weights(model, tensors, "there")
    assert same(dict(model.state_dict()), before)


def test_weights_of_another_dtype_are_refused_where_digits_would_be_lost() -> None:
    model = nn.Linear(2, 1).bfloat16()
    wide = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"'weight' is of torch.float32 there and of torch.bfloat16 in the model"):
        state.load_weights(model, wide, "there")
    state.load_weights(model.double(), wide, "there")
    assert model.weight.tolist() == [[1.0, 1.0]]


class Queue(nn.Module):
    """Keeps what it has seen in a buffer, which grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(0))


class Growing(Queue):
    refuses = False

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}seen" in state_dict:
            self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        if self.refuses:
            raise KeyError("no")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Whole(Queue):
    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict)


@pytest.mark.parametrize("make", [Growing, Whole, lambda: nn.Sequential(Growing())])
def test_buffer_of_another_shape_is_for_the_loader_of_its_module(make: Any) -> None:
    source, target = make(), make()
    queues = [one for model in (source, target) for one in model.modules() if isinstance(one, Queue)]
    queues[0].seen = torch.arange(3.0)
    state.load_weights(target, state.model_tensors(source), "there")
    assert queues[1].seen.tolist() == [0.0, 1.0, 2.0]
    assert queues[1].layer.weight.equal(queues[0].layer.weight)


def test_buffer_of_another_shape_without_such_a_loader_is_refused_with_the_remedy() -> None:
    source, target = Queue(), Queue()
    source.seen = torch.arange(3.0)
    with pytest.raises(CheckpointError, match=r"'seen' has shape \(3,\) there and \(0,\).*`_load_from_state_dict` of"):
        state.load_weights(target, state.model_tensors(source), "there")


def test_model_whose_loader_refuses_is_as_it_was() -> None:
    source, target = Growing(), Growing()
    source.seen, target.refuses = torch.arange(3.0), True
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"there does not fit the model, which refused it: KeyError: 'no'"):
        state.load_weights(target, state.model_tensors(source), "there")
    assert same(dict(target.state_dict()), before)


def test_parameter_of_another_shape_is_refused_whatever_loads_it() -> None:
    source, target = Growing(), Growing()
    source.layer = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=r"'layer.weight' has shape \(1, 2\) there and \(1, 1\) in the model"):
        state.load_weights(target, state.model_tensors(source), "there")


def test_modules_whose_state_dict_gives_copies_are_loaded_all_the_same() -> None:
    model = nn.Linear(2, 1)
    model._register_state_dict_hook(lambda module, found, *_: found.update({k: v.clone() for k, v in found.items()}))
    state.load_weights(model, {"weight": torch.ones(1, 2), "bias": torch.ones(1)}, "there")
    assert model.weight.tolist() == [[1.0, 1.0]]


class Counting(nn.Linear):
    count = 0
    tensor_count: Any = None

    def get_extra_state(self) -> Any:
        return {"count": self.count, 1: (2, math.inf)}

    def set_extra_state(self, state: Any) -> None:
        assert state[1] == (2, math.inf)
        self.count = state["count"]


def test_extra_state_of_modules_comes_back() -> None:
    source, target = nn.Sequential(Counting(1, 1)), nn.Sequential(Counting(1, 1))
    source[0].count = 7
    extra = json.loads(json.dumps(state.extra_state(source), allow_nan=False))
    state.load_weights(target, state.model_tensors(source), "there", extra)
    assert target[0].count == 7


def test_extra_state_that_no_checkpoint_can_hold_is_refused_by_name() -> None:
    model = nn.Sequential(Counting(1, 1))
    model[0].get_extra_state = lambda: {"what": object()}  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"`0\._extra_state/what` holds a object"):
        state.extra_state(model)


# --- save_model


class Config:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "config.json").write_text("{}")


def test_saved_model_is_one_file_with_the_config_beside_it(tmp_path: Path) -> None:
    model = Tied()
    model.config = Config()  # type: ignore[assignment]
    state.save_weights(model, tmp_path / "a" / "b", overwrite=False)
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    header = (tmp_path / "a" / "b" / "model.safetensors").read_bytes()[8:]
    assert json.loads(header[: header.index(b"}}") + 2])["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "BertForSequenceClassification"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_config_beside_a_transformers_model_is_the_one_that_the_model_itself_writes(
    family: str, dtype: torch.dtype, compiled: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config: Any = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(
            n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
        ),
        "BertForSequenceClassification": lambda: transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=11
        ),
    }[family]()
    model = getattr(transformers, family)(config).to(dtype)
    before = model.config.to_dict()
    wrapped: Any = torch.compile(model, backend="eager") if compiled else model
    state.save_weights(wrapped, tmp_path / "ours", overwrite=False)
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (tmp_path / side / name for side in ("ours", "theirs"))
        assert ours.exists() == theirs.exists()
        if ours.exists():
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
    opened = getattr(transformers, family).from_pretrained(tmp_path / "ours")
    assert opened.dtype == dtype and same(dict(opened.state_dict()), dict(model.state_dict()))
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "ours")).__name__ == f"{family[:4]}Model"
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [family]


def test_model_that_is_there_is_replaced_only_if_that_is_wanted_and_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save_weights(Tied(0), tmp_path, overwrite=False)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"model.safetensors' already exists.*overwrite=True"):
        state.save_weights(Tied(1), tmp_path, overwrite=False)

    def torn(tensors: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):  # noqa: PT012
        patch.setattr(state, "save_tensors", torn)
        state.save_weights(Tied(1), tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    state.save_weights(Tied(1), tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors").read_bytes() != before
    with pytest.raises(ConfigError, match="it is a file"):
        state.save_weights(Tied(), tmp_path / "model.safetensors", overwrite=True)


# --- optimizers


def trained(make: Any, order: list[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    parameters = dict(model.named_parameters())
    optimizer = make([parameters[name] for name in order or parameters])
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}


def through_json(rest: Any) -> Any:
    return json.loads(json.dumps(rest, allow_nan=False))


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "SGD without momentum": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_every_optimizer_comes_back_to_the_bit_in_any_order_of_parameters(name: str, tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    tensors, rest = state.optimizer_state(optimizer, model)
    state.save_tensors(tensors, tmp_path / "file")
    other, twin = trained(OPTIMIZERS[name], ["1.bias", "0.weight", "1.weight", "0.bias"])
    for entry in twin.state.values():
        entry.clear()
    state.restore_optimizer(twin, other, state.load_tensors(tmp_path / "file"), through_json(rest), "there")
    then, now = by_name(model, optimizer), by_name(other, twin)
    assert {name: set(entry) for name, entry in then.items()} == {name: set(entry) for name, entry in now.items()}
    for parameter, entry in then.items():
        for key, value in entry.items():
            found = now[parameter][key]
            assert type(found) is type(value)
            if isinstance(value, torch.Tensor):
                assert found.dtype is value.dtype and torch.equal(found, value), f"{parameter}/{key}"
            else:
                assert found == value


def test_tensors_are_kept_under_parameter_names() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, _ = state.optimizer_state(optimizer, torch.compile(model, backend="eager"))
    assert {name for name in tensors if name.startswith("0.weight/")} == {
        "0.weight/step", "0.weight/exp_avg", "0.weight/exp_avg_sq",
    }  # fmt: skip


def test_lists_of_tensors_and_what_belongs_to_no_parameter_come_back(tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS["SGD"])
    first = next(model.parameters())
    optimizer.state[first]["factors"] = [torch.eye(2), {"power": torch.tensor([3.0])}, None]
    optimizer.state["steps"] = 3
    optimizer.state["mean"] = torch.tensor([1.0, 2.0])
    tensors, rest = state.optimizer_state(optimizer, model)
    state.save_tensors(tensors, tmp_path / "file")
    other, twin = trained(OPTIMIZERS["SGD"])
    state.restore_optimizer(twin, other, state.load_tensors(tmp_path / "file"), through_json(rest), "there")
    factors = twin.state[next(other.parameters())]["factors"]
    assert torch.equal(factors[0], torch.eye(2)) and torch.equal(factors[1]["power"], torch.tensor([3.0]))
    assert factors[2] is None
    assert twin.state["steps"] == 3 and twin.state["mean"].tolist() == [1.0, 2.0]


def test_options_of_the_groups_come_back_and_how_it_computes_does_not() -> None:
    model, optimizer = trained(lambda parameters: torch.optim.AdamW(parameters, 0.1, betas=(0.7, 0.8), fused=True))
    optimizer.param_groups[0] |= {"lr": 0.03, "own": (1, [2], {"x": None})}
    tensors, rest = state.optimizer_state(optimizer, model)
    for options in ({"lr": 0.1, "foreach": True}, {"lr": torch.tensor(0.1)}):
        other, twin = trained(lambda parameters: torch.optim.AdamW(parameters, **options))  # noqa: B023
        state.restore_optimizer(twin, other, tensors, through_json(rest), "there")
        group = twin.param_groups[0]
        assert group["betas"] == (0.7, 0.8) and group["own"] == (1, [2], {"x": None})
        assert type(group["lr"]) is type(options["lr"]) and float(group["lr"]) == pytest.approx(0.03)
        assert not group["fused"] and group["foreach"] == options.get("foreach")


def test_moments_keep_a_dtype_that_is_not_the_parameters() -> None:
    model, optimizer = trained(OPTIMIZERS["SGD"])
    for entry in optimizer.state.values():
        entry["kept"] = torch.full((2,), 1 / 3, dtype=torch.float64)
        entry["quantized"] = torch.tensor([200], dtype=torch.uint8)
    tensors, rest = state.optimizer_state(optimizer, model)
    state.restore_optimizer(optimizer, model, dict(tensors), through_json(rest), "there")
    entry = next(iter(optimizer.state.values()))
    assert entry["kept"].dtype is torch.float64 and float(entry["kept"][0]) == 1 / 3
    assert entry["quantized"].dtype is torch.uint8


def test_optimizer_of_other_parameters_or_groups_is_refused() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, rest = state.optimizer_state(optimizer, model)
    fewer = torch.optim.AdamW(list(model.parameters())[:-1])
    with pytest.raises(CheckpointError, match=r"there does not fit the optimizer.*other parameters: 1\.bias"):
        state.restore_optimizer(fewer, model, tensors, rest, "there")
    first, *others = model.parameters()
    two = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    with pytest.raises(CheckpointError, match=r"in other groups"):
        state.restore_optimizer(two, model, tensors, rest, "there")


def grown(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros([size + 1 for size in tensor.shape] or [2], dtype=tensor.dtype)


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()[:1].clone()


@pytest.mark.parametrize("change", [grown, shrunk, torch.Tensor.double], ids=["grown", "shrunk", "double"])
@pytest.mark.parametrize("name", ["AdamW", "amsgrad", "SGD", "Adafactor", "NAdam", "RMSprop"])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_tensor_that_the_optimizer_would_not_hold_is_refused_before_any_is_loaded(
    name: str, change: Any, is_fresh: bool
) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    tensors, rest = state.optimizer_state(optimizer, model)
    if is_fresh:
        optimizer = OPTIMIZERS[name](model.parameters())
    before = {key: dict(value) for key, value in optimizer.state.items()}
    for key in (key for key in tensors if key.startswith("0.weight/")):
        forged = {**tensors, key: change(tensors[key])}
        if forged[key].shape == tensors[key].shape == ():
            continue  # a number is one in any type
        with pytest.raises(CheckpointError, match=rf"there does not fit the optimizer: '{key}' is of shape .* in the"):
            state.restore_optimizer(optimizer, model, forged, through_json(rest), "there")
        lacking = {other: tensor for other, tensor in tensors.items() if other != key}
        if any(other.startswith("0.weight/") for other in lacking):
            with pytest.raises(CheckpointError, match=rf"'{key}' is missing"):
                state.restore_optimizer(optimizer, model, lacking, through_json(rest), "there")
        assert {key: dict(value) for key, value in optimizer.state.items()} == before


def test_moments_in_full_precision_of_parameters_in_half_are_refused_and_the_opposite_is_widened() -> None:
    def make(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = trained(OPTIMIZERS["SGD"])
        optimizer = torch.optim.AdamW(model.to(dtype).parameters(), fused=True)
        model(torch.ones(4, 3, dtype=dtype)).sum().backward()
        optimizer.step()
        return model, optimizer

    half, full = make(torch.bfloat16), make(torch.float32)
    tensors, rest = state.optimizer_state(full[1], full[0])
    with pytest.raises(CheckpointError, match=r"torch.float32 there.*torch.bfloat16 in the optimizer"):
        state.restore_optimizer(half[1], half[0], tensors, rest, "there")
    tensors, rest = state.optimizer_state(half[1], half[0])
    state.restore_optimizer(full[1], full[0], dict(tensors), rest, "there")
    moments = full[1].state[next(full[0].parameters())]
    assert moments["exp_avg"].dtype is moments["step"].dtype is torch.float32
    full[1].step()


def test_tensors_that_the_state_refers_to_and_that_are_not_there_are_refused_by_name() -> None:
    model, optimizer = trained(OPTIMIZERS["SGD"])
    optimizer.state[next(model.parameters())]["factors"] = [torch.eye(2)]
    tensors, rest = state.optimizer_state(optimizer, model)
    del tensors["0.weight/factors/0"]
    with pytest.raises(CheckpointError, match=r"'0.weight/factors/0' is missing"):
        state.restore_optimizer(optimizer, model, tensors, through_json(rest), "there")


def test_optimizer_with_a_step_of_its_own_is_not_asked_for_one_and_keeps_what_it_holds() -> None:
    class Own(torch.optim.Optimizer):
        steps = 0

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: Any = None) -> Any:
            Own.steps += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["rows"] = torch.ones(parameter.shape[0])

    model, optimizer = trained(Own)
    tensors, rest = state.optimizer_state(optimizer, model)
    twin = Own(model.parameters())
    state.restore_optimizer(twin, model, tensors, through_json(rest), "there")
    assert twin.state[next(model.parameters())]["rows"].tolist() == [1.0, 1.0] and Own.steps == 3
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):  # it has some now
        state.restore_optimizer(twin, model, {key: grown(one) for key, one in tensors.items()}, rest, "there")


@pytest.mark.parametrize(("option", "value"), [("lr", "high"), ("lr", math.nan), ("betas", 0.9), ("amsgrad", 7)])
def test_option_of_another_kind_is_refused_by_name(option: str, value: Any) -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, rest = state.optimizer_state(optimizer, model)
    rest["groups"][0][option] = value
    with pytest.raises(CheckpointError, match=rf"optimizer option '{option}' is "):
        state.restore_optimizer(optimizer, model, tensors, rest, "there")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("AdamW", "lr", -1.0), ("AdamW", "betas", (0.9, 1.5)), ("AdamW", "weight_decay", -0.1), ("SGD", "momentum", -1)],
)
def test_option_out_of_the_range_of_the_optimizer_is_refused_by_name(name: str, option: str, value: Any) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    tensors, rest = state.optimizer_state(optimizer, model)
    rest["groups"][0][option] = state.to_json(value, option)
    with pytest.raises(CheckpointError, match=rf"optimizer option '{option}' is .*which {name} refuses"):
        state.restore_optimizer(optimizer, model, tensors, rest, "there")


def test_rate_that_a_schedule_has_brought_a_rounding_error_below_zero_is_taken() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, rest = state.optimizer_state(optimizer, model)
    rest["groups"][0]["lr"] = -1e-20
    state.restore_optimizer(optimizer, model, tensors, rest, "there")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_count_of_steps_that_no_step_leaves_is_refused_by_name(value: float) -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, rest = state.optimizer_state(optimizer, model)
    state.check_numbers(tensors, rest, "there")
    key = next(key for key in tensors if key.endswith("/step"))
    with pytest.raises(CheckpointError, match=rf"there is damaged: '{key}' of the optimizer is"):
        state.check_numbers({**tensors, key: torch.tensor(value)}, rest, "there")
    name = key.removesuffix("/step")
    with pytest.raises(CheckpointError, match=rf"there is damaged: '{key}' of the optimizer is 'x'"):
        state.check_numbers({}, {"rest": {name: {"step": "x"}}}, "there")


def test_what_is_loaded_needs_the_file_no_more(tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, rest = state.optimizer_state(optimizer, model)
    state.save_tensors(tensors, tmp_path / "file")
    state.restore_optimizer(optimizer, model, TensorFile(tmp_path / "file"), through_json(rest), "there")
    read = state.load_tensors(tmp_path / "file")
    os.truncate(tmp_path / "file", 0)
    optimizer.step()  # into a map of the file it would be SIGBUS
    assert all(torch.isfinite(tensor).all() for tensor in read.values())
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


def test_parameter_that_is_not_the_models_has_no_name_and_is_refused() -> None:
    model, _ = trained(OPTIMIZERS["SGD"])
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], 0.1)
    with pytest.raises(CheckpointError, match=r"shapes \[\(7,\)\] that are not the model's"):
        state.optimizer_state(optimizer, model)


# --- random numbers


def draw() -> list[Any]:
    return [torch.rand(2).tolist(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)]


def test_generators_go_on_where_they_were_with_the_normal_number_they_had_in_store(tmp_path: Path) -> None:
    np.random.randn()
    random.gauss(0, 1)
    torch.randn(1)
    tensors, rest = state.rng_tensors(torch.device("cpu"))
    state.save_tensors(tensors, tmp_path / "file")
    expected = [draw(), draw()]
    draw()
    state.restore_rng_tensors(state.load_tensors(tmp_path / "file"), through_json(rest), torch.device("cpu"))
    assert [draw(), draw()] == expected


# --- JSON


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
states = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.dictionaries(st.sampled_from(["__tuple__", "__float__", "__dict__", "__tensor__"]), inner)
    ),
    max_leaves=12,
)


def shape_of(value: Any) -> Any:
    """Tell 1 from 1.0 and True, and a tuple from a list."""
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(entry) for entry in value]
    if isinstance(value, dict):
        return type(value), [(shape_of(key), shape_of(entry)) for key, entry in value.items()]
    return type(value), value


@given(states)
def test_any_state_goes_through_strict_json_and_back_unchanged(value: Any) -> None:
    text = json.dumps(state.to_json(value, "state"), allow_nan=False)
    assert shape_of(state.from_json(json.loads(text))) == shape_of(value)


def test_numbers_of_numpy_and_torch_become_pythons_and_counters_stay_counters() -> None:
    value = {"a": np.float32(0.5), "b": torch.tensor(3), "c": Counter({2: 1, 4: 2}), "d": math.nan, "e": -math.inf}
    found = state.from_json(json.loads(json.dumps(state.to_json(value, "state"), allow_nan=False)))
    assert (found["a"], found["b"]) == (0.5, 3) and type(found["b"]) is int
    assert type(found["c"]) is Counter and found["c"] == {2: 1, 4: 2}
    assert math.isnan(found["d"]) and found["e"] == -math.inf


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.zeros(2), np.zeros(2), lambda: None])
def test_what_json_cannot_hold_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"`mine/list/1/deep` holds a \w+, which has no place"):
        state.to_json({"list": [1, {"deep": value}]}, "mine")
