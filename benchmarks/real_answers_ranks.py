"""How well each measure of a reward model ranks models by their gain on real answers, and the figure of it.

`real_answers_verdict.py` judges the claims on these correlations. A measure is seen on one half of the prompts, and
what it predicts on the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from real_answers import GROUPS, Data
from scipy.stats import rankdata

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.evaluation.rewards import LENGTH_MATCHED
from rmcore.evaluation.uncertainty import percentile_interval
from rmcore.policy.readiness.components import JudgedPools, accuracies_by_prompt
from rmcore.policy.readiness.rank import ByPrompt, gains, in_deviations, win_rates, without_length
from rmcore.reporting.figures.style import MUTED, PALETTE, dress, headline, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N = 16
APART = 3
"""The first three of `GROUPS` share no model."""

ESTIMATES = (
    "win_rate_16",
    "gain_16",
    "win_rate_4",
    "on_policy_accuracy",
    "hard_accuracy",
    "pair_accuracy",
    "length_matched_accuracy",
    "adversarial_accuracy",
    "reward_variance",
)
TRUTHS = ("gain_16", "gain_4", "gain_8", "gain_all", "gain_16_by_rank", "gain_16_without_length")


@dataclass(frozen=True)
class Answers:
    """Where each group's answers to each prompt are among all answers, and what the judge says of them."""

    data: Data

    @cached_property
    def prompts(self) -> list[str]:
        """The prompts, in the order of the answers."""
        return list(self.data.answers["prompt"].drop_duplicates())

    @cached_property
    def rows(self) -> dict[str, list[IntArray]]:
        """By group, one index array a prompt: (K,) each."""
        answers = self.data.answers.assign(group=self.data.answers["model"].map(self.data.group_of))
        places = answers.groupby("prompt", sort=False).indices
        of_group = answers["group"].to_numpy()
        return {
            group: [
                rows if group == "all" else rows[of_group[rows] == group]
                for rows in (places[one] for one in self.prompts)
            ]
            for group in GROUPS
        }

    def pools(self, group: str, values: FloatArray) -> list[FloatArray]:
        """One array a prompt of the group's answers, of (A,) values."""
        return [values[rows] for rows in self.rows[group]]

    @cached_property
    def judge(self) -> FloatArray:
        """(A,) log-odds."""
        return self.data.answers["judge"].to_numpy(dtype=np.float64)

    @cached_property
    def length(self) -> FloatArray:
        """(A,) characters."""
        return self.data.answers["response"].str.len().to_numpy(dtype=np.float64)


