"""Adapters of PEFT on several processes: saved in PEFT's format without the base, resumed on any backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapting import adapted, content_of
from backends import Job, asked_for, bound, gap, launch_all, make_trainer, tensors_of
from forking import Found, joined
from marks import thinned
from recipes import StopAt, rows
from safetensors.torch import load_file
from tiny import Tokens, llama
from torch import nn

from omnitrain import Callback
from omnitrain.checkpoint.tensor_files import fingerprints
from omnitrain.distributed.ranks import Ranks

HERE = "test_adapters"
BACKENDS = ("native", "ddp", "fsdp", "zero1", "zero2", "zero3", "hf", "hf2", "hf_fsdp", "hf_zero2", "hf_zero3")
WAYS = [("fsdp", "native"), ("zero3", "ddp"), ("native", "fsdp"), ("ddp", "zero3")]


def adapt(
    backend: str, folder: str, resume: str = "", cut: int = 0, base: int = 0, steps: int = 6, best: bool = False
) -> dict[str, Any]:
    """Train adapters, and modules that are trained in full; save them."""
    data = (Tokens(16), Tokens(6)) if best else (Tokens(16),)
    trainer = make_trainer(
        backend, adapted(llama(base), modules_to_save=["lm_head"]).float(), *data, batch_size=2,
        global_batch_size=4, max_steps=steps, learning_rate=0.5 if best else 0.05, save_steps=4, save_dir=folder,
        callbacks=[StopAt(cut)] if cut else [], load_best_at_end=best, **({"eval_steps": 2} if best else {}),
    )  # fmt: skip
    trainer.train(resume_from=resume or None)
    tensors = {f"weights/{name}": one for name, one in tensors_of(trainer).items()}
    trainer.save_model(f"{folder}/model")
    losses = [trainer.evaluate()["eval_loss"], trainer.metrics["best_valid"]["eval_loss"]] if best else []
    return {"tensors": tensors, "losses": losses}


class Twins(nn.Module):
    """One part that trains, one that a callback changes, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher, self.fixed = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)
        self.teacher.requires_grad_(False)
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) + self.teacher(x) + self.fixed(x)


class Fade(Callback):
    """Changes weights that do not train, without PyTorch counting it."""

    def on_step_end(self, trainer: Any) -> None:
        for one in trainer.model.teacher.parameters():
            part = getattr(one, "ds_tensor", one)
            (part.to_local() if hasattr(part, "to_local") else part).data.mul_(0.5)


def fade(backend: str, folder: str) -> dict[str, Any]:
    """Train next to weights that are changed by hand."""
    trainer = make_trainer(
        backend, Twins(), rows(16, torch.float32), loss_fn=nn.functional.mse_loss, batch_size=2, max_steps=2,
        save_dir=folder, save_frozen=False, callbacks=[Fade()],
    )  # fmt: skip
    trainer.train()
    return {}


# --- what came of it


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Found[list[dict[str, Any]]]:
    def job(name: str, backend: str, function: str = "adapt", **options: Any) -> Job:
        return Job(name, backend, f"{HERE}:{function}", {"folder": str(folder / name), **options})

    ways = asked_for(request, "source", "target")
    straight = asked_for(request, "backend", test="test_adapters")
    before, after = [], []
    for backend in sorted(straight | {source for source, _ in ways}):
        before += [job(f"straight-{backend}", backend), job(f"cut-{backend}", backend, cut=4)]
    for backend in sorted(straight):
        last = str(folder / f"cut-{backend}/last")
        after.append(job(f"{backend}-{backend}", backend, resume=last))
        after.append(job(f"another-{backend}", backend, resume=last, base=9))
    for source, target in sorted(ways):
        after.append(job(f"{source}-{target}", target, resume=str(folder / f"cut-{source}/last")))
    before += [job(f"best-{one}", one, best=True) for one in sorted(asked_for(request, "backend", test="test_best"))]
    before += [job(f"fade-{one}", one, "fade") for one in sorted(asked_for(request, "backend", test="test_frozen"))]
    return joined(launch_all(before, folder / "before"), launch_all(after, folder / "after"))


def weights(results: Any, name: str) -> list[dict[str, torch.Tensor]]:
    assert all("error" not in rank for rank in results[name]), results[name]
    return [rank["tensors"] for rank in results[name]]


def names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["fsdp"]))
def test_adapters_resume_exactly_without_the_base(results: Any, folder: Path, backend: str) -> None:
    """On another base they do not."""
    runs = (weights(results, f"{name}-{backend}") for name in (backend, "straight"))
    assert all(gap(resumed, straight) == 0 for resumed, straight in zip(*runs, strict=True))
    saved = names(folder / f"straight-{backend}" / "last")
    heads = {f"base_model.model.lm_head.{part}.weight" for part in ("original_module", "modules_to_save.default")}
    assert heads < saved and len(saved) == 6 and all("lora_" in name for name in saved - heads)
    model = adapted(llama(0), modules_to_save=["lm_head"])
    base = {name: one.float() for name, one in model.named_parameters() if name not in saved}
    assert content_of(folder / f"straight-{backend}" / "last")["frozen"] == fingerprints(base, Ranks())
    for rank in results[f"another-{backend}"]:
        assert rank.get("error") == "CheckpointError", rank
        assert "differ in this model, the first of them 'base_model.model." in rank["message"]


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["fsdp"]))
def test_adapters_in_parts_load_in_peft(results: Any, folder: Path, backend: str) -> None:
    import peft

    expected = weights(results, f"straight-{backend}")[0]
    for place in ("last", "model"):
        path = folder / f"straight-{backend}" / place
        model = peft.PeftModel.from_pretrained(llama(0).float(), path)
        assert gap({f"weights/{name}": one.data for name, one in model.named_parameters()}, expected) == 0
        assert not (path / "config.json").exists()


@pytest.mark.parametrize(("source", "target"), thinned(WAYS, [("fsdp", "native")]))
def test_checkpoint_without_the_base_moves_between_backends(results: Any, source: str, target: str) -> None:
    for tensors in weights(results, f"{source}-{target}"):
        assert gap(tensors, weights(results, f"straight-{source}")[0]) < 1e-5


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["fsdp"]))
def test_best_adapters_are_loaded_at_the_end(results: Any, backend: str) -> None:
    for rank in results[f"best-{backend}"]:
        assert "error" not in rank, rank
        last, best = rank["losses"]
        assert last == pytest.approx(best, abs=bound(backend))


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "zero2", "zero3"], ["fsdp"]))
def test_frozen_weights_changed_by_hand_are_saved(results: Any, folder: Path, backend: str) -> None:
    assert all("error" not in rank for rank in results[f"fade-{backend}"]), results[f"fade-{backend}"]
    checkpoint = folder / f"fade-{backend}" / "last"
    assert set(content_of(checkpoint)["frozen"]) == {"fixed.weight", "fixed.bias"}
    assert names(checkpoint) == {"student.weight", "student.bias", "teacher.weight", "teacher.bias"}
