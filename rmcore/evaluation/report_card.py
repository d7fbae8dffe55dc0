"""The report card of a reward model: every held-out metric of a pair table with its 95 % interval over prompts.

One bootstrap draws the prompts; each metric is a function of the drawn weights. Temperature scaling has its own two
samples: it is fitted on some prompts and judged on others.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, prefixed, silent
from rmcore.evaluation import calibration as calib
from rmcore.evaluation.ranking import (
    ALIKE,
    BY_PROMPT,
    OVER_BASELINE,
    ROC_AUC,
    SIDE_THRESHOLDS,
    MarginPercentiles,
    OverBaseline,
    PooledSides,
    PromptMean,
    Spread,
    correctness,
    mean_statistic,
    mean_value,
    pair_means,
    prompt_sizes,
    softplus,
)
from rmcore.evaluation.rewards import RewardTable
from rmcore.evaluation.uncertainty import MetricValue, Resampled, cluster_bootstrap, metric_value


def evaluate_pairs(
    rewards: pd.DataFrame,
    *,
    calibration: pd.DataFrame | None = None,
    num_resamples: int = 1000,
    num_bins: int = 10,
    thresholds: Sequence[float] | None = SIDE_THRESHOLDS,
    seed: int = 0,
    beta: float = 1.0,
    report: Report = silent,
) -> dict[str, MetricValue]:
    """Every metric of held-out pairs, with 95 % intervals resampled over prompts.

    Definitions: `rmcore.evaluation.ranking` (pairwise_accuracy, tie_rate, loss, mean_margin, margin_std, margin_p05 to
    p95, negative_margin_rate, brier, roc_auc, tpr/fpr/fnr@t, length_matched_accuracy, longer_wins_accuracy,
    accuracy_over_baseline, accuracy_by_prompt, pairwise_accuracy[subset], within_prompt_ and pooled_reward_variance)
    and `rmcore.evaluation.calibration` (ece_debiased, temperature). ece_tempered_debiased is the calibration error of
    beta * margin / temperature on pairs that the temperature was not fitted on.

    Intervals are expanded percentile intervals (`percentile_interval`); a share that is the same in all prompts gets
    the exact bound over prompts (`with_unseen_prompts`), and what weighs prompts by their pairs the effective number of
    prompts, with what larger ones than were seen may say (`metric_value`). A calibration error has
    `BinnedCalibration.interval`.

    Args:
        rewards: one row a pair with pair_id, prompt_id (of a dialogue, that of its first user turn), reward_chosen,
            reward_rejected (logits), chosen_chars, rejected_chars, subset (text or null).
        calibration: a separate split of the same form to fit the temperature on; pairs whose prompt also occurs in
            `rewards` are left out. None: the temperature is fitted on a hash-half of the prompts of `rewards` and
            ece_tempered_debiased is over the other half.
        num_resamples: bootstrap resamples (1000: the ends of a 95 % interval rest on 25 resamples each).
        num_bins: calibration bins over confidence 0.5 to 1.
        thresholds: of tpr, fpr and fnr, between 0 and 1; None: no metric of single sides, roc_auc neither.
        seed: of the resampling.
        beta: scale of the reward model's margins (`BradleyTerryRM.beta`): P(chosen preferred) is
            sigmoid(beta * margin) in every metric that is about probabilities. Rewards and margins are given as they
            are.
        report: of both bootstraps; see `cluster_bootstrap`.

    Raises:
        DataError: columns are missing, there is no pair, or a reward is not finite (names the pairs).
        ConfigError: num_resamples or num_bins is below 1, or beta is no finite number above 0.
    """
    table = RewardTable.from_frame(rewards, beta=beta)
    means = pair_means(table)
    by_name = {mean.name: mean for mean in means}
    others = (
        OverBaseline(table),
        PromptMean(table),
        Spread(table),
        MarginPercentiles(table),
        *(() if thresholds is None else (PooledSides(table, thresholds),)),
    )

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        values = {mean.name: mean_statistic(mean, table.prompt, weights) for mean in means}
        for statistic in others:
            values |= statistic(weights)
        return values

    resampled = cluster_bootstrap(
        compute, table.num_prompts, num_resamples=num_resamples, seed=seed, row_size=table.num_pairs, report=report
    )
    metrics = {
        name: mean_value(by_name[name], table.prompt, resampled) if name in by_name else _value(name, table, resampled)
        for name in resampled.point
    }
    metrics["ece_debiased"] = _calibration_error(table, 1.0, num_bins)
    fit, judge = _temperature_split(rewards, calibration, beta)
    return metrics | _tempered(fit, judge, num_resamples, num_bins, seed, prefixed(report, "temperature"))


def _value(name: str, table: RewardTable, resampled: Resampled) -> MetricValue:
    """Value and interval of a metric over all pairs."""
    return resampled.value(
        name,
        num_prompts=table.num_prompts,
        num_pairs=table.num_pairs,
        is_share="@" in name or name in (ROC_AUC, BY_PROMPT),
        is_difference=name == OVER_BASELINE,
        is_across=name == ROC_AUC,
        sizes=None if name in ALIKE else prompt_sizes(table.prompt),
    )


def _calibration_error(table: RewardTable, temperature: float, num_bins: int) -> MetricValue:
    """The debiased error of log-odds / temperature."""
    return calib.BinnedCalibration(table.log_odds / temperature, table.prompt, table.num_prompts, num_bins).value()


def _temperature_split(
    rewards: pd.DataFrame, calibration: pd.DataFrame | None, beta: float
) -> tuple[RewardTable | None, RewardTable | None]:
    """Pairs to fit the temperature on and pairs to judge it on, disjoint in prompts; None where a part is empty."""
    table = RewardTable.from_frame(rewards, beta=beta)
    if calibration is None:
        half = calib.fitting_half(rewards["prompt_id"])
        return (table.take(half) if half.any() else None, table.take(~half) if not half.all() else None)
    other = RewardTable.from_frame(calibration, "calibration", beta=beta)
    # A prompt in both splits would be fitted and judged on: the error left would flatter the temperature.
    new = ~calibration["prompt_id"].astype(str).isin(set(rewards["prompt_id"].astype(str))).to_numpy()
    return (other.take(new) if new.any() else None, table)


def _tempered(
    fit: RewardTable | None, judge: RewardTable | None, num_resamples: int, num_bins: int, seed: int, report: Report
) -> dict[str, MetricValue]:
    """Fitted temperature over the fitting pairs; the error that it leaves over the judging pairs."""
    if fit is None:
        none = MetricValue(None, None, None, 0, "no prompt is left to fit the temperature on; pass a calibration split")
        return {"temperature": none, "ece_tempered_debiased": none}
    temperature, reason = calib.fit_temperature(fit.log_odds)
    if temperature is None:
        return {
            "temperature": MetricValue(None, None, None, fit.num_pairs, reason),
            "ece_tempered_debiased": MetricValue(None, None, None, 0, f"no temperature: {reason}"),
        }
    statistic = calib.TemperatureStatistic(fit.log_odds, fit.prompt, fit.num_prompts, temperature)
    fitted = cluster_bootstrap(statistic, fit.num_prompts, num_resamples=num_resamples, seed=seed, report=report)
    replicates = fitted.replicates.get("temperature")
    metrics = {
        "temperature": metric_value(
            temperature,
            replicates,
            num_prompts=fit.num_prompts,
            num_pairs=fit.num_pairs,
            sizes=prompt_sizes(fit.prompt),
        )
    }
    if judge is None:
        why = "no prompt is left to judge the temperature on; pass a calibration split"
        return metrics | {"ece_tempered_debiased": MetricValue(None, None, None, 0, why)}
    return metrics | {"ece_tempered_debiased": _calibration_error(judge, temperature, num_bins)}


def most_confident_mistakes(rewards: pd.DataFrame, *, beta: float = 1.0) -> pd.DataFrame:
    """Pairs with negative margins, the most negative first, with columns margin and confidence added.

    Confidence is sigmoid(beta * |margin|), the probability that the model gave to the wrong side. Equal margins are
    ordered by pair_id, so the table does not depend on the row order.

    Raises:
        ConfigError: beta is no finite number above 0.
        DataError: a column is missing or a reward is not finite.
    """
    pairs = RewardTable.from_frame(rewards, beta=beta)
    confidence, _ = calib.confidence_and_correctness(pairs.log_odds)
    table = rewards.assign(margin=pairs.margin, confidence=confidence)
    return table[pairs.margin < 0].sort_values(["margin", "pair_id"], kind="stable").reset_index(drop=True)


def batch_metrics(
    rewards: npt.ArrayLike, num_bins: int = 10, thresholds: Sequence[float] = SIDE_THRESHOLDS, *, beta: float = 1.0
) -> dict[str, float]:
    """Quick metrics of (P, 2) rewards, chosen first, without intervals, for validation during training.

    Keys, as in `evaluate_pairs`: pairwise_accuracy (ties half), tie_rate, loss (nats),
    mean_margin, margin_std (population), margin_p05 to margin_p95, negative_margin_rate, ece (plug-in), and of the
    single sides roc_auc and tpr@t, fpr@t, fnr@t for each of `thresholds`. `beta` as there.

    Raises:
        DataError: there is no pair, or a reward is not finite (names the positions).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != 2 or len(values) == 0:
        raise DataError(
            f"batch_metrics got rewards of shape {values.shape}: it needs a row a pair, chosen and rejected, at least "
            "one."
        )
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise DataError(
            f"rewards of {len(bad)} of {len(values)} pairs are not finite, first at positions {bad[:5].tolist()}: the "
            "model diverged or overflowed. Lower the learning rate, or use fp32."
        )
    table = RewardTable.of_rewards(values, beta=beta)
    margin = table.margin
    once = np.ones((1, table.num_pairs))  # (1, P): here each pair is its own cluster, and nothing is resampled
    sides = PooledSides(table, thresholds)(once) | MarginPercentiles(table)(once)
    return {
        "pairwise_accuracy": float(correctness(margin).mean()),
        "tie_rate": float((margin == 0).mean()),
        "loss": float(softplus(-table.log_odds).mean()),
        "mean_margin": float(margin.mean()),
        "margin_std": float(margin.std()),
        "negative_margin_rate": float((margin < 0).mean()),
        "ece": calib.expected_calibration_error(table.log_odds, num_bins),
    } | {name: float(value[0]) for name, value in sides.items()}
