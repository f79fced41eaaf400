"""Pruned weights: which they are, that they stay zero, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import StopAt, distance, rows, same, t16, weights
from torch import nn

from omnitrain import EMA, Callback, ConfigError, LayerFreezing, MagnitudePruning, Trainer


def build(*algorithms: Any, model: nn.Module | None = None, data: Any = None, **options: Any) -> Trainer:
    common: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 0.1, "max_grad_norm": None}
    common |= {"loss_fn": F.mse_loss, "device": "cpu", "progress_bar": False}
    return Trainer(model or t16(), data or rows(16), algorithms=algorithms, **{**common, **options})


class Zeros(Callback):
    """Writes down after each update how many weights of a parameter are zero."""

    def __init__(self, name: str = "0.weight") -> None:
        self.name, self.counts = name, list[int]()

    def on_step_end(self, trainer: Any) -> None:
        self.counts.append(int((trainer.model.get_parameter(self.name) == 0).sum()))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_weights_are_those_of_a_loop_that_masks_gradients_and_weights(scope: Any) -> None:
    found, model = t16(), t16()
    build(
        MagnitudePruning(0.75, start=2, end=6, every=2, initial=0.25, scope=scope), model=found, shuffle=False,
        optimizer="adam", max_grad_norm=0.3,
    ).train()  # fmt: skip
    pruned = [model[0].weight, model[3].weight]  # type: ignore[index]
    masks = [torch.ones_like(one, dtype=torch.bool) for one in pruned]
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), lr=0.1), rows(16).tensors
    for step in range(1, 9):
        part = slice((step - 1) % 4 * 4, (step - 1) % 4 * 4 + 4)
        F.mse_loss(model(x[part]), y[part]).backward()
        for one, mask in zip(pruned, masks, strict=True):
            one.grad *= mask  # type: ignore[operator]
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if step in (2, 4, 6):
                share = {2: 0.25, 4: 0.75 - 0.5 * 0.125, 6: 0.75}[step]
                if scope == "layer":
                    limits = [one.abs().flatten().sort()[0][round(share * one.numel()) - 1] for one in pruned]
                else:
                    every = torch.cat([(one * mask).abs().flatten() for one, mask in zip(pruned, masks, strict=True)])
                    limits = [every.sort()[0][round(share * every.numel()) - 1]] * 2
                masks = [(one * mask).abs() > limit for one, mask, limit in zip(pruned, masks, limits, strict=True)]
            for one, mask in zip(pruned, masks, strict=True):
                one.mul_(mask)
    assert distance(weights(found), weights(model)) <= 1e-12
    zeros = [int((one == 0).sum()) for one in (found[0].weight, found[3].weight)]  # type: ignore[index]
    assert zeros == [48, 12] if scope == "layer" else sum(zeros) == 60


def test_the_share_grows_by_the_cube_and_what_is_pruned_stays_zero_under_momentum_and_freezing() -> None:
    zeros = Zeros()
    pruning = MagnitudePruning(0.5, end="0.5dur", every=1)
    trainer = build(pruning, LayerFreezing(0.0), epochs=3, optimizer="adam", callbacks=[zeros])
    trainer.train()
    expected = [round(64 * pruning.sparsity_at(step / 5)) for step in range(6)]
    assert zeros.counts == [*expected, *[32] * 6] and pruning.reached == 0.5
    assert not trainer.model[0]._forward_pre_hooks and list(trainer.model.state_dict()) == list(t16().state_dict())
    assert not (trainer.model[0].bias == 0).any()
    trainer.train()  # another run begins with none
    assert pruning.reached == 0.5 and zeros.counts[12] < 32 == zeros.counts[-1]


def test_a_resume_between_two_prunings_keeps_what_was_pruned(tmp_path: Path) -> None:
    def trained(*guests: Any, **options: Any) -> list[torch.Tensor]:
        model, resume = t16(), options.pop("resume_from", None)
        pruning = MagnitudePruning(0.6, end=8, every=4, initial=0.3)
        build(pruning, model=model, callbacks=guests, optimizer="adam", **options).train(resume_from=resume)
        return weights(model)

    expected = trained()
    trained(StopAt(3), save_dir=tmp_path)
    assert same(trained(save_dir=tmp_path, resume_from="auto"), expected)


def test_what_is_pruned_is_not_given_back_for_weights_that_happen_to_be_zero() -> None:
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


def test_a_longer_run_gives_nothing_back_that_was_pruned(tmp_path: Path) -> None:
    zeros, more = Zeros(), Zeros()
    build(MagnitudePruning(0.5, end="1dur", every=1), epochs=2, callbacks=[zeros], save_dir=tmp_path).train()
    build(MagnitudePruning(0.5, end="1dur", every=1), epochs=4, callbacks=[more], save_dir=tmp_path).train("last")
    assert zeros.counts[-1] == 32 and more.counts == [32] * 8


def test_what_cannot_be_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    for wrong in (
        {"sparsity": 1}, {"sparsity": True}, {"initial": 0.6}, {"every": 0}, {"match": "0"}, {"scope": "all"},
        {"start": "2h"}, {"end": "1e3tok"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}`"):
            MagnitudePruning(**wrong)  # type: ignore[arg-type]
    for options, words in (
        ({"end": 9}, "would end at update 9 .*the run has 8"),
        ({"start": "0.9dur"}, "begin at update 8 and end at update 4"),
        ({"match": ["head"]}, "'head' is found in no parameter's name"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(MagnitudePruning(**options)).train()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parameter that trains and has two dim"):
        build(MagnitudePruning(), model=nn.Sequential(nn.Linear(4, 1)), freeze=["weight"]).train()
    with pytest.raises(ConfigError, match="MagnitudePruning goes by the share of the run"):
        build(MagnitudePruning(), epochs=None, max_duration="1h").train()
    with pytest.raises(ConfigError, match="exclude each other"):
        build(MagnitudePruning(), EMA())
    build(MagnitudePruning(every=1), eval_dataset=rows(4), epochs=1).train()
    assert "Pass load_best_at_end=False" in caplog.text
