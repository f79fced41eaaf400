"""The direction of a metric, and what counts as best and as a gain."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.core.errors import CheckpointError, ConfigError, ObjectiveError
from omnitrain.core.history import MetricRow
from omnitrain.core.objective import Objective, infer_direction

HIGHER = """
acc accuracy balanced_accuracy f1 f1_macro f1_score micro_f1 auc roc_auc auroc auprc average_precision precision recall
bleu BLEU bleu4 sacrebleu rouge rouge1 rouge2 rougeL rouge_l rougeLsum chrf chrf++ meteor comet bertscore exact_match em
r2 r2_score explained_variance pearson spearman pearsonr matthews_correlation mcc pcc kappa cohen_kappa_score
map mAP map50 mAP@0.5:0.95 AP50 ndcg ndcg@10 ndcg_at_10 mrr hit_rate hits@10 recall@10 recall@k precision_at_k pass@1
top1 top5 top-1 top_5 top5_accuracy top_k_accuracy iou miou mean_iou dice jaccard gmean silhouette silhouette_score
calinski_harabasz_score ssim psnr inception_score clip_score log_likelihood d2_absolute_error_score mutual_info_score
v_measure_score neg_mean_squared_error neg_mse neg_log_loss neg_brier_score neg_wer
neg_mean_poisson_deviance rewards/accuracies acc_norm win_rate
samples_per_second precision_recall_auc
"""
LOWER = """
loss mlm_loss web_loss ppl perplexity word_perplexity wer cer ter mae mse rmse mape smape rmsle error err error_rate
top1_error word_error_rate nll neg_log_likelihood negative_log_likelihood cross_entropy binary_cross_entropy kl
kl_divergence brier brier_score brier_score_loss latency latency_ms p99_latency fid fid_score kid fvd lpips
bits_per_byte bpc davies_bouldin_score hamming_loss zero_one_loss hinge_loss log_loss max_error
median_absolute_error mean_squared_error mean_poisson_deviance ece eer far frr fpr fpr95 f1_error accuracy_loss
neg_accuracy cosine_distance mean_rank
"""
UNCLEAR = """
foo loss_score error_recall f1_wer wer_score risk_score accuracy_gap accuracy_std gap_f1 1-ssim one_minus_f1
inverse_loss neg_foo error_reduction loss_scale learning_rate grad_norm time_to_accuracy attack_success_rate
entropy coverage num_correct _
"""
PREFIXES = ["", "eval_", "val_", "test_", "train_", "valid/", "eval_web_", "squad_", "val/dev/"]


def test_direction_of_names() -> None:
    for metrics, direction in ((HIGHER, "max"), (LOWER, "min")):
        names = [prefix + metric for metric in metrics.split() for prefix in PREFIXES]
        assert {name: infer_direction(name)[0] for name in names} == dict.fromkeys(names, direction)
    names = pytest.importorskip("sklearn.metrics").get_scorer_names()
    assert {name: infer_direction(name)[0] for name in names} == dict.fromkeys(names, "max")


def test_direction_rejects_unclear_names() -> None:
    remedy = "Pass `optimization_direction='max'` or `'min'`."
    for name in (prefix + metric for metric in UNCLEAR.split() for prefix in ("", "eval_")):
        with pytest.raises(ObjectiveError) as caught:
            infer_direction(name)
        assert str(caught.value) == f"Cannot tell whether a higher or lower '{name}' is better. {remedy}"


SOURCES = {
    "the exact table": "eval_dev_wer eval_loss", "the word 'f1'": "f1_macro", "the word 'error'": "error_by_hand",
    "scikit-learn's suffix rule": "web_loss consensus_score coverage_error",
    "scikit-learn's suffix rule, turned around by 'neg_'": "neg_coverage_error",
}  # fmt: skip


def test_direction_reports_source_by_precedence() -> None:
    for source, metrics in SOURCES.items():
        assert {infer_direction(metric)[1] for metric in metrics.split()} == {source}
    assert infer_direction("accuracy", higher_is_better=False) == ("min", "the metric's own higher_is_better")
    objective = Objective("accuracy", direction="max", higher_is_better=False)
    assert (objective.direction, objective.source) == ("max", "optimization_direction")


@pytest.mark.parametrize(("arguments", "name"), [
    *(({"direction": value}, "optimization_direction") for value in ("maximize", True)),
    *(({"delta": value}, "delta") for value in (-0.1, math.nan, math.inf, "0.1")),
    *(({"metric": value}, "optimization_metric") for value in ("", "eval_", None)),
])  # fmt: skip
def test_objective_rejects_wrong_arguments(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}`.*{next(iter(arguments.values()))!r}"):
        Objective(**arguments)


def test_objective_finds_metric_or_lists_names() -> None:
    for metric in ("dev_wer", "eval_dev_wer"):
        assert Objective(metric).key({"step": 1, "eval_dev_wer": 0.1}) == "eval_dev_wer"
        assert Objective(metric).key({"dev_wer": 0.1}) == "dev_wer"
    row = MetricRow(eval_loss=0.5)
    assert row[Objective("loss").key(row)] == 0.5
    words = "^`optimization_metric='acc'` is not among the metrics: 'loss', 'accuracy'. Did you mean 'accuracy'.$"
    with pytest.raises(ObjectiveError, match=words):
        Objective("acc").key({"epoch": 1, "step": 2, "eval_loss": 0.5, "eval_accuracy": 0.5})
    with pytest.raises(KeyError, match="metrics: nothing"):
        Objective("acc").key({})


def test_objective_ignores_non_finite() -> None:
    lower, higher = Objective("loss"), Objective("accuracy")
    for value in (math.nan, math.inf, -math.inf):
        assert not lower.is_better(value, None) and not higher.is_better(value, None)
        assert lower.is_better(9.0, value) and higher.is_better(9.0, value)


@pytest.mark.parametrize(("first", "second", "delta"), [(0.7, 0.8, 0.1), (0.5, 0.6, 0.1), (0.5, 0.501, 0.001)])
def test_objective_gain_of_delta_is_none(first: float, second: float, delta: float) -> None:
    for metric, values in (("accuracy", (first, second)), ("loss", (second, first))):
        objective = Objective(metric, delta=delta)
        assert [objective.update(value, step) for step, value in enumerate(values)] == [True, True]
        assert objective.evaluations_without_gain == 1


def test_objective_before_training_uses_no_patience() -> None:
    objective = Objective("loss")
    assert [objective.update(value, 0, counts=False) for value in (0.5, math.nan, 0.7)] == [True, False, False]
    assert objective.evaluations_without_gain == 0 and not objective.update(0.6, 1)
    assert (objective.best, objective.best_step, objective.evaluations_without_gain) == (0.5, 0, 1)


numbers = st.one_of(st.integers(-5, 5).map(float), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(
    values=st.lists(numbers, max_size=20),
    delta=st.integers(0, 3),
    direction=st.sampled_from(["max", "min"]),
    resume_at=st.integers(0, 20),
)
@settings(max_examples=100)
def test_objective_equals_naive_model(values: list[float], delta: int, direction: Any, resume_at: int) -> None:
    objective = Objective("foo", direction, delta)
    sign = 1 if direction == "max" else -1
    reference, counter = -math.inf, 0
    for step, value in enumerate(values):
        if step == resume_at:
            state = json.loads(json.dumps(objective.state_dict(), allow_nan=False))
            objective = Objective("foo", direction, delta)
            objective.load_state_dict(state)
        before = [sign * other for other in values[:step] if math.isfinite(other)]
        is_best = math.isfinite(value) and all(sign * value > other for other in before)
        assert objective.update(value, step) == is_best
        if math.isfinite(value) and sign * value > reference + delta:
            reference, counter = sign * value, 0
        elif math.isfinite(value):
            counter += 1
        assert objective.evaluations_without_gain == counter
    finite = [sign * value for value in values if math.isfinite(value)]
    assert objective.best == (sign * max(finite) if finite else None)
    assert objective.best_step == (values.index(sign * max(finite)) if finite else None)


def test_objective_of_checkpoint_fixes_metric_but_not_delta() -> None:
    state = Objective("loss", delta=0.1).state_dict()
    for other in (Objective("accuracy"), Objective("loss", direction="max")):
        with pytest.raises(CheckpointError, match="`optimization_metric='loss'` \\(min\\)"):
            other.load_state_dict(state)
    objective = Objective("loss", delta=0.2)
    objective.load_state_dict(state)
    assert objective.delta == 0.2
