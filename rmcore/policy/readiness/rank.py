"""Which of several reward models to optimise against, and which measure tells: from answers that a judge has scored.

What a choice among answers gains is known for every model, since the judge scored all answers. So the question which
measure predicts the gain can be asked of a user's own models and answers: on one half of the prompts each model is
measured, on the other half the gain is, and Spearman's correlation over the models says how well the one ranks the
other. All measures are sums over prompts, so a resample of prompts is a vector of weights.
Axes: M models, P prompts, H halves (each half and its complement), S splits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata, ttest_1samp

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.evaluation.uncertainty import GainValue, MetricValue, metric_value
from rmcore.evaluation.verdicts.judgement import holm
from rmcore.policy.logged_answers import MIN_PROMPTS
from rmcore.policy.readiness.components import JudgedPools, accuracies_by_prompt
from rmcore.policy.sampling.best_of_n import best_of_n_weights, best_of_n_win_rate, pooled_deviation

FEWEST_MODELS = 5
"""Reward models of which a rank correlation is computed: of four, one exchange moves it by 0.2 or more."""
SPLITS = 20
PREDICTION_RESAMPLES = 400
ALPHA = 0.05
SHOWN = ("gain", "gain_without_length", "win_rate")
"""Measured of each model, and of choosing the longest answer; `over_longest` is a model's gain minus that one's."""
PREDICTORS = ("win_rate", "on_policy_accuracy", "hard_accuracy", "reward_variance")


@dataclass(frozen=True, slots=True)
class ByPrompt:
    """A measure as what each prompt adds: its value is sum w top / sum w bottom under weights w of the prompts.

    top, bottom: (..., M, P); bottom is 0 where a prompt has no say.
    """

    top: FloatArray
    bottom: FloatArray

    def value(self, weights: FloatArray) -> FloatArray:
        """(..., M, H) under weights (H, P) of the prompts; NaN where no prompt has a say."""
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
    found = [
        float(best_of_n_weights(pool, n or len(pool)) @ scores - scores.mean()) if own else 0.0
        for pool, scores, own in zip(rewards, judged, known, strict=True)
    ]
    return np.array(found), known.astype(np.float64)


def win_rates(rewards: Sequence[FloatArray], judged: Sequence[FloatArray], n: int) -> tuple[FloatArray, FloatArray]:
    """Compute by prompt how often the best of n beats one more answer, and whether the prompt has n + 1 answers."""
    known = np.array([len(pool) > n for pool in rewards])
    found = [
        best_of_n_win_rate(pool, scores, n) if own else 0.0
        for pool, scores, own in zip(rewards, judged, known, strict=True)
    ]
    return np.array(found), known.astype(np.float64)


def measured_by_prompt(
    rewards: Sequence[FloatArray], judged: Sequence[FloatArray], lengths: Sequence[FloatArray], n: int
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Measure one model on judged answers: (P,) tops and bottoms of each measure.

    Returns:
        win_rate: of the best of n over one more answer. on_policy_accuracy and hard_accuracy (the better answer is the
        shorter one): of all pairs of answers that the judge tells apart, each prompt alike. gain: of the best of n.
        reward_variance: within prompts, in the model's own unit.
    """
    pools = JudgedPools(rewards, judged, lengths)
    every = np.ones(len(rewards))
    return {
        "win_rate": win_rates(rewards, judged, n),
        "on_policy_accuracy": accuracies_by_prompt(pools, only_hard=False),
        "hard_accuracy": accuracies_by_prompt(pools, only_hard=True),
        "gain": gains(rewards, judged, n),
        "reward_variance": (np.array([float(pool.var()) for pool in rewards]), every),
    }


def stacked(found: Sequence[Mapping[str, tuple[FloatArray, FloatArray]]]) -> dict[str, ByPrompt]:
    """Measures of M models, one mapping each, as (M, P) arrays by name."""
    return {name: ByPrompt(*(np.stack([one[name][side] for one in found]) for side in (0, 1))) for name in found[0]}