def measured(answers: Answers, group: str, rewards: FloatArray) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Estimates and truths of one model in one group, (P,) tops and bottoms."""
    pools, lengths = answers.pools(group, rewards), answers.pools(group, answers.length)
    raw = answers.pools(group, answers.judge)
    judged, ranks = in_deviations(raw), [(rankdata(pool) - 0.5) / len(pool) for pool in raw]
    controlled = without_length(raw, lengths)
    compared = JudgedPools(pools, judged, lengths)
    found = {
        "win_rate_16": win_rates(pools, judged, N),
        "win_rate_4": win_rates(pools, judged, 4),
        "gain_16": gains(pools, judged, N),
        "on_policy_accuracy": accuracies_by_prompt(compared, only_hard=False),
        "hard_accuracy": accuracies_by_prompt(compared, only_hard=True),
        "reward_variance": (np.array([float(pool.var()) for pool in pools]), np.ones(len(pools))),
    }
    found |= {f"gain_{name}": gains(pools, judged, n) for name, n in (("4", 4), ("8", 8), ("all", None))}
    found["gain_16_by_rank"] = gains(pools, ranks, N)
    found["gain_16_without_length"] = gains(pools, controlled, N)
    found["win_rate_16_without_length"] = win_rates(pools, controlled, N)
    return found


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


def on_labelled_pairs(answers: Answers, pairs: pd.DataFrame, scores: FloatArray) -> dict[str, ByPrompt]:
    """Accuracies on labelled pairs of (M, A) scores, by prompt: all, of about equal length, better one shorter."""
    place = {key: row for row, key in enumerate(answers.data.answered)}
    good, bad = (
        np.array([place[key] for key in zip(pairs["prompt"], pairs[side], strict=True)])
        for side in ("chosen", "rejected")
    )
    prompt = pairs["prompt"].map({one: number for number, one in enumerate(answers.prompts)}).to_numpy()
    right = (1 + np.sign(scores[:, good] - scores[:, bad])) / 2  # (M, L)
    longer, shorter = (
        np.maximum(*(answers.length[side] for side in (good, bad))),
        answers.length[good] < answers.length[bad],
    )
    matched = np.abs(answers.length[good] - answers.length[bad]) < LENGTH_MATCHED * longer
    masks = {
        "pair_accuracy": np.ones(len(prompt)),
        "length_matched_accuracy": matched.astype(np.float64),
        "adversarial_accuracy": shorter.astype(np.float64),
    }
    size = len(answers.prompts)
    return {
        name: ByPrompt(
            np.stack([np.bincount(prompt, row * mask, size) for row in right]),
            np.broadcast_to(np.bincount(prompt, mask, size), (len(scores), size)),
        )
        for name, mask in masks.items()
    }


PAIRS = tuple((estimate, truth) for truth in TRUTHS for estimate in ESTIMATES)
CONTROLLED = ("win_rate_16_without_length", "gain_16_without_length")
"""The win rate by the judge with length taken out, against the gain by that judge."""
PARTIAL = ("length_matched_accuracy given win_rate_16", "gain_16")
ROWS = (*PAIRS, CONTROLLED, PARTIAL)


@dataclass(frozen=True)
class Ranking:
    """How well measures rank models: everything (G, M, P), of the groups that share no model."""

    by_name: Mapping[str, ByPrompt]
    kinds: Sequence[str]
    halves: BoolArray

    def rhos(self, weights: FloatArray, models: IntArray) -> FloatArray:
        """(R, G) Spearman's correlations over models for each of `ROWS`, averaged over splits and directions."""
        seen, unseen = {}, {}
        for name in {one for row in (*PAIRS, CONTROLLED) for one in row}:
            one = self.by_name[name]
            own = ByPrompt(one.top[..., models, :], one.bottom[..., models, :])
            seen[name], unseen[name] = halves_apart(own, own, self.halves, weights)
        found = [correlation(seen[estimate], unseen[truth]) for estimate, truth in (*PAIRS, CONTROLLED)]
        x, y, z = seen["length_matched_accuracy"], unseen["gain_16"], seen["win_rate_16"]
        xy, xz, yz = correlation(x, y), correlation(x, z), correlation(y, z)
        found.append((xy - xz * yz) / np.sqrt(np.maximum(1e-9, (1 - xz**2) * (1 - yz**2))))
        return np.stack([one.mean(axis=-1) for one in found])

    def resampled(self, num: int) -> FloatArray:
        """(B, R, G) correlations with prompts and kinds of model drawn with replacement."""
        rng, size = np.random.default_rng(0), self.halves.shape[1]
        names, kind = np.unique(self.kinds, return_inverse=True)
        found = []
        for _ in range(num):
            weights = rng.multinomial(size, np.full(size, 1 / size)).astype(np.float64)
            drawn = rng.integers(len(names), size=len(names))
            found.append(self.rhos(weights, np.concatenate([np.flatnonzero(kind == one) for one in drawn])))
        return np.stack(found)

    def without_each_kind(self) -> FloatArray:
        """(K, R, G) correlations with one kind of model left out."""
        weights, kinds = np.ones(self.halves.shape[1]), np.array(self.kinds)
        return np.stack([self.rhos(weights, np.flatnonzero(kinds != kind)) for kind in sorted(set(self.kinds))])


