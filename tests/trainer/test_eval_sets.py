"""Evaluation sets with their own metrics, weight, interval, subset and unit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Streamed
from datasets import Dataset as HFDataset
from recipes import Keyed, KeyedModel, trainer_on_cpu
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from omnitrain import CheckpointError, ConfigError, EvalSet, HFTrainer, ObjectiveError, StepOutput, Trainer


def classes(size: int = 16, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def build(trainer_class: Any, eval_dataset: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"loss_fn": F.cross_entropy, "max_steps": 8, "batch_size": 4, "learning_rate": 0.1, **options}
    options.setdefault("eval_steps", None if eval_dataset is None else 1)
    return trainer_on_cpu(trainer_class, nn.Linear(4, 3), classes(), eval_dataset=eval_dataset, **options)


def test_means_over_sets_are_weighted(trainer_class: Any) -> None:
    third = EvalSet(classes(8, 3), metrics=["accuracy", "f1_macro"], weight=0)
    sets = {"a": EvalSet(classes(8, 1), weight=3), "b": classes(8, 2), "c": third}
    row = build(trainer_class, sets, compute_metrics=["accuracy", "balanced_accuracy"]).evaluate()
    for name in ("loss", "accuracy", "balanced_accuracy"):
        assert row[f"eval_{name}"] == pytest.approx((3 * row[f"eval_a_{name}"] + row[f"eval_b_{name}"]) / 4)
    names = {name.removeprefix("eval_c_") for name in row if name.startswith("eval_c_")}
    assert names == {"loss", "accuracy", "f1_macro"} and "eval_f1_macro" not in row
    loaders = {"a": EvalSet(DataLoader(classes(8, 1), 3), weight=3), "b": DataLoader(classes(8, 2), 3)}
    row_of_loaders = build(trainer_class, None, eval_loader=loaders, eval_steps=1).evaluate()
    assert row_of_loaders == pytest.approx({name: row[name] for name in row_of_loaders}, rel=1e-6)


def test_sets_have_their_own_metrics(trainer_class: Any) -> None:
    def spread(y_true: Any, y_pred: Any) -> dict[str, float]:
        return {"spread": float(y_pred.std())}

    sets = {"a": EvalSet(classes(8, 1), metrics=spread), "b": EvalSet(classes(8, 2), metrics=None), "c": classes(8, 3)}
    trainer = build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="c_accuracy", max_steps=1)
    row = trainer.train()["valid"][-1]
    names = {"eval_loss", "eval_a_loss", "eval_a_spread", "eval_b_loss", "eval_c_loss", "eval_c_accuracy"}
    assert row.keys() == names | {"epoch", "step"}
    single = build(trainer_class, sets["c"], compute_metrics="accuracy", max_steps=1).train()["valid"][-1]
    assert row["eval_c_accuracy"] == single["eval_accuracy"]


def test_objective_is_a_mean_over_sets_or_a_metric_of_one(trainer_class: Any) -> None:
    sets = {"a": EvalSet(classes(8, 1), metrics=["accuracy", "log_loss"]), "b": classes(8, 2)}
    trainer = build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="accuracy", max_steps=1)
    assert trainer.train()["best_valid"]["accuracy"] and trainer.objective.direction == "max"
    of_one = build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="a_log_loss")
    assert of_one.objective.direction == "min"
    with pytest.raises(ObjectiveError, match=r"'log_loss'.*not among the metrics: 'loss', 'accuracy', 'a_loss'"):
        build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="log_loss")
    sets["rare"] = EvalSet(classes(), every=2)
    with pytest.raises(ObjectiveError, match=r"'rare_loss'.*its own intervals.*'2ba'"):
        build(trainer_class, sets, optimization_metric="rare_loss")


def test_interval_of_a_set_selects_evaluations(trainer_class: Any, tmp_path: Path) -> None:
    rare, epoch = EvalSet(classes(8, 2), every="5ba"), EvalSet(classes(8), every="1ep")
    sets = {"often": classes(8, 1), "rare": rare, "epoch": epoch}
    options = {"eval_steps": 2, "max_steps": 12, "eval_on_start": True, "save_steps": 99, "save_dir": tmp_path / "a"}
    rows = build(trainer_class, sets, **options).train()["valid"]
    for name, steps in (("", range(0, 13, 2)), ("rare_", [0, 6, 10]), ("epoch_", [0, 4, 8, 12])):
        assert [row["step"] for row in rows if f"eval_{name}loss" in row] == [*steps]
    assert all(row["eval_loss"] == row["eval_often_loss"] for row in rows)
    first = build(trainer_class, sets, eval_steps=2, max_steps=6).train()["valid"]
    assert [row["step"] for row in first if "eval_rare_loss" in row] == [6]
    build(trainer_class, sets, **{**options, "max_steps": 9, "save_dir": tmp_path / "b"}).train()
    resumed = build(trainer_class, sets, **{**options, "save_dir": tmp_path / "b"}).train(resume_from="auto")
    assert resumed["valid"] == rows


@pytest.mark.parametrize("kind", ["map", "tensors", "stream", "columns"])
def test_subset_is_the_first_samples(kind: str) -> None:
    full = classes(12, 1)
    data: Any = {"map": full, "tensors": tuple(full.tensors), "stream": Streamed(full)}.get(kind)
    trainer, first = build(Trainer, None), TensorDataset(*full[:5])
    if kind == "columns":
        keyed = Keyed(12)
        data = HFDataset.from_dict({"x": keyed.x.numpy(), "labels": keyed.y.numpy()}).with_format("torch")
        trainer, first = trainer_on_cpu(HFTrainer, KeyedModel(), data, batch_size=4, max_steps=1), data.select(range(5))
    assert trainer.evaluate(EvalSet(data, subset=5)) == trainer.evaluate(first)
    assert trainer.evaluate(EvalSet(data, subset=500)) == trainer.evaluate(data)


class Absolute:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, batch: Any) -> StepOutput:
        outputs = self.model(batch[0])
        return StepOutput(outputs.abs().mean(), outputs, batch[1])

    evaluate = __call__


def test_sets_have_their_own_unit(trainer_class: Any) -> None:
    model, data = nn.Linear(4, 3), classes(10, 1)
    sets = {"a": EvalSet(data, unit=Absolute(model), metrics="accuracy"), "b": data}
    options = {"loss_fn": F.cross_entropy, "compute_metrics": "accuracy", "batch_size": 4}
    row = trainer_on_cpu(trainer_class, model, classes(), eval_dataset=sets, **options).evaluate()
    outputs = model(data.tensors[0]).detach()
    assert row["eval_a_loss"] == pytest.approx(float(outputs.abs().mean()), rel=1e-6)
    assert row["eval_b_loss"] == pytest.approx(float(F.cross_entropy(outputs, data.tensors[1])), rel=1e-6)
    assert row["eval_a_accuracy"] == row["eval_b_accuracy"]


@pytest.mark.parametrize(("options", "message"), [
    ({"weight": -1}, "EvalSet.weight`.*at least 0, got -1"), ({"weight": float("nan")}, "EvalSet.weight`.*got nan"),
    ({"weight": 10**400}, "EvalSet.weight`.*got one of more than 40 digits"),
    ({"subset": 0}, "EvalSet.subset`.*got 0"), ({"subset": True}, "EvalSet.subset`.*got True"),
    ({"every": "2h"}, "`every`.*steps or epochs.*'2h'"), ({"every": 0}, "`every`.*got 0"),
    ({"unit": 3}, "`unit`.*callable.*got 3"), ({"data": {"b": classes()}}, "one dataset or loader, got dict"),
    ({"data": DataLoader(classes()), "subset": 3}, "`subset=3` has no effect on a loader"),
    ({"metrics": "acuracy"}, "'acuracy'.*accuracy"), ({"weight": 0}, "No set of `eval_dataset` counts"),
])  # fmt: skip
def test_eval_set_arguments_are_validated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Trainer, {"a": EvalSet(**{"data": classes(), **options}), "b": EvalSet(classes(), every=2)})
    with pytest.raises(ConfigError, match="needs a named set"):
        build(Trainer, EvalSet(classes(), every=2))


def test_resume_with_other_rules_must_be_allowed(tmp_path: Path) -> None:
    build(Trainer, {"a": EvalSet(classes(8)), "b": classes(8)}, save_dir=tmp_path, max_steps=2).train()
    sets = {"a": EvalSet(classes(8), weight=2), "b": classes(8)}
    with pytest.raises(CheckpointError, match=re.escape("the evaluation set 'a' has weight=2 now, and had 1.0")):
        build(Trainer, sets, save_dir=tmp_path, max_steps=4).train(resume_from="auto")
    trainer = build(Trainer, sets, save_dir=tmp_path, max_steps=4)
    assert trainer.train(resume_from="auto", allow_change={"eval_dataset"})["stop_reason"] == "max_steps"
