from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forging import content_of, forge_tensors, seal
from recipes import rows, same, weights
from torch import nn

from omnitrain import AccelerateTrainer, Callback, CheckpointError, ConfigError, Trainer


class Keeps(Callback):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.discriminator(x)


def adversarial(base: type[Trainer], held: bool = True) -> Any:
    class Adversarial(base):  # type: ignore[misc, valid-type]
        def _setup_training_components(self) -> None:
            super()._setup_training_components()
            parts = {name: getattr(self.model, name).parameters() for name in ("generator", "discriminator")}
            made = {name: torch.optim.Adam(parameters, lr=0.01) for name, parameters in parts.items()}
            if held:
                self.optimizers = made
            else:
                self.own = made

        def _train_epoch(self, epoch: int) -> float:
            made = self.optimizers if held else self.own
            generator, discriminator, total = self.model.generator, self.model.discriminator, 0.0
            for x, _ in self.train_loader:
                fake = generator(torch.randn(len(x), 2))
                real, forged = discriminator(x), discriminator(fake.detach())
                loss = F.softplus(-real).mean() + F.softplus(forged).mean()
                made["discriminator"].zero_grad()
                loss.backward()
                made["discriminator"].step()
                made["generator"].zero_grad()
                F.softplus(-discriminator(fake)).mean().backward()
                made["generator"].step()
                total += loss.item()
            return total / len(self.train_loader)

    return Adversarial


@pytest.mark.parametrize("base", [Trainer, AccelerateTrainer])
def test_optimizers_of_a_loop_of_ones_own_are_counted_and_go_on_after_a_resume(base: Any, tmp_path: Path) -> None:
    def make(name: str, epochs: int, **options: Any) -> Any:
        placed = {"device": "cpu"} if base is Trainer else {}
        return adversarial(base)(
            Pair(), rows(20, torch.float32), batch_size=4, epochs=epochs, save_dir=tmp_path / name, progress_bar=False,
            **options, **placed,
        )  # fmt: skip

    straight = make("straight", 4)
    straight.train()
    assert straight.progress.step == 20
    assert [path.name for path in straight.store.checkpoints()] == [f"checkpoint-{n}" for n in (5, 10, 15, 20)]
    make("resumed", 2).train()
    resumed = make("resumed", 4)
    resumed.train(resume_from="auto")
    assert same(weights(resumed.model), weights(straight.model))
    held = [state["exp_avg"] for one in resumed.optimizers.values() for state in one.state.values()]
    assert same(held, [s["exp_avg"] for one in straight.optimizers.values() for s in one.state.values()])
    assert resumed.optimizer is resumed.optimizers["generator"] and type(resumed.optimizer) is torch.optim.Adam
    names = sorted(path.name for path in (resumed.store.root / "checkpoint-20" / "optimizer").iterdir())
    assert names == ["discriminator.safetensors", "state.safetensors"]
    assert len(resumed.resolved_config()["optimizer_groups"]) == 2


def test_optimizers_that_no_checkpoint_holds_are_said_and_their_resume_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(held: bool) -> Any:
        return adversarial(Trainer, held)(
            Pair(), rows(8, torch.float32), epochs=1, save_dir=tmp_path, device="cpu", progress_bar=False
        )

    make(held=False).train()
    assert "in no checkpoint: own['generator'], own['discriminator']. Put them into `self.optimizers`" in caplog.text
    with pytest.raises(CheckpointError, match=r"start them anew. Put them into `self.optimizers`"):
        make(held=False).train(resume_from="auto")


def test_optimizers_under_other_names_are_refused(tmp_path: Path) -> None:
    def make(epochs: int) -> Any:
        return adversarial(Trainer)(
            Pair(), rows(8, torch.float32), epochs=epochs, save_dir=tmp_path, device="cpu", progress_bar=False
        )

    make(1).train()
    trainer = make(2)
    trainer.optimizers = {"g": trainer.optimizers["generator"], "d": trainer.optimizers["discriminator"]}
    with pytest.raises(
        CheckpointError, match=r"saved with 'generator', 'discriminator' .* the trainer has 'g', 'd' there"
    ):
        trainer.train(resume_from="auto")


@pytest.mark.parametrize("wrong", [{}, None, {"a": 1}, {"a/b": "sgd"}, {"state": "sgd"}])
def test_what_are_no_optimizers_by_name_is_refused(wrong: Any) -> None:
    trainer = adversarial(Trainer)(Pair(), rows(8, torch.float32), device="cpu", progress_bar=False)
    given = {key: trainer.optimizer if one == "sgd" else one for key, one in wrong.items()} if wrong else wrong
    with pytest.raises(ConfigError, match="`optimizers"):
        trainer.optimizers = given


FORGERIES: dict[str, Any] = {
    "no object": lambda one: 5,
    "no groups": lambda one: {"rest": {}, "shared": {}},
    "a rate that is text": lambda one: {**one, "groups": [{**one["groups"][0], "lr": "fast"}]},
    "a group of other parameters": lambda one: {**one, "groups": [{**one["groups"][0], "params": ["generator.bias"]}]},
}


@pytest.mark.parametrize("how", [*FORGERIES, "a moment of another shape", "no file", "a turn that is text"])
def test_forged_state_of_one_of_several_optimizers_is_refused_and_auto_takes_the_one_before(
    how: str, tmp_path: Path
) -> None:
    def make(epochs: int) -> Any:
        return adversarial(Trainer)(
            Pair(), rows(20, torch.float32), batch_size=4, epochs=epochs, save_dir=tmp_path, progress_bar=False,
            device="cpu", callbacks=[Keeps()],
        )  # fmt: skip

    make(2).train()
    newest = tmp_path / "checkpoint-10"
    content, file = content_of(newest), "optimizer/discriminator.safetensors"
    if how in FORGERIES:
        content["optimizers"]["discriminator"] = FORGERIES[how](content["optimizers"]["discriminator"])
    elif how == "no file":
        del content["files"][file]
    elif how == "a turn that is text":
        content["callbacks"][0]["turn"] = "first"
    else:
        forge_tensors(newest, file, lambda tensors: tensors.update({next(iter(tensors)): torch.zeros(3, 5)}))
        content = content_of(newest)
    seal(newest, content)
    trainer = make(3)
    before = weights(trainer.model)
    with pytest.raises(CheckpointError, match="checkpoint-10"):
        trainer.train(resume_from="last")
    assert same(weights(trainer.model), before)
    trainer = make(3)
    trainer.train(resume_from="auto")
    assert trainer.progress.step == 15
