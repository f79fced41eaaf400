"""Optimizers with a closure, and with `train()` and `eval()`, which change the weights as schedule-free ones do."""

import re
from pathlib import Path
from typing import Any

import pytest
import recipes
import torch
import torch.nn.functional as F
from recipes import Holding, Sentences, StopAt, Tagger, distance, fit, rows, same, t16, trainer_on_cpu, weights
from safetensors.torch import load_file
from torch import nn

from omnitrain import SAM, AccelerateTrainer, Algorithm, ConfigError, HFTrainer, NonFiniteError, Trainer


def build(model: nn.Module, optimizer: Any = torch.optim.LBFGS, data: Any = None, **options: Any) -> Trainer:
    common: dict[str, Any] = {"max_grad_norm": None, "max_steps": 3, "learning_rate": 0.1, "shuffle": False}
    common |= {} if data else {"loss_fn": F.mse_loss}
    return trainer_on_cpu(Trainer, model, data or rows(8), optimizer=optimizer, **{**common, **options})


class Counting(Holding):
    def __call__(self, batch: Any) -> tuple[torch.Tensor, int]:
        return super().__call__(batch)[0], 2 * len(batch[1])


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
    model, data = (Tagger(), Sentences(8)) if kind == "labels" else (t16(), rows(8))
    options: dict[str, Any] = {"unit": Counting(model)} if kind == "targets" else {}
    options |= {"batch_size": 3, "gradient_accumulation_steps": 3, "max_steps": 1, "grad_reduction": reduction}
    trainer = fit(build(model, Probe, data, **options))
    (up, _), (down, _), (_, square) = trainer.optimizer.values
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
    for options, message in (
        ({"max_grad_norm": 1.0}, "`max_grad_norm=1.0` would clip.* Pass max_grad_norm=None"),
        ({"microbatch_size": "auto"}, "`microbatch_size='auto'` could not begin"),
        ({"on_nonfinite": "skip"}, "`on_nonfinite='skip'` decides on a step before"),
        ({"algorithms": [SAM()]}, r"`algorithms=\[SAM\]` moves the weights"),
    ):
        with pytest.raises(ConfigError, match=rf"`optimizer` \(LBFGS\) takes loss and .*{message}"):
            build(t16(), **options).train()
    custom = type("Own", (HFTrainer,), {"training_step": lambda self, *args: HFTrainer.training_step(self, *args)})
    for parts in ({"optimizer": torch.optim.LBFGS}, {"algorithms": [SAM()]}):
        trainer = custom(t16(), None, rows(8), loss_fn=F.mse_loss, max_grad_norm=None, max_steps=1, **parts)
        with pytest.raises(ConfigError, match=re.escape("Own.training_step")):
            trainer.train()


def test_algorithms_change_gradients_in_each_pass() -> None:
    class Masking(Algorithm):
        def before_update(self, trainer: Any) -> None:
            trainer.model[0].weight.grad[:8] = 0

    model, passes = t16(), list[int]()
    model.register_forward_hook(lambda *_: passes.append(1))
    trainer = fit(build(model, batch_size=4, gradient_accumulation_steps=2, max_steps=1, algorithms=[Masking()]))
    (state,) = trainer.optimizer.state.values()
    assert len(passes) == 2 * state["func_evals"]  # of two micro-batches, and no pass that nobody requests
    is_same = (weights(model)[0] == weights(t16())[0]).all(1)
    assert is_same[:8].all() and not is_same[8:].all()


class InPlace(nn.Module):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.inner, self.copies = t16(), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner((x.clone() if self.copies else x).mul_(0.5))


@pytest.mark.parametrize(("trainer_class", "kind"), [(Trainer, "SAM"), (HFTrainer, "SAM"), (Trainer, "LBFGS")])
def test_each_pass_gets_an_unchanged_batch(trainer_class: Any, kind: str) -> None:
    ends = []
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "max_steps": 2, "learning_rate": 0.1, "max_grad_norm": None}
    for copies in (True, False):
        options |= {"algorithms": [SAM()]} if kind == "SAM" else {"optimizer": torch.optim.LBFGS}
        trainer = fit(trainer_on_cpu(trainer_class, InPlace(copies), rows(8), batch_size=4, **options))
        ends.append(weights(trainer.model))
    assert distance(*ends) == 0


def reference(steps: int) -> tuple[dict[str, torch.Tensor], float]:
    model, (x, y) = recipes.KeyedModel().double(), rows(20).tensors
    optimizer = recipes.ScheduleFree(model.parameters())
    optimizer.train()
    for step in range(steps):
        batch = slice(step * 5 % 20, step * 5 % 20 + 5)
        optimizer.zero_grad()
        F.mse_loss(model.body(x[batch]), y[batch]).backward()
        optimizer.step()
    optimizer.eval()
    return model.state_dict(), F.mse_loss(model.body(x), y).item()


DOUBLES = [{"x": x, "labels": y} for x, y in rows(20)]


def schedule_free(kind: Any, save_dir: Path | None = None, **options: Any) -> Any:
    options = {
        "batch_size": 5, "epochs": 2, "shuffle": False, "max_grad_norm": None, "optimizer": recipes.ScheduleFree,
        "learning_rate": 0.05, "eval_dataset": DOUBLES, "load_best_at_end": False, **options,
    }  # fmt: skip
    return trainer_on_cpu(kind, recipes.KeyedModel().double(), DOUBLES, save_dir=save_dir, **options)


def test_optimizer_modes_follow_evaluations_saves_and_a_resume(trainer_class: Any, tmp_path: Path) -> None:
    """What is evaluated, saved and left in the model are the weights of `eval()`; training has those of `train()`.

    These are the same to the bit with more evaluations, and with a resume.
    """
    straight = fit(schedule_free(trainer_class, eval_dataset=None, load_best_at_end=None))
    schedule_free(trainer_class, tmp_path, eval_steps=1, save_steps=3, callbacks=[StopAt(3)]).train()
    trainer = fit(schedule_free(trainer_class, tmp_path, eval_steps=1, save_steps=3), resume_from="auto")
    for row in trainer.metrics["valid"]:
        assert row["eval_loss"] == pytest.approx(reference(row["step"])[1], rel=1e-10)
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    torch.testing.assert_close(saved, dict(reference(3)[0]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(trainer.model.state_dict(), reference(8)[0], rtol=1e-10, atol=1e-12)
    assert not any(group["train_mode"] for group in trainer.optimizer.param_groups)
    assert trainer.evaluate()["eval_loss"] == trainer.metrics["valid"][-1]["eval_loss"]
    assert same(weights(straight.model), weights(trainer.model))


def test_optimizer_modes_survive_the_best_and_a_longer_run(trainer_class: Any) -> None:
    straight = fit(schedule_free(trainer_class, epochs=3))
    longer = fit(schedule_free(trainer_class, load_best_at_end=True))
    assert longer.evaluate()["eval_loss"] == min(row["eval_loss"] for row in longer.metrics["valid"])
    assert not any(group["train_mode"] for group in longer.optimizer.param_groups)
    longer.train(more=1)
    assert longer.metrics["valid"] == straight.metrics["valid"]


def test_optimizer_modes_are_an_error_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("omnitrain.backends.accelerators.check_launched", bool)  # it fails before that matters
    schedule_free(AccelerateTrainer)  # accelerate notes that there is one process
    with pytest.raises(ConfigError, match=r"ScheduleFree.*has train\(\) and eval\(\), which change the weights"):
        schedule_free(AccelerateTrainer, deepspeed_config={"zero_optimization": {"stage": 2}}).train()
