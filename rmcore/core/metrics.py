"""The registry of metrics: what each is called, its unit, its definition, which way is better and how it is judged.

Tables, figures, bands, experiments and MLflow's names look a metric up here; none has a table of its own. It is in
the core because evaluation and reporting, which may not import one another, both read it, and an experiment is declared
without either. No stage imports it, so that a reworded label has no artifact computed again.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from rmcore.core.capabilities import capabilities
from rmcore.core.errors import ConfigError
from rmcore.core.metric_spec import Bands, MetricSpec

_OF_PAIRS = (
    MetricSpec(
        "pairwise_accuracy",
        "pairwise accuracy",
        "share",
        "share of pairs whose chosen side gets the higher reward; ties count half",
        better="higher",
        cell_name="eval/test_pairwise_accuracy",
        cell_label="held-out pairwise accuracy",
        stage="evaluate",
        within_unit=True,
        bands=Bands(
            "eval accuracy", ((0.58, 0.63, "acceptable"), (-math.inf, 0.58, "failure"), (0.63, math.inf, "success"))
        ),
    ),
    MetricSpec(
        "accuracy_by_prompt",
        "accuracy, each prompt alike",
        "share",
        "mean over prompts of the accuracy of each one's pairs: prompts with many pairs do not outweigh the others",
        better="higher",
    ),
    MetricSpec(
        "length_matched_accuracy",
        "length-matched accuracy",
        "share",
        "pairwise accuracy where the two completions differ by less than 15 % in characters, so length helps little",
        better="higher",
        cell_name="eval/test_length_matched_accuracy",
        cell_label="accuracy on pairs of about equal length",
        stage="evaluate",
        within_unit=True,
    ),
    MetricSpec(
        "expected_accuracy",
        "expected accuracy",
        "share",
        "pairwise accuracy against fresh labels, where the chance that these name either side is known: without the "
        "luck of the labels drawn",
        better="higher",
        cell_name="eval/test_expected_accuracy",
        cell_label="held-out accuracy, labels' luck removed",
        stage="evaluate",
        within_unit=True,
    ),
    MetricSpec(
        "longer_wins_accuracy",
        "“the longer one wins”",
        "share",
        "accuracy of always preferring the longer completion, pairs of equal length half: a yardstick, not this model",
    ),
    MetricSpec(
        "accuracy_over_baseline",
        "accuracy minus best baseline",
        "points",
        "pairwise accuracy minus that of the best baseline: chance, always the longer, or always the shorter "
        "completion, ties half; at zero or less, length alone does as well",
        better="higher",
    ),
    MetricSpec("tie_rate", "ties", "share", "share of pairs with exactly equal rewards"),
    MetricSpec(
        "loss",
        "loss",
        "nats",
        "mean of log(1 + exp(−β · margin)), β as in training; 0.693 is guessing",
        better="lower",
        cell_name="eval/test_loss",
        cell_label="held-out loss",
        stage="evaluate",
    ),
    MetricSpec(
        "mean_margin",
        "mean margin",
        "logits",
        "mean of reward(chosen) − reward(rejected)",
        cell_name="eval/test_mean_margin",
        cell_label="mean held-out margin",
        stage="evaluate",
    ),
    MetricSpec("margin_std", "spread of margins", "logits", "standard deviation of the margins"),
    MetricSpec("margin_p05", "margin, 5th percentile", "logits", "5 % of the margins are below"),
    MetricSpec("margin_p25", "margin, 25th percentile", "logits", "a quarter of the margins is below"),
    MetricSpec("margin_p50", "median margin", "logits", "half of the margins are below"),
    MetricSpec("margin_p75", "margin, 75th percentile", "logits", "three quarters of the margins are below"),
    MetricSpec("margin_p95", "margin, 95th percentile", "logits", "95 % of the margins are below"),
    MetricSpec(
        "negative_margin_rate",
        "negative margins",
        "share",
        "share of pairs ranked the wrong way round",
        better="lower",
        cell_name="eval/test_negative_margin_rate",
        cell_label="share of negative margins",
        stage="evaluate",
        within_unit=True,
    ),
    MetricSpec(
        "ece_debiased",
        "calibration error (ECE), debiased",
        "",
        "mean gap between confidence max(p, 1 − p), p = sigmoid(β · margin), and accuracy over bins of confidence, "
        "without the upward bias of binning; 0 where none was found",
        better="lower",
        cell_name="calib/test_ece_debiased",
        stage="evaluate",
        within_unit=True,
        floor=0.0,
    ),
    MetricSpec(
        "ece_tempered_debiased",
        "ECE after temperature, debiased",
        "",
        "debiased ECE of β · margin / temperature, on pairs that the temperature was not fitted on",
        floor=0.0,
    ),
    MetricSpec(
        "temperature",
        "temperature",
        "",
        "the number to divide β · margin by for the best probabilities; above 1 the model is too sure of itself",
    ),
    MetricSpec(
        "brier",
        "Brier score",
        "",
        "mean squared error of the probability; 0.25 is guessing",
        better="lower",
        cell_name="calib/test_brier",
        stage="evaluate",
    ),
    MetricSpec(
        "roc_auc",
        "ROC AUC (secondary)",
        "",
        "chance that a chosen side outscores a rejected side of any prompt; compares offsets between prompts that "
        "training leaves free",
    ),
    MetricSpec(
        "pooled_reward_variance", "reward variance, pooled", "logits²", "variance of all held-out rewards together"
    ),
    MetricSpec(
        "within_prompt_reward_variance",
        "reward variance within prompts",
        "logits²",
        "variance among answers to the same prompt, averaged over prompts",
    ),
    MetricSpec(
        "train_test_gap",
        "train − test accuracy",
        "share",
        "how much better the model does on pairs that it has seen",
        better="lower",
        cell_name="eval/train_test_gap",
        cell_label="train accuracy minus held-out accuracy",
        stage="evaluate",
        bands=Bands(  # failure is only what is beyond: gap > 15 points
            "train-test gap", ((0.10, 0.15, "acceptable"), (-math.inf, 0.10, "success"), (0.15, math.inf, "failure"))
        ),
    ),
    MetricSpec(
        "loss_after_temperature",
        "loss after temperature",
        "nats",
        "loss of β · margin / temperature: what is left when the scale is set right",
    ),
)

_OF_ANSWERS = tuple(
    spec
    for n in (4, 16)
    for spec in (
        MetricSpec(
            f"answers_gain_{n}",
            f"gain of the best of {n} judged answers",
            "sd",
            "by the judge, over a blind choice, in its deviations within prompts",
            better="higher",
            cell_name=f"eval/answers_gain_{n}",
            stage="evaluate",
        ),
        MetricSpec(
            f"answers_win_rate_{n}",
            f"win rate of the best of {n} judged answers",
            "share",
            "how often the judge prefers it to one more answer",
            better="higher",
            cell_name=f"eval/answers_win_rate_{n}",
            stage="evaluate",
            within_unit=True,
        ),
    )
)

_OF_POLICIES = (
    MetricSpec("readiness_v1", "original score (v1)", "", "a weighted score of four numbers; no verdict"),
    MetricSpec("on_policy_accuracy", "on-policy accuracy", "share", "accuracy on pairs of the policy's own samples"),
    MetricSpec(
        "hard_accuracy", "hard on-policy accuracy", "share", "the same where the shorter sample is the better one"
    ),
    MetricSpec("win_rate_16", "best-of-16 win rate", "share", "how often the best of 16 samples beats one more"),
    MetricSpec("planned_gain", "gain at the planned KL", "sd", "of the true reward, in deviations within prompts"),
    MetricSpec(
        "planned_fall", "fall before the planned KL", "sd", "gain at the planned KL minus the highest before it"
    ),
    MetricSpec(
        "telling_prompts",
        "prompts the judge can separate",
        "count",
        "independent prompts whose samples the judge tells apart",
    ),
    MetricSpec("unseen_prompts", "gain with unseen prompts", "sd", "the gain if all prompts left out lose the most"),
    MetricSpec("worthwhile_gain", "worthwhile gain", "sd", "gain at the planned KL, at the upper end of its interval"),
    MetricSpec("fall", "fall", "sd", "gain at the planned KL minus the highest before it"),
)

_OF_TRAINING = (
    MetricSpec("num_steps", "steps until training stopped", "steps", cell_name="train/num_steps", stage="train"),
    MetricSpec(
        "stop_share",
        "share of the planned steps that were run",
        "share",
        cell_name="train/stop_share",
        stage="train",
        within_unit=True,
        bands=Bands(  # the plan has them in steps of 1000, and leaves open what stops before 400
            "stopped after",
            (
                (0.40, 0.60, "success"),
                (0.60, 0.90, "acceptable"),
                (-math.inf, 0.40, "early"),
                (0.90, math.inf, "failure"),
            ),
        ),
    ),
    MetricSpec("best_step", "step of the kept checkpoint", "steps", cell_name="train/best_step", stage="train"),
    MetricSpec(
        "steps_to_target",
        "steps to the target accuracy",
        "steps",
        better="lower",
        cell_name="train/steps_to_target",
        stage="train",
        floor=0.0,
        needs_target=True,
    ),
    MetricSpec(
        "seconds_to_target",
        "training time to the target accuracy",
        "seconds",
        better="lower",
        cell_name="cost/seconds_to_target",
        stage="train",
        floor=0.0,
        needs_target=True,
    ),
    MetricSpec(
        "train_seconds",
        "training time",
        "seconds",
        better="lower",
        cell_name="cost/train_seconds",
        stage="train",
        floor=0.0,
    ),
    MetricSpec(
        "train_pairs_per_second",
        "training throughput",
        "pairs/s",
        better="higher",
        cell_name="cost/train_pairs_per_second",
        stage="train",
    ),
    MetricSpec(
        "peak_training_mib",
        "peak memory of training above the weights",
        "MiB",
        better="lower",
        cell_name="cost/peak_training_mib",
        stage="train",
    ),
    MetricSpec(
        "peak_total_mib",
        "peak memory of training with the weights",
        "MiB",
        "the peak above them and the weights in float32",
        better="lower",
        cell_name="cost/peak_total_mib",
        stage="train",
    ),
    MetricSpec(
        "trained_share",
        "share of the parameters that is trained",
        "share",
        cell_name="train/trained_share",
        stage="train",
        within_unit=True,
    ),
)

_OF_CAPABILITIES = tuple(spec for one in capabilities().values() for spec in one.metrics)

METRICS: dict[str, MetricSpec] = {
    spec.name: spec for spec in (*_OF_PAIRS, *_OF_ANSWERS, *_OF_POLICIES, *_OF_TRAINING, *_OF_CAPABILITIES)
}
"""By name, in the order of a report's table."""

