"""Checkpoints without the weights that do not train (`save_frozen`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapting import adapted, agree, make, run, weights_of
from forging import content_of
from marks import make_small
from recipes import StopAt, callback, fit, rows
from resuming import Net
from safetensors.torch import load_file
from tiny import Tokens, llama
from torch import nn

from omnitrain import Callback, CheckpointError, ConfigError, Trainer
from omnitrain.checkpoint import model_files
from omnitrain.distributed.ranks import Ranks


def names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def headed(seed: int = 0, cls: type[Net] = Net) -> Net:
    """Return a small regression model whose body, with batch norm and dropout, does not train."""
    model = cls()
    if seed:
        torch.manual_seed(seed)
        nn.init.normal_(model.body[0].weight)  # type: ignore[arg-type]
    model.body.requires_grad_(False)
    return model


def train(model: nn.Module, folder: Path | None, *callbacks: Callback, resume: Any = None, **options: Any) -> Trainer:
    rate = {} if "optimizer" in options else {"learning_rate": 0.05}
    options = {"epochs": 2, "save_frozen": False, **rate, **options}
    return fit(make_small("native", model, rows(16), save_dir=folder, callbacks=callbacks, **options), resume)


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.get_model().state_dict()


def check_resumes(build: Callable[[], nn.Module], folder: Path, *callbacks: Callback) -> None:
    """Check that a run that stops at step 5 and resumes equals one that does not stop, to the bit."""
    straight = train(build(), folder / "straight", *callbacks)
    train(build(), folder / "cut", *callbacks, StopAt(5))
    assert agree(state(train(build(), folder / "cut", *callbacks, resume="auto")), state(straight))


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_frozen_base_is_left_out_and_resume_is_exact(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Its fingerprints are computed once a run."""
    counts: list[int] = []
    original = model_files.fingerprints
    monkeypatch.setattr(model_files, "fingerprints", lambda *parts: counts.append(len(parts[0])) or original(*parts))
    straight = run(kind, adapted(lora_dropout=0.1))
    assert counts == []  # nothing is saved
    run(kind, adapted(lora_dropout=0.1), tmp_path, callbacks=[StopAt(3)])
    assert counts == [12]
    resumed = fit(make(kind, adapted(lora_dropout=0.1), tmp_path), resume_from="auto")
    assert counts == [12, 12]
    assert agree(weights_of(resumed), weights_of(straight)) and resumed.metrics == straight.metrics
    assert names(tmp_path / "last") == {name for name, weight in weights_of(resumed).items() if weight.requires_grad}


def test_frozen_base_must_match_unless_allowed(tmp_path: Path) -> None:
    run("native", adapted(), tmp_path, epochs=1)

    def other(epochs: int = 2) -> Any:
        base: Any = llama()
        base.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-9
        return make("native", adapted(base), tmp_path, epochs=epochs)

    trainer = other()
    before = {name: value.clone() for name, value in weights_of(trainer).items()}
    with pytest.raises(CheckpointError, match=r"1 of the 12 differ in this model, the first of them '.*up_proj.w"):
        trainer.train(resume_from="auto")
    assert agree(weights_of(trainer), before)
    trainer.train(resume_from="auto", allow_change={"frozen_weights"})
    assert fit(other(3), resume_from="auto").progress.step == 6  # its checkpoints are of the new base


def test_frozen_base_of_a_full_checkpoint_is_kept_if_loaded(tmp_path: Path) -> None:
    """Later checkpoints leave it out if the model was built with it, and keep it if only the checkpoint had it."""
    for name, base in (("same", llama()), ("other", llama(9))):
        run("native", adapted(base), tmp_path / name, save_frozen=True, epochs=1)
        make("native", adapted(), tmp_path / name).train(resume_from="auto")
    assert len(names(tmp_path / "same" / "last")) == 4 and len(names(tmp_path / "other" / "last")) > 12
    trainer = make("native", adapted())
    trainer.load_checkpoint(tmp_path / "other" / "last")
    assert torch.equal(weights_of(trainer)["base_model.model.lm_head.weight"], llama(9).lm_head.weight)


