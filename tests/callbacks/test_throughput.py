"""Rates, times, operations and goodput of a run."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from recipes import Keyed, KeyedModel, rows, t16
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from omnitrain import AccelerateTrainer, Callback, ConfigError, HFTrainer, Throughput, Trainer
from omnitrain.callbacks.devices import peak_flops
from omnitrain.clock import Clock

TRAINERS: list[Any] = [Trainer, AccelerateTrainer, HFTrainer]


class Rows(Callback):
    """Keeps the rows of logs."""

    order = 90

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, trainer: Any, logs: Any) -> None:
        self.rows.append(dict(logs))


def run(
    kind: Any, model: nn.Module, data: Any, *callbacks: Callback, **options: Any
) -> tuple[Any, list[dict[str, float]]]:
    kept = Rows()
    defaults: dict[str, Any] = {"batch_size": 4, "max_steps": 4, "log_steps": 2, "progress_bar": False}
    trainer = kind(model=model, train_dataset=data, callbacks=[*callbacks, kept], **(defaults | options))
    trainer.train()
    return trainer, kept.rows


def flops_of(model: nn.Module, data: Any, **options: Any) -> float:
    """Return the operations of one sample, forward and backward, as the callback counts them."""
    throughput = Throughput()
    trainer, _ = run(Trainer, model, data, throughput, **options)
    assert throughput.flops is not None
    progress = trainer.progress
    return throughput.flops * (progress.tokens / progress.samples if progress.tokens else 1)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token sequences of one length, all of whose tokens have labels, or one class each."""

    def __init__(self, length: int, has_classes: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, 50, (16, length), generator=generator)
        self.has_classes = has_classes

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = torch.tensor(index % 2) if self.has_classes else self.ids[index]
        return {"input_ids": self.ids[index], "attention_mask": torch.ones_like(self.ids[index]), "labels": labels}


def block_flops(length: int, width: int, inner: int) -> float:
    """Return the operations of forward in a transformer's block: four projections, attention, and two for the MLP."""
    return 2 * length * (4 * width * width + 2 * width * inner) + 4 * length * length * width


