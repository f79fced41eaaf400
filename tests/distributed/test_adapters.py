"""Adapters of PEFT on several processes: saved in PEFT's own form, without the base, and resumed on any backend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from adapting import adapted, content_of  # noqa: E402
from backends import Job, asked_for, bound, gap, launch_all, make_trainer  # noqa: E402
from forking import Found, joined  # noqa: E402
from marks import thinned  # noqa: E402
from recipes import StopAt, rows  # noqa: E402
from tiny import Tokens, llama  # noqa: E402

from omnitrain import Callback  # noqa: E402
from omnitrain.checkpoint.tensors import fingerprints, whole  # noqa: E402
from omnitrain.distributed import Ranks  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_adapters"
BACKENDS = ("native", "ddp", "fsdp", "zero1", "zero2", "zero3", "hf", "hf2", "hf_fsdp", "hf_zero2", "hf_zero3")
QUICK = ("ddp", "fsdp", "zero3")
WAYS = (("fsdp", "native"), ("zero3", "ddp"), ("native", "fsdp"), ("ddp", "zero3"))


def adapt(
    backend: str, folder: str, resume: str = "", cut: int = 0, base: int = 0, steps: int = 6, best: bool = False
) -> dict[str, Any]:
    """Train adapters, and modules that are trained whole; save them."""
    data = (Tokens(16), Tokens(6)) if best else (Tokens(16),)
    trainer = make_trainer(
        backend, adapted(llama(base), modules_to_save=["lm_head"]).float(), *data, batch_size=2,
        global_batch_size=4, max_steps=steps, learning_rate=0.5 if best else 0.05, save_steps=4, save_dir=folder,
        callbacks=[StopAt(cut)] if cut else [], load_best_at_end=best, **({"eval_steps": 2} if best else {}),
    )  # fmt: skip
    trainer.train(resume_from=resume or None)
    tensors = {f"weights/{name}": whole(one) for name, one in sorted(trainer.backend.model_tensors().items())}
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
    """Train beside weights that are changed by hand."""
    trainer = make_trainer(
        backend, Twins(), rows(16, torch.float32), loss_fn=nn.functional.mse_loss, batch_size=2, max_steps=2,
        save_dir=folder, save_frozen=False, callbacks=[Fade()],
    )  # fmt: skip
    trainer.train()
    return {}


# --- what came of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Found[list[dict[str, Any]]]:
    def job(name: str, backend: str, **options: Any) -> Job:
        return Job(name, backend, f"{HERE}:adapt", {"folder": str(folder / name), **options})

    backends = asked_for(request, "backend", test="test_adapters")
    ways = asked_for(request, "source", "target")
    backends |= {one for way in ways for one in way}
    before, after = [], []
    for one in sorted(backends):
        before += [job(f"straight-{one}", one), job(f"cut-{one}", one, cut=4)]
        after.append(job(f"{one}-{one}", one, resume=str(folder / f"cut-{one}/last")))
        after.append(job(f"another-{one}", one, resume=str(folder / f"cut-{one}/last"), base=9))
    for one in sorted(asked_for(request, "backend", test="test_the_best")):
        before.append(job(f"best-{one}", one, best=True))
    for one in sorted(asked_for(request, "backend", test="test_weights")):
        before.append(Job(f"fade-{one}", one, f"{HERE}:fade", {"folder": str(folder / f"fade-{one}")}))
    for source, target in sorted(ways):
        after.append(job(f"{source}-{target}", target, resume=str(folder / f"cut-{source}/last")))
    return joined(launch_all(before, folder / "before"), launch_all(after, folder / "after"))


def weights(results: Any, name: str) -> list[dict[str, torch.Tensor]]:
    assert all("error" not in one for one in results[name]), results[name]
    return [one["tensors"] for one in results[name]]


def names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("backend", thinned(BACKENDS, QUICK))
def test_adapters_are_resumed_to_the_bit_without_the_base(results: Any, folder: Path, backend: str) -> None:
    for found, expected in zip(
        weights(results, f"{backend}-{backend}"), weights(results, f"straight-{backend}"), strict=True
    ):
        assert gap(found, expected) == 0
    held = names(folder / f"straight-{backend}" / "last")
    heads = {f"base_model.model.lm_head.{one}.weight" for one in ("original_module", "modules_to_save.default")}
    assert heads < held and len(held) == 6 and all("lora_" in name for name in held - heads)
    whole_base = {name: one.float() for name, one in adapted(llama(0), modules_to_save=["lm_head"]).named_parameters()}
    expected = {name: one for name, one in whole_base.items() if name not in held}
    assert content_of(folder / f"straight-{backend}" / "last")["frozen"] == fingerprints(expected, Ranks())


@pytest.mark.parametrize("backend", thinned(BACKENDS, QUICK))
def test_adapters_in_parts_are_in_a_form_that_peft_opens(results: Any, folder: Path, backend: str) -> None:
    import peft

    expected = weights(results, f"straight-{backend}")[0]
    for place in ("last", "model"):
        base = llama(0).float()
        again = peft.PeftModel.from_pretrained(base, folder / f"straight-{backend}" / place)
        assert gap({f"weights/{name}": one.data for name, one in again.named_parameters()}, expected) == 0
        assert not (folder / f"straight-{backend}" / place / "config.json").exists()


@pytest.mark.parametrize("backend", thinned(BACKENDS, QUICK))
def test_adapters_on_another_base_are_refused(results: Any, backend: str) -> None:
    for result in results[f"another-{backend}"]:
        assert result.get("error") == "CheckpointError", result
        assert "others in this model, the first of them 'base_model.model." in result["message"]


@pytest.mark.parametrize(("source", "target"), thinned(WAYS, WAYS[::3]))
def test_a_checkpoint_without_the_base_moves_between_backends(results: Any, source: str, target: str) -> None:
    for found in weights(results, f"{source}-{target}"):
        assert gap(found, weights(results, f"straight-{source}")[0]) < 1e-5


@pytest.mark.parametrize("backend", thinned(BACKENDS, ("ddp", "fsdp", "zero3")))
def test_the_best_adapters_are_loaded_at_the_end(results: Any, backend: str) -> None:
    for result in results[f"best-{backend}"]:
        assert "error" not in result, result
        now, best = result["losses"]
        assert now == pytest.approx(best, abs=bound(backend))


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero2", "zero3"])
def test_weights_that_are_changed_by_hand_are_saved_on_several_processes(
    results: Any, folder: Path, backend: str
) -> None:
    assert all("error" not in one for one in results[f"fade-{backend}"]), results[f"fade-{backend}"]
    checkpoint = folder / f"fade-{backend}" / "last"
    assert set(content_of(checkpoint)["frozen"]) == {"fixed.weight", "fixed.bias"}
    assert names(checkpoint) == {"student.weight", "student.bias", "teacher.weight", "teacher.bias"}
