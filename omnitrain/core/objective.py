"""The objective of a run: its metric, direction and best value.

The table of directions and the rules for other names belong here. The lifecycle and the callbacks decide what follows
from a gain (a checkpoint) or its absence (the end of the run).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from omnitrain.core.errors import CheckpointError, ConfigError, ObjectiveError, check_number, did_you_mean
from omnitrain.core.history import quote_names
from omnitrain.core.metric_format import bare_name, get_descriptor

Direction = Literal["max", "min"]

# Names of metrics without digits ("rouge1" is "rouge"), unless the digit is part of the name. They match a whole name,
# its end ("squad_exact_match"), and words inside it ("f1_macro").
_HIGHER = """
acc accs accuracy accuracies balanced_accuracy exact exact_match match correct
f1 f1s f05 f0_5 f2 fbeta f_beta fscore f_score fmeasure f_measure f1score
precision recall sensitivity specificity tpr tnr ppv npv
true_positive_rate true_negative_rate positive_predictive_value negative_predictive_value positive_likelihood_ratio
auc auroc auprc aucpr aupr roc_auc pr_auc average_precision mean_average_precision youden informedness markedness
mcc matthews matthews_corrcoef matthews_correlation phi_coefficient kappa qwk gmean g_mean geometric_mean
iou miou giou jaccard dice panoptic_quality mota hota idf1 pck pckh
r2 r_2 r_squared rsquared d2 explained_variance explained_variance_score
d2_absolute_error_score d2_pinball_score d2_tweedie_score d2_log_loss_score d2_brier_score
pearson pearsonr spearman spearmanr kendall kendalltau correlation corr corrcoef pcc plcc srcc krcc ccc concordance
c_index cindex log_likelihood loglikelihood likelihood elbo
silhouette calinski_harabasz calinski_harabasz_score purity homogeneity completeness v_measure vmeasure
nmi ami ari fmi rand rand_index mutual_info mutual_information fowlkes_mallows
ndcg dcg discounted_cumulative_gain cumulative_gain mrr reciprocal_rank hit hits hit_rate hit_ratio hitrate ctr
bleu sacrebleu gleu rouge rougel rougelsum chrf meteor comet cometkiwi bleurt bertscore bartscore moverscore cider spice
ribes mauve sari word_information_preserved
psnr ssim msssim ms_ssim inception_score clip_score clipscore snr si_snr sisnr sdr si_sdr sisdr pesq stoi estoi dnsmos
signal_to_noise_ratio mos
pass_rate win_rate winrate success success_rate elo reward rewards score
similarity cosine_similarity cosine_sim
throughput speedup fps mfu samples_per_second tokens_per_second steps_per_second
"""
_LOWER = """
loss losses error errors err error_rate word_error_rate character_error_rate misclassification mismatch
wer cer wil word_information_lost eer hter frr ece rms_calibration
fpr fnr fdr false_positive_rate false_negative_rate false_discovery_rate false_alarm_rate miss_rate
false_acceptance_rate false_rejection_rate negative_likelihood_ratio min_dcf mindcf
mae mse rmse nrmse msle rmsle mape smape mdape wape wmape mase mspe rmspe medae rae rrse
mean_absolute_deviation deviance crps pinball huber
nll log_loss logloss cross_entropy crossentropy xent bce kl kld kl_divergence jsd divergence
brier brier_score perplexity ppl bits_per_byte bits_per_character bits_per_char bits_per_dim bits_per_token bpb bpc bpd
davies_bouldin davies_bouldin_score inertia aic bic mean_rank median_rank
fid fid_score fvd fvd_score kid kid_score fad fad_score lpips lpips_score dists niqe brisque mmd emd wasserstein
chamfer hausdorff mcd distortion distance edit_distance mpjpe epe abs_rel absrel sq_rel silog
latency delay runtime inference_time step_time response_time regret cost failure failures violation violations
risk penalty residual toxicity hallucination hallucinations
"""
# These are metrics only as a whole name, or after the name of a set: in a longer name they mean something else.
_HIGHER_ALONE = "em ap ar map pq hr maj pass top top_k mc1 mc2 bert_score"
_LOWER_ALONE = "ter ter_score mer per der jer far ate rpe ce hd mce l1 l2"

_EXACT: dict[str, Direction] = {
    **dict.fromkeys(f"{_HIGHER} {_HIGHER_ALONE}".split(), "max"),
    **dict.fromkeys(f"{_LOWER} {_LOWER_ALONE}".split(), "min"),
}
_WITHIN: dict[str, Direction] = {**dict.fromkeys(_HIGHER.split(), "max"), **dict.fromkeys(_LOWER.split(), "min")}
_MAX_WORDS = max(name.count("_") for name in _EXACT) + 1
_SPLITS = ("eval", "evaluation", "val", "valid", "validation", "dev", "test", "train")
_SUFFIXES: dict[str, Direction] = {"score": "max", "error": "min", "loss": "min"}
# Words that reverse the meaning of a name or make it another quantity: "accuracy_gap", "loss_scale".
_INVERTING = "inverse inv inverted minus reciprocal not non no"
_UNCLEAR = """
neg negative std stdev stddev sd sem var variance gap diff difference drop change delta reduction decrease increase
improvement gain count num number threshold weight scale coef ratio temperature bias vs rejected lost time
steps attack
"""
_INVERTING_WORDS = frozenset(_INVERTING.split())
_UNCLEAR_WORDS = _INVERTING_WORDS | frozenset(_UNCLEAR.split())


def infer_direction(metric: str, higher_is_better: bool | None = None) -> tuple[Direction, str]:
    """Infer from a metric's name whether higher is better. Values play no part.

    Args:
        metric: The name, with or without `eval_`, `val/` or the name of a dataset before it.
        higher_is_better: The metric object's own attribute, if there is one.

    Returns:
        "max" or "min", and where the answer comes from.

    Raises:
        ObjectiveError: The direction is unknown, or the words of the name contradict each other.

    >>> infer_direction("eval_dev_wer")
    ('min', 'the exact table')
    >>> infer_direction("val/top5_accuracy_weighted")
    ('max', "the word 'accuracy'")
    """
    if higher_is_better is not None:
        return ("max" if higher_is_better else "min"), "the metric's own higher_is_better"
    if (higher := get_descriptor(metric).higher_is_better) is not None:
        return ("max" if higher else "min"), "the metric's descriptor"
    is_complement = re.search(r"(?:^|[_/\s])1\s*-", metric)  # "1-ssim" is not "ssim"
    result = None if is_complement else _infer_from_words(_split_words(metric))
    if result is None:
        raise ObjectiveError(
            f"Cannot tell whether a higher or lower {metric!r} is better. "
            "Pass `optimization_direction='max'` or `'min'`."
        )
    return result


def _split_words(metric: str) -> list[str]:
    """Split a name into lower-case words, without parameters: "recall@10" is recall."""
    name = re.sub(r"_at_(?:k|\d+)(?=_|$)", "", re.sub(r"[^a-z0-9]+", "_", metric.lower()))
    parts = name.strip("_").split("_")
    while parts[0] in _SPLITS and len(parts) > 1:
        parts = parts[1:]
    if "_".join(parts) in _EXACT:
        return parts
    return [word for part in parts if (word := part if part in _EXACT else part.strip("0123456789"))]


def _infer_from_words(words: list[str]) -> tuple[Direction, str] | None:
    """Return direction and source for the words of a name, or None if unknown."""
    for start, word in enumerate(words):
        rest = words[start:]
        is_suffix = start > 0 and word in _SUFFIXES  # "x_loss" is decided by the rule below, not by "loss"
        if not is_suffix and (direction := _EXACT.get("_".join(rest))):
            return direction, "the exact table"
        if word in ("neg", "negative"):
            if inferred := _infer_from_words(rest[1:]):
                return ("min" if inferred[0] == "max" else "max"), f"{inferred[1]}, turned around by '{word}_'"
            return None
        if word in _WITHIN or word in _UNCLEAR_WORDS:
            break  # the word belongs to the metric, so it is not the name of a dataset
    suffix = words[-1] if len(words) > 1 else ""
    if suffix in ("error", "loss"):
        return None if _INVERTING_WORDS.intersection(words) else (_SUFFIXES[suffix], "scikit-learn's suffix rule")
    inferred = _infer_from_each_word(words)
    if suffix == "score" and inferred is not None:
        return inferred[0], "scikit-learn's suffix rule"
    return inferred


def _infer_from_each_word(words: list[str]) -> tuple[Direction, str] | None:
    """Return the direction that all words agree on, and the first of them; None if they do not."""
    directions: list[tuple[Direction, str]] = []
    start = 0
    while start < len(words):
        for length in range(min(_MAX_WORDS, len(words) - start), 0, -1):
            name = "_".join(words[start : start + length])
            if direction := _WITHIN.get(name):
                directions.append((direction, f"the word {name!r}"))
                break
        else:
            length = 1
            if words[start] in _UNCLEAR_WORDS:
                return None
        start += length
    return directions[0] if len({direction for direction, _ in directions}) == 1 else None


class Objective:
    """The metric a run optimizes, and its best value so far.

    Two things are kept apart. The *best* evaluation is simply the one with the best value; on a tie, the first.
    *Patience* counts the evaluations since the last gain of more than `delta`, so small gains can add up to one.

    >>> objective = Objective("accuracy", delta=0.1)
    >>> values = [0.5, 0.55, 0.53, 0.62]
    >>> [objective.update(value, step) for step, value in enumerate(values, start=1)]
    [True, True, False, True]
    >>> objective.best, objective.best_step, objective.evaluations_without_gain
    (0.62, 4, 0)
    """

    def __init__(
        self,
        metric: str = "loss",
        direction: Direction | None = None,
        delta: float = 0.0,
        higher_is_better: bool | None = None,
    ) -> None:
        """Determine the direction.

        Args:
            metric: The metric's name, with or without `eval_`.
            direction: "max", "min", or None to infer it from the name.
            delta: For patience, a gain must be larger than this.
            higher_is_better: The metric object's own attribute, if there is one.

        Raises:
            ConfigError: An argument is wrong.
            ObjectiveError: The direction is unknown.
        """
        if not isinstance(metric, str) or not metric.removeprefix("eval_"):
            raise ConfigError(f"`optimization_metric` must be the name of a metric, got {metric!r}.")
        if direction not in ("max", "min", None):
            raise ConfigError(f"`optimization_direction` must be 'max', 'min' or None, got {direction!r}.")
        check_number("delta", delta, least=0)
        self.metric: str = metric.removeprefix("eval_")
        self.source: str = "optimization_direction"
        if direction is None:
            direction, self.source = infer_direction(self.metric, higher_is_better)
        self.direction: Direction = direction
        self.delta: float = float(delta)
        self.best: float | None = None
        self.best_step: int | None = None
        self.latest: float | None = None
        self.evaluations_without_gain: int = 0
        self._reference: float | None = None

    def key(self, metrics: Mapping[str, Any]) -> str:
        """Return the key of `metrics` that holds the metric.

        Raises:
            ObjectiveError: It is missing.
        """
        for name in (f"eval_{self.metric}", self.metric):
            if name in metrics:
                return name
        known = [bare_name(name) for name in metrics if name not in ("epoch", "step")]
        raise ObjectiveError(
            f"`optimization_metric={self.metric!r}` is not among the metrics: {quote_names(known)}."
            f"{did_you_mean(self.metric, known)}"
        )

    def check(self, names: Iterable[str]) -> None:
        """Raise ObjectiveError for a metric that is not among the results of evaluations, without `eval_`."""
        self.key(dict.fromkeys(f"eval_{name}" for name in names))

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether `value` is strictly better; one that is not finite never is, and any finite one beats it."""
        if not math.isfinite(value):
            return False
        return than is None or not math.isfinite(than) or self._gain(value, than) > 0

    def update(self, value: float, step: int, counts: bool = True) -> bool:
        """Record an evaluation, and return whether it is the best so far.

        Args:
            value: The metric's value.
            step: The optimizer step it was measured at.
            counts: Whether it counts for patience; the evaluation before training does not. A value that is not
                finite never counts: it says nothing about a gain.
        """
        self.latest = float(value) if math.isfinite(value) else None
        if self._reference is None:
            is_gain = math.isfinite(value)
        else:
            gain = self._gain(value, self._reference)
            # As floats, 0.8 - 0.7 is slightly more than 0.1, but it must not exceed a delta of 0.1.
            is_gain = math.isfinite(value) and gain > self.delta and not math.isclose(gain, self.delta)
        if is_gain:
            self._reference = float(value)
            self.evaluations_without_gain = 0
        elif counts and math.isfinite(value):
            self.evaluations_without_gain += 1
        if not self.is_better(value, self.best):
            return False
        self.best, self.best_step = float(value), step
        return True

    def _gain(self, value: float, than: float) -> float:
        return value - than if self.direction == "max" else than - value

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON types."""
        return {
            "metric": self.metric,
            "direction": self.direction,
            "best": self.best,
            "best_step": self.best_step,
            "latest": self.latest,
            "evaluations_without_gain": self.evaluations_without_gain,
            "reference": self._reference,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Reject the state of an objective with another metric or direction, whose best value cannot be compared.

        Raises:
            CheckpointError: With both metrics and directions.
        """
        theirs, ours = (state["metric"], state["direction"]), (self.metric, self.direction)
        if theirs != ours:
            raise CheckpointError(
                f"The checkpoint was made with `optimization_metric={theirs[0]!r}` ({theirs[1]}), and this run has "
                f"{ours[0]!r} ({ours[1]}). Resume with the metric and direction of the checkpoint."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict()`; `delta` is not part of it and may change.

        Raises:
            CheckpointError: It comes from a run with another metric or direction.
        """
        self.check_state(state)
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.latest = state["latest"]
        self.evaluations_without_gain = state["evaluations_without_gain"]
        self._reference = state["reference"]
