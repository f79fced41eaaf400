"""Every optimizer of PyTorch, with every legal combination of its options, is resumed to the bit."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from marks import thinned
from torch import nn

from omnitrain import AccelerateTrainer, HFTrainer, Trainer
from omnitrain.checkpoint.state_dicts import optimizer_state, restore_optimizer

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T * self.scale


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


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
QUICK = [("SGD", torch.float32), ("AdamW", torch.bfloat16), ("Adagrad", torch.float64)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, id=f"{kind.__name__}-{dtype}",
                     marks=[] if (kind.__name__, dtype) in QUICK else pytest.mark.slow)
        for kind in KINDS for dtype in DTYPES
    ],
)  # fmt: skip
def test_optimizer_is_restored_with_any_legal_options(kind: Any, dtype: torch.dtype) -> None:
    has_scale, count = kind.__name__ != "Muon", 0
    for options in legal_options(kind):
        straight, resumed = Scaled(has_scale, dtype), Scaled(has_scale, dtype)
        first, second = kind(straight.parameters(), **options), kind(resumed.parameters(), **options)
        for number in range(3):
            step(straight, first, number)
        tensors, saved = optimizer_state(first, straight)
        resumed.load_state_dict(straight.state_dict())
        restore_optimizer(second, resumed, {key: tensor.clone() for key, tensor in tensors.items()}, saved, "the state")
        for number in range(3, 5):
            step(straight, first, number)
            step(resumed, second, number)
        for name, parameter in straight.named_parameters():
            assert torch.equal(parameter, resumed.get_parameter(name)), (options, name)
        count += 1
    assert count


@pytest.mark.parametrize(
    ("name", "trainer_class"),
    thinned(
        itertools.product(
            ["nesterov", "scale in bfloat16", "scale in float64"], [Trainer, AccelerateTrainer, HFTrainer]
        ),
        [("nesterov", HFTrainer), ("scale in bfloat16", Trainer), ("scale in float64", AccelerateTrainer)],
    ),
)
def test_trainer_resumes_with_options_of_the_optimizer(name: str, trainer_class: Any, tmp_path: Any) -> None:
    dtype = {"nesterov": torch.float32, "scale in bfloat16": torch.bfloat16}.get(name, torch.float64)

    def run(epochs: int, folder: str, resume_from: str | None = None) -> nn.Module:
        model = Scaled(dtype=dtype)
        options: dict[str, Any] = {}
        if name == "nesterov":
            options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        data = [(torch.randn(2, dtype=dtype), torch.randn(3, dtype=dtype)) for _ in range(16)]
        trainer = trainer_class(
            model, data, loss_fn=nn.functional.mse_loss, epochs=epochs, batch_size=4, save_dir=tmp_path / folder,
            progress_bar=False, lr_scheduler="constant", **options,
        )  # fmt: skip
        trainer.train(resume_from=resume_from)
        return trainer.model

    torch.manual_seed(1)
    expected = run(2, "straight").state_dict()
    torch.manual_seed(1)
    run(1, "cut")
    torch.manual_seed(1)
    resumed = run(2, "cut", "auto").state_dict()
    assert all(torch.equal(resumed[key], expected[key]) for key in expected)