def claimed(name: str, rhos: FloatArray) -> FloatArray:
    """(...,) the statistic of R1 to R4 of (..., R, G) correlations."""

    def rho(estimate: str) -> FloatArray:
        return np.asarray(rhos[..., ROWS.index((estimate, "gain_16")), :].mean(axis=-1))

    return {
        "R1": lambda: rho("win_rate_16") - rho("pair_accuracy"),
        "R2": lambda: rho("win_rate_16") - rho("on_policy_accuracy"),
        "R3": lambda: rho(PARTIAL[0]),
        "R4": lambda: rho("on_policy_accuracy") - rho("adversarial_accuracy"),
    }[name]()


def rank_table(correlations: Sequence[FloatArray], num_kinds: int) -> list[dict[str, Any]]:
    """Every estimate's rank correlation with every truth: averaged over the groups with its interval, and by group."""
    point, drawn, _ = correlations
    return [
        {
            "estimate": estimate,
            "truth": truth,
            "rho": float(point[row].mean()),
            "interval": percentile_interval(drawn[:, row].mean(axis=-1), num_kinds),
            "by_group": point[row].tolist(),
        }
        for row, (estimate, truth) in enumerate(ROWS)
    ]


def figure(ranking: Ranking, correlations: FloatArray, names: Sequence[str]) -> "Figure":
    """Estimate on one half against the gain on the other, one point a model, a column a group."""
    weights = ranking.halves[:1].astype(np.float64), (~ranking.halves[:1]).astype(np.float64)
    shown = (
        ("win_rate_16", "best-of-16 win rate, half A"),
        ("on_policy_accuracy", "on-policy accuracy, half A"),
        ("pair_accuracy", "accuracy on labelled pairs, half A"),
    )
    drawn = new_figure(11, 9.5)
    axes = drawn.subplots(len(shown), APART, sharey="col")
    families = [name.split("_")[0] for name in names]
    colours = {family: PALETTE[place] for place, family in enumerate(dict.fromkeys(families))}
    rng = np.random.default_rng(0)
    draws = rng.multinomial(weights[0].shape[1], np.full(weights[0].shape[1], 1 / weights[0].shape[1]), size=300)
    for row, (estimate, label) in zip(axes, shown, strict=True):
        for group, ax in enumerate(row):
            x, y = (
                _ends_of(ranking.by_name[one], group, half, draws)
                for one, half in ((estimate, weights[0]), ("gain_16", weights[1]))
            )
            for model, family in enumerate(families):
                ax.errorbar(
                    x[0][model],
                    y[0][model],
                    xerr=x[1][:, model, None],
                    yerr=y[1][:, model, None],
                    fmt="o",
                    markersize=4,
                    linewidth=0.5,
                    color=colours[family],
                    ecolor=MUTED,
                    alpha=0.85,
                )
            ax.axhline(0, color=MUTED, linewidth=0.7)
            rho = correlations[ROWS.index((estimate, "gain_16")), group]
            dress(
                ax,
                title=f"{GROUPS[group]} policy: ρ = {rho:.2f} (mean of 20 splits)",
                x=label,
                y="gain of best-of-16, half B (sd)" if group == 0 else "",
            )
    for family, colour in colours.items():
        axes[0, 0].plot([], [], "o", color=colour, label=family)
    axes[0, 0].legend(fontsize=7)
    headline(
        drawn,
        "Real answers: what each measure on one half of the prompts says of the judge's gain on the other. "
        "One point a reward model, 95 % intervals over prompts",
    )
    return drawn


def _ends_of(measure: ByPrompt, group: int, half: FloatArray, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(M,) values of one group and (2, M) distances to the ends of 95 % intervals over prompts."""
    place = min(group, measure.top.shape[0] - 1)
    own = ByPrompt(measure.top[place], measure.bottom[place])
    value = own.value(half)[:, 0]
    low, high = np.nanpercentile(own.value(half * draws), [2.5, 97.5], axis=1)
    return value, np.maximum(0, np.stack([value - low, high - value]))
