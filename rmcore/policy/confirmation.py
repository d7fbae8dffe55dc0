"""Best-of-n as it would be served, on fresh prompts: whether the gold reward rose for certain.

Readiness judges a plan from samples of some prompts. This carries the plan out on others: n samples of each prompt are
scored, the best is what a user would get, and a judge compares it with samples that were not among the n. It takes a
judgement of `1 + OPPONENTS` responses a prompt, however large n is.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, metric_value
from rmcore.policy.sampling.best_of_n import nominal_kl

OPPONENTS = 4
"""Samples of each prompt that the best is compared with: enough to know how far samples of a prompt lie apart."""
FEWEST_TELLING = 10
"""Prompts whose judged responses differ, below which no interval is given: a few of them decide alone then, and
resamples without them have no unit. With one in 200, 30 % of "gained" were false (simulated)."""
MOST_SAMPLES = 4096
FURTHEST_KL = nominal_kl(MOST_SAMPLES)
"""7.3 nats: a plan beyond them is none that best-of-n carries out."""


def smallest_n(planned_kl: float) -> int:
    """The smallest power of two whose best-of-n moves by at least `planned_kl` nats, where no samples tie.

    Raises:
        DataError: it is beyond `MOST_SAMPLES`.
    """
    n = 2
    while nominal_kl(n) < planned_kl:
        n *= 2
        if n > MOST_SAMPLES:
            raise DataError(
                f"best-of-n moves a policy by log n - (n - 1) / n nats, which is {FURTHEST_KL:.2f} at n = "
                f"{MOST_SAMPLES}, and {planned_kl:g} are planned; lower readiness.planned_kl, or train a policy."
            )
    return n


def confirm(best: FloatArray, opponents: FloatArray, *, num_resamples: int, seed: int) -> dict[str, MetricValue]:
    """Measure the gain on C prompts from serving the best of n instead of one sample.

    Args:
        best: (C,) a reward of the response that was chosen.
        opponents: (C, M) the same reward of M samples of the same prompts that it was not chosen from.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Returns:
        gain: mean of the chosen one minus mean of a sample, in standard deviations of samples within prompts;
        win_rate: how often the chosen one beats a sample, ties half. Each with a 95 % interval over prompts, or with
        the reason why there is none: fewer than `FEWEST_TELLING` prompts tell the responses apart.

    Raises:
        DataError: there are not two prompts with two opponents each, a reward is not finite, or all samples of each
            prompt have one reward.
    """
    if best.ndim != 1 or opponents.shape[:1] != best.shape or opponents.shape[1:] < (2,) or len(best) < 2:
        raise DataError(
            f"rewards of shape {best.shape} for the chosen ones and {opponents.shape} for the others: two prompts or "
            "more are needed, with one chosen response and the same number of others, at least two, each."
        )
    if not (np.isfinite(best).all() and np.isfinite(opponents).all()):
        raise DataError("a reward of these responses is not finite, so no gain follows from them; judge them again.")
    usual = opponents.mean(axis=1)  # (C,)
    rise = best - usual  # (C,)
    squares = ((opponents - usual[:, None]) ** 2).sum(axis=1)  # (C,), of M - 1 freedoms each
    if not squares.any():
        raise DataError(
            "all samples of each prompt got one and the same reward, so a gain has no unit. A judge that gives "
            "constants, or a policy that always answers alike, cannot be judged."
        )
    wins = ((1 + np.sign(best[:, None] - opponents)) / 2).mean(axis=1)  # (C,)
    free = opponents.shape[1] - 1

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        num_prompts = weights.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample of prompts without any spread: no number
            deviation = np.sqrt(weights @ squares / (free * num_prompts))
            return {"gain": weights @ rise / num_prompts / deviation, "win_rate": weights @ wins / num_prompts}

    num_telling = int(((np.ptp(opponents, axis=1) > 0) & (rise != 0)).sum())
    if num_telling < FEWEST_TELLING:
        point = compute(np.ones((1, len(best))))
        reason = (
            f"the judge tells the chosen response and the others apart on {num_telling} of {len(best)} prompts, and an "
            f"interval takes {FEWEST_TELLING}"
        )
        return {name: MetricValue(float(value[0]), None, None, len(best), reason) for name, value in point.items()}
    drawn = cluster_bootstrap(compute, len(best), num_resamples=num_resamples, seed=seed)
    return {
        name: metric_value(value, drawn.replicates.get(name), num_prompts=len(best), num_pairs=len(best))
        for name, value in drawn.point.items()
    }


def verdict_of_confirmation(record: dict[str, Any]) -> dict[str, Any]:
    """Judge by the 95 % interval of its gain whether the gold reward rose when best-of-n was served.

    Args:
        record: n, num_prompts, min_gain, and gold and proxy, {"gain", "win_rate"} each, as `confirm` gives them.

    Returns:
        {"status": rose, fell or unclear, "headline", "reasons"}.
    """
    gain = record["gold"]["gain"]
    where = f"best-of-{record['n']} on {record['num_prompts']} fresh prompts"
    if gain["ci_low"] is None:
        headline = f"Unclear whether gold moved, {gain['value']:+.2f} sd without an interval, by {where}"
        return {"status": "unclear", "headline": headline, "reasons": [gain["reason"] or "there is no interval"]}
    shown = shown_gain(gain)
    reasons = []
    if gain["ci_low"] > 0:
        status, headline = "rose", f"Gained {shown} of gold by {where}"
        if gain["ci_low"] < record["min_gain"]:
            reasons.append(f"a gain of {record['min_gain']:g} sd was asked for, and is not shown")
    elif gain["ci_high"] < 0:
        status, headline = "fell", f"Lost gold, {shown}, by {where}"
    else:
        status, headline = "unclear", f"Unclear whether gold moved, {shown}, by {where}"
        reasons.append("more fresh prompts narrow the interval (policy.fresh_prompts)")
    return {"status": status, "headline": headline, "reasons": reasons}


def shown_gain(value: Mapping[str, Any]) -> str:
    """A gain in standard deviations with its interval, as verdicts say it; without one where there is none."""
    if value["ci_low"] is None:
        return f"{value['value']:+.2f} sd"
    return f"{value['value']:+.2f} sd ({value['ci_low']:+.2f} to {value['ci_high']:+.2f})"
