"""What is frozen, clipped, cut short, scaled, or run twice, against what a careful user would write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Sentences, StopAt, Tagger, Trace, distance, rows, t16, weights
from torch import nn

from omnitrain import (
    SAM,
    SWA,
    Callback,
    ConfigError,
    DataError,
    GradientClipping,
    GradualUnfreezing,
    LayerFreezing,
    ProgressiveResizing,
    SeqLengthWarmup,
    Trainer,
)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Linear(4, 1)).double()


def build(*algorithms: Any, model: nn.Module | None = None, data: Any = None, **options: Any) -> Trainer:
    common: dict[str, Any] = {"epochs": 4, "batch_size": 4, "learning_rate": 0.1, "max_grad_norm": None}
    common |= {"loss_fn": F.mse_loss, "device": "cpu", "progress_bar": False}
    return Trainer(model or deep(), data or rows(8), algorithms=algorithms, **{**common, **options})


class Seen(Callback):
    """Writes down at each update which layers have a gradient."""

    def __init__(self) -> None:
        self.trains: list[str] = []

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.trains.append("".join(str(int(layer.weight.grad is not None)) for layer in trainer.model))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LayerFreezing(0.25), ["11111", "11111", "01111", "00111"]),
        (lambda: LayerFreezing(0.0, 0.5), ["11111", "11111", "01111", "01111"]),
        (lambda: GradualUnfreezing(0.75), ["00001", "00011", "00111", "11111"]),
        (lambda: GradualUnfreezing(0.5, layers=["[01]", "[23]", "4"]), ["00001", "00111", "11111", "11111"]),
    ],
)
def test_layers_stop_or_start_to_train_from_below_or_above(make: Any, expected: list[str]) -> None:
    seen = Seen()
    build(make(), callbacks=[seen]).train()
    assert seen.trains == [one for one in expected for _ in range(2)]


def test_a_frozen_layer_keeps_its_moments_and_what_the_user_froze_stays_frozen() -> None:
    model, moments = deep(), []

    class Moments(Callback):
        def on_step_end(self, trainer: Any) -> None:
            moments.append(trainer.optimizer.state[model[0].weight]["exp_avg"].clone())

    model[1].weight.requires_grad_(False)
    trainer = build(LayerFreezing(0.0), model=model, callbacks=[Moments()])
    trainer.train()
    assert not torch.equal(moments[0], moments[1]) and all(torch.equal(moments[1], one) for one in moments[2:])
    trainer.train()  # and the next run begins with all of them
    assert model[0].weight.requires_grad is False and not model[1].weight.requires_grad
    assert not torch.equal(moments[8], moments[9])


def test_freezing_that_cannot_be_is_refused() -> None:
    for wrong in ({"freeze_start": 1}, {"freeze_level": 0}, {"layers": "head"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LayerFreezing(**wrong)  # type: ignore[arg-type]
    for one, words in ((LayerFreezing(layers=["0", "9"]), "no module is called '9'"),
                       (LayerFreezing(layers=["0"]), "two layers")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            build(one).train()
    for one in (LayerFreezing(), SWA(), ProgressiveResizing(), SeqLengthWarmup(8)):
        with pytest.raises(ConfigError, match=f"{type(one).__name__} goes by the share of the run"):
            build(one, epochs=None, max_duration="1h").train()
    with pytest.raises(ConfigError, match="exclude each other"):
        build(LayerFreezing(), GradualUnfreezing())


# --- clipping


def clipped(*algorithms: Any, **options: Any) -> tuple[nn.Module, list[torch.Tensor], float]:
    """Return the model, the gradients that make the first update, and the norm that is logged."""
    found: list[torch.Tensor] = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any) -> None:
            found.extend(one.grad.clone() for one in trainer.model.parameters())

    trace = Trace()
    build(*algorithms, model=t16(), callbacks=[Look(), trace], max_steps=1, epochs=None, log_steps=1, **options).train()
    return t16(), found, trace.logs[0]["grad_norm"]


def test_gradients_are_clipped_by_value_or_by_the_norm_of_each_units_weights() -> None:
    model, plain, norm = clipped()
    _, by_value, logged = clipped(GradientClipping("value", 0.05))
    assert all(torch.equal(one, other.clamp(-0.05, 0.05)) for one, other in zip(by_value, plain, strict=True))
    assert logged == norm and max(float(one.abs().max()) for one in plain) > 0.05
    _, adaptive, logged = clipped(GradientClipping("adaptive", 0.1, exclude=["^3.bias"]))
    assert logged == norm
    changed = 0
    for (name, weight), one, other in zip(model.named_parameters(), adaptive, plain, strict=True):
        units = [(weight, one, other)] if weight.dim() == 1 else zip(weight, one, other, strict=True)
        for w, found, g in units:
            most = 0.1 * max(float(w.detach().norm()), 1e-3)
            expected = g if name == "3.bias" or g.norm() <= most else g * most / g.norm()
            changed += expected is not g
            torch.testing.assert_close(found, expected)
    assert changed > 5


def test_clipping_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="'value' or 'adaptive', got 'norm'"):
        GradientClipping("norm", 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit"):
        GradientClipping("value", 0)
    with pytest.raises(ConfigError, match=r"max_grad_norm=1\.0` clips as well"):
        clipped(GradientClipping("value", 1.0), max_grad_norm=1.0)
    with pytest.raises(ConfigError, match="`exclude`: 'head' is found in no parameter's name"):
        clipped(GradientClipping("value", 1.0, exclude=["head"]))


# --- sizes


def test_short_sequences_give_the_mean_over_the_labels_that_are_left() -> None:
    lengths: list[int] = []

    class Look(Tagger):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            lengths.append(ids.shape[1])
            return super().forward(ids, labels)

    def cut(batch: Any) -> Any:
        return {key: torch.stack([one[key] for one in batch])[:, :2] for key in batch[0]}

    found, expected = Look(), Tagger()
    run_with = {"max_steps": 2, "epochs": 2}
    Trainer(
        found, Sentences(8), algorithms=[SeqLengthWarmup(6, 2, 1.0, 4)], batch_size=2, gradient_accumulation_steps=4,
        learning_rate=0.1, optimizer="sgd", max_grad_norm=None, device="cpu", progress_bar=False, callbacks=[StopAt(1)],
        **run_with,
    ).train()  # fmt: skip
    Trainer(
        expected, Sentences(8), data_collator=cut, batch_size=8, learning_rate=0.1, optimizer="sgd",
        max_grad_norm=None, device="cpu", progress_bar=False, callbacks=[StopAt(1)], **run_with,
    ).train()  # fmt: skip
    assert lengths == [2] * 4 and distance(weights(found), weights(expected)) <= 1e-12
    warmup = SeqLengthWarmup(100, 10, 0.5, 8)
    assert [warmup.length_at(done) for done in (0, 0.1, 0.25, 0.49, 0.5)] == [10, 24, 48, 96, 100]
    with pytest.raises(DataError, match="dict batches"):
        build(SeqLengthWarmup(6, 2)).train()


def test_images_grow_from_the_delay_on_and_are_whole_at_the_end() -> None:
    sizes: list[tuple[int, ...]] = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                sizes.append(tuple(x.shape[-2:]))
            return self.body(x).mean(dim=(2, 3))

    data = [(torch.randn(1, 16, 8), torch.zeros(1)) for _ in range(10)]
    build(ProgressiveResizing(0.5, 0.2, 0.4, 2), model=Look(), data=data, batch_size=1, epochs=1).train()
    expected = [(8, 4), (8, 4), (8, 4), (10, 4), (12, 6), (14, 7)]
    assert [one[0] for one in sizes] == [8, 8, 8, 10, 12, 14, 16, 16, 16, 16] and sizes[:3] == expected[:3]
    assert sizes[-1] == (16, 8)


# --- two passes


def test_sam_updates_by_the_gradient_where_the_loss_is_worst_nearby() -> None:
    found, model = t16(), t16()
    trace = Trace()
    trainer = build(
        SAM(0.3), model=found, data=rows(16), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), epochs=2,
        batch_size=2, gradient_accumulation_steps=4, max_grad_norm=0.5, log_steps=1, callbacks=[trace], shuffle=False,
        learning_rate=2e-5,
    )  # fmt: skip
    trainer.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for start in (0, 8, 0, 8):
        x, y = rows(16).tensors[0][start : start + 8], rows(16).tensors[1][start : start + 8]
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = nn.utils.get_total_norm(gradients)
        before = weights(model)
        with torch.no_grad():
            for one, gradient in zip(model.parameters(), gradients, strict=True):
                one.add_(gradient * 0.3 / norm)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for one, kept in zip(model.parameters(), before, strict=True):
                one.copy_(kept)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(found), weights(model)) <= 1e-12
    assert [row["loss"] for row in trace.logs] == pytest.approx(losses, abs=1e-12)


def test_a_second_pass_that_fails_leaves_the_weights_where_they_were() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.count = t16(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.count == 2:
                raise RuntimeError("boom")
            return self.body(x)

    model = Fails()
    with pytest.raises(RuntimeError, match="boom"):
        build(SAM(0.5), model=model).train()
    assert distance(weights(model), weights(t16())) == 0
    with pytest.raises(ConfigError, match=r"SAM.*microbatch_size='auto'"):
        build(SAM(), microbatch_size="auto").train()
    for wrong in (0, -1, True, float("inf")):
        with pytest.raises(ConfigError, match="rho"):
            SAM(wrong)
