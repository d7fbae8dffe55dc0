"""The parts of readiness: measurements of a reward model on samples of the policy that will be optimised.

All of them are over one policy's samples of the same prompts, scored by the reward model and by the judge that counts
(the gold reward, people, a stronger model). Each has a 95 % interval over prompts. Nothing here depends on the scale
or the offset of the rewards: no optimiser that ranks does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, metric_value
from rmcore.policy.sampling.best_of_n import best_of_n_win_rate

WIN_COUNTS = (4, 16, 64)
"""n of the best-of-n win rates."""
ACCURACIES = frozenset(("on_policy_accuracy", "hard_accuracy"))
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class JudgedPools:
    """Samples of C prompts: what the reward model gives them, what the judge gives them, and how long they are.

    rewards, judged, lengths: one (K,) array a prompt, in logits, in the judge's unit, in characters or words.
    members: rewards of the same samples by M models that differ by seed or data only, one (M, K) array a prompt;
        empty where there are none.
    """

    rewards: Sequence[FloatArray]
    judged: Sequence[FloatArray]
    lengths: Sequence[FloatArray]
    members: Sequence[FloatArray] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be judged.

        Raises:
            DataError: the arrays do not fit each other, a pool has fewer than four samples, or a value is not finite.
        """
        sizes = [len(pool) for pool in self.rewards]
        others = [self.judged, self.lengths, *([[pool.T for pool in self.members]] if self.members else [])]
        if any([len(pool) for pool in pools] != sizes for pools in others) or min(sizes, default=0) < 4:
            raise DataError(
                f"readiness got pools of {sizes[:5]}... samples; each prompt needs the same samples for every judge "
                "and at least four of them. Draw more, or leave that prompt out."
            )
        for name, pools in (("reward model", self.rewards), ("judge", self.judged), ("members", self.members)):
            broken = [index for index, pool in enumerate(pools) if not np.isfinite(pool).all()]
            if broken:
                raise DataError(
                    f"the {name} gave a reward that is not finite for prompt {broken[0]} (and {len(broken) - 1} more): "
                    "no ranking follows from it. Look at these samples, or leave them out."
                )

    @property
    def num_samples(self) -> int:
        """In all."""
        return sum(len(pool) for pool in self.rewards)

    @property
    def num_telling_prompts(self) -> int:
        """Prompts whose samples the judge tells apart."""
        return sum(bool(np.ptp(pool) > 0) for pool in self.judged)


def on_policy_parts(
    pools: JudgedPools, *, judge_ceiling: float = 1.0, num_resamples: int = 1000, seed: int = 0
) -> dict[str, MetricValue]:
    """Measure everything that needs samples, by name.

    Args:
        pools: the samples.
        judge_ceiling: probability that the judge agrees with itself, or with the truth, on a pair; 1 for a judge
            without noise. Accuracy is corrected for it: (a - (1 - c)) / (2 c - 1), what it would be without the noise
            of independent wrong answers.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Returns:
        on_policy_accuracy; win_rate_N and skill_N for N of `WIN_COUNTS`, the latter where every pool has more than N
        samples, the former without a value where one has not; signal_share where there are members;
        length_correlation; hard_accuracy.

    Raises:
        ConfigError: judge_ceiling is not in (0.5, 1].
    """
    if not 0.5 < judge_ceiling <= 1:
        raise ConfigError(
            f"judge_ceiling={judge_ceiling:g}: a judge that agrees with the truth on half of the pairs or fewer cannot "
            "be corrected for; give a number above 0.5 and at most 1."
        )
    correct = _noise_correction(judge_ceiling)
    ratios: dict[str, tuple[FloatArray, FloatArray, Callable[[FloatArray], FloatArray]]] = {}
    ratios["on_policy_accuracy"] = (*_accuracies(pools, only_hard=False), correct)
    ratios["hard_accuracy"] = (*_accuracies(pools, only_hard=True), correct)
    smallest = min(len(pool) for pool in pools.rewards)
    for n in WIN_COUNTS:
        if n < smallest:
            wins = np.array([best_of_n_win_rate(r, j, n) for r, j in zip(pools.rewards, pools.judged, strict=True)])
            ratios[f"win_rate_{n}"] = (wins, np.ones(len(wins)), _unchanged)
            ratios[f"skill_{n}"] = (wins, np.ones(len(wins)), _skill(n))
    if pools.members:
        ratios["signal_share"] = (*_signal(pools.members), _unchanged)
    moments = np.array([_moments(*one) for one in zip(pools.rewards, pools.lengths, pools.judged, strict=True)])

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        found = {}
        with np.errstate(invalid="ignore", divide="ignore"):
            for name, (top, bottom, transform) in ratios.items():
                found[name] = transform((weights @ top) / (weights @ bottom))
            found["length_correlation"] = _partial_correlation(weights @ moments)
        return found

    num_prompts = len(pools.rewards)
    carrying = {name: int(np.count_nonzero(bottom)) for name, (_, bottom, _) in ratios.items()}
    # Where all prompts say the same, a share has an exact interval; undoing a judge's noise leaves no share.
    shares = {f"win_rate_{n}" for n in WIN_COUNTS} | (ACCURACIES if judge_ceiling == 1 else frozenset())
    drawn = cluster_bootstrap(compute, num_prompts, num_resamples=num_resamples, seed=seed)
    too_many = {
        f"win_rate_{n}": f"it takes {n + 1} samples of each prompt (policy.samples_per_prompt), and one has {smallest}"
        for n in WIN_COUNTS
        if n >= smallest
    }
    unmeasured = {name: MetricValue(None, None, None, 0, reason) for name, reason in too_many.items()}
    return unmeasured | {
        name: MetricValue(None, None, None, 0, "no two samples of a prompt that the judge tells apart allow it")
        if math.isnan(value)
        else metric_value(
            value,
            drawn.replicates.get(name),
            num_prompts=carrying.get(name, num_prompts),
            num_pairs=pools.num_samples,
            is_share=name in shares,
        )
        for name, value in drawn.point.items()
    }


