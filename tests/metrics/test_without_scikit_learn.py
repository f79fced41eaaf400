"""Runs and metrics without scikit-learn, which is an extra."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

from omnitrain import MissingExtraError, Trainer
from omnitrain.cli.main import main
from omnitrain.metrics.classification import FROM_HITS
from omnitrain.metrics.registry import NamedMetrics

COMPUTED_HERE = {
    *("accuracy", "hamming_loss", "zero_one_loss", "log_loss", "perplexity", "brier", "top2_accuracy", "medae"),
    *("mse", "rmse", "mae", "mape", "msle", "rmsle", "max_error", "r2", "explained_variance", "pearson"),
}


@pytest.fixture
def without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make scikit-learn, and SciPy that comes with it, impossible to import."""
    for name in [*sys.modules, "sklearn", "scipy"]:
        if name.partition(".")[0] in ("sklearn", "scipy"):
            monkeypatch.setitem(sys.modules, name, None)


def small_run(trainer_class: type[Any], **changes: Any) -> Any:
    data = (torch.randn(12, 4), torch.arange(12) % 2)
    return trainer_class(nn.Linear(4, 2), data, data, loss_fn=nn.CrossEntropyLoss(), epochs=1, **changes)


@pytest.mark.usefixtures("without_scikit_learn")
def test_trainers_run_without_scikit_learn(trainer_class: Any) -> None:
    assert "accuracy" not in small_run(trainer_class).train()["valid"][-1]
    metrics = small_run(trainer_class, compute_metrics="accuracy", optimization_metric="accuracy").train()
    assert 0 <= metrics["valid"][-1]["accuracy"] <= 1


@pytest.mark.usefixtures("without_scikit_learn")
def test_metric_names_are_errors_if_they_need_scikit_learn() -> None:
    with pytest.raises(MissingExtraError, match=r"metric 'f1' needs scikit-learn.*-e '\.\[metrics\]'"):
        small_run(Trainer, compute_metrics=["accuracy", "f1"])  # before the first step
    for name in ("f2", "precision_macro", "roc_auc", "average_precision", "spearman", "kendall"):
        package = "scipy" if name in ("spearman", "kendall") else "scikit-learn"
        with pytest.raises(MissingExtraError, match=rf"'{name}' needs {package}, .*\[metrics\]") as error:
            NamedMetrics([name])
        assert error.value.name == package


@pytest.mark.usefixtures("without_scikit_learn")
def test_metric_names_without_scikit_learn_are_computed() -> None:
    for name in COMPUTED_HERE:
        metrics = NamedMetrics([name])
        if name in {*FROM_HITS, "log_loss", "perplexity", "brier", "top2_accuracy"}:
            metrics.update(torch.eye(3), torch.arange(3))
        else:
            metrics.update(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 4.0]))
        (value,) = metrics.compute().values()
        assert value is not None and np.isfinite(value), name


@pytest.mark.usefixtures("without_scikit_learn")
def test_demo_reports_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 1
    assert "`omnitrain demo` needs scikit-learn" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


LAYOUTS: dict[str, Any] = {
    "text": lambda predicted, labels: [[f"class {number}" for number in numbers] for numbers in (predicted, labels)],
    "one score": lambda predicted, labels: (predicted * 2.0 - 1, labels),
    "class scores": lambda predicted, labels: (nn.functional.one_hot(predicted, 2).double(), labels),
    "classes": lambda predicted, labels: (predicted, labels),
}


@pytest.mark.parametrize("kind", sorted(FROM_HITS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_of_hits_equal_scikit_learn_to_the_bit(kind: str, layout: str) -> None:
    for hits, misses in ((0, 3), (2, 1), (7, 0), (1, 48), (333, 667)):
        metrics, labels = NamedMetrics([kind]), torch.arange(hits + misses) % 2
        predicted = torch.where(torch.arange(hits + misses) < hits, labels, 1 - labels)
        metrics.update(*LAYOUTS[layout](predicted, labels))
        function = getattr(sk, "accuracy_score" if kind == "accuracy" else kind)
        assert metrics.compute()[kind] == float(function(labels, predicted)), (hits, misses)