CELL_METRICS: dict[str, MetricSpec] = {spec.cell_name: spec for spec in METRICS.values() if spec.cell_name}
"""Metrics that an experiment can report of its cells, by the names that it, MLflow and its report use."""

CELL_STAGES = tuple(dict.fromkeys(("prepare", "train", *(spec.stage for spec in CELL_METRICS.values() if spec.stage))))
"""Stages that a cell may run, in order."""

BANDS: dict[str, Bands] = {spec.bands.about: spec.bands for spec in CELL_METRICS.values() if spec.bands is not None}
"""By what they are said of."""

CURVES: dict[str, MetricSpec] = {
    "eval/pairwise_accuracy": replace(METRICS["pairwise_accuracy"], label="validation accuracy"),
    "train/loss": replace(METRICS["loss"], label="training loss"),
}
"""Curves that an experiment's report draws over optimizer steps, by the names of `metrics.jsonl`."""

HEADLINE = (
    "eval/test_pairwise_accuracy",
    "eval/test_accuracy_over_baseline",
    "eval/test_loss",
    "calib/test_ece_debiased",
    "ready/best_of_n_planned_gain",
    "cost/train_seconds",
    "cost/train_pairs_per_second",
    "eval/ood_pairwise_accuracy",
    "eval/train_pairwise_accuracy",
    "ready/kl_optimum_planned_gain",
    "policy/trained_gold",
    "policy/trained_kl",
    "policy/served_value",
    "cost/peak_training_mib",
    "cost/rlhf_tokens_per_second",
)
"""Final numbers that become metrics in MLflow, by their names in `summary.json`; the first eight are columns of a
study's table. All others are in the run's artifact `numbers.json`."""
HEADLINE_FAMILY = "ready/logged_gain_"
"""Beginning of names that become metrics there, too: one for each number of answers that was chosen from."""
NUM_COLUMNS = 8
WATCHED = re.compile(
    r"train/(loss|lr|log10_lr|grad_norm)|cost/pairs_per_second|eval/(loss|pairwise_accuracy)|hessian/lambda_max"
    r"|policy/(loss|kl|proxy|gold|win_rate|(reward|tokens|weight_version|measured_(kl|gold))_seed\d+)"
)
"""Names of the curves that are watched while something runs; `metrics.jsonl` has all others."""