def _unchanged(values: FloatArray) -> FloatArray:
    return values


def _noise_correction(ceiling: float) -> Callable[[FloatArray], FloatArray]:
    return lambda accuracy: np.clip((accuracy - (1 - ceiling)) / (2 * ceiling - 1), 0, 1)


def _skill(n: int) -> Callable[[FloatArray], FloatArray]:
    """0 for a blind choice, 1 for the win rate n / (n + 1) of a perfect one over an independent draw."""
    return lambda win_rate: (win_rate - 0.5) / (n / (n + 1) - 0.5)


def _accuracies(pools: JudgedPools, *, only_hard: bool) -> tuple[FloatArray, FloatArray]:
    """By prompt: accuracy over pairs of samples that the judge tells apart, and whether there are any (1 or 0).

    Hard pairs are those whose better sample is the shorter one. Equal rewards are half right.
    """
    accuracies = np.zeros(len(pools.rewards))
    for index, (reward, judged, length) in enumerate(zip(pools.rewards, pools.judged, pools.lengths, strict=True)):
        better = judged[:, None] > judged[None, :]
        if only_hard:
            better &= length[:, None] < length[None, :]
        agreement = (1 + np.sign(reward[:, None] - reward[None, :])) / 2
        accuracies[index] = agreement[better].mean() if better.any() else np.nan
    known = ~np.isnan(accuracies)
    return np.where(known, accuracies, 0.0), known.astype(np.float64)


def _signal(members: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """By prompt: covariance between different members, and their variance; each member in its own deviations.

    Their ratio is the share of the variance within prompts that another seed would reproduce (the intraclass
    correlation of Shrout and Fleiss 1979, with members as raters and their levels removed).
    """
    scale = np.sqrt(np.mean([pool.var(axis=1) for pool in members], axis=0))
    if len(scale) < 2 or (scale <= 0).any():
        raise ConfigError(
            f"the signal share compares members, and {len(scale)} were given of which {int((scale <= 0).sum())} do not "
            "tell the samples of any prompt apart; give at least two that do."
        )
    shared, total = [], []
    for pool in members:
        covariance = np.cov(pool / scale[:, None], bias=True)
        size = len(covariance)
        total.append(np.trace(covariance) / size)
        shared.append((covariance.sum() - np.trace(covariance)) / (size * (size - 1)))
    return np.array(shared), np.array(total)


def _moments(reward: FloatArray, length: FloatArray, judged: FloatArray) -> FloatArray:
    """Sums of squares and products within the prompt: of reward, length and judge, in this order (6,)."""
    r, n, j = (values - values.mean() for values in (reward, length.astype(np.float64), judged))
    return np.array([r @ r, n @ n, j @ j, r @ n, r @ j, n @ j])


def _partial_correlation(sums: FloatArray) -> FloatArray:
    """Correlate reward and length given the judge, within prompts. (B, 6) -> (B,).

    NaN where one of them never varies, or is a line of the judge, up to rounding: nothing of it is left then.
    """
    rr, nn, jj, rn, rj, nj = sums.T
    r_n, r_j, n_j = rn / np.sqrt(rr * nn), rj / np.sqrt(rr * jj), nj / np.sqrt(nn * jj)
    left = np.minimum(1 - r_j**2, 1 - n_j**2)  # the least share of variance that the judge does not explain
    found = (r_n - r_j * n_j) / np.sqrt((1 - r_j**2) * (1 - n_j**2))
    return np.where(left > _ROUNDING, found, np.nan)
