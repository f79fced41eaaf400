"""optimizer="muon": matrices by Muon and the rest by AdamW, in one optimizer; and optimizers of other packages."""

import copy
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import StopAt, distance, fit, rows, small_trainer, weights
from tiny import bert, gpt, t5
from torch import nn

from omnitrain import ConfigError, HFTrainer, MissingExtraError, Trainer
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.muon import Muon


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def run(kind: Any = Trainer, resume: str | None = None, **options: Any) -> Any:
    options = {"batch_size": 8, "weight_decay": 0.1, "lr_scheduler": "cosine", "log_steps": 1, **options}
    options = {"model": deep(), "data": rows(20), "optimizer": "muon", "learning_rate": 0.05, **options}
    return fit(small_trainer(kind=kind, **options), resume)


def matrices_of(model: nn.Module) -> set[str]:
    optimizer = build_optimizer("muon", model, 1e-3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(weight)] for group in optimizer.param_groups if "ns_steps" in group for weight in group["params"]}


def test_muon_step_equals_torch_optimizers() -> None:
    ours, theirs = deep(), deep()
    matrices = [theirs[0].weight, theirs[2].weight]  # type: ignore[index]
    rest = [parameter for parameter in theirs.parameters() if not any(parameter is matrix for matrix in matrices)]
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    pair = [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options), torch.optim.AdamW(rest, **options)]
    muon = build_optimizer("muon", ours, 0.05, 0.1)
    x, y = rows(8).tensors
    for model, optimizers in ((ours, [muon]), (theirs, pair)):
        for _ in range(3):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert distance(weights(ours), weights(theirs)) <= 1e-15
    again = copy.deepcopy(muon)
    assert isinstance(again, Muon) and len(again.state) == len(muon.state) == 6


def test_muon_skips_embeddings_and_output_layer() -> None:
    assert matrices_of(deep()) == {"0.weight", "2.weight"}
    assert not any("wte" in name or "lm_head" in name for name in matrices_of(gpt()))
    assert matrices_of(bert()) >= {"bert.encoder.layer.0.output.dense.weight", "bert.pooler.dense.weight"}
    assert "classifier.weight" not in matrices_of(bert()) and "shared.weight" not in matrices_of(t5())
    with pytest.raises(ConfigError, match="matrices that are neither embeddings nor the output layer, and Linear has"):
        build_optimizer("muon", nn.Linear(4, 2), 1e-3, 0.0)


@pytest.mark.parametrize("trainer_class", [Trainer, HFTrainer])
def test_muon_resumes_on_every_trainer(trainer_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omnitrain")
    straight = run(trainer_class)
    assert "Muon updates 2 matrices, and AdamW the 4 other parameters: vectors, and 4.weight" in caplog.text
    assert type(straight.optimizer) is Muon and straight.optimizer.param_groups[0]["lr"] == 0.0
    split = run(trainer_class, batch_size=2, gradient_accumulation_steps=4)
    assert distance(weights(split.model), weights(straight.model)) <= 1e-3  # Muon computes in bfloat16
    run(trainer_class, save_dir=tmp_path, callbacks=[StopAt(2)])
    for trainer in (run(trainer_class, "auto", save_dir=tmp_path), run()):
        assert distance(weights(trainer.model), weights(straight.model)) == 0


def test_muon_with_grad_scaler() -> None:
    model, data = deep(), rows(8)
    optimizer = build_optimizer("muon", model, 0.05, 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = weights(model)
    scaler.scale(F.mse_loss(model(data.tensors[0]), data.tensors[1])).backward()
    next(model.parameters()).grad.mul_(float("inf"))  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert distance(weights(model), before) == 0 and scaler.get_scale() == 2.0**9


def test_muon_groups_take_options() -> None:
    groups = [{"match": r"^4\.", "betas": (0.8, 0.9)}, {"match": r"^2\.w", "momentum": 0.9}]
    grouped = run(param_groups=groups, max_steps=1).optimizer
    kwargs = {"momentum": 0.5, "betas": (0.8, 0.9), "fused": False, "adjust_lr_fn": "original"}
    common = build_optimizer("muon", deep(), 0.1, 0.0, kwargs)
    assert [group.get("adjust_lr_fn", group.get("fused")) for group in common.param_groups] == ["original", False]
    for optimizer, expected in ((grouped, [0.9, 0.95, (0.8, 0.9), (0.9, 0.999)]), (common, [0.5, (0.8, 0.9)])):
        assert [group.get("momentum", group.get("betas")) for group in optimizer.param_groups] == expected
    for group, words in (
        ({"match": r"^2\.", "betas": (0.8, 0.9)}, "'betas', which is no option of Muon for these parameters"),
        ({"match": r"^2\.w", "momentum": -1.0}, "Muon rejects it: momentum should be >= 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(param_groups=[group])


@pytest.mark.parametrize(("name", "package", "kind"), [
    ("lion", "lion_pytorch", "Lion"), ("Lion", "timm.optim", "Lion"),
    ("paged_adamw_8bit", "bitsandbytes.optim", "PagedAdamW8bit"), ("adamw_torch_8bit", "torchao.optim", "AdamW8bit"),
])  # fmt: skip
def test_optimizer_name_of_other_package(name: str, package: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in {package.partition(".")[0], package}:
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    optimizer_class = type(kind, (torch.optim.SGD,), {})
    setattr(sys.modules[package], kind, optimizer_class)
    assert type(build_optimizer(name, deep(), 0.25, 0.5)) is optimizer_class


def test_optimizer_names_of_transformers() -> None:
    for name, package in (("lion", "lion_pytorch"), ("adamw_bnb_8bit", "bitsandbytes")):
        with pytest.raises(MissingExtraError, match=f"optimizer='{name}' needs {package}, which is not installed"):
            build_optimizer(name, deep(), 0.1, 0.0)
    for name, kind in (("adamw_torch", "AdamW"), ("adafactor", "Adafactor"), ("NAdam", "NAdam")):
        assert type(build_optimizer(name, deep(), 0.1, 0.0)) is getattr(torch.optim, kind)
    assert build_optimizer("adamw_torch_fused", deep(), 0.1, 0.0).defaults["fused"]