_FAMILIES = (
    MetricSpec("pairwise_accuracy[", "accuracy: {}", "share", "pairwise accuracy over the pairs of this subset"),
    MetricSpec(
        "tpr@",
        "true positive rate at {}",
        "share",
        "share of chosen sides with sigmoid(β (reward − mean)) at or above it",
    ),
    MetricSpec(
        "fpr@",
        "false positive rate at {}",
        "share",
        "share of rejected sides with sigmoid(β (reward − mean)) at or above it",
    ),
    MetricSpec(
        "fnr@", "false negative rate at {}", "share", "share of chosen sides with sigmoid(β (reward − mean)) below it"
    ),
    MetricSpec("win_rate_", "best-of-{} win rate", "share", "how often the best of so many samples beats one more"),
)
"""One metric a subset or threshold: what their names begin with."""


def metric_spec(name: str) -> MetricSpec:
    """Look up a metric, also one of a subset or a threshold; one that is not listed has its own name as label."""
    if name in METRICS:
        return METRICS[name]
    for family in _FAMILIES:
        if name.startswith(family.name):
            part = name[len(family.name) :].removesuffix("]")
            return replace(family, name=name, label=family.label.format(part))
    return MetricSpec(name, name.replace("_", " "), "")


def floored(name: str, value: float | None) -> float | None:
    """`value`, or an end of its interval, as people are shown it: not below the floor of its metric.

    Args:
        name: of the metric, as it is computed or as a cell reports it.
        value: None stays None.
    """
    floor = _floor(name)
    return value if floor is None or value is None else max(value, floor)


