"""Named evaluation sets with rules of their own: metrics, weight, interval, subset and unit of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset as HFDataset
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from omnitrain import (
    AccelerateTrainer,
    CheckpointError,
    ConfigError,
    EvalSet,
    HFTrainer,
    ObjectiveError,
    StepOutput,
    Trainer,
)

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


@pytest.fixture(params=TRAINERS.values(), ids=TRAINERS)
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return request.param


def classes(size: int = 16, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def build(trainer_class: Any, eval_dataset: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {
        "loss_fn": F.cross_entropy, "max_steps": 8, "batch_size": 4, "learning_rate": 0.1, "progress_bar": False,
        "eval_steps": None if eval_dataset is None else 1, **options,
    }  # fmt: skip
    return trainer_class(nn.Linear(4, 3), train_dataset=classes(), eval_dataset=eval_dataset, **options)


def test_means_over_the_sets_are_weighted_and_of_every_metric_that_all_have(trainer_class: Any) -> None:
    sets = {
        "a": EvalSet(classes(8, 1), weight=3), "b": classes(8, 2),
        "c": EvalSet(classes(8, 3), metrics=["accuracy", "f1_macro"], weight=0),
    }  # fmt: skip
    found = build(trainer_class, sets, compute_metrics=["accuracy", "balanced_accuracy"]).evaluate()
    for name in ("loss", "accuracy", "balanced_accuracy"):
        assert found[f"eval_{name}"] == pytest.approx((3 * found[f"eval_a_{name}"] + found[f"eval_b_{name}"]) / 4)
    assert {name for name in found if name.startswith("eval_c")} == {
        "eval_c_loss",
        "eval_c_accuracy",
        "eval_c_f1_macro",
    }
    assert "eval_f1_macro" not in found


def test_each_set_has_its_own_metrics(trainer_class: Any) -> None:
    def spread(y_true: Any, y_pred: Any) -> dict[str, float]:
        return {"spread": float(y_pred.std())}

    sets = {"a": EvalSet(classes(8, 1), metrics=spread), "b": EvalSet(classes(8, 2), metrics=None), "c": classes(8, 3)}
    trainer = build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="c_accuracy", max_steps=1)
    row = trainer.train()["valid"][-1]
    names = {"eval_loss", "eval_a_loss", "eval_a_spread", "eval_b_loss", "eval_c_loss", "eval_c_accuracy"}
    assert row.keys() == names | {"epoch", "step"}
    assert row["eval_c_accuracy"] == build(trainer_class, sets["c"], compute_metrics="accuracy", max_steps=1).train()[
        "valid"
    ][-1]["eval_accuracy"]  # fmt: skip


def test_the_objective_may_be_a_mean_over_the_sets_or_a_metric_of_one_set(trainer_class: Any) -> None:
    sets = {"a": EvalSet(classes(8, 1), metrics=["accuracy", "log_loss"]), "b": classes(8, 2)}
    trainer = build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="accuracy", max_steps=1)
    assert trainer.train()["best_valid"]["accuracy"] and trainer.objective.direction == "max"
    of_one = build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="a_log_loss")
    assert of_one.objective.direction == "min"
    with pytest.raises(ObjectiveError, match=r"'log_loss'.*not among the metrics: 'loss', 'accuracy', 'a_loss'"):
        build(trainer_class, sets, compute_metrics="accuracy", optimization_metric="log_loss")


def test_a_set_with_an_interval_is_evaluated_in_the_first_evaluation_at_or_after_each_multiple(
    trainer_class: Any, tmp_path: Path
) -> None:
    sets = {
        "often": classes(8, 1),
        "rare": EvalSet(classes(8, 2), every="5ba"),
        "epoch": EvalSet(classes(8), every="1ep"),
    }
    options = {"eval_steps": 2, "max_steps": 12, "eval_on_start": True, "save_steps": 3, "save_dir": tmp_path / "a"}
    whole = build(trainer_class, sets, **options)
    rows = whole.train()["valid"]
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in rows if "eval_rare_loss" in row] == [0, 6, 10]
    assert [row["step"] for row in rows if "eval_epoch_loss" in row] == [0, 4, 8, 12]
    assert all(row["eval_loss"] == row["eval_often_loss"] for row in rows)
    first = build(trainer_class, sets, eval_steps=2, max_steps=6).train()["valid"]
    assert [row["step"] for row in first if "eval_rare_loss" in row] == [6]
    build(trainer_class, sets, **{**options, "max_steps": 9, "save_dir": tmp_path / "b"}).train()
    resumed = build(trainer_class, sets, **{**options, "save_dir": tmp_path / "b"}).train(resume_from="auto")
    assert resumed["valid"] == rows


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(classes(12, 1))


@pytest.mark.parametrize("kind", ["map", "tensors", "stream", "columns"])
def test_a_subset_is_of_the_first_samples(trainer_class: Any, kind: str) -> None:
    whole, own = classes(12, 1), classes(12, 1).tensors
    columns = HFDataset.from_dict({"input": own[0].numpy(), "labels": own[1].numpy()}).with_format("torch")
    data = {"map": whole, "tensors": tuple(own), "stream": Stream(), "columns": columns}[kind]
    options = {}
    if kind == "columns":

        class Named(nn.Linear):
            def forward(self, input: torch.Tensor, labels: Any = None) -> Any:
                out = super().forward(input)
                return {"loss": F.cross_entropy(out, labels), "logits": out} if labels is not None else {"logits": out}

        torch.manual_seed(0)
        model = Named(4, 3)
        trainer = trainer_class(model, train_dataset=columns, batch_size=4, progress_bar=False, max_steps=1)
        expected = trainer.evaluate(columns.select(range(5)))["eval_loss"]
    else:
        trainer = build(trainer_class, None, **options)
        expected = trainer.evaluate(TensorDataset(*(one[:5] for one in own)))["eval_loss"]
    assert trainer.evaluate(EvalSet(data, subset=5))["eval_loss"] == expected
    assert trainer.evaluate(EvalSet(data, subset=500)) == trainer.evaluate(data)


class Absolute:
    """A unit that measures something else, on a set alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.evaluate(batch).loss  # type: ignore[return-value]

    def evaluate(self, batch: Any) -> StepOutput:
        outputs = self.model(batch[0])
        return StepOutput(outputs.abs().mean(), outputs, batch[1])


