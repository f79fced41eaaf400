"""Checkpoints of several optimizers, which a custom training loop has by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forging import content_of, forge_tensors, seal
from recipes import rows, same, weights
from torch import nn

from omnitrain import AccelerateTrainer, Callback, CheckpointError, ConfigError, Trainer


class Stateful(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.discriminator(x)


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


def make(
    folder: Path | None, epochs: int = 1, base: Any = Trainer, attribute: str = "optimizers", **options: Any
) -> Any:
    """Return a trainer of 5 steps an epoch."""
    options |= {"device": "cpu"} if base is Trainer else {}
    return adversarial(base, attribute)(
        Pair(), rows(20, torch.float32), batch_size=4, epochs=epochs, save_dir=folder, progress_bar=False, **options
    )


@pytest.mark.parametrize("base", [Trainer, AccelerateTrainer])
def test_optimizers_of_a_custom_loop_are_saved_and_resumed(base: Any, tmp_path: Path) -> None:
    straight = make(tmp_path / "straight", 4, base)
    straight.train()
    assert straight.progress.step == 20
    assert [path.name for path in straight.store.checkpoints()] == [f"checkpoint-{n}" for n in (5, 10, 15, 20)]
    make(tmp_path / "resumed", 2, base).train()
    resumed = make(tmp_path / "resumed", 4, base)
    resumed.train(resume_from="auto")
    assert same(weights(resumed.model), weights(straight.model))
    moments, expected = (
        [state["exp_avg"] for optimizer in trainer.optimizers.values() for state in optimizer.state.values()]
        for trainer in (resumed, straight)
    )
    assert same(moments, expected)
    assert resumed.optimizer is resumed.optimizers["generator"] and type(resumed.optimizer) is torch.optim.Adam
    names = sorted(path.name for path in (resumed.store.root / "checkpoint-20" / "optimizer").iterdir())
    assert names == ["discriminator.safetensors", "state.safetensors"]
    assert len(resumed.resolved_config()["optimizer_groups"]) == 2


def test_optimizers_in_other_attributes_prevent_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, attribute="own").train()
    assert "in no checkpoint: own['generator'], own['discriminator']. Put them into `self.optimizers`" in caplog.text
    with pytest.raises(CheckpointError, match=r"start them anew. Put them into `self.optimizers`"):
        make(tmp_path, attribute="own").train(resume_from="auto")


def test_optimizers_of_other_names_are_rejected(tmp_path: Path) -> None:
    make(tmp_path).train()
    trainer = make(tmp_path, 2)
    trainer.optimizers = {"g": trainer.optimizers["generator"], "d": trainer.optimizers["discriminator"]}
    message = r"saved with 'generator', 'discriminator' .* the trainer has 'g', 'd' there"
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from="auto")


@pytest.mark.parametrize("value", [{}, None, {"a": 1}, {"a/b": "sgd"}, {"state": "sgd"}])
def test_optimizers_must_be_a_dict_of_optimizers_by_name(value: Any) -> None:
    trainer = make(None)
    if value:
        value = {key: trainer.optimizer if item == "sgd" else item for key, item in value.items()}
    with pytest.raises(ConfigError, match="`optimizers"):
        trainer.optimizers = value


FILE = "optimizer/discriminator.safetensors"


def forge_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        content = content_of(folder)
        content["optimizers"]["discriminator"] = change(content["optimizers"]["discriminator"])
        seal(folder, content)

    return forge


def forge_group(**options: Any) -> Callable[[Path], None]:
    return forge_state(lambda state: {**state, "groups": [{**state["groups"][0], **options}]})


def remove_file(folder: Path) -> None:
    content = content_of(folder)
    del content["files"][FILE]
    seal(folder, content)


def forge_turn(folder: Path) -> None:
    content = content_of(folder)
    content["callbacks"][0]["turn"] = "first"
    seal(folder, content)


def forge_moment(folder: Path) -> None:
    forge_tensors(folder, FILE, lambda tensors: tensors.update({next(iter(tensors)): torch.zeros(3, 5)}))


FORGERIES = {
    "no object": forge_state(lambda state: 5),
    "no groups": forge_state(lambda state: {"rest": {}, "shared": {}}),
    "rate that is text": forge_group(lr="fast"),
    "other parameters": forge_group(params=["generator.bias"]),
    "other shape": forge_moment,
    "no file": remove_file,
    "turn that is text": forge_turn,
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_optimizers_with_forged_state_are_rejected(forge: Callable[[Path], None], tmp_path: Path) -> None:
    """Resuming from "auto" takes the checkpoint before it."""
    make(tmp_path, 2, callbacks=[Stateful()]).train()
    forge(tmp_path / "checkpoint-10")
    trainer = make(tmp_path, 3, callbacks=[Stateful()])
    before = weights(trainer.model)
    with pytest.raises(CheckpointError, match="checkpoint-10"):
        trainer.train(resume_from="last")
    assert same(weights(trainer.model), before)
    trainer = make(tmp_path, 3, callbacks=[Stateful()])
    trainer.train(resume_from="auto")
    assert trainer.progress.step == 15
