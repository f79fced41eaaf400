"""Rates, times, operations and goodput of a run."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from recipes import Keyed, KeyedModel, Trace, callback, fit, rows, t16
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from omnitrain import Callback, Throughput, Trainer
from omnitrain.callbacks.throughput import peak_flops
from omnitrain.core.progress import Clock


def run(kind: Any, model: nn.Module, data: Any, *callbacks: Callback, **options: Any) -> tuple[Any, list[Any]]:
    trace = Trace()
    options = {"batch_size": 4, "max_steps": 4, "log_steps": 2, "progress_bar": False, **options}
    resume, callbacks = options.pop("resume_from", None), (*callbacks, trace)
    return fit(kind(model=model, train_dataset=data, callbacks=callbacks, **options), resume), trace.logs


def flops_of(model: nn.Module, data: Any, **options: Any) -> float:
    """Return the operations of one sample, forward and backward, as the callback counts them."""
    throughput = Throughput()
    trainer, _ = run(Trainer, model, data, throughput, **options)
    assert throughput.flops is not None
    progress = trainer.progress
    return throughput.flops * (progress.tokens / progress.samples if progress.tokens else 1)


LENGTH, WIDTH, LAYERS, WORDS = 32, 64, 2, 50
BLOCK_FLOPS = 2 * LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * 4 * WIDTH) + 4 * LENGTH * LENGTH * WIDTH
"""Of forward in a transformer's block: four projections, attention, and two products for the MLP."""


def test_flops_of_a_perceptron_and_a_gpt() -> None:
    counted = flops_of(t16(dtype=torch.float32), rows(16, torch.float32), loss_fn=F.mse_loss)
    # the rows need no gradient, so the first layer has two products instead of three
    assert counted == 2 * (2 * 4 * 16) + 3 * (2 * 16 * 1)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    forward = LAYERS * BLOCK_FLOPS + 2 * LENGTH * WIDTH * WORDS
    # of attention's products backward makes five where forward makes two, as its weights are computed again
    again = LAYERS * 2 * LENGTH * LENGTH * WIDTH
    sequences = torch.randint(3, WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    texts = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in sequences]
    assert flops_of(GPT2LMHeadModel(config), texts) == pytest.approx(3 * forward + again, rel=0.01)


def test_recomputed_activations_count_for_hfu_only() -> None:
    plain, recomputing = Throughput(peak=1e12), Throughput(peak=1e12)
    run(Trainer, tiny.llama(), tiny.Tokens(16), plain)
    _, logs = run(Trainer, tiny.llama(), tiny.Tokens(16), recomputing, gradient_checkpointing=True)
    assert plain.flops and recomputing.flops and recomputing.hardware_flops
    assert recomputing.flops == pytest.approx(plain.flops, rel=0.1)
    assert recomputing.hardware_flops > 1.1 * recomputing.flops
    assert logs[-1]["hfu"] > 1.1 * logs[-1]["mfu"]


def test_throughput_adds_to_rows(trainer_class: Any) -> None:
    _, logs = run(trainer_class, KeyedModel(), Keyed(), Throughput(peak=1e12), eval_dataset=Keyed(), eval_steps=2)
    rates = {"steps_per_second", "samples_per_second_per_device", "tflops_per_device"}
    assert all(rates | {"data_share", "goodput", "mfu", "hfu"} <= row.keys() for row in logs)
    assert all(0 < row["goodput"] <= 1 and 0 <= row["data_share"] <= 1 for row in logs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=1000.0)
    for name in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(f"time.{name}", lambda: clock.now)
    return clock


def slow_parts(clock: Any) -> tuple[nn.Module, Any, Callback, Callback]:
    """A model that takes 0.1 s in an evaluation, its data, and callbacks that take 1 s in a step, 0.3 s in a save."""

    def advance(seconds: float, *_: Any) -> None:
        clock.now += seconds

    model = KeyedModel()
    model.register_forward_hook(lambda *_: None if model.training else advance(0.1))
    slow = callback(on_step_end=partial(advance, 1.0), on_save_start=partial(advance, 0.3))
    return model, Keyed(), Throughput(), slow


