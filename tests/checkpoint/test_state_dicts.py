"""Weights, moments and random states are restored bit for bit, under the names of the bare module."""

import copy
import hashlib
import inspect
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import thinned
from recipes import disturb, draw, states
from resuming import assert_same
from tiny import bert, gpt
from torch import nn

from omnitrain.checkpoint import model_files, state_dicts, tensor_files
from omnitrain.checkpoint.tensor_files import TensorFile
from omnitrain.core.errors import CheckpointError, ConfigError
from omnitrain.core.files import FileSystem


class Tied(nn.Module):
    """Has tied weights, buffers that are views of another, one that is not persistent, and empty ones."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        table = torch.arange(6.0) + seed
        views = {"table": table, "whole_table": table, "first_half": table[:3], "bits": table.view(torch.int32)}
        for name, tensor in {**views, "empty": torch.zeros(0), "also_empty": torch.zeros(0, 3)}.items():
            self.register_buffer(name, tensor)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_file_contains_only_the_tensors_of_views(tmp_path: Path) -> None:
    """Not the large tensor that they are views of."""
    large = torch.zeros(1_000_000)
    tensors = {"head": large[:10], "overlapping": large[5:15], "transposed": torch.arange(6.0).reshape(2, 3).T}
    tensor_files.save_tensors(tensors, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 1000
    assert_same(tensor_files.load_tensors(tmp_path / "file"), tensors)


def test_file_equals_that_of_safetensors_and_its_digest(tmp_path: Path) -> None:
    def header_and_data(path: Path) -> tuple[Any, bytes]:
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        assert begin % 8 == 0
        return json.loads(content[8:begin]), content[begin:]

    tensors = {
        "flag": torch.tensor([True]), "b": torch.randn(3), "wide": torch.randn(2, 2, dtype=torch.float64),
        "a": torch.tensor(1.0), "none": torch.zeros(0, 3), "h\u00e4lfte": torch.randn(5).half(),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }  # fmt: skip
    tensor_files.save_tensors(tensors, tmp_path / "ours")
    content = (tmp_path / "ours").read_bytes()
    entry = FileSystem().write(tmp_path / "ours", tensor_files.file_content(tensors))
    assert (tmp_path / "ours").read_bytes() == content
    assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    tensors["transposed"] = tensors["transposed"].contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert header_and_data(tmp_path / "ours") == header_and_data(tmp_path / "theirs")


def test_load_weights_keeps_tied_tensors_and_memory(tmp_path: Path) -> None:
    source, target = Tied(), Tied(seed=1)
    addresses = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    tensors = state_dicts.model_tensors(source)
    assert list(tensors) == ["table", "first_half", "bits", "empty", "also_empty", "embed.weight"]
    tensor_files.save_tensors(tensors, tmp_path / "file")
    state_dicts.load_weights(target, tensor_files.load_tensors(tmp_path / "file"), "there")
    assert_same(dict(target.state_dict()), dict(source.state_dict()))
    assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == addresses
    assert target.head.weight is target.embed.weight


def test_wrapped_models_have_the_names_of_the_bare_module() -> None:
    tensors = {name: torch.full_like(tensor, 0.5) for name, tensor in two_layers().state_dict().items()}
    half: Any = two_layers()
    half[0] = torch.compile(half[0], backend="eager")
    for model in (torch.compile(two_layers(), backend="eager"), half, nn.DataParallel(two_layers())):
        assert list(state_dicts.model_tensors(model)) == list(tensors)
        state_dicts.load_weights(model, tensors, "there")
        assert all((parameter == 0.5).all() for parameter in model.parameters())


def test_load_weights_converts_only_without_loss() -> None:
    """Also if `state_dict` returns copies."""
    model = nn.Linear(2, 1).bfloat16()
    wide = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"'weight' is of torch.float32 there and of torch.bfloat16 in the model"):
        state_dicts.load_weights(model, wide, "there")
    model._register_state_dict_hook(lambda module, result, *_: result.update({k: v.clone() for k, v in result.items()}))
    state_dicts.load_weights(model.double(), wide, "there")
    assert model.weight.tolist() == [[1.0, 1.0]]


class Queue(nn.Module):
    """Collects what it has seen in a buffer, which grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(0))


