"""Which of several reward models to optimise against: from answers that a judge has scored.

What a choice among answers gains is known for every model, since the judge scored all answers. All measures are sums
over prompts, so a resample of prompts is a vector of weights. Axes: M models, P prompts, B resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.evaluation.uncertainty import GainValue, MetricValue, metric_value
from rmcore.evaluation.verdicts.judgement import holm
from rmcore.policy.sampling.best_of_n import best_of_n_weights, best_of_n_win_rate, pooled_deviation
from rmcore.readiness.logged_answers import MIN_PROMPTS

ALPHA = 0.05
SHOWN = ("gain", "gain_without_length", "win_rate")
"""Measured of each model, and of choosing the longest answer; `over_longest` is a model's gain minus that one's."""


@dataclass(frozen=True, slots=True)
class ByPrompt:
    """A measure as what each prompt adds: its value is sum w top / sum w bottom under weights w of the prompts.

    top, bottom: (..., M, P); bottom is 0 where a prompt has no say.
    """

    top: FloatArray
    bottom: FloatArray

    def value(self, weights: FloatArray) -> FloatArray:
        """(..., M, B) under weights (B, P) of the prompts; NaN where no prompt has a say."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((self.top @ weights.T) / (self.bottom @ weights.T))


def in_deviations(judged: Sequence[FloatArray]) -> list[FloatArray]:
    """Judge's scores in their standard deviations within prompts."""
    deviation = pooled_deviation(judged)
    return [pool / deviation for pool in judged]


def without_length(judged: Sequence[FloatArray], lengths: Sequence[FloatArray]) -> list[FloatArray]:
    """Judge's scores less what log length explains within prompts, in standard deviations within prompts.

    One slope for all prompts: the least-squares fit of the scores on log length, both less their means in the prompt.

    Source:
        Dubois et al. 2024, Length-controlled AlpacaEval, arXiv:2404.04475, which controls a win rate in the same way.
    """
    logs = [np.log1p(pool) - np.log1p(pool).mean() for pool in lengths]
    apart = [pool - pool.mean() for pool in judged]
    spread = sum(float(x @ x) for x in logs)
    slope = sum(float(x @ y) for x, y in zip(logs, apart, strict=True)) / spread if spread > 0 else 0.0
    return in_deviations([y - slope * x for x, y in zip(logs, apart, strict=True)])


def gains(rewards: Sequence[FloatArray], judged: Sequence[FloatArray], n: int | None) -> tuple[FloatArray, FloatArray]:
    """Compute by prompt what the best of n gains over a blind choice, and whether the prompt has n answers.

    Args:
        rewards: one array a prompt, by the reward model.
        judged: of the same answers, in the unit of the gain.
        n: answers that the best is chosen from; None: all of a prompt's.
    """
    known = np.array([n is None or len(pool) >= n for pool in rewards])
    values = [
        float(best_of_n_weights(pool, n or len(pool)) @ scores - scores.mean()) if is_known else 0.0
        for pool, scores, is_known in zip(rewards, judged, known, strict=True)
    ]
    return np.array(values), known.astype(np.float64)


def win_rates(rewards: Sequence[FloatArray], judged: Sequence[FloatArray], n: int) -> tuple[FloatArray, FloatArray]:
    """Compute by prompt how often the best of n beats one more answer, and whether the prompt has n + 1 answers."""
    known = np.array([len(pool) > n for pool in rewards])
    values = [
        best_of_n_win_rate(pool, scores, n) if is_known else 0.0
        for pool, scores, is_known in zip(rewards, judged, known, strict=True)
    ]
    return np.array(values), known.astype(np.float64)


def stacked(by_model: Sequence[Mapping[str, tuple[FloatArray, FloatArray]]]) -> dict[str, ByPrompt]:
    """Measures of M models, one mapping each, as (M, P) arrays by name."""
    return {name: ByPrompt(*map(np.stack, zip(*(one[name] for one in by_model), strict=True))) for name in by_model[0]}


def largest_choice(sizes: Sequence[int], n: int | None = None) -> int:
    """The largest n of 16, 8, 4 and 2, or the one that is given, that half of the prompts have an opponent for.

    Raises:
        DataError: fewer than half of the prompts, or than `MIN_PROMPTS`, have more than n answers.
    """
    for choice in (16, 8, 4, 2) if n is None else (n,):
        if sum(size > choice for size in sizes) >= max(MIN_PROMPTS, len(sizes) / 2):
            return choice
    least = n or 2
    raise DataError(
        f"{sum(size > least for size in sizes)} of {len(sizes)} prompts have more than {least} judged answers, and the "
        f"best of {least} is judged on {MIN_PROMPTS} such prompts or more, and half of all. Judge answers to more "
        "prompts, or more of each."
    )


