"""Memory that runs out, in each part of a step, and is given back; and how much evaluations and checkpoints take."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import Greedy, GreedyAdamW, allocated, free_up, make, peak_of, room_for
from recipes import fit, rows, same, t16, weights
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import Callback
from omnitrain.compute.precision import is_out_of_memory

FP32 = torch.float32
MB = 2**20


def wide(device: torch.device, where: str = "") -> tuple[Greedy, TensorDataset]:
    """A model of which parameters, gradients and moments take 128 MB, 128 MB and 256 MB of a GPU; little on a CPU."""
    width = 2048 if device.type == "cuda" else 32
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
    return Greedy(nn.Sequential(*layers), where), TensorDataset(torch.randn(32, width), torch.randn(32, width))


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def run_out(trainer: Any, work: str = "train") -> str:
    """Have a trainer run out of memory, and return what the error says, without keeping anything of it."""
    try:
        getattr(trainer, work)()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    pytest.fail("there was memory enough")


def straight(kind: str, device: torch.device) -> list[torch.Tensor]:
    """Train a small model, and return its weights on the host."""
    trainer = fit(make(kind, device, t16(dtype=FP32), rows(60, FP32)))
    return [parameter.cpu() for parameter in weights(trainer.get_model())]


class Stops(Callback):
    """Notes how far the run came, and how it ended."""

    def __init__(self) -> None:
        self.step, self.error, self.has_ended = 0, "", False

    def on_step_end(self, trainer: Any) -> None:
        self.step = trainer.progress.step

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        self.error = type(error).__name__

    def on_train_end(self, trainer: Any) -> None:
        self.has_ended = True


# --- running out


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_out_of_memory_ends_run_and_frees_memory(device: torch.device, kind: str, where: str) -> None:
    expected = straight(kind, device)
    free_up(device)
    before, stops = allocated(device), Stops()

    def fail() -> weakref.ref[nn.Module]:
        model, data = wide(device, where)
        optimizer = GreedyAdamW if where == "update" else None
        trainer = make(
            kind, device, model, data, loss_fn=F.mse_loss, batch_size=8, optimizer=optimizer, callbacks=[stops]
        )
        message = run_out(trainer)
        assert "out of memory" in message or "can't allocate memory" in message
        if device.type == "cuda":
            assert allocated(device) - before > 2 * size_of(model)  # or nothing would have to be given back
        return weakref.ref(model)

    model = fail()
    assert stops.step == 2 and stops.error in ("OutOfMemoryError", "RuntimeError") and stops.has_ended
    free_up(device)
    assert model() is None, "something refers to the model still"
    assert allocated(device) - before < 48 * MB
    assert same(expected, straight(kind, device))


def test_out_of_memory_in_evaluation_has_remedy(device: torch.device, kind: str) -> None:
    stops = Stops()
    trainer = make(
        kind, device, Greedy(t16(dtype=FP32), "evaluation"), rows(12, FP32), rows(8, FP32), loss_fn=F.mse_loss,
        callbacks=[stops], sanity=False,
    )  # fmt: skip
    assert "ran out in evaluation" in (message := run_out(trainer)) and "eval_batch_size=2 (instead of 4)" in message
    assert stops.step == 3


@pytest.mark.gpu
def test_optimizer_state_larger_than_memory_raises(kind: str) -> None:
    device = torch.device("cuda")
    straight(kind, device)  # brings in what stays in memory
    free_up(device)
    before = allocated(device)

    def fail() -> None:
        model, data = wide(device)
        size, stops = size_of(model), Stops()
        with room_for(device, int(2.9 * size)):  # for parameters and gradients, and for half of the moments
            trainer = make(kind, device, model, data, loss_fn=F.mse_loss, batch_size=8, callbacks=[stops])
            assert "out of memory" in run_out(trainer)
        assert stops.step == 0 and model.passes == 1

    fail()
    free_up(device)
    assert allocated(device) - before < 48 * MB
    model, data = wide(device)
    with room_for(device, int(2.9 * size_of(model))):
        trainer = fit(make(kind, device, model, data, loss_fn=F.mse_loss, batch_size=8, optimizer="torch.optim.SGD"))
    assert trainer.progress.step == 4


# --- how much


def test_run_leaves_only_parameters_and_moments(device: torch.device, kind: str) -> None:
    straight(kind, device)
    free_up(device)
    before = allocated(device)
    model, data = wide(device)
    trainer = make(kind, device, model, data, loss_fn=F.mse_loss, batch_size=8)
    trainer.train()
    free_up(device)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert allocated(device) - before < 3 * size_of(model) + 48 * MB


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(1) == predictions.label_ids).mean())}


@pytest.mark.parametrize("metrics", [None, "accuracy", accuracy], ids=["loss", "name", "function"])
def test_evaluation_memory_is_constant(device: torch.device, kind: str, metrics: Any) -> None:
    size = 64 if device.type == "cuda" else 4
    model = nn.Linear(16, 1000)
    trainer = make(
        kind, device, model, rows(4, FP32), eval_batch_size=size, loss_fn=F.cross_entropy, compute_metrics=metrics
    )

    def evaluate(batches: int) -> None:
        x, labels = torch.randn(batches * size, 16), torch.randint(0, 1000, (batches * size,))
        scores = trainer.evaluate(TensorDataset(x, labels))
        assert scores.keys() == ({"eval_loss"} if metrics is None else {"eval_loss", "eval_accuracy"})

    evaluate(2)
    few, many = (peak_of(device, lambda n=n: evaluate(n)) for n in (4, 64))
    assert many <= few + MB


@pytest.mark.parametrize("async_save", [False, True])
def test_checkpoint_makes_no_copy_on_device(device: torch.device, kind: str, async_save: bool, tmp_path: Path) -> None:
    if async_save and kind == "hf":
        pytest.skip("HFTrainer has no async_save")
    model, data = wide(device)
    options = {"async_save": True} if async_save else {}
    trainer = make(
        kind, device, model, data, loss_fn=F.mse_loss, batch_size=8, save_dir=tmp_path, save_steps=1000, **options
    )
    trainer.train()
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    before = weights(model)
    for work in (trainer.save_checkpoint, lambda: trainer.load_checkpoint("last")):
        assert peak_of(device, work) <= 2 * largest
    assert same(before, weights(model))
