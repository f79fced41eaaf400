"""Precision: autocast, loss scaler, fp8 and errors."""

import re
import sys
from typing import Any

import eighths
import pytest
import torch
import torch.nn.functional as F
from recipes import fit, rows, same, t16, trainer_on_cpu, weights

from omnitrain.compute.precision import Precision, choose_device, matmul_precision, uses_tf32
from omnitrain.core.errors import ConfigError, MissingExtraError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # naming a device needs none


SPELLINGS = {
    "fp32": (None, "fp32", "float32", "FP32", torch.float32, "torch.float32"),
    "bf16": ("bf16", "bfloat16", "BF16", torch.bfloat16),
    "fp16": ("fp16", "float16", "half", torch.float16),
}


def test_autocast_spellings() -> None:
    for expected, names in SPELLINGS.items():
        assert {Precision.parse(name, CUDA) for name in names} == {Precision(expected, "cuda")}
    words = "`autocast` must be one of 'fp32'.*'bfloat16'.* or None, got .*"
    errors = {name: words + re.escape(repr(name)) for name in ("fp15", "", True, 16, torch.float64)}
    for name, words in {**errors, "half": r"not available on a CPU. Use `autocast='bf16'`"}.items():
        with pytest.raises(ConfigError, match=words):
            Precision.parse(name, CPU)


@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_autocast_rejects_fp8_without_hardware_or_torchao(capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match="autocast='fp8' needs torchao"):
        Precision("fp8", "cuda").convert(torch.nn.Sequential(torch.nn.Linear(16, 16)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    device, words = (CPU, "the device is cpu") if capability is None else (CUDA, r"A100 has 8\.0")
    with pytest.raises(ConfigError, match=rf"`autocast='float8'` needs an NVIDIA GPU .*8\.9.*{words}\. Use .*bf16"):
        Precision.parse("float8", device)


def test_fp8_layers_are_converted_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    eighths.install(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 3))
    before = dict(model.named_parameters())
    for _ in range(2):  # by one trainer after the other
        Precision("fp8", "cuda").convert(model)
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", "Linear"]
    assert "1 linear layers multiply in fp8, which is tested by emulation only" in caplog.text
    assert all(weight is before[name] for name, weight in model.named_parameters())


def test_forward_runs_in_autocast_dtype() -> None:
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)) * 2:  # a context in every step
        with Precision.parse(name, CPU).autocast():
            assert layer(x).dtype is dtype
        assert layer.weight.dtype is layer(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16), Precision.parse("fp32", CPU).autocast():
        assert layer(x).dtype is torch.bfloat16  # that of the user is kept


def test_fp32_layers_that_may_compute_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    convolutions, products = torch.nn.Sequential(torch.nn.Conv1d(1, 1, 1)), torch.nn.Linear(1, 1)
    for precision, expected in (("highest", False), ("high", True)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert uses_tf32(convolutions, CUDA) and uses_tf32(products, CUDA) is expected
        assert not uses_tf32(convolutions, CPU) and not uses_tf32(products, CPU)


def test_train_inside_user_autocast_sees_each_update(trainer_class: Any) -> None:
    """`torch.autocast` keeps the weights that it has cast until it is left; a run inside computed with the first."""

    def build(**options: Any) -> Any:
        options |= {"loss_fn": F.mse_loss, "max_steps": 4, "learning_rate": 0.1}
        return trainer_on_cpu(trainer_class, t16(dtype=torch.float32), rows(16, torch.float32), **options)

    expected, data = fit(build(autocast="bf16")), rows(4, torch.float32)
    moments = [tensor for state in expected.optimizer.state.values() for tensor in state.values()]
    assert {tensor.dtype for tensor in moments} == {torch.float32}
    for trainer in (build(), build(autocast="bf16")):
        with torch.autocast("cpu", torch.bfloat16):
            before, after = trainer.predict(data).predictions, fit(trainer).predict(data).predictions
            assert torch.is_autocast_cache_enabled()
        assert (before != after).any() and (after == expected.predict(data).predictions).all()
        assert same(weights(trainer.model), weights(expected.model))


def test_grad_scaler_only_for_fp16() -> None:
    loss = torch.tensor(2.0)
    for name, scale in (("fp32", 1.0), ("bf16", 1.0), ("fp16", 8.0)):
        scaler = Precision(name, "cpu").grad_scaler((8.0, 1e-4))
        assert scaler.is_enabled() is (name == "fp16") and scaler.scale(loss).item() == 2.0 * scale
        assert scaler.get_scale() == scale


@pytest.mark.parametrize("before", ["tf32", "ieee"])
def test_matmul_precision_is_restored(before: str) -> None:
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        pytest.skip("this PyTorch has only one way")
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"  # whatever ran before
    try:
        backends.fp32_precision = before
        precision = matmul_precision()
        with Precision("fp32", "cuda", "medium").run_context():
            assert matmul_precision() == torch.get_float32_matmul_precision() == "medium"
        assert matmul_precision() == precision == {"tf32": "high", "ieee": "highest"}[before]
    finally:
        backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_device_that_cannot_be_used_is_an_error() -> None:
    for device, words in (("meta", "tensors on it have no values"), ("cuda:99", r"[^.].*[^.]\. Leave it out")):
        with pytest.raises(ConfigError, match=f"`device='{device}'` cannot be used: {words}"):
            choose_device(device)