def test_a_set_may_have_a_unit_of_its_own(trainer_class: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = classes(10, 1)
    sets = {"a": EvalSet(data, unit=Absolute(model), metrics="accuracy"), "b": data}
    trainer = trainer_class(
        model, train_dataset=classes(), eval_dataset=sets, loss_fn=F.cross_entropy, batch_size=4, progress_bar=False,
        compute_metrics="accuracy",
    )  # fmt: skip
    found = trainer.evaluate()
    assert found["eval_a_loss"] == pytest.approx(float(model(data.tensors[0]).abs().mean()), rel=1e-6)
    assert found["eval_b_loss"] == pytest.approx(
        float(F.cross_entropy(model(data.tensors[0]), data.tensors[1])), rel=1e-6
    )
    assert found["eval_a_accuracy"] == found["eval_b_accuracy"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: {"a": EvalSet(classes(), weight=-1)}, "`weight`.*0 or more, got -1"),
        (lambda: {"a": EvalSet(classes(), weight=float("nan"))}, "`weight`.*got nan"),
        (lambda: {"a": EvalSet(classes(), subset=0)}, "`subset`.*got 0"),
        (lambda: {"a": EvalSet(classes(), subset=True)}, "`subset`.*got True"),
        (lambda: {"a": EvalSet(classes(), every="2h")}, "`every`.*steps or epochs.*'2h'"),
        (lambda: {"a": EvalSet(classes(), every=0)}, "`every`.*got 0"),
        (lambda: {"a": EvalSet(classes(), unit=3)}, "`unit`.*callable.*got 3"),
        (lambda: {"a": EvalSet({"b": classes()})}, "one dataset or loader, got dict"),
        (lambda: {"a": EvalSet(None)}, "one dataset or loader, got NoneType"),
        (
            lambda: {"a": EvalSet(classes(), weight=0), "b": EvalSet(classes(), every=2)},
            "No set of `eval_dataset` counts",
        ),
        (lambda: EvalSet(classes(), every=2), "needs a set with a name"),
        (lambda: {"a": EvalSet(DataLoader(classes()), subset=3)}, "`subset=3` has no effect on a loader"),
        (lambda: {"a": EvalSet(classes(), metrics="acuracy")}, "'acuracy'.*accuracy"),
    ],
)
def test_wrong_rules_are_refused_at_construction(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(Trainer, make())


def test_a_loader_of_your_own_may_have_rules_too(trainer_class: Any) -> None:
    loaders = {"a": EvalSet(DataLoader(classes(8, 1), 3), weight=3), "b": DataLoader(classes(8, 2), 3)}
    found = build(trainer_class, None, eval_loader=loaders, eval_steps=1).evaluate()
    plain = build(trainer_class, {"a": EvalSet(classes(8, 1), weight=3), "b": classes(8, 2)}).evaluate()
    assert found == pytest.approx(plain, rel=1e-6)


def test_a_set_with_an_interval_is_no_objective() -> None:
    sets = {"a": classes(), "rare": EvalSet(classes(), every=2)}
    with pytest.raises(ObjectiveError, match=r"'rare_loss'.*intervals of its own.*'2ba'"):
        build(Trainer, sets, optimization_metric="rare_loss")


def test_a_resume_with_other_rules_is_refused_with_both_values(trainer_class: Any, tmp_path: Path) -> None:
    build(trainer_class, {"a": EvalSet(classes(8)), "b": classes(8)}, save_dir=tmp_path, max_steps=2).train()
    sets = {"a": EvalSet(classes(8), weight=2), "b": classes(8)}
    trainer = build(trainer_class, sets, save_dir=tmp_path, max_steps=4)
    with pytest.raises(CheckpointError, match=re.escape("the evaluation set 'a' has weight=2 now, and had 1.0")):
        trainer.train(resume_from="auto")
    again = build(trainer_class, sets, save_dir=tmp_path, max_steps=4)
    assert again.train(resume_from="auto", allow_change={"eval_dataset"})["stop_reason"] == "max_steps"
