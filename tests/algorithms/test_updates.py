"""Freezing, gradient clipping, growing sizes and SAM, against loops by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import (
    FailsAt,
    Sentences,
    StopAt,
    Tagger,
    Trace,
    callback,
    distance,
    fit,
    rows,
    same,
    small_trainer,
    t16,
    weights,
)
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import (
    SAM,
    Algorithm,
    DataError,
    GradientClipping,
    GradualUnfreezing,
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


@pytest.mark.parametrize(("algorithm", "expected"), [
    (LayerFreezing(0.25), ["11111", "11111", "01111", "00111"]),
    (LayerFreezing(0.0, 0.5), ["11111", "11111", "01111", "01111"]),
    (GradualUnfreezing(0.75), ["00001", "00011", "00111", "11111"]),
    (GradualUnfreezing(0.5, layers=["[01]", "[23]", "4"]), ["00001", "00111", "11111", "11111"]),
], ids=["freezing", "half frozen", "unfreezing", "layers"])  # fmt: skip
def test_layers_are_frozen_and_unfrozen_by_progress(algorithm: Any, expected: list[str]) -> None:
    trains: list[str] = []

    def note(trainer: Any) -> None:
        trains.append("".join(str(int(layer.weight.grad is not None)) for layer in trainer.model))

    build(algorithm, callbacks=[callback(on_before_optimizer_step=note)]).train()
    assert trains == [flags for flags in expected for _ in range(2)]


def test_frozen_layer_keeps_its_moments() -> None:
    model, moments = deep(), []
    state_of = lambda trainer: trainer.optimizer.state[model[0].weight]["exp_avg"].clone()  # noqa: E731
    look = callback(on_step_end=lambda trainer: moments.append(state_of(trainer)))
    model[1].weight.requires_grad_(False)
    trainer = fit(build(LayerFreezing(0.0), model=model, callbacks=[look]))
    assert not torch.equal(moments[0], moments[1]) and same(moments[2:], [moments[1]] * len(moments[2:]))
    trainer.train()  # and the next run begins with all of them
    assert model[0].weight.requires_grad is False and not model[1].weight.requires_grad
    assert not torch.equal(moments[8], moments[9])


def clipped(*algorithms: Any) -> tuple[list[torch.Tensor], float]:
    """Return the gradients that make the first update, and the norm that is logged."""
    gradients, trace = list[torch.Tensor](), Trace()
    gradients_of = lambda trainer: [parameter.grad.clone() for parameter in trainer.model.parameters()]  # noqa: E731
    look = callback(on_before_optimizer_step=lambda trainer: gradients.extend(gradients_of(trainer)))
    build(*algorithms, model=t16(), callbacks=[look, trace], max_steps=1, epochs=None, log_steps=1).train()
    return gradients, trace.logs[0]["grad_norm"]


def test_gradients_are_clipped_by_value_or_adaptively() -> None:
    plain, norm = clipped()
    by_value, logged = clipped(GradientClipping("value", 0.05))
    assert same(by_value, [gradient.clamp(-0.05, 0.05) for gradient in plain])
    assert logged == norm and max(float(gradient.abs().max()) for gradient in plain) > 0.05
    adaptive, logged = clipped(GradientClipping("adaptive", 0.1, exclude=["^3.bias"]))
    assert logged == norm
    changed = 0
    for (name, parameter), *pair in zip(t16().named_parameters(), adaptive, plain, strict=True):
        units = [(parameter, *pair)] if parameter.dim() == 1 else zip(parameter, *pair, strict=True)
        for weight, result, gradient in units:
            limit = 0.1 * max(float(weight.detach().norm()), 1e-3)
            is_small = name == "3.bias" or gradient.norm() <= limit
            changed += not is_small
            torch.testing.assert_close(result, gradient if is_small else gradient * limit / gradient.norm())
    assert changed > 5


def test_sequence_warmup_is_the_mean_over_remaining_labels() -> None:
    lengths: list[int] = []

    def cut(batch: Any) -> Any:
        return {key: torch.stack([sample[key] for sample in batch])[:, :2] for key in batch[0]}

    warm, expected = Tagger(), Tagger()
    warm.embed.register_forward_pre_hook(lambda module, args: lengths.append(module.training * args[0].shape[1]))
    options: dict[str, Any] = {"optimizer": "sgd", "loss_fn": None, "callbacks": [StopAt(1)], "max_steps": 2}
    options |= {"data": Sentences(8), "epochs": 2}
    build(SeqLengthWarmup(6, 2, 1.0, 4), model=warm, batch_size=2, gradient_accumulation_steps=4, **options).train()
    build(model=expected, data_collator=cut, batch_size=8, **options).train()
    assert [length for length in lengths if length] == [2] * 4 and distance(weights(warm), weights(expected)) <= 1e-12
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


def failing_once(method: str, change: Any) -> Algorithm:
    """An algorithm that changes what a method gets in the third step, which it is for the first time."""

    def transform(self: Any, trainer: Any, value: Any) -> Any:
        is_third = trainer.progress.step == 2 and not trainer.progress.skipped_steps
        return change(value) if is_third else value

    return type("Failing", (Algorithm,), {method: transform})()


@pytest.mark.parametrize("algorithms", [
    [failing_once("transform_loss", lambda loss: loss * float("inf")), SAM(0.1)],  # of finite activations
    [failing_once("transform_batch", lambda batch: (batch[0] * float("nan"), batch[1]))],
], ids=["second pass", "first pass"])  # fmt: skip
def test_skipped_step_leaves_buffers_unchanged(trainer_class: Any, algorithms: list[Algorithm]) -> None:
    """NaN of its passes would stay in the statistics of BatchNorm for ever."""
    buffers: list[list[torch.Tensor]] = []
    copy = callback(on_step_end=lambda trainer: buffers.append([*map(torch.clone, trainer.model.buffers())]))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    options = {"model": model, "data": rows(16, torch.float32), "on_nonfinite": "skip", "callbacks": [copy]}
    trainer = fit(small_trainer(*algorithms, kind=trainer_class, **options))
    assert (trainer.progress.step, trainer.progress.skipped_steps) == (7, 1)
    assert same(buffers[1], buffers[2]) and not torch.equal(buffers[3][0], buffers[2][0])
    assert all(bool(buffer.isfinite().all()) for snapshot in buffers for buffer in snapshot)
