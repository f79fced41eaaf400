"""Optimizers with a closure."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Holding, Sentences, Tagger, Trace, distance, rows, t16, weights
from torch import nn

from omnitrain import SAM, Algorithm, ConfigError, HFTrainer, NonFiniteError, Trainer


class Ascent(torch.optim.SGD):
    """Computes its gradients where the loss is higher, after moving the weights."""

    losses: list[float]

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moves = [parameter.grad * 0.1 for parameter in parameters]
        torch._foreach_add_([parameter.data for parameter in parameters], moves)  # which changes no version counter
        loss = closure()
        torch._foreach_sub_([parameter.data for parameter in parameters], moves)
        self.losses = [*vars(self).get("losses", []), float(loss)]
        return super().step()


def build(model: nn.Module, optimizer: Any = torch.optim.LBFGS, data: Any = None, **options: Any) -> Trainer:
    common: dict[str, Any] = {"device": "cpu", "progress_bar": False, "max_grad_norm": None, "max_steps": 3}
    common |= {"log_steps": 1, "learning_rate": 0.1, "shuffle": False}
    if data is None:
        common |= {"loss_fn": F.mse_loss}
    return Trainer(model, data or rows(8), optimizer=optimizer, **{**common, **options})


def test_closure_computes_gradients_at_moved_weights() -> None:
    trained, model, trace = t16(), t16(), Trace()
    trainer = build(trained, Ascent, batch_size=2, gradient_accumulation_steps=4, callbacks=[trace])
    trainer.train()
    optimizer, (x, y), logged, inner = torch.optim.SGD(model.parameters(), lr=0.1), rows(8).tensors, [], []
    for _ in range(3):
        before = weights(model)
        logged.append(F.mse_loss(model(x), y))
        gradients = torch.autograd.grad(logged[-1], list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.add_(gradient * 0.1)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        inner.append(loss.item())
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(trained), weights(model)) <= 1e-12
    torch.testing.assert_close([row["loss"] for row in trace.logs], [loss.item() for loss in logged])
    torch.testing.assert_close(trainer.optimizer.losses, inner)  # type: ignore[attr-defined]


class Counting(Holding):
    """Counts two targets in each sample."""

    def __call__(self, batch: Any) -> tuple[torch.Tensor, int]:
        loss, count = super().__call__(batch)
        return loss, 2 * count


@pytest.mark.parametrize(("kind", "reduction"), [("labels", "mean"), ("targets", "mean"), ("targets", "sum")])
def test_closure_loss_is_that_of_its_gradients(kind: str, reduction: Any) -> None:
    """Along the gradient the loss rises by its square, however the window is divided."""
    model: Any = Tagger() if kind == "labels" else t16()
    values: list[tuple[float, float]] = []

    class Probe(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in parameters]
            for size in (1e-6, -2e-6, 1e-6):
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.add_(gradient * size)
                values.append((float(closure()), sum(float((parameter.grad**2).sum()) for parameter in parameters)))

    options: dict[str, Any] = {"unit": Counting(model)} if kind == "targets" else {}
    data = Sentences(8) if kind == "labels" else rows(8)
    build(
        model, Probe, data, batch_size=3, gradient_accumulation_steps=3, max_steps=1, grad_reduction=reduction,
        **options,
    ).train()  # fmt: skip
    (up, _), (down, _), (_, square) = values
    assert (up - down) / 2e-6 == pytest.approx(square, rel=1e-5)


def test_nan_in_a_closure_restores_the_weights() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.passes = t16(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return self.body(x) * (float("nan") if self.passes == 3 else 1.0)

    model = Breaking()
    with pytest.raises(NonFiniteError, match=r"step 1 .*The weights were not updated by it"):
        build(model).train()
    assert model.passes >= 3 and distance(weights(model), weights(t16())) == 0


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
    trainer = build(model, batch_size=4, gradient_accumulation_steps=2, max_steps=1, algorithms=[Masking()])
    trainer.train()
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
    results = []
    for copies in (True, False):
        options: dict[str, Any] = {"algorithms": [SAM()]} if kind == "SAM" else {"optimizer": torch.optim.LBFGS}
        options |= {"device": "cpu"} if trainer_class is Trainer else {}
        trainer = trainer_class(
            InPlace(copies), rows(8), loss_fn=F.mse_loss, max_steps=2, learning_rate=0.1, max_grad_norm=None,
            batch_size=4, progress_bar=False, **options,
        )  # fmt: skip
        trainer.train()
        results.append(weights(trainer.model))
    assert distance(*results) == 0