def test_clock_excludes_evaluations_and_saves_from_training(tmp_path: Path, clock: Any) -> None:
    options: dict[str, Any] = {"save_dir": tmp_path / "run", "save_steps": 2, "keep_best": 0, "load_best_at_end": False}
    options |= {"eval_dataset": Keyed(8), "eval_steps": 1, "sanity": False}
    trainer, logs = run(Trainer, *slow_parts(clock), **options)
    seconds, total = trainer.lifecycle.clock.seconds, trainer.progress.seconds
    assert seconds["evaluation"] == pytest.approx(4 * 2 * 0.1) and seconds["saving"] == pytest.approx(2 * 0.3)
    assert trainer.lifecycle.clock.training(total) == pytest.approx(4.0)
    assert logs[-1]["steps_per_second"] == pytest.approx(1.0)
    clock.now += 10.0
    trainer, _ = run(Trainer, *slow_parts(clock), max_steps=6, resume_from="last", **options)
    seconds, total = trainer.lifecycle.clock.seconds, trainer.progress.seconds
    assert trainer.lifecycle.clock.began_at == 1000.0 and seconds["evaluation"] == pytest.approx(6 * 2 * 0.1)
    assert seconds["saving"] == pytest.approx(2 * 0.3)  # a checkpoint does not know the time of its own save
    assert trainer.lifecycle.clock.goodput(total) == pytest.approx(6.3 / (clock.now - 1000.0))


def test_time_before_a_run_does_not_count(clock: Any) -> None:
    trainer = Trainer(KeyedModel(), Keyed(), batch_size=4, max_steps=2, progress_bar=False, max_duration="1s")
    clock.now += 5.0
    trainer.train()
    assert trainer.progress.step == 2 and trainer.progress.seconds < 1.0


def test_clock_counts_nested_phases_once(clock: Any) -> None:
    phases = Clock()
    with phases.during("saving"):
        with phases.during("evaluation"):
            clock.now += 2.0
            phases.add("waiting", 1.5)
        clock.now += 1.0
    assert [phases.seconds[name] for name in ("waiting", "evaluation", "saving")] == [1.5, 0.5, 1.0]


def test_unknown_flops_and_peaks_are_logged_and_are_arguments(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="omnitrain")
    _, logs = run(Trainer, KeyedModel(), Keyed(), Throughput())
    assert "mfu" not in logs[-1] and logs[-1]["tflops_per_device"] > 0
    assert caplog.text.count("the peak of 'cpu' in fp32 is unknown") == 1
    _, logs = run(Trainer, KeyedModel(), Keyed(), Throughput(), compile={"backend": "eager"})
    assert "tflops_per_device" not in logs[-1] and "Pass `flops`" in caplog.text
    throughput = Throughput(flops=1e9, peak=1e12, window=np.int64(2))
    _, logs = run(Trainer, KeyedModel(), Keyed(), throughput, compile={"backend": "eager"})
    assert logs[-1]["mfu"] == pytest.approx(logs[-1]["samples_per_second_per_device"] * 1e9 / 1e12)


@pytest.mark.parametrize(("name", "precision", "peak"), [
    ("NVIDIA A100-SXM4-80GB", "bf16", 312.0), ("NVIDIA H100 PCIe", "fp16", 756.0), ("NVIDIA A10G", "bf16", None),
    ("Tesla V100-SXM2-16GB", "bf16", None), ("Tesla V100-SXM2-16GB", "fp16", 125.0), ("NVIDIA H200", "fp32", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
])  # fmt: skip
def test_peak_flops_are_those_of_data_sheets(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == (None if peak is None else peak * 1e12)


def test_throughput_counts_flops_in_the_first_step_only() -> None:
    steps, start = list[int](), Throughput.on_step_start
    note = lambda self, trainer: steps.append(trainer.progress.step) or start(self, trainer)  # noqa: E731
    noting = type("Noting", (Throughput,), {"on_step_start": note})()
    run(Trainer, t16(dtype=torch.float32), rows(20, torch.float32), noting, loss_fn=F.mse_loss)
    assert steps == [0]