def is_at_floor(name: str, value: float | None) -> bool:
    """Whether nothing was found of a metric that has a floor: shown are the floor and the upper end of the interval."""
    floor = _floor(name)
    return floor is not None and value is not None and value <= floor


def _floor(name: str) -> float | None:
    return (CELL_METRICS.get(name) or metric_spec(name)).floor


def metric_order(name: str) -> tuple[int, str]:
    """Sort key: listed metrics in the order of METRICS, then subsets and thresholds, then the rest by name."""
    if name in METRICS:
        return list(METRICS).index(name), ""
    listed = [index for index, family in enumerate(_FAMILIES) if name.startswith(family.name)]
    return len(METRICS) + (listed[0] if listed else len(_FAMILIES)), name


def band(name: str, value: float) -> str:
    """The band of one value.

    Raises:
        ConfigError: there are no bands of that name, or the value is not finite.
    """
    if name not in BANDS:
        raise ConfigError(f"no bands for {name!r}; there are {', '.join(BANDS)}.")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value:g} is in no band; leave out what was not measured.")
    return next(word for low, high, word in BANDS[name].words if low <= value <= high)


def bands(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The band of every metric of a cell, by its name in the registry, that has bands and a value."""
    found = {}
    for name, spec in CELL_METRICS.items():
        value = metrics.get(name)
        if spec.bands is not None and value is not None:
            found[spec.bands.about] = band(spec.bands.about, value)
    return found