class Growing(Queue):
    """Has loading code for its buffer, which may raise."""

    raises = False

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}seen" in state_dict:
            self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        if self.raises:
            raise KeyError("no")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Loading(Queue):
    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict)


@pytest.mark.parametrize("make", [Growing, Loading, lambda: nn.Sequential(Growing())], ids=["own", "all", "inner"])
def test_load_weights_leaves_buffers_to_custom_loaders(make: Any) -> None:
    source, target = make(), make()
    next(module for module in source.modules() if isinstance(module, Queue)).seen = torch.arange(3.0)
    state_dicts.load_weights(target, state_dicts.model_tensors(source), "there")
    assert_same(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize(("model", "attribute", "value", "message"), [
    (Queue, "seen", torch.arange(3.0), r"'seen' has shape \(3,\) there and \(0,\).*or `_load_from_state_dict`"),
    (Growing, "raises", True, r"there does not fit the model, which rejected it: KeyError: 'no'"),
    (Growing, "layer", nn.Linear(2, 1), r"'layer.weight' has shape \(1, 2\) there and \(1, 1\) in the model"),
], ids=["no loader", "loader raises", "parameter"])  # fmt: skip
def test_load_weights_failure_leaves_the_model(model: Any, attribute: str, value: Any, message: str) -> None:
    """A loader decides about buffers only, and the model is restored if it raises."""
    source, target = model(), model()
    source.seen = torch.arange(3.0)
    setattr(target if attribute == "raises" else source, attribute, value)
    before = copy.deepcopy(dict(target.state_dict()))
    with pytest.raises(CheckpointError, match=message):
        state_dicts.load_weights(target, state_dicts.model_tensors(source), "there")
    assert_same(dict(target.state_dict()), before)


@pytest.mark.parametrize(("make", "dtype", "is_compiled"), [(gpt, torch.float32, True), (bert, torch.bfloat16, False)])
def test_save_model_config_equals_save_pretrained(make: Any, dtype: Any, is_compiled: bool, tmp_path: Path) -> None:
    import transformers

    model, ours = make().to(dtype), tmp_path / "ours"
    before = model.config.to_dict()
    wrapped: Any = torch.compile(model, backend="eager") if is_compiled else model
    model_files.save_model(wrapped, ours, overwrite=False)
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / "theirs")
    folders = ours, tmp_path / "theirs"
    configs, theirs = ({file.name: json.loads(file.read_text()) for file in each.glob("*.json")} for each in folders)
    assert configs == theirs
    loaded = type(model).from_pretrained(ours)
    assert loaded.dtype == dtype
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    family = type(model).__name__
    assert type(transformers.AutoModel.from_pretrained(ours)).__name__ == f"{family[:4]}Model"
    assert configs["config.json"]["architectures"] == [family]


def test_save_model_overwrites_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    model_files.save_model(Tied(0), tmp_path, overwrite=False)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"model.safetensors' already exists.*overwrite=True"):
        model_files.save_model(Tied(1), tmp_path, overwrite=False)

    def half_content(*arguments: Any) -> Iterator[bytes]:
        yield b"half"
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):  # noqa: PT012
        patch.setattr(model_files, "file_content", half_content)
        model_files.save_model(Tied(1), tmp_path, overwrite=True)
    assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]
    model_files.save_model(Tied(1), tmp_path, overwrite=True)
    assert file.read_bytes() != before
    with pytest.raises(ConfigError, match="it is a file"):
        model_files.save_model(Tied(), file, overwrite=True)


