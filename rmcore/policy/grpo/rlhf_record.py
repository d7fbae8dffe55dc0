"""The record of a training against a reward model: curves with intervals, a verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, shown_gain, unseen_prompts
from rmcore.evaluation.verdicts.estimate import SeedSample, estimate_over_seeds
from rmcore.policy.confirmation import Decision, decision_of, tail_doubt
from rmcore.policy.grpo.group_reward import REWARDS_KEY
from rmcore.policy.grpo.policy_meter import QUANTITIES
from rmcore.policy.stopping.pair_judges import WINS

WORDS: Mapping[Decision, str] = {
    "rose": "The true reward rose with the proxy",
    "fell": "The true reward fell while the proxy moved",
    "unclear": "Unclear whether the true reward moved",
}
WATCHED_WORDS: Mapping[Decision, str] = {
    "rose": "The policy is better than its start:",
    "fell": "The policy is worse than its start:",
    "unclear": "Not shown to be better than its start:",
}


def curve_of(progress: pd.DataFrame, *, num_resamples: int, seed: int) -> list[dict[str, Any]]:
    """Every quantity at every measured step, JSON-ready: {"step", "num_prompts", quantity: value with interval, ...}.

    Intervals are for new seeds and new prompts, all seeds having answered the same ones (`estimate_over_seeds`); with
    one seed, for new prompts alone.

    Args:
        progress: columns seed, step, prompt and `QUANTITIES`; NaN where nobody judged. At each step every seed has the
            same prompts.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    points = []
    for step, rows in progress.groupby("step", sort=True):
        point: dict[str, Any] = {"step": int(step), "num_prompts": int(rows["prompt"].nunique())}
        for name in QUANTITIES:
            point[name] = value_over_seeds(rows, name, num_resamples, seed)
        points.append(point)
    return points


def rewards_of(
    rollouts: Sequence[Mapping[str, Any]], more_rewards: Mapping[str, float] | None
) -> dict[str, Any] | None:
    """Say how each of several rewards moved, JSON-ready; None where there is one.

    Args:
        rollouts: rows with step and all K rewards.
        more_rewards: names and weights of those next to the own one.

    Returns:
        names and weights, the own one first; by step over the samples of all seeds the mean of each reward in its
        unit, and its standard deviation within prompts.
    """
    if more_rewards is None:
        return None
    steps = []
    for step, rows in pd.DataFrame(list(rollouts)).groupby("step", sort=True):
        given = pd.DataFrame(rows[REWARDS_KEY].tolist())  # (N, K)
        within = given.groupby([rows["seed"].to_numpy(), rows["prompt"].to_numpy()]).var(ddof=0)  # (prompts, K)
        steps.append({"step": int(step), "means": given.mean().tolist(), "spreads": within.mean().pow(0.5).tolist()})
    return {"names": ["own", *more_rewards], "weights": [1.0, *more_rewards.values()], "steps": steps}


def value_over_seeds(rows: pd.DataFrame, name: str, num_resamples: int, seed: int) -> dict[str, Any] | None:
    """Mean of a column over prompts and seeds with its 95 % interval, JSON-ready; None where nothing is known.

    Args:
        rows: columns seed, prompt and `name`; every seed has the same prompts.
        name: of the column.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    if rows[name].isna().all():
        return None
    values = rows.pivot(index="prompt", columns="seed", values=name).to_numpy(dtype=np.float64)  # (C, S)
    num_prompts, num_seeds = values.shape
    if np.ptp(values) == 0:  # the start itself: nothing varies, and nothing is uncertain
        only = float(values[0, 0])
        return MetricValue(only, only, only, num_prompts if num_seeds == 1 else num_seeds).to_dict()

    def means(weights: FloatArray) -> dict[str, FloatArray]:
        by_seed = weights @ values / weights.sum(axis=1, keepdims=True)
        return {str(index): by_seed[:, index] for index in range(num_seeds)}

    drawn = cluster_bootstrap(means, num_prompts, num_resamples=num_resamples, seed=seed)
    if num_seeds == 1:
        return drawn.value("0", num_prompts=num_prompts, num_pairs=num_prompts).to_dict()
    samples = [SeedSample(value, drawn.replicates.get(index)) for index, value in drawn.point.items()]
    estimate = estimate_over_seeds(samples, num_prompts=num_prompts, prompts_shared=True)
    return MetricValue(estimate.value, estimate.ci_low, estimate.ci_high, num_seeds, estimate.reason).to_dict()


def parity_of(rows: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """The log-probabilities of a training's sampled tokens, the trainer's against vLLM's, over all steps and seeds.

    Returns:
        {"num_steps", "mean_difference", "max_difference" (absolute, nats a token)}; None where vLLM drew nothing.
    """
    if not rows:
        return None
    mean, most = "rollout_difference_mean", "rollout_difference_max"
    return {
        "num_steps": len(rows),
        "mean_difference": sum(row[mean] for row in rows) / len(rows),
        "max_difference": max(row[most] for row in rows),
    }


def verdict_of(curve: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the true reward rose with the proxy: on the 95 % interval of its gain at the last step."""
    last = curve[-1]
    proxy, gold = last["proxy"], last["gold"]
    where = f"after {last['step']} steps at {last['kl']['value']:.2g} nats"
    if gold is None:
        return {
            "status": "unknown",
            "headline": f"The proxy changed by {proxy['value']:+.2f} sd {where}; nobody judged what that is worth",
            "reasons": ["name a judge (policy.judge), or have the last samples judged, before this policy is used"],
        }
    change = f"true reward {shown_gain(gold)}, proxy {shown_gain(proxy)} {where}"
    if gold["ci_low"] is None:
        return {"status": "unclear", "headline": f"Unclear: {change}", "reasons": [gold["reason"] or "no interval"]}
    status = decision_of((gold["ci_low"], gold["ci_high"]))
    headline = f"{WORDS[status]}: {change}"
    if status != "unclear":
        headline += f", but {unseen_prompts(last['num_prompts'], gold['value'])}"
    best = max(curve, key=lambda point: point["gold"]["value"])
    reasons = []
    if best["step"] != last["step"] and _apart(best["gold"], gold):
        reasons.append(
            f"it was highest at step {best['step']} ({shown_gain(best['gold'])} at {best['kl']['value']:.2g} nats) and "
            "has fallen since: over-optimisation"
        )
    return {"status": status, "headline": headline, "reasons": reasons}


