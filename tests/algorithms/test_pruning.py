"""Pruning by magnitude."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import callback, distance, fit, rows, small_trainer, t16, weights
from torch import nn

from omnitrain import Algorithm, Callback, MagnitudePruning

build = functools.partial(small_trainer, max_grad_norm=None)


def counting_zeros(counts: list[int]) -> Any:
    """Return a callback that counts after each update the weights of the first layer that are zero."""
    return callback(on_step_end=lambda trainer: counts.append(int((trainer.model[0].weight == 0).sum())))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_pruning_equals_a_loop_with_masks(scope: Any) -> None:
    trained, model = t16(), t16()
    build(
        MagnitudePruning(0.75, start=2, end=6, every=2, initial=0.25, scope=scope), model=trained, shuffle=False,
        optimizer="adam", max_grad_norm=0.3,
    ).train()  # fmt: skip
    pruned = [model[0].weight, model[3].weight]  # type: ignore[index]
    masks = [torch.ones_like(weight, dtype=torch.bool) for weight in pruned]
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), lr=0.1), rows(16).tensors
    shares = {2: 0.25, 4: 0.75 - 0.5 * 0.125, 6: 0.75}
    for step in range(1, 9):
        part = slice((step - 1) % 4 * 4, (step - 1) % 4 * 4 + 4)
        F.mse_loss(model(x[part]), y[part]).backward()
        for weight, mask in zip(pruned, masks, strict=True):
            weight.grad *= mask  # type: ignore[operator]
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if step in shares:
                sizes = [(weight * mask).abs().flatten() for weight, mask in zip(pruned, masks, strict=True)]
                sizes = sizes if scope == "layer" else [torch.cat(sizes)] * 2
                limits = [values.sort()[0][round(shares[step] * len(values)) - 1] for values in sizes]
                masks = [(w * mask).abs() > limit for w, mask, limit in zip(pruned, masks, limits, strict=True)]
            for weight, mask in zip(pruned, masks, strict=True):
                weight.mul_(mask)
    assert distance(weights(trained), weights(model)) <= 1e-12
    zeros = [int((weight == 0).sum()) for weight in (trained[0].weight, trained[3].weight)]  # type: ignore[index]
    assert zeros == [48, 12] if scope == "layer" else sum(zeros) == 60


def test_pruned_weights_grow_by_the_cube_and_stay_zero() -> None:
    counts, pruning = list[int](), MagnitudePruning(0.5, end="0.5dur", every=1)
    trainer = fit(build(pruning, epochs=3, optimizer="adam", callbacks=[counting_zeros(counts)]))
    expected = [round(64 * pruning.sparsity_at(step / 5)) for step in range(6)]
    assert counts == [*expected, *[32] * 6] and pruning.reached == 0.5
    assert not trainer.model[0]._forward_pre_hooks and list(trainer.model.state_dict()) == list(t16().state_dict())
    assert not (trainer.model[0].bias == 0).any()
    trainer.train()  # another run begins with none
    assert pruning.reached == 0.5 and counts[12] < 32 == counts[-1]


def test_pruned_weights_are_not_exchanged_for_other_zeros() -> None:
    pruned: list[torch.Tensor] = []

    class Zeroing(Callback):
        def on_step_end(self, trainer: Any) -> None:
            weight = trainer.model[0].weight
            pruned.append((weight[:, 1:] == 0).clone())
            with torch.no_grad():
                weight[:, 0] *= trainer.progress.step < 4

    data = rows(16)
    data.tensors[0][:, 0] = 0  # so that these weights have no gradient
    build(MagnitudePruning(0.5, end=8, every=1), data=data, optimizer="sgd", callbacks=[Zeroing()]).train()
    assert all(bool((later | ~earlier).all()) for earlier, later in itertools.pairwise(pruned))
    assert int(pruned[3].sum())


def test_longer_run_keeps_pruned_weights(tmp_path: Path) -> None:
    counts: list[int] = []
    for epochs, resume in ((2, None), (4, "last")):
        pruning = MagnitudePruning(0.5, end="1dur", every=1)
        build(pruning, epochs=epochs, callbacks=[counting_zeros(counts)], save_dir=tmp_path).train(resume)
    assert counts[7:] == [32] * 9


class Skipping(Algorithm):
    """Makes the losses of two steps NaN."""

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        progress = trainer.progress
        return loss * float("nan") if 0 < progress.step + progress.skipped_steps < 3 else loss


def test_pruning_warns_if_the_run_ends_without_it(caplog: pytest.LogCaptureFixture) -> None:
    """By steps that were skipped, once; not in a run that reaches `end`."""
    build(MagnitudePruning(0.5, end=4, every=1), Skipping(), epochs=1, on_nonfinite="skip").train()
    assert caplog.text.count("MagnitudePruning has pruned 0.3519 of the weights and not `sparsity=0.5`") == 1
    assert "(epochs) after 2 updates and 2 skipped steps" in caplog.text and "`end` is update 4" in caplog.text
    caplog.clear()
    build(MagnitudePruning(0.5, end=4, every=1), eval_dataset=rows(4), epochs=1).train()
    assert "MagnitudePruning has pruned" not in caplog.text
    assert "Pass load_best_at_end=False" in caplog.text  # the best weights may be those before the pruning
