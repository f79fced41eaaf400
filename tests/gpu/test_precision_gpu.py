"""fp16 with real overflows, bf16, fused optimizers, and a NaN that is heard of late: all three trainers alike."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import Notes, Overflow, make, make_half
from recipes import StopAt, Trace, callback, distance, fit, rows, same, t16, weights
from torch.utils.data import TensorDataset

from omnitrain import Callback, NonFiniteError

FP32 = torch.float32


def notes_of(kind: str, device: torch.device, *at: int, **options: Any) -> tuple[Any, Notes]:
    """Train 15 windows of which some overflow, and return the trainer with what was noted of them."""
    notes = Notes()
    trainer = fit(make_half(
        kind, device, t16(dtype=FP32), rows(60, FP32), (1024.0, 1e-4), lr_scheduler="linear",
        algorithms=[Overflow(*at)], callbacks=[notes], **options,
    ))  # fmt: skip
    return trainer, notes


# --- fp16


def test_overflow_skips_only_its_window(device: torch.device, kind: str) -> None:
    """And leaves all trainers with the same weights."""
    (trainer, notes), (_, expected) = notes_of(kind, device, 4, 9), notes_of("native", device, 4, 9)
    assert notes.rows == expected.rows and same(notes.weights[-1], expected.weights[-1])
    steps, skipped, scales, rates = (list(column) for column in zip(*notes.rows, strict=True))
    assert steps == [1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 12, 13]
    assert skipped == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert scales == [1024.0] * 3 + [512.0] * 5 + [256.0] * 7
    assert rates == pytest.approx([0.01 * (1 - step / 15) for step in steps])
    assert trainer.lr_scheduler.last_epoch == 13
    unchanged = [number for number, pair in enumerate(itertools.pairwise(notes.weights), start=2) if same(*pair)]
    assert unchanged == [4, 9]
    assert math.isfinite(trainer.metrics["train_metrics_history"][0]["train_loss"])


def test_overflow_in_micro_batch_skips_whole_window(device: torch.device, kind: str) -> None:
    _, notes = notes_of(kind, device, 3, gradient_accumulation_steps=2)  # the first of the second window
    assert [row[:2] for row in notes.rows] == [(1, 0), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1)]
    assert same(notes.weights[0], notes.weights[1])


def test_scale_below_minimum_ends_run(device: torch.device, kind: str) -> None:
    data, algorithms = rows(60, FP32), [Overflow(*range(1, 99))]
    trainer = make_half(kind, device, t16(dtype=FP32), data, (4.0, 1.0), algorithms=algorithms)
    before = weights(trainer.get_model())
    with pytest.raises(NonFiniteError, match=r"fell to 0\.5, below its minimum 1, at step 1"):
        trainer.train()
    assert trainer.progress.step == 0
    assert same(before, weights(trainer.get_model()))


def test_scale_continues_after_resume(device: torch.device, kind: str, tmp_path: Path) -> None:
    def run(*guests: Callback, **options: Any) -> tuple[Any, Notes]:
        notes = Notes()
        trainer = make_half(
            kind, device, t16(dtype=FP32), rows(60, FP32), (1024.0, 1e-4), algorithms=[Once()],
            callbacks=[notes, *guests], save_dir=tmp_path / options.pop("folder"), load_best_at_end=False,
        )  # fmt: skip
        trainer.train(**options)
        return trainer, notes

    class Once(Overflow):
        """Lets the third window of the run overflow, also where it is resumed."""

        def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
            self.count, self.at = trainer.progress.step + trainer.progress.skipped_steps, (3,)
            return super().transform_loss(trainer, loss)

    _, straight = run(folder="straight")
    run(StopAt(6), folder="parts")
    second, rest = run(folder="parts", resume_from="auto")
    assert rest.rows == straight.rows[-len(rest.rows) :] and len(rest.rows) == 8
    assert second.scaler.get_scale() == 512.0
    assert same(straight.weights[-1], rest.weights[-1])


@pytest.mark.gpu
def test_scale_adapts_to_large_gradients(kind: str) -> None:
    device, (x, y) = torch.device("cuda"), rows(60, FP32).tensors
    data, ends = TensorDataset(x, 1000 * y), []
    for name in ("native", kind):
        trace = Trace()
        trainer = make(name, device, t16(dtype=FP32), data, autocast="fp16", epochs=4, log_steps=1, callbacks=[trace])
        trainer.train()
        assert trace.logs[-1]["loss_scale"] == 65536 / 2**trainer.progress.skipped_steps
        ends.append((trainer.progress.step, trainer.progress.skipped_steps, weights(trainer.get_model())))
    (steps, skipped, expected), (own_steps, own_skipped, weights_there) = ends
    assert (own_steps, own_skipped) == (steps, skipped)
    assert 3 <= skipped <= 30 and steps + skipped == 60
    assert same(weights_there, expected)
    assert distance(weights_there, weights(t16(dtype=FP32).to(device))) > 0.1


# --- what is computed in which precision


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", DTYPES)
def test_forward_is_in_low_precision_and_state_is_not(device: torch.device, kind: str, precision: str) -> None:
    if precision == "fp16" and device.type == "cpu":
        pytest.skip("a CPU has no fp16")
    model, dtypes = t16(dtype=FP32), set[torch.dtype]()
    list(model.children())[-1].register_forward_hook(lambda layer, inputs, output: dtypes.add(output.dtype))
    trainer = make(kind, device, model, rows(60, FP32), autocast=precision, epochs=4)
    losses = [row["train_loss"] for row in trainer.train()["train_metrics_history"]]
    assert dtypes == {DTYPES[precision]}
    state = trainer.optimizer.state[next(iter(model.parameters()))]
    assert {parameter.dtype for parameter in model.parameters()} == {state["exp_avg"].dtype} == {FP32}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_trainers_end_with_the_same_weights(device: torch.device, kind: str, precision: str) -> None:
    ends = []
    for name in ("native", kind):
        trainer = fit(make(
            name, device, t16(dtype=FP32), rows(60, FP32), autocast=precision, epochs=2, gradient_accumulation_steps=2,
            lr_scheduler="cosine", warmup_steps=2, max_grad_norm=0.5,
        ))  # fmt: skip
        ends.append(weights(trainer.get_model()))
    assert distance(*ends) == 0.0


class Plain(torch.optim.AdamW):
    """AdamW, not fused."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, fused=False)