def test_operations_of_a_gpt_are_those_of_the_formula() -> None:
    length, width, layers, words = 32, 64, 2, 50
    config = GPT2Config(
        vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    forward = layers * block_flops(length, width, 4 * width) + 2 * length * width * words
    # of attention's products backward makes five where forward makes two, as its weights are computed again
    again = layers * 2 * length * length * width
    counted = flops_of(GPT2LMHeadModel(config), Texts(length, has_classes=False))
    assert counted == pytest.approx(3 * forward + again, rel=0.01)


def test_operations_of_a_bert_are_those_of_the_formula() -> None:
    length, width, layers = 32, 64, 2
    config = BertConfig(
        vocab_size=50, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * width,
        max_position_embeddings=length, num_labels=2,
    )  # fmt: skip
    forward = layers * block_flops(length, width, 4 * width) + 2 * width * width + 2 * width * 2
    # with a mask attention is two products here, of each of which backward makes two
    counted = flops_of(BertForSequenceClassification(config), Texts(length, has_classes=True))
    assert counted == pytest.approx(3 * forward, rel=0.01)


class Residual(nn.Module):
    """A small network of convolutions with shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.out(x.mean((2, 3)))


def test_operations_of_a_resnet_are_those_of_the_formula() -> None:
    size = 12 * 12
    first, block = 2 * size * 9 * 3 * 8, 2 * size * 9 * 8 * 8
    data = TensorDataset(torch.randn(16, 3, 12, 12), torch.randint(0, 2, (16,)))
    counted = flops_of(Residual(), data, loss_fn=F.cross_entropy)
    # the images need no gradient, so the first convolution has two products instead of three
    assert counted == pytest.approx(2 * first + 4 * 3 * block + 3 * 2 * 8 * 2, rel=0.01)


def test_recomputed_activations_count_for_the_hardware_alone() -> None:
    plain, recomputing = Throughput(peak=1e12), Throughput(peak=1e12)
    run(Trainer, tiny.llama(), tiny.Tokens(16), plain)
    _, logs = run(Trainer, tiny.llama(), tiny.Tokens(16), recomputing, gradient_checkpointing=True)
    assert plain.flops and recomputing.flops and recomputing.hardware_flops
    assert recomputing.flops == pytest.approx(plain.flops, rel=0.1)
    assert recomputing.hardware_flops > 1.1 * recomputing.flops
    assert logs[-1]["hfu"] > 1.1 * logs[-1]["mfu"]


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_run_with_it_has_the_same_bits_and_more_in_its_rows(kind: Any) -> None:
    def made(*callbacks: Callback) -> tuple[Any, list[dict[str, float]]]:
        torch.manual_seed(0)
        return run(kind, KeyedModel(dropout=0.3), Keyed(), *callbacks, eval_dataset=Keyed(), eval_steps=2)

    (plain, _), (watched, logs) = made(), made(Throughput(peak=1e12))
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    wanted = {
        "steps_per_second",
        "samples_per_second_per_device",
        "data_share",
        "goodput",
        "tflops_per_device",
        "mfu",
        "hfu",
    }
    assert all(wanted <= row.keys() for row in logs)
    assert all(0 < row["goodput"] <= 1 and 0 <= row["data_share"] <= 1 for row in logs)


class Slow(Callback):
    """Makes evaluations and saves take a time that can be told apart."""

    def on_eval_start(self, trainer: Any) -> None:
        pass

    def on_save_start(self, trainer: Any) -> None:
        time.sleep(0.3)


def test_evaluations_and_saves_are_no_time_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sleepy(KeyedModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                time.sleep(0.1)
            return super().forward(*args, **kwargs)

    throughput = Throughput()
    trainer, logs = run(
        Trainer, Sleepy(), Keyed(), throughput, Slow(), eval_dataset=Keyed(8), eval_steps=1, save_steps=2,
        save_dir=tmp_path / "run", sanity=False,
    )  # fmt: skip
    spent, total = trainer.lifecycle.clock.seconds, trainer.progress.seconds
    assert spent["evaluation"] >= 4 * 2 * 0.1
    assert spent["saving"] >= 2 * 0.3
    assert trainer.lifecycle.clock.training(total) < total - 1.4 + 0.01
    assert logs[-1]["steps_per_second"] > 4 / (total - 1.4 + 0.05) / 2


def test_a_resumed_run_goes_on_with_the_times_and_the_time_in_between_is_lost(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_dir": tmp_path / "run", "save_steps": 2}
    first, _ = run(Trainer, KeyedModel(), Keyed(), **options)
    began, spent = first.lifecycle.clock.began_at, dict(first.lifecycle.clock.seconds)
    time.sleep(0.5)
    trainer = Trainer(
        KeyedModel(), Keyed(), batch_size=4, max_steps=6, progress_bar=False, callbacks=[Throughput()], **options
    )
    trainer.train(resume_from="last")
    clock = trainer.lifecycle.clock
    assert clock.began_at == began
    assert clock.seconds["saving"] > 0.0 and clock.seconds["data"] >= min(spent["data"], 1e-9)
    assert clock.goodput(trainer.progress.seconds) < trainer.progress.seconds / (trainer.progress.seconds + 0.4)


def test_the_time_before_a_run_is_no_part_of_it(tmp_path: Path) -> None:
    trainer = Trainer(
        KeyedModel(), Keyed(), batch_size=4, max_steps=2, save_dir=tmp_path / "run", progress_bar=False,
        max_duration="1s",
    )  # fmt: skip
    time.sleep(1.0)
    trainer.train()
    assert trainer.progress.step == 2 and trainer.progress.seconds < 1.0


def test_phases_inside_of_others_count_once() -> None:
    clock = Clock()
    with clock.during("saving"):
        with clock.during("evaluation"):
            time.sleep(0.02)
            clock.add("waiting", 0.015)
        time.sleep(0.01)
    assert clock.seconds["waiting"] == 0.015
    assert 0.004 < clock.seconds["evaluation"] < 0.015
    assert 0.009 < clock.seconds["saving"] < 0.02


def test_a_compiled_model_needs_the_operations_given(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="omnitrain")
    _, logs = run(Trainer, KeyedModel(), Keyed(), Throughput(), compile={"backend": "eager"})
    assert "tflops_per_device" not in logs[-1] and "Pass `flops`" in caplog.text
    _, logs = run(Trainer, KeyedModel(), Keyed(), Throughput(flops=1e9, peak=1e12), compile={"backend": "eager"})
    assert logs[-1]["mfu"] == pytest.approx(logs[-1]["samples_per_second_per_device"] * 1e9 / 1e12)


def test_the_peak_of_an_unknown_device_is_said_to_be_unknown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="omnitrain")
    _, logs = run(Trainer, KeyedModel(), Keyed(), Throughput())
    assert "mfu" not in logs[-1] and logs[-1]["tflops_per_device"] > 0
    assert caplog.text.count("the peak of 'cpu' in fp32 is unknown") == 1


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0), ("NVIDIA H100 PCIe", "fp16", 756.0), ("NVIDIA A10G", "bf16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None), ("Tesla V100-SXM2-16GB", "fp16", 125.0), ("NVIDIA H200", "fp32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ],
)  # fmt: skip
def test_peaks_are_those_of_data_sheets_or_unknown(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == (None if peak is None else peak * 1e12)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"window": 1.5}, {"flops": -1}, {"peak": "312e12"}, {"window": True}]
)
def test_wrong_numbers_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"`{name}` of a Throughput must be"):
        Throughput(**options)


def test_it_listens_to_no_step_once_the_operations_are_counted() -> None:
    calls: list[str] = []

    class Noisy(Throughput):
        def on_step_start(self, trainer: Any) -> None:
            calls.append("start")
            super().on_step_start(trainer)

    run(Trainer, t16(dtype=torch.float32), rows(20, torch.float32), Noisy(), loss_fn=F.mse_loss)
    assert calls == ["start"]
