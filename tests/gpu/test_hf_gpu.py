"""HFTrainer under transformers' own arguments: precision, and micro-batches that shrink where memory really ends."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import Greedy, Notes, Overflow, make, room_for
from recipes import distance, fit, rows, same, t16, weights
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain.compute.precision import is_out_of_memory

transformers = pytest.importorskip("transformers", reason="HFTrainer needs transformers, which is not installed")

from tiny import gpt  # noqa: E402

from omnitrain import HFTrainer  # noqa: E402

FP32 = torch.float32
CUDA = torch.device("cuda")
MB = 2**20


def arguments(folder: Path, **options: Any) -> Any:
    defaults = {
        "num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 0.01, "save_strategy": "no",
        "logging_steps": 5, "report_to": "none", "lr_scheduler_type": "constant",
        "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**defaults, **options})


def hf(model: nn.Module, args: Any, data: Any, *more: Any, **options: Any) -> HFTrainer:
    return HFTrainer(model, args, data, *more, progress_bar=False, **{"loss_fn": F.mse_loss, **options})


# --- precision


def test_bf16_argument_is_autocast(device: torch.device, tmp_path: Path) -> None:
    model, ours = t16(dtype=FP32), t16(dtype=FP32)
    trainer = fit(hf(model, arguments(tmp_path, bf16=True), rows(60, FP32)))
    make("native", device, ours, rows(60, FP32), autocast="bf16").train()
    assert trainer.precision.name == "bf16" and trainer.device.type == device.type
    assert same(weights(model), weights(ours))


@pytest.mark.gpu
def test_fp16_argument_skips_overflow_as_native(tmp_path: Path) -> None:
    data, ends = rows(60, FP32), []
    for way in ("hf", "native"):
        notes, model = Notes(), t16(dtype=FP32)
        guests: dict[str, Any] = {"algorithms": [Overflow(4)], "callbacks": [notes], "fp16_loss_scale": (1024.0, 1e-4)}
        if way == "hf":
            trainer: Any = hf(model, arguments(tmp_path, fp16=True), data, **guests)
        else:
            trainer = make("native", CUDA, model, data, autocast="fp16", **guests)
        trainer.train()
        ends.append((notes.rows, trainer.progress.skipped_steps, weights(model)))
    assert ends[0][:2] == ends[1][:2] and ends[0][1] == 1
    assert same(ends[0][2], ends[1][2])


@pytest.mark.parametrize("full", ["bf16_full_eval", pytest.param("fp16_full_eval", marks=pytest.mark.gpu)])
def test_low_precision_evaluation_restores_weights(device: torch.device, full: str, tmp_path: Path) -> None:
    model = t16(dtype=FP32)
    trainer = hf(model, arguments(tmp_path, **{full: True}), rows(60, FP32), rows(12, FP32))
    before, plain = weights(trainer.get_model()), make("native", device, t16(dtype=FP32), None, rows(12, FP32))
    dtype = torch.bfloat16 if full.startswith("bf16") else torch.float16
    x, y = rows(12, FP32).tensors
    loss = trainer.evaluate(TensorDataset(x.to(dtype), y.to(dtype)))["eval_loss"]
    assert loss == pytest.approx(plain.evaluate()["eval_loss"], rel=0.05)
    assert same(before, weights(trainer.get_model()))


def texts(size: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (size, 32), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row in range(size):
        labels[row, : row % 16] = -100  # unequal prompts
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", ["accelerate", "hf"])
def test_small_gpt_in_bf16_trains_alike_in_all_trainers(device: torch.device, kind: str) -> None:
    ends = []
    for trainer_kind in ("native", kind):
        model = gpt(vocabulary=64).float()
        trainer = make(
            trainer_kind, device, model, texts(), texts(8), autocast="bf16", epochs=2, gradient_accumulation_steps=2,
            learning_rate=1e-3, deterministic=True,
        )  # fmt: skip
        metrics = trainer.train()
        ends.append((weights(model), metrics["valid"][-1]["eval_loss"]))
    assert distance(ends[0][0], ends[1][0]) == 0.0
    assert ends[0][1] == ends[1][1]


def test_gradient_checkpointing_gives_the_same_numbers(device: torch.device, tmp_path: Path) -> None:
    ends = []
    for checkpoints in (False, True):
        model = gpt(vocabulary=64).float()
        args = arguments(tmp_path / str(checkpoints), gradient_checkpointing=checkpoints)
        HFTrainer(model, args, texts(), progress_bar=False).train()
        ends.append(weights(model))
    assert distance(*ends) < 1e-4


# --- memory


class Fills(nn.Module):
    """A regression model that takes 16 MB for each sample, in the forward pass or in the backward pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.body, self.where = t16(dtype=torch.float64), where
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.body(x)
        if self.training:
            self.sizes.append(len(x))
            if self.where == "forward":
                fill(x)
            else:
                output.register_hook(fill)
        return output


def fill(samples: torch.Tensor) -> None:
    torch.empty(len(samples) * 16 * MB, dtype=torch.uint8, device=samples.device)


def found_batch(model: nn.Module, folder: Path, batch: int, accumulation: int = 1, finds: bool = True) -> HFTrainer:
    """Train 40 rows in steps of 16, the last one of 8."""
    args = arguments(
        folder, num_train_epochs=2, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        auto_find_batch_size=finds,
    )  # fmt: skip
    return fit(hf(model, args, rows(40)))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_splits_batches_exactly(where: str, tmp_path: Path) -> None:
    small = found_batch(Fills(where), tmp_path, 4, 4, finds=False)  # which also brings in what stays in memory
    model = Fills(where)
    with room_for(CUDA, 100 * MB):  # for 4 samples, and not for 8
        split = found_batch(model, tmp_path, 16)
    assert split._feed.microbatch_size == 4
    assert model.sizes[:3] == [16, 8, 4] and set(model.sizes[2:]) == {4}
    assert split.progress.step == small.progress.step == 6
    assert distance(weights(model), weights(small.get_model())) <= 1e-12
    ends = [trainer.metrics["train_metrics_history"] for trainer in (split, small)]
    assert all(a == pytest.approx(b, rel=1e-9) for a, b in zip(*ends, strict=True))


def test_sample_larger_than_memory_raises(device: torch.device, tmp_path: Path) -> None:
    model = Greedy(t16(), "forward", start=1)
    with pytest.raises(RuntimeError) as caught:
        found_batch(model, tmp_path, 4)
    assert is_out_of_memory(caught.value)
    assert "at one row at a time" in "".join(caught.value.__notes__)
    assert model.passes == 3


def test_stock_trainer_resumes_our_checkpoint(device: torch.device, tmp_path: Path) -> None:
    data = [{"input_ids": ids, "labels": labels} for ids, labels in zip(*texts().values(), strict=True)]
    saves = {"save_strategy": "epoch", "load_best_model_at_end": False}
    args = arguments(tmp_path / "run", bf16=True, num_train_epochs=2, **saves)
    HFTrainer(gpt(vocabulary=64).float(), args, data, progress_bar=False, stock_checkpoints=True).train()
    longer = arguments(tmp_path / "stock", bf16=True, num_train_epochs=3)
    stock = transformers.Trainer(gpt(vocabulary=64).float(), longer, train_dataset=data)
    end = stock.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-16"))
    assert stock.args.device.type == device.type
    assert end.global_step == 24 and math.isfinite(end.training_loss)
