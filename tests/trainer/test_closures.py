"""Optimizers with a closure."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Holding, Sentences, Tagger, distance, fit, rows, t16, trainer_on_cpu, weights
from torch import nn

from omnitrain import SAM, Algorithm, ConfigError, HFTrainer, NonFiniteError, Trainer


def build(model: nn.Module, optimizer: Any = torch.optim.LBFGS, data: Any = None, **options: Any) -> Trainer:
    common: dict[str, Any] = {"max_grad_norm": None, "max_steps": 3, "learning_rate": 0.1, "shuffle": False}
    common |= {} if data else {"loss_fn": F.mse_loss}
    return trainer_on_cpu(Trainer, model, data or rows(8), optimizer=optimizer, **{**common, **options})


class Counting(Holding):
    """Counts two targets in each sample."""

    def __call__(self, batch: Any) -> tuple[torch.Tensor, int]:
        loss, count = super().__call__(batch)
        return loss, 2 * count


class Probe(torch.optim.SGD):
    """Moves the weights along the gradient, and notes the loss and the square of the gradient there."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients, self.values = [parameter.grad for parameter in parameters], []
        for size in (1e-6, -2e-6, 1e-6):
            moves = [gradient * size for gradient in gradients]
            torch._foreach_add_([parameter.data for parameter in parameters], moves)  # changes no version counter
            self.values.append((float(closure()), sum(float((parameter.grad**2).sum()) for parameter in parameters)))


@pytest.mark.parametrize(("kind", "reduction"), [("labels", "mean"), ("targets", "mean"), ("targets", "sum")])
def test_closure_loss_is_that_of_its_gradients(kind: str, reduction: Any) -> None:
    """Along the gradient the loss rises by its square, however the window is divided."""
    model: Any = Tagger() if kind == "labels" else t16()
    options: dict[str, Any] = {"unit": Counting(model)} if kind == "targets" else {}
    trainer = fit(build(
        model, Probe, Sentences(8) if kind == "labels" else rows(8), batch_size=3, gradient_accumulation_steps=3,
        max_steps=1, grad_reduction=reduction, **options,
    ))  # fmt: skip
    (up, _), (down, _), (_, square) = trainer.optimizer.values  # type: ignore[attr-defined]
    assert (up - down) / 2e-6 == pytest.approx(square, rel=1e-5)


def test_nan_in_a_closure_restores_the_weights() -> None:
    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return output * (float("nan") if len(passes) == 3 else 1.0)

    model, passes = t16(), list[int]()
    model.register_forward_hook(spoil)
    with pytest.raises(NonFiniteError, match=r"step 1 .*The weights were not updated by it"):
        build(model).train()
    assert len(passes) >= 3 and distance(weights(model), weights(t16())) == 0


def test_unsupported_options_are_an_error() -> None:
    class Own(HFTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return super().training_step(model, inputs, num_items_in_batch)

    for options, message in (
        ({"max_grad_norm": 1.0}, "`max_grad_norm=1.0` would clip.* Pass max_grad_norm=None"),
        ({"microbatch_size": "auto"}, "`microbatch_size='auto'` could not begin"),
        ({"on_nonfinite": "skip"}, "`on_nonfinite='skip'` decides on a step before"),
        ({"algorithms": [SAM()]}, r"`algorithms=\[SAM\]` moves the weights"),
    ):
        with pytest.raises(ConfigError, match=rf"`optimizer` \(LBFGS\) takes loss and .*{message}"):
            build(t16(), **options).train()
    for parts in ({"optimizer": torch.optim.LBFGS}, {"algorithms": [SAM()]}):
        trainer = Own(t16(), None, rows(8), loss_fn=F.mse_loss, max_grad_norm=None, max_steps=1, **parts)
        with pytest.raises(ConfigError, match=re.escape("Own.training_step")):
            trainer.train()


def test_algorithms_change_gradients_in_each_pass() -> None:
    class Masking(Algorithm):
        def before_update(self, trainer: Any) -> None:
            trainer.model[0].weight.grad[:8] = 0

    model = t16()
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    trainer = fit(build(model, batch_size=4, gradient_accumulation_steps=2, max_steps=1, algorithms=[Masking()]))
    (state,) = trainer.optimizer.state.values()
    assert len(passes) == 2 * state["func_evals"]  # of two micro-batches, and no pass that nobody requests
    assert torch.equal(model[0].weight[:8], t16()[0].weight[:8])  # type: ignore[index]
    assert not torch.equal(model[0].weight[8:], t16()[0].weight[8:])  # type: ignore[index]


class InPlace(nn.Module):
    """Changes its input in place, or a copy of it."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.inner, self.copies = t16(), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone() if self.copies else x
        return self.inner(x.mul_(0.5))


@pytest.mark.parametrize(("trainer_class", "kind"), [(Trainer, "SAM"), (HFTrainer, "SAM"), (Trainer, "LBFGS")])
def test_each_pass_gets_an_unchanged_batch(trainer_class: Any, kind: str) -> None:
    ends = []
    for copies in (True, False):
        options: dict[str, Any] = {"algorithms": [SAM()]} if kind == "SAM" else {"optimizer": torch.optim.LBFGS}
        trainer = fit(trainer_on_cpu(
            trainer_class, InPlace(copies), rows(8), loss_fn=F.mse_loss, max_steps=2, learning_rate=0.1,
            max_grad_norm=None, batch_size=4, **options,
        ))  # fmt: skip
        ends.append(weights(trainer.model))
    assert distance(*ends) == 0
