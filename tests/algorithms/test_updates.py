"""Freezing, gradient clipping, growing sizes and SAM, against loops by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import FailsAt, Sentences, StopAt, Tagger, Trace, distance, fit, rows, same, small_trainer, t16, weights
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import (
    SAM,
    Algorithm,
    ConfigError,
    DataError,
    GradientClipping,
    GradualUnfreezing,
    HookCallback,
    LayerFreezing,
    ProgressiveResizing,
    SeqLengthWarmup,
)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Linear(4, 1)).double()


def build(*algorithms: Any, model: Any = None, data: Any = None, **options: Any) -> Any:
    options = {"epochs": 4, "max_grad_norm": None, **options}
    return small_trainer(*algorithms, model=model or deep(), data=data or rows(8), **options)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LayerFreezing(0.25), ["11111", "11111", "01111", "00111"]),
        (lambda: LayerFreezing(0.0, 0.5), ["11111", "11111", "01111", "01111"]),
        (lambda: GradualUnfreezing(0.75), ["00001", "00011", "00111", "11111"]),
        (lambda: GradualUnfreezing(0.5, layers=["[01]", "[23]", "4"]), ["00001", "00111", "11111", "11111"]),
    ],
    ids=["freezing", "half frozen", "unfreezing", "layers"],
)
def test_layers_are_frozen_and_unfrozen_by_progress(make: Any, expected: list[str]) -> None:
    trains: list[str] = []

    def note(trainer: Any) -> None:
        trains.append("".join(str(int(layer.weight.grad is not None)) for layer in trainer.model))

    build(make(), callbacks=[HookCallback({"before_optimizer_step": note})]).train()
    assert trains == [flags for flags in expected for _ in range(2)]


def test_frozen_layer_keeps_its_moments() -> None:
    model, moments = deep(), []
    look = HookCallback({
        "on_step_end": lambda trainer: moments.append(trainer.optimizer.state[model[0].weight]["exp_avg"].clone())
    })  # fmt: skip
    model[1].weight.requires_grad_(False)
    trainer = fit(build(LayerFreezing(0.0), model=model, callbacks=[look]))
    assert not torch.equal(moments[0], moments[1]) and same(moments[2:], [moments[1]] * len(moments[2:]))
    trainer.train()  # and the next run begins with all of them
    assert model[0].weight.requires_grad is False and not model[1].weight.requires_grad
    assert not torch.equal(moments[8], moments[9])


def clipped(*algorithms: Any) -> tuple[nn.Module, list[torch.Tensor], float]:
    """Return the model, the gradients that make the first update, and the norm that is logged."""
    gradients, trace = list[torch.Tensor](), Trace()
    look = HookCallback({
        "before_optimizer_step": lambda trainer: gradients.extend(p.grad.clone() for p in trainer.model.parameters())
    })  # fmt: skip
    build(*algorithms, model=t16(), callbacks=[look, trace], max_steps=1, epochs=None, log_steps=1).train()
    return t16(), gradients, trace.logs[0]["grad_norm"]


def test_gradients_are_clipped_by_value_or_adaptively() -> None:
    model, plain, norm = clipped()
    _, by_value, logged = clipped(GradientClipping("value", 0.05))
    assert same(by_value, [gradient.clamp(-0.05, 0.05) for gradient in plain])
    assert logged == norm and max(float(gradient.abs().max()) for gradient in plain) > 0.05
    _, adaptive, logged = clipped(GradientClipping("adaptive", 0.1, exclude=["^3.bias"]))
    assert logged == norm
    changed = 0
    for (name, parameter), *pair in zip(model.named_parameters(), adaptive, plain, strict=True):
        units = [(parameter, *pair)] if parameter.dim() == 1 else zip(parameter, *pair, strict=True)
        for weight, result, gradient in units:
            limit = 0.1 * max(float(weight.detach().norm()), 1e-3)
            is_small = name == "3.bias" or gradient.norm() <= limit
            changed += not is_small
            torch.testing.assert_close(result, gradient if is_small else gradient * limit / gradient.norm())
    assert changed > 5


def test_sequence_warmup_is_the_mean_over_remaining_labels() -> None:
    lengths: list[int] = []

    def note_length(module: nn.Module, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        if module.training:
            lengths.append(inputs["ids"].shape[1])

    def cut(batch: Any) -> Any:
        return {key: torch.stack([sample[key] for sample in batch])[:, :2] for key in batch[0]}

    warm, expected = Tagger(), Tagger()
    warm.register_forward_pre_hook(note_length, with_kwargs=True)
    options: dict[str, Any] = {
        "data": Sentences(8), "optimizer": "sgd", "loss_fn": None, "callbacks": [StopAt(1)], "max_steps": 2, "epochs": 2
    }  # fmt: skip
    build(SeqLengthWarmup(6, 2, 1.0, 4), model=warm, batch_size=2, gradient_accumulation_steps=4, **options).train()
    build(model=expected, data_collator=cut, batch_size=8, **options).train()
    assert lengths == [2] * 4 and distance(weights(warm), weights(expected)) <= 1e-12
    warmup = SeqLengthWarmup(100, 10, 0.5, 8)
    assert [warmup.length_at(done) for done in (0, 0.1, 0.25, 0.49, 0.5)] == [10, 24, 48, 96, 100]
    with pytest.raises(DataError, match="dict batches"):
        build(SeqLengthWarmup(6, 2)).train()


def test_images_grow_to_their_full_size() -> None:
    sizes: list[tuple[int, ...]] = []
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.register_forward_pre_hook(lambda module, args: sizes.append(tuple(args[0].shape[-2:])))
    data = [(torch.randn(1, 16, 8), torch.zeros(1)) for _ in range(10)]
    resizing = ProgressiveResizing(initial_scale=0.5, delay=0.2, finetune=0.4, size_increment=2)
    build(resizing, model=model, data=data, batch_size=1, epochs=1).train()
    assert [height for height, _ in sizes] == [8, 8, 8, 10, 12, 14, 16, 16, 16, 16]
    assert sizes[:3] == [(8, 4)] * 3 and sizes[-1] == (16, 8)
    for data in (rows(8), TensorDataset(torch.ones(8, 1, 4, 4, dtype=torch.uint8), torch.ones(8, 1))):
        trainer = build(ProgressiveResizing(), data=data)
        with pytest.raises(DataError, match=r"ProgressiveResizing needs images, .* of shape \(4, "):
            trainer.train()
        assert trainer.progress.step == 0


def test_sam_equals_a_loop_by_hand() -> None:
    trained, model, trace = t16(), t16(), Trace()
    build(
        SAM(0.3), model=trained, data=rows(16), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), epochs=2,
        batch_size=2, gradient_accumulation_steps=4, max_grad_norm=0.5, log_steps=1, callbacks=[trace], shuffle=False,
        learning_rate=2e-5,
    ).train()  # fmt: skip
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for start in (0, 8, 0, 8):
        x, y = (tensor[start : start + 8] for tensor in rows(16).tensors)
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = nn.utils.get_total_norm(gradients)
        before = weights(model)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.add_(gradient * 0.3 / norm)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(trained), weights(model)) <= 1e-12
    assert [row["loss"] for row in trace.logs] == pytest.approx(losses, abs=1e-12)


def test_sam_restores_weights_if_the_second_pass_fails() -> None:
    model = FailsAt(2)
    with pytest.raises(RuntimeError, match="boom"):
        build(SAM(0.5), model=model).train()
    assert distance(weights(model.body), weights(t16())) == 0


def is_bad(trainer: Any) -> bool:
    return trainer.progress.step == 2 and not trainer.progress.skipped_steps


class BadBatch(Algorithm):
    """Makes the third batch NaN."""

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        return (batch[0] * float("nan"), batch[1]) if is_bad(trainer) else batch


class BadLoss(Algorithm):
    """Makes the loss of the third step infinite, while all activations are finite."""

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("inf") if is_bad(trainer) else loss


@pytest.mark.parametrize("algorithms", [[BadLoss(), SAM(0.1)], [BadBatch()]], ids=["second pass", "first pass"])
def test_skipped_step_leaves_buffers_unchanged(trainer_class: Any, algorithms: list[Algorithm]) -> None:
    """NaN of its passes would stay in the statistics of BatchNorm for ever."""
    buffers: list[dict[str, torch.Tensor]] = []
    copy = HookCallback({
        "on_step_end": lambda trainer: buffers.append({
            name: buffer.clone() for name, buffer in trainer.model.named_buffers()
        })
    })  # fmt: skip
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    trainer = fit(small_trainer(
        *algorithms, kind=trainer_class, model=model, data=rows(16, torch.float32), on_nonfinite="skip",
        callbacks=[copy],
    ))  # fmt: skip
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (7, 1)
    assert all(torch.equal(before, buffers[2][name]) for name, before in buffers[1].items())
    assert all(bool(buffer.isfinite().all()) for snapshot in buffers for buffer in snapshot.values())
    assert not torch.equal(buffers[3]["1.running_mean"], buffers[2]["1.running_mean"])


@pytest.mark.parametrize("make", [GradualUnfreezing, LayerFreezing, ProgressiveResizing])
def test_share_of_a_run_with_growing_steps_is_an_error(make: Any) -> None:
    """By the size of its steps, and not by its length or its data, of which nothing is wrong."""
    with pytest.raises(ConfigError, match=r"`global_batch_size=\{0: 4, '2ep': 8\}` changes in the run"):
        build(make(), global_batch_size={0: 4, "2ep": 8}).train()
    with pytest.raises(ConfigError, match="its length is in time or tokens, or its data have no length"):
        build(make(), epochs=None, max_duration="1h").train()