def final_of(watches: Sequence[Mapping[str, Any]], *, num_resamples: int, seed: int) -> dict[str, Any] | None:
    """Gain of what is kept over the start, on prompts that nothing was decided on, with its 95 % interval; JSON-ready.

    `doubt` says why what clipped differences show is not claimed (`rmcore.policy.confirmation.tail_doubt`), or is None;
    `num_prompts` counts the judged ones of each seed.

    A seed that went back to the start has gained nothing, for certain. Of one seed the interval is the confidence
    sequence's, which holds however many pairs were judged; of several it is for new seeds and new prompts.

    Args:
        watches: `watch` of each training's end; the final prompts are the same.
        num_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    measured = [watch["final"] for watch in watches if watch["final"] is not None]
    if not measured:
        return None
    count, limit = len(measured[0]["differences"]), measured[0]["limit"]
    whole = [
        np.array(watch["final"]["differences"]) if watch["final"] and watch["kept_step"] else np.zeros(count)
        for watch in watches
    ]
    if len(watches) == 1:
        only = measured[0]
        low, high = only["interval"]
        gain = MetricValue(only["value"], low, high, len(only["path"])).to_dict()
        return gain | {"num_prompts": count, "doubt": _doubt(gain, only["differences"], limit)}
    by_seed = whole if limit is None else [np.clip(differences, -limit, limit) for differences in whole]
    rows = pd.DataFrame(
        [
            {"prompt": prompt, "seed": number, "final": value}
            for number, values in enumerate(by_seed)
            for prompt, value in enumerate(values)
        ]
    )
    over_seeds = value_over_seeds(rows, "final", num_resamples, seed)
    if over_seeds is None:
        return None
    return over_seeds | {"num_prompts": count, "doubt": _doubt(over_seeds, np.mean(whole, axis=0), limit)}


def _doubt(gain: Mapping[str, Any], differences: Sequence[float] | FloatArray, limit: float | None) -> str | None:
    if limit is None or gain["ci_low"] is None:
        return None
    return tail_doubt(list(differences), limit, decision_of((gain["ci_low"], gain["ci_high"])))


def verdict_of_watch(watches: Sequence[Mapping[str, Any]], final: Mapping[str, Any] | None) -> dict[str, Any]:
    """Which ending a watched training has: a policy that is better, none shown to be, or the start back again."""
    kept = [watch["kept_step"] for watch in watches]
    unit = watches[0]["unit"]
    ends = [watch["looks"][-1] for watch in watches if watch["looks"]]
    reasons = list(dict.fromkeys(look["reason"] for look in ends if look["action"] == "stop"))
    if not any(kept) and not reasons:
        labels = sum(watch["labels"] for watch in watches)
        return {
            "status": "unclear",
            "headline": f"Not shown to be better than the start, which is kept: {labels:,} labels showed neither a "
            "gain nor that the true reward turned",
            "reasons": ["allow more labels (rlhf.watch.labels), more steps, or a smaller KL penalty"],
        }
    if not any(kept):
        return {
            "status": "refused",
            "headline": "Not against this reward model: no policy was shown to be better than the start, which is kept",
            "reasons": reasons,
        }
    where = f"at step {kept[0]} and {watches[0]['kept_kl']:.2g} nats" if len(kept) == 1 else (
        f"over {len(kept)} seeds, of which {sum(map(bool, kept))} kept a trained policy"
    )  # fmt: skip
    if final is None or final["ci_low"] is None:
        return {
            "status": "unclear",
            "headline": f"The best checkpoint by what the watch saw is kept, {where}; what it gained was not measured",
            "reasons": [
                *reasons,
                "set rlhf.watch.final_labels, so that it is measured on prompts that decided nothing",
            ],
        }
    gained = (
        f"{final['value']:+.2f} {unit} ({final['ci_low']:+.2f} to {final['ci_high']:+.2f}) on fresh prompts, {where}"
    )
    status = decision_of((final["ci_low"], final["ci_high"]))
    said = WATCHED_WORDS[status]
    if final["doubt"] is not None:
        status, reasons = "unclear", [final["doubt"], *reasons]
        said = "Unclear whether the policy is better than its start: where differences are clipped"
    if status != "unclear" and unit != WINS:
        gained += f", but {unseen_prompts(final['num_prompts'], final['value'])}"
    return {"status": status, "headline": f"{said} true reward {gained}", "reasons": reasons}


def _apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two intervals do not meet: a conservative reading, as both points share their prompts."""
    return bool(first["ci_low"] is not None and second["ci_high"] is not None and first["ci_low"] > second["ci_high"])
