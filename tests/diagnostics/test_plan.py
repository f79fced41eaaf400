"""Plans of runs, compared with the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import rows, t16, trainer_on_cpu
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, SequentialLR
from torch.utils.data import IterableDataset

from omnitrain import Callback, ConfigError, Trainer
from omnitrain.diagnostics.plan import RunPlan


class Counted(Callback):
    """Counts evaluations and saves, and lists the rates before each step."""

    def __init__(self) -> None:
        self.evaluations = self.saves = 0
        self.rates: list[float] = []

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        self.evaluations += 1

    def on_save_end(self, trainer: Any) -> None:
        self.saves += 1

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.rates.append(float(trainer.optimizer.param_groups[0]["lr"]))


def planned(kind: Any = Trainer, **options: Any) -> tuple[RunPlan, Any, Counted]:
    """Return the plan of a run, its trainer after the run, and what was counted."""
    counted = Counted()
    options = {"loss_fn": nn.MSELoss(), "batch_size": 8, "epochs": 3, "learning_rate": 1e-2, **options}
    trainer = trainer_on_cpu(kind, t16(), rows(60), eval_dataset=rows(20), callbacks=[counted], **options)
    plan = trainer.plan()
    trainer.train()
    return plan, trainer, counted


def test_plan_matches_the_run(trainer_class: Any, tmp_path: Path) -> None:
    """Steps, samples, evaluations, saves, rates, optimizer bytes and bytes on the disk are those of the run."""
    plan, trainer, counted = planned(
        trainer_class, save_dir=tmp_path, lr_scheduler="cosine", warmup_steps=4, save_steps=5, eval_steps=6,
        save_total_limit=2, keep_best=0, gradient_accumulation_steps=2, load_best_at_end=False,
    )  # fmt: skip
    progress = trainer.progress
    assert (plan.length["steps"], plan.length["samples"]) == (progress.step, progress.samples) == (12, 180)
    assert plan.counts == {"evaluations": counted.evaluations, "saves": counted.saves}
    assert [rate for _, rate in plan.rates] == pytest.approx(counted.rates)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    assert plan.memory["optimizer"] == sum(tensor.nbytes for tensor in state)
    assert plan.memory["weights"] == plan.memory["gradients"] == sum(p.nbytes for p in trainer.model.parameters())
    folders = [folder for folder in tmp_path.glob("checkpoint-*") if folder.is_dir() and not folder.is_symlink()]
    sizes = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in folders]
    assert plan.disk["checkpoint"] == pytest.approx(max(sizes), rel=0.3)
    assert len(folders) <= plan.disk["kept"] and sum(sizes) < plan.disk["total"] and plan.ok


def test_plan_counts_bytes_of_a_large_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 1)).double()
    options = {"loss_fn": nn.MSELoss(), "max_steps": 1, "save_dir": tmp_path, "device": "cpu", "progress_bar": False}
    trainer = Trainer(model, rows(8), **options)
    plan = trainer.plan()
    trainer.train()
    (folder,) = tmp_path.glob("checkpoint-*")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert plan.disk["checkpoint"] == pytest.approx(size, rel=0.02)


class Processor:
    """Stands for a tokenizer, whose files are in each checkpoint."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("x" * 300_000)

    def pad(self, samples: Any, **options: Any) -> Any:
        return torch.utils.data.default_collate(samples)


def test_plan_counts_tokenizers_and_bests_between_saves(tmp_path: Path) -> None:
    """Evaluations get better from one to the next, and are not where checkpoints are saved."""
    plan, *_ = planned(save_dir=tmp_path, save_steps=4, eval_steps=6, processing_class=Processor(), keep_best=1)
    folders = [folder for folder in tmp_path.glob("checkpoint-*") if folder.is_dir() and not folder.is_symlink()]
    sizes = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in folders]
    assert plan.disk["checkpoint"] == pytest.approx(max(sizes), rel=0.05)
    assert plan.counts["saves"] < len(folders) <= plan.disk["kept"] and " and new bests between them, " in str(plan)


@pytest.mark.parametrize(("evaluate", "save"), [("2ba after 1ep", ["1ep", "5ba"]), (["3ba", "1ep after 1ep"], "5ba")])
def test_plan_counts_intervals_of_several_rules(evaluate: Any, save: Any, tmp_path: Path) -> None:
    options = {"keep_best": 0, "load_best_at_end": False}
    plan, _, counted = planned(save_dir=tmp_path, eval_steps=evaluate, save_steps=save, **options)
    assert plan.counts == {"evaluations": counted.evaluations, "saves": counted.saves}


def test_plan_of_a_functional_interval_is_unknown(tmp_path: Path) -> None:
    plan, *_ = planned(save_dir=tmp_path, save_steps=lambda progress: progress.step == 2)
    assert "saves" not in plan.counts and "unknown" in str(plan)


def test_plan_counts_bytes_of_reduced_checkpoints(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 400), nn.Linear(400, 1)).double()
    options = {"loss_fn": nn.MSELoss(), "max_steps": 4, "save_steps": 1, "save_only_model": "all_but_last"}
    trainer = trainer_on_cpu(Trainer, model, rows(8), save_dir=tmp_path, **options)
    plan = trainer.plan()
    trainer.train()
    sizes = sorted(
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in tmp_path.glob("checkpoint-*")
        if not folder.is_symlink()
    )
    assert plan.disk["checkpoint"] == pytest.approx(sizes[-1], rel=0.05)
    assert plan.disk["total"] == pytest.approx(sum(sizes) + sizes[-1] - sizes[0], rel=0.05)


