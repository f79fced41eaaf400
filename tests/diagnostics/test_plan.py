"""Plans of runs, compared with the runs."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipes import rows, small_trainer, t16, trainer_on_cpu
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, SequentialLR
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


def planned(kind: Any = Trainer, model: Any = None, **options: Any) -> tuple[RunPlan, Any, Counted]:
    """Return the plan of a run, its trainer after the run, and what was counted."""
    counted = Counted()
    options = {"batch_size": 8, "epochs": 3, "learning_rate": 1e-2, **options}
    data = {"data": rows(60), "eval_dataset": rows(20), "callbacks": [counted]}
    trainer = small_trainer(kind=kind, model=model, **{**data, **options})
    plan = trainer.plan()
    trainer.train()
    return plan, trainer, counted


def sizes_of(folder: Path) -> list[int]:
    folders = [path for path in folder.glob("checkpoint-*") if path.is_dir() and not path.is_symlink()]
    return sorted(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in folders)


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
    sizes = sizes_of(tmp_path)
    assert plan.disk["checkpoint"] == pytest.approx(max(sizes), rel=0.3)
    assert len(sizes) <= plan.disk["kept"] and sum(sizes) < plan.disk["total"] and plan.ok


@pytest.mark.parametrize("only", [False, "all_but_last"])
def test_plan_counts_bytes_of_large_checkpoints(only: Any, tmp_path: Path) -> None:
    """Also of those that are reduced to their weights later."""
    model = nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 1)).double()
    options = {"batch_size": 4, "epochs": None, "max_steps": 4, "save_steps": 1, "save_only_model": only}
    plan, *_ = planned(model=model, data=rows(8), eval_dataset=None, save_dir=tmp_path, **options)
    sizes = sizes_of(tmp_path)
    assert plan.disk["checkpoint"] == pytest.approx(sizes[-1], rel=0.02)
    assert plan.disk["total"] == pytest.approx(sum(sizes) + sizes[-1] - sizes[0], rel=0.05)


class Processor:
    """Stands for a tokenizer, whose files are in each checkpoint."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("x" * 300_000)

    def pad(self, samples: Any, **options: Any) -> Any:
        return torch.utils.data.default_collate(samples)


def test_plan_counts_tokenizers_and_bests_between_saves(tmp_path: Path) -> None:
    """Evaluations get better from one to the next, and are not where checkpoints are saved."""
    plan, *_ = planned(save_dir=tmp_path, save_steps=4, eval_steps=6, processing_class=Processor(), keep_best=1)
    sizes = sizes_of(tmp_path)
    assert plan.disk["checkpoint"] == pytest.approx(max(sizes), rel=0.05)
    assert plan.counts["saves"] < len(sizes) <= plan.disk["kept"] and " and new bests between them, " in str(plan)


@pytest.mark.parametrize(("evaluate", "save"), [
    ("2ba after 1ep", ["1ep", "5ba"]), (["3ba", "1ep after 1ep"], "5ba"), (6, lambda progress: progress.step == 2),
])  # fmt: skip
def test_plan_counts_intervals_of_several_rules(evaluate: Any, save: Any, tmp_path: Path) -> None:
    options = {"keep_best": 0, "load_best_at_end": False}
    plan, _, counted = planned(save_dir=tmp_path, eval_steps=evaluate, save_steps=save, **options)
    counts = {"evaluations": counted.evaluations, "saves": counted.saves}
    assert plan.counts == counts if not callable(save) else "saves" not in plan.counts and "unknown" in str(plan)


def test_plan_of_one_step_measures_all_its_passes() -> None:
    calls = list[int]()
    model = t16()
    model.register_forward_hook(lambda *_: calls.append(1))
    trainer = small_trainer(model=model, gradient_accumulation_steps=4)
    assert {"data", "passes"} <= trainer.plan().seconds.keys()
    assert len(calls) == 5  # a micro-batch to begin with, then the whole step