def random_halves(num_prompts: int, num_splits: int, seed: int) -> BoolArray:
    """(2 S, P) halves of the prompts: S random ones, then their complements in the same order."""
    rng = np.random.default_rng(seed)
    first = np.zeros((num_splits, num_prompts), dtype=bool)
    for row in first:
        row[rng.permutation(num_prompts)[: num_prompts // 2]] = True
    return np.concatenate([first, ~first])


def halves_apart(
    estimate: ByPrompt, truth: ByPrompt, halves: BoolArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Ranks (..., 2 S, M) of the models by an estimate on each half, and by the truth on the other one.

    Args:
        estimate: what is known on the one half.
        truth: of the same models and prompts, on the other half.
        halves: of `random_halves`.
        weights: (P,) of the prompts: all ones, or how often a resample drew each.
    """
    seen = np.swapaxes(estimate.value(halves * weights), -1, -2)
    unseen = np.swapaxes(truth.value(~halves * weights), -1, -2)
    return rankdata(seen, axis=-1), rankdata(unseen, axis=-1)


def correlation(x: FloatArray, y: FloatArray) -> FloatArray:
    """Pearson's correlation along the last axis; of ranks it is Spearman's. 0 where one of them does not vary."""
    x, y = (values - values.mean(axis=-1, keepdims=True) for values in (x, y))
    scale = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    return np.asarray(np.where(scale > 0, (x * y).sum(axis=-1) / np.where(scale > 0, scale, 1.0), 0.0))


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
    """Rank M reward models by what the best of n gains, and measures by how well they predict that.

    Args:
        names: of the models.
        rewards: by model, one array a prompt.
        judged: of the same answers, one array a prompt.
        lengths: of the same answers, in characters.
        n: answers that the best is chosen from.
        num_resamples: of the bootstrap over prompts.
        seed: of resamples and splits.

    Returns:
        JSON-ready. models: by gain, the largest first, each with name, group (1 is that of the best; models of one
        group are not shown to differ from its first, after Holm over all pairs of models), and with intervals gain,
        gain_without_length, win_rate and over_longest, its gain minus that of the longest answer (of few prompts the
        ends of gains hold if no prompt is a disaster); longest: the first three of choosing the longest answer;
        perfect_gain; measures: Spearman's correlation of each measure on one half of the prompts with the gain on the
        other, averaged over splits, with its interval over prompts (of fewer than `FEWEST_MODELS` models none);
        num_prompts, num_answers, n.
    """
    scaled, controlled = in_deviations(judged), without_length(judged, lengths)
    every = [*rewards, lengths]
    found = [measured_by_prompt(one, scaled, lengths, n) for one in every]
    for one, pools in zip(found, every, strict=True):
        one["gain_without_length"] = gains(pools, controlled, n)
    measures = stacked(found)  # the last row is of the longest answer
    size = len(judged)
    weights = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=num_resamples)
    drawn = {name: measures[name].value(weights.astype(np.float64)) for name in SHOWN}  # (M + 1, B)
    points = {name: measures[name].value(np.ones((1, size)))[:, 0] for name in SHOWN}
    for values in (drawn, points):
        values["over_longest"] = values["gain"] - values["gain"][-1]

    def value(name: str, place: int) -> MetricValue:
        num_prompts = int((measures["gain" if name == "over_longest" else name].bottom[place] > 0).sum())
        found = metric_value(
            float(points[name][place]),
            drawn[name][place],
            num_prompts=num_prompts,
            num_pairs=sum(map(len, judged)),
            is_share=name == "win_rate",
        )
        if name == "win_rate" or found.value is None or found.ci_low is None or found.ci_high is None:
            return found
        # A prompt where the worst answer is chosen weighs as several others, and few prompts may show none.
        return GainValue.of(found.value, found.ci_low, found.ci_high, num=found.num, num_prompts=num_prompts)

    def shown(place: int, names: Sequence[str] = SHOWN) -> dict[str, Any]:
        return {name: value(name, place).to_dict() for name in names}

    order = np.argsort(-points["gain"][:-1], kind="stable")
    group = _groups(measures["gain"], order)
    return {
        "n": n,
        "num_prompts": size,
        "num_answers": sum(map(len, judged)),
        "models": [
            {"name": names[place], "group": group[place], **shown(place, (*SHOWN, "over_longest"))} for place in order
        ],
        "longest": shown(len(names)),
        "perfect_gain": float(gains(judged, scaled, n)[0].mean()),
        "measures": _predicting(measures, len(names), weights[:PREDICTION_RESAMPLES], size, seed)
        if len(names) >= FEWEST_MODELS
        else [],
    }


def _groups(gain: ByPrompt, order: IntArray) -> dict[int, int]:
    """Number of each model's group: models that are not shown to gain less than the group's first, after Holm.

    Pairs of models are compared by a t test over prompts: a bootstrap's smallest p is too large for Holm over many.
    """
    pairs = [(a, b) for place, a in enumerate(order) for b in order[place + 1 :]]
    known = gain.bottom[0] > 0  # the same of all models, as they are of the same answers
    differences = [gain.top[a, known] - gain.top[b, known] for a, b in pairs]
    # Models that choose alike everywhere have no spread, and are not told apart.
    p = [float(ttest_1samp(one, 0.0).pvalue) if np.ptp(one) > 0 else 1.0 for one in differences]
    p = holm(p) if pairs else []
    apart = {pair for pair, corrected in zip(pairs, p, strict=True) if corrected <= ALPHA}
    found: dict[int, int] = {}
    first = order[0]
    for one in order:
        if (first, one) in apart:
            first = one
        found[int(one)] = found[int(first)] if one != first else max(found.values(), default=0) + 1
    return found


def _predicting(
    measures: Mapping[str, ByPrompt], num_models: int, weights: IntArray, num_prompts: int, seed: int
) -> list[dict[str, Any]]:
    own = {name: ByPrompt(one.top[:num_models], one.bottom[:num_models]) for name, one in measures.items()}
    halves = random_halves(num_prompts, SPLITS, seed)

    def rho(name: str, of_prompts: FloatArray) -> float:
        return float(correlation(*halves_apart(own[name], own["gain"], halves, of_prompts)).mean())

    found = []
    for name in PREDICTORS:
        value = rho(name, np.ones(num_prompts))
        replicates = np.array([rho(name, one.astype(np.float64)) for one in weights])
        interval = metric_value(value, replicates, num_prompts=num_prompts, num_pairs=num_models)
        found.append({"measure": name, **interval.to_dict()})
    return sorted(found, key=lambda one: -one["value"])
