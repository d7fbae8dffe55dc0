"""Optimising against a reward without training: best-of-n, and the KL-regularised optimum, on stored samples.

A pool holds K samples of one prompt, drawn from a policy. Whatever re-weights them is a distribution over the pool, and
its expected reward is a sum over the pool: no sampling noise beyond the pool's own, every sample used at every n. The
same pool serves any number of reward models.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError

IndexArray = npt.NDArray[np.intp]

_ROUNDING = 1e-9
_STRONGEST = 1e6
"""1 / beta in units of the pool's standard deviation beyond which nothing but the best sample has weight."""


ENOUGH_PROMPTS = 50
"""Prompts that a claim of readiness asks for: fewer leave room for disasters on more than 5.8 % of all prompts that
none of them shows (`rmcore.evaluation.uncertainty.unseen_share`)."""


def samples_needed(planned_kl: float) -> int:
    """The smallest n, of a power of two or not, whose best-of-n moves by `planned_kl` nats where no samples tie."""
    enough = math.ceil(math.exp(min(planned_kl, 40.0) + 1))  # log n - (n - 1) / n > log n - 1
    return 1 + bisect_left(range(1, enough), planned_kl - _ROUNDING, key=nominal_kl)


def reaching(sizes: Sequence[int], wanted: int) -> npt.NDArray[np.bool_]:
    """Which prompts have the samples that are wanted: (C,). So one that lacks some keeps no other from its end.

    Where neither `ENOUGH_PROMPTS` nor half of the prompts have as many, those that have as many as half of them.

    Args:
        sizes: samples of each of C prompts.
        wanted: samples.
    """
    counts = np.asarray(sizes)
    if np.count_nonzero(counts >= wanted) < min(ENOUGH_PROMPTS, len(counts) / 2):
        wanted = int(np.sort(counts)[len(counts) // 2])
    return np.asarray(counts >= wanted)


def by_unit(values: FloatArray, units: npt.ArrayLike | None) -> FloatArray:
    """Average rows of prompts over those that make up one independent unit: (C, ...) to (U, ...).

    Args:
        values: one row a prompt.
        units: (C,) number of each prompt's unit, equal where prompts share a topic; None: each is
            one of its own.
    """
    if units is None:
        return values
    _, unit = np.unique(np.asarray(units), return_inverse=True)
    sums = np.zeros((unit.max() + 1, *values.shape[1:]))
    np.add.at(sums, unit, values)
    return np.asarray(sums / np.bincount(unit).reshape(-1, *[1] * (values.ndim - 1)))


def best_of_n_weights(rewards: FloatArray, n: int) -> FloatArray:
    """Probability that each of K samples is the best of n drawn without replacement: (K,), sums to 1.

    All n lie among the k lowest with probability C(k, n) / C(K, n); equal rewards share what their group gets. The
    expectation under these weights is the unbiased estimate of best-of-n from K >= n samples, as pass@k is (Chen et
    al. 2021, arXiv:2107.03374, equation 1).

    Raises:
        ConfigError: n is not in 1..K.
    """
    size = len(rewards)
    if not 1 <= n <= size:
        raise ConfigError(f"best of {n} cannot be told from {size} samples of a prompt; draw more, or take a lower n.")
    below = _all_among(size, n)
    first, last = _ties(rewards)
    return np.asarray((below[last] - below[first]) / (last - first))


def best_of_n_win_rate(rewards: FloatArray, judged: FloatArray, n: int) -> float:
    """P(the judge prefers the best of n by reward to one more sample of the policy); equal ones count half.

    Exact over all draws of n + 1 of the K samples without replacement: the opponent is none of those that the best was
    chosen from. A perfect choice wins n / (n + 1) on average, the chance that the largest of n + 1 is among the first
    n. (An opponent from all others would be, with probability (n - 1) / (K - 1), one that the best has beaten already.)

    Args:
        rewards: (K,) that the choice is made by.
        judged: (K,) of the same samples by the judge.
        n: samples that the best is chosen from.

    Raises:
        ConfigError: n is not in 1..K-1.
    """
    size = len(rewards)
    if not 1 <= n < size:
        raise ConfigError(
            f"the best of {n} has no opponent among {size} samples of a prompt: it takes {n + 1}. Draw more, or take a "
            "lower n."
        )
    # The opponent j may as well be drawn first, then the n from the K - 1 others, of which the best is i.
    below = _all_among(size - 1, n)
    first, last = (ranks[:, None] for ranks in _ties(rewards))  # of i, among all K
    opponent_below = rewards[None, :] < rewards[:, None]
    opponent_tied = rewards[None, :] == rewards[:, None]
    low, high = first - opponent_below, last - opponent_below - opponent_tied  # the same, among the others
    best = (below[high] - below[low]) / np.maximum(high - low, 1)
    np.fill_diagonal(best, 0.0)
    wins = (1 + np.sign(judged[:, None] - judged[None, :])) / 2
    return float((best * wins).sum() / size)


@lru_cache(maxsize=1024)
def _all_among(size: int, n: int) -> FloatArray:
    """Probability that n of `size`, drawn without replacement, are all among the k lowest: C(k, n) / C(size, n).

    For k = 0..size: (size + 1,).
    """
    lowest = np.arange(size + 1, dtype=np.float64)
    below = np.ones(size + 1)
    for drawn in range(n):
        below *= np.clip(lowest - drawn, 0, None) / (size - drawn)
    below.setflags(write=False)  # shared by all pools of one size
    return below


def _ties(rewards: FloatArray) -> tuple[IndexArray, IndexArray]:
    """How many rewards are below each one, and how many are not above it; (K,) each."""
    ranked = np.sort(rewards)
    return np.searchsorted(ranked, rewards, side="left"), np.searchsorted(ranked, rewards, side="right")


def best_of_n_kl(rewards: FloatArray, n: int) -> float:
    """KL divergence in nats of best-of-n from the policy that drew these K samples.

    With u the share of the policy's samples of lower reward, best-of-n has the density n u^(n-1) in u. Samples of one
    reward are taken for an atom of the policy, within which nothing is chosen: it adds P log(P / p), with P and p its
    probabilities under best-of-n and the policy. A sample alone in its reward stands for its piece of a continuum and
    adds the integral of n u^(n-1) log(n u^(n-1)). So the sum is log n - (n - 1) / n, whatever K, where no two samples
    tie, and less where they do (Beirami et al. 2024, arXiv:2401.01879, on why that formula is an upper bound).
    """
    _, counts = np.unique(rewards, return_counts=True)
    if len(counts) == len(rewards):
        return nominal_kl(n)
    upper = np.cumsum(counts) / len(rewards)
    lower = np.concatenate([[0.0], upper[:-1]])
    atoms = upper**n - lower**n
    tied = atoms * (np.log(np.maximum(atoms, np.finfo(float).tiny)) - np.log(upper - lower))
    alone = _integral(upper, n) - _integral(lower, n)
    return float(np.where(counts > 1, tied, alone).sum())


def _integral(u: FloatArray, n: int) -> FloatArray:
    """Antiderivative of n u^(n-1) log(n u^(n-1))."""
    power = u**n
    logarithm = np.log(np.where(u > 0, u, 1.0))
    return np.asarray(power * math.log(n) + (n - 1) * (power * logarithm - power / n))


def tilted_weights(rewards: FloatArray, strength: float) -> FloatArray:
    """Weights proportional to exp(strength * reward): the policy of highest reward at its KL, (K,).

    This is the optimum of E[reward] - KL / strength over the pool, which KL-regularised RL aims at (Korbak et al. 2022,
    arXiv:2205.11275, equation 5).
    """
    exponents = strength * (rewards - rewards.max())
    weights = np.exp(exponents)
    return np.asarray(weights / weights.sum())


def strength_for(pools: Sequence[FloatArray], kl: float) -> float:
    """The strength at which the tilted policy's KL from the pools, averaged over prompts, is `kl` nats.

    Raises:
        ConfigError: no strength reaches it; see `largest_kl`.
    """
    from scipy.optimize import brentq  # here: it takes a fifth of a second to import, and most runs draw nothing

    def excess(log_strength: float) -> float:
        return float(np.mean([pool_kl(tilted_weights(pool, math.exp(log_strength))) for pool in pools])) - kl

    spread = pooled_deviation(pools)
    low, high = math.log(1e-9 / spread), math.log(_STRONGEST / spread)
    most = largest_kl(pools)
    if not 0 < kl < most:
        raise ConfigError(f"a KL of {kl:g} nats is not between 0 and {most:.3g}, the most that these samples allow.")
    return math.exp(brentq(excess, low, high, xtol=1e-10))


def largest_kl(pools: Sequence[FloatArray]) -> float:
    """KL in nats, averaged over prompts, of choosing among each pool's best samples alone: what no tilt goes beyond."""
    return float(np.mean([math.log(len(pool) / np.count_nonzero(pool == pool.max())) for pool in pools]))


def pool_kl(weights: FloatArray) -> float:
    """KL divergence in nats of weights over K samples from the policy that drew them, for which each stands for 1/K."""
    positive = weights[weights > 0]
    return max(0.0, float(np.sum(positive * np.log(positive * len(weights)))))  # 49 / 49 rounds to less than 1


def nominal_kl(n: int) -> float:
    """Give log n - (n - 1) / n: the KL of best-of-n where no two samples tie and the pool is endless, in nats.

    An upper bound otherwise (Beirami et al. 2024, arXiv:2401.01879).
    """
    return math.log(n) - (n - 1) / n


def pooled_deviation(pools: Sequence[FloatArray]) -> float:
    """Standard deviation of rewards within prompts, all prompts together.

    Raises:
        ConfigError: it is zero: nothing tells the samples of a prompt apart.
    """
    squares = sum(float(np.sum((pool - pool.mean()) ** 2)) for pool in pools)
    free = sum(len(pool) - 1 for pool in pools)
    if free < 1 or squares <= 0:
        raise ConfigError(
            "every prompt's samples have one and the same reward, so no choice among them changes anything. Score them "
            "with a model that tells them apart, or draw samples that differ."
        )
    return math.sqrt(squares / free)