@pytest.mark.parametrize(("kind", "saves"), [("native", False), ("hf", True)])
def test_frozen_base_and_load_best_at_end(kind: str, saves: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run" if saves else None
    trainer = run(kind, adapted(), folder, eval_dataset=Tokens(6), learning_rate=1.0, epochs=3, load_best_at_end=True)
    best = trainer.metrics["best_valid"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best["eval_loss"], abs=1e-12)


def test_save_frozen_false_resumes_exactly(tmp_path: Path) -> None:
    """Also with custom code for loading; a weight that a callback changes is saved."""

    class CustomLoading(Net):
        def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
            return super().load_state_dict(state_dict)

    check_resumes(lambda: headed(cls=CustomLoading), tmp_path / "custom")
    decay = callback(on_step_end=lambda trainer: trainer.model.body[0].weight.data.mul_(0.9))
    check_resumes(headed, tmp_path / "decay", decay)
    frozen = content_of(tmp_path / "decay" / "straight" / "last")["frozen"]
    assert frozen.keys() == {"body.0.bias", "body.1.weight", "body.1.bias"}
    check_resumes(headed, tmp_path)
    with pytest.raises(CheckpointError, match=r"the first of them 'body.0.weight'. Build the model on the weights"):
        train(headed(3), tmp_path / "cut", resume="auto", epochs=3)
    with pytest.raises(CheckpointError, match=r"body\.0\.weight"):
        make_small("native", headed(3), rows(16)).load_checkpoint(tmp_path / "cut" / "last")
    straight = state(train(headed(), None, save_frozen=None))
    train(headed(), tmp_path / "on", StopAt(3))
    resumed = train(headed(), tmp_path / "on", resume="auto", save_frozen=True)
    assert agree(state(resumed), straight) and names(tmp_path / "on" / "last") == set(straight)


def test_frozen_weights_that_thaw_are_saved_from_then_on(tmp_path: Path) -> None:
    def thaw(trainer: Any) -> None:
        trainer.model.body.requires_grad_(trainer.progress.step in (2, 3))

    def run_thawing(folder: Path, *callbacks: Callback, **options: Any) -> dict[str, torch.Tensor]:
        model, thaws = headed(), callback(on_step_start=thaw)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return state(train(model, folder, thaws, *callbacks, optimizer=optimizer, save_steps=1, **options))

    straight = run_thawing(tmp_path / "straight")
    weights = {name for name in straight if name.startswith("body") and name.endswith(("weight", "bias"))}
    counts = [len(names(folder) & weights) for folder in sorted((tmp_path / "straight").glob("checkpoint-*"))]
    assert counts == [0, 0, 4, 4, 4, 4, 4, 4]
    run_thawing(tmp_path / "cut", StopAt(6))
    assert agree(run_thawing(tmp_path / "cut", resume="auto"), straight)


def test_frozen_fingerprints_are_equal_in_16_and_32_bits() -> None:
    def fingerprints(dtype: torch.dtype) -> Any:
        model = headed().to(torch.float32)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
        return model_files.fingerprints(dict(model.named_parameters()), Ranks())

    assert fingerprints(torch.bfloat16) == fingerprints(torch.float32)


def test_save_frozen_false_leaves_out_frozen_parameters(tmp_path: Path) -> None:
    trainer = train(headed(), tmp_path / "lean")
    trained = {"head.weight", "head.bias", "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
    assert names(tmp_path / "lean" / "last") == trained
    assert set(content_of(tmp_path / "lean" / "last")["frozen"]) == set(state(trainer)) - trained
    for value in (True, None):
        train(headed(), tmp_path / str(value), save_frozen=value)
        assert names(tmp_path / str(value) / "last") == set(state(trainer))
    train(Net(), tmp_path / "all")
    assert content_of(tmp_path / "all" / "last")["frozen"] == {}
    model = llama()
    model.model.requires_grad_(False)
    for value in (False, None):  # without its frozen weights, transformers could not open the model
        run("native", model, tmp_path / f"llama {value}", save_frozen=value)
        assert (tmp_path / f"llama {value}" / "last" / "config.json").exists() is (value is None)
    for value, message in ((False, "`save_frozen=False` needs a place"), ("no", "`save_frozen` must be")):
        with pytest.raises(ConfigError, match=message):
            train(headed(), None, save_frozen=value)


class Quantised(nn.Module):
    """A linear layer of integers whose scale gets into the state by custom code, as that of bitsandbytes does."""

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


def test_frozen_quantised_weights_include_their_scale(tmp_path: Path) -> None:
    def model(scale: float = 0.25) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(Quantised(), nn.Linear(4, 1, dtype=torch.float64))
        layers[0].scale.fill_(scale)  # type: ignore[operator]
        return layers

    train(model(), tmp_path / "other", StopAt(5))
    with pytest.raises(CheckpointError, match=r"the first of them '0\.weight\.absmax'"):
        train(model(0.5), tmp_path / "other", resume="auto")
    check_resumes(model, tmp_path)
    assert names(tmp_path / "straight" / "last") == {"1.weight", "1.bias"}