def trained(make: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = make(model.parameters())
    for number in range(3):
        step(model, optimizer, number)
    return model, optimizer


def saved(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
    tensors, rest = state_dicts.optimizer_state(optimizer, model)
    return dict(tensors), through_json(rest)


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Any, rest: Any) -> dict[str, Any]:
    """Restore a state; return what the optimizer has for each parameter."""
    state_dicts.restore_optimizer(optimizer, model, tensors, rest, "there")
    return {name: dict(optimizer.state.get(parameter, {})) for name, parameter in model.named_parameters()}


def through_json(rest: Any) -> Any:
    return json.loads(json.dumps(rest, allow_nan=False))


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}


VALUES: dict[str, tuple[Any, ...]] = {
    "momentum": (0.0, 0.9), "dampening": (0.0, 0.1), "nesterov": (False, True), "weight_decay": (0.0, 0.1),
    "amsgrad": (False, True), "maximize": (False, True), "decoupled_weight_decay": (False, True),
    "centered": (False, True), "fused": (False, True), "foreach": (False, True), "lr_decay": (0.0, 0.1),
}  # fmt: skip
"""Options that choose what an optimizer keeps, or on which others depend."""
KINDS = [
    kind for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]  # fmt: skip


class Scaled(nn.Module):
    """A layer with a parameter of no dimension, like CLIP's `logit_scale`."""

    def __init__(self, has_scale: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=dtype))
        self.scale = nn.Parameter(torch.ones((), dtype=dtype)) if has_scale else 1.0


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def legal_options(kind: Any) -> Iterator[dict[str, Any]]:
    names = [name for name in VALUES if name in inspect.signature(kind).parameters]
    for values in itertools.product(*(VALUES[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        model = Scaled(kind.__name__ != "Muon")
        try:
            step(model, kind(model.parameters(), **options), 0)
        except (ValueError, RuntimeError):
            continue
        yield options


QUICK = [
    (torch.optim.SGD, torch.float32), (torch.optim.Adafactor, torch.float32), (torch.optim.AdamW, torch.bfloat16),
    (torch.optim.Adagrad, torch.float64),
]  # fmt: skip
DTYPES = itertools.cycle([torch.bfloat16, torch.float32, torch.float64])
OTHERS = [case for case in zip(KINDS, DTYPES, strict=False) if case not in QUICK]


@pytest.mark.parametrize(("kind", "dtype"), thinned([*QUICK, *OTHERS], QUICK))
def test_optimizer_is_restored_with_any_legal_options(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """From a file, and with its parameters in another order; entries are listed as after a step of the optimizer."""
    has_scale, count = kind.__name__ != "Muon", 0
    for options in legal_options(kind):
        straight, resumed = Scaled(has_scale, dtype), Scaled(has_scale, dtype)
        first, second = kind(straight.parameters(), **options), kind([*resumed.parameters()][::-1], **options)
        for number in range(3):
            step(straight, first, number)
        tensors, rest = saved(first, straight)
        tensor_files.save_tensors(tensors, tmp_path / "file")
        resumed.load_state_dict(straight.state_dict())
        restore(second, resumed, tensor_files.load_tensors(tmp_path / "file"), rest)
        for number in range(3, 5):
            step(straight, first, number)
            step(resumed, second, number)
        for name, parameter in straight.named_parameters():
            assert torch.equal(parameter, resumed.get_parameter(name)), (options, name)
            assert [*first.state[parameter]] == [*second.state[resumed.get_parameter(name)]], (options, name)
        count += 1
    assert count


def test_restore_optimizer_handles_any_entries(tmp_path: Path) -> None:
    """Lists, entries of no parameter, other dtypes, and a learning rate that a schedule left slightly below zero."""
    model, optimizer = trained(OPTIMIZERS["SGD"])
    optimizer.state[model[0].weight] |= {
        "factors": [torch.eye(2), {"power": torch.tensor([3.0])}, None],
        "wide": torch.full((2,), 1 / 3, dtype=torch.float64),
        "quantized": torch.tensor([200], dtype=torch.uint8),
    }
    optimizer.state |= {"steps": 3, "mean": torch.tensor([1.0, 2.0])}
    optimizer.param_groups[0]["lr"] = -1e-20
    tensors, rest = saved(optimizer, model)
    tensor_files.save_tensors(tensors, tmp_path / "file")
    other, twin = trained(OPTIMIZERS["SGD"])
    entry = restore(twin, other, tensor_files.load_tensors(tmp_path / "file"), rest)["0.weight"]
    assert_same(entry, dict(optimizer.state[model[0].weight]))
    assert_same([twin.state["steps"], twin.state["mean"]], [3, torch.tensor([1.0, 2.0])])
    assert twin.param_groups[0]["lr"] == -1e-20


def test_restore_optimizer_keeps_the_implementation() -> None:
    """The options of the groups are restored, except those that choose how it computes (fused, foreach)."""
    model, optimizer = trained(lambda parameters: torch.optim.AdamW(parameters, 0.1, betas=(0.7, 0.8), fused=True))
    optimizer.param_groups[0] |= {"lr": 0.03, "own": (1, [2], {"x": None})}
    for options in ({"lr": 0.1, "foreach": True}, {"lr": torch.tensor(0.1)}):
        other, twin = trained(lambda parameters: torch.optim.AdamW(parameters, **options))  # noqa: B023
        restore(twin, other, *saved(optimizer, model))
        group = twin.param_groups[0]
        assert group["betas"] == (0.7, 0.8) and group["own"] == (1, [2], {"x": None})
        assert type(group["lr"]) is type(options["lr"]) and float(group["lr"]) == pytest.approx(0.03)
        assert not group["fused"] and group["foreach"] == options.get("foreach")


def test_restore_optimizer_converts_only_without_loss() -> None:
    model, full = trained(OPTIMIZERS["AdamW"])
    short, _ = trained(torch.optim.SGD)
    half = torch.optim.AdamW(short.bfloat16().parameters(), fused=True)
    step(short, half, 0)
    with pytest.raises(CheckpointError, match=r"torch.float32 there.*torch.bfloat16 in the optimizer"):
        restore(half, short, *saved(full, model))
    moments = restore(full, model, *saved(half, short))["0.weight"]
    assert moments["exp_avg"].dtype is moments["step"].dtype is torch.float32


def test_restore_optimizer_leaves_no_map_of_the_file(tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, rest = saved(optimizer, model)
    tensor_files.save_tensors(tensors, tmp_path / "file")
    restore(optimizer, model, TensorFile(tmp_path / "file"), rest)
    loaded = tensor_files.load_tensors(tmp_path / "file")
    os.truncate(tmp_path / "file", 0)
    optimizer.step()  # into a map of the file it would be SIGBUS
    assert all(torch.isfinite(tensor).all() for tensor in loaded.values())
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


def test_restore_optimizer_does_not_step_custom_optimizers() -> None:
    """PyTorch's are stepped to learn what they would hold; one with a custom `step` is trusted until it has a state."""

    class Custom(torch.optim.Optimizer):
        steps = 0

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: Any = None) -> Any:
            Custom.steps += 1
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["rows"] = torch.ones(parameter.shape[0])

    model, optimizer = trained(Custom)
    tensors, rest = saved(optimizer, model)
    twin = Custom(model.parameters())
    assert restore(twin, model, tensors, rest)["0.weight"]["rows"].tolist() == [1.0, 1.0] and Custom.steps == 3
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):
        restore(twin, model, {key: torch.zeros(len(tensor) + 1) for key, tensor in tensors.items()}, rest)


def test_restore_optimizer_rejects_other_states() -> None:
    for name, options, message in (
        ("AdamW", {"lr": "high"}, "'lr' is "), ("AdamW", {"lr": math.nan}, "'lr' is "),
        ("AdamW", {"amsgrad": 7}, "'amsgrad' is "),
        ("AdamW", {"betas": {"__tuple__": [0.9, 1.5]}}, "AdamW rejects the options .*beta parameter"),
        ("SGD", {"momentum": -1}, "SGD rejects the options .*momentum"),
    ):  # fmt: skip
        model, optimizer = trained(OPTIMIZERS[name])
        tensors, rest = saved(optimizer, model)
        rest["groups"][0] |= options
        with pytest.raises(CheckpointError, match=message):
            restore(optimizer, model, tensors, rest)
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    tensors, rest = saved(optimizer, model)
    first, *remaining = model.parameters()
    for groups, message in (
        ([first, *remaining[:-1]], r"different parameters: 1\.bias"),
        ([{"params": [first]}, {"params": remaining}], "in other groups"),
    ):
        with pytest.raises(CheckpointError, match=message):
            restore(torch.optim.AdamW(groups), model, tensors, rest)
    optimizer.state[first]["factors"] = [torch.eye(2)]
    with pytest.raises(CheckpointError, match=r"'0\.weight/factors/0' is missing"):
        restore(optimizer, model, tensors, saved(optimizer, model)[1])


def test_random_states_are_restored_with_cached_numbers(tmp_path: Path) -> None:
    """Generators draw normal numbers in pairs, and cache the second."""
    cpu = torch.device("cpu")
    disturb()
    tensors, rest = state_dicts.rng_tensors(cpu)
    tensor_files.save_tensors(tensors, tmp_path / "file")
    before = states()
    draw()
    state_dicts.restore_rng_tensors(tensor_files.load_tensors(tmp_path / "file"), through_json(rest), cpu)
    assert states() == before


texts = st.text("a\u00e4\U0001f600_\0", max_size=4)
json_states = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(texts | st.integers() | st.tuples(st.integers()), inner)
        | st.dictionaries(st.sampled_from(["__tuple__", "__float__", "__dict__", "__tensor__"]), inner)
    ),
    max_leaves=12,
)


def shape_of(value: Any) -> Any:
    """Distinguish 1 from 1.0 and True, and a tuple from a list."""
    entries = value.items() if isinstance(value, dict) else value
    return type(value), [*map(shape_of, entries)] if isinstance(value, (list, tuple, dict)) else value


@settings(max_examples=30)
@given(json_states)
def test_to_json_preserves_any_state(value: Any) -> None:
    text = json.dumps(state_dicts.to_json(value, "state"), allow_nan=False)
    assert shape_of(state_dicts.from_json(json.loads(text))) == shape_of(value)


def test_to_json_converts_numbers_and_preserves_counters() -> None:
    value = {"a": np.float32(0.5), "b": torch.tensor(3), "c": Counter({2: 1, 4: 2}), "d": math.nan, "e": -math.inf}
    result = state_dicts.from_json(through_json(state_dicts.to_json(value, "state")))
    assert type(result["b"]) is int and type(result["c"]) is Counter
    assert_same(result, {"a": 0.5, "b": 3, "c": {2: 1, 4: 2}, "d": math.nan, "e": -math.inf})


def test_unsavable_state_is_reported_by_name(tmp_path: Path) -> None:
    class Opaque(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"what": object()}

    with pytest.raises(CheckpointError, match=r"'a/b' has dtype torch\.complex128"):
        tensor_files.save_tensors({"a/b": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"`0\._extra_state/what` holds a object"):
        state_dicts.extra_state(nn.Sequential(Opaque(1, 1)))
    for value in (object(), {1, 2}, b"bytes", torch.zeros(2), np.zeros(2), lambda: None):
        with pytest.raises(CheckpointError, match=r"`mine/list/1/deep` holds a \w+, which checkpoints"):
            state_dicts.to_json({"list": [1, {"deep": value}]}, "mine")
