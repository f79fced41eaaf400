"""Trainers of every kind on a device, for tests that run on a GPU, and on the CPU where there is none."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from recipes import weights
from torch import nn

from omnitrain import Algorithm, Callback

KINDS = ("native", "accelerate", "hf")


def trainer_class(kind: str) -> Any:
    """Return the class of a trainer; packages that one of them needs are loaded with it alone."""
    import omnitrain

    return getattr(omnitrain, {"native": "Trainer", "accelerate": "AccelerateTrainer", "hf": "HFTrainer"}[kind])


def make(kind: str, device: torch.device, model: nn.Module, data: Any, *more: Any, **options: Any) -> Any:
    """Return a trainer of a kind; those that choose for themselves take the GPU where there is one."""
    place = {"device": device} if kind == "native" else {}
    defaults: dict[str, Any] = {"progress_bar": False, "learning_rate": 0.01, "batch_size": 4, "epochs": 1, **place}
    if "train_loader" in options:
        del defaults["batch_size"]
    if isinstance(model, nn.Sequential):
        defaults["loss_fn"] = F.mse_loss
    trainer = trainer_class(kind)(model, data, *more, **{**defaults, **options})
    assert trainer.device.type == device.type
    return trainer


def make_half(
    kind: str, device: torch.device, model: nn.Module, data: Any, scale: tuple[float, float], **options: Any
) -> Any:
    """Return a trainer under fp16; on a CPU, which has none, one in fp32 with a loss scaler all the same."""
    if device.type != "cpu":
        options["autocast"] = "fp16"
    trainer = make(kind, device, model, data, fp16_loss_scale=scale, **options)
    if device.type == "cpu":
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale[0])
    assert trainer.scaler.is_enabled()
    return trainer


# --- what happens in a run


class Notes(Callback):
    """Writes down after each window where the run is, and a copy of the weights."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, float, float]] = []
        """Step, skipped steps, scale of the loss, learning rate."""
        self.weights: list[list[torch.Tensor]] = []

    def on_step_end(self, trainer: Any) -> None:
        progress, rate = trainer.progress, trainer.optimizer.param_groups[0]["lr"]
        self.rows.append((progress.step, progress.skipped_steps, trainer.scaler.get_scale(), float(rate)))
        self.weights.append(weights(trainer.get_model()))


class Overflow(Algorithm):
    """Lets the gradients of chosen micro-batches, counted from 1, overflow; their losses stay finite."""

    def __init__(self, *at: int) -> None:
        self.at = at
        self.count = 0

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count in self.at:
            loss = loss.clone()
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss


# --- waiting for the device


def forbid_waiting(device: torch.device, forbids: bool = True) -> None:
    """Make it an error to wait for the GPU, or allow it again."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if forbids else "default")


@contextlib.contextmanager
def waiting_allowed_at_last(device: torch.device) -> Iterator[None]:
    """Allow to wait for the GPU when this is over, however it ends."""
    try:
        yield
    finally:
        forbid_waiting(device, False)


def keep_busy(device: torch.device, milliseconds: float = 5.0) -> None:
    """Give the GPU something to do, so that the host gets ahead of it."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles of its clock, which has 1 to 2 GHz


# --- memory


def free_up(device: torch.device) -> None:
    """Free what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Return the bytes that tensors take on the GPU; 0 on a CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_of(device: torch.device, work: Callable[[], Any]) -> int:
    """Return by how many bytes `work` raises what is allocated at most; 0 on a CPU."""
    free_up(device)
    if device.type != "cuda":
        work()
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextlib.contextmanager
def room_for(device: torch.device, size: int) -> Iterator[None]:
    """Let this process take no more of the GPU's memory than it has now, and `size` bytes."""
    free_up(device)
    index = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(index) + size) / total, index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def ask_for_too_much(device: torch.device) -> None:
    """Ask for more memory than any machine has, which raises."""
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


class Greedy(nn.Module):
    """A regression model that asks for too much memory in evaluations, or from a pass on, forward or backward."""

    def __init__(self, body: nn.Module, where: str = "", start: int = 3) -> None:
        super().__init__()
        self.body, self.where, self.start, self.passes = body, where, start, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        output = self.body(x)
        is_time = self.passes >= self.start
        if (self.where == "evaluation" and not self.training) or (self.where == "forward" and is_time):
            ask_for_too_much(x.device)
        if self.where == "backward" and is_time:
            output.register_hook(lambda gradient: ask_for_too_much(gradient.device))
        return output


class GreedyAdamW(torch.optim.AdamW):
    """AdamW that asks for too much memory in its third step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3:
            ask_for_too_much(self.param_groups[0]["params"][0].device)
        return super().step(closure)