def test_plan_of_a_custom_loop_with_a_fixed_batch() -> None:
    class Custom(Trainer):
        def _train_epoch(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    assert small_trainer(kind=Custom, global_batch_size=8).plan().length["samples_per_step"] == 8


def sequential(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [CosineAnnealingLR(optimizer, count) for count in (10, 20)], milestones=[10])


SCHEDULES: dict[str, dict[str, Any]] = {
    "one cycle": {"lr_scheduler": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=30)},
    "sequential": {"lr_scheduler": sequential},
    "callable": {"lr_scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 24)},
    "wsd": {"lr_scheduler": "wsd", "lr_scheduler_kwargs": {"decay": "0.3dur"}, "warmup_steps": 0.1},
    "epochs": {"lr_scheduler": "cosine", "scheduler_interval": "epoch"},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plan_shows_rates_of_any_schedule(schedule: str) -> None:
    plan, _, counted = planned(load_best_at_end=False, **SCHEDULES[schedule])
    assert [rate for _, rate in plan.rates] == pytest.approx(counted.rates)
    assert schedule == "epochs" or "█" in str(plan)


@pytest.mark.parametrize(("options", "steps"), [
    ({"epochs": 2.5}, 20), ({"max_steps": 7, "epochs": None}, 7), ({"max_duration": "96sp", "epochs": None}, 13),
])  # fmt: skip
def test_plan_counts_steps_of_every_limit(options: dict[str, Any], steps: int) -> None:
    plan, trainer, counted = planned(load_best_at_end=False, **options)
    assert plan.length["steps"] == trainer.progress.step == steps
    assert plan.counts["evaluations"] == counted.evaluations


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return itertools.cycle(rows(20))


def build(data: Any = None, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).double()
    return trainer_on_cpu(Trainer, model, data or rows(32), loss_fn=nn.MSELoss(), **options)


def test_plan_of_a_stream_counts_by_measured_steps() -> None:
    trainer = build(data=Endless(), max_duration="2h")
    plan = trainer.plan()
    assert plan.length["samples_per_step"] == 8 and plan.length["epochs"] is None
    assert plan.seconds["total"] == pytest.approx(7200, rel=0.01) and plan.end is not None
    assert torch.equal(next(iter(trainer.train_loader))[0], rows(20).tensors[0][:8])


def test_plan_counts_activations_alike_with_fake_tensors() -> None:
    """What backward passes keep: the inputs of the layers, and the outputs of activations."""
    trainer = build(batch_size=16)
    real, fake = trainer.plan(), trainer.plan(device="1MB", ranks=8)
    expected = 16 * 8 * (4 + 64 + 64 + 1 + 1)
    assert real.memory["activations"] == pytest.approx(expected, abs=16 * 8)
    assert fake.memory["activations"] == pytest.approx(real.memory["activations"], abs=16 * 8)
    assert fake.length["steps"] == 3 and "passes" not in fake.seconds and fake.end is None
    assert fake.memory["capacity"] == 10**6 and fake.memory["sharded"] < fake.memory["total"]


def test_plan_warns_of_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(save_dir=tmp_path)
    plan = trainer.plan(device="50KB")
    assert not plan.ok and plan.warnings[0].startswith("A step needs 0.2 MB, and a device has 0.1 MB.")
    usage = SimpleNamespace(free=10**5)
    monkeypatch.setattr("omnitrain.diagnostics.plan.shutil.disk_usage", lambda path: usage)
    plan = trainer.plan()
    assert not plan.ok and "0.1 MB free. Keep fewer by `save_total_limit`" in plan.warnings[0]
    assert "warning" in str(plan) and not list(tmp_path.iterdir())


def test_plan_is_json_html_and_figure(tmp_path: Path) -> None:
    plan = build(lr_scheduler="linear").plan()
    assert json.loads(json.dumps(plan.to_json()))["length"]["steps"] == 12
    assert "12 steps" in plan._repr_html_() and plan.plot(tmp_path / "rates.png").stat().st_size > 1000


@pytest.mark.parametrize("options", [*({"device": value} for value in ("H100", "80", "-3GB", 80)), {"ranks": 0}])
def test_plan_rejects_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="such as '80GB', got" if "device" in options else "ranks"):
        build().plan(**options)
