from typing import Any

import pytest
from recipes import rows, small_trainer

from omnitrain import ConfigError, MetricDescriptor, MetricsDict, describe_metric
from omnitrain.core.metric_format import format_metric, format_title, sort_for_display
from omnitrain.core.objective import infer_direction

PERCENT = MetricDescriptor("Hits", unit="%", format=".1f", order=5, higher_is_better=False)


def test_describe_metric_sets_title_unit_format_and_place():
    describe_metric("hits", PERCENT)
    row = {"epoch": 1, "step": 10, "eval_loss": 0.5, "eval_f1": 0.25, "eval_hits": 12.34}
    metrics = MetricsDict()
    metrics.add_valid(row, best=True)
    assert list(sort_for_display(row)) == ["step", "epoch", "eval_hits", "eval_loss", "eval_f1"]
    assert (format_metric("eval_hits", 12.34), format_title("eval_hits")) == ("eval Hits 12.3 %", "eval Hits (%)")
    assert str(metrics).splitlines() == [
        "best: step 10 (epoch 1), loss 0.5000, f1 0.2500, Hits (%) 12.3",
        "epoch  step  eval Hits (%)  eval_loss  eval_f1",
        "    1    10           12.3     0.5000   0.2500  *",
    ]
    with pytest.raises(ConfigError, match="no format for a number"):
        describe_metric("hits", MetricDescriptor(format="%d"))


def test_plot_panels_and_direction_follow_descriptors():
    pytest.importorskip("matplotlib")
    assert infer_direction("eval_hits")[0] == "max"
    describe_metric("hits", PERCENT)
    metrics = MetricsDict()
    for step in (1, 2):
        metrics.add_valid({"epoch": 1, "step": step, "eval_loss": 1.0, "eval_f1": 0.5, "eval_hits": 1.0}, best=False)
    labels = [axes.get_lines()[0].get_label() for axes in metrics.plot().axes]
    assert labels == ["eval_loss", "eval Hits (%)", "eval_f1"]
    assert infer_direction("eval_hits") == ("min", "the metric's descriptor")
    assert infer_direction("hits", higher_is_better=True)[0] == "max"


@pytest.mark.parametrize("descriptor", [PERCENT, {"hits": PERCENT}])
def test_metric_brings_descriptor(descriptor):
    def hits(y_true: Any, y_pred: Any) -> float:
        return 12.34

    hits.descriptor = descriptor  # type: ignore[attr-defined]
    trainer = small_trainer(eval_dataset=rows(4), compute_metrics=hits, optimization_metric="hits")
    assert trainer.objective.direction == "min"
    assert "eval Hits (%)" in str(trainer.train())
