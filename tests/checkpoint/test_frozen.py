"""A checkpoint leaves out what does not train, and knows it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapting import TRAINERS, adapted, agree, content_of, make, run, weights_of
from recipes import StopAt, rows
from resuming import Net
from safetensors.torch import load_file
from tiny import Tokens, llama
from torch import nn

from omnitrain import Callback, CheckpointError, ConfigError, Trainer
from omnitrain.checkpoint import frozen as subject
from omnitrain.distributed import Ranks


def names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def headed(seed: int = 0) -> nn.Module:
    """Return a small regression model whose body, with batch norm and dropout, does not train."""
    model = Net()
    if seed:
        torch.manual_seed(seed)
        nn.init.normal_(model.body[0].weight)  # type: ignore[arg-type]
    model.body.requires_grad_(False)
    return model


def train(model: nn.Module, folder: Path | None, *callbacks: Callback, resume: Any = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"epochs": 2, "batch_size": 4, "save_frozen": False}
    if "optimizer" not in options:
        defaults["learning_rate"] = 0.05
    trainer = Trainer(
        model, rows(16), loss_fn=F.mse_loss, save_dir=folder, device="cpu", progress_bar=False, callbacks=callbacks,
        **{**defaults, **options},
    )  # fmt: skip
    trainer.train(resume_from=resume)
    return trainer


# --- adapters


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_checkpoint_of_adapters_leaves_the_base_out_and_is_resumed_to_the_bit(kind: str, tmp_path: Path) -> None:
    straight = run(kind, adapted(lora_dropout=0.1), tmp_path / "straight")
    trained = {name for name, one in straight.get_model().named_parameters() if one.requires_grad}
    assert names(tmp_path / "straight" / "last") == trained
    run(kind, adapted(lora_dropout=0.1), tmp_path / "cut", callbacks=[StopAt(3)])
    resumed = make(kind, adapted(lora_dropout=0.1), tmp_path / "cut")
    resumed.train(resume_from="auto")
    assert agree(weights_of(resumed), weights_of(straight)) and resumed.metrics == straight.metrics
    whole = run(kind, adapted(lora_dropout=0.1), tmp_path / "whole", save_frozen=True)
    assert names(tmp_path / "whole" / "last") == set(weights_of(whole))
    assert agree(weights_of(whole), weights_of(straight))
    assert size(tmp_path / "straight" / "last") < size(tmp_path / "whole" / "last")


@pytest.mark.parametrize("kind", TRAINERS)
def test_another_base_is_refused_and_named_unless_it_is_allowed(kind: str, tmp_path: Path) -> None:
    run(kind, adapted(), tmp_path / "run", epochs=1)

    def other() -> Any:
        base: Any = llama()
        with torch.no_grad():
            base.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-9
        return adapted(base)

    trainer = make(kind, other(), tmp_path / "run")
    before = {name: one.clone() for name, one in weights_of(trainer).items()}
    with pytest.raises(CheckpointError, match=r"1 of the 12 are others in this model, the first of them '.*up_proj.w"):
        trainer.train(resume_from="auto")
    assert agree(weights_of(trainer), before)
    trainer.train(resume_from="auto", allow_change={"frozen_weights"})
    again = make(kind, other(), tmp_path / "run", epochs=3)
    again.train(resume_from="auto")  # its checkpoints are of the new base
    assert again.progress.step == 6


@pytest.mark.parametrize("kind", TRAINERS)
def test_fingerprints_are_taken_once_a_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    original = subject.fingerprints
    monkeypatch.setattr(subject, "fingerprints", lambda *parts: taken.append(len(parts[0])) or original(*parts))
    run(kind, adapted(), tmp_path / "run", save_steps=1)
    assert taken == [12]
    make(kind, adapted(), tmp_path / "run", epochs=3, save_steps=1).train(resume_from="auto")
    assert taken == [12, 12]
    run(kind, adapted())
    assert taken == [12, 12]  # nothing is saved


def test_a_checkpoint_that_was_saved_whole_is_resumed_and_its_base_stays_in_those_after_it(tmp_path: Path) -> None:
    run("native", adapted(), tmp_path / "same", save_frozen=True, epochs=1)
    run("native", adapted(llama(9)), tmp_path / "other", save_frozen=True, epochs=1)
    for folder in ("same", "other"):  # the model is built on one base, and the second checkpoint brings another
        make("native", adapted(), tmp_path / folder).train(resume_from="auto")
    assert len(names(tmp_path / "same" / "last")) == 4
    assert len(names(tmp_path / "other" / "last")) > 12
    make("native", adapted(), tmp_path / "other", epochs=3).train(resume_from="auto")


def test_a_run_that_saves_all_goes_on_from_one_that_did_not(tmp_path: Path) -> None:
    straight = run("native", adapted())
    run("native", adapted(), tmp_path, callbacks=[StopAt(3)])
    resumed = make("native", adapted(), tmp_path, save_frozen=True)
    resumed.train(resume_from="auto")
    assert agree(weights_of(resumed), weights_of(straight)) and names(tmp_path / "last") == set(weights_of(resumed))


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("saves", [True, False])
def test_the_best_adapters_are_in_the_model_at_the_end(kind: str, saves: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run" if saves else None
    trainer = run(kind, adapted(), folder, eval_dataset=Tokens(6), learning_rate=1.0, epochs=3, load_best_at_end=True)
    best = trainer.metrics["best_valid"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best["eval_loss"], abs=1e-12)


# --- any model


def test_what_does_not_train_is_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    trainer = train(headed(), tmp_path / "lean")
    kept = {"head.weight", "head.bias", "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
    assert names(tmp_path / "lean" / "last") == kept
    assert set(content_of(tmp_path / "lean" / "last")["frozen"]) == set(trainer.get_model().state_dict()) - kept
    for value in (True, None):
        train(headed(), tmp_path / str(value), save_frozen=value)
        assert names(tmp_path / str(value) / "last") == set(trainer.get_model().state_dict())
    train(Net(), tmp_path / "all")
    assert content_of(tmp_path / "all" / "last")["frozen"] == {}


def test_any_model_is_resumed_to_the_bit_without_what_does_not_train(tmp_path: Path) -> None:
    straight = train(headed(), tmp_path / "straight").get_model().state_dict()
    train(headed(), tmp_path / "cut", StopAt(5))
    resumed = train(headed(), tmp_path / "cut", resume="auto").get_model().state_dict()
    assert agree(resumed, straight)
    with pytest.raises(CheckpointError, match=r"the first of them 'body.0.weight'. Build the model on the weights"):
        train(headed(3), tmp_path / "cut", resume="auto", epochs=3)
    trainer = Trainer(headed(3), rows(16), loss_fn=F.mse_loss, device="cpu")
    with pytest.raises(CheckpointError, match=r"body\.0\.weight"):
        trainer.load_checkpoint(tmp_path / "cut" / "last")


def test_weights_that_begin_to_train_are_saved_from_then_on_also_when_they_have_stopped(tmp_path: Path) -> None:
    class Thaw(Callback):
        def on_step_start(self, trainer: Any) -> None:
            trainer.model.body.requires_grad_(trainer.progress.step in (2, 3))

    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.05)

    def build(folder: Path, *more: Callback, **options: Any) -> Any:
        model = headed()
        found = train(model, folder, Thaw(), *more, optimizer=optimizer(model.parameters()), save_steps=1, **options)
        return found.get_model().state_dict()

    straight = build(tmp_path / "straight")
    weights = {name for name in straight if name.startswith("body") and name.endswith(("weight", "bias"))}
    sizes = [len(names(one) & weights) for one in sorted((tmp_path / "straight").glob("checkpoint-*"))]
    assert sizes == [0, 0, 4, 4, 4, 4, 4, 4]
    build(tmp_path / "cut", StopAt(6))
    assert agree(build(tmp_path / "cut", resume="auto"), straight)


def test_weights_that_are_changed_by_hand_are_saved(tmp_path: Path) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.student, self.teacher = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
            self.fixed = nn.Linear(4, 1).requires_grad_(False)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.student(x) + 0.1 * self.teacher(x) + self.fixed(x)

    class Follow(Callback):
        def on_step_end(self, trainer: Any) -> None:
            model = trainer.model
            for one, other in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                one.data.mul_(0.9).add_(other.data, alpha=0.1)

    straight = train(Twins(), tmp_path / "straight", Follow()).get_model().state_dict()
    assert set(content_of(tmp_path / "straight" / "last")["frozen"]) == {"fixed.weight", "fixed.bias"}
    train(Twins(), tmp_path / "cut", Follow(), StopAt(5))
    assert agree(train(Twins(), tmp_path / "cut", Follow(), resume="auto").get_model().state_dict(), straight)


def test_a_model_with_a_loading_of_its_own_is_given_all_of_its_weights(tmp_path: Path) -> None:
    class Own(Net):
        def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
            return super().load_state_dict(state_dict)

    def model() -> nn.Module:
        made = Own()
        made.body.requires_grad_(False)
        return made

    straight = train(model(), tmp_path / "straight").get_model().state_dict()
    train(model(), tmp_path / "cut", StopAt(5))
    assert agree(train(model(), tmp_path / "cut", resume="auto").get_model().state_dict(), straight)


def test_weights_of_16_bits_are_known_again_in_32() -> None:
    def half(dtype: torch.dtype) -> nn.Module:
        model = headed().to(torch.float32)
        for parameter in [one for one in model.parameters() if not one.requires_grad]:
            parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
        return model

    found = [subject.fingerprints(dict(half(dtype).named_parameters()), Ranks())
             for dtype in (torch.bfloat16, torch.float32)]  # fmt: skip
    assert found[0] == found[1]


def test_of_a_model_without_its_frozen_weights_there_is_no_config_that_would_open_it(tmp_path: Path) -> None:
    model = llama()
    model.model.requires_grad_(False)
    run("native", model, tmp_path / "lean", save_frozen=False)
    run("native", model, tmp_path / "whole")
    assert not (tmp_path / "lean" / "last" / "config.json").exists()
    assert (tmp_path / "whole" / "last" / "config.json").exists()


def test_save_frozen_has_a_meaning_with_checkpoints_only() -> None:
    with pytest.raises(ConfigError, match=r"`save_frozen=False` needs a place for checkpoints"):
        train(headed(), None)
    with pytest.raises(ConfigError, match=r"`save_frozen` must be"):
        train(headed(), None, save_frozen="no")


class Quantised(nn.Module):
    """A linear layer of whole numbers, whose scale is in its state as that of bitsandbytes' is: by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = torch.tensor(0.25, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).T

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}weight.absmax", self.scale)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_quantised_weights_are_left_out_with_what_belongs_to_them_and_compared(tmp_path: Path) -> None:
    def model(scale: float = 0.25) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(Quantised(), nn.Linear(4, 1, dtype=torch.float64))
        made[0].scale.fill_(scale)  # type: ignore[operator]
        return made

    straight = train(model(), tmp_path / "straight").get_model().state_dict()
    assert names(tmp_path / "straight" / "last") == {"1.weight", "1.bias"}
    train(model(), tmp_path / "cut", StopAt(5))
    with pytest.raises(CheckpointError, match=r"the first of them '0\.weight\.absmax'"):
        train(model(0.5), tmp_path / "cut", resume="auto")
    assert agree(train(model(), tmp_path / "cut", resume="auto").get_model().state_dict(), straight)
