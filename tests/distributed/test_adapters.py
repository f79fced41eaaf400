"""Adapters of PEFT on several processes: saved in PEFT's format without the base, resumed on any backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapting import adapted
from backends import Jobs, asked_for, bound, gap, launch_all, make_trainer, tensors_of
from forging import content_of
from forking import Found, joined
from marks import thinned
from recipes import StopAt, callback, rows
from safetensors.torch import load_file
from tiny import Tokens, llama
from torch import nn

from omnitrain.checkpoint.tensor_files import fingerprints
from omnitrain.distributed.ranks import Ranks

BACKENDS = ("fsdp", "native", "ddp", "zero2", "zero3", "hf2", "hf_fsdp", "hf_zero3")
MOVES = [("fsdp", "native"), ("zero3", "ddp"), ("native", "fsdp")]


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
    trainer.save_model(f"{folder}/model")
    losses = [trainer.evaluate()["eval_loss"], trainer.metrics["best_valid"]["eval_loss"]] if best else []
    return {"tensors": tensors_of(trainer), "losses": losses}


class Twins(nn.Module):
    """One part that trains, one that a callback changes, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 1)
        self.teacher, self.fixed = (nn.Linear(4, 1).requires_grad_(False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) + self.teacher(x) + self.fixed(x)


def change_teacher(trainer: Any) -> None:
    """Change weights that do not train, without PyTorch counting it."""
    for parameter in trainer.model.teacher.parameters():
        part = getattr(parameter, "ds_tensor", parameter)
        (part.to_local() if hasattr(part, "to_local") else part).data.mul_(0.5)


def fade(backend: str, folder: str) -> dict[str, Any]:
    """Train next to weights that are changed by hand."""
    make_trainer(
        backend, Twins(), rows(16, torch.float32), loss_fn=nn.functional.mse_loss, batch_size=2, max_steps=2,
        save_dir=folder, save_frozen=False, callbacks=[callback(on_step_end=change_teacher)],
    ).train()  # fmt: skip
    return {}


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Found[list[dict[str, Any]]]:
    before, after = Jobs(), Jobs()

    def add(jobs: Jobs, name: str, backend: str, function: Any = adapt, **options: Any) -> None:
        jobs.add(name, backend, function, folder=str(folder / name), **options)

    moves = asked_for(request, "source", "target")
    straight = asked_for(request, "backend", test="test_adapters")
    for backend in sorted(straight | {source for source, _ in moves}):
        add(before, f"straight-{backend}", backend)
        add(before, f"cut-{backend}", backend, cut=4)
    for source, target in sorted({*moves, *zip(straight, straight, strict=True)}):
        add(after, f"{source}-{target}", target, resume=str(folder / f"cut-{source}/last"))
    for backend in sorted(straight):
        add(after, f"another-{backend}", backend, resume=str(folder / f"cut-{backend}/last"), base=9)
    for backend in sorted(asked_for(request, "backend", test="test_best")):
        add(before, f"best-{backend}", backend, best=True)
    for backend in sorted(asked_for(request, "backend", test="test_frozen")):
        add(before, f"fade-{backend}", backend, fade)
    return joined(launch_all(before, folder / "before"), launch_all(after, folder / "after"))


def weights(results: Any, name: str) -> list[dict[str, torch.Tensor]]:
    assert all("error" not in rank for rank in results[name]), results[name]
    return [rank["tensors"] for rank in results[name]]


@pytest.mark.parametrize("backend", thinned(BACKENDS, ["fsdp", "hf2"]))
def test_adapters_resume_exactly_without_the_base(results: Any, folder: Path, backend: str) -> None:
    """And load in PEFT. On another base they do not resume."""
    import peft

    runs = (weights(results, f"{name}-{backend}") for name in (backend, "straight"))
    assert all(gap(resumed, straight) == 0 for resumed, straight in zip(*runs, strict=True))
    run = folder / f"straight-{backend}"
    saved = set(load_file(run / "last" / "model.safetensors"))
    heads = {f"base_model.model.lm_head.{part}.weight" for part in ("original_module", "modules_to_save.default")}
    assert heads < saved and len(saved) == 6 and all("lora_" in name for name in saved - heads)
    model = adapted(llama(0), modules_to_save=["lm_head"])
    base = {name: weight.float() for name, weight in model.named_parameters() if name not in saved}
    assert content_of(run / "last")["frozen"] == fingerprints(base, Ranks())
    for path in (run / "last", run / "model"):
        model = peft.PeftModel.from_pretrained(llama(0).float(), path)
        loaded = {name: weight.data for name, weight in model.named_parameters()}
        assert gap(loaded, weights(results, f"straight-{backend}")[0]) == 0
        assert not (path / "config.json").exists()
    for rank in results[f"another-{backend}"]:
        assert rank.get("error") == "CheckpointError", rank
        assert "differ in this model, the first of them 'base_model.model." in rank["message"]


@pytest.mark.parametrize(("source", "target"), thinned(MOVES, MOVES[:1]))
def test_checkpoint_without_the_base_moves_between_backends(results: Any, source: str, target: str) -> None:
    for tensors in weights(results, f"{source}-{target}"):
        assert gap(tensors, weights(results, f"straight-{source}")[0]) < 1e-5


@pytest.mark.parametrize("backend", thinned(["fsdp", "zero3", "hf2"], ["fsdp"]))
def test_best_adapters_are_loaded_at_the_end(results: Any, backend: str) -> None:
    assert weights(results, f"best-{backend}")
    for last, best in (rank["losses"] for rank in results[f"best-{backend}"]):
        assert last == pytest.approx(best, abs=bound(backend))


@pytest.mark.parametrize("backend", thinned(["fsdp", "zero2", "zero3"], ["fsdp"]))
def test_frozen_weights_changed_by_hand_are_saved(results: Any, folder: Path, backend: str) -> None:
    assert all("error" not in rank for rank in results[f"fade-{backend}"]), results[f"fade-{backend}"]
    checkpoint = folder / f"fade-{backend}" / "last"
    assert set(content_of(checkpoint)["frozen"]) == {"fixed.weight", "fixed.bias"}
    saved = set(load_file(checkpoint / "model.safetensors"))
    assert saved == {"student.weight", "student.bias", "teacher.weight", "teacher.bias"}
