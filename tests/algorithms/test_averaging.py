"""Averages of the weights: what is evaluated, saved, kept as the best, and what the run ends with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import StopAt, distance, rows, same, t16, weights
from torch import nn

from omnitrain import EMA, Algorithm, Callback, CheckpointError, ConfigError, Trainer
from omnitrain.checkpoint.state import load_tensors


class Watch(Callback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append(weights(trainer.model))


def build(*algorithms: Algorithm, model: nn.Module | None = None, **options: Any) -> Trainer:
    options = {"epochs": 2, "batch_size": 4, "learning_rate": 0.1, "eval_steps": 2, "loss_fn": F.mse_loss, **options}
    callbacks = options.pop("callbacks", [])
    return Trainer(
        t16() if model is None else model, rows(16), rows(9), device="cpu", progress_bar=False, callbacks=callbacks,
        algorithms=algorithms, **options,
    )  # fmt: skip


def averaged(seen: list[list[torch.Tensor]], decay: float) -> list[torch.Tensor]:
    found = weights(t16())
    for one in seen:
        for average, weight in zip(found, one, strict=True):
            average.mul_(decay).add_(weight, alpha=1 - decay)
    return found


def loss_of(values: list[torch.Tensor]) -> float:
    model, (x, y) = t16(), rows(9).tensors
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
        return F.mse_loss(model(x), y).item()


@pytest.mark.parametrize("saves", [True, False], ids=["save_dir", "host"])
def test_the_average_is_evaluated_kept_as_the_best_and_loaded_at_the_end(saves: bool, tmp_path: Path) -> None:
    watch = Watch()
    trainer = build(EMA(0.7), callbacks=[watch], save_dir=tmp_path if saves else None)
    plain = Watch()
    build(callbacks=[plain]).train()
    metrics = trainer.train()
    assert all(same(one, other) for one, other in zip(watch.seen, plain.seen, strict=True))  # training is as without
    expected = [loss_of(averaged(watch.seen[:step], 0.7)) for step in (2, 4, 6, 8)]
    found = [row["eval_loss"] for row in metrics["valid"]]
    assert found == pytest.approx(expected, abs=1e-12)
    best = averaged(watch.seen[: metrics["best_step"]], 0.7)
    assert distance(weights(trainer.model), best) <= 1e-12
    assert trainer.evaluate()["eval_loss"] == min(found)
    if saves:
        held = load_tensors(tmp_path / "best" / "model.safetensors")
        assert distance(list(held.values()), [held_of(best)[name] for name in held]) <= 1e-12
        step = metrics["best_step"]
        trained = load_tensors(tmp_path / "best" / "trained.safetensors")
        assert all(torch.equal(one, held_of(watch.seen[step - 1])[name]) for name, one in trained.items())


def held_of(values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip((name for name, _ in t16().named_parameters()), values, strict=True))


def test_a_run_without_evaluations_ends_with_the_last_average(caplog: Any, tmp_path: Path) -> None:
    watch = Watch()
    trainer = Trainer(
        t16(), rows(16), loss_fn=F.mse_loss, epochs=1, batch_size=4, learning_rate=0.1, device="cpu",
        progress_bar=False, callbacks=[watch], algorithms=[EMA(0.7)],
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "omnitrain"):
        trainer.train()
    assert distance(weights(trainer.model), averaged(watch.seen, 0.7)) <= 1e-12
    assert "Algorithms in the order they run: EMA." in caplog.text and "averaged weights now" in caplog.text
    trainer.save_model(tmp_path / "model")
    held = load_tensors(tmp_path / "model" / "model.safetensors")
    assert same([held[name] for name, _ in t16().named_parameters()], weights(trainer.model))


def test_an_evaluation_that_fails_leaves_the_weights_in_training() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = t16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training and not torch.equal(self.body[0].weight, watch.seen[-1][0] if watch.seen else start):
                raise RuntimeError("no average")
            return self.body(x)

    watch, start = Watch(), weights(t16())[0]
    trainer = build(EMA(0.7), model=Fails(), callbacks=[watch])
    with pytest.raises(RuntimeError, match="no average"):
        trainer.train()
    assert len(watch.seen) == 2 and same(weights(trainer.model), watch.seen[-1])


def test_a_model_that_is_saved_in_mid_run_is_the_one_that_is_evaluated(tmp_path: Path) -> None:
    class Save(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                trainer.save_model(tmp_path / "model")
                self.loss = trainer.evaluate()["eval_loss"]

    watch, save = Watch(), Save()
    build(EMA(0.7), callbacks=[watch, save]).train()
    expected, held = averaged(watch.seen[:3], 0.7), load_tensors(tmp_path / "model" / "model.safetensors")
    assert distance([held[name] for name, _ in t16().named_parameters()], expected) <= 1e-12
    assert save.loss == pytest.approx(loss_of(expected), abs=1e-12)


@pytest.mark.parametrize("later", [True, False], ids=["added", "left out"])
def test_a_run_may_go_on_with_or_without_averages_if_that_is_allowed(later: bool, tmp_path: Path) -> None:
    first, second = ([], [EMA(0.7)]) if later else ([EMA(0.7)], [])
    build(*first, save_dir=tmp_path, callbacks=[StopAt(3)]).train()
    with pytest.raises(CheckpointError, match="algorithms"):
        build(*second, save_dir=tmp_path).train(resume_from="auto")
    resumed, straight = Watch(), Watch()
    build(*second, save_dir=tmp_path, callbacks=[resumed]).train(resume_from="auto", allow_change={"algorithms"})
    build(callbacks=[straight]).train()
    assert all(same(one, other) for one, other in zip(resumed.seen, straight.seen[3:], strict=True))


def test_a_checkpoint_whose_weights_in_training_are_of_another_model_is_refused_whole(tmp_path: Path) -> None:
    from omnitrain.checkpoint import contents

    build(EMA(0.7), save_dir=tmp_path, callbacks=[StopAt(3)]).train()
    trainer = build(EMA(0.7), save_dir=tmp_path)
    before = weights(trainer.model)
    found = trainer._checkpointer.find("last")
    assert found is not None
    wrong = {name: torch.zeros(3) for name in load_tensors(found[0] / contents.TRAINED)}
    from omnitrain.checkpoint.tensors import save_tensors

    save_tensors(wrong, found[0] / contents.TRAINED)
    with pytest.raises(CheckpointError, match="shape"):
        trainer._checkpointer.restore(*found)
    assert same(weights(trainer.model), before)


def test_weights_of_16_bits_are_refused_before_the_first_step() -> None:
    trainer = build(EMA(), model=t16(dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"EMA.*bfloat16.*autocast='bf16'"):
        trainer.train()
    assert trainer.progress.step == 0


@pytest.mark.parametrize("decay", [0, 1, True, "0.9", float("nan")])
def test_a_decay_that_is_none_is_refused(decay: Any) -> None:
    with pytest.raises(ConfigError, match="decay"):
        EMA(decay)


# --- places and conflicts


def test_what_excludes_each_other_is_refused_by_the_constructor() -> None:
    class First(Algorithm):
        conflicts = ("Second",)

    class Second(Algorithm):
        pass

    for pair in ((First(), Second()), (Second(), First())):
        with pytest.raises(ConfigError, match="exclude each other"):
            build(*pair)
    build(Second(), Second())
    with pytest.raises(ConfigError, match=r"EMA and EMA, and only one"):
        build(EMA(), EMA())


def test_a_method_for_a_place_that_is_none_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(ConfigError, match=r"after_updates would never be called.*'?after_update'?"):
        type("Odd", (Algorithm,), {"after_updates": lambda self, trainer: None})


def test_places_are_called_in_their_order_and_only_where_they_are_overridden() -> None:
    seen: list[str] = []

    def note(name: str) -> Any:
        def method(self: Any, trainer: Any, value: Any = None) -> Any:
            seen.append(f"{self.name}.{name}")
            return value

        return method

    places = ("set_up", "begin_epoch", "transform_batch", "transform_output", "transform_loss", "before_update",
              "after_update", "transform_metrics", "end_epoch")  # fmt: skip
    kind = type("Noted", (Algorithm,), {place: note(place) for place in places})
    pair = [kind(), kind()]
    pair[0].name, pair[1].name = "a", "b"
    build(*pair, epochs=1, batch_size=16, eval_steps=None).train()
    inward = ["set_up", "begin_epoch", "transform_batch"]
    expected = [f"{name}.{place}" for place in inward for name in "ab"]
    expected += [f"{name}.{place}" for place in ("transform_output", "transform_loss") for name in "ba"]
    expected += [f"{name}.{place}" for place in ("before_update", "after_update", "end_epoch") for name in "ab"]
    assert seen == [*expected, "b.transform_metrics", "a.transform_metrics"]


def test_gradients_that_are_changed_before_the_update_are_clipped_and_the_norm_is_that_before() -> None:
    class Grow(Algorithm):
        def before_update(self, trainer: Any) -> None:
            for one in trainer.model.parameters():
                one.grad.mul_(100)

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any) -> None:
            self.norm = torch.linalg.vector_norm(torch.cat([one.grad.flatten() for one in trainer.model.parameters()]))

        def on_log(self, trainer: Any, logs: Any) -> None:
            self.logged = logs["grad_norm"]

    looks = [Look(), Look()]
    for look, algorithms in zip(looks, ([], [Grow()]), strict=True):
        build(*algorithms, callbacks=[look], max_steps=1, epochs=None, log_steps=1, max_grad_norm=5.0).train()
    assert looks[0].logged == looks[1].logged and looks[1].norm.item() == pytest.approx(5.0, rel=1e-5)
    assert looks[0].norm.item() == pytest.approx(looks[0].logged) and looks[0].logged < 5