def test_plan_of_one_step_measures_all_its_passes() -> None:
    calls = list[int]()
    model = t16()
    model.register_forward_hook(lambda *_: calls.append(1))
    trainer = trainer_on_cpu(
        Trainer, model, rows(16), loss_fn=nn.MSELoss(), batch_size=4, gradient_accumulation_steps=4
    )
    assert {"data", "passes"} <= trainer.plan().seconds.keys()
    assert len(calls) == 5  # a micro-batch to begin with, then the whole step


def test_plan_of_a_custom_loop_with_a_fixed_batch() -> None:
    class Custom(Trainer):
        def _train_epoch(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    options = {"loss_fn": nn.MSELoss(), "batch_size": 4, "global_batch_size": 8}
    assert trainer_on_cpu(Custom, t16(), rows(16), **options).plan().length["samples_per_step"] == 8


@pytest.mark.parametrize("schedule", ["one cycle", "sequential", "callable", "wsd", "epochs"])
def test_plan_shows_rates_of_any_schedule(schedule: str) -> None:
    def one_cycle(optimizer: Any) -> Any:
        return OneCycleLR(optimizer, 0.1, total_steps=30)

    def sequential(optimizer: Any) -> Any:
        parts: list[LRScheduler] = [CosineAnnealingLR(optimizer, 10), CosineAnnealingLR(optimizer, 20)]
        return SequentialLR(optimizer, parts, milestones=[10])

    options: dict[str, dict[str, Any]] = {
        "one cycle": {"lr_scheduler": one_cycle},
        "sequential": {"lr_scheduler": sequential},
        "callable": {"lr_scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 24)},
        "wsd": {"lr_scheduler": "wsd", "lr_scheduler_kwargs": {"decay": "0.3dur"}, "warmup_steps": 0.1},
        "epochs": {"lr_scheduler": "cosine", "scheduler_interval": "epoch"},
    }
    plan, _, counted = planned(load_best_at_end=False, **options[schedule])
    assert [rate for _, rate in plan.rates] == pytest.approx(counted.rates)
    assert schedule == "epochs" or "█" in str(plan)


def test_plan_counts_steps_of_every_limit() -> None:
    for options, steps in (
        ({"epochs": 2.5}, 20), ({"max_steps": 7, "epochs": None}, 7), ({"max_duration": "96sp", "epochs": None}, 13),
    ):  # fmt: skip
        plan, trainer, counted = planned(load_best_at_end=False, **options)
        assert plan.length["steps"] == trainer.progress.step == steps, options
        assert plan.counts["evaluations"] == counted.evaluations, options


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        x, y = rows(20).tensors
        while True:
            yield from zip(x, y, strict=True)


def test_plan_of_a_stream_counts_by_measured_steps() -> None:
    trainer = Trainer(t16(), Endless(), loss_fn=nn.MSELoss(), max_duration="2h", device="cpu", progress_bar=False)
    plan = trainer.plan()
    assert plan.length["samples_per_step"] == 8 and plan.length["epochs"] is None
    assert plan.seconds["total"] == pytest.approx(7200, rel=0.01) and plan.end is not None
    iterator = iter(trainer.train_loader)
    assert torch.equal(next(iterator)[0], rows(20).tensors[0][:8])


def deep(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    ).double()


def test_plan_counts_activations_alike_with_fake_tensors() -> None:
    """What backward passes keep: the inputs of the layers, and the outputs of activations."""
    trainer = Trainer(deep(), rows(32), loss_fn=nn.MSELoss(), batch_size=16, device="cpu", progress_bar=False)
    real, fake = trainer.plan(), trainer.plan(device="1MB", ranks=8)
    expected = 16 * 8 * (4 + 64 + 64 + 1 + 1)
    assert real.memory["activations"] == pytest.approx(expected, abs=16 * 8)
    assert fake.memory["activations"] == pytest.approx(real.memory["activations"], abs=16 * 8)
    assert fake.length["steps"] == 3 and "passes" not in fake.seconds and fake.end is None
    assert fake.memory["capacity"] == 10**6 and fake.memory["sharded"] < fake.memory["total"]


def test_plan_warns_of_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(deep(), rows(32), loss_fn=nn.MSELoss(), device="cpu", save_dir=tmp_path, progress_bar=False)
    plan = trainer.plan(device="50KB")
    assert not plan.ok and plan.warnings[0].startswith("A step needs 0.2 MB, and a device has 0.1 MB.")
    usage = type("Usage", (), {"free": 10**5})()
    monkeypatch.setattr("omnitrain.diagnostics.plan.shutil.disk_usage", lambda path: usage)
    plan = trainer.plan()
    assert not plan.ok and "0.1 MB free. Keep fewer by `save_total_limit`" in plan.warnings[0]
    assert "warning" in str(plan) and not list(tmp_path.iterdir())


def test_plan_is_json_html_and_figure(tmp_path: Path) -> None:
    trainer = Trainer(deep(), rows(32), loss_fn=nn.MSELoss(), lr_scheduler="linear", device="cpu", progress_bar=False)
    plan = trainer.plan()
    assert json.loads(json.dumps(plan.to_json()))["length"]["steps"] == 12
    assert "12 steps" in plan._repr_html_() and plan.plot(tmp_path / "rates.png").stat().st_size > 1000


def test_plan_rejects_wrong_arguments() -> None:
    trainer = Trainer(deep(), rows(32), loss_fn=nn.MSELoss(), device="cpu", progress_bar=False)
    for device in ("H100", "80", "-3GB", 80):
        with pytest.raises(ConfigError, match="such as '80GB', got"):
            trainer.plan(device=device)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="ranks"):
        trainer.plan(ranks=0)