def test_default_optimizer_is_fused_and_exact(device: torch.device, kind: str) -> None:
    def run(**options: Any) -> Any:
        return fit(make(kind, device, t16(dtype=FP32), rows(60, FP32), weight_decay=0.01, **options))

    fused, plain = run(), run(optimizer=Plain)
    assert [group["fused"] for group in fused.optimizer.param_groups] == [True]
    assert [group["fused"] for group in plain.optimizer.param_groups] == [False]
    assert distance(weights(fused.get_model()), weights(plain.get_model())) < 1e-5
    assert distance(weights(fused.get_model()), weights(t16(dtype=FP32).to(device))) > 1e-2


# --- NaN


def with_nan() -> TensorDataset:
    data = rows(64, FP32)
    data.tensors[1][17] = math.nan
    return data


@pytest.mark.parametrize("optimizer", [None, "torch.optim.SGD"], ids=["fused", "not fused"])
def test_nan_reports_sample_and_stops_updates(device: torch.device, kind: str, optimizer: str | None) -> None:
    ends: list[list[torch.Tensor]] = []  # after each step; samples 0 to 15 are of two, and the third step has the NaN
    trainer = make(
        kind, device, t16(dtype=FP32), with_nan(), batch_size=8, shuffle=False, epochs=3, optimizer=optimizer,
        callbacks=[callback(on_step_end=lambda trainer: ends.append(weights(trainer.get_model())))],
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"step 3 .* 17"):
        trainer.train()
    assert same(ends[1], weights(trainer.get_model()))


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_nan_policies_hold_on_device(device: torch.device, kind: str, policy: str) -> None:
    trainer = fit(make(
        kind, device, t16(dtype=FP32), with_nan(), batch_size=8, shuffle=False, on_nonfinite=policy
    ))  # fmt: skip
    is_finite = all(bool(parameter.isfinite().all()) for parameter in trainer.get_model().parameters())
    expected = (7, 1, True) if policy == "skip" else (8, 0, False)
    assert (trainer.progress.step, trainer.progress.skipped_steps, is_finite) == expected
