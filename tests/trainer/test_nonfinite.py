"""Detection of losses and gradients that are not finite, at once and deferred."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import fit, rows, same, t16, trainer_on_cpu, weights
from resuming import differences
from torch import nn
from torch.nn import functional as F

from omnitrain import HookCallback, NonFiniteError, SpikeGuard
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.trainer.meters import LossMeter
from omnitrain.trainer.step import FiniteGuard

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def test_loss_meter_is_nan_without_losses_and_sums_in_fp64() -> None:
    meter = LossMeter(CPU)
    assert math.isnan(meter.mean()) and meter.since_last() == (0.0, 0.0) and meter.sum == 0.0
    meter.add(torch.ones((), requires_grad=True) * 2, 1)
    assert not torch.as_tensor(meter.sum).requires_grad
    for dtype in (torch.float16, torch.float32):
        meter = LossMeter(CPU)
        for _ in range(3000):
            meter.add(torch.tensor(1.0, dtype=dtype), 1)
        meter.add(torch.tensor(2.0**-20, dtype=dtype), 1)  # which is lost in any smaller type
        assert meter.sum == 3000.0 + 2.0**-20


def test_reading_guard_updates_on_finite_values() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    guard = FiniteGuard(device_runtime(CPU), torch.optim.SGD(parameters, lr=1.0), deferred=False)
    for value in (1.0, 0.0, 1e300, NAN, INF):
        assert guard.should_update(torch.tensor(value, dtype=torch.float64), lambda: "here") is math.isfinite(value)
        assert guard.first_bad() is None and guard.first_bad(wait=True) is None
    fused, plain = torch.optim.AdamW(parameters, fused=True), torch.optim.AdamW(parameters)
    gpu = device_runtime(torch.device("cuda"))
    assert gpu.can_skip_updates(fused)
    assert not gpu.can_skip_updates(plain) and not device_runtime(CPU).can_skip_updates(fused)


FUSED = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1, fused=True),
    "amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, fused=True),
}


class Run:
    def __init__(self, kind: str, deferred: bool = True) -> None:
        self.parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2, 2), 2.0))]
        self.optimizer = FUSED[kind](self.parameters)
        self.guard = FiniteGuard(device_runtime(CPU), self.optimizer, deferred)

    def step(self, number: int, factor: float = 1.0) -> bool:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, (number % 3 - 0.7) * factor)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])  # type: ignore[misc]
        admitted = self.guard.should_update(norm, lambda: number)
        self.optimizer.step()
        return admitted

    def state(self) -> Any:
        return weights(nn.ParameterList(self.parameters)), copy.deepcopy([*self.optimizer.state.values()])


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize(("bad", "first"), [(NAN, 0), (-INF, 5)])
def test_deferred_guard_skips_all_updates_from_the_first_bad_one(kind: str, bad: float, first: int) -> None:
    run, plain = Run(kind), Run(kind, deferred=False)
    for number in range(first):
        assert run.step(number) and plain.step(number) and run.guard.first_bad() is None
    assert not differences(run.state(), plain.state())  # finite steps are unchanged
    before = run.state()
    assert run.step(first, bad)  # as far as the host knows
    for number in range(first + 1, first + 4):  # finite again, but after a step that was skipped
        assert not differences(run.state()[0], before[0]) and not (first and differences(run.state(), before))
        run.step(number)
    assert not differences(run.state()[0], before[0]) and run.guard.first_bad(wait=True) == first


@pytest.mark.parametrize("bad", [0, 31, 32, 99])
def test_deferred_guard_reports_after_32_steps(bad: int) -> None:
    run, reported = Run("AdamW"), []
    for number in range(100):
        run.step(number, NAN if number == bad else 1.0)
        reported.append(run.guard.first_bad(wait=number == 99))
    first = min(bad + 31, 99)  # all ranks notice it in the same step
    assert reported[: first + 1] == [None] * first + [bad]


def test_guard_release_restores_the_optimizer() -> None:
    run = Run("AdamW")
    run.step(0, NAN)
    before = run.state()
    run.guard.release(run.optimizer)
    assert not hasattr(run.optimizer, "found_inf") and not hasattr(run.optimizer, "grad_scale")
    run.step(1)
    assert differences(run.state(), before)
    run.guard.release(run.optimizer)  # twice does no harm
    run.guard = FiniteGuard(device_runtime(CPU), run.optimizer, deferred=True)  # and a second one starts from nothing
    before = run.state()
    run.step(2)
    assert run.guard.first_bad(wait=True) is None and differences(run.state(), before)
    assert run.optimizer.state_dict()["param_groups"] == Run("AdamW", False).optimizer.state_dict()["param_groups"]


def scaled(trainer_class: Any, data: Any, scale: float = 1024.0, **options: Any) -> Any:
    options = {"loss_fn": F.mse_loss, "epochs": 1, "batch_size": 4, "learning_rate": 0.01, "shuffle": False, **options}
    trainer = trainer_on_cpu(trainer_class, t16(dtype=torch.float32), data, **options)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return trainer


@pytest.mark.parametrize("policy", [
    {"on_nonfinite": "skip"}, {"algorithms": [SpikeGuard(action="skip")]}, {"algorithms": [SpikeGuard(every=3)]},
])  # fmt: skip
def test_skipped_step_keeps_the_loss_scale(trainer_class: Any, policy: dict[str, Any]) -> None:
    data = rows(40, torch.float32)
    data.tensors[1][21] = NAN
    run, plain = (fit(scaled(trainer_class, data, scale, **policy)) for scale in (1024.0, 1.0))
    assert run.scaler.get_scale() == 1024.0 and run.progress.step == 9
    assert same(weights(run.model), weights(plain.model))


def test_scaled_run_resumes_after_an_error_within_a_step(trainer_class: Any, tmp_path: Path) -> None:
    """In the same process, whose scaler has unscaled gradients that no update took."""
    data = rows(40, torch.float32)
    expected = fit(scaled(trainer_class, data))
    number, data.tensors[1][21] = data.tensors[1][21].clone(), NAN
    trainer = scaled(trainer_class, data, save_dir=tmp_path, save_steps=2)
    with pytest.raises(NonFiniteError):
        trainer.train()
    data.tensors[1][21] = number
    trainer.train(resume_from="auto", allow_change={"train_dataset"})
    assert trainer.scaler.get_scale() == 1024.0 and same(weights(trainer.model), weights(expected.model))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_detect_anomaly_names_the_operation_of_a_nan(trainer_class: Any) -> None:
    modes: list[bool] = []
    look = HookCallback({"on_step_start": lambda trainer: modes.append(torch.is_anomaly_enabled())})
    for value, words in ((False, "is not finite"), (True, "returned nan values")):
        model = t16()
        model.register_forward_hook(lambda module, inputs, y: y + (y * 0).sqrt() * 0)
        options = {"loss_fn": F.mse_loss, "max_steps": 1, "batch_size": 4, "callbacks": [look]}
        trainer = trainer_on_cpu(trainer_class, model, rows(8), detect_anomaly=value, **options)
        with pytest.raises(Exception, match=words):
            trainer.train()
        assert not torch.is_anomaly_enabled()
    assert modes == [False, True]