def rank_models(
    names: Sequence[str],
    rewards: Sequence[Sequence[FloatArray]],
    judged: Sequence[FloatArray],
    lengths: Sequence[FloatArray],
    *,
    n: int,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Rank M reward models by what the best of n gains.

    Args:
        names: of the models.
        rewards: by model, one array a prompt.
        judged: of the same answers, one array a prompt.
        lengths: of the same answers, in characters.
        n: answers that the best is chosen from.
        num_resamples: of the bootstrap over prompts.
        seed: of the resamples.

    Returns:
        JSON-ready. models: by gain, the largest first, each with name, group (1 is that of the best; models of one
        group are not shown to differ from its first, after Holm over all pairs of models), and with intervals gain,
        gain_without_length, win_rate and over_longest, its gain minus that of the longest answer (of few prompts the
        ends of gains hold if no prompt is a disaster); longest: the first three of choosing the longest answer;
        perfect_gain, num_prompts, num_answers, n.
    """
    scaled, controlled = in_deviations(judged), without_length(judged, lengths)
    every = [*rewards, lengths]
    by_model = [
        {
            "gain": gains(pools, scaled, n),
            "gain_without_length": gains(pools, controlled, n),
            "win_rate": win_rates(pools, scaled, n),
        }
        for pools in every
    ]
    measures = stacked(by_model)  # the last row is of the longest answer
    size = len(judged)
    weights = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=num_resamples)
    drawn = {name: measures[name].value(weights.astype(np.float64)) for name in SHOWN}  # (M + 1, B)
    points = {name: measures[name].value(np.ones((1, size)))[:, 0] for name in SHOWN}
    for values in (drawn, points):
        values["over_longest"] = values["gain"] - values["gain"][-1]

    def value(name: str, model: int) -> MetricValue:
        num_prompts = int((measures["gain" if name == "over_longest" else name].bottom[model] > 0).sum())
        metric = metric_value(
            float(points[name][model]),
            drawn[name][model],
            num_prompts=num_prompts,
            num_pairs=sum(map(len, judged)),
            is_share=name == "win_rate",
        )
        # A prompt where the worst answer is chosen weighs as several others, and few prompts may show none.
        return metric if name == "win_rate" else GainValue.of_metric(metric, num_prompts)

    def record(model: int, names: Sequence[str] = SHOWN) -> dict[str, Any]:
        return {name: value(name, model).to_dict() for name in names}

    order = np.argsort(-points["gain"][:-1], kind="stable")
    group = _groups(measures["gain"], order)
    return {
        "n": n,
        "num_prompts": size,
        "num_answers": sum(map(len, judged)),
        "models": [
            {"name": names[model], "group": group[model], **record(model, (*SHOWN, "over_longest"))} for model in order
        ],
        "longest": record(len(names)),
        "perfect_gain": float(gains(judged, scaled, n)[0].mean()),
    }


def _groups(gain: ByPrompt, order: IntArray) -> dict[int, int]:
    """Number of each model's group: models that are not shown to gain less than the group's first, after Holm.

    Pairs of models are compared by a t test over prompts: a bootstrap's smallest p is too large for Holm over many.
    """
    pairs = [(a, b) for place, a in enumerate(order) for b in order[place + 1 :]]
    known = gain.bottom[0] > 0  # the same of all models, as they are of the same answers
    differences = [gain.top[a, known] - gain.top[b, known] for a, b in pairs]
    # Models that choose alike everywhere have no spread, and are not told apart.
    p = [float(ttest_1samp(by_prompt, 0.0).pvalue) if np.ptp(by_prompt) > 0 else 1.0 for by_prompt in differences]
    p = holm(p) if pairs else []
    apart = {pair for pair, corrected in zip(pairs, p, strict=True) if corrected <= ALPHA}
    groups: dict[int, int] = {}
    first = order[0]
    for model in order:
        if (first, model) in apart:
            first = model
        groups[int(model)] = groups[int(first)] if model != first else max(groups.values(), default=0) + 1
    return groups
