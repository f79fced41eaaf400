"""Checkpoints of several optimizers, which a custom training loop has by name."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forging import content_of, copied, forge_tensors, seal
from marks import make_small
from recipes import fit, rows, same, weights
from resuming import assert_same
from torch import nn

from omnitrain import AccelerateTrainer, CheckpointError, ConfigError, Trainer


def adversarial(base: type[Trainer], attribute: str) -> Any:
    class Adversarial(base):  # type: ignore[misc, valid-type]
        def _setup_training_components(self) -> None:
            super()._setup_training_components()
            parts = {name: getattr(self.model, name).parameters() for name in ("generator", "discriminator")}
            setattr(self, attribute, {name: torch.optim.Adam(part, lr=0.01) for name, part in parts.items()})

        def _train_epoch(self, epoch: int) -> float:
            optimizers = getattr(self, attribute)
            generator, discriminator, total = self.model.generator, self.model.discriminator, 0.0
            for x, _ in self.train_loader:
                fake = generator(torch.randn(len(x), 2))
                real, forged = discriminator(x), discriminator(fake.detach())
                loss = F.softplus(-real).mean() + F.softplus(forged).mean()
                optimizers["discriminator"].zero_grad()
                loss.backward()
                optimizers["discriminator"].step()
                optimizers["generator"].zero_grad()
                F.softplus(-discriminator(fake)).mean().backward()
                optimizers["generator"].step()
                total += loss.item()
            return total / len(self.train_loader)

    return Adversarial


def make(folder: Path | None, epochs: int = 1, base: Any = Trainer, attribute: str = "optimizers") -> Any:
    """Return a trainer of 5 steps an epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(generator=nn.Linear(2, 4), discriminator=nn.Linear(4, 1)))
    options = {"loss_fn": None, "epochs": epochs, "save_dir": folder}
    return make_small(adversarial(base, attribute), model, rows(20, torch.float32), **options)


@pytest.mark.parametrize("base", [Trainer, AccelerateTrainer])
def test_optimizers_of_a_custom_loop_are_saved_and_resumed(base: Any, tmp_path: Path) -> None:
    straight = fit(make(tmp_path / "straight", 2, base))
    assert [path.name for path in straight.store.checkpoints()] == ["checkpoint-5", "checkpoint-10"]
    make(tmp_path / "resumed", 1, base).train()
    resumed = fit(make(tmp_path / "resumed", 2, base), resume_from="auto")
    states = [[each.state_dict() for each in trainer.optimizers.values()] for trainer in (resumed, straight)]
    assert_same([weights(resumed.model), states[0]], [weights(straight.model), states[1]])
    assert resumed.optimizer is resumed.optimizers["generator"] and type(resumed.optimizer) is torch.optim.Adam
    names = sorted(path.name for path in (resumed.store.root / "checkpoint-10" / "optimizer").iterdir())
    assert names == ["discriminator.safetensors", "state.safetensors"]
    assert len(resumed.resolved_config()["optimizer_groups"]) == 2


def test_optimizers_in_other_attributes_prevent_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, attribute="own").train()
    assert "in no checkpoint: own['generator'], own['discriminator']. Put them into `self.optimizers`" in caplog.text
    with pytest.raises(CheckpointError, match=r"start them without it. Put them into `self.optimizers`"):
        make(tmp_path, attribute="own").train(resume_from="auto")


def test_optimizers_must_be_a_dict_of_the_saved_names(tmp_path: Path) -> None:
    make(tmp_path).train()
    trainer = make(tmp_path, 2)
    first, second = trainer.optimizers.values()
    for value in ({}, None, {"a": 1}, {"a/b": first}, {"state": first}):
        with pytest.raises(ConfigError, match="`optimizers"):
            trainer.optimizers = value
    trainer.optimizers = {"g": first, "d": second}
    with pytest.raises(CheckpointError, match=r"with 'generator', 'discriminator' .* the trainer has 'g', 'd' there"):
        trainer.train(resume_from="auto")


FILE = "optimizer/discriminator.safetensors"
FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda content: content["optimizers"].update(discriminator=5),
    "no groups": lambda content: content["optimizers"]["discriminator"].pop("groups"),
    "rate that is text": lambda content: content["optimizers"]["discriminator"]["groups"][0].update(lr="fast"),
    "no file": lambda content: content["files"].pop(FILE),
}


def test_optimizers_with_forged_state_are_rejected(tmp_path: Path) -> None:
    """Resuming from "auto" takes the checkpoint before it."""
    make(tmp_path / "finished", 2).train()
    for name in (*FORGERIES, "other shape"):
        run = copied(tmp_path / "finished", tmp_path / "run")
        checkpoint = run / "checkpoint-10"
        if name in FORGERIES:
            content = content_of(checkpoint)
            FORGERIES[name](content)
            seal(checkpoint, content)
        else:
            forge_tensors(checkpoint, FILE, lambda tensors: tensors.update({next(iter(tensors)): torch.zeros(3, 5)}))
        trainer = make(run, 3)
        before = weights(trainer.model)
        with pytest.raises(CheckpointError, match="checkpoint-10"):
            trainer.train(resume_from="last")
        assert same(weights(trainer.model), before), name
        assert fit(make(run, 3), resume_from="auto").progress.step == 15, name
